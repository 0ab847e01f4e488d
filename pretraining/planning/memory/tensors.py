"""The parameter tensors of a model, in the order of its modules, and the width of their elements."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from pretraining.ds_config import zero_stage
from pretraining.planning.shapes import count_model, is_mixture, widths_of
from pretraining.recipe import Recipe, model_with_defaults
from pretraining.recipe.model import is_exact

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


def layer_numel(tensors: Sequence[Tensor]) -> int:
    """Return the number of parameters in the largest layer."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layer is not None:
            sizes[tensor.layer] = sizes.get(tensor.layer, 0) + tensor.numel
    return max(sizes.values())


def _counted(part: str, numel: int, layer: int | None, factors: int | None) -> Tensor:
    """Return a tensor of `CountedModel`."""
    # only matrices have rows and columns
    if factors is None:
        return Tensor(numel, VECTOR, layer, numel)
    return Tensor(numel, part if part in (EMBEDDING, HEAD, ROUTER) else HIDDEN, layer, factors)


def _matrix(
    layer: int | None, rows: int, columns: int, bias: bool = False, kind: str = HIDDEN, experts: int = 1
) -> list[Tensor]:
    weight = [Tensor(experts * rows * columns, kind, layer, experts * (rows + columns))]
    return [*weight, *_vector(layer, columns)] if bias else weight


def _vector(layer: int | None, width: int) -> list[Tensor]:
    return [Tensor(width, VECTOR, layer, width)]


def _norm(layer: int | None, width: int, bias: bool = False) -> list[Tensor]:
    # the bias is a vector of its own
    return _vector(layer, width) * (2 if bias else 1)


def _gpt2(shape: dict) -> list[Tensor]:
    widths, vocabulary = widths_of(shape), shape["vocab_size"]
    width, inner = widths.hidden, widths.inner
    tensors = _matrix(None, vocabulary, width, kind=EMBEDDING)
    tensors += _matrix(None, shape["n_positions"], width, kind=EMBEDDING)
    for layer in range(widths.layers):
        tensors += _norm(layer, width, bias=True)
        # queries, keys and values are one matrix
        tensors += _matrix(layer, width, 3 * width, bias=True) + _matrix(layer, width, width, bias=True)
        tensors += _norm(layer, width, bias=True)
        tensors += _matrix(layer, width, inner, bias=True) + _matrix(layer, inner, width, bias=True)
    # a tied head is the embedding, which is counted above
    head = [] if shape["tie_word_embeddings"] else _matrix(None, width, vocabulary, kind=HEAD)
    return tensors + _norm(None, width, bias=True) + head


def _llama_like(shape: dict) -> list[Tensor]:
    width, vocabulary = shape["hidden_size"], shape["vocab_size"]
    tensors = _matrix(None, vocabulary, width, kind=EMBEDDING)
    for layer in range(shape["num_hidden_layers"]):
        tensors += _attention(shape, layer) + _feed_forward(shape, layer)
        tensors += _norm(layer, width) + _norm(layer, width)
    head = [] if shape["tie_word_embeddings"] else _matrix(None, width, vocabulary, kind=HEAD)
    return tensors + _norm(None, width) + head


def _attention(shape: dict, layer: int) -> list[Tensor]:
    widths, bias = widths_of(shape), bool(shape.get("attention_bias"))
    width, queries, keys = widths.hidden, widths.queries, widths.keys
    tensors = _matrix(layer, width, queries, bias) + _matrix(layer, width, keys, bias)
    tensors += _matrix(layer, width, keys, bias) + _matrix(layer, queries, width, bias)
    return tensors + (2 * _norm(layer, widths.head_size) if shape["model_type"].startswith("qwen3") else [])


def _feed_forward(shape: dict, layer: int) -> list[Tensor]:
    widths, bias = widths_of(shape), bool(shape.get("mlp_bias"))
    width, inner = widths.hidden, widths.inner
    if not is_mixture(shape, layer):
        return 2 * _matrix(layer, width, inner, bias) + _matrix(layer, inner, width, bias)
    experts, inner = widths.experts, widths.expert_inner
    router = _matrix(layer, experts, width, kind=ROUTER)
    # transformers 5.23 keeps the experts of a layer in two tensors: both halves of the gate, and the way back
    halves = _matrix(layer, 2 * inner, width, experts=experts)
    return router + halves + _matrix(layer, width, inner, experts=experts)
