"""The parameter tensors of a model, in the order of its modules: what ZeRO cuts and pads one by one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from pretraining.planning.counted import count_model
from pretraining.recipe import model_with_defaults
from pretraining.recipe.model import is_exact

EMBEDDING, HEAD, ROUTER, HIDDEN, VECTOR = "embedding", "head", "router", "hidden", "vector"


@dataclass(frozen=True)
class Tensor:
    """One parameter."""

    numel: int
    kind: str
    """An embedding (a tied head is one), the head, a router, a hidden matrix, or a vector: a norm or a bias."""
    layer: int | None
    """None for what lies outside the layers."""
    factors: int
    """Rows and columns of its matrices together; of a vector its elements."""

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to every matrix."""
        return self.kind != VECTOR


def parameter_tensors(model: dict) -> tuple[Tensor, ...]:
    """Every parameter of a recipe's model section, as transformers 5.23 orders them (modeling_<type>.py)."""
    if not is_exact(model):
        return tuple(_counted(*tensor) for tensor in count_model(model).tensors)
    return _by_formula(json.dumps(model, sort_keys=True))


@cache
def _by_formula(section: str) -> tuple[Tensor, ...]:
    """Kept, since a search asks for them hundreds of times."""
    shape = model_with_defaults(json.loads(section))
    return tuple(_gpt2(shape) if shape["model_type"] == "gpt2" else _llama_like(shape))


def layer_numel(tensors: Sequence[Tensor]) -> int:
    """Parameters of the largest layer."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layer is not None:
            sizes[tensor.layer] = sizes.get(tensor.layer, 0) + tensor.numel
    return max(sizes.values())


def _counted(part: str, numel: int, layer: int | None, factors: int | None) -> Tensor:
    """A tensor of `CountedModel`."""
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
    return _vector(layer, width) * (2 if bias else 1)


def _gpt2(shape: dict) -> list[Tensor]:
    width, vocabulary = shape["n_embd"], shape["vocab_size"]
    inner = shape["n_inner"] or 4 * width
    tensors = _matrix(None, vocabulary, width, kind=EMBEDDING)
    tensors += _matrix(None, shape["n_positions"], width, kind=EMBEDDING)
    for layer in range(shape["n_layer"]):
        tensors += _norm(layer, width, bias=True)
        tensors += _matrix(layer, width, 3 * width, bias=True) + _matrix(layer, width, width, bias=True)
        tensors += _norm(layer, width, bias=True)
        tensors += _matrix(layer, width, inner, bias=True) + _matrix(layer, inner, width, bias=True)
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
    width, heads, bias = shape["hidden_size"], shape["num_attention_heads"], bool(shape.get("attention_bias"))
    head_size = shape["head_dim"] or width // heads
    queries, keys = heads * head_size, (shape["num_key_value_heads"] or heads) * head_size
    tensors = _matrix(layer, width, queries, bias) + _matrix(layer, width, keys, bias)
    tensors += _matrix(layer, width, keys, bias) + _matrix(layer, queries, width, bias)
    return tensors + (2 * _norm(layer, head_size) if shape["model_type"].startswith("qwen3") else [])


def _feed_forward(shape: dict, layer: int) -> list[Tensor]:
    width, bias = shape["hidden_size"], bool(shape.get("mlp_bias"))
    if is_mixture(shape, layer):
        experts = num_experts(shape)
        inner = shape.get("moe_intermediate_size") or shape["intermediate_size"]
        router = _matrix(layer, experts, width, kind=ROUTER)
        halves = _matrix(layer, 2 * inner, width, experts=experts)
        return router + halves + _matrix(layer, width, inner, experts=experts)
    inner = shape["intermediate_size"]
    return 2 * _matrix(layer, width, inner, bias) + _matrix(layer, inner, width, bias)


def num_experts(shape: dict) -> int:
    """Experts of a mixture layer, 0 in a dense model."""
    return shape.get("num_local_experts") or shape.get("num_experts") or 0


def is_mixture(shape: dict, layer: int) -> bool:
    """Whether this layer's feed-forward part is a mixture of experts (as transformers 5.23 chooses)."""
    if shape["model_type"] == "mixtral":
        return True
    if shape["model_type"] != "qwen3_moe" or not shape["num_experts"]:
        return False
    return layer not in (shape["mlp_only_layers"] or []) and (layer + 1) % shape["decoder_sparse_step"] == 0
