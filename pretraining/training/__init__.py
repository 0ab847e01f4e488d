"""The loop around the Trainer: ranks, arguments, and one callback for each concern."""

from pretraining.training.arguments import build_arguments
from pretraining.training.collate import collate_blocks
from pretraining.training.hangs import HangCallback
from pretraining.training.machine import find_machine
from pretraining.training.metrics import MetricsCallback
from pretraining.training.optimizers import choose_clipping, choose_optimizer
from pretraining.training.peak_memory import PeakMemory
from pretraining.training.progress import ProgressCallback
from pretraining.training.ranks import device_name, join_ranks, joined_ranks, leave_ranks
from pretraining.training.speed import SpeedMeter
from pretraining.training.stability import StabilityMonitor
from pretraining.training.stopping import StopRequests
from pretraining.training.trackers import build_trackers
from pretraining.training.trainer import PretrainingTrainer

__all__ = [
    "HangCallback",
    "MetricsCallback",
    "PeakMemory",
    "PretrainingTrainer",
    "ProgressCallback",
    "SpeedMeter",
    "StabilityMonitor",
    "StopRequests",
    "build_arguments",
    "build_trackers",
    "choose_clipping",
    "choose_optimizer",
    "collate_blocks",
    "device_name",
    "find_machine",
    "join_ranks",
    "joined_ranks",
    "leave_ranks",
]
