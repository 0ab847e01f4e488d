"""Fetch a committed checkpoint from `checkpoints.upload` or from any address, verify it, and write its marker last.

Every rank fetches a share of the files, in ranges, several at once. Files of an interrupted fetch are verified and
kept. Until the marker is written, the folder does not count as a checkpoint. No start waits until a copy is on the
disk: the store has what it holds. A power cut may spoil a copy that has a marker, as an old disk may any checkpoint;
the next start finds out by the checksums, and fetches the damaged files again.
"""

import fcntl
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import xxhash
from tqdm import tqdm

from pretraining.checkpoints.folders import committed_checkpoints, move_aside, step_in, step_in_name, step_of
from pretraining.checkpoints.format import MARKER, file_entry, parse_marker, read_marker
from pretraining.checkpoints.remote import RemoteRun
from pretraining.checkpoints.upload import RUN_FILES
from pretraining.data.streaming.store import reason_of
from pretraining.errors import UserError
from pretraining.outside.addresses import is_remote
from pretraining.outside.files import regular
from pretraining.runtime.durable_files import replacing, rows_of, sync_to_disk
from pretraining.runtime.heartbeat import long_work, work_done
from pretraining.runtime.journal import NOTHING_HEALED, Journal
from pretraining.runtime.process_group import from_rank_0, gather_from_ranks, rank_and_world_size
from pretraining.runtime.restarts import resume_after_restart
from pretraining.runtime.run_folder import RunFolder

_RANGE_BYTES = 16 << 20  # with all threads, 128 MiB of host memory a rank
_THREADS = 8
_FILES = 4
"""Files fetched at once: while one is written to the disk, the store sends others."""
_LOOK_SECONDS = 1.0
"""How often the progress bar looks at the files."""
_ATTEMPTS = 3
"""If a file arrives damaged in each of them, it is damaged in the store."""


Check = Callable[[str, dict, bytes], object]
"""Raises `UserError` for a checkpoint that this start cannot go on from: address, marker, and changes.json there."""


def resolve_resume(
    run: RunFolder, upload: str | None, resume: str, in_parts: bool = False, check: Check | None = None
) -> tuple[str, Path | None]:
    """Return `--resume auto|never|PATH|ADDRESS` as auto, never or a PATH on this machine; every rank calls this.

    A checkpoint at an ADDRESS is fetched; with auto the store's newest one, if it is newer than the newest here. The
    second value is the folder of the checkpoint that was fetched just now, every byte of it verified; None without one.

    upload: the recipe's `checkpoints.upload`. in_parts: the disk holds parts of checkpoints; agreement.py then brings
    what is missing, and auto and an ADDRESS stay as they are. check: asked before anything of a checkpoint is fetched.

    Raises `UserError` if the store cannot be used, or holds later checkpoints with which those of this start would mix.
    """
    # A launcher that restarts the run repeats the command line: a typed `never` must not begin the run anew each time.
    resume = from_rank_0(lambda: resume_after_restart(run, resume))
    if is_remote(resume):
        if upload is not None:
            refuse_newer(RemoteRun(upload, run.path.name), step_in(at_address(resume)[1]), resume)
        return (resume, None) if in_parts else _fetch_address(run, resume, check)
    if upload is None or (resume == "auto" and in_parts):
        return resume, None
    remote = RemoteRun(upload, run.path.name)
    if resume == "auto":
        here = from_rank_0(lambda: [step_in_name(folder) for folder in committed_checkpoints(run)])
        return resume, fetch_newest(run, remote, max(here, default=None), check=check)
    step = 0 if resume == "never" else from_rank_0(lambda: _step_at(Path(resume)))
    # The run will save steps which the store may already hold from another course of the run.
    refuse_newer(remote, step, resume)
    return resume, None


def at_address(address: str) -> tuple[RemoteRun, str]:
    """Return the run of a checkpoint's address, and the checkpoint's name."""
    above, _, name = address.rstrip("/").rpartition("/")
    place, _, run_name = above.rpartition("/")
    return RemoteRun(place, run_name), name


def _fetch_address(run: RunFolder, address: str, check: Check | None) -> tuple[str, Path | None]:
    remote, name = at_address(address)
    wrong = fetch_checkpoint(run, remote, name, check)
    if wrong is not None:
        raise UserError(f"--resume {address}: {wrong}")
    return str(run.path / name), run.path / name


def _step_at(folder: Path) -> int:
    """Return the step of a checkpoint's marker; 0 if it has none."""
    try:
        return step_of(folder)
    # No error here: `choose_checkpoint` comes next and reports a missing or damaged marker.
    except (OSError, ValueError):
        return 0


def fetch_newest(
    run: RunFolder,
    remote: RemoteRun,
    newest_here: int | None,
    damaged_here: Path | None = None,
    check: Check | None = None,
) -> Path | None:
    """Fetch the newest committed checkpoint of the store that is whole, if it is newer than the newest here.

    Returns its folder; None if none was fetched. Every rank calls this. A damaged one is passed over with an event.
    newest_here: a step, or None. If the store cannot be reached, that is an event if there is a checkpoint here, and a
    `UserError` if there is none. A checkpoint of a newer version is a `UserError` too.
    damaged_here: one to replace, which `fetch_again` could not mend: the newest up to its step is fetched.
    """
    above = -1 if newest_here is None else newest_here
    below = sys.maxsize if damaged_here is None else step_in(damaged_here.name) + 1
    while name := from_rank_0(partial(newest_unless_unreachable, run, remote, above, below, newest_here)):
        is_same = damaged_here is not None and name == damaged_here.name
        if is_same and not from_rank_0(partial(_gives_way, run, remote, damaged_here)):
            below = step_in(name)
            continue
        if (reason := fetch_checkpoint(run, remote, name, check)) is None:
            return run.path / name
        from_rank_0(lambda: pass_over_remote(run, remote.where(name), reason))
        below = step_in(name)  # it is damaged: the one before may be whole
    return None


def _gives_way(run: RunFolder, remote: RemoteRun, damaged: Path) -> bool:
    """Set a damaged checkpoint aside for another one of its step; False if the store's is the same, or damaged too."""
    content, _, wrong = read_remote_marker(remote, damaged.name)
    if wrong is not None or content == (damaged / MARKER).read_bytes():
        return False
    move_aside(run, damaged)
    return True


def fetch_checkpoint(run: RunFolder, remote: RemoteRun, name: str, check: Check | None = None) -> str | None:
    """Fetch one checkpoint into the run folder, all ranks together; returns what is wrong with it there, or None.

    Of one that is here, only the files that are damaged. Raises `UserError` on every rank if the store fails, or if
    another checkpoint of that name is here.
    """
    content, files, wrong = from_rank_0(lambda: read_remote_marker(remote, name))
    if wrong is not None:
        return wrong
    is_here = from_rank_0(lambda: _is_here(run.path / name, content))
    if check is not None:
        where, listed = remote.where(name), run.changes.name
        from_rank_0(lambda: check(where, parse_marker(content, where), remote.read_if_there(listed) or b"[]"))
    wrong = _fetch_files(run, remote, name, files)
    if wrong is None and not is_here:
        from_rank_0(lambda: _finish(run, remote, name, content))
    return wrong


def fetch_again(run: RunFolder, upload: str | None, folder: Path, reason: str) -> bool:
    """Replace the damaged files of a checkpoint by those of the store, all ranks together; say if it is whole now.

    It is not if the store lacks the checkpoint, holds another of that name or a damaged one, or does not answer.
    reason: what is damaged, for the event.
    """
    if upload is None or folder.parent != run.path:
        return False
    # no long patience: there may be an older checkpoint to go on from
    remote = RemoteRun(upload, run.path.name).at_first_contact()
    try:
        files = from_rank_0(lambda: _files_of_the_same(remote, folder))
        if not files or _fetch_files(run, remote, folder.name, files) is not None:
            return False
    except UserError:
        return False
    from_rank_0(lambda: _tell_fetched_again(run, remote.where(folder.name), folder, reason))
    return True


def _tell_fetched_again(run: RunFolder, where: str, folder: Path, reason: str) -> None:
    run.add_event("fetch", checkpoint=folder.name, source=where, damaged_here=reason)
    print(f"{folder} was damaged ({reason}): mended with the files of {where}", flush=True)


def _files_of_the_same(remote: RemoteRun, folder: Path) -> dict:
    """Return the files of the store's checkpoint of that name; none if its marker is another than the folder's."""
    content, files, wrong = read_remote_marker(remote, folder.name)
    if wrong is not None or content != (folder / MARKER).read_bytes():
        return {}
    # nothing here is replaced by what is not whole there either
    sizes = remote.sizes(folder.name) or {}
    return files if all(sizes.get(name) == entry["bytes"] for name, entry in files.items()) else {}


def _fetch_files(run: RunFolder, remote: RemoteRun, name: str, files: dict) -> str | None:
    """Fetch what is not here whole, all ranks together; returns what is wrong in the store, or None."""
    rank, ranks = rank_and_world_size()
    share = dict(sorted(files.items())[rank::ranks])
    wrong = None
    # An error of one rank is raised on all: if one rank left alone, the others would wait for it.
    with fetching_bar(remote.where(name), run.path / name, files):
        results = gather_from_ranks(fetch_share(remote, name, run.path / name, share))
    for damage, failure in results:
        if failure:
            raise UserError(failure)
        wrong = wrong or damage
    return wrong


def refuse_newer(remote: RemoteRun, step: int, resume: str) -> None:
    """Raise `UserError` if a run that begins at `step` on request would mix with later checkpoints of the store."""
    if name := from_rank_0(lambda: newest_committed(remote.at_first_contact(), step)):
        raise UserError(
            f"--resume {resume}: {remote.where(name)} is newer, and a later start would go on from there; give this "
            "run its own --output_dir or another checkpoints.upload, or remove what lies there"
        )


def newest_committed(
    remote: RemoteRun, above: int, below: int = sys.maxsize, journal: Journal = NOTHING_HEALED
) -> str | None:
    """Return the newest checkpoint of the store with a marker and a step between `above` and `below`, or None.

    Checkpoints that a rollback of `journal` has left behind do not count.
    """
    names = [name for name in remote.folders() if above < step_in(name) < below]
    # Lazily: each look at a marker is a request to the store.
    found = (name for name in sorted(names, key=step_in, reverse=True))
    return next((name for name in found if _is_in_force(remote, name, journal)), None)


def _is_in_force(remote: RemoteRun, name: str, journal: Journal) -> bool:
    content = remote.read_if_there(f"{name}/{MARKER}")
    if content is None:
        return False
    try:
        marker = parse_marker(content, remote.where(name))
    except ValueError:
        return True  # damaged: fetching it reports that
    return not journal.overtakes(step_in(name), marker.get("rollbacks", 0))


def _journal(run: RunFolder, remote: RemoteRun) -> Journal:
    """Return this machine's journal or the store's: the one with more rollbacks."""
    there = Journal.of(rows_of((remote.read_if_there(run.journal.name) or b"").decode(errors="replace")))
    return max(Journal.read(run.journal), there, key=lambda journal: len(journal.rollbacks))


def newest_unless_unreachable(
    run: RunFolder, remote: RemoteRun, above: int, below: int, here: int | None
) -> str | None:
    """Return the newest checkpoint of the store between these steps, or None; an unreachable store is an event.

    here: the newest step on this machine or its fellows; None: there is none, so that the `UserError` is raised.
    """
    try:
        first_contact = remote.at_first_contact()
        if below == sys.maxsize:  # only at the first call of a start
            first_contact.check_writable()
        return newest_committed(first_contact, above, below, _journal(run, first_contact))
    except UserError as error:
        if here is None:
            raise
        run.add_event("upload_unreachable", reason=str(error))
        print(
            f"checkpoints: {error}; going on from checkpoint-{here}, which is here",
            file=sys.stderr,
            flush=True,
        )
        return None


def pass_over_remote(run: RunFolder, where: str, reason: str) -> None:
    """Report a checkpoint of a store that is damaged there."""
    run.add_event("remote_checkpoint_passed_over", checkpoint=where, reason=reason)
    print(f"checkpoints: {where} is passed over: {reason}", file=sys.stderr, flush=True)


def read_remote_marker(remote: RemoteRun, name: str) -> tuple[bytes, dict, str | None]:
    """Return the marker's bytes, the files it names, and what is wrong with it or None."""
    content = remote.read_if_there(f"{name}/{MARKER}")
    if content is None:
        return b"", {}, f"no committed checkpoint there ({MARKER} is missing)"
    try:
        return content, parse_marker(content, remote.where(name))["files"], None
    except ValueError as error:
        return content, {}, str(error)


def _is_here(folder: Path, marker: bytes) -> bool:
    here = folder / MARKER
    if here.exists() and here.read_bytes() != marker:
        raise UserError(
            f"{folder}: another checkpoint of that name is here; move it, or choose another --output_dir"
        )
    return here.exists()


def fetch_share(remote: RemoteRun, name: str, folder: Path, files: dict) -> tuple[str | None, str | None]:
    """Fetch the `files` of this rank's share; returns (what is damaged in the store, what failed)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Ranges(remote) as ranges:

            def fetch(file: str) -> str | None:
                return _fetch_file(ranges, f"{name}/{file}", folder / file, files[file])

            with ThreadPoolExecutor(_FILES) as threads:
                return next(filter(None, list(threads.map(fetch, files))), None), None
    except UserError as error:
        # A file which the marker names and the store lacks is damage, no failure: the checkpoint before may be whole.
        if isinstance(error.__cause__, FileNotFoundError):
            return f"a file that its {MARKER} names is not there ({reason_of(error.__cause__)})", None
        return None, str(error)
    except OSError as error:
        return None, f"{folder}: {error.strerror}"


class Ranges:
    """Reads ranges of files of a store, several at once; of all files together, a few are in memory."""

    def __init__(self, remote: RemoteRun):
        self.remote = remote
        self._threads = ThreadPoolExecutor(_THREADS)
        self._room = threading.BoundedSemaphore(_THREADS)

    def __enter__(self) -> "Ranges":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def in_order(self, where: str, size: int) -> Iterator[bytes | memoryview]:
        """Yield the content of a file from its beginning; what is yielded is valid until the next."""
        if self.remote.folder is not None:  # its kernel reads ahead, without a copy for each range
            yield from self.remote.pieces(where, size)
            return
        waiting: deque[Future[bytes]] = deque()
        starts = iter(range(0, size, _RANGE_BYTES))
        try:
            while True:
                # One is always asked for; more if there is room.
                while self._room.acquire(blocking=not waiting):
                    if (start := next(starts, None)) is None:
                        self._room.release()
                        break
                    stop = min(start + _RANGE_BYTES, size)
                    waiting.append(self._threads.submit(self.remote.read_range, where, start, stop))
                if not waiting:
                    return
                yield waiting[0].result()
                waiting.popleft()
                self._room.release()
        finally:
            for _ in waiting:
                self._room.release()


def _fetch_file(ranges: Ranges, where: str, path: Path, entry: dict) -> str | None:
    """Fetch and verify one file, and fetch it again if it arrived damaged.

    Returns what is wrong in the store, or None.
    """
    if _is_whole(path, entry):
        return None
    for _ in range(_ATTEMPTS):
        digest = xxhash.xxh128()
        with open(path, "wb", buffering=0, opener=regular) as file:
            for content in ranges.in_order(where, entry["bytes"]):
                digest.update(content)  # now, which spares another reading of the file
                written = 0  # an unbuffered write may take less than it is given
                while written < len(content):
                    written += file.write(memoryview(content)[written:])
                work_done(len(content))
        if f"xxh128:{digest.hexdigest()}" == entry["checksum"]:
            return None
    return f"{path.name} is not what was committed (fetched {_ATTEMPTS} times)"


def fetch_absent(remote: RemoteRun, folder: Path, file: str) -> bool:
    """Fetch one more file of a checkpoint into its folder; ranks of a node that want the same one wait for the first.

    Returns True. Raises `UserError` if the store fails, or holds other bytes than were committed.
    """
    entry = read_marker(folder)["files"][file]
    with long_work(), open(folder / f".{file}.lock", "w", opener=regular) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with fetching_bar(f"{remote.where(folder.name)}/{file}", folder, {file: entry}):
            damage, failure = fetch_share(remote, folder.name, folder, {file: entry})
        Path(lock.name).unlink(missing_ok=True)  # whoever waits for it finds the file whole
    if reason := failure or damage:
        raise UserError(f"{remote.where(folder.name)}: {reason}", on_every_rank=False)
    return True


def _is_whole(path: Path, entry: dict) -> bool:
    return path.is_file() and path.stat().st_size == entry["bytes"] and file_entry(path) == entry


def _finish(run: RunFolder, remote: RemoteRun, name: str, marker: bytes) -> None:
    """Write the files of the run that this machine lacks, the journal with more rollbacks, and then the marker."""
    if (journal := _journal(run, remote)) != NOTHING_HEALED:
        journal.write(run.journal)
    # A file of the run that is here already is newer: a run on this machine wrote it.
    for each in RUN_FILES:
        if not (run.path / each).exists() and (content := remote.read_if_there(each)) is not None:
            _write(run.path / each, content)
    _write(run.path / name / MARKER, marker)
    run.add_event("fetch", checkpoint=name, source=remote.where(name))


def _write(path: Path, content: bytes) -> None:
    with replacing(path, "wb") as file:
        file.write(content)
    sync_to_disk(path.parent)


@contextmanager
def fetching_bar(where: str, folder: Path, files: dict[str, dict]) -> Iterator[None]:
    """Show on rank 0's stderr, while the block runs, how much of these files the folder holds, by all ranks."""
    if rank_and_world_size()[0] != 0:
        yield
        return

    def arrived() -> int:
        # The sizes on the disk: a file that is fetched again counts once.
        return sum(min(_size(folder / name), entry["bytes"]) for name, entry in files.items())

    def look_again_and_again(pause: float = _LOOK_SECONDS) -> None:
        while not over.wait(pause):
            began = time.monotonic()
            bar.update(max(0, arrived() - bar.n))
            # Thousands of files on a slow disk: at most a tenth of the time.
            pause = max(_LOOK_SECONDS, 9 * (time.monotonic() - began))

    over, total = threading.Event(), sum(entry["bytes"] for entry in files.values())
    with tqdm(desc=f"fetching {where}", total=total, unit="B", unit_scale=True) as bar:
        thread = threading.Thread(target=look_again_and_again, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            bar.update(max(0, arrived() - bar.n))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
