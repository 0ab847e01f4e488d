"""The files of one data set at an fsspec address, read whole or by range, patiently."""

import os
from collections.abc import Iterator

from pretraining.data.packages import require
from pretraining.data.streaming.retries import Patience, reason_of
from pretraining.errors import UserError

CHUNK_BYTES = 8 << 20
"""A request asks for so much: few of them, and one that fails repeats little."""


class ShortAnswer(OSError):
    """A store sent fewer bytes than were asked for; asked again like any failure."""


class Store:
    """One folder at an address. Picklable; each process (a forked one too) makes its own connection."""

    advice = "check --data_dir"
    """What to do about an address that nobody understands."""

    def __init__(self, address: str, patience: Patience | None = None):
        self.address, self.patience = address, patience or Patience.here()
        self._connection = None
        self._connected_by = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_connection": None, "_connected_by": None}

    def where(self, path: str) -> str:
        """The address of one file, for messages."""
        return f"{self.address}/{path}"

    def read(self, path: str) -> bytes:
        """A small file, whole. UserError where it is not there or may not be read."""
        return self.patience.ask(lambda: self._filesystem().cat_file(self.where(path)), self.where(path))

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of a file."""
        return self.patience.ask(lambda: self._range(path, start, stop), self.where(path))

    def chunks(self, path: str, size: int) -> Iterator[bytes]:
        """A file of `size` bytes, in order, in requests of CHUNK_BYTES."""
        for start in range(0, size, CHUNK_BYTES):
            yield self.read_range(path, start, min(start + CHUNK_BYTES, size))

    def _range(self, path: str, start: int, stop: int) -> bytes:
        content = self._filesystem().cat_file(self.where(path), start=start, end=stop)
        if len(content) != stop - start:
            raise ShortAnswer(f"{len(content):,} of {stop - start:,} bytes came")
        return content

    def _filesystem(self):
        if self._connected_by != os.getpid():
            self._connection, self._connected_by = self._connect(), os.getpid()
        return self._connection

    def _connect(self):
        fsspec = require("fsspec", f"reading {self.address}")
        try:
            return fsspec.core.url_to_fs(self.address)[0]
        except ImportError as error:
            protocol = self.address.partition("://")[0]
            raise UserError(
                f"{self.address}: {protocol}:// needs another package ({reason_of(error)}); for s3:// that is "
                "pip install -r requirements-remote.txt"
            ) from error
        except ValueError as error:
            raise UserError(f"{self.address}: {reason_of(error)}; {self.advice}") from error
