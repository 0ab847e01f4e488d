"""What the ends of blocks do to documents: how many they cut, in sequence and after best-fit packing."""

from collections.abc import Iterable

import numpy as np

from pretraining.data.best_fit import BestFit
from pretraining.data.packed import PackedDataset
from pretraining.data.shards import TokenSplit

SAMPLED_BLOCKS = 32
"""Blocks of a run whose windows are looked at when it starts."""

MOST_WINDOWS = 1000
"""Of a split; packing so many takes some seconds."""


def cuts_of_run(dataset: PackedDataset) -> dict | None:
    """`cut_shares` around the first blocks that a run reads; None where its blocks are not packed.

    Its first samples need their shards anyway, so nothing is fetched for this.
    """
    if dataset.packed is None:
        return None
    count = min(SAMPLED_BLOCKS, dataset.num_samples)
    places = [dataset.locate(block) for block in dataset.block_numbers(np.arange(count)).tolist()]
    windows = {(source, *dataset.packed[source].window_around(block)) for source, block in places}
    return cut_shares(
        (dataset.packed[source], first, max(stop, first + 1)) for source, first, stop in windows
    )


def cuts_of_split(split: TokenSplit, sequence_length: int) -> dict:
    """`cut_shares` of a split's windows, or of `MOST_WINDOWS` of them from its beginning to its end.

    Reads the documents' ends alone.
    """
    packed = BestFit(split, sequence_length)
    windows = list(packed.windows())
    chosen = windows[:: -(-len(windows) // MOST_WINDOWS) or 1]
    return cut_shares((packed, *window) for window in chosen)


def cut_shares(windows: Iterable[tuple[BestFit, int, int]]) -> dict:
    """Of the documents that would fit into one block and end in these windows of blocks: how many are cut.

    {"documents", and unless there are none for "in_sequence" and "best_fit" {"cut", "cropped"}}: shares of the
    documents that a block's end cuts, and of their tokens that come after a cut and do not see their document's
    beginning.
    """
    counts = sum((_counts(*window) for window in windows), start=np.zeros(6, np.int64))
    documents, tokens, *cut = counts.tolist()
    if not documents:
        return {"documents": 0}
    in_sequence, best_fit = ({"cut": n / documents, "cropped": t / tokens} for n, t in (cut[:2], cut[2:]))
    return {"documents": documents, "in_sequence": in_sequence, "best_fit": best_fit}


def _counts(packed: BestFit, first: int, stop: int) -> np.ndarray:
    """Documents and their tokens; then cut ones and the tokens behind the cut, in sequence and packed."""
    split, length = packed.split, packed.sequence_length
    begin = first * length
    shard_start = begin - split.locate(begin)[1]  # where a document begins, and none goes on
    ends = np.union1d(split.document_ends(max(shard_start, begin - length), stop * length), shard_start)
    starts, stops = ends[:-1], ends[1:]
    fitting = (stops > begin) & (stops - starts <= length)
    starts, stops = starts[fitting], stops[fitting]
    next_block = (starts // length + 1) * length
    behind = np.maximum(stops - next_block, 0)
    parts = dict(part for block in range(first, stop) for part in packed.stretches(block))
    inside = [parts.get(start, begin) for start in starts.tolist()] if stop - first > 1 else stops
    behind_packed = stops - np.where(starts < begin, begin, np.array(inside, np.int64))
    sums = [array for behind in (behind, behind_packed) for array in (np.count_nonzero(behind), behind.sum())]
    return np.array([len(starts), (stops - starts).sum(), *sums], np.int64)


def cuts_text(shares: dict) -> str:
    """One line for the start of a run."""
    if not shares["documents"]:
        return "packing: best fit; no document near the first samples fits into a block"
    before, now = shares["in_sequence"], shares["best_fit"]
    return (
        f"packing: best fit; blocks' ends cut {now['cut']:.2%} of the documents that fit into one and crop "
        f"{now['cropped']:.2%} of their tokens (in sequence {before['cut']:.2%} and {before['cropped']:.2%})"
    )
