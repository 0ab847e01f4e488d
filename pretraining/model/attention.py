"""The attention kernel: the best one that is installed, unless the recipe names one."""

import torch
from transformers import AttentionInterface, TrainingArguments
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from pretraining.errors import UserError
from pretraining.model.varlen_attention import TORCH_VARLEN, register_varlen_attention
from pretraining.model_types import is_exact

SDPA_CAUSAL = "sdpa_causal"
"""torch's kernels told that the mask is causal. transformers' own `sdpa` looks for packed documents in every forward
pass, and under torch.compile builds a 4-D mask, which rules the flash kernels out (huggingface/transformers#48925)."""
INSTALL = {
    "flash_attention_2": "pip install --no-build-isolation flash-attn, which needs nvcc",
    "flash_attention_3": "pip install flash-attn-3, for Hopper GPUs",
}
HOPPER = (9, 0)


def choose_attention(model: dict, arguments: TrainingArguments, masks_documents: bool = False) -> str | None:
    """The name that transformers takes: the recipe's `model.attn_implementation`, else the fastest at hand.

    None leaves the choice to a class of transformers that is not among the known ones: its layers may need a mask of
    their own, for windows or biases.

    FlashAttention takes 16-bit numbers only; where there is none, torch's scaled_dot_product_attention has kernels
    of the same kind. Documents are kept apart by kernels for sequences of different lengths, which torch has for
    16-bit numbers on GPUs, and by a mask elsewhere.
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
    if is_flash_attn_3_available() and torch.cuda.get_device_capability() == HOPPER:
        return "flash_attention_3"
    if is_flash_attn_2_available():
        return "flash_attention_2"
    return TORCH_VARLEN if masks_documents else _without_documents(model)


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
    """What the log says."""
    notes = ["torch's kernels, no mask"] * (name == SDPA_CAUSAL) + ["documents apart"] * masks_documents
    return f"attention: {name}" + (f" ({', '.join(notes)})" if notes else "")
