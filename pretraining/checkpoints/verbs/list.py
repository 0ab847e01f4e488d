"""The checkpoints of a run: step, age, size, ranks, ZeRO stage, losses, state.

`committed` says that the marker holds and every file has its size; `verify` reads the bytes.
"""

import argparse

from pretraining.checkpoints.catalogue import catalogue
from pretraining.checkpoints.selection import add_run, run_of
from pretraining.planning.quantities import columns, duration, num_bytes

EXAMPLES = """  python -m pretraining.checkpoints list runs/tiny
  python -m pretraining.checkpoints list runs/tiny --json"""
HEADER = ["step", "state", "age", "size", "ranks", "stage", "loss", "validation"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run."""
    add_run(parser)


def answer(options: argparse.Namespace) -> dict:
    """{"run", "checkpoints": entries of the catalogue}."""
    return {"run": str(options.run), "checkpoints": catalogue(run_of(options.run))}


def as_text(answer: dict) -> str:
    """A table, and below it what is wrong with the damaged ones."""
    entries = answer["checkpoints"]
    if not entries:
        return f"{answer['run']}: no checkpoint yet"
    reasons = [f"{each['folder']}: {each['reason']}" for each in entries if each["reason"]]
    return "\n".join([columns(HEADER, [_row(each) for each in entries], left=2), *reasons])


def _row(entry: dict) -> list[str]:
    stage = "-" if entry["ranks"] is None else "none" if entry["zero_stage"] is None else entry["zero_stage"]
    losses = ("-" if entry[key] is None else f"{entry[key]:.4f}" for key in ("loss", "eval_loss"))
    return [
        str(entry["step"]),
        entry["state"],
        duration(max(1, entry["age_seconds"])),
        num_bytes(entry["bytes"]),
        str(entry["ranks"] or "-"),
        str(stage),
        *losses,
    ]
