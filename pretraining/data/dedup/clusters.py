"""Clusters of duplicates, and what becomes of their documents: train, validation, or dropped.

Two documents are in one cluster if pairs connect them, directly or through others. The first document of each cluster
is kept, in the order of the recipe's sources (and within a source in the order of its files and rows). So a source that
is named earlier keeps its copy. A chain of pairs is one cluster, although its ends may resemble each other less than
neighbours do (`benchmarks/dedup.py` counts them). Memory grows with the documents that are in a pair and with the pairs
of one file, not with the corpus.

A cluster goes to the split that its representative drew, so copies never end up on both sides of the split. A wider
pass finds pairs just below the threshold. If the split would part a pair of at least `MinHashSpec.guarded`, the
document in train is dropped, never the one in validation. So validation stays the sample that was drawn, and train
loses the few documents that resemble it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from pretraining.data.dedup.pairs import DocumentNumbers

TRAIN, VALIDATION, DUPLICATE, TWIN = 0, 1, 2, 3
"""Fates. DUPLICATE: an earlier document of its cluster is kept. TWIN: in train, and close to validation."""

FATE_NAMES = ("train", "validation", "duplicate", "validation_twin")

_NUM_EXAMPLES = 5

PairSource: TypeAlias = np.ndarray | Callable[[], np.ndarray]
"""An array of `pairs.PAIR`, or a function that loads one: only one of them is then in memory at a time."""


class Clusters(NamedTuple):
    """The documents that have a duplicate, and the representative of each."""

    members: np.ndarray
    """int64 [members], ascending document numbers."""
    representatives: np.ndarray
    """int64 [members]: the first document of each one's cluster."""

    def representatives_of(self, documents: np.ndarray) -> np.ndarray:
        """Return the representative of each of `documents`: itself if it has no duplicate."""
        if not len(self.members):
            return documents
        # searchsorted gives len(members) for numbers beyond the last member.
        places = np.minimum(np.searchsorted(self.members, documents), len(self.members) - 1)
        return np.where(self.members[places] == documents, self.representatives[places], documents)

    @property
    def dropped(self) -> np.ndarray:
        """int64: the members that are not their cluster's first."""
        return self.members[self.members != self.representatives]


def cluster(pairs: Sequence[PairSource], accepted: float) -> Clusters:
    """Form clusters of the pairs of similarity `accepted` and above; each source of pairs is used twice.

    The result depends on the set of all pairs alone, not on the number or order of the sources.
    """
    members = np.zeros(0, np.int64)
    # Once for the members, then once for the edges: all pairs together may not fit in memory.
    for first, second in _accepted(pairs, accepted):
        members = np.union1d(members, np.concatenate([first, second]))
    # A forest over the members: every label is the least number of its tree.
    labels = np.arange(len(members))
    for first, second in _accepted(pairs, accepted):
        first, second = np.searchsorted(members, first), np.searchsorted(members, second)
        # Each round hangs the larger root of every edge under the smaller and flattens the trees by pointer
        # jumping (Shiloach and Vishkin, 1982): a few rounds, however long the chains.
        while len(first):
            one, other = labels[first], labels[second]
            apart = one != other
            first, second = first[apart], second[apart]
            # Unbuffered, because one root may occur in several edges.
            np.minimum.at(labels, np.maximum(one, other)[apart], np.minimum(one, other)[apart])
            while not np.array_equal(above := labels[labels], labels):
                labels[:] = above
    return Clusters(members, members[labels])


def _accepted(pairs: Sequence[PairSource], accepted: float) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    for some in map(_load, pairs):
        # In float32, as similarities are stored: else a pair exactly on the border could fall out.
        some = some[some["similarity"] >= np.float32(accepted)]
        yield some["first"], some["second"]


def _load(source: PairSource) -> np.ndarray:
    return source() if callable(source) else source


def assign_fates(
    validation: Sequence[np.ndarray],
    clusters: Clusters,
    pairs: Sequence[PairSource] = (),
    remove: bool = True,
) -> list[np.ndarray]:
    """Decide the fate of every document: uint8 [documents] for each piece.

    `validation`: for each piece bool [documents], whether the draw of the text itself is below the share.
    `pairs`: all pairs that were found. If `remove` is false, every copy is kept, on the side of its representative.
    """
    documents = DocumentNumbers([len(draws) for draws in validation])
    # False becomes TRAIN and True VALIDATION.
    fates = np.concatenate([np.zeros(0, np.uint8), *validation]).astype(np.uint8)
    fates[clusters.members] = fates[clusters.representatives]  # the draw of the first decides for all
    if remove:
        fates[clusters.dropped] = DUPLICATE
    twins = []
    for some in map(_load, pairs):
        sides = [some["first"], some["second"]]
        if remove:  # a dropped document counts as its representative
            sides = [clusters.representatives_of(side) for side in sides]
        first, second = sides
        forward = (fates[first] == VALIDATION) & (fates[second] == TRAIN)
        backward = (fates[first] == TRAIN) & (fates[second] == VALIDATION)
        twins.append(np.unique(np.concatenate([second[forward], first[backward]])))
    if twins:
        # After all sources are read, so that the order of the pairs does not matter.
        fates[np.concatenate(twins)] = TWIN
    return documents.split(fates)


def count_fates(fates: Sequence[np.ndarray]) -> dict[str, int]:
    counts = sum(np.bincount(some, minlength=len(FATE_NAMES)) for some in fates)
    return dict(zip(FATE_NAMES, map(int, counts), strict=True))


def duplicates_report(
    clusters: Clusters, counts: Sequence[int], sources: Sequence[int], names: Sequence[str]
) -> dict:
    """Report clusters and dropped documents, within and between sources, with examples.

    `counts`: documents of each piece; `sources`: each piece's number in `names`. An example names piece and
    row of the dropped and of the kept document; the caller knows their files. Examples are spread evenly over the
    dropped documents.
    """
    documents = DocumentNumbers(counts)
    dropped = clusters.dropped
    kept = clusters.representatives_of(dropped)
    sizes = np.unique(clusters.representatives, return_counts=True)[1]
    places = [documents.locate(side) for side in (dropped, kept)]
    losing, keeping = (np.asarray(sources)[pieces] for pieces, _ in places)
    table = np.zeros((len(names), len(names)), np.int64)
    # Unbuffered, because the same two sources occur many times.
    np.add.at(table, (losing, keeping), 1)
    chosen = np.linspace(0, max(len(dropped) - 1, 0), min(_NUM_EXAMPLES, len(dropped)), dtype=np.int64)
    return {
        "documents": len(documents),
        "clusters": len(sizes),
        "largest_cluster": int(sizes.max(initial=0)),
        "dropped": len(dropped),
        # {source of the dropped: {source of the one that is kept instead: documents}}
        "dropped_for_kept_in": {
            names[row]: {names[column]: int(table[row, column]) for column in np.flatnonzero(table[row])}
            for row in np.flatnonzero(table.any(axis=1))
        },
        "examples": [
            {
                side: {"piece": int(pieces[number]), "row": int(rows[number])}
                for side, (pieces, rows) in zip(("dropped", "kept"), places, strict=True)
            }
            for number in chosen
        ],
    }
