"""Allow one run per folder, and find which ranks see the same one: all on a shared disk, else those of each node.

One rank of each disk holds the lock, from before the first write to the end. Ranks of one disk meet through files. What
ranks of several disks must say to each other goes through the process group (process_group.py).
"""

import contextlib
import fcntl
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from pretraining.errors import UserError
from pretraining.outside.files import read_bytes, regular
from pretraining.runtime.process_group import (
    Disks,
    from_rank_0,
    gather_from_ranks,
    rank_and_world_size,
    together,
)

LOOK_SECONDS = 12.0  # for a new file on a network disk, which may show it late; others show it at once
_PAUSE_SECONDS = 0.25
_OWN_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay")
"""Types of file systems that no other machine writes to."""


def find_disks(folder: Path) -> Disks:
    """Find which ranks see the same `folder`; all ranks call it, and raise if one does not see that of its node."""
    rank, ranks = rank_and_world_size()
    if ranks == 1:
        return Disks((0,))
    tokens: list[Path] = []

    def make_token() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        # A name that nobody has looked for: network disks also remember for a while which names are not there.
        tokens.append(folder / f".disk-{uuid.uuid4().hex}")
        tokens[0].touch()
        return tokens[0].name

    try:
        token = from_rank_0(make_token)
        sees_rank_0 = rank == 0 or _appears(folder, [token]) is not None
        first = [0] * ranks
        if not all(gather_from_ranks(sees_rank_0)):
            # Not rank 0's: of those ranks the first of each node makes a token of its own.
            is_first_here = not sees_rank_0 and os.environ.get("LOCAL_RANK", "0") == "0"
            made = gather_from_ranks(together(lambda: make_token() if is_first_here else None))
            others = {name: number for number, name in enumerate(made) if name}
            found = token if sees_rank_0 else _appears(folder, list(others))
            first = gather_from_ranks(0 if sees_rank_0 else others.get(found or ""))
            hosts = gather_from_ranks(socket.gethostname())
            if None in first:
                missing = first.index(None)
                who = f"rank {missing} on {hosts[missing]}"
                what = "does not see what the first rank of its node wrote there"
                raise UserError(f"{folder}: {who} {what}; all ranks of a node need one --output_dir")
        gather_from_ranks(None)  # nobody looks any more
        return Disks(tuple(first), first[rank])
    finally:
        for path in tokens:
            path.unlink(missing_ok=True)


def _appears(folder: Path, names: list[str]) -> str | None:
    """Return the first of `names` that is in the folder; looks for a while if the disk may show it late."""
    until = time.monotonic() + (LOOK_SECONDS if is_network_disk(folder) else 0)
    while True:
        if found := next((name for name in names if (folder / name).exists()), None):
            return found
        if time.monotonic() >= until:
            return None
        time.sleep(_PAUSE_SECONDS)
        # Reading the folder makes a network disk ask its server again.
        with contextlib.suppress(OSError):
            list(folder.iterdir())


def is_network_disk(folder: Path) -> bool:
    """Return whether other machines may write to the disk of this folder; True if the system does not say."""
    try:
        rows = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return True
    path = folder.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    path = path.resolve()
    # The longest mount point above the folder; of two at the same place, the later one covers the first.
    above = [
        (len(row[1]), number)
        for number, row in enumerate(rows)
        if path.is_relative_to(row[1].replace("\\040", " "))
    ]
    return not above or rows[max(above)[1]][2] not in _OWN_DISKS


LOCK = ".lock"
PATIENCE_SECONDS = 5.0  # for the lock: a run that was killed a moment ago may need them to end


@contextmanager
def lock_idle_run(folder: Path) -> Iterator[None]:
    """Lock an existing run folder, in one process, so that no run begins there; `UserError` if a run holds it."""
    lock = lock_folder(folder, patience_seconds=0)
    try:
        yield
    finally:
        release(lock, folder)


def holder_of(folder: Path) -> str | None:
    """Return who holds the lock of a run folder, as `process 12 on node0`; None if nobody does."""
    if not (folder / LOCK).is_file():
        return None
    lock = try_lock(folder / LOCK)
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
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # as below /proc
        raise UserError(f"{folder}: no folder can be made there; choose another --output_dir") from error
    until = time.monotonic() + patience_seconds
    while (lock := try_lock(folder / LOCK)) is None:
        # no holder: it has just left, so the next try gets the lock
        if time.monotonic() > until and (holder := _holder(folder / LOCK)) is not None:
            remedy = "wait for its end, stop it, or give this one its own folder with --output_dir"
            raise UserError(f"{folder}: another run is writing there ({holder}); {remedy}")
        time.sleep(0.1)
    os.register_at_fork(after_in_child=lock.close)  # else a data worker would keep the lock of a killed run
    lock.truncate(0)  # the file may still hold the line of a process that was killed
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock


def move_lock(folder: Path, new_folder: Path) -> None:
    new_folder.mkdir()
    # flock is on the open file, not on its name, so a rename keeps it
    (folder / LOCK).rename(new_folder / LOCK)


def try_lock(path: Path) -> TextIO | None:
    """Return the locked file, or None if another process holds it, or has just removed it."""
    file = os.fdopen(regular(str(path), os.O_RDWR | os.O_CREAT), "r+", encoding="utf-8")
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        # the system releases it when the process ends, however it ends
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder may have removed the file between open and flock: a lock on it would keep nobody out.
        if os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
    file.close()
    return None


def _holder(path: Path) -> str | None:
    """Return what the process that holds the lock wrote about itself; None if it has left meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return read_bytes(path).decode("utf-8", "backslashreplace")[:200]
    return None


def release(lock: TextIO, folder: Path) -> None:
    """Release the lock, and remove the folder if it is empty."""
    # before closing: else this could remove a file that the next holder has just locked
    (folder / LOCK).unlink(missing_ok=True)
    lock.close()
    if folder.is_dir() and not any(folder.iterdir()):
        # a disk of its own may be mounted there
        with contextlib.suppress(OSError):
            folder.rmdir()
