"""Read the faults of GPUs, memory and disks that the kernel of this machine has logged, and say what they mean."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

LOG = Path("/dev/kmsg")
"""Readable for root, and for all where `kernel.dmesg_restrict` is 0; containers mostly hide it."""
RECORD_BYTES = 8192
"""The kernel gives one record a read, and refuses a smaller buffer."""
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
"""What happened, and what to do, if the kernel ended a process."""

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

    time: float
    """UNIX seconds."""
    text: str
    process: int | None = None
    """The process that the kernel killed for memory."""

    @property
    def xid(self) -> int | None:
        """Return the number of a fault of NVIDIA's driver; None for other lines."""
        found = _XID.search(self.text)
        return int(found["number"]) if found else None

    @property
    def meaning(self) -> tuple[str, str] | None:
        """Return what happened and what to do; None if the line says it itself."""
        if self.process is not None:
            return NO_MEMORY
        return XIDS.get(self.xid or 0)


def kernel_faults(since: float, log: Path = LOG, most: int | None = MOST_FAULTS) -> list[Fault]:
    """Read the newest faults logged since then (UNIX seconds), the newest last; empty if the log cannot be read."""
    try:
        # not blocking: at its end the log would wait for the next message
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    # the log counts from the start of the machine
    started = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    faults: list[Fault] = []
    try:
        while True:
            try:
                record = os.read(descriptor, RECORD_BYTES).decode("utf-8", errors="replace")
            except BrokenPipeError:
                # old records were overwritten while this one was read: the next is there
                continue
            except OSError:
                break
            if not record:
                break
            # priority,number,microseconds,flags;text
            head, _, rest = record.partition(";")
            fields, text = head.split(","), rest.partition("\n")[0]
            if len(fields) < 3 or not fields[2].isdigit():
                continue
            when, killed = started + int(fields[2]) / 1e6, _KILLED.search(text)
            if when >= since and (killed or _XID.search(text) or _OTHERS.search(text)):
                faults.append(Fault(when, text, int(killed["process"]) if killed else None))
    finally:
        os.close(descriptor)
    return faults if most is None else faults[-most:]


def failing_gpus(log: Path = LOG) -> list[tuple[str, int]]:
    """List (PCI address, number) of all errors of GPUs themselves that were logged since the machine started."""
    faults = [fault for fault in kernel_faults(0.0, log, most=None) if fault.xid in OF_DEVICES]
    return sorted({(_XID.search(fault.text)["gpu"], fault.xid) for fault in faults})
