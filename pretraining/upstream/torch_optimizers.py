"""What torch's schedulers and optimizers have no public way to do; torch 2.13.

- Rates (`set_rates`): no function sets the rates of a scheduler's current step. Only `step` writes `_last_lr` and the
  groups' `lr`, and it goes on to the next step. Held by tests/test_stability.py and tests/test_optimizer_states.py;
  may go once a scheduler has a function for it.
- Order of hooks (`hook_first`): `register_step_pre_hook` appends, and the norm of gradients must be measured before
  another hook clips them. Held by tests/test_gradient_monitors.py; may go once it can put a hook first, as
  `nn.Module.register_forward_pre_hook(prepend=True)` can.
"""

from collections.abc import Callable, Sequence

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.hooks import RemovableHandle


def rates_now(scheduler: LambdaLR) -> list[float]:
    """Compute the rate of every parameter group at the step that the scheduler is at."""
    rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    return [base * rate(scheduler.last_epoch) for base, rate in rates]


def set_rates(scheduler: LRScheduler, rates: Sequence[float]) -> None:
    """Give every parameter group its rate, as if the scheduler had just computed it."""
    # What the scheduler reports, and what the optimizer steps with: two copies of the same rates.
    scheduler._last_lr = list(rates)
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def hook_first(optimizer: torch.optim.Optimizer, hook: Callable) -> RemovableHandle:
    """Register a hook that is called before each step, before all that are registered already."""
    # The hooks are in an ordered dict: its first entry is called first.
    handle = optimizer.register_step_pre_hook(hook)
    optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)
    return handle
