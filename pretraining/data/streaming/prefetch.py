"""Fetch ahead: find the shards that the coming samples need; threads bring them into the cache in time."""

import os
import threading
import weakref
from collections.abc import Sequence
from io import FileIO

import numpy as np

from pretraining.data.order import ShardNeeds, WindowedOrder
from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.streaming.cache import CacheFull, ShardBusy
from pretraining.data.streaming.remote_data import StreamedSplit
from pretraining.errors import UserError

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


class PrefetchedDataset:
    """The samples of `dataset`, unchanged; each read moves the prefetcher on."""

    def __init__(self, dataset: PackedDataset, prefetcher: "Prefetcher"):
        self.dataset, self.prefetcher = dataset, prefetcher
        self._remote = prefetcher.splits[0].remote

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict]:
        self.prefetcher.advance(self.dataset.first_sample + min(indices))
        self._remote.count_reads(len(indices))
        return self.dataset.__getitems__(indices)


def prefetched(dataset: PackedDataset) -> PackedDataset | PrefetchedDataset:
    """Prefetch if the shards come from an address; the samples stay the same.

    Raises:
        UserError: the cache may not keep what the order needs at once.
    """
    # Without an order blocks come in sequence (validation).
    if dataset.order is None or not isinstance(dataset.splits[0], StreamedSplit):
        return dataset
    orders, cache = dataset.order.orders, dataset.splits[0].remote.cache
    sizes = [sorted((e["size"] for e in split.shard_entries), reverse=True) for split in dataset.splits]
    # Of each split as many shards as are shuffled together; None: all of them.
    needed = [
        size for shards, order in zip(sizes, orders, strict=True) for size in shards[: order.group_size]
    ]
    room = cache.max_bytes * SHARE_OF_CACHE
    if sum(needed) > room:
        most = int(room // max(needed) // len(sizes))
        smaller = f", or shuffle by groups of shards: --set data.shuffle_shards={most}" if most else ""
        if any(isinstance(order, WindowedOrder) for order in orders):
            smaller = ", or take a smaller data.shuffle_blocks"
        raise UserError(
            f"{cache.root}: the order of the run needs {len(needed):,} shards ({sum(needed) / 1e9:.3g} GB) at once, "
            f"the cache may hold {cache.max_bytes / 1e9:.3g} GB: raise --data_cache_gb to "
            f"{sum(needed) / SHARE_OF_CACHE / 1e9 + 0.05:.1f}{smaller}"
        )
    end = dataset.first_sample + len(dataset)
    return PrefetchedDataset(dataset, Prefetcher(dataset.shard_needs(), dataset.splits, end))


class Prefetcher:
    """Bring shards into the cache in the order the run needs them. It changes when they are read, not what.

    `advance(sample)` gives it the position of the run. Each process that reads, such as a DataLoader worker, has its
    own threads. A lock protects the shards that the coming samples need from eviction.
    """

    def __init__(self, needs: ShardNeeds, splits: Sequence[StreamedSplit], num_samples: int):
        """splits: those `needs` numbers; num_samples: of the whole run, from sample 0 on."""
        self.needs, self.splits, self.num_samples = needs, list(splits), num_samples
        self.cache = self.splits[0].remote.cache
        self._forget()

    def __getstate__(self) -> dict:
        return {key: self.__dict__[key] for key in ("needs", "splits", "num_samples", "cache")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._process: int | None = None
        self._running: _Threads | None = None

    def advance(self, sample: int) -> None:
        """Note that the run reads samples from `sample` on, and that this process reads none before it."""
        # Threads do not survive a fork: the first read in a process starts its own.
        if self._process != os.getpid():
            self._process, self._running = os.getpid(), _Threads(self)
            self._running.position = sample
            for thread in self._running.threads:
                thread.start()
            # The threads refer to `_running`, not to the prefetcher: so it can be collected, which stops them.
            weakref.finalize(self, self._running.stop.set)
        self._running.position = sample

    def close(self) -> None:
        """End the threads of this process and release the shards they kept."""
        if self._running is not None and self._process == os.getpid():
            self._running.stop.set()
            for thread in self._running.threads:
                thread.join(END_SECONDS)
            for file in self._running.held.values():
                file.close()
        self._forget()


class _Threads:
    """The threads of one process, and the shards they keep from eviction."""

    def __init__(self, prefetcher: Prefetcher):
        self.splits, self.position = prefetcher.splits, 0
        self.stop = threading.Event()
        sizes = [[entry["size"] for entry in split.shard_entries] for split in self.splits]
        room = int(prefetcher.cache.max_bytes * SHARE_OF_CACHE)
        self.window = Window(prefetcher.needs, sizes, prefetcher.num_samples, room)
        self.held: dict[Key, FileIO] = {}
        self._fetching: set[Key] = set()
        # Shards that could not be fetched: not tried again, so that other shards have their turn.
        self._failed: set[Key] = set()
        self._turn = threading.Lock()
        self.threads = [threading.Thread(target=self._run, daemon=True) for _ in range(NUM_THREADS)]

    def _run(self) -> None:
        """Bring shards here and keep them for the window, until told to stop."""
        while not self.stop.is_set():
            if (key := self._next()) is None:
                self.stop.wait(WAIT_SECONDS)
                continue
            split = self.splits[key[0]]
            entry = split.shard_entries[key[1]]
            try:
                file = split.remote.cache.open(split.remote.cached(entry))
                file = file or split.remote.fetch(split.name, entry, wanted=lambda: not self.stop.is_set())
            except (ShardBusy, CacheFull):
                file = None
                self.stop.wait(WAIT_SECONDS)  # other threads take the shards after it meanwhile
            except UserError:  # the read that needs the shard will ask again, and raise it
                file = None
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
            for key in [key for key in self.held if key not in self.window.last_needs]:
                self.held.pop(key).close()
            for key in self.window.last_needs:
                if key not in self.held and key not in self._fetching and key not in self._failed:
                    self._fetching.add(key)
                    return key
        return None


class Window:
    """Track the shards needed from a position on, in order of first need, up to `max_bytes` of them.

    shard_bytes: for each split the sizes of its shards.
    """

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
            if (has_all and self._scanned >= position + SCANNED_SAMPLES) or not self._scan():
                break

    def _scan(self) -> bool:
        """Look at the next samples; False if one of them needs a shard that finds no room."""
        start = self._scanned
        samples = np.arange(start, min(start + SCANNED_SAMPLES, self.stop))
        needed = self.needs.of(samples)
        # Split and shard in one number: `unique` of plain integers is faster than of rows.
        numbers, firsts, places = np.unique(
            (needed[:, 0] << 32) | needed[:, 1], return_index=True, return_inverse=True
        )
        keys = [(number >> 32, number & 0xFFFFFFFF) for number in numbers.tolist()]
        # Samples before `halt` found room. The scan goes on from there when room is free.
        halt = len(samples)
        for index in np.argsort(firsts).tolist():
            key = keys[index]
            if key in self.last_needs:
                continue
            size = self.shard_bytes[key[0]][key[1]]
            # The first shard is taken in any case: without it the run cannot go on.
            if self.last_needs and self.num_bytes + size > self.max_bytes:
                halt = int(firsts[index])
                break
            self.last_needs[key] = 0
            self.num_bytes += size
        lasts = np.full(len(keys), -1)
        lasts[places[:halt]] = np.arange(halt)  # of equal places numpy keeps the last
        for key, last in zip(keys, lasts.tolist(), strict=True):
            if last >= 0:
                self.last_needs[key] = start + last
        self._scanned = start + halt
        return halt == len(samples)
