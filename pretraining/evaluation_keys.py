"""What a recipe says of evaluation must fit its cadences: what is judged is measured, when it is judged."""

from collections.abc import Sequence

from pretraining.errors import nearest
from pretraining.metric_names import LOWER_IS_BETTER
from pretraining.schema import problem

BY_SOURCE = ("loss", "bits_per_byte")
"""What a validation measures of each of several sources."""


def check_evaluation(
    evaluation: dict, keep_best: int, training: dict, sources: Sequence[str], where: str
) -> None:
    """Raise `UserError` for the first key of `evaluation`, or `checkpoints.keep_best`, that cannot be kept.

    sources: what the data's sources are called.
    """
    _check_validated_saves(keep_best, training, where)
    _check_patience(evaluation["patience"], training, where)
    _check_metric(evaluation, sources, where)
    _check_cadence(evaluation["task_steps"], training, where)


def _check_validated_saves(keep_best: int, training: dict, where: str) -> None:
    """The best are told by the validation loss after their own step: each save needs one."""
    strategies = {training.get("save_strategy", "steps"), training.get("eval_strategy", "no")}
    save = training.get("save_steps", 500)
    evaluate = _eval_steps(training)
    if keep_best and (strategies != {"steps"} or save % evaluate):
        what = (
            f"is {keep_best}, but not every save is validated: set eval_strategy and save_strategy to steps, and "
            f"training.save_steps (now {save}) to a multiple of training.eval_steps (now {evaluate})"
        )
        raise problem(where, "checkpoints.keep_best", what)


def _eval_steps(training: dict) -> int:
    """Steps between validations, by TrainingArguments' own defaults."""
    return training.get("eval_steps") or training.get("logging_steps", 500)


def _check_patience(patience: int | None, training: dict, where: str) -> None:
    if patience is not None and training.get("eval_strategy", "no") == "no":
        what = f"is {patience}, but nothing is validated while training: set training.eval_strategy to steps"
        raise problem(where, "evaluation.patience", what)


def _check_metric(evaluation: dict, sources: Sequence[str], where: str) -> None:
    """It is measured by every validation; that of a source only if there are several."""
    metric, task_steps = evaluation["metric"], evaluation["task_steps"]
    is_score, several = "/" in metric, len(set(sources)) == len(sources) > 1
    by_source = [f"{name}_{kind}" for name in sources for kind in BY_SOURCE] if several else []
    if not is_score and metric not in (*LOWER_IS_BETTER, *by_source):
        near = nearest(metric, (*LOWER_IS_BETTER, *by_source, "hellaswag/acc", "hellaswag/acc_norm"))
        known = "loss, perplexity, bits_per_byte, <source>_loss of several sources or <task>/<metric>"
        raise problem(where, "evaluation.metric", f"is {metric!r}; it must be {known}{near}")
    if is_score and task_steps is not None:
        what = f"is {task_steps}, but evaluation.metric {metric} is wanted at each validation: leave it out"
        raise problem(where, "evaluation.task_steps", what)
    if is_score and not evaluation["tasks"] and evaluation["hellaswag"] is None:
        what = (
            f"is {metric!r}, but nothing scores it: name evaluation.tasks, or data for evaluation.hellaswag"
        )
        raise problem(where, "evaluation.metric", what)


def _check_cadence(task_steps: int | None, training: dict, where: str) -> None:
    every = _eval_steps(training)
    if task_steps is not None and training.get("eval_strategy") == "steps" and task_steps % every:
        what = (
            f"is {task_steps}, no multiple of training.eval_steps {every}: scores come with the validations"
        )
        raise problem(where, "evaluation.task_steps", what)
