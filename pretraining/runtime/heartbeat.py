"""Every rank keeps a heartbeat in the run folder: how far it has come, and that its process is alive."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

_FILE_BYTES = 512
"""One write of this many bytes replaces the one before."""
ENDED_STATES = "ZX"
"""Of a process that has ended, whose parent has not asked yet how."""


@dataclass(frozen=True)
class Place:
    """Where a rank is, as its heartbeat says."""

    rank: int
    host: str
    process: int
    phase: str
    step: int
    arrivals: int
    """How many places it has come to; the ranks come to the same ones in the same order."""
    beats: int
    """Grows as long as the process runs, even while its main thread waits."""
    machine: str = ""
    """As `this_machine` says there."""
    began: int = 0
    """When the process began, in clock ticks since the machine started: an id alone is given out again."""
    moves: int = 0
    """Grows as long as a long piece of work moves, which the other ranks may have to wait for (`long_work`)."""


class Heartbeat:
    """This rank's own: `arrive` from the main thread, `beat` from a thread that only a stopped process stops."""

    def __init__(self, folder: Path, rank: int):
        self.path = heartbeat_path(folder, rank)
        self.place = Place(
            rank, socket.gethostname(), os.getpid(), "start", 0, 0, 0, this_machine(), _began(os.getpid())
        )
        self.arrived_at = time.monotonic()
        self._moves, self._work_seen = 0, 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
        self.beat(0)  # who stands still from here on has said who it is

    def arrive(self, phase: str, step: int) -> None:
        """Progress: a step, a part of it, a round of a validation, a save."""
        self.place = replace(self.place, phase=phase, step=step, arrivals=self.place.arrivals + 1)
        self.arrived_at = time.monotonic()

    def beat(self, number: int) -> None:
        """Write the file anew. Long work that has moved since the last beat counts as progress."""
        if (work := _work.so_far()) != self._work_seen:
            self._work_seen = work
            if _work.waits:
                self._moves += 1
                self.arrived_at = time.monotonic()
        text = json.dumps({**asdict(self.place), "beats": number, "moves": self._moves})
        os.pwrite(self._file, text.encode().ljust(_FILE_BYTES), 0)

    def close(self) -> None:
        """Remove the file."""
        os.close(self._file)
        self.path.unlink(missing_ok=True)


class _Work:
    """What the threads of this process have done, in any unit, and whether its main thread waits for it."""

    def __init__(self):
        self.waits, self.done, self.growing = 0, 0, []

    def so_far(self) -> int:
        """Changes whenever something moves."""
        return self.done + sum(_bytes_below(folder) for folder in list(self.growing))


_work = _Work()


def work_done(amount: int = 1) -> None:
    """A part of a long piece of work is done: bytes written or sent, a token drawn. Any thread may call this."""
    _work.done += amount


@contextmanager
def long_work(growing: Path | None = None) -> Iterator[None]:
    """Inside the block the main thread does, or waits for, work that may take longer than a run may stand still.

    As long as `work_done` is called, this rank makes progress, and so do those that wait for it. While the main thread
    trains, work of other threads is no progress: it may go on although training stands still.

    growing: a folder that a library fills; its size counts as work done.
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


def _bytes_below(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError:  # not there yet, or gone
        return 0


def heartbeat_path(folder: Path, rank: int) -> Path:
    """The file of one rank."""
    return folder / f"rank-{rank:05}.json"


def read_place(folder: Path, rank: int) -> Place | None:
    """The rank's newest heartbeat; None where it has none, or is writing it."""
    return _place_in(heartbeat_path(folder, rank))


def killed_ranks(folder: Path, since: float) -> list[Place]:
    """The places of all ranks if every one of their processes is gone for certain; empty if not.

    since: UNIX seconds; a heartbeat written before belongs to an earlier start.
    """
    places = [_place_in(path) for path in sorted(folder.glob("rank-*.json")) if _written(path) >= since]
    return places if all(place is not None and is_gone(place) for place in places) else []


def is_gone(place: Place) -> bool:
    """Whether the process of a heartbeat has ended; False if it ran on a machine that this one cannot look into."""
    if not place.machine or place.machine != this_machine():
        return False
    fields = process_fields(place.process)
    if fields:
        return fields[0] in ENDED_STATES or int(fields[19]) != place.began
    try:
        os.kill(place.process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # another user's, which the system hides
    return False


def this_machine() -> str:
    """Where a process id means one process: host, its last start, and the container; empty if the system hides it."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {started} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def process_fields(process: int) -> list[str]:
    """State, parent and what else the system says of a process, in the order of proc(5); empty if it says nothing."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _began(process: int) -> int:
    fields = process_fields(process)
    return int(fields[19]) if fields else 0


def _place_in(path: Path) -> Place | None:
    try:
        return Place(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed meanwhile: its process has closed it
        return 0.0
