"""Let ranks report to each other without collectives: who came, who answered, and who is missing, by name.

A collective that hangs gives no message. So each rank does the work of a step in a thread that may be left behind. Its
main thread answers through the store of the launcher (torch's TCPStore): "done", "failed" or "waits". A rank whose
process stopped or never came gives no answer at all.
"""

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, TCPStore

from pretraining.doctor.findings import Finding, few_of
from pretraining.errors import UserError
from pretraining.training.ranks import shared_with_the_launcher

DONE, FAILED, WAITS, SILENT = "done", "failed", "waits", "silent"
GRACE_SECONDS = 4.0
"""How much later than the step's limit an answer may come, since ranks do not start a step at the same moment."""
MOST_REFUSED = 8
"""The most failed ranks of a step to report: eight ranks of a node often fail for one reason."""
_POLL_SECONDS = 0.01


class Stuck(Exception):
    """A step did not end on every rank; `answers` say on which ranks it did."""

    def __init__(self, step: str, seconds: float, answers: list["Answer"]) -> None:
        super().__init__(f"{step}: no end within {seconds:.0f} s")
        self.step, self.seconds, self.answers = step, seconds, answers


@dataclass(frozen=True)
class Answer:
    """How a step ended on one rank."""

    state: str = SILENT
    value: Any = None
    """What the work returned, after a way through JSON."""
    error: str = ""
    """Its exception on one line, if it failed."""


@dataclass(frozen=True)
class Rank:
    """A rank that came, with its host and process."""

    rank: int
    host: str
    process: int
    local_rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def named(came: list[Rank], ranks: list[int]) -> str:
    """Write `rank 3 on node1, rank 4 on node1`; of many ranks only the first few."""
    return few_of([str(came[rank]) for rank in ranks])


class RollCall:
    """Hold the store, the ranks that came, and one thread for work that may hang. Every rank makes the same calls.

    If a rank does not answer, or its work does not come back, each call raises `Stuck`, on every rank.
    """

    def __init__(self, rank: int, size: int, arrival_seconds: float) -> None:
        """Meet in the store; `UserError` if rank 0 cannot be reached from here."""
        self.rank, self.size = rank, size
        server = _connect(rank, arrival_seconds)
        # torchrun starts its ranks again with the same store, in which the old keys still are.
        attempt = f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        limit = timedelta(seconds=60)
        client = TCPStore(server.host, server.port, is_master=False, wait_for_workers=False, timeout=limit)
        self._store, self.work_store = PrefixStore(attempt, server), PrefixStore(attempt, client)
        """Of both, the second is for use inside a step: one that waits keeps others from using its connection."""
        self._work: queue.SimpleQueue = queue.SimpleQueue()
        self._answers: queue.SimpleQueue = queue.SimpleQueue()
        # Work is done in a thread, because it may hang inside a library, where nothing can end it. A daemon: one that
        # hangs must not keep the process alive.
        threading.Thread(target=self._serve, daemon=True, name="doctor").start()
        self._calls = 0
        mine = Rank(rank, socket.gethostname(), os.getpid(), int(os.environ.get("LOCAL_RANK", "0")))
        # rank 0 counts from its own start; the others do not know when that was, and wait longer
        patience = arrival_seconds if rank == 0 else 2 * arrival_seconds
        try:
            arrived = self._collect_from_all("arrival", asdict(mine), time.monotonic() + patience)
        except Stuck as stuck:
            what = f"{mine}: rank 0 does not answer, though its port is open; look at its host, and its log"
            raise UserError(what, on_every_rank=mine.local_rank != 0) from stuck
        self.ranks: list[Rank | None] = [None if fields is None else Rank(**fields) for fields in arrived]

    @property
    def hosts(self) -> list[str]:
        return [came.host for came in self.ranks]

    @property
    def nodes(self) -> list[list[int]]:
        """List the ranks of each node."""
        # Launchers number the ranks of a node one after the other, from local rank 0 on.
        nodes: list[list[int]] = []
        for came in self.ranks:
            if came.local_rank == 0 or not nodes:
                nodes.append([])
            nodes[-1].append(came.rank)
        return nodes

    def step(self, name: str, work: Callable[[], object], seconds: float) -> list[Answer]:
        """Do `work` on every rank at once; return the answers of all ranks, on every rank."""
        until = time.monotonic() + seconds + GRACE_SECONDS
        self._work.put(work)
        try:
            mine = self._answers.get(timeout=seconds)
        except queue.Empty:
            mine = Answer(WAITS)
        gathered = self._collect_from_all(name, asdict(mine), until)
        answers = [Answer() if each is None else Answer(**each) for each in gathered]
        # of the other states no rank can do the next step
        if not all(answer.state in (DONE, FAILED) for answer in answers):
            raise Stuck(name, seconds, answers)
        return answers

    def failures(self, check: str, answers: list[Answer], remedy: str = "") -> list[Finding]:
        """Make one finding for each of the first ranks on which a step failed; none if it failed nowhere.

        remedy: for errors that name none.
        """
        by_rank = zip(map(str, self.ranks), answers, strict=True)
        failed = [(rank, answer.error) for rank, answer in by_rank if answer.state == FAILED]
        found = [Finding.of_error(check, error, where=rank) for rank, error in failed[:MOST_REFUSED]]
        return [replace(each, remedy=each.remedy or remedy) for each in found]

    def gather(self, name: str, value: Any) -> list:
        """Return the value of every rank, on every rank, at once."""
        gathered = self._collect_from_all(name, [value], time.monotonic() + GRACE_SECONDS)
        if None in gathered:
            answers = [Answer(SILENT if each is None else DONE) for each in gathered]
            raise Stuck(name, GRACE_SECONDS, answers)
        return [value for (value,) in gathered]

    def collect(self, name: str, value: Any) -> list:
        """Return the value of every rank on rank 0 only, an empty list elsewhere: for values that are large."""
        self._store.set(f"{name}/{self.rank}", json.dumps(value))
        # returns when every rank has set its value
        self.gather(name, None)
        ranks = range(self.size) if self.rank == 0 else ()
        return [json.loads(self._store.get(f"{name}/{rank}")) for rank in ranks]

    def _collect_from_all(self, name: str, value, until: float) -> list:
        """Return the value of every rank, on every rank; None for those that sent none by then (`time.monotonic()`)."""
        self._calls += 1
        # numbered: keys stay in the store, and a step may be made twice
        name = f"{self._calls}/{name}"
        try:
            self._store.set(f"{name}/{self.rank}", json.dumps(value))
            if self.rank == 0:
                missing = set(range(self.size))
                while missing and time.monotonic() < until:
                    # asked rank by rank: `wait` would not say which key is missing
                    missing -= {rank for rank in missing if self._store.check([f"{name}/{rank}"])}
                    time.sleep(_POLL_SECONDS if missing else 0)
                values: list = [None] * self.size
                for rank in set(range(self.size)) - missing:
                    values[rank] = json.loads(self._store.get(f"{name}/{rank}"))
                self._store.set(f"{name}/all", json.dumps(values))
            left = max(0.1, until - time.monotonic()) + GRACE_SECONDS
            self._store.wait([f"{name}/all"], timedelta(seconds=left))
            return json.loads(self._store.get(f"{name}/all"))
        except DistError as error:
            others = [Answer(SILENT if rank == 0 else DONE) for rank in range(self.size)]
            raise Stuck(name.partition("/")[2], GRACE_SECONDS, others) from error

    def part(self, gone: list[int]) -> None:
        """Make the last call: rank 0, whose process may hold the store, leaves last; it does not wait for `gone`."""
        try:
            self._store.set(f"left/{self.rank}", "yes")
            others = [f"left/{rank}" for rank in range(self.size) if rank not in gone]
            until = time.monotonic() + GRACE_SECONDS
            while self.rank == 0 and not self._store.check(others) and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
        except DistError:
            pass  # the other side has left already

    def _serve(self) -> None:
        while True:
            work = self._work.get()
            try:
                self._answers.put(Answer(DONE, work()))
            except BaseException as error:  # reported as what the check found, whatever it is
                self._answers.put(Answer(FAILED, error=one_line(error)))


def one_line(error: BaseException) -> str:
    """Write an exception's kind and first words on one line."""
    words = " ".join(str(error).split())
    kind = "" if isinstance(error, UserError | ConnectionError) else f"{type(error).__name__}: "
    return f"{kind}{words[:300]}"


def _connect(rank: int, seconds: float) -> TCPStore:
    """Connect to the store that the launcher's variables name; rank 0 serves it unless the launcher does."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves, patience = rank == 0 and not shared_with_the_launcher(), timedelta(seconds=seconds)
    try:
        # multi_tenant: the process group, made later, meets in the same server.
        options = {"multi_tenant": True, "wait_for_workers": False, "timeout": patience}
        return TCPStore(host, port, is_master=serves, **options)
    except DistError as error:
        if serves:
            what = f"port {port} of {host} cannot be opened ({one_line(error)})"
            raise UserError(f"{what}; choose another: --master_port=N", on_every_rank=False) from error
        what = f"{socket.gethostname()} does not reach rank 0 at {host}:{port} within {seconds:.0f} s; start every "
        what += "node, open all TCP ports between the nodes (firewall), or name another --master_addr"
        raise UserError(what, on_every_rank=os.environ.get("LOCAL_RANK") != "0") from error
