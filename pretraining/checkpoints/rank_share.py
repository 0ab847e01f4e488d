"""What one rank adds to a checkpoint, and how it comes to lie on the disk."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from pretraining.checkpoints.awaiting import write_bytes
from pretraining.checkpoints.receipts import write_receipt
from pretraining.checkpoints.shard_files import rank_file, write_rank_file


class RankShare(NamedTuple):
    """tensors: by key, maybe live views, which the next step changes. files: small ones. receipt: what else to say."""

    tensors: Mapping[str, torch.Tensor]
    files: Mapping[str, bytes]
    receipt: Mapping


def write_share(share: RankShare, folder: Path, rank: int, ranks: int) -> None:
    """Write it now; the checkpoint counts once a marker is written after all ranks' receipts."""
    name = rank_file(rank, ranks)
    written = {name: write_rank_file(folder / name, share.tensors)}
    written |= {name: write_bytes(folder / name, content) for name, content in share.files.items()}
    write_receipt(folder, rank, ranks, written, **share.receipt)
