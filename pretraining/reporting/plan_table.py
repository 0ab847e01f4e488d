"""The plan beside what was measured."""

import numpy as np

from pretraining.reporting.run_record import RunRecord
from pretraining.run_dir import trained_on_processor

QUANTITIES = {
    "tokens_per_second": ("throughput/tokens_per_second", "tokens", "Tokens per second"),
    "step_seconds": ("throughput/step_seconds", "seconds", "Time of a step"),
    "mfu": ("throughput/mfu", "share", "MFU"),
    "peak_memory_bytes": ("memory/peak_bytes", "bytes", "Peak GPU memory"),
    "checkpoint_bytes": (None, "bytes", "A checkpoint"),
}
"""Quantity of plan.json's `predicted` -> (the metric that measures it, its unit, its name on the page)."""
ON_PROCESSOR = "Peak memory, beyond what the process held before the model"


def plan_beside_measured(record: RunRecord) -> dict:
    """{"facts": what the plan states, "pairs": [{"quantity", "label", "unit", "predicted", "measured"}, ...]}.

    Measured is what the end event says, else the median of the rows (of memory the last), else the newest
    checkpoint's bytes.
    """
    predicted = {
        "checkpoint_bytes": record.plan.get("checkpoint_bytes"),
        **(record.plan.get("predicted") or {}),
    }
    ends = [event for event in record.events if event.get("event") == "end"]
    told = (ends[-1].get("measured") or {}) if ends else {}
    pairs = []
    on_processor = trained_on_processor(record.environment)
    for quantity, (metric, unit, label) in QUANTITIES.items():
        measured = told.get(quantity)
        measured = _measured(record, quantity, metric) if measured is None else measured
        pair = {
            "quantity": quantity,
            "label": ON_PROCESSOR if on_processor and quantity == "peak_memory_bytes" else label,
            "unit": unit,
            "predicted": predicted.get(quantity),
            "measured": measured,
        }
        if pair["predicted"] is not None or pair["measured"] is not None:
            pairs.append(pair)
    return {"facts": _facts(record.plan), "pairs": pairs}


def _measured(record: RunRecord, quantity: str, metric: str | None) -> float | None:
    if metric is None:
        return _checkpoint_bytes(record)
    if quantity == "peak_memory_bytes":
        return record.metrics.last(metric)
    _, values = record.metrics.column(metric)
    values = values[1:] if len(values) > 1 else values  # the first row holds the warm-up of the machine
    return float(np.median(values)) if len(values) else None


def _checkpoint_bytes(record: RunRecord) -> float | None:
    folders = [path.parent for path in record.run.path.glob("checkpoint-*/committed.json")]
    if not folders:
        return None
    newest = max(folders, key=lambda folder: folder.stat().st_mtime)
    return float(sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()))


def _facts(plan: dict) -> dict:
    """What of the plan fits a line each."""
    names = (
        "parameters",
        "tokens",
        "steps",
        "tokens_per_step",
        "sequence_length",
        "world_size",
        "micro_batch",
    )
    names += ("accumulation_steps", "deepspeed", "training_flops", "tokens_per_parameter")
    return {name: plan[name] for name in names if plan.get(name) is not None}
