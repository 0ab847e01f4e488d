"""A text as the rules see it (numpy): its lines, paragraphs, sentences, words as arrays, and what repeats in it."""

import string
import unicodedata
from collections.abc import Iterator
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from pretraining.data.dedup.ngrams import NUM_CODE_POINTS, random_words, word_hashes

_SENTENCE_TERMINALS = (
    "21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736 "
    "17d4-17d6 17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c 1c7e-1c7f "
    "203c-203d 2047-2049 2e2e 2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f "
    "a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb fe52 fe56-fe57 ff01 ff0e ff1f ff61 10a56-10a57 10f55-10f59 "
    "10f86-10f89 11047-11048 110be-110c1 11141-11143 111c5-111c6 111cd 111de-111df 11238-11239 "
    "1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 1173c-1173e 11944 11946 "
    "11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 16b37-16b38 16b44 "
    "16e98 1bc9f 1da88"
)
"""Code points of Unicode's Sentence_Terminal property that FineWeb uses (sorted, hexadecimal, as ranges)."""

_OTHER_PUNCTUATION = (
    "0-8 b-1f 7f-9f ab b4 bb 2013-2014 2019 201c-201e 2026 2236 2501 25ba 3001 3008-300d 3010-3011 "
    "ff05 ff08-ff09 ff0c ff11 ff1a-ff1b ff5e"
)
"""What FineWeb counts as punctuation besides ASCII's and the sentence terminals."""


def _characters_of(ranges: str) -> frozenset[str]:
    """Read ranges of code points: `"21 61d-61f"` gives four characters."""
    bounds = [tuple(int(end, 16) for end in item.split("-")) for item in ranges.split()]
    return frozenset(chr(point) for bound in bounds for point in range(bound[0], bound[-1] + 1))


TERMINAL = _characters_of(_SENTENCE_TERMINALS)
"""Characters that end a sentence."""

PUNCTUATION = TERMINAL | _characters_of(_OTHER_PUNCTUATION) | frozenset(string.punctuation)
"""Punctuation. A word that holds nothing else is a symbol, not a word (as in FineWeb's pipeline)."""

_ENDS = TERMINAL | {"…"}
_OPENING = "\"'(\u201c\u2018"
_CLOSING = "\"')]}\u201d\u2019\u00bb\u300d\u300f\uff09"
_ABBREVIATIONS = "mr mrs ms dr prof st vs etc no vol fig jr sr inc ltd co approx cf al"
_ABBREVIATED = frozenset(_ABBREVIATIONS.split())


def count_sentences(line: str) -> int:
    """Count the sentences of a line: one, and one more for each end of a sentence that words follow.

    Closing quotes and brackets belong to the mark before them. The period of an abbreviation or of initials ends none.
    """
    words = line.split()
    count = min(len(words), 1)
    for word in words[:-1]:
        word = word.rstrip(_CLOSING)
        if not word or word[-1] not in _ENDS:
            continue
        stem = word[:-1].lstrip(_OPENING).lower()
        is_initials = stem.isascii() and all(len(part) == 1 and part.isalpha() for part in stem.split("."))
        # Only a period can belong to an abbreviation: other marks always end a sentence.
        count += word[-1] != "." or (stem not in _ABBREVIATED and not is_initials)
    return count


SPACE, SYMBOL, ALPHABETIC, DIGIT, NOT_PUNCTUATION, JOINS_LETTERS, JOINS_DIGITS, RUNS = (
    1 << n for n in range(8)
)
"""Flags of a character, a byte together."""

_CLASSIFIED = 0x40000
"""Planes 0 to 3. A code point above (tags, private use) counts as a letter of a word, not as alphabetic."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: Fibonacci hashing


class Words:
    """The words of a text, symbols included.

    A word is a run of letters, marks and digits. An apostrophe, `_`, `.` and `@` between two of these belong to
    it (don't, snake_case, e.g, 3.14), as `,` and `:` do between two digits (1,000, 12:30). Every other symbol that
    is not white space is a word of its own; a run of `.`, `-`, `~` or `^` is one word (`...`). This is close to
    spaCy's English rules, which FineWeb's pipeline uses: `benchmarks/filters.py` counts how often verdicts agree.
    """

    def __init__(self, text: str):
        self.text = text
        if text.isascii():  # a byte a character, a quarter of the memory
            self._points = np.frombuffer(text.encode("ascii"), np.uint8)
            self._flags = _flags_by_code_point()[self._points]
        else:
            # "surrogatepass": a JSON escape can leave half of a surrogate pair.
            self._points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
            self._flags = _flags_by_code_point()[np.minimum(self._points, _CLASSIFIED)]
        points = self._points
        # SPACE, SYMBOL, or 0: a part of a word, which is a letter or a joining symbol.
        kinds = self._flags & (SPACE | SYMBOL)
        # A joining symbol becomes part of the word if both its neighbours are.
        before, middle, after = self._flags[:-2], self._flags[1:-1], self._flags[2:]
        letters = ((middle & JOINS_LETTERS) != 0) & ((kinds[:-2] | kinds[2:]) == 0)
        digits = ((middle & JOINS_DIGITS) != 0) & ((before & after & DIGIT) != 0)
        kinds[1:-1][letters | digits] = 0
        inside = kinds != SPACE
        # A character goes on the word before it if both are of one kind; a symbol, only in a run of its own.
        goes_on = (kinds[1:] == kinds[:-1]) & inside[1:]
        runs_on = (points[1:] == points[:-1]) & ((self._flags[1:] & RUNS) != 0)
        goes_on &= (kinds[1:] != SYMBOL) | runs_on
        starts, ends = inside.copy(), inside.copy()
        starts[1:] &= ~goes_on
        ends[:-1] &= ~goes_on
        self.starts, self.ends = np.flatnonzero(starts), np.flatnonzero(ends) + 1
        self.lengths = self.ends - self.starts
        """Characters of each word."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_letters(self) -> int:
        return int(np.count_nonzero(self._flags & ALPHABETIC))

    @property
    def texts(self) -> list[str]:
        return [self.text[start:end] for start, end in zip(self.starts, self.ends, strict=True)]

    @cached_property
    def is_alphabetic(self) -> np.ndarray:
        return self._have(ALPHABETIC)

    @cached_property
    def is_more_than_punctuation(self) -> np.ndarray:
        return self._have(NOT_PUNCTUATION)

    def _have(self, flag: int) -> np.ndarray:
        """Say of each word whether any of its characters has a flag: bool [words]."""
        return np.bitwise_or.reduceat(self._flags & flag, self.starts) != 0

    @cached_property
    def hashes(self) -> np.ndarray:
        """uint64 hash of each word. Equal words have equal hashes; up to 4,096 characters only they do."""
        return word_hashes(self._points, self.starts, _hashes_by_code_point())

    def count_distinct(self, wanted: tuple[str, ...]) -> int:
        return int(sum((self.hashes == wish).any() for wish in _hashes_of(wanted)))


@lru_cache
def _hashes_of(words: tuple[str, ...]) -> np.ndarray:
    views = map(Words, words)
    # 0: a word that the splitter divides never occurs.
    return np.array([view.hashes[0] if len(view) == 1 else 0 for view in views], np.uint64)


@cache
def _flags_by_code_point() -> np.ndarray:
    """Build the table of flags: uint8 [_CLASSIFIED + 1]; the last one is for every code point above."""
    flags = np.full(_CLASSIFIED + 1, NOT_PUNCTUATION, np.uint8)
    for point in range(_CLASSIFIED):
        character = chr(point)
        if character.isspace():
            flags[point] = SPACE
            continue
        category = unicodedata.category(character)
        # Control characters (Cc) that are no white space split words, as symbols do.
        kind = SYMBOL if category[0] in "PS" or category == "Cc" else 0
        kind |= ALPHABETIC if category[0] == "L" else 0
        kind |= DIGIT if category == "Nd" else 0
        kind |= JOINS_LETTERS if character in "'\u2019_.@" else 0
        kind |= JOINS_DIGITS if character in ",:" else 0
        kind |= RUNS if character in ".-~^" else 0
        flags[point] = kind | (0 if character in PUNCTUATION else NOT_PUNCTUATION)
    return flags


@cache
def _hashes_by_code_point() -> np.ndarray:
    """Build the table of random numbers for all characters, 0 for white space: uint64 [0x110000]."""
    table = random_words(NUM_CODE_POINTS, 17)
    table[:_CLASSIFIED][_flags_by_code_point()[:-1] == SPACE] = 0
    return table


class NgramsOfText(NamedTuple):
    """The n-grams of a text that occur more than once, overlapping ones included."""

    n: int
    positions: np.ndarray
    """Number of each one's first word, ascending."""
    keys: np.ndarray
    """Equal n-grams have equal keys."""


def repeated_ngrams(words: Words, largest: int) -> Iterator[NgramsOfText]:
    """Find the n-grams that repeat, for n = 2, 3, ... `largest`."""
    hashes = words.hashes
    # An n-gram can only repeat if its first n - 1 words do: each n looks only at the places that n - 1 left.
    positions, keys = np.arange(len(hashes)), hashes
    for n in range(2, largest + 1):
        # The last words of the text have fewer than n words from there on.
        inside = positions + n <= len(hashes)
        positions, keys = positions[inside], keys[inside]
        # The key of the n-gram that is one word shorter, and the next word: no sum over n words.
        keys = keys * _MULTIPLIER + hashes[positions + n - 1]
        keys ^= keys >> np.uint64(31)
        order = np.argsort(keys)  # equal keys become neighbours
        ordered = keys[order]
        pairs = ordered[1:] == ordered[:-1]
        again = np.zeros(len(keys), bool)
        again[order[1:][pairs]] = True
        again[order[:-1][pairs]] = True
        positions, keys = positions[again], keys[again]
        yield NgramsOfText(n, positions, keys)


def characters_of_most_frequent(words: Words, ngrams: NgramsOfText) -> int:
    """Count the characters (one space between words) of the most frequent n-gram, times its occurrences.

    Of equally frequent ones the first counts; if none repeats, that is the text's first n words.
    """
    first, count = 0, 1
    if len(words) < ngrams.n:
        return 0
    if len(ngrams.keys):
        _, where, counts = np.unique(ngrams.keys, return_index=True, return_counts=True)
        count = counts.max()
        # `where` holds first occurrences, so the least of them is the earliest n-gram.
        first = ngrams.positions[where[counts == count].min()]
    return int((words.lengths[first : first + ngrams.n].sum() + ngrams.n - 1) * count)


def characters_in_duplicates(words: Words, ngrams: NgramsOfText) -> int:
    """Count the characters of words inside n-grams that occurred before in the text, none of them twice.

    Goes from left to right (Gopher, table A1). An n-gram that was seen before is counted, and all its words are
    skipped. Any other n-gram is remembered, and the next one begins one word later.
    """
    if not len(ngrams.keys):
        return 0
    # Characters of words before each word: spaces between words do not count here.
    ends = np.concatenate([[0], np.cumsum(words.lengths)])
    characters = (ends[ngrams.positions + ngrams.n] - ends[ngrams.positions]).tolist()
    seen, total, free = set(), 0, 0
    for position, key, size in zip(ngrams.positions.tolist(), ngrams.keys.tolist(), characters, strict=True):
        if position < free:
            continue
        if key in seen:
            total += size
            free = position + ngrams.n
        else:
            seen.add(key)
    return total


class TextView:
    """A text with its words, lines and paragraphs, each found once, when a rule first asks."""

    # For the rules, which do not import this module.
    terminal = TERMINAL
    count_sentences = staticmethod(count_sentences)

    def __init__(self, text: str):
        self.text = text

    @cached_property
    def words(self) -> Words:
        return Words(self.text)

    @cached_property
    def lines(self) -> list[str]:
        """Stretches between newlines, empty ones left out; a newline at either end adds one empty block."""
        # As datatrove's split by `\n+` gives them: its repetition shares count the empty block.
        beyond = self.text.startswith("\n") + self.text.endswith("\n")
        return [line for line in self.text.split("\n") if line] + [""] * beyond

    @cached_property
    def paragraphs(self) -> list[str]:
        # Of three or more newlines in a row, the ones left over begin the next part.
        parts = [part.lstrip("\n") for part in self.text.strip().split("\n\n")]
        # At least one, because the rules divide by their number.
        return [part for part in parts if part] or [""]

    @staticmethod
    def repeated(parts: list[str]) -> tuple[int, int]:
        """Count the `parts` that occurred before, and their characters."""
        if len(set(parts)) == len(parts):  # most texts: spares the loop
            return 0, 0
        seen, again = set(), []
        for part in parts:
            again += [len(part)] if part in seen else []
            seen.add(part)
        return len(again), sum(again)
