"""Mend DeepSpeed's engine and its optimizers as a run needs it; deepspeed 0.19.8.

- The gradient norm (`read_norm_once`): the device is asked up to four times a step if a gradient overflows, if
  the norm is finite, how much to clip by, and how long it is; and numbers are copied to the device in between. The norm
  alone answers all of it. Held by tests/test_fake_gpu.py and tests/norms_read_once.py.
- Stage 3 (`order_on_the_device`): the host waits for the reductions of every micro-batch, and after every step for the
  gather of the parameters that stay whole. Streams can wait for each other. Held by tests/test_fake_gpu.py.
- Stage 0 (`keep_norm_at_stage_0`): the norm is computed for clipping and dropped (deepspeedai/DeepSpeed#7255).
- `round_robin_gradients` (`link_slices`): the map from parameters to slices is wrong. Held by the checkpoint tests.
- Offload at stages 1 and 2 (`drop_refused_sums`): the sums of a refused step stay. Held by tests/test_stability.py.

Each may go once its test passes without it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer, utils
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import link_hp_params
from torch.overrides import TorchFunctionMode


def mend_optimizer(optimizer: Any) -> None:
    """Apply the functions below to the engine's optimizer; each changes only the optimizers that it is for."""
    link_slices(optimizer)
    read_norm_once(optimizer)
    order_on_the_device(optimizer)


def read_norm_once(optimizer: Any) -> None:
    """Bring the norm to the host as soon as it is known; what follows from it is worked out there.

    optimizer: the engine's. Stages 2 and 3, and stage 1 in bf16; any other is left as it is. A step with gradients that
    are not finite is refused as before: their norm is not finite either.
    """
    bf16_optimizer.get_global_norm_of_tensors = _norm_of_tensors
    stage3.combine_grad_norm_groups = _norm_of_groups
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer._get_norm_groups = without_copies(optimizer._get_norm_groups)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer) and not optimizer.cpu_offload:
        optimizer.scaled_global_norm = on_the_host(optimizer.scaled_global_norm)
        if optimizer.dtype != torch.float16:  # fp16 needs the check: it lowers the loss scale
            optimizer.check_overflow = lambda *args, **kwargs: None


def on_the_host(norm_on_the_device: Callable) -> Callable:
    """Wrap a function that returns a norm, so that the result is on the host: the only wait of a step."""
    norm_on_the_device = without_copies(norm_on_the_device)

    def read_norm(*args, **kwargs) -> torch.Tensor:
        return norm_on_the_device(*args, **kwargs).cpu()

    return read_norm


def without_copies(function: Callable) -> Callable:
    """Wrap a function, so that its `torch.tensor(number, device=...)` fills memory of the device."""

    def filling(*args, **kwargs):
        with _FilledOnTheDevice():
            return function(*args, **kwargs)

    return filling


class _FilledOnTheDevice(TorchFunctionMode):
    """Fills memory on the device instead of copying a number to it: the host would wait for the copy."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.tensor and "device" in kwargs:
            shape, number = (
                ((1,), args[0][0]) if isinstance(args[0], list) and len(args[0]) == 1 else ((), args[0])
            )
            if isinstance(number, int | float):
                return torch.full(shape, number, **kwargs)
        return function(*args, **kwargs)


# Wrapped once: each optimizer of the process replaces DeepSpeed's functions by these same ones.
_norm_of_tensors = on_the_host(utils.get_global_norm_of_tensors)
_norm_of_groups = on_the_host(utils.combine_grad_norm_groups)
_clip = on_the_host(clip_grad_norm_)


def order_on_the_device(optimizer: Any) -> None:
    """Let streams wait for each other instead of the host, at stage 3; any other optimizer is left as it is.

    The waits of the host protect no memory: buffers that two streams use are recorded on both, because reductions run
    beside the backward pass anyway.
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
    optimizer._post_step = _without_waiting(optimizer._post_step, accelerator)


def _without_waiting(gather: Callable, accelerator) -> Callable:
    """Wrap `gather` so that it does not call `accelerator.synchronize`."""
    # The current stream waits for the collective already.

    def gather_in_order(*args, **kwargs):
        accelerator.synchronize = lambda *_: None  # on the instance, over the method of its class
        try:
            return gather(*args, **kwargs)
        finally:
            del accelerator.synchronize

    return gather_in_order


def keep_norm_at_stage_0(engine: DeepSpeedEngine, report: Callable[[float], None]) -> None:
    """Make `engine.get_global_grad_norm` answer as at the other stages.

    report: called with the norm before the step, so that no other code reads it from the device.
    """
    # In these the optimizer is DeepSpeed's own, which keeps the norm.
    if engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled():
        return

    def clip() -> None:
        limit, parameters = engine.gradient_clipping(), engine.module.parameters()
        norm = _clip(parameters=parameters, max_norm=limit, mpu=engine.mpu)
        engine._global_grad_norm = float(norm)
        report(engine._global_grad_norm)

    engine.clip_fp32_gradients = clip


def link_slices(optimizer: Any) -> None:
    """Mend `_hp_mapping` of every parameter, by which checkpoints, Muon and monitors find its slice.

    To spread the work of a backward pass over the ranks, DeepSpeed lays a group's parameters end to end in another
    order, but links them as if they lay in their own. Any optimizer without `round_robin_gradients` is left as it is.
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
    weights are not.
    """
    if getattr(optimizer, "cpu_offload", False) and hasattr(optimizer, "averaged_gradients"):
        optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))
