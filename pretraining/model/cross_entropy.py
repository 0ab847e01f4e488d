"""Summed cross-entropy without a copy of the logits in fp32: in chunks of tokens, or fused with the head's product.

Both find the gradient while they find the loss, chunk by chunk, so that nothing of the size tokens x vocabulary is
kept for the backward pass. The z-loss, `weight * log(Z)^2` for each token, keeps the softmax's normaliser Z near 1
(PaLM: Chowdhery et al. 2022, section 5).
"""

import torch

from pretraining.data.document_masking import IGNORED
from pretraining.planning.memory.loss import default_chunk


def chunked_nats(
    logits: torch.Tensor,
    labels: torch.Tensor,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
    each: torch.Tensor | None = None,
) -> torch.Tensor:
    """Summed nats of the labels, in fp32 (fp64 for fp64 logits).

    Where a gradient is wanted it is written over the logits themselves: nobody may read them afterwards.

    Args:
        logits: [tokens, vocabulary], contiguous.
        labels: [tokens], -100 where there is no target.
        each: [tokens], is given every token's own nats.
    """
    chunk_tokens = chunk_tokens or default_chunk(logits.shape[1])
    return _ChunkedNats.apply(logits, labels, z_loss, chunk_tokens, each)


def fused_nats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    each: torch.Tensor | None = None,
) -> torch.Tensor:
    """Summed nats of the labels under the logits `hidden @ weight.T`, of which one chunk exists at a time.

    Args:
        hidden: [tokens, width].
        weight: [vocabulary, width].
        labels: [tokens], -100 where there is no target.
        dtype: of the product (autocast's); the gradient of `weight` is summed over the chunks in fp32.
        each: [tokens], is given every token's own nats.
    """
    chunk_tokens = chunk_tokens or default_chunk(weight.shape[0])
    return _FusedNats.apply(hidden, weight, labels, z_loss, chunk_tokens, dtype or hidden.dtype, each)


def _nats_and_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    z_loss: float,
    space: torch.Tensor,
    wants_gradient: bool,
    each: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(summed nats, G, scale): the logits' gradient is `scale[:, None] * G`, both in fp32, G in `space`."""
    logs = torch.log_softmax(logits, -1, dtype=space.dtype, out=space[: len(logits)])
    counted = labels != IGNORED
    targets = labels.clamp_min(0)[:, None]
    picked = logs.gather(1, targets).squeeze(1)
    nats, scale = -picked, counted.to(space.dtype)
    weight = torch.ones_like(picked)
    if z_loss:
        log_z = logits.gather(1, targets).squeeze(1).to(space.dtype) - picked
        nats = nats + z_loss * log_z.square()
        weight = 1 + 2 * z_loss * log_z
        scale = scale * weight
    if wants_gradient:
        logs.exp_().scatter_add_(1, targets, (-1 / weight)[:, None])
    nats = torch.where(counted, nats, 0)
    if each is not None:
        each.copy_(nats)
    return nats.sum(), logs, scale


def _fp32_space(num_tokens: int, vocab_size: int, like: torch.Tensor) -> torch.Tensor:
    """One chunk's log-probabilities; the same memory serves every chunk."""
    precision = torch.promote_types(like.dtype, torch.float32)
    return torch.empty(num_tokens, vocab_size, dtype=precision, device=like.device)


class _ChunkedNats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, z_loss, chunk_tokens, each):
        wants_gradient = ctx.needs_input_grad[0]
        space, total = _fp32_space(min(chunk_tokens, len(logits)), logits.shape[1], logits), 0.0
        for start in range(0, len(logits), chunk_tokens):
            place = slice(start, start + chunk_tokens)
            rows, own = logits[place], None if each is None else each[place]
            nats, gradient, scale = _nats_and_gradient(
                rows, labels[place], z_loss, space, wants_gradient, own
            )
            total = total + nats
            if wants_gradient:
                rows.copy_(gradient.mul_(scale[:, None]))
        ctx.gradient = logits.detach() if wants_gradient else None
        return total

    @staticmethod
    def backward(ctx, upstream):
        gradient, ctx.gradient = ctx.gradient, None
        assert gradient is not None, "the logits' gradient has been handed on already"
        return gradient.mul_(upstream), None, None, None, None


class _FusedNats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, z_loss, chunk_tokens, dtype, each):
        wants_gradient = any(ctx.needs_input_grad[:2])
        inputs, matrix = hidden.detach().to(dtype), weight.detach().to(dtype)
        ctx.dtypes = hidden.dtype, weight.dtype
        if wants_gradient:
            input_gradient = torch.empty_like(inputs)
            sums = torch.zeros_like(matrix, dtype=torch.promote_types(dtype, torch.float32))
        chunk, vocab_size = min(chunk_tokens, len(inputs)), len(matrix)
        logits = torch.empty(chunk, vocab_size, dtype=dtype, device=inputs.device)
        space, total = _fp32_space(chunk, vocab_size, logits), 0.0
        for start in range(0, len(inputs), chunk):
            rows = slice(start, start + chunk)
            here = torch.mm(inputs[rows], matrix.t(), out=logits[: len(inputs[rows])])
            own = None if each is None else each[rows]
            nats, gradient, scale = _nats_and_gradient(here, labels[rows], z_loss, space, wants_gradient, own)
            total = total + nats
            if wants_gradient:
                gradient = gradient if gradient.dtype == dtype else here.copy_(gradient)
                torch.mm(gradient, matrix, out=input_gradient[rows])
                input_gradient[rows].mul_(scale[:, None])
                _add_product(sums, gradient.t(), (inputs[rows] * scale[:, None]).to(dtype))
        ctx.gradients = (input_gradient, sums) if wants_gradient else None
        return total

    @staticmethod
    def backward(ctx, upstream):
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the gradients have been handed on already"
        scaled = [g.mul_(upstream).to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return *scaled, None, None, None, None, None


def _add_product(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`sums += left @ right`, added in the precision of `sums`."""
    if sums.dtype == left.dtype:
        sums.addmm_(left, right)
    else:
        sums.add_(left @ right)
