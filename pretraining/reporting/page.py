"""The page of one or several runs: what it shows, as plain JSON values, and the HTML that shows it."""

import html
import json
import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from pretraining.outside.masking import as_json
from pretraining.outside.schema import filled
from pretraining.recipe import recipe_schema
from pretraining.reporting.analysis import Analysis, analyze, sentences
from pretraining.reporting.published import curve_of
from pretraining.reporting.run_record import RunRecord, Standing
from pretraining.runtime.console_log import console_tail
from pretraining.runtime.durable_files import one_at_a_time, replacing
from pretraining.runtime.run_folder import event_seconds, trained_on_processor
from pretraining.runtime.wall_time import CAUSES

# A page stays small whatever the run's length: a phone opens it.
POINTS_OF_LOSS, POINTS = 3000, 1000
POINTS_OF_PARTS, FEWEST_POINTS = 10_000, 20
"""Points of all parts of a metric together, such as the layers of the gradient norm; points of each part."""

PAGE = Path(__file__).resolve().parent / "assets"
"""What every page holds: structure, style, scripts and the chart library."""
SCRIPTS = ("vendor/uplot-1.6.32.min.js", "format.js", "charts.js", "panels.js", "sections.js", "main.js")
LADDER_SCRIPTS = (*SCRIPTS[:3], "sections.js", "ladder.js")
LIST_SCRIPTS = (*SCRIPTS[1:3], "sections.js", "list.js")
STYLES = ("vendor/uplot-1.6.32.min.css", "style.css")
NO_NETWORK = """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:">"""
MOST_EVENTS, MOST_SAMPLED_STEPS, MOST_SCORES = 400, 60, 60
LONGEST_TEXT = 6000
"""Characters of a sample or of an event's detail."""
LAST_CONSOLE_BYTES = 60_000
_KINDS = {
    "bad": "alert spike non_finite gradient_explosion hang rollback",
    "warn": "plateau starved_experts straggler low_use tracker_failed checkpoint_passed_over refusal "
    "uncommitted_checkpoint_removed",
    "note": "start resume end",
}
LEVELS = {kind: level for level, kinds in _KINDS.items() for kind in kinds.split()}
"""How an event is shown; a kind that is not here is a note, or as its own `level` says."""
ROUTINE = ("save", "upload", "notified")
"""Kinds that are many and go well. They are no marks; the checkpoints on disk are."""
NEAR = 0.002
"""A spike of the curve this close to an event's step, as a share of the run, is the one that the event reports."""
MOST_MARKS = 600
MOST_IN_LABEL, LONGEST_VALUE = 3, 24
"""Settings beside a run's name in a legend, and characters of each."""
QUANTITIES = {
    "tokens_per_second": ("tokens", "Tokens per second, all steps"),
    "step_seconds": ("seconds", "Time of a step, mean"),
    "training_seconds": ("seconds", "Time of all steps"),
    "mfu": ("share", "MFU, all steps"),
    "peak_memory_bytes": ("bytes", "Peak GPU memory"),
    "checkpoint_bytes": ("bytes", "A checkpoint"),
    "validation_loss": ("loss", "Validation loss at the end"),
}
"""{quantity of plan.json's `predicted`: (its unit, its name on the page)}"""
FACTS = ("parameters", "tokens", "steps", "tokens_per_step", "sequence_length", "world_size", "micro_batch")
FACTS += ("accumulation_steps", "deepspeed", "training_flops", "tokens_per_parameter")
"""What the page shows of a plan: what fits one line each."""
ON_PROCESSOR = "Peak memory, beyond what the process held before the model"


def page_text(
    payload: dict, title: str, scripts: tuple[str, ...] = SCRIPTS, served: str | None = None
) -> str:
    """Build the HTML of a report, with everything inside: nothing comes from a network.

    Every text of a run is data: the scripts show it as text, never as markup. served: the name of the scripts at the
    server from which this page comes, as its style does.
    """
    style = f"{NO_NETWORK}\n<style>{joined(STYLES)}</style>"
    script = f"<script>{joined(scripts)}</script>"
    if served is not None:
        style, script = '<link rel="stylesheet" href="style.css">', f'<script src="{served}"></script>'
    # Inside a script element only `<` could end it.
    data = data_text(payload).replace("<", "\\u003c")
    parts = {"style": style, "script": script, "title": html.escape(title), "data": data}
    # In one pass and not one by one: a run's text may hold "{{data}}" itself.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], joined(("index.html",)))


def data_text(payload: dict) -> str:
    return as_json(payload, ensure_ascii=False, separators=(",", ":"))


@cache
def joined(names: tuple[str, ...]) -> str:
    return "\n".join((PAGE / name).read_text(encoding="utf-8") for name in names)


def write_page(path: Path, text: str) -> None:
    """Replace the page atomically: a reader sees the old page or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # the run writes its page while a user asks for one
    with one_at_a_time(path.parent), replacing(path, "wb") as file:
        # Lone surrogates, which no browser can show, become question marks.
        file.write(text.encode("utf-8", errors="replace"))


def page_payload(runs: list[dict], every_seconds: float | None) -> dict:
    """Give the page's data: its runs, what differs between them, when it was written, and how often it is written
    again (None: never).
    """
    differing = settings_that_differ(runs)
    for number, run in enumerate(runs):
        # with the first settings in which it differs, as many as a legend has room for
        ours = {key: values[number] or "left out" for key, values in differing.items()}
        ours = {key: value for key, value in ours.items() if not key.startswith("environment.")}
        shown = [
            f"{key} {value if len(value) <= LONGEST_VALUE else f'{value[: LONGEST_VALUE - 1]}…'}"
            for key, value in list(ours.items())[:MOST_IN_LABEL]
        ]
        shown += [f"{len(ours) - len(shown)} more"] if len(ours) > len(shown) else []
        run["label"] = f"{run['name']}: {', '.join(shown)}" if shown else run["name"]
    return {
        "runs": runs,
        "settings": [[key, *values] for key, values in differing.items()],
        "written": round(time.time(), 3),
        "every_seconds": every_seconds,
    }


def settings_that_differ(runs: Sequence[dict]) -> dict[str, list[str | None]]:
    """Give {dotted key: its value in every run, as JSON, or None} of what is not the same in all of these payloads.

    None: the run's recipe does not have the key. What a recipe leaves out counts with its default. After the recipe's
    keys come the number of ranks, the device and the versions.
    """
    flats = []
    for run in runs:
        environment, ranks = run["environment"], run["plan"]["facts"].get("world_size")
        around = {} if ranks is None else {"ranks": ranks}
        shown = {name: environment.get(name) for name in ("device", "versions", "git_commit")}
        around["environment"] = {name: value for name, value in shown.items() if value is not None}
        flats.append(_flat(filled(run["recipe"], recipe_schema())) | _flat(around))
    keys = dict.fromkeys(key for flat in flats for key in flat)  # no set, because it keeps their order
    keys = [key for key in keys if key.partition(".")[0] not in ("name", "description")]
    return {
        key: [json.dumps(flat[key], ensure_ascii=False) if key in flat else None for flat in flats]
        for key in keys
        if any(key not in flat or flat[key] != flats[0].get(key) for flat in flats)
    }


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """Take a JSON value apart: {dotted key: single value}. A list of single values stays whole."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        return {key: value}
    parts = [_flat(item, f"{key}.{name}" if key else str(name)) for name, item in value.items()]
    return {name: item for part in parts for name, item in part.items()}


def names_of(records: Sequence[RunRecord]) -> list[str]:
    """Name every run so that no two are the same: by its recipe, else by its folder, else with a number too."""
    names = [record.name for record in records]
    if len(set(names)) < len(names):
        names = [record.run.path.resolve().name for record in records]
    counted = Counter(names)
    numbers = count(1)
    return [f"{name} ({next(numbers)})" if counted[name] > 1 else name for name in names]


def run_payload(
    record: RunRecord, live: bool | None = None, track_record: Sequence[float] = (), name: str | None = None
) -> dict:
    """Collect everything that the page shows of one run.

    live: True if a process of the run writes the page again and again, False if it writes the last one, None if the
    page is written from outside. track_record: relative errors of forecasts of finished runs, for the sentences. name:
    what the page calls the run; None for its recipe's name.
    """
    found, metrics = analyze(record, track_record), record.metrics
    times = [event_seconds(event) for event in record.events[:1]] + list(metrics.times[:1])
    # the last events; routine ones, which are many, fill at most half of the list
    routine = [event.get("event") in ROUTINE for event in record.events]
    halves = ([n for n, each in enumerate(routine) if each == kind] for kind in (False, True))
    listed = sorted(n for half in halves for n in half[-MOST_EVENTS // 2 :])
    of_event = {n: {"step": record.event_steps[n], "routine": routine[n]} for n in listed}
    events = [plain(record.events[n]) | more for n, more in of_event.items()]
    heading = found.heading and asdict(found.heading)
    if heading:
        heading |= {**heading.pop("law"), "tokens": found.heading_tokens}
    return {
        "name": name or record.name,
        "folder": str(record.run.path),
        "description": str(record.recipe.get("description") or ""),
        **standing_of(record, found.standing, live),
        "began": min(filter(math.isfinite, times), default=None),
        "num_rows": len(metrics),
        "broken_lines": metrics.broken_lines,
        "last": {name: plain(metrics.last(name)) for name in metrics.names()},
        "speed": record.speed(),
        "last_place": record.at_step(record.newest_step) if len(metrics) else None,
        "budget_share": record.budget_share,
        "budget": record.recipe.get("budget") or {},
        "phase": found.phase,
        "sentences": sentences(found),
        # the wall time, in seconds, and of each cause of lost time: its name, its seconds and its share
        "spent": {
            "seconds": spent.seconds,
            "ranks": spent.rank_seconds,
            "counted": spent.counted,
            "lost": [[CAUSES[cause], spent.lost[cause], share] for cause, share in spent.shares.items()],
        }
        if (spent := found.wall_time) and spent.seconds
        else None,
        "series": curves_of(record),
        "marks": marks_of(record, found.spikes),
        "heading": heading,
        "target": found.target,
        "published": _published(record, found),
        "foreseen": _foreseen(record, found),
        "best_validation": plain(found.best_validation),
        "plan": plan_beside_measured(record),
        "scores": _scores(record),
        "sources": [row.get("source") for row in record.mixture.get("run", {}).get("sources", [])],
        "events": events,
        "samples": _samples(record),
        "console": console_tail(record.run.console_log, LAST_CONSOLE_BYTES),
        "recipe": record.recipe,
        "environment": record.environment,
    }


def standing_of(record: RunRecord, standing: Standing, live: bool | None = None) -> dict:
    """Give the run's state when the page is written.

    The page is read later: a run that is running here is silent `silent_after` seconds after `alive`, by its
    reader's clock.
    """
    state = standing.state
    # Only a process of the run writes a live page, so it runs: killed, or failed, were the ranks of the start before.
    quiet = state in ("running", "silent") or (live and state in ("killed", "failed"))
    return {
        "state": "running" if quiet else state,
        "since": standing.since,
        "at_step": standing.step,
        "reason": standing.reason,
        "checkpoint": standing.checkpoint,
        "alive": time.time() if live and quiet else record.last_written,
        "silent_after": 0.0 if live is False else record.silent_after,
    }


def marks_of(record: RunRecord, spike_steps: list[int]) -> list[dict]:
    """List {"kind", "level", "label", "step", "tokens", "hours"} of all marks, by step.

    Marks are events that have a place on the curves, spikes that no event reports, and the checkpoints on disk.
    """
    marks: list[dict] = []

    def add(kind: str, level: str, label: str, step: float) -> None:
        marks.append({"kind": kind, "level": level, "label": label, **record.at_step(step)})

    for event, step in zip(record.events, record.event_steps, strict=True):
        if event.get("event") in (None, *ROUTINE):
            continue
        kind = str(event["event"])
        level = LEVELS.get(kind, str(event.get("level", "note")))
        hidden = ("event", "time", "step", "export")
        text = _brief({key: value for key, value in event.items() if key not in hidden and value is not None})
        label = f"{kind.replace('_', ' ')} at step {step:,.0f}" + (f": {text[:280]}" if text else "")
        add(kind, level if level in ("bad", "warn", "note") else "note", label, step)
    reported = [mark["step"] for mark in marks if mark["kind"] in ("spike", "rollback", "alert")]
    # An event names the exact step; the row that shows it may be some steps later.
    near = max(2.0, NEAR * (float(record.steps[-1]) if len(record.steps) else 0))
    for step in spike_steps:
        if not any(abs(step - other) <= near for other in reported):
            add("spike", "bad", f"spike of the loss at step {step:,}", step)
    for step in record.checkpoint_steps():
        add("checkpoint", "good", f"checkpoint of step {step:,}, on disk", step)
    # the newest are kept
    return sorted(marks, key=lambda mark: mark["step"])[-MOST_MARKS:]


def _brief(value: Any) -> str:
    """Write a value in few words: an object's values with their names, a list's values."""
    if isinstance(value, dict):
        return ", ".join(f"{str(key).replace('_', ' ')} {_brief(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_brief, value))
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def plan_beside_measured(record: RunRecord) -> dict:
    """Compare: {"facts": of the plan, "pairs": [{"quantity", "label", "unit", "predicted", "measured"}, ...]}.

    The measured speed is that of all steps together. Measured memory comes from the end event, else from the last
    row. A checkpoint's bytes are those of the newest.
    """
    predicted = {"checkpoint_bytes": record.plan.get("checkpoint_bytes")}
    predicted |= record.plan.get("predicted") or {}
    end = next((event for event in reversed(record.events) if event.get("event") == "end"), {})
    pairs = []
    measured = {"peak_memory_bytes": record.metrics.last("memory/peak_bytes"), "checkpoint_bytes": None}
    if committed := record.run.committed():
        files = [path for path in committed[0].rglob("*") if path.is_file()]
        measured["checkpoint_bytes"] = float(sum(path.stat().st_size for path in files))
    measured["validation_loss"] = end.get("eval_loss")
    measured |= (end.get("measured") or {}) | record.speed()
    if not end:
        measured.pop("training_seconds", None)  # the plan's is that of the whole run
    for quantity, (unit, label) in QUANTITIES.items():
        if quantity == "peak_memory_bytes" and trained_on_processor(record.environment):
            label = ON_PROCESSOR  # there is no GPU whose memory could be measured
        both = {"predicted": predicted.get(quantity), "measured": measured.get(quantity)}
        # a loss that nobody foresaw is not beside anything
        if any(value is not None for value in both.values()) and (unit != "loss" or both["predicted"]):
            pairs.append({"quantity": quantity, "label": label, "unit": unit, **both})
    facts = {name: record.plan[name] for name in FACTS if record.plan.get(name) is not None}
    return {"facts": facts, "pairs": pairs}


def _published(record: RunRecord, found: Analysis) -> dict | None:
    """Give the curve that the recipe names by tokens and steps, with rows of it beside this run, and with notes."""
    curve = curve_of(record.recipe)
    if curve is None:
        return None
    per_step, series = (record.recipe.get("budget") or {}).get("tokens_per_step") or 1, {}
    for metric, each in curve["curves"].items():
        steps = [count / per_step for count in each["tokens"]]
        series[metric] = {"tokens": each["tokens"], "step": steps, "value": each["values"]}
    other, rows = found.published, []
    if other is not None:
        rows = list(zip(other.tokens, other.own, other.published, other.gaps, strict=True))
        rows = _spread(rows, MOST_SCORES)
    made = {"run": curve["run"], "series": series, "metric": other and other.metric, "rows": rows}
    return {**made, "notes": found.published_notes, "is_comparable": not found.published_differs}


def _foreseen(record: RunRecord, found: Analysis) -> dict | None:
    """Give the losses that a ladder foresees by tokens and steps: {"words", "left", "loss", "low", "high"}."""
    if (made := found.foreseen) is None:
        return None
    per_step = (record.recipe.get("budget") or {}).get("tokens_per_step") or 1
    places = {"tokens": made.tokens, "step": [tokens / per_step for tokens in made.tokens]}
    curves = {name: {**places, "value": values} for name, values in made.curves.items()}
    return {"words": made.words, "left": made.has_left, **curves}


def _samples(record: RunRecord) -> dict:
    """Tabulate the samples: {"prompts", "steps": [[step, text of each prompt or None], ...]}, spread over the run."""
    by_step: dict[int, dict[str, str]] = {}
    for sample in record.samples:
        text = sample.get("text")
        text = text if isinstance(text, str) else json.dumps(sample, ensure_ascii=False)
        # a step that was repeated is there twice: the newer text counts
        by_step.setdefault(sample["step"], {})[str(sample.get("prompt") or "")] = plain(text)
    steps = _spread(sorted(by_step), MOST_SAMPLED_STEPS)
    prompts = list(dict.fromkeys(prompt for step in steps for prompt in by_step[step]))
    rows = [[step, *(by_step[step].get(prompt) for prompt in prompts)] for step in steps]
    return {"prompts": prompts, "steps": rows}


def _scores(record: RunRecord) -> dict:
    """Tabulate the evaluations, spread over the run: {"names", "rows": [[step, value, ...], ...]}."""
    names = [name for name in record.metrics.names() if name.startswith("eval/")]
    by_step: dict[float, dict] = {}
    for name in names:
        for row, value in zip(*record.metrics.column(name), strict=True):
            by_step.setdefault(float(record.steps[row]), {})[name] = plain(float(value))
    steps = _spread(sorted(by_step), MOST_SCORES)
    rows = [[step, *(by_step[step].get(name) for name in names)] for step in steps]
    return {"names": names, "rows": rows}


def _spread(items: list, most: int) -> list:
    """Choose at most `most` items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))]


def plain(value: Any) -> Any:
    """Turn a value into one that JSON can write: no NaN, no endless text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else f"{value[:LONGEST_TEXT]} ..."
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value[:1000]]
    return value


def curves_of(record: RunRecord) -> dict[str, dict]:
    """Give {metric: its points, as x columns and values}; if not every row is a point, also bucket means to smooth."""
    curves = {}
    for name, most_points in points_of(record.metrics.names()).items():
        rows, values = record.metrics.column(name)
        kept = kept_points(values, most_points)
        curve = curves[name] = {**_places(record, rows[kept]), "value": _numbers(values[kept])}
        if len(values) > most_points:
            middle, means, counts = bucket_means(values, most_points // (2 if name == "train/loss" else 3))
            mean = {"value": _numbers(means), "count": counts.tolist()}
            curve["mean"] = {**_places(record, rows[middle]), **mean}
    return curves


def points_of(names: list[str]) -> dict[str, int]:
    """Share out points: {metric: most points it is drawn with}. Parts of one metric share a chart and its points."""
    parts = Counter(name.rpartition("/")[0] for name in names if name.count("/") > 1)
    shares = {name: POINTS_OF_PARTS // parts.get(name.rpartition("/")[0], 1) for name in names}
    points = {name: max(FEWEST_POINTS, min(POINTS, share)) for name, share in shares.items()}
    return points | ({"train/loss": POINTS_OF_LOSS} if "train/loss" in points else {})


def _places(record: RunRecord, rows: np.ndarray) -> dict[str, list]:
    return {
        # 12 digits: steps and tokens are exact counts
        "step": _numbers(record.steps[rows], 12),
        "tokens": _numbers(record.tokens[rows], 12),
        "hours": _numbers(record.hours[rows]),
    }


def bucket_edges(num_rows: int, num_buckets: int) -> np.ndarray:
    """Find the first row of each bucket: two thirds are evenly spaced, one third by the logarithm, for log axes."""
    if num_rows <= num_buckets:
        return np.arange(num_rows)
    even = np.linspace(0, num_rows, 2 * num_buckets // 3, endpoint=False)
    early = np.geomspace(1, num_rows, num_buckets // 3, endpoint=False)
    return np.unique(np.concatenate([even, early]).astype(np.int64))


def kept_points(values: np.ndarray, num_points: int) -> np.ndarray:
    """Choose at most about `num_points` rows to draw, so that no spike is lost.

    If there are few values, all rows; else the first, the last, and of every bucket the lowest, the highest and the
    first that is not finite.
    """
    if len(values) <= num_points:
        return np.arange(len(values))
    edges = bucket_edges(len(values), num_points // 2)  # two points a bucket
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    # the ends, so that a curve is drawn over its whole length
    kept = {0, len(values) - 1}
    for begin, end in zip(edges, [*edges[1:], len(values)], strict=True):
        kept.add(begin + int(low[begin:end].argmin()))
        kept.add(begin + int(high[begin:end].argmax()))
    broken = np.flatnonzero(~finite)
    if len(broken):
        # the first broken row of each bucket: side="right" gives the bucket that holds it
        _, first = np.unique(np.searchsorted(edges, broken, side="right"), return_index=True)
        kept.update(broken[first].tolist())
    return np.array(sorted(kept))


def bucket_means(values: np.ndarray, num_buckets: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Average each bucket that has a finite value: (middle row, mean of the finite values, how many)."""
    edges = bucket_edges(len(values), num_buckets)
    if not len(edges):
        return np.array([], dtype=np.int64), np.array([]), np.array([], dtype=np.int64)
    finite = np.isfinite(values)
    # reduceat sums from each edge to the next
    counts = np.add.reduceat(finite.astype(np.int64), edges)
    sums = np.add.reduceat(np.where(finite, values, 0.0), edges)
    ends = np.append(edges[1:], len(values))
    some = counts > 0
    return ((edges + ends - 1) // 2)[some], sums[some] / counts[some], counts[some]


def _numbers(values: np.ndarray, digits: int = 6) -> list:
    """Shorten numbers to few digits: whole ones become integers, those that are not finite null."""
    plain = []
    for value in values.tolist():
        if not math.isfinite(value):
            plain.append(None)
            continue
        # fewer characters: a page stays small
        short = float(f"{value:.{digits}g}")
        plain.append(int(short) if short.is_integer() else short)
    return plain
