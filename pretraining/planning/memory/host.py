"""Host memory of one rank: what it is for, and what pinned buffers and the copy for a save take of it."""

from collections.abc import Iterable, Sequence

from pretraining.ds_config import optimizer_device, parameter_device, zero_stage
from pretraining.planning.constants import table
from pretraining.planning.memory.precision import Precision
from pretraining.planning.memory.states import FP32, ModelState, checkpoint_bytes, pinned_by_offload
from pretraining.planning.memory.tensors import Tensor
from pretraining.recipe import Recipe
from pretraining.runtime.imports import MOST_ROUNDED_MIB

SNAPSHOT_ALIGNMENT = 64
"""Bytes; a tensor of any type may begin there."""
PROCESS, BUILT, SNAPSHOT = "process", "model while it is built", "copy for a save"


def pinned_bytes(num_bytes: int) -> int:
    """Host memory that a pinned buffer of so many bytes takes.

    torch 2.13 rounds up to a power of two (ATen/core/CachingHostAllocator.h), here only up to `MOST_ROUNDED_MIB`.
    """
    rounded = 1 << max(0, num_bytes - 1).bit_length()
    return rounded if num_bytes <= MOST_ROUNDED_MIB << 20 else num_bytes


def snapshot_bytes(sizes: Iterable[int]) -> int:
    """Bytes of one buffer for copies of tensors of these sizes in bytes."""
    return sum(size + -size % SNAPSHOT_ALIGNMENT for size in sizes)


def host_memory(
    recipe: Recipe,
    config: dict | None,
    world_size: int,
    state: ModelState,
    precision: Precision,
    tensors: Sequence[Tensor],
    optimizer,
) -> dict[str, float]:
    """Host memory of one rank in bytes, by use: the process, offloaded states, buffers, a model on its way, a save.

    Stage 3 builds its weights sharded; the other stages build all of them on every rank, then move them to the GPU
    (`model/build.py`). NVMe offload stages through pinned buffers (`buffer_count`, `buffer_size`:
    deepspeed 0.19.8, runtime/zero/offload_config.py).
    """
    host = {PROCESS: table("memory")["host_process_bytes"]["value"]}
    if state.host:
        host["offloaded states"] = state.host
    if staging := _staging(config, tensors):
        host["staging buffers"] = staging
    pinned = pinned_by_offload(config, world_size, precision.weights, optimizer.in_groups(tensors))
    if rounding := sum(pinned_bytes(size) - size for size in pinned):
        host["rounding of pinned buffers"] = rounding
    if zero_stage(config) != 3:
        built = 2 if config and precision.name == "bf16" and not precision.is_autocast else 4
        host[BUILT] = built * sum(tensor.numel for tensor in tensors)
    if recipe.checkpoints["background"] and recipe.training.get("save_strategy", "steps") != "no":
        host[SNAPSHOT] = pinned_bytes(
            snapshot_bytes([-(-checkpoint_bytes(tensors, optimizer) // world_size)])
        )
    return host


def most_at_once(host: dict[str, float]) -> float:
    """Bytes of a rank at their peak: the model has moved to the GPU before the first save."""
    return sum(host.values()) - min(host.get(BUILT, 0), host.get(SNAPSHOT, 0))


def _staging(config: dict | None, tensors: Sequence[Tensor]) -> float:
    zero = (config or {}).get("zero_optimization", {})
    staging = 0.0
    if optimizer_device(config) == "cpu" and zero_stage(config) < 3:
        staging += 2 * max(tensor.numel for tensor in tensors)  # temp_grad_buffer_for_cpu_offload
    if parameter_device(config) == "nvme":
        block = zero["offload_param"]
        staging += 2 * block.get("buffer_count", 5) * block.get("buffer_size", 100_000_000)
    if optimizer_device(config) == "nvme":
        block, group = zero["offload_optimizer"], zero.get("sub_group_size", 1_000_000_000)
        share = sum(tensor.numel for tensor in tensors)
        staging += FP32 * block.get("buffer_count", 4) * min(group, share)
    return staging
