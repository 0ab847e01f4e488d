"""How well an order mixes documents: pairs of samples of a step, against a full shuffle."""

from typing import NamedTuple

import numpy as np

from pretraining.data.order import Order


class MixingQuality(NamedTuple):
    """Of all pairs of samples in a step."""

    same_document: float
    """Share of the pairs whose blocks start in the same document."""
    full_shuffle: float
    """That share in expectation, were all blocks drawn in a uniformly random order."""

    @property
    def different_ratio(self) -> float:
        """How often a pair comes from different documents, over how often a full shuffle's does: 1 is as good."""
        return (1 - self.same_document) / (1 - self.full_shuffle)


def mixing_quality(order: Order, documents: np.ndarray, samples_per_step: int) -> MixingQuality:
    """Measure the whole steps of one epoch; documents: [blocks], the document in which each block starts."""
    num_steps = max(1, order.num_blocks // samples_per_step)
    samples = np.arange(num_steps * samples_per_step)
    steps = np.sort(documents[order.blocks(samples)].reshape(num_steps, samples_per_step), axis=1)
    # pairs of equal documents inside a step: of a run of length c, c (c - 1) / 2
    begins = np.ones(steps.shape, bool)
    begins[:, 1:] = steps[:, 1:] != steps[:, :-1]
    runs = np.diff(np.append(np.flatnonzero(begins), steps.size)).astype(float)
    equal = float((runs * (runs - 1) / 2).sum())
    num_pairs = num_steps * samples_per_step * (samples_per_step - 1) / 2
    return MixingQuality(equal / num_pairs, full_shuffle_share(documents))


def full_shuffle_share(documents: np.ndarray) -> float:
    """Return the chance that two different blocks, drawn alike, start in the same document."""
    blocks = np.unique(documents, return_counts=True)[1].astype(float)
    return float((blocks * (blocks - 1)).sum() / (len(documents) * (len(documents) - 1)))
