"""What the page is given: one run as plain JSON values, small whatever the run's length."""

import math
import time
from collections import Counter

import numpy as np

from pretraining.reporting.analysis import Analysis, analyze
from pretraining.reporting.downsample import bucket_means, kept_points
from pretraining.reporting.marks import ROUTINE, marks_of
from pretraining.reporting.plan_table import plan_beside_measured
from pretraining.reporting.run_record import RunRecord
from pretraining.reporting.words import sentences

POINTS_OF_LOSS, POINTS = 3000, 1000
POINTS_OF_PARTS, FEWEST_POINTS = 10_000, 20
"""Of all parts of a metric together, such as the layers of the gradient norm; of each of them."""
MOST_EVENTS, MOST_SAMPLES, MOST_SCORES = 400, 60, 60
LONGEST_TEXT = 6000
"""Characters of a sample or of an event's detail."""


def run_payload(record: RunRecord, live: bool | None = None, track_record: list[float] = ()) -> dict:
    """Everything the page shows of one run.

    live: a process of the run writes the page again and again; False: it writes the last one; None: nobody knows.
    """
    found = analyze(record, track_record)
    metrics, num_points = record.metrics, points_of(record.metrics.names())
    return {
        "name": record.name,
        "folder": str(record.run.path),
        "description": str(record.recipe.get("description") or ""),
        **_standing(record, found, live),
        "began": _began(record),
        "num_rows": len(metrics),
        "broken_lines": metrics.broken_lines,
        "last": {name: _plain(metrics.last(name)) for name in metrics.names()},
        "speed": record.speed(),
        "last_place": record.newest_place if len(metrics) else None,
        "budget_share": record.budget_share,
        "budget": record.recipe.get("budget") or {},
        "phase": found.phase,
        "sentences": sentences(found),
        "series": {name: _series(record, name, most) for name, most in num_points.items()},
        "marks": marks_of(record, found.spikes),
        "heading": _heading(found),
        "target": found.target,
        "best_validation": _plain(found.best_validation),
        "plan": plan_beside_measured(record),
        "scores": _scores(record),
        "sources": [row.get("source") for row in record.mixture.get("run", {}).get("sources", [])],
        "events": _events(record),
        "samples": [_short(sample) for sample in _spread(record.samples, MOST_SAMPLES)],
        "recipe": record.recipe,
        "environment": record.environment,
    }


def _standing(record: RunRecord, found: Analysis, live: bool | None) -> dict:
    """How the run stands when the page is written. The page is read later: a run that is running here is silent
    `silent_after` seconds after `alive`, by its reader's clock.
    """
    state = found.standing.state
    # Only a process of the run writes a live page: who was killed is the start before.
    quiet = state in ("running", "silent") or (live and state == "killed")
    return {
        "state": "running" if quiet else state,
        "since": found.standing.since,
        "at_step": found.standing.step,
        "reason": found.standing.reason,
        "checkpoint": found.standing.checkpoint,
        "alive": time.time() if live and quiet else record.last_written,
        "silent_after": 0.0 if live is False else record.silent_after,
    }


def _began(record: RunRecord) -> float | None:
    """UNIX seconds of the first event or row."""
    times = [record.event_time(event) for event in record.events[:1]] + list(record.metrics.times[:1])
    times = [moment for moment in times if math.isfinite(moment)]
    return min(times) if times else None


def points_of(names: list[str]) -> dict[str, int]:
    """{metric: points it is drawn with at most}; the parts of one metric, which share a chart, share its points."""
    parts = Counter(name.rpartition("/")[0] for name in names if name.count("/") > 1)
    shares = {name: POINTS_OF_PARTS // parts.get(name.rpartition("/")[0], 1) for name in names}
    points = {name: max(FEWEST_POINTS, min(POINTS, share)) for name, share in shares.items()}
    return points | ({"train/loss": POINTS_OF_LOSS} if "train/loss" in points else {})


def _series(record: RunRecord, name: str, most_points: int) -> dict:
    """Points of a metric, x columns and values; where not all rows are points, also means of buckets, for smoothing."""
    rows, values = record.metrics.column(name)
    kept = kept_points(values, most_points)
    points = {**_places(record, rows[kept]), "value": _numbers(values[kept])}
    if len(values) > most_points:
        middle, means, counts = bucket_means(values, most_points // (2 if name == "train/loss" else 3))
        points["mean"] = {
            **_places(record, rows[middle]),
            "value": _numbers(means),
            "count": counts.tolist(),
        }
    return points


def _places(record: RunRecord, rows: np.ndarray) -> dict[str, list]:
    return {
        "step": _numbers(record.steps[rows], 12),
        "tokens": _numbers(record.tokens[rows], 12),
        "hours": _numbers(record.hours[rows]),
    }


def _heading(found: Analysis) -> dict | None:
    if found.heading is None:
        return None
    law = found.heading.law
    return {
        "tokens": found.heading_tokens,
        "loss": found.heading.loss,
        "low": found.heading.low,
        "high": found.heading.high,
        "floor": law.floor,
        "scale": law.scale,
        "exponent": law.exponent,
        "unit": law.unit,
    }


def _events(record: RunRecord) -> list[dict]:
    """The last events, each with its step; of the routine ones, which are many, at most half of them."""
    routine = [event.get("event") in ROUTINE for event in record.events]
    notable = [number for number, is_routine in enumerate(routine) if not is_routine][-MOST_EVENTS // 2 :]
    saves = [number for number, is_routine in enumerate(routine) if is_routine][-MOST_EVENTS // 2 :]
    return [
        {**_short(record.events[n]), "step": record.event_steps[n], "routine": routine[n]}
        for n in sorted(notable + saves)
    ]


def _scores(record: RunRecord) -> dict:
    """{"names", "rows": [[step, value, ...], ...]} of every evaluation, spread over the run."""
    columns = {
        name: record.metrics.column(name) for name in record.metrics.names() if name.startswith("eval/")
    }
    by_step: dict[float, dict] = {}
    for name, (rows, values) in columns.items():
        for row, value in zip(rows, values, strict=True):
            by_step.setdefault(float(record.steps[row]), {})[name] = _plain(float(value))
    chosen = _spread(sorted(by_step), MOST_SCORES)
    return {
        "names": list(columns),
        "rows": [[step, *(by_step[step].get(name) for name in columns)] for step in chosen],
    }


def _spread(items: list, most: int) -> list:
    """At most `most` of the items, evenly spaced, first and last among them."""
    if len(items) <= most:
        return list(items)
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))]


def _short(row: dict) -> dict:
    return {key: _plain(value) for key, value in row.items()}


def _plain(value):
    """A value that JSON can write: no NaN, no endless text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else f"{value[:LONGEST_TEXT]} ..."
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value[:1000]]
    return value


def _numbers(values: np.ndarray, digits: int = 6) -> list:
    """Numbers with few digits; whole ones as integers, what is not finite as null."""
    plain = []
    for value in values.tolist():
        if not math.isfinite(value):
            plain.append(None)
        else:
            short = float(f"{value:.{digits}g}")
            plain.append(int(short) if short.is_integer() else short)
    return plain


def page_payload(runs: list[dict], every_seconds: float | None) -> dict:
    """The page's data: its runs, when it was written, how often it is written again (None: this is all)."""
    return {"runs": runs, "written": round(time.time(), 3), "every_seconds": every_seconds}
