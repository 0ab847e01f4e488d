"""The parameter tensors of a model, in the order of its modules, and the width of their elements."""

import argparse
import fnmatch
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from pretraining.ds_config import zero_stage
from pretraining.errors import nearest_names
from pretraining.planning.quantities import columns
from pretraining.planning.shapes import count_model, is_mixture, widths_of
from pretraining.planning.sizes import Backward, ModelSize, model_size
from pretraining.recipe import Recipe, load_recipe, model_with_defaults
from pretraining.recipe.model import is_exact
from pretraining.schema import display_path, listed, problem

# bytes an element
SIXTEEN_BIT, FP32 = 2, 4
EMBEDDING, HEAD, ROUTER, HIDDEN, VECTOR = "embedding", "head", "router", "hidden", "vector"


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

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to every matrix."""
        return self.kind != VECTOR


def parameter_tensors(model: dict) -> tuple[Tensor, ...]:
    """Return every parameter of a recipe's model section, as transformers 5.23 orders them (modeling_<type>.py)."""
    if not is_exact(model):
        return tuple(_counted(*tensor) for tensor in count_model(model).tensors)
    return _by_formula(json.dumps(model, sort_keys=True))


# a search asks for the same tensors hundreds of times
@cache
def _by_formula(section: str) -> tuple[Tensor, ...]:
    """Return the tensors of a model section, written as JSON."""
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
            raise problem(where, f"model.frozen.{number}", f"{what}{_near_pattern(pattern, names)}")
    frozen = tuple(tensor for tensor in tensors if recipe.weights.freezes(tensor.name))
    if len(frozen) == len(tensors):
        raise problem(where, "model.frozen", "matches every parameter: nothing is left to train")
    return frozen


def _near_pattern(pattern: str, names: list[str]) -> str:
    kinds = list(dict.fromkeys(map(_in_every_layer, names)))
    return nearest_names(pattern, kinds) or f"; there are {listed(kinds)}"


def _in_every_layer(name: str) -> str:
    """Write the pattern of a parameter of all layers."""
    return re.sub(r"\.\d+\.", ".*.", name)


class ParametersVerb:
    """Names and sizes of a model's parameters, as `model.frozen` names them."""

    EXAMPLES = """  python -m pretraining.planning parameters --recipe 124m
  python -m pretraining.planning parameters --recipe features/frozen-layers --json"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Take a recipe."""
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
        """Write one line for the parameters that differ in the layer alone."""
        families: dict[str, list[dict]] = {}
        for each in answer["parameters"]:
            families.setdefault(_in_every_layer(each["name"]), []).append(each)
        header = ["name, or pattern of all layers", "parameters", "elements of each", "of all", "frozen"]
        rows = []
        for pattern, members in families.items():
            sizes = [each["elements"] for each in members]
            each = f"{sizes[0]:,}" if len(set(sizes)) == 1 else "differ"
            frozen = sum(member["frozen"] for member in members)
            rows.append(
                [pattern, f"{len(members):,}", each, f"{sum(sizes):,}", f"{frozen:,}" if frozen else "-"]
            )
        total = sum(each["elements"] for each in answer["parameters"])
        kept = sum(each["elements"] for each in answer["parameters"] if each["frozen"])
        words = f"{answer['name']}: {total:,} elements in {len(answer['parameters']):,} parameters, {kept:,} frozen"
        return f"{words}\n\n{columns(header, rows)}"


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
    """Return the parameters that the optimizer steps."""
    if not recipe.weights.frozen:
        return parameter_tensors(recipe.model)
    frozen = {tensor.name for tensor in frozen_tensors(recipe)}
    return tuple(tensor for tensor in parameter_tensors(recipe.model) if tensor.name not in frozen)


def size_of_recipe(recipe: Recipe) -> ModelSize:
    """Return the sizes of the recipe's model, with what is left to the backward pass if parameters are frozen."""
    size, trained = model_size(recipe.model), trained_tensors(recipe)
    if not recipe.weights.frozen:
        return size
    tensors, first = parameter_tensors(recipe.model), trained[0]
    behind = [tensor for tensor in tensors[tensors.index(first) :] if tensor.layer is not None]
    layers = size.num_layers - behind[0].layer if behind else 0
    # Of the experts of a layer a token meets some.
    met = 1 - (size.total - size.active) / size.parts.experts if size.parts.experts else 1.0

    def entries(chosen: Sequence[Tensor]) -> int:
        matrices = [tensor for tensor in chosen if tensor.kind in (HIDDEN, ROUTER)]
        return round(sum(each.numel * (met if ".experts." in each.name else 1) for each in matrices))

    of_head = (HEAD, EMBEDDING) if size.tied else (HEAD,)
    trains_head = any(tensor.kind in of_head and tensor.numel == size.head for tensor in trained)
    backward = Backward(
        trained=sum(tensor.numel for tensor in trained),
        weights=entries(trained) + size.head * trains_head,
        inputs=entries(behind) + size.head * (first.kind != HEAD),
        layers=layers / size.num_layers,
    )
    return replace(size, backward=backward)


def layer_numel(tensors: Sequence[Tensor]) -> int:
    """Return the number of parameters in the largest layer."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layer is not None:
            sizes[tensor.layer] = sizes.get(tensor.layer, 0) + tensor.numel
    return max(sizes.values())


def _counted(part: str, numel: int, layer: int | None, factors: int | None, name: str) -> Tensor:
    """Return a tensor of `CountedModel`."""
    # only matrices have rows and columns
    if factors is None:
        return Tensor(numel, VECTOR, layer, numel, name)
    return Tensor(numel, part if part in (EMBEDDING, HEAD, ROUTER) else HIDDEN, layer, factors, name)


def _matrix(
    name: str, layer: int | None, rows: int, columns: int, bias: bool = False, kind: str = HIDDEN
) -> list[Tensor]:
    """Return a layer's matrix and its bias; `name` is the module's."""
    weight = [Tensor(rows * columns, kind, layer, rows + columns, f"{name}.weight")]
    return [*weight, Tensor(columns, VECTOR, layer, columns, f"{name}.bias")] if bias else weight


def _experts(name: str, layer: int, rows: int, columns: int, experts: int) -> Tensor:
    """Return a matrix of each of a layer's experts, in one tensor."""
    return Tensor(experts * rows * columns, HIDDEN, layer, experts * (rows + columns), name)


def _norm(name: str, layer: int | None, width: int, bias: bool = False) -> list[Tensor]:
    # the bias is a vector of its own
    parts = ("weight", "bias") if bias else ("weight",)
    return [Tensor(width, VECTOR, layer, width, f"{name}.{part}") for part in parts]


def _gpt2(shape: dict) -> list[Tensor]:
    widths, vocabulary = widths_of(shape), shape["vocab_size"]
    width, inner = widths.hidden, widths.inner
    tensors = _matrix("transformer.wte", None, vocabulary, width, kind=EMBEDDING)
    tensors += _matrix("transformer.wpe", None, shape["n_positions"], width, kind=EMBEDDING)
    for layer in range(widths.layers):
        at = f"transformer.h.{layer}"
        tensors += _norm(f"{at}.ln_1", layer, width, bias=True)
        # queries, keys and values are one matrix
        tensors += _matrix(f"{at}.attn.c_attn", layer, width, 3 * width, bias=True)
        tensors += _matrix(f"{at}.attn.c_proj", layer, width, width, bias=True)
        tensors += _norm(f"{at}.ln_2", layer, width, bias=True)
        tensors += _matrix(f"{at}.mlp.c_fc", layer, width, inner, bias=True)
        tensors += _matrix(f"{at}.mlp.c_proj", layer, inner, width, bias=True)
    return tensors + _norm("transformer.ln_f", None, width, bias=True) + _head(shape, width, vocabulary)


def _head(shape: dict, width: int, vocabulary: int) -> list[Tensor]:
    # a tied head is the embedding, which is counted there
    return [] if shape["tie_word_embeddings"] else _matrix("lm_head", None, width, vocabulary, kind=HEAD)


def _llama_like(shape: dict) -> list[Tensor]:
    width, vocabulary = shape["hidden_size"], shape["vocab_size"]
    tensors = _matrix("model.embed_tokens", None, vocabulary, width, kind=EMBEDDING)
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        tensors += _attention(shape, layer, f"{at}.self_attn") + _feed_forward(shape, layer, f"{at}.mlp")
        tensors += _norm(f"{at}.input_layernorm", layer, width)
        tensors += _norm(f"{at}.post_attention_layernorm", layer, width)
    return tensors + _norm("model.norm", None, width) + _head(shape, width, vocabulary)


def _attention(shape: dict, layer: int, at: str) -> list[Tensor]:
    widths, bias = widths_of(shape), bool(shape.get("attention_bias"))
    width, queries, keys = widths.hidden, widths.queries, widths.keys
    tensors = _matrix(f"{at}.q_proj", layer, width, queries, bias)
    tensors += _matrix(f"{at}.k_proj", layer, width, keys, bias)
    tensors += _matrix(f"{at}.v_proj", layer, width, keys, bias)
    tensors += _matrix(f"{at}.o_proj", layer, queries, width, bias)
    if shape["model_type"].startswith("qwen3"):
        tensors += _norm(f"{at}.q_norm", layer, widths.head_size)
        tensors += _norm(f"{at}.k_norm", layer, widths.head_size)
    return tensors


def _feed_forward(shape: dict, layer: int, at: str) -> list[Tensor]:
    widths, bias = widths_of(shape), bool(shape.get("mlp_bias"))
    width, inner = widths.hidden, widths.inner
    if not is_mixture(shape, layer):
        tensors = _matrix(f"{at}.gate_proj", layer, width, inner, bias)
        tensors += _matrix(f"{at}.up_proj", layer, width, inner, bias)
        return tensors + _matrix(f"{at}.down_proj", layer, inner, width, bias)
    experts, inner = widths.experts, widths.expert_inner
    router = _matrix(f"{at}.gate", layer, experts, width, kind=ROUTER)
    # transformers 5.23 keeps the experts of a layer in two tensors: both halves of the gate, and the way back
    both = _experts(f"{at}.experts.gate_up_proj", layer, 2 * inner, width, experts)
    return [*router, both, _experts(f"{at}.experts.down_proj", layer, width, inner, experts)]
