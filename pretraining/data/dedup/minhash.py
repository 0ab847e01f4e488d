"""Sign documents by MinHash (Broder, 1997), banded for locality-sensitive hashing: what is a near duplicate.

Hash j of an n-gram is a_j x mod 2**32 (a_j odd, x the upper half of its 64-bit hash). The n-gram hashes are random
already, and the multiplier only permutes them. A document keeps one byte of each minimum, to estimate similarities,
and one 64-bit key for each band of minima, to find candidates: 512 bytes at 32 bands of 8 rows.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pretraining.data.dedup.ngrams import batches_of, mix, ngrams_of, random_words, units_of
from pretraining.recipe.data import MinHash
from pretraining.recipe.section import key

_NUM_HASHES = 256
"""Hashes of a signature if the recipe does not give bands and rows."""

_RECALL_AT_THRESHOLD = 0.99
"""Bands and rows are derived from the threshold so that at least this share of the pairs on it is found."""

# In standard deviations of the estimate, below the threshold. 2.4 keeps 99 % of the pairs on it (one-sided normal).
_ACCEPT_DEVIATIONS = 2.4
_GUARD_DEVIATIONS = 6


class MinHashSpec(MinHash):
    """Near-duplicate settings of a recipe, with bands and rows, and what follows from them.

    Two documents are near duplicates if the share of signature hashes on which they agree is at least `accepted`.
    """

    bands: int = key(default=32)
    rows: int = key(default=8)

    @classmethod
    def from_recipe(cls, section: dict) -> "MinHashSpec":
        """Read data.dedup.minhash, which the recipe has checked."""
        given = {key: value for key, value in section.items() if value is not None}
        if "bands" not in given:
            given["bands"], given["rows"] = bands_and_rows(given.get("threshold", cls.threshold))
        return cls(**given)

    @property
    def num_hashes(self) -> int:
        return self.bands * self.rows

    @property
    def deviation(self) -> float:
        """Standard deviation of the estimate for two documents exactly on the threshold (binomial)."""
        return math.sqrt(self.threshold * (1 - self.threshold) / self.num_hashes)

    @property
    def accepted(self) -> float:
        """Estimate from which a pair counts: it keeps 99 % of the pairs on the threshold (0.74 at 0.8)."""
        return self.threshold - _ACCEPT_DEVIATIONS * self.deviation

    @property
    def guarded(self) -> float:
        """Estimate from which both documents of a pair must be on one side of the split (0.65 at 0.8)."""
        return max(self.threshold - _GUARD_DEVIATIONS * self.deviation, 0.0)


def recall_at(similarity: float, bands: int, rows: int) -> float:
    """Return the chance that two documents of Jaccard `similarity` share a band: 1 - (1 - s**rows)**bands.

    Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, section 3.4.
    """
    return 1 - (1 - similarity**rows) ** bands


def bands_and_rows(threshold: float) -> tuple[int, int]:
    """Choose the most rows (fewest useless candidates) that still find `_RECALL_AT_THRESHOLD`; 32 x 8 at 0.8."""
    for rows in range(_NUM_HASHES, 1, -1):
        bands = _NUM_HASHES // rows
        if recall_at(threshold, bands, rows) >= _RECALL_AT_THRESHOLD:
            return bands, rows
    return _NUM_HASHES, 1


NO_KEY = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
"""Band key of a document without n-grams: it matches nothing."""

_HIGHEST_BYTE = np.uint32(24)
_SCATTER = np.uint32(0x9E3779B1)


class Signatures(NamedTuple):
    """Keys that find near duplicates of some documents, and sketches that confirm them."""

    keys: np.ndarray
    """uint64 [bands, documents]."""
    sketch: np.ndarray
    """uint8 [documents, bands x rows]."""


def sign_piece(texts: Sequence[str], spec: MinHashSpec) -> Signatures:
    """Sign `texts`, in their order; working memory is that of one batch (or one long text)."""
    keys = np.full((spec.bands, len(texts)), NO_KEY, np.uint64)
    sketch = np.zeros((len(texts), spec.num_hashes), np.uint8)
    # A seed far from those of the other tables of random words. Odd, so that the product is a permutation.
    words = random_words(spec.num_hashes, spec.seed + (1 << 32))
    multipliers = (words >> np.uint64(32)).astype(np.uint32) | 1
    done = 0
    for batch in batches_of(texts):
        ngrams = ngrams_of(units_of(batch, spec.unit), spec.ngram)
        # Documents without n-grams keep NO_KEY.
        rows = done + np.flatnonzero(np.diff(ngrams.first))
        minima = np.empty((spec.num_hashes, len(rows)), np.uint32)
        if len(rows):
            starts = ngrams.first[:-1][np.diff(ngrams.first) > 0]
            values = (ngrams.hashes >> np.uint64(32)).astype(np.uint32)
            np.maximum(values, 1, out=values)  # 0 would be the minimum of every hash
            hashed = np.empty_like(values)
            # One hash at a time: the array of n-grams stays in the cache, and memory does not grow with the hashes.
            for number, multiplier in enumerate(multipliers):
                np.multiply(values, multiplier, out=hashed)
                np.minimum.reduceat(hashed, starts, out=minima[number])
        # A band's key is the hash of its minima: unequal ones agree with odds of 2**-58.
        banded = minima.reshape(spec.bands, spec.rows, -1)
        band_keys = np.zeros((spec.bands, minima.shape[1]), np.uint64)
        for row, weight in enumerate(random_words(spec.rows, 15)):
            # + 1, so that a minimum of 0 counts too.
            band_keys += (banded[:, row] + np.uint64(1)) * weight
        # A key that equals NO_KEY by chance would match nothing.
        keys[:, rows] = np.minimum(mix(band_keys), NO_KEY - np.uint64(1))
        # The byte must depend on all bits, because the high bits of a minimum are near zero.
        sketch[rows] = ((minima * _SCATTER) >> _HIGHEST_BYTE).astype(np.uint8).T
        done += len(batch)
    return Signatures(keys, sketch)


def agreement(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Estimate the Jaccard similarity of sketches uint8 [pairs, hashes]: float32 [pairs].

    The method is that of Li and Konig: b-bit minwise hashing, WWW 2010.
    """
    share = np.count_nonzero(one == other, axis=1) / one.shape[1]
    # Bytes of unequal minima agree once in 256 times: that part is taken out of the estimate.
    return ((share - 1 / 256) / (1 - 1 / 256)).astype(np.float32)
