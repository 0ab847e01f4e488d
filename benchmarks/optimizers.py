"""Validation loss after one budget under AdamW and Muon: the best rate of each, over several seeds.

    python benchmarks/optimizers.py --keep
    python benchmarks/optimizers.py --recipe 124m --launcher "torchrun --nproc_per_node=8" --seeds 42

Each rate is tried with the first seed; the rate with the lowest validation loss is then run with the others. Prints one
JSON line: every loss, and whether Muon's mean lies below AdamW's by more than the seeds' spread (the wider of the two,
highest minus lowest). On two CPU cores the tiny recipe takes some minutes a run, so the whole takes hours; `--tokens`
shortens the budget (`budget.tokens`).
"""

import statistics

from record import parser_of, record
from whole_run import final_loss, prepare

RATES = {"adamw": (0.0025, 0.005, 0.01), "muon": (0.0025, 0.005, 0.01)}
"""Peak learning rates to choose from. Muon's are of the hidden matrices too: its updates are scaled to AdamW's size."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--rates", type=float, nargs="+", help="for both; default: those of RATES")
    parser.add_argument("--tokens", type=int, help="budget.tokens in place of the recipe's")
    parser.add_argument("--launcher", help="what starts train.py; default: this Python")
    parser.add_argument("--deepspeed", default="null")
    options = parser.parse_args()
    prepare(options.recipe)
    found = {name: tuned(name, options) for name in RATES}
    margin = found["adamw"]["mean"] - found["muon"]["mean"]
    spread = max(result["spread"] for result in found.values())
    values = {key: value for key, value in vars(options).items() if key != "keep"}
    values |= {**found, "margin": round(margin, 5), "spread": round(spread, 5)}
    record("optimizers", {**values, "muon_is_below": margin > spread}, options.keep)


def tuned(name: str, options) -> dict:
    """Losses of every rate with the first seed, and of the best one with all seeds."""
    first, *others = options.seeds
    by_rate = {rate: loss_after(name, rate, first, options) for rate in options.rates or RATES[name]}
    best = min(by_rate, key=by_rate.get)
    losses = [by_rate[best], *(loss_after(name, best, seed, options) for seed in others)]
    return {
        "by_rate": {str(rate): round(loss, 5) for rate, loss in by_rate.items()},
        "rate": best,
        "by_seed": [round(loss, 5) for loss in losses],
        "mean": round(statistics.mean(losses), 5),
        "spread": round(max(losses) - min(losses), 5),
    }


def loss_after(name: str, rate: float, seed: int, options) -> float:
    """Validation loss of one whole run, in nats per token."""
    settings = {"optimizer.name": name, "training.learning_rate": rate, "training.seed": seed}
    settings |= {"budget.tokens": options.tokens} if options.tokens else {}
    return final_loss(options.recipe, settings, options.launcher, options.deepspeed)


if __name__ == "__main__":
    main()
