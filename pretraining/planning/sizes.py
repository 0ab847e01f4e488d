"""Exact parameter counts, part by part: by formula for the known architectures, by building for all others."""

from dataclasses import dataclass, fields

from pretraining.planning.counted import HOW, CountedModel, count_model
from pretraining.recipe import model_with_defaults
from pretraining.recipe.model import is_exact


@dataclass(frozen=True)
class PartSizes:
    """Parameters by what they do; together they are the model."""

    embedding: int
    """Token table, and GPT-2's table of learned positions."""
    attention: int
    """Query, key, value and output projections with their biases; the norms on heads are among `norms`."""
    mlp: int
    """Dense feed-forward layers with their biases."""
    experts: int
    """All experts of all mixture layers."""
    router: int
    """The matrices that choose among the experts."""
    norms: int
    head: int
    """Output projection; 0 where it is tied to the token table."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters, equal to those of the built model."""

    total: int
    """All parameters; a tied head is counted once."""
    embedding: int
    """Token and learned-position tables (a separate head is not among them)."""
    active: int
    """Parameters that one token passes through: of the experts of a layer, those it is routed to."""
    matmul: int
    """Entries of the matrices that a token is multiplied with: layers and head, without biases and norms."""
    head: int
    """Entries of the output projection among them, whether it is tied or not."""
    num_layers: int
    attention_width: int
    """Heads x head size, the width of the queries."""
    tied: bool
    """Whether the head is the token table."""
    parts: PartSizes
    counted: str | None = None
    """How, where not by formula."""

    @property
    def non_embedding(self) -> int:
        """Total without the embedding tables."""
        return self.total - self.embedding


@dataclass(frozen=True)
class _Counted:
    """The parts of a model, and what a token does not meet or is not multiplied with."""

    parts: PartSizes
    head: int
    """The output projection, tied or not."""
    idle_experts: int
    biases: int
    """Biases of the linear layers."""
    attention_width: int


def model_size(model: dict) -> ModelSize:
    """Sizes of a recipe's model section, exactly as the class of the installed transformers builds it."""
    if not is_exact(model):
        return _of_counted(count_model(model))
    shape = model_with_defaults(model)
    counted = _gpt2(shape) if shape["model_type"] == "gpt2" else _llama_like(shape)
    parts, active = counted.parts, counted.parts.total - counted.idle_experts
    in_layers = active - parts.embedding - parts.head - counted.biases - parts.norms
    return ModelSize(
        total=parts.total,
        embedding=parts.embedding,
        active=active,
        matmul=in_layers + counted.head,
        head=counted.head,
        num_layers=shape["n_layer"] if shape["model_type"] == "gpt2" else shape["num_hidden_layers"],
        attention_width=counted.attention_width,
        tied=bool(shape["tie_word_embeddings"]),
        parts=parts,
    )


def _of_counted(facts: CountedModel) -> ModelSize:
    """Sizes of a model that was built on the meta device."""
    attention_biases, mlp_biases = facts.of_part("attention bias"), facts.of_part("mlp bias")
    named = {field.name: facts.of_part(field.name) for field in fields(PartSizes)}
    named["attention"] += attention_biases
    named["mlp"] += mlp_biases
    parts = PartSizes(**named)
    idle = (
        parts.experts * (facts.experts - facts.chosen_experts) // facts.experts if facts.chosen_experts else 0
    )
    active = parts.total - idle
    in_layers = active - parts.embedding - parts.head - attention_biases - mlp_biases - parts.norms
    return ModelSize(
        total=parts.total,
        embedding=parts.embedding,
        active=active,
        matmul=in_layers + facts.head,
        head=facts.head,
        num_layers=facts.layers,
        attention_width=facts.attention_width,
        tied=facts.tied,
        parts=parts,
        counted=HOW,
    )


def _gpt2(shape: dict) -> _Counted:
    """GPT-2 (Radford et al. 2019): learned positions, biases everywhere, LayerNorm with bias."""
    width, layers = shape["n_embd"], shape["n_layer"]
    inner, head = shape["n_inner"] or 4 * width, shape["vocab_size"] * width
    parts = PartSizes(
        embedding=(shape["vocab_size"] + shape["n_positions"]) * width,
        attention=layers * (_linear(width, 3 * width, bias=True) + _linear(width, width, bias=True)),
        mlp=layers * (_linear(width, inner, bias=True) + _linear(inner, width, bias=True)),
        experts=0,
        router=0,
        norms=(2 * layers + 1) * 2 * width,
        head=0 if shape["tie_word_embeddings"] else head,
    )
    return _Counted(parts, head, 0, layers * (3 * width + width + inner + width), width)


def _llama_like(shape: dict) -> _Counted:
    """Llama, Qwen3, Mixtral and Qwen3-MoE: rotary positions, RMSNorm, gated MLPs, grouped-query attention."""
    width, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    head_size = shape["head_dim"] or width // heads
    sparse, experts = _moe_layers(shape), _num_experts(shape)
    expert, table = 3 * width * _expert_width(shape), shape["vocab_size"] * width
    attention, attention_biases = _attention(shape, heads, head_size)
    mlp, mlp_biases = _gated_mlp(shape)
    head_norms = 2 * head_size if shape["model_type"].startswith("qwen3") else 0
    parts = PartSizes(
        embedding=table,
        attention=layers * attention,
        mlp=(layers - sparse) * mlp,
        experts=sparse * experts * expert,
        router=sparse * experts * width,
        norms=layers * (2 * width + head_norms) + width,
        head=0 if shape["tie_word_embeddings"] else table,
    )
    idle = sparse * (experts - shape.get("num_experts_per_tok", 0)) * expert
    biases = layers * attention_biases + (layers - sparse) * mlp_biases
    return _Counted(parts, table, idle, biases, heads * head_size)


def _attention(shape: dict, heads: int, head_size: int) -> tuple[int, int]:
    """Parameters of one layer's projections, and how many of them are biases."""
    width, bias = shape["hidden_size"], bool(shape.get("attention_bias"))
    queries, key_values = heads * head_size, (shape["num_key_value_heads"] or heads) * head_size
    parameters = _linear(width, queries, bias) + 2 * _linear(width, key_values, bias)
    parameters += _linear(queries, width, bias)
    return parameters, bias * (queries + 2 * key_values + width)


def _gated_mlp(shape: dict) -> tuple[int, int]:
    """Parameters of one dense gated MLP, and how many of them are biases."""
    width, inner, bias = shape["hidden_size"], shape["intermediate_size"], bool(shape.get("mlp_bias"))
    parameters = 2 * _linear(width, inner, bias) + _linear(inner, width, bias)
    return parameters, bias * (2 * inner + width)


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _num_experts(shape: dict) -> int:
    return shape.get("num_local_experts") or shape.get("num_experts") or 0


def _expert_width(shape: dict) -> int:
    return shape.get("moe_intermediate_size") or shape["intermediate_size"]


def _moe_layers(shape: dict) -> int:
    """Layers whose MLP is a mixture of experts."""
    layers = shape["num_hidden_layers"]
    if shape["model_type"] == "mixtral":
        return layers
    if shape["model_type"] != "qwen3_moe" or not shape["num_experts"]:
        return 0
    dense, every = set(shape["mlp_only_layers"] or []), shape["decoder_sparse_step"]
    return sum(layer not in dense and (layer + 1) % every == 0 for layer in range(layers))
