"""Prepare a part of a corpus and go on from there; time limited recipes from text to their first step.

    python benchmarks/data_portions.py --part extension
    python benchmarks/data_portions.py --part first_step --recipes 124m 7b --keep

The corpus is the text of Python's standard library as JSON lines, several times over. `extension` prepares it for a
cap, goes on to twice as many tokens, prepares as much at once elsewhere, and compares every byte. `first_step` runs
data_prep.py and train.py with `--limit_tokens`, one process, on each recipe as it is but for three stand-ins: that
corpus for its source, a tokenizer of 8,192 ids, and a model of its type with two layers of width 64, since a processor
trains nothing larger. The clock stops with the first logged step. Prints one JSON line for each part or recipe.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from hashlib import sha256
from pathlib import Path

from record import REPOSITORY, parser_of, record

WIDTHS = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2},
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
}
WIDTHS["mixtral"] = WIDTHS["llama"]
WIDTHS["qwen3"] = {**WIDTHS["llama"], "head_dim": 32}
WIDTHS["qwen3_moe"] = {**WIDTHS["qwen3"], "moe_intermediate_size": 64}
"""The stand-in's size, by the model's type."""


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="data_portions_") as root:
        corpus = write_corpus(Path(root) / "corpus", options.megabytes)
        tokenizer = prepare_tokenizer(Path(root), corpus)
        if options.part == "extension":
            return record("data_portions", extension(Path(root), corpus, tokenizer), options.keep)
        for name in options.recipes or shipped():
            values = first_step(Path(root) / name, name, corpus, tokenizer, options.limit_tokens)
            record("data_portions", {"part": "first_step", "recipe": name, **values}, options.keep)


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--part", choices=("extension", "first_step"), required=True)
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="default: all of recipes/")
    parser.add_argument("--limit_tokens", type=int, default=5_000_000)
    parser.add_argument("--megabytes", type=int, default=60, help="size of the corpus")
    return parser.parse_args()


def shipped() -> list[str]:
    paths = (REPOSITORY / "recipes").glob("*.json")
    return sorted(path.stem for path in paths if path.name != "schema.json")


def write_corpus(path: Path, megabytes: int) -> Path:
    """Write modules of the standard library, again and again with a number before each, until the size is reached."""
    path.mkdir()
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [module.read_text(encoding="utf-8", errors="replace") for module in modules]
    size, copy = 0, 0
    while size < megabytes << 20:
        rows = "".join(json.dumps({"text": f"# {copy}\n{text}"}) + "\n" for text in texts)
        size += (path / f"{copy:03d}.jsonl").write_text(rows)
        copy += 1
    return path


def recipe_of(folder: Path, data: dict) -> Path:
    values = json.loads((REPOSITORY / "recipes" / "tiny.json").read_text())
    values["data"], values["model"]["vocab_size"] = data, 8192
    path = folder / f"{data['name']}.json"
    path.write_text(json.dumps(values))
    return path


def data_prep(*words: str | Path) -> tuple[dict, float]:
    """Run the command; return its summary and its seconds."""
    start = time.perf_counter()
    command = [sys.executable, "data_prep.py", *map(str, words), "--json"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(result.stderr)
    return json.loads(result.stdout), time.perf_counter() - start


def prepare_tokenizer(root: Path, corpus: Path) -> Path:
    source = {"path": str(corpus / "000.jsonl")}
    data = {"name": "tokenizer", "sources": [source], "tokenizer": {"train_vocab_size": 8192}}
    recipe = recipe_of(root, {**data, "validation_share": 0.1})
    return Path(data_prep("--recipe", recipe, "--data_dir", root)[0]["folder"]) / "tokenizer"


def extension(root: Path, corpus: Path, tokenizer: Path) -> dict:
    """Prepare a cap, twice as much from there, and as much at once; stop with an error if a byte differs."""
    data = {"name": "text", "tokenizer": str(tokenizer), "validation_share": 0.02}
    folders, seconds, tokens = {}, {}, 4_000_000
    for place, cap, what in (
        ("extended", tokens, "first"),
        ("extended", 2 * tokens, "further"),
        ("at_once", 2 * tokens, "at_once"),
    ):
        recipe = recipe_of(root, {**data, "sources": [{"path": str(corpus), "max_tokens": cap}]})
        summary, seconds[what] = data_prep("--recipe", recipe, "--data_dir", root / place)
        folders[place] = digests(Path(summary["folder"]))
    if folders["extended"] != folders["at_once"]:
        raise SystemExit("the extended data set differs from the one made at once")
    rounded = {f"{what}_seconds": round(value, 2) for what, value in seconds.items()}
    return {"part": "extension", "tokens": 2 * tokens, "files": len(folders["at_once"]), **rounded}


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


def first_step(folder: Path, name: str, corpus: Path, tokenizer: Path, limit: int) -> dict:
    """Prepare a limited recipe and train to its first logged step."""
    recipe = json.loads((REPOSITORY / "recipes" / f"{name}.json").read_text())
    model = WIDTHS[recipe["model"]["model_type"]]
    weights = [{key: s[key] for key in ("name", "weight") if key in s} for s in recipe["data"]["sources"]]
    sources = [{"path": str(corpus), **each} for each in weights]
    settings = {
        "data.sources": sources,
        "data.tokenizer": str(tokenizer),
        **{f"model.{key}": value for key, value in {**model, "vocab_size": 8192}.items()},
        "training.logging_steps": 1,
        "training.report_to": "none",
        "report.every_seconds": None,
    }
    words = ["--recipe", name, "--limit_tokens", str(limit), "--data_dir", str(folder / "data")]
    words += [w for key, value in settings.items() for w in ("--set", f"{key}={json.dumps(value)}")]
    summary, prepared = data_prep(*words)
    start = time.perf_counter()
    run = folder / "run"
    command = [sys.executable, "train.py", *words, "--output_dir", str(run), "--force"]
    if ":" in recipe["deepspeed"]:  # a layout of several ranks: one process has its stage alone
        command += ["--deepspeed", recipe["deepspeed"].partition(":")[0]]
    if recipe["deepspeed"] == "zero3_hpz":
        command += ["--deepspeed", "zero3"]
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=file, stderr=file, start_new_session=True)
        while not first_row(run / "metrics.jsonl"):
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
    trained = time.perf_counter() - start
    row = first_row(run / "metrics.jsonl")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    resolved = json.loads((run / "recipe.json").read_text())
    return {
        "limit_tokens": limit,
        "seconds": round(prepared + trained, 1),
        "preparing_seconds": round(prepared, 1),
        "to_first_step_seconds": round(trained, 1),
        "first_logged_step": row["step"],
        "train_tokens_prepared": summary["train"]["tokens"],
        "tokens_per_step": resolved["budget"]["tokens_per_step"],
        "deepspeed": resolved["deepspeed"],
    }


def first_row(path: Path) -> dict:
    """Read the first row of a training step, {} if there is none yet."""
    rows = path.read_text().splitlines() if path.exists() else []
    found = (json.loads(row) for row in rows if row.endswith("}"))
    return next((row for row in found if "train/loss" in row), {})


if __name__ == "__main__":
    main()
