"""The gradient norm of DeepSpeed's optimizers, for which the host waits once a step.

deepspeed 0.19.8 asks the device up to four times: whether a gradient overflows, whether the norm is finite, how much to
clip by, and how long the norm is; and it copies numbers to the device in between. The norm alone answers all of it.
"""

from collections.abc import Callable

import torch
from deepspeed.runtime import bf16_optimizer, utils
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.overrides import TorchFunctionMode


def read_norm_once(optimizer) -> None:
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
        if optimizer.dtype != torch.float16:  # whose loss scale is lowered by it
            optimizer.check_overflow = lambda *args, **kwargs: None


def on_the_host(norm_on_the_device: Callable) -> Callable:
    """A function that returns a norm, with the result on the host: the one wait of a step."""
    norm_on_the_device = without_copies(norm_on_the_device)

    def read_norm(*args, **kwargs) -> torch.Tensor:
        return norm_on_the_device(*args, **kwargs).cpu()

    return read_norm


def without_copies(function: Callable) -> Callable:
    """A function whose `torch.tensor(number, device=...)` fills memory of the device."""

    def filling(*args, **kwargs):
        with _FilledOnTheDevice():
            return function(*args, **kwargs)

    return filling


class _FilledOnTheDevice(TorchFunctionMode):
    """The host would wait for a copy."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.tensor and "device" in kwargs:
            shape, number = (
                ((1,), args[0][0]) if isinstance(args[0], list) and len(args[0]) == 1 else ((), args[0])
            )
            if isinstance(number, int | float):
                return torch.full(shape, number, **kwargs)
        return function(*args, **kwargs)


_norm_of_tensors = on_the_host(utils.get_global_norm_of_tensors)
_norm_of_groups = on_the_host(utils.combine_grad_norm_groups)
