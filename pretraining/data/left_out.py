"""An order with windows left out: what healing skips moves every later sample forward."""

from collections.abc import Sequence

import numpy as np

from pretraining.data.order import Order


class OrderWithout:
    """The samples of `order` outside the windows [first, last) of its positions; O(1) a sample in the run.

    left_out: disjoint windows in order (`Journal.left_out`).
    """

    def __init__(self, order: Order, left_out: Sequence[tuple[int, int]]):
        self.order, self.num_blocks = order, order.num_blocks
        self.orders = getattr(order, "orders", [order])
        windows = np.array(left_out, np.int64).reshape(-1, 2)
        self._shifts = np.concatenate([[0], np.cumsum(windows[:, 1] - windows[:, 0])])
        self._starts = windows[:, 0] - self._shifts[:-1]

    def positions(self, sample_indices: np.ndarray) -> np.ndarray:
        """[n] positions (int64) in `order` of the run's samples [n]."""
        samples = np.asarray(sample_indices, np.int64)
        return samples + self._shifts[np.searchsorted(self._starts, samples, side="right")]

    def blocks(self, sample_indices: np.ndarray) -> np.ndarray:
        """[n] block numbers (int64) of the run's samples [n]."""
        return self.order.blocks(self.positions(sample_indices))
