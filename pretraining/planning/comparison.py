"""Compare what a run was predicted to need with what it measured."""

import argparse
import math
from pathlib import Path
from typing import Any

from pretraining.errors import UserError
from pretraining.outside.files import COUNT, object_of, read_json_value
from pretraining.outside.schema import check
from pretraining.planning.constants import table
from pretraining.planning.costs import forecast
from pretraining.planning.gpus import Gpu
from pretraining.planning.ladder import ladder_of
from pretraining.planning.memory.need import memory_need
from pretraining.planning.quantities import duration, num_bytes, three_digits
from pretraining.planning.run_plan import RunPlan, build_run_plan
from pretraining.planning.setup import Setup
from pretraining.planning.step_time import model_flops_utilization
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.metric_names import grouped_names
from pretraining.runtime.run_folder import (
    MARKER,
    RunFolder,
    StepTotals,
    first_step,
    read_events,
    trained_on_processor,
)
from pretraining.runtime.table import aligned

TITLES = {
    "peak_memory_bytes": "peak memory",
    "tokens_per_second": "tokens/s, all steps",
    "mfu": "MFU",
    "step_seconds": "step, mean",
    "training_seconds": "time of all steps",
    "checkpoint_bytes": "checkpoint",
    "validation_loss": "validation loss",
}
"""`training_seconds` is the time of all steps together, without validation, saving and restarts. `validation_loss` is
that of the end; the recipe's ladder foresees it."""
QUANTITIES = tuple(TITLES)


def predicted(
    setup: Setup, gpu: Gpu | None, on_processor: bool = False, gpu_memory: float | None = None
) -> dict[str, float | None]:
    """Return the quantities of a run before it starts: plan.json's `predicted`.

    Quantities that depend on the speed are None if the GPU is not in the table, or lacks the recipe's precision.

    Args:
        on_processor: no GPU trains; the peak is what a process takes beyond what it had before the model was built.
        gpu_memory: bytes of one GPU, in the table or not.
    """
    values: dict[str, float | None] = dict.fromkeys(QUANTITIES)
    need = memory_need(setup, gpu_memory)
    values["peak_memory_bytes"] = need.on_processor if on_processor else need.allocated
    values["checkpoint_bytes"] = build_run_plan(setup).checkpoint_bytes
    if ladder := ladder_of(setup.recipe):
        values["validation_loss"] = ladder.expected(setup.recipe).loss
    if gpu is None or setup.recipe.training.product_precision not in gpu.dense_peak_flops:
        return values
    speed = forecast(setup, gpu)
    return values | {
        "step_seconds": speed["step"]["seconds"],
        "tokens_per_second": speed["tokens_per_second"],
        "training_seconds": speed["seconds"],
        "mfu": speed["mfu"],
    }


def measured(
    run: RunFolder, plan: RunPlan, gpu: Gpu | None, peak_memory_bytes: int | None
) -> dict[str, float]:
    """Return the same quantities of a run that has ended, for its end event, without those that were not measured."""
    values, setup = _observed(run), plan.setup
    if peak_memory_bytes is not None:
        values["peak_memory_bytes"] = peak_memory_bytes
    precision = setup.recipe.training.product_precision
    # an MFU needs a peak in the recipe's precision
    if gpu and precision in gpu.dense_peak_flops and "tokens_per_second" in values:
        speed, peak = values["tokens_per_second"], gpu.peak_flops(precision)
        values["mfu"] = model_flops_utilization(speed, setup.flops.training, setup.world_size, peak)
    return values


def compare_run(folder: Path) -> dict:
    """Return {"run", "finished", "on_processor", quantity: {"predicted", "measured", "ratio"}} of one run folder.

    Measured values come from metrics.jsonl and the checkpoints, else from the end event (its `measured`). `UserError`
    if it is no run folder, or nothing was predicted and nothing was measured in it.
    """
    run = RunFolder(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    if not run.plan.is_file():
        raise UserError(f"{folder}: no plan.json there: no run folder, or one of a version without plans")
    end = run.last_event("end") or {}
    plan = _read_object(run.plan)
    # a plan of an older version has the bytes of a checkpoint, but no `predicted`
    foreseen = _numbers({"checkpoint_bytes": plan.get("checkpoint_bytes")}) | _numbers(plan.get("predicted"))
    # the peak of memory and the MFU are in the end event alone; for the rest, the files come first
    observed = {**_numbers(end.get("measured")), **_observed(run)}
    observed |= _numbers({"validation_loss": end.get("eval_loss")})
    if not foreseen and not observed:
        raise UserError(f"{folder}: its plan.json predicts nothing and the run has measured nothing yet")
    if not end:
        # the prediction is for all steps, and these are only those so far
        observed.pop("training_seconds", None)
    rows = {}
    for name in QUANTITIES:
        before, after = foreseen.get(name), observed.get(name)
        # a quantity may be predicted and not measured, or the reverse
        ratio = after / before if before and after is not None else None
        rows[name] = {"predicted": before, "measured": after, "ratio": ratio}
    on_processor = run.environment.is_file() and trained_on_processor(_read_object(run.environment))
    # on a processor a part of the prediction is assumed, the same for every run, so a ratio would not judge it
    if on_processor:
        rows["peak_memory_bytes"]["ratio"] = None
    return {"run": str(folder), "finished": bool(end), "on_processor": on_processor, **rows}


def measured_beside_planned(folder: Path) -> str:
    """Write in one line what a run measured of what its plan foresaw; empty if there is nothing to compare."""
    try:
        compared = compare_run(folder)
    except UserError:  # a folder of a version without plans
        return ""
    return ", ".join(
        f"{TITLES[name]} {_words(name, compared[name]['measured'])} "
        f"(planned {_words(name, compared[name]['predicted'])})"
        for name in QUANTITIES
        if None not in (compared[name]["predicted"], compared[name]["measured"])
    )


def _read_object(path: Path) -> dict:
    try:
        value = read_json_value(path)
    except ValueError as error:
        raise UserError(f"{path.parent}: {path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path.parent}: {path.name} is no JSON object")
    return value


def _numbers(values: Any) -> dict[str, float]:
    values = values if isinstance(values, dict) else {}
    return {name: values[name] for name in QUANTITIES if _is_number(values.get(name))}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _observed(run: RunFolder) -> dict[str, float]:
    """Return the speed over all steps, and the bytes of the newest checkpoint."""
    names = ("step", "throughput/step_seconds", "throughput/tokens_per_second")
    rows = [[row.get(name) for name in names] for row in map(grouped_names, read_rows(run.metrics))]
    # rows without a speed are no steps, such as those of a validation
    timed = [row for row in rows if all(map(_is_number, row))]
    observed = StepTotals.of(timed, first_step(read_events(run.events))).speed()
    # only the newest counts: older ones may come from another optimizer or precision
    # a checkpoint that is not committed is not whole
    if committed := run.committed():
        # a node without a shared disk may hold a part of the files that the marker names
        marker, here = committed[0] / MARKER, (path for path in committed[0].rglob("*") if path.is_file())
        sizes = {path.name: path.stat().st_size for path in here}
        try:
            files = check(read_json_value(marker), _MARKER, str(marker)).get("files", {})
        except (OSError, ValueError, UserError):  # damaged, which the next start reports
            files = {}
        sizes = {name: entry["bytes"] for name, entry in files.items()} | sizes
        observed["checkpoint_bytes"] = sum(sizes.values())
    return observed


_FILES = {"type": "object", "patternProperties": {"(?s:.*)": object_of({"bytes": COUNT})}}
_MARKER = {"type": "object", "properties": {"files": _FILES}}


class CompareVerb:
    """Predicted beside measured, for every run folder given."""

    EXAMPLES = """  python -m pretraining.planning compare runs/*
  python -m pretraining.planning compare runs/tiny --json"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders: runs/*")

    def answer(self, options: argparse.Namespace) -> dict:
        """Return {"runs": one entry for each run folder, "left_out": [{"run", "why"}]}; see `compare_run`.

        Raises:
            UserError: none of the folders can be compared.
        """
        runs, left_out = [], []
        for folder in options.runs:
            try:
                runs.append(compare_run(folder))
            except UserError as error:
                # the folder is in `run` already
                left_out.append({"run": str(folder), "why": str(error).removeprefix(f"{folder}: ")})
            except OSError as error:
                left_out.append({"run": str(folder), "why": f"cannot be read ({error.strerror})"})
        if not runs:
            first = f"{left_out[0]['run']}: {left_out[0]['why']}"
            more = f" ({len(left_out) - 1} more cannot be compared either)" if len(left_out) > 1 else ""
            raise UserError(f"{first}{more}; give run folders, such as runs/tiny")
        return {"runs": runs, "left_out": left_out}

    def as_text(self, answer: dict) -> str:
        """Write a line for each run and known quantity, and one for each run that is left out."""
        lines = [["run", "quantity", "predicted", "measured", "measured/predicted"]]
        for run in answer["runs"]:
            name = run["run"] if run["finished"] else f"{run['run']} (not finished)"
            for quantity in QUANTITIES:
                before, after, ratio = run[quantity].values()
                if before is not None or after is not None:
                    words = [_words(quantity, before), _words(quantity, after)]
                    lines.append([name, TITLES[quantity], *words, "-" if ratio is None else f"{ratio:.2f}"])
        below = [f"left out: {each['run']}: {each['why']}" for each in answer["left_out"]]
        if any(run["on_processor"] for run in answer["runs"]):
            assumed = num_bytes(table("memory")["processor_bytes"]["value"])
            note = f"Without a GPU peak memory is what a process took beyond its libraries. {assumed} of what is "
            note += "predicted are assumed,\nfor libraries that are loaded later and for what the allocator keeps: "
            below.insert(0, f"{note}a run may take less, or more.")
        return "\n".join([aligned(lines, left=2), *([""] if below else []), *below])


def _words(quantity: str, value: float | None) -> str:
    if value is None:
        return "-"
    if quantity.endswith("bytes"):
        return num_bytes(value)
    if quantity.endswith("seconds"):
        return duration(value)
    if quantity.endswith("loss"):
        return f"{value:.4f}"
    return f"{value:.0%}" if quantity == "mfu" else three_digits(value)
