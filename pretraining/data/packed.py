"""Token blocks as samples: what the Trainer indexes, already in the order of the run."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from pretraining.data.best_fit import BestFit, Stretch
from pretraining.data.document_masking import masked_block
from pretraining.data.mixing.grouped import blocks_starting
from pretraining.data.mixing.guard import BlockGuard
from pretraining.data.mixing.shards import ShardNeeds
from pretraining.data.order import Order
from pretraining.data.shards import TokenSplit
from pretraining.errors import UserError


class PackedDataset:
    """Map-style: `dataset[i]` is sample `first_sample + i` of the run: input_ids and labels, int64 [L] each.

    Block b holds the tokens [b * L, b * L + L] of the stream: the first L are the input, the last L the
    labels, which are thus the NEXT tokens, already shifted. Every token but the very first of the stream is a
    target exactly once (but for an incomplete last block). With several splits, one a source, each is a stream
    of its own and the blocks are numbered through, split after split.

    Without an `order` the blocks come in sequence and end with the last split (validation). With one, epochs
    follow each other without end: `num_samples` bounds them (default: what is left of the first epoch).
    Resuming is a matter of `first_sample`: nothing that was consumed is read again. A `guard` looks at every
    block that is read. With `masks_documents` a sample also has position_ids, and its labels are those of
    `masked_block`. With several splits it has the number of its own as `source`, int64.

    With `packing` "best_fit" the documents near each other change places first, as `BestFit` says: the next token is
    then that of the same document, or where it ends the first one of whatever has come to lie behind it.
    """

    def __init__(
        self,
        splits: TokenSplit | Sequence[TokenSplit],
        sequence_length: int,
        order: Order | None = None,
        first_sample: int = 0,
        num_samples: int | None = None,
        guard: BlockGuard | None = None,
        masks_documents: bool = False,
        packing: str = "in_sequence",
    ):
        self.splits = (splits,) if isinstance(splits, TokenSplit) else tuple(splits)
        self.sequence_length, self.order, self.guard = sequence_length, order, guard
        self.masks_documents = masks_documents
        best_fit = packing == "best_fit"
        self.packed = [BestFit(split, sequence_length) for split in self.splits] if best_fit else None
        counts = [split.num_blocks(sequence_length) for split in self.splits]
        self.num_blocks = sum(counts)
        self._first_blocks = [sum(counts[:number]) for number in range(len(counts))]
        self.first_sample = first_sample
        left = max(0, self.num_blocks - first_sample)
        self.num_samples = left if num_samples is None else num_samples
        self._check(counts)

    def _check(self, counts: list[int]) -> None:
        for split, count in zip(self.splits, counts, strict=True):
            if count == 0:
                raise UserError(
                    f"{split.folder}: {split.num_tokens:,} tokens are too few for one block of "
                    f"{self.sequence_length + 1:,}; add text or shorten the sequence length"
                )
        if self.order is not None and self.order.num_blocks != self.num_blocks:
            raise ValueError(f"order of {self.order.num_blocks} blocks for splits of {self.num_blocks}")
        if self.order is None and self.first_sample + self.num_samples > self.num_blocks:
            raise ValueError(
                f"{self.num_samples} samples from {self.first_sample} of {self.num_blocks} blocks"
            )

    def __len__(self) -> int:
        return self.num_samples

    def block_numbers(self, indices) -> np.ndarray:
        """[n] blocks (int64) behind the dataset's samples [n]; IndexError beyond its end."""
        indices = np.asarray(indices, np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.num_samples:
            raise IndexError(f"sample {indices.max()} of {self.num_samples}")
        samples = indices + self.first_sample
        return samples if self.order is None else self.order.blocks(samples)

    def shard_needs(self) -> ShardNeeds:
        """Which shards the samples of the run need, by position in the run; the dataset must have an order."""
        length = self.sequence_length
        splits = [(split.token_starts, split.num_blocks(length)) for split in self.splits]
        return ShardNeeds(self.order, [blocks_starting(starts, length, count) for starts, count in splits])

    def locate(self, block: int) -> tuple[int, int]:
        """Which of `splits` a block lies in, and its number in there."""
        source = bisect_right(self._first_blocks, block) - 1
        return source, block - self._first_blocks[source]

    def place(self, block: int) -> tuple[int, list[Stretch]]:
        """Which of `splits` a block lies in, and the stretches of that split's stream that are its L inputs."""
        source, number = self.locate(block)
        if self.packed is not None:
            return source, self.packed[source].stretches(number)
        start = number * self.sequence_length
        return source, [(start, start + self.sequence_length)]

    def read_block(self, block: int, sample: int | None = None) -> dict[str, np.ndarray]:
        """Inputs and labels of one block, int64 [L] each: unmasked, two views of one array of L + 1 tokens.

        `sample`, its position in the run, has the guard look at it.
        """
        source, stretches = self.place(block)
        split = self.splits[source]
        stored = _read(split, stretches)
        if self.guard is not None and sample is not None:
            self.guard.look(stored, sample, block, source, stretches, split)
        tokens = stored.astype(np.int64)
        if self.masks_documents:
            block = masked_block(tokens, _document_ends(split, stretches))
        else:
            block = {"input_ids": tokens[:-1], "labels": tokens[1:]}
        return block if len(self.splits) == 1 else {**block, "source": np.array(source)}

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, np.ndarray]]:
        """A batch at once, as torch's fetcher asks for it: the order is computed for all indices together."""
        blocks = self.block_numbers(indices).tolist()
        return [
            self.read_block(block, self.first_sample + index)
            for block, index in zip(blocks, indices, strict=True)
        ]


def _read(split: TokenSplit, stretches: list[Stretch]) -> np.ndarray:
    """The tokens of the stretches, and the one that follows the last of them: the last input's target."""
    *others, (start, stop) = stretches
    last = split.read(start, stop + 1)
    return np.concatenate([*(split.read(*other) for other in others), last]) if others else last


def _document_ends(split: TokenSplit, stretches: list[Stretch]) -> np.ndarray:
    """Places in the block, from 1 to L, at which a document has just ended; each stretch but the last ends one."""
    *others, (start, stop) = stretches
    ends = np.cumsum([other_stop - other_start for other_start, other_stop in others], dtype=np.int64)
    last = split.document_ends(start, stop) - start
    return np.append(ends, last + ends[-1]) if others else last
