"""Update hidden matrices with Muon and the rest with AdamW, on whole parameters or ZeRO's flat partitions.

Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon): the update is the orthogonalised momentum of a matrix.
Momentum and weights stay where ZeRO keeps them. A matrix is put together on one rank only to orthogonalise it: the
first half of this module finds its slices, shares the work between the ranks, and exchanges them. The norm of all
gradients is clipped before, by DeepSpeed or the Trainer (`training.max_grad_norm`); what else clips is gradients.py.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.adamw import adamw

from pretraining.runtime.process_group import gather_from_ranks, rank_and_world_size
from pretraining.upstream.deepspeed import Partition, Slice, partitions, split_part, whole_shape
from pretraining.upstream.matrices import Matrices

ROUND_NUMEL = 2**28
"""Elements of the matrices in one round. It limits the memory of the buffers in a step."""


class MatrixFragment(NamedTuple):
    """A contiguous part of one parameter in one of this rank's flat tensors."""

    parameter: int
    start: int
    """First element, in the flattened parameter."""
    tensor: int
    """Which flat tensor of the step."""
    offset: int
    """First element there."""
    numel: int
    columns: int = 0
    """Of a rectangle in rows of `width`, if a layer's columns are split over ranks; else 0."""
    width: int = 0

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """View the fragment in the flattened parameter."""
        if not self.columns:
            return whole[self.start : self.start + self.numel]
        row, column = divmod(self.start, self.width)
        rows = whole.view(-1, self.width)[row : row + self.numel // self.columns]
        return rows[:, column : column + self.columns]

    @property
    def end(self) -> int:
        """The element after the last one, in the flattened parameter."""
        gaps = self.numel // self.columns - 1 if self.columns else 0
        return self.start + self.numel + gaps * (self.width - self.columns)


def fragments_of(piece: Slice, number: int) -> Iterator[MatrixFragment]:
    """Yield where in the whole parameter `number` the elements of a slice are."""
    _, start, _, offset, numel = piece
    if not (split := split_part(piece.parameter)):
        yield MatrixFragment(number, start, 0, offset, numel)
        return
    # of a layer that AutoTP splits, a slice counts in this rank's part: some of its rows, or some of its columns
    [(dim, (first, count))], width = split.items(), whole_shape(piece.parameter)[-1]
    if dim == 0:
        yield MatrixFragment(number, first * width + start, 0, offset, numel)
        return
    for at, rows, columns in rectangles(start, numel, count):
        row, column = divmod(at, count)
        place = row * width + first + column, 0, offset + at - start
        yield MatrixFragment(number, *place, rows * columns, columns, width)


def rectangles(start: int, numel: int, columns: int) -> Iterator[tuple[int, int, int]]:
    """Cut a slice of flattened rows into the end of one, whole ones, the beginning of one: (first, rows, columns)."""
    end = start + numel
    while start < end:
        width = min(columns - start % columns, end - start)
        rows = (end - start) // columns if width == columns else 1
        yield start, rows, width
        start += rows * width


@dataclass(frozen=True)
class Round:
    """What one rank sends, receives and works on in one round. The lists have an entry for each rank."""

    parameters: list[int]
    """All of the round, whichever rank works on them."""
    owned: dict[int, int]
    """parameter -> number of its elements, for those that this rank works on."""
    given: list[list[MatrixFragment]]
    """This rank's fragments that another one works on."""
    taken: list[list[MatrixFragment]]
    """The others' fragments that this rank works on."""
    handed_back: list[list[MatrixFragment]]
    """The others' fragments that this rank has worked on."""
    received_back: list[list[MatrixFragment]]
    """This rank's fragments that another one has worked on."""


def plan_rounds(
    local: list[MatrixFragment], costs: dict[int, int], round_numel: int = ROUND_NUMEL
) -> list[Round]:
    """Agree with all ranks on who works on what. costs: {parameter: work}, equal on every rank. A collective."""
    rank, world_size = rank_and_world_size()
    gathered = gather_from_ranks([tuple(fragment) for fragment in local])
    by_parameter: dict[int, list[list[MatrixFragment]]] = {}
    for number, fragments in enumerate(gathered):
        for fragment in sorted(MatrixFragment(*each) for each in fragments):
            ranks = by_parameter.setdefault(fragment.parameter, [[] for _ in range(world_size)])
            ranks[number].append(fragment)
    owners, busy = {}, [0] * world_size
    # the largest first, so that the small ones even out the loads; every rank sorts alike
    for parameter in sorted(by_parameter, key=lambda p: (-costs[p], p)):
        shares = [_held(fragments) for fragments in by_parameter[parameter]]
        # Only ranks with more than half of the largest share: whole matrices hardly travel. If all ranks have equal
        # slices (ZeRO-3) or everything (no ZeRO), all are candidates and share the work.
        candidates = [each for each, share in enumerate(shares) if 2 * share > max(shares)]
        owners[parameter] = min(candidates, key=lambda each: (busy[each], each))
        busy[owners[parameter]] += costs[parameter]
    rounds: list[list[int]] = []
    room = 0
    for parameter in sorted(by_parameter):
        numel = _numel(by_parameter[parameter])
        if numel > room:
            rounds.append([])
            room = round_numel
        rounds[-1].append(parameter)
        room -= numel
    planned = []
    for parameters in rounds:
        given, taken, handed_back, received_back = ([[] for _ in range(world_size)] for _ in range(4))
        owned = {}
        for parameter in parameters:
            ranks, owner = by_parameter[parameter], owners[parameter]
            # if the owner has all of it, nobody needs to send anything
            sources = [owner] if _held(ranks[owner]) == _numel(ranks) else range(world_size)
            if rank in sources:
                given[owner] += ranks[rank]
            received_back[owner] += ranks[rank]
            if rank == owner:
                owned[parameter] = _numel(ranks)
                for source in sources:
                    taken[source] += ranks[source]
                for other in range(world_size):
                    handed_back[other] += ranks[other]
        planned.append(Round(parameters, owned, given, taken, handed_back, received_back))
    return planned


def _held(fragments: list[MatrixFragment]) -> int:
    return sum(fragment.numel for fragment in fragments)


def _numel(ranks: list[list[MatrixFragment]]) -> int:
    # ranks may hold the same elements, so a sum would count twice
    return max(fragment.end for fragments in ranks for fragment in fragments)


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

    def piece(fragment: MatrixFragment) -> torch.Tensor:
        return tensors[fragment.tensor][fragment.offset : fragment.offset + fragment.numel]

    for each in rounds:
        whole = {p: torch.empty(numel, dtype=dtype, device=device) for p, numel in each.owned.items()}
        outgoing = [[piece(f).to(device, dtype) for f in fragments] for fragments in each.given]
        for fragment, values in _exchange(outgoing, each.taken, dtype, device):
            place = fragment.of(whole[fragment.parameter])
            place.copy_(values.view_as(place))
        whole = work(whole)
        outgoing = [[f.of(whole[f.parameter]).flatten() for f in fs] for fs in each.handed_back]
        for fragment, values in _exchange(outgoing, each.received_back, dtype, device):
            piece(fragment).copy_(values)


def _exchange(
    outgoing: list[list[torch.Tensor]],
    incoming: list[list[MatrixFragment]],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[MatrixFragment, torch.Tensor]]:
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


class Muon(torch.optim.Optimizer):
    """An optimizer with two rules: a group's `algorithm` is "muon" or "adamw".

    Args:
        groups: parameter groups, with lr and its peak, weight_decay and decay_times, momentum; one of "muon" also has
            nesterov, polynomial, newton_schulz_steps, neuron_beta2 and scale, one of "adamw" beta2 and eps.
        model: whose parameters these are.
        matrices: {name: its matrices} of every parameter in a group of "muon".

    DeepSpeed replaces a group's parameters by flat fp32 partitions. `bind` says which parts are in them.
    """

    def __init__(self, groups: list[dict], model: nn.Module, matrices: dict[str, Matrices]) -> None:
        super().__init__(groups, {"algorithm": "adamw"})
        self.model, self.names, self.matrices = model, list(matrices), list(matrices.values())
        self._neurons: dict[int, torch.Tensor] = {}
        self._costs = {number: each.cost for number, each in enumerate(self.matrices)}
        self.bind(partitions(self))

    def bind(self, stepped: Iterable[Partition]) -> None:
        """Set the tensors that are stepped from now on."""
        # Numbers, because fragments travel between ranks, where a tensor's id means nothing. By name, because AutoTP
        # may have put other parameters in the place of the model's.
        numbers = {id(self.model.get_parameter(name)): number for number, name in enumerate(self.names)}
        self._plans: dict[tuple, list[Round]] = {}
        self._tensors: dict[int, tuple[torch.Tensor, list[MatrixFragment]]] = {}
        for each in stepped:
            if self.param_groups[each.group]["algorithm"] == "muon":
                found = [fragments_of(piece, numbers[id(piece.parameter)]) for piece in each.slices]
                self._tensors[id(each.tensor)] = each.tensor, list(chain.from_iterable(found))

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> float | None:
        """Update every group that has parameters. All ranks must call this together."""
        # a closure runs a backward pass, which `no_grad` around this method would prevent
        loss = None if closure is None else torch.enable_grad()(closure)()
        if all(parameter.grad is None for group in self.param_groups for parameter in group["params"]):
            # refused, on every rank (training/stability.py): the momentum must not move the weights either
            return loss
        for group in self.param_groups:
            if group["params"]:
                (self._step_muon if group["algorithm"] == "muon" else self._step_adamw)(group)
        return loss

    def _step_muon(self, group: dict) -> None:
        parameters = group["params"]
        updates = []
        for parameter in parameters:
            # all ranks exchange the same fragments in every step, gradient or not
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            # Nesterov's look-ahead; clone: the exchange writes the result into the update, and must not change the
            # momentum
            update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum.clone()
            updates.append(update.flatten())
        if any(id(parameter) not in self._tensors for parameter in parameters):
            # Not a tensor of the model: loading a checkpoint steps zeros, to find out which states there would be.
            assert not any(update.any() for update in updates), "Muon was not told what is in its partitions"
            return
        device = compute_device(updates[0])
        # the iteration is stable in bf16, and messages are half as large
        dtype = torch.bfloat16 if device.type == "cuda" else updates[0].dtype
        # planning is a collective: once for each set of parameters, not in each step
        key = tuple(map(id, parameters))
        if key not in self._plans:
            held = [(place, self._tensors[each][1]) for place, each in enumerate(key)]
            local = [fragment._replace(tensor=place) for place, found in held for fragment in found]
            self._plans[key] = plan_rounds(local, self._costs)
        beta2, triples = group["neuron_beta2"], group["polynomial"]
        triples = POLYNOMIALS[triples] if isinstance(triples, str) else triples
        # one for each step: the last one is repeated
        triples = [triples[min(n, len(triples) - 1)] for n in range(group["newton_schulz_steps"])]

        def orthogonalized(whole: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
            batches = [self.matrices[number].of(flat) for number, flat in whole.items()]
            results = {}
            for number, result in zip(whole, orthogonalize_all(batches, triples), strict=True):
                matrices = self.matrices[number]
                if beta2 is not None:
                    result = even_out(result, self._moments(device)[number], beta2, matrices.transposed)
                results[number] = matrices.put(result * matrices.scale(group["scale"]))
            return results

        work_on_whole(self._plans[key], updates, orthogonalized, dtype, device)
        if beta2 is not None and rank_and_world_size()[1] > 1:
            # Every rank gets the moments that the others have worked on, so that any can save them, and after a start
            # in another layout another rank can work on them. They are small: a number for each neuron.
            rounds, all_moments = self._plans[key], self._moments(device)
            owned = {number for each in rounds for number in each.owned}
            moments = {number: all_moments[number] for each in rounds for number in each.parameters}
            own = [each if number in owned else torch.zeros_like(each) for number, each in moments.items()]
            flat = torch.cat([each.flatten() for each in own])
            # each is one rank's number and the others' zeros: the sum is exact
            dist.all_reduce(flat)
            for each, new in zip(moments.values(), flat.split([m.numel() for m in own]), strict=True):
                each.copy_(new.view_as(each))
        for parameter, update in zip(parameters, updates, strict=True):
            shrink(parameter, update.view_as(parameter), group)
            parameter.add_(update.view_as(parameter), alpha=-group["lr"])

    def _moments(self, device: torch.device) -> dict[int, torch.Tensor]:
        """Return NorMuon's second moments, {parameter: [matrices, outputs]}; the same on every rank after a step."""
        if not self._neurons:
            shapes = [each.neurons for each in self.matrices]
            self._neurons = {number: torch.zeros(shape, device=device) for number, shape in enumerate(shapes)}
        return self._neurons

    def whole_states(self) -> dict[tuple[str, str], torch.Tensor]:
        """Return {(state, parameter): tensor} of what every rank keeps of whole parameters, for checkpoints."""
        if all(group.get("neuron_beta2") is None for group in self.param_groups):
            return {}
        moments = self._moments(compute_device(next(self.model.parameters())))
        return {("neuron_moment", self.names[number]): each for number, each in moments.items()}

    def _step_adamw(self, group: dict) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        weight_decay = group["weight_decay"]
        if group["decay_times"] != "rate" or group["cautious_decay"]:
            # the kernel decays every weight, times the rate
            for parameter, state in zip(parameters, states, strict=True):
                # an update has the sign of the first moment
                shrink(parameter, state["exp_avg"].lerp(parameter.grad, 1 - group["momentum"]), group)
            weight_decay = 0.0
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["momentum"],
            beta2=group["beta2"],
            lr=group["lr"],
            weight_decay=weight_decay,
            eps=group["eps"],
            maximize=False,
        )


def shrink(parameter: torch.Tensor, update: torch.Tensor, group: dict) -> None:
    """Apply decoupled weight decay; with `cautious_decay` only to weights that the update makes smaller too.

    Such a weight and its update, which is subtracted, have one sign (Chen et al. 2025, arXiv 2510.12402).
    """
    times = {"rate": group["lr"], "share": group["lr"] / group["peak"], "one": 1.0}
    share = group["weight_decay"] * times[group["decay_times"]]
    if group["cautious_decay"]:
        parameter.addcmul_(parameter, (update * parameter >= 0).to(parameter.dtype), value=-share)
    else:
        parameter.mul_(1 - share)


def compute_device(tensor: torch.Tensor) -> torch.device:
    """Return the rank's GPU, also if the states are in host memory."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else tensor.device


POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""Amsel et al. 2025, arXiv 2505.16932, algorithm 1."""
POLYNOMIALS = {
    # steepest at zero, so that small singular values are near 1 after five iterations (Jordan 2024)
    "steep": ((3.4445, -4.7750, 2.0315),),
    # comes to 1 and stays there, in some twelve iterations (modded-nanogpt, track 3)
    "converging": ((2.0, -1.5, 0.5),),
    # Their margin against rounding: p(x / m) in place of p(x), twice at the start and never in the last step.
    "polar_express": tuple(
        (a / m, b / m**3, c / m**5)
        for (a, b, c), m in zip(POLAR_EXPRESS, (1.01**2, *6 * (1.01,), 1.0), strict=True)
    ),
}
"""{`optimizer.polynomial`: (a, b, c) of each iteration; the last one counts for those that follow too}"""
Triples = Sequence[Sequence[float]]
SMALLEST_NORM = 1e-7


def orthogonalize(matrices: torch.Tensor, triples: Triples = 5 * POLYNOMIALS["steep"]) -> torch.Tensor:
    """Turn [n, rows, columns] into as many matrices whose singular values are all near 1.

    Divide X by |X|_F, then X <- a X + b (X X^T) X + c (X X^T)^2 X with each (a, b, c) of `triples`. The dtype
    is the caller's: bf16 on a GPU, in which the iteration is stable.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    # so that X X^T has the shorter side
    x = matrices.mT if tall else matrices
    # the Frobenius norm bounds the largest singular value, which must begin at 1 or less
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(SMALLEST_NORM)
    for a, b, c in triples:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def even_out(
    updates: torch.Tensor, moments: torch.Tensor, beta2: float, transposed: bool = False
) -> torch.Tensor:
    """Divide each neuron's update by the root of its running mean square (NorMuon, Li et al. 2025, algorithm 1).

    updates: [n, outputs, inputs], or [n, inputs, outputs] if transposed; moments: [n, outputs], changed in place. The
    result has the Frobenius norm of an orthogonal matrix, so that `scale` means the same as without: with match_adamw
    the update is the paper's 0.2 sqrt(outputs inputs) / |O|.
    """
    neurons = (updates.mT if transposed else updates).to(moments.dtype)
    moments.lerp_(neurons.square().mean(-1), 1 - beta2)
    even = neurons / (moments.sqrt() + SMALLEST_NORM).unsqueeze(-1)
    norm = even.norm(dim=(-2, -1), keepdim=True).clamp_min(SMALLEST_NORM)
    even = (even * (min(even.shape[-2:]) ** 0.5 / norm)).to(updates.dtype)
    return even.mT if transposed else even


def orthogonalize_all(
    batches: Sequence[torch.Tensor], triples: Triples = 5 * POLYNOMIALS["steep"]
) -> list[torch.Tensor]:
    """Orthogonalize batches of various shapes. Matrices of one shape are computed together."""
    alike = defaultdict(list)
    for number, batch in enumerate(batches):
        # a matrix and a transposed one count as one shape: tall ones are transposed anyway
        alike[tuple(sorted(batch.shape[1:]))].append(number)
    found: list[torch.Tensor | None] = [None] * len(batches)
    for numbers in alike.values():
        tall = [batches[n].shape[1] > batches[n].shape[2] for n in numbers]
        wide = [batches[n].mT if flip else batches[n] for n, flip in zip(numbers, tall, strict=True)]
        results = orthogonalize(torch.cat(wide), triples).split([len(batch) for batch in wide])
        for number, flip, result in zip(numbers, tall, results, strict=True):
            found[number] = result.mT if flip else result
    return found
