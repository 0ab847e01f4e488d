"""Host memory: what a rank takes of it, pinned or not, and how much of it the machine and its container allow."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pretraining.ds_config import optimizer_device, parameter_device, zero_stage
from pretraining.planning.memory.precision import Precision
from pretraining.planning.memory.states import FP32, ModelState, checkpoint_bytes, pinned_by_offload
from pretraining.planning.memory.tensors import Tensor
from pretraining.planning.tables import table
from pretraining.quiet import MOST_ROUNDED_MIB
from pretraining.recipe import Recipe

SNAPSHOT_ALIGNMENT = 64
"""Bytes; a tensor of any type may begin there."""
PROCESS, BUILT, SNAPSHOT = "process", "model while it is built", "copy for a save"

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""A group without a limit reports a number near the largest there is (cgroup v1) or the word max (v2)."""


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


def host_memory_bytes() -> int | None:
    """Memory of this machine, or what its container allows if that is less; None if neither is known."""
    try:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    return min([physical, *(group.limit for group in _limited_groups())])


def available_bytes() -> int | None:
    """Host memory that is free on this machine and below its container's limit; None if the system does not say.

    What a container keeps of files that it has read or written counts as free: the system gives it back.
    """
    try:
        lines = (_PROC / "meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    kibibytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    if kibibytes is None:
        return None
    return min([int(kibibytes) * 1024, *(group.free for group in _limited_groups())])


class _Group(NamedTuple):
    """A control group that limits this process, in bytes."""

    limit: int
    used: int
    files: int
    """Part of what is used: pages of files that can be given back at once."""

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used + self.files)


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def _limited_groups() -> Iterator[_Group]:
    """Each group with a limit, of this process and above it: SLURM and Kubernetes limit a job some levels higher."""
    try:
        lines = (_PROC / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (_CGROUPS / "memory", _VERSION_1) if controllers else (_CGROUPS, _VERSION_2)
        own = root / path.lstrip(
            "/"
        )  # a container may not see its path, but it sees the root, which is its group
        for folder in (own, *own.parents[: len(own.parts) - len(root.parts)]):
            if (group := _limit_of(folder, *names)) is not None:
                yield group


def _limit_of(folder: Path, limit: str, used: str, files: str) -> _Group | None:
    try:
        text = (folder / limit).read_text().strip()
        if not text.isdigit() or int(text) >= _NO_LIMIT:
            return None
        parts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return _Group(int(text), int((folder / used).read_text()), int(parts.get(files, 0)))
    except OSError:
        return None
