"""What one rank of a real training run holds between two passes, by what DeepSpeed keeps it for."""

import gc
import time
from collections.abc import Iterable

import torch

RELEASE_SECONDS = 0.5
"""After a collective, gloo's own thread still holds the bucket that it reduced for a moment."""


def held_bytes(model: torch.nn.Module, optimizer) -> dict[str, int]:
    """Bytes of every live tensor of this process, by owner; storages that several tensors share count once.

    model: as DeepSpeed trains it; optimizer: DeepSpeed's, or torch's without it. `other` is what none of the
    owners explains: the buckets of DistributedDataParallel, the batch.
    """
    time.sleep(RELEASE_SECONDS)
    gc.collect()  # what only a cycle still holds is gone at the next collection
    seen: set[int] = set()
    owners = {
        "weights": _weights(model),
        "gradients": (p.grad for p in model.parameters() if p.grad is not None),
        "gradient_sums": _sums(model, optimizer),
        "masters": _masters(optimizer),
        "moments": _moments(optimizer),
        "host_weights": _attributes(optimizer, "param_buffer_of_bit16_for_cpu_offload_groups"),
        "buckets": _buckets(optimizer),
        "other": (each for each in gc.get_objects() if _is_tensor(each)),
    }
    return {name: _new_bytes(tensors, seen) for name, tensors in owners.items()}


def _is_tensor(each) -> bool:
    try:
        return isinstance(each, torch.Tensor)
    except ReferenceError:
        return False


def _new_bytes(tensors: Iterable, seen: set[int]) -> int:
    """Bytes of the storages that nobody has counted yet."""
    total = 0
    for tensor in tensors:
        if tensor is None or tensor.device.type == "meta":
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _weights(model: torch.nn.Module):
    for parameter in model.parameters():
        yield parameter.data
        yield getattr(parameter, "ds_tensor", None)
        yield getattr(parameter, "ds_secondary_tensor", None)


def _flat(values):
    """Tensors in lists, tuples and dictionaries, however deep."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _flat(value)
    elif isinstance(values, list | tuple | set):
        for value in values:
            yield from _flat(value)


def _attributes(optimizer, *names: str):
    for name in names:
        yield from _flat(getattr(optimizer, name, None))


def _sums(model: torch.nn.Module, optimizer):
    yield from (getattr(p, "grad_accum", None) for p in model.parameters())
    names = (
        "averaged_gradients",
        "all_grad_tensors",
        "grad_partitions_flat_buffer",
        "accumulated_grads_in_cpu",
    )
    yield from _attributes(optimizer, *names, "fp32_groups_gradients_flat")
    for master in _masters(optimizer):
        yield master.grad


def _masters(optimizer):
    names = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")
    yield from _attributes(optimizer, *names, "fp32_groups_flat")


def _moments(optimizer):
    inner = getattr(optimizer, "optimizer", optimizer)
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    yield from _flat(dict(inner.state))


def _buckets(optimizer):
    """Reduce buckets, and offloading's staging buffers of one tensor."""
    yield from _attributes(optimizer, "temp_grad_buffer_for_cpu_offload", "temp_grad_buffer_for_gpu_offload")
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        yield from _flat(list(vars(bucket).values()))
