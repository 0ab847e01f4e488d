"""Throughput of the steps since the last log, against the device's dense peak and the run's budget."""

import math
from dataclasses import dataclass, field
from functools import cache

import torch

from pretraining.errors import UserError
from pretraining.planning.flops import flops_per_token
from pretraining.planning.gpus import FILE, find_gpu
from pretraining.planning.memory.need import recomputed_one_in, recomputed_share
from pretraining.planning.sizes import model_size
from pretraining.recipe import Recipe
from pretraining.recipe.budget import StepSizes
from pretraining.runtime.process_group import rank_and_world_size
from pretraining.training.step_clock import PAUSES, StepClock


@dataclass
class SpeedMeter:
    """What a run's tokens cost, and the clock of its steps."""

    step_sizes: StepSizes
    num_steps: int
    """Of the whole run."""
    world_size: int = 1
    model_flops_per_token: float = 0.0
    """Forward and backward, attention and active experts counted, the causal mask not credited."""
    hardware_flops_per_token: float = 0.0
    """With what activation checkpointing computes again."""
    peak_flops: float | None = None
    """Dense peak of one device in FLOPs per second; None where it is not known, as for a processor."""
    tokens_before: int = 0
    """What earlier, larger or smaller steps have consumed more than as many of these would."""
    clock: StepClock = field(default_factory=StepClock)

    @classmethod
    def of(cls, recipe: Recipe, world_size: int, last_step: int, tokens_before: int = 0) -> "SpeedMeter":
        """The meter of a recipe that ends with `last_step`, on this machine's devices."""
        counted = flops_per_token(model_size(recipe.model), recipe.sequence_length)
        again = recomputed_share(recomputed_one_in(recipe)) * counted.recomputed
        return cls(
            recipe.step_sizes,
            last_step,
            world_size,
            counted.training,
            counted.training + again,
            device_peak_flops(recipe),
            tokens_before,
        )

    def tokens_at(self, step: int) -> int:
        """Tokens that the run has seen after optimizer step `step`."""
        return self.tokens_before + self.step_sizes.tokens_at(step)

    def rates(self, seconds: dict[str, float], before: int, step: int) -> dict[str, float]:
        """Metrics of the steps after `before`, up to `step`, that took {phase: seconds}: means of a step, sums of the
        pauses.
        """
        steps = step - before
        in_steps = sum(value for phase, value in seconds.items() if phase not in PAUSES)
        step_seconds = in_steps / max(steps, 1)
        tokens_per_second = (self.tokens_at(step) - self.tokens_at(before)) / max(in_steps, 1e-9)
        split = {
            "data_wait": seconds.get("data_wait", 0.0),
            "forward_backward": seconds.get("forward", 0.0) + seconds.get("backward", 0.0),
            "optimizer": seconds.get("optimizer", 0.0),
        }
        return {
            "throughput/tokens_per_second": round(tokens_per_second, 1),
            "throughput/tokens_per_second_per_device": round(tokens_per_second / self.world_size, 1),
            "throughput/step_seconds": round(step_seconds, 6),
            **{f"throughput/{name}_seconds": round(s / max(steps, 1), 6) for name, s in split.items()},
            **{f"throughput/{name}_seconds": round(seconds.get(name, 0.0), 6) for name in PAUSES},
            **self.utilization(tokens_per_second),
        }

    def progress(self, step: int, step_seconds: float) -> dict[str, float]:
        """Share of the budget that is spent, and the time left at this speed, pauses not foreseen."""
        done, budget = self.tokens_at(step), self.tokens_at(self.num_steps)
        token_seconds = step_seconds / self.step_sizes.at(max(0, step - 1))
        return {
            "throughput/budget_share": round(done / budget, 6),
            "throughput/seconds_left": round((budget - done) * token_seconds, 1),
        }

    def utilization(self, tokens_per_second: float) -> dict[str, float]:
        """MFU and HFU: shares of the dense peak (PaLM, appendix B)."""
        if self.peak_flops is None:
            return {}
        share = tokens_per_second / (self.world_size * self.peak_flops)
        return {
            "throughput/mfu": round(share * self.model_flops_per_token, 6),
            "throughput/hfu": round(share * self.hardware_flops_per_token, 6),
        }


def device_peak_flops(recipe: Recipe) -> float | None:
    """Dense peak of this rank's GPU at the recipe's precision, from the planner's table; None where unknown."""
    if not torch.cuda.is_available():
        return None
    precision = next((name for name in ("bf16", "fp16", "tf32") if recipe.training.get(name)), "fp32")
    return _known_peak(torch.cuda.get_device_name(), precision)


@cache
def _known_peak(name: str, precision: str) -> float | None:
    """The table's peak; if it has none, rank 0 logs once why there will be no MFU."""
    try:
        return find_gpu(name).peak_flops(precision)
    except UserError:
        why = "is a slice of a GPU, and its peak" if " MIG " in name else f"or its {precision} peak"
        if rank_and_world_size()[0] == 0:
            print(f"no MFU: {name} {why} is not in {FILE}", flush=True)
        return None


def device_memory() -> dict[str, float]:
    """{metric: bytes or share} of this rank's device; empty without a GPU.

    The same metrics on every rank, which gather them; NaN for a utilization that this one does not know.
    """
    if not torch.cuda.is_available():
        return {}
    return {
        "memory/peak_bytes": torch.cuda.max_memory_allocated(),
        "memory/reserved_bytes": torch.cuda.max_memory_reserved(),
        "throughput/gpu_utilization": _utilization(),
    }


def _utilization() -> float:
    try:
        return torch.cuda.utilization() / 100
    except Exception:  # nvidia-ml-py is not installed, or NVML refuses in its own way (MIG, virtual GPUs)
        return math.nan
