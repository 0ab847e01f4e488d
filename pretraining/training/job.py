"""Hold what every attempt of one start of a run works with."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pretraining.data.prepared import PreparedData
from pretraining.planning.run_plan import RunPlan
from pretraining.recipe import Recipe
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.arrival import Arrival
from pretraining.training.monitors import RunMonitors


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
