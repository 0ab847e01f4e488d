"""Keep what each rank prints in the run folder: without secrets, and with a limit on the size.

Rank 0 writes console.log, any other rank logs/rank-N.log. Copies what Python writes to stdout and stderr. A pipe below
them would catch the libraries' C code as well, but a process that is killed would lose the last lines, which matter
most. If a process dies in C code (SIGSEGV, SIGBUS, SIGABRT), Python's fault handler writes its stacks there.
"""

import contextlib
import faulthandler
import os
import re
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from pretraining.errors import UserError
from pretraining.outside.files import regular
from pretraining.outside.masking import masked
from pretraining.runtime.run_folder import RunFolder, utc_now

MOST_BYTES = 1_000_000  # of a log; a full console.log becomes console.1.log, in place of the one before it
LONGEST_LINE = 2000  # characters of a line
MOST_WAITING = 1000  # lines that wait in memory for the run folder; the newest are kept
_START = re.compile(rb"^--- \S+Z .*$", re.MULTILINE)


@contextmanager
def kept_console(run: RunFolder) -> Iterator[None]:
    """Copy what the block prints, and the error that ends it, to this rank's log; nothing of a run that is refused."""
    log, screen = ConsoleLog(run, int(os.environ.get("RANK", "0"))), (sys.stdout, sys.stderr)
    run.at_beginning.append(log.begin)
    copies = [Copied(stream, log) for stream in screen]
    sys.stdout, sys.stderr = copies
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        # it is printed only after the block
        log.add(f"error: {error}" if isinstance(error, UserError) else traceback.format_exc())
        raise
    finally:
        sys.stdout, sys.stderr = screen
        for copied in copies:
            copied.finish()
        run.at_beginning.remove(log.begin)
        log.close()


class ConsoleLog:
    """The lines of one start, appended to a rank's log. A line that the disk refuses is left out."""

    def __init__(self, run: RunFolder, rank: int) -> None:
        self.path, self.process, self.lock = run.rank_log(rank), os.getpid(), threading.RLock()
        self.waiting: deque[str] | None = deque(maxlen=MOST_WAITING)
        self.add(f"--- {utc_now()} {' '.join(sys.argv)}")
        self.descriptor: int | None = None
        self.catches_faults = False

    def begin(self) -> None:
        """Write the lines so far, and every further one at once."""
        with self.lock:
            lines, self.waiting = list(self.waiting or ()), None
            if lines:
                self._write(lines)

    def add(self, text: str) -> None:
        """Append lines."""
        # a worker of the data loader has a copy of this object, and is not the one to write
        if os.getpid() != self.process:
            return
        with self.lock:
            lines = [masked(line)[:LONGEST_LINE] for line in text.splitlines()]
            if self.waiting is None:
                return self._write(lines)
            self.waiting.extend(lines)

    def _write(self, lines: list[str]) -> None:
        data = "".join(f"{line}\n" for line in lines).encode("utf-8", errors="backslashreplace")
        # a full disk is reported by what the run itself writes
        with contextlib.suppress(OSError):
            if self.descriptor is None:
                self._open()
            size = os.fstat(self.descriptor).st_size
            if size and size + len(data) > MOST_BYTES:
                self.close()
                self.path.replace(_older(self.path))
                self._open()
            os.write(self.descriptor, data)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor = regular(str(self.path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        # somebody else's handler, such as that of PYTHONFAULTHANDLER, stays
        if not faulthandler.is_enabled():
            faulthandler.enable(self.descriptor)
            self.catches_faults = True

    def close(self) -> None:
        if self.catches_faults:
            faulthandler.disable()
            self.catches_faults = False
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class Copied:
    """A text stream whose lines go to the log too. Everything else is asked of the stream itself."""

    def __init__(self, stream: TextIO, log: ConsoleLog) -> None:
        self.stream, self.log, self.begun = stream, log, ""

    def write(self, text: str) -> int:
        """Write to the stream, without secrets, and every line that is now complete to the log."""
        written = self.stream.write(masked(text))
        *lines, self.begun = (self.begun + text).split("\n")
        # a progress bar draws itself again and again: what is left of it at last is the line
        self.begun = self.begun.rpartition("\r")[2][-LONGEST_LINE:]
        for line in lines:
            if shown := line.rstrip("\r").rpartition("\r")[2]:
                self.log.add(shown)
        return written

    def finish(self) -> None:
        if self.begun.strip():
            self.log.add(self.begun)
        self.begun = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def console_tail(path: Path, most_bytes: int) -> str:
    """Read the last lines of a console.log, with those of the full one before it if there is room."""
    found = b""
    for each in (path, _older(path)):
        missing = most_bytes - len(found)
        if missing > 0 and each.is_file():
            with open(each, "rb", opener=regular) as file:
                file.seek(max(0, each.stat().st_size - missing))
                part = file.read(missing)
                # not the rest of a line
                found = (part if file.tell() <= missing else part.partition(b"\n")[2]) + found
    return found.decode("utf-8", errors="replace")


def cut_log(path: Path, most_bytes: int) -> bytes:
    """Read a log, or its last `most_bytes` below one line that says when that start began and how much is missing."""
    content = path.read_bytes()
    if len(content) <= most_bytes:
        return content
    tail = content[-most_bytes:]
    tail = tail.partition(b"\n")[2] or tail  # not the rest of a line
    missing = len(content) - len(tail)
    # in front, as in a whole log: its readers find starts, and order the logs of several nodes, by this line
    starts = _START.findall(content, 0, missing)
    note = f"[cut: {missing:,} bytes before this are not here]".encode()
    return b" ".join([*starts[-1:], note]) + b"\n" + tail


def _older(path: Path) -> Path:
    return path.with_suffix(f".1{path.suffix}")
