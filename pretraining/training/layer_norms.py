"""Gradient norms layer by layer, on demand: of the whole step, before clipping, at any ZeRO stage."""

import math
import re
from collections.abc import Callable

import torch
from transformers import TrainerCallback

from pretraining.runtime.process_group import sum_over_ranks
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.optimizers import partition_fragments

PREFIX = "stability/gradient_norm/"
_BLOCK = re.compile(r".*?\.\d+(?=\.)")


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to: `transformer.h.0.attn.c_attn.weight` -> `transformer.h.0`.

    Outside the blocks each module is its own: `transformer.wte.weight` -> `transformer.wte`.
    """
    block = _BLOCK.match(name)
    return block[0] if block else name.rpartition(".")[0]


class LayerNorms:
    """Looks at the gradients that the optimizer is handed, between `open` and `close`; outside it costs nothing.

    They are summed over ranks and micro-batches by then and, under ZeRO, lie in flat slices: each rank adds up the
    squares of its own. What clipping did to them is the same factor everywhere, which the whole norm undoes.
    """

    def __init__(self, model: torch.nn.Module, optimizer):
        """optimizer: the Trainer's, as accelerate or DeepSpeed wrapped it."""
        inner = getattr(optimizer, "optimizer", optimizer)
        names = {id(parameter): layer_of(name) for name, parameter in model.named_parameters()}
        self.layers = list(dict.fromkeys(names.values()))
        numbers = {key: self.layers.index(layer) for key, layer in names.items()}
        # Hashed by identity: (layer, offset, elements) of what lies in each tensor that is stepped.
        self.places: dict[int, list[tuple[int, int, int]]] = {}
        if isinstance(inner, torch.optim.Optimizer):
            self.optimizers, self.is_whole = [inner], True
            for parameter in model.parameters():
                self.places[id(parameter)] = [(numbers[id(parameter)], 0, parameter.numel())]
        else:
            steppers = (inner.optimizer, getattr(inner, "backup_optimizer", None))
            self.optimizers, self.is_whole = [each for each in steppers if each is not None], False
            for tensor, piece in partition_fragments(model, inner, lambda each: numbers.get(id(each))):
                self.places.setdefault(id(tensor), []).append((piece.parameter, piece.offset, piece.numel))
        self.squares = torch.zeros(len(self.layers), dtype=torch.float64)
        self._hooks: list = []

    def open(self) -> None:
        """Look at the step that comes."""
        self.squares.zero_()
        for optimizer in self.optimizers:
            hook = optimizer.register_step_pre_hook(self._see)
            optimizer._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)  # before clipping by value
            self._hooks.append(hook)

    @torch.no_grad()
    def _see(self, optimizer: torch.optim.Optimizer, *_) -> None:
        norms, layers = [], []
        for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
            if tensor.grad is not None:
                flat = tensor.grad.reshape(-1)
                for layer, offset, numel in self.places.get(id(tensor), ()):
                    piece = flat[offset : offset + numel]
                    norms.append(torch.linalg.vector_norm(piece, dtype=torch.float32))
                    layers.append(layer)
        if norms:
            self.squares.index_add_(0, torch.tensor(layers), torch.stack(norms).double().square().cpu())

    def close(self, whole_norm: float | None) -> dict[str, float]:
        """{layer: gradient norm before clipping}; empty where the step had no finite gradients. A collective.

        whole_norm: of all layers together, before clipping; None: nothing was clipped.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        squares = self.squares.tolist()
        if not self.is_whole:
            squares = sum_over_ranks(squares)
        total = math.sqrt(sum(squares))
        if not 0 < total < math.inf or not math.isfinite(whole_norm or 0):
            return {}
        factor = 1.0 if whole_norm is None else whole_norm / total
        return {layer: factor * math.sqrt(s) for layer, s in zip(self.layers, squares, strict=True)}


class LayerNormsCallback(TrainerCallback):
    """Measures every `every_steps`-th step, for the next row of metrics, and the step after an alert, as an event."""

    def __init__(self, run: RunFolder, every_steps: int | None, alerted_step: Callable[[], int | None]):
        """alerted_step: the last step that an alert was told of, the same on every rank."""
        self.run, self.every_steps, self.alerted_step = run, every_steps, alerted_step
        self.norms: LayerNorms | None = None
        self.measures, self.gradient_norm, self.latest = False, None, {}

    def on_step_begin(self, args, state, control, model, optimizer, **kwargs):
        step = state.global_step
        self.is_due = self.every_steps is not None and (step + 1) % self.every_steps == 0
        self.follows_alert = step > 0 and self.alerted_step() == step
        self.measures = self.is_due or self.follows_alert
        if self.measures:
            self.norms = self.norms or LayerNorms(model, optimizer)
            self.norms.open()

    def hear_gradient_norm(self, norm) -> None:
        """Of the whole step, before clipping; None where there was no clipping to tell of it."""
        self.gradient_norm = norm

    def on_step_end(self, args, state, control, **kwargs):
        if not self.measures:
            return
        whole = None if self.gradient_norm is None else float(self.gradient_norm)
        found = {layer: round(norm, 8) for layer, norm in self.norms.close(whole).items()}
        if self.is_due:
            self.latest = found
        if self.follows_alert and found and state.is_world_process_zero:
            self.run.add_event("layer_norms", step=state.global_step, gradient_norms=found)

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            logs.update({f"{PREFIX}{layer}": norm for layer, norm in self.latest.items()})
            self.latest = {}
