"""Rewrite a checkpoint into another number of files.

No resume needs it: any number of ranks at any ZeRO stage reads any checkpoint as it is. Fewer files suit a slow
store, more suit many readers. Verifies first; takes memory of one slice of a parameter.
"""

import argparse
from pathlib import Path

from pretraining.checkpoints.folders import step_of
from pretraining.checkpoints.selection import add_run, add_step, chosen_checkpoints
from pretraining.checkpoints.verification import damage
from pretraining.command_line import not_negative_integer
from pretraining.errors import UserError
from pretraining.planning.quantities import num_bytes

EXAMPLES = """  python -m pretraining.checkpoints reshard runs/tiny --files 1 --to out/checkpoint
  python -m pretraining.checkpoints reshard runs/tiny --step 750 --files 8 --to out/checkpoint-750"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The checkpoint, how many files, and where they go."""
    add_run(parser, or_checkpoint=True)
    add_step(parser, "default: the newest")
    parser.add_argument("--files", type=not_negative_integer, required=True, metavar="N", help="how many")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")


def answer(options: argparse.Namespace) -> dict:
    """{"checkpoint", "step", "to", "files", "bytes"}."""
    checkpoint = chosen_checkpoints(options.run, options.step)[0]
    if options.files < 1:
        raise UserError("--files 0: a checkpoint needs one file at least")
    if reason := damage(checkpoint):
        raise UserError(f"{checkpoint}: the checkpoint is damaged: {reason}; choose another with --step")
    if options.to.exists():
        raise UserError(f"{options.to}: is there already; remove it, or choose another with --to")
    from pretraining.checkpoints.reshard import reshard

    reshard(checkpoint, options.to, options.files)
    size = sum(path.stat().st_size for path in options.to.iterdir())
    told = {"checkpoint": str(checkpoint), "step": step_of(checkpoint), "to": str(options.to)}
    return {**told, "files": options.files, "bytes": size}


def as_text(answer: dict) -> str:
    """Where it is."""
    return f"{answer['to']}: {answer['checkpoint']} in {answer['files']} files, {num_bytes(answer['bytes'])}"
