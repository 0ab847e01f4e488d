"""The attention kernel: the fastest for this GPU of those installed, unless the recipe names one."""

import torch
from transformers import AttentionInterface, TrainingArguments
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import is_flash_attn_3_available

from pretraining.errors import UserError
from pretraining.model.varlen_attention import TORCH_VARLEN, register_varlen_attention
from pretraining.recipe.model import is_exact

SDPA_CAUSAL = "sdpa_causal"
"""torch's kernels told that the mask is causal. transformers' own `sdpa` looks for packed documents in every forward
pass, and under torch.compile builds a 4-D mask, which rules the flash kernels out (huggingface/transformers#48925)."""
INSTALL = {
    "flash_attention_2": "pip install --no-build-isolation flash-attn, which needs nvcc",
    "flash_attention_3": "pip install flash-attn-3",
}
HOPPER, BLACKWELL = (9, 0), (10, 0)
CUDNN_FIRST = 91501
"""From this cuDNN on torch 2.13 takes its kernels first on Hopper and Blackwell, and its own copy of FlashAttention-2
on other GPUs (ATen/native/transformers/cuda/sdp_utils.cpp, `check_prefer_cudnn_attention`)."""


def choose_attention(model: dict, arguments: TrainingArguments, masks_documents: bool = False) -> str | None:
    """The name that transformers takes: the recipe's `model.attn_implementation`, else the fastest for this GPU.

    None leaves the choice to a class of transformers that is not among the known ones: its layers may need a mask of
    their own, for windows or biases.

    torch's scaled_dot_product_attention has the kernels of FlashAttention-2, and on Hopper and Blackwell cuDNN's,
    as fast as FlashAttention-3 on an H100 (pytorch/pytorch#142132; not measured here): no package is needed.
    Documents are kept apart by kernels for sequences of different lengths, in 16 bit on GPUs, and by a mask
    elsewhere. For those torch has FlashAttention-2 alone: on Hopper the package of FlashAttention-3 is taken if it
    is there. The borders come with the batch (`data.document_masking`): without them transformers would wait for
    the device in every layer to find them.
    """
    AttentionInterface.register(
        SDPA_CAUSAL, sdpa_attention_forward
    )  # without a mask function: the mask is None
    asked_for = model.get("attn_implementation")
    register_varlen_attention()
    if asked_for or not is_exact(model):
        return asked_for
    if not (torch.cuda.is_available() and (arguments.bf16 or arguments.fp16)) or model.get("attn_pdrop"):
        return "sdpa" if masks_documents else _without_documents(model)
    if not masks_documents:
        return _without_documents(model)
    has_3 = is_flash_attn_3_available() and torch.cuda.get_device_capability() == HOPPER
    return "flash_attention_3" if has_3 else TORCH_VARLEN


def _without_documents(model: dict) -> str:
    """torch's causal kernel, or where layers look back over a window alone transformers' `sdpa`, whose mask says so."""
    windows = model["model_type"] == "mixtral" and model.get("sliding_window")
    return "sdpa" if windows or model.get("use_sliding_window") else SDPA_CAUSAL


def missing_kernel(name: str, error: Exception) -> UserError:
    """One line for an attention that the recipe asks for and this machine does not have."""
    reason = " ".join(str(error).split())[:200]
    install = INSTALL.get(name, "see its package")
    return UserError(
        f"model.attn_implementation: {name} cannot be used here ({install}), or leave it out to use "
        f"torch's own kernels: {reason}"
    )


def describe_attention(name: str, masks_documents: bool = False) -> str:
    """What the log says: which kernel, and which package would bring a faster one for this GPU."""
    gpu = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    notes = ["torch's kernels, no mask"] * (name == SDPA_CAUSAL) + ["documents apart"] * masks_documents
    if name == SDPA_CAUSAL and gpu in (HOPPER, BLACKWELL):
        is_new = (torch.backends.cudnn.version() or 0) >= CUDNN_FIRST
        notes.append("cuDNN's first" if is_new else "a newer nvidia-cudnn would be faster")
    if name == TORCH_VARLEN and gpu == HOPPER:
        notes.append(f"the package flash-attn-3 would be faster on this GPU: {INSTALL['flash_attention_3']}")
    return f"attention: {name}" + (f" ({', '.join(notes)})" if notes else "")
