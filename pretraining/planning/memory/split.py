"""What one rank holds of a model whose layers, sequences or experts are split over ranks, before ZeRO shards it.

Tensor parallelism cuts the matrices of a layer, embedding and head; norms and routers stay whole on every rank. Expert
parallelism cuts the experts. ZeRO then shards what is left over the ranks that hold the same part. Ranks that have
parts of the same sequences hold the same weights, so that to ZeRO they are data-parallel.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from pretraining.ds_config import Degrees, degrees_of, zero_stage
from pretraining.planning.memory.tensors import Tensor, frozen_tensors, parameter_tensors, wide_tensors
from pretraining.planning.shapes import Widths, shape_of
from pretraining.recipe import Recipe

# AutoTP cuts the outputs of the first line and the inputs of the second; a bias of the second stays whole
_CUT = re.compile(
    r"\.(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)\.(weight|bias)$"
    r"|\.(self_attn\.o_proj|mlp\.down_proj)\.weight$"
)
# by tokens of the vocabulary (model/parallel.py); the fullest rank has a row more if the degree does not
# divide them
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
_EXPERTS = re.compile(r"\.experts\.")


class Family(NamedTuple):
    """Parameters that ZeRO shards over the same ranks, of the size that one rank would hold without ZeRO."""

    trained: tuple[Tensor, ...]
    frozen: tuple[Tensor, ...]
    trained_numel: int
    """Elements of those that are trained."""
    numel: int
    """Elements of all of them."""
    ranks: int
    """Ranks that hold the same part of them."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.trained, *self.frozen)


def families(recipe: Recipe, ds_config: dict | None, world_size: int) -> list[Family]:
    """Return the parameters of one rank by the ranks that share them: those that are whole at stage 3 come first."""
    degrees, apart = degrees_of(ds_config), zero_stage(ds_config) == 3
    # stage 3 shards what every rank of a tensor group has over these too (deepspeed 0.19.8)
    ranks = (world_size // (1 if apart else degrees.tensor), world_size // degrees.tensor)
    ranks = (*ranks, world_size // (degrees.tensor * degrees.expert))
    section = json.dumps(recipe.model, sort_keys=True)
    frozen = frozenset(tensor.name for tensor in frozen_tensors(recipe))
    parts = _parts_of(section, frozen, degrees._replace(sequence=1), apart)
    held = [Family(*part, ranks=max(1, number)) for part, number in zip(parts, ranks, strict=True)]
    return [family for family in held if family.tensors]


def held_tensors(of_rank: Sequence[Family]) -> tuple[Tensor, ...]:
    """Return all parameters of one rank."""
    return tuple(tensor for family in of_rank for tensor in family.tensors)


def wide_of(family: Family, recipe: Recipe, ds_config: dict | None) -> tuple[Tensor, ...]:
    """Return the parameters of a family that are in fp32 although others are not, as a rank holds them."""
    names = {tensor.name for tensor in wide_tensors(recipe, ds_config)}
    return tuple(tensor for tensor in family.tensors if tensor.name in names)


# a search asks hundreds of times for the same few
@cache
def _parts_of(section: str, frozen: frozenset[str], degrees: Degrees, apart: bool) -> tuple:
    """Return the fields of a `Family`, without its ranks, for each part of `_cut`.

    section: the recipe's model section, written as JSON.
    """
    parts = []
    for tensors in _cut(json.loads(section), degrees, apart):
        trained = tuple(tensor for tensor in tensors if tensor.name not in frozen)
        kept = tuple(tensor for tensor in tensors if tensor.name in frozen)
        numel = [sum(tensor.numel for tensor in each) for each in (trained, kept)]
        parts.append((trained, kept, numel[0], sum(numel)))
    return tuple(parts)


def _cut(model: dict, degrees: Degrees, apart: bool) -> tuple[list[Tensor], ...]:
    """Return the parameters of one rank: dense ones, parts of split ones, and its experts if these are split.

    apart: whether parts that tensor parallelism leaves to a rank are not among the dense ones.
    """
    dense, parts, experts = [], [], []
    for tensor in parameter_tensors(model):
        if degrees.expert > 1 and _EXPERTS.search(tensor.name):
            experts.append(_part(tensor, degrees.expert))
        elif degrees.tensor > 1 and _CUT.search(tensor.name):
            (parts if apart else dense).append(_part(tensor, degrees.tensor))
        elif degrees.tensor > 1 and tensor.name in _TABLES:
            size = shape_of(model)["vocab_size"]
            rows = rows_of_rank(size, degrees)
            (parts if apart else dense).append(replace(tensor, numel=tensor.numel // size * rows))
        else:
            dense.append(tensor)
    return dense, parts, experts


def _part(tensor: Tensor, degree: int) -> Tensor:
    return replace(tensor, numel=tensor.numel // degree)


def rows_of_rank(vocab_size: int, degrees: Degrees) -> int:
    """Return the rows of embedding and head, thus logits of a token, that the fullest rank has."""
    return -(-vocab_size // degrees.tensor)


def widths_of_rank(widths: Widths, degrees: Degrees) -> Widths:
    """Return the widths of the products that one rank computes. The residual stream is as wide on every rank."""
    split = degrees.tensor
    return replace(
        widths,
        heads=widths.heads // split,
        key_value_heads=max(1, widths.key_value_heads // split),
        inner=widths.inner // split,
    )


def key_value_copies(widths: Widths, degrees: Degrees) -> int:
    """Return how often keys and values are copied, so that each rank has a head of them after the exchange.

    widths: those of one rank (`widths_of_rank`).
    """
    return max(1, degrees.sequence // widths.key_value_heads)
