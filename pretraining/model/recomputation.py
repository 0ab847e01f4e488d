"""Choose what a recomputed layer keeps: its input alone, or also what its products and attention gave."""

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

_aten = torch.ops.aten
KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""Operators whose results are dear to compute again. Not those of eager attention: they are as large as all pairs."""


def keep_products(model: PreTrainedModel) -> None:
    """Let activation checkpointing keep the results of products and attention, and compute all else again.

    The Trainer switches activation checkpointing on, when training begins.
    """
    enable = model.activation_checkpointing_enable

    def enable_selectively(activation_checkpointing_kwargs: dict | None = None, **keywords: Any) -> None:
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        enable(
            {"use_reentrant": False, **(activation_checkpointing_kwargs or {}), "context_fn": contexts},
            **keywords,
        )

    model.activation_checkpointing_enable = enable_selectively


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
