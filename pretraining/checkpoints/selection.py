"""Which checkpoints a command means: those of a run folder, or one by its step or its path."""

import argparse
from pathlib import Path

from pretraining.checkpoints.folders import committed_checkpoints, step_in_name
from pretraining.checkpoints.marker import MARKER
from pretraining.command_line import not_negative_integer
from pretraining.errors import UserError
from pretraining.runtime.run_folder import RunFolder


def add_run(parser: argparse.ArgumentParser, or_checkpoint: bool = False) -> None:
    """`RUN`: the folder of a run, or where `or_checkpoint` also that of a checkpoint."""
    what = "a run folder, or one checkpoint in it" if or_checkpoint else "a run folder"
    parser.add_argument("run", type=Path, metavar="RUN", help=what)


def add_step(parser: argparse.ArgumentParser, which: str) -> None:
    """`--step N`."""
    parser.add_argument("--step", type=not_negative_integer, metavar="N", help=f"that checkpoint ({which})")


def run_of(folder: Path) -> RunFolder:
    """The run in a folder; `UserError` where there is none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name a run folder, as runs/tiny")
    run = RunFolder(folder)
    if not run.recipe.exists() and not any(folder.glob("checkpoint-*")):
        raise UserError(f"{folder}: no run folder (no recipe.json, no checkpoint-*)")
    return run


def chosen_checkpoints(folder: Path, step: int | None) -> list[Path]:
    """The committed checkpoints meant, newest first: one by its path or `step`, else all of the run."""
    if (folder / MARKER).exists():
        return [folder]
    committed = committed_checkpoints(run_of(folder))
    found = committed if step is None else [each for each in committed if step_in_name(each) == step]
    if not found:
        there = ", ".join(str(step_in_name(each)) for each in reversed(committed))
        which = "no committed checkpoint" if step is None else f"no committed checkpoint of step {step}"
        raise UserError(f"{folder}: {which}" + (f"; there are those of {there}" if there else ""))
    return found
