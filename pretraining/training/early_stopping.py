"""Early stopping: a run ends in order once its validations have not become better for a while."""

from collections.abc import Iterable

from transformers import TrainerCallback

from pretraining.metric_names import is_better, worst_value
from pretraining.runtime.run_folder import RunFolder


class EarlyStopping(TrainerCallback):
    """As transformers' own callback judges, but by the logged validations alone.

    A run that was killed and started again therefore stops where the undisturbed one does, and does not go on
    from the checkpoint at which it had stopped. The numbers are the same on every rank, so is the decision.

    metric: of the validation, as `loss`. patience: validations in a row that are not better than the best before
    them by more than `min_improvement`.
    """

    def __init__(self, run: RunFolder, metric: str, patience: int, min_improvement: float):
        self.run, self.metric = run, f"eval_{metric}"
        self.patience, self.min_improvement = patience, min_improvement

    def on_train_begin(self, args, state, control, **kwargs):
        if self._is_over(state):
            control.should_training_stop = True

    def on_evaluate(self, args, state, control, **kwargs):
        if state.global_step >= state.max_steps or not self._is_over(state):
            return
        control.should_training_stop = control.should_save = True
        if state.is_world_process_zero:
            values = self._values(state)
            best = best_step(values, self.metric)
            details = {"metric": self.metric.removeprefix("eval_"), "best": values[best], "best_step": best}
            self.run.add_event("early_stop", step=state.global_step, **details, patience=self.patience)

    def _values(self, state) -> dict[int, float]:
        """{step: value} of the validations so far, in order; one that was repeated counts once."""
        return {row["step"]: row[self.metric] for row in state.log_history if self.metric in row}

    def _is_over(self, state) -> bool:
        worse = validations_without_gain(self._values(state).values(), self.metric, self.min_improvement)
        return worse >= self.patience


def early_stopping(run: RunFolder, section: dict) -> list[EarlyStopping]:
    """What the recipe's `evaluation` section asks for: one callback, or none."""
    if section["patience"] is None:
        return []
    return [EarlyStopping(run, section["metric"], section["patience"], section["min_improvement"])]


def validations_without_gain(values: Iterable[float], metric: str, min_improvement: float) -> int:
    """How many of the last `values` in a row were no gain; a NaN never is, unless it is the first.

    As transformers judges: the best is the best so far, however small its lead over the one before it.
    """
    best, without_gain = worst_value(metric), -1
    for value in values:
        better = is_better(metric, value, best)
        gained = better and abs(value - best) > min_improvement
        without_gain = 0 if gained or without_gain < 0 else without_gain + 1
        best = value if better else best
    return max(0, without_gain)


def best_step(values: dict[int, float], metric: str) -> int:
    """The step of the best value, the first of equals."""
    best, best_value = min(values), worst_value(metric)
    for step, value in values.items():
        if is_better(metric, value, best_value):
            best, best_value = step, value
    return best
