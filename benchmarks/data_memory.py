"""Peak memory of a preparation against the length of its input, and of the plan of an input too long for this disk.

    python benchmarks/data_memory.py --megabytes 50 100 200 400

Each length is prepared by the real command with a given tokenizer, plain and (up to `--cleaned_megabytes`) with
filters and deduplication; peak_bytes is of the command and its workers. The plan is that of JSON lines of
`--plan_gigabytes` in sparse files: cut into pieces and tasks, with a digest for each and what is still to do.
One JSON line a run.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from machine_text import write_corpus
from record import REPOSITORY, parser_of, record
from watched_process import run_watched

CLEANED = {
    "filters": [{"rule": "length", "min_words": 5}, {"rule": "pii"}],
    "dedup": {"exact": True, "minhash": {}},
}
PLAN = """
import json, sys, time
start = time.perf_counter()
from pathlib import Path
from pretraining.data.preparation.plan import Preparation
from pretraining.data.sources import open_sources
from pretraining.recipe import load_recipe
recipe = load_recipe(sys.argv[1], [])
sources = open_sources(recipe.data)
fingerprints = [source.fingerprint() for source in sources]
plan = Preparation.of(recipe, sources, Path(sys.argv[2]), fingerprints)
pending = {stage.name: len(stage.pending()) for stage in plan.stages}
plan.save()
seconds = time.perf_counter() - start
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"tasks": pending, "seconds": round(seconds, 3), "peak_bytes": peak}))
"""


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="data_memory_", dir=options.folder) as root:
        folder = Path(root)
        tokenizer = train_tokenizer(folder / "tokenizer")
        for megabytes in options.megabytes:
            for name, section in {"plain": {}, "cleaned": CLEANED}.items():
                if name == "plain" or megabytes <= options.cleaned_megabytes:
                    values = prepare(folder / f"{megabytes}-{name}", megabytes, tokenizer, section)
                    record("data_memory", {"what": name, "megabytes": megabytes, **values}, options.keep)
        for name, section in {"plain": {}, "cleaned": CLEANED}.items():
            values = plan(folder / f"plan-{name}", options.plan_gigabytes, tokenizer, section)
            record("data_plan", {"what": name, "gigabytes": options.plan_gigabytes, **values}, options.keep)


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 100, 200, 400])
    parser.add_argument(
        "--cleaned_megabytes", type=int, default=100, help="longest input that is filtered too"
    )
    parser.add_argument("--plan_gigabytes", type=int, default=100)
    parser.add_argument("--folder", help="where the temporary folder lies (default: the system's)")
    return parser.parse_args()


def train_tokenizer(folder: Path) -> Path:
    """A byte-level BPE of 8,192 ids, of the repository's own text."""
    from pretraining.data.tokenizer import train_tokenizer as train

    paths = sorted(path for room in ("pretraining", "tests") for path in (REPOSITORY / room).rglob("*.py"))
    train((path.read_text(encoding="utf-8") for path in paths), 8192, folder)
    return folder


def write_recipe(folder: Path, tokenizer: Path, section: dict) -> Path:
    """Recipe `tiny` on the JSON lines of `folder`."""
    recipe = json.loads((REPOSITORY / "recipes" / "tiny.json").read_text())
    del recipe["$schema"]
    recipe["model"]["vocab_size"] = 8192
    recipe["data"] = {
        "name": "corpus",
        "sources": [{"path": str(folder / "*.jsonl")}],
        "tokenizer": str(tokenizer),
        "validation_share": 0.005,
        **section,
    }
    path = folder / "recipe.json"
    path.write_text(json.dumps(recipe))
    return path


def prepare(folder: Path, megabytes: int, tokenizer: Path, section: dict) -> dict:
    """The real command on so much text; peak memory, seconds and tokens. What it wrote is removed."""
    folder.mkdir()
    num_bytes = write_corpus(folder, megabytes * 10**6, 2)
    recipe = write_recipe(folder, tokenizer, section)
    command = [sys.executable, "data_prep.py", "--recipe", str(recipe), "--data_dir", str(folder / "data")]
    began = time.perf_counter()
    output, peak = run_watched([*command, "--json"])
    seconds = round(time.perf_counter() - began, 2)
    summary = json.loads(output.splitlines()[-1])
    tokens = sum(summary[split]["tokens"] for split in ("train", "validation"))
    shutil.rmtree(folder)
    return {"text_bytes": num_bytes, "tokens": tokens, "seconds": seconds, "peak_bytes": peak}


def plan(folder: Path, gigabytes: int, tokenizer: Path, section: dict) -> dict:
    """The plan of `gigabytes` files of a gigabyte of nothing."""
    folder.mkdir()
    for number in range(gigabytes):
        with (folder / f"{number:05d}.jsonl").open("wb") as file:
            file.truncate(10**9)
    recipe = write_recipe(folder, tokenizer, section)
    output, _ = run_watched([sys.executable, "-c", PLAN, str(recipe), str(folder / "data" / "corpus")])
    shutil.rmtree(folder)
    return json.loads(output)


if __name__ == "__main__":
    main()
