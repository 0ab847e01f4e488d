"""Bytes that a forward pass keeps for its backward pass: per layer, outside the layers, and around the loss.

They are counted tensor by tensor from transformers 5.24 (modeling_gpt2.py, modeling_llama.py and similar files), as
CUDA kernels save them. benchmarks/memory.py compares the counts with torch's memory tracker.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from pretraining.planning import shapes
from pretraining.planning.setup import FP32, SIXTEEN_BIT, Precision, Setup
from pretraining.planning.sizes import model_size
from pretraining.recipe import model_with_defaults
from pretraining.recipe.model import Model, is_exact
from pretraining.recipe.sections import Loss

# `gelu_new` is written in Python, so four tensors stay: x, 0.5 x, tanh(...) and 1 + tanh(...)
ELEMENTWISE_SAVED = {"gelu_new": 4, "relu": 0}
"""Tensors that an activation function saves beside its result; most save one, their input (activations.py)."""
INDEX = 8
"""Bytes of an int64."""
TOKEN_INPUT_BYTES = 24
"""Bytes of a token's id, label and position, int64 each."""
ON_PROCESSOR = 256 * 2**20
"""Bytes of one chunk if a processor trains."""
ON_GPU = 2**30
"""Bytes of one chunk on a GPU, at most; a smaller GPU gives one part in GPU_SHARE of its memory."""
GPU_SHARE = 64
VALIDATED_AT_ONCE = 1024
"""Tokens whose logits a validation holds in fp32 at once."""
MULTIPLE = 128
"""Tokens; a chunk is a multiple of it, as matrix products work on tiles."""


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one GPU."""

    per_layer: float
    """Bytes that one layer keeps, without activation checkpointing."""
    layers: float
    """Bytes that all layers together keep until the backward pass."""
    recomputed: float
    """With activation checkpointing: one layer's activations, computed again for its backward pass."""
    outside: float
    """Final norm, input of the head, ids, labels and positions; under autocast also the weights' 16-bit copies."""
    logits: float
    """The loss at its peak (`loss_bytes`)."""
    backward: float
    """Gradients of a layer's own activations while its backward pass runs."""
    recomputes_last: bool = False
    """Whether the last layer, whose backward pass is the first, is computed again."""

    @property
    def at_last_layer(self) -> float:
        return self.layers + (self.recomputed if self.recomputes_last else 0) + self.backward

    @property
    def kept(self) -> float:
        return self.layers + self.outside


def activations(setup: Setup, gpu_memory: float | None) -> Activations:
    """Return activations of one micro-batch on one rank.

    gpu_memory: bytes of the GPU, which decide the loss's chunks; None: a processor trains, or it is not known.
    """
    recipe, model, precision, degrees = setup.recipe, setup.recipe.model, setup.precision, setup.degrees
    tokens, of_loss = setup.tokens_of_pass, _loss_peak(setup, gpu_memory)
    if not is_exact(model):
        passing = _of_counted(setup)
        # made of whole logits, such as capped ones; under a head in fp32 no 16-bit copy of its weights
        capped = 0.0 if recipe.resolved_loss.kind == "fused" else passing.logits
        if setup.head_is_wide and precision.is_autocast:
            capped -= SIXTEEN_BIT * model_size(model).head / degrees.tensor
        return replace(passing, outside=passing.outside + capped, logits=of_loss)
    shape, widths, every = model_with_defaults(model), setup.widths, recipe.training.recomputed_one_in
    # inputs and outputs of modules in fp32, in the layer that has most: they keep these in fp32 too
    wide: Counter = Counter()
    for tensor in (each for each in setup.wide if each.layer is not None):
        wide[tensor.layer] += tensor.factors
    # each dropout on the residual stream keeps a mask of one byte an element
    dropouts = 2 if shape.get("resid_pdrop") else 0
    attends = 2 * _norm(shape, widths.hidden, precision) + dropouts * widths.hidden
    attends += FP32 * max(wide.values(), default=0) + _attention(setup, shape)
    by_layer = [attends + _feed_forward(setup, shape, index) for index in range(widths.layers)]
    # the input of a layer, on the residual stream
    largest, boundary = max(by_layer), precision.residual * widths.hidden
    # tables that say where rows are (`Copies` of model/parallel.py): source and place of each row sent and of each
    # choice, and where those of a token and of a received row begin
    met = shapes.ranks_met(widths.experts, widths.chosen_experts, degrees.expert)
    tables = INDEX * (3 * met + 2 * widths.chosen_experts + 1) if degrees.expert > 1 else 0
    again = _recomputed(setup, widths.layers)
    products = read_anyway = 0.0
    if recipe.speed.recompute == "operators":
        # of a recomputed dense layer: results of products and attention, and of these the ones that its backward pass
        # reads anyway: no backward pass reads the two products that are added to the residual stream
        halves, width = 1 if shape["model_type"] == "gpt2" else 2, precision.compute
        read_anyway = width * (widths.queries + 2 * widths.keys + halves * widths.inner)
        # eager attention multiplies in batches, which are computed again
        read_anyway += 0.0 if _is_eager(model) else width * widths.queries + FP32 * widths.heads
        products = read_anyway + 2 * width * widths.hidden
    kept = sum(boundary + products if redo else size for redo, size in zip(again, by_layer, strict=True))
    kept += widths.layers * tables
    outside = _norm(shape, widths.hidden, precision) + precision.compute * widths.hidden + TOKEN_INPUT_BYTES
    if every and _is_eager(model):
        # the mask is an argument of every recomputed layer
        outside += precision.weights * recipe.sequence_length
    copies = 0
    if precision.is_autocast:
        # autocast's 16-bit copies of the matrices do not grow with the tokens; a recomputed layer frees its own after
        # its forward pass, the head's stays
        size = model_size(model)
        copies = 0 if setup.head_is_wide else size.head / degrees.tensor
        if not every:
            copies += (size.parts["attention"] + size.parts["mlp"]) / degrees.tensor
            copies += size.parts["experts"] / degrees.expert + size.parts["router"]
        copies *= SIXTEEN_BIT
    # the gradients of a layer's inner values
    inner = (3 if shape["model_type"] == "gpt2" else 2) * precision.compute * widths.inner
    if degrees.expert > 1:
        # those of the experts, and of their inputs
        inner = precision.compute * widths.chosen_experts * (widths.hidden + 2 * widths.expert_inner)
    if _is_eager(model):
        # the gradients of all pairs may be wider
        inner = max(inner, 2 * FP32 * widths.heads * recipe.sequence_length)
    return Activations(
        per_layer=tokens * largest,
        layers=tokens * kept,
        recomputed=tokens * (largest - boundary - read_anyway) if every else 0.0,
        outside=tokens * outside + copies,
        logits=of_loss,
        backward=tokens * (inner + boundary),
        recomputes_last=again[-1],
    )


def _is_eager(model: Model) -> bool:
    """Return whether attention keeps the probabilities of every pair."""
    return model.get("attn_implementation") == "eager"


def _recomputed(setup: Setup, num_layers: int) -> list[bool]:
    """Return of each layer whether it is recomputed: of every n the first."""
    every = setup.recipe.training.recomputed_one_in
    return [every > 0 and index % every == 0 for index in range(num_layers)]


def _loss_peak(setup: Setup, gpu_memory: float | None) -> float:
    """Return the bytes of the loss at its peak."""
    recipe, tokens, precision, read = setup.recipe, setup.tokens_of_pass, setup.precision, 0
    vocab_size, width, loss = recipe.model.vocab_size, recipe.model.hidden_size, recipe.resolved_loss
    # a plain loss gathers the logits
    logits = vocab_size if loss.kind == "plain" else shapes.rows_of_rank(vocab_size, setup.degrees)
    if setup.head_is_wide:
        precision = replace(precision, weights=FP32, compute=FP32)
        # the head's input in fp32
        read = FP32 * tokens * width
    return read + loss_bytes(tokens, logits, width, precision, loss, gpu_memory)


class _Layer(NamedTuple):
    """Bytes of one layer of a model that was counted by building it."""

    kept: float
    input: float
    widest: float
    """Of its largest tensor."""
    copies: float = 0.0
    """Made of its weights, however many tokens there are."""


def _of_counted(setup: Setup) -> Activations:
    """Return what a model of any type keeps, as its forward pass was measured; of the loss, what comes before it."""
    model, precision, degrees = setup.recipe.model, setup.precision, setup.degrees
    facts, rows, length = shapes.count_model(model), setup.recipe.micro_batch, setup.recipe.sequence_length
    tokens, found, layers = rows * length / degrees.sequence, {}, []
    if "bytes" in facts.kept:
        name = "fp32" if precision.compute == FP32 else "autocast" if precision.is_autocast else "16 bit"
        found = facts.kept["bytes"][name]
    else:
        # estimated by what goes into a layer's matrices and comes out; why: `kept_or_why_not` in model/counting.py
        width, of_number = model.hidden_size, tokens * precision.compute
        share = facts.chosen_experts / facts.experts if facts.experts else 1
        numbers: dict[int, float] = {}
        for tensor in facts.tensors:
            if tensor.layer is not None and tensor.decays:
                met = share if tensor.part == "experts" else 1
                numbers[tensor.layer] = numbers.get(tensor.layer, 4 * width) + met * tensor.factors
        sizes = [of_number * each for each in numbers.values()]
        layers = [_Layer(size, of_number * width, size / 4) for size in sizes]

    def measured(key: str) -> tuple[float, float]:
        """Return the bytes that do not depend on tokens, such as copies of weights, and the others."""
        if key not in found:
            return 0.0, 0.0
        fixed, of_tokens = _at(found[key], facts.kept["lengths"], rows, length)
        return fixed / degrees.tensor, of_tokens / degrees.sequence

    for kind in facts.kept.get("kinds", ()):
        copies, kept = measured(f"{kind}")
        # ranks that split layers hold a part of the heads and of the inner values each
        kept -= measured(f"{kind} split")[1] * (1 - 1 / degrees.tensor)
        layers.append(_Layer(kept, measured(f"{kind} input")[1], measured(f"{kind} largest")[1], copies))
    if degrees.sequence > 1:
        # after the exchange back, the result is another tensor than the kernel's; keys and values may be copied
        keys = 2 * setup.widths.keys * (shapes.key_value_copies(setup.widths, degrees) - 1)
        exchanged = tokens * precision.compute * (setup.widths.queries + keys)
        layers = [layer._replace(kept=layer.kept + exchanged) for layer in layers]
    again = _recomputed(setup, len(layers))
    pairs = zip(again, layers, strict=True)
    held = sum(layer.input if redo else layer.kept + layer.copies for redo, layer in pairs)
    # what is an argument of every recomputed layer stays with it
    outside = sum(sum(measured(key)) for key in ("outside", *(["arguments"] if any(again) else [])))
    largest = max(layers, key=lambda layer: layer.kept, default=_Layer(0, 0, 0))
    return Activations(
        per_layer=largest.kept,
        layers=held,
        recomputed=largest.kept - largest.input if any(again) else 0.0,
        outside=outside + TOKEN_INPUT_BYTES * tokens,
        logits=sum(measured("logits")),
        # the gradients of a layer's widest tensor and of what was made from it
        backward=2 * largest.widest / degrees.tensor + largest.input,
        recomputes_last=any(again[-1:]),
    )


def _at(found: list[int], lengths: list[int], rows: int, length: int) -> tuple[float, float]:
    """Return the fixed bytes and those of tokens, for `rows` sequences of `length` tokens.

    Args:
        found: bytes of one sequence of the first length, and of one and of two sequences of the others. What sequences
            share, such as positions, is linear in their length, and one sequence's own part a polynomial of degree 2.
        lengths: ascending.
    """
    (first, second, third), (of_first, *others) = lengths, found
    own = [0, others[1] - others[0], others[3] - others[2]]
    shared, more = others[0] - own[1], (others[2] - own[2] - others[0] + own[1]) / (third - second)
    fixed = shared - more * second
    own[0] = of_first - fixed - more * first
    slope = (own[1] - own[0]) / (second - first)
    bend = ((own[2] - own[1]) / (third - second) - slope) / (third - first)
    of_row = own[0] + (length - first) * (slope + bend * (length - second))
    return fixed, rows * of_row + more * length


def _norm(shape: dict, width: int, precision: Precision, groups: int = 1) -> float:
    if shape["model_type"] == "gpt2":
        # LayerNorm: its input, mean and deviation
        return precision.residual * width + 2 * FP32
    # RMSNorm: its input in fp32, 1 / rms, and the normalised input
    return FP32 * width + FP32 * groups + precision.residual * width


def _attention(setup: Setup, shape: dict) -> float:
    """Return the bytes that attention keeps for a token: inputs, queries, keys, values, result, the kernel's own."""
    precision, degrees, widths = setup.precision, setup.degrees, setup.widths
    width, gpt2 = precision.compute, shape["model_type"] == "gpt2"
    # autocast casts the input once for each projection; GPT-2 has one matrix for all three
    casts = 1 if gpt2 or not precision.is_autocast else 3
    inputs = casts * width * widths.hidden
    if shape["model_type"].startswith("qwen3"):
        # the norms of query and key heads read results of products, not the residual stream
        narrow = replace(precision, residual=width)
        inputs += _norm(shape, widths.queries, narrow, widths.heads)
        inputs += _norm(shape, widths.keys, narrow, widths.key_value_heads)
    if not _is_eager(setup.recipe.model):
        # flash and memory-efficient kernels keep one fp32 number per head and token (Dao et al. 2022, section 3)
        keys = widths.keys * shapes.key_value_copies(widths, degrees)
        # after the exchange back, the result of split sequences is another tensor than the kernel's
        queries = (3 if degrees.sequence > 1 else 2) * widths.queries
        return inputs + width * (queries + 2 * keys) + FP32 * widths.heads
    # eager attention keeps the probabilities of every pair
    pairs = widths.heads * setup.recipe.sequence_length
    # llama and similar types, and GPT-2 under autocast, compute them in fp32 and keep them in both precisions
    fp32_first = precision.compute < FP32 and (not gpt2 or precision.is_autocast)
    probabilities = pairs * (width + (FP32 if fp32_first else 0))
    if shape["attn_pdrop" if gpt2 else "attention_dropout"]:
        # dropout keeps its result, and a mask of one byte
        probabilities += pairs * (width + 1)
    # eager attention repeats keys and values until they are as wide as the queries
    return inputs + 4 * width * widths.queries + probabilities


def _feed_forward(setup: Setup, shape: dict, index: int) -> float:
    """Return the bytes that a layer's feed-forward part keeps for a token."""
    precision, widths, gpt2 = setup.precision, setup.widths, shape["model_type"] == "gpt2"
    width = precision.compute
    if shapes.is_mixture(shape, index):
        # once for each chosen expert, and the router's in fp32
        of_expert = 2 * widths.hidden + 4 * widths.expert_inner
        if setup.degrees.expert > 1:
            # nothing behind the last product, but the product with the weight before it (model/parallel.py)
            of_expert = widths.hidden + 5 * widths.expert_inner
        router = 2 * FP32 * widths.experts
        return width * (widths.hidden + widths.chosen_experts * of_expert) + router
    saved = ELEMENTWISE_SAVED.get(shape["activation_function" if gpt2 else "hidden_act"], 1)
    if gpt2:
        # the input, what the activation function saves, and its result
        return width * (widths.hidden + (saved + 1) * widths.inner)
    # autocast casts the input once for each of the gate's halves
    casts = 2 if precision.is_autocast else 1
    # gated: also the other half and the product of both
    return width * (casts * widths.hidden + (saved + 3) * widths.inner)


def validation_bytes(setup: Setup) -> float:
    """Return the bytes of a forward pass that keeps nothing: those of its widest layer, or of its logits."""
    recipe, precision, degrees, widths = setup.recipe, setup.precision, setup.degrees, setup.widths
    # every rank reads a part of each sequence
    tokens = recipe.training.per_device_eval_batch_size * recipe.sequence_length // degrees.sequence
    # the residual stream, its sum with a layer's result, and a norm's copy in fp32
    stream = (2 * precision.residual + FP32) * widths.hidden
    attention = 2 * widths.queries + 2 * widths.keys
    if degrees.sequence > 1:
        # before the exchange, copied for it, as it comes, and joined (model/parallel.py)
        attention = 4 * (widths.queries + 2 * widths.keys * shapes.key_value_copies(widths, degrees))
    inner = (3 if widths.gated else 2) * widths.inner
    if widths.experts:
        inner = max(inner, widths.chosen_experts * (widths.hidden + 3 * widths.expert_inner))
    layers = tokens * (stream + precision.compute * (widths.hidden + max(attention, inner)))
    # all logits at once, which are in fp32 for a few tokens at a time (evaluation/validation.py)
    at_once = 2 * FP32 * min(tokens, VALIDATED_AT_ONCE) + precision.compute * tokens
    return max(layers, at_once * recipe.model.vocab_size + precision.compute * tokens * widths.hidden)


def compiles_loss(compile: bool | None, on_gpu: bool) -> bool:
    """Return the value of `loss.compile`; null means true on a GPU."""
    return on_gpu if compile is None else compile


def logit_bytes(compute: int, compiled: bool) -> int:
    """Return the bytes that a chunk holds for each logit of `compute` bytes."""
    # a loss that is not compiled also holds the log-probability, in fp32
    return compute if compiled else compute + max(compute, FP32)


def chunk_length(
    tokens: int, vocab_size: int, bytes_a_logit: int, gpu_memory: float | None, chunk_tokens: int | None
) -> int:
    """Return the tokens of a chunk: the recipe's, or as many as its memory allows, so that all chunks have one length.

    Args:
        bytes_a_logit: see `logit_bytes`.
        gpu_memory: bytes of the GPU; None: a processor trains, or the GPU is not known.
        chunk_tokens: the recipe's `loss.chunk_tokens`.
    """
    if chunk_tokens:
        return min(tokens, chunk_tokens)
    chunk_bytes = ON_PROCESSOR
    if gpu_memory is not None:
        # a power of two, as GPUs of one kind report a little more or less memory than the table has
        chunk_bytes = min(ON_GPU, 1 << (int(gpu_memory / GPU_SHARE).bit_length() - 1))
    most = max(1, chunk_bytes // (bytes_a_logit * vocab_size * MULTIPLE)) * MULTIPLE
    # equal chunks: no small one at the end
    even = ceil(tokens / ceil(tokens / most))
    return min(tokens, ceil(even / MULTIPLE) * MULTIPLE)


def loss_bytes(
    tokens: int,
    vocab_size: int,
    width: int,
    precision: Precision,
    loss: Loss,
    gpu_memory: float | None,
) -> float:
    """Return the bytes that the loss of one micro-batch holds (`model/loss.py`, `model/cross_entropy.py`)."""
    if loss.kind == "plain":
        # the fp32 log-probabilities, their gradient and the logits' gradient
        return 3 * FP32 * tokens * vocab_size
    compute, compiled = precision.compute, compiles_loss(loss.compile, gpu_memory is not None)
    bytes_a_logit = logit_bytes(compute, compiled)
    chunk = chunk_length(tokens, vocab_size, bytes_a_logit, gpu_memory, loss.chunk_tokens)
    if loss.kind == "chunked":
        # the logits, which their gradient overwrites, and a chunk's log-probabilities if nothing is compiled
        return compute * tokens * vocab_size + (bytes_a_logit - compute) * chunk * vocab_size
    # after the last chunk, the sum of the head's gradient is cast to the weights' precision
    handed_on = precision.weights * vocab_size * width if precision.weights < FP32 else 0
    passing = max(bytes_a_logit * chunk * vocab_size, handed_on)
    # the sum of the head's gradient in fp32, and the gradient of the head's input
    return passing + FP32 * vocab_size * width + compute * tokens * width
