"""Attention of sequence parallelism: each rank has a part of every sequence, and in attention a part of the heads.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509): before attention the ranks of a group exchange their parts, so
that each has all tokens of some heads. The exchange after it brings back all heads of its own tokens. All else works on
single tokens and needs no exchange. To ZeRO the ranks of a group are data-parallel ranks.

DeepSpeed 0.19.8 brings the same exchange (`UlyssesSPAttentionHF`). But it refuses GPT-2, keeps packed documents apart
only with the package flash-attn, and its loader cannot resume within an epoch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pretraining.model.exchange import exchange
from pretraining.runtime.process_group import RankGroups

SPLIT = "split_sequence_"
"""How the names of these attentions begin, in `attn_implementation`."""


def register_split(name: str, kernel: Callable, groups: RankGroups) -> str:
    """Register a kernel of whole sequences as one of split sequences, and return its name for transformers."""
    # It gets no mask function: transformers would make the mask of the rank's own part.
    AttentionInterface.register(f"{SPLIT}{name}", SplitAttention(kernel, groups))
    return f"{SPLIT}{name}"


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
            parts = (query, key, value)
            whole = [part.repeat_interleave(max(1, self.size // part.shape[1]), 1) for part in parts]
            for_ranks = [part.unflatten(1, (self.size, -1)).transpose(0, 1) for part in whole]
            counts = [part.shape[2] for part in for_ranks]
            # [ranks, batch, heads, length, width]: what goes to each rank, then what came from each
            received = exchange(torch.cat(for_ranks, 2), self.group)
            query, key, value = received.permute(1, 2, 0, 3, 4).flatten(2, 3).split(counts, 1)
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
