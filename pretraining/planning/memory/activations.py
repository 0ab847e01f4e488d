"""Bytes that a forward pass keeps for its backward pass: per layer, outside the layers, and around the loss.

Counted tensor by tensor from transformers 5.23 (modeling_gpt2.py, modeling_llama.py and kin) as CUDA kernels save
them; benchmarks/memory.py compares the counts with torch's memory tracker.
"""

from dataclasses import dataclass
from math import ceil

from pretraining.planning.memory.tensors import FP32, SIXTEEN_BIT, Precision
from pretraining.planning.shapes import Widths, is_mixture, shape_of, widths_of
from pretraining.planning.sizes import model_size
from pretraining.recipe.sections import Loss

ELEMENTWISE_SAVED = {"gelu_new": 4, "relu": 0}
"""Inner activations an activation function saves beside its result; most save one, their input (activations.py).

`gelu_new` is written out in Python: x, 0.5 x, tanh(...) and 1 + tanh(...) each stay.
"""
TOKEN_INPUT_BYTES = 24
"""Ids, labels and positions, int64 each."""
PLAIN = Loss(kind="plain")
ON_PROCESSOR = 256 * 2**20
"""Bytes of one chunk if a processor trains."""
ON_GPU = 2**30
"""Bytes of one chunk on a GPU, but no more than a GPU_SHAREth of its memory."""
GPU_SHARE = 64
MULTIPLE = 128
"""Of tokens: the tiles of matrix products."""


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one GPU."""

    per_layer: float
    """What one layer keeps, without activation checkpointing."""
    layers: float
    """What all layers together keep until the backward pass."""
    recomputed: float
    """With activation checkpointing: one layer's activations, made again when its backward pass comes."""
    outside: float
    """Final norm, input of the head, ids and labels; under autocast also the weights' 16-bit copies."""
    logits: float
    """Loss at its peak (`loss_bytes`)."""
    backward: float
    """Gradients of a layer's own activations while its backward pass runs."""

    @property
    def kept(self) -> float:
        """What is held when the loss is computed."""
        return self.layers + self.outside


def activations(
    model: dict,
    micro_batch: int,
    sequence_length: int,
    precision: Precision,
    every_n_layers: int = 0,
    loss: Loss = PLAIN,
    gpu_memory: float | None = None,
) -> Activations:
    """Return activations of one micro-batch.

    Args:
        every_n_layers: of how many layers one is recomputed, of which its input is kept alone; 0: none is.
        loss: the recipe's section.
        gpu_memory: bytes of the GPU, which chunks of the loss go by; None: a processor trains, or it is not known.
    """
    shape = shape_of(model)
    tokens, widths = micro_batch * sequence_length, widths_of(shape)
    by_layer = [_layer(shape, widths, index, sequence_length, precision) for index in range(widths.layers)]
    largest, boundary = max(by_layer), precision.residual * widths.hidden
    if every_n_layers:
        again = [index % every_n_layers == 0 for index in range(widths.layers)]
        kept = sum(boundary if redo else size for redo, size in zip(again, by_layer, strict=True))
    else:
        kept = sum(by_layer)
    outside = _norm(shape, widths.hidden, precision) + precision.compute * widths.hidden + TOKEN_INPUT_BYTES
    if every_n_layers and shape.get("attn_implementation") == "eager":
        # the mask is an argument of every recomputed layer
        outside += precision.weights * sequence_length
    return Activations(
        per_layer=tokens * largest,
        layers=tokens * kept,
        recomputed=tokens * (largest - boundary) if every_n_layers else 0.0,
        outside=tokens * outside + (_cast_weights(model, every_n_layers > 0) if precision.is_autocast else 0),
        logits=loss_bytes(tokens, shape["vocab_size"], widths.hidden, precision, loss, gpu_memory),
        backward=tokens * _backward(shape, widths, sequence_length, precision),
    )


def _cast_weights(model: dict, checkpointing: bool) -> int:
    """Autocast's 16-bit copies of the matrices; a recomputed layer's go with it, the head's stays."""
    size = model_size(model)
    layers = size.parts.attention + size.parts.mlp + size.parts.experts + size.parts.router
    return SIXTEEN_BIT * (size.head + (0 if checkpointing else layers))


def _layer(shape: dict, widths: Widths, index: int, length: int, precision: Precision) -> float:
    """Bytes a token of one layer."""
    # one byte an element for the mask of each dropout on the residual stream
    dropouts = 2 if shape.get("resid_pdrop") else 0
    norms = 2 * _norm(shape, widths.hidden, precision) + dropouts * widths.hidden
    attention = _attention(shape, widths, length, precision)
    mixture = shape["model_type"] != "gpt2" and is_mixture(shape, index)
    return (
        norms
        + attention
        + (_experts(widths, precision) if mixture else _feed_forward(shape, widths, precision))
    )


def _norm(shape: dict, width: int, precision: Precision, groups: int = 1) -> float:
    """LayerNorm keeps its input, mean and deviation; RMSNorm its input in fp32, 1 / rms, and the normalised input."""
    if shape["model_type"] == "gpt2":
        return precision.residual * width + 2 * FP32
    return FP32 * width + FP32 * groups + precision.residual * width


def _attention(shape: dict, widths: Widths, length: int, precision: Precision) -> float:
    """Input of the projections, queries, keys, values, the result, and what the kernel keeps.

    Flash and memory-efficient kernels keep one fp32 number a head and token (Dao et al. 2022, section 3); eager
    attention the probabilities of every pair, Llama's kin in fp32 and once more in 16 bit.
    """
    width, gpt2 = precision.compute, shape["model_type"] == "gpt2"
    casts = 1 if gpt2 or not precision.is_autocast else 3
    inputs = casts * width * widths.hidden
    if shape["model_type"].startswith("qwen3"):
        inputs += _head_norms(shape, widths, precision)
    if shape.get("attn_implementation") != "eager":
        return inputs + width * (2 * widths.queries + 2 * widths.keys) + FP32 * widths.heads
    pairs = widths.heads * length
    fp32_first = precision.compute < FP32 and (not gpt2 or precision.is_autocast)
    probabilities = pairs * (width + (FP32 if fp32_first else 0))
    if shape["attn_pdrop" if gpt2 else "attention_dropout"]:
        probabilities += pairs * (width + 1)
    return inputs + 4 * width * widths.queries + probabilities


def _head_norms(shape: dict, widths: Widths, precision: Precision) -> float:
    """Qwen3's norms of every query and key head."""
    narrow = Precision(precision.name, precision.weights, precision.compute, precision.compute)
    of_queries = _norm(shape, widths.queries, narrow, widths.heads)
    return of_queries + _norm(shape, widths.keys, narrow, widths.key_value_heads)


def _feed_forward(shape: dict, widths: Widths, precision: Precision) -> float:
    """Input, inner activations before and after the activation function; of a gated one both halves."""
    width, gpt2 = precision.compute, shape["model_type"] == "gpt2"
    saved = ELEMENTWISE_SAVED.get(shape["activation_function" if gpt2 else "hidden_act"], 1)
    if gpt2:
        return width * (widths.hidden + (saved + 1) * widths.inner)
    # autocast casts the input once for each of the gate's halves
    casts = 2 if precision.is_autocast else 1
    return width * (casts * widths.hidden + (saved + 3) * widths.inner)


def _experts(widths: Widths, precision: Precision) -> float:
    """A mixture: each token's inner activations once for every expert it is routed to, and the router in fp32."""
    width, router = precision.compute, 2 * FP32 * widths.experts
    of_expert = 2 * widths.hidden + 4 * widths.expert_inner
    return width * (widths.hidden + widths.chosen_experts * of_expert) + router


def _backward(shape: dict, widths: Widths, length: int, precision: Precision) -> float:
    """Gradients at the widest point of a layer's backward pass: of the inner activations, or of all pairs."""
    width = precision.compute
    inner = (3 if shape["model_type"] == "gpt2" else 2) * width * widths.inner
    if shape.get("attn_implementation") == "eager":
        return max(inner, 2 * FP32 * widths.heads * length) + precision.residual * widths.hidden
    return inner + precision.residual * widths.hidden


def compiles_loss(compile: bool | None, on_gpu: bool) -> bool:
    """Return what `loss.compile` becomes: null is true on a GPU."""
    return on_gpu if compile is None else compile


def logit_bytes(compute: int, compiled: bool) -> int:
    """Return what a chunk holds for a logit of `compute` bytes; its fp32 log-probability too if nothing is compiled."""
    return compute if compiled else compute + max(compute, FP32)


def chunk_length(
    tokens: int, vocab_size: int, bytes_a_logit: int, gpu_memory: float | None, chunk_tokens: int | None
) -> int:
    """Return the tokens of a chunk: the recipe's, else chunks of one length, as few as its memory allows.

    Args:
        bytes_a_logit: see `logit_bytes`.
        gpu_memory: bytes of the GPU; None: a processor trains, or the GPU is not known.
        chunk_tokens: the recipe's `loss.chunk_tokens`.
    """
    if chunk_tokens:
        return min(tokens, chunk_tokens)
    most = max(1, _chunk_bytes(gpu_memory) // (bytes_a_logit * vocab_size * MULTIPLE)) * MULTIPLE
    even = ceil(tokens / ceil(tokens / most))
    return min(tokens, ceil(even / MULTIPLE) * MULTIPLE)


def _chunk_bytes(gpu_memory: float | None) -> int:
    """A power of two, as GPUs of one kind report a little more or less memory than the table says."""
    if gpu_memory is None:
        return ON_PROCESSOR
    return min(ON_GPU, 1 << (int(gpu_memory / GPU_SHARE).bit_length() - 1))


def loss_bytes(
    tokens: int,
    vocab_size: int,
    width: int,
    precision: Precision,
    loss: Loss = PLAIN,
    gpu_memory: float | None = None,
) -> float:
    """Return what `model/loss.py` and `model/cross_entropy.py` hold while they find the loss of one micro-batch.

    plain: the fp32 log-probabilities, their gradient and the logits' gradient. chunked: the logits, which their
    gradient overwrites, and a chunk's log-probabilities if nothing is compiled. fused: the sum of the head's gradient
    in fp32, the gradient of the head's input, and a chunk; after the last chunk the sum in the weights' precision.
    """
    if loss.kind == "plain":
        return 3 * FP32 * tokens * vocab_size
    compute, compiled = precision.compute, compiles_loss(loss.compile, gpu_memory is not None)
    bytes_a_logit = logit_bytes(compute, compiled)
    chunk = chunk_length(tokens, vocab_size, bytes_a_logit, gpu_memory, loss.chunk_tokens)
    if loss.kind == "chunked":
        return compute * tokens * vocab_size + (bytes_a_logit - compute) * chunk * vocab_size
    handed_on = precision.weights * vocab_size * width if precision.weights < FP32 else 0
    passing = max(bytes_a_logit * chunk * vocab_size, handed_on)
    return passing + FP32 * vocab_size * width + compute * tokens * width
