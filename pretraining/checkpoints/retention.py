"""Choose which checkpoints of a run are kept once a newer one is committed, and remove the others."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pretraining.checkpoints.folders import remove_checkpoint
from pretraining.checkpoints.format import marker_or_nothing
from pretraining.recipe.sections import Checkpoints
from pretraining.runtime.metric_names import lower_is_better
from pretraining.runtime.run_folder import RunFolder, step_in_name


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept once a newer one is committed: the last, the best, and one every so many steps.

    Once the rate of `warmup_stable_decay` falls, the last checkpoint before that stays too: a longer run, or another
    decay, begins there.

    demote(run, checkpoint, weights_folder) makes a `from_pretrained` folder of a checkpoint, whole or not at all, and
    returns whether the checkpoint may be removed now. Without it, nothing of a removed checkpoint is kept.
    """

    section: Checkpoints
    demote: Callable[[RunFolder, Path, Path], bool] | None = None
    metric: str = "loss"  # the recipe's `evaluation.metric`, by which the best are ranked

    def kept_steps(self, committed: Iterable[tuple[int, Mapping]]) -> set[int]:
        """Return the steps whose checkpoints are kept. committed: step and marker ({} if unreadable) of each."""
        markers = dict(committed)
        newest = sorted(markers, reverse=True)
        rule = self.section
        if rule.keep_last is None:
            return set(newest)
        # the validation after exactly that step; None without one
        measured = {
            step: marker.get("metrics", {}).get(f"eval_{self.metric}") for step, marker in markers.items()
        }
        # Leaves out NaN, which is not equal to itself, so that it never ranks as best.
        ranked = [step for step in newest if measured[step] is not None and measured[step] == measured[step]]
        sign = 1 if lower_is_better(self.metric) else -1
        # The sort is stable: of equally good checkpoints the newer ones come first.
        best = sorted(ranked, key=lambda step: sign * measured[step])[: rule.keep_best]
        every = [step for step in newest if rule.keep_every and step % rule.keep_every == 0]
        stable = [step for step in newest if markers[step].get("before_decay")]
        return {*newest[: rule.keep_last], *best, *every, *stable[:1]}

    def apply(self, run: RunFolder) -> list[Path]:
        """Remove what the rule does not keep, after a commit; returns the checkpoints that the rule does not keep."""
        folders = run.committed()
        kept = self.kept_steps((step_in_name(each), marker_or_nothing(each)) for each in folders)
        # Oldest first, one after the other: if the process is killed, the next call finds the rest.
        removed = [folder for folder in reversed(folders) if step_in_name(folder) not in kept]
        for folder in removed:
            weights = run.weights(step_in_name(folder))
            # The weights exist if an earlier call was killed between the demotion and the removal.
            if self.demote is None or weights.exists() or self.demote(run, folder, weights):
                remove_checkpoint(folder)
        return removed
