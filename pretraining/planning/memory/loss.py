"""The loss's chunks and the bytes it takes at its peak, for each way to compute it (`loss.kind`)."""

from math import ceil

from pretraining.planning.memory.precision import FP32, Precision
from pretraining.recipe.sections import Loss

PLAIN = Loss(kind="plain")
ON_PROCESSOR = 256 * 2**20
"""Bytes of one chunk where a processor trains."""
ON_GPU = 2**30
"""Bytes of one chunk on a GPU, but no more than a GPU_SHAREth of its memory."""
GPU_SHARE = 64
MULTIPLE = 128
"""Of tokens: the tiles of matrix products."""


def compiles_loss(compile: bool | None, on_gpu: bool) -> bool:
    """What `loss.compile` becomes: null is true on a GPU."""
    return on_gpu if compile is None else compile


def logit_bytes(compute: int, compiled: bool) -> int:
    """What a chunk holds for each logit of `compute` bytes; its log-probability in fp32 too if nothing is compiled."""
    return compute if compiled else compute + max(compute, FP32)


def chunk_length(
    tokens: int, vocab_size: int, bytes_a_logit: int, gpu_memory: float | None, chunk_tokens: int | None
) -> int:
    """Tokens of a chunk: the recipe's, else chunks of one length, as few as the memory set aside for one allows.

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
    """What `model/loss.py` and `model/cross_entropy.py` hold while they find the loss of one micro-batch.

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
