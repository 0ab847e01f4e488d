"""How often to save: what a checkpoint costs, what a failure loses, and the interval at which both are least."""

import math
from dataclasses import asdict, dataclass

from pretraining.planning.constants import table
from pretraining.planning.gpus import Gpu, kept_rates
from pretraining.planning.quantities import duration, num_bytes
from pretraining.planning.run_plan import RunPlan, checkpoints_written, save_every
from pretraining.recipe import Recipe

SECONDS_PER_HOUR = 3600
NOTABLE = 0.002
"""Share of the run's time that another interval must save before a plan proposes it."""


@dataclass(frozen=True)
class CheckpointCost:
    """Bytes and seconds that checkpoints take, and what a failure costs."""

    bytes: float
    every_seconds: float
    step_seconds: float
    steps: int
    """Optimizer steps of the whole run."""
    written: int
    """Checkpoints over the whole run."""
    kept: int
    write_seconds: float
    held_seconds: float
    """How long training stands still for a save: for the copy to host memory, or for all of the writing."""
    failure_seconds: float
    """Mean time between failures of all GPUs together."""
    disk: dict | None = None
    """The disk's rate, if it was measured on this machine (`gpus.kept_rates`); None if it is assumed."""

    def lost_share(self, every_seconds: float) -> float:
        """Return the share of the run's time that is lost to saves and failures, if it saves that often.

        A failure comes half an interval after the last save on average. A save behind training counts once it is
        written. The time to start again is the same at every interval and is left out.
        """
        unwritten = self.write_seconds if self.held_seconds < self.write_seconds else 0.0
        return self.held_seconds / every_seconds + (every_seconds / 2 + unwritten) / self.failure_seconds

    @property
    def best_every_seconds(self) -> float:
        """The interval that loses least (Daly 2006, equation 37, after Young 1974), and no shorter than a save."""
        ratio = self.held_seconds / (2 * self.failure_seconds)
        if ratio >= 1:
            return max(self.failure_seconds, self.write_seconds)
        series = 1 + math.sqrt(ratio) / 3 + ratio / 9
        best = math.sqrt(2 * self.held_seconds * self.failure_seconds) * series - self.held_seconds
        # a save waits for the one before
        return max(best, self.write_seconds, self.step_seconds)

    @property
    def best_every_steps(self) -> int:
        """The same in optimizer steps, in two digits: the prediction is not finer. At most those of the run."""
        steps = max(1.0, self.best_every_seconds / self.step_seconds)
        digits = 10 ** max(0, math.floor(math.log10(steps)) - 1)
        return min(self.steps, round(steps / digits) * digits)

    @property
    def is_worth_changing(self) -> bool:
        """Return whether the best interval would save a notable share of the time."""
        best = self.lost_share(self.best_every_steps * self.step_seconds)
        return self.lost_share(self.every_seconds) - best > NOTABLE

    def to_dict(self) -> dict:
        """Return plain JSON values, derived ones included."""
        return {
            **asdict(self),
            "lost_share": self.lost_share(self.every_seconds),
            "best_every_seconds": self.best_every_seconds,
            "best_every_steps": self.best_every_steps,
            "best_lost_share": self.lost_share(self.best_every_steps * self.step_seconds),
            "is_worth_changing": self.is_worth_changing,
        }


def cost_of_checkpoints(
    plan: RunPlan, recipe: Recipe, step_seconds: float, gpu: Gpu, num_gpus: int
) -> CheckpointCost | None:
    """Return what the checkpoints of a recipe cost; None if it saves none.

    step_seconds: of one optimizer step.
    """
    every = save_every(recipe)
    if every is None:
        return None
    # a longer interval than the run is the run: it saves after its last step
    every = min(every, recipe.num_steps)
    # kept for this kind and number of GPUs: a plan of another cluster must not use this machine's disk
    disk = kept_rates(gpu.name, num_gpus).get("disk_bytes_per_second")
    rates = table("rates")
    write_seconds = plan.checkpoint_bytes / (disk or rates["disk_bytes_per_second"])["value"]
    # each GPU copies its share
    copy_seconds = plan.checkpoint_bytes / num_gpus / gpu.pcie_bytes_per_second
    between = recipe.checkpoints.hours_between_failures
    # one failure stops all GPUs, so that the time between failures shrinks as their number grows
    assumed = rates["gpu_hours_between_failures"]["value"] / num_gpus
    return CheckpointCost(
        bytes=plan.checkpoint_bytes,
        every_seconds=every * step_seconds,
        step_seconds=step_seconds,
        steps=recipe.num_steps,
        written=checkpoints_written(recipe),
        kept=plan.checkpoints_kept,
        write_seconds=write_seconds,
        held_seconds=min(copy_seconds, write_seconds) if recipe.checkpoints.background else write_seconds,
        failure_seconds=(between or assumed) * SECONDS_PER_HOUR,
        disk=disk,
    )


def failure_words(saved: dict) -> str:
    """Write how often a failure is expected, what it and the saves lose, and at which interval that is least."""
    text = f"one every {duration(saved['failure_seconds'])} of all GPUs"
    lost = f"{saved['lost_share']:.2%} of the time lost to it and to saves"
    if not saved["is_worth_changing"]:
        return f"{text}; {lost}"
    best = (
        f"least, {saved['best_lost_share']:.2%}, with --set training.save_steps={saved['best_every_steps']}"
    )
    return f"{text}; {lost}; {best}"


def write_words(saved: dict) -> str:
    """Write how long a checkpoint takes to write, if the disk was measured; nothing if its rate is assumed."""
    disk = saved["disk"]
    if disk is None:
        return ""
    rate = f"{num_bytes(disk['value'])}/s to {disk['where']}, measured here on {disk['date']}"
    return f", {duration(saved['write_seconds'])} to write ({rate})"
