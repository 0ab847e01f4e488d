"""Text to finished shards: this repository against the bare tokenizer, `datasets.map` + group_texts, and datatrove.

The corpus is this machine's own text (Python sources and documentation) as JSON lines, the tokenizer a byte-level
BPE trained on the first of its files. Each engine runs in a process of its own, all of them in turn, round after round;
the medians are recorded. An engine's clock starts with the first text and ends with the last file; imports and opening
an encoder are outside of it. `rate_over_bare` compares the preparation with its own backend's batch call over the same
texts, held in memory and never seen before by that process.

    python benchmarks/data_prep.py --megabytes 100 --rounds 3
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
from gear import last_json, parser_of, record, run_command, tiny_recipe, write_corpus

BLOCK = 1024
ENGINES = [
    "shards-fastokens",
    "bare-fastokens",
    "shards-gigatoken",
    "bare-gigatoken",
    "datasets",
    "datatrove",
]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=100, help="text in the corpus")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each engine")
    parser.add_argument("--vocab_size", type=int, default=50257, help="ids of the tokenizer")
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES, help="what to compare")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        return print(json.dumps(run_engine(options.engine, options.folder)))
    from pretraining.data.tokenizer import train_tokenizer

    with tempfile.TemporaryDirectory(prefix="data_prep_") as root:
        num_bytes = write_corpus(Path(root), options.megabytes * 10**6, len(os.sched_getaffinity(0)))
        lines = Path(corpus_files(Path(root))[0]).read_text(encoding="utf-8").splitlines()
        texts = (json.loads(line)["text"] for line in lines)
        train_tokenizer(texts, options.vocab_size, Path(root) / "tokenizer")
        rounds = []
        for _ in range(options.rounds):
            rounds.append({})
            for engine in options.engines:
                words = [sys.executable, __file__, "--engine", engine, "--folder", root]
                ended = run_command(*words, watched=True, HF_HUB_OFFLINE="1")
                rounds[-1][engine] = {**last_json(ended.stdout), "peak_bytes": ended.peak_bytes}
    prints = {e: each["tokens_fingerprint"] for e, each in rounds[0].items() if not e.startswith("bare-")}
    if len(set(prints.values())) > 1:  # nothing else that an engine says would count
        sys.exit(f"the engines disagree on the tokens: {prints}")
    values = {"text_bytes": num_bytes, "rounds": options.rounds, **comparison(rounds)}
    record("data_prep", values, options.keep)


def run_engine(engine: str, root: Path) -> dict:
    """Return what one engine took, and what it made."""
    kind, _, backend = engine.partition("-")
    output = root / "output"
    shutil.rmtree(output, ignore_errors=True)
    arguments = (root, output, backend) if backend else (root, output)
    engines = {"shards": shards, "bare": bare, "datasets": by_datasets, "datatrove": by_datatrove}
    run, documents_of = engines[kind](*arguments)
    # of this process: an engine's workers are not in the processor's time
    start, start_cpu = time.perf_counter(), time.process_time()
    result = run()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    files = (path for path in output.rglob("*") if path.is_file() and path.parent.name != "tokenizer")
    size = sum(path.stat().st_size for path in files)
    tokens, fingerprint = count_and_hash(documents_of(result))
    row = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
    if backend:
        row["tokens_per_cpu_second"] = tokens / cpu_seconds
    return {**row, "bytes_per_token": size / tokens, "tokens_fingerprint": fingerprint}


def count_and_hash(documents: Iterator[np.ndarray]) -> tuple[int, str]:
    """Tokens with an EOS for each document, and a digest of all documents' ids that no order of them changes."""
    from xxhash import xxh3_64_intdigest

    num_tokens = total = 0
    for ids in documents:
        num_tokens += len(ids) + 1
        total += xxh3_64_intdigest(ids.astype("<u4").tobytes())
    return num_tokens, f"{total % (1 << 64):016x}"


def cut(tokens: np.ndarray, ends: np.ndarray, closing: int) -> Iterator[np.ndarray]:
    """The ids of each document that ends at `ends`, without the `closing` ones at its end."""
    return (tokens[start : end - closing] for start, end in pairwise([0, *ends.tolist()]))


def corpus_files(root: Path) -> list[str]:
    return sorted(str(path) for path in root.glob("corpus-*.jsonl"))


def shards(root: Path, output: Path, backend: str) -> tuple[Callable, Callable]:
    """This repository, from the files to the published data set, with an encoder opened before (as in `bare`)."""
    import pyarrow  # noqa: F401  outside the clock

    import pretraining.data.preparation.finish
    import pretraining.data.preparation.plan  # noqa: F401
    from pretraining.data.manifest import read_manifest
    from pretraining.data.preparation import tokenizing
    from pretraining.data.preparation.prepare import prepare_data
    from pretraining.data.shards import TokenSplit
    from pretraining.recipe import load_recipe

    data = {"sources": [{"path": str(root / "corpus-*.jsonl")}], "tokenizer": str(root / "tokenizer")}
    data |= {"validation_share": 0.005, "encoder": backend}
    changes = [f"model.vocab_size={1 << 16}", f"model.n_positions={BLOCK}"]
    recipe = load_recipe(str(tiny_recipe(root, data)), changes)
    encoder = open_encoder(root, backend)
    tokenizing.Encoder = lambda *_, **__: encoder

    def documents_of(folder: Path) -> Iterator[np.ndarray]:
        for split, entry in read_manifest(folder)["splits"].items():
            part = TokenSplit(folder / split, entry)
            count = part.num_tokens
            yield from cut(part.read(0, count), part.document_ends(0, count), closing=1)

    return lambda: prepare_data(recipe, output, show_progress=False).folder, documents_of


def open_encoder(root: Path, backend: str):
    """The encoder of the trained tokenizer, loaded and checked."""
    from pretraining.data.encoder import Encoder
    from pretraining.data.tokenizer import describe_tokenizer

    folder = root / "tokenizer"
    info = describe_tokenizer(folder, "benchmark")
    return Encoder(folder, info, backend)


def bare(root: Path, output: Path, backend: str) -> tuple[Callable, Callable]:
    """The backend's batch call over texts that are in memory: nothing read, nothing kept on disk."""
    from pretraining.data.corpus import BATCH_BYTES, open_source
    from pretraining.recipe.data import Source

    encoder = open_encoder(root, backend)
    batches, size = [[]], 0
    for text, *_ in open_source(Source(path=str(root / "corpus-*.jsonl"))).documents():
        batches[-1].append(text)
        size += len(text)
        if size > BATCH_BYTES:
            batches.append([])
            size = 0

    def documents_of(results: list) -> Iterator[np.ndarray]:
        for ids, offsets in results:
            yield from cut(ids, offsets[1:], closing=0)

    return lambda: [encoder.backend.encode_flat(batch) for batch in batches if batch], documents_of


def by_datasets(root: Path, output: Path) -> tuple[Callable, Callable]:
    """`datasets.map` twice with a process a core, as in transformers' run_clm: tokenize, then group_texts."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(root / "tokenizer" / "tokenizer.json"))
    files = corpus_files(root)

    def tokenize(rows: dict) -> dict:
        return tokenizer(rows["text"], return_attention_mask=True)

    def group(rows: dict) -> dict:
        joined = {key: list(chain.from_iterable(lists)) for key, lists in rows.items()}
        total = len(joined["input_ids"]) // BLOCK * BLOCK
        blocks = {key: [ids[at : at + BLOCK] for at in range(0, total, BLOCK)] for key, ids in joined.items()}
        return {**blocks, "labels": blocks["input_ids"].copy()}

    def run():
        raw = datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(output))
        tokenized = raw.map(tokenize, batched=True, num_proc=len(files), remove_columns=raw.column_names)
        tokenized.map(group, batched=True, num_proc=len(files))
        return tokenized

    def documents_of(tokenized) -> Iterator[np.ndarray]:
        for chunk in tokenized.data.column("input_ids").chunks:
            ends = np.cumsum(chunk.value_lengths().to_numpy())
            yield from cut(chunk.flatten().to_numpy(), ends, closing=0)

    return run, documents_of


def by_datatrove(root: Path, output: Path) -> tuple[Callable, Callable]:
    """datatrove's own reader and tokenizer step, a task and a worker a file; documents shuffled as it ships."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    count, tokenizer = len(corpus_files(root)), str(root / "tokenizer" / "tokenizer.json")
    reader = JsonlReader(str(root), glob_pattern="corpus-*.jsonl")
    steps = [reader, DocumentTokenizer(str(output / "tokens"), tokenizer, eos_token="<|endoftext|>")]
    executor = LocalPipelineExecutor(steps, tasks=count, workers=count, logging_dir=str(output / "logs"))

    def documents_of(_) -> Iterator[np.ndarray]:
        for file in sorted((output / "tokens").glob("*.ds")):
            ends = np.fromfile(f"{file}.index", "<u8").astype(np.int64)
            yield from cut(np.fromfile(file, np.uint16), ends, closing=1)

    return executor.run, documents_of


def comparison(rounds: list[dict]) -> dict:
    """Return medians by engine, each preparation's rate over its bare backend, and over the others'."""
    keys = ("seconds", "tokens_per_second", "tokens_per_cpu_second", "peak_bytes", "bytes_per_token")
    rows, ratios = {}, {}
    for engine, first in rounds[0].items():
        found = {key: statistics.median(one[engine][key] for one in rounds) for key in keys if key in first}
        rows[engine] = {"tokens": first["tokens"], **found}
    for engine, row in rows.items():
        kind, _, backend = engine.partition("-")
        if kind == "shards":
            others = sorted({f"bare-{backend}", "datasets", "datatrove"} & rows.keys())
            ratios[engine] = {
                f"rate_over_{other.partition('-')[0]}": row["tokens_per_second"]
                / rows[other]["tokens_per_second"]
                for other in others
            }
            if there := rows.get(f"bare-{backend}"):
                by_cpu = row["tokens_per_cpu_second"] / there["tokens_per_cpu_second"]
                ratios[engine]["rate_over_bare_by_cpu_time"] = by_cpu
    return {"engines": rows, "ratios": ratios}


if __name__ == "__main__":
    main()
