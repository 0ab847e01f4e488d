"""Text to finished shards: this repository against the bare tokenizer, `datasets.map` + group_texts, and datatrove.

The corpus is this machine's own text (Python sources and documentation) as JSON lines, the tokenizer a byte-level
BPE trained on the first of its files. Each engine runs in a process of its own, all of them in turn, round after round;
the medians are recorded. `rate_over_bare` compares the preparation with its own backend's batch call over
the same texts, held in memory and never seen before by that process.

    python benchmarks/data_prep.py --megabytes 100 --rounds 3
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from machine_text import write_corpus
from record import parser_of, record
from watched_process import run_watched

ENGINES = Path(__file__).with_name("data_prep_engines.py")


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="data_prep_") as root:
        num_bytes = write_corpus(Path(root), options.megabytes * 10**6, len(os.sched_getaffinity(0)))
        execute("train", Path(root), options.vocab_size)
        rounds = [
            {engine: execute(engine, Path(root), options.vocab_size) for engine in options.engines}
            for _ in range(options.rounds)
        ]
    check_equal_tokens(rounds[0])
    rows = {engine: medians([one[engine] for one in rounds]) for engine in options.engines}
    record("data_prep", {"text_bytes": num_bytes, "rounds": options.rounds, **comparison(rows)}, options.keep)


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=100, help="text in the corpus")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each engine")
    parser.add_argument("--vocab_size", type=int, default=50257, help="ids of the tokenizer")
    engines = [
        "shards-fastokens",
        "bare-fastokens",
        "shards-gigatoken",
        "bare-gigatoken",
        "datasets",
        "datatrove",
    ]
    parser.add_argument("--engines", nargs="+", default=engines, choices=engines, help="what to compare")
    return parser.parse_args()


def execute(engine: str, root: Path, vocab_size: int) -> dict:
    """Run one engine in its own process; what it printed, and the peak memory of it and its children."""
    output, peak_bytes = run_watched([sys.executable, str(ENGINES), engine, str(root), str(vocab_size)])
    return {**json.loads(output.splitlines()[-1]), "peak_bytes": peak_bytes}


def check_equal_tokens(results: dict) -> None:
    """Stop where an engine's documents became other tokens: nothing else it says would count."""
    found = {engine: result["tokens_fingerprint"] for engine, result in results.items()}
    found = {engine: fingerprint for engine, fingerprint in found.items() if not engine.startswith("bare-")}
    if len(set(found.values())) > 1:
        sys.exit(f"the engines disagree on the tokens: {found}")


def medians(results: list[dict]) -> dict:
    keys = ("seconds", "tokens_per_second", "tokens_per_cpu_second", "peak_bytes", "bytes_per_token")
    row = {key: statistics.median(result[key] for result in results) for key in keys if key in results[0]}
    return {"tokens": results[0]["tokens"], **row}


def comparison(rows: dict) -> dict:
    """The rows, each preparation's rate over its bare backend, and how many times faster it is than the others."""
    ratios = {}
    for engine, row in rows.items():
        kind, _, backend = engine.partition("-")
        if kind == "shards":
            others = {f"bare-{backend}", "datasets", "datatrove"} & rows.keys()
            rates = {other: row["tokens_per_second"] / rows[other]["tokens_per_second"] for other in others}
            ratios[engine] = {f"rate_over_{other.partition('-')[0]}": rates[other] for other in sorted(rates)}
            if f"bare-{backend}" in rows:
                there = rows[f"bare-{backend}"]["tokens_per_cpu_second"]
                ratios[engine]["rate_over_bare_by_cpu_time"] = row["tokens_per_cpu_second"] / there
    return {"engines": rows, "ratios": ratios}


if __name__ == "__main__":
    main()
