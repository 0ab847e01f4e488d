"""What callbacks may want to hear beyond the Trainer's own events: one that has the method is told."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
from transformers import TrainerCallback


@runtime_checkable
class HearsGradientNorm(Protocol):
    """Wants the global gradient norm of each step, before clipping: a number, or None where nobody knows it."""

    def hear_gradient_norm(self, norm) -> None: ...


@runtime_checkable
class HearsSources(Protocol):
    """Wants to know which sources of a mixture a micro-batch is from, before its forward pass."""

    def hear_sources(self, sources: torch.Tensor) -> None: ...


def tell_gradient_norm(callbacks: Iterable[TrainerCallback], norm) -> None:
    """To those that listen."""
    for callback in callbacks:
        if isinstance(callback, HearsGradientNorm):
            callback.hear_gradient_norm(norm)


def tell_sources(callbacks: Iterable[TrainerCallback], sources: torch.Tensor) -> None:
    """[batch] numbers, to those that listen."""
    for callback in callbacks:
        if isinstance(callback, HearsSources):
            callback.hear_sources(sources)
