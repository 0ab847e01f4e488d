"""The exchange of rows between the ranks of a group, through which gradients flow back: an all-to-all."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def exchange(
    rows: torch.Tensor,
    group: dist.ProcessGroup | None,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
) -> torch.Tensor:
    """Send rows to the ranks of a group, in their order, and return what came from each, in their order.

    sent, received: rows that go to and come from each rank; None: an equal part to each.
    """
    return _Exchange.apply(rows, group, sent, received)


class _Exchange(torch.autograd.Function):
    """The gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any, sent: Any, received: Any) -> torch.Tensor:
        ctx.group, ctx.sizes = group, (sent, received)
        return _all_to_all(rows, group, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        sent, received = ctx.sizes
        return _all_to_all(gradient, ctx.group, received, sent), None, None, None


def _all_to_all(
    rows: torch.Tensor,
    group: dist.ProcessGroup | None,
    sent: Sequence[int] | None,
    received: Sequence[int] | None,
) -> torch.Tensor:
    shape = rows.shape if received is None else (sum(received), *rows.shape[1:])
    taken = rows.new_empty(shape)
    dist.all_to_all_single(taken, rows.contiguous(), received, sent, group=group)
    return taken
