"""Saving without standing still: training stops for the copy into host memory, a thread does the rest.

The thread of each rank writes and checksums its files in one pass, waits for the disk and leaves a receipt. That of
rank 0 waits for all receipts, writes the marker, and then forgets old checkpoints. At most one save is in flight. What
became of it is agreed on by all ranks at a step boundary, so that a failure meets every rank at the same step.

A rank that dies leaves a folder without a marker, which counts for nothing and goes at the next start.
"""

import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from pretraining.checkpoints.awaiting import wait_for_receipts
from pretraining.checkpoints.marker import MARKER
from pretraining.checkpoints.rank_save import RankSave
from pretraining.checkpoints.rank_share import RankShare, write_share
from pretraining.checkpoints.snapshot import HostSnapshot
from pretraining.errors import UserError
from pretraining.planning.quantities import num_bytes
from pretraining.runtime.durable_files import sync_to_disk
from pretraining.runtime.heartbeat import long_work
from pretraining.runtime.process_group import gather_from_ranks, host_group, rank_and_world_size
from pretraining.runtime.run_folder import RunFolder

_PAUSE_SECONDS = 0.01

Commit = Callable[[Path, dict], None]
"""(folder, the marker but for its files): writes the marker, after which the checkpoint counts."""


class CheckpointWriter:
    """Writes checkpoints of a run; every rank makes one, and calls the same methods at the same steps.

    commit: called on rank 0 when all ranks' files are down. after_commit: called on rank 0 then (retention).
    on_committed: called on every rank with the folder, at the step boundary where all know (upload).
    background: False writes in the caller's time, the same bytes. on_full_disk: "stop" raises `UserError` on every
    rank where files cannot be written, "continue" leaves an event and trains on.
    """

    def __init__(
        self,
        run: RunFolder,
        commit: Commit,
        after_commit: Callable[[], None] = lambda: None,
        on_committed: Callable[[Path], None] = lambda folder: None,
        background: bool = True,
        on_full_disk: str = "stop",
    ):
        self.run, self.commit, self.after_commit, self.on_committed = run, commit, after_commit, on_committed
        self.background, self.on_full_disk = background, on_full_disk
        self.rank, self.ranks = rank_and_world_size()
        self.snapshot = HostSnapshot()
        self.last: dict | None = None
        """The newest finished save, as its event tells it."""
        self._group = host_group()
        self._attempt = gather_from_ranks(uuid.uuid4().hex, self._group)[0]
        self._num_saves = 0
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

        files: small files of this rank, by name. receipt: what its receipt holds besides (JSON). marker: what the
        marker says but for the files (rank 0's counts); taken now, so that later numbers cannot get into it.
        """
        began = time.perf_counter()
        self.drain()
        self._num_saves += 1
        save = self._flight = RankSave(
            folder=self.run.checkpoint(step),
            name=f"{self._attempt}.{self._num_saves}",
            files=dict(files or {}),
            receipt=dict(receipt or {}),
            marker=dict(marker or {}),
            num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
            began=began,
            waited_seconds=time.perf_counter() - began,
        )
        if self._open(save, tensors):
            self._start(save, save.attempt(lambda: self.snapshot.take(tensors)))
            save.blocked_seconds = time.perf_counter() - began
        else:
            with long_work():
                save.attempt(lambda: self._write(save, tensors))
            self._start(save, None)
            self.drain()

    def poll(self) -> None:
        """At each step boundary: where a save is in flight, the ranks tell each other how far they are.

        Raises on every rank alike what stopped a rank's writing, unless the policy is to go on.
        """
        if self._flight is None:
            return
        reports = gather_from_ranks(self._flight.report(), self._group)
        if any(report["failed"] for report in reports):
            self._abandon(reports)
        elif all(report["done"] for report in reports):
            self._finish(reports)

    @property
    def in_flight(self) -> bool:
        """Whether a save has begun whose end the ranks have not agreed on yet; the same on all."""
        return self._flight is not None

    def drain(self) -> None:
        """Wait until nothing is in flight."""
        with long_work():
            while self._flight is not None:
                self.poll()
                if self._flight is not None:
                    time.sleep(_PAUSE_SECONDS)

    def _open(self, save: RankSave, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Rank 0 makes the folder; whether every rank can copy its tensors and write behind training."""
        if self.rank == 0:
            save.attempt(lambda: _empty_folder(save.folder))
        fits = self.background and self.snapshot.would_fit(tensors)
        answers = gather_from_ranks((save.failed, fits), self._group)
        save.failed = save.failed or any(failed for failed, _ in answers)
        all_fit = all(fits for _, fits in answers)
        if all_fit and all(gather_from_ranks(self.snapshot.make_room(tensors), self._group)):
            return True
        self.snapshot.release()
        if self.rank == 0 and self.background:
            save.attempt(lambda: self._report_no_room(save))
        return False

    def _report_no_room(self, save: RankSave) -> None:
        """An event for each save, a line for the first."""
        self.run.add_event("no_room_for_snapshot", checkpoint=save.folder.name, needed_bytes=save.num_bytes)
        if not self._reported_no_room:
            size = num_bytes(save.num_bytes)
            line = f"no host memory for a copy of {size} a rank; training waits while checkpoints are written"
            print(f"checkpoints: {line}", file=sys.stderr, flush=True)
        self._reported_no_room = True

    def _start(self, save: RankSave, copies: Mapping[str, torch.Tensor] | None) -> None:
        """A thread for what is left to do; `copies` None where the rank's files are written already."""

        def work() -> None:
            if copies is not None:
                save.attempt(lambda: self._write(save, copies))
            if self.rank == 0:
                save.attempt(lambda: self._commit(save))
            save.done = True

        self._thread = threading.Thread(target=work, name=f"save-{save.folder.name}", daemon=True)
        self._thread.start()

    def _write(self, save: RankSave, tensors: Mapping[str, torch.Tensor]) -> None:
        began = time.perf_counter()
        share = RankShare(tensors, save.files, {"save": save.name, **save.receipt})
        write_share(share, save.folder, self.rank, self.ranks)
        sync_to_disk(save.folder)
        save.write_seconds = time.perf_counter() - began

    def _commit(self, save: RankSave) -> None:
        wait_for_receipts(save.folder, self.ranks, save.name, save.abandoned)
        self.commit(save.folder, save.marker)
        self.after_commit()

    def _finish(self, reports: list[dict]) -> None:
        folder = self._close().folder
        self.last = {
            "checkpoint": folder.name,
            "bytes": sum(report["num_bytes"] for report in reports),
            "snapshot_bytes": self.snapshot.num_bytes,
            **{key: max(report[key] for report in reports) for key in RankSave.SECONDS},
        }
        if self.rank == 0:
            self.run.add_event("save", background=self.background, **self.last)
        self.on_committed(folder)

    def _abandon(self, reports: list[dict]) -> None:
        """Forget the save, on every rank alike; what failed first of the lowest rank is told."""
        self._flight.abandoned.set()
        save = self._close()
        gather_from_ranks(None, self._group)  # no thread writes there any more
        told, mendable = next(report["error"] for report in reports if report["error"])
        if not mendable:
            raise RuntimeError(f"{save.folder.name} could not be saved:\n{told}")
        if self.rank == 0:
            if not (save.folder / MARKER).exists():
                shutil.rmtree(save.folder, ignore_errors=True)
            self._tell_failure(save.folder.name, told)
        if self.on_full_disk == "stop":
            raise UserError(told)

    def _tell_failure(self, checkpoint: str, told: str) -> None:
        line = f"{checkpoint} was not saved: {told}"
        if self.on_full_disk == "continue":
            print(f"checkpoints: {line}; training goes on", file=sys.stderr, flush=True)
        try:
            self.run.add_event("save_failed", checkpoint=checkpoint, reason=told)
        except OSError as error:  # the disk that refused the checkpoint refuses the event too
            print(f"checkpoints: no event of it either ({error})", file=sys.stderr, flush=True)

    def _close(self) -> RankSave:
        """The save that was in flight, its thread ended."""
        save, self._flight = self._flight, None
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return save


def _empty_folder(folder: Path) -> None:
    """A new folder; one of that name (a save of a step that training returned to) goes, its marker first."""
    (folder / MARKER).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
