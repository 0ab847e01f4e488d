"""The loop around the Trainer: ranks, arguments, and one callback for each concern."""

from pretraining.training.arguments import build_arguments
from pretraining.training.collate import collate_blocks
from pretraining.training.machine import find_machine
from pretraining.training.optimizers import choose_clipping, choose_optimizer
from pretraining.training.ranks import device_name, join_ranks, joined_ranks, leave_ranks
from pretraining.training.trainer import PretrainingTrainer
from pretraining.training.watch import Watch

__all__ = [
    "PretrainingTrainer",
    "Watch",
    "build_arguments",
    "choose_clipping",
    "choose_optimizer",
    "collate_blocks",
    "device_name",
    "find_machine",
    "join_ranks",
    "joined_ranks",
    "leave_ranks",
]
