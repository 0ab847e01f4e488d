"""One decision for all ranks: rank 0 looks at the disk, the others are told; or all tell each other."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from pretraining.errors import UserError, file_error

Answer = TypeVar("Answer")


def from_rank_0(decide: Callable[[], Answer]) -> Answer:
    """What `decide` returns on rank 0, on every rank; or its `UserError`, a file it could not use included.

    A process without a group decides for itself.
    """
    if not dist.is_initialized():
        return decide()
    answer: list = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = decide()
        except UserError as error:
            answer[1] = str(error)
        except OSError as error:
            if (told := file_error(error)) is None:
                raise
            answer[1] = str(told)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise UserError(answer[1])
    return answer[0]


def told_by_all(value: Answer, group: dist.ProcessGroup | None = None) -> list[Answer]:
    """Every rank's `value`, in the order of the ranks, on every rank; the process alone where there is no group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    answers: list = [None] * dist.get_world_size()
    dist.all_gather_object(answers, value, group=group)
    return answers


def host_group() -> dist.ProcessGroup | None:
    """A group that speaks over the hosts' network and never waits for a GPU; every rank must call this."""
    if not dist.is_initialized() or dist.get_backend() == "gloo":
        return None  # the default group is one
    return dist.new_group(backend="gloo")
