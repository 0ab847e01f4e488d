"""Read the files at one fsspec address, whole or by range; ask again if the store fails."""

import errno
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Self, TypeVar

from pretraining.errors import UserError, file_error, reason_of, require
from pretraining.outside.files import is_name, read_bytes, regular

PATIENCE_VARIABLE = "PRETRAINING_DATA_PATIENCE_SECONDS"
PATIENCE_SECONDS = 600.0
"""How long a store may fail before the run ends: longer than the outages that clouds call short."""
FIRST_CONTACT_SECONDS = 60.0
"""The wait at the start: a store that does not answer then has more likely a wrong address than an outage."""

FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.1, 20.0
REPORTED_AFTER_SECONDS = 10.0

CHUNK_BYTES = 8 << 20
"""Bytes of one request: large enough for few requests, small enough that a failed one repeats little."""

_NO_FILE = (errno.ENXIO, errno.ELOOP, errno.EISDIR, errno.ENOTDIR)

Answer = TypeVar("Answer")


def log_line(message: str, speaker: str = "data") -> None:
    print(f"{speaker}: {message}", file=sys.stderr, flush=True)


class ShortAnswer(OSError):
    """A store sent fewer bytes than were asked for: it is asked again, as after any failure."""


class Store:
    """One folder at an address. Picklable; each process, also a forked one, makes its own connection."""

    speaker = "data"
    """Begins the line about a slow store."""
    advice = "check --data_dir"
    """The remedy for an address that fsspec does not understand."""
    not_there = "not there; check --data_dir, or copy the data there again"
    not_allowed = "no permission to read it ({reason}); check the account and its rights"

    def __init__(self, address: str):
        self.address = address
        self.seconds = float(os.environ.get(PATIENCE_VARIABLE, PATIENCE_SECONDS))
        """How long a request is repeated before the run gives up."""
        self._connection = None
        self._connected_by = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_connection": None, "_connected_by": None}

    def at_first_contact(self) -> Self:
        """Return the same place with less patience."""
        made = copy(self)
        made.seconds = min(FIRST_CONTACT_SECONDS, self.seconds)
        return made

    def ask(self, request: Callable[[], Answer], path: str) -> Answer:
        """Repeat `request` until it answers; UserError if waiting cannot help, or after too long a wait."""
        what, start, delay, reported = self.where(path), time.monotonic(), FIRST_DELAY_SECONDS, False
        while True:
            try:
                return request()
            except UserError:  # final: asking again would give the same answer
                raise
            # stores raise errors of many families; `refusal` knows the hopeless ones
            except Exception as error:
                refused = self.refusal(error, what)
                # Something else than a file in a folder that serves as a store.
                if refused is None and isinstance(error, OSError) and error.errno in _NO_FILE:
                    refused = file_error(error)
                if refused is not None:
                    raise refused from error
                waited = time.monotonic() - start
                # No last sleep that would end after the limit.
                if waited + delay > self.seconds:
                    fault = f"the store does not answer ({reason_of(error)}), tried for {waited:.0f} s"
                    remedy = f"start the same command again when it does, or wait longer: {PATIENCE_VARIABLE}"
                    raise UserError(f"{what}: {fault}; {remedy}", on_every_rank=False) from error
                # Once a request: a log needs no line for each try.
                if waited > REPORTED_AFTER_SECONDS and not reported:
                    slow = f"slow or failing store ({reason_of(error)}), trying for {waited:.0f} s now"
                    log_line(f"{what}: {slow}", self.speaker)
                    reported = True
            # A random part, so that many processes do not ask again at the same moment.
            time.sleep(delay * random.uniform(0.5, 1.5))
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)

    def refusal(self, error: Exception, what: str) -> UserError | None:
        """Make the UserError for an answer that asking again will not change; None for any other."""
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            said = self.not_there
        # By name: botocore, which raises it, may not be installed.
        elif isinstance(error, PermissionError) or "Credential" in type(error).__name__:
            said = self.not_allowed
        else:
            return None
        return UserError(f"{what}: {said.format(reason=reason_of(error))}")

    @property
    def folder(self) -> Path | None:
        """The folder that the address means, such as a mounted disk; None for a store of another kind."""
        from fsspec.core import split_protocol

        protocol, path = split_protocol(self.address)
        return Path(path).expanduser().absolute() if protocol in (None, "file", "local") else None

    def where(self, path: str) -> str:
        return f"{self.address}/{path}"

    def _whole(self, path: str) -> bytes:
        if self.folder is not None:
            return read_bytes(self.folder / path)
        return self._filesystem().cat_file(self.where(path))

    def read(self, path: str) -> bytes:
        """Read a small file whole. UserError if it is not there or may not be read."""
        return self.ask(lambda: self._whole(path), path)

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Read the bytes [start, stop) of a file."""

        def part() -> bytes:
            if self.folder is not None:
                with open(self.folder / path, "rb", opener=regular) as file:
                    content = os.pread(file.fileno(), stop - start, start)
            else:
                content = self._filesystem().cat_file(self.where(path), start=start, end=stop)
            # Some stores end an answer early without an error.
            if len(content) != stop - start:
                raise ShortAnswer(f"{len(content):,} of {stop - start:,} bytes came")
            return content

        return self.ask(part, path)

    def chunks(self, path: str, size: int) -> Iterator[bytes]:
        for start in range(0, size, CHUNK_BYTES):
            yield self.read_range(path, start, min(start + CHUNK_BYTES, size))

    def sizes(self, path: str) -> dict[str, int] | None:
        """Return {name: bytes} of the files directly below `path`; None if this kind of store lists nothing."""

        def listed() -> dict[str, int] | None:
            system = self._filesystem()
            system.invalidate_cache()  # fsspec keeps listings for ever
            try:
                found = system.ls(self.where(path), detail=True)
            except NotImplementedError:
                return None
            except FileNotFoundError:
                return {}
            sizes = {each["name"].rpartition("/")[2]: each["size"] for each in found}
            return {name: size for name, size in sizes.items() if is_name(name)}

        return self.ask(listed, path)

    def size(self, path: str) -> int | None:
        """Return the bytes of a file; None if the store does not say. UserError if it is not there."""
        return self.ask(lambda: self._filesystem().size(self.where(path)), path)

    def _filesystem(self):
        # A connection's threads and sockets do not survive a fork.
        if self._connected_by == os.getpid():
            return self._connection
        fsspec = require("fsspec", f"reading {self.address}")
        try:
            self._connection = fsspec.core.url_to_fs(self.address)[0]
        except ImportError as error:
            protocol = self.address.partition("://")[0]
            what = f"{protocol}:// needs another package ({reason_of(error)})"
            remedy = "for s3:// that is pip install -r requirements-remote.txt"
            raise UserError(f"{self.address}: {what}; {remedy}") from error
        except ValueError as error:
            raise UserError(f"{self.address}: {reason_of(error)}; {self.advice}") from error
        self._connected_by = os.getpid()
        return self._connection
