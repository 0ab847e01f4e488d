"""Read the checkpoints of a run in its store: which there are, their markers, and their files, verified as they arrive.

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
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash
from tqdm import tqdm

from pretraining.checkpoints.folders import step_in
from pretraining.checkpoints.format import MARKER, digest_entry, file_entry, parse_marker, read_marker
from pretraining.checkpoints.remote import RemoteRun
from pretraining.checkpoints.upload import RUN_FILES
from pretraining.data.streaming.store import reason_of
from pretraining.errors import UserError
from pretraining.outside.files import regular
from pretraining.runtime.durable_files import replacing, rows_of
from pretraining.runtime.heartbeat import long_work, work_done
from pretraining.runtime.journal import NOTHING_HEALED, Journal
from pretraining.runtime.process_group import rank_and_world_size
from pretraining.runtime.run_folder import RunFolder

_RANGE_BYTES = 16 << 20  # with all threads, 128 MiB of host memory a rank
_THREADS = 8
_FILES = 4
"""Files fetched at once: while one is written to the disk, the store sends others."""
_LOOK_SECONDS = 1.0
"""How often the progress bar looks at the files."""
_ATTEMPTS = 3
"""If a file arrives damaged in each of them, it is damaged in the store."""


def newest_committed(
    remote: RemoteRun, above: int, below: int = sys.maxsize, journal: Journal = NOTHING_HEALED
) -> str | None:
    """Return the newest checkpoint of the store with a marker and a step between `above` and `below`, or None.

    Checkpoints that a rollback of `journal` has left behind do not count.
    """
    names = [name for name in remote.folders() if above < step_in(name) < below]
    for name in sorted(names, key=step_in, reverse=True):  # each look at a marker is a request to the store
        if (content := remote.read_if_there(f"{name}/{MARKER}")) is None:
            continue
        try:
            rollbacks = parse_marker(content, remote.where(name)).get("rollbacks", 0)
        except ValueError:
            return name  # damaged: fetching it reports that
        if not journal.overtakes(step_in(name), rollbacks):
            return name
    return None


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


def read_remote_marker(remote: RemoteRun, name: str) -> tuple[bytes, str | None]:
    """Return the marker's bytes, and what is wrong with it or None."""
    content = remote.read_if_there(f"{name}/{MARKER}")
    if content is None:
        return b"", f"no committed checkpoint there ({MARKER} is missing)"
    try:
        parse_marker(content, remote.where(name))
    except ValueError as error:
        return content, str(error)
    return content, None


def fetch_share(remote: RemoteRun, name: str, folder: Path, files: dict) -> str | None:
    """Fetch the `files` of this rank's share; returns what is damaged in the store, or None.

    Raises `UserError` if the store fails, or the disk.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Ranges(remote) as ranges:

            def fetch(file: str) -> str | None:
                return _fetch_file(ranges, f"{name}/{file}", folder / file, files[file])

            with ThreadPoolExecutor(_FILES) as threads:
                return next(filter(None, list(threads.map(fetch, files))), None)
    except UserError as error:
        # A file which the marker names and the store lacks is damage, no failure: the checkpoint before may be whole.
        if isinstance(error.__cause__, FileNotFoundError):
            return f"a file that its {MARKER} names is not there ({reason_of(error.__cause__)})"
        raise
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from error


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
    if path.is_file() and path.stat().st_size == entry["bytes"] and file_entry(path) == entry:
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
        if digest_entry(entry["bytes"], digest) == entry:
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
            try:
                reason = fetch_share(remote, folder.name, folder, {file: entry})
            except UserError as error:
                reason = str(error)
        Path(lock.name).unlink(missing_ok=True)  # whoever waits for it finds the file whole
    if reason is not None:
        raise UserError(f"{remote.where(folder.name)}: {reason}", on_every_rank=False)
    return True


def bring_run_files(run: RunFolder, remote: RemoteRun) -> None:
    """Write the files of the run that this machine lacks, and the journal with more rollbacks."""
    if (journal := _journal(run, remote)) != NOTHING_HEALED:
        journal.write(run.journal)
    # A file of the run that is here already is newer: a run on this machine wrote it.
    for name in RUN_FILES:
        if not (run.path / name).exists() and (content := remote.read_if_there(name)) is not None:
            with replacing(run.path / name, "wb") as file:
                file.write(content)


@contextmanager
def fetching_bar(where: str, folder: Path, files: dict[str, dict]) -> Iterator[None]:
    """Show on rank 0's stderr, while the block runs, how much of these files the folder holds, by all ranks."""
    if rank_and_world_size()[0] != 0:
        yield
        return

    def arrived() -> int:
        # The sizes on the disk: a file that is fetched again counts once.
        total = 0
        for name, entry in files.items():
            with suppress(OSError):  # not there yet
                total += min((folder / name).stat().st_size, entry["bytes"])
        return total

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
