"""Curves: the points of a metric that a page draws, so few that it stays small; and every row of a run as CSV."""

import csv
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pretraining.reporting.run_record import RunRecord
from pretraining.runtime.durable_files import replacing

# A page stays small whatever the run's length: a phone opens it.
POINTS_OF_LOSS, POINTS = 3000, 1000
POINTS_OF_PARTS, FEWEST_POINTS = 10_000, 20
"""Points of all parts of a metric together, such as the layers of the gradient norm; points of each part."""


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
        else:
            # fewer characters: a page stays small
            short = float(f"{value:.{digits}g}")
            plain.append(int(short) if short.is_integer() else short)
    return plain


def write_csv(path: Path, records: Sequence[RunRecord], names: Sequence[str]) -> None:
    """Write every row of these runs: run, step, tokens, hours, then one column a metric.

    A value that a row does not have is empty; one that is not a number is NaN.
    """
    metrics = sorted({metric for record in records for metric in record.metrics.names()})
    with replacing(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", "step", "tokens", "hours", *metrics])
        for record, name in zip(records, names, strict=True):
            steps, tokens = (values.astype(np.int64).tolist() for values in (record.steps, record.tokens))
            hours = record.hours.round(6).tolist()
            columns = []
            for metric in metrics:
                cells: list = [""] * len(steps)
                for row, value in zip(*map(np.ndarray.tolist, record.metrics.column(metric)), strict=True):
                    cells[row] = "NaN" if math.isnan(value) else value
                columns.append(cells)
            writer.writerows(zip([name] * len(steps), steps, tokens, hours, *columns, strict=True))
