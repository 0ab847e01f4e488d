"""Attention over sequences of different lengths written one after the other, by torch's own FlashAttention kernel.

16-bit numbers on GPUs. No mask exists and nothing is computed between two documents; the borders come with the
batch (`pretraining.data.document_masking.document_borders`), so that no layer waits for the device to find them.
"""

import torch
from torch.nn.attention import varlen
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

TORCH_VARLEN = "torch_varlen"


def register_varlen_attention() -> None:
    """Make `torch_varlen` a name that `attn_implementation` takes; it has no mask function: the mask is None."""
    AttentionInterface.register(TORCH_VARLEN, varlen_attention_forward)


def varlen_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Causal attention [batch, length, heads, width] inside each document.

    query, key, value: [batch, heads, length, width], fewer heads in key and value allowed. cu_seq_lens_q: int32
    [documents + 1], borders in the batch written as one row; without them every row is one document.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    rows = [heads.transpose(1, 2).flatten(0, 1).to(dtype) for heads in (query, key, value)]
    attended = varlen.varlen_attn(
        *rows,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.unflatten(0, (len(query), -1)), None
