"""How evenly a mixture of experts uses its experts, counted in the model's own forward passes."""

import math
from collections.abc import Callable, Sequence

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from pretraining.recipe import Recipe, model_with_defaults
from pretraining.recipe.model import is_exact
from pretraining.runtime.process_group import sum_over_ranks
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.alerts import advice

PREFIX = "stability/expert_load/"
STARVED = 0.1
"""Of an even share: an expert that gets less starves ..."""
WINDOWS = 3
"""... where it did in so many logged windows in a row ..."""
FEWEST = 100
"""... in each of which an even share was at least so many tokens."""


def experts_per_token(recipe: Recipe) -> int | None:
    """To how many experts a token is sent; None where the model's outputs do not tell of any, as is known of them."""
    model = model_with_defaults(recipe.model)
    tells = is_exact(model) and model.get("output_router_logits")
    return model["num_experts_per_tok"] if tells else None


class ExpertLoad(TrainerCallback, ExportableState):
    """Counts on the device what each expert was chosen for; the ranks' counts are added up at logging.

    Nothing waits before that, and whatever computes the loss does not matter: the routers' scores come with the
    model's outputs. A starving expert is told of once, until it has recovered.
    """

    def __init__(self, run: RunFolder, chosen: int):
        """chosen: experts a token is sent to."""
        self.run, self.chosen = run, chosen
        self.counts: torch.Tensor | None = None
        self.starved: dict[tuple[int, int], int] = {}

    def around(self, compute_loss: Callable) -> Callable:
        """The Trainer's `compute_loss_func`, whose outputs are counted first."""

        def counted(outputs, labels, num_items_in_batch=None):
            self.count(outputs.router_logits)
            return compute_loss(outputs, labels, num_items_in_batch=num_items_in_batch)

        return counted

    @torch.no_grad()
    def count(self, router_logits: Sequence[torch.Tensor]) -> None:
        """router_logits: [tokens, experts] of every mixture layer."""
        if self.counts is None:
            shape = len(router_logits), router_logits[0].shape[-1]
            self.counts = torch.zeros(shape, dtype=torch.int64, device=router_logits[0].device)
        for layer, logits in zip(self.counts, router_logits, strict=True):
            experts = logits.topk(self.chosen, dim=-1, sorted=False).indices.flatten()
            layer.scatter_add_(0, experts, torch.ones_like(experts))

    def on_train_begin(self, args, state, control, **kwargs):
        name = type(self).__name__
        saved = state.stateful_callbacks.get(name, self.state())
        self.starved = {(layer, expert): windows for layer, expert, windows in saved["attributes"]["starved"]}
        state.stateful_callbacks[name] = self.state()

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" not in logs or self.counts is None:
            return
        counts = self._take_counts()
        logs.update({f"{PREFIX}{name}": value for name, value in load_metrics(counts).items()})
        found = self._newly_starved(counts)
        if found and state.is_world_process_zero:
            kind = "starved_experts"
            self.run.add_event(kind, step=state.global_step, experts=found, **advice(kind))

    def _take_counts(self) -> list[list[float]]:
        """[layers, experts] over all ranks since the last call."""
        num_experts, flat = self.counts.shape[1], sum_over_ranks(self.counts.flatten().tolist())
        self.counts = None
        return [flat[start : start + num_experts] for start in range(0, len(flat), num_experts)]

    def _newly_starved(self, counts: list[list[float]]) -> list[dict]:
        """Experts that have been starving for exactly `WINDOWS` windows now; the same on every rank."""
        now = {}
        for layer, row in enumerate(counts):
            even = sum(row) / len(row)
            for expert, count in enumerate(row):
                if even >= FEWEST and count < STARVED * even:
                    now[layer, expert] = self.starved.get((layer, expert), 0) + 1
        self.starved = now
        return [
            {"layer": layer, "expert": expert, "share": counts[layer][expert] / sum(counts[layer])}
            for (layer, expert), windows in now.items()
            if windows == WINDOWS
        ]

    def state(self) -> dict:
        """What checkpoints keep of it."""
        starved = [[layer, expert, windows] for (layer, expert), windows in self.starved.items()]
        return {"args": {}, "attributes": {"starved": starved}}


def load_metrics(counts: list[list[float]]) -> dict[str, float]:
    """{"max_over_mean", "entropy"} of the least even layer, and of every mixture layer, which are numbered from 0.

    counts: [layers, experts]. max_over_mean: the busiest expert's load over an even share, 1 at best. entropy: of the
    shares, as a part of an even spread's, 1 at best.
    """
    uneven = [max(row) * len(row) / sum(row) for row in counts]
    entropies = [_entropy(row) / math.log(len(row)) if len(row) > 1 else 1.0 for row in counts]
    return {
        "max_over_mean": round(max(uneven), 4),
        "entropy": round(min(entropies), 4),
        **{f"max_over_mean/{layer}": round(value, 4) for layer, value in enumerate(uneven)},
        **{f"entropy/{layer}": round(value, 4) for layer, value in enumerate(entropies)},
    }


def _entropy(counts: list[float]) -> float:
    """In nats."""
    total = sum(counts)
    return -sum(count / total * math.log(count / total) for count in counts if count)
