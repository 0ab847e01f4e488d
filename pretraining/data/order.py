"""Compute the order of a run: which block its i-th sample is, and which shards it needs.

The order is arithmetic, not an index file: a pure function of the sample's position, whatever the ranks, micro-batch or
accumulation. A run can be resumed anywhere without reading what came before. recipe/budget.py says which samples a step
has.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from pretraining.data.interleaving import Interleaving

_NUM_ROUNDS = 8
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Constants of the splitmix64 finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""

_WORD = (1 << 64) - 1

ALL_SAMPLES = 1 << 60
"""More samples than any run has."""

_FEW = 16  # up to this many positions are cheaper one by one than as an array


class Order:
    """Which block each sample of a run is."""

    num_blocks: int
    group_size: int | None = None
    """Shards that are shuffled together; None: all of them."""

    def blocks(self, sample_indices: np.ndarray) -> np.ndarray:
        """Return the block numbers [n], int64, of the samples at positions [n] of the run, of any epoch."""
        raise NotImplementedError

    def positions(self, sample_indices: np.ndarray) -> np.ndarray:
        """Return the positions [n], int64, in the full order: equal to those of the run unless windows are left out."""
        return np.asarray(sample_indices, np.int64)

    def ready_until(self) -> int:
        """Return how many samples of the run, from its beginning on, can be read now."""
        return ALL_SAMPLES

    @property
    def orders(self) -> Sequence["Order"]:
        """List the order of each source; for a single stream, this order itself."""
        return (self,)


class _EpochOrder(Order):
    """An order in which every epoch reads each block once, in a fresh order."""

    def blocks(self, sample_indices: np.ndarray) -> np.ndarray:
        epochs, positions = np.divmod(np.asarray(sample_indices, np.int64), self.num_blocks)
        blocks = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            blocks[chosen] = self._blocks_of_epoch(positions[chosen], epoch)
        return blocks

    def _blocks_of_epoch(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        raise NotImplementedError


class GlobalOrder(_EpochOrder):
    """Permute all blocks again for every epoch, by (seed, fingerprint, epoch). Any sample costs O(1)."""

    def __init__(self, num_blocks: int, seed: int, fingerprint: str):
        self.num_blocks, self.seed, self.fingerprint = num_blocks, seed, fingerprint
        self._permutation = Permutation(num_blocks)

    def _blocks_of_epoch(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        # The fingerprint is part of the key, so that another data set has another order under the same seed.
        return self._permutation.permute(positions, f"{self.seed}/{self.fingerprint}/{epoch}")


class GroupedOrder(_EpochOrder):
    """Shuffle the shards again for every epoch, take `group_size` of them at a time, and shuffle the blocks of a group.

    This is for streamed data: the samples of one group need `group_size` shards and, if a block crosses a shard's end,
    the beginning of the next shard. The key is (seed, fingerprint, epoch). Any sample costs O(log shards).
    """

    def __init__(self, first_blocks: np.ndarray, group_size: int, seed: int, fingerprint: str):
        """first_blocks: [shards + 1], as `blocks_starting` returns them."""
        self.first_blocks = np.asarray(first_blocks, np.int64)
        self.num_blocks = int(self.first_blocks[-1])
        self.group_size, self.seed, self.fingerprint = group_size, seed, fingerprint
        # A short shard may begin and end inside one block: no block starts in it.
        self._filled = np.flatnonzero(np.diff(self.first_blocks))
        # One value, which threads replace at once: the last epoch that was arranged.
        self._arranged: tuple = (None, None)

    def _arrange(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the epoch's shuffled shards, without those in which no block starts, [shards]; the position in blocks
        after each of them if they were read in sequence, [shards]; that at which each group begins, [groups + 1].
        """
        arranged, found = self._arranged
        if arranged != epoch:
            permutation = Permutation(len(self._filled))
            shards = self._filled[permutation.permute(np.arange(len(self._filled)), self._label(epoch))]
            ends = np.cumsum(np.diff(self.first_blocks)[shards])
            starts = np.concatenate([[0], ends[self.group_size - 1 :: self.group_size]])
            # The last group may have fewer shards.
            found = shards, ends, starts if starts[-1] == ends[-1] else np.append(starts, ends[-1])
            self._arranged = epoch, found
        return found

    def _label(self, *parts: int) -> str:
        return "/".join(map(str, ("grouped", self.seed, self.fingerprint, self.group_size, *parts)))

    def _blocks_of_epoch(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        shards, ends, starts = self._arrange(epoch)
        groups = np.searchsorted(starts, positions, side="right") - 1
        landed = np.empty_like(positions)
        for group in np.unique(groups):
            chosen, start = groups == group, starts[group]
            # Groups differ in size, so each is permuted by a network of its own.
            inside = Permutation(int(starts[group + 1] - start))
            label = self._label(epoch, int(group))
            landed[chosen] = start + inside.permute(positions[chosen] - start, label)
        which = np.searchsorted(ends, landed, side="right")
        # Counted back from the shard's end: first_blocks has the end of each, `ends` that of its place in the epoch.
        return self.first_blocks[shards[which] + 1] - (ends[which] - landed)


class WindowedOrder(_EpochOrder):
    """Read the blocks in windows of `window` neighbours, one window after the other, and shuffle inside each.

    So the order of a window is known before the blocks behind it are: its key is (seed, label, epoch, window), without
    an identity of the data, and only the last window of an epoch depends on their number. Any sample costs O(1).
    """

    def __init__(
        self, num_blocks: int, window: int, seed: int, label: str = "", group_size: int | None = None
    ):
        """label: tells sources of a mixture apart. group_size: shards that a window needs (`shards_at_once`)."""
        self.num_blocks, self.window, self.seed, self.label = num_blocks, window, seed, label
        self.group_size = group_size

    def _blocks_of_epoch(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        windows = positions // self.window
        blocks = np.empty_like(positions)
        for number in np.unique(windows).tolist():
            chosen, start = windows == number, number * self.window
            # The last window of an epoch may have fewer blocks.
            inside = Permutation(min(self.window, self.num_blocks - start))
            label = "/".join(map(str, ("windowed", self.seed, self.label, self.window, epoch, number)))
            blocks[chosen] = start + inside.permute(positions[chosen] - start, label)
        return blocks


def shards_at_once(first_blocks: np.ndarray, window: int) -> int:
    """Return the most shards in which one window's blocks start; first_blocks: [shards + 1], of `blocks_starting`."""
    starts = np.arange(0, int(first_blocks[-1]), window)
    first = np.searchsorted(first_blocks, starts, side="right")
    last = np.searchsorted(first_blocks, np.minimum(starts + window, first_blocks[-1]) - 1, side="right")
    return int((last - first).max()) + 1


def blocks_starting(token_starts: np.ndarray, sequence_length: int, num_blocks: int) -> np.ndarray:
    """Return the first block that starts in each shard, then `num_blocks`: [shards + 1], int64.

    token_starts: [shards + 1], the tokens before each shard, as `TokenSplit.token_starts` has them.
    """
    # Rounded up: a block that a shard's start cuts belongs to the shard before. The last tokens may fill no block.
    return np.minimum(-(-np.asarray(token_starts, np.int64) // sequence_length), num_blocks)


class MixedOrder(Order):
    """Order the blocks of several sources, which are numbered source after source.

    The interleaving says which draw of which source a sample is. The source's own order says which block that draw is.
    So within an epoch of a source no block is repeated, whatever the shares are.
    """

    def __init__(self, interleaving: Interleaving, orders: Sequence[Order]):
        self.interleaving, self._orders = interleaving, tuple(orders)
        counts = [order.num_blocks for order in orders]
        self.num_blocks = sum(counts)
        self._first_blocks = np.cumsum([0, *counts[:-1]], dtype=np.int64)

    @property
    def orders(self) -> Sequence[Order]:
        return self._orders

    def blocks(self, sample_indices: np.ndarray) -> np.ndarray:
        sources, draws = self.interleaving.draws(sample_indices)
        blocks = np.empty_like(draws)
        for source in np.unique(sources):
            chosen = sources == source
            blocks[chosen] = self._orders[source].blocks(draws[chosen]) + self._first_blocks[source]
        return blocks


class OrderWithout(Order):
    """Take the samples of `order` outside the windows [first, last) that a rollback left out; later ones move on."""

    def __init__(self, order: Order, left_out: Sequence[tuple[int, int]]):
        """left_out: disjoint windows in order (`Journal.left_out`)."""
        self.order, self.num_blocks = order, order.num_blocks
        windows, self._windows = np.array(left_out, np.int64).reshape(-1, 2), tuple(left_out)
        self._shifts = np.concatenate([[0], np.cumsum(windows[:, 1] - windows[:, 0])])
        # Where each window begins for the run, which has already left out the windows before it.
        self._starts = windows[:, 0] - self._shifts[:-1]

    @property
    def orders(self) -> Sequence[Order]:
        return self.order.orders

    def ready_until(self) -> int:
        """Return how many samples can be read: the positions that are ready, without those that are left out."""
        ready = self.order.ready_until()
        return ready - sum(max(0, min(stop, ready) - first) for first, stop in self._windows)

    def positions(self, sample_indices: np.ndarray) -> np.ndarray:
        samples = np.asarray(sample_indices, np.int64)
        return samples + self._shifts[np.searchsorted(self._starts, samples, side="right")]

    def blocks(self, sample_indices: np.ndarray) -> np.ndarray:
        return self.order.blocks(self.positions(sample_indices))


def needed_shards(order: Order, starts: np.ndarray, shards: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return for each sample that of `shards` in which its block starts; a prefetch asks this.

    The few tokens of a block that ends in the next shard are no need of that. starts: the first block of each shard.
    """
    return shards[np.searchsorted(starts, order.blocks(samples), side="right") - 1]


class Permutation:
    """Compute keyed permutations of `num_blocks` numbers, any place of any of them in O(1).

    A Feistel network (Luby and Rackoff, 1988) over the next power of two, walked along its cycles until it
    reaches a block (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        num_bits = max(2, (num_blocks - 1).bit_length())  # a half must have a bit
        self._widths = (num_bits - num_bits // 2, num_bits // 2)

    def permute(self, positions: np.ndarray, label: str) -> np.ndarray:
        """Return what each position is mapped to under the key of `label`: [n] int64."""
        if self.num_blocks == 1:
            return np.zeros(len(positions), np.int64)
        # Little-endian, so that every machine has the same order.
        digest = hashlib.blake2b(label.encode(), digest_size=8 * _NUM_ROUNDS).digest()
        keys = np.frombuffer(digest, "<u8").tolist()
        if len(positions) <= _FEW:
            # In Python's integers: for a few positions faster than arrays.
            few = []
            for value in positions.tolist():
                while (value := self._feistel(value, keys)) >= self.num_blocks:
                    pass
                few.append(value)
            return np.array(few, np.int64)
        values = self._feistel(positions.astype(np.uint64), keys)
        # Results beyond the blocks are mapped on until all are inside (cycle walking).
        while (outside := values >= self.num_blocks).any():
            values[outside] = self._feistel(values[outside], keys)
        return values.astype(np.int64)

    def _feistel(self, values: Any, keys: list[int]) -> Any:
        """Permute numbers of [0, 2**bits): an array, uint64, or one Python integer."""
        high_bits, low_bits = self._widths
        for key in keys:
            low = values & ((1 << low_bits) - 1)
            # splitmix64's finaliser. Products of arrays wrap without a warning; `_WORD` keeps 64 bits of an integer.
            mixed = low ^ key
            mixed = (mixed ^ mixed >> 30) * _MULTIPLIERS[0] & _WORD
            mixed = (mixed ^ mixed >> 27) * _MULTIPLIERS[1] & _WORD
            mixed = (values >> low_bits ^ mixed ^ mixed >> 31) & ((1 << high_bits) - 1)
            values = low << high_bits | mixed
            # The halves swap each round, so an odd number of bits works too.
            high_bits, low_bits = low_bits, high_bits
        return values
