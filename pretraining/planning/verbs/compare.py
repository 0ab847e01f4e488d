"""Predicted beside measured, for every run folder given."""

import argparse
from pathlib import Path

from pretraining.planning.comparison import QUANTITIES, compare_runs
from pretraining.planning.constants import table
from pretraining.planning.quantities import columns, duration, num_bytes, three_digits

EXAMPLES = """  python -m pretraining.planning compare runs/*
  python -m pretraining.planning compare runs/tiny --json"""
TITLES = {
    "peak_memory_bytes": "peak memory",
    "tokens_per_second": "tokens/s, all steps",
    "mfu": "MFU",
    "step_seconds": "step, mean",
    "training_seconds": "time of all steps",
    "checkpoint_bytes": "checkpoint",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run folders."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders: runs/*")


def answer(options: argparse.Namespace) -> dict:
    """Every run that can be compared, in the order given, and why the others are left out."""
    return compare_runs(options.runs)


def as_text(answer: dict) -> str:
    """A line for each run and quantity that is known on either side; then a line for each run that is left out."""
    header = ["run", "quantity", "predicted", "measured", "measured/predicted"]
    rows = [row for run in answer["runs"] for row in _rows(run)]
    left_out = [f"left out: {each['run']}: {each['why']}" for each in answer["left_out"]]
    notes = [_processor_note()] if any(run["on_processor"] for run in answer["runs"]) else []
    below = [*notes, *left_out]
    return "\n".join([columns(header, rows, left=2), *([""] if below else []), *below])


def _processor_note() -> str:
    assumed = num_bytes(table("memory")["processor_bytes"]["value"])
    return (
        f"Without a GPU peak memory is what a process took beyond its libraries. {assumed} of what is predicted are "
        "assumed,\nfor libraries that are loaded later and for what the allocator keeps: a run may take less, or more."
    )


def _rows(run: dict) -> list[list[str]]:
    known = [
        name for name in QUANTITIES if run[name]["predicted"] is not None or run[name]["measured"] is not None
    ]
    name = run["run"] if run["finished"] else f"{run['run']} (not finished)"
    return [[name, TITLES[quantity], *_cells(quantity, run[quantity])] for quantity in known]


def _cells(quantity: str, pair: dict) -> list[str]:
    words = [_words(quantity, pair[side]) for side in ("predicted", "measured")]
    return [*words, "-" if pair["ratio"] is None else f"{pair['ratio']:.2f}"]


def _words(quantity: str, value: float | None) -> str:
    if value is None:
        return "-"
    if quantity.endswith("bytes"):
        return num_bytes(value)
    if quantity.endswith("seconds"):
        return duration(value)
    return f"{value:.0%}" if quantity == "mfu" else three_digits(value)
