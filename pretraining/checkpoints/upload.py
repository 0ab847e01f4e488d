"""Upload to a store: committed checkpoints behind training, and the export at the end.

Checkpoints go to `checkpoints.upload`: files, then receipts, the marker last. Each rank's thread sends the files that
the rank wrote, one at a time. Rank 0 adds the marker once every rank has reported that its files are in the store. If
the store fails, that is an event and never stops the run. Only one checkpoint is uploaded at a time. Of those that are
committed in the meantime, only the newest is uploaded, next or at the end.
"""

import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import xxhash

from pretraining.checkpoints.folders import step_in
from pretraining.checkpoints.format import MARKER, is_of_rank, parse_marker, parse_receipt, receipt_name
from pretraining.checkpoints.remote import RUN_FILES, RemoteRun
from pretraining.checkpoints.retention import Retention
from pretraining.errors import UserError
from pretraining.outside.files import read_bytes
from pretraining.outside.masking import masked
from pretraining.runtime.heartbeat import long_work, work_done
from pretraining.runtime.process_group import Messages, gather_from_ranks, host_group, rank_and_world_size
from pretraining.runtime.run_folder import RunFolder, step_in_name, unix_seconds

_PAUSE_SECONDS = 0.05  # between two exchanges of the ranks
_CHUNK_BYTES = 256 << 10  # it stays in the processor's cache between hashing and sending

_SEND, _SENT = b"send", b"sent"  # what rank 0 finds is to be done with a checkpoint; a rank has done it


class _GivenUp(Exception):
    """Another rank could not send its files."""


class Uploader:
    """Sends a run's committed checkpoints; every rank makes one, and calls the same methods at the same steps.

    mirror: checkpoints that retention removes here (`remove`) are also removed from the store, after the next upload.
    rule: retention of checkpoints in the store that this folder never had, as after the loss of a disk; applied once,
        with `mirror`.
    """

    def __init__(self, run: RunFolder, remote: RemoteRun, mirror: bool = True, rule: Retention | None = None):
        self.run, self.remote, self.mirror, self.rule = run, remote, mirror, rule
        self.rank, self.ranks = rank_and_world_size()
        self._began = time.time()
        # of the main thread alone, in `offer` and `wait`; the thread of an upload sends messages
        self._group = host_group()
        self._waiting: Parcel | None = None
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._given_up = threading.Event()
        self._messages = Messages("upload")  # used by the thread alone
        # Names the uploads of this process in messages.
        self._attempt = gather_from_ranks(uuid.uuid4().hex, self._group)[0]
        self._num_uploads = 0
        self._removed_here: list[str] = []
        self._sent: dict | None = None

    def remove(self, names: list[str]) -> None:
        """Remove from the store, after the next upload, the checkpoints that rank 0's retention removed here."""
        if self.mirror:
            self._removed_here += names

    def offer(self, folder: Path) -> None:
        """Upload a committed checkpoint now, or next if another one is under way. All ranks call this."""
        if self._waiting is not None:
            self._add_event("upload_left_out", checkpoint=self._waiting.name)
            self._waiting.open_files.close()
        # Opens the files now, because retention may remove them before their upload begins.
        self._waiting = Parcel(folder, self.rank, self.ranks)
        self._proceed()

    def wait(self) -> None:
        with long_work():
            while not self._proceed():
                time.sleep(_PAUSE_SECONDS)

    def _proceed(self) -> bool:
        """Begin the next upload if all ranks are idle; returns True if none is left. The ranks agree here."""
        busy = self._thread is not None and self._thread.is_alive()
        states = gather_from_ranks((busy, self._failure), self._group)
        failures = [failure for _, failure in states if failure]
        if failures:
            self._given_up.set()  # rank 0 may wait for a receipt that will not come
        if any(busy for busy, _ in states):
            return False
        if self._sent:
            self._add_event("upload", **self._sent)
        if failures:
            self._add_event("upload_failed", reason=failures[0])
            if self.rank == 0:
                print(f"checkpoints: upload failed: {failures[0]}", file=sys.stderr, flush=True)
        self._sent, self._failure, self._thread = None, None, None
        if self._waiting is None:
            return True
        parcel, self._waiting = self._waiting, None
        self._given_up.clear()
        self._num_uploads += 1

        def work() -> None:
            try:
                self._send(parcel)
            except _GivenUp:
                pass  # the other rank reports why
            except Exception as error:  # any error: training goes on, and the run reports it
                # It is printed too. An address in it may hold credentials.
                self._failure = masked(f"{parcel.name}: {str(error) or type(error).__name__}")
            finally:
                parcel.open_files.close()  # so that the disk gets back the room of removed ones

        self._thread = threading.Thread(target=work, name="upload", daemon=True)
        self._thread.start()
        return False

    def _add_event(self, kind: str, **details) -> None:
        if self.rank == 0:
            self.run.add_event(kind, **details)

    def _send(self, parcel: "Parcel") -> None:
        """Send this rank's part, without what an interrupted upload has sent already."""
        began, upload = time.perf_counter(), f"{self._attempt}.{self._num_uploads}"
        if self.rank:
            if self._await(f"{upload}/plan") == _SEND:
                self._send_own(parcel)
                self._messages.send(f"{upload}/{self.rank}", _SENT)
            return
        marker = self.remote.marker(parcel.name)
        is_there = marker == parcel.marker
        if not (is_there or marker is None):
            # of another one of its step: it must go before any rank changes a file
            saved = None
            with suppress(UserError, ValueError):
                saved = parse_marker(marker, self.remote.address).get("saved")
            if saved is not None and unix_seconds(saved) > self._began:  # after this start, and not by it
                remedy = "give one of them another name, --output_dir or checkpoints.upload"
                raise UserError(f"another run commits to the same place; {remedy}")
            self.remote.remove(f"{parcel.name}/{MARKER}")
        if self.ranks > 1:
            self._messages.remove(f"{self._attempt}.{self._num_uploads - 1}/plan")  # all have read that one
            self._messages.send(f"{upload}/plan", _SENT if is_there else _SEND)
        if not is_there:
            self._send_own(parcel)
            for rank in range(1, self.ranks):
                self._await(f"{upload}/{rank}", last=True)
        for name, content in parcel.run_files.items():  # the journal may hold a rollback since then
            self.remote.write_bytes(name, content)
        if is_there:
            return
        if not self.remote.create(f"{parcel.name}/{MARKER}", parcel.marker):
            raise UserError("another run has committed it there meanwhile")
        # what an interrupted upload, or a damaged checkpoint of the same step, has left in the folder
        for name in set(self.remote.sizes(parcel.name) or ()) - {*parcel.files, MARKER}:
            self.remote.remove(f"{parcel.name}/{name}")
        seconds = round(time.perf_counter() - began, 3)
        to = self.remote.where(parcel.name)
        self._sent = {"checkpoint": parcel.name, "to": to, "bytes": parcel.num_bytes, "seconds": seconds}
        if self.mirror and self.rule is not None:
            # committed ones up to this step that the store alone holds, and the rule does not keep
            markers = {}
            for name in self.remote.checkpoints():
                # none, a damaged one, or a newer version's: not ours to judge
                with suppress(UserError, ValueError):
                    if step_in(name) <= step_in(parcel.name):
                        markers[name] = parse_marker(self.remote.marker(name) or b"", self.remote.where(name))
            kept = self.rule.kept_steps((step_in(name), marker) for name, marker in markers.items())
            kept |= set(map(step_in_name, self.run.committed()))
            self._removed_here += [name for name in markers if step_in(name) not in kept]
            self.rule = None
        # A name leaves the list only after its removal: if the store fails, the next upload tries again.
        while self._removed_here:
            self.remote.remove_checkpoint(self._removed_here[0])
            self._removed_here.pop(0)

    def _send_own(self, parcel: "Parcel") -> None:
        """Send the files of each saving rank that is this rank's to send, and then its receipt."""
        for receipt, content in parcel.receipts.items():
            where = f"{parcel.name}/{receipt}"
            if self.remote.read_if_there(where) == content:
                continue
            for name, entry in parcel.files_of(receipt).items():
                chunks = partial(parcel.chunks, name, entry)
                self.remote.write(f"{parcel.name}/{name}", chunks, entry["bytes"])
            self.remote.write_bytes(where, content)

    def _await(self, name: str, last: bool = False) -> bytes:
        """Return the message of a name once it has come. last: no other rank reads it, so that it is removed."""
        while True:
            content = self._messages.take(name) if last else self._messages.read(name)
            if content is not None:
                return content
            if self._given_up.wait(_PAUSE_SECONDS):
                raise _GivenUp


class Parcel:
    """What one rank sends of a committed checkpoint.

    receipts: {name: content} of the saving ranks whose files this rank sends. run_files: on rank 0 alone.
    """

    def __init__(self, folder: Path, rank: int, ranks: int):
        self.name = folder.name
        self.marker = read_bytes(folder / MARKER)
        content = parse_marker(self.marker, folder)
        self.files = content["files"]
        self.num_bytes = sum(
            entry["bytes"]
            for name, entry in content["files"].items()
            if not (is_of_rank(name) and name.endswith(".json"))  # receipts
        )
        names = [receipt_name(saver, content["ranks"]) for saver in range(rank, content["ranks"], ranks)]
        # A node's own disk lacks what it did not need; the store, from which the rest came, then holds all.
        self.receipts = {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
        # Open files can still be read after retention has removed them here.
        self.open_files = ExitStack()
        self._files = {
            name: self.open_files.enter_context((folder / name).open("rb", buffering=0))
            for receipt in self.receipts
            for name in self.files_of(receipt)
            if (folder / name).exists()
        }
        paths = [folder.parent / name for name in RUN_FILES] if rank == 0 else []
        self.run_files = {path.name: path.read_bytes() for path in paths if path.is_file()}

    def files_of(self, receipt: str) -> dict[str, dict]:
        return parse_receipt(self.receipts[receipt], f"{self.name}/{receipt}")["files"]

    def chunks(self, name: str, entry: dict) -> Iterator[bytes]:
        """Yield a file's bytes in order; `UserError` if they are not the committed ones."""
        # The last chunk waits for the checksum: a damaged file never arrives complete.
        file, digest, last = self._files[name], xxhash.xxh128(), b""
        file.seek(0)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            if last:
                yield last
                work_done(len(last))  # the store has taken it
            last = chunk
        if f"xxh128:{digest.hexdigest()}" != entry["checksum"]:
            raise UserError(f"{name} of {self.name} has changed since it was committed")
        yield last


def send_export(run: RunFolder, remote: RemoteRun) -> None:
    """Send the export to the run's store, and compare the sizes there. A store that fails is a line and an event."""
    began = time.perf_counter()
    sizes = {path.name: path.stat().st_size for path in sorted(run.export.iterdir()) if path.is_file()}
    try:
        for name in sizes:
            remote.write_file(f"{run.export.name}/{name}", run.export / name)
        arrived = remote.sizes(run.export.name)
        if arrived is not None and {name: arrived.get(name) for name in sizes} != sizes:
            raise UserError(f"{remote.where(run.export.name)}: not what was sent; copy {run.export} there")
    except (UserError, OSError) as error:
        print(f"checkpoints: the export's upload failed: {masked(str(error))}", file=sys.stderr, flush=True)
        return run.add_event("export_upload_failed", reason=str(error))
    seconds = round(time.perf_counter() - began, 3)
    to = remote.where(run.export.name)
    run.add_event("export_upload", to=to, bytes=sum(sizes.values()), seconds=seconds)
