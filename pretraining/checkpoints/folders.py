"""List, check, remove and set aside the checkpoint folders of a run."""

import re
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from heapq import heapreplace
from pathlib import Path

from pretraining.checkpoints.format import (
    MARKER,
    THREADS,
    MarkerDamage,
    file_entry,
    flush_folder,
    marker_or_nothing,
    no_progress,
    read_marker,
)
from pretraining.errors import UserError
from pretraining.runtime.run_folder import RunFolder, unix_seconds

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")

Progress = Callable[[int], None]
"""Called with the number of bytes of each read."""
_FROM_MARKER = ("saved", "ranks", "zero_stage", "tokens")


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
    """Return the step in the name of a run's folder."""
    return int(folder.name.rpartition("-")[2])


def step_in(name: str) -> int:
    """Return the optimizer step in a folder's name; -1 if it is no checkpoint's name."""
    found = _CHECKPOINT.fullmatch(name)
    return int(found[1]) if found else -1


def step_of(checkpoint: Path | None) -> int:
    """Return the optimizer steps of a checkpoint by its marker, whatever its folder is called; 0 for None."""
    return read_marker(checkpoint)["step"] if checkpoint else 0


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
    target = _free_name(run.aside / f"{folder.name}.{when}")
    target.parent.mkdir(exist_ok=True)
    folder.rename(target)
    run.add_event("checkpoint_set_aside", checkpoint=folder.name, to=str(target.relative_to(run.path)))
    return target


def _free_name(path: Path) -> Path:
    count = 1
    while path.exists():
        count += 1
        path = path.with_name(f"{path.name.partition('~')[0]}~{count}")
    return path


def damage(folder: Path, of_run: bool = False, progress: Progress = no_progress) -> str | None:
    """Return what is wrong with a committed checkpoint (a missing, cut or changed file); None if it is whole.

    Compares every byte with the marker; loads nothing.

    of_run: it is in its run's folder, and its name must hold its step; a copy elsewhere may have any name.
    Raises `UserError` if another version of this repository wrote it.
    """
    reason, files = quick_damage(folder, of_run)
    return reason or next(iter(changed_files(folder, files, progress).values()), None)


def quick_damage(
    folder: Path, of_run: bool = False, is_part: bool = False
) -> tuple[str | None, dict[str, dict]]:
    """Check marker and file sizes alone; returns what is wrong or None, and the files whose bytes are not compared.

    is_part: a node's own disk holds it, so that others may be elsewhere.
    """
    try:
        marker = read_marker(folder)
    except OSError as error:
        return f"{MARKER} cannot be read: {error.strerror}", {}
    except MarkerDamage as error:
        return str(error), {}
    # A run chooses by the names of its folders: it would take a renamed one for a step which that one does not hold.
    if of_run and step_in_name(folder) != marker.get("step"):
        return f"{MARKER} is that of step {marker.get('step')}", {}
    files = marker["files"]
    if is_part:
        files = {name: entry for name, entry in files.items() if (folder / name).exists()}
    return _wrong_sizes(folder, files), files


def changed_files(folder: Path, files: dict[str, dict], progress: Progress = no_progress) -> dict[str, str]:
    """Return {name: what is wrong} of the files that do not hold the bytes that were committed."""
    verdicts = file_verdicts(folder, files, progress)
    return {name: reason for name, reason in verdicts.items() if reason}


def file_verdicts(
    folder: Path, files: dict[str, dict], progress: Progress = no_progress
) -> dict[str, str | None]:
    """Return {name: what is wrong with it, or None}, several files read at once."""

    def verdict(name: str) -> str | None:
        try:
            reason = _wrong_size(folder, name, files[name])  # without reading a byte
            if reason or file_entry(folder / name, progress) == files[name]:
                return reason
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        return f"{name} has changed since it was committed"

    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(files, threads.map(verdict, files), strict=True))


def share_of(files: dict[str, dict], rank: int, ranks: int) -> dict[str, dict]:
    """Return the files that one of `ranks` compares."""
    # The largest file first, each to the rank with the fewest bytes: the start waits for the slowest rank.
    loads, share = [(0, each) for each in range(ranks)], {}
    for name in _largest_first(files):
        load, least = loads[0]
        heapreplace(loads, (load + files[name]["bytes"], least))
        if least == rank:
            share[name] = files[name]
    return share


def _largest_first(files: dict[str, dict]) -> Iterable[str]:
    return sorted(files, key=lambda name: (-files[name]["bytes"], name))


def _wrong_sizes(folder: Path, files: dict[str, dict]) -> str | None:
    reasons = (_wrong_size(folder, name, entry) for name, entry in files.items())
    return next((reason for reason in reasons if reason), None)


def has_size(folder: Path, name: str, entry: dict) -> bool:
    """Say if a file of a checkpoint is there in its committed size."""
    return _wrong_size(folder, name, entry) is None


def _wrong_size(folder: Path, name: str, entry: dict) -> str | None:
    path = folder / name
    return size_fault(name, path.stat().st_size if path.is_file() else None, entry)


def size_fault(name: str, size: int | None, entry: dict) -> str | None:
    """Return what is wrong with the size of a file, or None. size: in bytes; None if it is not there."""
    if size is None:
        return f"{name} is missing"
    return None if size == entry["bytes"] else f"{name} holds {size} bytes, {entry['bytes']} were committed"


def catalogue(run: RunFolder) -> list[dict]:
    """List every checkpoint of a run with its state, newest step first, from markers and sizes alone.

    {"folder", "step", "state", "reason", "bytes", "age_seconds", "saved", "ranks", "zero_stage", "tokens", "loss",
    "eval_loss"}; state: committed, damaged, other version, uncommitted, weights only, set aside.
    """
    is_part = run.holds_parts()
    entries = [_checkpoint(folder, is_part) for folder in checkpoint_folders(run)]
    entries += [_entry(folder, step_in_name(folder), "weights only") for folder in weights_folders(run)]
    entries.sort(key=lambda entry: (-entry["step"], entry["folder"]))
    return entries + [_set_aside(folder, run) for folder in sorted(run.aside.glob("*-*"))]


def _checkpoint(folder: Path, is_part: bool) -> dict:
    step = step_in_name(folder)
    if not (folder / MARKER).exists():
        return _entry(folder, step, "uncommitted")
    try:
        reason, _ = quick_damage(folder, of_run=True, is_part=is_part)
    # Another version's checkpoint is not damaged, so that prune must not remove it.
    except UserError as error:
        return _entry(folder, step, "other version", str(error))
    return _entry(folder, step, "damaged" if reason else "committed", reason)


def _set_aside(folder: Path, run: RunFolder) -> dict:
    step = int(folder.name.partition(".")[0].rpartition("-")[2])  # checkpoint-<step>.<when>
    return {**_entry(folder, step, "set aside"), "folder": str(folder.relative_to(run.path))}


def _entry(folder: Path, step: int, state: str, reason: str | None = None) -> dict:
    num_bytes = sum(path.stat().st_size for path in files_in(folder))
    marker, changed = marker_or_nothing(folder), folder.stat().st_mtime
    return entry_of(folder.name, step, state, reason, marker, num_bytes, changed)


def entry_of(
    name: str,
    step: int,
    state: str,
    reason: str | None,
    marker: dict,
    num_bytes: int,
    changed: float | None = None,
) -> dict:
    """Describe a checkpoint of a catalogue.

    marker: {} if there is none that can be read; then its time is that of its last change, in UNIX seconds.
    """
    metrics, saved = marker.get("metrics", {}), marker.get("saved")
    when = unix_seconds(saved) if saved else changed
    return {
        "folder": name,
        "step": step,
        "state": state,
        "reason": reason,
        "bytes": num_bytes,
        "age_seconds": None if when is None else max(0, int(time.time() - when)),
        **{key: marker.get(key) for key in _FROM_MARKER},
        "loss": metrics.get("loss"),
        "eval_loss": metrics.get("eval_loss"),
    }


def files_in(folder: Path) -> list[Path]:
    """Return every file below `folder`, by name."""
    return sorted(path for path in folder.rglob("*") if path.is_file())
