"""Clipping beyond the global norm (`training.max_grad_norm`, which comes first): by value, and adaptive."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from pretraining.training.optimizers.matrices import hidden_matrices

SMALLEST_NORM = 1e-3
"""Of a unit's weights, so that units that start at zero can leave it (Brock et al. 2021, section 4)."""


def choose_clipping(recipe) -> Callable | None:
    """(model, optimizer) -> None that clips before each step; None if the recipe asks for nothing more."""
    value, ratio = (recipe.optimizer[key] for key in ("clip_value", "adaptive_clip"))
    if not (value or ratio):
        return None

    def clip_before_steps(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
        if ratio:
            dimensions = unit_dimensions(model)
            optimizer.register_step_pre_hook(lambda each, *_: clip_adaptively(each, dimensions, ratio))
        if value:
            optimizer.register_step_pre_hook(lambda each, *_: clip_by_value(each, value))

    return clip_before_steps


@torch.no_grad()
def clip_by_value(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Every gradient into [-value, value]; element by element, so whole parameters or slices alike."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.clamp_(-value, value)


def unit_dimensions(model: PreTrainedModel) -> dict[torch.Tensor, tuple[int, ...]]:
    """{parameter: the dimensions that make up one unit}, of all but the head, which is not clipped.

    A unit of a matrix is what leads into one output, of an embedding a row, of a vector all of it, as in the
    reference of Brock et al. 2021.
    """
    head, matrices = model.get_output_embeddings(), hidden_matrices(model)
    spared = None if head is None else head.weight
    found = {}
    for name, parameter in model.named_parameters():
        if parameter is not spared:
            transposed = name in matrices and matrices[name].transposed
            found[parameter] = (0,) if parameter.ndim < 2 else (-2,) if transposed else (-1,)
    return found


@torch.no_grad()
def clip_adaptively(optimizer: torch.optim.Optimizer, dimensions: dict, ratio: float) -> None:
    """No unit's gradient longer than `ratio` times its weights (AGC: Brock et al. 2021, equation 3)."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter in dimensions:
                unit = {"dim": dimensions[parameter], "keepdim": True}
                longest = ratio * parameter.norm(**unit).clamp_min(SMALLEST_NORM)
                length = parameter.grad.norm(**unit)
                parameter.grad.mul_((longest / length.clamp_min(1e-12)).clamp_max(1.0))
