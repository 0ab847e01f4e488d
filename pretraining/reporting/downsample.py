"""Fewer points, the same picture: every bucket keeps its lowest and highest value, so that no spike is lost."""

import numpy as np


def bucket_edges(num_rows: int, num_buckets: int) -> np.ndarray:
    """First rows of the buckets: two thirds of them evenly spaced, one third by the logarithm, for log axes."""
    if num_rows <= num_buckets:
        return np.arange(num_rows)
    even = np.linspace(0, num_rows, 2 * num_buckets // 3, endpoint=False)
    early = np.geomspace(1, num_rows, num_buckets // 3, endpoint=False)
    return np.unique(np.concatenate([even, early]).astype(np.int64))


def kept_points(values: np.ndarray, num_points: int) -> np.ndarray:
    """Indices of at most about `num_points` values: all where they are few, else first, last, and of every bucket
    the lowest, the highest and the first that is not finite."""
    if len(values) <= num_points:
        return np.arange(len(values))
    edges = bucket_edges(len(values), num_points // 2)
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    kept = {0, len(values) - 1}
    for begin, end in zip(edges, [*edges[1:], len(values)], strict=True):
        kept.add(begin + int(low[begin:end].argmin()))
        kept.add(begin + int(high[begin:end].argmax()))
    broken = np.flatnonzero(~finite)
    if len(broken):
        _, first = np.unique(np.searchsorted(edges, broken, side="right"), return_index=True)
        kept.update(broken[first].tolist())
    return np.array(sorted(kept))


def bucket_means(values: np.ndarray, num_buckets: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(middle row, mean of the finite values, how many) of every bucket that has a finite value."""
    edges = bucket_edges(len(values), num_buckets)
    if not len(edges):
        return np.array([], dtype=np.int64), np.array([]), np.array([], dtype=np.int64)
    finite = np.isfinite(values)
    counts = np.add.reduceat(finite.astype(np.int64), edges)
    sums = np.add.reduceat(np.where(finite, values, 0.0), edges)
    ends = np.append(edges[1:], len(values))
    some = counts > 0
    return ((edges + ends - 1) // 2)[some], sums[some] / counts[some], counts[some]
