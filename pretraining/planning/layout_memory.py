"""Memory of one GPU under tensor, pipeline, context and data parallelism together."""

from dataclasses import asdict, dataclass

from pretraining.planning.constants import table
from pretraining.planning.sizes import ModelSize
from pretraining.planning.stand_in import shape_of

BF16, FP32 = 2, 4
RESERVES = ("fragmentation", "cuda_context_bytes", "nccl_bytes")


@dataclass(frozen=True)
class LayerShape:
    """What of a model's shape decides its activations and messages."""

    width: int
    heads: int
    key_value_heads: int
    head_size: int
    layers: int
    inner: int
    """Width of the feed-forward layers a token meets; of a mixture, of all experts it is routed to."""
    gated: bool
    vocab_size: int

    @property
    def key_value_width(self) -> int:
        """Width of the keys, or of the values."""
        return self.key_value_heads * self.head_size


@dataclass(frozen=True)
class LayoutMemory:
    """Bytes on the fullest GPU of a layout."""

    weights_and_gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """All of it, with the allocator's and the framework's reserve."""
        held = self.weights_and_gradients + self.optimizer + self.activations + self.logits
        assumed = {name: table("memory")[name]["value"] for name in RESERVES}
        return held * (1 + assumed["fragmentation"]) + assumed["cuda_context_bytes"] + assumed["nccl_bytes"]

    def to_dict(self) -> dict:
        """The parts and the total."""
        return {**asdict(self), "total": self.total}


def layer_shape(model: dict) -> LayerShape:
    """The shape of a recipe's model section."""
    shape = shape_of(model)
    if shape["model_type"] == "gpt2":
        width, heads = shape["n_embd"], shape["n_head"]
        inner, layers = shape["n_inner"] or 4 * width, shape["n_layer"]
        return LayerShape(width, heads, heads, width // heads, layers, inner, False, shape["vocab_size"])
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    experts = shape.get("num_local_experts") or shape.get("num_experts")
    inner = shape.get("moe_intermediate_size") or shape["intermediate_size"]
    return LayerShape(
        width=width,
        heads=heads,
        key_value_heads=shape["num_key_value_heads"] or heads,
        head_size=shape["head_dim"] or width // heads,
        layers=shape["num_hidden_layers"],
        inner=inner * (shape["num_experts_per_tok"] if experts else 1),
        gated=True,
        vocab_size=shape["vocab_size"],
    )


def activation_bytes_per_token(shape: LayerShape) -> int:
    """Bytes one layer keeps per token for its backward pass, in bf16 with fused attention.

    Korthikanti et al. 2022, section 4.1, without dropout masks: 32 h for GPT. Inputs of the two norms, input of
    the attention, queries, keys, values, its result, input of the feed-forward layer, and its inner values:
    two of them, four where it is gated.
    """
    queries = shape.heads * shape.head_size
    attention = shape.width + queries + 2 * shape.key_value_width + queries
    feed_forward = shape.width + shape.inner * (4 if shape.gated else 2)
    return BF16 * (2 * shape.width + attention + feed_forward)


def gpu_parameters(size: ModelSize, tensor: int, pipeline: int) -> float:
    """Parameters on a GPU of the first stage, or the last where that holds more: its layers and a table."""
    table = max(size.embedding, size.parts.head)
    layers = size.total - size.embedding - size.parts.head
    whole = layers + size.embedding + size.parts.head if pipeline == 1 else layers / pipeline + table
    return whole / tensor


def layout_memory(
    size: ModelSize,
    shape: LayerShape,
    tokens: float,
    tensor: int,
    pipeline: int,
    shards: int,
    in_flight: int,
    recompute: bool,
    optimizer_width: float = 3 * FP32,
) -> LayoutMemory:
    """Memory of the fullest GPU.

    Weights and fp32 gradients are 6 bytes a parameter, the optimizer's master weights and Adam's moments 12, shared
    by the `shards` data- and context-parallel ranks as Megatron-LM's distributed optimizer does (ZeRO stage 1).
    Under 1F1B the first stage holds the activations of `in_flight` micro-batches (Narayanan et al. 2021, section
    2.2); tensor parallelism with sequence parallelism divides all of them (Korthikanti et al. 2022, table 2);
    with recomputation only each layer's input stays, and one layer's activations beside them.

    Args:
        tokens: of one micro-batch on one GPU, that is after context parallelism.
        optimizer_width: bytes a parameter of master weights and the optimizer's states.
    """
    held, layers = gpu_parameters(size, tensor, pipeline), shape.layers / pipeline
    one_layer = activation_bytes_per_token(shape) * tokens / tensor
    kept = BF16 * shape.width * tokens / tensor if recompute else one_layer
    activations = in_flight * layers * kept + (one_layer if recompute else 0)
    return LayoutMemory(
        weights_and_gradients=held * (BF16 + FP32),
        optimizer=held * optimizer_width / shards,
        activations=activations,
        # as in memory/activations.py: fp32 log-probabilities, their gradient, the logits' gradient
        logits=3 * FP32 * tokens * shape.vocab_size / tensor,
    )
