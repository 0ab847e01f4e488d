"""The experts of a mixture: how evenly they are used, and the correction biases that follow their load."""

import math
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from pretraining.planning.quantities import several
from pretraining.runtime.process_group import sum_over_ranks
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.stability import ADVICE

PREFIX = "stability/expert_load/"
STARVED = 0.1
"""An expert starves if it gets less than this part of an even share ..."""
WINDOWS = 3
"""... in so many logged windows in a row ..."""
FEWEST = 100
"""... in each of which an even share was at least so many tokens."""


class RouterBias(TrainerCallback):
    """Move each expert's correction bias by `rate` a step: up if it had fewer tokens than an even share, down if more.

    Wang et al. 2024 (arXiv 2408.15664), algorithm 1, as DeepSeek-V3 does. The load is that of the whole step, all ranks
    and micro-batches, so that the biases do not depend on how a step is divided. They are buffers of the model: in
    checkpoints, and in the export.
    """

    def __init__(self, rate: float) -> None:
        self.rate, self.routing, self.counts = rate, None, None

    def around(self, compute_loss: Callable) -> Callable:
        """Wrap the Trainer's `compute_loss_func`: count the choices of the forward pass first."""

        def counted(outputs, labels, **keywords):
            if self.routing is not None:
                counts = self.routing.counts()
                self.counts = counts if self.counts is None else self.counts + counts
            return compute_loss(outputs, labels, **keywords)

        return counted

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        routing = getattr(model, "routing", None)
        if routing is not None and any(bias is not None for bias in routing.biases):
            self.routing = routing

    @torch.no_grad()
    def on_step_end(self, args, state, control, **kwargs) -> None:
        counts, self.counts = self.counts, None
        if counts is None:
            return
        if dist.is_initialized() and dist.get_world_size() > 1:
            # ranks that share tokens (split layers) all count them: a sign does not depend on the scale
            dist.all_reduce(counts)
        for bias, size, row in zip(self.routing.biases, self.routing.sizes, counts, strict=True):
            if bias is not None:
                # size * count against the sum: in integers, so that even is even
                bias.add_(torch.sign(row[:size].sum() - size * row[:size]), alpha=self.rate)


class ExpertLoad(TrainerCallback, ExportableState):
    """Count on the device how many tokens each expert gets. At logging the ranks' counts are added up.

    Nothing waits before that. Any loss function works, because the choices come with the model's forward pass.
    A starving expert is reported once, and again only after it has recovered.
    """

    def __init__(self, run: RunFolder, chosen: int | None = None) -> None:
        """chosen: how many experts a token is sent to; None: the model's `routing` knows what was chosen."""
        self.run, self.chosen, self.routing = run, chosen, None
        self.counts: torch.Tensor | None = None
        self.starved: dict[tuple[int, int], int] = {}

    def around(self, compute_loss: Callable) -> Callable:
        """Wrap the Trainer's `compute_loss_func`: count the model's outputs first."""

        def counted(outputs, labels, num_items_in_batch=None):
            if self.chosen is not None:
                self.count(outputs.router_logits)
            elif self.routing is not None:
                counts = self.routing.counts()
                self.counts = counts if self.counts is None else self.counts + counts
            return compute_loss(outputs, labels, num_items_in_batch=num_items_in_batch)

        return counted

    @torch.no_grad()
    def count(self, router_logits: Sequence[torch.Tensor]) -> None:
        """Count the chosen experts. router_logits: [tokens, experts] of every mixture layer."""
        if self.counts is None:
            shape = len(router_logits), router_logits[0].shape[-1]
            self.counts = torch.zeros(shape, dtype=torch.int64, device=router_logits[0].device)
        for layer, logits in zip(self.counts, router_logits, strict=True):
            # the order does not matter for a count, and sorting costs
            experts = logits.topk(self.chosen, dim=-1, sorted=False).indices.flatten()
            layer.scatter_add_(0, experts, torch.ones_like(experts))

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        name, self.routing = type(self).__name__, getattr(model, "routing", None)
        saved = state.stateful_callbacks.get(name, self.state())
        self.starved = {(layer, expert): windows for layer, expert, windows in saved["attributes"]["starved"]}
        state.stateful_callbacks[name] = self.state()

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if "loss" not in logs or self.counts is None:
            return
        num_experts = self.counts.shape[1]
        flat, self.counts = (
            sum_over_ranks(self.counts.flatten().tolist()),
            None,
        )  # the host waits for the device
        counts = [flat[start : start + num_experts] for start in range(0, len(flat), num_experts)]
        logs.update({f"{PREFIX}{name}": value for name, value in load_metrics(counts).items()})
        found = self._newly_starved(counts)
        if found and state.is_world_process_zero:
            advice = ADVICE["starved_experts"]
            self.run.add_event("starved_experts", step=state.global_step, experts=found, **advice)
            first = f"expert {found[0]['expert']} of layer {found[0]['layer']}, {found[0]['share']:.1%} of its choices"
            line = f"step {state.global_step}: {several(len(found), 'expert')} starved, the first: {first}"
            print(f"{line}; try {advice['try'][0]}", file=sys.stderr, flush=True)

    def _newly_starved(self, counts: list[list[float]]) -> list[dict]:
        """Return the experts that have starved for exactly `WINDOWS` windows now. The same on every rank."""
        now = {}
        for layer, row in enumerate(counts):
            even = sum(row) / len(row)
            for expert, count in enumerate(row):
                if even >= FEWEST and count < STARVED * even:
                    now[layer, expert] = self.starved.get((layer, expert), 0) + 1
        # an expert that has recovered is not in it, and counts from 0 again
        self.starved = now
        return [
            {"layer": layer, "expert": expert, "share": counts[layer][expert] / sum(counts[layer])}
            for (layer, expert), windows in now.items()
            # not ">=": each expert is reported once
            if windows == WINDOWS
        ]

    def state(self) -> dict:
        starved = [[layer, expert, windows] for (layer, expert), windows in self.starved.items()]
        return {"args": {}, "attributes": {"starved": starved}}


def load_metrics(counts: list[list[float]]) -> dict[str, float]:
    """Return {"max_over_mean", "entropy"} of the least even layer, and of every mixture layer, numbered from 0.

    counts: [layers, experts]. max_over_mean: the busiest expert's load divided by an even share, 1 at best. entropy:
    that of the shares divided by that of even shares, 1 at best.
    """
    uneven = [max(row) * len(row) / sum(row) for row in counts]
    entropies = []
    for row in counts:
        shares = [count / sum(row) for count in row if count]
        nats = -sum(share * math.log(share) for share in shares)
        entropies.append(nats / math.log(len(row)) if len(row) > 1 else 1.0)
    return {
        "max_over_mean": round(max(uneven), 4),
        "entropy": round(min(entropies), 4),
        **{f"max_over_mean/{layer}": round(value, 4) for layer, value in enumerate(uneven)},
        **{f"entropy/{layer}": round(value, 4) for layer, value in enumerate(entropies)},
    }
