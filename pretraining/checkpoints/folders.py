"""List, remove and set aside the checkpoint folders of a run."""

import re
import shutil
import time
from pathlib import Path

from pretraining.checkpoints.format import MARKER, flush_folder, read_marker
from pretraining.errors import UserError
from pretraining.runtime.run_folder import RunFolder

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def checkpoint_folders(run: RunFolder) -> list[Path]:
    """Return every `checkpoint-<step>`, committed or not, newest step first."""
    return _by_step(run.path, "checkpoint")


def weights_folders(run: RunFolder) -> list[Path]:
    """Return every `weights-<step>`, which retention left of a checkpoint, newest step first."""
    return _by_step(run.path, "weights")


def committed_checkpoints(run: RunFolder) -> list[Path]:
    """Return the checkpoint folders that have the commit marker, newest step first."""
    return [folder for folder in checkpoint_folders(run) if (folder / MARKER).exists()]


def _by_step(folder: Path, kind: str) -> list[Path]:
    # Leaves out `weights-8.partial`, and a copy that a user named `checkpoint-8-good`.
    found = (path for path in folder.glob(f"{kind}-*") if re.fullmatch(rf"{kind}-\d+", path.name))
    return sorted(found, key=step_in_name, reverse=True)


def step_in_name(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def step_in(name: str) -> int:
    """Return the optimizer step in a folder's name; -1 if it is no checkpoint's name."""
    found = _CHECKPOINT.fullmatch(name)
    return int(found[1]) if found else -1


def step_of(checkpoint: Path) -> int:
    """Return the optimizer steps of a checkpoint by its marker, whatever its folder is called."""
    return read_marker(checkpoint)["step"]


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, its marker first: if the process is killed in between, the rest does not count."""
    (folder / MARKER).unlink(missing_ok=True)
    flush_folder(folder)  # the disk, too, must lose the marker before it loses the first file
    shutil.rmtree(folder)


def remove_uncommitted(run: RunFolder) -> None:
    """Remove what a killed save has left, so that its files cannot mix with those of the next save."""
    for folder in checkpoint_folders(run):
        if not (folder / MARKER).exists():
            if folder.is_symlink() or folder.is_file():
                raise UserError(
                    f"{folder}: a link to nothing, or a file, where a checkpoint belongs; move it away"
                )
            shutil.rmtree(folder)  # before the event, for which a full disk needs this room
            run.add_event("uncommitted_checkpoint_removed", checkpoint=folder.name)
    for partial in run.path.glob("weights-*.partial"):  # a demotion that was killed
        shutil.rmtree(partial)


def set_aside_after(run: RunFolder, step: int, spared: Path | None = None) -> list[Path]:
    """Move what was saved after `step` to `aside/`: the run continues from `step` and will save those steps again.

    These checkpoints are damaged, or belong to a part of the run that is given up; none is deleted. spared: the
    checkpoint to continue from; it stays even if its folder has the name of a later step.
    """
    later = [each for each in checkpoint_folders(run) + weights_folders(run) if step_in_name(each) > step]
    later = [each for each in later if spared is None or not each.samefile(spared)]
    return [move_aside(run, folder) for folder in later]


def move_aside(run: RunFolder, folder: Path) -> Path:
    """Move one checkpoint to `aside/`; returns where it is then."""
    # The time is part of the name, because a step may be set aside more than once.
    when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    target, count = run.aside / f"{folder.name}.{when}", 1
    while target.exists():
        count += 1
        target = target.with_name(f"{folder.name}.{when}~{count}")
    target.parent.mkdir(exist_ok=True)
    folder.rename(target)
    run.add_event("checkpoint_set_aside", checkpoint=folder.name, to=str(target.relative_to(run.path)))
    return target


def files_in(folder: Path) -> list[Path]:
    """Return every file below `folder`, by name."""
    return sorted(path for path in folder.rglob("*") if path.is_file())
