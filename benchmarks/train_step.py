"""Speed of train.py's step, beside a bare PyTorch loop: same model, data, optimizer, processes; paired in one run.

    python benchmarks/train_step.py --shape small --deepspeed null
    python benchmarks/train_step.py --shape 124m --processes 2 --deepspeed zero2 --pairs 6
    python benchmarks/train_step.py --shape small --deepspeed zero1 --bare engine
    python benchmarks/train_step.py --shape 1.5b --deepspeed zero2 --micro_batch 16 --keep                (needs a GPU)
    python benchmarks/train_step.py --shape 7b --layers 8 --deepspeed zero2 --micro_batch 4 --keep        (needs a GPU)
    python benchmarks/train_step.py --shape 124m --deepspeed zero2 --levers --keep

Inside one training run, blocks of Trainer steps alternate with blocks of bare steps on a second copy of the model, so
that both see the same machine at the same time. Prints one JSON line: the ratio is the median of the ratios of
neighbouring blocks; tokens/s of both, what share of the dense peak they are (MFU, where the GPU's peak is known), the
memory that each allocates at most (GPUs), and where the Trainer's step spends its time. The bare loop is fp32 with
torch's fused AdamW, under autocast where the recipe is in bf16. On a CPU the shapes train in fp32.

`--levers` takes the bare loop away and adds one lever after the other to a plain step: a line for each, and a table.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gear import REPOSITORY, parser_of, record


class Shape(NamedTuple):
    """What is trained, and how many optimizer steps make a block on a CPU."""

    recipe: str
    overrides: dict
    block_steps: int


SHAPES = {
    # 4 layers, width 128: a step of some 60 ms on two CPU cores.
    "small": Shape(
        "tiny", {"model.n_layer": 4, "model.n_embd": 128, "model.n_head": 4, "model.n_positions": 128}, 20
    ),
    # The GPT-2 small shape on the tokens of the tiny corpus; one sequence a rank and step.
    "124m": Shape("124m", {"model.n_positions": 1024}, 1),
    "1.5b": Shape("1.5b", {}, 1),
    "7b": Shape("7b", {"data.sequence_length": 2048}, 1),
}
BLOCK_STEPS_ON_GPU = 10

# Each is added to those before it.
LEVERS = {
    "plain": {"loss.kind": "plain", "model.attn_implementation": "eager"},
    "attention kernel": {"model.attn_implementation": None},
    "chunked loss": {"loss.kind": "chunked"},
    "fused loss": {"loss.kind": "fused"},
    "compiled blocks": {"speed.compile": "blocks"},
    "documents kept apart": {"data.document_masking": True},
    "every layer recomputed": {"training.activation_checkpointing": True},
}


def main() -> None:
    options = parse_arguments()
    if options.levers and options.lever is None:
        return measure_levers(options)
    start_ranks(__file__, run_paired, options)


def start_ranks(script: str, run: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> None:
    """`run(options)` on each of `options.processes` ranks: torchrun starts this script again."""
    if "BENCHMARK_WORKER" in os.environ:
        return run(options)
    subprocess.run(check=True, **on_ranks(script, options.processes))


def on_ranks(script: str, processes: int, *more: str) -> dict:
    """What `subprocess.run` takes to start a script again, as so many workers, with this command's arguments."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    return {
        "args": [*launcher, script, *sys.argv[1:], *more],
        "env": {**os.environ, "BENCHMARK_WORKER": "1"},
    }


def measure_levers(options: argparse.Namespace) -> None:
    """A run for each lever, on top of those before it; a line each as it ends, the table at the end."""
    rows = []
    for lever in LEVERS:
        command = on_ranks(__file__, options.processes, "--lever", lever)
        finished = subprocess.run(stdout=subprocess.PIPE, text=True, **command)
        lines = [line for line in finished.stdout.splitlines() if line.startswith('{"benchmark"')]
        print(*lines, sep="\n", flush=True)
        rows.append((lever, json.loads(lines[-1]) if finished.returncode == 0 else None))
    print(levers_table(rows), file=sys.stderr)


def levers_table(rows: list[tuple[str, dict | None]]) -> str:
    """What each lever brings on top of those above it."""
    lines = [f"{'':<24}{'tokens/s':>12}{'MFU':>8}{'peak GB':>10}"]
    for lever, row in rows:
        if row is None:
            lines.append(f"{lever:<24}{'failed':>12}")
            continue
        mfu, peak = row["mfu"], row["peak_bytes"]
        lines.append(
            f"{lever:<24}{row['tokens_per_second']:>12,.0f}{'' if mfu is None else format(mfu, '.1%'):>8}"
            f"{'' if peak is None else format(peak / 1e9, ',.1f'):>10}"
        )
    return "\n".join(lines)


def run_paired(options: argparse.Namespace) -> None:
    """Run train.py's own `main` with a callback that interleaves the bare loop."""
    import torch
    from paired_steps import LOOPS, PairedSteps

    on_gpu = torch.cuda.is_available()
    block_steps = options.block_steps or (BLOCK_STEPS_ON_GPU if on_gpu else SHAPES[options.shape].block_steps)
    paired = PairedSteps(block_steps, None if options.levers else LOOPS[options.bare])
    train_with(paired, [*recipe_arguments(options, block_steps), *step_settings(options, on_gpu)])
    if os.environ["RANK"] == "0":
        names = ("shape", "layers", "processes", "deepspeed", "micro_batch", "pairs", "bare", "lever")
        chosen = {name: getattr(options, name) for name in names}
        record("train_step", {**chosen, **paired.result()}, options.keep)


def train_with(callback, words: list[str]) -> None:
    """train.py's own `main` with these words, `callback` before all others and no progress bar.

    The callback is given the run's `speed`, its SpeedMeter.
    """
    import train
    from pretraining.training.metrics import ProgressCallback
    from pretraining.training.monitors import Monitors

    callbacks = Monitors.callbacks

    def with_ours(watch: Monitors, saves) -> list:
        callback.speed = watch.speed
        return [callback, *(c for c in callbacks(watch, saves) if not isinstance(c, ProgressCallback))]

    Monitors.callbacks = with_ours
    sys.argv = ["train.py", *words]
    train.main()


def recipe_arguments(options: argparse.Namespace, block_steps: int) -> list[str]:
    """train.py's command line: no logging, evaluation or saving inside the measured steps."""
    from pretraining.recipe import load_recipe

    shape = SHAPES[options.shape]
    tiny = json.loads((REPOSITORY / "recipes" / "tiny.json").read_text())
    settings = [f"{key}={json.dumps(value)}" for key, value in shape.overrides.items()]
    length = load_recipe(shape.recipe, settings).sequence_length
    per_step = options.micro_batch * length * options.processes
    num_steps = block_steps * (options.pairs + 1)
    output = Path(tempfile.gettempdir()) / f"train_step_{os.getppid()}"
    shutil.rmtree(output, ignore_errors=True)
    values = {
        **shape.overrides,
        "data.name": "python-stdlib",
        "data.sources": tiny["data"]["sources"],
        "data.tokenizer": tiny["data"]["tokenizer"],
        "data.validation_share": tiny["data"]["validation_share"],
        "budget.tokens_per_step": per_step,
        "budget.tokens": per_step * num_steps,
        "training.per_device_train_batch_size": options.micro_batch,
        "training.dataloader_num_workers": 0,
        "training.bf16": False,
        "training.logging_steps": num_steps,
        "training.logging_first_step": False,
        "training.eval_strategy": "no",
        "training.save_strategy": "no",
        "training.activation_checkpointing": False,
        "training.report_to": "none",
        "report.every_seconds": None,
        "evaluation.max_validation_tokens": length,
    }
    words = ["--recipe", shape.recipe, "--deepspeed", options.deepspeed, "--output_dir", str(output)]
    return words + _set(values)


def step_settings(options: argparse.Namespace, on_gpu: bool) -> list[str]:
    """Precision and data workers of a GPU, fewer layers, and the levers up to the one that is measured."""
    from pretraining.recipe import load_recipe
    from pretraining.recipe.model import own_key

    values: dict = {}
    if on_gpu:
        values |= {"training.bf16": True, "training.dataloader_num_workers": 2}
    if options.layers:
        model = load_recipe(SHAPES[options.shape].recipe).model
        values[f"model.{own_key(model, 'num_hidden_layers')}"] = options.layers
    if options.lever:
        for name, lever in LEVERS.items():
            values |= lever
            if name == options.lever:
                break
    return _set(values)


def _set(values: dict) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument(
        "--layers", type=int, help="instead of the shape's, where it is too large for the machine"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--deepspeed", default="null", help="a ds_config, or null")
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=15, help="measured blocks of either loop")
    parser.add_argument("--block_steps", type=int, help="steps of a block (default: by shape, 10 on a GPU)")
    parser.add_argument(
        "--bare",
        choices=("plain", "engine"),
        default="plain",
        help="a PyTorch loop, or one around DeepSpeed's engine",
    )
    parser.add_argument("--levers", action="store_true", help="what each lever brings, without the bare loop")
    parser.add_argument("--lever", choices=LEVERS, help="used by --levers: the last one that is added")
    return parser.parse_args()


if __name__ == "__main__":
    main()
