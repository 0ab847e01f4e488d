"""Best-fit packing: inside short windows of the stream, documents change places so that few are cut by a block's end.

Longest first, each into the block where it leaves the least room (best-fit-decreasing; Ding et al. 2024, "Fewer
Truncations Improve Language Modeling", arXiv 2404.10830). What finds no block whole is cut to fill the room that is
left. So nothing is padded, dropped or repeated, there are as many blocks as before, and any of them costs the packing
of its window alone: the order of the run, mixtures, resuming and remote shards do not know of it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pretraining.data.shards import TokenSplit

WINDOW_BLOCKS = 128
"""Blocks of a window: more of them cut fewer documents, and cost more for a block that is read at random."""

KEPT_WINDOWS = 512
"""Windows that a reader remembers, some kilobytes each."""

Stretch = tuple[int, int]
"""[start, stop) of the stream, in tokens."""


class _Window(NamedTuple):
    """The parts of documents that the blocks of a window are made of."""

    starts: np.ndarray
    stops: np.ndarray
    """[parts] int64: places in the stream."""
    firsts: np.ndarray
    """[blocks + 1]: the first part of each block."""


class BestFit:
    """Which stretches of a split make up a block of `sequence_length` tokens, every token in exactly one block.

    A window holds blocks that lie wholly inside one shard: a block that goes on in the next shard stays as it is.
    """

    def __init__(self, split: TokenSplit, sequence_length: int):
        self.split, self.sequence_length = split, sequence_length
        self._windows: dict[int, _Window] = {}

    def stretches(self, block: int) -> list[Stretch]:
        """The stretches of block `block`, in its order; each but the last ends with a document."""
        first, stop = self.window_around(block)
        if first == stop:
            start = block * self.sequence_length
            return [(start, start + self.sequence_length)]
        window = self._window(first, stop)
        parts = slice(*window.firsts[block - first : block - first + 2])
        return list(zip(window.starts[parts].tolist(), window.stops[parts].tolist(), strict=True))

    def window_around(self, block: int) -> tuple[int, int]:
        """[first, stop) of the window that the block lies in; empty where the block crosses a shard's end."""
        length, place = self.sequence_length, block * self.sequence_length
        shard, offset = self.split.locate(place)
        lowest, highest = -(-(place - offset) // length), int(self.split.token_starts[shard + 1]) // length
        highest = min(highest, self.split.num_blocks(length))
        if block >= highest:
            return block, block
        first = block - (block - lowest) % WINDOW_BLOCKS
        return first, min(first + WINDOW_BLOCKS, highest)

    def windows(self) -> Iterator[tuple[int, int]]:
        """[first, stop) of every window in order; a block that crosses a shard's end is one of its own."""
        block, num_blocks = 0, self.split.num_blocks(self.sequence_length)
        while block < num_blocks:
            first, stop = self.window_around(block)
            block = max(stop, block + 1)
            yield first, block

    def _window(self, first: int, stop: int) -> _Window:
        if first not in self._windows:
            if len(self._windows) >= KEPT_WINDOWS:
                del self._windows[next(iter(self._windows))]  # the one packed first
            self._windows[first] = self._pack(first, stop)
        return self._windows[first]

    def _pack(self, first: int, stop: int) -> _Window:
        start, end = first * self.sequence_length, stop * self.sequence_length
        ends = self.split.document_ends(start, end)
        borders = np.union1d(ends, (start, end)).tolist()
        blocks = pack(borders, self.sequence_length, goes_on=end not in ends[-1:])
        parts = np.array([part for block in blocks for part in block], np.int64)
        return _Window(*parts.T, np.cumsum([0, *map(len, blocks)]))

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_windows": {}}


def pack(borders: list[int], length: int, goes_on: bool = False) -> list[list[Stretch]]:
    """Blocks of exactly `length` tokens out of the documents between `borders`, whose span is a multiple of it.

    A document longer than a block fills whole blocks from its start on; only its remainder is packed. What does not
    end with its document is the last of its block, for the token that follows it is its target: also the last
    document's remainder where it `goes_on` behind the last border.
    """
    blocks: list[list[Stretch]] = []
    remainders: list[Stretch] = []
    for start, stop in pairwise(borders):
        whole = start + (stop - start) // length * length
        blocks += [[(place, place + length)] for place in range(start, whole, length)]
        remainders += [(whole, stop)] if whole < stop else []
    tail = remainders.pop() if goes_on and remainders and remainders[-1][1] == borders[-1] else None
    room = _Room((borders[-1] - borders[0]) // length - len(blocks), length, tail)
    remainders.sort(key=lambda part: part[0] - part[1])
    for part in [part for part in remainders if not room.place(*part)]:
        room.divide(*part)
    return blocks + room.filled()


class _Room:
    """Blocks being filled, and the room that each of them has left. The first one ends with `tail`."""

    def __init__(self, num_blocks: int, length: int, tail: Stretch | None):
        self.blocks: list[list[Stretch]] = [[] for _ in range(num_blocks)]
        self.tail = tail
        taken = tail[1] - tail[0] if tail else 0
        self._open = sorted((length - (0 if block else taken), block) for block in range(num_blocks))

    def place(self, start: int, stop: int) -> bool:
        """Put a part where it leaves the least room; False where it fits nowhere."""
        at = bisect_left(self._open, (stop - start,))
        if at == len(self._open):
            return False
        room, block = self._open.pop(at)
        self.blocks[block].append((start, stop))
        if room > stop - start:
            insort(self._open, (room - (stop - start), block))
        return True

    def divide(self, start: int, stop: int) -> None:
        """Cut a part that fits nowhere: its beginning ends the block with the most room, until the rest fits.

        The block that ends with the tail is none of those: were it the only one with room, all that is left would fit.
        """
        while not self.place(start, stop):
            is_tails = self.tail is not None and self._open[-1][1] == 0
            room, block = self._open.pop(-2 if is_tails else -1)
            self.blocks[block].append((start, start + room))
            start += room

    def filled(self) -> list[list[Stretch]]:
        """The blocks, with nothing left to place."""
        if self.tail:
            self.blocks[0].append(self.tail)
        return self.blocks
