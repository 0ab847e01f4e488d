"""Keep how each rank failed, in a file of its own: the error, its place in the code, and what the kernel has logged.

A rank that is killed writes nothing. What it was doing is in its heartbeat, and why it ended in the kernel's log, which
names faults of GPUs, memory and disks.
"""

import contextlib
import os
import re
import socket
import sysconfig
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pretraining.errors import UserError
from pretraining.outside.files import COUNT, NUMBER, TEXT, object_of
from pretraining.outside.masking import masked
from pretraining.outside.schema import fits
from pretraining.runtime.durable_files import append_row, read_rows
from pretraining.runtime.installation import PACKAGE
from pretraining.runtime.run_folder import RunFolder

LOG = Path("/dev/kmsg")  # for root, or for all if `kernel.dmesg_restrict` is 0; containers mostly hide it
RECORD_BYTES = 8192  # the kernel gives one record a read, and refuses a smaller buffer
MOST_FAULTS = 50

BROKEN = "take the node out of the job and have the GPU checked"
RESET = "reset the GPU or restart the node"
PROGRAM = "mostly a fault of a program: CUDA_LAUNCH_BLOCKING=1 names the kernel"
XIDS = {
    13: ("a kernel ran into an error", PROGRAM),
    31: ("a kernel used an address that it may not use", PROGRAM),
    43: ("the GPU stopped the program", PROGRAM),
    45: ("a program was removed from the GPU", "look for the error before it"),
    48: ("the GPU's memory lost data (double-bit ECC error)", BROKEN),
    61: ("a controller inside the GPU stopped", RESET),
    62: ("a controller inside the GPU stopped", RESET),
    63: ("a row of the GPU's memory will be replaced by a spare one", RESET),
    64: ("a row of the GPU's memory could not be replaced", BROKEN),
    74: ("an NVLink link failed", BROKEN),
    79: ("the GPU has fallen off the bus", BROKEN),
    92: ("the GPU's memory corrects many errors", BROKEN),
    94: ("the GPU's memory lost data of one program", RESET),
    95: ("the GPU's memory lost data, perhaps of several programs", RESET),
    109: ("the GPU could not change between programs in time", RESET),
    119: ("the GPU's own processor did not answer the driver", RESET),
    120: ("the GPU's own processor failed", RESET),
    154: ("the driver asks for a reset of the GPU or its node", RESET),
}
"""{number of NVIDIA's driver faults: (what happened, what to do)}, after NVIDIA's catalogue of Xid errors"""

NO_MEMORY = (
    "the machine had no memory left, and the kernel killed a process",
    "give it more memory, or take fewer loader workers, no offload, or less of it in host memory",
)

OF_DEVICES = {48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140}
"""Those that are errors of the device, not of a program: memory, links, firmware, a lost GPU (NVIDIA, Xid Errors)."""

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<gpu>[^)]+)\): (?P<number>\d+)")
_KILLED = re.compile(r"[Oo]ut of memory: Killed process (?P<process>\d+)")
_OTHERS = re.compile(
    r"nvidia-nvswitch.*SXid|Machine [Cc]heck|Hardware Error|I/O error|remounting filesystem read-only"
    r"|(mlx5|ib_|infiniband).*(error|[Ll]ink down|fatal)|[Ll]ink is [Dd]own"
)


@dataclass(frozen=True)
class Fault:
    """One line of the kernel's log that may explain why a process ended."""

    time: float  # UNIX seconds
    text: str
    process: int | None = None

    @property
    def xid(self) -> int | None:
        """The number of a fault of NVIDIA's driver; None for other lines."""
        found = _XID.search(self.text)
        return int(found["number"]) if found else None

    @property
    def meaning(self) -> tuple[str, str] | None:
        """What happened and what to do; None if the line says it itself."""
        return XIDS.get(self.xid or 0) if self.process is None else NO_MEMORY


def kernel_faults(since: float, log: Path = LOG, most: int | None = MOST_FAULTS) -> list[Fault]:
    """Read the newest faults logged since then (UNIX seconds), the newest last; empty if the log cannot be read."""
    # the log counts from the start of the machine
    started = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    faults: list[Fault] = []

    def opened(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NONBLOCK)  # at its end the log would wait for the next message

    with contextlib.suppress(OSError), open(log, "rb", buffering=0, opener=opened) as file:
        while True:
            try:
                record = file.read(RECORD_BYTES)
            except BrokenPipeError:
                continue  # old records were overwritten while this one was read: the next is there
            if not record:
                break
            # priority,number,microseconds,flags;text
            head, _, rest = record.decode("utf-8", errors="replace").partition(";")
            fields, text = head.split(","), rest.partition("\n")[0]
            if len(fields) < 3 or not fields[2].isdigit():
                continue
            when, killed = started + int(fields[2]) / 1e6, _KILLED.search(text)
            if when >= since and (killed or _XID.search(text) or _OTHERS.search(text)):
                faults.append(Fault(when, text, int(killed["process"]) if killed else None))
    return faults if most is None else faults[-most:]


def failing_gpus(log: Path = LOG) -> list[tuple[str, int]]:
    """List (PCI address, number) of all errors of GPUs themselves that were logged since the machine started."""
    faults = [fault for fault in kernel_faults(0.0, log, most=None) if fault.xid in OF_DEVICES]
    return sorted({(_XID.search(fault.text)["gpu"], fault.xid) for fault in faults})


_LIBRARIES = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]
LONGEST_ERROR, LONGEST_TRACEBACK = 2000, 20_000  # characters; of a traceback the end is kept

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
    time: float  # UNIX seconds, by the clock of its host
    rank: int
    host: str
    process: int
    error: str  # class and message
    where: str  # the innermost line of this package or an extension: file:line in function
    traceback: str
    expected: bool  # whether it is an error with a remedy, of one line
    faults: tuple[Fault, ...] = ()  # what the kernel of its host had logged since the process began

    @property
    def is_consequence(self) -> bool:
        return not self.expected and bool(_CONSEQUENCES.search(self.error))


def short(error: str) -> str:
    """Return the first line of an error, at most 160 characters of it."""
    line = error.partition("\n")[0]
    return line if len(line) <= 160 else f"{line[:159]}…"


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
            said = masked(str(error) if expected else f"{type(error).__name__}: {error}")[:LONGEST_ERROR]
            text = masked("".join(traceback.format_exception(error)))[-LONGEST_TRACEBACK:]

            # the innermost frame that is ours or an extension's; else the innermost of all
            frames, where = traceback.extract_tb(error.__traceback__), ""
            ours = [frame for frame in frames if not _of_a_library(frame.filename)]
            if frames:
                frame = (ours or frames)[-1]
                path = Path(frame.filename)
                name = path.relative_to(PACKAGE.parent) if PACKAGE in path.parents else path
                where = f"{name}:{frame.lineno} in {frame.name}"
            _keep(run, said, where, text, expected, tuple(kernel_faults(began)))
        raise


def _of_a_library(file: str) -> bool:
    parents = Path(file).parents
    # this package may be installed beside the libraries; "<string>" is code without a file
    return PACKAGE not in parents and (file.startswith("<") or any(place in parents for place in _LIBRARIES))


def keep_end_by_launcher(run: RunFolder) -> None:
    """Write down that this rank ended because of another one: a rank without such a line is the one that was killed."""
    if run.has_begun:
        _keep(run, ENDED_BY_LAUNCHER, "", "", False)


def _keep(run: RunFolder, error: str, *details: Any) -> None:
    rank = int(os.environ.get("RANK", "0"))
    failure = Failure(time.time(), rank, socket.gethostname(), os.getpid(), error, *details)
    # a full disk, or a folder that is gone, must not hide the error itself
    with contextlib.suppress(OSError):
        append_row(run.failures(rank), asdict(failure))
        run.fail()


_FAULT = object_of({"time": NUMBER, "text": TEXT}, {"process": {"type": ["integer", "null"]}})
_FAULT["additionalProperties"] = False
_TEXTS = dict.fromkeys(("host", "error", "where", "traceback"), TEXT)
_NUMBERS = {"time": NUMBER, "rank": COUNT, "process": COUNT, "expected": {"type": "boolean"}}
_ROW = object_of({**_TEXTS, **_NUMBERS}, {"faults": {"type": "array", "items": _FAULT}})
"""A failure as it was written; any other row is left out, because a run folder may be a stranger's."""


def read_failures(run: RunFolder) -> list[Failure]:
    """Read the failures of all ranks, in the order of their clocks."""
    rows = [row for path in sorted(run.failures_folder.glob("rank-*.jsonl")) for row in read_rows(path)]
    names = {field.name for field in fields(Failure)}
    known = [{name: row[name] for name in names & row.keys()} for row in rows if fits(row, _ROW)]
    faults = [tuple(Fault(**fault) for fault in row.get("faults", ())) for row in known]
    failures = [Failure(**{**row, "faults": each}) for row, each in zip(known, faults, strict=True)]
    return sorted(failures, key=lambda failure: failure.time)
