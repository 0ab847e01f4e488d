"""The most memory that training took, to stand beside what the plan predicted."""

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
FORGET_PEAK = "5"
"""Written to CLEAR: the process's peak is what it holds now (proc(5))."""


class PeakMemory:
    """Counts from its making, which must come before the model's, to `of_fullest_rank`.

    On a GPU what torch allocated there; else what the process holds in memory beyond what it held before.
    """

    def __init__(self):
        with contextlib.suppress(OSError):
            CLEAR.write_text(FORGET_PEAK)
        self.held_before = _status_bytes("VmRSS") or 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def of_fullest_rank(self) -> int | None:
        """Bytes; every rank takes part. None where the system does not tell."""
        if torch.cuda.is_available():
            here, device = torch.cuda.max_memory_allocated(), "cuda"
        else:
            here, device = max(0, (_status_bytes("VmHWM") or 0) - self.held_before), "cpu"
        most = torch.tensor(here, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most) or None


def _status_bytes(key: str) -> int | None:
    """A line such as `VmHWM:  123 kB` of the process's status; None where there is no such file."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)
