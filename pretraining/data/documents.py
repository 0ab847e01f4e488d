"""Fill blocks with documents, and keep the documents of one block apart.

Without packing, documents follow each other in sequence. With it, documents inside short windows of the stream change
places so that a block's end cuts few of them. The longest comes first, and each goes into the block in which it leaves
the least room (best-fit-decreasing; Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv 2404.10830).
One that fits into no block is cut to fill the remaining room. So nothing is padded, dropped or repeated, and there are
as many blocks as before. To read a block, only its window must be packed: order, mixtures, resuming and remote shards
do not depend on it.

With cropping, each block begins with a document: what does not fit is cut off at the block's end and left out.

Masked, positions start again at each document, and no target crosses a border; model/attention.py keeps attention
inside of a document by these positions.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pretraining.data.order import blocks_starting

if TYPE_CHECKING:
    from pretraining.data.shards import TokenSplit

IGNORED = -100
"""Label of a token that is no target: the default `ignore_index` of torch's cross-entropy."""

WINDOW_BLOCKS = 128
"""Blocks of a window: a larger window cuts fewer documents, and costs more for a block that is read at random."""

_KEPT_WINDOWS = 512  # the most packed windows that a reader keeps, some kilobytes each
_MOST_WINDOWS = 1000  # the most windows of a split that are counted; packing so many takes some seconds

Stretch = tuple[int, int]
"""[start, stop) of the stream, in tokens."""


class _Window(NamedTuple):
    """The parts of documents that make up the blocks of a window."""

    starts: np.ndarray
    stops: np.ndarray
    """[parts] int64: places in the stream."""
    firsts: np.ndarray
    """[blocks + 1]: the first part of each block."""


class _Packing:
    """Find which stretches of a split make up a block of `sequence_length` tokens; packed windows are kept."""

    def __init__(self, split: "TokenSplit", sequence_length: int):
        self.split, self.sequence_length = split, sequence_length
        self._windows: dict[int, _Window] = {}

    def _stretches_of(self, window: _Window, number: int) -> list[Stretch]:
        parts = slice(*window.firsts[number : number + 2])
        return list(zip(window.starts[parts].tolist(), window.stops[parts].tolist(), strict=True))

    def _keep(self, key: int, blocks: list[list[Stretch]]) -> _Window:
        if len(self._windows) >= _KEPT_WINDOWS:
            del self._windows[next(iter(self._windows))]  # the one packed first
        starts, stops = np.array([part for block in blocks for part in block], np.int64).T
        self._windows[key] = _Window(starts, stops, np.cumsum([0, *map(len, blocks)]))
        return self._windows[key]

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_windows": {}}  # a worker packs its own


class Cropped(_Packing):
    """Every block begins with a document. The longest that fits comes next, again and again; where none fits, the
    shortest ends the block, cut off, and its rest is left out (as nanochat packs, there from a buffer of documents).

    A window holds the documents that begin in so many tokens of a shard as `WINDOW_BLOCKS` blocks have. A document that
    is longer than a block is cut off behind its first block, and what fills no block at the end is left out.
    """

    def __init__(self, split: "TokenSplit", sequence_length: int):
        super().__init__(split, sequence_length)
        first_documents, counts, shards = [], [], [0]
        for start, stop in pairwise(split.token_starts.tolist()):
            if start == stop:
                shards.append(len(counts))
                continue
            # The places at which documents begin, of all windows together.
            starts = np.append(start, split.document_ends(start, stop)[:-1])
            sizes = np.diff(starts, append=stop)
            windows = (starts - start) // (WINDOW_BLOCKS * sequence_length)
            borders = np.flatnonzero(np.diff(windows, prepend=-1, append=-1))
            for first, last in pairwise(borders.tolist()):
                first_documents.append((int(starts[first]), int(starts[last - 1] + sizes[last - 1])))
                counts.append(_count_cropped(tuple(sizes[first:last].tolist()), sequence_length + 1))
            shards.append(len(counts))
        self._spans = first_documents
        """[windows]: the stretch of the stream that its documents are."""
        self._blocks_before = np.cumsum([0, *counts])
        self.first_blocks = self._blocks_before[shards]
        """[shards + 1]: the blocks before each shard, then all."""

    @classmethod
    def of(cls, split: "TokenSplit", sequence_length: int) -> "Cropped":
        """Return the split's own, made once: it takes some microseconds a document."""
        if sequence_length not in split.cropped:
            split.cropped[sequence_length] = cls(split, sequence_length)
        return split.cropped[sequence_length]

    def stretches(self, block: int) -> list[Stretch]:
        """Return the stretches of block `block`, in its order; each except the last is a whole document.

        The last target is of the document of the last input: the last stretch may have no input at all.
        """
        number = int(np.searchsorted(self._blocks_before, block, side="right")) - 1
        window = self._windows.get(number)
        if window is None:
            start, stop = self._spans[number]
            starts = np.append(start, self.split.document_ends(start, stop))
            blocks = crop(np.diff(starts).tolist(), self.sequence_length + 1)
            parts = [[(int(starts[n]), int(starts[n]) + size) for n, size in each] for each in blocks]
            window = self._keep(number, [[*own[:-1], (own[-1][0], own[-1][1] - 1)] for own in parts])
        return self._stretches_of(window, block - int(self._blocks_before[number]))


def crop(sizes: list[int], room: int) -> list[list[tuple[int, int]]]:
    """Make blocks of exactly `room` tokens of the beginnings of documents: (number, tokens of it), the last one cut."""
    # Shortest first; of equal ones the later, so that documents come in their order.
    order = sorted(range(len(sizes)), key=lambda number: (sizes[number], -number))
    ordered = [sizes[number] for number in order]
    blocks = []
    while ordered:
        block, left = [], room
        while ordered and left:
            # The longest that fits; a first one may be longer than the block.
            at = bisect_right(ordered, left) - 1 if block else len(ordered) - 1
            at = max(at, 0)
            block.append((order.pop(at), min(ordered.pop(at), left)))
            left -= block[-1][1]
        if not left:
            blocks.append(block)
    return blocks


@lru_cache(maxsize=64)
def _count_cropped(sizes: tuple[int, ...], room: int) -> int:
    # Kept, because the windows of data that stands in at a rehearsal are alike.
    return len(crop(list(sizes), room))


class BestFit(_Packing):
    """Every token is in exactly one block.

    A window holds blocks that are wholly inside one shard: a block that goes on in the next shard stays as it is.
    """

    def stretches(self, block: int) -> list[Stretch]:
        """Return the stretches of block `block`, in its order; each except the last ends with a document."""
        first, stop = self.window_around(block)
        length, window = self.sequence_length, self._windows.get(first)
        if first == stop:  # crosses a shard's end
            return [(block * length, block * length + length)]
        if window is None:
            start, end = first * length, stop * length
            ends = self.split.document_ends(start, end)
            borders = np.union1d(ends, (start, end)).tolist()
            # Does the last document go on behind the window? Then no document ends at `end`.
            window = self._keep(first, pack(borders, length, goes_on=end not in ends[-1:]))
        return self._stretches_of(window, block - first)

    def window_around(self, block: int) -> tuple[int, int]:
        """Return [first, stop) of the window that holds the block; empty if the block crosses a shard's end."""
        length, place = self.sequence_length, block * self.sequence_length
        shard, offset = self.split.locate(place)
        # Blocks that begin in the shard, and among them those that end in it.
        lowest, highest = -(-(place - offset) // length), int(self.split.token_starts[shard + 1]) // length
        highest = min(highest, self.split.num_blocks(length))
        if block >= highest:
            return block, block
        # Windows are counted from the shard's first whole block, so that none reaches into another shard.
        first = block - (block - lowest) % WINDOW_BLOCKS
        return first, min(first + WINDOW_BLOCKS, highest)


def pack(borders: list[int], length: int, goes_on: bool = False) -> list[list[Stretch]]:
    """Make blocks of exactly `length` tokens of the documents between `borders`, whose span is a multiple of it.

    A stretch that does not end its document is the last of its block. goes_on: so is the end of the last document.
    """
    blocks: list[list[Stretch]] = []
    remainders: list[Stretch] = []
    for start, stop in pairwise(borders):
        # A document longer than a block fills whole blocks from its start on. Only its remainder is packed.
        whole = start + (stop - start) // length * length
        blocks += [[(place, place + length)] for place in range(start, whole, length)]
        remainders += [(whole, stop)] if whole < stop else []
    # It must be the last of its block: the token after it, behind the window, is its target.
    tail = remainders.pop() if goes_on and remainders and remainders[-1][1] == borders[-1] else None
    num_blocks = (borders[-1] - borders[0]) // length - len(blocks)
    # Of each block that is to be filled, the room that is left; the first one will end with the tail.
    filled: list[list[Stretch]] = [[] for _ in range(num_blocks)]
    taken = tail[1] - tail[0] if tail else 0
    rooms = sorted((length - (0 if block else taken), block) for block in range(num_blocks))

    def place(start: int, stop: int) -> bool:
        """Put a part into the block in which it leaves the least room; False if it fits into none."""
        at = bisect_left(rooms, (stop - start,))
        if at == len(rooms):
            return False
        room, block = rooms.pop(at)
        filled[block].append((start, stop))
        if room > stop - start:
            insort(rooms, (room - (stop - start), block))
        return True

    remainders.sort(key=lambda part: part[0] - part[1])  # longest first
    # First place all that fit whole, then cut the others: the beginning of each ends the block with the most room,
    # until its rest fits.
    for start, stop in [part for part in remainders if not place(*part)]:
        while not place(start, stop):
            # Never the block that ends with the tail: if only that one had room, all that is left would fit into it.
            is_tails = tail is not None and rooms[-1][1] == 0
            room, block = rooms.pop(-2 if is_tails else -1)
            filled[block].append((start, start + room))
            start += room
    if tail:
        filled[0].append(tail)
    return blocks + filled


def cuts_of_split(split: "TokenSplit", sequence_length: int) -> dict:
    """Count `cut_shares` in a split's windows, or `_MOST_WINDOWS` of them; it reads no tokens."""
    packed, windows, block = BestFit(split, sequence_length), [], 0
    while block < split.num_blocks(sequence_length):
        first, stop = packed.window_around(block)
        # A block that crosses a shard's end is a window of its own.
        block = max(stop, block + 1)
        windows.append((first, block))
    chosen = windows[:: -(-len(windows) // _MOST_WINDOWS) or 1]
    return cut_shares((packed, *window) for window in chosen)


def cut_shares(windows: Iterable[tuple[BestFit, int, int]]) -> dict:
    """Count how many of the documents that would fit into one block, and end in these windows of blocks, are cut.

    Returns {"documents"} and, if there are any, "in_sequence" and "best_fit", each {"cut", "cropped"}: the share of the
    documents that a block's end cuts, and of their tokens, which come after a cut and do not see the beginning.
    """
    # Documents and their tokens, then the cut ones and the tokens behind the cut, in sequence and packed.
    counts = np.zeros(6, np.int64)
    for packed, first, stop in windows:
        split, length = packed.split, packed.sequence_length
        begin = first * length
        shard_start = begin - split.locate(begin)[1]  # no document goes on across a shard's start
        ends = np.union1d(split.document_ends(max(shard_start, begin - length), stop * length), shard_start)
        starts, stops = ends[:-1], ends[1:]
        fitting = (stops > begin) & (stops - starts <= length)
        starts, stops = starts[fitting], stops[fitting]
        # In sequence: what lies behind the end of the block in which a document starts.
        behind = np.maximum(stops - (starts // length + 1) * length, 0)
        parts = dict(part for block in range(first, stop) for part in packed.stretches(block))
        # Packed, a document is cut where the part that begins with it ends. One that begins and ends in a window of
        # one block is not cut.
        inside = [parts.get(start, begin) for start in starts.tolist()] if stop - first > 1 else stops
        behind_packed = stops - np.where(starts < begin, begin, np.array(inside, np.int64))
        sums = [each for cut in (behind, behind_packed) for each in (np.count_nonzero(cut), cut.sum())]
        counts += np.array([len(starts), (stops - starts).sum(), *sums], np.int64)
    documents, tokens, *cut = counts.tolist()
    if not documents:
        return {"documents": 0}
    in_sequence, best_fit = ({"cut": n / documents, "cropped": t / tokens} for n, t in (cut[:2], cut[2:]))
    return {"documents": documents, "in_sequence": in_sequence, "best_fit": best_fit}


def blocks_by_shard(split: "TokenSplit", sequence_length: int, packing: str) -> np.ndarray:
    """Return how many blocks are before each shard, then how many there are in all: [shards + 1] int64."""
    if packing == "cropped":
        return Cropped.of(split, sequence_length).first_blocks
    return blocks_starting(split.token_starts, sequence_length, split.num_blocks(sequence_length))


def count_blocks(split: "TokenSplit", sequence_length: int, packing: str) -> int:
    """Count the blocks that training reads of a split."""
    if packing == "cropped":
        return int(blocks_by_shard(split, sequence_length, packing)[-1])
    return split.num_blocks(sequence_length)


def cuts_text(shares: dict) -> str:
    """Format the shares as one line for the start of a run."""
    if "read" in shares:
        read = shares["read"]
        return f"packing: cropped; every block begins with a document, and {read:.2%} of the tokens are read"
    if not shares["documents"]:
        return "packing: best fit; no document near the first samples fits into a block"
    before, now = shares["in_sequence"], shares["best_fit"]
    return (
        f"packing: best fit; blocks' ends cut {now['cut']:.2%} of the documents that fit into one and crop "
        f"{now['cropped']:.2%} of their tokens (in sequence {before['cut']:.2%} and {before['cropped']:.2%})"
    )


def masked_block(tokens: np.ndarray, ends: np.ndarray) -> dict[str, np.ndarray]:
    """Split the tokens of one block into inputs, labels and positions, int64 [L] each.

    The first token of a document is no target. A document that began before the block goes on at position 0.
    tokens: int64 [L + 1]. ends: places in the block, from 1 to L, at which a document has just ended.
    """
    labels = tokens[1:].copy()
    # Label i is token i + 1, and token `end` begins the next document: nothing the model may look at comes before it.
    labels[ends - 1] = IGNORED
    begins = np.zeros(len(labels), np.int64)
    # An end at L begins a document that has no input in this block.
    inside = ends[ends < len(labels)]
    begins[inside] = inside
    # The latest beginning before each place: a running maximum, no loop over documents.
    positions = np.arange(len(labels)) - np.maximum.accumulate(begins)
    return {"input_ids": tokens[:-1], "labels": labels, "position_ids": positions}


def stack_blocks(blocks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray | int | bool]:
    """Make one batch of blocks: int64 [L] under each key becomes int64 [batch, L].

    With positions it also holds what keeps documents apart in a forward pass, whatever the model's config says.
    """
    batch = {key: np.stack([block[key] for block in blocks]) for key in blocks[0]}
    if "position_ids" not in batch:
        return batch
    # With a cache, transformers 5.24 takes positions that start again for one text
    # (`masking_utils._preprocess_mask_arguments`).
    return {**batch, **document_borders(batch["position_ids"]), "use_cache": False}


def part_of_sequences(batch: dict, part: int, parts: int) -> dict:
    """Cut inputs, labels and positions [batch, L] to one of `parts` equal parts of each sequence.

    The borders of documents stay those of whole sequences: attention gathers the parts. Positions say where each is.
    """
    if parts == 1:
        return batch
    rows, length = batch["input_ids"].shape
    own = slice(part * length // parts, (part + 1) * length // parts)
    whole = {"position_ids": np.tile(np.arange(length), (rows, 1)), **batch}
    cut = {key: whole[key][:, own] for key in ("input_ids", "labels", "position_ids")}
    return {**batch, **cut, "use_cache": False}


def document_borders(position_ids: np.ndarray) -> dict[str, np.ndarray | int]:
    """Return what kernels for sequences of different lengths take, from positions [batch, L], by transformers' names.

    `cu_seq_lens_*`, int32 [documents + 1]: the borders in the batch written as one row. `max_length_*`: a bound, L.
    """
    begins = np.flatnonzero(position_ids.reshape(-1) == 0)
    borders = np.append(begins, position_ids.size).astype(np.int32)
    # The bound L, not the longest document: it is the same for every batch, so kernels compile once.
    lengths = dict.fromkeys(("max_length_q", "max_length_k"), position_ids.shape[1])
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, **lengths}
