"""Prepare a part of a corpus and go on from there; time limited recipes from text to their first step.

    python benchmarks/data_portions.py --part extension
    python benchmarks/data_portions.py --part first_step --recipes 124m 7b --keep

The corpus is the text of Python's standard library as JSON lines, several times over. `extension` prepares it for a
cap, goes on to twice as many tokens, prepares as much at once elsewhere, and compares every byte. `first_step` runs
data_prep.py and train.py with `--limit_tokens`, one process, on each recipe as it is but for three stand-ins: that
corpus for its source, a tokenizer of 8,192 ids, and a model of its type with two layers of width 64, since a processor
trains nothing larger. The clock stops with the first logged step. Prints one JSON line for each part or recipe.
"""

import json
import re
import sys
import tempfile
import time
from pathlib import Path

from gear import (
    REPOSITORY,
    choices,
    digests,
    library_modules,
    parser_of,
    prepare_data,
    record,
    repository_tokenizer,
    tiny_recipe,
    write_corpus,
)

SIZES = {"vocab_size": 8192, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 64}
"""Of the stand-in, by the common names."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--part", choices=("extension", "first_step"), required=True)
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="default: all of recipes/")
    parser.add_argument("--limit_tokens", type=int, default=5_000_000)
    parser.add_argument("--megabytes", type=int, default=60, help="size of the corpus")
    options = parser.parse_args()
    from pretraining.recipe import recipe_names

    with tempfile.TemporaryDirectory(prefix="data_portions_") as name:
        root, corpus = Path(name), Path(name) / "corpus"
        texts = library_modules()
        megabytes = max(1, sum(map(len, texts)) >> 20)
        write_corpus(corpus, options.megabytes << 20, max(1, options.megabytes // megabytes), texts)
        tokenizer = repository_tokenizer(root / "tokenizer", 8192)
        if options.part == "extension":
            return record("data_portions", extension(root, corpus, tokenizer), options.keep)
        for recipe in options.recipes or recipe_names():
            values = first_step(root / recipe, recipe, corpus, tokenizer, options.limit_tokens)
            record("data_portions", {"part": "first_step", "recipe": recipe, **values}, options.keep)


def extension(root: Path, corpus: Path, tokenizer: Path) -> dict:
    """Prepare a cap, twice as much from there, and as much at once; stop with an error if a byte differs."""
    folders, seconds, tokens = {}, {}, 4_000_000
    for place, cap, what in (
        ("extended", tokens, "first"),
        ("extended", 2 * tokens, "further"),
        ("at_once", 2 * tokens, "at_once"),
    ):
        data = {"tokenizer": str(tokenizer), "validation_share": 0.02}
        recipe = tiny_recipe(root, {**data, "sources": [{"path": str(corpus), "max_tokens": cap}]})
        summary, ended = prepare_data("--recipe", recipe, "--data_dir", root / place)
        folders[place], seconds[f"{what}_seconds"] = digests(Path(summary["folder"])), round(ended.seconds, 2)
    if folders["extended"] != folders["at_once"]:
        raise SystemExit("the extended data set differs from the one made at once")
    return {"part": "extension", "tokens": 2 * tokens, "files": len(folders["at_once"]), **seconds}


def first_step(folder: Path, name: str, corpus: Path, tokenizer: Path, limit: int) -> dict:
    """Prepare a limited recipe and train to its first logged step."""
    from pretraining.recipe.model import type_entry
    from tests.gear.runs import Run, Started

    recipe = json.loads((REPOSITORY / "recipes" / f"{name}.json").read_text())
    entry = type_entry(recipe["model"]["model_type"])
    keys = {entry["names"].get(key, key): size for key, size in SIZES.items()}
    model = {f"model.{key}": size for key, size in keys.items() if key in entry["properties"]}
    weights = [{key: s[key] for key in ("name", "weight") if key in s} for s in recipe["data"]["sources"]]
    sources = [{"path": str(corpus), **each} for each in weights]
    settings = {
        "data.sources": sources,
        "data.tokenizer": str(tokenizer),
        **model,
        "training.logging_steps": 1,
        "training.report_to": "none",
        "report.every_seconds": None,
    }
    words = ["--recipe", name, "--limit_tokens", str(limit), "--data_dir", str(folder / "data")]
    words += choices(settings)
    summary, ended = prepare_data(*words)
    run = Run(folder / "run")
    command = [sys.executable, "train.py", *words, "--output_dir", run.folder, "--force"]
    # of a layout of several ranks one process has its stage alone
    command += ["--deepspeed", re.split(":|_hpz", recipe["deepspeed"])[0]]
    began = time.perf_counter()
    started = Started(command)
    while not run.training_rows:
        if started.process.poll() is not None:
            raise SystemExit(started.finish().output)
        time.sleep(0.1)
    trained, row = time.perf_counter() - began, run.training_rows[0]
    started.kill()
    resolved = json.loads(run.dir.recipe.read_text())
    return {
        "limit_tokens": limit,
        "seconds": round(ended.seconds + trained, 1),
        "preparing_seconds": round(ended.seconds, 1),
        "to_first_step_seconds": round(trained, 1),
        "first_logged_step": row["step"],
        "train_tokens_prepared": summary["train"]["tokens"],
        "tokens_per_step": resolved["budget"]["tokens_per_step"],
        "deepspeed": resolved["deepspeed"],
    }


if __name__ == "__main__":
    main()
