"""Hold a part of a table as AutoTP holds a part of a matrix; deepspeed 0.19.8.

AutoTP cuts a weight in place, notes on it what was cut, and marks it, so that gradient norms count each part once and
exports gather the whole. `hold_rows` has AutoTP's own layer write the note and the marks for a weight which our modules
keep (`model/parallel.py`). All that reads them (`upstream/deepspeed.py`) then holds for these weights too.

DeepSpeed has layers for it, `VocabParallelEmbedding` and `VocabParallelLinear`, which are not used. They take the place
of the model's modules, install a loss of their own, without a z-loss and on all logits of a rank at once, and split the
embedding only if it is also the head. Held by test_vocabulary_parallel.py. May go once `vocab_parallel_lm_head`
leaves the loss to its user.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import LinearLayer
from deepspeed.utils import groups
from torch import nn


class HeldRows(NamedTuple):
    """Which rows of a table this rank has."""

    first: int
    numbers: tuple[int, ...]
    """How many each rank of the group has; the fewer ones come last."""
    group: dist.ProcessGroup

    @property
    def own(self) -> int:
        """Number of this rank's rows."""
        return self.numbers[dist.get_rank(self.group)]

    @property
    def most(self) -> int:
        """Number of rows of the rank that has most."""
        return max(self.numbers)

    def find(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for each index of the table the row here (0 if it is another rank's), and whether it is here."""
        rows = indices - self.first
        is_here = (rows >= 0) & (rows < self.own)
        return rows.masked_fill(~is_here, 0), is_here


def make_tensor_groups(degree: int) -> dist.ProcessGroup:
    """Make the groups of ranks that split layers, `degree` neighbours each, and return this rank's. A collective.

    They are those that the engine would make later.
    """
    groups._init_tp_mesh_device(tensor_model_parallel_size=degree)
    return groups.get_tensor_model_parallel_group()


def hold_rows(modules: Sequence[Any], group: dist.ProcessGroup) -> HeldRows:
    """Leave to this rank its rows of the weight that these modules share. All ranks of the group call it.

    The first ranks have a row more if the degree does not divide them. If ZeRO-3 has the weight in shards, it is
    gathered once, and the engine partitions what is left over the data ranks.
    """
    weight = modules[0].weight
    if hasattr(weight, "ds_id"):
        with deepspeed.zero.GatheredParameters([weight]):
            whole = nn.Parameter(weight.data.clone(), requires_grad=weight.requires_grad)
        if hasattr(weight, "is_wide"):  # `wide_weights.py`
            whole.is_wide = weight.is_wide
        weight = whole
        for module in modules:
            module.weight = weight
    is_trained = weight.requires_grad
    # Only for its notes: a layer of another name would be cut by heads.
    layer = LinearLayer(
        SimpleNamespace(weight=weight, bias=None), group, skip_partition=True, name="vocabulary"
    )
    numbers = layer._partition_sizes
    rows = HeldRows(sum(numbers[: layer.tp_index]), numbers, group)
    # a copy, or the whole would stay in memory
    weight.data = weight.data[rows.first : rows.first + rows.own].clone()
    weight.requires_grad_(is_trained)  # the layer takes this for inference until there is an engine
    layer._mark_uc_metadata()
    return rows
