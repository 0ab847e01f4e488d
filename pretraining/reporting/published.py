"""The curve of the run that a recipe repeats (`published.curve`), and how far above it this run is."""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from pretraining.outside.files import NUMBER, TEXT, object_of, read_json_value
from pretraining.outside.schema import fits, listed
from pretraining.recipe.sections import curve_file

_NUMBERS = {"type": "array", "items": NUMBER}
_SERIES = object_of({"tokens": _NUMBERS, "values": _NUMBERS})
_FILE = object_of({"run": TEXT, "curves": {"type": "object", "patternProperties": {"(?s:.*)": _SERIES}}})
"""A file of recipes/published/curves/: values after so many trained tokens, by the name that metrics.jsonl has for
them; `sources`, `licence` and `note` are for its readers."""

JUDGED = {
    "eval/loss": "a validation loss of",
    "eval/bits_per_byte": "bits per byte of",
    "train/loss": "a training loss of",
}
"""What is compared point by point, in words: the first of these that both curves have."""


@dataclass(frozen=True)
class Beside:
    """A run's own values beside the published ones."""

    run: str
    metric: str
    tokens: list[float]
    own: list[float]
    published: list[float]
    """Between its points by the logarithm of the tokens: a curve of losses is nearly straight there."""

    @property
    def gaps(self) -> list[float]:
        """Own values less the published ones: below zero this run is better."""
        return [own - other for own, other in zip(self.own, self.published, strict=True)]


@cache
def read_curve(path: Path) -> dict | None:
    """Read a published curve; None if it is not there, or is none: a report is written all the same."""
    try:
        value = read_json_value(path)
    except (OSError, ValueError):
        return None
    if not fits(value, _FILE):
        return None
    whole = (len(each["tokens"]) == len(each["values"]) for each in value["curves"].values())
    return value if all(whole) else None


def curve_of(recipe: dict) -> dict | None:
    section = recipe.get("published")
    name = section.get("curve") if isinstance(section, dict) else None
    return read_curve(curve_file(name)) if isinstance(name, str) else None


def beside(curve: dict, columns: dict[str, tuple[np.ndarray, np.ndarray]]) -> Beside | None:
    """Compare a run with a published curve at each of its own points within it; None if none is.

    columns: {metric: (tokens, values)} of the run.
    """
    for metric in JUDGED:
        series, (tokens, values) = curve["curves"].get(metric), columns.get(metric, ((), ()))
        if series is None or not len(values):
            continue
        theirs = np.array(sorted(zip(series["tokens"], series["values"], strict=True)), dtype=float)
        # the value before the first step has no logarithm of its tokens
        theirs = theirs[theirs[:, 0] > 0]
        inside = np.isfinite(values) & (tokens > 0)
        inside &= (tokens >= theirs[:, 0].min(initial=math.inf)) & (tokens <= theirs[:, 0].max(initial=0))
        if inside.any():
            at, own = tokens[inside], values[inside]
            there = np.interp(np.log(at), np.log(theirs[:, 0]), theirs[:, 1])
            return Beside(curve["run"], metric, at.tolist(), own.tolist(), there.tolist())
    return None


def notes_beside(curve: dict, found: Beside | None, differs: list[str], reached: float) -> list[str]:
    """Say in which keys the recipe of a curve's run is another, and why nothing of it is beside this run yet.

    differs: those keys. reached: tokens that this run has seen.
    """
    run, notes = curve["run"], []
    if differs:
        notes.append(f"The published run ({run}) is not comparable: {listed(differs, ', ')}.")
    judged = [curve["curves"][metric]["tokens"] for metric in JUDGED if metric in curve["curves"]]
    # the value before the first step is not compared
    if found is None and (places := [tokens for series in judged for tokens in series if tokens > 0]):
        first, last = min(places), max(places)
        what = f"it has logged nothing to compare between {first:,.0f} and {last:,.0f} tokens"
        if first > reached:
            what = f"no published point is near its {reached:,.0f} tokens yet; the first is at {first:,.0f} tokens"
        notes.append(f"This run has no gap to the published one ({run}): {what}.")
    return notes
