"""The promise of docs/fleet.md: a node's plug is pulled at night, and in the morning the run is finished.

Nodes under torchrun share nothing but a store. A report there says what the loss has cost.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from pretraining.checkpoints.folders import step_in
from pretraining.checkpoints.remote import RemoteRun
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.run_folder import STARTS
from tests.gear.hosts import hosts
from tests.gear.nodes import HERE, SLOW, Nodes, wait_until
from tests.gear.object_store import Proxy, connect_to, newest_committed, s3_server, use_here
from tests.gear.runs import (
    Finished,
    Started,
    Workshop,
    answer_of,
    choices,
    completed,
    forked_programs,
    free_port,
)

QUICK = "last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=10"
"""torchrun's own patience with nodes that come late, or are silent: seconds, for nodes that are this machine."""
DOLLARS = 36.0
SETTINGS = (
    "training.save_steps=2",
    "monitors.hang_minutes=0.25",
    "checkpoints.upload=s3://bucket/runs",
    f"report.dollars_per_gpu_hour={DOLLARS}",
    "report.every_seconds=600",
)


class TorchrunNodes(Nodes):
    """Nodes with a supervised torchrun each; they meet on a machine that is none of them."""

    seconds_a_step = "1"
    spare: str | None = None
    """A node that is one too many, and waits for another's loss; without one, one node less is enough too."""

    def begin(self, store: str, settings: tuple[str, ...] = ()) -> None:
        """Start all, with this address of their store, and what they meet at."""
        self.port, self.store, self.settings = free_port(), store, (*SETTINGS, *settings)
        (self.folder / "slow.py").write_text(SLOW)
        self.point = self.meet()
        self.started = {name: self.start_on(name) for name in self.hosts.names if name != self.spare}

    def meet(self) -> Started:
        """Start what they meet at, and wait until it takes them."""
        point = Started([sys.executable, "-m", "pretraining.meeting_point", "--port", self.port])
        assert "--rdzv_endpoint" in point.process.stdout.readline()
        return point

    def start_on(self, name: str) -> Started:
        """The command that is typed once on each node."""
        most = len(self.hosts.names)
        number = most - 1 if self.spare else f"{most - 1}:{most}"
        torchrun = ["torchrun", f"--nnodes={number}", "--nproc_per_node=1", "--max-restarts=9"]
        torchrun += ["--rdzv_backend=c10d", f"--rdzv_endpoint={self.hosts.outside}:{self.port}"]
        torchrun += ["--rdzv_id=run", f"--rdzv_conf={QUICK}"]
        settings = (*self.settings, f'extensions=["{self.folder / "slow.py"}"]')
        options = self.workshop.options("--output_dir", self.output, *choices("zero2", settings))
        words = [*self.hosts.words(name, {self.output: self.disk(name).folder})]
        words += [sys.executable, "-m", "pretraining.supervise", "--", *torchrun, "train.py", *options]
        return Started(
            words, SECONDS_A_STEP=self.seconds_a_step, **HERE, **forked_programs(), **connect_to(self.store)
        )

    def lose(self, name: str) -> None:
        """Pull its plug."""
        self.hosts.pull_plug(name)
        self.started.pop(name).kill()

    def come_back(self, name: str) -> None:
        """Plug it in, and type the same command there."""
        self.hosts.plug_in(name)
        self.started[name] = self.start_on(name)

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Look again and again; an error where a node ends first."""
        wait_until(self.started, reached, pause=0.05)

    def finish(self) -> dict[str, Finished]:
        """Wait for the end on every node that is there."""
        finished = {name: each.finish() for name, each in self.started.items()}
        for each in finished.values():
            assert each.code == 0, each.output
        return finished

    def starts(self, name: str) -> list[tuple[int, int]]:
        """(Step, ranks) of each start in the history on a node's disk."""
        events = [event for event in self.disk(name).events if event["event"] in STARTS]
        return [(event["step"], event["world_size"]) for event in events]

    def trains_with(self, ranks: int, name: str) -> bool:
        """Whether the newest start in the history on a node's disk has so many ranks, and has trained a step."""
        starts = self.starts(name)
        if not starts or starts[-1][1] != ranks:
            return False
        return any(row["step"] > starts[-1][0] for row in self.disk(name).training_rows)

    def end(self) -> None:
        """Leave no process behind."""
        for each in [*self.started.values(), self.point]:
            each.kill()


@contextmanager
def torchrun_nodes(
    workshop: Workshop, folder: Path, monkeypatch, *names: str, settings=(), seconds_a_step="1", spare=None
) -> Iterator[tuple[TorchrunNodes, RemoteRun]]:
    """The nodes, which train, and what the store holds of their run."""
    with hosts(folder, *names) as made:
        if made is None:
            pytest.skip("may not make networks here")
        nodes = TorchrunNodes(workshop, folder, made)
        nodes.seconds_a_step, nodes.spare = seconds_a_step, spare
        with (
            s3_server(folder / "log") as address,
            Proxy(address, lambda number, path: None, made.outside) as proxy,
        ):
            use_here(monkeypatch, address)
            nodes.begin(proxy.address, settings)
            try:
                nodes.wait_until(partial(nodes.trains_with, len(nodes.started), "alpha"))
                yield nodes, RemoteRun("s3://bucket/runs", "run")
            finally:
                nodes.end()


def look_back(store: str = "s3://bucket/runs/run") -> dict:
    """What the store of a run says about its end."""
    found = completed([sys.executable, "-m", "pretraining.postmortem", "--json", store], **os.environ)
    return answer_of(found.stdout)


def largest_difference(run, reference) -> float:
    return max(abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True))


def test_a_node_without_power_is_done_without_and_taken_back_and_a_report_says_what_it_cost(
    workshop: Workshop, tmp_path, monkeypatch
):
    """Two nodes and a bucket. The plug of rank 0's node is pulled; it comes back, but not its disk with all metrics.

    Nobody types anything on the other, which goes on alone. Patience makes it slow: 15 seconds until the hang is named,
    and 10 in which torchrun waits for nodes that come late.
    """
    reference = workshop.run("zero2")
    with torchrun_nodes(workshop, tmp_path, monkeypatch, "alpha", "beta", seconds_a_step="2") as (
        nodes,
        remote,
    ):
        nodes.wait_until(lambda: newest_committed(remote, 1) is not None)
        nodes.lose("alpha")
        committed = step_in(newest_committed(remote, -1))
        nodes.wait_until(partial(nodes.trains_with, 1, "beta"))
        nodes.replace("alpha")
        nodes.come_back("alpha")
        nodes.finish()
        assert newest_committed(remote, -1) == "checkpoint-10"
        report, found = remote.read("report.html").decode(), look_back()
    name = max(nodes.hosts.names, key=lambda name: len(nodes.starts(name)))
    # the first may have begun with the quicker of them
    run, starts = nodes.disk(name), nodes.starts(name)[-3:]
    assert [ranks for _, ranks in starts] == [2, 1, 2] and starts[1][0] == committed
    assert largest_difference(run, reference) <= 1e-4
    hangs = [row for row in read_rows(nodes.disk("beta").dir.node_events) if row["event"] == "hang"]
    assert [hang["ranks"] for hang in hangs] == [[0]]
    assert "restarts after a crash" in report and "It has cost $" in report
    assert [attempt["ranks"] for attempt in found["attempts"]][-3:] == [2, 1, 2]
    assert found["dollars"] > found["dollars_lost"] > 0
    assert (run.dir.export / "config.json").exists()


ASKED = pytest.mark.skipif(
    not os.environ.get("TORCHRUN_TESTS"), reason="minutes; TORCHRUN_TESTS=1 runs it as root"
)


@ASKED
def test_a_lost_meeting_point_ends_the_run_until_it_is_back(workshop: Workshop, tmp_path, monkeypatch):
    """Its process is killed; the supervisors start again, and the run goes on from its newest checkpoint."""
    reference = workshop.run("zero2")
    made = torchrun_nodes(workshop, tmp_path, monkeypatch, "alpha", "beta", seconds_a_step="3")
    with made as (nodes, remote):
        nodes.wait_until(lambda: newest_committed(remote, 1) is not None)
        nodes.point.kill()
        nodes.point = nodes.meet()
        nodes.finish()
    # the quicker one may have gone on alone
    longest = max(nodes.hosts.names, key=lambda name: len(nodes.starts(name)))
    assert len(nodes.starts(longest)) > 1
    assert largest_difference(nodes.disk(longest), reference) <= 1e-4


@ASKED
def test_a_spare_node_takes_the_place_of_a_lost_one(workshop: Workshop, tmp_path, monkeypatch):
    """Two train, for one would not divide the step of a real recipe; a third waits, with an empty disk."""
    reference, names = workshop.run("zero2"), ("alpha", "beta", "gamma")
    made = torchrun_nodes(workshop, tmp_path, monkeypatch, *names, seconds_a_step="3", spare="gamma")
    with made as (nodes, remote):
        nodes.started["gamma"] = nodes.start_on("gamma")
        nodes.wait_until(lambda: newest_committed(remote, 1) is not None)
        nodes.lose("beta")
        nodes.finish()
    assert largest_difference(nodes.disk("alpha"), reference) <= 1e-4
    assert [ranks for _, ranks in nodes.starts("alpha")] == [2, 2]


@ASKED
def test_nodes_that_come_back_take_part_again(workshop: Workshop, tmp_path, monkeypatch):
    """Three nodes, two at least. Rank 0's is lost and comes back with an empty disk; then another, with its disk."""
    steps = ("budget.tokens_per_step=768", "budget.tokens=7680")
    reference = workshop.run("zero2", settings=steps)
    names, choice = ("alpha", "beta", "gamma"), {"settings": steps, "seconds_a_step": "4"}
    with torchrun_nodes(workshop, tmp_path, monkeypatch, *names, **choice) as (nodes, remote):
        nodes.wait_until(lambda: newest_committed(remote, 1) is not None)
        for lost, first in (("alpha", "beta"), ("beta", "alpha")):
            nodes.lose(lost)
            nodes.wait_until(partial(nodes.trains_with, 2, first))
            if lost == "alpha":
                nodes.replace(lost)
            nodes.come_back(lost)
            nodes.wait_until(partial(nodes.trains_with, 3, "alpha"))
        nodes.finish()
        found = look_back()
    assert largest_difference(nodes.disk("alpha"), reference) <= 1e-4
    assert [attempt["ranks"] for attempt in found["attempts"]][-5:] == [3, 2, 3, 2, 3]
    assert found["attempts"][-1]["end"] == "finished" and found["dollars_lost"] > 0
