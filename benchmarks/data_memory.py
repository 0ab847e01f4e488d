"""Peak memory of a preparation against the length of its input, and of the plan of an input too long for this disk.

    python benchmarks/data_memory.py --megabytes 50 100 200 400

Each length is prepared by the real command with a given tokenizer, plain and (up to `--cleaned_megabytes`) with
filters and deduplication; peak_bytes is of the command and its workers. The plan is that of JSON lines of
`--plan_gigabytes` in sparse files: cut into pieces and tasks, with a digest for each and what is still to do.
One JSON line a run.
"""

import shutil
import tempfile
import time
from pathlib import Path

from gear import (
    in_fresh_process,
    parser_of,
    prepare_data,
    record,
    repository_tokenizer,
    tiny_recipe,
    write_corpus,
)

CLEANED = {
    "filters": [{"rule": "length", "min_words": 5}, {"rule": "pii"}],
    "dedup": {"exact": True, "minhash": {}},
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 100, 200, 400])
    parser.add_argument("--cleaned_megabytes", type=int, default=100, help="longest that is filtered too")
    parser.add_argument("--plan_gigabytes", type=int, default=100)
    parser.add_argument("--folder", help="where the temporary folder lies (default: the system's)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="data_memory_", dir=options.folder) as root:
        data = {"tokenizer": str(repository_tokenizer(Path(root) / "tokenizer", 8192))}
        data |= {"sources": [{"path": f"{root}/text/*.jsonl"}], "validation_share": 0.005}
        for megabytes in options.megabytes:
            for name, section in {"plain": {}, "cleaned": CLEANED}.items():
                if name == "plain" or megabytes <= options.cleaned_megabytes:
                    values = prepare(Path(root) / "text", megabytes, {**data, **section})
                    record("data_memory", {"what": name, "megabytes": megabytes, **values}, options.keep)
        for name, section in {"plain": {}, "cleaned": CLEANED}.items():
            values = plan(Path(root) / "text", options.plan_gigabytes, {**data, **section})
            record("data_plan", {"what": name, "gigabytes": options.plan_gigabytes, **values}, options.keep)


def prepare(folder: Path, megabytes: int, data: dict) -> dict:
    """Run the real command on so much text; return its peak memory, seconds and tokens. Remove what it wrote."""
    num_bytes = write_corpus(folder, megabytes * 10**6, 2)
    summary, ended = prepare_data("--recipe", tiny_recipe(folder, data), "--data_dir", folder / "data")
    tokens = sum(summary[split]["tokens"] for split in ("train", "validation"))
    shutil.rmtree(folder)
    values = {"text_bytes": num_bytes, "tokens": tokens, "seconds": round(ended.seconds, 2)}
    return {**values, "peak_bytes": ended.peak_bytes}


def plan(folder: Path, gigabytes: int, data: dict) -> dict:
    """Plan `gigabytes` files of a gigabyte of nothing."""
    folder.mkdir()
    for number in range(gigabytes):
        with (folder / f"{number:05d}.jsonl").open("wb") as file:
            file.truncate(10**9)
    recipe = tiny_recipe(folder, data)
    found = in_fresh_process(planned, recipe, folder / "data" / "corpus")
    shutil.rmtree(folder)
    return found


def planned(recipe: str, folder: str) -> dict:
    """Plan a preparation; return its tasks that are to be done, and seconds, imports among them."""
    began = time.perf_counter()
    from pretraining.data.corpus import open_sources
    from pretraining.data.preparation.plan import Preparation
    from pretraining.recipe import load_recipe

    loaded = load_recipe(recipe, [])
    sources = open_sources(loaded.data)
    fingerprints = [source.fingerprint() for source in sources]
    made = Preparation.of(loaded, sources, Path(folder), fingerprints)
    pending = {stage.name: len(stage.pending()) for stage in made.stages}
    made.save()
    return {"tasks": pending, "seconds": round(time.perf_counter() - began, 3)}


if __name__ == "__main__":
    main()
