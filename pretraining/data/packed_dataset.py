"""Serve token blocks as samples, which the Trainer indexes, in the order of the run."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pretraining.data.arriving import ArrivingOrder, ArrivingSplit
from pretraining.data.block_guard import BlockGuard
from pretraining.data.documents import (
    IGNORED,
    BestFit,
    Cropped,
    Stretch,
    blocks_by_shard,
    count_blocks,
    cut_shares,
    masked_block,
)
from pretraining.data.order import (
    ALL_SAMPLES,
    GlobalOrder,
    GroupedOrder,
    MixedOrder,
    Order,
    OrderWithout,
    WindowedOrder,
    needed_shards,
    shards_at_once,
)
from pretraining.data.shards import TokenSplit
from pretraining.data.streaming.remote_data import SHARE_OF_CACHE, Prefetcher, ShardNeeds, StreamedSplit
from pretraining.errors import UserError

if TYPE_CHECKING:
    from pretraining.data.prepared import PreparedData
    from pretraining.recipe import Recipe

_COUNTED_BLOCKS = 32  # whose windows are counted when a run starts


@dataclass(eq=False, repr=False)
class PackedDataset:
    """Map-style: `dataset[i]` is sample `first_sample + i` of the run: input_ids and labels, int64 [L] each.

    Block b holds the tokens [b * L, b * L + L] of the stream, both ends included. The first L are the input, the last L
    the labels: they are the NEXT tokens, already shifted. Every token except the very first of the stream is a target
    exactly once (an incomplete last block is left out). Several splits (one for each source) are streams of their own.
    Their blocks are numbered split after split, and a sample has the number of its split as `source`, int64.
    """

    splits: Sequence[TokenSplit]
    sequence_length: int
    order: Order | None = None
    """Epochs follow each other without end. None: the blocks come in sequence and end with the last split
    (validation)."""
    first_sample: int = 0
    """Where a resumed run begins: nothing that was consumed is read again."""
    num_samples: int | None = None
    """None: the rest of the first epoch."""
    guard: BlockGuard | None = None
    """Looks at every block that is read."""
    masks_documents: bool = False
    """A sample also has position_ids, and its labels are those of `masked_block`."""
    packing: str = "in_sequence"
    """With "best_fit", documents near each other first change places, as `BestFit` says. The next token is then that of
    the same document or, if this ends, the first one of the document packed behind it. With "cropped", blocks are those
    of `Cropped`, and so is their number."""
    prefetcher: Prefetcher | None = None
    """Moved on by each read, if the shards come from an address."""

    def __post_init__(self) -> None:
        # One alone may be given too.
        self.splits = (self.splits,) if isinstance(self.splits, TokenSplit) else tuple(self.splits)
        self._packed: list[BestFit] | list[Cropped] | None = None
        if self.packing != "in_sequence":
            packs = BestFit if self.packing == "best_fit" else Cropped.of
            self._packed = [packs(split, self.sequence_length) for split in self.splits]
        counts = [count_blocks(split, self.sequence_length, self.packing) for split in self.splits]
        self.num_blocks = sum(counts)
        self._first_blocks = [sum(counts[:number]) for number in range(len(counts))]
        if self.num_samples is None:
            self.num_samples = max(0, self.num_blocks - self.first_sample)
        # Those of data that is being prepared grow.
        if any(isinstance(split, ArrivingSplit) for split in self.splits):
            return
        for split, count in zip(self.splits, counts, strict=True):
            if count == 0:
                what = f"{split.num_tokens:,} tokens are too few for one block of"
                remedy = f"{self.sequence_length + 1:,}; add text or shorten the sequence length"
                raise UserError(f"{split.folder}: {what} {remedy}")
        if self.order is not None and self.order.num_blocks != self.num_blocks:
            raise ValueError(f"order of {self.order.num_blocks} blocks for splits of {self.num_blocks}")
        if self.order is None and (last := self.first_sample + self.num_samples) > self.num_blocks:
            raise ValueError(f"samples up to {last} of {self.num_blocks} blocks")

    @property
    def tokens_per_epoch(self) -> int | None:
        """Return the tokens of all blocks; None if nobody knows yet how many there will be."""
        num_blocks = self.num_blocks if self.order is None else self.order.num_blocks
        return None if num_blocks == ALL_SAMPLES else num_blocks * self.sequence_length

    def __len__(self) -> int:
        return self.num_samples

    def block_numbers(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the blocks [n], int64, of the dataset's samples [n]; IndexError beyond its end."""
        indices = np.asarray(indices, np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.num_samples:
            raise IndexError(f"sample {indices.max()} of {self.num_samples}")
        samples = indices + self.first_sample
        return samples if self.order is None else self.order.blocks(samples)

    def shard_needs(self) -> ShardNeeds:
        """Tell which shards the samples of the run need; the dataset must have an order."""
        starts, shards = [], []
        for source, split in enumerate(self.splits):
            blocks = blocks_by_shard(split, self.sequence_length, self.packing)[:-1]
            starts.append(blocks + self._first_blocks[source])
            shards.append(np.stack([np.full(len(blocks), source), np.arange(len(blocks))], axis=1))
        return partial(needed_shards, self.order, np.concatenate(starts), np.concatenate(shards))

    def locate(self, block: int) -> tuple[int, int]:
        source = bisect_right(self._first_blocks, block) - 1
        return source, block - self._first_blocks[source]

    def place(self, block: int) -> tuple[int, list[Stretch]]:
        """Return which of `splits` holds a block, and the stretches of its stream that are the block's L inputs."""
        source, number = self.locate(block)
        if self._packed is not None:
            return source, self._packed[source].stretches(number)
        start = number * self.sequence_length
        return source, [(start, start + self.sequence_length)]

    def read_block(self, block: int, sample: int | None = None) -> dict[str, np.ndarray]:
        """Read inputs and labels of one block, int64 [L] each: unmasked, two views of one array of L + 1 tokens.

        The guard looks at it if `sample`, its position in the run, is given; of a block left out no token is a target.
        """
        source, stretches = self.place(block)
        split, (*others, (start, stop)) = self.splits[source], stretches
        # Only the last stretch needs one token more, the target of the last input: behind any other, the next stretch
        # begins with the target.
        pieces = [split.read(*other) for other in others] + [split.read(start, stop + 1)]
        # uint16 or uint32, as on the disk: cheaper for the guard
        stored = np.concatenate(pieces) if others else pieces[0]
        reasons = {}
        if self.guard is not None and sample is not None:
            reasons = self.guard.look(stored, split, stretches, sample=sample, block=block, source=source)
        tokens = stored.astype(np.int64)  # torch embeds and compares int64 alone
        read = {"input_ids": tokens[:-1], "labels": tokens[1:]}
        if self.masks_documents:
            # The places in the block, from 1 to L, at which a document has just ended.
            ends = split.document_ends(start, stop) - start
            if others:  # each of these ends with a document
                before = np.cumsum([end - begin for begin, end in others], dtype=np.int64)
                ends = np.append(before, ends + before[-1])
            read = masked_block(tokens, ends)
        if reasons and self.guard.leaves_out(reasons):
            # The sample keeps its place, so every other sample keeps its step, on any number of ranks.
            read["labels"] = np.full_like(read["labels"], IGNORED)
        # The loss by source is added up on the device: it needs the number beside the tokens.
        return read if len(self.splits) == 1 else {**read, "source": np.array(source)}

    def cut_shares(self) -> dict | None:
        """Count what the ends of blocks cut around the first blocks (`documents.cut_shares`); None if not packed.

        Of cropped documents {"read"}: the share of all tokens that the blocks hold.
        """
        if self._packed is None:
            return None
        packed = [each for each in self._packed if isinstance(each, BestFit)]
        if not packed:
            return {"read": self.num_blocks * self.sequence_length / sum(s.num_tokens for s in self.splits)}
        # The first samples need their shards anyway, so nothing is fetched for this.
        count = min(_COUNTED_BLOCKS, self.num_samples)
        places = [self.locate(block) for block in self.block_numbers(np.arange(count)).tolist()]
        windows = {(source, *packed[source].window_around(block)) for source, block in places}
        return cut_shares((packed[source], first, max(stop, first + 1)) for source, first, stop in windows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, np.ndarray]]:
        """Read a batch, as torch's fetcher asks for it: the order is computed for all indices together."""
        if self.prefetcher is not None:
            self.prefetcher.advance(self.first_sample + min(indices))
            self.prefetcher.splits[0].remote.count_reads(len(indices))
        read = zip(self.block_numbers(indices).tolist(), indices, strict=True)
        return [self.read_block(block, self.first_sample + index) for block, index in read]


def build_training_dataset(
    data: "PreparedData",
    recipe: "Recipe",
    first_sample: int,
    num_samples: int | None = None,
    guard: BlockGuard | None = None,
    left_out: Sequence[tuple[int, int]] = (),
) -> PackedDataset:
    """Build the run's samples from `first_sample` on, in the order that (data, seed, recipe) give.

    num_samples: None for as many as the Trainer's loop may ask for. left_out: windows [first, last) of that order
    which the run does not read (`Journal.left_out`).
    """
    if isinstance(data.train, ArrivingSplit):
        window = recipe.data.shuffle_blocks
        assert window is not None, "refusals.check_while_preparing"
        # The run reads that much more of the order.
        stop = recipe.num_samples + sum(last - first for first, last in left_out)
        order: Order = ArrivingOrder(data.train, recipe.sequence_length, window, recipe.data_seed, "", stop)
    elif data.mixture is None:
        order = _order_of(data.train, recipe, data.fingerprint, "")
    else:
        orders = [
            # A label of its own: sources of equal size must not be read in step with each other.
            _order_of(split, recipe, f"{data.fingerprint}/{source}", str(source))
            for source, split in enumerate(data.mixture.splits)
        ]
        order = MixedOrder(data.mixture.interleaving, orders)
    return PackedDataset(
        [data.train] if data.mixture is None else data.mixture.splits,
        recipe.sequence_length,
        # Wrapped only if needed: it costs a search for each batch.
        OrderWithout(order, left_out) if left_out else order,
        first_sample,
        recipe.most_samples if num_samples is None else num_samples,
        guard,
        recipe.data.document_masking,
        recipe.data.packing,
    )


def _order_of(split: TokenSplit, recipe: "Recipe", fingerprint: str, source: str) -> Order:
    """Order the blocks of one stream; source: its number in a mixture."""
    length, seed, group_size = recipe.sequence_length, recipe.data_seed, recipe.data.shuffle_shards
    num_blocks = count_blocks(split, length, recipe.data.packing)
    window = recipe.data.shuffle_blocks
    if group_size is None and window is None:
        return GlobalOrder(num_blocks, seed, fingerprint)
    first_blocks = blocks_by_shard(split, length, recipe.data.packing)
    if window is not None:
        return WindowedOrder(num_blocks, window, seed, source, shards_at_once(first_blocks, window))
    return GroupedOrder(first_blocks, group_size, seed, fingerprint)


def prefetched(dataset: PackedDataset) -> PackedDataset:
    """Prefetch if the shards come from an address; UserError if the cache may not keep what the order needs at once."""
    # Without an order blocks come in sequence (validation).
    if dataset.order is None or not isinstance(dataset.splits[0], StreamedSplit):
        return dataset
    cache, needed = dataset.splits[0].remote.cache, []
    for split, order in zip(dataset.splits, dataset.order.orders, strict=True):
        # As many shards as are shuffled together; None: all of them.
        needed += sorted((entry["size"] for entry in split.shard_entries), reverse=True)[: order.group_size]
    room, orders = cache.max_bytes * SHARE_OF_CACHE, dataset.order.orders
    if sum(needed) > room:
        most = int(room // max(needed) // len(dataset.splits))
        smaller = f", or shuffle by groups of shards: --set data.shuffle_shards={most}" if most else ""
        if any(isinstance(order, WindowedOrder) for order in orders):
            smaller = ", or take a smaller data.shuffle_blocks"
        what = f"the order of the run needs {len(needed):,} shards ({sum(needed) / 1e9:.3g} GB) at once, the cache"
        enough = f"raise --data_cache_gb to {sum(needed) / SHARE_OF_CACHE / 1e9 + 0.05:.1f}"
        raise UserError(f"{cache.root}: {what} may hold {cache.max_bytes / 1e9:.3g} GB: {enough}{smaller}")
    end = dataset.first_sample + len(dataset)
    dataset.prefetcher = Prefetcher(dataset.shard_needs(), dataset.splits, end)
    return dataset
