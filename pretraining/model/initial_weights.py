"""Initial weights that depend only on the seed and the parameter's name: the same at every ZeRO stage.

They are drawn by the rules of the model's class, and matrices that a row of `model.draw` names by that row. Each module
has a random generator of its own, so it does not matter which rank draws it: the ranks draw at the same
time, each another module, and send the results to all. Nothing is gathered that is overwritten anyway.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from pretraining.model.counting import parameters_near, standing_in, traced
from pretraining.planning.quantities import several
from pretraining.recipe.optimizer import VECTOR, InitialRow
from pretraining.runtime.heartbeat import long_work, work_done
from pretraining.runtime.process_group import rank_and_world_size
from pretraining.upstream.deepspeed import (
    Chunks,
    copy_chunks,
    fill_partition,
    first_element,
    own_rows,
    share_of,
    whole_numel,
    whole_shape,
)
from pretraining.upstream.matrices import hidden_matrices
from pretraining.upstream.transformers import draw_module, is_partitioned


class Normal(NamedTuple):
    """A normal distribution of mean 0, from which the recipe draws a parameter."""

    std: float
    cut: float | None = None
    """Values are within so many std."""

    def fill(self, tensor: torch.Tensor) -> None:
        if self.cut is None or not self.std:
            nn.init.normal_(tensor, std=self.std)
        else:
            nn.init.trunc_normal_(tensor, std=self.std, a=-self.cut * self.std, b=self.cut * self.std)


NONE: Mapping[str, Any] = {}
MANY = 1_000_000_000
"""So many weights take minutes, or seconds on many ranks: then it is printed that they are drawn."""
NEWS_SECONDS = 30.0


class Draw(NamedTuple):
    """What the rule of one module draws."""

    name: str
    module: nn.Module
    owner: PreTrainedModel
    """The model whose rule it is."""
    kept: list[nn.Parameter]
    """What it draws, without what a later rule draws again."""
    lent: list[nn.Parameter]
    """What needs memory for it."""
    continues: bool = False
    """Whether the rule uses values that it has not drawn itself."""
    own: "Normal | None" = None
    """The recipe's rule, for one parameter, in the place of the class's."""

    @property
    def num_kept(self) -> int:
        return sum(map(whole_numel, self.kept))


@torch.no_grad()
def initialise_weights(
    model: PreTrainedModel,
    seed: int,
    factors: Mapping[str, float] = NONE,
    rules: Mapping[str, Normal] = NONE,
) -> None:
    """Draw every weight from the architecture's own distribution, in fp32 on the CPU, seeded by module name.

    The class's rule for each module runs on full fp32 tensors, with a generator for each module. If several rules draw
    one weight, the last one counts, children first. The result is rounded to the parameter's dtype.

    All ranks call this together. Each has one drawn module at a time in host memory.

    Args:
        factors: {parameter name: factor of the drawn values}.
        rules: {parameter name: what it is drawn from}, of those that do not follow their class.
    """
    rank, ranks = rank_and_world_size()
    draws = list_draws(model, rules)
    scales = {parameter: factors.get(name, 1.0) for name, parameter in model.named_parameters()}
    # The same for every draw, since fresh pages cost time; none of it is taken before it is written to. Not pinned: a
    # rank's part goes over the bus once, and to pin memory for it takes about as long.
    memory = torch.empty(max((sum(map(whole_numel, draw.lent)) for draw in draws), default=0))
    num_weights, num_drawn, began = sum(draw.num_kept for draw in draws), 0, time.monotonic()
    said_at, says = began, rank == 0 and num_weights >= MANY
    if says:
        print(f"drawing {num_weights / 1e9:.1f} B weights, on {several(ranks, 'rank')}", flush=True)
    with long_work():
        for turn in turns(draws, ranks):
            # what continues from values that all ranks have, all draw
            mine = turn[0] if turn[0].continues else turn[rank] if rank < len(turn) else None
            drawn = _draw(mine, seed, memory, scales) if mine is not None else {}
            for source, draw in enumerate(turn):
                for parameter in draw.kept:
                    value = drawn.get(parameter)
                    if ranks > 1 and not draw.continues:
                        if value is None:
                            numel, dtype = whole_numel(parameter), parameter.dtype
                            value = torch.empty(numel, dtype=dtype, device=_sending_device())
                        dist.broadcast(value, source)
                    fill(parameter, lambda start, stop, value=value: [(start, value[start:stop])])
                num_drawn += draw.num_kept
                work_done(draw.num_kept)
            if says and time.monotonic() - said_at > NEWS_SECONDS:
                said_at = time.monotonic()
                minutes = (said_at - began) * (num_weights - num_drawn) / num_drawn / 60
                what = f"{num_drawn / 1e9:.1f} of {num_weights / 1e9:.1f} B weights"
                print(f"drew {what}, about {minutes:.1f} minutes left", flush=True)


def list_draws(model: PreTrainedModel, rules: Mapping[str, Normal] = NONE) -> list[Draw]:
    """List in order what the rules of a model's modules draw, without those of which nothing is kept."""
    draws: list[Draw] = []
    by_recipe = {parameter: rules[name] for name, parameter in model.named_parameters() if name in rules}
    drawn_again: set[nn.Parameter] = set(by_recipe)
    for name, module, owner, trace in reversed(list(traced(model, _on_meta))):
        near = parameters_near(module)
        kept = [each for each in near if each in trace.written - drawn_again]
        if not kept:
            continue
        # GPT-2's attention and MLP draw their children's output projections again, scaled by 1/sqrt(2 n_layer).
        lost = (trace.written & drawn_again) - trace.read
        if not trace.random <= lost:
            lost = set()  # they are drawn all the same, for the numbers that come after them
        lent = [each for each in near if each in trace.written - lost]
        continued = (trace.written | trace.read) - trace.filled
        draws.append(Draw(name, module, owner, kept, lent, bool(continued)))
        drawn_again = (drawn_again | trace.filled) - continued | by_recipe.keys()
    names = {parameter: name for name, parameter in model.named_parameters()}
    # first: a rule that continues from one of them then finds its values
    own = [Draw(names[each], model, model, [each], [each], own=rule) for each, rule in by_recipe.items()]
    return own + draws[::-1]


def rules_of(
    model: PreTrainedModel, rows: Sequence[InitialRow], kinds: Mapping[str, str]
) -> dict[str, Normal]:
    """Return what the rows of `model.draw` draw matrices from; of several that match one the last counts.

    kinds: {parameter name: its kind}.
    """
    layers, matrices = model.config.get_text_config().num_hidden_layers, hidden_matrices(model)
    rules = {}
    for name, parameter in model.named_parameters():
        matching = [row for row in rows if kinds[name] != VECTOR and row.matches(name, kinds[name])]
        if matching:
            sides = matrices[name].sides if name in matrices else whole_shape(parameter)[-2:]
            rules[name] = Normal(matching[-1].deviation(layers, *sides), matching[-1].cut)
    return rules


def turns(draws: list[Draw], ranks: int) -> Iterator[list[Draw]]:
    """Yield the draws that are made at the same time, one on each rank, large ones with large ones.

    A draw that continues from drawn values is alone, after all that come before it.
    """
    waiting: list[Draw] = []
    for draw in [*draws, None]:
        if draw is None or draw.continues:
            waiting.sort(key=lambda each: each.num_kept, reverse=True)
            yield from (waiting[first : first + ranks] for first in range(0, len(waiting), ranks))
            waiting = []
            if draw is not None:
                yield [draw]
        else:
            waiting.append(draw)


def _on_meta(parameter: nn.Parameter) -> torch.Tensor:
    return torch.empty(whole_shape(parameter), dtype=torch.float32, device="meta")


def _draw(
    draw: Draw, seed: int, memory: torch.Tensor, scales: Mapping[nn.Parameter, float]
) -> dict[nn.Parameter, torch.Tensor]:
    """Return {parameter: flat tensor, in its type} of what a draw keeps; valid until the memory is used again."""
    if draw.continues:
        import deepspeed

        lent = {}
        for parameter in parameters_near(draw.module):
            # what the ranks hold, in fp32; of split experts it has only this rank's
            lent[parameter] = torch.empty(whole_shape(parameter), dtype=torch.float32)
            with deepspeed.zero.GatheredParameters([parameter]):  # without ZeRO-3 this does nothing
                own_rows(parameter, lent[parameter]).copy_(parameter)
    else:
        sizes = list(map(whole_numel, draw.lent))
        views = memory[: sum(sizes)].split(sizes)
        lent = {p: view.view(whole_shape(p)) for p, view in zip(draw.lent, views, strict=True)}
    # On the meta device nothing is drawn. On the CPU and in fp32, as a GPU, or 16 bits, would draw other numbers.
    own = nullcontext() if draw.own else standing_in(draw.module, lambda p: lent.get(p, _on_meta(p)))
    # Seeded by seed and module name, so that no weight depends on what was drawn before it.
    digest = hashlib.blake2b(f"{seed}/{draw.name}".encode(), digest_size=8).digest()
    with own, torch.random.fork_rng(devices=[]):
        # 63 bits, because torch's seeds are signed
        torch.random.default_generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        if draw.own:
            draw.own.fill(lent[draw.kept[0]])
        else:
            draw_module(draw.owner, draw.module)
    values = {p: lent[p].view(-1).to(_sending_device(), p.dtype) for p in draw.kept}
    return {p: value if scales[p] == 1.0 else value.mul_(scales[p]) for p, value in values.items()}


def _sending_device() -> str:
    """Name the device whose tensors the ranks can send; a rank alone sends nothing."""
    return "cuda" if rank_and_world_size()[1] > 1 and dist.get_backend() == "nccl" else "cpu"


def fill(parameter: nn.Parameter, read: Callable[[int, int], Chunks]) -> None:
    """Set what this rank has of a parameter. All ranks call this together.

    read: returns the elements [start, stop) of the whole flattened parameter.
    """
    start = first_element(parameter)
    if not is_partitioned(parameter):
        copy_chunks(read(start, start + parameter.numel()), parameter.view(-1), start)
    elif not fill_partition(parameter, read):
        import deepspeed  # here and not above: counting a model does not wait for its import

        share = share_of(parameter)
        # the values of the first rank, or of the first that has the same experts, go to the others when the block ends
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if dist.get_rank(share.copies if share else None) == 0:
                copy_chunks(read(start, start + parameter.numel()), parameter.view(-1), start)
