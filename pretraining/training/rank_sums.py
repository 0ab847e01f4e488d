"""Numbers that are added up over the ranks, seldom: on steps that measure something."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Element by element, in fp64, the same on every rank; a collective that waits for the device."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [float(value) for value in values]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    summed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return summed.tolist()
