"""Cache the shards that a machine has fetched: shared by its processes, checked, and within a limit of bytes.

    <root>/<data fingerprint>/<checksum>.arrow    a shard, whole and checked; in use while a process holds its lock
    <root>/<data fingerprint>/<checksum>.part     one being fetched, its room already taken; stale if it is not locked
    <root>/.lock                                  held while room is made and taken
    <root>/.held                                  bytes that have been taken; what was removed since may be among them

A killed process leaves at most a .part without a lock. The next process that needs the shard or the room takes it.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from pretraining.errors import FILE_ERRORS, UserError

FOLDER_VARIABLE = "PRETRAINING_DATA_CACHE"
GIGABYTES_VARIABLE = "PRETRAINING_DATA_CACHE_GB"
DEFAULT_SHARE = 0.5
"""Share of the room on the disk (free, or already used by the cache) if no limit is given."""
COUNT_FILE = ".held"
SPARE_SHARE = 0.01
"""Share of the limit that is made free at once: a full cache of many shards is not listed at each fetch."""


class ShardBusy(Exception):
    """Another process or thread is fetching this shard."""


class CacheFull(Exception):
    """No room can be made: everything in the cache is in use."""


class DamagedDownload(OSError):
    """The bytes from the store do not have the manifest's checksum."""


class CachedShard(NamedTuple):
    """A shard as the cache names it: by the data set's fingerprint and the shard's checksum."""

    data_fingerprint: str
    checksum: str
    size: int


class ShardCache:
    """One cache folder and its limit in bytes, for many data sets, runs and processes; it keeps no file open itself."""

    def __init__(self, root: Path, max_bytes: int):
        self.root, self.max_bytes = Path(root), max_bytes

    @classmethod
    def of(cls, folder: Path | None = None, gigabytes: float | None = None) -> "ShardCache":
        """Take the command line's values, else the environment's, else the user's cache folder and half its disk."""
        if folder is None:
            user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
            folder = Path(os.environ.get(FOLDER_VARIABLE) or f"{user_cache}/pretraining/data")
        folder, text = folder.expanduser(), os.environ.get(GIGABYTES_VARIABLE)
        if gigabytes is None and text:
            try:
                gigabytes = float(text)
            except ValueError:
                gigabytes = 0.0
            # Written so that NaN is refused too.
            if not gigabytes > 0:
                raise UserError(f"{GIGABYTES_VARIABLE} is {text!r}; set it to a number of gigabytes above 0")
        if gigabytes is not None:
            return cls(folder, int(gigabytes * 1e9))
        # The folder may not be there yet: its nearest parent is on the same disk.
        existing = next((place for place in (folder, *folder.parents) if place.exists()), Path("/"))
        held = sum(path.stat().st_size for path in folder.glob("*/*.arrow"))
        return cls(folder, int((shutil.disk_usage(existing).free + held) * DEFAULT_SHARE))

    def _path(self, shard: CachedShard, suffix: str) -> Path:
        return self.root / shard.data_fingerprint / f"{shard.checksum.rpartition(':')[2]}{suffix}"

    def check_fits(self, size: int) -> None:
        """Raise UserError if a shard of `size` bytes is larger than the cache may become."""
        if size > self.max_bytes:
            room = f"{max(4 * size / 1e9, 0.01):.2g}"
            what = f"the cache may hold {self.max_bytes / 1e9:.3g} GB, one shard has {size / 1e9:.3g} GB"
            remedy = f"give it room with --data_cache_gb {room}, on a disk that has it (--data_cache)"
            raise UserError(f"{self.root}: {what}; {remedy}")

    def open(self, shard: CachedShard) -> FileIO | None:
        """Open the shard, protected from eviction until file and maps are closed; None if it is not here."""
        path = self._path(shard, ".arrow")
        file = _open_in_use(path)
        if file is None:
            return None
        if os.fstat(file.fileno()).st_size != shard.size:  # cut by another program
            file.close()
            _remove_unless_in_use(path)
            return None
        with contextlib.suppress(PermissionError):  # a file of another user keeps its age
            os.utime(path)  # the age decides what is evicted
        return file

    def holds(self, shard: CachedShard) -> bool:
        """Return whether the shard is here, without protecting it."""
        return self._path(shard, ".arrow").exists()

    def fetch(self, shard: CachedShard, chunks: Callable[[], Iterable[bytes]]) -> FileIO:
        """Fetch the shard unless it is here; return its file, as `open` does.

        Raises ShardBusy while another process or thread fetches it, CacheFull if no room can be made, DamagedDownload
        if the checksum differs, UserError if the disk refuses.
        """
        with self.disk_faults():
            self._path(shard, ".part").parent.mkdir(parents=True, exist_ok=True)
            part = _claim(self._path(shard, ".part"))
            if part is None:
                raise ShardBusy
            with part:
                try:
                    if not self.holds(shard):  # another process may have fetched it meanwhile
                        self._take_room(part, shard.size)
                        _write_checked(part, chunks(), shard.checksum)
                        # only now do readers see it: whole and checked
                        self._path(shard, ".part").rename(self._path(shard, ".arrow"))
                finally:
                    if _is_still_at(part, self._path(shard, ".part")):
                        self._path(shard, ".part").unlink()
                    fcntl.flock(part, fcntl.LOCK_UN)
            file = self.open(shard)
        if file is None:
            raise ShardBusy  # evicted in the same moment
        return file

    def _take_room(self, part: FileIO, size: int) -> None:
        """Evict the shards unused for longest until `size` more bytes fit, then take these bytes."""
        self.check_fits(size)
        with exclusive_lock(self.root / ".lock"):
            try:
                counted = int((self.root / COUNT_FILE).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                counted = self.max_bytes + 1  # nobody has counted
            # What has been removed since may still be counted, and shows when the files are listed.
            if counted + size <= self.max_bytes and self._take(part, size, counted):
                return
            files = []
            for path in (*self.root.glob("*/*.part"), *self.root.glob("*/*.arrow")):
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    # Parts are evicted first, then the longest unneeded shards.
                    files.append(((path.suffix == ".arrow", status.st_mtime_ns), path, status.st_size))
            held = sum(path_size for _, _, path_size in files)
            # Room for more than one shard: the next fetches list nothing.
            wanted = max(size, int(SPARE_SHARE * self.max_bytes))
            for _, path, path_size in sorted(files, key=lambda file: file[0]):
                if held + wanted <= self.max_bytes and self._take(part, size, held):
                    return
                if _remove_unless_in_use(path):
                    held -= path_size
            if held + size > self.max_bytes:
                raise CacheFull
            if not self._take(part, size, held):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.root))

    def _take(self, part: FileIO, size: int, held: int) -> bool:
        """Take `size` bytes of the disk for the file; False if the disk does not have so many."""
        try:
            os.posix_fallocate(part.fileno(), 0, size)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                part.truncate(0)
                return False
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # what file systems without fallocate say
                raise
            part.truncate(size)
        # At once, under the lock: another process counts these bytes as held.
        (self.root / COUNT_FILE).write_text(str(held + size), encoding="utf-8")
        return True

    @contextlib.contextmanager
    def disk_faults(self) -> Iterator[None]:
        """Turn the faults of the disk into a UserError of one line."""
        try:
            yield
        except OSError as error:
            if error.errno not in FILE_ERRORS:
                raise
            fault = os.strerror(error.errno)
            remedy = "free some room, lower --data_cache_gb, or name another folder with --data_cache"
            what = f"the cache of data shards cannot be written: {fault}; {remedy}"
            raise UserError(f"{self.root}: {what}", on_every_rank=False) from error


def _write_checked(part: FileIO, chunks: Iterable[bytes], checksum: str) -> None:
    import xxhash

    digest, position = xxhash.xxh128(), 0
    for chunk in chunks:
        digest.update(chunk)
        while chunk:
            written = os.pwrite(part.fileno(), chunk, position)
            chunk, position = chunk[written:], position + written
    found = f"xxh128:{digest.hexdigest()}"
    if found != checksum:
        raise DamagedDownload(f"checksum {found}, expected {checksum}")
    # Before the rename: a power cut must not leave a shard that looks whole.
    os.fsync(part.fileno())


# File locks, which the kernel releases if their holder dies, however it dies. A lock (flock) belongs to an open file,
# which a forked child inherits. The child closes its copies at once, else it would hold, for its whole life, locks that
# a thread of its parent has given up. A file that is being closed at a fork it cannot find any more: exclusive locks,
# for which others wait, are therefore given back before their file is closed.

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
    """Open the file unbuffered, and remember that a forked child must close it."""
    # No fork between the open and the note: the child would not know of the file.
    with _opening:
        file = FileIO(os.open(path, flags, 0o644), "r+" if flags & os.O_RDWR else "r")
        _locked.add(file)
    return file


def _is_still_at(file: FileIO, path: Path) -> bool:
    """Return whether `path` is (still) the name of this open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _open_in_use(path: Path) -> FileIO | None:
    """Open a file for reading under a shared lock, which protects it from eviction; None if there is none.

    The lock lives as long as any duplicate of the descriptor: a memory map of the file keeps it.
    """
    while True:
        try:
            file = _open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        # Waits for an eviction in progress, after which the file is no longer at `path`.
        fcntl.flock(file, fcntl.LOCK_SH)
        if _is_still_at(file, path):
            return file
        file.close()  # evicted between open and lock


def _claim(path: Path) -> FileIO | None:
    """Open an empty file at `path` under an exclusive lock, also a dead process's; None if somebody has claimed it."""
    while True:
        file = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        if _is_still_at(file, path):
            file.truncate(0)
            return file
        file.close()


def _remove_unless_in_use(path: Path) -> bool:
    """Remove a file unless somebody has it locked; False too if it was renamed: its bytes still take room."""
    try:
        with _open(path, os.O_RDONLY) as file, _locked_alone(file, fcntl.LOCK_NB):
            if _is_still_at(file, path):
                path.unlink()
                return True
    except (BlockingIOError, FileNotFoundError):
        pass
    return False


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    with _open(path, os.O_RDWR | os.O_CREAT) as file, _locked_alone(file):
        yield


@contextlib.contextmanager
def _locked_alone(file: FileIO, flags: int = 0) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX | flags)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
