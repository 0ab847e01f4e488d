"""A step whose gradients are not finite is not applied, at any stage and without DeepSpeed alike."""

import math

import torch

from pretraining.upstream.zero_optimizers import drop_refused_sums


class NonFiniteGuard:
    """Sees to it, and counts.

    ZeRO's optimizers and fp16's look for themselves: they clear such gradients and leave the weights alone. A plain
    torch optimizer, which DeepSpeed's stage 0 uses too, would write them into every weight: before it steps, this
    guard takes the gradients away, which leaves weights and moments as they are. Gradients are the same on every
    rank by then, and so is what it does.
    """

    def __init__(self, optimizer):
        """optimizer: the Trainer's, as accelerate or DeepSpeed wrapped it."""
        self.optimizer, self._took_away, self._norm = optimizer, False, None
        inner = getattr(optimizer, "optimizer", optimizer)
        if isinstance(inner, torch.optim.Optimizer) and not hasattr(inner, "overflow"):
            inner.register_step_pre_hook(self._before_step)

    def hear_gradient_norm(self, norm) -> None:
        """Of the gradients that are about to be stepped with; nothing is looked through again where it is known."""
        self._norm = norm

    def _before_step(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = _norm_of(parameters) if self._norm is None else self._norm
        self._took_away = not math.isfinite(norm)
        if self._took_away:
            for parameter in parameters:
                parameter.grad = None

    def refused_last_step(self) -> bool:
        """Whether the step just made was left out; the same answer on every rank."""
        took_away, self._took_away, self._norm = self._took_away, False, None
        refused = took_away or bool(getattr(self.optimizer, "step_was_skipped", False))
        if refused:
            drop_refused_sums(getattr(self.optimizer, "optimizer", None))
        return refused


def _norm_of(parameters: list[torch.Tensor]) -> float:
    """Of their gradients together: one pass, and one number to the host."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0
