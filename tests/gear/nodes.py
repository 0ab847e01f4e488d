"""Nodes on this machine with nothing shared but a store: start a run on them, lose one, look at their disks.

Each node (hosts.py) has its network, its host name, and its own disk in place of the run folder. `python -m
tests.gear.nodes FOLDER NODE MASTER_PORT RUN COMMAND...` is a rank on one of them.
"""

import os
import runpy
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.gear.hosts import Hosts, hosts
from tests.gear.runs import Finished, Run, Started, Workshop, choices, free_port

NAMES = ["alpha", "beta"]
HERE = {"GLOO_SOCKET_IFNAME": "eth0"}
SLOW = """
import os
import time

from transformers import TrainerCallback

from pretraining import extend


@extend.callback
class IsSlow(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(float(os.environ.get("SECONDS_A_STEP", "0")))
"""
"""An extension: so many seconds more for each step, in which something may happen to the run."""


class Nodes:
    """The nodes, each with an empty disk in place of the run folder `folder/NAME`."""

    def __init__(self, workshop: Workshop, folder: Path, made: Hosts, name: str = "run"):
        self.workshop, self.folder, self.hosts = workshop, folder, made
        self.output = folder / name
        self.output.mkdir()
        for each in made.names:
            self.disk(each).folder.mkdir()

    def disk(self, name: str) -> Run:
        """The run folder as this node sees it."""
        return Run(disk_of(self.output, name))

    def replace(self, name: str) -> None:
        """Put an empty node in place of one."""
        shutil.rmtree(self.disk(name).folder)
        self.disk(name).folder.mkdir()

    def start(self, stage="zero2", ranks=1, settings=(), more=(), **variables: str) -> dict[str, Started]:
        """Start the run, `ranks` of them on each node."""
        port = str(free_port())
        options = self.workshop.options("--output_dir", self.output, *choices(stage, settings), *more)
        rank, train = (
            ["forked", ranks, "-m", "tests.gear.nodes", self.folder],
            [self.output, "train.py", *options],
        )
        return {name: Started([*rank, name, port, *train], **HERE, **variables) for name in NAMES}

    def run(self, **options) -> dict[str, Finished]:
        """Start the run, and wait for its end on every node."""
        started = self.start(**options)
        return {name: each.finish() for name, each in started.items()}


def wait_until(started: dict[str, Started], reached: Callable[[], bool], pause: float = 0.01) -> None:
    """Look again and again; an error where a node ends first."""
    while not reached():
        for each in started.values():
            assert each.process.poll() is None, each.finish().output
        time.sleep(pause)


@contextmanager
def two_nodes(workshop: Workshop, folder: Path) -> Iterator[Nodes | None]:
    """The nodes; None if this system does not let us make them."""
    with hosts(folder, *NAMES) as made:
        yield None if made is None else Nodes(workshop, folder, made)


def disk_of(run: Path, name: str) -> Path:
    """What is in place of the run folder on a node."""
    return run.with_name(f"{run.name}-{name}")


def main(folder: Path, name: str, port: str, run: Path, command: list[str]) -> None:
    """Move this process to a node, and be a rank there."""
    made = Hosts(folder, NAMES)
    made.enter(name, {run: disk_of(run, name)})
    # A share of the cores, so that a rank has as many threads as one of as many ranks on one machine.
    cores, number = sorted(os.sched_getaffinity(0)), NAMES.index(name)
    os.sched_setaffinity(0, cores[number :: len(NAMES)] or cores)
    local, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    os.environ["RANK"] = str(NAMES.index(name) * ranks + local)
    os.environ["WORLD_SIZE"] = str(len(NAMES) * ranks)
    os.environ.update(MASTER_ADDR=made.address(NAMES[0]), MASTER_PORT=port)
    sys.argv = command
    sys.path[0] = str(Path(command[0]).resolve().parent)
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5:])
