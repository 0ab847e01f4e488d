"""The machine that a plan is judged on, and the verdict: refusals stop a run, warnings are printed as `tight`.

The rules are in gate.py.
"""

import os
import sys
from dataclasses import asdict, dataclass, field

from pretraining.errors import UserError
from pretraining.planning.gpus import Gpu
from pretraining.runtime.run_folder import RunFolder


@dataclass(frozen=True)
class Machine:
    """The machine and the prepared data, as they were found; None for values that are not known."""

    gpu_memory_bytes: float | None = None
    """Bytes of one GPU; also None if the processor trains."""
    gpu: Gpu | None = None
    """Its entry in tables/gpus.json, if it has one."""
    has_bf16: bool | None = None
    disk_room_bytes: float | None = None
    """Bytes for this run's checkpoints on the run folder's disk: free ones, and those that its checkpoints take now."""
    host_memory_bytes: float | None = None
    """Bytes of this machine, or as many as its container allows."""
    ranks_per_host: int = 1
    trains_on_processor: bool = False
    data_tokens: int | None = None
    """Training tokens of the prepared data."""
    continues: bool = False
    """Whether the run has begun already; then its recipe may no longer change the loss curve."""


@dataclass(frozen=True)
class Objection:
    """One thing that is wrong or unwise, and what to do about it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


@dataclass(frozen=True)
class Verdict:
    """Refusals stop a run, unless it is forced; warnings are printed."""

    refusals: list[Objection] = field(default_factory=list)
    warnings: list[Objection] = field(default_factory=list)

    def enforce(self, force: bool = False) -> "Verdict":
        """Print warnings on rank 0 and return itself; raise `UserError` with the first refusal, unless forced."""
        if self.refusals and not force:
            raise UserError(f"{self.refusals[0]} (--force goes on regardless)")
        # every rank judges the same plan: one prints
        if _is_rank_0():
            for objection in (*self.refusals, *self.warnings):
                print(f"warning: {objection}", file=sys.stderr, flush=True)
        return self

    def keep(self, run: RunFolder, step: int) -> None:
        """Write an event for each refusal that was forced and each warning, on rank 0.

        step: the step at which the run starts.
        """
        for kind, objections in {"forced": self.refusals, "warning": self.warnings}.items():
            for objection in objections if _is_rank_0() else ():
                run.add_event(kind, step=step, **asdict(objection))


def _is_rank_0() -> bool:
    # the launcher's variable; a process without a launcher is rank 0
    return os.environ.get("RANK", "0") == "0"
