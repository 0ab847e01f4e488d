"""Choose which checkpoints to keep once a newer one is committed: the last, the best, and one every so many steps."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pretraining.checkpoints.folders import committed_checkpoints, remove_checkpoint, step_in_name
from pretraining.checkpoints.format import marker_or_nothing
from pretraining.recipe.sections import Checkpoints
from pretraining.runtime.metric_names import lower_is_better
from pretraining.runtime.run_folder import RunFolder

Demote = Callable[[RunFolder, Path, Path], bool]


class Committed(NamedTuple):
    """A committed checkpoint, with what the rule needs of it."""

    step: int
    measured: float | None
    """The metric by which checkpoints are ranked, from the validation after exactly that step; None without one."""


@dataclass(frozen=True)
class Retention:
    """The rule of a recipe's `checkpoints` section.

    demote(run, checkpoint, weights_folder) makes a `from_pretrained` folder of a checkpoint, whole or not at all, and
    returns whether the checkpoint may be removed now. Without it, nothing of a removed checkpoint is kept.
    """

    keep_last: int | None
    """None keeps all."""
    keep_best: int = 0
    """How many of the checkpoints with the best validation are kept."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of it are kept for ever."""
    demote: Demote | None = None
    metric: str = "loss"
    """The validation metric by which the best are ranked."""

    @classmethod
    def of(cls, section: Checkpoints, demote: Demote | None = None, metric: str = "loss") -> "Retention":
        """Return the rule of a `checkpoints` section; `demote` counts only if `demote_to_weights` is on.

        metric: the recipe's `evaluation.metric`.
        """
        rule = section.keep_last, section.keep_best, section.keep_every
        return cls(*rule, demote=demote if section.demote_to_weights else None, metric=metric)

    def kept_steps(self, committed: Iterable[Committed]) -> set[int]:
        """Return the steps whose checkpoints are kept."""
        newest = sorted(committed, reverse=True)
        if self.keep_last is None:
            return {each.step for each in newest}
        # Leaves out NaN, which is not equal to itself, so that it never ranks as best.
        measured = [each for each in newest if each.measured == each.measured]
        measured = [each for each in measured if each.measured is not None]
        sign = 1 if lower_is_better(self.metric) else -1
        # The sort is stable: of equally good checkpoints the newer ones come first.
        best = sorted(measured, key=lambda each: sign * each.measured)[: self.keep_best]
        every = [each for each in newest if self.keep_every and each.step % self.keep_every == 0]
        return {each.step for each in (*newest[: self.keep_last], *best, *every)}

    def to_remove(self, run: RunFolder) -> list[Path]:
        """Return the committed checkpoints that the rule does not keep, oldest first."""
        folders = committed_checkpoints(run)
        kept = self.kept_steps(
            Committed(step_in_name(each), measured_at(each, self.metric)) for each in folders
        )
        return [folder for folder in reversed(folders) if step_in_name(folder) not in kept]

    def apply(self, run: RunFolder) -> list[Path]:
        """Remove what the rule does not keep, after a commit; returns the checkpoints that the rule does not keep."""
        # Oldest first, one after the other: if the process is killed, the next call finds the rest.
        removed = self.to_remove(run)
        for folder in removed:
            weights = run.weights(step_in_name(folder))
            # The weights exist if an earlier call was killed between the demotion and the removal.
            if self.demote is None or weights.exists() or self.demote(run, folder, weights):
                remove_checkpoint(folder)
        return removed


def measured_at(folder: Path, metric: str) -> float | None:
    """Return a metric of the validation after a checkpoint's step; None if it was not measured."""
    return metric_of(marker_or_nothing(folder), metric)


def metric_of(marker: dict, metric: str) -> float | None:
    """Return a metric of the validation after the step of a marker; None if it was not measured."""
    return marker.get("metrics", {}).get(f"eval_{metric}")
