"""The parameter tensors of a model, in the order of its modules, and those that one rank holds of a split model.

Tensor parallelism cuts the matrices of a layer, embedding and head; norms and routers stay whole on every rank. Expert
parallelism cuts the experts. ZeRO then shards what is left over the ranks that hold the same part. Ranks that have
parts of the same sequences hold the same weights, so that to ZeRO they are data-parallel.
"""

import argparse
import fnmatch
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from pretraining.ds_config import Degrees, degrees_of, zero_stage
from pretraining.errors import nearest_names
from pretraining.planning.shapes import Widths, count_model, is_mixture, widths_of
from pretraining.recipe import Recipe, load_recipe, model_with_defaults
from pretraining.recipe.model import is_exact
from pretraining.runtime.table import Column, write_table
from pretraining.schema import display_path, listed, problem

# bytes an element
SIXTEEN_BIT, FP32 = 2, 4
EMBEDDING, HEAD, ROUTER, HIDDEN, VECTOR = "embedding", "head", "router", "hidden", "vector"
COLUMNS = (
    Column("name, or pattern of all layers", "name"),
    Column("parameters", "number", ","),
    Column("elements of each", "each"),
    Column("of all", "all", ","),
    Column("frozen", "frozen", ","),
)


@dataclass(frozen=True)
class Precision:
    """Bytes of an element, by what it is for."""

    name: str
    """bf16, fp16 or fp32."""
    weights: int
    compute: int
    """Bytes in the products' inputs and results."""
    residual: int
    """Bytes in the inputs of the norms: fp32 under autocast, else as in the products."""

    @property
    def is_autocast(self) -> bool:
        """Whether weights stay fp32 and every product casts its inputs."""
        return self.weights > self.compute


def precision_of(recipe: Recipe, ds_config: dict | None) -> Precision:
    """Return the precision a recipe trains in under a ds_config."""
    name = next((name for name in ("bf16", "fp16") if recipe.training.get(name)), "fp32")
    compute = FP32 if name == "fp32" else SIXTEEN_BIT
    # 16 bit without DeepSpeed, and bf16 at stage 0, is autocast over fp32 weights (training/arguments.py). From stage 1
    # on, DeepSpeed holds 16-bit weights and fp32 masters.
    autocast = name != "fp32" and (ds_config is None or (name == "bf16" and zero_stage(ds_config) == 0))
    weights = FP32 if autocast else compute
    return Precision(name, weights, compute, residual=weights)


@dataclass(frozen=True)
class Tensor:
    """One parameter."""

    numel: int
    kind: str
    """An embedding (a tied head counts as one), the head, a router, a hidden matrix, or a vector (a norm or a bias)."""
    layer: int | None
    """Its layer; None outside the layers."""
    factors: int
    """Sum of the rows and columns of its matrices; for a vector, its elements."""
    name: str = ""
    """What the model calls it."""
    part: str = ""
    """Its part of `sizes.PartSizes`; `attention bias` or `mlp bias` for the bias of a linear layer."""

    @classmethod
    def of_part(cls, part: str, numel: int, layer: int | None, factors: int | None, name: str) -> "Tensor":
        """Return a parameter as `shapes.CountedModel` lists it; factors: None for a vector."""
        if factors is None:
            return cls(numel, VECTOR, layer, numel, name, part)
        return cls(numel, part if part in (EMBEDDING, HEAD, ROUTER) else HIDDEN, layer, factors, name, part)

    @property
    def decays(self) -> bool:
        return self.kind != VECTOR


def parameter_tensors(model: dict) -> tuple[Tensor, ...]:
    """Return every parameter of a recipe's model section, as transformers 5.23 orders them (modeling_<type>.py)."""
    return _tensors_of(json.dumps(model, sort_keys=True), is_exact(model))


# a search asks for the same tensors hundreds of times
@cache
def _tensors_of(section: str, exact: bool) -> tuple[Tensor, ...]:
    """section: the model section, written as JSON."""
    if not exact:
        return tuple(Tensor.of_part(*tensor) for tensor in count_model(json.loads(section)).tensors)
    shape = model_with_defaults(json.loads(section))
    return tuple(_gpt2(shape) if shape["model_type"] == "gpt2" else _llama_like(shape))


def frozen_tensors(recipe: Recipe) -> tuple[Tensor, ...]:
    """Return the parameters that `model.frozen` keeps as they are.

    Raises:
        UserError: a pattern matches no parameter, or nothing is left to train.
    """
    if not recipe.weights.frozen:
        return ()
    tensors, where = parameter_tensors(recipe.model), display_path(recipe.path)
    names = [tensor.name for tensor in tensors]
    for number, pattern in enumerate(recipe.weights.frozen):
        if not fnmatch.filter(names, pattern):
            what = f"is {json.dumps(pattern)}, which matches none of the {len(names)} parameters"
            kinds = list(dict.fromkeys(map(_in_every_layer, names)))
            near = nearest_names(pattern, kinds) or f"; there are {listed(kinds)}"
            raise problem(where, f"model.frozen.{number}", f"{what}{near}")
    frozen = tuple(tensor for tensor in tensors if recipe.weights.freezes(tensor.name))
    if len(frozen) == len(tensors):
        raise problem(where, "model.frozen", "matches every parameter: nothing is left to train")
    return frozen


def _in_every_layer(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


class ParametersVerb:
    """Names and sizes of a model's parameters, as `model.frozen` names them."""

    EXAMPLES = """  python -m pretraining.planning parameters --recipe 124m
  python -m pretraining.planning parameters --recipe features/frozen-layers --json"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--recipe", required=True, metavar="NAME|PATH", help="a file of recipes/, or a path"
        )
        parser.add_argument(
            "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change a value"
        )

    def answer(self, options: argparse.Namespace) -> dict:
        """List every parameter in the order of the modules; a tied one has the name of the embedding."""
        recipe = load_recipe(options.recipe, options.set)
        frozen = {tensor.name for tensor in frozen_tensors(recipe)}
        parameters = [
            {"name": each.name, "elements": each.numel, "layer": each.layer, "frozen": each.name in frozen}
            for each in parameter_tensors(recipe.model)
        ]
        return {"name": recipe.name, "parameters": parameters}

    def as_text(self, answer: dict) -> str:
        families: dict[str, list[dict]] = {}
        for each in answer["parameters"]:
            families.setdefault(_in_every_layer(each["name"]), []).append(each)
        rows = []
        for pattern, members in families.items():
            sizes = [each["elements"] for each in members]
            each = f"{sizes[0]:,}" if len(set(sizes)) == 1 else "differ"
            frozen = sum(member["frozen"] for member in members) or None
            rows.append(
                {"name": pattern, "number": len(members), "each": each, "all": sum(sizes), "frozen": frozen}
            )
        total = sum(each["elements"] for each in answer["parameters"])
        frozen = sum(each["elements"] for each in answer["parameters"] if each["frozen"])
        words = f"{total:,} elements in {len(answer['parameters']):,} parameters, {frozen:,} frozen"
        return f"{answer['name']}: {words}\n\n{write_table(COLUMNS, rows)}"


def wide_tensors(recipe: Recipe, ds_config: dict | None) -> tuple[Tensor, ...]:
    """Return the parameters that `model.keep_in_fp32` keeps in fp32 beside 16-bit ones (upstream/wide_weights.py)."""
    parts = recipe.weights.keep_in_fp32 or ()
    if not parts or precision_of(recipe, ds_config).weights == FP32:
        return ()
    # the table of the tokens comes first, and is the head too if that is tied
    tokens, *others = parameter_tensors(recipe.model)
    wide = [tokens] if "embeddings" in parts or _is_tied(recipe) else []
    kinds = {"embeddings": EMBEDDING, "head": HEAD}
    return (*wide, *(tensor for tensor in others if tensor.kind in {kinds[part] for part in parts}))


def head_is_wide(recipe: Recipe) -> bool:
    """Return whether `model.keep_in_fp32` has the head multiply in fp32."""
    parts = recipe.weights.keep_in_fp32 or ()
    return "head" in parts or (bool(parts) and _is_tied(recipe))


def _is_tied(recipe: Recipe) -> bool:
    return not any(tensor.kind == HEAD for tensor in parameter_tensors(recipe.model))


def trained_tensors(recipe: Recipe) -> tuple[Tensor, ...]:
    if not recipe.weights.frozen:
        return parameter_tensors(recipe.model)
    frozen = {tensor.name for tensor in frozen_tensors(recipe)}
    return tuple(tensor for tensor in parameter_tensors(recipe.model) if tensor.name not in frozen)


def layer_numel(tensors: Sequence[Tensor]) -> int:
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layer is not None:
            sizes[tensor.layer] = sizes.get(tensor.layer, 0) + tensor.numel
    return max(sizes.values())


def _matrix(
    part: str, name: str, layer: int | None, rows: int, columns: int, bias: bool = False
) -> list[Tensor]:
    weight = Tensor.of_part(part, rows * columns, layer, rows + columns, f"{name}.weight")
    if not bias:
        return [weight]
    return [weight, Tensor.of_part(f"{part} bias", columns, layer, None, f"{name}.bias")]


def _norm(name: str, layer: int | None, width: int, bias: bool = False) -> list[Tensor]:
    # the bias is a vector of its own
    parts = ("weight", "bias") if bias else ("weight",)
    return [Tensor.of_part("norms", width, layer, None, f"{name}.{part}") for part in parts]


def _gpt2(shape: dict) -> list[Tensor]:
    """List GPT-2's (Radford et al. 2019): learned positions, biases everywhere, LayerNorm with bias."""
    widths = widths_of(shape)
    width, inner = widths.hidden, widths.inner
    tensors = _matrix(EMBEDDING, "transformer.wte", None, shape["vocab_size"], width)
    tensors += _matrix(EMBEDDING, "transformer.wpe", None, shape["n_positions"], width)
    for layer in range(widths.layers):
        at = f"transformer.h.{layer}"
        tensors += _norm(f"{at}.ln_1", layer, width, bias=True)
        # queries, keys and values are one matrix
        tensors += _matrix("attention", f"{at}.attn.c_attn", layer, width, 3 * width, bias=True)
        tensors += _matrix("attention", f"{at}.attn.c_proj", layer, width, width, bias=True)
        tensors += _norm(f"{at}.ln_2", layer, width, bias=True)
        tensors += _matrix("mlp", f"{at}.mlp.c_fc", layer, width, inner, bias=True)
        tensors += _matrix("mlp", f"{at}.mlp.c_proj", layer, inner, width, bias=True)
    return tensors + _norm("transformer.ln_f", None, width, bias=True) + _head(shape, width)


def _head(shape: dict, width: int) -> list[Tensor]:
    # a tied head is the embedding, which is counted there
    return [] if shape["tie_word_embeddings"] else _matrix(HEAD, "lm_head", None, width, shape["vocab_size"])


def _llama_like(shape: dict) -> list[Tensor]:
    """List those of Llama, Qwen3, Mixtral and Qwen3-MoE: RMSNorm, gated MLPs, grouped-query attention."""
    widths = widths_of(shape)
    width, queries, keys, bias = widths.hidden, widths.queries, widths.keys, bool(shape.get("attention_bias"))
    tensors = _matrix(EMBEDDING, "model.embed_tokens", None, shape["vocab_size"], width)
    for layer in range(widths.layers):
        at = f"model.layers.{layer}.self_attn"
        tensors += _matrix("attention", f"{at}.q_proj", layer, width, queries, bias)
        tensors += _matrix("attention", f"{at}.k_proj", layer, width, keys, bias)
        tensors += _matrix("attention", f"{at}.v_proj", layer, width, keys, bias)
        tensors += _matrix("attention", f"{at}.o_proj", layer, queries, width, bias)
        # one norm for all query heads of a layer, and one for all key heads
        if shape["model_type"].startswith("qwen3"):
            tensors += _norm(f"{at}.q_norm", layer, widths.head_size)
            tensors += _norm(f"{at}.k_norm", layer, widths.head_size)
        at = f"model.layers.{layer}.mlp"
        if is_mixture(shape, layer):
            tensors += _matrix(ROUTER, f"{at}.gate", layer, widths.experts, width)
            # transformers 5.23 keeps a layer's experts in two tensors: both halves of the gate, and the way back
            for name, rows in (("gate_up_proj", 2 * widths.expert_inner), ("down_proj", widths.expert_inner)):
                numel, factors = widths.experts * rows * width, widths.experts * (rows + width)
                tensors.append(Tensor.of_part("experts", numel, layer, factors, f"{at}.experts.{name}"))
        else:
            bias_inside = bool(shape.get("mlp_bias"))
            tensors += _matrix("mlp", f"{at}.gate_proj", layer, width, widths.inner, bias_inside)
            tensors += _matrix("mlp", f"{at}.up_proj", layer, width, widths.inner, bias_inside)
            tensors += _matrix("mlp", f"{at}.down_proj", layer, widths.inner, width, bias_inside)
        tensors += _norm(f"model.layers.{layer}.input_layernorm", layer, width)
        tensors += _norm(f"model.layers.{layer}.post_attention_layernorm", layer, width)
    return tensors + _norm("model.norm", None, width) + _head(shape, width)


# AutoTP cuts the outputs of the first line and the inputs of the second; a bias of the second stays whole
_CUT = re.compile(
    r"\.(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)\.(weight|bias)$"
    r"|\.(self_attn\.o_proj|mlp\.down_proj)\.weight$"
)
# by tokens of the vocabulary (model/vocabulary_parallel.py); the fullest rank has a row more if the degree does not
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
    parts = _cut(section, frozen, degrees._replace(sequence=1), apart)
    held = [Family(*part, ranks=max(1, number)) for part, number in zip(parts, ranks, strict=True)]
    return [family for family in held if family.tensors]


def held_tensors(of_rank: Sequence[Family]) -> tuple[Tensor, ...]:
    return tuple(tensor for family in of_rank for tensor in family.tensors)


def wide_of(family: Family, recipe: Recipe, ds_config: dict | None) -> tuple[Tensor, ...]:
    """Return the parameters of a family that are in fp32 although others are not, as a rank holds them."""
    names = {tensor.name for tensor in wide_tensors(recipe, ds_config)}
    return tuple(tensor for tensor in family.tensors if tensor.name in names)


# a search asks hundreds of times for the same few
@cache
def _cut(section: str, frozen: frozenset[str], degrees: Degrees, apart: bool) -> tuple:
    """Return the fields of a `Family`, without its ranks: of dense tensors, parts of split ones, and split experts.

    Args:
        section: the recipe's model section, written as JSON.
        apart: whether parts that tensor parallelism leaves to a rank are not among the dense ones.
    """
    model = json.loads(section)
    dense, parts, experts = [], [], []
    for tensor in parameter_tensors(model):
        if degrees.expert > 1 and _EXPERTS.search(tensor.name):
            experts.append(replace(tensor, numel=tensor.numel // degrees.expert))
        elif degrees.tensor > 1 and _CUT.search(tensor.name):
            (parts if apart else dense).append(replace(tensor, numel=tensor.numel // degrees.tensor))
        elif degrees.tensor > 1 and tensor.name in _TABLES:
            size = model["vocab_size"]
            rows = rows_of_rank(size, degrees)
            (parts if apart else dense).append(replace(tensor, numel=tensor.numel // size * rows))
        else:
            dense.append(tensor)
    fields = []
    for tensors in (dense, parts, experts):
        trained = tuple(tensor for tensor in tensors if tensor.name not in frozen)
        kept = tuple(tensor for tensor in tensors if tensor.name in frozen)
        numel = [sum(tensor.numel for tensor in each) for each in (trained, kept)]
        fields.append((trained, kept, numel[0], sum(numel)))
    return tuple(fields)


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
