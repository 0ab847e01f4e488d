"""The plan beside what was measured."""

from pretraining.reporting.run_record import RunRecord
from pretraining.runtime.run_folder import trained_on_processor

QUANTITIES = {
    "tokens_per_second": ("tokens", "Tokens per second, all steps"),
    "step_seconds": ("seconds", "Time of a step, mean"),
    "training_seconds": ("seconds", "Time of all steps"),
    "mfu": ("share", "MFU, all steps"),
    "peak_memory_bytes": ("bytes", "Peak GPU memory"),
    "checkpoint_bytes": ("bytes", "A checkpoint"),
}
"""Quantity of plan.json's `predicted` -> (its unit, its name on the page)."""
ON_PROCESSOR = "Peak memory, beyond what the process held before the model"


def plan_beside_measured(record: RunRecord) -> dict:
    """{"facts": what the plan states, "pairs": [{"quantity", "label", "unit", "predicted", "measured"}, ...]}.

    Measured is the speed of all steps together; of memory what the end event says, else the last row, and of a
    checkpoint the bytes of the newest. The time of all steps is that of the plan only once the run has ended.
    """
    predicted = {
        "checkpoint_bytes": record.plan.get("checkpoint_bytes"),
        **(record.plan.get("predicted") or {}),
    }
    ends = [event for event in record.events if event.get("event") == "end"]
    told = (ends[-1].get("measured") or {}) if ends else {}
    pairs = []
    on_processor = trained_on_processor(record.environment)
    found = {**_sizes(record), **told, **record.speed()}
    if not ends:
        found.pop("training_seconds", None)
    for quantity, (unit, label) in QUANTITIES.items():
        pair = {
            "quantity": quantity,
            "label": ON_PROCESSOR if on_processor and quantity == "peak_memory_bytes" else label,
            "unit": unit,
            "predicted": predicted.get(quantity),
            "measured": found.get(quantity),
        }
        if pair["predicted"] is not None or pair["measured"] is not None:
            pairs.append(pair)
    return {"facts": _facts(record.plan), "pairs": pairs}


def _sizes(record: RunRecord) -> dict[str, float | None]:
    return {
        "peak_memory_bytes": record.metrics.last("memory/peak_bytes"),
        "checkpoint_bytes": _checkpoint_bytes(record),
    }


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
