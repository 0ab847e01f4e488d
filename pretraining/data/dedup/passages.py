"""Find passages that occur more than once, word for word, and cut out all but the first.

This is the exact deduplication of substrings of Lee et al. 2022 ("Deduplicating Training Data Makes Language Models
Better", arXiv 2107.06499), by words and hashes in place of tokens and a suffix array.

A passage of at least n words repeats another exactly if each of its windows of n words does. So a hash of every window
is written while texts are cleaned (8 bytes a word), and windows of equal hashes are found by sorting them, a range of
hashes at a time: memory does not grow with the corpus. The longest passages follow, as unions of windows. Two windows
that differ have equal hashes with odds of 2**-58.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pretraining.data.dedup.duplicates import TRAIN, VALIDATION, collect_range, num_ranges
from pretraining.data.dedup.signatures import batches_of, ngrams_of, units_of

WINDOWS_NAME, FIRST_NAME = "windows.npy", "first-windows.npy"
"""Files of a piece: uint64 [windows], and where those of each document begin, int64 [documents + 1]."""


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
