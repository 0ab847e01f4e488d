"""An embedding and a head whose rows, one for each token of the vocabulary, are split over the ranks of a tensor group.

Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3): a rank looks up the tokens whose rows it has, and the
ranks add up what they found. Of the head each rank computes the logits of its own rows. The loss needs one number of
each rank and token, the log of its normaliser, so that no rank ever has whole logits while it trains. Evaluations
gather them.

The modules stay the model's own, under the same names. A tied weight is cut once.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from pretraining.model.cross_entropy import LossHead
from pretraining.upstream.split_weights import HeldRows, hold_rows, make_tensor_groups
from pretraining.upstream.wide_weights import WideLinear


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
