"""Tell good texts from others: a logistic regression over hashed words and pairs of words, trained on two folders.

Words are hashed into buckets as fastText hashes its n-grams (Joulin et al. 2017, arXiv:1607.01759), with no embedding
between. The file of weights is read without anybody's code. fastText itself would need a compiler to train: the package
that is pinned only reads models.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from scipy.sparse import csr_matrix, vstack

from pretraining.data.dedup.ngrams import ngrams_of, units_of
from pretraining.errors import UserError
from pretraining.outside.files import UNREADABLE
from pretraining.runtime.durable_files import replacing

BUCKET_BITS = 18
"""2**18 weights: a file of 1 MB at most, and few collisions among the words that tell texts apart."""
NUM_WEIGHTS = 2**BUCKET_BITS + 1

SIDE_CHARACTERS = 128 << 20
"""What is read of each side for training: more brings little, and its n-grams are held in memory."""
HELD_OUT_ONE_IN = 10
FEWEST_TEXTS = 20
"""Of a side."""
_EPOCHS, _BATCH, _RATE = 5, 64, 0.1
"""Of AdaGrad (Duchi et al. 2011)."""


def _grams_of(texts: Sequence[str]) -> csr_matrix:
    """Return the single words and pairs of some texts: int8 [texts, NUM_WEIGHTS - 1], a 1 for each."""
    units, shift = units_of(texts), np.uint64(64 - BUCKET_BITS)
    grams = [ngrams_of(units, size) for size in (1, 2)]
    owners = np.concatenate([np.repeat(np.arange(len(texts)), np.diff(each.first)) for each in grams])
    buckets = np.concatenate([(each.hashes >> shift).astype(np.int32) for each in grams])
    first = np.cumsum([0, *np.bincount(owners, minlength=len(texts))])
    ordered = buckets[np.argsort(owners, kind="stable")]
    return csr_matrix((np.ones(len(ordered), np.int8), ordered, first), (len(texts), NUM_WEIGHTS - 1))


class Classifier:
    """Weights of the buckets, and a last one that is added for every text: float32 [NUM_WEIGHTS]."""

    def __init__(self, weights: np.ndarray):
        self.weights = weights

    @classmethod
    def load(cls, path: str) -> "Classifier":
        try:
            with np.load(path) as file:
                weights = file["weights"]
        except (
            *UNREADABLE,
            BadZipFile,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            NotImplementedError,
        ) as error:
            what = f"no classifier of `python -m pretraining.data quality` ({error})"
            raise UserError(f"{path}: {what}; train one") from error
        if weights.shape != (NUM_WEIGHTS,) or weights.dtype != np.float32:
            raise UserError(f"{path}: a classifier of another version; train it again")
        return cls(weights)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, "wb") as file:
            np.savez_compressed(file, weights=self.weights)

    def scores(self, texts: Sequence[str]) -> np.ndarray:
        """Return the score of each text, float64 [texts]: the same in whatever company it comes."""
        return self._scores(_grams_of(texts))

    def _scores(self, grams: csr_matrix) -> np.ndarray:
        owners = np.repeat(np.arange(grams.shape[0]), np.diff(grams.indptr))
        sums = np.bincount(owners, self.weights[grams.indices], grams.shape[0]) / _lengths_of(grams)
        return 1 / (1 + np.exp(-self.weights[-1] - sums))

    def train(self, grams: csr_matrix, is_good: np.ndarray) -> None:
        """Fit the weights to texts of which `is_good`, bool [texts], says the side; the same texts give the same."""
        share, draw, squares = is_good.mean(), np.random.default_rng(0), np.full(NUM_WEIGHTS, 1e-8)
        # Both sides count as much, whatever their sizes.
        importance = np.where(is_good, 0.5 / share, 0.5 / (1 - share))
        for _ in range(_EPOCHS):
            order = draw.permutation(len(is_good))
            for chosen in np.split(order, range(_BATCH, len(order), _BATCH)):
                batch = grams[chosen]
                error = (self._scores(batch) - is_good[chosen]) * importance[chosen] / len(chosen)
                slope = np.append(batch.T @ (error / _lengths_of(batch)), error.sum())
                squares += slope**2
                self.weights -= (_RATE * slope / np.sqrt(squares)).astype(np.float32)


def train_classifier(good: Iterable[str], other: Iterable[str]) -> tuple[Classifier, dict]:
    """Train a classifier, and judge by it the texts that it has not seen, one in ten.

    Returns it and {"good", "other": texts, "accuracy", "auc", "quantiles": scores of each side at 10, 50 and 90 %}.
    Raises UserError for a side of too few texts.
    """
    sides = {}
    for name, texts in (("good", good), ("other", other)):
        parts, left = [], SIDE_CHARACTERS
        for text in texts:
            parts.append(_grams_of([text]))
            left -= len(text)
            if left <= 0:
                break
        if len(parts) < FEWEST_TEXTS:
            raise UserError(f"--{name}: has {len(parts)} texts; give at least {FEWEST_TEXTS}")
        sides[name] = vstack(parts, "csr")
    grams, sizes = vstack(list(sides.values()), "csr"), [each.shape[0] for each in sides.values()]
    is_good, numbers = np.arange(sum(sizes)) < sizes[0], np.arange(sum(sizes))
    seen, unseen = numbers[numbers % HELD_OUT_ONE_IN > 0], numbers[numbers % HELD_OUT_ONE_IN == 0]
    classifier = Classifier(np.zeros(NUM_WEIGHTS, np.float32))
    classifier.train(grams[seen], is_good[seen])
    scores, truth = classifier._scores(grams[unseen]), is_good[unseen]
    of_good, of_others = scores[truth], np.sort(scores[~truth])
    # The chance that a good text has the higher score (Mann and Whitney); equal scores count half.
    above = [np.searchsorted(of_others, of_good, side=side) for side in ("left", "right")]
    quantiles = [np.quantile(each, (0.1, 0.5, 0.9)).round(4).tolist() for each in (of_good, of_others)]
    report: dict = {"accuracy": float(((scores >= 0.5) == truth).mean())}
    report["quantiles"] = dict(zip(sides, quantiles, strict=True))
    report["auc"] = float(np.mean(above) / len(of_others))
    return classifier, {**dict(zip(sides, sizes, strict=True)), **report}


def _lengths_of(grams: csr_matrix) -> np.ndarray:
    """Return the root of the n-grams of each text: a long text is surer than a short one, but not by its length."""
    return np.sqrt(np.maximum(np.diff(grams.indptr), 1))
