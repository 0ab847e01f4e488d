"""Hold a part of a table, or some of the experts, as DeepSpeed's own layers hold their parts; deepspeed 0.19.8.

Rows of a table. AutoTP cuts a weight in place, notes on it what was cut, and marks it, so that gradient norms count
each part once and exports gather the whole. `hold_rows` has AutoTP's own layer write the note and the marks for a
weight which our modules keep (`model/parallel.py`). All that reads them (`upstream/deepspeed.py`) then holds
for these weights too.

DeepSpeed has layers for it, `VocabParallelEmbedding` and `VocabParallelLinear`, which are not used. They take the place
of the model's modules, install a loss of their own, without a z-loss and on all logits of a rank at once, and split the
embedding only if it is also the head. Held by test_vocabulary_parallel.py. May go once `vocab_parallel_lm_head`
leaves the loss to its user.

Experts. DeepSpeed knows parameters of which ranks hold different ones by attributes, from its own layers
(`deepspeed.moe`, AutoEP). `hold_experts` sets the same ones on a parameter of any module, which then keeps its name and
its place. What follows from them:

- Gradients are added up over the ranks that hold the same experts (expert-data-parallel), and divided by all ranks: an
  expert's gradient already contains the tokens of all ranks that it computed for.
- Stages 1 and 2 cut the master weights over the same ranks, in parameter groups marked `moe` (`expert_groups_of`). The
  engine looks for its own layers to know that there are any: `_configure_distributed_model` is wrapped, and says so
  for marked parameters too. Stage 3 looks at the parameters alone (`ds_zero_placement_family`).
- The gradient norm counts every expert once.

Held by test_layouts.py. May go once DeepSpeed can be told in public which ranks have copies of a
parameter.

AutoEP itself (`expert_parallel`, module_inject/auto_ep.py) is not used. It replaces router and experts by modules of
its own: weights get other names and shapes, and the router has no logits of its class, by which the router losses, the
load of experts, checkpoints and exports work. With transformers 5.24.0 it stops at the first layer: the registry of
recorded outputs (`_CanRecordRegistry`) has lost the default of its `get`.
"""

from collections.abc import Iterable, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.module_inject.layers import LinearLayer
from deepspeed.utils import groups
from torch import nn

from pretraining.upstream.deepspeed import Share, own_shape, share_of, split_groups


class HeldRows(NamedTuple):
    """Which rows of a table this rank has."""

    first: int
    numbers: tuple[int, ...]
    """How many each rank of the group has; the fewer ones come last."""
    group: dist.ProcessGroup

    @property
    def own(self) -> int:
        return self.numbers[dist.get_rank(self.group)]

    @property
    def most(self) -> int:
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
    held = SimpleNamespace(weight=weight, bias=None)
    layer = LinearLayer(held, group, skip_partition=True, name="vocabulary")
    numbers = layer._partition_sizes
    rows = HeldRows(sum(numbers[: layer.tp_index]), numbers, group)
    # a copy, or the whole would stay in memory
    weight.data = weight.data[rows.first : rows.first + rows.own].clone()
    weight.requires_grad_(is_trained)  # the layer takes this for inference until there is an engine
    layer._mark_uc_metadata()
    return rows


EXPERTS = "autoep_expert"
"""What DeepSpeed calls the parameters of experts, at stage 3."""


def make_expert_groups(size: int) -> dist.ProcessGroup:
    """Make the groups of ranks that split the experts, `size` neighbours each, and return this rank's. A collective."""
    configure = DeepSpeedEngine._configure_distributed_model
    if not hasattr(configure, "__wrapped__"):

        @wraps(configure)
        def configured(engine: DeepSpeedEngine, model: nn.Module) -> None:
            configure(engine, model)
            if any(not getattr(parameter, "allreduce", True) for parameter in model.parameters()):
                engine.has_moe_layers = True

        # engines that are made from now on find marked parameters in any module
        DeepSpeedEngine._configure_distributed_model = configured
    name = f"ep_size_{size}"
    if name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(size)
    return groups._get_expert_parallel_group(name)


def hold_experts(module: nn.Module, name: str, size: int) -> None:
    """Replace a parameter of a module by this rank's part along its first dimension, not filled yet.

    size: number of ranks that split the experts; their groups are made already.
    """
    whole = module.get_parameter(name)
    name_of_group = f"ep_size_{size}"
    group = groups._get_expert_parallel_group(name_of_group)
    copies = groups._get_expert_data_parallel_group(name_of_group)
    total, *others = own_shape(whole)
    rows = total // size
    empty = torch.empty(rows, *others, dtype=whole.dtype, device="meta" if whole.is_meta else "cpu")
    part = nn.Parameter(empty, requires_grad=whole.requires_grad)
    start = rows * dist.get_rank(group)
    part.share = Share(start, start + rows, total, group, copies)
    part.group_name = part.ds_zero_partition_group_name = name_of_group
    if hasattr(whole, "ds_id"):
        part.ds_zero_placement_family, part.ds_zero_partition_process_group = EXPERTS, copies
        whole.convert_to_zero_parameters([part])
    else:
        # DeepSpeed's mark of a parameter whose gradients are not those of all ranks
        part.allreduce = False
    module.register_parameter(name, part)


def expert_groups_of(param_groups: Iterable[dict]) -> list[dict]:
    """Split each parameter group into one without experts and one of experts alone; those of experts come last."""
    plain, experts = split_groups(param_groups, lambda parameter: share_of(parameter) is not None)
    return plain + [{**group, "moe": True, "name": group["params"][0].group_name} for group in experts]


def whole_experts(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return {name: whole tensor} of every split parameter, in host memory; {} but on rank 0. A collective."""
    found = {}
    for name, parameter in model.named_parameters():
        if (share := share_of(parameter)) is None:
            continue
        # without ZeRO-3 this does nothing
        with deepspeed.zero.GatheredParameters([parameter]):
            # one group has all experts
            if dist.get_global_rank(share.group, 0) == 0:
                own, is_first = parameter.detach().contiguous(), dist.get_rank() == 0
                parts = [torch.empty_like(own) for _ in range(dist.get_world_size(share.group))]
                dist.gather(own, parts if is_first else None, dst=0, group=share.group)
                if is_first:
                    found[name] = torch.cat([part.cpu() for part in parts])
    return found
