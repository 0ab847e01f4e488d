"""What the sections of a recipe ask of each other; each function raises `UserError` for the first key that is wrong."""

from collections.abc import Sequence

from pretraining.errors import nearest
from pretraining.metric_names import LOWER_IS_BETTER
from pretraining.recipe.data import Data
from pretraining.recipe.model import CROSSES_DOCUMENTS, EXACT, Model
from pretraining.recipe.sections import Evaluation, Loss
from pretraining.recipe.training import Training
from pretraining.schema import problem

BY_SOURCE = ("loss", "bits_per_byte")
"""What a validation measures of each of several sources."""


def check_documents(data: Data, model: Model, where: str) -> None:
    """Documents are kept apart only by a type and a kernel for which that is known to be exact."""
    if not data.document_masking:
        return
    name = model.get("attn_implementation")
    if not model.is_exact:
        what = f"is tested for {', '.join(EXACT)} alone, not for {model.model_type}; set it to false"
        raise problem(where, "data.document_masking", what)
    # a name with a slash is a kernel of the hub, which nothing here has tested
    if name is not None and (name in CROSSES_DOCUMENTS or "/" in name):
        what = f"is {name}, which is not known to keep documents apart, as data.document_masking wants; leave it out"
        raise problem(where, "model.attn_implementation", what)


def check_vocabulary(data: Data, model: Model, where: str) -> None:
    """A tokenizer that is trained here has no more tokens than the model has rows."""
    trained = data.tokenizer["train_vocab_size"] if isinstance(data.tokenizer, dict) else 0
    if trained > model.vocab_size:
        what = f"is {trained}, more than model.vocab_size {model.vocab_size}"
        raise problem(where, "data.tokenizer.train_vocab_size", what)


def check_router_loss(loss: Loss, model: Model, where: str) -> None:
    """The routers' logits are there if their loss is wanted."""
    if loss.router_z_loss and not model.get("output_router_logits"):
        what = "needs a mixture of experts with model.output_router_logits true; set it, or leave router_z_loss out"
        raise problem(where, "loss.router_z_loss", what)


def check_kernels(training: Training, model: Model, where: str) -> None:
    """Liger has kernels for the type."""
    if training.use_liger_kernel and model.model_type == "gpt2":
        what = "is true, and Liger has no kernels for gpt2: set it to false, or take model_type llama"
        raise problem(where, "training.use_liger_kernel", what)


def check_profile(steps: int | list[int], num_steps: int, where: str) -> None:
    """The steps to trace are among those that the run has."""
    last = steps[-1] if isinstance(steps, list) else steps
    if last > num_steps:
        raise problem(where, "monitors.profile.steps", f"is {steps}, but the run has {num_steps} steps")


def check_evaluation(
    evaluation: Evaluation, keep_best: int, training: Training, sources: Sequence[str], where: str
) -> None:
    """What is judged must be measured, when it is judged.

    keep_best: `checkpoints.keep_best`. sources: what the data's sources are called.
    """
    _check_validated_saves(keep_best, training, where)
    _check_patience(evaluation.patience, training, where)
    _check_metric(evaluation, sources, where)
    _check_cadence(evaluation.task_steps, training, where)


def _check_validated_saves(keep_best: int, training: Training, where: str) -> None:
    """The best checkpoints are ranked by the validation loss of their own step, so each save needs a validation."""
    strategies = {training.save_strategy, training.eval_strategy}
    save, evaluate = training.save_steps, training.steps_between_validations
    # a save between two validations has no loss of its own step
    if keep_best and (strategies != {"steps"} or save % evaluate):
        what = (
            f"is {keep_best}, but not every save is validated: set eval_strategy and save_strategy to steps, and "
            f"training.save_steps (now {save}) to a multiple of training.eval_steps (now {evaluate})"
        )
        raise problem(where, "checkpoints.keep_best", what)


def _check_patience(patience: int | None, training: Training, where: str) -> None:
    if patience is not None and training.eval_strategy == "no":
        what = f"is {patience}, but nothing is validated while training: set training.eval_strategy to steps"
        raise problem(where, "evaluation.patience", what)


def _check_metric(evaluation: Evaluation, sources: Sequence[str], where: str) -> None:
    """It is measured by every validation; that of a source only if there are several."""
    metric, task_steps = evaluation.metric, evaluation.task_steps
    # scores are <task>/<metric>; the source of a loss is known by its name, so names must differ
    is_score, several = "/" in metric, len(set(sources)) == len(sources) > 1
    by_source = [f"{name}_{kind}" for name in sources for kind in BY_SOURCE] if several else []
    if not is_score and metric not in (*LOWER_IS_BETTER, *by_source):
        near = nearest(metric, (*LOWER_IS_BETTER, *by_source, "hellaswag/acc", "hellaswag/acc_norm"))
        known = "loss, perplexity, bits_per_byte, <source>_loss of several sources or <task>/<metric>"
        raise problem(where, "evaluation.metric", f"is {metric!r}; it must be {known}{near}")
    if is_score and task_steps is not None:
        what = f"is {task_steps}, but evaluation.metric {metric} is wanted at each validation: leave it out"
        raise problem(where, "evaluation.task_steps", what)
    if is_score and not evaluation.tasks and evaluation.hellaswag is None:
        what = (
            f"is {metric!r}, but nothing scores it: name evaluation.tasks, or data for evaluation.hellaswag"
        )
        raise problem(where, "evaluation.metric", what)


def _check_cadence(task_steps: int | None, training: Training, where: str) -> None:
    every = training.steps_between_validations
    if task_steps is not None and training.eval_strategy == "steps" and task_steps % every:
        what = (
            f"is {task_steps}, no multiple of training.eval_steps {every}: scores come with the validations"
        )
        raise problem(where, "evaluation.task_steps", what)
