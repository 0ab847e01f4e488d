"""The rate that a torch scheduler has set, set again; torch 2.13.

`LambdaLR` has no way to compute the rates of its current step anew: `step` alone writes `_last_lr` and the groups'
`lr`, and moves on. A run needs them after a rollback, which lowers the rate of the next step. Held by
tests/test_stability.py; it may go once a scheduler can be asked for its current rates.
"""

from torch.optim.lr_scheduler import LambdaLR


def set_rates(scheduler: LambdaLR) -> None:
    """Give every parameter group the rate of the step that the scheduler is at."""
    rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    scheduler._last_lr = [base * rate(scheduler.last_epoch) for base, rate in rates]
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
        group["lr"] = rate
