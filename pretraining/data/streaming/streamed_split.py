"""A split whose shards lie in a store: read through the cache, mapped like local ones."""

import os
import weakref

import numpy as np

from pretraining.data.mapped_shard import Shard, map_shard
from pretraining.data.shards import TokenSplit, between
from pretraining.data.streaming.cache import CacheFull
from pretraining.data.streaming.remote_data import RemoteData
from pretraining.data.streaming.retries import tell
from pretraining.errors import UserError

LARGEST_DIRECT_SHARE = 1 / 8
"""What goes on into a shard that is not here is read from the store directly up to this share of its tokens."""

_splits: weakref.WeakSet["StreamedSplit"] = weakref.WeakSet()


def _unmap_inherited() -> None:
    """A forked child maps for itself: with its parent's maps it would hold its parent's locks."""
    for split in list(_splits):
        split.let_go(idle_only=False)


os.register_at_fork(after_in_child=_unmap_inherited)


class StreamedSplit(TokenSplit):
    """TokenSplit over shards that `remote` fetches. The bytes, their order and every method are the same.

    A shard is protected from eviction while it is mapped here, and let go when reads have moved on.
    """

    def __init__(self, remote: RemoteData, name: str, entry: dict):
        self.remote, self.name = remote, name
        super().__init__(name, entry)
        self.folder = remote.store.where(name)
        self._enter()
        self._reads_at_sweep: dict[int, int] = {}
        self._told = False

    def _of_entry(self, entry: dict) -> "StreamedSplit":
        return type(self)(self.remote, self.name, entry)

    def _check_shards(self) -> None:
        """Nothing: a shard is checked when it comes."""

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_reads_at_sweep": {}}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._enter()

    def _enter(self) -> None:
        self.remote.splits.add(self)
        _splits.add(self)

    def num_maps(self) -> int:
        """Shards mapped here."""
        return len(self._open)

    def let_go(self, idle_only: bool) -> None:
        """Close the maps, or those not read since the last sweep."""
        for number, shard in list(self._open.items()):
            if not idle_only or shard.reads == self._reads_at_sweep.get(number):
                self._open.pop(number, None)
        self._reads_at_sweep = {number: shard.reads for number, shard in self._open.items()}

    def map_anew(self, number: int) -> Shard:
        """The shard, fetched unless it is here, and mapped."""
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
                self._tell_of_the_full_cache()
                return self._direct(number, offset, count)
        return shard.view(offset, count)

    def _next_piece(self, number: int, count: int) -> np.ndarray:
        if self._is_near(number) or count > LARGEST_DIRECT_SHARE * self._entry["shards"][number]["tokens"]:
            return self._first_piece(number, 0, count)
        return self._direct(number, 0, count)

    def _is_near(self, number: int) -> bool:
        """Whether the shard is mapped, or in the cache."""
        cached = self.remote.cached(self._entry["shards"][number])
        return number in self._open or self.remote.cache.holds(cached)

    def _ends_between(self, number: int, low: int, high: int) -> np.ndarray:
        if low >= 0 or self._is_near(number):
            try:
                return between(super()._shard(number).ends, low, high)
            except CacheFull:
                self._tell_of_the_full_cache()
        return between(self._direct_ends(number, high), low, high)

    def _direct_ends(self, number: int, high: int) -> np.ndarray:
        """The ends of a shard's documents up to `high`, straight from the store; a document has a token at least."""
        entry = self._entry["shards"][number]
        first = entry["buffers"]["offsets"] + 8  # behind the zero that they begin with
        stop = first + 8 * min(entry["documents"], high + 1)
        return np.frombuffer(self.remote.store.read_range(f"{self.name}/{entry['file']}", first, stop), "<i8")

    def _direct(self, number: int, offset: int, count: int) -> np.ndarray:
        """Up to `count` tokens of a shard, straight from the store; their number is checked, their sum cannot be."""
        entry, size = self._entry["shards"][number], self.dtype.itemsize
        count = min(count, entry["tokens"] - offset)
        start = entry["buffers"]["input_ids"] + offset * size
        content = self.remote.store.read_range(f"{self.name}/{entry['file']}", start, start + count * size)
        return np.frombuffer(content, self.dtype)

    def _tell_of_the_full_cache(self) -> None:
        if not self._told:
            tell(
                f"{self.remote.cache.root}: all that the cache may hold is in use; reading blocks from the store "
                "one by one until there is room (raise --data_cache_gb)"
            )
        self._told = True
