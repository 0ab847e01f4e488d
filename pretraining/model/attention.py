"""The attention kernel: the fastest installed one for this GPU, unless the recipe names one.

Kernels here keep documents apart by their borders (data/documents.py); others by a mask: `mask_by_positions` in
upstream/transformers.py, and `document_mask` in parallel.py for parts of sequences.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import varlen
from transformers import AttentionInterface, TrainingArguments
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import is_flash_attn_3_available

from pretraining.model.parallel import SplitAttention
from pretraining.recipe.model import is_exact, why_not_apart
from pretraining.runtime.process_group import RankGroups

SDPA_CAUSAL = "sdpa_causal"
"""torch's kernels, which know that the mask is causal. transformers' own `sdpa` looks for packed documents in every
forward pass, and under torch.compile builds a 4-D mask, which rules the flash kernels out
(huggingface/transformers#48925)."""
SPLIT = "split_sequence_"
"""How the names of attentions over split sequences begin, in `attn_implementation`."""
TORCH_VARLEN = "torch_varlen"
"""torch's FlashAttention kernel for sequences of different lengths: 16-bit numbers on GPUs."""
INSTALL = {
    "flash_attention_2": "pip install --no-build-isolation flash-attn, which needs nvcc",
    "flash_attention_3": "pip install flash-attn-3",
}
HOPPER, BLACKWELL = (9, 0), (10, 0)
CUDNN_FIRST = 91501
"""From this cuDNN on torch 2.13 takes its kernels first on Hopper and Blackwell, and its own copy of FlashAttention-2
on other GPUs (ATen/native/transformers/cuda/sdp_utils.cpp, `check_prefer_cudnn_attention`)."""


def choose_attention(model: dict, arguments: TrainingArguments, masks_documents: bool = False) -> str | None:
    """Choose the name that transformers takes: the recipe's `model.attn_implementation`, else the fastest for this GPU.

    None leaves the choice to transformers.

    torch's scaled_dot_product_attention has the kernels of FlashAttention-2, and on Hopper and Blackwell cuDNN's,
    as fast as FlashAttention-3 on an H100 (pytorch/pytorch#142132; not measured here): no package is needed.
    Documents are kept apart by kernels for sequences of different lengths in 16 bit on GPUs, and by a mask elsewhere.
    """
    register_kernels()
    asked_for = model.get("attn_implementation")
    if asked_for:
        return asked_for
    if not masks_documents:
        if not is_exact(model):
            return None  # layers of other classes may need masks for windows or biases
        # Layers that see a window only take transformers' `sdpa`, whose mask says so. Mixtral has a window if it is
        # given; other types have a switch of their own for it.
        windows = model["model_type"] == "mixtral" and model.get("sliding_window")
        return "sdpa" if windows or model.get("use_sliding_window") else SDPA_CAUSAL
    on_gpu = torch.cuda.is_available() and (arguments.bf16 or arguments.fp16)
    if not on_gpu or model.get("attn_pdrop") or why_not_apart(model, TORCH_VARLEN):
        return "eager" if why_not_apart(model, "sdpa") else "sdpa"
    # For sequences of different lengths torch has only FlashAttention-2: on Hopper the package is faster.
    has_3 = is_flash_attn_3_available() and torch.cuda.get_device_capability() == HOPPER
    return "flash_attention_3" if has_3 and is_exact(model) else TORCH_VARLEN


def register_kernels() -> None:
    """Make `sdpa_causal` and `torch_varlen` names that `attn_implementation` takes."""
    # Neither gets a mask function, so that the mask is None.
    AttentionInterface.register(SDPA_CAUSAL, sdpa_attention_forward)
    AttentionInterface.register(TORCH_VARLEN, varlen_attention_forward)


def split_attention(name: str | None, groups: RankGroups) -> str:
    """Return the name of the attention that computes with one of `SPLIT_KERNELS` on split sequences."""
    kernels: dict[str, Callable] = {
        SDPA_CAUSAL: sdpa_attention_forward,
        "sdpa": sdpa_attention_forward,
        TORCH_VARLEN: varlen_attention_forward,
    }
    # flash-attn's own functions look for their name in the model's config, where that of the split attention is
    name = name if name in kernels else TORCH_VARLEN
    # It gets no mask function: transformers would make the mask of the rank's own part.
    AttentionInterface.register(f"{SPLIT}{name}", SplitAttention(kernels[name], groups))
    return f"{SPLIT}{name}"


def describe_attention(name: str, masks_documents: bool = False) -> str:
    """Write what the log says: which kernel, and which package would bring a faster one for this GPU."""
    gpu = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    notes = ["each rank has a part of every sequence"] * name.startswith(SPLIT)
    name = name.removeprefix(SPLIT)
    notes += ["torch's kernels, no mask"] * (name == SDPA_CAUSAL) + ["documents apart"] * masks_documents
    if name == SDPA_CAUSAL and gpu in (HOPPER, BLACKWELL):
        is_new = (torch.backends.cudnn.version() or 0) >= CUDNN_FIRST
        notes.append("cuDNN's first" if is_new else "a newer nvidia-cudnn would be faster")
    if name == TORCH_VARLEN and gpu == HOPPER:
        notes.append(f"the package flash-attn-3 would be faster on this GPU: {INSTALL['flash_attention_3']}")
    return f"attention: {name}" + (f" ({', '.join(notes)})" if notes else "")


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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention [batch, length, heads, width] inside each document.

    There is no mask, and nothing is computed between two documents.

    Args:
        query, key, value: [batch, heads, length, width]; key and value may have fewer heads.
        cu_seq_lens_q: int32 [documents + 1], borders in the batch written as one row, which come with the batch
            (`data.documents.document_borders`): no layer waits for the device to find them. Without them every
            row is one document.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    # The kernel takes 16-bit numbers: under autocast the projections are, rotated queries and keys may be in fp32.
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
        # A window counts the token itself, and the kernel only those before it. 0 after it: causal.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.unflatten(0, (len(query), -1)), None
