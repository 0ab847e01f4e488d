"""The files of a checkpoint: on disk, checksummed, and as readable as any file the user makes."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pretraining.runtime.heartbeat import work_done

THREADS = 8  # files read at once; the checksum leaves the interpreter's lock alone while it computes
_CHUNK_BYTES = 4 << 20


def no_progress(num_bytes: int) -> None:
    """Count nothing."""


def file_entry(path: Path, progress: Callable[[int], None] = no_progress) -> dict:
    """{"bytes", "checksum": "xxh128:<hex>"} of a file as it is read now; `progress` is told the bytes read."""
    import xxhash

    digest, num_bytes = xxhash.xxh128(), 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            num_bytes += count
            work_done(count)
            progress(count)
    return {"bytes": num_bytes, "checksum": f"xxh128:{digest.hexdigest()}"}


def file_entries(folder: Path, names: Iterable[str], progress=no_progress) -> dict[str, dict]:
    """{name: its `file_entry`} of files of `folder`, read side by side."""
    names = list(names)
    with ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(lambda name: file_entry(folder / name, progress), names)
        return dict(zip(names, found, strict=True))


def wait_for_disk(paths: Iterable[Path]) -> None:
    """Return once the disk holds these files (fsync)."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
        work_done()


def follow_umask(paths: Iterable[Path]) -> None:
    """Give files the mode the user's umask asks for: safetensors makes its own 0600."""
    umask = os.umask(0o077)
    os.umask(umask)
    for path in paths:
        path.chmod(path.stat().st_mode & 0o111 | 0o666 & ~umask)


def files_in(folder: Path) -> list[Path]:
    """Every file below `folder`, by name."""
    return sorted(path for path in folder.rglob("*") if path.is_file())
