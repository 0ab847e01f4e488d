"""Parameters, part by part, and FLOPs per token, in every way the field counts them."""

from dataclasses import asdict, dataclass, fields

from pretraining.planning.shapes import HOW, CountedModel, Widths, count_model, is_mixture, widths_of
from pretraining.recipe import model_with_defaults
from pretraining.recipe.model import ROUTER_COEFFICIENT, is_exact

BACKWARD = 2
"""The backward pass costs twice the forward pass: one product for the inputs' gradients, one for the weights'."""


@dataclass(frozen=True)
class PartSizes:
    """Parameters by what they do; their sum is the whole model."""

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
    """Output projection; 0 if it is tied to the token table."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Backward:
    """What the backward pass computes of a model of which some parameters are frozen."""

    trained: int
    """Parameters with gradients."""
    weights: int
    """Entries of `ModelSize.matmul` that get gradients."""
    inputs: int
    """Entries of `ModelSize.matmul` whose inputs get gradients: those behind the first parameter that is trained."""
    layers: float
    """Share of the layers behind the first parameter that is trained."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters, equal to those of the built model."""

    total: int
    """All parameters; a tied head is counted once."""
    embedding: int
    """Token and learned-position tables (a separate head is not among them)."""
    active: int
    """Parameters that one token passes through; of a layer's experts, only those it is routed to."""
    matmul: int
    """Entries of the matrices that a token is multiplied with: layers and head, without biases and norms."""
    head: int
    """Entries of the output projection in `matmul`, whether it is tied or not."""
    num_layers: int
    attention_width: int
    """Heads x head size, the width of the queries."""
    tied: bool
    """Whether the head is the token table."""
    parts: PartSizes
    counted: str | None = None
    """The way it was counted; None if by formula."""
    backward: "Backward | None" = None
    """What the backward pass is for, if some parameters are frozen; None: for all of it."""

    @property
    def gradients(self) -> Backward:
        """What the backward pass computes."""
        return self.backward or Backward(self.total, self.matmul, self.matmul, 1.0)

    @property
    def non_embedding(self) -> int:
        """Total without the embedding tables."""
        return self.total - self.embedding


@dataclass(frozen=True)
class _Counted:
    """The parts of a model, and the parameters that a token does not pass or is not multiplied with."""

    parts: PartSizes
    head: int
    """The output projection, tied or not."""
    idle_experts: int
    biases: int
    """Biases of the linear layers."""
    attention_width: int


def model_size(model: dict) -> ModelSize:
    """Return sizes of a recipe's model section, exactly as the class of the installed transformers builds it."""
    # formulas exist only for the types that the recipe knows exactly
    if not is_exact(model):
        return _of_counted(count_model(model))
    shape = model_with_defaults(model)
    counted = _gpt2(shape) if shape["model_type"] == "gpt2" else _llama_like(shape)
    parts, active = counted.parts, counted.parts.total - counted.idle_experts
    # a tied head is no part of its own, yet a token is multiplied with it: `counted.head` is added below in both cases
    in_layers = active - parts.embedding - parts.head - counted.biases - parts.norms
    return ModelSize(
        total=parts.total,
        embedding=parts.embedding,
        active=active,
        matmul=in_layers + counted.head,
        head=counted.head,
        num_layers=widths_of(shape).layers,
        attention_width=counted.attention_width,
        tied=bool(shape["tie_word_embeddings"]),
        parts=parts,
    )


def balance_of_experts(model: dict) -> str | None:
    """Say what evens out the use of a mixture's experts; empty if nothing does, None for a model without experts.

    A bias of the routers, as DeepSeek-V3 has it, is updated by nobody here.
    """
    if not model_size(model).parts.experts:
        return None
    values = model_with_defaults(model)
    weight = values.get(ROUTER_COEFFICIENT) if values.get("output_router_logits") else None
    return f"a balancing loss, {ROUTER_COEFFICIENT} {weight:g}" if weight else ""


def _of_counted(facts: CountedModel) -> ModelSize:
    """Return the sizes of a model that was built on the meta device."""
    attention_biases, mlp_biases = facts.of_part("attention bias"), facts.of_part("mlp bias")
    named = {field.name: facts.of_part(field.name) for field in fields(PartSizes)}
    # PartSizes holds biases with their layers; only `matmul` leaves them out
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
    """Count GPT-2 (Radford et al. 2019): learned positions, biases everywhere, LayerNorm with bias."""
    widths = widths_of(shape)
    width, layers, inner = widths.hidden, widths.layers, widths.inner
    head = shape["vocab_size"] * width
    parts = PartSizes(
        embedding=(shape["vocab_size"] + shape["n_positions"]) * width,
        # queries, keys and values are one matrix
        attention=layers * (_linear(width, 3 * width, bias=True) + _linear(width, width, bias=True)),
        mlp=layers * (_linear(width, inner, bias=True) + _linear(inner, width, bias=True)),
        experts=0,
        router=0,
        # two in each layer and a last one, each with weight and bias
        norms=(2 * layers + 1) * 2 * width,
        head=0 if shape["tie_word_embeddings"] else head,
    )
    # biases in the order of the matrices above
    return _Counted(parts, head, 0, layers * (3 * width + width + inner + width), width)


def _llama_like(shape: dict) -> _Counted:
    """Count Llama, Qwen3, Mixtral and Qwen3-MoE: rotary positions, RMSNorm, gated MLPs, grouped-query attention."""
    widths = widths_of(shape)
    width, layers, experts = widths.hidden, widths.layers, widths.experts
    sparse = sum(is_mixture(shape, layer) for layer in range(layers))
    # three matrices: both halves of the gate, and the way back
    expert, table = 3 * width * widths.expert_inner, shape["vocab_size"] * width
    attention, attention_biases = _attention(shape, widths)
    mlp, mlp_biases = _gated_mlp(shape, widths)
    # one norm for all query heads and one for all key heads of a layer
    head_norms = 2 * widths.head_size if shape["model_type"].startswith("qwen3") else 0
    parts = PartSizes(
        embedding=table,
        attention=layers * attention,
        mlp=(layers - sparse) * mlp,
        experts=sparse * experts * expert,
        router=sparse * experts * width,
        # RMSNorm has no bias
        norms=layers * (2 * width + head_norms) + width,
        head=0 if shape["tie_word_embeddings"] else table,
    )
    idle = sparse * (experts - widths.chosen_experts) * expert
    biases = layers * attention_biases + (layers - sparse) * mlp_biases
    return _Counted(parts, table, idle, biases, widths.queries)


def _attention(shape: dict, widths: Widths) -> tuple[int, int]:
    """Return the parameters of one layer's projections, and how many of them are biases."""
    hidden, queries, keys = widths.hidden, widths.queries, widths.keys
    bias = bool(shape.get("attention_bias"))
    parameters = _linear(hidden, queries, bias) + 2 * _linear(hidden, keys, bias)
    parameters += _linear(queries, hidden, bias)
    return parameters, bias * (queries + 2 * keys + hidden)


def _gated_mlp(shape: dict, widths: Widths) -> tuple[int, int]:
    """Return the parameters of one dense gated MLP, and how many of them are biases."""
    hidden, inner, bias = widths.hidden, widths.inner, bool(shape.get("mlp_bias"))
    parameters = 2 * _linear(hidden, inner, bias) + _linear(inner, hidden, bias)
    return parameters, bias * (2 * inner + hidden)


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs of one token; a multiply-add is two."""

    parameters: int
    """6 N over the entries of the matrices that a token meets, head included, without attention's scores."""
    six_n_total: int
    """6 N over all active parameters, embeddings included: Hoffmann et al. 2022's C = 6 N D."""
    forward: int
    """Forward pass, every product, causal mask not credited."""
    training: int
    """Forward and backward, causal mask not credited: 6 N + 12 L H Q T (PaLM, appendix B)."""
    training_causal: int
    """The same without the masked half of the scores: 6 N + 6 L H Q T."""
    recomputed: int
    """FLOPs that recomputing every layer adds: each layer's forward pass once more, without the head's."""

    @property
    def hardware(self) -> int:
        """Training with every layer recomputed: what hardware FLOPs utilization (HFU) counts."""
        return self.training + self.recomputed

    def to_dict(self) -> dict:
        """Return the counts and their sum."""
        return {**asdict(self), "hardware": self.hardware}


def flops_per_token(size: ModelSize, sequence_length: int) -> FlopsPerToken:
    """Count the FLOPs of a token in a sequence of `sequence_length` tokens.

    Softmax, norms, biases and activations are not counted, nor is the look-up of the embedding. Frozen matrices have no
    gradients, and in front of the first trained parameter nothing is computed backward. With every
    layer recomputed the sum is equation 3 of Narayanan et al. 2021: 96 l h^2 (1 + s / 6h + V / 16lh) per token
    for GPT.
    """
    # 2 products of 2 FLOPs each, without the mask: PaLM (Chowdhery et al. 2022), appendix B
    scores = 4 * size.num_layers * size.attention_width * sequence_length
    behind = size.gradients
    # a product with a matrix of n entries is 2 n (Kaplan et al. 2020, table 1)
    forward = 2 * size.matmul + scores
    backward_products, backward_scores = (
        2 * (behind.weights + behind.inputs),
        BACKWARD * behind.layers * scores,
    )
    training = round(forward + backward_products + backward_scores)
    return FlopsPerToken(
        parameters=6 * size.matmul,
        six_n_total=6 * size.active,
        forward=forward,
        training=training,
        training_causal=round(training - (scores + backward_scores) / 2),
        recomputed=round(behind.layers * (forward - 2 * size.head)),
    )
