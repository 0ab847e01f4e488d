"""Pairs of equal and of similar documents, found in the files of hashes and signatures of all pieces.

A document's number is its place in the order of pieces: the pieces of the first source first, and so on.

Documents are candidates if they share a band, and the agreement of their signatures confirms them. The work is a grid
of bands x ranges of key values: task t of T takes cells t, t + T, ... A bucket (equal keys of a band) is in one cell,
so the pairs do not depend on T. In a bucket every document is checked against the first one and against the
`NEIGHBOURS` before it. These are all pairs of a small bucket. In a large one they are enough to keep each of its
clusters together, and the cost grows with the documents and not with their square.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from pretraining.data.dedup.minhash import NO_KEY, MinHashSpec, agreement
from pretraining.runtime.durable_files import replacing

PAIR = np.dtype([("first", "<i8"), ("second", "<i8"), ("similarity", "<f4")])
"""Two document numbers, the earlier first, and their estimated Jaccard similarity (1 for equal texts)."""

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
        """Return piece and row within it of each document number."""
        pieces = np.searchsorted(self.first, documents, side="right") - 1
        return pieces, documents - self.first[pieces]

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Cut an array over all documents into one array a piece."""
        return np.split(values, self.first[1:-1])


class HashParts:
    """The text hashes of all pieces."""

    def __init__(self, folder: Path, num_pieces: int):
        self._files = _MappedFiles([hash_file(folder, piece) for piece in range(num_pieces)])
        self.documents = DocumentNumbers([len(self._files[piece]) for piece in range(num_pieces)])

    def columns(self) -> Iterator[np.ndarray]:
        """Yield the hashes of each piece in turn: uint64 [documents, 2]."""
        return (self._files[piece] for piece in range(len(self._files.paths)))


class SignatureParts:
    """The signatures of all pieces."""

    def __init__(self, folder: Path, num_pieces: int):
        paths = [signature_files(folder, piece) for piece in range(num_pieces)]
        self._keys = _MappedFiles([keys for keys, _ in paths])
        self._sketches = _MappedFiles([sketch for _, sketch in paths])
        self.documents = DocumentNumbers([self._keys[piece].shape[1] for piece in range(num_pieces)])

    def columns(self, band: int) -> Iterator[np.ndarray]:
        """Yield the keys of one band of each piece in turn: uint64 [documents]."""
        return (self._keys[piece][band] for piece in range(len(self._keys.paths)))

    def sketches(self, documents: np.ndarray) -> np.ndarray:
        """Read the sketches of the given document numbers, in their order: uint8 [documents, hashes]."""
        pieces, rows = self.documents.locate(documents)
        # File by file, so that each is mapped once for all its rows.
        order = np.argsort(documents, kind="stable")
        bounds = np.flatnonzero(np.diff(pieces[order], prepend=-1))
        found = np.empty((len(documents), self._sketches[0].shape[1]), np.uint8)
        for places in np.split(order, bounds[1:]) if len(order) else ():
            found[places] = self._sketches[int(pieces[places[0]])][rows[places]]
        return found


class _MappedFiles:
    """.npy files opened as memory maps when needed, at most `_OPEN_FILES` at a time."""

    def __init__(self, paths: Sequence[Path]):
        self.paths = list(paths)
        self._open: OrderedDict[int, np.ndarray] = OrderedDict()

    def __getitem__(self, number: int) -> np.ndarray:
        if number not in self._open:
            if len(self._open) >= _OPEN_FILES:
                # The one that was not used for the longest time.
                self._open.popitem(last=False)
            try:
                self._open[number] = np.load(self.paths[number], mmap_mode="r")
            except ValueError:  # an empty array cannot be mapped
                self._open[number] = np.load(self.paths[number])
        self._open.move_to_end(number)
        return self._open[number]


def hash_file(folder: Path, piece: int) -> Path:
    return folder / f"{piece:05d}.hashes.npy"


def signature_files(folder: Path, piece: int) -> tuple[Path, Path]:
    return folder / f"{piece:05d}.keys.npy", folder / f"{piece:05d}.sketch.npy"


def write_array(path: Path, array: np.ndarray) -> None:
    """Write `array` as .npy; the file is whole or absent."""
    with replacing(path, "wb") as file:
        np.save(file, array)


def hash_texts(texts: Sequence[str]) -> np.ndarray:
    """Hash each text's UTF-8 with blake2b, 128 bits: uint64 [texts, 2].

    Unequal texts of a corpus of 1e9 documents agree with odds of 1.5e-21, and cannot be made to.
    """
    digests = [hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest() for text in texts]
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)


def exact_pairs(parts: HashParts, part: int = 0, num_slices: int = 1) -> np.ndarray:
    """Pair each text that occurred before with its first occurrence, in one slice of the hashes: PAIR [pairs]."""
    ranges = _num_ranges(len(parts.documents))
    batches = []
    for number in range(part, ranges, num_slices):
        hashes, documents = _collect_range(parts.columns(), number, ranges)
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
    ranges = _num_ranges(len(parts.documents))
    batches = []
    for cell in range(part, spec.bands * ranges, num_slices):
        band, number = divmod(cell, ranges)
        keys, documents = _collect_range(parts.columns(band), number, ranges)
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


def _num_ranges(num_documents: int) -> int:
    """Return into how many ranges (a power of two) the keys of a band are cut; it depends only on the corpus."""
    return 1 << max(0, (num_documents - 1) // RANGE_DOCUMENTS).bit_length()


def _collect_range(columns: Iterable[np.ndarray], number: int, ranges: int) -> tuple[np.ndarray, np.ndarray]:
    """Gather the keys that fall into range `number` of `ranges`, and the documents they belong to.

    `columns` holds the keys of one piece after the other: uint64 [documents], or [documents, words] of which
    the first decides.
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
