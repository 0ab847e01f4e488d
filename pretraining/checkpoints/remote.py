"""Read, write and fetch a run's checkpoints at an fsspec address: `s3://bucket/runs/<name>`, `hf://...`, a folder.

Every rank fetches a share of the files, in ranges, several at once. Files of an interrupted fetch are verified and
kept. Until the marker is written, the folder does not count as a checkpoint. A start does not wait until fetched files
are on the disk: they can be fetched again. A power cut may spoil a copy that has a marker, as an old disk may any
checkpoint; the next start finds out by the checksums, and fetches the damaged files again.
"""

import fcntl
import io
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tqdm import tqdm

from pretraining.checkpoints.folders import Pieces, Place, step_in
from pretraining.checkpoints.format import MARKER, THREADS, file_entry, passed_on, read_marker
from pretraining.errors import UserError, reason_of
from pretraining.outside.files import regular
from pretraining.outside.store import ShortAnswer, Store
from pretraining.runtime.durable_files import replacing
from pretraining.runtime.heartbeat import long_work, work_done
from pretraining.runtime.process_group import own_rank

RUN_FILES = ("recipe.json", "changes.json", "journal.jsonl", "flagged_blocks.jsonl", "metrics.jsonl")
RUN_FILES += ("samples.jsonl", "events.jsonl", "wandb_id")
"""Files of the run folder that a start on an empty machine needs besides the checkpoint."""

_BLOCK_BYTES = 32 << 20  # how much of a file a rank holds in memory during its upload
_PIECE_BYTES = 256 << 10
_AHEAD_BYTES = 16 << 20
_CHUNK_BYTES = 8 << 20
_MOST_BLOCKS = 9_000  # S3 takes 10,000 parts a file
_RANGE_BYTES = 16 << 20  # with all threads, 128 MiB of host memory a rank
_FILES = 4  # files fetched at once: while one is written to the disk, the store sends others
_LOOK_SECONDS = 1.0
_ATTEMPTS = 3  # if a file arrives damaged in each of them, it is damaged in the store


class RemoteRun(Store, Place):
    """Reads, writes and lists below `<address>/<name of the run>`, and tries again if the store fails.

    Every method raises `UserError` for an error that waiting cannot repair, or once `seconds` are over. Credentials
    come from the environment.
    """

    speaker, advice = "checkpoints", "check checkpoints.upload"
    not_there = "no such bucket or folder ({reason}); make it, or check checkpoints.upload"
    not_allowed = "no permission ({reason}); check the rights of the account and "
    not_allowed += "the variables that hold its credentials"

    def __init__(self, address: str, name: str | None = None):
        """address: of the run, or, with its `name`, of the place above it."""
        address = address.rstrip("/")
        super().__init__((address or "/") if name is None else f"{address}/{name}")

    @classmethod
    def of_checkpoint(cls, address: str) -> "tuple[RemoteRun, str]":
        """Return the run of a checkpoint's address, and the checkpoint's name."""
        above, _, name = address.rstrip("/").rpartition("/")
        return cls(above), name

    def refusal(self, error: Exception, what: str) -> UserError | None:
        if isinstance(error, NotImplementedError):
            return UserError(f"{what}: nothing can be written there; choose another checkpoints.upload")
        return super().refusal(error, what)

    def read_if_there(self, path: str) -> bytes | None:
        """Read a small file; None if there is none."""

        def read() -> bytes | None:
            with suppress(FileNotFoundError):  # `ask` would report it as a wrong address
                return self._whole(path)
            return None

        return self.ask(read, path)

    def pieces(self, path: str, size: int) -> Iterator[memoryview]:
        """Read a file of `folder` from its beginning; a piece is valid until the next."""
        folder = self.folder
        assert folder is not None
        # One small buffer again and again: it stays in the processor's cache, and new memory costs more than reading.
        buffer = memoryview(bytearray(_PIECE_BYTES))
        opened: list[io.FileIO] = []

        def read(start: int, stop: int) -> memoryview:
            try:
                if not opened:
                    opened.append(io.FileIO(folder / path, opener=regular))
                if start % _AHEAD_BYTES == 0 and hasattr(os, "posix_fadvise"):
                    # The kernel reads on while these are checked and written.
                    os.posix_fadvise(opened[0].fileno(), start, 2 * _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
                    # Read once: the memory is for what is written from it.
                    os.posix_fadvise(opened[0].fileno(), 0, start, os.POSIX_FADV_DONTNEED)
                opened[0].seek(start)
                if count := opened[0].readinto(buffer[: stop - start]):
                    return buffer[:count]
                raise ShortAnswer(f"the file ends after {start:,} of {size:,} bytes")
            except OSError:
                while opened:  # a mounted disk that has failed needs a new handle
                    opened.pop().close()
                raise

        try:
            start = 0
            while start < size:
                read_next = partial(read, start, min(start + _PIECE_BYTES, size))
                piece = self.ask(read_next, path)
                start += len(piece)
                yield piece
        finally:
            for file in opened:
                file.close()

    def write(self, path: str, open_chunks: Callable[[], Iterable[bytes]], num_bytes: int) -> None:
        """Write a file from its chunks, whole or not at all."""

        def send() -> None:
            # Each attempt opens the chunks again: an iterator that an attempt has used up cannot be read twice.
            chunks = open_chunks()
            if self.folder is not None:
                # fsspec writes local files in place, so that a reader could see half of a file.
                return _send_to_folder(self.folder / path, chunks)
            # Each block is a part of the upload: a large file needs larger ones.
            block = max(_BLOCK_BYTES, num_bytes // _MOST_BLOCKS)
            file = self._filesystem().open(self.where(path), "wb", block_size=block)
            try:
                for chunk in chunks:
                    file.write(chunk)
                file.close()
            except BaseException:  # also an interrupt must not leave half a file as a whole one
                with suppress(Exception):
                    file.discard()
                # `close`, which the destructor calls too, would complete the file with half of its bytes.
                with suppress(AttributeError):
                    file.closed = True
                raise

        self.ask(send, path)
        work_done()

    def write_file(self, path: str, source: Path) -> None:
        """Write a file of this machine, whole or not at all."""

        def chunks() -> Iterator[bytes]:
            with source.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
                    work_done(len(chunk))

        self.write(path, chunks, source.stat().st_size)

    def write_bytes(self, path: str, content: bytes) -> None:
        self.write(path, lambda: [content], len(content))

    def create(self, path: str, content: bytes) -> bool:
        """Write a small file unless another one is there; returns False if there is.

        The store itself decides, if it can write on a condition (S3's If-None-Match): of two writers at once, one wins.
        """

        def write() -> bool:
            try:
                if self.folder is None:
                    self._filesystem().pipe_file(self.where(path), content, mode="create")
                    return True
                place = self.folder / path
                whole = place.with_name(f"{place.name}.{uuid.uuid4().hex}")
                _send_to_folder(whole, [content])
                try:
                    place.hardlink_to(whole)  # unlike a rename it fails if the name is taken
                finally:
                    whole.unlink()
            except FileExistsError:
                # An attempt whose answer was lost has perhaps written it.
                return self._filesystem().cat_file(self.where(path)) == content
            return True

        return self.ask(write, path)

    def remove(self, path: str, is_folder: bool = False) -> None:
        """Remove one file, or a folder with its files, if it is there."""

        def remove() -> None:
            system = self._filesystem()
            with suppress(FileNotFoundError):
                if is_folder:
                    system.rm(self.where(path), recursive=True)
                else:
                    system.rm_file(self.where(path))

        self.ask(remove, path)

    def remove_checkpoint(self, name: str) -> None:
        # The marker first: if the process is killed in between, what is left does not count.
        self.remove(f"{name}/{MARKER}")
        self.remove(name, is_folder=True)

    def checkpoints(self) -> list[str]:
        """List the names of the checkpoints, committed or not, newest step first."""
        found = [name for name in self.sizes("") or {} if step_in(name) >= 0]
        return sorted(found, key=step_in, reverse=True)

    def marker(self, name: str) -> bytes | None:
        return self.read_if_there(f"{name}/{MARKER}")

    @contextmanager
    def opened(self) -> Iterator[Pieces]:
        with Ranges(self) as ranges:
            yield ranges.in_order

    def check_writable(self) -> None:
        """Write a small file and remove it, so that a `UserError` comes now and not at the first checkpoint."""
        self.write_bytes(".writable", b"yes\n")
        self.remove(".writable")


def _send_to_folder(path: Path, chunks: Iterable[bytes]) -> None:
    with replacing(path, "wb") as file:
        for chunk in chunks:
            file.write(chunk)


class Ranges(ThreadPoolExecutor):
    """Threads that read ranges of files of a store; of all files together, a few ranges are in memory."""

    def __init__(self, remote: RemoteRun):
        super().__init__(THREADS)
        self.remote, self._room = remote, threading.BoundedSemaphore(THREADS)

    def in_order(self, where: str, size: int) -> Iterator[bytes | memoryview]:
        """Yield the content of a file from its beginning; what is yielded is valid until the next."""
        if self.remote.folder is not None:  # its kernel reads ahead, without a copy for each range
            yield from self.remote.pieces(where, size)
            return
        waiting: deque[Future[bytes]] = deque()
        starts = iter(range(0, size, _RANGE_BYTES))
        try:
            while True:
                # One is always asked for; more if there is room.
                while self._room.acquire(blocking=not waiting):
                    if (start := next(starts, None)) is None:
                        self._room.release()
                        break
                    stop = min(start + _RANGE_BYTES, size)
                    waiting.append(self.submit(self.remote.read_range, where, start, stop))
                if not waiting:
                    return
                yield waiting[0].result()
                waiting.popleft()
                self._room.release()
        finally:
            for _ in waiting:
                self._room.release()


def fetch_share(remote: RemoteRun, name: str, folder: Path, files: dict) -> str | None:
    """Fetch and verify the `files` of this rank's share, once more each that arrived damaged.

    Returns what is damaged in the store, or None. Raises `UserError` if the store fails, or the disk.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Ranges(remote) as ranges:

            def fetch(file: str) -> str | None:
                path, entry = folder / file, files[file]
                if path.is_file() and path.stat().st_size == entry["bytes"] and file_entry(path) == entry:
                    return None
                for _ in range(_ATTEMPTS):
                    with open(path, "wb", buffering=0, opener=regular) as out:
                        if passed_on(ranges.in_order(f"{name}/{file}", entry["bytes"]), out.write) == entry:
                            return None
                return f"{file} is not what was committed (fetched {_ATTEMPTS} times)"

            with ThreadPoolExecutor(_FILES) as threads:
                return next(filter(None, list(threads.map(fetch, files))), None)
    except UserError as error:
        # A file which the marker names and the store lacks is damage, no failure: the checkpoint before may be whole.
        if isinstance(error.__cause__, FileNotFoundError):
            return f"a file that its {MARKER} names is not there ({reason_of(error.__cause__)})"
        raise
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from error


def fetch_absent(remote: RemoteRun, folder: Path, file: str) -> bool:
    """Fetch one more file, for which ranks of a node wait together; returns True, or raises `UserError`."""
    entry = read_marker(folder)["files"][file]
    with long_work(), open(folder / f".{file}.lock", "w", opener=regular) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with fetching_bar(f"{remote.where(folder.name)}/{file}", folder, {file: entry}):
            try:
                reason = fetch_share(remote, folder.name, folder, {file: entry})
            except UserError as error:
                reason = str(error)
        Path(lock.name).unlink(missing_ok=True)  # whoever waits for it finds the file whole
    if reason is not None:
        raise UserError(f"{remote.where(folder.name)}: {reason}", on_every_rank=False)
    return True


@contextmanager
def fetching_bar(where: str, folder: Path, files: dict[str, dict]) -> Iterator[None]:
    """Show on rank 0's stderr, while the block runs, how much of these files the folder holds, by all ranks."""
    if own_rank() != 0:
        yield
        return

    def arrived() -> int:
        # The sizes on the disk: a file that is fetched again counts once.
        total = 0
        for name, entry in files.items():
            with suppress(OSError):  # not there yet
                total += min((folder / name).stat().st_size, entry["bytes"])
        return total

    def look_again_and_again(pause: float = _LOOK_SECONDS) -> None:
        while not over.wait(pause):
            began = time.monotonic()
            bar.update(max(0, arrived() - bar.n))
            # Thousands of files on a slow disk: at most a tenth of the time.
            pause = max(_LOOK_SECONDS, 9 * (time.monotonic() - began))

    over, total = threading.Event(), sum(entry["bytes"] for entry in files.values())
    with tqdm(desc=f"fetching {where}", total=total, unit="B", unit_scale=True) as bar:
        thread = threading.Thread(target=look_again_and_again, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            bar.update(max(0, arrived() - bar.n))
