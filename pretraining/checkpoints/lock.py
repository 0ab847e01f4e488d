"""One run a folder: rank 0 holds a lock on it from before the first write to the end."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from pretraining.errors import UserError
from pretraining.runtime.process_group import from_rank_0
from pretraining.runtime.run_folder import RunFolder

LOCK = ".lock"
PATIENCE_SECONDS = 5.0
"""A run that was killed a moment ago may need this long to be gone."""


@contextmanager
def sole_run(run: RunFolder) -> Iterator[None]:
    """Hold the run folder, on rank 0 for all ranks; at the end no trace is left where nothing was written.

    The system releases the lock when the process ends, however it ends.

    Raises:
        UserError: on every rank, with nothing written: which process holds the folder.
    """
    held: list[TextIO] = []
    from_rank_0(lambda: held.append(lock_folder(run.path)))
    try:
        yield
    finally:
        for lock in held:
            _release(lock, run.path)


@contextmanager
def folder_held(folder: Path) -> Iterator[None]:
    """Hold a run folder that exists against runs, in one process; `UserError` where a run holds it."""
    lock = lock_folder(folder, patience_seconds=0)
    try:
        yield
    finally:
        _release(lock, folder)


def lock_folder(folder: Path, patience_seconds: float = PATIENCE_SECONDS) -> TextIO:
    """Make the folder and lock it until the file returned is closed. `UserError` names who holds it already."""
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + patience_seconds
    while (lock := _try_lock(folder / LOCK)) is None:
        if time.monotonic() > until and (holder := _holder(folder / LOCK)) is not None:
            raise UserError(
                f"{folder}: another run is writing there ({holder}); wait for its end, stop it, or give this one "
                "its own folder with --output_dir"
            )
        time.sleep(0.1)
    os.register_at_fork(after_in_child=lock.close)  # else a data worker would keep the lock of a killed run
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock


def move_lock(folder: Path, new_folder: Path) -> None:
    """Keep the lock in `new_folder` instead: it belongs to the file, not to its name."""
    new_folder.mkdir()
    (folder / LOCK).rename(new_folder / LOCK)


def _try_lock(path: Path) -> TextIO | None:
    """The locked file, or None; one that its last holder removed meanwhile counts for nothing."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    file.close()
    return None


def _holder(path: Path) -> str | None:
    """What the process that holds the lock says of itself; None if it has left meanwhile."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _release(lock: TextIO, folder: Path) -> None:
    (folder / LOCK).unlink(missing_ok=True)
    lock.close()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
