"""Put whole matrices together from slices of ZeRO's flat partitions: find the slices, share the work, exchange."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from pretraining.runtime.process_group import rank_and_world_size

ROUND_NUMEL = 2**28
"""Elements of the matrices in one round. It limits the memory of the buffers in a step."""


class Fragment(NamedTuple):
    """A contiguous part of one parameter in one of this rank's flat tensors."""

    parameter: int
    start: int
    """First element, in the flattened parameter."""
    tensor: int
    """Which flat tensor of the step."""
    offset: int
    """First element there."""
    numel: int


@dataclass(frozen=True)
class Round:
    """What one rank sends, receives and works on in one round. The lists have an entry for each rank."""

    owned: dict[int, int]
    """parameter -> number of its elements, for those that this rank works on."""
    given: list[list[Fragment]]
    """This rank's fragments that another one works on."""
    taken: list[list[Fragment]]
    """The others' fragments that this rank works on."""
    handed_back: list[list[Fragment]]
    """The others' fragments that this rank has worked on."""
    received_back: list[list[Fragment]]
    """This rank's fragments that another one has worked on."""


def plan_rounds(local: list[Fragment], costs: dict[int, int], round_numel: int = ROUND_NUMEL) -> list[Round]:
    """Agree with all ranks on who works on what; every rank must call it, with its own fragments.

    Args:
        costs: parameter -> work, equal on every rank.
    """
    rank, world_size = rank_and_world_size()
    gathered = [[tuple(fragment) for fragment in local]]
    if world_size > 1:
        gathered = [None] * world_size
        dist.all_gather_object(gathered, [tuple(fragment) for fragment in local])
    by_parameter: dict[int, list[list[Fragment]]] = {}
    for number, fragments in enumerate(gathered):
        for fragment in sorted(Fragment(*each) for each in fragments):
            ranks = by_parameter.setdefault(fragment.parameter, [[] for _ in range(world_size)])
            ranks[number].append(fragment)
    owners = _owners(by_parameter, costs)
    rounds = _rounds({p: _numel(ranks) for p, ranks in by_parameter.items()}, round_numel)
    return [_round_of(rank, each, by_parameter, owners) for each in rounds]


def _owners(by_parameter: dict[int, list[list[Fragment]]], costs: dict[int, int]) -> dict[int, int]:
    owners, busy = {}, None
    # the largest first, so that the small ones even out the loads; every rank sorts alike
    for parameter in sorted(by_parameter, key=lambda p: (-costs[p], p)):
        shares = [_held(fragments) for fragments in by_parameter[parameter]]
        busy = busy or [0] * len(shares)
        # Only ranks with more than half of the largest share: whole matrices hardly travel. If all ranks have equal
        # slices (ZeRO-3) or everything (no ZeRO), all are candidates and share the work.
        candidates = [rank for rank, share in enumerate(shares) if 2 * share > max(shares)]
        owners[parameter] = min(candidates, key=lambda rank: (busy[rank], rank))
        busy[owners[parameter]] += costs[parameter]
    return owners


def _rounds(numels: dict[int, int], round_numel: int) -> list[list[int]]:
    rounds, room = [], 0
    for parameter in sorted(numels):
        if numels[parameter] > room:
            rounds.append([])
            room = round_numel
        rounds[-1].append(parameter)
        room -= numels[parameter]
    return rounds


def _round_of(rank: int, parameters: list[int], by_parameter: dict, owners: dict[int, int]) -> Round:
    world_size = len(next(iter(by_parameter.values())))
    given, taken, handed_back, received_back = ([[] for _ in range(world_size)] for _ in range(4))
    owned = {}
    for parameter in parameters:
        ranks, owner = by_parameter[parameter], owners[parameter]
        complete = _held(ranks[owner]) == _numel(
            ranks
        )  # the owner has all of it: nobody needs to send anything
        sources = [owner] if complete else range(world_size)
        if rank in sources:
            given[owner] += ranks[rank]
        received_back[owner] += ranks[rank]
        if rank == owner:
            owned[parameter] = _numel(ranks)
            for source in sources:
                taken[source] += ranks[source]
            for other in range(world_size):
                handed_back[other] += ranks[other]
    return Round(owned, given, taken, handed_back, received_back)


def _held(fragments: list[Fragment]) -> int:
    return sum(fragment.numel for fragment in fragments)


def _numel(ranks: list[list[Fragment]]) -> int:
    # ranks may hold the same elements, so a sum would count twice
    return max(fragment.start + fragment.numel for fragments in ranks for fragment in fragments)


def work_on_whole(
    rounds: list[Round],
    tensors: list[torch.Tensor],
    work: Callable[[dict[int, torch.Tensor]], dict[int, torch.Tensor]],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Apply `work` to whole parameters, and write the results into this rank's flat `tensors`.

    `work` takes and returns {parameter: [numel]} in `dtype` on `device`, for the parameters that this rank works on.
    Every rank must call it.
    """

    def piece(fragment: Fragment) -> torch.Tensor:
        return tensors[fragment.tensor][fragment.offset : fragment.offset + fragment.numel]

    for each in rounds:
        whole = {p: torch.empty(numel, dtype=dtype, device=device) for p, numel in each.owned.items()}
        outgoing = [[piece(f).to(device, dtype) for f in fragments] for fragments in each.given]
        for fragment, values in _exchange(outgoing, each.taken, dtype, device):
            _part(whole, fragment).copy_(values)
        whole = work(whole)
        outgoing = [[_part(whole, f) for f in fragments] for fragments in each.handed_back]
        for fragment, values in _exchange(outgoing, each.received_back, dtype, device):
            piece(fragment).copy_(values)


def _part(whole: dict[int, torch.Tensor], fragment: Fragment) -> torch.Tensor:
    return whole[fragment.parameter][fragment.start : fragment.start + fragment.numel]


def _exchange(
    outgoing: list[list[torch.Tensor]],
    incoming: list[list[Fragment]],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[Fragment, torch.Tensor]]:
    """Send `outgoing[r]` to each rank r. Yield what was received, in the order of `incoming`."""
    if len(outgoing) == 1:
        yield from zip(incoming[0], outgoing[0], strict=True)
        return
    # the empty tensor: torch.cat refuses an empty list, and a rank may have nothing to send
    sent = torch.cat([torch.empty(0, dtype=dtype, device=device), *(t for ts in outgoing for t in ts)])
    sizes_out = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
    sizes_in = [_held(fragments) for fragments in incoming]
    received = torch.empty(sum(sizes_in), dtype=dtype, device=device)
    dist.all_to_all_single(received, sent, sizes_in, sizes_out)
    expected = [fragment for fragments in incoming for fragment in fragments]
    yield from zip(expected, received.split([f.numel for f in expected]), strict=True)
