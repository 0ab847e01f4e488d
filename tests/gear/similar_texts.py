"""Exact similarities of texts, and the files of their signatures, for tests and benchmarks of deduplication."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from pretraining.data.dedup.duplicates import KEYS_NAME, SKETCH_NAME
from pretraining.data.dedup.minhash import Signatures
from pretraining.data.dedup.ngrams import batches_of, ngrams_of, units_of


def ngram_sets(texts: Sequence[str], n: int, unit: str = "words") -> list[np.ndarray]:
    """The sorted set of n-gram hashes of each text."""
    sets = []
    for batch in batches_of(texts):
        hashes, first = ngrams_of(units_of(batch, unit), n)
        sets += [np.unique(hashes[a:b]) for a, b in pairwise(first)]
    return sets


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """The Jaccard similarity of two sorted sets; 0 if both are empty."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / max(len(one) + len(other) - shared, 1)


def write_signatures(folder: Path, signatures: Signatures) -> Path:
    """What `Clean` writes of a piece, in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip((KEYS_NAME, SKETCH_NAME), signatures, strict=True):
        np.save(folder / name, array)
    return folder
