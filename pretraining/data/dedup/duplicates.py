"""Find equal and similar documents from the hashes and signatures of all pieces, and decide what becomes of each; then
passages that occur more than once.

A document's number is its place in the order of pieces: the pieces of the first source first, and so on.

Documents are candidates if they share a band, and the agreement of their signatures confirms them. The work is a grid
of bands x ranges of key values: task t of T takes cells t, t + T, ... A bucket (equal keys of a band) is in one cell,
so the pairs do not depend on T. In a bucket every document is checked against the first one and against the
`NEIGHBOURS` before it. These are all pairs of a small bucket. In a large one they are enough to keep each of its
clusters together, and the cost grows with the documents and not with their square.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretraining.data.dedup.minhash import NO_KEY, MinHashSpec, agreement
from pretraining.data.dedup.ngrams import batches_of, ngrams_of, units_of

PAIR = np.dtype([("first", "<i8"), ("second", "<i8"), ("similarity", "<f4")])
"""Two document numbers, the earlier first, and their estimated Jaccard similarity (1 for equal texts)."""

HASHES_NAME, KEYS_NAME, SKETCH_NAME = "hashes.npy", "keys.npy", "sketch.npy"
"""Files of a piece: the hashes of its texts, and both parts of their signatures."""

WINDOWS_NAME, FIRST_NAME = "windows.npy", "first-windows.npy"
"""Files of a piece: uint64 [windows], and where those of each document begin, int64 [documents + 1]."""
WINDOWS_FORM = 2
"""Of these hashes: those of another one are never compared with them."""

NEIGHBOURS = 16
"""Documents before it in its bucket that each document is checked against."""

RANGE_DOCUMENTS = 1 << 23
"""Documents sorted at once: some 500 MB of working memory."""

_CHECKED_AT_ONCE = 1 << 15
"""Pairs whose sketches are held at once: 16 MB at 256 hashes."""

_OPEN_FILES = 128
"""Memory maps held open at once: below the usual limit of open files, however many pieces there are."""


class DocumentNumbers:
    """Which documents each piece holds: `counts[p]` of them, numbered from `first[p]` on."""

    def __init__(self, counts: Sequence[int]):
        self.first = np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))])

    def __len__(self) -> int:
        return int(self.first[-1])

    def locate(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pieces = np.searchsorted(self.first, documents, side="right") - 1
        return pieces, documents - self.first[pieces]


class StoredPairs:
    """Arrays of `PAIR` in files: one of them is in memory at a time, as often as they are read."""

    def __init__(self, paths: Sequence[Path]):
        self.paths = paths

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(np.load, self.paths)


class SignatureParts:
    """The signatures of all pieces, each in a folder of its own."""

    def __init__(self, folders: Sequence[Path]):
        self.num_pieces = len(folders)
        self.keys, self._sketches = (_opened(folders, name) for name in (KEYS_NAME, SKETCH_NAME))
        self.documents = DocumentNumbers([keys.shape[1] for keys in map(self.keys, range(len(folders)))])

    def sketches(self, documents: np.ndarray) -> np.ndarray:
        """Read the sketches of the given document numbers, in their order: uint8 [documents, hashes]."""
        pieces, rows = self.documents.locate(documents)
        # File by file, so that each is mapped once for all its rows.
        order = np.argsort(documents, kind="stable")
        bounds = np.flatnonzero(np.diff(pieces[order], prepend=-1))
        found = np.empty((len(documents), self._sketches(0).shape[1]), np.uint8)
        for places in np.split(order, bounds[1:]) if len(order) else ():
            found[places] = self._sketches(int(pieces[places[0]]))[rows[places]]
        return found


def _opened(folders: Sequence[Path], name: str) -> Callable[[int], np.ndarray]:
    """Return what opens this file of a piece as a memory map; the last ones that were used stay open."""

    @lru_cache(_OPEN_FILES)
    def opened(piece: int) -> np.ndarray:
        try:
            return np.load(folders[piece] / name, mmap_mode="r")
        except ValueError:  # an empty array cannot be mapped
            return np.load(folders[piece] / name)

    return opened


def hash_texts(texts: Sequence[str]) -> np.ndarray:
    """Hash each text's UTF-8 with blake2b, 128 bits: uint64 [texts, 2]; of 1e9 texts two agree with odds of 1.5e-21."""
    digests = [hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest() for text in texts]
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)


def exact_pairs(folders: Sequence[Path], part: int = 0, num_slices: int = 1) -> np.ndarray:
    """Pair each text that occurred before with its first occurrence, in one slice of the hashes: PAIR [pairs]."""
    piece, numbers = _opened(folders, HASHES_NAME), range(len(folders))
    ranges = num_ranges(sum(map(len, map(piece, numbers))))
    batches = []
    for number in range(part, ranges, num_slices):
        hashes, documents = collect_range(map(piece, numbers), number, ranges)
        # Equal hashes side by side, each run of them in the order of documents.
        order = np.lexsort((documents, hashes[:, 1], hashes[:, 0]))
        hashes, documents = hashes[order], documents[order]
        same = np.all(hashes[1:] == hashes[:-1], axis=1)
        starts = np.flatnonzero(np.concatenate([[True], ~same])) if len(documents) else documents
        leaders = np.repeat(documents[starts], np.diff(starts, append=len(documents)))
        later = leaders != documents
        pairs = np.zeros(np.count_nonzero(later), PAIR)
        pairs["first"], pairs["second"], pairs["similarity"] = leaders[later], documents[later], 1
        batches.append(pairs)
    return unique_pairs(batches)


def match_slice(parts: SignatureParts, spec: MinHashSpec, part: int = 0, num_slices: int = 1) -> np.ndarray:
    """Find the pairs of one slice whose estimated similarity is at least `spec.guarded`: PAIR [pairs].

    Pairs of at least `spec.accepted` are near duplicates. The other pairs must not be parted by the split.
    """
    ranges = num_ranges(len(parts.documents))
    batches = []
    for cell in range(part, spec.bands * ranges, num_slices):
        band, number = divmod(cell, ranges)
        columns = (parts.keys(piece)[band] for piece in range(parts.num_pieces))
        keys, documents = collect_range(columns, number, ranges)
        order = np.argsort(keys, kind="stable")  # equal keys stay in the order of documents
        keys, documents = keys[order], documents[order]
        for first, second in _candidates(keys):
            for start in range(0, len(first), _CHECKED_AT_ONCE):
                some = slice(start, start + _CHECKED_AT_ONCE)
                sides = documents[first[some]], documents[second[some]]
                similarity = agreement(*map(parts.sketches, sides))
                close = similarity >= spec.guarded
                pairs = np.zeros(np.count_nonzero(close), PAIR)
                for name, column in zip(PAIR.names, (*sides, similarity), strict=True):
                    pairs[name] = column[close]
                batches.append(pairs)
    return unique_pairs(batches)


def _candidates(keys: np.ndarray) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Yield places in the sorted `keys` of two documents of one bucket: neighbours, then each with the first."""
    places = np.flatnonzero(keys != NO_KEY)
    for distance in range(1, NEIGHBOURS + 1):
        places = places[places + distance < len(keys)]
        places = places[keys[places] == keys[places + distance]]
        yield places, places + distance
    later = places + NEIGHBOURS  # documents with at least as many before them in their bucket
    starts = np.searchsorted(keys, keys[later])
    further = later - starts > NEIGHBOURS
    yield starts[further], later[further]


def num_ranges(num_documents: int) -> int:
    """Return into how many ranges (a power of two) the keys of a band are cut; it depends only on the corpus."""
    return 1 << max(0, (num_documents - 1) // RANGE_DOCUMENTS).bit_length()


def collect_range(columns: Iterable[np.ndarray], number: int, ranges: int) -> tuple[np.ndarray, np.ndarray]:
    """Gather the keys that fall into range `number` of `ranges`, and the documents they belong to.

    columns: the keys of each piece, uint64 [documents] or [documents, words], of which the first decides.
    """
    # The highest bits of a key choose its range.
    shift, first = np.uint64(64 - (ranges.bit_length() - 1)), 0
    keys, documents = [], []
    for column in columns:
        leading = column if column.ndim == 1 else column[:, 0]
        # One range takes all keys: nothing to compare.
        rows = np.flatnonzero(leading >> shift == number) if ranges > 1 else np.arange(len(column))
        keys.append(column[rows])
        documents.append(rows + first)
        first += len(column)
    return np.concatenate(keys), np.concatenate(documents)


def unique_pairs(found: list[np.ndarray]) -> np.ndarray:
    """Merge the pairs of several arrays, each once, in the order of their documents."""
    pairs = np.concatenate([np.zeros(0, PAIR), *found])
    # A pair that shares several bands was found in each of them.
    pairs = pairs[np.lexsort((pairs["second"], pairs["first"]))]
    repeated = (pairs["first"][1:] == pairs["first"][:-1]) & (pairs["second"][1:] == pairs["second"][:-1])
    return pairs[np.concatenate([[True], ~repeated])] if len(pairs) else pairs


# Clusters of duplicates, and what becomes of their documents: train, validation, or dropped.
#
# Two documents are in one cluster if pairs connect them, directly or through others. The first document of each cluster
# is kept, in the order of the recipe's sources (and within a source in the order of its files and rows). So a source
# that is named earlier keeps its copy. A chain of pairs is one cluster, although its ends may resemble each other less
# than neighbours do (`benchmarks/dedup.py` counts them). Memory grows with the documents that are in a pair and with
# the pairs of one file, not with the corpus.
#
# A cluster goes to the split that its representative drew, so copies never end up on both sides of the split. A wider
# pass finds pairs just below the threshold. If the split would part a pair of at least `MinHashSpec.guarded`, the
# document in train is dropped, never the one in validation. So validation stays the sample that was drawn, and train
# loses the few documents that resemble it.

TRAIN, VALIDATION, DUPLICATE, TWIN = 0, 1, 2, 3
"""Fates. DUPLICATE: an earlier document of its cluster is kept. TWIN: in train, and close to validation."""

FATE_NAMES = ("train", "validation", "duplicate", "validation_twin")

_NUM_EXAMPLES = 5


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


def cluster(pairs: Iterable[np.ndarray], accepted: float) -> Clusters:
    """Form clusters of the pairs of similarity `accepted` and above; each array of pairs is read twice."""
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


def _accepted(pairs: Iterable[np.ndarray], accepted: float) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    for some in pairs:
        # In float32, as similarities are stored: else a pair exactly on the border could fall out.
        some = some[some["similarity"] >= np.float32(accepted)]
        yield some["first"], some["second"]


def assign_fates(
    validation: Sequence[np.ndarray],
    clusters: Clusters,
    pairs: Iterable[np.ndarray] = (),
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
    for some in pairs:
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
    return np.split(fates, documents.first[1:-1])


def duplicates_report(
    clusters: Clusters,
    fates: Sequence[np.ndarray],
    sources: Sequence[int],
    names: Sequence[str],
    where: Callable[[int, int], str],
) -> dict:
    """Report clusters, dropped documents (within and between sources, with examples) and fates.

    fates: uint8 [documents] for each piece. sources: each piece's number in `names`. where: says from piece and row
    where a document comes from. An example says it of the dropped and of the kept one; examples are spread evenly over
    the dropped ones.
    """
    documents = DocumentNumbers(list(map(len, fates)))
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
                side: where(int(pieces[number]), int(rows[number]))
                for side, (pieces, rows) in zip(("dropped", "kept"), places, strict=True)
            }
            for number in chosen
        ],
        "fates": {
            name: int(sum((some == fate).sum() for some in fates)) for fate, name in enumerate(FATE_NAMES)
        },
    }


# Passages that occur more than once, word for word: all but the first are cut out.
#
# This is the exact deduplication of substrings of Lee et al. 2022 ("Deduplicating Training Data Makes Language Models
# Better", arXiv 2107.06499), by words and hashes in place of tokens and a suffix array.
#
# A passage of at least n words repeats another exactly if each of its windows of n words does. So a hash of every
# window is written while texts are cleaned (8 bytes a word), and windows of equal hashes are found by sorting them, a
# range of hashes at a time: memory does not grow with the corpus. The longest passages follow, as unions of windows.
# Two windows that differ have equal hashes with odds of 2**-58.


def windows_of(texts: Sequence[str], num_words: int) -> tuple[np.ndarray, np.ndarray]:
    """Hash every window of `num_words` words: uint64 [windows], and int64 [texts], the windows of each text."""
    hashes, counts = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for batch in batches_of(texts):
        units = units_of(batch, "written")
        grams = ngrams_of(units, num_words)
        # A shorter text has a single n-gram, of all its words, which is no window.
        is_long = np.diff(units.first) >= num_words
        of_each = np.diff(grams.first)
        hashes.append(grams.hashes[np.repeat(is_long, of_each)])
        counts.append(np.where(is_long, of_each, 0))
    return np.concatenate(hashes), np.concatenate(counts)


def repeated_windows(
    folders: Sequence[Path], fates: Sequence[np.ndarray], num_words: int, part: int, num_slices: int
) -> tuple[np.ndarray, np.ndarray]:
    """Find in one slice of the hashes the windows that occurred before, in documents that stay: numbers of windows and
    of their documents, int64 [repeated] each, ascending.

    The first of equal ones is one of validation, if there is such: what training loses, validation keeps. A window that
    overlaps the first one is no repetition: of a line that comes a hundred times, its first `num_words` words stay.
    """
    firsts, found = [np.load(folder / FIRST_NAME) for folder in folders], [np.zeros((2, 0), np.int64)]
    bases, fate = np.cumsum([0, *(int(first[-1]) for first in firsts)]), np.concatenate(fates)
    # The windows before each document.
    first = np.concatenate([first[:-1] + base for first, base in zip(firsts, bases, strict=False)])
    ranges = num_ranges(int(bases[-1]))
    for number in range(part, ranges, num_slices):
        of_pieces = (np.load(folder / WINDOWS_NAME) for folder in folders)
        hashes, windows = collect_range(of_pieces, number, ranges)
        owners = np.searchsorted(first, windows, side="right") - 1
        stays = np.isin(fate[owners], (TRAIN, VALIDATION))
        hashes, windows, owners = hashes[stays], windows[stays], owners[stays]
        order = np.lexsort((windows, fate[owners] == TRAIN, hashes))
        hashes, windows, owners = hashes[order], windows[order], owners[order]
        starts = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]])) if len(hashes) else order
        leaders = np.repeat(starts, np.diff(starts, append=len(hashes)))
        apart = (owners != owners[leaders]) | (windows - windows[leaders] >= num_words)
        later = apart & (leaders != np.arange(len(hashes)))
        found.append(np.stack([windows[later], owners[later]]))
    windows, owners = np.concatenate(found, axis=1)
    order = np.argsort(windows)
    return windows[order], owners[order]


def without_windows(text: str, windows: np.ndarray, num_words: int) -> str:
    """Cut the words of these windows (numbers in the text) out of it, each with what is behind it."""
    starts = np.append(units_of([text], "written").starts, len(text))
    change = np.zeros(len(starts) + 1, np.int64)
    np.add.at(change, windows, 1)
    np.add.at(change, windows + num_words, -1)
    is_cut = np.cumsum(change)[: len(starts) - 1] > 0
    borders = np.flatnonzero(np.diff(is_cut, prepend=False, append=False))
    kept, at = [], 0
    for first, stop in borders.reshape(-1, 2).tolist():
        kept.append(text[at : int(starts[first])])
        at = int(starts[stop])
    return "".join([*kept, text[at:]])
