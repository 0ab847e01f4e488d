"""Spikes of a logged curve, found after the fact; the monitor that judges steps as they happen is another."""

import numpy as np

BLOCK = 32
SCORE = 8.0
"""Robust standard deviations above the median of the block before."""
RISE = 1.08
"""A spike is also at least this multiple of that median: a quiet curve's noise is none."""


def spike_rows(values: np.ndarray) -> list[int]:
    """The highest row of every spike: rows far above the median of the block before them.

    Rows that are not finite count as spikes. The first blocks, where a curve falls steeply, are not judged.
    """
    high = ~np.isfinite(values)
    for start in range(2 * BLOCK, len(values), BLOCK):
        level, spread = _level_and_spread(values[start - 2 * BLOCK : start])
        block = values[start : start + BLOCK]
        with np.errstate(invalid="ignore"):
            high[start : start + BLOCK] |= (block > level + SCORE * spread) & (block > RISE * level)
    return [_highest(values, run) for run in _runs(np.flatnonzero(high))]


def _level_and_spread(before: np.ndarray) -> tuple[float, float]:
    """Median of the later half, and robust standard deviation around the trend of both halves."""
    rows = np.flatnonzero(np.isfinite(before))
    early, late = rows[rows < BLOCK], rows[rows >= BLOCK]
    if len(early) < BLOCK // 2 or len(late) < BLOCK // 2:
        return np.inf, 0.0
    level, slope = np.median(before[late]), (np.median(before[late]) - np.median(before[early])) / BLOCK
    residuals = before[rows] - level - slope * (rows - 1.5 * BLOCK)
    return level, 1.4826 * np.median(np.abs(residuals)) + 1e-3 * abs(level)


def _runs(rows: np.ndarray, gap: int = 8) -> list[np.ndarray]:
    """Rows in groups: those closer than `gap` belong to one spike."""
    if not len(rows):
        return []
    return np.split(rows, np.flatnonzero(np.diff(rows) > gap) + 1)


def _highest(values: np.ndarray, rows: np.ndarray) -> int:
    return int(rows[np.argmax(np.where(np.isfinite(values[rows]), values[rows], np.inf))])
