"""Look at the checkpoints of a place, which is a run folder or a store: list them, judge them, compare their bytes.

The health of a checkpoint has four words. `committed`: its marker holds, and every file has its size. `damaged`: one of
these is not so. `other version`: this version cannot judge it. `uncommitted`: it has no marker, and does not count.
"""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from heapq import heapreplace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import xxhash

from pretraining.checkpoints.fetch import Ranges
from pretraining.checkpoints.folders import (
    checkpoint_folders,
    files_in,
    step_in,
    step_in_name,
    weights_folders,
)
from pretraining.checkpoints.format import (
    MARKER,
    THREADS,
    MarkerDamage,
    digest_entry,
    file_entry,
    marker_or_nothing,
    no_progress,
    parse_marker,
)
from pretraining.checkpoints.remote import RemoteRun
from pretraining.errors import UserError
from pretraining.outside.files import read_bytes
from pretraining.runtime.run_folder import RunFolder, unix_seconds

COMMITTED, DAMAGED, OTHER_VERSION, UNCOMMITTED = "committed", "damaged", "other version", "uncommitted"

Files = Mapping[str, dict]
"""{name: {"bytes", "checksum"}}, as a marker has them."""
Verdicts = dict[str, str | None]
"""{name: what is wrong with the file, or None}."""
Progress = Callable[[int], None]
"""Called with the number of bytes of each read."""


class Health(NamedTuple):
    """What marker and sizes show of a checkpoint, without a byte of its files."""

    word: str
    reason: str | None = None
    marker: Mapping = MappingProxyType({})
    """{} if it cannot be read."""
    files: Files = MappingProxyType({})
    """What the place has, or should have, of the marker's files."""
    num_bytes: int = 0


class DiskPlace:
    """A run folder, or another folder with copies of checkpoints."""

    def __init__(self, path: Path):
        self.path = path

    def where(self, name: str) -> str:
        """Return the path of a checkpoint."""
        return str(self.path / name)

    def marker(self, name: str) -> bytes | None:
        """Read a checkpoint's marker; None if it has none."""
        path = self.path / name / MARKER
        return read_bytes(path) if path.exists() else None

    def sizes(self, name: str) -> dict[str, int]:
        """Return {file: bytes} of a checkpoint."""
        try:
            with os.scandir(self.path / name) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def verdicts(self, name: str, files: Files, progress: Progress = no_progress) -> Verdicts:
        """Compare every byte of these files of a checkpoint with what was committed, several files at once."""
        folder = self.path / name

        def verdict(file: str) -> str | None:
            path = folder / file
            try:
                size = path.stat().st_size if path.is_file() else None
                # the size first, without reading a byte
                reason = size_fault(file, size, files[file])
                if reason or file_entry(path, progress) == files[file]:
                    return reason
            except OSError as error:
                return f"{file} cannot be read: {error.strerror}"
            return f"{file} has changed since it was committed"

        with ThreadPoolExecutor(THREADS) as threads:
            return dict(zip(files, threads.map(verdict, files), strict=True))


class StorePlace:
    """The same for the place of a run in a store; nothing of what is read is kept."""

    def __init__(self, remote: RemoteRun):
        self.remote = remote

    def where(self, name: str) -> str:
        return self.remote.where(name)

    def names(self) -> list[str]:
        """List the checkpoints, committed or not, newest step first."""
        found = [name for name in self.remote.folders() if step_in(name) >= 0]
        return sorted(found, key=step_in, reverse=True)

    def marker(self, name: str) -> bytes | None:
        return self.remote.read_if_there(f"{name}/{MARKER}")

    def sizes(self, name: str) -> dict[str, int]:
        return self.remote.sizes(name) or {}

    def verdicts(self, name: str, files: Files, progress: Progress = no_progress) -> Verdicts:
        sizes = self.sizes(name)

        def verdict(file: str) -> str | None:
            # a store would be asked again and again for bytes that it does not have
            if reason := size_fault(file, sizes.get(file), files[file]):
                return reason
            digest = xxhash.xxh128()
            for content in ranges.in_order(f"{name}/{file}", files[file]["bytes"]):
                digest.update(content)
                progress(len(content))
            same = digest_entry(files[file]["bytes"], digest) == files[file]
            return None if same else f"{file} has changed since it was committed"

        with Ranges(self.remote) as ranges, ThreadPoolExecutor(THREADS) as threads:
            return dict(zip(files, threads.map(verdict, files), strict=True))


def health(place: "DiskPlace | StorePlace", name: str, of_run: bool = True, is_part: bool = False) -> Health:
    """Judge a checkpoint by its marker and the sizes of its files.

    of_run: its name must hold its step; a copy elsewhere may have any name. is_part: a node's own disk holds it,
    so that some of its files may be elsewhere.
    """
    sizes = place.sizes(name)
    num_bytes = sum(sizes.values())
    try:
        if (content := place.marker(name)) is None:
            return Health(UNCOMMITTED, num_bytes=num_bytes)
    except OSError as error:
        return Health(DAMAGED, f"{MARKER} cannot be read: {error.strerror}", num_bytes=num_bytes)
    try:
        marker = parse_marker(content, place.where(name))
    except MarkerDamage as error:
        return Health(DAMAGED, str(error), num_bytes=num_bytes)
    except UserError as error:
        return Health(OTHER_VERSION, str(error), num_bytes=num_bytes)
    if of_run and (fault := step_fault(name, marker)):
        return Health(DAMAGED, fault, marker, num_bytes=num_bytes)
    files = {each: entry for each, entry in marker["files"].items() if each in sizes or not is_part}
    faults = (size_fault(each, sizes.get(each), entry) for each, entry in files.items())
    reason = next(filter(None, faults), None)
    return Health(DAMAGED if reason else COMMITTED, reason, marker, files, num_bytes)


def size_fault(name: str, size: int | None, entry: dict) -> str | None:
    """Return what is wrong with the size of a file, or None. size: in bytes; None if it is not there."""
    if size is None:
        return f"{name} is missing"
    return None if size == entry["bytes"] else f"{name} holds {size} bytes, {entry['bytes']} were committed"


def step_fault(name: str, marker: dict) -> str | None:
    """Return what is wrong if a checkpoint of a run has the name of another step."""
    # A run chooses by the names of its folders: it would take a renamed one for a step which that one does not hold.
    return None if step_in(name) == marker.get("step") else f"{MARKER} is that of step {marker.get('step')}"


def damage(folder: Path, of_run: bool = False) -> str | None:
    """Return what is wrong with a committed checkpoint (a missing, cut or changed file); None if it is whole.

    Compares every byte with the marker; loads nothing. of_run: as in `health`.
    Raises `UserError` if another version of this repository wrote it.
    """
    found = health(DiskPlace(folder.parent), folder.name, of_run)
    if found.word == OTHER_VERSION:
        raise UserError(found.reason)
    if found.word == UNCOMMITTED:
        return f"{MARKER} is missing"
    return found.reason or next(iter(changed_files(folder, found.files).values()), None)


def changed_files(folder: Path, files: Files) -> dict[str, str]:
    """Return {name: what is wrong} of the files that do not hold the bytes that were committed."""
    verdicts = DiskPlace(folder.parent).verdicts(folder.name, files)
    return {name: reason for name, reason in verdicts.items() if reason}


def share_of(files: Files, rank: int, ranks: int) -> Files:
    """Return the files that one of `ranks` compares."""
    # The largest file first, each to the rank with the fewest bytes: the start waits for the slowest rank.
    loads, share = [(0, each) for each in range(ranks)], {}
    for name in sorted(files, key=lambda name: (-files[name]["bytes"], name)):
        load, least = loads[0]
        heapreplace(loads, (load + files[name]["bytes"], least))
        if least == rank:
            share[name] = files[name]
    return share


def catalogue(run: RunFolder) -> list[dict]:
    """List every checkpoint of a run as `entry_of` describes it, newest step first.

    Besides the words of health there are two more states: weights only, set aside.
    """
    place, is_part = DiskPlace(run.path), run.holds_parts()

    def entry(folder: Path, step: int, state: str | None = None) -> dict:
        if state is None:
            found = health(place, folder.name, is_part=is_part)
        else:
            num_bytes = sum(path.stat().st_size for path in files_in(folder))
            found = Health(state, None, marker_or_nothing(folder), num_bytes=num_bytes)
        return entry_of(str(folder.relative_to(run.path)), step, found, folder.stat().st_mtime)

    entries = [entry(folder, step_in_name(folder)) for folder in checkpoint_folders(run)]
    entries += [entry(folder, step_in_name(folder), "weights only") for folder in weights_folders(run)]
    entries.sort(key=lambda each: (-each["step"], each["folder"]))
    for folder in sorted(run.aside.glob("*-*")):  # checkpoint-<step>.<when>
        entries.append(entry(folder, int(folder.name.partition(".")[0].rpartition("-")[2]), "set aside"))
    return entries


def entry_of(name: str, step: int, found: Health, changed: float | None = None) -> dict:
    """Describe a checkpoint of a catalogue.

    Returns {"folder", "step", "state", "reason", "bytes", "age_seconds", "saved", "ranks", "zero_stage", "tokens",
    "loss", "eval_loss"}. changed: UNIX seconds of its last change, for one whose marker does not say when it was saved.
    """
    marker = found.marker
    metrics, saved = marker.get("metrics", {}), marker.get("saved")
    when = unix_seconds(saved) if saved else changed
    return {
        "folder": name,
        "step": step,
        "state": found.word,
        "reason": found.reason,
        "bytes": found.num_bytes,
        "age_seconds": None if when is None else max(0, int(time.time() - when)),
        **{key: marker.get(key) for key in ("saved", "ranks", "zero_stage", "tokens")},
        "loss": metrics.get("loss"),
        "eval_loss": metrics.get("eval_loss"),
    }
