"""Seconds, bytes and growth of all that grows with ranks, shards, tokens, files and steps, by simulation.

python benchmarks/scale.py --keep

Four sizes each; `exponent` is the growth from the first size to the last (1: linear, 2: quadratic). `operations` counts
what is asked of the disk, which is the same on every machine.
"""

import contextlib
import json
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from gear import parser_of, record

RANKS = (512, 1024, 2048, 4096)
SHARDS = (12_500, 25_000, 50_000, 100_000)
TOKENS = (10**10, 10**11, 10**12, 10**13)
FILES = (1_000, 10_000, 100_000, 1_000_000)
ROWS = (12_500, 25_000, 50_000, 100_000)
CACHED = (250, 500, 1000, 2000)
LENGTH = 2048
ENTRY = {"bytes": 1 << 30, "checksum": "xxh128:" + "0" * 32}


def main() -> None:
    options = parser_of(__doc__).parse_args()
    curves = {}
    for name, (sizes, measure) in CURVES.items():
        with tempfile.TemporaryDirectory() as folder:
            curves[name] = curve(sizes, lambda size, measure=measure: measure(Path(folder) / str(size), size))
        print(name, json.dumps(curves[name]), flush=True)
    record("scale", {"curves": curves}, options.keep)


def curve(sizes: tuple[int, ...], measure: Callable[[int], dict]) -> dict:
    """Return what `measure` finds at each size, and the exponent of each number."""
    rows = [measure(size) for size in sizes]
    growth = math.log(sizes[-1] / sizes[0])
    exponents = {
        key: round(math.log(max(rows[-1][key], 1e-9) / max(rows[0][key], 1e-9)) / growth, 2)
        for key in rows[0]
    }
    return {"sizes": sizes, **{key: [row[key] for row in rows] for key in rows[0]}, "exponent": exponents}


@contextmanager
def measured(owner: object = None, name: str = "") -> Iterator[dict]:
    """Yield what a block takes: `seconds`, and as `operations` the calls of a function, if one is named."""
    values: dict = {}
    with contextlib.ExitStack() as stack:
        if name:
            original, values["operations"] = getattr(owner, name), 0

            def counting(*args, **keywords):
                values["operations"] += 1
                return original(*args, **keywords)

            stack.enter_context(mock.patch.object(owner, name, counting))
        began = time.perf_counter()
        yield values
        values["seconds"] = round(time.perf_counter() - began, 4)


def write_receipts(folder: Path, ranks: int, save: str = "save") -> None:
    """Receipts as ranks write them, with the states of Python's and numpy's generators."""
    from pretraining.checkpoints.format import receipt_name
    from pretraining.checkpoints.manager import random_numbers
    from pretraining.checkpoints.shard_files import rank_file

    folder.mkdir(parents=True)
    numbers = random_numbers()
    for rank in range(ranks):
        content = {"files": {rank_file(rank, ranks): ENTRY}, "save": save, "rng": numbers}
        (folder / receipt_name(rank, ranks)).write_text(json.dumps(content, indent=2))


def marker(folder: Path, ranks: int) -> dict:
    """Rank 0's work at the end of a save: all receipts are there, are read, and the marker is on the disk."""
    from pretraining.checkpoints.background import wait_for_receipts
    from pretraining.checkpoints.format import MARKER, commit_checkpoint, read_marker

    write_receipts(folder, ranks)
    with measured(Path, "open") as found:
        wait_for_receipts(folder, ranks, "save", threading.Event())
        commit_checkpoint(folder, {"ranks": ranks, "step": 1})
    read_marker(folder)
    return {**found, "bytes": (folder / MARKER).stat().st_size}


def resume(folder: Path, ranks: int) -> dict:
    """What one rank opens to read its own part of a checkpoint of all ranks."""
    import torch
    from safetensors.torch import save_file

    from pretraining.checkpoints import shard_files

    folder.mkdir()
    for rank in range(ranks):
        tensors = {f"master/weight@{8 * rank}": torch.zeros(8)}
        save_file(tensors, folder / shard_files.rank_file(rank, ranks))
    state = {"format": shard_files.STATE_FORMAT, "parameters": {"weight": {"shape": [8 * ranks]}}}
    (folder / shard_files.STATE_FILE).write_text(json.dumps(state))
    own = ranks // 2
    with measured(shard_files, "safe_open") as found:
        reader = shard_files.CheckpointReader(folder, first=own)
        reader.read("master", "weight", 8 * own, 8)
    return found


def many_files(folder: Path, files: int) -> dict:
    """A marker that names so many files: written, read, and shared among 4,096 ranks."""
    from pretraining.checkpoints.folders import rank_files
    from pretraining.checkpoints.format import MARKER, read_marker, write_marker

    folder.mkdir()
    named = {f"rank-{number:07d}.safetensors": ENTRY for number in range(files)}
    with measured() as found:
        write_marker(folder, {"files": named, "ranks": 4096})
        rank_files(read_marker(folder)["files"], 7, 4096)
    return {**found, "bytes": (folder / MARKER).stat().st_size}


def manifest(folder: Path, shards: int) -> dict:
    """A data set of so many shards in eight sources: its manifest is read, its streams and their order are opened."""
    import numpy as np

    from pretraining.data.manifest import FORMAT, parse_manifest
    from pretraining.data.mixture import open_by_source
    from pretraining.data.order import GroupedOrder, blocks_starting, needed_shards
    from pretraining.rehearsal.stand_in_data import StandInSplit

    entry = {"tokens": 10**8, "documents": 10**5, "bytes": 4 * 10**8, "size": 2 * 10**8}
    entry |= {"checksum": ENTRY["checksum"], "buffers": {"input_ids": 0, "offsets": 0, "num_bytes": 0}}
    entries = [{"file": f"data-{n:06d}.arrow", "source": 8 * n // shards, **entry} for n in range(shards)]
    totals = {key: shards * entry[key] for key in ("tokens", "documents", "bytes")}
    split = {**totals, "dtype": "uint16", "checksum": "0" * 32, "shards": entries}
    values = {
        "format": FORMAT,
        "name": "d",
        "fingerprint": "0" * 32,
        "data": {"sources": [], "tokenizer": "t"},
    }
    values |= {"splits": {"train": split, "validation": split}}
    values |= {"tokenizer": {"vocab_size": 1, "fingerprint": "0" * 32}}
    text = json.dumps(values)
    with measured() as found:
        read = parse_manifest(text, "", "", "")["splits"]["train"]
        stream = StandInSplit(folder, read)
        open_by_source(stream)
        count = stream.num_blocks(LENGTH)
        first_blocks = blocks_starting(stream.token_starts, LENGTH, count)
        grouped = GroupedOrder(first_blocks, 64, 1, "f")
        needed_shards(grouped, first_blocks[:-1], np.arange(shards), np.arange(4096))
    return {**found, "bytes": len(text)}


def order(folder: Path, tokens: int) -> dict:
    """The blocks of the samples of a step of 4,096 samples, at the end of so many tokens."""
    import numpy as np

    from pretraining.data.order import GlobalOrder

    blocks = tokens // LENGTH
    with measured() as found:
        GlobalOrder(blocks, 1, "f").blocks(np.arange(blocks - 4096, blocks))
    return found


def cache(folder: Path, shards: int) -> dict:
    """So many shards are fetched into a cache that holds half of them; `operations`: files that are listed."""
    import xxhash

    from pretraining.data.streaming.cache import CachedShard, ShardCache

    size, kept = 1000, ShardCache(folder, 500 * shards)
    folder.mkdir()
    glob, listed = Path.glob, []

    def listing(folder: Path, pattern: str) -> list[Path]:
        files = list(glob(folder, pattern))
        listed.append(len(files))
        return files

    with mock.patch.object(Path, "glob", listing), mock.patch("os.fsync"), measured() as found:
        for number in range(shards):
            content = number.to_bytes(8, "little") * (size // 8)
            shard = CachedShard("data", f"xxh128:{xxhash.xxh128(content).hexdigest()}", size)
            kept.fetch(shard, lambda content=content: [content]).close()
    return {**found, "operations": sum(listed)}


def report(folder: Path, rows: int) -> dict:
    """The report of a run that has logged so many steps."""
    from pretraining.reporting.__main__ import write_report

    folder.mkdir()
    names = ("train/loss", "train/grad_norm", "throughput/tokens_per_second", "throughput/step_seconds")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, rows + 1):
            values = dict.fromkeys(names, 3.0 + 1 / step)
            row = {"step": step, "time": 1e9 + step, "train/tokens": step * 4096, **values}
            file.write(json.dumps(row) + "\n")
    (folder / "events.jsonl").write_text('{"time": "2026-01-01T00:00:00Z", "event": "start", "step": 0}\n')
    with measured() as found:
        path = write_report([folder], folder / "report.html")
    return {**found, "bytes": path.stat().st_size}


CURVES = {
    "marker of ranks": (RANKS, marker),
    "files that a rank opens": (RANKS, resume),
    "marker of files": (FILES, many_files),
    "manifest of shards": (SHARDS, manifest),
    "order of tokens": (TOKENS, order),
    "cache of shards": (CACHED, cache),
    "report of steps": (ROWS, report),
}

if __name__ == "__main__":
    main()
