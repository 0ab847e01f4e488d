"""What the ends of blocks do to documents: how many they cut, in sequence and after best-fit packing."""

from collections.abc import Iterable

import numpy as np

from pretraining.data.best_fit import BestFit
from pretraining.data.packed import PackedDataset
from pretraining.data.shards import TokenSplit

SAMPLED_BLOCKS = 32
"""Blocks of a run whose windows are looked at when it starts."""


def cuts_of_run(dataset: PackedDataset) -> dict | None:
    """`cut_shares` around the first blocks that a run reads; None where its blocks are not packed.

    Its first samples need their shards anyway, so nothing is fetched for this.
    """
    if dataset.packed is None:
        return None
    count = min(SAMPLED_BLOCKS, dataset.num_samples)
    places = [dataset.locate(block) for block in dataset.block_numbers(np.arange(count)).tolist()]
    return cut_shares((dataset.packed[source], number) for source, number in places)


def cuts_of_split(split: TokenSplit, sequence_length: int) -> dict | None:
    """`cut_shares` of a whole split; None where it has no block of that length. Reads the documents' ends alone."""
    packed, num_blocks = BestFit(split, sequence_length), split.num_blocks(sequence_length)
    return cut_shares((packed, block) for block in range(num_blocks)) if num_blocks else None


def cut_shares(blocks: Iterable[tuple[BestFit, int]]) -> dict | None:
    """Of the documents that would fit into one block, in the windows of these blocks: how many are cut.

    {"documents", and for "in_sequence" and "best_fit" {"cut", "cropped"}}: shares of the documents that a block's
    end cuts, and of their tokens that come after a cut and do not see their document's beginning. Documents that a
    window's end cuts are not among them. None where the windows hold none.
    """
    counts, seen = np.zeros(6, np.int64), set()
    for packed, block in blocks:
        first, stop = packed.window_around(block)
        if first < stop and (id(packed), first) not in seen:
            seen.add((id(packed), first))
            counts += _counts(packed, first, stop)
    documents, tokens, *cut = counts.tolist()
    if not documents:
        return None
    in_sequence, best_fit = ({"cut": n / documents, "cropped": t / tokens} for n, t in (cut[:2], cut[2:]))
    return {"documents": documents, "in_sequence": in_sequence, "best_fit": best_fit}


def _counts(packed: BestFit, first: int, stop: int) -> np.ndarray:
    """Documents and their tokens; then cut ones and the tokens behind the cut, in sequence and packed."""
    length = packed.sequence_length
    ends = packed.split.document_ends(first * length, stop * length)
    starts, stops = ends[:-1], ends[1:]
    fitting = stops - starts <= length
    starts, stops = starts[fitting], stops[fitting]
    next_block = (starts // length + 1) * length
    behind = np.maximum(stops - next_block, 0)
    parts = dict(part for block in range(first, stop) for part in packed.stretches(block))
    packed_stops = np.array([parts[start] for start in starts.tolist()], np.int64)
    behind_packed = stops - packed_stops
    sums = [array for behind in (behind, behind_packed) for array in (np.count_nonzero(behind), behind.sum())]
    return np.array([len(starts), (stops - starts).sum(), *sums], np.int64)


def cuts_text(shares: dict) -> str:
    """One line for the start of a run."""
    before, now = shares["in_sequence"], shares["best_fit"]
    return (
        f"packing: best fit; blocks' ends cut {now['cut']:.2%} of the documents that fit into one and crop "
        f"{now['cropped']:.2%} of their tokens (in sequence {before['cut']:.2%} and {before['cropped']:.2%})"
    )
