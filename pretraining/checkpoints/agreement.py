"""Agree on the checkpoint to continue from, and bring its files, if nodes have run folders of their own.

Each disk then holds the files of its own ranks. A checkpoint is complete if the store holds its marker, or if the disks
together hold all its files. The newest complete one counts. Files that a disk holds are verified and stay; the others
come from the store, or from the disk of another node. A node gets what its ranks need: their own files if the layout is
that of the save, else all of them. Every function here is called by every rank.
"""

from __future__ import annotations

import socket
import sys
import uuid
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import xxhash

from pretraining.checkpoints.fetch import (
    at_address,
    fetch_share,
    fetching_bar,
    newest_unless_unreachable,
    pass_over_remote,
    read_remote_marker,
)
from pretraining.checkpoints.folders import (
    changed_files,
    committed_checkpoints,
    damage,
    has_size,
    move_aside,
    share_of,
    step_in,
    step_in_name,
)
from pretraining.checkpoints.format import (
    MARKER,
    MarkerDamage,
    file_entry,
    is_of_rank,
    marker_or_nothing,
    parse_marker,
    place_marker,
    receipt_name,
)
from pretraining.checkpoints.remote import RemoteRun
from pretraining.checkpoints.shard_files import STATE_FILE, rank_file
from pretraining.checkpoints.upload import RUN_FILES
from pretraining.errors import UserError
from pretraining.outside.addresses import is_remote
from pretraining.outside.files import read_json_value
from pretraining.planning.quantities import several
from pretraining.recipe import Recipe
from pretraining.runtime.durable_files import replacing, rows_of, sync_to_disk
from pretraining.runtime.heartbeat import long_work, work_done
from pretraining.runtime.journal import Journal
from pretraining.runtime.process_group import (
    from_rank,
    from_rank_0,
    gather_from_ranks,
    rank_and_world_size,
    together,
)
from pretraining.runtime.run_folder import STARTS, RunFolder

_PIECE_BYTES = 16 << 20
_MEETING = ".nodes"
"""File of the store by which every node shows that it reads what rank 0 writes."""


class Candidate(NamedTuple):
    """A checkpoint to continue from, if its files can be brought together."""

    name: str
    marker: bytes
    in_store: bool


def refuse_lone_disks(run: RunFolder, recipe: Recipe) -> None:
    """Raise `UserError` if nodes have run folders of their own and no store in which their checkpoints meet."""
    if run.disks.shared or recipe.training.save_strategy == "no":
        return
    upload = recipe.checkpoints.upload
    what = (
        f"{run.path} is a folder of its own on {several(run.disks.count, 'disk')}, and ranks see only theirs"
    )
    if upload is None:
        raise UserError(
            f"{what}: a lost node would take its part of every checkpoint with it; set checkpoints.upload to a store "
            "that all nodes reach, give --output_dir on a shared disk, or save nothing: "
            '--set training.save_strategy="no"'
        )
    if recipe.checkpoints.demote_to_weights:
        raise UserError(
            f"{what}: checkpoints.demote_to_weights needs all files of a checkpoint in one place; set it to false, or "
            "give --output_dir on a shared disk"
        )
    _refuse_stores_apart(run, RemoteRun(upload, run.path.name).at_first_contact())


def _refuse_stores_apart(run: RunFolder, remote: RemoteRun) -> None:
    """Raise `UserError` if a node does not read in the store what rank 0 writes there, such as a folder of its own."""
    token = uuid.uuid4().hex.encode()

    def write() -> bool:
        try:
            remote.write_bytes(_MEETING, token)
            return True
        except UserError:
            return False

    # A store that does not answer is another matter: the run may continue from what the disks hold.
    if not from_rank_0(write):
        return
    token = from_rank(0, token)
    reads = together(lambda: not run.disks.is_first or remote.read_if_there(_MEETING) == token)
    hosts = gather_from_ranks(socket.gethostname())
    apart = [host for host, same in zip(hosts, gather_from_ranks(reads), strict=True) if not same]
    if apart:
        raise UserError(
            f"checkpoints.upload: {remote.address} is another place on {', '.join(apart)} than on {hosts[0]}; "
            "all nodes must reach the same store"
        )


def bring_history(run: RunFolder, upload: str | None) -> None:
    """Give rank 0 the newest history of the run (journal, metrics, events), if its own disk holds an older one."""
    # Each start of the run adds an event to the history that it continues: the newest history has the most.
    own = _num_starts(run.events.read_bytes()) if run.events.exists() else 0
    found = gather_from_ranks(own if run.disks.is_first else -1)
    owner = max(range(len(found)), key=lambda rank: (found[rank], -rank))
    remote = None if upload is None else RemoteRun(upload, run.path.name).at_first_contact()
    if remote is not None and from_rank_0(lambda: _starts_in_store(run, remote)) > found[owner]:
        from_rank_0(lambda: _write_history(run, {name: remote.read_if_there(name) for name in RUN_FILES}))
    elif found[owner] > found[0]:
        paths = {name: run.path / name for name in RUN_FILES}
        here = rank_and_world_size()[0] == owner
        read = {name: path.read_bytes() for name, path in paths.items() if path.exists()} if here else {}
        history = from_rank(owner, read)
        from_rank_0(lambda: _write_history(run, history))


def _num_starts(events: bytes) -> int:
    rows = rows_of(events.decode(errors="replace"))
    return sum(row.get("event") in STARTS for row in rows)


def _starts_in_store(run: RunFolder, remote: RemoteRun) -> int:
    try:
        return _num_starts(remote.read_if_there(run.events.name) or b"")
    except UserError:  # it does not answer, which the search for a checkpoint reports
        return 0


def _write_history(run: RunFolder, history: dict[str, bytes | None]) -> None:
    for name, content in history.items():
        if content is None:
            (run.path / name).unlink(missing_ok=True)
            continue
        with replacing(run.path / name, "wb") as file:
            file.write(content)


def choose_on_disks(
    run: RunFolder, upload: str | None, resume: str, journal: Journal, layout: dict | None
) -> tuple[Path | None, RemoteRun | None]:
    """Return the checkpoint that `--resume auto|PATH|ADDRESS` means, and the store that holds all its files, or None.

    Every disk now holds what its ranks need of it. Raises `UserError` for a PATH or an ADDRESS without a whole one.
    """
    if resume == "auto":
        return agree_on_checkpoint(run, upload, journal, layout)
    if not is_remote(resume):
        return _seen_by_all(run, Path(resume)), None
    remote, name = at_address(resume)
    content, _, wrong = from_rank_0(lambda: read_remote_marker(remote, name))
    wrong = wrong or bring_checkpoint(run, remote, Candidate(name, content, in_store=True), layout)
    if wrong is not None:
        raise UserError(f"--resume {resume}: {wrong}")
    return run.path / name, remote


def _seen_by_all(run: RunFolder, folder: Path) -> Path:
    """Return the folder if every node sees a whole checkpoint there; else raise `UserError`."""
    reason = damage(folder) if run.disks.is_first and folder.is_dir() else None
    reason = reason or (None if folder.is_dir() else "no such folder")
    for host, found in zip(gather_from_ranks(socket.gethostname()), gather_from_ranks(reason), strict=True):
        if found is not None:
            raise UserError(
                f"--resume {folder}: on {host}: {found}; nodes without a shared disk each need all its files there, or "
                "give its address in a store"
            )
    return folder


def agree_on_checkpoint(
    run: RunFolder, upload: str | None, journal: Journal, layout: dict | None
) -> tuple[Path | None, RemoteRun | None]:
    """Return the newest complete checkpoint, of which every disk now holds what its ranks need; None if there is none.

    With it, the store that holds its other files; None if no store has this checkpoint.

    layout: that of this start (`RunPlan.layout`). Raises `UserError` if the store cannot be used and no disk has a
    checkpoint.
    """
    remote = None if upload is None else RemoteRun(upload, run.path.name)
    below = sys.maxsize
    while (candidate := _newest(run, remote, journal, below)) is not None:
        reason = bring_checkpoint(run, remote, candidate, layout)
        if reason is None:
            return run.path / candidate.name, remote if candidate.in_store else None
        from_rank_0(partial(_pass_over, run, remote, candidate, reason))
        below = step_in(candidate.name)
    return None, None


def _newest(run: RunFolder, remote: RemoteRun | None, journal: Journal, below: int) -> Candidate | None:
    """Return the newest checkpoint below a step that the store holds, or any disk a part of."""
    here = {}
    for folder in committed_checkpoints(run) if run.disks.is_first else ():
        step, marker = step_in_name(folder), marker_or_nothing(folder)
        # Without a readable marker nothing is known of its files.
        if (
            step < below
            and marker.get("step") == step
            and not journal.overtakes(step, marker.get("rollbacks", 0))
        ):
            here[step] = xxhash.xxh128((folder / MARKER).read_bytes()).hexdigest()
    on_disks = gather_from_ranks(here)
    newest = max((step for found in on_disks for step in found), default=None)
    if remote is not None:
        above = -1 if newest is None else newest - 1
        if name := from_rank_0(lambda: newest_unless_unreachable(run, remote, above, below, newest)):
            content, _, wrong = from_rank_0(lambda: read_remote_marker(remote, name))
            # One that is damaged in the store may be whole on the disks.
            if wrong is None or newest is None or step_in(name) > newest:
                return Candidate(name, content, in_store=True)
    if newest is None:
        return None
    # Disks hold different ones of a step only after a start that not all of them took part in.
    (digest, _), *_ = Counter(found[newest] for found in on_disks if newest in found).most_common(1)
    owner = next(rank for rank, found in enumerate(on_disks) if found.get(newest) == digest)
    mine = rank_and_world_size()[0] == owner
    marker = from_rank(owner, (run.checkpoint(newest) / MARKER).read_bytes() if mine else b"")
    return Candidate(run.checkpoint(newest).name, marker, in_store=False)


def _pass_over(run: RunFolder, remote: RemoteRun | None, candidate: Candidate, reason: str) -> None:
    if remote is not None and candidate.in_store:
        return pass_over_remote(run, remote.where(candidate.name), reason)
    run.add_event("checkpoint_passed_over", checkpoint=candidate.name, reason=reason)
    print(f"{candidate.name} on the disks is passed over: {reason}", file=sys.stderr, flush=True)


def bring_checkpoint(
    run: RunFolder, remote: RemoteRun | None, candidate: Candidate, layout: dict | None
) -> str | None:
    """Give every disk the files that its ranks need, and then the marker; returns what is wrong with it, or None.

    Raises `UserError` on every rank if the store fails, or a disk is full.
    """
    folder, disks = run.path / candidate.name, run.disks
    try:
        marker = parse_marker(candidate.marker, folder)
        files = marker["files"]
    except (MarkerDamage, ValueError, KeyError) as error:
        return str(error)
    together(lambda: _clear(run, folder, candidate.marker, files) if disks.is_first else None)
    sizes = {name for name in files if has_size(folder, name, files[name])} if disks.is_first else set()
    held = [set(names) for names in gather_from_ranks(sizes)]
    if not candidate.in_store and (lost := sorted(set(files).difference(*held))):
        return f"{several(len(lost), 'file')} of it on no disk: {lost[0]}"
    good = _verified(run, folder, files, held)
    needed = {first: _needed(marker, disks.ranks_of(first), layout) for first in set(disks.first_ranks)}
    if not candidate.in_store:
        # Nothing can be brought later.
        more = _not_partitioned(folder, marker, good)
        needed = {first: names | more for first, names in needed.items()}
    missing = {first: names - good[first] for first, names in needed.items()}
    if candidate.in_store and remote is not None:
        wrong = _fetch(run, remote, candidate.name, files, missing)
    else:
        wrong = _exchange(run, folder, files, good, missing)
    if wrong is not None:
        return wrong
    together(lambda: _finish(folder, candidate) if disks.is_first else None)
    return None


def _clear(run: RunFolder, folder: Path, marker: bytes, files: dict[str, dict]) -> None:
    """Make the folder without what is not of this checkpoint."""
    if (folder / MARKER).exists() and (folder / MARKER).read_bytes() != marker:
        move_aside(run, folder)  # another one of that step
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in files and path.name != MARKER:
            path.unlink()


def _verified(
    run: RunFolder, folder: Path, files: dict[str, dict], held: list[set[str]]
) -> dict[int, set[str]]:
    """Return {first rank of a disk: files that it holds whole}; the ranks of a disk share the reading."""
    disks, rank = run.disks, rank_and_world_size()[0]
    ranks, here = disks.ranks_of(disks.first_rank), held[disks.first_rank]
    share = share_of({name: files[name] for name in sorted(here)}, ranks.index(rank), len(ranks))
    with long_work():
        changed = gather_from_ranks(set(changed_files(folder, share)))
    good = {first: set(held[first]) for first in set(disks.first_ranks)}
    for number, names in enumerate(changed):
        good[disks.first_ranks[number]] -= names
    return good


def _needed(marker: dict, ranks: list[int], layout: dict | None) -> set[str]:
    """Return the files that these ranks read: all, unless they hold now what the same ranks of the save held."""
    world, files = marker["ranks"], set(marker["files"])
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
    mine = rank_and_world_size()[0] == owner and STATE_FILE in good[owner]
    state = from_rank(owner, read_json_value(folder / STATE_FILE) if mine else {})
    return {rank_file(0, marker["ranks"])} if state.get("buffers") else set()


def _fetch(
    run: RunFolder, remote: RemoteRun, name: str, files: dict[str, dict], missing: dict[int, set[str]]
) -> str | None:
    """Fetch what each disk lacks from the store; returns what is damaged there, or None."""
    ranks = run.disks.ranks_of(run.disks.first_rank)
    own = sorted(missing[run.disks.first_rank])
    share = own[ranks.index(rank_and_world_size()[0]) :: len(ranks)]
    of_disk = {each: files[each] for each in own}
    with long_work(), fetching_bar(remote.where(name), run.path / name, of_disk):
        results = gather_from_ranks(
            fetch_share(remote, name, run.path / name, {each: files[each] for each in share})
        )
    # An error of one rank is raised on all: if one rank left alone, the others would wait for it.
    if failure := next((failure for _, failure in results if failure), None):
        raise UserError(failure)
    wrong = next((damaged for damaged, _ in results if damaged), None)
    if wrong is None and any(missing.values()):
        hosts = gather_from_ranks(socket.gethostname())
        fetched = [
            {"host": hosts[first], "files": len(names), "bytes": sum(files[each]["bytes"] for each in names)}
            for first, names in sorted(missing.items())
        ]
        source = remote.where(name)
        from_rank_0(lambda: run.add_event("fetch", checkpoint=name, source=source, nodes=fetched))
    return wrong


def _exchange(
    run: RunFolder,
    folder: Path,
    files: dict[str, dict],
    good: dict[int, set[str]],
    missing: dict[int, set[str]],
) -> str | None:
    """Send files from disks that hold them to those that need them; returns what is wrong with them, or None."""
    if lost := sorted(set(files).difference(*good.values())):
        return f"{lost[0]} has changed since it was committed"
    for name in sorted(set().union(*missing.values())):
        owner = min(each for each, names in good.items() if name in names)
        receives = run.disks.is_first and name in missing[run.disks.first_rank]
        whole = _send_file(folder / name, files[name], owner, receives)
        if not all(gather_from_ranks(whole)):
            return f"{name} did not arrive whole from another disk"
    return None


def _send_file(path: Path, entry: dict, owner: int, receives: bool) -> bool:
    """Send a file from the rank `owner` to those that receive it; returns whether it arrived whole."""
    is_owner = rank_and_world_size()[0] == owner
    for start in range(0, max(1, entry["bytes"]), _PIECE_BYTES):
        piece = from_rank(owner, _piece(path, start) if is_owner else b"")
        together(partial(_add, path, start, piece) if receives else lambda: None)
    return together(lambda: not receives or file_entry(path) == entry)


def _piece(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(_PIECE_BYTES)


def _add(path: Path, start: int, piece: bytes) -> None:
    with path.open("r+b" if start else "wb") as file:
        file.seek(start)
        file.write(piece)
    work_done(len(piece))


def _finish(folder: Path, candidate: Candidate) -> None:
    # what a power cut spoils, a store that holds it gives again
    for path in () if candidate.in_store else folder.iterdir():
        sync_to_disk(path)
    if not (folder / MARKER).exists():
        place_marker(folder, candidate.marker)
