"""Summed cross-entropy: plain, or without a copy of the logits in fp32 (in chunks, or fused with the head's product).

Chunked and fused find the gradient while they find the loss, chunk by chunk, so that nothing of the size tokens x
vocabulary is kept for the backward pass. The z-loss, `weight * log(Z)^2` for each token, keeps the softmax's normaliser
Z near 1 (PaLM: Chowdhery et al. 2022, section 5).

Bytes that a logit of 16 bits moves on a GPU by the kernels' code, without the product that writes it (2) and the two
that read its gradient (4):

    eager        28  to fp32 6, log_softmax 8, exp_ 8, back to 16 bits 6
    compiled      6  torch.compile: an online softmax reads the logits once, the gradient is written over them
    Liger 0.8.5   6  its fused function waits for the GPU in both passes, gives a token's own nats only for another
                     product in the backward pass, and rounds the head's gradient before it is scaled; its kernel alone
                     would do in our chunks, but is private, of 28 arguments, and another package
    torch 2.13   40  linear_cross_entropy, logits in fp32: has no z-loss, and sums the head's gradient in 16 bits

A GPU gets the compiled one, since it needs torch alone. A chunk also moves 12 bytes for each weight of the head: 4 that
two products read, 8 of the sum in fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pretraining.data.documents import IGNORED
from pretraining.planning.memory.activations import chunk_length, compiles_loss, logit_bytes
from pretraining.runtime.process_group import fails_anywhere
from pretraining.upstream.split_weights import HeldRows
from pretraining.upstream.torch import fix_no_length, missing_compiler
from pretraining.upstream.wide_weights import WideLinear, is_wide

TRIAL_TOKENS = 1024
"""Rows that kernels are compiled with: so many that one program sums each row, as in a real chunk."""


@dataclass(frozen=True)
class LossSettings:
    """How nats are summed chunk by chunk."""

    z_loss: float = 0.0
    chunk_tokens: int | None = None
    compile: bool | None = None
    """The recipe's `loss.compile`."""
    rows: HeldRows | None = None
    """Of a head that is split over ranks, which rows are here; None: all."""


DEFAULT = LossSettings()


def token_nats(
    logits: torch.Tensor, labels: torch.Tensor, z_loss: float = 0.0, each: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum the cross-entropy in nats, computed in fp32 (fp64 for fp64 logits).

    Args:
        logits: [batch, length, vocabulary].
        labels: [batch, length], already the next tokens; -100 is skipped.
        each: [batch * length], receives every token's own nats.
    """
    flat, targets = logits.flatten(0, 1).to(_precision(logits.dtype)), labels.flatten()
    nats = F.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum")
    if z_loss:
        nats = nats + z_loss * (flat.logsumexp(-1).square() * (targets != IGNORED)).sum()
    if each is not None:
        flat = flat.detach()
        each.copy_(F.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="none"))
        if z_loss:
            each.add_(z_loss * flat.logsumexp(-1).square() * (targets != IGNORED))
    return nats


class LossHead(nn.Linear):
    """An output projection that returns the hidden states while the model is trained, and logits otherwise.

    So in training mode the model's `logits` are the head's input. The loss then calls the head again with the labels,
    and the head returns the summed nats. The loss calls the module, because ZeRO-3 gathers its weight only for a call.
    """

    compute_dtype: torch.dtype
    rows: HeldRows | None = None
    """Of a head that is split over ranks: which rows are here."""

    def forward(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor | None = None,
        way: LossSettings = DEFAULT,
        each: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map [..., width] to [..., vocabulary]. In training return the input; with labels [...] return summed nats."""
        if labels is not None:
            way, flat = replace(way, rows=self.rows), hidden.flatten(0, -2)
            return fused_nats(flat, self.weight, labels.flatten(), way, self.compute_dtype, each)
        if not (self.training and torch.is_grad_enabled()):
            return self.product(hidden)
        if is_wide(self.weight):
            self.compute_dtype = torch.float32
            return hidden
        # accelerate returns autocast's outputs in fp32: the loss multiplies in the dtype the logits would have had.
        device = hidden.device.type
        autocasts = torch.is_autocast_enabled(device)
        self.compute_dtype = torch.get_autocast_dtype(device) if autocasts else hidden.dtype
        return hidden

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [..., width] to the logits of all rows that are here."""
        linear = WideLinear if is_wide(self.weight) else nn.Linear
        return linear.forward(self, hidden)


class _ChunkedNats(torch.autograd.Function):
    """The gradient is found in the forward pass, over the logits; the backward pass only scales it."""

    @staticmethod
    def forward(ctx, logits, labels, way=DEFAULT, each=None):
        logits = logits.detach()
        chunk, space = _chunk(*logits.shape, logits, way)
        nats = torch.empty(len(logits), dtype=_precision(logits.dtype), device=logits.device)
        for start in range(0, len(logits), chunk):
            part = slice(start, start + chunk)
            nats[part] = _nats_and_gradient(logits[part], labels[part], way, ctx.needs_input_grad[0], space)
        if each is not None:
            each.copy_(nats)
        ctx.gradient = (logits, labels != IGNORED) if ctx.needs_input_grad[0] else None
        return nats.sum()

    @staticmethod
    def backward(ctx, upstream):
        # Not kept after this pass: it is as large as the logits.
        gradient, ctx.gradient = ctx.gradient, None
        assert gradient is not None, "the logits' gradient has been handed on already"  # backward ran twice
        logits, counted = gradient
        return logits.mul_((upstream * counted)[:, None]), None, None, None


chunked_nats = _ChunkedNats.apply
"""Sum the nats of the labels, in fp32 (fp64 for fp64 logits).

If a gradient is wanted it is written over the logits: they cannot be read afterwards.

Args:
    logits: [tokens, vocabulary], contiguous; only the columns of this rank's rows if the head is split.
    labels: [tokens], -100 for no target.
    way: `LossSettings`.
    each: [tokens], receives every token's own nats.
"""


class _FusedNats(torch.autograd.Function):
    """Both gradients are found in the forward pass, chunk by chunk; the backward pass only scales them."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, way=DEFAULT, dtype=None, each=None):
        dtype = dtype or hidden.dtype
        wants_gradient = any(ctx.needs_input_grad[:2])
        inputs, matrix = hidden.detach().to(dtype), weight.detach().to(dtype)
        ctx.dtypes = hidden.dtype, weight.dtype
        chunk, space = _chunk(len(inputs), len(matrix), inputs, way)
        # One chunk of logits, which every chunk overwrites.
        logits = torch.empty(chunk, len(matrix), dtype=dtype, device=inputs.device)
        nats = torch.empty(len(inputs), dtype=_precision(dtype), device=inputs.device)
        on_the_way = []
        if wants_gradient:
            input_gradient = torch.empty_like(inputs)
            # fp32: sums over many chunks would lose digits in 16 bits.
            sums = torch.zeros_like(matrix, dtype=_precision(dtype))
        for start in range(0, len(inputs), chunk):
            part = slice(start, start + chunk)
            here = torch.mm(inputs[part], matrix.t(), out=logits[: len(inputs[part])])
            nats[part] = _nats_and_gradient(here, labels[part], way, wants_gradient, space)
            if wants_gradient:
                # The logits are their own gradient by now.
                counted = (labels[part] != IGNORED)[:, None]
                of_part = torch.mm(here, matrix, out=input_gradient[part]).mul_(counted)
                if way.rows is not None:
                    # each rank has the part of its rows; the next chunk computes meanwhile
                    on_the_way.append(dist.all_reduce(of_part, group=way.rows.group, async_op=True))
                left, right = here.t(), inputs[part] * counted
                # added in the precision of `sums`
                if sums.dtype == left.dtype:
                    sums.addmm_(left, right)
                elif _adds_in_fp32(sums.device):
                    torch.addmm(sums, left, right, out_dtype=sums.dtype, out=sums)
                else:
                    sums.add_(left @ right)
        for sum_of_ranks in on_the_way:
            sum_of_ranks.wait()
        if each is not None:
            each.copy_(nats)
        ctx.gradients = (input_gradient, sums) if wants_gradient else None
        return nats.sum()

    @staticmethod
    def backward(ctx, upstream):
        # Not kept after this pass: the sum is as large as the head.
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the gradients have been handed on already"
        scaled = [g.mul_(upstream).to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return *scaled, None, None, None, None


fused_nats = _FusedNats.apply
"""Sum the nats of the labels under the logits `hidden @ weight.T`; only one chunk of logits exists at a time.

Args:
    hidden: [tokens, width].
    weight: [vocabulary, width]; only this rank's rows if the head is split.
    labels, way, each: as of `chunked_nats`.
    dtype: the dtype of the product (autocast's). The gradient of `weight` is summed over the chunks in fp32.
"""


def _chunk(
    tokens: int, vocab_size: int, like: torch.Tensor, way: LossSettings
) -> tuple[int, torch.Tensor | None]:
    """Choose the tokens of a chunk, and allocate space in fp32 for log-probabilities, for every chunk in turn.

    The compiled functions need no space: it is None then.
    """
    device, dtype, split = like.device, like.dtype, way.rows
    compiled = compiles_loss(way.compile, device.type == "cuda") and _can_compile(device, dtype, vocab_size)
    # Ranks of a split head exchange numbers of each chunk: what a length depends on is equal on all of them.
    memory = _memory(device) if split is None else _least_memory(split.group, device)
    most = vocab_size if split is None else split.most
    num_bytes = logit_bytes(dtype.itemsize, compiled)
    chunk = chunk_length(tokens, most, num_bytes, memory or None, way.chunk_tokens)
    if compiled:
        return chunk, None
    return chunk, torch.empty(chunk, vocab_size, dtype=_precision(dtype), device=device)


def _memory(device: torch.device) -> int:
    """Return the bytes of this rank's GPU; 0 if a processor trains."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


@cache
def _least_memory(group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the least that any rank of the group has; all of them ask once, before their first chunk."""
    least = torch.tensor(_memory(device), device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return int(least)


def _precision(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _nats_and_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    way: LossSettings,
    wants_gradient: bool,
    space: torch.Tensor | None,
) -> torch.Tensor:
    """Compute every token's nats in fp32, and write the logits' gradient over the logits.

    The gradient of a token without a target is meaningless: callers multiply it by 0.

    space: receives the log-probabilities; None for the compiled functions, which need none.
    """
    z_loss, split = way.z_loss, way.rows
    # -100 is no index; these rows do not count in the end.
    targets, is_here = labels.clamp_min(0)[:, None], None
    if split is not None:
        targets, is_here = split.find(targets)
    # Read now, because the gradient is written over the logits below.
    target_logit = logits.gather(1, targets).squeeze(1).to(_precision(logits.dtype))
    if space is None:
        log_z = _compiled(_log_normaliser)(logits)
        picked = target_logit - log_z
    else:
        logs = torch.log_softmax(logits, -1, dtype=space.dtype, out=space[: len(logits)])
        picked = logs.gather(1, targets).squeeze(1)
        log_z = target_logit - picked
    own_log_z = log_z
    if split is not None:
        # of the whole vocabulary, from those of each rank's rows, [tokens]; all ranks of the group get the same bits
        own = torch.cat([log_z, target_logit.masked_fill(~is_here.squeeze(1), 0)])
        laid = own.new_empty(len(split.numbers) * len(own))
        dist.all_gather_single(laid, own, group=split.group)
        of_ranks = laid.view(len(split.numbers), 2, -1)
        log_z, target_logit = of_ranks[:, 0].logsumexp(0), of_ranks[:, 1].sum(0)
        picked = target_logit - log_z
    weight = 1 + 2 * z_loss * log_z  # of the softmax in the gradient of -log p + z_loss * log(Z)^2
    if wants_gradient:
        if space is None:
            _compiled(_softmax_over)(logits, log_z, weight)
        else:
            gradient = torch.exp(logs, out=logits if logits.dtype == logs.dtype else logs)
            if split is not None:
                gradient.mul_(((own_log_z - log_z).exp() * weight)[:, None])
            elif z_loss:
                gradient.mul_(weight[:, None])
            logits.copy_(gradient)  # nothing to do if it is there already
        of_target = (picked.exp() * weight - 1)[:, None].to(logits.dtype)
        if split is not None:
            of_target = torch.where(is_here, of_target, logits.gather(1, targets))
        logits.scatter_(1, targets, of_target)
    return torch.where(labels != IGNORED, z_loss * log_z.square() - picked, 0)


def _log_normaliser(logits: torch.Tensor) -> torch.Tensor:
    """Compute log(Z) of every row in fp32, in the form that inductor turns into an online softmax.

    Inductor matches it (`prepare_softmax_pattern` of torch 2.15); in another form it would read the logits twice.
    """
    wide = logits.to(_precision(logits.dtype))
    largest = wide.amax(-1, keepdim=True)
    return (largest + (wide - largest).exp().sum(-1, keepdim=True).log()).squeeze(1)


def _softmax_over(logits: torch.Tensor, log_z: torch.Tensor, weight: torch.Tensor) -> None:
    # A separate graph: together with log_z, inductor would first write it to other memory.
    wide = logits.to(log_z.dtype)
    logits.copy_((wide - log_z[:, None]).exp() * weight[:, None])


@cache
def _compiled(function: Callable) -> Callable:
    """Compile to one graph, whose sums are equal on every rank and at every start."""
    # deterministic: kernels are not chosen by timing. One thread: a pool of processes on each rank is too much for two
    # kernels.
    return torch.compile(function, fullgraph=True, options={"deterministic": True, "compile_threads": 1})


@cache
def _can_compile(device: torch.device, dtype: torch.dtype, vocab_size: int) -> bool:
    """Compile for logits of this kind, in chunks of any length; if that fails on any rank, warn and return False."""
    what = "the loss is not compiled on any rank, as rank {rank} cannot compile it ({failure})"
    words = f"{what}; mend that, or --set loss.compile=false"
    return not fails_anywhere(_failure(device, dtype, vocab_size), device, words)


def _failure(device: torch.device, dtype: torch.dtype, vocab_size: int) -> str | None:
    if missing := missing_compiler():
        return f"inductor needs {missing}"
    # A trial before the first real chunk, so that a failure costs a line and not the run.
    logits = torch.zeros(TRIAL_TOKENS, vocab_size, dtype=dtype, device=device)
    log_z, weight = (torch.ones(TRIAL_TOKENS, dtype=_precision(dtype), device=device) for _ in range(2))
    for tensor in (logits, log_z, weight):
        fix_no_length(tensor)
    try:
        _compiled(_log_normaliser)(logits)
        _compiled(_softmax_over)(logits, log_z, weight)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        cause = getattr(error, "inner_exception", error)
        return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
    return None


@cache
def _adds_in_fp32(device: torch.device) -> bool:
    """Return whether one call can add a product in 16 bits to sums in fp32: cuBLAS can, on Ampere or later."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8
