"""What a plan is judged by, and what the judgement is: the machine and data found, findings, the verdict."""

import os
import sys
from dataclasses import asdict, dataclass, field, replace

from pretraining.errors import UserError
from pretraining.planning.gpus import Gpu
from pretraining.planning.memory.need import memory_need
from pretraining.recipe import Recipe
from pretraining.runtime.run_folder import RunFolder


@dataclass(frozen=True)
class Found:
    """What the machine and the prepared data turned out to be; None for what is not known."""

    gpu_memory_bytes: float | None = None
    """Of one GPU; None too where the processor trains."""
    gpu: Gpu | None = None
    """Its entry in tables/gpus.json, where it has one."""
    has_bf16: bool | None = None
    disk_room_bytes: float | None = None
    """For this run's checkpoints, where the run folder lies: free, or taken by those it has already."""
    host_memory_bytes: float | None = None
    """Of this machine, or what its container allows."""
    ranks_per_host: int = 1
    trains_on_processor: bool = False
    data_tokens: int | None = None
    """Training tokens of the prepared data."""
    continues: bool = False
    """Whether the run has begun already, so that its recipe may not change the curve any more."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or unwise."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


@dataclass(frozen=True)
class Verdict:
    """Refusals stop a run, unless it is forced; warnings are printed."""

    refusals: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)

    def enforce(self, force: bool = False) -> "Verdict":
        """Itself, its warnings printed by rank 0; raises `UserError` with the first refusal, unless forced."""
        if self.refusals and not force:
            raise UserError(f"{self.refusals[0]} (--force goes on regardless)")
        if _is_rank_0():
            for finding in (*self.refusals, *self.warnings):
                print(f"warning: {finding}", file=sys.stderr, flush=True)
        return self

    def keep(self, run: RunFolder, step: int) -> None:
        """Write an event for each refusal that was forced and each warning, on rank 0. step: where the run starts."""
        for kind, findings in {"forced": self.refusals, "warning": self.warnings}.items():
            for finding in findings if _is_rank_0() else ():
                run.add_event(kind, step=step, **asdict(finding))


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


class Case:
    """One question, with what several answers need."""

    def __init__(self, recipe: Recipe, ds_config: dict | None, world_size: int, found: Found):
        self.recipe, self.ds_config, self.world_size, self.found = recipe, ds_config, world_size, found
        self.limit = found.gpu_memory_bytes
        self.need = memory_need(recipe, ds_config, world_size, self.limit)

    def total_with(self, ds_config: dict | None, **training) -> float:
        """Bytes on a GPU under another ds_config or other training keys."""
        recipe = replace(self.recipe, training={**self.recipe.training, **training})
        return memory_need(recipe, ds_config, self.world_size, self.limit).total
