"""Kill nodes, ranks, launchers and the store of runs without a shared disk, and see whether anything was lost.

Two nodes (tests/gear/nodes.py) share only a store, which fails one request in ten.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretraining.checkpoints.folders import damage, step_in
from pretraining.checkpoints.remote import RemoteRun
from pretraining.runtime.run_folder import unix_seconds
from tests.gear.chaos import MOMENTS, SETTINGS, Folder, came, ends_as, have_fallen, ranks_of
from tests.gear.hosts import Hosts
from tests.gear.nodes import NAMES, Nodes
from tests.gear.object_store import (
    OTHER_CREDENTIALS,
    OtherServer,
    Proxy,
    connect_to,
    newest_committed,
    one_in,
)
from tests.gear.runs import Started, Workshop, send_kill

TARGETS = ("node", "rank", "launcher", "store")
UPLOAD = "s3://bucket/runs"
LONGEST_OUTAGE_SECONDS = 3.0


class NodeChaos:
    """`endure` raises `AssertionError` if a run on two nodes lost anything."""

    def __init__(
        self, workshop: Workshop, folder: Path, made: Hosts, server: OtherServer, proxy: Proxy, seed: int
    ):
        self.workshop, self.folder, self.hosts, self.server = workshop, folder, made, server
        self.variables = connect_to(proxy.address, **OTHER_CREDENTIALS)
        self.chance, self.counts = random.Random(seed), Counter()
        self.settings = (*SETTINGS, f"checkpoints.upload={UPLOAD}")
        self.reference = workshop.run("zero2", 2, settings=SETTINGS)
        self.lost_with_a_node: set[bytes] = set()
        """Markers on disks of checkpoints of which a lost node took a part."""

    def endure(self, kills: int) -> dict[str, int]:
        """Kill so often, over as many runs as it takes, and leave each to finish. {what: how often}."""
        while self.counts["kills"] < kills:
            self.counts["runs"] += 1
            name = f"run-{self.counts['runs']}"
            self.nodes = Nodes(self.workshop, self.folder, self.hosts, name)
            self.remote = RemoteRun(UPLOAD, name)
            for _ in range(self.chance.randint(3, 8)):
                if self.counts["kills"] == kills or not self._start_and_kill():
                    break
            self._finish()
        return dict(self.counts)

    def _start(self) -> dict[str, Started]:
        return self.nodes.start(settings=self.settings, **self.variables)

    def _start_and_kill(self) -> bool:
        """Whether something could be killed before the run ended by itself."""
        moment, target, victim = map(self.chance.choice, (list(MOMENTS), TARGETS, NAMES))
        wait = self.chance.random() * MOMENTS[moment][1]
        outage = self.chance.random() * LONGEST_OUTAGE_SECONDS
        least, began = self._least(), time.time()
        started, folder = self._start(), Folder(self.nodes.disk("alpha").folder)
        try:
            if not came([*started.values()], folder, moment):
                _finished(started)
                return False
            time.sleep(wait)
            self._strike(started, target, victim, outage)
            in_store = self._newest_in_store()
            if target == "store":  # training goes on without it
                _finished(started)
            else:
                self.counts["killed after patience"] += not have_fallen([*started.values()])
        finally:
            for each in started.values():
                each.kill()
        self.counts.update(("kills", moment, target))
        if target == "node":
            self._replace(victim)
        assert self._newest_in_store() >= in_store, "the store lost a committed step"
        if (target, victim) != ("node", "alpha"):  # which has taken its events along
            self._continued(least, began)
        return target != "store"

    def _strike(self, started: dict[str, Started], target: str, victim: str, outage: float) -> None:
        if target == "node":
            started[victim].kill()
        elif target == "rank":
            send_kill(ranks_of(started[victim])[:1])
        elif target == "launcher":
            os.kill(started[victim].process.pid, signal.SIGKILL)
        else:
            self.server.kill()
            time.sleep(outage)
            self.server.start()

    def _replace(self, name: str) -> None:
        """Put an empty node in place of the lost one; what it alone held of checkpoints is gone."""
        self.nodes.replace(name)
        in_store = self._newest_in_store()
        self.lost_with_a_node |= {each.read_bytes() for each in self._markers() if _step_of(each) > in_store}

    def _markers(self) -> list[Path]:
        disks = [self.nodes.disk(name).folder for name in NAMES]
        return [path for disk in disks for path in disk.glob("checkpoint-*/committed.json")]

    def _newest_in_store(self) -> int:
        name = newest_committed(self.remote, -1)
        return step_in(name) if name else 0

    def _least(self) -> int:
        """The step from which the next start must go on, or from a later one."""
        whole = [each for each in self._markers() if each.read_bytes() not in self.lost_with_a_node]
        return max([self._newest_in_store(), *map(_step_of, whole)])

    def _continued(self, least: int, began: float) -> None:
        """The start since then, if it came so far, went on from the newest checkpoint there was."""
        for event in self.nodes.disk("alpha").events:
            if event["event"] in ("start", "resume") and unix_seconds(event["time"]) >= int(began):
                assert event["step"] >= least, (event, least)

    def _finish(self) -> None:
        """The same command once more: weights, losses and validation are those of the undisturbed run."""
        least, began = self._least(), time.time()
        started = self._start()
        _finished(started)
        self._continued(least, began)
        ends_as(self.nodes.disk("alpha"), self.reference)
        self._store_is_whole()

    def _store_is_whole(self) -> None:
        """The last checkpoint in the store is that of the last step, every byte as committed."""
        name = newest_committed(self.remote, -1)
        assert name == "checkpoint-10", name
        copy = self.folder / "copies" / self.nodes.output.name / name
        copy.mkdir(parents=True)
        system = self.remote._filesystem()
        for path in system.ls(self.remote.where(name), detail=False):
            (copy / path.rpartition("/")[2]).write_bytes(system.cat_file(path))
        assert damage(copy) is None


def _step_of(marker: Path) -> int:
    return step_in(marker.parent.name)


def _finished(started: dict[str, Started]) -> None:
    for each in started.values():
        finished = each.finish()
        assert finished.code == 0, finished.output


@contextmanager
def node_chaos(workshop: Workshop, folder: Path, made: Hosts, seed: int) -> Iterator[NodeChaos]:
    """The nodes with a store of their own, which this process reaches without the failures."""
    fails = one_in(10, "error", "drop", "cut")
    with OtherServer(folder / "objects") as server, Proxy(server.address, fails, made.outside) as proxy:
        os.environ |= connect_to(server.address, **OTHER_CREDENTIALS)
        yield NodeChaos(workshop, folder, made, server, proxy, seed)
