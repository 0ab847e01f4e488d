"""Optimizers: which parameters belong together, Muon for the hidden matrices, and what each stage allows."""

from pretraining.training.optimizers.choose import choose_optimizer
from pretraining.training.optimizers.clipping import choose_clipping
from pretraining.training.optimizers.groups import describe_groups
from pretraining.training.optimizers.muon import Muon
from pretraining.training.optimizers.partitions import BindPartitions, partition_fragments
from pretraining.training.optimizers.schedule_free import counting_by_tensor

__all__ = [
    "BindPartitions",
    "Muon",
    "choose_clipping",
    "choose_optimizer",
    "counting_by_tensor",
    "describe_groups",
    "partition_fragments",
]
