"""Is a committed checkpoint whole? Its marker, the size of each file, then every byte: nothing is loaded before."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pretraining.checkpoints.files import THREADS, file_entry, no_progress
from pretraining.checkpoints.folders import step_in_name
from pretraining.checkpoints.marker import MARKER, MarkerDamage, read_marker

Progress = Callable[[int], None]


def damage(folder: Path, of_run: bool = False, progress: Progress = no_progress) -> str | None:
    """What is wrong with a committed checkpoint (a missing, cut or changed file), or None where it is whole.

    of_run: it lies in its run's folder, where its name must be its step's; a copy may be called anything.
    Raises `UserError` where another version of this repository wrote it.
    """
    reason, files = quick_damage(folder, of_run)
    return reason or next(iter(changed_files(folder, files, progress).values()), None)


def quick_damage(folder: Path, of_run: bool = False) -> tuple[str | None, dict[str, dict]]:
    """(what the marker and the sizes of the files tell, the files whose bytes are still to be compared)."""
    try:
        marker = read_marker(folder)
    except OSError as error:
        return f"{MARKER} cannot be read: {error.strerror}", {}
    except MarkerDamage as error:
        return str(error), {}
    if of_run and step_in_name(folder) != marker["step"]:
        return f"{MARKER} is that of step {marker['step']}", {}
    return _wrong_sizes(folder, marker["files"]), marker["files"]


def changed_files(folder: Path, files: dict[str, dict], progress: Progress = no_progress) -> dict[str, str]:
    """{name: what is wrong} of the files that do not hold the bytes that were committed."""
    verdicts = file_verdicts(folder, files, progress)
    return {name: reason for name, reason in verdicts.items() if reason}


def file_verdicts(
    folder: Path, files: dict[str, dict], progress: Progress = no_progress
) -> dict[str, str | None]:
    """{name: what is wrong with it, or None}, the files read side by side."""

    def verdict(name: str) -> str | None:
        try:
            reason = _wrong_size(folder, name, files[name])
            if reason or file_entry(folder / name, progress) == files[name]:
                return reason
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        return f"{name} has changed since it was committed"

    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(files, threads.map(verdict, files), strict=True))


def share_of(files: dict[str, dict], rank: int, ranks: int) -> dict[str, dict]:
    """The files that one of `ranks` compares: the largest first, each to the rank with the fewest bytes so far."""
    loads, shares = [0] * ranks, [{} for _ in range(ranks)]
    for name in _largest_first(files):
        least = loads.index(min(loads))
        loads[least] += files[name]["bytes"]
        shares[least][name] = files[name]
    return shares[rank]


def _largest_first(files: dict[str, dict]) -> Iterable[str]:
    return sorted(files, key=lambda name: (-files[name]["bytes"], name))


def _wrong_sizes(folder: Path, files: dict[str, dict]) -> str | None:
    reasons = (_wrong_size(folder, name, entry) for name, entry in files.items())
    return next((reason for reason in reasons if reason), None)


def _wrong_size(folder: Path, name: str, entry: dict) -> str | None:
    path = folder / name
    if not path.is_file():
        return f"{name} is missing"
    if (size := path.stat().st_size) != entry["bytes"]:
        return f"{name} holds {size} bytes, {entry['bytes']} were committed"
    return None
