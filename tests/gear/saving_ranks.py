"""What two ranks do in a test of the background writer: `python -m tests.gear.saving_ranks FOLDER FAULT`."""

import errno
import json
import os
import sys
from pathlib import Path

import torch

from pretraining.checkpoints.background import CheckpointWriter
from pretraining.checkpoints.format import MARKER
from pretraining.errors import UserError
from pretraining.runtime.durable_files import write_json
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.ranks import join_ranks, leave_ranks


def write_marker(folder: Path, content: dict) -> None:
    """The least a commit does: what the marker holds is tested elsewhere."""
    receipts = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    write_json(folder / MARKER, {**content, "receipts": receipts})


def fail_fsync(*_) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def main(folder: str, fault: str) -> None:
    rank, _ = join_ranks()
    writer = CheckpointWriter(RunFolder(folder), write_marker, on_full_disk=fault)
    flushed = os.fsync
    story = []
    for step in (1, 2, 3):
        os.fsync = fail_fsync if rank == 1 and step == 2 else flushed
        try:
            writer.save(
                step, {f"master/weight@{rank * 4}": torch.full((4,), float(step))}, marker={"rank": rank}
            )
            while writer.in_flight:
                writer.poll()
            story.append("saved" if writer.last["checkpoint"] == f"checkpoint-{step}" else "not saved")
        except UserError as error:
            story.append(str(error))
            break
        finally:
            os.fsync = flushed
    Path(folder, f"story-{rank}.json").write_text(json.dumps(story))
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
