"""Blocks of the dataset to one micro-batch."""

import numpy as np
import torch

from pretraining.data.document_masking import document_borders


def collate_blocks(blocks: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor | int]:
    """Stack int64 [length] arrays under each key into an int64 [batch, length] tensor.

    Where the blocks have positions, the borders of their documents go with them (`document_borders`).
    """
    batch = {key: np.stack([block[key] for block in blocks]) for key in blocks[0]}
    if "position_ids" in batch:
        batch |= document_borders(batch["position_ids"])
    return {key: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for key, x in batch.items()}
