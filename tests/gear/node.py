"""A rank on its own node: `python -m tests.gear.node FOLDER NODE MASTER_PORT RUN COMMAND...`, under `forked` ranks.

Each node (tests/gear/hosts.py) has its network, its host name, and its own disk in place of the run folder.
"""

import os
import runpy
import sys
from pathlib import Path

from tests.gear.hosts import Hosts

NAMES = ["alpha", "beta"]


def disk_of(run: Path, name: str) -> Path:
    """What is in place of the run folder on a node."""
    return run.with_name(f"{run.name}-{name}")


def enter(folder: Path, name: str, run: Path) -> Hosts:
    """Move this process to a node."""
    made = Hosts(folder, NAMES)
    made.enter(name, {run: disk_of(run, name)})
    return made


def main(folder: Path, name: str, port: str, run: Path, command: list[str]) -> None:
    made = enter(folder, name, run)
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
