"""A checkpoint is complete or it does not exist: the marker is written last, when every rank has vouched."""

from pathlib import Path

import torch.distributed as dist
from transformers import TrainerCallback

from pretraining.checkpoints.files import file_entries, file_entry, files_in, follow_umask, wait_for_disk
from pretraining.checkpoints.identity import Identity, metrics_at
from pretraining.checkpoints.marker import MARKER, write_marker
from pretraining.checkpoints.receipts import (
    files_of_all_ranks,
    is_receipt,
    missing_receipts,
    receipt_name,
    write_receipt,
)
from pretraining.checkpoints.retention import Retention
from pretraining.run_dir import RunDir


class CommitCallback(TrainerCallback):
    """Commits each checkpoint the Trainer saved; older ones then go, as far as `checkpoints` does not keep them.

    The Trainer's own rotation runs before the other ranks have written their files, so it stays off.
    """

    def __init__(self, run: RunDir, identity: Identity, retention: Retention):
        self.run, self.identity, self.retention = run, identity, retention

    def on_save(self, args, state, control, **kwargs):
        folder = self.run.checkpoint(state.global_step)
        _barrier()
        if missing_receipts(folder, dist.get_world_size() if dist.is_initialized() else 1):
            _vouch_for_a_share(folder)
        if state.is_world_process_zero:
            metrics = metrics_at(state.global_step, state.log_history)
            commit_checkpoint(folder, self.identity.marker_at(state.global_step, metrics))
            self.retention.apply(self.run)


def commit_checkpoint(folder: Path, content: dict) -> None:
    """Write the marker of a checkpoint whose `content["ranks"]` ranks have all given their receipts.

    The files are those of the receipts, and the receipts themselves: no other rank's bytes are read again.
    """
    ranks = content["ranks"]
    if missing := missing_receipts(folder, ranks):
        raise FileNotFoundError(f"{folder}: no receipt of rank {missing[0]} of {ranks}")
    receipts = {name: file_entry(folder / name) for name in (receipt_name(r, ranks) for r in range(ranks))}
    write_marker(folder, {**content, "files": {**files_of_all_ranks(folder, ranks), **receipts}})


def _vouch_for_a_share(folder: Path) -> None:
    """Each rank flushes and checksums its share of the files that all have written, and gives its receipt."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    names = [str(path.relative_to(folder)) for path in files_in(folder)]
    names = [name for name in names if name != MARKER and not is_receipt(name)]
    mine = sorted(names, key=lambda name: (-(folder / name).stat().st_size, name))[rank::ranks]
    paths = [folder / name for name in mine]
    follow_umask(paths)
    wait_for_disk(paths)
    _barrier()  # every rank has looked before the first receipt appears
    write_receipt(folder, rank, ranks, file_entries(folder, mine))
    _barrier()


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
