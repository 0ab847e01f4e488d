"""The checkpoint folders of a run as they lie on disk: which are committed, and after how many steps."""

import re
import shutil
import time
from pathlib import Path

from pretraining.checkpoints.marker import MARKER, flush_folder, read_marker
from pretraining.runtime.run_folder import RunFolder


def checkpoint_folders(run: RunFolder) -> list[Path]:
    """Every `checkpoint-<step>`, committed or not, newest step first."""
    return _by_step(run.path, "checkpoint")


def weights_folders(run: RunFolder) -> list[Path]:
    """Every `weights-<step>`: what retention left of a checkpoint, newest step first."""
    return _by_step(run.path, "weights")


def committed_checkpoints(run: RunFolder) -> list[Path]:
    """Folders that carry the commit marker, newest step first."""
    return [folder for folder in checkpoint_folders(run) if (folder / MARKER).exists()]


def step_in_name(folder: Path) -> int:
    """The step that a folder of a run is named by."""
    return int(folder.name.rpartition("-")[2])


def step_of(checkpoint: Path | None) -> int:
    """Optimizer steps a checkpoint holds, as its marker says, whatever the folder is called; 0 for none."""
    return read_marker(checkpoint)["step"] if checkpoint else 0


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint, its marker first: killed at any point, what is left does not count."""
    (folder / MARKER).unlink(missing_ok=True)
    flush_folder(folder)
    shutil.rmtree(folder)


def remove_uncommitted(run: RunFolder) -> None:
    """Delete what a killed save left behind, so that its files cannot mix with the next save's."""
    for folder in checkpoint_folders(run):
        if not (folder / MARKER).exists():
            shutil.rmtree(folder)  # before the event: the disk may be full of it
            run.add_event("uncommitted_checkpoint_removed", checkpoint=folder.name)
    for partial in run.path.glob("weights-*.partial"):
        shutil.rmtree(partial)


def set_aside_after(run: RunFolder, step: int, spared: Path | None = None) -> list[Path]:
    """Move what was saved after `step` to `aside/`: the run goes on from there, and will come to those steps again.

    They are damaged ones, or those of a part of the run that is given up; none is deleted. `spared` stays: the
    checkpoint to go on from, where its folder is named by a later step.
    """
    later = [each for each in checkpoint_folders(run) + weights_folders(run) if step_in_name(each) > step]
    later = [each for each in later if spared is None or not each.samefile(spared)]
    when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    moved = []
    for folder in later:
        target = _free_name(run.aside / f"{folder.name}.{when}")
        target.parent.mkdir(exist_ok=True)
        folder.rename(target)
        run.add_event("checkpoint_set_aside", checkpoint=folder.name, to=str(target.relative_to(run.path)))
        moved.append(target)
    return moved


def _free_name(path: Path) -> Path:
    count = 1
    while path.exists():
        count += 1
        path = path.with_name(f"{path.name.partition('~')[0]}~{count}")
    return path


def _by_step(folder: Path, kind: str) -> list[Path]:
    found = (path for path in folder.glob(f"{kind}-*") if re.fullmatch(rf"{kind}-\d+", path.name))
    return sorted(found, key=step_in_name, reverse=True)
