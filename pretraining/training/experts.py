"""The experts of a mixture: how evenly they are used, and the correction biases that follow their load."""

import math
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from pretraining.planning.quantities import several
from pretraining.runtime.process_group import sum_over_ranks
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.stability import ADVICE

PREFIX = "stability/expert_load/"
STARVED, WINDOWS, FEWEST = 0.1, 3, 100
"""An expert starves if it gets less than `STARVED` of an even share in `WINDOWS` logged windows in a row. Windows in
which an even share is less than `FEWEST` tokens do not count."""


class ExpertLoad(TrainerCallback, ExportableState):
    """Count on the device how many tokens each expert gets; log it, and let the correction biases follow it.

    After each step the bias of an expert with fewer tokens than an even share grows by `bias_rate`, that of one with
    more falls by it (Wang et al. 2024, arXiv 2408.15664, algorithm 1; DeepSeek-V3), unless the step was refused. The
    load is that of the whole step, all ranks and micro-batches, so that the biases do not depend on how a step is
    divided. They are buffers of the model: in its checkpoints, and in the export.

    The host waits for the counts at logging alone. Any loss function works, because the choices come with the model's
    forward pass. A starving expert is reported once, and again only after it has recovered.
    """

    def __init__(
        self,
        run: RunFolder,
        bias_rate: float = 0.0,
        logs: bool = True,
        refused_last_step: Callable[[], bool] = lambda: False,
    ) -> None:
        """refused_last_step: whether the step that has just ended was not applied, the same on every rank."""
        self.run, self.bias_rate, self.logs = run, bias_rate, logs
        self.refused_last_step = refused_last_step
        self.routing: Any = None
        self.step: list[torch.Tensor] | None = None
        """Counts of this rank in the step, [experts] of every mixture layer; below, since the last row."""
        self.window: list[torch.Tensor] | None = None
        self.starved: dict[tuple[int, int], int] = {}

    def around(self, compute_loss: Callable) -> Callable:
        """Wrap the Trainer's `compute_loss_func`: count the choices of the forward pass first."""

        def counted(outputs, labels, num_items_in_batch=None):
            if self.routing is not None:
                self.count(self.routing.choices, self.routing.sizes)
            return compute_loss(outputs, labels, num_items_in_batch=num_items_in_batch)

        return counted

    @torch.no_grad()
    def count(self, choices: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
        """Count a micro-batch. choices: [tokens, chosen] of every mixture layer; sizes: how many experts each has."""
        if self.step is None:
            self.step = [choices[0].new_zeros(size) for size in sizes]
        for counts, chosen in zip(self.step, choices, strict=True):
            # scatter_add_ and not bincount, because the host would wait for bincount
            counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        name, self.routing = type(self).__name__, getattr(model, "routing", None)
        saved = state.stateful_callbacks.get(name, self.state())
        self.starved = {(layer, expert): windows for layer, expert, windows in saved["attributes"]["starved"]}
        state.stateful_callbacks[name] = self.state()

    @torch.no_grad()
    def on_step_end(self, args, state, control, **kwargs) -> None:
        step, self.step = self.step, None
        if step is None:
            return
        self.window = (
            step if self.window is None else [sum(pair) for pair in zip(self.window, step, strict=True)]
        )
        biases = self.routing.biases if self.bias_rate and self.routing is not None else []
        if self.refused_last_step() or not any(bias is not None for bias in biases):
            return
        everywhere = torch.cat(step)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(everywhere)
        for bias, counts in zip(biases, everywhere.split([len(counts) for counts in step]), strict=True):
            if bias is not None:
                # compared in integers, n * count with the sum: an even share does not move by rounding
                bias.add_(torch.sign(counts.sum() - len(counts) * counts), alpha=self.bias_rate)

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if "loss" not in logs or self.window is None or not self.logs:
            return
        sizes = [len(counts) for counts in self.window]
        flat = iter(sum_over_ranks(torch.cat(self.window).tolist()))  # the host waits for the device
        self.window, counts = None, [list(islice(flat, size)) for size in sizes]
        logs.update({f"{PREFIX}{name}": value for name, value in load_metrics(counts).items()})
        now = {}
        for layer, row in enumerate(counts):
            even = sum(row) / len(row)
            for expert, count in enumerate(row):
                if even >= FEWEST and count < STARVED * even:
                    now[layer, expert] = self.starved.get((layer, expert), 0) + 1
        # an expert that has recovered is not in it, and counts from 0 again
        self.starved = now
        found = [
            {"layer": layer, "expert": expert, "share": counts[layer][expert] / sum(counts[layer])}
            for (layer, expert), windows in now.items()
            # not ">=": each expert is reported once
            if windows == WINDOWS
        ]
        if found and state.is_world_process_zero:
            advice = ADVICE["starved_experts"]
            self.run.add_event("starved_experts", step=state.global_step, experts=found, **advice)
            first = f"expert {found[0]['expert']} of layer {found[0]['layer']}, {found[0]['share']:.1%} of its choices"
            line = f"step {state.global_step}: {several(len(found), 'expert')} starved, the first: {first}"
            print(f"{line}; try {advice['try'][0]}", file=sys.stderr, flush=True)

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
