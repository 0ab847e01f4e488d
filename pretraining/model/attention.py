"""The attention kernel: the best one that is installed, unless the recipe names one."""

import torch
from transformers import AttentionInterface, TrainingArguments
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from pretraining.errors import UserError

SDPA_CAUSAL = "sdpa_causal"
"""torch's kernels told that the mask is causal. transformers' own `sdpa` looks for packed documents in every forward
pass, and under torch.compile builds a 4-D mask, which rules the flash kernels out (huggingface/transformers#48925)."""
INSTALL = {
    "flash_attention_2": "pip install -r requirements-gpu.txt",
    "flash_attention_3": "pip install flash-attn-3, for Hopper GPUs",
}
HOPPER = (9, 0)


def choose_attention(model: dict, arguments: TrainingArguments) -> str:
    """The name that transformers takes: the recipe's `model.attn_implementation`, else the fastest at hand.

    FlashAttention takes 16-bit numbers only; where there is none, torch's scaled_dot_product_attention has kernels
    of the same kind.
    """
    AttentionInterface.register(
        SDPA_CAUSAL, sdpa_attention_forward
    )  # without a mask function: the mask is None
    asked_for = model.get("attn_implementation")
    if asked_for:
        return asked_for
    if not (torch.cuda.is_available() and (arguments.bf16 or arguments.fp16)) or model.get("attn_pdrop"):
        return SDPA_CAUSAL
    if is_flash_attn_3_available() and torch.cuda.get_device_capability() == HOPPER:
        return "flash_attention_3"
    return "flash_attention_2" if is_flash_attn_2_available() else SDPA_CAUSAL


def missing_kernel(name: str, error: Exception) -> UserError:
    """One line for an attention that the recipe asks for and this machine does not have."""
    reason = " ".join(str(error).split())[:200]
    install = INSTALL.get(name, "see its package")
    return UserError(
        f"model.attn_implementation: {name} cannot be used here ({install}), or leave it out to use "
        f"torch's own kernels: {reason}"
    )


def describe_attention(name: str) -> str:
    """What the log says."""
    return f"attention: {name}" + (" (torch's kernels, no mask)" if name == SDPA_CAUSAL else "")
