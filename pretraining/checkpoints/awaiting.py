"""A rank's receipt: its files of one save are on disk, this large, with these checksums.

A receipt names its save (the process's attempt and a count), so that one left by an earlier attempt, or by an
earlier save of the same step, is never taken for today's.
"""

import json
import os
import time
from pathlib import Path
from threading import Event

import xxhash

from pretraining.checkpoints.receipts import receipt_name

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.25


class SaveAbandoned(Exception):
    """The save this thread works on has failed on another rank."""


def write_bytes(path: Path, content: bytes) -> dict:
    """Write a small file; returns {"bytes", "checksum"} once the disk holds it (fsync)."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(content), "checksum": f"xxh128:{xxhash.xxh128(content).hexdigest()}"}


def wait_for_receipts(folder: Path, ranks: int, save: str, abandoned: Event) -> None:
    """Return as soon as every rank's receipt of this save is there.

    Looks at the files alone: it runs in a thread, where no collective may. Raises `SaveAbandoned` once
    `abandoned` is set.
    """
    missing, pause = set(range(ranks)), _FIRST_PAUSE_SECONDS
    while True:
        missing -= {rank for rank in missing if _is_of(save, folder / receipt_name(rank, ranks))}
        if not missing:
            return
        if abandoned.is_set():
            raise SaveAbandoned
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)


def _is_of(save: str, path: Path) -> bool:
    """Whether the receipt is there, and this save's."""
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("save") == save
    except (FileNotFoundError, ValueError):
        return False
