"""The learning rate's schedule and the optimizers with rules of their own: their names, keywords and limits.

Keywords of a schedule are those of the functions in transformers/optimization.py; a test compares the two.
"""

from collections.abc import Sequence

from pretraining.errors import nearest
from pretraining.recipe.budget import Budget
from pretraining.recipe.sections import Monitors, Spikes
from pretraining.recipe.training import ADAMW, Training
from pretraining.schema import check, problem

CONSTANT = ("constant", "constant_with_warmup")
DECAYING = "warmup_stable_decay"
STABLE = (*CONSTANT, DECAYING)
"""Schedules that hold their peak: a stage may begin there."""
BY_METRIC = ("reduce_lr_on_plateau", "greedy")
"""Schedules that follow the validation loss and not the number of steps."""
WITHOUT_WARMUP = ("constant", *BY_METRIC)

SCHEDULE_FREE = ("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd")
"""Optimizers that average in place of a decay (Defazio et al. 2024, The Road Less Scheduled)."""
# Such an optimizer takes gradients at y, but its result is the average x. It keeps a sequence z as a state, and
# x = y + `AVERAGING` (z - y). It keeps this number too, for every tensor that it has stepped.
Z = "z"
AVERAGING = "averaging"
"""Names of these two states."""
ELEMENTWISE = (*ADAMW, *SCHEDULE_FREE, "sgd", "adagrad", "rmsprop", "lion_32bit", "adamw_bnb_32bit")
"""Names of `training.optim` whose update of a weight uses no other weight, so that it may be cut anywhere."""

_SHARE = {"type": "number", "minimum": 0, "maximum": 1}
_RATE = {"type": "number", "minimum": 0}
_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
_COUNT, _STEPS = {"type": "integer", "minimum": 0}, {"type": "integer", "minimum": 1}
_SHAPE = {"enum": ["linear", "cosine", "1-sqrt"]}
# either of the first two: see ONE_OF
_LEAST_RATE = {"min_lr": _RATE, "min_lr_rate": _SHARE, "num_cycles": _POSITIVE}
_FACTOR = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
_JUDGING = {
    "mode": {"enum": ["min"]},  # what is judged is the validation loss
    "factor": _FACTOR,
    "patience": _COUNT,
    "threshold": _RATE,
    "threshold_mode": {"enum": ["rel", "abs"]},
    "cooldown": _COUNT,
    "min_lr": _RATE,
    "eps": _RATE,
}
KEYWORDS: dict[str, dict] = {
    "linear": {},
    "cosine": {"num_cycles": _POSITIVE},
    "cosine_with_restarts": {"num_cycles": _STEPS},
    "polynomial": {"lr_end": _RATE, "power": _POSITIVE},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": _STEPS},
    "reduce_lr_on_plateau": _JUDGING,
    "cosine_with_min_lr": _LEAST_RATE,
    "cosine_warmup_with_min_lr": {**_LEAST_RATE, "warmup_lr_rate": _SHARE},
    DECAYING: {
        "num_decay_steps": _STEPS,
        "num_stable_steps": _COUNT,
        "warmup_type": _SHAPE,
        "decay_type": _SHAPE,
        "min_lr_ratio": _SHARE,
        "num_cycles": _POSITIVE,
    },
    "greedy": {
        **_JUDGING,
        "warmup": _COUNT,
        "max_lr": _POSITIVE,
        "verbose": {"type": "boolean"},
        "smooth": {"type": "boolean"},
        "window_size": _STEPS,
        "reset_start": _COUNT,
    },
}
"""Schema of every keyword that `training.lr_scheduler_kwargs` takes, by `training.lr_scheduler_type`."""
ONE_OF = {
    name: [{"required": ["min_lr"]}, {"required": ["min_lr_rate"]}]
    for name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
}
"""Keywords of which a schedule needs exactly one."""


def check_schedule(
    budget: Budget,
    training: Training,
    in_steps: Training,
    monitors: Monitors,
    num_steps: int,
    where: str,
    own: Sequence[str] = (),
) -> None:
    """Raise `UserError` for a schedule that transformers would refuse, or follow otherwise than it reads.

    in_steps: `training`, with what the budget says of the schedule in tokens, in full steps. num_steps: of the whole
    run. own: names of schedules of extensions.
    """
    kind, keywords = training.lr_scheduler_type, training.lr_scheduler_kwargs or {}
    if kind not in (*KEYWORDS, *own):
        near = (
            nearest(kind, (*KEYWORDS, *own))
            or f"; known are {', '.join((*KEYWORDS, *own))}, or one of your own, from a module in extensions"
        )
        what = f"is {kind!r}, which is no schedule{near}"
        raise problem(where, "training.lr_scheduler_type", what)
    _check_schedule_free(training, where)
    _check_tokens(budget, training, where)
    _check_warmup(training, where)
    if kind not in own:
        _check_keywords(kind, keywords, where)
    _check_end(training, keywords, where)
    if kind == DECAYING:
        full_steps = num_steps if training == in_steps else budget.tokens // budget.tokens_per_step
        _check_decay(in_steps, full_steps, where, budget.decay_tokens)
    if kind in BY_METRIC:
        _check_judged(budget, training, monitors.spikes, where)


def _check_schedule_free(training: Training, where: str) -> None:
    """Averaging takes the place of a decay, and needs a momentum to average over."""
    optim, kind = training.optim, training.lr_scheduler_type
    if optim not in SCHEDULE_FREE:
        return
    if kind not in CONSTANT:
        what = f"is {kind}, but {optim} does without a decay; write {' or '.join(CONSTANT)}"
        raise problem(where, "training.lr_scheduler_type", what)
    if not training.adam_beta1:
        what = f"is 0: {optim} would train weights that do not tell their average; write 0.9"
        raise problem(where, "training.adam_beta1", what)


def _check_judged(budget: Budget, training: Training, spikes: Spikes, where: str) -> None:
    """A schedule that follows the validation loss is no function of the step: nothing can be multiplied with it."""
    kind, ramp = training.lr_scheduler_type, budget.ramp
    if training.eval_strategy == "no":
        what = f"is {kind}, which follows the validation loss, and nothing is validated: set training.eval_strategy"
        raise problem(where, "training.lr_scheduler_type", what)
    remedy = f"the validation loss sets the rate of {kind}; leave it out, or choose another schedule"
    if ramp is not None and ramp.lr_scaling != "none":
        raise problem(where, "budget.ramp.lr_scaling", f"is {ramp.lr_scaling}, but {remedy}")
    if spikes.lr_factor != 1 and spikes.lr_steps:
        raise problem(where, "monitors.spikes.lr_factor", f"is {spikes.lr_factor:g}, but {remedy}")


def _check_tokens(budget: Budget, training: Training, where: str) -> None:
    """What the budget says of the schedule in tokens, `training` may not say in steps."""
    kind, key = training.lr_scheduler_type, "budget.warmup_tokens"
    if budget.warmup_tokens is not None and training.warmup_steps:
        what = "and training.warmup_steps are both there; leave one out, or set training.warmup_steps=0"
        raise problem(where, key, what)
    if budget.warmup_tokens is not None and kind in WITHOUT_WARMUP:
        what = f"is set, but training.lr_scheduler_type {kind} has no warm-up; write constant_with_warmup"
        raise problem(where, key, what)
    if budget.decay_tokens is None:
        return
    key = "budget.decay_tokens"
    if kind != DECAYING:
        what = (
            f"is for training.lr_scheduler_type {DECAYING}, and that is {kind}; set that, or leave this out"
        )
        raise problem(where, key, what)
    # either would fix the same border a second time, in steps
    for name in ("num_decay_steps", "num_stable_steps"):
        if name in (training.lr_scheduler_kwargs or {}):
            what = f"and training.lr_scheduler_kwargs.{name} are both there; leave one out"
            raise problem(where, key, what)


def _check_warmup(training: Training, where: str) -> None:
    given = training.warmup_steps
    # 1 and above are steps, below 1 a share
    if given > 1 and given != int(given):
        what = f"is {given:g}; write a whole number of steps, or a share of the run below 1"
        raise problem(where, "training.warmup_steps", what)


def _check_keywords(kind: str, keywords: dict, where: str) -> None:
    """Names, types and limits of what the schedule's function takes."""
    key, known = "training.lr_scheduler_kwargs", KEYWORDS[kind]
    for name in keywords:
        if name not in known:
            takes = nearest(name, known) or (f"; it takes {', '.join(known)}" if known else "; it takes none")
            remedy = "" if known else f": --set {key}={{}}"
            raise problem(where, f"{key}.{name}", f"is no keyword of {kind}{takes}{remedy}")
    one_of = {"oneOf": ONE_OF[kind]} if kind in ONE_OF else {}
    check(keywords, {"type": "object", "properties": known, **one_of}, where, key)


def _check_end(training: Training, keywords: dict, where: str) -> None:
    """A polynomial falls to `lr_end`: transformers refuses one that is not below the peak."""
    # 1e-7 is transformers' default
    end, peak = keywords.get("lr_end", 1e-7), training.learning_rate
    if training.lr_scheduler_type == "polynomial" and end >= peak:
        what = f"is {end:g}, which is not below training.learning_rate {peak:g}: lower it"
        raise problem(where, "training.lr_scheduler_kwargs.lr_end", what)


def _check_decay(training: Training, num_steps: int, where: str, decay_tokens: int | None) -> None:
    """The parts of a schedule in three parts fit into the run: it would begin in the middle of its decay."""
    key, keywords = "training.lr_scheduler_kwargs.num_decay_steps", training.lr_scheduler_kwargs or {}
    if "num_decay_steps" not in keywords:
        what = f"is missing: {DECAYING} needs the number of its last steps, or budget.decay_tokens"
        raise problem(where, key, what)
    decay, stable = keywords["num_decay_steps"], keywords.get("num_stable_steps", 0)
    given = training.warmup_steps
    warmup = int(given) if given >= 1 else round(given * num_steps)
    if warmup + stable + decay > num_steps:
        parts = f"{warmup} steps of warm-up" + f", {stable} stable" * bool(stable)
        what = f"is {decay} steps; with {parts} that is more than the run's {num_steps} steps: shorten them"
        raise problem(where, "budget.decay_tokens" if decay_tokens else key, what)
