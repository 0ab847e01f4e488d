"""Write checkpoints in the background: training stops for the copy into host memory, and a thread does the rest.

The thread of each rank writes and checksums its files in one pass, waits for the disk and leaves a receipt. The thread
of rank 0 also waits for all receipts, writes the marker, and then removes old checkpoints. At most one save is in
flight. All ranks agree on its result at a step boundary, so that a failure stops every rank at the same step.

A save that comes before the validation of its step counts at once. Then its threads wait for what is measured, and add
it to the marker. Only then is the new one uploaded and are old ones removed: which is best is known now.

If nodes have run folders of their own, each holds the files of its own ranks. Receipts go to rank 0 as messages, and
the marker comes back in the same way: the first rank of each other disk writes it there.

If a rank dies, its folder has no marker: it does not count as a checkpoint, and the next start removes it.
"""

import json
import shutil
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from pretraining.checkpoints.folders import remove_checkpoint
from pretraining.checkpoints.format import (
    MARKER,
    add_metrics,
    place_marker,
    receipt_name,
    write_bytes,
    write_receipt,
)
from pretraining.checkpoints.shard_files import rank_file, write_rank_file
from pretraining.command_line import ranks_here
from pretraining.errors import UserError
from pretraining.planning.memory.need import SNAPSHOT_ALIGNMENT, pinned_bytes, snapshot_bytes
from pretraining.planning.quantities import num_bytes
from pretraining.runtime.durable_files import one_line_disk_errors, sync_to_disk
from pretraining.runtime.heartbeat import long_work
from pretraining.runtime.host import free_memory_bytes
from pretraining.runtime.process_group import (
    Messages,
    gather_from_ranks,
    host_group,
    largest_over_ranks,
    rank_and_world_size,
)
from pretraining.runtime.run_folder import RunFolder

_PAUSE_SECONDS = 0.01  # between two exchanges of the ranks while training waits
_LAST_WAIT_SECONDS = 900  # of a rank that ends with an error, for the save in flight
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.25

DONE, WRITING, FAILED = 0, 1, 2  # how far a save is; over all ranks the largest counts

Result = TypeVar("Result")


class CheckpointWriter:
    """Writes checkpoints of a run; every rank makes one, and calls the same methods at the same steps.

    commit: writes the marker on rank 0, once the disk holds all ranks' files. after_commit: called on rank 0 after it
    (retention). on_committed: called on every rank with the folder, at the step boundary at which all ranks know of the
    commit (upload). background: False writes the same bytes while the caller waits. on_full_disk: if files cannot be
    written, "stop" raises `UserError` on every rank, and "continue" writes an event and goes on training.
    """

    def __init__(
        self,
        run: RunFolder,
        commit: Callable[[Path, dict], None],
        after_commit: Callable[[], None] = lambda: None,
        on_committed: Callable[[Path], None] = lambda folder: None,
        background: bool = True,
        on_full_disk: str = "stop",
    ):
        self.run, self.commit, self.after_commit, self.on_committed = run, commit, after_commit, on_committed
        self.background, self.on_full_disk = background, on_full_disk
        self.rank, self.ranks = rank_and_world_size()
        self.snapshot = HostSnapshot()
        self.last: dict | None = None  # the newest finished save, with the values of its event
        self.validation_follows = False  # whether each `save` from now on is followed by `add_validation`
        # The group of training may be busy on the GPU, so the reports of saves use the network of the hosts. The main
        # thread alone exchanges them, in `save`, `poll` and `wait`; the thread of a save sends messages.
        self._group = host_group()
        # Names the saves of this process in their receipts: see `wait_for_receipts`.
        self._attempt = gather_from_ranks(uuid.uuid4().hex, self._group)[0]
        self._num_saves = 0
        self._messages = Messages("save")  # used by the thread alone
        self._reported_no_room = False
        self._flight: RankSave | None = None
        self._thread: threading.Thread | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        files: Mapping[str, bytes] | None = None,
        receipt: Mapping | None = None,
        marker: Mapping | None = None,
    ) -> None:
        """Begin to save this rank's `tensors`; returns as soon as they may change.

        files: small files of this rank, by name. receipt: what else its receipt holds (JSON). marker: the marker
        without its files; only the one of rank 0 counts.
        """
        began = time.perf_counter()
        self.wait()  # for the previous save: there is memory for one copy
        self._num_saves += 1
        save = self._flight = RankSave(
            folder=self.run.checkpoint(step),
            name=f"{self._attempt}.{self._num_saves}",
            files=dict(files or {}),
            receipt=dict(receipt or {}),
            # A copy: numbers of later steps must not get into it.
            marker=dict(marker or {}),
            num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            began=began,
            waited_seconds=time.perf_counter() - began,
        )
        if not self.validation_follows:
            save.validated.set()
        if self._open(save, tensors):
            self._start(save, save.attempt(lambda: self.snapshot.take(tensors)))
            save.blocked_seconds = time.perf_counter() - began
        else:
            with long_work():
                save.attempt(lambda: self._write(save, tensors))
            self._start(save, None)  # the commit waits for other ranks, which may still write
            if save.validated.is_set():
                self.wait()

    def add_validation(self, metrics: Mapping) -> bool:
        """Give the save in flight what the validation after it has measured; returns whether it waits for that."""
        save = self._flight
        if save is None or save.validated.is_set():
            return False
        save.metrics = dict(metrics)
        save.validated.set()
        return True

    def wait_for_marker(self) -> None:
        """Wait, without the other ranks, until the save in flight counts or has failed: this rank is about to die."""
        # no longer: another rank may have died with its part unwritten
        save, until = self._flight, time.monotonic() + _LAST_WAIT_SECONDS
        while save is not None and not save.failed and time.monotonic() < until:
            if (save.folder / MARKER).exists():
                return
            time.sleep(_PAUSE_SECONDS)

    def poll(self) -> None:
        """Exchange, at a step boundary, how far the save in flight is; a failure stops every rank, or is an event."""
        if self._flight is None:  # on all ranks or on none, so nobody waits in the exchange
            return
        # One number at each step; thousands of reports are exchanged once, at the end of the save.
        save = self._flight
        state = largest_over_ranks(FAILED if save.failed else DONE if save.done else WRITING)
        if state == WRITING:
            return
        so_far = time.perf_counter() - save.began
        report: dict[str, Any] = {
            "error": save.error,
            "num_bytes": save.num_bytes,
            "waited_seconds": round(save.waited_seconds, 4),
            "blocked_seconds": round(so_far if save.blocked_seconds is None else save.blocked_seconds, 4),
            "write_seconds": round(save.write_seconds, 4),
        }
        reports = gather_from_ranks(report, self._group)
        if state == FAILED:
            return self._abandon(reports)
        folder = self._close().folder
        self.last = {
            "checkpoint": folder.name,
            "bytes": sum(each["num_bytes"] for each in reports),
            "snapshot_bytes": self.snapshot.num_bytes,
            # Training waits for the slowest rank.
            **{key: max(each[key] for each in reports) for key in report if key.endswith("_seconds")},
        }
        if self.rank == 0:
            self.run.add_event("save", background=self.background, **self.last)
        self.on_committed(folder)

    def wait(self) -> None:
        """Wait until nothing is in flight."""
        with long_work():
            while self._flight is not None:
                self.poll()
                if self._flight is not None:
                    time.sleep(_PAUSE_SECONDS)

    def _open(self, save: "RankSave", tensors: Mapping[str, torch.Tensor]) -> bool:
        """Make the folder, once a disk; returns whether every rank has room to copy its tensors and write later."""

        def make_folder() -> None:
            # There is an older one if training returned to an earlier step and has now reached this step again.
            if save.folder.exists():
                remove_checkpoint(save.folder)
            save.folder.mkdir(parents=True)

        if self.run.disks.is_first:
            save.attempt(make_folder)
        # All ranks of a host look at its free memory before one of them takes some.
        fits = self.background and self.snapshot.would_fit(tensors)
        answers = gather_from_ranks((save.failed, fits), self._group)
        save.failed = save.failed or any(failed for failed, _ in answers)
        all_fit = all(fits for _, fits in answers)
        # The system may refuse what seemed free, on any rank: then all write at once.
        if all_fit and all(gather_from_ranks(self.snapshot.make_room(tensors), self._group)):
            return True
        self.snapshot.release()

        def report() -> None:
            needed = {"checkpoint": save.folder.name, "needed_bytes": save.num_bytes}
            self.run.add_event("no_room_for_snapshot", **needed)
            if not self._reported_no_room:  # a line for the first save alone
                size = num_bytes(save.num_bytes)
                line = f"no host memory for a copy of {size} a rank; training waits while checkpoints are written"
                print(f"checkpoints: {line}", file=sys.stderr, flush=True)
            self._reported_no_room = True

        if self.rank == 0 and self.background:
            save.attempt(report)
        return False

    def _start(self, save: "RankSave", copies: Mapping[str, torch.Tensor] | None) -> None:
        """Start a thread for the rest of the work; `copies` is None if the rank's files are written already."""

        def work() -> None:
            if copies is not None:
                save.attempt(lambda: self._write(save, copies))
            if self.run.disks.is_first:
                save.attempt(lambda: self._commit(save) if self.rank == 0 else follow())
            save.done = True

        def read(name: str) -> bytes:
            for _ in pauses(save.abandoned):
                if (content := self._messages.read(f"{save.name}/{name}")) is not None:
                    return content
            raise AssertionError  # `pauses` has no end

        def follow() -> None:
            """Write the marker of rank 0 to this disk, and remove old checkpoints once every disk holds it."""
            place_marker(save.folder, read(MARKER))
            self._messages.send(f"{save.name}/{self.rank}", b"yes")
            save.take_validation()
            read("done")
            self.after_commit()

        # A daemon: a run that ends with an error must not wait for its save.
        self._thread = threading.Thread(target=work, name=f"save-{save.folder.name}", daemon=True)
        self._thread.start()

    def _write(self, save: "RankSave", tensors: Mapping[str, torch.Tensor]) -> None:
        began = time.perf_counter()
        name = rank_file(self.rank, self.ranks)
        written = {name: write_rank_file(save.folder / name, tensors)}
        written |= {name: write_bytes(save.folder / name, content) for name, content in save.files.items()}
        # last: the checkpoint counts only once it has a marker too
        write_receipt(save.folder, self.rank, self.ranks, written, save=save.name, **save.receipt)
        sync_to_disk(save.folder)  # the names of the files, whose bytes are on the disk already
        if not self.run.disks.has_rank_0:
            name = receipt_name(self.rank, self.ranks)
            self._messages.send(f"{save.name}/{name}", (save.folder / name).read_bytes())
        save.write_seconds = time.perf_counter() - began

    def _commit(self, save: "RankSave") -> None:
        """Write the marker once all receipts are here; every disk then holds it before old checkpoints are removed."""

        def take(receipt: str) -> None:
            # that of a rank on another disk comes as a message
            content = self._messages.take(f"{save.name}/{receipt}") if not self.run.disks.shared else None
            if content is not None:
                write_bytes(save.folder / receipt, content)

        wait_for_receipts(save.folder, self.ranks, save.name, save.abandoned, take)
        self.commit(save.folder, save.marker)
        if not self.run.disks.shared:
            self._messages.send(f"{save.name}/{MARKER}", (save.folder / MARKER).read_bytes())
            missing = {f"{save.name}/{first}" for first in self.run.disks.first_ranks if first}
            for _ in pauses(save.abandoned):
                missing = {name for name in missing if self._messages.take(name) is None}
                if not missing:
                    break
            self._messages.remove(f"{save.name}/{MARKER}")
            # The one before: all have read it, because they have saved since.
            self._messages.remove(f"{self._attempt}.{self._num_saves - 1}/done")
        save.take_validation()
        if not self.run.disks.shared:
            self._messages.send(f"{save.name}/done", b"yes")
        self.after_commit()

    def _abandon(self, reports: list[dict]) -> None:
        """Give the save up on every rank; raises or reports the error of the lowest rank that has one."""
        self._flight.abandoned.set()
        save = self._close()
        gather_from_ranks(None, self._group)  # after this no thread of any rank writes into the folder
        reason, mendable = next(report["error"] for report in reports if report["error"])
        if not mendable:
            raise RuntimeError(f"{save.folder.name} could not be saved:\n{reason}")
        # If the retention failed, after the commit, the checkpoint has its marker and counts.
        if self.run.disks.is_first and not (save.folder / MARKER).exists():
            shutil.rmtree(save.folder, ignore_errors=True)
        name = save.folder.name
        if self.rank == 0:
            if self.on_full_disk == "continue":
                line = f"{name} was not saved: {reason}; training goes on"
                print(f"checkpoints: {line}", file=sys.stderr, flush=True)
            try:
                self.run.add_event("save_failed", checkpoint=name, reason=reason)
            except OSError as error:  # the disk that refused the checkpoint refuses the event too
                print(f"checkpoints: no event of it either ({error})", file=sys.stderr, flush=True)
        if self.on_full_disk == "stop":
            raise UserError(reason)

    def _close(self) -> "RankSave":
        """Return the save that was in flight, once its thread has ended."""
        save, self._flight = self._flight, None
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return save


@dataclass
class RankSave:
    """One rank's part of one save: what it writes, how far it is, and what went wrong.

    The rank's main thread and the thread that writes share it; each field has one writer at a time.
    """

    folder: Path
    name: str
    files: dict[str, bytes]
    receipt: dict
    marker: dict
    num_bytes: int
    began: float  # seconds, from `time.perf_counter`
    waited_seconds: float  # how long this save waited for the previous one
    blocked_seconds: float | None = None  # with the wait for the previous save; None while it still waits
    write_seconds: float = 0.0
    done: bool = False
    failed: bool = False
    error: tuple[str, bool] | None = None  # what went wrong on this rank, and whether a user can repair it
    abandoned: threading.Event = field(default_factory=threading.Event)
    validated: threading.Event = field(default_factory=threading.Event)  # or none follows
    metrics: dict = field(default_factory=dict)

    def take_validation(self) -> None:
        """Wait for the validation that follows, and add it to the marker on this disk: the same on every disk."""
        while not self.validated.wait(_LONGEST_PAUSE_SECONDS):
            if self.abandoned.is_set():
                raise SaveAbandoned
        if self.metrics:
            add_metrics(self.folder, self.metrics)

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """Do `work`, unless something has failed already; an error is kept until the step boundary."""
        if self.failed:
            return None
        try:
            with one_line_disk_errors(self.folder):
                return work()
        except SaveAbandoned:
            pass
        except UserError as error:
            self.error = (str(error), True)
        except Exception:  # a bug in a thread must end the run, not the thread alone
            self.error = (traceback.format_exc(), False)
        self.failed = True
        return None


class SaveAbandoned(Exception):
    """The save this thread works on has failed on another rank."""


def wait_for_receipts(
    folder: Path,
    ranks: int,
    save: str,
    abandoned: threading.Event,
    look: Callable[[str], None] = lambda receipt: None,
) -> None:
    """Return as soon as every rank's receipt of this save is there; raises `SaveAbandoned` if `abandoned` is set.

    It looks at the files, because it runs in a thread, which must not use collectives. save: the name of the save. A
    receipt of an earlier attempt, or of an earlier save of the same step, has another name and does not count. look: is
    called with the name of a missing receipt, and may write it.
    """
    # not parsed: rank 0 looks at thousands, and each holds the states of random generators
    named = f'"save": {json.dumps(save)}'.encode()
    missing = {receipt_name(rank, ranks) for rank in range(ranks)}
    for _ in pauses(abandoned):
        for receipt in tuple(missing):
            # A rank writes its receipt last: if the receipt is there, all files of the rank are.
            with suppress(FileNotFoundError):
                if named in (folder / receipt).read_bytes():
                    missing.remove(receipt)
        if not missing:
            return
        for receipt in missing:
            look(receipt)


def pauses(abandoned: threading.Event) -> Iterator[None]:
    """Yield after longer and longer pauses; raises `SaveAbandoned` if `abandoned` is set."""
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield
        if abandoned.is_set():
            raise SaveAbandoned
        time.sleep(pause)
        # Short pauses first, so that a small checkpoint is committed at once; longer ones later, so that a large
        # checkpoint does not ask a shared disk thousands of times.
        pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)


class HostSnapshot:
    """Host memory for one rank's tensors of one save, pinned if they come from a GPU; none before the first save."""

    def __init__(self):
        self._memory: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.numel()

    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return complete copies of `tensors`, for which there is room; they are valid until the next call."""
        copies, start = {}, 0
        for name, tensor in tensors.items():
            stop = start + tensor.nbytes
            copy = self._memory[start:stop].view(tensor.dtype).view(tensor.shape)
            # from a GPU all copies are queued, then waited for once
            copy.copy_(tensor.detach(), non_blocking=True)
            copies[name], start = copy, stop + -stop % SNAPSHOT_ALIGNMENT  # an address valid for every type
        if self._memory.is_pinned():
            torch.cuda.synchronize()
        return copies

    def would_fit(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether this rank's share of the free host memory suffices for copies of `tensors`."""
        needed, free = _bytes_of(tensors), free_memory_bytes()
        if needed <= self.num_bytes or free is None:
            return True
        # Pinned memory comes in powers of two, and every rank of this host asks for the same amount.
        return pinned_bytes(needed) - self.num_bytes < free // ranks_here()

    def make_room(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Take the memory that copies of `tensors` need; returns False if the system does not give it."""
        needed = _bytes_of(tensors)
        if self._memory is None or needed > self.num_bytes:
            self.release()  # first: never two at once
            on_gpu = any(tensor.is_cuda for tensor in tensors.values())
            try:
                self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=on_gpu)
            except RuntimeError:  # what was free a moment ago is taken, or may not be pinned
                return False
        return True

    def release(self) -> None:
        self._memory = None


def _bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    return snapshot_bytes(tensor.nbytes for tensor in tensors.values())
