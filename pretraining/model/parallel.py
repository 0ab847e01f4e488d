"""Layers that are split over the ranks of a group: sequences in attention, experts, and rows of embedding and head.

- Sequences, DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509): before attention the ranks exchange their parts,
  so that each has all tokens of some heads; the exchange after it brings back all heads of its own tokens. All else
  works on single tokens. To ZeRO these ranks are data-parallel. DeepSpeed 0.19.8 brings the same exchange
  (`UlyssesSPAttentionHF`), but it refuses GPT-2, keeps packed documents apart only with the package flash-attn, and
  its loader cannot resume within an epoch.
- Experts, GShard (Lepikhin et al. 2020, arXiv 2006.16668): every rank routes its own tokens, sends each to the ranks of
  its experts, and gets the results back. No token is dropped: the exchange has as many rows as were chosen. All else
  is data-parallel, and the ranks read different samples.
- The vocabulary, Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3): a rank looks up the tokens whose rows
  it has, and the ranks add up what they found. Of the head each rank computes the logits of its own rows. The loss
  needs one number of each rank and token, the log of its normaliser, so that no rank has whole logits while it trains.

The modules stay the model's own, under the same names: of experts, embedding and head a rank holds a slice.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pretraining.model.cross_entropy import LossHead
from pretraining.runtime.process_group import RankGroups
from pretraining.upstream.split_weights import (
    HeldRows,
    hold_experts,
    hold_rows,
    make_expert_groups,
    make_tensor_groups,
)
from pretraining.upstream.torch import let_length_vary
from pretraining.upstream.transformers import is_experts
from pretraining.upstream.wide_weights import WideLinear


def exchange(
    rows: torch.Tensor,
    group: dist.ProcessGroup | None,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
) -> torch.Tensor:
    """Send rows to the ranks of a group, in their order, and return what came from each, in their order.

    sent, received: rows that go to and come from each rank; None: an equal part to each.
    """
    return _Exchange.apply(rows, group, sent, received)


class _Exchange(torch.autograd.Function):
    """The gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any, sent: Any, received: Any) -> torch.Tensor:
        ctx.group, ctx.sizes = group, (sent, received)
        return _all_to_all(rows, group, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        sent, received = ctx.sizes
        return _all_to_all(gradient, ctx.group, received, sent), None, None, None


def _all_to_all(
    rows: torch.Tensor,
    group: dist.ProcessGroup | None,
    sent: Sequence[int] | None,
    received: Sequence[int] | None,
) -> torch.Tensor:
    shape = rows.shape if received is None else (sum(received), *rows.shape[1:])
    taken = rows.new_empty(shape)
    dist.all_to_all_single(taken, rows.contiguous(), received, sent, group=group)
    return taken


class HeadsHere(NamedTuple):
    """What kernels read of an attention layer, for the heads that this rank has after the exchange."""

    num_key_value_groups: int
    is_causal: bool = True


class SplitAttention:
    """Compute causal attention of sequences of which each rank of a group has a part, with a kernel of whole ones.

    Sequences are split in training and in validation. For samples and scores each rank has whole ones of its own, and
    nothing is exchanged.
    """

    def __init__(self, kernel: Callable, groups: RankGroups) -> None:
        """kernel: takes the arguments of `__call__` and returns the same."""
        self.kernel, self.size, self.group = kernel, groups.degrees.sequence, groups.sequence_group

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cu_seq_lens_q: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        splits_sequences: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the attended values [batch, length, heads, width] of this rank's tokens, and no weights.

        Args:
            query, key, value: [batch, heads, length, width]; key and value may have fewer heads.
            cu_seq_lens_q: borders of the documents in the whole sequences of the batch, written as one row.
            position_ids: those of this rank's tokens. No kernel here needs them.
            splits_sequences: whether a pass that is no training has a part of every sequence too.
        """
        exchanges = module.training or splits_sequences
        if exchanges:
            # [batch, heads, part of the length, width] becomes [batch, part of the heads, length, width], all three in
            # one exchange; a rank has at least one head of each: with fewer key-value heads than ranks they are copied
            width = value.shape[-1]
            if width < query.shape[-1]:  # of latent attention: filled up, values travel with the others
                value = F.pad(value, (0, query.shape[-1] - width))
            parts = (query, key, value)
            whole = [part.repeat_interleave(max(1, self.size // part.shape[1]), 1) for part in parts]
            for_ranks = [part.unflatten(1, (self.size, -1)).transpose(0, 1) for part in whole]
            counts = [part.shape[2] for part in for_ranks]
            # [ranks, batch, heads, length, width]: what goes to each rank, then what came from each
            received = exchange(torch.cat(for_ranks, 2), self.group)
            query, key, value = received.permute(1, 2, 0, 3, 4).flatten(2, 3).split(counts, 1)
            value = value[..., :width]
        if cu_seq_lens_q is not None:
            if self.kernel is sdpa_attention_forward:
                attention_mask = document_mask(cu_seq_lens_q, len(query), query.shape[2])
            else:
                kwargs["cu_seq_lens_q"] = cu_seq_lens_q
        heads = HeadsHere(query.shape[1] // key.shape[1])
        attended, _ = self.kernel(heads, query, key, value, attention_mask, **kwargs)
        if exchanges:
            # [batch, length, part of the heads, width] becomes [batch, part of the length, heads, width]
            received = exchange(attended.unflatten(1, (self.size, -1)).transpose(0, 1), self.group)
            attended = received.permute(1, 2, 0, 3, 4).flatten(2, 3)
        return attended, None


def document_mask(borders: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Return [batch, 1, length, length]: True where a token may look at another one, before it in its document.

    borders: int [documents + 1], in the batch written as one row; every row begins a document.
    """
    begins = torch.zeros(batch * length, dtype=torch.int32, device=borders.device)
    begins[borders[:-1].long()] = 1
    documents = begins.cumsum(0).view(batch, 1, length)
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    return same.tril()


FEWEST_ROWS = 2
"""Fewer are filled up with zeros: without a row no gradient would reach the weights, and this rank would miss the
reductions of the others. torch.compile would make a graph of its own for a single row."""
_exchange = torch.compiler.disable(exchange)


def split_experts(model: PreTrainedModel, size: int) -> None:
    """Leave each rank its part of every layer's experts, and let tokens travel. All ranks must call this.

    The weights are not drawn yet. Under ZeRO-3 the parameters are in shards already.
    """
    group = make_expert_groups(size)
    for experts in expert_modules(model):
        for name, parameter in list(experts.named_parameters(recurse=False)):
            hold_experts(experts, name, size)
            del parameter
        dispatch = ExpertDispatch(experts, group)
        experts.num_experts = dispatch.local
        experts.forward = dispatch


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """List the modules that hold all experts of a layer, stacked along the first dimension of their parameters."""
    return [module for module in model.modules() if is_experts(module)]


class ExpertDispatch:
    """The forward pass of a module of experts of which this rank has a part.

    It takes the arguments of the module's own forward pass, and returns the same. In a compiled block, a graph ends
    before it and another begins after it; the rank's own experts are a graph between the two exchanges.
    """

    def __init__(self, experts: Any, group: dist.ProcessGroup) -> None:
        """experts: with the number of all experts still."""
        self.compute, self.group = experts.forward, group
        self.experts, self.ranks = experts.num_experts, dist.get_world_size(group)
        self.local = self.experts // self.ranks

    @torch.compiler.disable(recursive=False)
    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs, [tokens, width].

        Args:
            hidden_states: [tokens, width].
            top_k_index: the chosen experts, [tokens, chosen], numbered over all ranks.
            top_k_weights: [tokens, chosen].
        """
        tokens, chosen = top_k_index.shape
        numbers = top_k_index.flatten()
        order = numbers.argsort(stable=True)  # by expert, thus by rank
        counts, sent, received = self.agree(numbers)
        rows = _exchange(hidden_states[order // chosen], self.group, sent, received)
        rows = _exchange(self._computed(rows, counts), self.group, received, sent)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        # as the module's own forward pass does: weighted in the weights' type, and added up in it
        weighted = rows[back].view(tokens, chosen, -1) * top_k_weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden_states.dtype)

    @torch.compiler.disable
    def agree(self, numbers: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        """Return the rows that come here [ranks, own experts], and how many go to and come from each rank."""
        # not bincount, for which the host would wait
        ones = torch.ones_like(numbers)
        going = torch.zeros(self.experts, dtype=ones.dtype, device=ones.device).scatter_add_(0, numbers, ones)
        coming = torch.empty_like(going)
        dist.all_to_all_single(coming, going, group=self.group)
        sums = torch.stack([going, coming]).view(2, self.ranks, self.local).sum(2)
        sent, received = sums.tolist()  # the host waits here, once: it must know the sizes of the exchange
        return coming.view(self.ranks, self.local), sent, received

    @torch.compiler.disable(recursive=False)
    def _computed(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Pass rows through this rank's experts; counts: [ranks, own experts], in the order of the rows."""
        numbers = torch.arange(self.local, device=rows.device).repeat(self.ranks)
        numbers = numbers.repeat_interleave(counts.flatten(), output_size=len(rows))
        num_rows, missing = len(rows), FEWEST_ROWS - len(rows)
        if missing > 0:
            rows = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
            numbers = torch.cat([numbers, numbers.new_zeros(missing)])
        parts = rows, numbers.unsqueeze(1), rows.new_ones(len(rows), 1)
        for part in parts:  # one graph for every number of rows
            let_length_vary(part)
        return self.compute(*parts)[:num_rows]


class SplitEmbedding(nn.Embedding):
    """A table of which this rank has some rows."""

    rows: HeldRows

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token ids [...] to [..., width], the same on every rank of the group."""
        rows, is_here = self.rows.find(tokens)
        found = F.embedding(rows, self.weight, self.padding_idx)
        return _Sum.apply(found.masked_fill(~is_here.unsqueeze(-1), 0), self.rows.group)


class SplitHead(LossHead):
    """An output projection of which this rank has some rows.

    `gives` says what it returns while the model is trained: whole logits, those of its own rows, or its input, as a
    `LossHead` does. Otherwise it returns whole logits.
    """

    gives = "logits"

    def forward(
        self, hidden: torch.Tensor, labels: torch.Tensor | None = None, *way: Any, **named: Any
    ) -> Any:
        """Map [..., width] to [..., vocabulary] or [..., own rows]; with labels [...] return summed nats."""
        trains = self.training and torch.is_grad_enabled()
        if labels is not None or (trains and self.gives == "input"):
            return super().forward(hidden, labels, *way, **named)
        logits = self.product(_Copy.apply(hidden, self.rows.group))
        return logits if trains and self.gives == "own logits" else _Gather.apply(logits, self.rows)


class WideSplitHead(SplitHead, WideLinear):
    """The same, multiplied in fp32."""


def split_vocabulary(model: PreTrainedModel, degree: int) -> None:
    """Leave each rank its rows of embedding and head. All ranks must call this; the weights are there already."""
    group = make_tensor_groups(degree)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is table.weight
    for modules in [[table, head]] if tied else [[table], [head]]:
        rows = hold_rows(modules, group)
        for module in modules:
            module.rows = rows
    table.__class__ = SplitEmbedding  # in place: new modules would lose names, hooks and the tie
    head.__class__ = WideSplitHead if isinstance(head, WideLinear) else SplitHead
    table.num_embeddings = head.out_features = table.rows.own
    if table.padding_idx is not None:
        padding = table.padding_idx - table.rows.first
        table.padding_idx = padding if 0 <= padding < table.rows.own else None


class _Sum(torch.autograd.Function):
    """Add up over the group. What follows is the same on every rank, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, found: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(found)
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        return gradient, None


class _Copy(torch.autograd.Function):
    """Leave the input as it is; each rank has a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Gather(torch.autograd.Function):
    """Lay the ranks' columns side by side. The loss on them is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, rows: HeldRows) -> torch.Tensor:
        ctx.rows = rows
        # equal parts, as not every backend can gather unequal ones
        own = F.pad(logits, (0, rows.most - logits.shape[-1])).contiguous()
        laid = own.new_empty(len(rows.numbers) * len(own), *own.shape[1:])
        dist.all_gather_single(laid, own, group=rows.group)
        parts = zip(laid.chunk(len(rows.numbers)), rows.numbers, strict=True)
        return torch.cat([part[..., :number] for part, number in parts], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        return gradient[..., ctx.rows.first : ctx.rows.first + ctx.rows.own], None
