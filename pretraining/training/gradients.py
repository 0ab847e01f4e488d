"""Clip gradients, queries and keys, and measure gradients and activations on chosen steps.

After their norm is clipped (`training.max_grad_norm`, by DeepSpeed or the Trainer), gradients are clipped here, right
before the optimizer's step, on whole parameters or ZeRO's slices: by value, and by the size of the weights. Norms layer
by layer and the gradient noise scale are those of the whole step before clipping, and cost nothing on all other steps.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState

from pretraining.errors import UserError
from pretraining.recipe import Recipe
from pretraining.runtime.process_group import sum_over_ranks
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.muon import compute_device, rectangles
from pretraining.upstream import attention_logits, deepspeed
from pretraining.upstream.matrices import hidden_matrices
from pretraining.upstream.saved_tensors import layers_of
from pretraining.upstream.torch import hook_first

SMALLEST_NORM = 1e-3
"""The least norm of a unit's weights that counts, so that units can leave zero (Brock et al. 2021, section 4)."""


@dataclass(frozen=True)
class UnitDivision:
    """How the elements of a parameter are divided into units.

    A unit is: in a matrix, the weights of one output; in an embedding, a row; a vector as a whole. The reference of
    Brock et al. 2021 does the same.
    """

    rows: int
    """Of all its matrices."""
    columns: int
    are_columns: bool
    """A unit is a column of its matrix: GPT-2 and gpt_oss's experts keep matrices [inputs, outputs]."""
    matrices: int = 1

    @classmethod
    def of(cls, shape: tuple[int, ...], is_transposed: bool) -> "UnitDivision":
        """Divide a parameter of this shape; the first dimensions of more than two count matrices."""
        if len(shape) < 2:
            return cls(1, prod(shape), are_columns=False)
        return cls(prod(shape[:-1]), shape[-1], is_transposed, prod(shape[:-2]))

    @property
    def count(self) -> int:
        return self.matrices * self.columns if self.are_columns else self.rows

    def parts(self, start: int, numel: int, offset: int = 0, first: int = 0) -> "Iterator[UnitPart]":
        """Cut the flattened parameter's elements [start, start + numel), which lie from `offset` on, into rectangles.

        first: the number of the parameter's first unit.
        """
        end, size = start + numel, self.rows * self.columns // (self.matrices if self.are_columns else 1)
        for matrix in range(start // size, -(-end // size)):
            begin = max(start, matrix * size)
            for position, rows, columns in rectangles(
                begin, min(end, (matrix + 1) * size) - begin, self.columns
            ):
                within = matrix * self.columns + position % self.columns
                unit = within if self.are_columns else position // self.columns
                yield UnitPart(offset + position - start, rows, columns, first + unit, self.are_columns)


class UnitPart(NamedTuple):
    """A rectangle of a parameter's elements: `rows` x `columns`, contiguous from `offset` in a flat tensor on."""

    offset: int
    rows: int
    columns: int
    first: int
    """Its first unit, among those of all of the tensor's parameters."""
    are_columns: bool

    @property
    def num_units(self) -> int:
        return self.columns if self.are_columns else self.rows

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.offset : self.offset + self.rows * self.columns].view(self.rows, self.columns)


def stepped_slices(inner: Any) -> list[deepspeed.Slice]:
    """List what is stepped: parameters whole, or this rank's slices of ZeRO's."""
    return [piece for each in deepspeed.partitions(inner) for piece in each.slices]


def stepped(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield what the optimizer steps now: whole parameters, or ZeRO's flat tensors."""
    return (tensor for group in optimizer.param_groups for tensor in group["params"])


class Clipping(TrainerCallback):
    """Clips before every step of the optimizers that really step, which DeepSpeed may have made itself.

    First each unit's gradient norm is limited to `optimizer.adaptive_clip` times its weights' norm (AGC: Brock et al.
    2021, equation 3), then every element to `optimizer.clip_value`. A slice of ZeRO's holds parts of units whose other
    parts are on other ranks: the ranks add up the squares of every unit, two numbers for each, and no more.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.value, self.ratio = recipe.optimizer.clip_value, recipe.optimizer.adaptive_clip
        self.layouts: dict[int, tuple[list[UnitPart], int]] = {}
        """id(tensor that is stepped) -> its parts, and the number of units that it and its counterparts hold."""

    def on_train_begin(self, args, state, control, model, optimizer, **kwargs) -> None:
        if self.value or self.ratio:
            self.begin(model, getattr(optimizer, "optimizer", optimizer))

    def begin(self, model: PreTrainedModel, optimizer: Any) -> None:
        """Clip from the next step on. optimizer: torch's, or DeepSpeed's of stage 1, 2 or 3."""
        self.is_shared = not isinstance(optimizer, torch.optim.Optimizer)
        if self.ratio:
            self._find_units(model, optimizer)
        for stepper in deepspeed.stepping_optimizers(optimizer):
            stepper.register_step_pre_hook(lambda each, *_: self._clip(each))

    def _find_units(self, model: PreTrainedModel, optimizer: Any) -> None:
        """Find the units of every tensor that is stepped; those of the head are not clipped."""
        head, matrices = model.get_output_embeddings(), hidden_matrices(model)
        spared = None if head is None else head.weight
        units = {
            parameter: UnitDivision.of(
                deepspeed.whole_shape(parameter), name in matrices and matrices[name].transposed
            )
            for name, parameter in model.named_parameters()
            if parameter is not spared
        }
        for partition in deepspeed.partitions(optimizer):
            # every rank counts the units of all parameters, in the same order
            first, total = {}, 0
            for parameter in (each for each in partition.parameters if each in units):
                first[parameter], total = total, total + units[parameter].count
            found: list[UnitPart] = []
            for piece in (each for each in partition.slices if each.parameter in first):
                place = piece.start, piece.numel, piece.offset, first[piece.parameter]
                found += units[piece.parameter].parts(*place)
            self.layouts[id(partition.tensor)] = found, total

    @torch.no_grad()
    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        for tensor in stepped(optimizer) if self.ratio else ():
            parts, num_units = self.layouts.get(id(tensor), ((), 0))
            # without ZeRO a parameter may have no gradient; with ZeRO all ranks take part
            if not num_units or (tensor.grad is None and not self.is_shared):
                continue
            gradient = None if tensor.grad is None else tensor.grad.view(-1)
            # sums of squares [2, units] of the weights and of the gradient, in fp32 at least
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            squares = torch.zeros(2, num_units, dtype=dtype, device=tensor.device)
            for row, flat in enumerate((tensor.detach().view(-1), gradient)):
                for part in parts if flat is not None else ():
                    dim, wide = 0 if part.are_columns else 1, torch.promote_types(flat.dtype, torch.float32)
                    norms = torch.linalg.vector_norm(part.of(flat), dim=dim, dtype=wide)
                    squares[row, part.first : part.first + part.num_units] += norms.square()
            if self.is_shared and dist.is_initialized() and dist.get_world_size() > 1:
                # offloaded gradients are on the host, and NCCL adds up on the GPU
                shared = squares.to(compute_device(squares))
                dist.all_reduce(shared)
                squares = shared.to(squares.device)
            longest = self.ratio * squares[0].sqrt().clamp_min(SMALLEST_NORM)
            # clamp_min: a gradient of zero would give 0 / 0
            factors = (longest / squares[1].sqrt().clamp_min(1e-12)).clamp_max(1.0)
            for part in parts if gradient is not None else ():
                factor = factors[part.first : part.first + part.num_units].to(gradient.dtype)
                part.of(gradient).mul_(factor if part.are_columns else factor[:, None])
        for tensor in stepped(optimizer) if self.value else ():
            if tensor.grad is not None:
                tensor.grad.clamp_(-self.value, self.value)


PREFIX = "stability/gradient_norm/"


def layer_of(name: str) -> str:
    """`transformer.h.0.attn.c_attn.weight` -> `transformer.h.0`; outside the blocks each module is its own layer."""
    block = re.match(r".*?\.\d+(?=\.)", name)
    return block[0] if block else name.rpartition(".")[0]


class LayerNormsCallback(TrainerCallback):
    """Measure every `every_steps`-th step for the next row of metrics, and the step after an alert as an event.

    Measured are the gradients that the optimizer gets, summed over ranks and micro-batches. Under ZeRO they are in flat
    slices, and each rank adds up the squares of its own. Ranks that hold the same elements each add their share.
    """

    def __init__(
        self, run: RunFolder, every_steps: int | None, alerted_step: Callable[[], int | None]
    ) -> None:
        """alerted_step: the last step with an alert, the same on every rank."""
        self.run, self.every_steps, self.alerted_step = run, every_steps, alerted_step
        self.places: dict[int, list[tuple[int, int, int, int]]] = {}
        """id(tensor that is stepped) -> (layer, offset, elements, ranks with the same elements) of each part in it."""
        self.measures, self.gradient_norm, self.latest = False, None, {}

    def on_step_begin(self, args, state, control, model, optimizer, **kwargs) -> None:
        step = state.global_step
        # global_step still counts finished steps: the one that begins is the next
        self.is_due = self.every_steps is not None and (step + 1) % self.every_steps == 0
        self.follows_alert = step > 0 and self.alerted_step() == step
        self.measures = self.is_due or self.follows_alert
        if self.measures:
            if not self.places:  # only now: without an interval and without an alert they are never needed
                names = {id(parameter): layer_of(name) for name, parameter in model.named_parameters()}
                self.layers = list(dict.fromkeys(names.values()))
                numbers = {key: self.layers.index(layer) for key, layer in names.items()}
                inner = getattr(optimizer, "optimizer", optimizer)
                self.optimizers = deepspeed.stepping_optimizers(inner)
                # Without ZeRO and layers that are split, every rank has the whole gradients.
                alone = not dist.is_initialized()
                for parameter, _, tensor, offset, numel in stepped_slices(inner):
                    if (layer := numbers.get(id(parameter))) is not None:
                        copies = 1 if alone else deepspeed.holders(parameter, inner)[1]
                        self.places.setdefault(id(tensor), []).append((layer, offset, numel, copies))
            self.squares = torch.zeros(len(self.layers), dtype=torch.float64)
            # before clipping by value
            self._hooks = [hook_first(each, self._see) for each in self.optimizers]

    @torch.no_grad()
    def _see(self, optimizer: torch.optim.Optimizer, *_) -> None:
        norms, layers, copies = [], [], []
        for tensor in stepped(optimizer):
            if tensor.grad is not None:
                flat = tensor.grad.reshape(-1)
                for layer, offset, numel, held_by in self.places.get(id(tensor), ()):
                    piece = flat[offset : offset + numel]
                    # in fp32: squares of bf16 gradients would lose most digits
                    norms.append(torch.linalg.vector_norm(piece, dtype=torch.float32))
                    layers.append(layer)
                    copies.append(held_by)
        if norms:
            # one copy to the host for all layers, not one each
            squares = torch.stack(norms).double().square().cpu() / torch.tensor(copies)
            self.squares.index_add_(0, torch.tensor(layers), squares)

    def on_gradient_norm(self, norm: Any) -> None:
        self.gradient_norm = norm

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if not self.measures:
            return
        for hook in self._hooks:
            hook.remove()
        squares = sum_over_ranks(self.squares.tolist())
        # the norm of all layers together: before clipping, None if nothing was clipped; and now
        whole = None if self.gradient_norm is None else float(self.gradient_norm)
        total, found = math.sqrt(sum(squares)), {}
        if 0 < total < math.inf and math.isfinite(whole or 0):
            # clipping has multiplied all gradients with one factor; the norm before it undoes this
            factor = 1.0 if whole is None else whole / total
            norms = zip(self.layers, squares, strict=True)
            found = {layer: round(factor * math.sqrt(square), 8) for layer, square in norms}
        if self.is_due:
            self.latest = found
        if self.follows_alert and found and state.is_world_process_zero:
            self.run.add_event("layer_norms", step=state.global_step, gradient_norms=found)

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if "loss" in logs:
            logs.update({f"{PREFIX}{layer}": norm for layer, norm in self.latest.items()})
            self.latest = {}


MEMORY = 0.9
"""The weight of earlier measurements in the running means. A new one has the rest."""


@dataclass
class NoiseScale:
    """Estimate tr(Sigma) / |G|^2 from squared gradient norms at two batch sizes, in the unit of these."""

    small: float
    """The size of the smaller batch."""
    signal: float = 0.0
    noise: float = 0.0

    def add(self, small_square: float, big_square: float, big: float) -> None:
        """Add a measurement: mean squared norm for the smaller batch, squared norm for a batch of size `big`."""
        if not (math.isfinite(small_square) and math.isfinite(big_square)):
            return
        signal = (big * big_square - self.small * small_square) / (big - self.small)
        noise = (small_square - big_square) / (1 / self.small - 1 / big)
        # Both estimates are unbiased, but their ratio is not, and it is noisy: so each is smoothed before the division.
        self.signal = MEMORY * self.signal + (1 - MEMORY) * signal
        self.noise = MEMORY * self.noise + (1 - MEMORY) * noise

    @property
    def value(self) -> float | None:
        """The noise scale; None while an estimate is not positive, because too little is known yet."""
        return self.noise / self.signal if self.signal > 0 and self.noise > 0 else None


class NoiseScaleCallback(TrainerCallback, ExportableState):
    """Measure on every `every_steps`-th step, and log `stability/gradient_noise_scale` in tokens.

    The small batch is a micro-batch: the mean over all of them, on all ranks. The big batch is the whole step. The
    Trainer reports its norm before clipping. On all other steps nothing is done.
    """

    def __init__(self, every_steps: int, sequence_length: int) -> None:
        self.every_steps, self.sequence_length = every_steps, sequence_length
        self.scale: NoiseScale | None = None
        self.measures, self.is_new, self.gradient_norm = False, False, None

    def on_train_begin(self, args, state, control, model, optimizer, **kwargs) -> None:
        if args.gradient_accumulation_steps * args.world_size == 1:
            print(
                "monitors.noise_scale_steps: a step is one micro-batch here, so there is nothing to compare it with; "
                "a smaller training.per_device_train_batch_size gives two sizes",
                file=sys.stderr,
            )
            return
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # ranks that split layers: each has the gradients of all parameters that are not split
        self.degree = deepspeed.tensor_part_and_degree()[1]
        name = type(self).__name__
        saved = state.stateful_callbacks.get(name, self.state())["attributes"]
        self.scale = NoiseScale(args.per_device_train_batch_size * self.sequence_length, **saved)
        state.stateful_callbacks[name] = self.state()

    def on_step_begin(self, args, state, control, optimizer, **kwargs) -> None:
        self.measures = self.scale is not None and (state.global_step + 1) % self.every_steps == 0
        if self.measures:
            # before the step, which may change the scale for the next one
            self.loss_scale = loss_scale(optimizer)
            self._norms, self._sum, self._passes = [], None, 0
            # These hooks run before what accumulates, reduces or shards a gradient. They see that of one backward
            # pass, whole and unreduced, at every ZeRO stage and under DDP.
            self._hooks = [
                parameter.register_hook(partial(self._see, is_split=bool(deepspeed.split_part(parameter))))
                for parameter in self.parameters
            ]

    def _see(self, gradient: torch.Tensor, is_split: bool) -> None:
        norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
        # so that in the sum over these ranks every parameter is counted `degree` times
        self._norms.append(norm * math.sqrt(self.degree) if is_split else norm)

    def on_substep_end(self, args, state, control, **kwargs) -> None:
        if self.measures and self._norms:
            # one number is kept of a backward pass instead of one for each parameter
            square = torch.stack(self._norms).double().square().sum()
            self._sum = square if self._sum is None else self._sum + square
            self._norms.clear()
            self._passes += 1

    def on_gradient_norm(self, norm: Any) -> None:
        self.gradient_norm = norm

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if not self.measures:
            return
        self.on_substep_end(args, state, control)  # the last backward pass
        for hook in self._hooks:
            hook.remove()
        total = 0.0 if self._sum is None else self._sum.item()  # waits for the device
        total, passes = sum_over_ranks([total, self._passes])
        # ranks that split layers make a pass together
        total, passes = total / self.degree, passes / self.degree
        # one micro-batch is the whole step: there are no two sizes to compare
        if self.gradient_norm is None or passes < 2:
            return
        # The backward pass of a micro-batch starts from its share of the step's mean loss, times the loss scale.
        small_square = total / passes * (self._passes / self.loss_scale) ** 2
        self.scale.add(small_square, float(self.gradient_norm) ** 2, passes * self.scale.small)
        self.is_new = True

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if "loss" in logs and self.is_new and self.scale.value is not None:
            logs["stability/gradient_noise_scale"] = round(self.scale.value, 3)
            self.is_new = False

    def state(self) -> dict:
        scale = self.scale
        return {"args": {}, "attributes": {"signal": scale.signal, "noise": scale.noise} if scale else {}}


def loss_scale(optimizer: Any) -> float:
    """Return the factor of the loss before the backward pass: the loss scale of fp16, else 1."""
    scaler = getattr(optimizer, "scaler", None)
    # torch's, without DeepSpeed; DeepSpeed's fp16 optimizers have `loss_scale`
    if scaler is not None:
        return scaler.get_scale()
    return float(getattr(getattr(optimizer, "optimizer", optimizer), "loss_scale", 1.0))


# Measure the largest attention logits and the sizes of activations on chosen steps, and clip queries and keys.
#
# A logit that grows without end, and layers whose outputs do, are seen in them long before the loss shows anything. The
# passes are those of training itself, whatever the kernel; on all other steps nothing is computed.


class ActivationsCallback(TrainerCallback):
    """Measure every `every_steps`-th step for the next row of metrics, over all of its tokens."""

    def __init__(self, every_steps: int) -> None:
        self.every_steps, self.measures, self.latest = every_steps, False, {}

    def on_step_begin(self, args, state, control, model, **kwargs) -> None:
        self.measures = (state.global_step + 1) % self.every_steps == 0
        if self.measures:
            attention_logits.forget_logits(model)
            self.was_on, attention_logits.WATCH.is_on = attention_logits.WATCH.is_on, True
            self.sums: dict[str, list[torch.Tensor]] = {}
            self.names = {layer: name for name, layer in layers_of(model)}
            self._hooks = [layer.register_forward_hook(self._see) for layer in self.names]

    # outside of compiled code; a recomputed layer is seen twice, with the same numbers
    @torch.compiler.disable
    @torch.no_grad()
    def _see(self, layer: nn.Module, inputs: tuple, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple | list) else output
        if layer.training:
            square = torch.linalg.vector_norm(hidden, dtype=torch.float32).double().square()
            self.sums.setdefault(self.names[layer], []).append(square / hidden.numel())

    def on_step_end(self, args, state, control, model, **kwargs) -> None:
        if not self.measures:
            return
        for hook in self._hooks:
            hook.remove()
        attention_logits.WATCH.is_on = self.was_on
        self.latest = {}
        for name, largest in attention_logits.read_logits(model).items():
            key = f"stability/attention_logit/{layer_of(f'{name}.')}"
            self.latest[key] = max(round(largest.max().item(), 6), self.latest.get(key, -math.inf))
        # one copy to the host for all layers; every pass has as many tokens
        means = torch.stack([torch.stack(squares).mean() for squares in self.sums.values()]).tolist()
        *means, ranks = sum_over_ranks([*means, 1.0])
        for name, mean in zip(self.sums, means, strict=True):
            self.latest[f"stability/activation/{name}"] = round(math.sqrt(mean / ranks), 8)

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if "loss" in logs:
            logs.update(self.latest)
            self.latest = {}


class LogitClip(TrainerCallback):
    """Shrinks queries and keys right after an optimizer's step, in what it steps: whole parameters or ZeRO's slices.

    The weights that DeepSpeed computes with are made of them afterwards, so that nothing more is sent than the largest
    logits of all heads.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.factors: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args, state, control, model, optimizer, **kwargs) -> None:
        attention_logits.WATCH.is_on = True
        self.begin(model, getattr(optimizer, "optimizer", optimizer))

    def on_train_end(self, args, state, control, **kwargs) -> None:
        attention_logits.WATCH.is_on = False

    def begin(self, model: PreTrainedModel, optimizer: Any) -> None:
        """Clip from the next step on. optimizer: torch's, or DeepSpeed's of stage 1, 2 or 3."""
        self.model, self.units = model, attention_logits.clipped_units(model)
        names = {parameter: name for name, parameter in model.named_parameters() if name in self.units}
        self.parts: dict[int, list[tuple[str, UnitPart]]] = {}
        for piece in stepped_slices(optimizer):
            if (name := names.get(piece.parameter)) is None:
                continue
            # a bias is a column; of a split layer a slice counts in this rank's rows
            shape = (*deepspeed.whole_shape(piece.parameter), 1)[:2]
            first, _ = deepspeed.split_part(piece.parameter).get(0, (0, 0))
            division = UnitDivision.of(shape, self.units[name].transposed and shape[1] > 1)
            parts = division.parts(piece.start, piece.numel, piece.offset, first)
            self.parts.setdefault(id(piece.tensor), []).extend((name, part) for part in parts)
        for stepper in deepspeed.stepping_optimizers(optimizer):
            # before an average takes the weights
            hook_first(stepper, self._clip, after_step=True)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.factors = {}
        attention_logits.forget_logits(self.model)

    @torch.no_grad()
    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.factors:  # the first of several calls in a step; all ranks make the same ones
            logits = attention_logits.read_logits(self.model)
            for name, units in self.units.items():
                self.factors[name] = attention_logits.factors(units, logits[units.layer], self.threshold)
        for tensor in stepped(optimizer):
            # a step that was refused has no gradients: it changes nothing
            for name, part in self.parts.get(id(tensor), ()) if tensor.grad is not None else ():
                factor = self.factors[name][part.first : part.first + part.num_units].to(tensor)
                part.of(tensor.view(-1)).mul_(factor if part.are_columns else factor[:, None])


def refuse_frozen_projections(model: PreTrainedModel) -> None:
    """Raise `UserError` if `LogitClip` could not shrink all that it must, because `model.frozen` names some of it."""
    units = attention_logits.clipped_units(model)
    if frozen := [
        name for name, each in model.named_parameters() if name in units and not each.requires_grad
    ]:
        what = f"is set, and {frozen[0]} is frozen (model.frozen): its logits could not be clipped"
        raise UserError(f"optimizer.qk_clip: {what}; set it to null, or train that")
