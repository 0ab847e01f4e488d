"""`python -m pretraining.data` on a data set of many tokens: million tokens a second and peak memory, verb by verb.

Each verb runs in a fresh process, all verbs in turn, `--repeats` times; medians. `copy` is the limit: shutil.copytree
of the shards. Tokens are drawn by Zipf's law; documents are 600 tokens in the mean.

    python benchmarks/data_tools.py --num_tokens 200000000
"""

import contextlib
import io
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from gear import in_fresh_process, parser_of, record, repository_tokenizer


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--num_tokens", type=int, default=200_000_000, help="tokens of the data set")
    parser.add_argument("--repeats", type=int, default=3, help="runs of every verb")
    parser.add_argument("--folder", help="where the temporary folder lies (default: the system's)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="data_tools_", dir=options.folder) as root:
        measured = measure_all(Path(root), options.num_tokens, options.repeats)
    for verb, runs in measured.items():
        seconds = statistics.median(run["seconds"] for run in runs)
        values = {
            "verb": verb,
            "tokens": options.num_tokens,
            "runs": len(runs),
            "seconds": round(seconds, 3),
            "million_tokens_per_second": round(options.num_tokens / seconds / 1e6, 1),
            "peak_bytes": max(run["peak_bytes"] for run in runs),
        }
        record("data_tools", values, options.keep)


def measure_all(root: Path, num_tokens: int, repeats: int) -> dict[str, list[dict]]:
    """Runs by verb; what a verb writes is removed after its run."""
    write_foreign(root / "theirs.ds", num_tokens)
    tokenizer = repository_tokenizer(root / "tokenizer", 512)
    theirs = ("--from", "datatrove", root / "theirs.ds", "--tokenizer", tokenizer)
    theirs += ("--validation_share", "0.01")
    data, out = root / "data", root / "out"
    run("convert", data, *theirs, "--json")
    run("convert", data, "--to", "megatron", root / "megatron", "--json")
    verbs = {
        "copy": ("copy", data, out),
        "verify": ("verify", data, "--json"),
        "stats": ("stats", data, "--json"),
        "stats --no-tokens": ("stats", data, "--no-tokens", "--json"),
        "convert --to megatron": ("convert", data, "--to", "megatron", out, "--json"),
        "convert --to datatrove": ("convert", data, "--to", "datatrove", out, "--json"),
        "convert --from megatron": ("convert", out, "--from", "megatron", root / "megatron", "--json"),
        "convert --from datatrove": ("convert", out, *theirs, "--json"),
    }
    measured: dict[str, list[dict]] = {verb: [] for verb in verbs}
    for _ in range(repeats):
        for verb, words in verbs.items():
            measured[verb].append(run(*words))
            shutil.rmtree(out, ignore_errors=True)
    return measured


def run(*words) -> dict:
    """Return seconds and peak memory of one verb in a fresh process."""
    os.sync()
    return in_fresh_process(done, *words)


def done(*words: str) -> dict:
    began = time.perf_counter()
    if words[0] == "copy":
        shutil.copytree(*words[1:])
    else:
        from pretraining.data.__main__ import main

        with contextlib.redirect_stdout(io.StringIO()):
            main(words)
    return {"seconds": time.perf_counter() - began}


def write_foreign(path: Path, num_tokens: int) -> None:
    """A datatrove file of ids 1 to 511 by Zipf's law; documents of 600 tokens in the mean, closed by id 0."""
    import numpy as np

    draw = np.random.default_rng(0)
    weights = 1 / np.arange(1, 512)
    once = draw.choice(np.arange(1, 512), 1 << 22, p=weights / weights.sum()).astype("<u2")
    ends = np.cumsum(draw.integers(100, 1101, num_tokens // 600 + 1))
    ends = np.append(ends[ends < num_tokens], num_tokens).astype("<u8")
    tokens = np.resize(once, num_tokens)
    tokens[ends - 1] = 0
    tokens.tofile(path)
    ends.tofile(path.with_name(f"{path.name}.index"))


if __name__ == "__main__":
    main()
