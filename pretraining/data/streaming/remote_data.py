"""Read a data set at an fsspec address: manifest and tokenizer at once, shards when they are needed.

`RemoteData` finds and fetches; `StreamedSplit` reads what was fetched as `TokenSplit` reads files of this machine.
"""

import io
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import numpy as np

from pretraining.data.checksums import digest_of
from pretraining.data.manifest import MANIFEST_NAME, POSITIONS_FILE, parse_manifest
from pretraining.data.shards import Shard, TokenSplit, between, map_shard
from pretraining.data.streaming.cache import CachedShard, CacheFull, DamagedDownload, ShardBusy, ShardCache
from pretraining.data.streaming.store import Patience, Store, log_line
from pretraining.data.tokenizer import COMPANION_FILES, tokenizer_fault
from pretraining.errors import UserError

FIRST_CONTACT_SECONDS = 60.0
"""The wait at the start: a store that does not answer then has more likely a wrong address than an outage."""

POLL_SECONDS = 0.02
REPORTED_AFTER_SECONDS = 20.0
ROOM_PATIENCE_SECONDS = 2.0
"""How long a read waits for other processes to release a shard before it reads past the cache."""

FEWEST_READS, READS_PER_MAP = 256, 16
"""A shard is not needed if this many reads, in random order over all open shards, miss it (wrong once in e^16)."""

DOWNLOADS = 3
"""A shard that arrives damaged this many times is damaged in the store."""


LARGEST_DIRECT_SHARE = 1 / 8
"""If a block crosses into a shard that is not here, up to this share of the shard's tokens is read from the store."""


class RemoteData:
    """One prepared data set at `address`, its shards kept in `cache`. Picklable."""

    def __init__(self, address: str, cache: ShardCache):
        self.address, self.cache, self.store = address, cache, Store(address)
        self.fingerprint, self._until_sweep = "", FEWEST_READS

    def read_manifest(self) -> dict:
        """Read the manifest; UserError if there is none, it may not be read, or a shard is larger than the cache."""
        patience = Patience(min(FIRST_CONTACT_SECONDS, self.store.patience.seconds))
        content, where = Store(self.address, patience).read(MANIFEST_NAME), self.store.where(MANIFEST_NAME)
        again = "copy the data there again", "prepare the data again and copy it there"
        manifest = parse_manifest(content, where, *again)
        self.fingerprint = manifest["fingerprint"]
        sizes = [shard["size"] for split in manifest["splits"].values() for shard in split["shards"]]
        # At the start, not hours later at the first shard that is too large.
        self.cache.check_fits(max(sizes, default=0))
        return manifest

    def local_folder(self, manifest: dict) -> Path:
        """Find the folder of this machine with the data set's `tokenizer/`; fetch it unless it is there."""
        entry = manifest["tokenizer"]
        folder = self.cache.root / self.fingerprint / f"tokenizer-{digest_of(entry)}"
        if not (folder / "tokenizer" / "tokenizer.json").is_file():
            with self.cache.disk_faults():
                self._fetch_tokenizer(folder)
        if fault := tokenizer_fault(folder / "tokenizer", entry):
            shutil.rmtree(folder)
            raise UserError(f"{self.address}/tokenizer/{': '.join(fault)}; copy the data there again")
        return folder

    def read_positions(self) -> np.ndarray:
        """Read the places of the validation documents: int64 [documents]."""
        return np.load(io.BytesIO(self.store.read(POSITIONS_FILE)))

    def _fetch_tokenizer(self, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place and renamed whole: other processes may look at the same time.
        building = Path(tempfile.mkdtemp(prefix=".tokenizer-", dir=folder.parent))
        (building / "tokenizer").mkdir()
        try:
            for name in ("tokenizer.json", *COMPANION_FILES):
                try:
                    content = self.store.read(f"tokenizer/{name}")
                except UserError as error:
                    # A companion file is optional.
                    if isinstance(error.__cause__, FileNotFoundError) and name != "tokenizer.json":
                        continue
                    raise
                (building / "tokenizer" / name).write_bytes(content)
            if not folder.exists():
                building.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)

    def cached(self, entry: dict) -> CachedShard:
        return CachedShard(self.fingerprint, entry["checksum"], entry["size"])

    def fetch(self, split: str, entry: dict, wanted: Callable[[], bool] = lambda: True) -> FileIO:
        """Fetch the shard if need be and return its file, which is protected until it and its maps are closed.

        Raises ShardBusy, CacheFull, and UserError if the store fails or its shard is damaged. `wanted` is called
        between the requests: if it says False, the fetch ends with ShardBusy.
        """
        path = f"{split}/{entry['file']}"

        def chunks() -> Iterator[bytes]:
            for chunk in self.store.chunks(path, entry["size"]):
                if not wanted():
                    raise ShardBusy
                yield chunk

        for attempt in range(1, DOWNLOADS + 1):
            try:
                return self.cache.fetch(self.cached(entry), chunks)
            except DamagedDownload as damage:
                if attempt == DOWNLOADS:
                    raise UserError(
                        f"{self.store.where(path)}: damaged shard: {damage}, fetched {attempt} times; copy it there "
                        "again (python -m pretraining.data verify finds all such shards)",
                        on_every_rank=False,
                    ) from damage
                log_line(f"{self.store.where(path)}: came damaged ({damage}), fetching it again")
        raise AssertionError

    def open(self, split: str, entry: dict) -> FileIO:
        """Wait for the shard's file; CacheFull if no room is made for it in time."""
        start, reported, full_since = time.monotonic(), False, None
        while (file := self.cache.open(self.cached(entry))) is None:
            try:
                return self.fetch(split, entry)
            except CacheFull:
                full_since = full_since or time.monotonic()
                self.unmap()  # this process's own maps may be what fills the cache
                if time.monotonic() - full_since > ROOM_PATIENCE_SECONDS:
                    raise
            except ShardBusy:
                full_since = None
            waited = time.monotonic() - start
            if waited > REPORTED_AFTER_SECONDS and not reported:
                log_line(f"waiting for {self.store.where(split)}/{entry['file']}, {waited:.0f} s now")
                reported = True
            time.sleep(POLL_SECONDS)
        return file

    def count_reads(self, count: int) -> None:
        """Count blocks about to be read in this process; from time to time, unmap the shards that are read no more."""
        self._until_sweep -= count
        if self._until_sweep <= 0:
            self.unmap(idle_only=True)
            num_maps = sum(split.num_maps() for split in self._splits())
            self._until_sweep = max(FEWEST_READS, READS_PER_MAP * num_maps)

    def unmap(self, idle_only: bool = False) -> None:
        """Close this process's maps of shards, or only those not read since the last time."""
        for split in self._splits():
            split.unmap(idle_only)

    def _splits(self) -> list["StreamedSplit"]:
        return [split for split in list(_open_splits) if split.remote is self]


class StreamedSplit(TokenSplit):
    """TokenSplit over shards that `remote` fetches. The bytes, their order and every method are the same.

    A shard is protected from eviction while it is mapped here, and unmapped when reads have moved on.
    """

    def __init__(self, remote: RemoteData, name: str, entry: dict):
        self.remote, self.name = remote, name
        super().__init__(name, entry)
        self.folder = remote.store.where(name)
        self._reads_at_sweep: dict[int, int] = {}
        self._reported = False
        _open_splits.add(self)

    def _of_entry(self, entry: dict) -> "StreamedSplit":
        return type(self)(self.remote, self.name, entry)

    def _check_shards(self) -> None:
        """Do nothing: a shard is checked when it is fetched."""

    def __getstate__(self) -> dict:
        # Maps are not copied, so their counts mean nothing there.
        return {**super().__getstate__(), "_reads_at_sweep": {}}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        _open_splits.add(self)

    def num_maps(self) -> int:
        return len(self._open)

    def unmap(self, idle_only: bool) -> None:
        """Close the maps, or only those not read since the last sweep."""
        for number, shard in list(self._open.items()):
            if not idle_only or shard.reads == self._reads_at_sweep.get(number):
                self._open.pop(number, None)
        # Read counts of now: a shard with the same count at the next sweep was idle.
        self._reads_at_sweep = {number: shard.reads for number, shard in self._open.items()}

    def map_anew(self, number: int) -> Shard:
        entry = self._entry["shards"][number]
        with self.remote.open(self.name, entry) as file:
            return map_shard(file, self._where(number), entry, self.dtype)

    def _where(self, number: int) -> str:
        return f"{self.folder}/{self._entry['shards'][number]['file']}"

    def _shard(self, number: int) -> Shard:
        try:
            return super()._shard(number)
        except CacheFull as error:
            raise UserError(
                f"{self.remote.cache.root}: all that the cache may hold is in use, {self._where(number)} finds no "
                "room; raise --data_cache_gb",
                on_every_rank=False,
            ) from error

    def _first_piece(self, number: int, offset: int, count: int) -> np.ndarray:
        shard = self._open.get(number)
        if shard is None:
            try:
                shard = super()._shard(number)
            except CacheFull:
                self._report_full_cache()
                return self._direct(number, offset, count)
        return shard.view(offset, count)

    def _next_piece(self, number: int, count: int) -> np.ndarray:
        if self._is_near(number) or count > LARGEST_DIRECT_SHARE * self._entry["shards"][number]["tokens"]:
            return self._first_piece(number, 0, count)
        return self._direct(number, 0, count)

    def _is_near(self, number: int) -> bool:
        """Return whether the shard is mapped or in the cache."""
        cached = self.remote.cached(self._entry["shards"][number])
        return number in self._open or self.remote.cache.holds(cached)

    def _ends_between(self, number: int, low: int, high: int) -> np.ndarray:
        if low >= 0 or self._is_near(number):
            try:
                return between(super()._shard(number).ends, low, high)
            except CacheFull:
                self._report_full_cache()
        # Straight from the store.
        entry = self._entry["shards"][number]
        first = entry["buffers"]["offsets"] + 8  # behind the zero that they begin with
        stop = first + 8 * min(entry["documents"], high + 1)  # a document has at least one token
        content = self.remote.store.read_range(f"{self.name}/{entry['file']}", first, stop)
        return between(np.frombuffer(content, "<i8"), low, high)

    def _direct(self, number: int, offset: int, count: int) -> np.ndarray:
        """Read up to `count` tokens of a shard straight from the store."""
        entry, size = self._entry["shards"][number], self.dtype.itemsize
        count = min(count, entry["tokens"] - offset)
        start = entry["buffers"]["input_ids"] + offset * size
        # `read_range` checks the number of bytes. A checksum exists only for the whole shard.
        content = self.remote.store.read_range(f"{self.name}/{entry['file']}", start, start + count * size)
        return np.frombuffer(content, self.dtype)

    def _report_full_cache(self) -> None:
        if not self._reported:
            log_line(
                f"{self.remote.cache.root}: all that the cache may hold is in use; reading blocks from the store "
                "one by one until there is room (raise --data_cache_gb)"
            )
        self._reported = True


_open_splits: weakref.WeakSet[StreamedSplit] = weakref.WeakSet()
"""Splits of this process, which unmap the shards they do not read."""


def _unmap_inherited() -> None:
    """Unmap in a forked child, which would hold its parent's locks with its parent's maps."""
    for split in list(_open_splits):
        split.unmap(idle_only=False)


os.register_at_fork(after_in_child=_unmap_inherited)
