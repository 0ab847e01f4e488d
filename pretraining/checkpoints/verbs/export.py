"""Make a `from_pretrained` folder of a checkpoint: weights, config, tokenizer, model card.

Reads the checkpoint's own files, whichever ranks at whichever ZeRO stage wrote them, after verifying them; needs
host memory for the weights, no GPU and none of the ranks that saved it.
"""

import argparse
from pathlib import Path

from pretraining.checkpoints.folders import step_of
from pretraining.checkpoints.selection import add_run, add_step, chosen_checkpoints
from pretraining.checkpoints.verification import damage
from pretraining.errors import UserError
from pretraining.planning.quantities import num_bytes
from pretraining.runtime.imports import prepare_imports
from pretraining.runtime.run_folder import RunFolder

EXAMPLES = """  python -m pretraining.checkpoints export runs/tiny
  python -m pretraining.checkpoints export runs/tiny --step 750 --to out/tiny-750
  python -m pretraining.checkpoints export /mnt/copies/checkpoint-750 --model runs/tiny/model --to out/tiny-750"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The checkpoint, and where the export goes."""
    add_run(parser, or_checkpoint=True)
    add_step(parser, "default: the newest")
    parser.add_argument("--to", type=Path, metavar="DIR", help="a new folder (default: RUN/export-<step>)")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="config and tokenizer (default: RUN/model, written by train.py)",
    )


def answer(options: argparse.Namespace) -> dict:
    """{"checkpoint", "step", "export", "bytes"}."""
    checkpoint = chosen_checkpoints(options.run, options.step)[0]
    run = RunFolder(checkpoint.parent)
    reason = damage(checkpoint)
    if reason:
        raise UserError(f"{checkpoint}: the checkpoint is damaged: {reason}; choose another with --step")
    step = step_of(checkpoint)
    folder = options.to or run.path / f"export-{step}"
    if folder.exists():
        raise UserError(f"{folder}: is there already; remove it, or choose another with --to")
    prepare_imports()
    from transformers.utils import logging

    from pretraining.checkpoints.weights import export_checkpoint

    logging.disable_progress_bar()
    export_checkpoint(checkpoint, options.model or run.model, folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"checkpoint": str(checkpoint), "step": step, "export": str(folder), "bytes": size}


def as_text(answer: dict) -> str:
    """Where it is."""
    return f"{answer['export']}: the model after {answer['step']:,} steps, {num_bytes(answer['bytes'])}"
