"""Build from the recipe everything that watches a run: stop requests, hangs, spikes, metrics.

Callbacks may have two methods beside the Trainer's own events:

- `on_gradient_norm(norm)`: the global gradient norm of each step, before clipping; None if nobody knows it.
- `on_sources(sources)`: [batch] numbers of the sources of the next micro-batch, before its forward pass.
"""

import argparse
import atexit
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.prepared import PreparedData
from pretraining.extend import all_of
from pretraining.planning.costs import price_of
from pretraining.planning.run_plan import RunPlan
from pretraining.recipe import Recipe
from pretraining.recipe.data import is_mixed
from pretraining.recipe.model import has_experts
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.arrival import Arrival
from pretraining.training.experts import ExpertLoad
from pretraining.training.gradients import ActivationsCallback, LayerNormsCallback, NoiseScaleCallback
from pretraining.training.hangs import HangCallback
from pretraining.training.metrics import MetricsCallback, ProgressCallback, SourceLoss
from pretraining.training.profile import PeakMemory, ProfileCallback
from pretraining.training.stability import StabilityMonitor
from pretraining.training.stopping import EarlyStopping, StopRequests
from pretraining.training.throughput import SpeedMeter, UseWatch
from pretraining.training.trackers import build_trackers

_MOST_SAMPLES = 16
"""The most samples of a step whose documents are named."""


class RunMonitors:
    """The monitors of one run. `begin` starts an attempt. A run that rolls back has several attempts."""

    def __init__(self, run: RunFolder, recipe: Recipe) -> None:
        self.run, self.recipe = run, recipe
        # these two outlive an attempt: signals and heartbeats are set up once in a process
        self.stop = StopRequests(run, recipe.checkpoints.time_limit_hours)
        self.hangs = HangCallback(run, recipe.monitors.hang_minutes)

    def begin(self, plan: RunPlan, start: Any, dataset: PackedDataset) -> None:
        """Watch an attempt that begins at `start` and reads `dataset`."""
        run, recipe, self.start = self.run, self.recipe, start
        origins = step_origins(dataset, recipe, run, start.step)
        self.memory = PeakMemory()
        self.stability = StabilityMonitor(run, recipe.monitors, origins)
        every = recipe.monitors.noise_scale_steps
        noise = [] if every is None else [NoiseScaleCallback(every, recipe.sequence_length)]
        # bound here: the monitor of a later attempt replaces self.stability
        layers_every, alerted = recipe.monitors.layer_norms_steps, self.stability
        self.gradients = [*noise, LayerNormsCallback(run, layers_every, lambda: alerted.alerted_step)]
        if (every := recipe.monitors.activations_steps) is not None:
            self.gradients.append(ActivationsCallback(every))
        self.experts = []
        if has_experts(recipe.model):
            rate = recipe.loss.bias_rate if recipe.loss.balance == "auto" else 0.0
            if recipe.monitors.expert_load or rate:
                logs = recipe.monitors.expert_load
                self.experts = [ExpertLoad(run, rate, logs, lambda: alerted.refused_last_step)]
        separate = recipe.monitors.source_loss and is_mixed(recipe.data)
        self.sources = [SourceLoss(recipe.data.source_names)] if separate else []
        settings = recipe.monitors.profile
        self.profile = [] if settings is None else [ProfileCallback(run, settings)]
        self.speed = SpeedMeter.of(recipe, plan.world_size, start.progress(recipe))
        price = price_of(recipe.report.dollars_per_gpu_hour, plan.machine.gpu if plan.machine else None)
        use = recipe.monitors.low_use and UseWatch(recipe.monitors.low_use, plan.predicted.get("mfu"))
        self.metrics = MetricsCallback(run, self.speed, lambda: dataset.tokens_per_epoch, price, use)
        report_to, project = recipe.training.report_to, recipe.training.get("project")
        self.trackers = build_trackers(report_to, run, recipe.name, project, recipe.monitors.prometheus)

    def loss(self, loss: Callable) -> Callable:
        """Wrap the loss, so that the monitors see it before the backward pass."""
        watching: list[Any] = [*self.sources, *self.experts, self.stability.watch]
        for monitor in watching:
            loss = monitor.around(loss)
        return loss

    def callbacks(self, saves: TrainerCallback) -> list[TrainerCallback]:
        """Return the callbacks in the order in which the Trainer must call them."""
        judging = [self.stability, EarlyStopping(self.run, self.recipe.evaluation)]
        logging = [self.metrics, ProgressCallback(), *self.trackers]
        counting = [*self.gradients, *self.sources, *self.experts]
        # saving comes before metrics: the row of a step then includes the save before it
        # the user's own come before metrics, which then has what they add to the logs
        own = [each() for each in all_of(self.recipe.extensions, "callback").values()]
        return [SettledCollector(), self.hangs, *judging, *counting, *own, saves, *logging, *self.profile]


def notify(callbacks: Iterable[TrainerCallback], method: str, value: Any) -> None:
    """Call `method` of the callbacks that have it."""
    for callback in callbacks:
        handler = getattr(callback, method, None)
        if handler is not None:
            handler(value)


class SettledCollector(TrainerCallback):
    """Switch the garbage collector on when training begins. `train.py` imports the libraries with it off."""

    has_frozen = False
    """Whether what existed when training began is left out of collections."""

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        gc.collect()
        # what exists now lives as long as the run: later collections need not look at it
        gc.freeze()
        # nothing frozen is freed at the exit either, and triton would list its own as leaks
        atexit.register(gc.unfreeze)
        self.has_frozen = True
        gc.enable()


@dataclass
class Job:
    """What this process trains, with what, and where to."""

    recipe: Recipe
    plan: RunPlan
    data: PreparedData
    run: RunFolder
    options: argparse.Namespace
    """The command line's."""
    monitors: RunMonitors
    arrival: Arrival
    device: torch.device | None = None
    """On which the model is built, without numbers, in a rehearsal; None: on the host, with its weights."""
    checkpoints: Callable[..., Any] | None = None
    """Makes what a rehearsal saves and loads with, in place of a `CheckpointManager`."""


def step_origins(
    dataset: PackedDataset, recipe: Recipe, run: RunFolder, steps_before: int
) -> Callable[[int], dict]:
    """Make a function of the optimizer step, counted from 1, that says where its samples came from, for alerts.

    It returns {"samples", "documents", "flagged"}. samples: [first, last) positions of the global order, as
    `inspect --sample` takes them. documents: the document in which each of the first `_MOST_SAMPLES` blocks starts.
    flagged: what the guard found in blocks of the step. steps_before: steps of the run before the dataset begins.
    """
    names = recipe.data.source_names
    tokens_at, length = recipe.step_sizes.tokens_at, recipe.sequence_length

    def origins(step: int) -> dict:
        # By tokens, not by steps: the sizes of the steps may change during the run.
        read = [(tokens_at(before) - tokens_at(steps_before)) // length for before in (step - 1, step)]
        numbers = dataset.first_sample + np.arange(*read)
        # `numbers` count the samples of the run; a rollback may have left out windows of the order.
        positions = dataset.order.positions(numbers)
        documents = []
        blocks = dataset.order.blocks(numbers[:_MOST_SAMPLES]).tolist()
        for sample, block in zip(positions[:_MOST_SAMPLES].tolist(), blocks, strict=True):
            source, stretches = dataset.place(block)
            shard, document = dataset.splits[source].document_at(stretches[0][0])
            name = {"source": names[source]} if source < len(names) and len(dataset.splits) > 1 else {}
            documents.append({"sample": sample, **name, "shard": shard, "document": document})
        rows, named = read_rows(run.flagged_blocks), ("source", "shard", "document", "reasons")
        flagged = [row for row in rows if int(numbers[0]) <= row["sample"] <= int(numbers[-1])]
        return {
            "samples": [int(positions[0]), int(positions[-1]) + 1],
            "documents": documents,
            "flagged": [{key: row[key] for key in named} for row in flagged],
        }

    return origins
