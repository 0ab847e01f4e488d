"""A power law through a loss curve, and how far to trust where it leads."""

import itertools
from dataclasses import dataclass

import numpy as np

EXPONENTS = np.geomspace(0.02, 2.0, 161)  # steps of 3 %
FEWEST_POINTS = 12
NUM_BUCKETS = 120
RESAMPLES = 200


@dataclass(frozen=True)
class PowerLaw:
    """loss(tokens) = floor + scale x (tokens / unit) ^ -exponent."""

    floor: float
    scale: float
    exponent: float
    unit: float

    def at(self, tokens: float) -> float:
        """The loss, in nats a token."""
        return self.floor + self.scale * (tokens / self.unit) ** -self.exponent


@dataclass(frozen=True)
class Forecast:
    """The loss a curve is heading for, between what its noise allows and what its later parts alone would say."""

    loss: float
    low: float
    high: float
    law: PowerLaw


def forecast(tokens: np.ndarray, losses: np.ndarray, at_tokens: float) -> Forecast | None:
    """Fit the curve so far and read it at `at_tokens`; None where it has too few points.

    Fitted are medians over buckets that are even in log(tokens), weighted by the root of their rows, so that
    neither spikes nor the many late rows decide alone. For each exponent, floor and scale follow by least squares,
    the floor not below 0 (the form is Hoffmann et al. 2022's, in tokens alone). The interval holds the middle 90 %
    of a moving-block bootstrap of the residuals, and the laws of the curve without its first quarter and half: it
    knows the noise and how far the curve is a power law at all, not what a falling learning rate will still bring.
    """
    x, y, rows = _buckets(tokens, losses)
    if len(x) < FEWEST_POINTS:
        return None
    unit, weights = float(x[-1]), np.sqrt(rows)
    floor, scale, exponent = (float(part[0]) for part in _fit(x / unit, y[:, None], weights))
    law = PowerLaw(floor, scale, exponent, unit)
    fitted = floor + scale * (x / unit) ** -exponent
    noisy = fitted[:, None] + _resampled((y - fitted) * np.sqrt(weights)) / np.sqrt(weights)[:, None]
    floors, scales, exponents = _fit(x / unit, noisy, weights)
    low, high = np.quantile(floors + scales * (at_tokens / unit) ** -exponents, [0.05, 0.95])
    ends = [low, high, law.at(at_tokens), *_later_ends(x / unit, y, weights, at_tokens / unit)]
    return Forecast(law.at(at_tokens), float(min(ends)), float(max(ends)), law)


def _later_ends(x: np.ndarray, y: np.ndarray, weights: np.ndarray, at: float) -> list[float]:
    """Where the laws of the later parts of the curve are at `at`."""
    ends = []
    for first in (len(x) // 4, len(x) // 2):
        if len(x) - first >= FEWEST_POINTS:
            floor, scale, exponent = (part[0] for part in _fit(x[first:], y[first:, None], weights[first:]))
            ends.append(float(floor + scale * at**-exponent))
    return ends


def _buckets(tokens: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Median tokens, median losses and rows of at most NUM_BUCKETS stretches, even in log(tokens)."""
    usable = np.isfinite(losses) & (tokens > 0)
    tokens, losses = tokens[usable], losses[usable]
    if not len(tokens):
        return tokens, losses, tokens
    edges = np.geomspace(tokens[0], tokens[-1] * 1.0001, NUM_BUCKETS + 1)
    spans = [(a, b) for a, b in itertools.pairwise(np.searchsorted(tokens, edges)) if b > a]
    middle = np.array([[np.median(tokens[a:b]), np.median(losses[a:b]), b - a] for a, b in spans])
    return middle[:, 0], middle[:, 1], middle[:, 2]


def _fit(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(floors, scales, exponents) [columns] of the best law for each column of y [points, columns].

    The best exponent of the grid, then the minimum of the parabola through its error and its neighbours'.
    """
    errors = np.stack([_solve(x[:, None] ** -exponent, y, weights)[2] for exponent in EXPONENTS])
    columns, best = np.arange(y.shape[1]), errors.argmin(axis=0).clip(1, len(EXPONENTS) - 2)
    before, here, after = (errors[best + step, columns] for step in (-1, 0, 1))
    bend = before - 2 * here + after
    shift = np.divide(0.5 * (before - after), bend, out=np.zeros_like(bend), where=bend > 0).clip(-1, 1)
    exponents = np.exp(np.interp(best + shift, np.arange(len(EXPONENTS)), np.log(EXPONENTS)))
    floors, scales, _ = _solve(x[:, None] ** -exponents, y, weights)
    return floors, scales, exponents


def _solve(powers: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, ...]:
    """(floors, scales, weighted squared errors) [columns] for given powers [points, columns or 1]."""
    total, mean_p, mean_y = weights.sum(), weights @ powers / weights.sum(), weights @ y / weights.sum()
    scale = weights @ ((powers - mean_p) * (y - mean_y)) / (weights @ (powers - mean_p) ** 2)
    floor = mean_y - scale * mean_p
    scale = np.where(floor < 0, weights @ (powers * y) / (weights @ powers**2), scale)
    floor = np.maximum(floor, 0.0)
    return floor, scale, weights @ (floor + scale * powers - y) ** 2 / total


def _resampled(residuals: np.ndarray) -> np.ndarray:
    """[points, RESAMPLES] residuals drawn in blocks, so that their slow waves stay; the same at every call."""
    points = len(residuals)
    length = max(1, round(points ** (1 / 3)))
    draws = np.random.default_rng(0).integers(0, points - length + 1, size=(-(-points // length), RESAMPLES))
    rows = (draws[:, None, :] + np.arange(length)[None, :, None]).reshape(-1, RESAMPLES)[:points]
    return residuals[rows]
