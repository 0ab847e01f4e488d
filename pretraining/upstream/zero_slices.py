"""Find where DeepSpeed keeps the parameters that an optimizer steps, at ZeRO stages 1 to 3; deepspeed 0.19.8.

An optimizer of DeepSpeed steps flat fp32 tensors: this rank's partitions. Checkpoints, Muon and the norms of layers
need to know which elements of which parameter are in them, and DeepSpeed has no function that tells it.

- Stages 1 and 2 lay the parameters of a group end to end and cut the whole into one partition a rank: `_hp_mapping` of
  a parameter is its slice of this rank's (mended by `zero_optimizers.link_slices`).
- Stage 3 cuts each parameter into equal shares, the last with padding (`ds_tensor`), and lays this rank's shares end to
  end, in sub-groups (`fp16_groups`). With NVMe a sub-group is in memory only while it is swapped in.

Held by tests/test_optimizer_states.py, tests/test_muon.py, tests/test_nvme.py and tests/test_reshard.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


class Slice(NamedTuple):
    """Elements [start, start + numel) of a flattened parameter, at `offset` in a flat tensor."""

    parameter: torch.nn.Parameter
    start: int
    tensor: torch.Tensor
    offset: int
    numel: int


class Partition(NamedTuple):
    """A flat tensor that this rank steps."""

    tensor: torch.Tensor
    group: int
    """Index of the optimizer's parameter group."""
    optimizer: torch.optim.Optimizer
    """The one that steps it."""
    parameters: list[torch.nn.Parameter]
    """All parameters that step with it, even if this rank's part holds no element of them."""
    slices: list[Slice]


def is_stage_3(optimizer: Any) -> bool:
    """Say if the optimizer is DeepSpeed's of stage 3."""
    return isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)


def is_stage_1_or_2(optimizer: Any) -> bool:
    """Say if the optimizer is DeepSpeed's of stage 1 or 2, that of bf16 weights included."""
    return isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer)


def zero_partitions(zero: Any) -> Iterator[Partition]:
    """Yield the flat tensors that a DeepSpeed optimizer steps on this rank, and what is in them; none at stage 0."""
    if is_stage_3(zero):
        yield from _of_sub_groups(zero)
    elif is_stage_1_or_2(zero):
        yield from _of_groups(zero)


def zero_slices(zero: Any) -> Iterator[Slice]:
    """Yield every slice of a parameter that a DeepSpeed optimizer of stage 1, 2 or 3 steps on this rank."""
    for partition in zero_partitions(zero):
        yield from partition.slices


def _of_groups(zero: Any) -> Iterator[Partition]:
    if isinstance(zero, BF16_Optimizer):
        groups = zip(zero.fp32_groups_flat_partition, zero.bf16_groups, strict=True)
    else:
        groups = zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True)
    for group, (tensor, parameters) in enumerate(groups):
        slices = []
        for parameter in parameters:
            if (mapping := parameter._hp_mapping) is not None:  # None: no element is in this rank's partition
                here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                slices.append(Slice(parameter, here.start, tensor, there.start, here.numel))
        yield Partition(tensor, group, zero.optimizer, list(parameters), slices)


def _of_sub_groups(zero: Any) -> Iterator[Partition]:
    for index, parameters in enumerate(zero.fp16_groups):
        tensor, slices, offset = zero.fp32_partitioned_groups_flat[index], [], 0
        for parameter in parameters:
            size = parameter.ds_tensor.ds_numel
            start = size * dist.get_rank(group=parameter.ds_process_group)
            numel = min(size, parameter.ds_numel - start)  # the last rank's share ends in padding
            if numel > 0:
                slices.append(Slice(parameter, start, tensor, offset, numel))
            offset += size  # with the padding
        group = zero.sub_group_to_group_id[index]
        # Stage 3 may cut one parameter group into several sub-groups.
        yield Partition(tensor, group, _stepping(zero, index), list(parameters), slices)


def _stepping(zero: Any, index: int) -> torch.optim.Optimizer:
    """Return the optimizer of a sub-group: with a part of them offloaded, a second one steps those on the GPU."""
    if zero.offload_optimizer and zero.subgroup_to_device[index] != "cpu":
        return zero.backup_optimizer
    return zero.optimizer


def stepping_optimizers(zero: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers which DeepSpeed's steps: one, or two with a part of stage 3's offloaded."""
    steppers = (zero.optimizer, getattr(zero, "backup_optimizer", None))
    return [each for each in steppers if each is not None]


def is_on_nvme(zero: Any, index: int) -> bool:
    """Say if stage 3 keeps this sub-group on NVMe, in memory only while it is swapped in."""
    return zero._swappable_optimizer_subgroup(index)


@contextmanager
def swapped_in(zero: Any, index: int, changed: bool) -> Iterator[None]:
    """Bring a sub-group on NVMe into memory for the `with` block; if `changed`, write it back afterwards."""
    zero._optimizer_states_and_gradient_swap_in(index)
    yield
    # Only changed states are written to the disk again: the others are there already.
    if changed:
        zero._optimizer_states_and_gradient_swap_out(index)
    else:
        zero._release_swap_buffers(index)


@contextmanager
def weights_set_anew(zero: Any) -> Iterator[None]:
    """Make `set_weights_of` possible in the `with` block."""
    # Small parameters are whole on every rank: they are partitioned before and gathered again afterwards.
    zero.checkpoint_event_prologue()
    yield
    zero.checkpoint_event_epilogue()


def set_weights_of(zero: Any, index: int) -> None:
    """Set stage 3's weights of one sub-group from its masters, which must be in memory."""
    zero._reassign_or_swap_out_partitioned_parameters(index)


def set_weights(zero: Any) -> None:
    """Set the weights that stage 1 or 2 computes with from its masters."""
    zero.update_lp_params()


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a whole parameter, even if ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def whole_numel(parameter: torch.Tensor) -> int:
    """Count the elements of a whole parameter, even if ZeRO-3 has partitioned it."""
    return getattr(parameter, "ds_numel", parameter.numel())
