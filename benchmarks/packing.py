"""What best-fit packing brings and costs: documents cut and tokens cropped by the ends of blocks, time of a block.

    python benchmarks/packing.py data/python-stdlib --keep

Prints one JSON line for each sequence length, over the whole of the train split. Times are microseconds a block with
masked documents, read in the order of a run and in turns (medians): in sequence, packed with every window known, and
packed where each block is the first of its window that is read.
"""

import statistics
from functools import partial
from pathlib import Path

import numpy as np
from gear import parser_of, record, seconds_in_turns, timed

from pretraining.data.documents import WINDOW_BLOCKS, cuts_of_split
from pretraining.data.finished import open_finished
from pretraining.data.order import GlobalOrder
from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.shards import TokenSplit


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="a prepared data set")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192], help="tokens a block")
    parser.add_argument("--blocks", type=int, default=256, help="blocks a round (default 256)")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default 9)")
    options = parser.parse_args()
    split = open_finished(options.folder).split("train")
    for length in options.lengths:
        values = {
            "length": length,
            "tokens": split.num_tokens,
            "mean_document_tokens": round(split.num_tokens / split.num_documents, 1),
            **cuts_of_split(split, length),
            **microseconds(split, length, options.blocks, options.rounds),
        }
        record("packing", values, options.keep)


def microseconds(split: TokenSplit, length: int, num_blocks: int, rounds: int) -> dict[str, float]:
    """Of a block: in sequence, packed, and packed in a window that was not looked at before."""
    order = GlobalOrder(split.num_blocks(length), 0, "packing")
    ways = {
        packing: PackedDataset(split, length, order, masks_documents=True, packing=packing)
        for packing in ("in_sequence", "best_fit")
    }
    samples = list(range(min(num_blocks, order.num_blocks)))
    readings = {packing: partial(dataset.__getitems__, samples) for packing, dataset in ways.items()}
    for read in readings.values():  # what a window is made of is known afterwards
        read()
    seconds = seconds_in_turns(readings, rounds)
    times = {f"{packing}_us": statistics.median(each) / len(samples) for packing, each in seconds.items()}
    # the first block that is read in each of up to ten windows, by a reader that knows none
    firsts, unknown = np.arange(0, split.num_blocks(length), WINDOW_BLOCKS)[:10].tolist(), []
    for _ in range(rounds):
        dataset = PackedDataset(split, length, masks_documents=True, packing="best_fit")
        unknown.append(timed(partial(dataset.__getitems__, firsts)) / len(firsts))
    times["first_of_window_us"] = statistics.median(unknown)
    return {name: round(1e6 * value, 1) for name, value in times.items()}


if __name__ == "__main__":
    main()
