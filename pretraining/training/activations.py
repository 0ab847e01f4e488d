"""Measure the largest attention logits and the sizes of activations on chosen steps, and clip queries and keys.

A logit that grows without end, and layers whose outputs do, are seen in them long before the loss shows anything. The
passes are those of training itself, whatever the kernel; on all other steps nothing is computed.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from pretraining.runtime.process_group import sum_over_ranks
from pretraining.training.gradients import UnitDivision, UnitPart, layer_of, stepped, stepped_slices
from pretraining.upstream import attention_logits
from pretraining.upstream.deepspeed import split_part, stepping_optimizers, whole_shape
from pretraining.upstream.saved_tensors import layers_of
from pretraining.upstream.torch import hook_first


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
            shape = (*whole_shape(piece.parameter), 1)[:2]
            first, _ = split_part(piece.parameter).get(0, (0, 0))
            division = UnitDivision.of(shape, self.units[name].transposed and shape[1] > 1)
            parts = division.parts(piece.start, piece.numel, piece.offset, first)
            self.parts.setdefault(id(piece.tensor), []).extend((name, part) for part in parts)
        for stepper in stepping_optimizers(optimizer):
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
