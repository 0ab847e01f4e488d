"""Read and write one run's checkpoints at an fsspec address (`s3://bucket/runs/<name>`, `hf://...`, a folder)."""

import contextlib
import io
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from pretraining.checkpoints.format import MARKER
from pretraining.data.streaming.store import Patience, ShortAnswer, Store, reason_of
from pretraining.errors import UserError
from pretraining.outside.files import regular
from pretraining.runtime.durable_files import replacing
from pretraining.runtime.heartbeat import work_done

FIRST_CONTACT_SECONDS = 60.0
"""How long the start waits for a store: if it does not answer then, its address is probably misspelt."""

_BLOCK_BYTES = 32 << 20
"""How much of a file a rank holds in memory during its upload."""
_PIECE_BYTES = 256 << 10
_AHEAD_BYTES = 16 << 20
_CHUNK_BYTES = 8 << 20
_MOST_BLOCKS = 9_000  # S3 takes 10,000 parts a file


class RemoteRun(Store):
    """Reads, writes and lists below `<address>/<name of the run>`, and tries again if the store fails.

    Every method raises `UserError` for an error that waiting cannot repair, or once `patience` is over. Credentials
    come from the environment.
    """

    advice = "check checkpoints.upload"

    def __init__(self, address: str, name: str | None = None, patience: Patience | None = None):
        """address: of the run, or, with its `name`, of the place above it."""
        own = Patience(Patience.here().seconds, refused=_refusal, speaker="checkpoints")
        address = address.rstrip("/")
        super().__init__((address or "/") if name is None else f"{address}/{name}", patience or own)

    @classmethod
    def of_checkpoint(cls, address: str) -> "tuple[RemoteRun, str]":
        """Return the run of a checkpoint's address, and the checkpoint's name."""
        above, _, name = address.rstrip("/").rpartition("/")
        return cls(above), name

    def at_first_contact(self) -> "RemoteRun":
        """Return the same place with less patience."""
        seconds = min(FIRST_CONTACT_SECONDS, self.patience.seconds)
        return RemoteRun(self.address, patience=Patience(seconds, _refusal, "checkpoints"))

    def read_if_there(self, path: str) -> bytes | None:
        """Read a small file; None if there is none."""

        def read() -> bytes | None:
            # Caught here: `ask` would report a missing file as a wrong address.
            with contextlib.suppress(FileNotFoundError):
                return self._whole(path)
            return None

        return self.patience.ask(read, self.where(path))

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
                stop = min(start + _PIECE_BYTES, size)
                piece = self.patience.ask(partial(read, start, stop), self.where(path))
                start += len(piece)
                yield piece
        finally:
            for file in opened:
                file.close()

    def write(self, path: str, open_chunks: Callable[[], Iterable[bytes]], num_bytes: int) -> None:
        """Write a file from its chunks, whole or not at all."""
        # Each attempt opens the chunks again: an iterator that an attempt has used up cannot be read twice.
        self.patience.ask(lambda: self._send(path, open_chunks(), num_bytes), self.where(path))
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

        return self.patience.ask(write, self.where(path))

    def remove(self, path: str) -> None:
        """Remove one file, if it is there."""

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem().rm_file(self.where(path))

        self.patience.ask(remove, self.where(path))

    def remove_checkpoint(self, name: str) -> None:
        """Remove a checkpoint."""
        # The marker first: if the process is killed in between, what is left does not count.
        self.remove(f"{name}/{MARKER}")

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem().rm(self.where(name), recursive=True)

        self.patience.ask(remove, self.where(name))

    def folders(self) -> list[str]:
        """Return the names directly below the run's address; [] if there are none."""

        return list(self.sizes("") or {})

    def check_writable(self) -> None:
        """Write a small file and remove it, so that a `UserError` comes now and not at the first checkpoint."""
        self.write_bytes(".writable", b"yes\n")
        self.remove(".writable")

    def _send(self, path: str, chunks: Iterable[bytes], num_bytes: int) -> None:
        if self.folder is not None:
            # fsspec writes local files in place, so that a reader could see half of a file.
            return _send_to_folder(self.folder / path, chunks)
        system = self._filesystem()
        # Each block is a part of the upload: a large file needs larger ones.
        block = max(_BLOCK_BYTES, num_bytes // _MOST_BLOCKS)
        file = system.open(self.where(path), "wb", block_size=block)
        try:
            for chunk in chunks:
                file.write(chunk)
            file.close()
        except BaseException:  # also an interrupt must not leave half a file as a whole one
            with contextlib.suppress(Exception):
                file.discard()
            # `close`, which the destructor calls too, would complete the file with half of its bytes.
            with contextlib.suppress(AttributeError):
                file.closed = True
            raise


def _send_to_folder(path: Path, chunks: Iterable[bytes]) -> None:
    with replacing(path, "wb") as file:
        for chunk in chunks:
            file.write(chunk)


def _refusal(error: Exception, what: str) -> UserError | None:
    """Return the `UserError` for an answer that asking again will not change; None for any other."""
    reason = reason_of(error)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return UserError(f"{what}: no such bucket or folder ({reason}); make it, or check checkpoints.upload")
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
        return UserError(
            f"{what}: no permission ({reason}); check the rights of the account and the variables that hold its "
            "credentials"
        )
    if isinstance(error, NotImplementedError):
        return UserError(f"{what}: nothing can be written there; choose another checkpoints.upload")
    return None
