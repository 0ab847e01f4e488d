"""The loss of each step as the mean over all ranks, known before its gradients are."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from accelerate.state import GradientState


class NumberOnItsWay:
    """A number of the device, copied to the host behind the work that is queued there now.

    Who reads it waits for that work alone, and not for what is queued later.
    """

    def __init__(self, number: torch.Tensor):
        """number: a tensor of one element."""
        self._copy, self._arrival = number, None
        if number.is_cuda:
            self._copy = torch.empty_like(number, device="cpu", pin_memory=True)
            self._copy.copy_(number, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def read(self) -> float:
        """The number."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy.item()


class LossWatch:
    """Stands around the loss function; a step whose loss exceeds `limit` can be kept from being applied.

    Costs one all-reduce of one number a step, on the device; who asks for it waits for the forward pass, not for the
    end of the step. To refuse a step it multiplies the gradient of the loss with NaN, on the device too: what refuses
    steps with gradients that are not finite then refuses this one, on all ranks and at every ZeRO stage alike.
    """

    def __init__(self, refuses: bool):
        self.refuses, self.limit = refuses, math.inf
        self._sum: torch.Tensor | None = None
        self._last: NumberOnItsWay | None = None

    def around(self, compute_loss: Callable) -> Callable:
        """The Trainer's `compute_loss_func`, watched; each call is one micro-batch's share of the step's loss."""

        def watched(outputs, labels, num_items_in_batch=None):
            loss = compute_loss(outputs, labels, num_items_in_batch=num_items_in_batch)
            share = loss.detach().float()
            self._sum = share.clone() if self._sum is None else self._sum + share
            if GradientState().sync_gradients:
                self._close_step(loss)
            return loss

        return watched

    def _close_step(self, loss: torch.Tensor) -> None:
        total, self._sum = self._sum, None
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        self._last = NumberOnItsWay(total)
        if self.refuses and loss.requires_grad:
            keep = torch.where(total <= self.limit, 1.0, math.nan)
            loss.register_hook(lambda gradient: gradient * keep)

    def set_limit(self, limit: float) -> None:
        """From now on: the highest loss that is applied, rounded as the device compares it."""
        self.limit = torch.tensor(limit, dtype=torch.float32).item()

    def last_loss(self) -> float:
        """Loss of the step just made, nats per token, mean over the ranks; NaN before the first."""
        return math.nan if self._last is None else self._last.read()
