"""Choose what a recomputed layer keeps: its input alone, or also what its products and attention gave."""

from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from pretraining.upstream.torch import DEAR_OPERATORS


def keep_products(model: PreTrainedModel) -> None:
    """Let activation checkpointing keep the results of products and attention, and compute all else again.

    The Trainer switches activation checkpointing on, when training begins.
    """
    enable = model.activation_checkpointing_enable

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in DEAR_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE

    def enable_selectively(activation_checkpointing_kwargs: dict | None = None, **keywords: Any) -> None:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        enable(
            {"use_reentrant": False, **(activation_checkpointing_kwargs or {}), "context_fn": contexts},
            **keywords,
        )

    model.activation_checkpointing_enable = enable_selectively
