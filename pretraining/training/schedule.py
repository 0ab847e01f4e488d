"""Compute the learning rate of every step.

    rate of a group = its peak (`training.learning_rate`, or another in `optimizer.groups`)
                    x muP's factor for its parameters               optimizers.py, recipe/optimizer.py
                    x the schedule: warm-up, decay                  transformers' `get_scheduler`
                    x what `budget.ramp.lr_scaling` makes of a step's size
                    x what rollbacks lower (`monitors.spikes.lr_factor`)

The last three are `share_of_peak`. The steps that warm up: recipe/budget.py rounds `budget.warmup_tokens` to steps,
`Training.in_steps` hands them on, and transformers' `get_warmup_steps` has the last word; `Recipe.warmup_steps` tells
plan and messages the same (a test compares the two). recipe/training.py checks the names and keywords of schedules, and
refuses the last two factors for one that follows the validation loss.

Elsewhere: `--limit_tokens` shortens a schedule with its run (recipe/loading.py), a step that ZeRO or fp16 skips moves
it on all the same (training/stability.py), and a run that goes on sets the rate again (checkpoints/manager.py).
"""

from collections.abc import Callable

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from pretraining.errors import UserError
from pretraining.extend import defined, named
from pretraining.recipe import Recipe
from pretraining.recipe.budget import Progress
from pretraining.recipe.piecewise import value_at
from pretraining.recipe.training import PIECEWISE
from pretraining.runtime.journal import NOTHING_HEALED, Journal
from pretraining.upstream.torch import rates_now, set_rates

Schedule = Callable[[float], float]
"""Number of finished steps -> share of the peak rate, as `training.lr_scheduler_type` defines it."""


def share_of_peak(schedule: Schedule, finished_steps: int, progress: Progress, journal: Journal) -> float:
    """Return the rate of the step after `finished_steps`, as a share of its group's peak: the last three factors."""
    share = schedule(progress.schedule_place(finished_steps)) * progress.step_sizes.lr_factor(finished_steps)
    lowered = 1.0
    for row in journal.rollbacks:
        # windows of several rollbacks may overlap: each lowers the rate further
        if row.to_step <= finished_steps < row.to_step + row.lr_steps:
            lowered *= row.lr_factor
    return share * lowered


def follow_run(scheduler: LRScheduler, progress: Progress, journal: Journal = NOTHING_HEALED) -> None:
    """Have the scheduler return `share_of_peak` for every group, from this step on.

    Raises `UserError`: the schedule is no function of the step (`reduce_lr_on_plateau`), and a rollback has lowered
    rates.
    """
    if isinstance(scheduler, LambdaLR):

        def of_run(schedule: Schedule) -> Schedule:
            # A plain function, because torch writes the attributes of any other callable into checkpoints.
            return lambda step: share_of_peak(schedule, step, progress, journal)

        scheduler.lr_lambdas = [of_run(schedule) for schedule in scheduler.lr_lambdas]
        set_rates(scheduler, rates_now(scheduler))  # those of the first step were computed as it was made
        return
    # Such a scheduler keeps rates of its own, which nothing here may multiply. Keys that would are refused when the
    # recipe is read (recipe/training.py); a rollback may have come before the present schedule.
    if any(row.lr_factor != 1 and row.lr_steps for row in journal.rollbacks):
        what = f"cannot change the rate of {type(scheduler).__name__}; set it to 1, or choose another"
        raise UserError(f"monitors.spikes.lr_factor: {what} training.lr_scheduler_type")


def own_schedule(recipe: Recipe, num_steps: float) -> Schedule | None:
    """Return the recipe's schedule; None if it is transformers'. `UserError` if its share at step 0 is no number."""
    name, keywords = recipe.training.lr_scheduler_type, recipe.training_keywords.lr_scheduler_kwargs or {}
    if name == PIECEWISE:
        return lambda step: value_at(keywords["points"], step, num_steps)
    if name not in defined(recipe.extensions, "schedule"):
        return None
    lengths = {"num_steps": num_steps, "warmup_steps": recipe.warmup_steps(num_steps)}
    function = named("schedule", name)
    first = function(0, **lengths, **keywords)
    if isinstance(first, bool) or not isinstance(first, int | float):
        what = f"{name} must return a share of the peak, a number, and returned {type(first).__name__}"
        raise UserError(f"training.lr_scheduler_type: {what}")
    return lambda step: function(step, **lengths, **keywords)
