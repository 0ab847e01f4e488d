"""Read a data set at an fsspec address: manifest and tokenizer at once, shards when they are needed.

`RemoteData` finds and fetches; `StreamedSplit` reads what was fetched as `TokenSplit` reads files of this machine;
`Prefetcher` finds the shards that the coming samples need, and its threads bring them into the cache in time.
"""

import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path

import numpy as np

from pretraining.data.checksums import digest_of
from pretraining.data.manifest import MANIFEST_NAME, POSITIONS_FILE, parse_manifest, parse_positions
from pretraining.data.shards import Shard, TokenSplit, between, map_shard
from pretraining.data.streaming.cache import CachedShard, CacheFull, DamagedDownload, ShardBusy, ShardCache
from pretraining.data.tokenizer import COMPANION_FILES, tokenizer_fault
from pretraining.errors import UserError
from pretraining.outside.store import Store, log_line

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

NUM_THREADS = 4
"""Shards fetched at once by a process; the processes of a machine share the work shard by shard."""

SHARE_OF_CACHE = 0.75
"""Share of the cache that one process may fill ahead; the rest is for validation and for slower processes."""

WAIT_SECONDS = 0.2
END_SECONDS = 5.0
"""How long `close` waits for a thread; a thread in the middle of a request ends by itself."""

SCANNED_SAMPLES = 4096
"""Samples whose shards are looked up in one step."""

Key = tuple[int, int]
"""(number of the split, number of the shard in it)"""
ShardNeeds = Callable[[np.ndarray], np.ndarray]
"""Positions of samples in the run [n] -> the shard that each needs, as rows of its `Key`, [n, 2] int64."""


class RemoteData:
    """One prepared data set at `address`, its shards kept in `cache`. Picklable."""

    def __init__(self, address: str, cache: ShardCache):
        self.address, self.cache, self.store = address, cache, Store(address)
        self.fingerprint, self._until_sweep = "", FEWEST_READS

    def read_manifest(self) -> dict:
        """Read the manifest; UserError if there is none, it may not be read, or a shard is larger than the cache."""
        content, where = self.store.at_first_contact().read(MANIFEST_NAME), self.store.where(MANIFEST_NAME)
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
        if fault := tokenizer_fault(folder / "tokenizer", entry):
            shutil.rmtree(folder)
            raise UserError(f"{self.address}/tokenizer/{': '.join(fault)}; copy the data there again")
        return folder

    def read_positions(self, manifest: dict) -> np.ndarray:
        """Read the places of the validation documents: int64 [documents]; UserError if they are not the manifest's."""
        content, where = self.store.read(POSITIONS_FILE), self.store.where(POSITIONS_FILE)
        return parse_positions(content, manifest, where, "copy the data there again")

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
                    what = f"damaged shard: {damage}, fetched {attempt} times; copy it there again"
                    what += " (python -m pretraining.data verify finds all such shards)"
                    raise UserError(f"{self.store.where(path)}: {what}", on_every_rank=False) from damage
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
            num_maps = sum(len(split._open) for split in self._splits())
            self._until_sweep = max(FEWEST_READS, READS_PER_MAP * num_maps)

    def unmap(self, idle_only: bool = False) -> None:
        for split in self._splits():
            split.unmap(idle_only)

    def _splits(self) -> list["StreamedSplit"]:
        return [split for split in list(_open_splits) if split.remote is self]


class StreamedSplit(TokenSplit):
    """TokenSplit over shards that `remote` fetches, with the same bytes in the same order.

    A shard is protected from eviction while it is mapped here, and unmapped when reads have moved on.
    """

    def __init__(self, remote: RemoteData, name: str, entry: dict):
        self.remote, self.name = remote, name
        super().__init__(name, entry)
        self.folder = remote.store.where(name)
        self._reads_at_sweep: dict[int, int] = {}
        self._reported = False
        _open_splits.add(self)

    def _check_shards(self) -> None:
        """Do nothing: a shard is checked when it is fetched."""

    def __getstate__(self) -> dict:
        # Maps are not copied, so their counts mean nothing there.
        return {**super().__getstate__(), "_reads_at_sweep": {}}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        _open_splits.add(self)

    def unmap(self, idle_only: bool) -> None:
        """Close the maps, or only those not read since the last sweep."""
        for number, shard in list(self._open.items()):
            if not idle_only or shard.reads == self._reads_at_sweep.get(number):
                self._open.pop(number, None)
        # Read counts of now: a shard with the same count at the next sweep was idle.
        self._reads_at_sweep = {number: shard.reads for number, shard in self._open.items()}

    def map_anew(self, number: int) -> Shard:
        entry = self.shard_entries[number]
        with self.remote.open(self.name, entry) as file:
            return map_shard(file, f"{self.folder}/{entry['file']}", entry, self.dtype)

    def _shard(self, number: int) -> Shard:
        try:
            return super()._shard(number)
        except CacheFull as error:
            where = f"{self.folder}/{self.shard_entries[number]['file']}"
            what = f"all that the cache may hold is in use, {where} finds no room; raise --data_cache_gb"
            raise UserError(f"{self.remote.cache.root}: {what}", on_every_rank=False) from error

    def _shard_if_room(self, number: int) -> Shard | None:
        """Return the shard; None if the cache is full, which is reported once."""
        try:
            return super()._shard(number)
        except CacheFull:
            if not self._reported:
                what = "all that the cache may hold is in use; reading blocks from the store one by one"
                log_line(f"{self.remote.cache.root}: {what} until there is room (raise --data_cache_gb)")
            self._reported = True
        return None

    def _first_piece(self, number: int, offset: int, count: int) -> np.ndarray:
        shard = self._shard_if_room(number)
        return self._direct(number, offset, count) if shard is None else shard.view(offset, count)

    def _next_piece(self, number: int, count: int) -> np.ndarray:
        if self._is_near(number) or count > LARGEST_DIRECT_SHARE * self.shard_entries[number]["tokens"]:
            return self._first_piece(number, 0, count)
        return self._direct(number, 0, count)

    def _is_near(self, number: int) -> bool:
        cached = self.remote.cached(self.shard_entries[number])
        return number in self._open or self.remote.cache.holds(cached)

    def _ends_between(self, number: int, low: int, high: int) -> np.ndarray:
        shard = self._shard_if_room(number) if low >= 0 or self._is_near(number) else None
        if shard is not None:
            return between(shard.ends, low, high)
        entry = self.shard_entries[number]
        first = entry["buffers"]["offsets"] + 8  # behind the zero that they begin with
        stop = first + 8 * min(entry["documents"], high + 1)  # a document has at least one token
        return between(self._stored(entry, first, stop, np.dtype("<i8")), low, high)

    def _direct(self, number: int, offset: int, count: int) -> np.ndarray:
        """Read up to `count` tokens of a shard straight from the store."""
        entry, size = self.shard_entries[number], self.dtype.itemsize
        start = entry["buffers"]["input_ids"] + offset * size
        stop = start + min(count, entry["tokens"] - offset) * size
        return self._stored(entry, start, stop, self.dtype)

    def _stored(self, entry: dict, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
        # `read_range` checks the number of bytes. A checksum exists only for the whole shard.
        return np.frombuffer(self.remote.store.read_range(f"{self.name}/{entry['file']}", start, stop), dtype)


_open_splits: weakref.WeakSet[StreamedSplit] = weakref.WeakSet()
"""Splits of this process, which unmap the shards they do not read."""


def _unmap_inherited() -> None:
    """Unmap in a forked child, which would hold its parent's locks with its parent's maps."""
    for split in list(_open_splits):
        split.unmap(idle_only=False)


os.register_at_fork(after_in_child=_unmap_inherited)


class Prefetcher:
    """Bring shards into the cache in the order the run needs them. It changes when they are read, not what.

    Each process that reads, such as a DataLoader worker, has its own threads, and holds a lock on the shards that the
    coming samples need, which protects them from eviction.
    """

    def __init__(self, needs: ShardNeeds, splits: Sequence[StreamedSplit], num_samples: int):
        """splits: those `needs` numbers; num_samples: of the whole run, from sample 0 on."""
        self.needs, self.splits, self.num_samples = needs, list(splits), num_samples
        self.running: _Threads | None = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "running": None}

    def advance(self, sample: int) -> None:
        """Note that the run reads samples from `sample` on, and that this process reads none before it."""
        # Threads do not survive a fork: the first read in a process starts its own.
        if self.running is None or self.running.process != os.getpid():
            self.running = _Threads(self, sample)
            # The threads refer to `running`, not to the prefetcher: so it can be collected, which stops them.
            weakref.finalize(self, self.running.stop.set)
        self.running.position = sample

    def close(self) -> None:
        """End the threads of this process and release the shards they kept."""
        if self.running is not None and self.running.process == os.getpid():
            self.running.stop.set()
            for thread in self.running.threads:
                thread.join(END_SECONDS)
            for file in self.running.held.values():
                file.close()
        self.running = None


class _Threads:
    """The threads of one process, and the shards they keep from eviction."""

    def __init__(self, prefetcher: Prefetcher, position: int):
        self.splits, self.position, self.process = prefetcher.splits, position, os.getpid()
        self.stop = threading.Event()
        sizes = [[entry["size"] for entry in split.shard_entries] for split in self.splits]
        room = int(self.splits[0].remote.cache.max_bytes * SHARE_OF_CACHE)
        self.window = Window(prefetcher.needs, sizes, prefetcher.num_samples, room)
        self.held: dict[Key, FileIO] = {}
        self._fetching: set[Key] = set()
        # Shards that could not be fetched: not tried again, so that other shards have their turn.
        self._failed: set[Key] = set()
        self._turn = threading.Lock()
        self.threads = [threading.Thread(target=self._run, daemon=True) for _ in range(NUM_THREADS)]
        for thread in self.threads:
            thread.start()

    def _run(self) -> None:
        """Bring shards here and keep them for the window, until told to stop."""
        while not self.stop.is_set():
            if (key := self._next()) is None:
                self.stop.wait(WAIT_SECONDS)
                continue
            split = self.splits[key[0]]
            entry = split.shard_entries[key[1]]
            file = None
            try:
                file = split.remote.cache.open(split.remote.cached(entry))
                file = file or split.remote.fetch(split.name, entry, wanted=lambda: not self.stop.is_set())
            except (ShardBusy, CacheFull):
                self.stop.wait(WAIT_SECONDS)  # other threads take the shards after it meanwhile
            except UserError:  # the read that needs the shard will ask again, and raise it
                self._failed.add(key)
            with self._turn:
                self._fetching.discard(key)
                if file is not None:
                    self.held[key] = file

    def _next(self) -> Key | None:
        """Choose the first shard of the window that is neither here nor being fetched by a thread of this process."""
        with self._turn:
            self.window.move(self.position)
            # Release first: a shard no longer needed may be evicted to make room.
            for key in self.held.keys() - self.window.last_needs.keys():
                self.held.pop(key).close()
            known = self.held.keys() | self._fetching | self._failed
            if key := next((key for key in self.window.last_needs if key not in known), None):
                self._fetching.add(key)
            return key


class Window:
    """Track the shards needed from a position on, in order of first need, up to `max_bytes` of their `shard_bytes`."""

    def __init__(self, needs: ShardNeeds, shard_bytes: Sequence[Sequence[int]], stop: int, max_bytes: int):
        self.needs, self.shard_bytes, self.stop, self.max_bytes = needs, shard_bytes, stop, max_bytes
        self.last_needs: dict[Key, int] = {}
        """Shard -> the last sample known to need it, in order of first need."""
        self.num_bytes = 0
        self._scanned: int | None = None
        self._num_shards = sum(map(len, shard_bytes))

    def move(self, position: int) -> None:
        """Forget shards last needed before `position`; look as far ahead as there is room."""
        if self._scanned is None or position > self._scanned:
            self._scanned = position
        for key in [key for key, last in self.last_needs.items() if last < position]:
            del self.last_needs[key]
            self.num_bytes -= self.shard_bytes[key[0]][key[1]]
        while self._scanned < self.stop:
            # With every shard in the window, one step ahead finds when each is needed last.
            has_all = len(self.last_needs) == self._num_shards
            if has_all and self._scanned >= position + SCANNED_SAMPLES:
                return
            samples = np.arange(self._scanned, min(self._scanned + SCANNED_SAMPLES, self.stop))
            for split, number in self.needs(samples).tolist():
                if (key := (split, number)) not in self.last_needs:
                    size = self.shard_bytes[split][number]
                    # The first shard is taken in any case: without it the run cannot go on.
                    if self.last_needs and self.num_bytes + size > self.max_bytes:
                        return
                    self.num_bytes += size
                self.last_needs[key] = self._scanned
                self._scanned += 1
