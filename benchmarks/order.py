"""The orders of the blocks: what a sample costs, how soon position 10^9 is there, how well each order mixes.

    python benchmarks/order.py
    python benchmarks/order.py --repeats 21 --keep

Orders, over 10^9 blocks: the whole epoch shuffled; groups of shards shuffled; a mixture of three sources by
decimal weights; one of twenty by size, whose period is the longest there is. Per order:

open_ms         build it and compute the 64 samples from position 10^9 (for a mixture, its interleaving too)
us_per_sample   in batches of 8 and of 512, at 40 places of the run in turn; the orders alternate, medians
different       pairs of samples of a step (512) from different documents, over what a full shuffle gives
same            pairs from the same document, over what a full shuffle gives: the sharper measure

`different` and `same` are measured on 2^20 blocks in 32 shards, documents of log-normal length (median one
block, mean three). `guard_us` is BlockGuard's cost for 2,049 Zipf-distributed ids of 50,257.
"""

from collections.abc import Callable

import numpy as np
from gear import middle, parser_of, record, timed

from pretraining.data.block_guard import BlockGuard
from pretraining.data.interleaving import InterleavedStage, Interleaving
from pretraining.data.order import GlobalOrder, GroupedOrder, MixedOrder, Order
from pretraining.recipe.data import exact_shares, shares_of_sizes
from tests.gear.mixing import mixing_quality

NUM_BLOCKS = 10**9
BLOCKS_PER_SHARD = 1 << 15
FAR = np.arange(10**9, 10**9 + 64)
SAMPLES_PER_STEP = 512


def grouped(num_blocks: int, group_size: int) -> GroupedOrder:
    starts = np.append(np.arange(0, num_blocks, BLOCKS_PER_SHARD), num_blocks)
    return GroupedOrder(starts, group_size, 0, "benchmark")


def mixed(shares) -> MixedOrder:
    orders = [GlobalOrder(NUM_BLOCKS // len(shares), source, "benchmark") for source in range(len(shares))]
    return MixedOrder(Interleaving([InterleavedStage.of(0, None, shares)]), orders)


TWENTY_SIZES = [int(size) | 1 for size in np.geomspace(1e6, 1e10, 20)]
"""Tokens, of no common measure."""
BUILDERS: dict[str, Callable[[], Order]] = {
    "global": lambda: GlobalOrder(NUM_BLOCKS, 0, "benchmark"),
    "groups_of_16": lambda: grouped(NUM_BLOCKS, 16),
    "mixture_of_3": lambda: mixed(exact_shares([0.7, 0.2, 0.1])),
    "mixture_of_20": lambda: mixed(shares_of_sizes(TWENTY_SIZES)),
}


def main() -> None:
    options = parser_of(__doc__)
    options.add_argument("--repeats", type=int, default=7, help="rounds in which all orders take turns")
    options = options.parse_args()
    costs = measure_costs(options.repeats)
    for name, values in costs.items():
        record("order", {"order": name, "blocks": NUM_BLOCKS, **values}, options.keep)
    for name, values in measure_mixing().items():
        record("order_mixing", {"order": name, "samples_per_step": SAMPLES_PER_STEP, **values}, options.keep)
    record("block_guard", {"tokens": 2049, "guard_us": measure_guard(options.repeats)}, options.keep)


def measure_costs(repeats: int) -> dict[str, dict]:
    """Medians over rounds in which each order is opened and read once."""
    found = {name: {"open_ms": [], "us_per_sample_of_8": [], "us_per_sample_of_512": []} for name in BUILDERS}
    places = np.sort(np.random.default_rng(0).integers(0, 4 * 10**9, 40))
    for _ in range(repeats):
        for name, build in BUILDERS.items():
            found[name]["open_ms"].append(1e3 * timed(lambda build=build: build().blocks(FAR)))
            order = build()
            order.blocks(FAR)
            for size in (8, 512):
                batches = [np.arange(place, place + size) for place in places]
                seconds = timed(lambda order=order, batches=batches: [*map(order.blocks, batches)])
                found[name][f"us_per_sample_of_{size}"].append(seconds * 1e6 / size / len(places))
    return {name: {key: middle(values, 3) for key, values in row.items()} for name, row in found.items()}


def measure_mixing() -> dict[str, dict]:
    """Pairs of samples of a step, of one epoch of 2^20 blocks, under each order."""
    lengths = np.random.default_rng(1).lognormal(0, 1.48, 1 << 20)
    ends = np.cumsum(lengths)
    documents = np.searchsorted(ends, np.arange(1 << 20), side="right")
    orders = {"global": GlobalOrder(1 << 20, 0, "benchmark")}
    orders |= {f"groups_of_{size}": grouped(1 << 20, size) for size in (1, 2, 4, 8, 16)}
    found = {name: mixing_quality(order, documents, SAMPLES_PER_STEP) for name, order in orders.items()}
    return {
        name: {
            "different": round(quality.different_ratio, 6),
            "same": round(quality.same_document / quality.full_shuffle, 3),
        }
        for name, quality in found.items()
    }


def measure_guard(repeats: int) -> float:
    """Median microseconds of a block."""
    random = np.random.default_rng(2)
    blocks = [np.minimum(random.zipf(1.2, 2049), 50256).astype(np.uint16) for _ in range(50)]
    guard = BlockGuard("unused", [b"a"] * 50257)
    rounds = (timed(lambda: [guard.reasons(block) for block in blocks]) for _ in range(10 * repeats))
    return middle((1e6 * seconds / len(blocks) for seconds in rounds), 1)


if __name__ == "__main__":
    main()
