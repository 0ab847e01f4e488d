"""Start a decay of the learning rate, or another stage, from a stable checkpoint, as a run of its own.

The new run's folder holds the checkpoint (linked, not copied, where the disk can) and a recipe which ends after
--steps more; the run it is from stays as it is and can go on. --decay lets the rate fall meanwhile, --stage and --set
change the recipe: a longer context, another mixture. Needs a schedule that is stable at that step: constant,
constant_with_warmup or warmup_stable_decay. `train.py` continues it.
"""

import argparse
import shlex
from pathlib import Path

from pretraining.checkpoints.folders import step_of
from pretraining.checkpoints.selection import add_run, chosen_checkpoints
from pretraining.checkpoints.verification import damage
from pretraining.command_line import not_negative_integer, not_negative_number, positive_integer
from pretraining.errors import UserError
from pretraining.runtime.run_folder import RunFolder

EXAMPLES = """  python -m pretraining.checkpoints branch runs/qk-norm --at 8000 --decay 1-sqrt --steps 2000
  python -m pretraining.checkpoints branch runs/qk-norm --at 8000 --decay linear --steps 500 --output runs/short
  python -m pretraining.checkpoints branch runs/qk-norm --at 8000 --steps 1000 --stage recipes/stages/qk-norm-8k.json
  python -m pretraining.checkpoints branch runs/qk-norm --at 8000 --steps 1000 --set data.sequence_length=1024"""
SHAPES = ("linear", "cosine", "1-sqrt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, the step, and the decay."""
    add_run(parser, or_checkpoint=True)
    parser.add_argument("--at", type=not_negative_integer, metavar="STEP", help="default: the newest")
    parser.add_argument("--steps", type=positive_integer, required=True, metavar="N", help="how many more")
    parser.add_argument("--decay", choices=SHAPES, help="the rate falls over them (default: it stays)")
    parser.add_argument(
        "--min_lr_ratio", type=not_negative_number, default=0.0, metavar="R", help="of the stable rate (0)"
    )
    what = "a file of the recipe's keys that change: a longer context, another mixture (see recipes/stages/)"
    parser.add_argument("--stage", type=Path, metavar="FILE", help=what)
    what = "change a value of the recipe, after the stage's (repeatable)"
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=what)
    what = "the new run's folder (default: beside RUN, named after the stage)"
    parser.add_argument("--output", type=Path, metavar="DIR", help=what)


def answer(options: argparse.Namespace) -> dict:
    """{"checkpoint", "step", "run": the new folder, "last_step", "command": what trains it}."""
    checkpoint = chosen_checkpoints(options.run, options.at)[0]
    if options.min_lr_ratio > 1:
        raise UserError(f"--min_lr_ratio {options.min_lr_ratio:g}: the rate is to fall; give 1 at most")
    if reason := damage(checkpoint):
        raise UserError(f"{checkpoint}: the checkpoint is damaged: {reason}; choose another with --at")
    step, run = step_of(checkpoint), checkpoint.absolute().parent
    name = f"{run.name}-{options.decay or 'stage'}-{step}-{step + options.steps}"
    output = options.output or checkpoint.parent.with_name(name)
    if output.exists():
        raise UserError(f"{output}: is there already; remove it, or choose another with --output")
    from pretraining.checkpoints.branch import branch
    from pretraining.checkpoints.stage import Stage, settings_of

    settings = (*(settings_of(options.stage) if options.stage else ()), *options.set)
    stage = Stage(options.steps, options.decay, options.min_lr_ratio, settings)
    branch(checkpoint, stage, output)
    words = ["train.py", "--recipe", str(RunFolder(output).recipe), "--output_dir", str(output)]
    told = {"checkpoint": str(checkpoint), "step": step, "run": str(output)}
    return {**told, "last_step": step + options.steps, "command": shlex.join(words)}


def as_text(answer: dict) -> str:
    """Where it is, and how it goes on."""
    return (
        f"{answer['run']}: goes on from {answer['checkpoint']} until step {answer['last_step']:,}\n"
        f"train it, by the launcher of your choice: {answer['command']}"
    )
