"""Open a data set of many tokens and read its first batch, in a fresh process: seconds and peak memory.

The shards are sparse files: their Arrow metadata is real, their tokens are holes (zeros), so that 10^11
tokens take a few megabytes of disk. One JSON line on stdout; the files are removed afterwards.

    python benchmarks/data_open.py --num_tokens 100000000000
"""

import json
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from gear import in_fresh_process, parser_of, record

TOKENS_PER_DOCUMENT = 100_000


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--num_tokens", type=int, default=10**11, help="tokens of the train split")
    parser.add_argument("--sequence_length", type=int, default=2048, help="tokens per sample")
    parser.add_argument("--batch", type=int, default=64, help="samples in the first batch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="data_open_") as root:
        num_shards = build_sparse_data(Path(root) / "sparse", options.num_tokens)
        found = in_fresh_process(first_batch, root, options.sequence_length, options.batch)
    layout = {"shards": num_shards, "sequence_length": options.sequence_length, "batch": options.batch}
    record("data_open", {**found, **layout}, options.keep)


def first_batch(root: str, length: str, batch: str) -> dict:
    """Open the data set and read a batch; return its tokens and what it took."""
    # a run has read its recipe before it opens the data
    from pretraining.recipe.data import Data
    from pretraining.recipe.model import Model

    began = time.perf_counter()
    from pretraining.data.order import GlobalOrder
    from pretraining.data.packed_dataset import PackedDataset
    from pretraining.data.prepared import open_prepared

    section = json.loads((Path(root) / "sparse" / "manifest.json").read_text())["data"]
    recipe = SimpleNamespace(name="sparse", words="--recipe sparse", model=Model(vocab_size=50304))
    recipe.data = Data.of({**section, "name": "sparse"})
    data = open_prepared(recipe, Path(root))
    order = GlobalOrder(data.train.num_blocks(int(length)), 0, data.fingerprint)
    samples = PackedDataset(data.train, int(length), order).__getitems__(list(range(int(batch))))
    assert len(samples) == int(batch) and samples[-1]["labels"].shape == (int(length),)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time()
    return {"tokens": data.train.num_tokens, "seconds": seconds, "cpu_seconds": cpu_seconds}


def build_sparse_data(folder: Path, num_tokens: int) -> int:
    """A data set of `num_tokens` zeros that passes every check of an open; its number of train shards."""
    from pretraining.data.checksums import content_fingerprint
    from pretraining.data.manifest import FORMAT, deciding_section
    from pretraining.data.shards import SHARD_TOKENS
    from pretraining.data.tokenizer import checksums_of

    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    sizes = [SHARD_TOKENS] * (num_tokens // SHARD_TOKENS)
    sizes += [num_tokens % SHARD_TOKENS] if num_tokens % SHARD_TOKENS else []
    splits = {
        "train": write_sparse_split(folder / "train", sizes),
        "validation": write_sparse_split(folder / "validation", [min(num_tokens, 10**6)]),
    }
    splits["validation"]["unigram_bits_per_byte"] = 0.0
    section = {"sources": [], "tokenizer": "sparse", "validation_share": 0.1, "skip_undecodable": False}
    manifest = {
        "format": FORMAT,
        "name": "sparse",
        "fingerprint": content_fingerprint(splits),
        "data": deciding_section(section),
        "tokenizer": {
            "vocab_size": 50257,
            "fingerprint": checksums_of(folder / "tokenizer")["tokenizer.json"],
        },
        "splits": splits,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return len(sizes)


def write_sparse_split(folder: Path, sizes: list[int]) -> dict:
    """Shards of `sizes` tokens; the manifest entry of the split."""
    folder.mkdir()
    templates = {num_tokens: shard_template(folder / "template", num_tokens) for num_tokens in set(sizes)}
    shards = []
    for number, num_tokens in enumerate(sizes):
        path = folder / f"data-{number:05d}-of-{len(sizes):05d}.arrow"
        head, tail, entry = templates[num_tokens]
        with path.open("wb") as file:
            file.write(head)
            file.seek(entry["size"] - len(tail))
            file.write(tail)
        shards.append({**entry, "file": path.name})
    totals = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
    return {**totals, "dtype": "uint16", "checksum": "0" * 32, "shards": shards}


def shard_template(path: Path, num_tokens: int) -> tuple[bytes, bytes, dict]:
    """Bytes before and after the tokens of a real shard of zeros, and its entry of the manifest."""
    import numpy as np

    from pretraining.data.shards import SplitWriter

    tokens = np.zeros(num_tokens, np.uint16)
    writer = SplitWriter(path, tokens.dtype, num_tokens)
    for document in np.array_split(tokens, max(1, num_tokens // TOKENS_PER_DOCUMENT)):
        writer.append(document, 4 * len(document))
    entry = writer.finish()["shards"][0]
    shard = path / entry["file"]
    content, start = shard.read_bytes(), entry["buffers"]["input_ids"]
    head, tail = content[:start], content[start + tokens.nbytes :]
    shutil.rmtree(path)
    return head, tail, entry


if __name__ == "__main__":
    main()
