"""What one rank sends of one committed checkpoint: its files held open, so that they outlive their removal here."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import xxhash

from pretraining.checkpoints.marker import MARKER
from pretraining.checkpoints.receipts import receipt_name
from pretraining.errors import UserError
from pretraining.runtime.heartbeat import work_done

_CHUNK_BYTES = 8 << 20

RUN_FILES = ("recipe.json", "changes.json", "journal.jsonl", "flagged_blocks.jsonl", "metrics.jsonl")
RUN_FILES += ("events.jsonl", "wandb_id")
"""Of the run folder: what a start on an empty machine goes on from, besides the checkpoint."""


class Parcel:
    """A checkpoint's files as of the moment it was made; `close` lets go of them.

    receipts: {name: content} of every rank that saved. own_receipts: those whose files this rank sends; where the
    ranks that go on are others than those that saved, each sends its share. run_files: on rank 0 alone.
    """

    def __init__(self, folder: Path, rank: int, ranks: int):
        self.name = folder.name
        self.marker = (folder / MARKER).read_bytes()
        saved_by = len(list(folder.glob("rank-*.safetensors")))
        names = [receipt_name(saver, saved_by) for saver in range(saved_by)]
        self.receipts = {name: (folder / name).read_bytes() for name in names}
        self.own_receipts = names[rank::ranks]
        self._open = ExitStack()
        self._files = {
            name: self._open.enter_context((folder / name).open("rb", buffering=0))
            for receipt in self.own_receipts
            for name in self.files_of(receipt)
        }
        paths = [folder.parent / name for name in RUN_FILES] if rank == 0 else []
        self.run_files = {path.name: path.read_bytes() for path in paths if path.is_file()}

    @property
    def num_bytes(self) -> int:
        """Of every rank's files."""
        return sum(entry["bytes"] for name in self.receipts for entry in self.files_of(name).values())

    def files_of(self, receipt: str) -> dict[str, dict]:
        """{file: {"bytes", "checksum"}} of one rank that saved."""
        return json.loads(self.receipts[receipt])["files"]

    def chunks(self, name: str, entry: dict) -> Iterator[bytes]:
        """A file's bytes in order; `UserError` before the last of them where they are not those committed."""
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

    def close(self) -> None:
        """Let the disk have the room of files that are removed."""
        self._open.close()
