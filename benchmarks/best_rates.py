"""Validation loss after one budget at several learning rates: AdamW and Muon, or narrow and wide models.

    python benchmarks/best_rates.py optimizers --keep
    python benchmarks/best_rates.py optimizers --recipe 124m --launcher "torchrun --nproc_per_node=8" --seeds 42
    python benchmarks/best_rates.py transfer --keep
    python benchmarks/best_rates.py transfer --tokens 1024000 --rates 0.0025 0.005 0.01 0.02 0.04

optimizers: each rate is tried with the first seed; the rate with the lowest validation loss is then run with the
others. One JSON line: every loss, and whether Muon's mean lies below AdamW's by more than the seeds' spread (the wider
of the two, highest minus lowest).

transfer: whether the best rate of a narrow model is the best of one four times as wide, with muP and without. A GPT-2
recipe at each of the widths, heads of one size, every rate with the first seed; the narrowest is the base, where both
ways are the same model. One JSON line a way: the validation loss by width and rate, the best rate of each width,
whether they are the same (`transfers`), and what the narrow model's best rate costs the wide one (`regret`, nats above
the wide one's best).

On two CPU cores a run of tiny takes one to four minutes, so all of them take hours; `--tokens` shortens the budget.
"""

import argparse
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from gear import REPOSITORY, choices, chosen, parser_of, record, run_command

RATES = {
    "optimizers": [0.0025, 0.005, 0.01],
    "transfer": [0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04],
}
"""Peak learning rates to choose from. Muon's are of the hidden matrices too: its updates are scaled to AdamW's size."""
HEAD_SIZE = 32


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=list(RATES))
    parser.add_argument("--recipe", default="features/gpt2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--rates", type=float, nargs="+", help="peak learning rates; default: those of RATES")
    parser.add_argument("--tokens", type=int, help="budget.tokens in place of the recipe's")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256], help="of transfer")
    # GPT-2's 0.02 is small for a base so narrow
    parser.add_argument("--initializer_range", type=float, default=0.06, help="of transfer's models")
    parser.add_argument("--launcher", help="what starts train.py; default: this Python")
    parser.add_argument("--deepspeed", default="null")
    options = parser.parse_args()
    options.rates = options.rates or RATES[options.what]
    run_command(sys.executable, "data_prep.py", "--recipe", options.recipe)
    {"optimizers": compare_optimizers, "transfer": compare_widths}[options.what](options)


def final_loss(options: argparse.Namespace, rate: float, seed: int, settings: dict) -> float:
    """Return the validation loss of one whole run, in nats per token. settings: {dotted key: value}."""
    from pretraining.runtime.run_folder import RunFolder

    values = {**settings, "training.learning_rate": rate, "training.seed": seed}
    values |= {"budget.tokens": options.tokens} if options.tokens else {}
    values |= {"training.report_to": "none", "training.save_strategy": "no"}
    launcher = shlex.split(options.launcher) if options.launcher else [sys.executable]
    with tempfile.TemporaryDirectory(prefix="best_rates_") as folder:
        output = Path(folder) / "run"
        words = ["--recipe", options.recipe, "--deepspeed", options.deepspeed, "--output_dir", str(output)]
        command = [*launcher, "train.py", *words, *choices(values)]
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=sys.stderr)
        return RunFolder(output).last_event("end")["eval_loss"]


def losses_by_rate(options: argparse.Namespace, settings: dict) -> tuple[dict[float, float], float]:
    """Return {rate: validation loss} with the first seed, and the best rate."""
    losses = {rate: final_loss(options, rate, options.seeds[0], settings) for rate in options.rates}
    return losses, min(losses, key=losses.get)


def rounded(losses: dict[float, float]) -> dict[str, float]:
    return {str(rate): round(loss, 5) for rate, loss in losses.items()}


def compare_optimizers(options: argparse.Namespace) -> None:
    results = {}
    for name in ("adamw", "muon"):
        settings = {"optimizer.name": name}
        by_rate, best = losses_by_rate(options, settings)
        others = [final_loss(options, best, seed, settings) for seed in options.seeds[1:]]
        losses = [by_rate[best], *others]
        results[name] = {
            "by_rate": rounded(by_rate),
            "rate": best,
            "by_seed": [round(loss, 5) for loss in losses],
            "mean": round(statistics.mean(losses), 5),
            "spread": round(max(losses) - min(losses), 5),
        }
    margin = results["adamw"]["mean"] - results["muon"]["mean"]
    spread = max(result["spread"] for result in results.values())
    values = {**chosen(options, "what", "widths", "initializer_range"), **results}
    values |= {"margin": round(margin, 5), "spread": round(spread, 5), "muon_is_below": margin > spread}
    record("optimizers", values, options.keep)


def compare_widths(options: argparse.Namespace) -> None:
    def by_rate(width: int, base_width: int | None) -> tuple[dict[float, float], float]:
        settings = {"model.n_embd": width, "model.n_head": width // HEAD_SIZE, "mup.base_width": base_width}
        return losses_by_rate(options, {**settings, "model.initializer_range": options.initializer_range})

    base, *wider = sorted(options.widths)
    narrow = by_rate(base, base)
    for way in ("mup", "standard"):
        found = {base: narrow, **{width: by_rate(width, base if way == "mup" else None) for width in wider}}
        best = {width: rate for width, (_, rate) in found.items()}
        widest = found[max(found)][0]
        values = {
            "way": way,
            "by_width": {str(width): rounded(losses) for width, (losses, _) in found.items()},
            "best": {str(width): rate for width, rate in best.items()},
            "transfers": len(set(best.values())) == 1,
            "regret": round(widest[best[base]] - min(widest.values()), 5),
        }
        record("transfer", {**chosen(options, "what"), **values}, options.keep)


if __name__ == "__main__":
    main()
