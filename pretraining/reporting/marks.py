"""Events as marks on the curves: any kind that has a place, and the checkpoints on disk."""

from pretraining.reporting.run_record import RunRecord

LEVELS = {
    "alert": "bad",
    "spike": "bad",
    "non_finite": "bad",
    "gradient_explosion": "bad",
    "hang": "bad",
    "rollback": "bad",
    "plateau": "warn",
    "starved_experts": "warn",
    "straggler": "warn",
    "tracker_failed": "warn",
    "checkpoint_passed_over": "warn",
    "uncommitted_checkpoint_removed": "warn",
    "refusal": "warn",
    "start": "note",
    "resume": "note",
    "end": "note",
}
"""How an event is shown; a kind that is not here is a note, or as its own `level` says."""
ROUTINE = ("save", "upload")
"""Kinds that are many and go well. They are no marks: the checkpoints on disk are."""
NEAR = 0.002
"""Share of the run within which a spike of the curve is the one that an event tells of."""
MOST_MARKS = 600


def marks_of(record: RunRecord, spike_steps: list[int]) -> list[dict]:
    """{"kind", "level", "label", "step", "tokens", "hours"} of all marks, by step."""
    placed = zip(record.events, record.event_steps, strict=True)
    marks = [_mark(record, *each) for each in placed if each[0].get("event") not in (None, *ROUTINE)]
    told = [mark["step"] for mark in marks if mark["kind"] in ("spike", "rollback", "alert")]
    near = max(2.0, NEAR * (float(record.steps[-1]) if len(record.steps) else 0))
    for step in spike_steps:
        if not any(abs(step - other) <= near for other in told):
            label = f"spike of the loss at step {step:,}"
            marks.append({"kind": "spike", "level": "bad", "label": label, **record.at_step(step)})
    marks += [_checkpoint(record, step) for step in record.checkpoint_steps()]
    return sorted(marks, key=lambda mark: mark["step"])[-MOST_MARKS:]


def _mark(record: RunRecord, event: dict, step: float) -> dict:
    kind = str(event["event"])
    level = LEVELS.get(kind, str(event.get("level", "note")))
    details = {key: value for key, value in event.items() if key not in ("event", "time", "step", "export")}
    told = _brief({key: value for key, value in details.items() if value is not None})
    label = f"{kind.replace('_', ' ')} at step {step:,.0f}" + (f": {told[:280]}" if told else "")
    return {
        "kind": kind,
        "level": level if level in ("bad", "warn", "note") else "note",
        "label": label,
        **record.at_step(step),
    }


def _checkpoint(record: RunRecord, step: int) -> dict:
    label = f"checkpoint of step {step:,}, on disk"
    return {"kind": "checkpoint", "level": "good", "label": label, **record.at_step(step)}


def _brief(value) -> str:
    """A value in few words: of an object its values by their names, of a list its values."""
    if isinstance(value, dict):
        return ", ".join(f"{str(key).replace('_', ' ')} {_brief(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_brief, value))
    return f"{value:.5g}" if isinstance(value, float) else str(value)
