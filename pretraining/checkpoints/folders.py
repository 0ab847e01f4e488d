"""List the checkpoints of a run folder, judge them, and remove or set them aside (which are kept: retention.py).

The health of a checkpoint has four words. `committed`: its marker holds, and every file has its size. `damaged`: one of
these is not so. `other version`: this version cannot judge it. `uncommitted`: it has no marker, and does not count.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from heapq import heapreplace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

from pretraining.checkpoints.format import (
    MARKER,
    THREADS,
    MarkerDamage,
    marker_or_nothing,
    parse_marker,
    passed_on,
    pieces_of,
    read_marker,
)
from pretraining.errors import UserError
from pretraining.outside.files import read_bytes
from pretraining.runtime.durable_files import flush_folder
from pretraining.runtime.heartbeat import work_done
from pretraining.runtime.journal import NOTHING_HEALED, Journal
from pretraining.runtime.process_group import together
from pretraining.runtime.run_folder import RunFolder, read_events, step_in_name, unix_seconds

COMMITTED, DAMAGED, OTHER_VERSION, UNCOMMITTED = "committed", "damaged", "other version", "uncommitted"
WEIGHTS_ONLY = "weights only"
ON_ITS_WAY = ".on_its_way"
"""File of a checkpoint whose others are being brought here; the marker takes its place."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_ASIDE = re.compile(r"(checkpoint|weights)-\d+\.\d{8}T\d{6}Z")

Files = Mapping[str, dict]  # {name: {"bytes", "checksum"}}, as a marker has them
Progress = Callable[[int], object]  # called with the number of bytes of each read
Pieces = Callable[[str, int], Iterable[bytes | memoryview]]
"""Reads a file below a place, of so many bytes, from its beginning; a piece is valid until the next."""


def step_in(name: str) -> int:
    """Return the optimizer step in a folder's name; -1 if it is no checkpoint's name."""
    found = _CHECKPOINT.fullmatch(name)
    return int(found[1]) if found else -1


def step_of(checkpoint: Path) -> int:
    """Return the optimizer steps of a checkpoint by its marker, whatever its folder is called."""
    return read_marker(checkpoint)["step"]


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, its marker first: if the process is killed in between, the rest does not count."""
    if folder.is_symlink() or folder.is_file():
        # what it names is not in this folder, and stays
        folder.unlink()
        flush_folder(folder.parent)
        return
    (folder / MARKER).unlink(missing_ok=True)
    flush_folder(folder)  # the disk, too, must lose the marker before it loses the first file
    shutil.rmtree(folder)


def refuse_foreign_files(run: RunFolder) -> None:
    """Raise `UserError` on every rank if a start in this folder would write over files of somebody else. A collective.

    They are somebody else's if no start has left its recipe or an event here. A checkpoint that is not whole is ours if
    it was on its way from a store or another disk.
    """

    def look() -> None:
        for folder in (run.model, run.export, run.extensions):
            if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
                raise UserError(f"{folder}: is a link or a file where the run makes a folder; move it away")
        if run.recipe.exists() or read_events(run.events) or read_events(run.node_events):
            return
        files = [run.plan, run.environment, run.mixture, run.metrics, run.samples, run.report]
        found = [path for path in (*files, run.model, run.export, run.extensions) if path.exists()]
        found += [*run.saved("weights"), *run.path.glob("weights-*.partial")]
        found += [*filter(_is_foreign, run.saved())]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            what = f"{found[0].name}{more} would be written over, and no run has left its recipe.json here"
            raise UserError(f"{run.path}: {what}; choose another --output_dir, or move what is here away")

    together(lambda: look() if run.disks.is_first else None)


def _is_foreign(checkpoint: Path) -> bool:
    """Return whether it is none of ours, as that of a plain Trainer."""
    names = {path.name for path in checkpoint.iterdir()} if checkpoint.is_dir() else set()
    return bool(names) and not names & {MARKER, ON_ITS_WAY}


def remove_uncommitted(run: RunFolder) -> None:
    """Remove what a killed save has left, so that its files cannot mix with those of the next save."""
    for folder in run.saved():
        if not (folder / MARKER).exists():
            if folder.is_symlink() or folder.is_file():
                what = "a link or a file, with no committed checkpoint behind it"
                raise UserError(f"{folder}: {what}; move it away")
            shutil.rmtree(folder)  # before the event, for which a full disk needs this room
            run.add_event("uncommitted_checkpoint_removed", checkpoint=folder.name)
    for partial in run.path.glob("weights-*.partial"):  # a demotion that was killed
        shutil.rmtree(partial)


def set_aside_after(run: RunFolder, step: int, spared: Path | None = None) -> list[Path]:
    """Move what was saved after `step` to `aside/`: the run continues from `step` and will save those steps again.

    These checkpoints are damaged, or belong to a part of the run that is given up; none is deleted. spared: the
    checkpoint to continue from; it stays even if its folder has the name of a later step.
    """
    folders = run.saved() + run.saved("weights")
    later = [each for each in folders if step_in_name(each) > step]
    return [move_aside(run, each) for each in later if spared is None or not each.samefile(spared)]


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


class Place(Protocol):
    """Where checkpoints are: a run folder or another folder (`DiskPlace`), or a store (`RemoteRun`)."""

    def where(self, name: str, /) -> str: ...
    def checkpoints(self) -> list[str]: ...  # committed or not, newest step first
    def marker(self, name: str, /) -> bytes | None: ...
    def sizes(self, name: str, /) -> dict[str, int] | None: ...  # {file: bytes}
    def opened(self) -> AbstractContextManager[Pieces]: ...

    def newest(
        self, above: int, below: int = sys.maxsize, journal: Journal = NOTHING_HEALED
    ) -> tuple[str, bytes, str | None] | None:
        """Find the newest marker with a step in between that `journal` leaves: (name, bytes, what is wrong or None)."""
        for name in self.checkpoints():
            if not above < step_in(name) < below:
                continue
            try:
                # each look at a marker of a store is a request
                if (content := self.marker(name)) is None:
                    continue
            except OSError:
                content = b""
            try:
                marker = parse_marker(content, self.where(name))
            except MarkerDamage as error:  # it does not say what a rollback has left behind, and is reported
                return name, content, str(error)
            if not journal.overtakes(step_in(name), marker.get("rollbacks", 0)):
                return name, content, step_fault(name, marker)
        return None

    def verdicts(self, name: str, files: Files, progress: Progress) -> dict[str, str | None]:
        """Compare every byte of these files with what was committed, several at once: {file: a fault, or None}."""
        sizes = self.sizes(name) or {}

        def verdict(file: str) -> str | None:
            # without reading a byte: a store would be asked again and again for those that it does not have
            if reason := size_fault(file, sizes.get(file), files[file]):
                return reason
            try:
                found = passed_on(pieces(f"{name}/{file}", files[file]["bytes"]), progress=progress)
            except OSError as error:
                return f"{file} cannot be read: {error.strerror}"
            return None if found == files[file] else f"{file} has changed since it was committed"

        with self.opened() as pieces, ThreadPoolExecutor(THREADS) as threads:
            return dict(zip(files, threads.map(verdict, files), strict=True))


class DiskPlace(Place):
    """A folder of this machine."""

    def __init__(self, path: Path):
        self.path = path

    def where(self, name: str) -> str:
        return str(self.path / name)

    def checkpoints(self) -> list[str]:
        return [folder.name for folder in RunFolder(self.path).saved()]

    def marker(self, name: str) -> bytes | None:
        path = self.path / name / MARKER
        return read_bytes(path) if path.exists() else None

    def sizes(self, name: str) -> dict[str, int]:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path / name) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        return {}

    def opened(self) -> AbstractContextManager[Pieces]:
        return nullcontext(lambda where, size: pieces_of(self.path / where))


class Health(NamedTuple):
    """What marker and sizes show of a checkpoint, without a byte of its files."""

    word: str
    reason: str | None = None
    marker: Mapping = MappingProxyType({})  # {} if it cannot be read
    files: Files = MappingProxyType({})  # what the place has, or should have, of the marker's files
    num_bytes: int = 0


def health(place: Place, name: str, of_run: bool = True, is_part: bool = False) -> Health:
    """Judge a checkpoint by marker and sizes. of_run: its name must hold its step. is_part: of a node's own disk."""
    sizes = place.sizes(name) or {}
    num_bytes = sum(sizes.values())
    try:
        if (content := place.marker(name)) is None:
            return Health(UNCOMMITTED, num_bytes=num_bytes)
        marker = parse_marker(content, place.where(name))
    except OSError as error:
        return Health(DAMAGED, f"{MARKER} cannot be read: {error.strerror}", num_bytes=num_bytes)
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


def damage(folder: Path) -> str | None:
    """Compare every byte of a checkpoint; returns what is wrong, or None. `UserError` if another version wrote it."""
    found = health(DiskPlace(folder.parent), folder.name, of_run=False)
    if found.word == OTHER_VERSION:
        raise UserError(found.reason)
    if found.word == UNCOMMITTED:
        return f"{MARKER} is missing"
    return found.reason or next(iter(changed_files(folder, found.files).values()), None)


def changed_files(folder: Path, files: Files) -> dict[str, str]:
    """Return {name: what is wrong} of the files that do not hold the bytes that were committed."""
    verdicts = DiskPlace(folder.parent).verdicts(folder.name, files, work_done)
    return {name: reason for name, reason in verdicts.items() if reason}


def rank_files(files: Files, rank: int, ranks: int) -> Files:
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
    """List every checkpoint of a run by `entry_of`, newest step first; two more states: weights only, set aside."""
    place, is_part = DiskPlace(run.path), run.holds_parts()

    def entry(folder: Path, state: str | None = None) -> dict:
        if state is None:
            found = health(place, folder.name, is_part=is_part)
        else:
            num_bytes = sum(path.stat().st_size for path in files_in(folder))
            found = Health(state, None, marker_or_nothing(folder), num_bytes=num_bytes)
        # one that was set aside is checkpoint-<step>.<when>
        step = step_in_name(folder.with_name(folder.name.partition(".")[0]))
        return entry_of(str(folder.relative_to(run.path)), step, found, folder.stat().st_mtime)

    entries = [entry(each) for each in run.saved()]
    entries += [entry(each, WEIGHTS_ONLY) for each in run.saved("weights")]
    entries.sort(key=lambda each: (-each["step"], each["folder"]))
    aside = sorted(each for each in run.aside.glob("*-*") if _ASIDE.match(each.name))
    return entries + [entry(each, "set aside") for each in aside]


def entry_of(name: str, step: int, found: Health, changed: float | None = None) -> dict:
    """Describe a checkpoint of a catalogue. changed: UNIX seconds, for a marker that does not say when it was saved."""
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
        **{key: metrics.get(key) for key in ("loss", "eval_loss")},
    }
