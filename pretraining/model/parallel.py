"""Layers that are split over the ranks of a group: sequences in attention, experts, and rows of embedding and head.

- Sequences, DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509): before attention the ranks exchange their parts,
  so that each has all tokens of some heads; the exchange after it brings back all heads of its own tokens. All else
  works on single tokens. To ZeRO these ranks are data-parallel. DeepSpeed 0.19.8 brings the same exchange
  (`UlyssesSPAttentionHF`), but it refuses GPT-2, keeps packed documents apart only with the package flash-attn, and
  its loader cannot resume within an epoch.
- Experts, GShard (Lepikhin et al. 2020, arXiv 2006.16668): every rank routes its own tokens, sends each to the ranks of
  its experts, and gets the results back. No token is dropped, and none travels twice to the same rank. All else is
  data-parallel, and the ranks read different samples.
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
from pretraining.upstream.attention_logits import WATCH, see_logits
from pretraining.upstream.split_weights import (
    HeldRows,
    hold_experts,
    hold_rows,
    make_expert_groups,
    make_tensor_groups,
)
from pretraining.upstream.torch import let_length_vary
from pretraining.upstream.transformers import activate, grouped_product, is_experts, multiplies_in_groups


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
        ctx.group, ctx.back = group, (received, sent)
        taken = rows.new_empty(rows.shape if received is None else (sum(received), *rows.shape[1:]))
        dist.all_to_all_single(taken, rows.contiguous(), received, sent, group=group)
        return taken

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        return exchange(gradient, ctx.group, *ctx.back), None, None, None


class HeadsHere(NamedTuple):
    """What kernels read of an attention layer, for the heads that this rank has after the exchange."""

    num_key_value_groups: int
    is_causal: bool = True


class SplitAttention:
    """Compute causal attention of sequences of which each rank of a group has a part, with a kernel of whole ones.

    Sequences are split in training and in validation. For samples and scores each rank has whole ones of its own, and
    nothing is exchanged.
    """

    sees_logits = True
    """Here, and not outside where a rank has parts of the sequences."""

    def __init__(self, kernel: Callable, groups: RankGroups) -> None:
        """kernel: takes the arguments of `__call__` and returns the same."""
        self.kernel, self.size, self.group = kernel, groups.degrees.sequence, groups.sequence_group
        self.part = groups.sequence_part

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
        if WATCH.is_on and module.training:
            named = {**kwargs, "cu_seq_lens_q": cu_seq_lens_q, "sequence_part": (self.part, self.size)}
            see_logits(module, query, key, attention_mask, **named)
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


def split_experts(model: PreTrainedModel, size: int) -> None:
    """Leave each rank its part of every layer's experts, and let tokens travel. All ranks must call this.

    The weights are not drawn yet. Under ZeRO-3 the parameters are in shards already.
    """
    group = make_expert_groups(size)
    for experts in expert_modules(model):
        # names alone: a parameter goes as soon as its part is there
        for name in [name for name, _ in experts.named_parameters(recurse=False)]:
            hold_experts(experts, name, size)
        dispatch = ExpertDispatch(experts, group)
        experts.num_experts = dispatch.local
        experts.forward = dispatch


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """List the modules that hold all experts of a layer, stacked along the first dimension of their parameters."""
    return [module for module in model.modules() if is_experts(module)]


def pass_through(forward: Callable, *parts: torch.Tensor) -> torch.Tensor:
    return forward(*parts)


class Kernels(NamedTuple):
    """What computes little between the products of experts: as it is, or compiled."""

    activate: Callable = activate
    pass_through: Callable = pass_through

    def compiled(self, **options: Any) -> "Kernels":
        return Kernels(*(torch.compile(each, **options) for each in self))


PLAIN_KERNELS = Kernels()


class Copies(NamedTuple):
    """Rows that are copies of the lines of a matrix, each line of some."""

    sources: torch.Tensor
    """Which line each row is a copy of, [rows]."""
    of_lines: torch.Tensor
    """The rows of the first line, then those of the second, and so on, [rows]."""
    starts: torch.Tensor
    """Where those of each line begin, [lines]."""

    @classmethod
    def of(cls, sources: torch.Tensor, num_lines: int) -> "Copies":
        lines, of_lines = sources.to(torch.int32).sort(stable=True)
        numbers = torch.arange(num_lines, dtype=lines.dtype, device=lines.device)
        return cls(sources, of_lines, torch.searchsorted(lines, numbers))

    def take(self, matrix: torch.Tensor) -> torch.Tensor:
        """Copy lines to rows; the gradient of a line is the sum of its rows', which needs no atomic addition."""
        return _Moved.apply(matrix, self, True)

    def add_up(self, rows: torch.Tensor) -> torch.Tensor:
        return _Moved.apply(rows, self, False)

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        if not len(rows):
            return rows.new_zeros(len(self.starts), rows.shape[1])
        # one kernel, which adds 16-bit numbers in fp32; detached, it makes no tables for a backward pass of its own
        return F.embedding_bag(self.of_lines, rows.detach(), self.starts, mode="sum")


class _Moved(torch.autograd.Function):
    """Take lines to rows, or add up the rows of each line: the one is the backward pass of the other.

    The tables stay with the graph. They are no saved tensors, which a recomputed layer would compute again: so its
    recomputation ends with the input of the last product, and nothing is sent back a second time. It routes as the
    first pass did, because nothing before it adds in an order of chance.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, copies: Copies, takes: bool) -> torch.Tensor:
        ctx.copies, ctx.takes = copies, takes
        return values[copies.sources] if takes else copies.sums(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        copies: Copies = ctx.copies
        return copies.sums(gradient) if ctx.takes else gradient[copies.sources], None, None


class Agreed(NamedTuple):
    """How many rows an exchange has, which the host must know."""

    sent: list[int]
    """To each rank: the tokens that chose any of its experts."""
    received: list[int]
    choices: int
    """Of this rank's experts, by the tokens of all ranks."""


class ExpertDispatch:
    """The forward pass of a module of experts of which this rank has a part.

    It takes the arguments of the module's own forward pass, and returns the same. A token travels once to every rank
    that has one of its experts or more. There the experts' outputs are added up, and one row travels back. Each choice
    is weighted before its expert's last product, so that no backward pass reads what that product gave.

    In a compiled block, a graph ends before it and another begins after it.
    """

    def __init__(self, experts: Any, group: dist.ProcessGroup) -> None:
        """experts: with the number of all experts still."""
        self.module, self.forward, self.group = experts, experts.forward, group
        self.ranks = dist.get_world_size(group)
        self.local = experts.num_experts // self.ranks
        self.kernels = PLAIN_KERNELS

    @torch.compiler.disable
    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs, [tokens, width].

        Args:
            hidden_states: [tokens, width].
            top_k_index: the chosen experts, [tokens, chosen], numbered over all ranks.
            top_k_weights: [tokens, chosen].
        """
        owners = top_k_index // self.local
        travels = torch.zeros(self.ranks, len(owners), dtype=torch.int64, device=owners.device)
        travels.scatter_(0, owners.T, 1)
        # rows are numbered by rank, and those of a rank by token: in the order of the entries of `travels` that are 1
        most = travels.numel()
        numbers = (travels.flatten().cumsum(0) - 1).masked_fill_(travels.flatten() == 0, most)
        entries = numbers.new_empty(most + 1).scatter_(0, numbers, torch.arange(most, device=numbers.device))
        sent, received, choices = self.agree(owners, travels)
        entries = entries[: sum(sent)]  # the last one received all that are 0
        copies = Copies.of(entries % len(owners), len(owners))
        rows = exchange(copies.take(hidden_states), self.group, sent, received)
        # of each row its token's choices, as numbers of the rank's experts; those of other ranks are left out
        own = top_k_index[copies.sources] - (entries // len(owners) * self.local).unsqueeze(1)
        is_there = (own >= 0) & (own < self.local)
        weights = copies.take(top_k_weights).masked_fill(~is_there, 0)
        wide = torch.promote_types(weights.dtype, torch.float32)  # exact, as the numbers are
        chosen = torch.cat([weights.to(wide), own.masked_fill(~is_there, self.local).to(wide)], 1)
        weights, experts = exchange(chosen, self.group, sent, received).chunk(2, 1)
        # Each row's choices here, [rows, chosen], in the order of the experts; a number past the last expert is none.
        experts = experts.detach().long()
        numbers, order = experts.flatten().to(torch.int16).sort(stable=True)
        numbers, order = numbers[:choices], order[:choices]
        own_copies = Copies.of(order // experts.shape[1], len(experts))
        inputs, weights = own_copies.take(rows), weights.flatten().gather(0, order).unsqueeze(1)
        if (missing := FEWEST_ROWS - choices) > 0:
            inputs, weights = (
                torch.cat([each, each.new_zeros(missing, each.shape[1])]) for each in (inputs, weights)
            )
            numbers = torch.cat([numbers, numbers.new_full((missing,), self.local - 1)])
            results = own_copies.add_up(self._multiplied(inputs, numbers, weights)[:choices])
        else:
            results = own_copies.add_up(self._multiplied(inputs, numbers, weights))
        returned = exchange(results, self.group, received, sent)
        return copies.add_up(returned).to(hidden_states.dtype)

    def agree(self, owners: torch.Tensor, travels: torch.Tensor) -> Agreed:
        """Exchange how many rows and choices go to each rank.

        Args:
            owners: ranks of the chosen experts, [tokens, chosen].
            travels: 1 if a token goes to a rank, else 0, [ranks, tokens].
        """
        # not bincount, for which the host would wait
        numbers = owners.flatten()
        choices = torch.zeros_like(travels[:, 0]).scatter_add_(0, numbers, torch.ones_like(numbers))
        going = torch.stack([travels.sum(1), choices], 1)
        coming = torch.empty_like(going)
        dist.all_to_all_single(coming, going, group=self.group)
        known = torch.stack([going[:, 0], coming[:, 0], coming[:, 1]])
        # the host waits here, once: it must know the sizes of the exchange
        sent, received, chosen = known.tolist()
        return Agreed(sent, received, sum(chosen))

    def _multiplied(self, inputs: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Pass each row [rows, width] through one expert and weight it; rows are in the order of the experts."""
        module, numbers_of_rows = self.module, numbers.long().unsqueeze(1)
        for each in (inputs, numbers_of_rows, weights):  # one graph for every number of rows
            let_length_vary(each)
        if not multiplies_in_groups(module):
            return self.kernels.pass_through(self.forward, inputs, numbers_of_rows, weights)
        bounds = torch.arange(self.local, dtype=numbers.dtype, device=numbers.device)
        ends = torch.searchsorted(numbers, bounds, right=True, out_int32=True)
        first = module.gate_up_proj if module.has_gate else module.up_proj
        inner = grouped_product(module, inputs, first, ends)
        let_length_vary(inner)
        return grouped_product(module, self.kernels.activate(module, inner, weights), module.down_proj, ends)


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


def split_vocabulary(model: PreTrainedModel, degree: int) -> None:
    """Leave each rank its rows of embedding and head. All ranks must call this; the weights are there already."""
    group = make_tensor_groups(degree)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is table.weight
    for modules in [[table, head]] if tied else [[table], [head]]:
        rows = hold_rows(modules, group)
        for module in modules:
            module.rows = rows
    # in place: new modules would lose names, hooks and the tie
    table.__class__, head.__class__ = SplitEmbedding, SplitHead
    table.num_embeddings = head.out_features = table.rows.own
    if table.padding_idx is not None:
        padding = table.padding_idx - table.rows.first
        table.padding_idx = padding if 0 <= padding < table.rows.own else None


def mean_over(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Average over the ranks of a group; the gradient is the average of theirs."""
    # a copy, as the sum is written over its input
    return _Sum.apply(_Copy.apply(values, group).clone(), group) / dist.get_world_size(group)


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
