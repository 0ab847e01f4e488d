"""Bits a byte on held-out files against seconds: the demo, the GPT-2 it was before, and a plain loop of PyTorch.

    python benchmarks/time_to_loss.py --keep                 # some forty minutes on two idle cores
    python benchmarks/time_to_loss.py --seconds 20 --seeds 1 --rates 0.005 --evaluations 2

All read the same text through the same tokenizer, are measured on the same held-out files by the same code, and
have the same cores. The clock starts with the command: launcher, imports and validation count. `demo` and `gpt2`
are the real `deepspeed` command on two processes; `demo` is recipe tiny, `gpt2` recipe features/gpt2. The
plain loop is transformers' GPT-2 of that recipe's shape, batch and schedule under AdamW, one process
on all cores, in fp32: `--rates` are tried with the first seed, the best one gets the other seeds. Its schedule
follows the clock, so that it ends with `--seconds`.

Each run is kept in `--folder`, and not made again. One JSON line a way: its runs' curves of [seconds, bits per
byte], the median of the ends. `--picture FILE` draws the curves (matplotlib).
"""

import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gear import REPOSITORY, choices, in_fresh_process, kept, parser_of, record, run_command

DEMO, GPT2 = "tiny", "features/gpt2"
WARMUP_SHARE, FLOOR = 0.05, 0.1
"""Of the plain loop's schedule, as the recipe has them."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=240, help="of the plain loop (default: 240)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0025, 0.005, 0.01])
    parser.add_argument("--evaluations", type=int, default=14, help="of each run; their time counts")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "time_to_loss")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    seeds = range(options.seeds)
    run_command(sys.executable, "data_prep.py", "--recipe", DEMO)
    ways = {
        name: [curve_of(options.folder, name, seed, run_recipe, options.evaluations) for seed in seeds]
        for name in (DEMO, GPT2)
    }
    clock = (options.seconds, options.evaluations)
    tried = {
        rate: curve_of(options.folder, f"plain {rate}", 0, run_plain, rate, *clock) for rate in options.rates
    }
    best = min(tried, key=lambda rate: tried[rate][-1][1])
    ways[f"plain loop, rate {best:g}"] = [tried[best]] + [
        curve_of(options.folder, f"plain {best}", seed, run_plain, best, *clock) for seed in seeds[1:]
    ]
    for name, curves in ways.items():
        ends = [curve[-1] for curve in curves]
        values = {
            "way": name,
            "seconds": round(statistics.median(seconds for seconds, _ in ends), 1),
            "bits_per_byte": round(statistics.median(bits for _, bits in ends), 4),
            "spread": round(max(bits for _, bits in ends) - min(bits for _, bits in ends), 4),
            "curves": curves,
        }
        if name.startswith("plain"):
            values["rates"] = {f"{rate:g}": curve[-1][1] for rate, curve in tried.items()}
        record("time_to_loss", values, options.keep)
    if options.picture:
        draw(ways, options.picture)


def curve_of(folder: Path, name: str, seed: int, run, *rest) -> list[list[float]]:
    """Return the curve of a run, from `folder` if it was made before."""
    return kept(folder / f"{name.replace('/', '-')}-{seed}.json", lambda: run(name, seed, *rest))


def run_recipe(recipe: str, seed: int, evaluations: int) -> list[list[float]]:
    """Train a recipe by its real command; return [seconds since it began, bits per byte] of each validation."""
    from pretraining.recipe import load_recipe
    from pretraining.runtime.durable_files import read_rows
    from pretraining.runtime.run_folder import RunFolder

    settings = {"training.seed": seed, "training.eval_steps": load_recipe(recipe).num_steps // evaluations}
    with tempfile.TemporaryDirectory(prefix="time_to_loss_") as folder:
        words = ["deepspeed", "--num_gpus=2", "train.py", "--recipe", recipe, "--output_dir", folder]
        began = time.time()
        subprocess.run([*words, *choices(settings)], cwd=REPOSITORY, check=True, stdout=sys.stderr)
        rows = read_rows(RunFolder(Path(folder)).metrics)
    return [[round(r["time"] - began, 1), r["eval/bits_per_byte"]] for r in rows if "eval/bits_per_byte" in r]


def run_plain(name: str, seed: int, rate: float, seconds: float, evaluations: int) -> list[list[float]]:
    print(f"plain loop, rate {rate:g}, seed {seed}", file=sys.stderr)
    return in_fresh_process(plain_loop, time.time(), seed, rate, seconds, evaluations)["curve"]


def plain_loop(*words: str) -> dict:
    """Train GPT-2 as one writes it in an afternoon; return its `curve` of [seconds, bits per byte].

    words: when the command began, seed, peak rate, seconds, and how often it is measured.
    """
    began, seed, peak, seconds, evaluations = (float(word) for word in words)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pretraining.data.packed_dataset import build_training_dataset
    from pretraining.data.prepared import open_prepared
    from pretraining.evaluation.validation import Validation
    from pretraining.recipe import load_recipe
    from pretraining.training.trainer import collate_blocks

    torch.manual_seed(int(seed))
    recipe = load_recipe(GPT2, [f"training.seed={int(seed)}"])
    data = open_prepared(recipe, REPOSITORY / "data")
    samples, validation = build_training_dataset(data, recipe, 0), Validation(data.validation, recipe)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**recipe.model))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)
    size = recipe.budget.tokens_per_step // recipe.sequence_length
    curve, step = [], 0
    while (share := (time.time() - began) / seconds) < 1:
        cosine = FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * share)) / 2
        for group in optimizer.param_groups:
            group["lr"] = peak * cosine * min(1.0, share / WARMUP_SHARE)
        places = [place % len(samples) for place in range(step * size, (step + 1) * size)]
        batch = collate_blocks(samples.__getitems__(places))
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if share >= (len(curve) + 1) / evaluations:
            curve.append([round(time.time() - began, 1), validation.measure(model)["bits_per_byte"]])
    bits = validation.measure(model)["bits_per_byte"]
    return {"curve": [*curve, [round(time.time() - began, 1), bits]], "steps": step}


def draw(ways: dict[str, list[list[list[float]]]], picture: Path) -> None:
    """Draw each way's curves in one colour."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for number, (name, curves) in enumerate(reversed(ways.items())):
        for which, curve in enumerate(curves):
            seconds, bits = zip(*curve, strict=True)
            axes.plot(seconds, bits, ".-", color=f"C{number}", alpha=0.8, label=None if which else name)
    axes.set_xlabel("seconds since the command, two CPU cores")
    axes.set_ylabel("bits per byte, held-out files")
    axes.set_ylim(top=3)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
