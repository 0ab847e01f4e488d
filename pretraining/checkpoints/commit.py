"""A checkpoint is complete or it does not exist: the marker is written last, when every rank has vouched."""

from pathlib import Path

from pretraining.checkpoints.files import file_entry
from pretraining.checkpoints.marker import write_marker
from pretraining.checkpoints.receipts import files_of_all_ranks, missing_receipts, receipt_name


def commit_checkpoint(folder: Path, content: dict) -> None:
    """Write the marker of a checkpoint whose `content["ranks"]` ranks have all given their receipts.

    The files are those of the receipts, and the receipts themselves: no other rank's bytes are read again.
    """
    ranks = content["ranks"]
    if missing := missing_receipts(folder, ranks):
        raise FileNotFoundError(f"{folder}: no receipt of rank {missing[0]} of {ranks}")
    receipts = {name: file_entry(folder / name) for name in (receipt_name(r, ranks) for r in range(ranks))}
    write_marker(folder, {**content, "files": {**files_of_all_ranks(folder, ranks), **receipts}})
