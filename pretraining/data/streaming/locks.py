"""File locks that the kernel releases when their holder dies, however it dies.

A lock (flock) belongs to an open file, which a forked child inherits: the child closes its copies at once, else it
would hold, for its whole life, locks that a thread of its parent has given up.
"""

import fcntl
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

_locked: weakref.WeakSet[FileIO] = weakref.WeakSet()
_opening = threading.Lock()


def _close_inherited() -> None:
    for file in list(_locked):
        file.close()
    _locked.clear()
    _opening.release()


os.register_at_fork(
    before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_close_inherited
)


def _open(path: Path, flags: int) -> FileIO:
    """The file, unbuffered, known to the children of this process as one to close."""
    with _opening:
        file = FileIO(os.open(path, flags, 0o644), "r+" if flags & os.O_RDWR else "r")
        _locked.add(file)
    return file


def is_still_at(file: FileIO, path: Path) -> bool:
    """Whether `path` is (still) the name of this open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def open_in_use(path: Path) -> FileIO | None:
    """The file open for reading under a shared lock, which protects it from eviction; None where there is none.

    The lock lives as long as any duplicate of the descriptor: a memory map of the file keeps it.
    """
    while True:
        try:
            file = _open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        fcntl.flock(file, fcntl.LOCK_SH)
        if is_still_at(file, path):
            return file
        file.close()  # evicted between open and lock


def claim(path: Path) -> FileIO | None:
    """An empty file at `path` under an exclusive lock; None where another process or thread has claimed it.

    What a process that died left there is taken over.
    """
    while True:
        file = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        if is_still_at(file, path):
            file.truncate(0)
            return file
        file.close()


def remove_unless_in_use(path: Path) -> bool:
    """Remove a file that nobody holds a lock of; whether this call has removed it.

    One that is no longer at `path` may have been renamed: its bytes are still there.
    """
    try:
        with _open(path, os.O_RDONLY) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_still_at(file, path):
                path.unlink()
                return True
    except (BlockingIOError, FileNotFoundError):
        pass
    return False


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the one lock at `path`, waiting for it."""
    with _open(path, os.O_RDWR | os.O_CREAT) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
