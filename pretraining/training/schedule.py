"""The learning rate as a function of the step's number: the recipe's schedule times what the journal lowers."""

from collections.abc import Callable
from functools import partial

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from pretraining.errors import UserError
from pretraining.recipe.budget import StepSizes
from pretraining.runtime.journal import Journal

Rate = Callable[[float], float]
"""The share of the peak at a number of steps."""


def count_tokens(scheduler: LRScheduler, clock: Callable[[int], float]) -> None:
    """Let the schedule count full steps' worth of tokens: `clock` of the number of finished steps.

    Raises:
        UserError: the schedule is no function of a number.
    """
    _change(
        scheduler, partial(_by_clock, clock=clock), "budget.warmup_tokens and decay_tokens", "leave them out"
    )


def lower_rates(scheduler: LRScheduler, journal: Journal) -> None:
    """Multiply the schedule with `journal.lr_factor` of each step.

    Raises:
        UserError: the journal lowers the rate and the schedule is no function of the step's number.
    """
    if all(row.lr_factor == 1.0 or row.lr_steps == 0 for row in journal.rollbacks):
        return
    _change(scheduler, partial(_times, factor=journal.lr_factor), "monitors.spikes.lr_factor", "set it to 1")


def follow_step_sizes(scheduler: LRScheduler, step_sizes: StepSizes) -> None:
    """Multiply the schedule with what `budget.ramp.lr_scaling` makes of each step's size.

    Raises:
        UserError: the rate is to go with the size, and the schedule is no function of the step's number.
    """
    if step_sizes.lr_scaling != "none":
        _change(
            scheduler,
            partial(_times, factor=step_sizes.lr_factor),
            "budget.ramp.lr_scaling",
            "--set budget.ramp.lr_scaling=none",
        )


def _change(scheduler: LRScheduler, change: Callable[[Rate], Rate], key: str, remedy: str) -> None:
    """Put `change(rate)` in the place of every group's rate, for the recipe's `key`."""
    if not isinstance(scheduler, LambdaLR):
        raise UserError(
            f"{key}: cannot change the rate of {type(scheduler).__name__}; {remedy}, or choose another "
            "training.lr_scheduler_type"
        )
    scheduler.lr_lambdas = [change(rate) for rate in scheduler.lr_lambdas]


def _by_clock(rate: Rate, clock: Callable[[int], float]) -> Rate:
    return lambda finished_steps: rate(clock(finished_steps))


def _times(rate: Rate, factor: Callable[[int], float]) -> Rate:
    def scaled(finished_steps: int) -> float:
        return rate(finished_steps) * factor(finished_steps)

    return scaled


def apply_schedule_now(scheduler: LRScheduler) -> None:
    """Set the rate of the next step: a checkpoint holds the one that was due before the journal's last row."""
    if not isinstance(scheduler, LambdaLR):
        return
    rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    scheduler._last_lr = [base * rate(scheduler.last_epoch) for base, rate in rates]
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
        group["lr"] = rate


def step_schedule(scheduler: LRScheduler) -> None:
    """Move on after a step that was not applied, where the Trainer does not; a schedule by metrics stays."""
    if isinstance(scheduler, LambdaLR):
        scheduler.step()
