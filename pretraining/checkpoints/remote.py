"""One run's checkpoints at an fsspec address (`s3://bucket/runs/<name>`, `hf://...`, a mounted folder)."""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pretraining.checkpoints.format import MARKER
from pretraining.data.streaming.store import Patience, Store, reason_of
from pretraining.errors import UserError
from pretraining.runtime.durable_files import replacing
from pretraining.runtime.heartbeat import work_done

FIRST_CONTACT_SECONDS = 60.0
"""A store that does not answer at the start is more likely misspelt than down."""

_BLOCK_BYTES = 32 << 20
"""How much of a file a rank holds in memory during its upload."""
_MOST_BLOCKS = 9_000  # S3 takes 10,000 parts a file


class RemoteRun(Store):
    """Reads, writes and lists below `<address>/<name of the run>`, patiently. Credentials come from the environment.

    Every method raises `UserError` for what waiting does not mend, or after `patience`.
    """

    advice = "check checkpoints.upload"

    def __init__(self, address: str, name: str, patience: Patience | None = None):
        own = Patience(Patience.here().seconds, refused=_refusal, speaker="checkpoints")
        super().__init__(f"{address.rstrip('/')}/{name}", patience or own)

    def at_first_contact(self) -> "RemoteRun":
        """Return the same place, given up sooner."""
        address, _, name = self.address.rpartition("/")
        seconds = min(FIRST_CONTACT_SECONDS, self.patience.seconds)
        return RemoteRun(address, name, Patience(seconds, _refusal, "checkpoints"))

    def read_if_there(self, path: str) -> bytes | None:
        """Read a small file; None if there is none."""

        def read() -> bytes | None:
            with contextlib.suppress(FileNotFoundError):
                return self._filesystem().cat_file(self.where(path))
            return None

        return self.patience.ask(read, self.where(path))

    def write(self, path: str, open_chunks: Callable[[], Iterable[bytes]], num_bytes: int) -> None:
        """Write a file from its chunks, whole or not at all. `open_chunks` is called for each attempt."""
        self.patience.ask(lambda: self._send(path, open_chunks(), num_bytes), self.where(path))
        work_done()

    def write_bytes(self, path: str, content: bytes) -> None:
        """Write a small file."""
        self.write(path, lambda: [content], len(content))

    def remove(self, path: str) -> None:
        """Remove one file, if it is there."""

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem().rm_file(self.where(path))

        self.patience.ask(remove, self.where(path))

    def remove_checkpoint(self, name: str) -> None:
        """Remove a checkpoint, its marker first: after a kill half-way it does not count."""
        self.remove(f"{name}/{MARKER}")

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem().rm(self.where(name), recursive=True)

        self.patience.ask(remove, self.where(name))

    def folders(self) -> list[str]:
        """Return the names directly below the run's address; [] if there are none."""

        def listed() -> list[str]:
            system = self._filesystem()
            system.invalidate_cache()  # fsspec remembers listings for ever
            with contextlib.suppress(FileNotFoundError):
                return [
                    str(path).rstrip("/").rpartition("/")[2] for path in system.ls(self.address, detail=False)
                ]
            return []

        return self.patience.ask(listed, self.address)

    def check_writable(self) -> None:
        """Write a small file and remove it: a `UserError` now rather than after the first hour."""
        self.write_bytes(".writable", b"yes\n")
        self.remove(".writable")

    def _send(self, path: str, chunks: Iterable[bytes], num_bytes: int) -> None:
        system = self._filesystem()
        if "file" in _protocols(system):
            from fsspec.core import strip_protocol

            # fsspec's own local files grow in place: a reader would see half of them.
            return _send_to_folder(Path(strip_protocol(self.where(path))), chunks)
        block = max(_BLOCK_BYTES, num_bytes // _MOST_BLOCKS)
        file = system.open(self.where(path), "wb", block_size=block)
        try:
            for chunk in chunks:
                file.write(chunk)
            file.close()
        except BaseException:
            _discard(file)
            raise


def _send_to_folder(path: Path, chunks: Iterable[bytes]) -> None:
    with replacing(path, "wb") as file:
        for chunk in chunks:
            file.write(chunk)


def _discard(file: Any) -> None:
    """Drop what was sent: closing the file, as its destructor would, would complete it with half its bytes."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(AttributeError):
        file.closed = True


def _protocols(system: Any) -> tuple[str, ...]:
    return (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)


def _refusal(error: Exception, what: str) -> UserError | None:
    """Return the `UserError` for an answer that asking again will not change; None for any other."""
    reason = reason_of(error)
    if isinstance(error, FileNotFoundError):
        return UserError(f"{what}: no such bucket or folder ({reason}); make it, or check checkpoints.upload")
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
        return UserError(
            f"{what}: no permission ({reason}); check the rights of the account and the variables that hold its "
            "credentials"
        )
    if isinstance(error, NotImplementedError):
        return UserError(f"{what}: nothing can be written there; choose another checkpoints.upload")
    return None
