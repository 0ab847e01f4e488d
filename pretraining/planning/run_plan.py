"""The RunPlan: what a recipe will take, known before anything is built; and the verdict on it (rules: gate.py)."""

import math
import os
import sys
from dataclasses import asdict, dataclass, field

from pretraining.ds_config import Degrees
from pretraining.errors import UserError
from pretraining.planning.gpus import Gpu
from pretraining.planning.memory.states import checkpoint_bytes, state_of
from pretraining.planning.setup import FP32, Setup
from pretraining.planning.sizes import model_size
from pretraining.recipe import Recipe
from pretraining.recipe.data import num_unique_tokens
from pretraining.recipe.training import steps_of
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
        """Write an event for each forced refusal and each warning, on rank 0. step: at which the run starts."""
        for kind, objections in {"forced": self.refusals, "warning": self.warnings}.items():
            for objection in objections if _is_rank_0() else ():
                run.add_event(kind, step=step, **asdict(objection))


def _is_rank_0() -> bool:
    # the launcher's variable; a process without a launcher is rank 0
    return os.environ.get("RANK", "0") == "0"


@dataclass(frozen=True)
class RunPlan:
    """Values that follow from a recipe, a ds_config and a number of ranks, without running anything."""

    setup: Setup
    accumulation_steps: int
    checkpoint_bytes: int
    checkpoints_kept: int
    """Resumable checkpoints on disk once the run is over."""
    weights_kept: int
    """Earlier checkpoints of which the weights alone stay (`checkpoints.demote_to_weights`)."""
    export_bytes: int
    """Bytes of the exported model, in the precision that holds the weights."""
    unique_tokens: int
    """Tokens that are read at least once: what has to be prepared for training."""
    data_bytes: int
    """Bytes of the token shards that the run reads, if it reads each token once."""
    machine: Machine | None = None
    """Machine on which the run is; None for a plan on paper."""
    verdict: Verdict | None = None
    """Refusals and warnings of the plan on that machine."""
    predicted: dict = field(default_factory=dict)
    """Result of `comparison.predicted` on that machine; empty until the plan is judged (`gate.judge_plan`)."""

    @property
    def ds_config(self) -> dict | None:
        return self.setup.ds_config

    @property
    def world_size(self) -> int:
        return self.setup.world_size

    @property
    def degrees(self) -> Degrees:
        return self.setup.degrees

    @property
    def zero_stage(self) -> int | None:
        # the stage without DeepSpeed is 0, but here it differs from stage 0
        return self.setup.stage if self.ds_config else None

    @property
    def layout(self) -> dict:
        # a checkpoint loads at any other layout; this one says which files a node needs of it
        split = {name: size for name, size in self.degrees._asdict().items() if size > 1}
        return {"world_size": self.world_size, "zero_stage": self.zero_stage, **split}

    @property
    def parameters(self) -> int:
        return self.setup.parameters

    @property
    def tokens_per_parameter(self) -> float:
        """Training tokens per parameter; about 20 is compute-optimal (Hoffmann et al. 2022)."""
        return self.setup.tokens / self.parameters

    @property
    def checkpoint_disk_bytes(self) -> int:
        """Disk that the kept checkpoints take, with room for the one being written before an old one goes."""
        # the new checkpoint is complete before an old one is deleted
        return self.checkpoint_bytes * (self.checkpoints_kept + 1) if self.checkpoints_kept else 0

    @property
    def saved_bytes(self) -> int:
        """The same with the weights of earlier checkpoints, which stay until the end."""
        return self.checkpoint_disk_bytes + self.weights_kept * self.export_bytes

    @property
    def disk(self) -> dict[str, int]:
        """Bytes on the run's disk by what they are for, with as many token shards as the run reads."""
        parts = {
            "checkpoints kept": self.checkpoints_kept * self.checkpoint_bytes,
            "one being written": min(1, self.checkpoints_kept) * self.checkpoint_bytes,
            "weights of earlier checkpoints": self.weights_kept * self.export_bytes,
            "token shards": self.data_bytes,
            "export": self.export_bytes,
        }
        # plans print only what the run writes or reads
        return {name: size for name, size in parts.items() if size}

    @property
    def disk_bytes(self) -> int:
        return sum(self.disk.values())

    def disk_bytes_of_node(self, ranks: int) -> int:
        """Bytes on a node's own disk, if no disk is shared: its ranks' files, all token shards, rank 0's export."""
        of_ranks = -(-self.checkpoint_disk_bytes * min(ranks, self.world_size) // self.world_size)
        return of_ranks + self.data_bytes + self.export_bytes

    def to_dict(self) -> dict:
        """Return the plan as plain JSON values, derived ones included."""
        setup, recipe = self.setup, self.setup.recipe
        saved = ("checkpoint_bytes", "checkpoints_kept", "weights_kept", "export_bytes", "unique_tokens")
        derived = ("parameters", "tokens_per_parameter", "checkpoint_disk_bytes", "disk", "disk_bytes")
        return {
            "name": recipe.name,
            "deepspeed": recipe.deepspeed,
            "zero_stage": self.zero_stage,
            "size": asdict(model_size(recipe.model)),
            "tokens": recipe.num_tokens,
            "tokens_per_step": recipe.tokens_per_step,
            "steps": recipe.num_steps,
            # number of first steps that have fewer tokens
            "ramp_steps": recipe.step_sizes.ramp_steps,
            "sequence_length": recipe.sequence_length,
            "world_size": self.world_size,
            "micro_batch": recipe.micro_batch,
            "accumulation_steps": self.accumulation_steps,
            # forward and backward, recomputation not counted
            "training_flops": recipe.num_tokens * setup.flops.training,
            # bytes per rank
            "model_state": state_of(setup).to_dict(),
            **{name: getattr(self, name) for name in (*saved, "data_bytes", "predicted", *derived)},
        }


def build_run_plan(setup: Setup) -> RunPlan:
    """Derive the plan of a recipe on so many ranks; `UserError` if they do not divide the tokens per step."""
    recipe = setup.recipe
    unique = num_unique_tokens(recipe.data, recipe.num_samples, recipe.sequence_length)
    every, rule, width = save_every(recipe), recipe.checkpoints, setup.precision.weights
    kept = written = checkpoints_written(recipe)
    if every and rule.keep_last is not None:
        # `keep_every` counts steps, and only steps that are saved can be kept
        for_ever = recipe.num_steps // math.lcm(every, rule.keep_every) if rule.keep_every else 0
        before_decay = recipe.decay_start(recipe.num_steps) is not None
        # one checkpoint may be both the best and the newest: an upper bound
        kept = min(rule.keep_last + rule.keep_best + for_ever + before_decay, written)
    return RunPlan(
        setup,
        accumulation_steps=setup.accumulation,
        checkpoint_bytes=checkpoint_bytes(recipe, width),
        checkpoints_kept=kept,
        # every checkpoint that is not kept whole
        weights_kept=written - kept if rule.demote_to_weights else 0,
        export_bytes=width * setup.parameters + (FP32 - width) * sum(tensor.numel for tensor in setup.wide),
        unique_tokens=unique,
        # of a token in its shard
        data_bytes=unique * (2 if recipe.model.vocab_size <= 2**16 else 4),
    )


def save_every(recipe: Recipe) -> int | None:
    """Return the steps from one checkpoint to the next; the whole run without `steps`, None if none is saved."""
    strategy, every = recipe.training.save_strategy, recipe.training.save_steps
    if strategy != "steps":
        return None if strategy == "no" else max(1, recipe.num_steps)
    return steps_of(every, recipe.num_steps)


def checkpoints_written(recipe: Recipe) -> int:
    """Return checkpoints over the whole run: one every `save_steps`, and one after the last step."""
    every = save_every(recipe)
    # rounded up, for the one after the last step
    return -(-recipe.num_steps // every) if every else 0
