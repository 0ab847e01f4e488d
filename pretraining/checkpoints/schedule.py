"""Learning-rate schedule and loss scaler: small, the same on every rank, kept as JSON."""

from torch.optim.lr_scheduler import LambdaLR, LRScheduler


def schedule_state(scheduler: LRScheduler) -> dict:
    """The schedule's own state, and the rate of each parameter group."""
    rates = [group["lr"] for group in scheduler.optimizer.param_groups]
    return {"state": scheduler.state_dict(), "rates": [float(rate) for rate in rates]}


def set_schedule(scheduler: LRScheduler, saved: dict) -> None:
    """Continue a schedule where it was saved.

    A schedule that is a function of the step gets its position alone: peak and shape are this run's recipe's.
    """
    state, rates = saved["state"], saved["rates"]
    if isinstance(scheduler, LambdaLR):
        state = {**state, **{key: scheduler.state_dict()[key] for key in ("base_lrs", "lr_lambdas")}}
        shapes = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        rates = [base * shape(state["last_epoch"]) for base, shape in shapes]
    scheduler.load_state_dict(state)
    scheduler._last_lr = rates
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def scaler_state(scaler: object | None) -> dict | None:
    """Numbers of a loss scaler: torch's GradScaler or DeepSpeed's, whose state is its attributes."""
    if scaler is None:
        return None
    values = scaler.state_dict() if hasattr(scaler, "state_dict") else vars(scaler)
    return {key: value for key, value in values.items() if isinstance(value, int | float | bool)}


def set_scaler(scaler: object | None, saved: dict | None) -> None:
    """Set what `scaler_state` found, where both sides scale in the same way."""
    if scaler is None or not saved:
        return
    if hasattr(scaler, "load_state_dict"):
        scaler.load_state_dict({**scaler.state_dict(), **saved})
    else:
        vars(scaler).update({key: value for key, value in saved.items() if key in vars(scaler)})
