"""Every checkpoint of a run with its state, told from markers and sizes: no byte of the large files is read."""

import time
from pathlib import Path

from pretraining.checkpoints.files import files_in
from pretraining.checkpoints.folders import checkpoint_folders, step_in_name, weights_folders
from pretraining.checkpoints.marker import MARKER, marker_or_nothing
from pretraining.checkpoints.verification import quick_damage
from pretraining.errors import UserError
from pretraining.runtime.run_folder import RunFolder, unix_seconds

FROM_MARKER = ("saved", "ranks", "zero_stage", "tokens")


def catalogue(run: RunFolder) -> list[dict]:
    """One entry a folder, newest step first.

    {"folder", "step", "state", "reason", "bytes", "age_seconds", "saved", "ranks", "zero_stage", "tokens", "loss",
    "eval_loss"}; state: committed, damaged, other version, uncommitted, weights only, set aside.
    """
    entries = [_checkpoint(folder) for folder in checkpoint_folders(run)]
    entries += [_entry(folder, step_in_name(folder), "weights only") for folder in weights_folders(run)]
    entries.sort(key=lambda entry: (-entry["step"], entry["folder"]))
    return entries + [_set_aside(folder, run) for folder in sorted(run.aside.glob("*-*"))]


def _checkpoint(folder: Path) -> dict:
    step = step_in_name(folder)
    if not (folder / MARKER).exists():
        return _entry(folder, step, "uncommitted")
    try:
        reason, _ = quick_damage(folder, of_run=True)
    except UserError as error:
        return _entry(folder, step, "other version", str(error))
    return _entry(folder, step, "damaged" if reason else "committed", reason)


def _set_aside(folder: Path, run: RunFolder) -> dict:
    step = int(folder.name.partition(".")[0].rpartition("-")[2])
    return {**_entry(folder, step, "set aside"), "folder": str(folder.relative_to(run.path))}


def _entry(folder: Path, step: int, state: str, reason: str | None = None) -> dict:
    marker = marker_or_nothing(folder)
    metrics = marker.get("metrics", {})
    saved = marker.get("saved")
    when = unix_seconds(saved) if saved else folder.stat().st_mtime
    return {
        "folder": folder.name,
        "step": step,
        "state": state,
        "reason": reason,
        "bytes": sum(path.stat().st_size for path in files_in(folder)),
        "age_seconds": max(0, int(time.time() - when)),
        **{key: marker.get(key) for key in FROM_MARKER},
        "loss": metrics.get("loss"),
        "eval_loss": metrics.get("eval_loss"),
    }
