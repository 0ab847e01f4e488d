"""Summed cross-entropy without a copy of the logits in fp32: in chunks of tokens, or fused with the head's product.

Both find the gradient while they find the loss, chunk by chunk, so that nothing of the size tokens x vocabulary is
kept for the backward pass. The z-loss, `weight * log(Z)^2` for each token, keeps the softmax's normaliser Z near 1
(PaLM: Chowdhery et al. 2022, section 5).

Bytes that a logit of 16 bits moves on a GPU between the product that writes it (2) and the two that read its gradient
(4), as the kernels' code has it:

    eager        28  to fp32 6, log_softmax 8, exp_ 8, back to 16 bits 6
    compiled      6  torch.compile: an online softmax reads the logits once, the gradient is written over them
    Liger 0.8.5   6  its fused function waits for the GPU in both passes, tells a token's own nats only for another
                     product in the backward pass, and rounds the head's gradient before it is scaled; its kernel alone
                     would do in our chunks, but is private, of 28 arguments, and another package
    torch 2.13   40  linear_cross_entropy, logits in fp32: knows no z-loss, and sums the head's gradient in 16 bits

Compiled is what a GPU gets, since it needs torch alone. A chunk moves 12 bytes for each weight of the head, too: 4
that two products read, 8 of the sum in fp32.
"""

import os
import sys
from collections.abc import Callable
from functools import cache

import torch

from pretraining.data.document_masking import IGNORED
from pretraining.planning.memory.activations import chunk_length, compiles_loss, logit_bytes
from pretraining.upstream.compiler import missing_compiler

TRIAL_TOKENS = 1024
"""Rows that kernels are compiled with: enough for each to be summed by one program, as those of a real chunk."""


def chunked_nats(
    logits: torch.Tensor,
    labels: torch.Tensor,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
    compile: bool | None = None,
    each: torch.Tensor | None = None,
) -> torch.Tensor:
    """Summed nats of the labels, in fp32 (fp64 for fp64 logits).

    Where a gradient is wanted it is written over the logits themselves: nobody may read them afterwards.

    Args:
        logits: [tokens, vocabulary], contiguous.
        labels: [tokens], -100 where there is no target.
        compile: the recipe's `loss.compile`.
        each: [tokens], is given every token's own nats.
    """
    return _ChunkedNats.apply(logits, labels, z_loss, chunk_tokens, compile, each)


def fused_nats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
    compile: bool | None = None,
    dtype: torch.dtype | None = None,
    each: torch.Tensor | None = None,
) -> torch.Tensor:
    """Summed nats of the labels under the logits `hidden @ weight.T`, of which one chunk exists at a time.

    Args:
        hidden: [tokens, width].
        weight: [vocabulary, width].
        labels: [tokens], -100 where there is no target.
        compile: the recipe's `loss.compile`.
        dtype: of the product (autocast's); the gradient of `weight` is summed over the chunks in fp32.
        each: [tokens], is given every token's own nats.
    """
    return _FusedNats.apply(
        hidden, weight, labels, z_loss, chunk_tokens, compile, dtype or hidden.dtype, each
    )


class _ChunkedNats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, z_loss, chunk_tokens, compile, each):
        logits = logits.detach()
        chunk, space = _chunk(*logits.shape, logits, chunk_tokens, compile)
        nats = torch.empty(len(logits), dtype=_precision(logits.dtype), device=logits.device)
        for start in range(0, len(logits), chunk):
            rows = slice(start, start + chunk)
            nats[rows] = _nats_and_gradient(
                logits[rows], labels[rows], z_loss, ctx.needs_input_grad[0], space
            )
        if each is not None:
            each.copy_(nats)
        ctx.gradient = (logits, labels != IGNORED) if ctx.needs_input_grad[0] else None
        return nats.sum()

    @staticmethod
    def backward(ctx, upstream):
        gradient, ctx.gradient = ctx.gradient, None
        assert gradient is not None, "the logits' gradient has been handed on already"
        rows, counted = gradient
        return rows.mul_((upstream * counted)[:, None]), None, None, None, None, None


class _FusedNats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, z_loss, chunk_tokens, compile, dtype, each):
        wants_gradient = any(ctx.needs_input_grad[:2])
        inputs, matrix = hidden.detach().to(dtype), weight.detach().to(dtype)
        ctx.dtypes = hidden.dtype, weight.dtype
        chunk, space = _chunk(len(inputs), len(matrix), inputs, chunk_tokens, compile)
        logits = torch.empty(chunk, len(matrix), dtype=dtype, device=inputs.device)
        nats = torch.empty(len(inputs), dtype=_precision(dtype), device=inputs.device)
        if wants_gradient:
            input_gradient = torch.empty_like(inputs)
            sums = torch.zeros_like(matrix, dtype=_precision(dtype))
        for start in range(0, len(inputs), chunk):
            rows = slice(start, start + chunk)
            here = torch.mm(inputs[rows], matrix.t(), out=logits[: len(inputs[rows])])
            nats[rows] = _nats_and_gradient(here, labels[rows], z_loss, wants_gradient, space)
            if wants_gradient:
                counted = (labels[rows] != IGNORED)[:, None]
                torch.mm(here, matrix, out=input_gradient[rows]).mul_(counted)
                _add_product(sums, here.t(), inputs[rows] * counted)
        if each is not None:
            each.copy_(nats)
        ctx.gradients = (input_gradient, sums) if wants_gradient else None
        return nats.sum()

    @staticmethod
    def backward(ctx, upstream):
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the gradients have been handed on already"
        scaled = [g.mul_(upstream).to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return *scaled, None, None, None, None, None, None


def _chunk(
    tokens: int, vocab_size: int, like: torch.Tensor, chunk_tokens: int | None, compile: bool | None
) -> tuple[int, torch.Tensor | None]:
    """(tokens of a chunk, space for its log-probabilities in fp32, which serves every chunk; None if compiled)."""
    device, dtype = like.device, like.dtype
    on_gpu = device.type == "cuda"
    compiled = compiles_loss(compile, on_gpu) and _can_compile(device, dtype, vocab_size)
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else None
    chunk = chunk_length(tokens, vocab_size, logit_bytes(dtype.itemsize, compiled), memory, chunk_tokens)
    if compiled:
        return chunk, None
    return chunk, torch.empty(chunk, vocab_size, dtype=_precision(dtype), device=device)


def _precision(dtype: torch.dtype) -> torch.dtype:
    """Of log-probabilities and sums."""
    return torch.promote_types(dtype, torch.float32)


def _nats_and_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    z_loss: float,
    wants_gradient: bool,
    space: torch.Tensor | None,
) -> torch.Tensor:
    """Every token's nats in fp32; the logits become their gradient, which of tokens without a target means nothing.

    space: takes the log-probabilities; None: the compiled functions, which need none.
    """
    targets = labels.clamp_min(0)[:, None]
    target_logit = logits.gather(1, targets).squeeze(1).to(_precision(logits.dtype))
    if space is None:
        log_z = _compiled(_log_normaliser)(logits)
        picked = target_logit - log_z
    else:
        logs = torch.log_softmax(logits, -1, dtype=space.dtype, out=space[: len(logits)])
        picked = logs.gather(1, targets).squeeze(1)
        log_z = target_logit - picked
    weight = 1 + 2 * z_loss * log_z
    if wants_gradient:
        if space is None:
            _compiled(_softmax_over)(logits, log_z, weight)
        else:
            gradient = torch.exp(logs, out=logits if logits.dtype == logs.dtype else logs)
            if z_loss:
                gradient.mul_(weight[:, None])
            logits.copy_(gradient)  # nothing to do if it is there already
        logits.scatter_(1, targets, (picked.exp() * weight - 1)[:, None].to(logits.dtype))
    return torch.where(labels != IGNORED, z_loss * log_z.square() - picked, 0)


def _log_normaliser(logits: torch.Tensor) -> torch.Tensor:
    """log(Z) of every row in fp32, written as inductor knows an online softmax (its `prepare_softmax_pattern`)."""
    rows = logits.to(_precision(logits.dtype))
    largest = rows.amax(-1, keepdim=True)
    return (largest + (rows - largest).exp().sum(-1, keepdim=True).log()).squeeze(1)


def _softmax_over(logits: torch.Tensor, log_z: torch.Tensor, weight: torch.Tensor) -> None:
    """Write `weight * softmax` over the logits; in one graph with `log_z` inductor would write it elsewhere first."""
    rows = logits.to(log_z.dtype)
    logits.copy_((rows - log_z[:, None]).exp() * weight[:, None])


@cache
def _compiled(function: Callable) -> Callable:
    """One graph, whose sums no timing decides on: equal on every rank and at every start.

    It is compiled in this process: a pool of processes on every rank is much for two kernels.
    """
    return torch.compile(function, fullgraph=True, options={"deterministic": True, "compile_threads": 1})


@cache
def _can_compile(device: torch.device, dtype: torch.dtype, vocab_size: int) -> bool:
    """Compile for logits of this kind, in chunks of any length; if that fails, say so and go on without."""
    if missing := missing_compiler():
        return _go_on_without(f"inductor needs {missing}")
    logits = torch.zeros(TRIAL_TOKENS, vocab_size, dtype=dtype, device=device)
    log_z, weight = (torch.ones(TRIAL_TOKENS, dtype=_precision(dtype), device=device) for _ in range(2))
    for tensor in (logits, log_z, weight):
        torch._dynamo.mark_dynamic(tensor, 0)
    try:
        _compiled(_log_normaliser)(logits)
        _compiled(_softmax_over)(logits, log_z, weight)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        cause = getattr(error, "inner_exception", error)
        return _go_on_without(f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}")
    return True


def _go_on_without(reason: str) -> bool:
    """Tell once for each machine that the loss is not compiled; False."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        told = f"the loss cannot be compiled and is computed without ({reason})"
        print(f"warning: {told}; mend that, or set loss.compile to false", file=sys.stderr, flush=True)
    return False


def _add_product(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`sums += left @ right`, added in the precision of `sums`."""
    if sums.dtype == left.dtype:
        sums.addmm_(left, right)
    elif _adds_in_fp32(sums.device):
        torch.addmm(sums, left, right, out_dtype=sums.dtype, out=sums)
    else:
        sums.add_(left @ right)


@cache
def _adds_in_fp32(device: torch.device) -> bool:
    """Whether a product of 16 bits can be added to sums in fp32 as it comes: by cuBLAS, on Ampere or later."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8
