"""Group the ranks of a run by what they share: samples, the parts of a sequence, the parts of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from pretraining.ds_config import NOT_SPLIT, Degrees
from pretraining.runtime.process_group import own_group, rank_and_world_size

# imported at run time by the function that needs it: torch takes seconds
if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class RankGroups:
    """Where this rank is among the ranks of a run. Tensor parallelism is innermost, then sequence, then data.

    So rank = (data_rank * sequence + sequence_part) * tensor + tensor_part.
    """

    degrees: Degrees = NOT_SPLIT
    rank: int = 0
    world_size: int = 1
    sequence_group: dist.ProcessGroup | None = None
    """The ranks that hold the parts of this rank's sequences, in their order; None if sequences are whole."""

    @property
    def data_ranks(self) -> int:
        """Number of groups that read samples of their own."""
        return self.world_size // self.degrees.ranks_per_sample

    @property
    def data_rank(self) -> int:
        """Which of these groups this rank is in."""
        return self.rank // self.degrees.ranks_per_sample

    @property
    def sequence_part(self) -> int:
        """Which part of each sequence this rank has."""
        return self.rank // self.degrees.tensor % self.degrees.sequence

    @property
    def tensor_part(self) -> int:
        """Which part of each split layer this rank has."""
        return self.rank % self.degrees.tensor

    @property
    def evaluating(self) -> tuple[int, int]:
        """(number, count) of this rank among those that evaluate samples of their own.

        Ranks that split layers compute the same samples together. Samples and scores do not split sequences.
        """
        return self.rank // self.degrees.tensor, self.world_size // self.degrees.tensor

    @property
    def is_first_of_sample(self) -> bool:
        """Return whether this rank is the one of its group that reports what it saw in the samples."""
        return self.rank % self.degrees.ranks_per_sample == 0


ALONE = RankGroups()
"""A single process."""


def rank_groups(degrees: Degrees) -> RankGroups:
    """Return where this process is, and make the groups when first asked; all ranks must ask alike."""
    import torch.distributed as dist

    world = id(dist.group.WORLD) if dist.is_initialized() else 0
    return _rank_groups(degrees, world)


@cache
def _rank_groups(degrees: Degrees, world: int) -> RankGroups:
    # `world` tells process groups apart that follow each other in one process
    rank, world_size = rank_and_world_size()
    sequence_group = None
    if degrees.sequence > 1:
        at_once = degrees.ranks_per_sample
        for start in range(0, world_size, at_once):
            for tensor_part in range(degrees.tensor):
                group = own_group(range(start + tensor_part, start + at_once, degrees.tensor))
                sequence_group = group or sequence_group
    return RankGroups(degrees, rank, world_size, sequence_group)
