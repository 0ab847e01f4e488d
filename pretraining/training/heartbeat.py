"""Every rank keeps a heartbeat in the run folder: how far it has come, and that its process is alive."""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_FILE_BYTES = 512
"""One write of this many bytes replaces the one before."""


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


class Heartbeat:
    """This rank's own: `arrive` from the main thread, `beat` from a thread that only a stopped process stops."""

    def __init__(self, folder: Path, rank: int):
        self.path = heartbeat_path(folder, rank)
        self.place = Place(rank, socket.gethostname(), os.getpid(), "start", 0, 0, 0)
        self.arrived_at = time.monotonic()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
        self.beat(0)  # who stands still from here on has said who it is

    def arrive(self, phase: str, step: int) -> None:
        """Progress: a step, a part of it, a round of a validation, a save."""
        place = self.place
        self.place = Place(
            place.rank, place.host, place.process, phase, step, place.arrivals + 1, place.beats
        )
        self.arrived_at = time.monotonic()

    def beat(self, number: int) -> None:
        """Write the file anew."""
        text = json.dumps({**asdict(self.place), "beats": number})
        os.pwrite(self._file, text.encode().ljust(_FILE_BYTES), 0)

    def close(self) -> None:
        """Remove the file."""
        os.close(self._file)
        self.path.unlink(missing_ok=True)


def heartbeat_path(folder: Path, rank: int) -> Path:
    """The file of one rank."""
    return folder / f"rank-{rank:05}.json"


def read_place(folder: Path, rank: int) -> Place | None:
    """The rank's newest heartbeat; None where it has none, or is writing it."""
    try:
        return Place(**json.loads(heartbeat_path(folder, rank).read_text()))
    except (OSError, ValueError, TypeError):
        return None
