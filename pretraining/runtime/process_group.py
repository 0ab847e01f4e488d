"""Find this process's rank and what it shares with others (samples, sequences, layers); let ranks agree on values."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from pretraining.ds_config import NOT_SPLIT, Degrees
from pretraining.errors import SILENT_SECONDS, UserError, file_error

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
else:

    class _Distributed:
        """`torch.distributed`, imported when it is used: a look at a run folder must not wait for torch."""

        def __getattr__(self, name: str) -> Any:
            import torch.distributed

            return getattr(torch.distributed, name)

    dist = _Distributed()

Answer = TypeVar("Answer")

_decides_alone = False  # whether no other rank exists: then this one decides for rank 0 (`deciding_alone`)
_store: list[dist.Store] = []
_PAUSE_SECONDS = 0.05
_beside: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""Group of all ranks -> the one of `host_group` beside it."""
_of_sequences: WeakKeyDictionary[dist.ProcessGroup, dict[Degrees, dist.ProcessGroup]] = WeakKeyDictionary()
"""Group of all ranks -> the one with the parts of this rank's sequences; by the group, since an id is used again."""


def keep_store(store: dist.Store) -> None:
    """Keep the store in which the ranks have met, for messages."""
    _store[:] = [store]


def rank_and_world_size() -> tuple[int, int]:
    """Return (rank, number of ranks); (0, 1) for a process without a group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def own_rank() -> int:
    return rank_and_world_size()[0]


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"


def from_rank_0(decide: Callable[[], Answer]) -> Answer:
    """Return on every rank what `decide` returns on rank 0. Only rank 0 looks at the disk.

    If rank 0 raises a `UserError`, or cannot use a file, every rank raises a `UserError`. A process without a group
    decides for itself.
    """
    if not dist.is_initialized() or _decides_alone:
        return decide()
    # the others wait in the broadcast, so rank 0 must reach it after an error too
    answer = list(_outcome(decide)) if dist.get_rank() == 0 else [None, None]
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise UserError(answer[1])
    return answer[0]


def _outcome(act: Callable[[], Answer]) -> tuple[Answer | None, str | None]:
    """Return (what `act` returns, None), or (None, the message of an error that the user can mend)."""
    try:
        return act(), None
    except UserError as error:
        return None, str(error)
    except OSError as error:
        if (refusal := file_error(error)) is None:
            raise
        return None, str(refusal)


def from_rank(source: int, value: Answer) -> Answer:
    """Return on every rank the `value` that the rank `source` gives."""
    if not dist.is_initialized():
        return value
    answer = [value]
    dist.broadcast_object_list(answer, src=source)
    return answer[0]


@contextmanager
def deciding_alone() -> Iterator[None]:
    """Let this rank decide what rank 0 would, until the end of the block: in a rehearsal there is no rank 0."""
    global _decides_alone
    _decides_alone = True
    try:
        yield
    finally:
        _decides_alone = False


def gather_from_ranks(value: Answer, group: dist.ProcessGroup | None = None) -> list[Answer]:
    """Return every rank's `value` in the order of the ranks, on every rank; [value] without a group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    answers: list = [None] * dist.get_world_size()
    dist.all_gather_object(answers, value, group=group)
    return answers


def together(act: Callable[[], Answer]) -> Answer:
    """Return what `act` returns on this rank; a `UserError` on any rank is raised on every one."""
    value, failure = _outcome(act)
    for message in gather_from_ranks(failure):
        if message is not None:
            raise UserError(message)
    return value


def fails_anywhere(failure: str | None, device: torch.device, words: str) -> bool:
    """Return whether any rank has a failure; the first warns, in `words` with {rank} and {failure}. A collective."""
    import torch

    rank, ranks = rank_and_world_size()
    # the number of ranks means no failure: it is larger than every rank
    failing = ranks if failure is None else rank
    if dist.is_initialized():  # else one process without a launcher
        first_failing = torch.tensor(failing, device=device)
        dist.all_reduce(first_failing, dist.ReduceOp.MIN)
        failing = first_failing.item()
    if failing == rank:
        print(f"warning: {words.format(rank=rank, failure=failure)}", file=sys.stderr, flush=True)
    return failing < ranks


@dataclass(frozen=True)
class Disks:
    """The run folders of a run, each on a disk that some ranks share."""

    first_ranks: tuple[int, ...] = ()  # of each rank, the lowest with the same folder; empty: nobody looked
    first_rank: int = 0  # that of this rank

    @property
    def shared(self) -> bool:
        """Return whether every rank sees the run folder of rank 0."""
        return not any(self.first_ranks)

    @property
    def count(self) -> int:
        return len(set(self.first_ranks)) or 1

    @property
    def is_first(self) -> bool:
        """Return whether this rank writes what its run folder needs once."""
        return own_rank() == self.first_rank

    @property
    def has_rank_0(self) -> bool:
        """Return whether this rank sees the run folder of rank 0, which alone holds metrics, events and report."""
        return self.first_rank == 0

    def groups(self) -> dict[int, list[int]]:
        """Return {the lowest rank that sees a run folder: all ranks that see it}."""
        groups: dict[int, list[int]] = {}
        for rank, first in enumerate(self.first_ranks or (0,) * rank_and_world_size()[1]):
            groups.setdefault(first, []).append(rank)
        return groups

    @property
    def place(self) -> tuple[int, int]:
        """(number, count) of this rank among those that share its run folder."""
        ranks = self.groups()[self.first_rank]
        return ranks.index(own_rank()), len(ranks)

    def each(self, look: Callable[[], Answer]) -> dict[int, Answer]:
        """Return on every rank {first rank of a disk: what `look` returns there}; an error of one is raised on all."""
        if self.shared:
            return {0: from_rank_0(look)}
        answers = gather_from_ranks(together(look if self.is_first else lambda: None))
        return {first: answers[first] for first in self.groups()}

    def from_one(self, first_rank: int, look: Callable[[], Answer]) -> Answer:
        """Return on every rank what `look` returns on the first rank of one disk."""
        if self.shared:
            return from_rank_0(look)
        is_there = own_rank() == first_rank
        return from_rank(first_rank, together(look if is_there else lambda: None))


ONE_DISK = Disks()


def is_first_to_report() -> bool:
    """Return whether this rank reports the error that ends it: rank 0 if it fails too, else the first of those that do.

    Not a collective: what a node lacks, a package or a compiler, ends its own ranks alone.
    """
    rank, key, until = own_rank(), "pretraining/reported", time.monotonic() + SILENT_SECONDS
    first = [rank == 0]  # of a single rank, which has no store, and if rank 0 has taken the store along

    def ask() -> None:
        with suppress(IndexError, RuntimeError):
            store = _store[0].clone()
            while rank and not store.check([key]) and time.monotonic() < until:
                time.sleep(_PAUSE_SECONDS)
            first[:] = [store.add(key, 1) == 1]

    # If rank 0 leaves meanwhile, and its store with it, torch writes a page about that. The descriptor itself: what is
    # written in C++ passes Python's streams by.
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        # a thread: torch waits for a store that is gone as long as a collective may take
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(2 * SILENT_SECONDS)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
    return first[0]


def host_group() -> dist.ProcessGroup | None:
    """Return the group that uses the hosts' network and never waits for a GPU. Every rank must call this.

    There is one, because in each every rank has an open connection to every other one. Only main threads may use it:
    they come to the same places in the same order, but what two threads of a rank send would mix. Threads send
    `Messages`. Returns None if the default group is such a group, or if there is no default group.
    """
    if not dist.is_initialized() or dist.get_backend() == "gloo":
        return None
    if dist.group.WORLD not in _beside:
        _beside[dist.group.WORLD] = dist.new_group(backend="gloo")
    return _beside[dist.group.WORLD]


def own_group(ranks: Iterable[int]) -> dist.ProcessGroup | None:
    """Make one of several groups that share no rank and together have all; None if this rank is not in it.

    Every rank calls this for each of the groups, in the same order. On NCCL all of them are then made by one split of
    the default group, as in a `DeviceMesh`, which would make groups of every other dimension too. `new_group` would
    split it once for each, with all ranks.
    """
    members, rank = sorted(ranks), dist.get_rank()
    # what torch asks of a group that is to be split; in DETAIL it wraps groups, and those cannot be
    if dist.group.WORLD.bound_device_id is not None and dist.get_debug_level() != dist.DebugLevel.DETAIL:
        # of the groups that `split_group` is given, it looks at this rank's alone
        return dist.split_group(split_ranks=[members]) if rank in members else None
    group = dist.new_group(members)  # every rank takes part in making every group
    return group if rank in members else None


def largest_over_ranks(value: int) -> int:
    """Return the largest `value` of all ranks, whose main threads all come here; takes the slowest link's latency."""
    import torch

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    shared = torch.tensor(value, dtype=torch.int64)
    # beside NCCL: gloo launches no kernel and waits for no stream
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=host_group())
    return int(shared)


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Add up the ranks' values, element by element, in fp64. A collective that waits for the device."""
    import torch

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [float(value) for value in values]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    summed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return summed.tolist()


class Messages:
    """Small messages between ranks through the store of the process group.

    Unlike a collective, each call is for one rank alone, returns at once, and may come from any thread. A thread makes
    its own, because calls through one connection wait for each other.
    """

    def __init__(self, subject: str):
        self._subject = subject

    def send(self, name: str, content: bytes) -> None:
        self._store.set(name, content)

    def read(self, name: str) -> bytes | None:
        """Return the message of a name; None if there is none."""
        return self._store.get(name) if self._store.check([name]) else None

    def take(self, name: str) -> bytes | None:
        """Do what `read` does, and remove the message: for the only rank that reads it."""
        if (content := self.read(name)) is not None:
            self.remove(name)
        return content

    def remove(self, name: str) -> None:
        self._store.delete_key(name)

    @cached_property
    def _store(self) -> dist.Store:
        return dist.PrefixStore(f"pretraining/{self._subject}", _store[0].clone())


@dataclass(frozen=True)
class RankGroups:
    """Where this rank is: rank = (data_rank * sequence + sequence_part) * tensor + tensor_part."""

    degrees: Degrees = NOT_SPLIT
    rank: int = 0
    world_size: int = 1
    sequence_group: dist.ProcessGroup | None = None  # with the parts of this rank's sequences, in order

    @property
    def data_ranks(self) -> int:
        return self.world_size // self.degrees.ranks_per_sample

    @property
    def data_rank(self) -> int:
        return self.rank // self.degrees.ranks_per_sample

    @property
    def sequence_part(self) -> int:
        return self.rank // self.degrees.tensor % self.degrees.sequence

    @property
    def tensor_part(self) -> int:
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


def rank_groups(degrees: Degrees) -> RankGroups:
    """Return where this process is, and make the groups when first asked; all ranks must ask alike."""
    rank, world_size = rank_and_world_size()
    if degrees.sequence == 1:
        return RankGroups(degrees, rank, world_size)
    made = _of_sequences.setdefault(dist.group.WORLD, {})
    if degrees not in made:
        at_once = degrees.ranks_per_sample
        for start in range(0, world_size, at_once):
            for tensor_part in range(degrees.tensor):
                group = own_group(range(start + tensor_part, start + at_once, degrees.tensor))
                made[degrees] = group or made.get(degrees)
    return RankGroups(degrees, rank, world_size, made[degrees])
