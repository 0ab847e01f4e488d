"""Clip gradients by value and by the size of the weights that they change, on whole parameters or ZeRO's slices.

Both come after `training.max_grad_norm`, right before the optimizer's step. A slice holds parts of units whose other
parts are on other ranks: the ranks add up the squares of every unit, two numbers for each, and no more.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, TrainerCallback

from pretraining.recipe import Recipe
from pretraining.training.muon import compute_device, hidden_matrices
from pretraining.upstream.deepspeed import first_element, stepping_optimizers, whole_shape, zero_partitions

SMALLEST_NORM = 1e-3
"""The least norm of a unit's weights that counts, so that units can leave zero (Brock et al. 2021, section 4)."""


class UnitBlock(NamedTuple):
    """A rectangle of a parameter's elements: `rows` x `columns`, contiguous from `offset` in a flat tensor on."""

    offset: int
    rows: int
    columns: int
    unit: int
    """The first of its units."""


@dataclass(frozen=True)
class UnitDivision:
    """How the elements of a parameter are divided into units.

    A unit is: in a matrix, the weights of one output; in an embedding, a row; a vector as a whole. The reference of
    Brock et al. 2021 does the same.
    """

    matrices: int
    rows: int
    columns: int
    are_columns: bool
    """A unit is a column: GPT-2 keeps its matrices [inputs, outputs]."""

    @classmethod
    def of(cls, shape: tuple[int, ...], is_transposed: bool) -> "UnitDivision":
        """Divide a parameter of this shape; the first dimensions of more than two count matrices."""
        if len(shape) < 2:
            return cls(1, 1, prod(shape), are_columns=False)
        *others, rows, columns = shape
        return cls(prod(others), rows, columns, is_transposed)

    @property
    def count(self) -> int:
        return self.matrices * (self.columns if self.are_columns else self.rows)

    def blocks(self, start: int, numel: int) -> Iterator[UnitBlock]:
        """Cut the flattened parameter's elements [start, start + numel) into blocks."""
        position, end = start, start + numel
        while position < end:
            row, column = divmod(position, self.columns)
            if column or end - position < self.columns:
                # a part of one row: the slice begins or ends in it
                rows, columns = 1, min(self.columns - column, end - position)
            else:
                rows, columns = (end - position) // self.columns, self.columns
                if self.are_columns:  # the next matrix has columns of its own
                    rows = min(rows, self.rows - row % self.rows)
            unit = row // self.rows * self.columns + column if self.are_columns else row
            yield UnitBlock(position - start, rows, columns, unit)
            position += rows * columns


class UnitPart(NamedTuple):
    """A block of a flat tensor, and where its units are among all of the tensor's parameters."""

    offset: int
    rows: int
    columns: int
    first: int
    are_columns: bool

    @property
    def num_units(self) -> int:
        return self.columns if self.are_columns else self.rows

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """View the block's elements."""
        return flat[self.offset : self.offset + self.rows * self.columns].view(self.rows, self.columns)

    def squares(self, flat: torch.Tensor) -> torch.Tensor:
        """Sum the squares of each unit's elements in the block, in fp32 at least."""
        dtype = torch.promote_types(flat.dtype, torch.float32)
        dimension = 0 if self.are_columns else 1
        return torch.linalg.vector_norm(self.of(flat), dim=dimension, dtype=dtype).square()


class UnitLayout(NamedTuple):
    """The parts of a tensor that an optimizer steps."""

    parts: list[UnitPart]
    num_units: int
    """Units of all parameters that this tensor and its counterparts on the other ranks hold."""
    is_shared: bool
    """Other ranks hold the rest of its units."""


def unit_layouts(model: PreTrainedModel, zero: Any = None) -> dict[int, UnitLayout]:
    """Return {id(tensor): layout} of every tensor that is stepped; the head's units are not clipped.

    zero: DeepSpeed's optimizer of stage 1, 2 or 3; None if whole parameters are stepped.
    """
    head, matrices = model.get_output_embeddings(), hidden_matrices(model)
    spared = None if head is None else head.weight
    units = {
        parameter: UnitDivision.of(whole_shape(parameter), name in matrices and matrices[name].transposed)
        for name, parameter in model.named_parameters()
        if parameter is not spared
    }
    if zero is None:
        whole = {p: _parts(each, 0, first_element(p), p.numel(), 0) for p, each in units.items()}
        return {
            id(parameter): UnitLayout(parts, units[parameter].count, False)
            for parameter, parts in whole.items()
        }
    layouts = {}
    for partition in zero_partitions(zero):
        # every rank counts the units of all parameters, in the same order
        first, total = {}, 0
        for parameter in (each for each in partition.parameters if each in units):
            first[parameter], total = total, total + units[parameter].count
        parts: list[UnitPart] = []
        for piece in (each for each in partition.slices if each.parameter in first):
            of_parameter = units[piece.parameter], first[piece.parameter]
            parts += _parts(*of_parameter, piece.start, piece.numel, piece.offset)
        layouts[id(partition.tensor)] = UnitLayout(parts, total, True)
    return layouts


def _parts(units: UnitDivision, first: int, start: int, numel: int, offset: int) -> list[UnitPart]:
    """Return the blocks of a slice that begins at `offset` of a flat tensor."""
    return [
        UnitPart(offset + block.offset, block.rows, block.columns, first + block.unit, units.are_columns)
        for block in units.blocks(start, numel)
    ]


@torch.no_grad()
def clip_by_value(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Clip every gradient to [-value, value], element by element. It works on whole parameters and on slices."""
    for tensor in _stepped(optimizer):
        if tensor.grad is not None:
            tensor.grad.clamp_(-value, value)


@torch.no_grad()
def clip_adaptively(optimizer: torch.optim.Optimizer, layouts: dict[int, UnitLayout], ratio: float) -> None:
    """Limit each unit's gradient norm to `ratio` times its weights' norm (AGC: Brock et al. 2021, equation 3).

    A collective for tensors whose units are shared by the ranks.
    """
    for tensor in _stepped(optimizer):
        layout = layouts.get(id(tensor))
        # without ZeRO a parameter may have no gradient; with ZeRO all ranks take part
        if layout is None or not layout.num_units or (tensor.grad is None and not layout.is_shared):
            continue
        gradient = None if tensor.grad is None else tensor.grad.view(-1)
        squares = _unit_squares(tensor.detach().view(-1), gradient, layout)
        longest = ratio * squares[0].sqrt().clamp_min(SMALLEST_NORM)
        # clamp_min: a gradient of zero would give 0 / 0
        factors = (longest / squares[1].sqrt().clamp_min(1e-12)).clamp_max(1.0)
        if gradient is None:
            continue
        for part in layout.parts:
            factor = factors[part.first : part.first + part.num_units].to(gradient.dtype)
            part.of(gradient).mul_(factor if part.are_columns else factor[:, None])


def _unit_squares(weights: torch.Tensor, gradient: torch.Tensor | None, layout: UnitLayout) -> torch.Tensor:
    """Return the sums of squares [2, units] of the weights and of the gradient, over all ranks."""
    dtype = torch.promote_types(weights.dtype, torch.float32)
    squares = torch.zeros(2, layout.num_units, dtype=dtype, device=weights.device)
    for row, flat in enumerate((weights, gradient)):
        for part in layout.parts if flat is not None else ():
            squares[row, part.first : part.first + part.num_units] += part.squares(flat)
    if not layout.is_shared or not dist.is_initialized() or dist.get_world_size() == 1:
        return squares
    # offloaded gradients are on the host, and NCCL adds up on the GPU
    shared = squares.to(compute_device(squares))
    dist.all_reduce(shared)
    return shared.to(squares.device)


def _stepped(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (tensor for group in optimizer.param_groups for tensor in group["params"])


def choose_clipping(recipe: Recipe) -> "Clipping | None":
    """Return what clips before each step; None if the recipe asks for nothing beyond `training.max_grad_norm`."""
    value, ratio = recipe.optimizer.clip_value, recipe.optimizer.adaptive_clip
    return Clipping(value, ratio) if value or ratio else None


class Clipping(TrainerCallback):
    """Clips before every step of the optimizers that really step, which DeepSpeed may have made itself."""

    def __init__(self, value: float | None, ratio: float | None) -> None:
        self.value, self.ratio = value, ratio

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **kwargs: Any
    ) -> None:
        self.begin(model, getattr(optimizer, "optimizer", optimizer))

    def begin(self, model: PreTrainedModel, optimizer: Any) -> None:
        """Clip from the next step on. optimizer: torch's, or DeepSpeed's of stage 1, 2 or 3."""
        is_whole = isinstance(optimizer, torch.optim.Optimizer)
        steppers = [optimizer] if is_whole else stepping_optimizers(optimizer)
        hooks: list[Callable] = []
        if self.ratio:
            # hooks run in the order of registration: units first, then single values
            layouts = unit_layouts(model, None if is_whole else optimizer)
            hooks.append(partial(clip_adaptively, layouts=layouts, ratio=self.ratio))
        if self.value:
            hooks.append(partial(clip_by_value, value=self.value))
        for stepper in steppers:
            for hook in hooks:
                stepper.register_step_pre_hook(lambda each, *_, hook=hook: hook(each))
