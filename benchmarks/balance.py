"""How evenly are the experts of a mixture used after some steps, balanced and not, and what does it cost in loss?

    python benchmarks/balance.py --steps 200 --keep

Trains features/balanced-experts (a small DeepSeek-V3 of eight experts) on the text of the demo, once with each way of
`loss.balance`, and prints for each the load of the busiest expert over an even share (mean over the layers and the last
tenth of the steps; and of the worst layer) and the validation loss.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from gear import choices, parser_of, record, run_command

RECIPE = "features/balanced-experts"
WAYS: dict[str, dict] = {
    "auto": {},
    "auto, a third of the rate": {"loss.bias_rate": 0.001},
    "bias alone": {"loss.sequence_balance": 0},
    "none": {"loss.balance": "none"},
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    run_command(sys.executable, "data_prep.py", "--recipe", RECIPE)
    with tempfile.TemporaryDirectory() as folder:
        found = {way: load(Path(folder) / way, options.steps, settings) for way, settings in WAYS.items()}
    record("balance", {"recipe": RECIPE, "steps": options.steps, "by": found}, options.keep)


def load(folder: Path, steps: int, settings: dict) -> dict:
    """Train one way; return the loads and the loss."""
    from pretraining.recipe import load_recipe
    from pretraining.runtime.durable_files import read_rows

    tokens = steps * load_recipe(RECIPE).tokens_per_step
    words = choices({"budget.tokens": tokens, "training.logging_steps": 1, "deepspeed": None, **settings})
    run_command(sys.executable, "train.py", "--recipe", RECIPE, "--output_dir", folder, *words)
    rows = read_rows(folder / "metrics.jsonl")
    last = [row for row in rows if "train/loss" in row][-steps // 10 :]
    layers = [key for key in last[0] if key.startswith("stability/expert_load/max_over_mean/")]
    means = {key: statistics.mean(row[key] for row in last) for key in layers}
    validated = [row["eval/loss"] for row in rows if "eval/loss" in row]
    return {
        "busiest_over_even": round(statistics.mean(means.values()), 3),
        "worst_layer": round(max(means.values()), 3),
        "validation_loss": round(validated[-1], 4),
    }


if __name__ == "__main__":
    main()
