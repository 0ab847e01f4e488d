"""Committed checkpoints go to `checkpoints.upload` behind training: files, then receipts, and the marker last.

Each rank's thread sends the files that the rank wrote; rank 0 adds the marker once every rank's receipt is there. A
store that fails costs an event, never the run. One checkpoint is under way at a time; those committed meanwhile are
left out but for the newest, which goes up next, or at the end.
"""

import sys
import threading
import time
from functools import partial
from pathlib import Path

from pretraining.addresses import masked
from pretraining.checkpoints.marker import MARKER
from pretraining.checkpoints.parcel import Parcel
from pretraining.checkpoints.remote import RemoteRun
from pretraining.runtime.heartbeat import long_work
from pretraining.runtime.process_group import gather_from_ranks, host_group, rank_and_world_size
from pretraining.runtime.run_folder import RunFolder

_PAUSE_SECONDS = 0.05
_RECEIPT_PAUSE_SECONDS = 1.0


class _GivenUp(Exception):
    """Another rank could not send its files."""


class Uploader:
    """Sends a run's committed checkpoints; every rank makes one, and calls the same methods at the same steps.

    mirror: checkpoints that retention removes here (`forget`) are removed there too, after the next one is complete.
    """

    def __init__(self, run: RunFolder, remote: RemoteRun, mirror: bool = True):
        self.run, self.remote, self.mirror = run, remote, mirror
        self.rank, self.ranks = rank_and_world_size()
        self._group = host_group()
        self._waiting: Parcel | None = None
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._given_up = threading.Event()
        self._doomed: list[str] = []
        self._sent: dict | None = None

    def forget(self, names: list[str]) -> None:
        """Rank 0's retention has removed these checkpoints here."""
        if self.mirror:
            self._doomed += names

    def offer(self, folder: Path) -> None:
        """A checkpoint is committed: it goes up now, or next where one is still under way. All ranks call this."""
        if self._waiting is not None:
            self._add_event("upload_left_out", checkpoint=self._waiting.name)
            self._waiting.close()
        self._waiting = Parcel(folder, self.rank, self.ranks)
        self._proceed()

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until everything offered is up or has failed, or for so many seconds; whether that is so."""
        until = None if seconds is None else time.monotonic() + seconds
        with long_work():
            while not self._proceed():
                late = until is not None and time.monotonic() > until
                if gather_from_ranks(late, self._group)[0]:
                    self._add_event("upload_cut_short", seconds=seconds)
                    return False
                time.sleep(_PAUSE_SECONDS)
        return True

    def _proceed(self) -> bool:
        """Where all ranks are idle, the next one begins; whether nothing is left. The ranks agree here."""
        busy = self._thread is not None and self._thread.is_alive()
        states = gather_from_ranks((busy, self._failure), self._group)
        failures = [failure for _, failure in states if failure]
        if failures:
            self._given_up.set()  # rank 0 may wait for a receipt that will not come
        if any(busy for busy, _ in states):
            return False
        self._tell(failures)
        if self._waiting is None:
            return True
        parcel, self._waiting, self._failure = self._waiting, None, None
        self._given_up.clear()
        self._thread = threading.Thread(target=self._work, args=(parcel,), name="upload", daemon=True)
        self._thread.start()
        return False

    def _tell(self, failures: list[str]) -> None:
        """What became of the last one, as events of rank 0."""
        if self._sent:
            self._add_event("upload", **self._sent)
        if failures:
            self._add_event("upload_failed", reason=failures[0])
            if self.rank == 0:
                print(f"checkpoints: upload failed: {failures[0]}", file=sys.stderr, flush=True)
        self._sent, self._failure, self._thread = None, None, None

    def _add_event(self, kind: str, **details) -> None:
        if self.rank == 0:
            self.run.add_event(kind, **details)

    def _work(self, parcel: Parcel) -> None:
        try:
            self._send(parcel)
        except _GivenUp:
            pass  # the other rank tells why
        except Exception as error:  # whatever it is, training goes on and the run tells it
            self._failure = masked(f"{parcel.name}: {str(error) or type(error).__name__}")
        finally:
            parcel.close()

    def _send(self, parcel: Parcel) -> None:
        """This rank's part; what an upload that was interrupted has sent is not sent again."""
        began, marker = time.perf_counter(), f"{parcel.name}/{MARKER}"
        found = self.remote.read_if_there(marker)
        if found == parcel.marker:
            return self._send_run_files(parcel)  # a rollback since then counts there too
        if found is not None and self.rank == 0:
            self.remote.remove(marker)
        for receipt in parcel.own_receipts:
            self._send_files(parcel, receipt)
        if self.rank == 0:
            self._await_receipts(parcel)
            self._send_run_files(parcel)
            self.remote.write_bytes(marker, parcel.marker)
            seconds = round(time.perf_counter() - began, 3)
            to = self.remote.where(parcel.name)
            self._sent = {"checkpoint": parcel.name, "to": to, "bytes": parcel.num_bytes, "seconds": seconds}
            self._mirror_removals()

    def _send_run_files(self, parcel: Parcel) -> None:
        for name, content in parcel.run_files.items():
            self.remote.write_bytes(name, content)

    def _send_files(self, parcel: Parcel, receipt: str) -> None:
        """One saving rank's files, then its receipt."""
        where, content = f"{parcel.name}/{receipt}", parcel.receipts[receipt]
        if self.remote.read_if_there(where) == content:
            return
        for name, entry in parcel.files_of(receipt).items():
            self.remote.write(f"{parcel.name}/{name}", partial(parcel.chunks, name, entry), entry["bytes"])
        self.remote.write_bytes(where, content)

    def _await_receipts(self, parcel: Parcel) -> None:
        """Return once the store holds the receipts that the marker was written upon."""
        for receipt, content in parcel.receipts.items():
            while self.remote.read_if_there(f"{parcel.name}/{receipt}") != content:
                if self._given_up.wait(_RECEIPT_PAUSE_SECONDS):
                    raise _GivenUp

    def _mirror_removals(self) -> None:
        while self._doomed:
            self.remote.remove_checkpoint(self._doomed[0])
            self._doomed.pop(0)
