"""The learning rate as a function of the step's number: the recipe's schedule times what the journal lowers."""

from collections.abc import Callable

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from pretraining.errors import UserError
from pretraining.journal import Journal


def lower_rates(scheduler: LRScheduler, journal: Journal) -> None:
    """Multiply the schedule with `journal.lr_factor` of each step.

    Raises:
        UserError: the journal lowers the rate and the schedule is no function of the step's number.
    """
    if all(row.lr_factor == 1.0 or row.lr_steps == 0 for row in journal.rollbacks):
        return
    if not isinstance(scheduler, LambdaLR):
        raise UserError(
            f"monitors.spikes.lr_factor: cannot lower the rate of {type(scheduler).__name__}; set it to 1, or choose "
            "another training.lr_scheduler_type"
        )
    scheduler.lr_lambdas = [_lowered(rate, journal) for rate in scheduler.lr_lambdas]


def _lowered(rate: Callable[[int], float], journal: Journal) -> Callable[[int], float]:
    def lowered(finished_steps: int) -> float:
        return rate(finished_steps) * journal.lr_factor(finished_steps)

    return lowered


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
