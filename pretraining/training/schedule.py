"""Compute the learning rate of every step.

    rate of a group = its peak (`training.learning_rate`, or the group's own in `optimizer`)
                    x muP's factor for its parameters               optimizers.py, recipe/mup.py
                    x the schedule: warm-up, decay                  transformers' `get_scheduler`
                    x what `budget.ramp.lr_scaling` makes of a step's size
                    x what rollbacks lower (`monitors.spikes.lr_factor`)

The last three are `share_of_peak`. How many steps warm up is `Recipe.warmup_steps`. recipe/training.py checks the names
and keywords of schedules. If a schedule follows the validation loss, it refuses the last two.
"""

from collections.abc import Callable

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from pretraining.errors import UserError
from pretraining.extend import named
from pretraining.recipe import Recipe
from pretraining.recipe.progress import Progress
from pretraining.runtime.journal import NOTHING_HEALED, Journal
from pretraining.upstream.torch import rates_now, set_rates

Schedule = Callable[[float], float]
"""Number of finished steps -> share of the peak rate, as `training.lr_scheduler_type` defines it."""


def share_of_peak(
    schedule: Schedule, finished_steps: int, progress: Progress, counts_tokens: bool, journal: Journal
) -> float:
    """Return the rate of the step after `finished_steps`, as a share of its group's peak.

    The schedule is read at this step, in steps of the size with which the schedule began; or at the tokens consumed if
    it counts these. The result is multiplied with the factor of the step's size (`budget.ramp.lr_scaling`), and with
    that of rollbacks (`monitors.spikes.lr_factor`).
    """
    # tokens in units of full steps, so that the schedule's own lengths stay steps
    count = progress.full_steps_at if counts_tokens else progress.schedule_steps_at
    share = schedule(count(finished_steps))
    return share * progress.step_sizes.lr_factor(finished_steps) * journal.lr_factor(finished_steps)


def follow_run(
    scheduler: LRScheduler, progress: Progress, counts_tokens: bool = False, journal: Journal = NOTHING_HEALED
) -> None:
    """Have the scheduler return `share_of_peak` for every group.

    Raises:
        UserError: the schedule is no function of the step (`reduce_lr_on_plateau`), and something has to change it.
    """
    if isinstance(scheduler, LambdaLR):

        def of_run(schedule: Schedule) -> Schedule:
            # A plain function, because torch writes the attributes of any other callable into checkpoints.
            return lambda step: share_of_peak(schedule, step, progress, counts_tokens, journal)

        scheduler.lr_lambdas = [of_run(schedule) for schedule in scheduler.lr_lambdas]
        return
    # such a scheduler keeps rates of its own, which nothing here may multiply
    changed_by = {
        "budget.warmup_tokens and decay_tokens": (counts_tokens, "leave them out"),
        "budget.ramp.lr_scaling": (progress.step_sizes.lr_scaling != "none", "set it to none"),
        "monitors.spikes.lr_factor": (journal.lowers_rates, "set it to 1"),
    }
    for key, (changes, remedy) in changed_by.items():
        if changes:
            raise UserError(
                f"{key}: cannot change the rate of {type(scheduler).__name__}; {remedy}, or choose another "
                "training.lr_scheduler_type"
            )


def own_schedule(recipe: Recipe, num_steps: int) -> Schedule:
    """Return the schedule of an extension that the recipe names.

    Raises:
        UserError: what it says of the first step is no number.
    """
    name, keywords = recipe.training.lr_scheduler_type, recipe.training_keywords.lr_scheduler_kwargs or {}
    lengths = {"num_steps": num_steps, "warmup_steps": recipe.warmup_steps(num_steps)}
    function = named("schedule", name)
    first = function(0, **lengths, **keywords)
    if isinstance(first, bool) or not isinstance(first, int | float):
        what = f"{name} must return a share of the peak, a number, and returned {type(first).__name__}"
        raise UserError(f"training.lr_scheduler_type: {what}")
    return lambda step: function(step, **lengths, **keywords)


def apply_schedule_now(scheduler: LRScheduler) -> None:
    """Set the rate of the next step. A checkpoint has the rate from before the journal's last row."""
    if isinstance(scheduler, LambdaLR):
        set_rates(scheduler, rates_now(scheduler))


def step_schedule(scheduler: LRScheduler) -> None:
    """Advance the schedule after a step that was not applied: the Trainer does not. A schedule by metrics stays."""
    if isinstance(scheduler, LambdaLR):
        scheduler.step()
