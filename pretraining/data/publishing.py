"""Publish a data folder whole or not at all: build it beside its place under a lock, then rename it into place.

What was there before is never deleted: it is kept under the next free name, `<name>.replaced-1` and so on.
"""

import glob
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from pretraining.runtime.durable_files import sync_to_disk
from pretraining.runtime.lock import try_lock

LOCK_POLL_SECONDS = 0.1
"""How often a process that waits for the lock looks again."""


@contextmanager
def preparation_lock(folder: Path) -> Iterator[Path | None]:
    """Hold the lock on the preparation of `folder`; report it and wait while another process holds the lock.

    It removes what an interrupted preparation left, and yields the new place of the data set that this had to keep.
    """
    path = folder.parent / f".{folder.name}.lock"
    made_parent = not folder.parent.exists()
    folder.parent.mkdir(parents=True, exist_ok=True)
    waiting = False
    while (file := try_lock(path)) is None:
        if not waiting:
            print(f"waiting: another process is preparing {folder}", file=sys.stderr, flush=True)
        waiting = True
        time.sleep(LOCK_POLL_SECONDS)
        # Whoever held the lock has removed a parent that it had made, if nothing is in it.
        folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        if _building(folder).exists():
            shutil.rmtree(_building(folder))
        # Killed between the first two renames of `publish`?
        if is_half_published(folder) and not folder.exists():
            _previous(folder).rename(folder)
        yield _keep_previous(folder)
    finally:
        # Remove the name before the lock is released: a process that waits sees that its file is no longer there.
        path.unlink()
        file.close()
        if made_parent and not any(folder.parent.iterdir()):
            folder.parent.rmdir()


def is_half_published(folder: Path) -> bool:
    """Return whether a process was killed in the middle of `publish`."""
    return _previous(folder).exists()


def _keep_previous(folder: Path) -> Path | None:
    """Do the last rename of `publish` if it is still to be done; return the new name of the earlier data set."""
    if not is_half_published(folder):
        return None
    numbered = (folder.with_name(f"{folder.name}.replaced-{number}") for number in count(1))
    # lexists: a dangling link takes the name too.
    kept = next(path for path in numbered if not os.path.lexists(path))
    _previous(folder).rename(kept)
    return kept


def kept_beside(folder: Path) -> list[Path]:
    """List the data sets whose place others took, the latest first."""
    named = folder.parent.glob(f"{glob.escape(folder.name)}.replaced-*")
    numbers = {path: path.name.rpartition("-")[2] for path in named}
    # As numbers: 10 comes after 9.
    numbered = {path: int(number) for path, number in numbers.items() if number.isdecimal()}
    return sorted(numbered, key=numbered.__getitem__, reverse=True)


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """Make an empty folder beside `folder` to build in. If the block raises, it is gone again."""
    # Beside, not in /tmp: a rename works only within one file system.
    _building(folder).mkdir()
    try:
        yield _building(folder)
    # Also after Ctrl-C: what is half built must not stay.
    except BaseException:
        shutil.rmtree(_building(folder), ignore_errors=True)
        raise


def work_folder(folder: Path) -> Path:
    """Name the folder in which the tasks of a preparation of `folder` keep what they have finished."""
    return folder.parent / f".{folder.name}.work"


def publish(folder: Path, contains_earlier: bool = False) -> Path | None:
    """Put the finished building in the place of `folder`, after the disk holds all of it.

    If there was a data set before, return the path under which it is kept; one that the new one contains is removed.
    """
    built = _building(folder)
    # Before the renames: after a power cut, a published name must not lead to half-written files.
    for path in [*built.rglob("*"), built]:
        sync_to_disk(path)
    # A rename replaces an empty folder, but not a full one.
    if folder.exists() and any(folder.iterdir()):
        folder.rename(_previous(folder))
    built.rename(folder)
    if contains_earlier:
        shutil.rmtree(_previous(folder))
    kept = _keep_previous(folder)
    # The renames themselves are kept by the parent folder.
    sync_to_disk(folder.parent)
    # Last: until the data set is in place, the tasks' results are the only copy.
    if work_folder(folder).exists():
        shutil.rmtree(work_folder(folder))
    return kept


def _building(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.building"


def _previous(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.previous"
