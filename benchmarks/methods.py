"""What methods of today change at the demo's size: bits per byte on held-out files at the end, over seeds.

    python benchmarks/methods.py --keep                      # 700 steps of recipe tiny; an hour of two cores
    python benchmarks/methods.py --tokens 204800 --seeds 1 --ways tiny per_head merged

Each way is recipe tiny with some keys changed, by the real command in one process on one core; all cores are at work,
and a run that `--folder` has is not made again. Within a seed, weights and order of texts are the same for all ways.
One JSON line a way: the ends, and the median of the differences from `tiny` or, of merged parts, from `decayed`.

`decayed` lets the rate fall over the last fifth of the steps, `constant` keeps it. `merged` is the average of the last
eight checkpoints of `constant`, which lie a fortieth of the run apart: it costs no step of its own.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from gear import choices, kept, on_each_core, parser_of, record, run_command

from pretraining.recipe import load_recipe
from pretraining.runtime.durable_files import read_rows

DECAYED, CONSTANT = "decayed", "constant"
PARTS, SPACES = 8, 40
"""How many checkpoints are merged, and into how many spaces they cut the run."""


def ways_of(steps: int) -> dict[str, dict]:
    """Return what each way changes: {dotted key: value}."""
    tiny = load_recipe("tiny").to_dict()
    decay, hidden = {"weight_decay": 0.1}, {"kind": "hidden"}
    late = {"num_decay_steps": steps // 5, "decay_type": "linear", "min_lr_ratio": 0.0}
    wsd = {"training.lr_scheduler_type": "warmup_stable_decay", "training.lr_scheduler_kwargs": late}
    return {
        "tiny": {},
        "steep": {"optimizer.polynomial": "steep"},
        "converging": {"optimizer.polynomial": "converging", "optimizer.newton_schulz_steps": 12},
        "normuon": {"optimizer.neuron_beta2": 0.95},
        "per_head": {"optimizer.per_head": True},
        "decay": {"optimizer.groups": [*tiny["optimizer"]["groups"], hidden | decay]},
        "cautious_decay": {
            "optimizer.groups": [*tiny["optimizer"]["groups"], hidden | decay | {"cautious_decay": True}]
        },
        "average": {"optimizer.average_decay": 0.98},
        DECAYED: wsd,
        CONSTANT: {
            "training.lr_scheduler_type": "constant_with_warmup",
            "training.save_steps": steps // SPACES,
            "checkpoints.keep_last": PARTS,
        },
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--tokens", type=int, default=1_433_600, help="of each run (default: half of the demo's)"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", help="some of them (default: all)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "methods")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    changes = ways_of(options.tokens // load_recipe("tiny").budget.tokens_per_step)
    wanted = options.ways or [*changes, "merged"]
    made = dict.fromkeys(CONSTANT if way == "merged" else way for way in wanted)
    run_command(sys.executable, "data_prep.py", "--recipe", "tiny")
    runs = [(way, seed) for seed in range(options.seeds) for way in made]

    def of_run(way: str, seed: int) -> dict[str, float]:
        path = options.folder / f"{way}-{options.tokens}-{seed}.json"
        return kept(path, lambda: ends_of(options.tokens, way, seed, changes[way]))

    ends = on_each_core(lambda run: of_run(*run), runs)
    found = dict(zip(runs, ends, strict=True))
    for way in wanted:
        run, key, base = way, "bits_per_byte", "tiny"
        if way == "merged":
            run, key, base = CONSTANT, "merged", DECAYED
        elif way == "average":
            key = "average"
        bits = [found[run, seed][key] for seed in range(options.seeds)]
        values = {"way": way, "tokens": options.tokens, "bits_per_byte": bits, "changed": changes.get(way)}
        if (base, 0) in found:
            values |= {"beside": base, "differences": differences(bits, found, base)}
        record("methods", values, options.keep)


def differences(bits: list[float], found: dict, base: str) -> dict:
    """Return the median, least and largest difference from the other way's run of the same seed."""
    each = [round(here - found[base, seed]["bits_per_byte"], 4) for seed, here in enumerate(bits)]
    return {"median": statistics.median(each), "least": min(each), "largest": max(each)}


def ends_of(tokens: int, way: str, seed: int, changed: dict) -> dict[str, float]:
    """Train a way; return its ends, in bits per byte: of its weights, of their average, of the merged parts."""
    common = {"budget.tokens": tokens, "training.seed": seed, "evaluation.prompt": ""}
    common |= {"training.eval_steps": 10**6, "training.save_steps": 10**6}  # the end has both anyway
    with tempfile.TemporaryDirectory(prefix="methods_") as folder:
        words = ["train.py", "--recipe", "tiny", "--output_dir", folder, *choices(common | changed)]
        run_command(sys.executable, *words)
        rows = [row for row in read_rows(Path(folder) / "metrics.jsonl") if "eval/loss" in row]
        ends = {"bits_per_byte": rows[-1]["eval/bits_per_byte"]}
        bits_per_nat = rows[-1]["eval/bits_per_byte"] / rows[-1]["eval/loss"]  # a token; the text is the same
        if "eval/average_loss" in rows[-1]:
            ends["average"] = round(rows[-1]["eval/average_loss"] * bits_per_nat, 4)
        if way == CONSTANT:
            verb = ["-m", "pretraining.checkpoints", "merge", folder, "--last", PARTS, "--validate", "--json"]
            merged = json.loads(run_command(sys.executable, *verb).stdout)
            ends["merged"] = round(merged["loss"] * bits_per_nat, 4)
    print(f"{way}, seed {seed}: {ends}", file=sys.stderr)
    return ends


if __name__ == "__main__":
    main()
