"""Blocks of the dataset to one micro-batch."""

import numpy as np
import torch

from pretraining.data.document_masking import stack_blocks


def collate_blocks(blocks: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor | int]:
    """`stack_blocks` in tensors: what the model's forward pass takes."""
    batch = stack_blocks(blocks)
    return {key: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for key, x in batch.items()}
