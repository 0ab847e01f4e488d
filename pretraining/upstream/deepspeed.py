"""Mend DeepSpeed's engine, read where its optimizers keep parameters, and change its defaults; deepspeed 0.19.8.

Each function below says what it mends or changes, which test holds it, and when it may go.

Read (held by test_optimizer_states.py, test_muon.py, test_nvme.py and test_reshard.py): an
optimizer steps flat fp32 tensors, this rank's partitions. Checkpoints, Muon and the norms of layers need to know which
elements of which parameter are in them, and no function of DeepSpeed says so.

- Stages 1 and 2 lay the parameters of a group end to end and cut the whole into one partition a rank: `_hp_mapping` of
  a parameter is its slice of this rank's (mended by `link_slices`).
- Stage 3 cuts each parameter into equal shares, the last with padding (`ds_tensor`), and lays this rank's shares end to
  end, in sub-groups (`fp16_groups`). With NVMe a sub-group is in memory only while it is swapped in.
- AutoTP (tensor parallelism) cuts a weight in place and leaves a note on it (`split_part`): the dimension, and how many
  of its elements each rank has. Stages 0, 1 and 2 then reduce over the data ranks alone. Under stage 3, `zero.Init` has
  partitioned every weight over all ranks; AutoTP gathers what it cuts, and only that is partitioned over the data ranks
  (`holders`). Held by test_layouts.py.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from math import inf, prod
from typing import Any, NamedTuple
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.runtime import bf16_optimizer, utils
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups, link_hp_params
from torch import nn
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode
from transformers.integrations import deepspeed as hf_deepspeed


def mend_optimizer(optimizer: Any) -> None:
    """Apply the functions below to the engine's optimizer; each changes only the optimizers that it is for."""
    link_slices(optimizer)
    read_norm_once(optimizer)
    add_in_one_kernel(optimizer)
    order_on_the_device(optimizer)


def read_norm_once(optimizer: Any) -> None:
    """Bring the norm to the host as soon as it is known; what follows from it is worked out there.

    DeepSpeed asks the device up to four times a step: if a gradient overflows, if the norm is finite, how much to clip
    by, and how long it is; and it copies numbers to the device in between. The norm alone answers all of it.

    optimizer: the engine's. Stages 2 and 3, and stage 1 in bf16; any other is left as it is. A step with gradients that
    are not finite is refused as before: their norm is not finite either.

    The waits that go gave the order of one that stays, in the same place: for the stream on which the norm is computed.
    Numbers that were copied from the host are filled on the stream that reads them. Held by test_stream_order.py,
    test_fake_gpu.py and test_clipping.py.
    """
    bf16_optimizer.get_global_norm_of_tensors = _norm_of_tensors
    stage3.combine_grad_norm_groups = _norm_of_groups
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer._get_norm_groups = within(_FilledOnTheDevice, optimizer._get_norm_groups)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer) and not optimizer.cpu_offload:
        optimizer.scaled_global_norm = on_the_host(optimizer.scaled_global_norm)
        if optimizer.dtype != torch.float16:  # fp16 needs the check: it lowers the loss scale
            optimizer.check_overflow = lambda *args, **kwargs: None


def on_the_host(norm_on_the_device: Callable) -> Callable:
    """Wrap a function that returns a norm, so that the result is on the host: the only wait of a step."""
    norm_on_the_device = within(_FilledOnTheDevice, norm_on_the_device)

    def read_norm(*args, **kwargs) -> torch.Tensor:
        return norm_on_the_device(*args, **kwargs).cpu()

    return read_norm


def within(mode: type[TorchFunctionMode], function: Callable) -> Callable:
    """Wrap a function, so that its calls of torch are changed by a mode."""

    def changed(*args, **kwargs):
        with mode():
            return function(*args, **kwargs)

    return changed


class _FilledOnTheDevice(TorchFunctionMode):
    """Fills memory on the device instead of copying a number to it: the host would wait for the copy."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.tensor and "device" in kwargs:
            listed = isinstance(args[0], list) and len(args[0]) == 1
            number = args[0][0] if listed else args[0]
            if isinstance(number, int | float):
                return torch.full((1,) if listed else (), number, **kwargs)
        return function(*args, **kwargs)


def add_in_one_kernel(optimizer: Any) -> None:
    """Add 16-bit gradients to their fp32 sums as they are, at stages 1 and 3: the same bits, 10 bytes for 18 a value.

    DeepSpeed makes an fp32 copy of each gradient first. A 16-bit value is exact in fp32, in the addition as in a copy.
    Held by test_fake_gpu.py.
    """
    for name in ("_update_hp_grad", "partition_grads"):
        if hasattr(optimizer, name):
            setattr(optimizer, name, within(_AddedAsTheyAre, getattr(optimizer, name)))


class _AddedAsTheyAre(TorchFunctionMode):
    """Leaves 16-bit tensors as they are if an fp32 copy is asked for: what follows adds them to fp32 tensors."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.to and args[1:] == (torch.float32,) and args[0].is_floating_point():
            return args[0]
        return function(*args, **(kwargs or {}))


# Wrapped once: each optimizer of the process replaces DeepSpeed's functions by these same ones.
_norm_of_tensors = on_the_host(utils.get_global_norm_of_tensors)
_norm_of_groups = on_the_host(utils.combine_grad_norm_groups)
_clip = on_the_host(clip_grad_norm_)


def order_on_the_device(optimizer: Any) -> None:
    """Let streams wait for each other instead of the host, at stage 3; any other optimizer is left as it is.

    Each wait of the host that is taken out gave an order, which a wait of a stream gives now:

    - at the end of a backward pass: the reductions, before what comes next (another pass, or the step);
    - after a step: the optimizer's writes to the shares of weights, before the gathering stream reads them in the next
      pass. DeepSpeed waits there only if some parameter stays whole on every rank; without one it has no order at all.

    test_stream_order.py holds both, for every layout: nothing is read before it is written, and no memory is
    given away before its last use.
    """
    # With offload the processor itself reads the gradients, so the host has to wait.
    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) or optimizer.offload_optimizer:
        return
    accelerator = get_accelerator()
    if accelerator.resolves_data_dependency():  # a processor: there are no streams
        return
    reductions = optimizer.reduce_and_partition_stream
    # Called at the end of a backward pass (`independent_gradient_partition_epilogue`): what the current stream does
    # next, another pass or the step, comes after the reductions.
    reductions.synchronize = lambda: accelerator.current_stream().wait_stream(reductions)
    end_step = optimizer._post_step

    def end_step_in_order(*args, **kwargs) -> None:
        # What it gathers comes on the current stream, which waits for that collective already.
        accelerator.synchronize = lambda *_: None  # on the instance, over the method of its class
        try:
            end_step(*args, **kwargs)
        finally:
            del accelerator.synchronize
        gather_after_writes(optimizer)

    optimizer._post_step = end_step_in_order


def gather_after_writes(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    """Let the next pass gather weights only after what the current stream has written to this rank's shares."""
    accelerator = get_accelerator()
    if not accelerator.resolves_data_dependency():
        gathering = optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream
        gathering.wait_stream(accelerator.current_stream())


def refuse_norms(is_refused: Callable[[float], bool] | None) -> None:
    """Let the optimizers of all ZeRO stages refuse a step by its norm too, as one that is not finite.

    The norm is the same on every rank. None: as DeepSpeed does. Each optimizer looks `is_invalid_grad_norm` up in its
    module. Held by test_stability.py; may go once DeepSpeed has a limit for the norm.
    """

    def is_invalid(norm: Any) -> bool:
        return utils.is_invalid_grad_norm(norm) or (is_refused is not None and is_refused(float(norm)))

    for module in (bf16_optimizer, stage3, stage_1_and_2):
        module.is_invalid_grad_norm = is_invalid


def keep_norm_at_stage_0(engine: DeepSpeedEngine, report: Callable[[float], None]) -> None:
    """Make `engine.get_global_grad_norm` answer as at the other stages.

    The norm is computed for clipping and dropped (deepspeedai/DeepSpeed#7255). Without clipping it is not computed, and
    a limit that nothing exceeds computes it.

    report: called with the norm before the step, so that no other code reads it from the device.
    """
    # In these the optimizer is DeepSpeed's own, which keeps the norm.
    if engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled():
        return

    limit = engine.gradient_clipping() or inf

    def clip() -> None:
        parameters = engine.module.parameters()
        if not engine.has_moe_layers:
            norm = _clip(parameters=parameters, max_norm=limit, mpu=engine.mpu)
        else:
            # by the norm of all gradients, experts of other ranks included; DeepSpeed takes the mean of the ranks
            graded = [parameter for parameter in parameters if parameter.grad is not None]
            squares = [
                torch.linalg.vector_norm(each.grad, dtype=torch.float32).double().square()
                / holders(each, None)[1]
                for each in graded
            ]
            square = torch.stack(squares).sum()
            dist.all_reduce(square)
            norm = float(square.sqrt())
            if (factor := limit / (norm + 1e-6)) < 1:
                for each in graded:
                    each.grad.mul_(factor)
        engine._global_grad_norm = float(norm)
        report(engine._global_grad_norm)

    engine.clip_fp32_gradients = clip
    engine.gradient_clipping = lambda: limit


def link_slices(optimizer: Any) -> None:
    """Mend `_hp_mapping` of every parameter, by which checkpoints, Muon and monitors find its slice.

    To spread the work of a backward pass over the ranks, DeepSpeed lays a group's parameters end to end in another
    order, but links them as if they lay in their own. Any optimizer without `round_robin_gradients` is left as it is.
    Held by the checkpoint tests.
    """
    if not getattr(optimizer, "round_robin_gradients", False):
        return
    for group, flat in enumerate(optimizer.bit16_groups_flat):
        ranks = optimizer.real_dp_process_group[group]
        size = flat.numel() // dist.get_world_size(group=ranks)
        laid = optimizer.round_robin_bit16_groups[group], optimizer.round_robin_bit16_offsets[group]
        offsets = dict(zip(*laid, strict=True))
        link_hp_params(
            lp_param_list=optimizer.bit16_groups[group],
            flat_hp_partition=optimizer.single_partition_of_fp32_groups[group],
            gradient_dict=optimizer.averaged_gradients,
            offload_gradient_dict=optimizer.offload_gradient_dict,
            use_offload=optimizer.cpu_offload,
            param_group_index=group,
            partition_start=dist.get_rank(group=ranks) * size,
            partition_size=size,
            dp_group=ranks,
            param_offsets=[offsets[parameter] for parameter in optimizer.bit16_groups[group]],
        )


def drop_refused_sums(optimizer: Any) -> None:
    """Forget the sums of gradients of a step that was refused, or every later step would be refused too.

    Stages 1 and 2 drop them only without offload (`DeepSpeedZeroOptimizer.step`); it matters if they are fp32 and the
    weights are not. Held by test_stability.py.
    """
    if getattr(optimizer, "cpu_offload", False) and hasattr(optimizer, "averaged_gradients"):
        optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))


class Share(NamedTuple):
    """Which part of a parameter this rank has, along the first dimension, if its experts are split over ranks."""

    start: int
    end: int
    total: int
    """Length of the whole parameter."""
    group: dist.ProcessGroup
    """The ranks that together have the whole, in its order."""
    copies: dist.ProcessGroup
    """The ranks that have the same part."""


def share_of(parameter: torch.Tensor) -> Share | None:
    """Return which part of a parameter this rank has; None if it is not split."""
    return getattr(parameter, "share", None)


def first_element(parameter: torch.Tensor) -> int:
    """Return the number of this rank's first element in the whole flattened parameter: 0 unless it is split."""
    share = share_of(parameter)
    return 0 if share is None else share.start * prod(whole_shape(parameter)[1:])


def own_rows(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """View in a tensor of the whole parameter's shape what this rank has of it."""
    share = share_of(parameter)
    return whole if share is None else whole[share.start : share.end]


def split_groups(
    groups: Iterable[dict], is_chosen: Callable[[torch.Tensor], bool]
) -> tuple[list[dict], list[dict]]:
    """Split each parameter group in two: (those without chosen parameters, those of chosen ones alone), none empty."""
    plain, chosen = [], []
    for group in groups:
        parameters = group["params"]
        for found, kept in ((plain, False), (chosen, True)):
            if some := [each for each in parameters if is_chosen(each) is kept]:
                found.append({**group, "params": some})
    return plain, chosen


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
    return isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)


def is_stage_1_or_2(optimizer: Any) -> bool:
    """Return whether the optimizer is DeepSpeed's of stage 1 or 2, that of bf16 weights included."""
    return isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer)


def partitions(zero: Any) -> Iterator[Partition]:
    """Yield the flat tensors that an optimizer steps on this rank, and what is in them: without ZeRO whole parameters.

    zero: DeepSpeed's, or torch's own.
    """
    if isinstance(zero, torch.optim.Optimizer):
        for number, values in enumerate(zero.param_groups):
            for each in values["params"]:
                # its part of a split layer, or its own experts
                whole = Slice(each, first_element(each), each, 0, each.numel())
                yield Partition(each, number, zero, [each], [whole])
    elif is_stage_3(zero):
        for index, parameters in enumerate(zero.fp16_groups):
            tensor, slices, offset = zero.fp32_partitioned_groups_flat[index], [], 0
            for parameter in parameters:
                size = parameter.ds_tensor.ds_numel
                start = size * dist.get_rank(group=parameter.ds_process_group)
                numel = min(size, parameter.ds_numel - start)  # the last rank's share ends in padding
                if numel > 0:
                    start += first_element(parameter)
                    slices.append(Slice(parameter, start, tensor, offset, numel))
                offset += size  # with the padding
            group = zero.sub_group_to_group_id[index]
            # with a part of the sub-groups offloaded, a second optimizer steps those on the GPU
            is_second = zero.offload_optimizer and zero.subgroup_to_device[index] != "cpu"
            stepping = zero.backup_optimizer if is_second else zero.optimizer
            # Stage 3 may cut one parameter group into several sub-groups.
            yield Partition(tensor, group, stepping, list(parameters), slices)
    elif is_stage_1_or_2(zero):
        if isinstance(zero, BF16_Optimizer):
            groups = zip(zero.fp32_groups_flat_partition, zero.bf16_groups, strict=True)
        else:
            groups = zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True)
        for group, (tensor, parameters) in enumerate(groups):
            slices = []
            for parameter in parameters:
                # None: no element is in this rank's partition
                if (mapping := parameter._hp_mapping) is not None:
                    here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                    start = first_element(parameter) + here.start
                    slices.append(Slice(parameter, start, tensor, there.start, here.numel))
            yield Partition(tensor, group, zero.optimizer, list(parameters), slices)


def stepping_optimizers(zero: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers which DeepSpeed's steps: one, or two with a part of stage 3's offloaded.

    Returns torch's own as it is.
    """
    if isinstance(zero, torch.optim.Optimizer):
        return [zero]
    steppers = (zero.optimizer, getattr(zero, "backup_optimizer", None))
    return [each for each in steppers if each is not None]


def is_on_nvme(zero: Any, index: int) -> bool:
    """Return whether stage 3 keeps this sub-group on NVMe, in memory only while it is swapped in."""
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
    gather_after_writes(zero)


def set_weights_of(zero: Any, index: int) -> None:
    """Set stage 3's weights of one sub-group from its masters, which must be in memory."""
    zero._reassign_or_swap_out_partitioned_parameters(index)


def set_weights(zero: Any) -> None:
    """Set the weights that stage 1 or 2 computes with from its masters."""
    zero.update_lp_params()


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a whole parameter, even if ZeRO-3 has partitioned it, or a layer is split over ranks."""
    if (split := getattr(parameter, DS_AUTOTP_UC_META, None)) and split["partition_sizes"]:
        return tuple(split["logical_shape"])
    held, share = own_shape(parameter), share_of(parameter)
    return held if share is None else (share.total, *held[1:])


def own_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of what this rank has of a split parameter, even if ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def whole_numel(parameter: torch.Tensor) -> int:
    return prod(whole_shape(parameter))


def split_part(parameter: torch.Tensor) -> dict[int, tuple[int, int]]:
    """Return what AutoTP leaves to this rank of a parameter, {dimension: (first, number)}; {} if it is not split."""
    split = getattr(parameter, DS_AUTOTP_UC_META, None)
    if not split or not (sizes := split["partition_sizes"]):
        return {}
    part = groups.get_tensor_model_parallel_rank()
    return {split["partition_dim"]: (sum(sizes[:part]), sizes[part])}


def tensor_part_and_degree() -> tuple[int, int]:
    """Return which part of split layers this rank has, and over how many ranks AutoTP splits them; (0, 1) without."""
    degree = groups._get_model_parallel_world_size()
    return (groups.get_tensor_model_parallel_rank() if degree > 1 else 0), degree


def holders(parameter: torch.Tensor, optimizer: Any) -> tuple[int, int]:
    """Return (number, count) of this rank among those whose optimizer steps the same elements of a parameter.

    optimizer: the engine's, or torch's own.
    """
    tensor, is_split, ranks = tensor_part_and_degree(), bool(split_part(parameter)), dist.get_world_size()
    if is_stage_3(optimizer) and dist.get_world_size(group=parameter.ds_process_group) == ranks:
        # `zero.Init` partitions over all ranks. Only what AutoTP splits afterwards is partitioned over the data ranks.
        return 0, 1
    if is_stage_3(optimizer) or is_stage_1_or_2(optimizer):
        # data ranks have partitions of their own
        return (0, 1) if is_split else tensor
    if (share := share_of(parameter)) is not None:
        return dist.get_rank(share.copies), dist.get_world_size(share.copies)
    rank = dist.get_rank()
    return (rank // tensor[1], ranks // tensor[1]) if is_split else (rank, ranks)


def no_zero3_draw() -> AbstractContextManager:
    """Leave weights as `zero.Init` has cut them up in the `with` block.

    Inside `no_init_weights` no weight is drawn at the other stages, but under ZeRO-3 `PreTrainedModel._from_config`
    (transformers 5.24) gathers every module once more and draws all the same. We draw or load them ourselves: at 30b
    that pass is seconds of communication for nothing. Held by test_model.py; may go once `no_init_weights` counts.
    """
    # transformers imports it from this module at each call.
    return mock.patch.object(hf_deepspeed, "initialize_weights_zero3", lambda model: None)


Chunks = Iterable[tuple[int, torch.Tensor]]
"""(first element, elements) of a flat tensor, a few at a time."""


def copy_chunks(chunks: Chunks, target: torch.Tensor, start: int = 0) -> None:
    """Copy chunks into a flat tensor whose first element is number `start`."""
    for first, part in chunks:
        target[first - start : first - start + part.numel()].copy_(part)


def own_partition(parameter: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return (first element, elements) of what this rank has of a parameter at any stage, as a view without padding."""
    if (part := getattr(parameter, "ds_tensor", None)) is None:
        return first_element(parameter), parameter.detach().view(-1)
    start = part.ds_numel * dist.get_rank(group=parameter.ds_process_group)
    # the last rank's share ends in padding, and of a small parameter a rank may have nothing
    own = part.data[: max(0, min(part.ds_numel, parameter.ds_numel - start))]
    return first_element(parameter) + start, own


def fill_partition(parameter: torch.Tensor, read: Callable[[int, int], Chunks]) -> bool:
    """Set this rank's part of a parameter under ZeRO-3 where it is; False if it must be gathered for that.

    To gather every parameter would take memory for the largest on every rank. Held by test_given_weights.py.

    read: returns the elements [start, stop) of the flattened parameter.
    """
    part = parameter.ds_tensor
    # A part on NVMe is not in memory; a node's own copy (hpZ) and 8-bit weights are made when a parameter is cut up.
    if part.final_location == OffloadDeviceEnum.nvme or parameter.ds_secondary_tensor is not None:
        return False
    if hasattr(part, "ds_quant_scale"):
        return False
    start, own = own_partition(parameter)
    if own.numel():
        copy_chunks(read(start, start + own.numel()), own, start)
    return True


def groups_at_once(own_group: Callable[[Iterable[int]], dist.ProcessGroup | None]) -> AbstractContextManager:
    """Let DeepSpeed make groups of experts and of nodes by `own_group`: in the block only some that have all ranks.

    It makes one after another, and looks `deepspeed.comm.new_group` up at each call. Held by test_scale.py; may go once
    it takes a mesh for them, as for tensor parallelism.
    """
    return mock.patch.object(deepspeed.comm, "new_group", own_group)


def gather_as_one(modules: Iterable[nn.Module]) -> None:
    """Let ZeRO-3 gather all weights of each module before its forward and backward pass, and none within.

    DeepSpeed 0.19.8 calls such a module a leaf (utils/z3_leaf_module.py): only the module itself gets hooks, and the
    modules inside it get none. Call this before the engine is made. Held by test_compiling.py.
    """
    from deepspeed.utils import set_z3_leaf_module

    for module in modules:
        set_z3_leaf_module(module, True)


def wait_in_every_group(timeout: timedelta) -> None:
    """Give groups that are made without a limit this one.

    DeepSpeed reduces in a group of its own making. torch's own limit for NCCL is 10 minutes, and then it aborts the
    process: the watch for hangs, which can name the ranks, would have no time to do so. Held by test_launchers.py; may
    go once DeepSpeed hands its own limit on to every group.
    """
    # Read when a group is made. Two names: NCCL has a default of its own, every other backend takes the first.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout


def leave_out_shared_memory() -> None:
    """Keep DeepSpeed from building its reductions through shared memory, which only `inference_all_reduce` uses.

    comm/torch.py would build them for every process group, also without a ds_config. That takes a minute of compiling,
    a line on the screen, and 66 MiB a rank in /dev/shm that no process gives back. They also reduce over all ranks,
    whichever group is asked for; torch's own reductions keep to the group. Held by test_ranks_apart.py; may go once
    they are built at their first use.
    """
    # Before `TorchBackend` is made, which looks here and builds them. Nobody else looks, and DeepSpeed would fill the
    # table first, for which every rank starts a compiler.
    deepspeed.ops.__compatible_ops__ = {}
