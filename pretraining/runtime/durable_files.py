"""Write files that a reader, or a restart after a kill, never sees half-written; name the reason if a disk refuses.

A file is written under another name beside its place, synced to the disk, and then renamed. The libraries' own messages
hide a full disk: `one_line_disk_errors` finds the reason.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from pretraining.errors import UserError, file_error
from pretraining.outside.files import parse_json, read_bytes, regular


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO]:
    """Write a file anew: what the block writes, as text ("w") or bytes ("wb"), is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # in the same folder: a rename is atomic only within one filesystem
    partial = path.with_name(path.name + ".partial")
    with open(partial, mode, encoding=None if "b" in mode else "utf-8", opener=regular) as file:
        yield file
        # before the rename: else a power cut could leave the new name with no content
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@contextmanager
def replacing_folder(folder: Path, is_new: bool = False) -> Iterator[Path]:
    """Yield a folder to fill; if the block ends without an error, it takes the place of `folder`, else it goes.

    is_new: no such folder is there; if one comes meanwhile, it stays (`OSError`).
    """
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an attempt that was killed
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if not is_new:
        shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    flush_folder(folder.parent)


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Let one process after the other into the block. Where nothing can be locked at `path`, nobody waits.

    path: a folder that is there, or a file, which is made.
    """
    with ExitStack() as held:
        with suppress(OSError):  # a folder that may not be written to, a filesystem without locks
            file = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT)
            held.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX)
            # before it is closed: a process that was forked meanwhile has the file open too
            held.callback(fcntl.flock, file, fcntl.LOCK_UN)
        yield


def flush_folder(folder: Path) -> None:
    """Return once the disk holds the names in `folder`."""
    try:
        sync_to_disk(folder)
    except FileNotFoundError:
        raise
    except OSError:
        pass  # some network filesystems cannot sync a folder; they keep its names by themselves


def sync_to_disk(path: Path) -> None:
    """Wait until the disk holds this file, or the names in this folder (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)  # read-only, because a folder cannot be opened for writing
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_state(path: Path) -> tuple[int, int] | None:
    """Tell one state of a file that grows from another: its inode and size; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size


def write_json(path: Path, value: object) -> None:
    with replacing(path) as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def append_row(path: Path, row: dict) -> None:
    """Append one JSON line in a single write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+", opener=regular) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        # a line that a kill or a power cut has torn must not take this one with it
        torn = size > 0 and file.read(1) != b"\n"
        # one write, so that a kill can leave at most the last line half-written
        file.write(("\n" * torn + json.dumps(row, ensure_ascii=False) + "\n").encode())


def read_rows(path: Path, last_bytes: int | None = None) -> list[dict]:
    """Read the rows of a JSON-lines file, or those in its end, without lines that are none. No file: no rows."""
    if not path.exists():
        return []
    # "replace": a line that was cut inside a character must not raise
    return rows_of(read_bytes(path, last_bytes).decode("utf-8", errors="replace"))


def rows_of(text: str) -> list[dict]:
    """Read the rows of a JSON-lines file's content, as `read_rows` does."""
    rows = []
    # not splitlines(): it also splits at characters that JSON leaves as they are within a string
    for line in text.split("\n"):
        try:
            row = parse_json(line)
        # the end of the file, or a line that a dying run left half-written
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


# of safetensors and tokenizers
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")


@contextmanager
def one_line_disk_errors(folder: Path) -> Iterator[None]:
    """Raise a `UserError` in place of what the libraries raise if `folder` cannot be written."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # The Rust libraries raise errors of their own classes, with the number only in the text.
        number, told = getattr(error, "errno", None), _RUST_ERROR.search(str(error))
        refusal = None
        if isinstance(error, FileNotFoundError) and not folder.exists():
            # "no such file" alone would not say that somebody moved the folder
            what = "was removed or renamed while the run wrote there"
            remedy = "what is gone cannot be continued, and a renamed folder is continued with --output_dir"
            refusal = UserError(f"{folder}: {what}; {remedy}", on_every_rank=False)
        elif isinstance(error, OSError) and number is not None:
            refusal = file_error(error, folder)
        elif told:
            refusal = file_error(OSError(int(told[1]), os.strerror(int(told[1]))), folder)
        if refusal is None:
            raise
        raise refusal from error
