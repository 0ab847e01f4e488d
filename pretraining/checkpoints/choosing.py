"""Choose the checkpoint to continue from, wherever it is, and bring its files to where the ranks need them.

A checkpoint may be in two places: on the disks of the ranks, which a shared disk makes one, and in the store. All ranks
together verify the newest; if it is damaged and cannot be mended, it is passed over for the next.

Nodes with run folders of their own hold the files of their own ranks: such a checkpoint is complete if the disks
together hold all its files, or if the store holds its marker. Files that a disk holds are verified and stay; the others
come from the store, or from the disk of another node. A node gets what its ranks need: their own files if the layout is
that of the save, else all of them. Ranks decide together: what one of them does alone is asked of it by `from_rank_0`
or `disks.each`.
"""

import socket
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pretraining.checkpoints.folders import (
    ON_ITS_WAY,
    OTHER_VERSION,
    UNCOMMITTED,
    DiskPlace,
    Files,
    changed_files,
    health,
    move_aside,
    rank_files,
    size_fault,
    step_in,
    step_of,
)
from pretraining.checkpoints.format import (
    MARKER,
    MarkerDamage,
    file_entry,
    is_of_rank,
    marker_or_nothing,
    parse_marker,
    place_marker,
    read_marker,
    receipt_name,
)
from pretraining.checkpoints.remote import RUN_FILES, RemoteRun, fetch_share, fetching_bar
from pretraining.checkpoints.shard_files import STATE_FILE, rank_file
from pretraining.data.checksums import checksum_of
from pretraining.errors import UserError
from pretraining.outside.addresses import is_remote
from pretraining.outside.files import read_json_value
from pretraining.planning.quantities import several
from pretraining.runtime.durable_files import replacing, rows_of, sync_to_disk
from pretraining.runtime.heartbeat import long_work, work_done
from pretraining.runtime.journal import NOTHING_HEALED, Journal
from pretraining.runtime.process_group import from_rank, from_rank_0, gather_from_ranks, own_rank, together
from pretraining.runtime.run_folder import RunFolder

_PIECE_BYTES = 16 << 20

Check = Callable[[str, dict, bytes], object]
"""Raises `UserError` for a checkpoint that this start cannot go on from: address, marker, and changes.json there."""


class Chosen(NamedTuple):
    """The checkpoint to continue from, of which every disk holds what its ranks need."""

    folder: Path | None = None  # None begins the run
    source: RemoteRun | None = None  # the store with its other files; None: none has any, or the disk has all


class Candidate(NamedTuple):
    """A checkpoint to continue from, if its files can be brought together."""

    name: str
    marker: bytes
    on_disks: bool = False  # whether the disks had this marker before the start
    in_store: bool = False
    fault: str | None = None  # what its marker alone shows to be wrong


def choose_checkpoint(
    run: RunFolder,
    resume: str,
    upload: str | None = None,
    layout: dict | None = None,
    check: Check = lambda *_: None,
    in_parts: bool = False,
) -> Chosen:
    """Choose the checkpoint that `--resume auto|never|PATH|ADDRESS` means, the same on every rank.

    auto: the newest committed one that is whole and that no rollback has left behind. A damaged file is fetched again
    if the store has that checkpoint. What cannot be mended is passed over with an event and a line; if nothing else is
    there, the run does not begin anew by itself.

    upload: the recipe's `checkpoints.upload`. layout: that of this start (`RunPlan.layout`), by which a node knows the
    files that it needs if it has a run folder of its own; None: it gets all. check: asked before anything of a
    checkpoint is fetched. in_parts: whether this disk may hold parts of checkpoints only, also if it is the last one
    that is left.

    Raises `UserError` if the store cannot be used and nothing is here; if no checkpoint of several is whole; for a PATH
    or ADDRESS without a whole checkpoint or with later ones in the store, with which those of this start would mix; and
    for another version's checkpoint.
    """
    remote = None if upload is None else RemoteRun(upload, run.path.name)
    chooser = _Chooser(run, remote, layout, check, in_parts or not run.disks.shared)
    below, passed_over = sys.maxsize, []
    while resume == "auto" and (candidates := chooser.newest(below)):
        for candidate in candidates:
            reason = candidate.fault or chooser.bring(candidate)
            if reason is None:
                needs_store = candidate.in_store and chooser.in_parts
                return Chosen(run.path / candidate.name, remote if needs_store else None)
            from_rank_0(partial(chooser.pass_over, candidate, reason))
        below = step_in(candidates[0].name)
        passed_over.append(below)
    if passed_over:
        steps = ", ".join(map(str, passed_over))
        remedy = "--resume PATH or ADDRESS goes on from a copy, --resume never keeps this run aside and begins anew"
        raise UserError(f"{run.path}: no checkpoint is whole, of step {steps}; {remedy}")
    if resume == "auto":
        return Chosen()

    def refuse_newer() -> None:
        # The run will save steps which the store may already hold from another course of the run.
        step = 0  # also without a readable marker, which is reported later
        if is_remote(resume):
            step = step_in(RemoteRun.of_checkpoint(resume)[1])
        elif resume != "never":
            with suppress(OSError, ValueError):
                step = step_of(Path(resume))
        # A later start passes over what a rollback to this step has left behind.
        journal = NOTHING_HEALED if resume == "never" else Journal.read(run.journal)
        if newer := remote.at_first_contact().newest(step, journal=journal):
            what = f"{remote.where(newer[0])} is newer, and a later start would go on from there"
            remedy = "give this run its own --output_dir or another checkpoints.upload"
            raise UserError(f"--resume {resume}: {what}; {remedy}, or remove what lies there")

    if remote is not None:
        from_rank_0(refuse_newer)
    if resume == "never":
        return Chosen()
    return chooser.at_address(resume) if is_remote(resume) else chooser.at_path(resume)


@dataclass(frozen=True)
class _Chooser:
    """What one search knows, and how it looks, compares and brings."""

    run: RunFolder
    remote: RemoteRun | None
    layout: dict | None
    check: Check
    in_parts: bool  # whether a disk may hold a part of a checkpoint

    def newest(self, below: int) -> list[Candidate]:
        """Return the newest checkpoint below a step: two candidates if disks and store hold another one each."""
        journal = from_rank_0(lambda: Journal.read(self.run.journal))

        def newest_here() -> tuple[int, str | None, str]:
            """Return (step, what is wrong with the marker, its digest) of this disk's newest one; -1: none."""
            if (found := DiskPlace(self.run.path).newest(-1, below, journal)) is None:
                return -1, None, ""
            name, content, fault = found
            return step_in(name), fault, checksum_of(content)

        found = self.run.disks.each(newest_here)
        newest, candidates, content = max(step for step, *_ in found.values()), [], None
        name = self.run.checkpoint(newest).name
        if newest >= 0:
            # Disks differ at one step only if a node has missed an earlier start.
            count = Counter(each for each in found.values() if each[0] == newest)
            common = max(count, key=lambda each: (each[1] is None, count[each]))
            owner = min(first for first, each in found.items() if each == common)
            content = self.run.disks.from_one(owner, lambda: _marker_here(self.run.path / name))
            candidates = [Candidate(name, content, on_disks=True, fault=common[1])]
        stored = self.remote and from_rank_0(lambda: self.newest_in_store(newest, below))
        if stored is None:
            return candidates
        name, there, fault = stored
        if step_in(name) > newest:
            return [Candidate(name, there, in_store=True, fault=fault)]
        if there == content:
            return [Candidate(name, there, on_disks=True, in_store=True, fault=fault)]
        candidates.append(Candidate(name, there, in_store=True, fault=fault))
        # A shared disk first: its copy is the newer one. One of several disks holds a part: the store first.
        return candidates[::-1] if self.in_parts else candidates

    def newest_in_store(self, here: int, below: int) -> tuple[str, bytes, str | None] | None:
        """Do what `Place.newest` does from step `here` on; if disks hold none (-1), an unreachable store raises."""
        try:
            remote = self.remote.at_first_contact()
            if below == sys.maxsize:  # only at the first call of a start
                remote.check_writable()
            return remote.newest(max(here - 1, -1), below, self.longest_journal(remote))
        except UserError as error:
            if here < 0:
                raise
            self.run.add_event("upload_unreachable", reason=str(error))
            line = f"checkpoints: {error}; going on from checkpoint-{here}, which is here"
            print(line, file=sys.stderr, flush=True)
            return None

    def longest_journal(self, remote: RemoteRun) -> Journal:
        """Return this machine's journal or the store's: the one with more rollbacks."""
        there = remote.read_if_there(self.run.journal.name) or b""
        journals = Journal.read(self.run.journal), Journal.of(rows_of(there.decode(errors="replace")))
        return max(journals, key=lambda journal: len(journal.rollbacks))

    def pass_over(self, candidate: Candidate, reason: str) -> None:
        name, where = candidate.name, self.run.path / candidate.name
        if candidate.in_store and (self.in_parts or not candidate.on_disks):
            where = self.remote.where(name)
            self.run.add_event("remote_checkpoint_passed_over", checkpoint=where, reason=reason)
            print(f"checkpoints: {where} is passed over: {reason}", file=sys.stderr, flush=True)
            return
        self.run.add_event("checkpoint_passed_over", checkpoint=name, reason=reason)
        if self.in_parts:
            print(f"{name} on the disks is passed over: {reason}", file=sys.stderr, flush=True)
        else:
            print(f"{where} is damaged ({reason}): passed over", flush=True)

    def at_path(self, resume: str) -> Chosen:
        """Return the checkpoint at a path; `UserError` unless each disk holds a whole one there."""
        folder = Path(resume)

        def look() -> str | None:
            if not folder.is_dir():
                return "no such folder; it takes auto, never or the path of a checkpoint"
            found = health(DiskPlace(folder.parent), folder.name, of_run=False)
            if found.word == OTHER_VERSION:
                raise UserError(found.reason)
            if found.word == UNCOMMITTED:
                return f"no committed checkpoint there ({MARKER} is missing)"
            return found.reason and f"the checkpoint is damaged: {found.reason}"

        hosts, faults = gather_from_ranks(socket.gethostname()), self.run.disks.each(look)
        if not any(faults.values()):
            for first, reasons in self.changed(folder, read_marker(folder)["files"]).items():
                faults[first] = f"the checkpoint is damaged: {min(reasons.values())}" if reasons else None
        for first, reason in faults.items():
            if reason is not None and not self.run.disks.shared:
                reason = f"on {hosts[first]}: {reason}; nodes without a shared disk each need all its files there, or "
                reason += "give its address in a store"
            if reason is not None:
                raise UserError(f"--resume {resume}: {reason}")
        return Chosen(folder)

    def at_address(self, resume: str) -> Chosen:
        """Return the checkpoint at an address, once it is here; `UserError` if it is not whole there."""
        remote, name = RemoteRun.of_checkpoint(resume)

        def read() -> bytes | None:
            content, folder = remote.marker(name), self.run.path / name
            another = not self.in_parts and (folder / MARKER).exists() and _marker_here(folder) != content
            if content is not None and another:
                what = "another checkpoint of that name is here"
                raise UserError(f"{folder}: {what}; move it, or choose another --output_dir")
            return content

        if (content := from_rank_0(read)) is None:
            wrong = f"no committed checkpoint there ({MARKER} is missing)"
        else:
            wrong = replace(self, remote=remote).bring(Candidate(name, content, in_store=True))
        if wrong is not None:
            raise UserError(f"--resume {resume}: {wrong}")
        return Chosen(self.run.path / name, remote if self.in_parts else None)

    def bring(self, candidate: Candidate) -> str | None:
        """Give each disk the files that its ranks need, and then the marker; returns what is wrong with it, or None."""
        run, remote, disks, name = self.run, self.remote, self.run.disks, candidate.name
        folder = run.path / name
        try:
            marker = parse_marker(candidate.marker, remote.where(name) if candidate.in_store else folder)
        except MarkerDamage as error:
            return str(error)
        files: Files = marker["files"]

        def check() -> None:
            accepted = remote.read_if_there(run.changes.name) or b"[]"
            self.check(remote.where(name), marker, accepted)

        is_new = candidate.in_store and not candidate.on_disks
        if is_new:
            from_rank_0(check)
            # of one that is here already, named by its address, the records of the run are here too, or another run's
            is_new = not any(disks.each(lambda: _marker_here(folder) == candidate.marker).values())
        # what is wrong on each disk: by sizes, without reading a byte; then by content, if each file may be somewhere
        faults = disks.each(lambda: self.look_here(candidate, files))
        if not candidate.in_store and (lost := _on_no_disk(files, faults)):
            where = f"{several(len(lost), 'file')} of it on no disk: {lost[0]}"
            return where if self.in_parts else next(iter(faults[0].values()))
        of_size = {each: files[each] for each in sorted(files.keys() - faults[disks.first_rank].keys())}
        changed = self.changed(folder, of_size)
        faults = {first: {**found, **changed[first]} for first, found in faults.items()}
        if not candidate.in_store and (lost := _on_no_disk(files, faults)):
            return next(reasons[lost[0]] for reasons in changed.values() if lost[0] in reasons)
        good = {first: files.keys() - found.keys() for first, found in faults.items()}
        # what each disk lacks of what its ranks need
        needed = {first: _needed(marker, ranks, self.layout) for first, ranks in disks.groups().items()}
        if not candidate.in_store and self.in_parts:
            more = _not_partitioned(folder, marker, good)  # nothing can be brought later
            needed = {first: names | more for first, names in needed.items()}
        missing = {first: names - good[first] for first, names in needed.items()}
        # A committed checkpoint on a shared disk lacks nothing, unless it is damaged.
        damaged_here = None
        if candidate.on_disks and not self.in_parts:
            damaged_here = next(iter(faults[0].values()), None)
        wrong = None
        if damaged_here:
            wrong = self.mend(name, files, missing, damaged_here)
        elif any(missing.values()) and candidate.in_store:
            wrong = self.fetch(name, files, missing)
        elif any(missing.values()):
            wrong = self.exchange(folder, files, good, missing)
        if wrong is not None:
            return wrong
        if is_new:
            from_rank_0(self.bring_run_files)

        def finish() -> bool:
            """Write the marker, if this one is not here yet; returns whether it was not."""
            if not candidate.in_store and self.in_parts:
                for path in folder.iterdir():  # what a power cut spoils, a store would give again
                    sync_to_disk(path)
            is_here = _marker_here(folder) == candidate.marker
            if not is_here:
                place_marker(folder, candidate.marker)
            # after the marker: a kill in between leaves a checkpoint that is known for ours
            (folder / ON_ITS_WAY).unlink(missing_ok=True)
            return not is_here

        added = any(disks.each(finish).values())
        if candidate.in_store and (added or any(missing.values())):
            details: dict = {"damaged_here": damaged_here} if damaged_here else {}
            hosts = gather_from_ranks(socket.gethostname())
            if self.in_parts:
                sizes = {first: [files[each]["bytes"] for each in names] for first, names in missing.items()}
                details["nodes"] = [
                    {"host": hosts[first], "files": len(each), "bytes": sum(each)}
                    for first, each in sorted(sizes.items())
                ]
            source = remote.where(name)
            from_rank_0(lambda: run.add_event("fetch", checkpoint=name, source=source, **details))
        return None

    def bring_run_files(self) -> None:
        """Write the files of the run that this machine lacks, and the journal with more rollbacks."""
        if (journal := self.longest_journal(self.remote)) != NOTHING_HEALED:
            journal.write(self.run.journal)
        # A file of the run that is here already is newer: a run on this machine wrote it.
        for name in RUN_FILES:
            path = self.run.path / name
            if not path.exists() and (content := self.remote.read_if_there(name)) is not None:
                with replacing(path, "wb") as file:
                    file.write(content)

    def look_here(self, candidate: Candidate, files: Files) -> dict[str, str]:
        """Make the folder here, without foreign files; returns {file: what is wrong}, by sizes alone."""
        folder = self.run.path / candidate.name
        # that of a disk which missed the step's validation may lack metrics, and names the same files
        if marker_or_nothing(folder).get("files") != files:
            if (folder / MARKER).exists():
                move_aside(self.run, folder)  # another one of that step
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ON_ITS_WAY).touch()
            for path in folder.iterdir():
                if path.name not in files and path.name != ON_ITS_WAY and path.is_file():
                    path.unlink()
        sizes = DiskPlace(self.run.path).sizes(candidate.name)
        faults = ((name, size_fault(name, sizes.get(name), entry)) for name, entry in files.items())
        return {name: fault for name, fault in faults if fault}

    def changed(self, folder: Path, files: Files) -> dict[int, dict[str, str]]:
        """Return {first rank of a disk: {file: what is wrong}}, read in shares. files: those compared on this disk."""
        # Because the ranks share the reading, verifying a large checkpoint takes only as long as loading it.
        with long_work():
            found = gather_from_ranks(changed_files(folder, rank_files(files, *self.run.disks.place)))
        return {
            first: {name: reason for rank in ranks for name, reason in found[rank].items()}
            for first, ranks in self.run.disks.groups().items()
        }

    def fetch(self, name: str, files: Files, missing: dict[int, set[str]]) -> str | None:
        """Fetch what each disk lacks from the store; returns what is damaged there, or None."""
        run, remote = self.run, self.remote
        of_disk = {each: files[each] for each in sorted(missing[run.disks.first_rank])}
        number, count = run.disks.place
        share = dict(list(of_disk.items())[number::count])
        with long_work(), fetching_bar(remote.where(name), run.path / name, of_disk):
            damaged = together(lambda: fetch_share(remote, name, run.path / name, share))
        return next(filter(None, gather_from_ranks(damaged)), None)

    def mend(self, name: str, files: Files, missing: dict[int, set[str]], reason: str) -> str | None:
        """Replace what is damaged on the shared disk by the store's files; returns `reason` if that is not possible."""
        # no long patience: there may be an older checkpoint to go on from
        remote = self.remote.at_first_contact()
        try:
            # nothing here is replaced by what is not whole there either
            sizes = from_rank_0(lambda: remote.sizes(name) or {})
            if any(size_fault(each, sizes.get(each), entry) for each, entry in files.items()):
                return reason
            if replace(self, remote=remote).fetch(name, files, missing) is not None:
                return reason
        except UserError:
            return reason
        if own_rank() == 0:
            line = f"{self.run.path / name} was damaged ({reason}): mended with the files of {remote.where(name)}"
            print(line, flush=True)
        return None

    def exchange(
        self, folder: Path, files: Files, good: dict[int, set[str]], missing: dict[int, set[str]]
    ) -> str | None:
        """Send files from disks that hold them to those that need them; returns what is wrong with them, or None."""

        def add(path: Path, start: int, piece: bytes) -> None:
            with path.open("r+b" if start else "wb") as file:
                file.seek(start)
                file.write(piece)
            work_done(len(piece))

        for name in sorted(set().union(*missing.values())):
            owner = min(each for each, names in good.items() if name in names)
            receives = self.run.disks.is_first and name in missing[self.run.disks.first_rank]
            path, entry = folder / name, files[name]
            for start in range(0, max(1, entry["bytes"]), _PIECE_BYTES):
                piece = b""
                if own_rank() == owner:
                    with path.open("rb") as file:
                        file.seek(start)
                        piece = file.read(_PIECE_BYTES)
                piece = from_rank(owner, piece)
                together(partial(add, path, start, piece) if receives else lambda: None)
            whole = together(lambda: not receives or file_entry(path) == entry)  # noqa: B023 (called at once)
            if not all(gather_from_ranks(whole)):
                return f"{name} did not arrive whole from another disk"
        return None


def _on_no_disk(files: Files, faults: dict[int, dict[str, str]]) -> list[str]:
    """Return the files that are not whole on any disk, as far as `faults` of each disk know."""
    return [name for name in sorted(files) if all(name in found for found in faults.values())]


def _marker_here(folder: Path) -> bytes:
    """Read the bytes of a marker; none if there is no readable one."""
    with suppress(OSError):
        return DiskPlace(folder.parent).marker(folder.name) or b""
    return b""


def _needed(marker: dict, ranks: list[int], layout: dict | None) -> set[str]:
    """Return the files that these ranks read: all, unless they hold now what the same ranks of the save held."""
    world, files = marker.get("ranks"), set(marker["files"])
    place = {} if layout is None else layout
    # Without a partition by ranks, each rank reads what all have written.
    alike = place.get("zero_stage") and place["zero_stage"] == marker.get("zero_stage")
    if not alike or place["world_size"] != world:
        return files
    common = {name for name in files if not is_of_rank(name)}
    own = {name for rank in ranks for name in (rank_file(rank, world), receipt_name(rank, world))}
    return (common | own) & files


def _not_partitioned(folder: Path, marker: dict, good: dict[int, set[str]]) -> set[str]:
    """Return the files with what every rank reads at any layout: frozen weights are in all, buffers in rank 0's."""
    if marker.get("recipe", {}).get("model", {}).get("frozen"):
        return set(marker["files"])
    owner = min((first for first, names in good.items() if STATE_FILE in names), default=0)
    mine = own_rank() == owner and STATE_FILE in good[owner]
    state = from_rank(owner, read_json_value(folder / STATE_FILE) if mine else {})
    return {rank_file(0, marker["ranks"])} if state.get("buffers") else set()
