"""Shrink a recipe to a number of tokens, to try all of a run in minutes: `--limit_tokens`.

The model stays what it is. Steps become smaller, so that there are still enough of them for a schedule, validations and
checkpoints. What is counted in steps or tokens shrinks in proportion. Data and run get names of their own, so that
neither takes the place of the real ones.
"""

import json
from typing import TYPE_CHECKING

from pretraining.errors import UserError
from pretraining.recipe.data import shares_are_written

if TYPE_CHECKING:
    from pretraining.recipe.recipe import Recipe

STEPS = 100
"""A limited run has at least so many steps, as long as a step still has `STEP_SEQUENCES`."""
STEP_SEQUENCES = 8
"""A step keeps about so many sequences, so that the ranks of one machine can share it."""
VALIDATIONS = 4
"""Validations and checkpoints of a limited run, at least."""
LOGS = 20

VALIDATION_DOCUMENTS, LONG_DOCUMENT = 5, 10_000
"""Validation gets about so many documents, at least, if they have so many tokens: the share of a long run may have
none of few documents."""
LEAST_VALIDATION, MOST_VALIDATION = 0.02, 0.2
"""Share of the documents that validation gets, unless the recipe gives it more."""

SCHEDULE_STEPS = ("num_decay_steps", "num_stable_steps")
"""Keywords of `training.lr_scheduler_kwargs` that count steps."""


def limited(values: dict, recipe: "Recipe", tokens: int, written: set[str], ranks: int = 1) -> dict:
    """Return the values of a recipe for a run of at most `tokens` tokens; the same values if it has no more.

    recipe: built from `values`. written: dotted keys that the command line sets; what it says of the size of a step and
    of cadences stays.

    Raises:
        UserError: a step of the size that the command line sets has more tokens.
    """
    if tokens >= recipe.budget.tokens:
        return values
    # a step: a divisor of the full one, of which the limit holds `STEPS`
    step = recipe.tokens_per_step
    if "budget.tokens_per_step" not in written:
        samples, sequences = recipe.samples_per_step, tokens // recipe.sequence_length
        # a limit of a few sequences is one step at least
        most = max(sequences // STEPS, min(STEP_SEQUENCES, sequences), 1)
        fitting = next(size for size in range(min(most, samples), 0, -1) if samples % size == 0)
        step = fitting * recipe.sequence_length
    if step > tokens:
        raise UserError(
            f"--limit_tokens {tokens}: is less than one step of {step:,} tokens; raise it, or lower "
            "budget.tokens_per_step or the sequence length"
        )
    steps = tokens // step
    # A deep copy: lists and objects inside are changed.
    changed = json.loads(json.dumps(values))
    changed["name"] = f"{recipe.name}-limit-{tokens}"
    budget, share = changed["budget"], steps * step / recipe.budget.tokens
    budget.update(tokens=steps * step, tokens_per_step=step)
    # There is no room for it: all steps are as small as its first ones.
    budget.pop("ramp", None)
    for key in ("warmup_tokens", "decay_tokens"):
        if (of_full := getattr(recipe.budget, key)) is not None:
            budget[key] = max(1, int(of_full * share) // step) * step
    _limit_data(changed["data"], recipe, tokens, written)
    training, share = changed["training"], steps / recipe.num_steps
    keywords = training.get("lr_scheduler_kwargs") or {}
    keywords.update({key: _fewer(keywords[key], share) for key in SCHEDULE_STEPS if key in keywords})
    if training.get("warmup_steps", 0) >= 1:
        training["warmup_steps"] = _fewer(training["warmup_steps"], share)
    if "training.per_device_train_batch_size" not in written:
        samples = step // recipe.sequence_length
        # Ranks that do not divide the step are refused later, with what would divide it.
        mine = samples // ranks if samples % ranks == 0 else samples
        micro = next(size for size in range(min(recipe.micro_batch, mine), 0, -1) if mine % size == 0)
        training["per_device_train_batch_size"] = micro
    _limit_cadences(changed, steps)
    return changed


def _limit_data(data: dict, recipe: "Recipe", tokens: int, written: set[str]) -> None:
    data["name"] = f"{recipe.data.name}-limit-{tokens}"
    if shares_are_written(recipe.data):
        data["prepare"] = "budget"
    else:
        for source in data["sources"]:
            source["max_tokens"] = min(tokens, source.get("max_tokens") or tokens)
    # 0: data.validation alone, which is read whole.
    if recipe.data.validation_share and "data.validation_share" not in written:
        wanted = VALIDATION_DOCUMENTS * LONG_DOCUMENT / tokens
        wanted = min(MOST_VALIDATION, max(LEAST_VALIDATION, float(f"{wanted:.2g}")))
        data["validation_share"] = max(recipe.data.validation_share, wanted)
    for stage in (data.get("mixture") or {}).get("stages") or []:
        if (stage.get("until") or 0) > 1:
            stage["until"] = stage["until"] / recipe.budget.tokens


def _limit_cadences(values: dict, steps: int) -> None:
    """Validate, save and log often enough to see each of them."""
    training, every = values["training"], max(1, steps // VALIDATIONS)
    for key, most in (("eval_steps", every), ("save_steps", every), ("logging_steps", max(1, steps // LOGS))):
        if (training.get(key) or 0) >= 1:
            training[key] = min(int(training[key]), most)
    evaluate, save = training.get("eval_steps") or 0, training.get("save_steps") or 0
    if evaluate >= 1 and save > evaluate:
        # A save goes with a validation wherever it did before.
        training["save_steps"] = save // evaluate * evaluate
    evaluation, monitors = values.get("evaluation") or {}, values.get("monitors") or {}
    if evaluation.get("task_steps") and evaluate >= 1:
        evaluation["task_steps"] = evaluate
    traced = (monitors.get("profile") or {}).get("steps") or 0
    if (traced[-1] if isinstance(traced, list) else traced) > steps:
        monitors["profile"] = None


def _fewer(steps: int, share: float) -> int:
    return max(1, int(steps * share))
