"""Update hidden matrices with Muon and the rest with AdamW, on whole parameters or ZeRO's flat partitions.

Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon): the update is the orthogonalised momentum of a matrix.
Momentum and weights stay where ZeRO keeps them. A matrix is put together on one rank only to orthogonalise it: the
first half of this module finds its slices, shares the work between the ranks, and exchanges them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.adamw import adamw
from transformers import PreTrainedModel, TrainerCallback
from transformers.pytorch_utils import Conv1D

from pretraining.runtime.process_group import rank_and_world_size
from pretraining.upstream.deepspeed import first_element, whole_shape, zero_partitions

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


@dataclass(frozen=True)
class Round:
    """What one rank sends, receives and works on in one round. The lists have an entry for each rank."""

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
    gathered = [[tuple(fragment) for fragment in local]]
    if world_size > 1:
        gathered = [None] * world_size
        dist.all_gather_object(gathered, [tuple(fragment) for fragment in local])
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
        candidates = [rank for rank, share in enumerate(shares) if 2 * share > max(shares)]
        owners[parameter] = min(candidates, key=lambda rank: (busy[rank], rank))
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
    return [_round_of(rank, each, by_parameter, owners) for each in rounds]


def _round_of(rank: int, parameters: list[int], by_parameter: dict, owners: dict[int, int]) -> Round:
    world_size = len(next(iter(by_parameter.values())))
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
    return Round(owned, given, taken, handed_back, received_back)


def _held(fragments: list[MatrixFragment]) -> int:
    return sum(fragment.numel for fragment in fragments)


def _numel(ranks: list[list[MatrixFragment]]) -> int:
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

    def piece(fragment: MatrixFragment) -> torch.Tensor:
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


def _part(whole: dict[int, torch.Tensor], fragment: MatrixFragment) -> torch.Tensor:
    return whole[fragment.parameter][fragment.start : fragment.start + fragment.numel]


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


@dataclass(frozen=True)
class Matrices:
    """The matrices that one parameter holds: GPT-2's queries, keys and values, or both halves of every expert."""

    shape: tuple[int, ...]
    """Shape of the whole parameter, even if this rank has only a part of it."""
    split_dim: int = 0
    parts: int = 1
    """The number of matrices side by side along `split_dim`."""
    transposed: bool = False
    """True for [inputs, outputs], the layout of GPT-2's Conv1D; False for [outputs, inputs]."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def cost(self) -> int:
        """The multiplications of one Newton-Schulz iteration, up to a constant factor."""
        rows, columns = self._one()
        # X X^T is formed on the shorter side, see `orthogonalize`
        return self.numel * min(rows, columns)

    @property
    def fan_out_in(self) -> tuple[int, int]:
        """(outputs, inputs) of one of the matrices."""
        rows, columns = self._one()
        return (columns, rows) if self.transposed else (rows, columns)

    def _one(self) -> tuple[int, int]:
        sizes = list(self.shape)
        sizes[self.split_dim] //= self.parts
        return sizes[-2], sizes[-1]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Reshape [numel] to [matrices, rows, columns], as a view if the layout allows it."""
        dim, sizes = self.split_dim, list(self.shape)
        sizes[dim : dim + 1] = [self.parts, sizes[dim] // self.parts]
        apart = flat.view(sizes).movedim(dim, 0)
        return apart.reshape(-1, *apart.shape[-2:])

    def put(self, matrices: torch.Tensor) -> torch.Tensor:
        """Reverse `of`: [matrices, rows, columns] to [numel]."""
        dim, sizes = self.split_dim, list(self.shape)
        sizes[dim] //= self.parts
        return matrices.view(self.parts, *sizes).movedim(0, dim).reshape(-1)


def hidden_matrices(model: PreTrainedModel) -> dict[str, Matrices]:
    """Return {name: its matrices} of every parameter that maps hidden states to hidden states.

    Embeddings, the head, routers, norms and biases are left out: an embedding's rows are looked up one at a time, and
    a router's outputs are no features (Jordan 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025,
    section 2.2).
    """
    head = model.get_output_embeddings()
    found = {}
    for module_name, module in model.named_modules():
        if module is head or isinstance(module, nn.Embedding) or type(module).__name__.endswith("Router"):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            # under ZeRO-3 the parameter itself is empty here
            shape = whole_shape(parameter)
            if len(shape) < 2:
                continue
            full_name = f"{module_name}.{name}" if module_name else name
            if isinstance(module, Conv1D):
                # queries, keys and values side by side: each is a matrix of its own
                fused = full_name.endswith("c_attn.weight")
                found[full_name] = Matrices(shape, split_dim=1, parts=3 if fused else 1, transposed=True)
            elif name.endswith("gate_up_proj"):
                # [experts, 2 x inner, hidden]: gate and up are separate matrices
                found[full_name] = Matrices(shape, split_dim=1, parts=2)
            else:
                found[full_name] = Matrices(shape)
    return found


def spectral_scale(matrices: Matrices) -> float:
    """Return sqrt(max(1, outputs / inputs)): the same effect on the outputs for every shape (Jordan 2024)."""
    outputs, inputs = matrices.fan_out_in
    return max(1.0, outputs / inputs) ** 0.5


def adamw_scale(matrices: Matrices) -> float:
    """Return 0.2 sqrt(max(outputs, inputs)): updates as large as AdamW's (Liu et al. 2025, eq. 4)."""
    return 0.2 * max(matrices.fan_out_in) ** 0.5


SCALES = {"match_adamw": adamw_scale, "spectral": spectral_scale}


class Muon(torch.optim.Optimizer):
    """An optimizer with two rules: a group's `algorithm` is "muon" or "adamw".

    Args:
        groups: parameter groups; one of "muon" has lr, weight_decay, momentum, nesterov, newton_schulz_steps and
            scale, one of "adamw" lr, weight_decay, betas and eps.
        matrices: {parameter: its matrices} of every parameter in a group of "muon".

    DeepSpeed replaces a group's parameters by flat fp32 partitions. `bind` then says which parts are in them.
    """

    def __init__(self, groups: list[dict], matrices: dict[torch.Tensor, Matrices]) -> None:
        super().__init__(groups, {"algorithm": "adamw"})
        self.matrices = list(matrices.values())
        # numbers, because fragments travel between ranks, where a tensor's id means nothing
        self._numbers = {id(parameter): number for number, parameter in enumerate(matrices)}
        self._costs = {number: each.cost for number, each in enumerate(self.matrices)}

        def whole_parameters(parameters: Sequence[torch.Tensor]) -> list[MatrixFragment]:
            # without ZeRO: every rank has every whole parameter, or all of its own experts
            numbers = (self._numbers[id(parameter)] for parameter in parameters)
            return [
                MatrixFragment(number, first_element(parameter), place, 0, parameter.numel())
                for place, (number, parameter) in enumerate(zip(numbers, parameters, strict=True))
            ]

        self.bind(list(matrices), whole_parameters)

    def bind(
        self,
        tensors: Sequence[torch.Tensor],
        locate: Callable[[Sequence[torch.Tensor]], list[MatrixFragment]],
    ) -> None:
        """Set the tensors that hold the matrices from now on. `locate` finds this rank's fragments in some of them."""
        self._tensors, self._locate, self._plans = {id(tensor): tensor for tensor in tensors}, locate, {}

    def bind_partitions(self, zero: Any) -> None:
        """Bind to the partitions of a DeepSpeed optimizer of stage 1, 2 or 3."""
        partitions = list(zero_partitions(zero))
        by_tensor: dict[int, list[MatrixFragment]] = {}
        for each in (each for partition in partitions for each in partition.slices):
            # None: AdamW updates it
            if (number := self._numbers.get(id(each.parameter))) is not None:
                fragment = MatrixFragment(number, each.start, 0, each.offset, each.numel)
                by_tensor.setdefault(id(each.tensor), []).append(fragment)

        def locate(tensors: Sequence[torch.Tensor]) -> list[MatrixFragment]:
            return [
                fragment._replace(tensor=number)
                for number, tensor in enumerate(tensors)
                for fragment in by_tensor.get(id(tensor), [])
            ]

        self.bind([partition.tensor for partition in partitions], locate)

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> float | None:
        """Update every group that has parameters. All ranks must call this together."""
        # a closure runs a backward pass, which `no_grad` around this method would prevent
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            if group["params"]:
                (self._step_muon if group["algorithm"] == "muon" else self._step_adamw)(group)
        return loss

    def _step_muon(self, group: dict) -> None:
        parameters = group["params"]
        updates = [self._momentum_update(parameter, group) for parameter in parameters]
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
            self._plans[key] = plan_rounds(self._locate(parameters), self._costs)
        scale, steps = SCALES[group["scale"]], group["newton_schulz_steps"]

        def orthogonalized(whole: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
            batches = [self.matrices[number].of(flat) for number, flat in whole.items()]
            results = zip(whole, orthogonalize_all(batches, steps), strict=True)
            return {n: self.matrices[n].put(result * scale(self.matrices[n])) for n, result in results}

        work_on_whole(self._plans[key], updates, orthogonalized, dtype, device)
        for parameter, update in zip(parameters, updates, strict=True):
            # decoupled weight decay, as in AdamW
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update.view_as(parameter), alpha=-group["lr"])

    def _momentum_update(self, parameter: torch.Tensor, group: dict) -> torch.Tensor:
        """Return the running mean of the gradients, [numel], with Nesterov's look-ahead if the group asks for it."""
        gradient, state = parameter.grad, self.state[parameter]
        if gradient is None:
            # all ranks exchange the same fragments in every step, gradient or not
            gradient = torch.zeros_like(parameter)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        # clone: the exchange writes the result into the update, and must not change the momentum
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum.clone()
        return update.flatten()

    def _step_adamw(self, group: dict) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def compute_device(tensor: torch.Tensor) -> torch.device:
    """Return the rank's GPU, also if the states are in host memory."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else tensor.device


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The quintic's coefficients: steepest at zero, so that small singular values are near 1 after five iterations.

Jordan 2024.
"""
SMALLEST_NORM = 1e-7


def orthogonalize(matrices: torch.Tensor, num_steps: int = 5) -> torch.Tensor:
    """Turn [n, rows, columns] into as many matrices whose singular values are all near 1.

    Divide X by |X|_F, then repeat X <- a X + b (X X^T) X + c (X X^T)^2 X. The dtype is the caller's: bf16 on a GPU, in
    which the iteration is stable.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    # so that X X^T has the shorter side
    x = matrices.mT if tall else matrices
    # the Frobenius norm bounds the largest singular value, which must begin at 1 or less
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(SMALLEST_NORM)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def orthogonalize_all(batches: Sequence[torch.Tensor], num_steps: int = 5) -> list[torch.Tensor]:
    """Orthogonalize batches of various shapes. Matrices of one shape are computed together."""
    alike = defaultdict(list)
    for number, batch in enumerate(batches):
        # a matrix and a transposed one count as one shape: tall ones are transposed anyway
        alike[tuple(sorted(batch.shape[1:]))].append(number)
    found: list[torch.Tensor | None] = [None] * len(batches)
    for numbers in alike.values():
        tall = [batches[n].shape[1] > batches[n].shape[2] for n in numbers]
        wide = [batches[n].mT if flip else batches[n] for n, flip in zip(numbers, tall, strict=True)]
        results = orthogonalize(torch.cat(wide), num_steps).split([len(batch) for batch in wide])
        for number, flip, result in zip(numbers, tall, results, strict=True):
            found[number] = result.mT if flip else result
    return found


class BindPartitions(TrainerCallback):
    """Tell Muon where each parameter is, after DeepSpeed has cut them up."""

    def __init__(self, muon: Muon) -> None:
        self.muon = muon

    def on_train_begin(self, args, state, control, model, optimizer, **kwargs) -> None:
        zero = getattr(optimizer, "optimizer", optimizer)
        if args.deepspeed and zero is not self.muon:
            self.muon.bind_partitions(zero)
