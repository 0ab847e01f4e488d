"""Bytes that the loss takes at its peak, for each way to compute it (`loss.kind`)."""

from pretraining.planning.memory.precision import FP32, Precision

CHUNK_BYTES = 128 * 2**20
"""Log-probabilities of one chunk where the recipe does not say how many tokens it has."""
PLAIN = {"kind": "plain", "chunk_tokens": None}


def default_chunk(vocab_size: int) -> int:
    """Tokens whose log-probabilities take CHUNK_BYTES in fp32, a multiple of 128."""
    return max(128, CHUNK_BYTES // (FP32 * vocab_size) // 128 * 128)


def loss_bytes(tokens: int, vocab_size: int, width: int, precision: Precision, loss: dict = PLAIN) -> float:
    """What `model/loss.py` and `model/cross_entropy.py` hold while they find the loss of one micro-batch.

    plain: the fp32 log-probabilities, their gradient and the logits' gradient. chunked: the logits, which their
    gradient overwrites, and a chunk's log-probabilities. fused: a chunk of both, the sum of the head's gradient in
    fp32, the gradient of the head's input.
    """
    if loss["kind"] == "plain":
        return 3 * FP32 * tokens * vocab_size
    chunk = min(tokens, loss["chunk_tokens"] or default_chunk(vocab_size))
    if loss["kind"] == "chunked":
        return precision.compute * tokens * vocab_size + FP32 * chunk * vocab_size
    passing = (precision.compute + FP32) * chunk * vocab_size
    return passing + FP32 * vocab_size * width + precision.compute * tokens * width
