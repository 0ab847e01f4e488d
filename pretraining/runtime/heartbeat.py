"""Keep a heartbeat of every rank in the run folder: how far it has come, and that its process is alive."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from pretraining.outside.files import read_json_value, regular

_FILE_BYTES = 512  # every write has this length, so that it covers the whole write before it
ENDED_STATES = "ZX"  # in proc(5), of a process that has ended before its parent asked for the exit code


@dataclass(frozen=True)
class HeartbeatRecord:
    """Where a rank is, as its heartbeat reports it."""

    rank: int
    host: str
    process: int
    phase: str
    step: int
    arrivals: int  # How many places it has reached. All ranks reach the same places in the same order.
    beats: int  # grows as long as the process runs, even while its main thread waits
    machine: str = ""
    began: int = 0  # when the process began, in clock ticks since the machine started: process ids are reused
    moves: int = 0  # grows with long work for which the other ranks may have to wait (`long_work`)


class Heartbeat:
    """Write this rank's heartbeat. The main thread calls `arrive`; another calls `beat` as long as the process runs."""

    def __init__(self, folder: Path, rank: int):
        self.path = heartbeat_path(folder, rank)
        host, process = socket.gethostname(), os.getpid()
        fields = process_fields(process)
        began = int(fields[19]) if fields else 0
        self.place = HeartbeatRecord(rank, host, process, "start", 0, 0, 0, this_machine(), began)
        self.arrived_at = time.monotonic()
        self._moves, self._work_seen = 0, 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # kept open and never truncated: a reader finds the old or the new text, not an empty file
        self._file = regular(str(self.path), os.O_WRONLY | os.O_CREAT)
        self.beat(0)  # now, so that a rank which hangs from here on can be named

    def arrive(self, phase: str, step: int) -> None:
        """Record progress: a step, a part of it, a round of a validation, a save."""
        self.place = replace(self.place, phase=phase, step=step, arrivals=self.place.arrivals + 1)
        self.arrived_at = time.monotonic()

    def beat(self, number: int) -> None:
        """Write the file anew. Long work that has moved since the last beat counts as progress."""
        work = _work.done
        # a copy: the main thread may change the list while the watch reads it
        for folder in list(_work.growing):
            with suppress(OSError):  # not there yet, or gone
                work += sum(path.stat().st_size for path in folder.iterdir())
        if work != self._work_seen:
            self._work_seen = work
            # work of other threads alone is no progress of training
            if _work.waits:
                self._moves += 1
                self.arrived_at = time.monotonic()
        text = json.dumps({**asdict(self.place), "beats": number, "moves": self._moves})
        os.pwrite(self._file, text.encode().ljust(_FILE_BYTES), 0)

    def close(self) -> None:
        os.close(self._file)
        self.path.unlink(missing_ok=True)


_work = SimpleNamespace(waits=0, done=0, growing=[])  # done by any thread, and whether the main one waits


def work_done(amount: int = 1) -> None:
    """Count a finished part of long work: bytes written or sent, a token drawn. Any thread may call this."""
    _work.done += amount


@contextmanager
def long_work(growing: Path | None = None) -> Iterator[None]:
    """Mark a block in which the main thread does, or waits for, work that may take longer than the hang limit.

    As long as `work_done` is called, this rank makes progress, and so do the ranks that wait for it. Outside such a
    block, work of other threads is no progress: it may go on although training hangs. growing: a folder that a library
    fills. Its size counts as work done.
    """
    waits = threading.current_thread() is threading.main_thread()
    _work.waits += waits
    if growing is not None:
        _work.growing.append(growing)
    try:
        yield
    finally:
        _work.waits -= waits
        if growing is not None:
            _work.growing.remove(growing)


def heartbeat_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.json"


def read_place(folder: Path, rank: int) -> HeartbeatRecord | None:
    """Read the rank's newest heartbeat; None if it has none, or is writing it."""
    with suppress(OSError, ValueError, TypeError):
        return HeartbeatRecord(**read_json_value(heartbeat_path(folder, rank)))
    return None


def gone_ranks(folder: Path, since: float, or_none: bool = False) -> list[HeartbeatRecord]:
    """Return ranks that are surely gone, by heartbeats since then (UNIX seconds). or_none: none unless all are."""
    places = []
    for path in sorted(folder.glob("rank-*.json")):
        # removed meanwhile, because its process has closed it; or somebody else's file
        with suppress(OSError, ValueError):
            if path.stat().st_mtime >= since:
                places.append(read_place(folder, int(path.stem.partition("-")[2])))
    gone = [place for place in places if place is not None and is_gone(place)]
    return [] if or_none and len(gone) < len(places) else gone


def is_gone(place: HeartbeatRecord) -> bool:
    """Return whether a heartbeat's process has ended; False if it ran on a machine that this one cannot look into."""
    if not place.machine or place.machine != this_machine():
        return False
    fields = process_fields(place.process)
    if fields:
        # field 22 of proc(5), the start time; the list begins at field 3. If it differs, the id was reused.
        return fields[0] in ENDED_STATES or int(fields[19]) != place.began
    try:
        os.kill(place.process, 0)  # signal 0 only asks if the process exists
    except OSError as error:  # of another user's process the system may say nothing
        return isinstance(error, ProcessLookupError)
    return False


def this_machine() -> str:
    """Name the place in which process ids are unique, by host, last boot and container; empty if that is hidden."""
    with suppress(OSError):
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {started} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def process_fields(process: int) -> list[str]:
    """Return state, parent and further fields of a process, in the order of proc(5); empty if there are none."""
    with suppress(OSError):
        # after the last ")": the command's name before it may hold spaces and brackets
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return []
