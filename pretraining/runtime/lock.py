"""Allow one run per folder: one rank of each disk holds a lock on it from before the first write to the end."""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from pretraining.errors import UserError
from pretraining.outside.files import read_bytes, regular
from pretraining.runtime.disks import find_disks
from pretraining.runtime.process_group import together
from pretraining.runtime.run_folder import RunFolder

LOCK = ".lock"
PATIENCE_SECONDS = 5.0
"""Seconds to wait for the lock: a run that was killed a moment ago may need them to end."""


@contextmanager
def lock_run(run: RunFolder) -> Iterator[None]:
    """Find which ranks see the same run folder, and lock it once on each disk. At the end, remove it if it is empty.

    Raises:
        UserError: another process holds the folder. Every rank raises it, and nothing is written.
    """
    locks: list[TextIO] = []  # one on the first rank of each disk, none on the others
    run.disks = find_disks(run.path)
    try:
        together(lambda: locks.append(lock_folder(run.path)) if run.disks.is_first else None)
        yield
    finally:
        for lock in locks:
            _release(lock, run.path)


@contextmanager
def lock_idle_run(folder: Path) -> Iterator[None]:
    """Lock an existing run folder, in one process, so that no run begins there; `UserError` if a run holds it."""
    lock = lock_folder(folder, patience_seconds=0)
    try:
        yield
    finally:
        _release(lock, folder)


def holder_of(folder: Path) -> str | None:
    """Return who holds the lock of a run folder, as `process 12 on node0`; None if nobody does."""
    if not (folder / LOCK).is_file():
        return None
    lock = _try_lock(folder / LOCK)
    if lock is None:
        return _holder(folder / LOCK)
    lock.close()
    return None


def was_killed(folder: Path) -> bool:
    """Return whether a folder's run was ended by force: its lock lies there, was one of this host, and nobody holds it.

    A run that ends by itself removes it. False too if another host's run left it, or a copy of the folder has it.
    """
    words = (_holder(folder / LOCK) or "").split()
    return words[-1:] == [socket.gethostname()] and holder_of(folder) is None and (folder / LOCK).is_file()


def lock_folder(folder: Path, patience_seconds: float = PATIENCE_SECONDS) -> TextIO:
    """Make the folder and lock it until the returned file is closed; `UserError` names the process that holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + patience_seconds
    while (lock := _try_lock(folder / LOCK)) is None:
        # no holder: it has just left, so the next try gets the lock
        if time.monotonic() > until and (holder := _holder(folder / LOCK)) is not None:
            raise UserError(
                f"{folder}: another run is writing there ({holder}); wait for its end, stop it, or give this one "
                "its own folder with --output_dir"
            )
        time.sleep(0.1)
    os.register_at_fork(after_in_child=lock.close)  # else a data worker would keep the lock of a killed run
    # the file may still hold the line of a process that was killed
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock


def move_lock(folder: Path, new_folder: Path) -> None:
    """Make `new_folder` and move the lock there."""
    new_folder.mkdir()
    # flock is on the open file, not on its name, so a rename keeps it
    (folder / LOCK).rename(new_folder / LOCK)


def _try_lock(path: Path) -> TextIO | None:
    """Return the locked file, or None if another process holds it, or has just removed it."""
    file = os.fdopen(regular(str(path), os.O_RDWR | os.O_CREAT), "r+", encoding="utf-8")
    try:
        # the system releases it when the process ends, however it ends
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder may have removed the file between open and flock: a lock on it would keep nobody out.
        if os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    file.close()
    return None


def _holder(path: Path) -> str | None:
    """Return what the process that holds the lock wrote about itself; None if it has left meanwhile."""
    try:
        return read_bytes(path).decode("utf-8", "backslashreplace")[:200]
    except FileNotFoundError:
        return None


def _release(lock: TextIO, folder: Path) -> None:
    # before closing: else this could remove a file that the next holder has just locked
    (folder / LOCK).unlink(missing_ok=True)
    lock.close()
    if folder.is_dir() and not any(folder.iterdir()):
        # a disk of its own may be mounted there
        with contextlib.suppress(OSError):
            folder.rmdir()
