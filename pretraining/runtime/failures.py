"""Keep how each rank failed, in a file of its own: the error, its place in the code, and the kernel's faults.

A rank that is killed writes nothing. What it was doing is in its heartbeat, and why it ended in the kernel's log.
"""

import contextlib
import os
import re
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pretraining.errors import UserError
from pretraining.outside.files import COUNT
from pretraining.outside.masking import masked
from pretraining.runtime.durable_files import append_row, read_rows
from pretraining.runtime.kernel_log import Fault, kernel_faults
from pretraining.runtime.run_folder import RunFolder
from pretraining.schema import fits

LONGEST_ERROR, LONGEST_TRACEBACK = 2000, 20_000
"""Characters; of a traceback the end is kept."""
PACKAGE = Path(__file__).resolve().parents[1]

ENDED_BY_LAUNCHER = "ended by its launcher, because another rank of its machine was gone"
# What ranks meet after another rank is gone: their launcher, gloo, NCCL, torch's store, its watchdog.
_CONSEQUENCES = re.compile(
    rf"{ENDED_BY_LAUNCHER}|"
    r"[Cc]onnection (closed|reset|refused)|Broken pipe|Socket [Cc]losed|ncclRemoteError|ncclSystemError"
    r"|remote process exited|NCCL communicator was aborted|[Tt]imed? ?out.*(collective|store|barrier|rank)"
    r"|DistStoreError|DistNetworkError|DistBackendError.*(remote|abort)|recvValue failed|sendBytes failed"
)


@dataclass(frozen=True)
class Failure:
    """How one rank failed."""

    time: float
    """UNIX seconds, by the clock of its host."""
    rank: int
    host: str
    process: int
    error: str
    """Class and message."""
    where: str
    """The innermost line of this package or an extension: file:line in function."""
    traceback: str
    expected: bool
    """Whether it is an error with a remedy, of one line."""
    faults: tuple[dict, ...] = ()
    """What the kernel of its host had logged since the process began (`kernel_log.Fault`)."""

    @property
    def is_consequence(self) -> bool:
        """Return whether the error only reports that another rank is gone."""
        return not self.expected and bool(_CONSEQUENCES.search(self.error))

    @property
    def kernel(self) -> list[Fault]:
        return [Fault(**fault) for fault in self.faults]


@contextmanager
def kept_failure(run: RunFolder) -> Iterator[None]:
    """Write an error that ends the block into the run folder, on the rank that meets it.

    An error with a remedy is kept only if the run has begun: a refused start leaves its folder as it was.
    """
    began = time.time()
    try:
        yield
    except Exception as error:
        expected = isinstance(error, UserError)
        if run.has_begun or not expected:
            _keep(
                run,
                masked(str(error) if expected else f"{type(error).__name__}: {error}")[:LONGEST_ERROR],
                where=_place(error),
                traceback=masked("".join(traceback.format_exception(error)))[-LONGEST_TRACEBACK:],
                expected=expected,
                faults=tuple(asdict(fault) for fault in kernel_faults(began)),
            )
        raise


def keep_end_by_launcher(run: RunFolder) -> None:
    """Write down that this rank ended because of another one: a rank without such a line is the one that was killed."""
    if run.has_begun:
        _keep(run, ENDED_BY_LAUNCHER, where="", traceback="", expected=False)


def _keep(run: RunFolder, error: str, **details) -> None:
    rank = int(os.environ.get("RANK", "0"))
    failure = Failure(time.time(), rank, socket.gethostname(), os.getpid(), error, **details)
    # a full disk, or a folder that is gone, must not hide the error itself
    with contextlib.suppress(OSError):
        append_row(run.failures(rank), asdict(failure))
        run.fail()


_FAULT = {
    "type": "object",
    "required": ["time", "text"],
    "properties": {
        "time": {"type": "number"},
        "text": {"type": "string"},
        "process": {"type": ["integer", "null"]},
    },
    "additionalProperties": False,
}
_TEXTS = {key: {"type": "string"} for key in ("host", "error", "where", "traceback")}
_NUMBERS = {"time": {"type": "number"}, "rank": COUNT, "process": COUNT, "expected": {"type": "boolean"}}
_ROW = {
    "type": "object",
    "required": [*_TEXTS, *_NUMBERS],
    "properties": {**_TEXTS, **_NUMBERS, "faults": {"type": "array", "items": _FAULT}},
}
"""A failure as it was written; any other row is left out, because a run folder may be a stranger's."""


def read_failures(run: RunFolder) -> list[Failure]:
    """Read the failures of all ranks, in the order of their clocks."""
    rows = [row for path in sorted(run.failures_folder.glob("rank-*.jsonl")) for row in read_rows(path)]
    names = {field.name for field in fields(Failure)}
    known = [{name: row[name] for name in names & row.keys()} for row in rows if fits(row, _ROW)]
    return sorted((Failure(**row) for row in known), key=lambda f: f.time)


def _place(error: BaseException) -> str:
    """Return the innermost frame that is ours; else the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    ours = [frame for frame in frames if PACKAGE in Path(frame.filename).parents]
    frame = (ours or frames)[-1]
    name = Path(frame.filename)
    shown = name.relative_to(PACKAGE.parent) if ours else name
    return f"{shown}:{frame.lineno} in {frame.name}"
