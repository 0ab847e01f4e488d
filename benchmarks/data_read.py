"""Read random blocks: from disk against copying them, from an S3 server against the disk, from one that fails.

    python benchmarks/data_read.py local      microseconds a block of 2,048 tokens, file in the page cache
    python benchmarks/data_read.py remote     blocks a second through PackedDataset, after warm-up, beside the disk's

What `local` compares, each at the same random places, in turns (medians over the rounds):
  copy        numpy copy of a slice of a bare memory map, position known beforehand: the limit
  copy_int64  the same slice copied as int64, which is what training wants
  read_copy   TokenSplit.read (locate the shard, slice) and the same copy
  read_int64  TokenSplit.read and the copy as int64
  read_masked the same with the positions and labels of masked documents, which are of 1,000 tokens
`remote` reads a grouped order's blocks as fast as it can from a cache that holds all (its second epoch is the rate
after warm-up), then at the pace of training from one that holds six shards; again through a proxy that fails one
request in five. What comes is compared with the disk's tokens. One JSON line each.
"""

import argparse
import contextlib
import mmap
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from gear import parser_of, record, timed

from pretraining.data.documents import masked_block
from pretraining.data.order import GroupedOrder, blocks_starting
from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.shards import SplitWriter, TokenSplit

LENGTH = 2048
TOKENS_PER_DOCUMENT = 1000


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=["local", "remote"])
    parser.add_argument("--shards", type=int, default=8, help="shards of the data set")
    parser.add_argument("--shard_tokens", type=int, default=4_000_000, help="tokens of a shard")
    parser.add_argument("--blocks", type=int, default=2000, help="blocks a round")
    parser.add_argument("--pace", type=int, default=2000, help="blocks a second that training takes")
    parser.add_argument("--rounds", type=int, default=15, help="rounds, the ways in turns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="data_read_") as folder:
        measure = {"local": measure_local, "remote": measure_remote}[options.what]
        for values in measure(Path(folder), options):
            record(f"data_read_{options.what}", values, options.keep)


def write_split(folder: Path, options: argparse.Namespace) -> tuple[TokenSplit, dict]:
    """Random tokens of GPT-2's vocabulary; the split and its manifest entry."""
    writer, draw = SplitWriter(folder, np.dtype(np.uint16), options.shard_tokens), np.random.default_rng(0)
    for _ in range(options.shards * options.shard_tokens // TOKENS_PER_DOCUMENT):
        writer.append(draw.integers(0, 50257, TOKENS_PER_DOCUMENT, dtype=np.uint16), 4000)
    entry = writer.finish()
    return TokenSplit(folder, entry), entry


def measure_local(folder: Path, options: argparse.Namespace):
    split, entry = write_split(folder / "train", options)
    maps = [bare_map(split, shard) for shard in entry["shards"]]

    def copy(places, starts) -> None:
        for shard, offset in places:
            shard[offset : offset + LENGTH].copy()

    def copy_int64(places, starts) -> None:
        for shard, offset in places:
            shard[offset : offset + LENGTH].astype(np.int64)

    def read_copy(places, starts) -> None:
        for start in starts:
            split.read(start, start + LENGTH).copy()

    def read_int64(places, starts) -> None:
        for start in starts:
            split.read(start, start + LENGTH).astype(np.int64)

    def read_masked(places, starts) -> None:
        for start in starts:
            tokens = split.read(start, start + LENGTH + 1).astype(np.int64)
            masked_block(tokens, split.document_ends(start, start + LENGTH) - start)

    ways = {each.__name__: each for each in (copy, copy_int64, read_copy, read_int64, read_masked)}
    draw = np.random.default_rng(1)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        shards = draw.integers(0, options.shards, options.blocks)
        offsets = draw.integers(0, options.shard_tokens - LENGTH, options.blocks)
        starts = (shards * options.shard_tokens + offsets).tolist()
        places = [
            (maps[shard], offset) for shard, offset in zip(shards.tolist(), offsets.tolist(), strict=True)
        ]
        for name, way in ways.items():
            times[name].append(timed(partial(way, places, starts)))
    us = {f"{name}_us": 1e6 * median(seconds[1:]) / options.blocks for name, seconds in times.items()}
    ratios = {
        "read_over_copy": us["read_copy_us"] / us["copy_us"],
        "read_int64_over_copy": us["read_int64_us"] / us["copy_us"],
        "read_int64_over_copy_int64": us["read_int64_us"] / us["copy_int64_us"],
        "read_masked_over_read_int64": us["read_masked_us"] / us["read_int64_us"],
    }
    rounded = {name: round(value, 3) for name, value in {**us, **ratios}.items()}
    yield {"length": LENGTH, "shards": options.shards, "rounds": options.rounds, **rounded}


def bare_map(split: TokenSplit, shard: dict) -> np.ndarray:
    with (split.folder / shard["file"]).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, np.uint16, shard["tokens"], shard["buffers"]["input_ids"])


def measure_remote(folder: Path, options: argparse.Namespace):
    from tests.gear.object_store import Proxy, connect_to, one_in, put, s3_server

    split, entry = write_split(folder / "train", options)
    starts = blocks_starting(split.token_starts, LENGTH, split.num_blocks(LENGTH))
    order = GroupedOrder(starts, 2, 2, "bench")
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(s3_server(folder / "log"))
        for shard in entry["shards"]:
            put(address, f"bench/train/{shard['file']}", (split.folder / shard["file"]).read_bytes())
        stores = {"sound": None, "fails 1 in 5": one_in(5, "error", "drop", "cut", "spoil")}
        for label, mistreat in stores.items():
            target = stack.enter_context(Proxy(address, mistreat)).address if mistreat else address
            os.environ.update(connect_to(target))
            yield {"store": label, **compare(split, entry, order, folder / label, options)}


def compare(split: TokenSplit, entry: dict, order: GroupedOrder, cache: Path, options) -> dict:
    """A cache that holds all, in its second epoch; then one of six shards, read at the pace of a machine of GPUs."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    local = PackedDataset(split, LENGTH, order, num_samples=2 * order.num_blocks)
    shard_bytes = max(shard["size"] for shard in entry["shards"])
    whole = streamed(entry, order, cache / "whole", 2 * options.shards * shard_bytes)
    seconds = epoch_in_turns(local, whole, 0), epoch_in_turns(local, whole, order.num_blocks)
    whole.prefetcher.close()
    bounded = streamed(entry, order, cache / "bounded", 6 * shard_bytes)
    paced, waits, most_held = paced_epoch(local, bounded, cache / "bounded", options)
    bounded.prefetcher.close()
    return {
        "blocks": order.num_blocks,
        "local_blocks_per_second": round(order.num_blocks / seconds[1][0]),
        "share_of_local_first_epoch": round(seconds[0][0] / seconds[0][1], 3),
        "share_of_local_second_epoch": round(seconds[1][0] / seconds[1][1], 3),
        "pace_blocks_per_second": options.pace,
        "share_of_pace_after_warm_up": round(paced, 3),
        "longest_wait_seconds": round(waits, 3),
        "cache_bound_bytes": 6 * shard_bytes,
        "most_held_bytes": most_held,
        "epoch_bytes": options.shards * shard_bytes,
    }


def streamed(entry: dict, order: GroupedOrder, cache: Path, max_bytes: int):
    """The same samples, from the store."""
    from pretraining.data.packed_dataset import prefetched
    from pretraining.data.streaming.cache import ShardCache
    from pretraining.data.streaming.remote_data import RemoteData, StreamedSplit

    remote = RemoteData("s3://bucket/bench", ShardCache(cache, max_bytes))
    remote.fingerprint = "bench"
    split = StreamedSplit(remote, "train", entry)
    return prefetched(PackedDataset(split, LENGTH, order, num_samples=2 * order.num_blocks))


def epoch_in_turns(local, remote, first: int) -> tuple[float, float]:
    """Seconds that one epoch's batches of eight take from disk and from the store, batch by batch in turns."""
    taken = [0.0, 0.0]
    for start in range(first, first + local.num_blocks - 8, 8):
        indices, found = list(range(start, start + 8)), []
        for number, dataset in enumerate((local, remote)):
            begin = perf_counter()
            found.append(dataset.__getitems__(indices))
            taken[number] += perf_counter() - begin
        assert all((a["labels"] == b["labels"]).all() for a, b in zip(*found, strict=True))
    return taken[0], taken[1]


def paced_epoch(local, remote, cache: Path, options) -> tuple[float, float, int]:
    """(blocks a second as a share of the pace after the first group, longest wait, most bytes held)."""
    waits, begin, due, most_held = [], 0.0, 0.0, 0
    warm = 8 * (local.num_blocks // max(1, options.shards // 2) // 8)
    for start in range(0, local.num_blocks - 8, 8):
        asked = perf_counter()
        if start == warm:
            begin, waits = asked, []
        samples = remote.__getitems__(list(range(start, start + 8)))
        waits.append(perf_counter() - asked)
        assert (samples[0]["labels"] == local[start]["labels"]).all()
        if start % 512 == 0:
            most_held = max(most_held, sum(path.stat().st_size for path in cache.glob("*/*.*")))
        if not start or perf_counter() > due + 0.05:  # a reader that was late does not hurry afterwards
            due = perf_counter()
        due += 8 / options.pace
        time.sleep(max(0.0, due - perf_counter()))
    taken = perf_counter() - begin
    return (local.num_blocks - 8 - warm) / taken / options.pace, max(waits), most_held


if __name__ == "__main__":
    main()
