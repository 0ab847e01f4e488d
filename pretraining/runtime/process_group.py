"""The ranks of a run: which one this process is, and how they agree on a value.

torch is imported inside the functions: a look at a run folder asks for the rank too, and never waits for torch.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from pretraining.errors import UserError, file_error

if TYPE_CHECKING:
    import torch.distributed as dist

Answer = TypeVar("Answer")


def rank_and_world_size() -> tuple[int, int]:
    """Return (rank, number of ranks); (0, 1) for a process without a group."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def device_name() -> str:
    """Return the name of this rank's GPU, or of the processor."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"


def from_rank_0(decide: Callable[[], Answer]) -> Answer:
    """Return on every rank what `decide` returns on rank 0, which alone looks at the disk.

    If rank 0 raises a `UserError`, or cannot use a file, every rank raises that. A process without a group
    decides for itself.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return decide()
    answer: list = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = decide()
        except UserError as error:
            answer[1] = str(error)
        except OSError as error:
            if (refusal := file_error(error)) is None:
                raise
            answer[1] = str(refusal)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise UserError(answer[1])
    return answer[0]


def gather_from_ranks(value: Answer, group: dist.ProcessGroup | None = None) -> list[Answer]:
    """Return every rank's `value` in the order of the ranks, on every rank; [value] without a group."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    answers: list = [None] * dist.get_world_size()
    dist.all_gather_object(answers, value, group=group)
    return answers


def host_group() -> dist.ProcessGroup | None:
    """Return a group that uses the hosts' network and never waits for a GPU; every rank must call this.

    None if the default group is such a group, or if there is none.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_backend() == "gloo":
        return None
    return dist.new_group(backend="gloo")


class Agreement:
    """The largest of the ranks' numbers, on every rank.

    The ranks meet in a gloo group of their own: no kernel is launched, no stream waited for. Every rank must call
    at the same place.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo") if several else None

    def largest(self, value: int) -> int:
        """Run a collective that moves one integer: it costs the latency of the slowest link."""
        if self._group is None:
            return value
        import torch
        import torch.distributed as dist

        shared = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self._group)
        return int(shared)


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Add up element by element, in fp64, the same on every rank; a collective that waits for the device."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [float(value) for value in values]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    summed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return summed.tolist()
