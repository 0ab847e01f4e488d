"""Texts to hashes of their word or character n-grams, without a Python object per word.

Deduplication and decontamination normalise in the same way: Unicode NFKC and lower case. A word is a run of letters,
marks and digits. Everything else (punctuation, symbols, underscores, white space) separates words and is not hashed.
Digits stay, because two tables of different numbers are different documents. In scripts written without spaces (Han,
Kana, Thai, Lao, Khmer, Myanmar) every character is a word. For n-grams of characters each run of separators between
words is one space.

A document of fewer than n words has one n-gram of all its words, so it equals another document only if all their words
are equal. A document without words has no n-gram and equals no other document.

Hashes are multilinear (Dietzfelbinger, Carter and Wegman: sum of character x random multiplier of its position
mod 2**64; the same over the words of an n-gram), then mixed. Two given n-grams that differ collide with
probability about 2**-58: of 1e12 n-grams of a corpus against 1e6 of evaluation sets, three or four meet by chance.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

BATCH_CHARACTERS = 1 << 18
"""Characters handled at once: the arrays of a batch stay in the processor's cache."""

MAX_NGRAM = 1 << 10
"""Words or characters in the longest n-gram."""

# splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014). The tables of random
# numbers below are its stream, not a library's generator, so that hashes stay the same across versions.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(values: np.ndarray) -> np.ndarray:
    """Apply the splitmix64 finaliser, a bijection of 64-bit words, in place to uint64 [n]; returns it."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        values ^= values >> np.uint64(shift)
        values *= factor
    values ^= values >> np.uint64(31)
    return values


def random_words(count: int, seed: int) -> np.ndarray:
    """Return the first words of the splitmix64 stream whose state starts at mix(`seed` + 1): uint64 [count]."""
    state = mix(np.array([seed + 1], np.uint64))
    steps = np.arange(1, count + 1, dtype=np.uint64)
    return mix(state + steps * _GOLDEN)


_POSITIONS = 1 << 12
"""Random multipliers for the characters of a word; a longer word uses them again from the first."""

_POSITION_MULTIPLIERS = random_words(_POSITIONS, 12)
_NGRAM_MULTIPLIERS = random_words(MAX_NGRAM, 13)
_SPACE = random_words(1, 14)[0]


class TextUnits(NamedTuple):
    """The words (or characters) of a batch of texts."""

    hashes: np.ndarray
    """uint64 [units]."""
    first: np.ndarray
    """int64 [texts + 1]: the units of text t are first[t]:first[t + 1]."""
    starts: np.ndarray
    """int64 [units]: the position of each in the normalised texts, a newline behind each of them."""
    texts: str
    """The normalised texts, joined so."""


class Ngrams(NamedTuple):
    """The n-gram hashes of a batch of texts, with repetitions, in their order."""

    hashes: np.ndarray
    """uint64 [n-grams]."""
    first: np.ndarray
    """int64 [texts + 1]: the n-grams of text t are first[t]:first[t + 1]."""


def batches_of(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Cut `texts` into batches of `BATCH_CHARACTERS` or so; a longer text comes alone."""
    first, size = 0, 0
    for number, text in enumerate(texts):
        if size and size + len(text) > BATCH_CHARACTERS:
            yield texts[first:number]
            first, size = number, 0
        size += len(text)
    if first < len(texts):
        yield texts[first:]


def units_of(texts: Sequence[str], unit: str = "words") -> TextUnits:
    """Hash the words or characters of `texts`, or its words as they are written.

    unit: "words", "characters" or "written": each word as it is, with all that is behind it up to the next one, or to
    the text's end and a newline. So n-grams of these are equal if the texts are, but for what precedes the first word;
    positions are those in the texts.
    """
    if unit != "written":
        # A table lowers the case later.
        texts = [text if text.isascii() else unicodedata.normalize("NFKC", text) for text in texts]
    joined = "".join(f"{text}\n" for text in texts)
    if joined.isascii():
        codes = np.frombuffer(joined.encode("ascii"), np.uint8)
    else:
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
    ends = np.cumsum([len(text) + 1 for text in texts], dtype=np.int64)
    kind = _kinds()[codes]
    begins = kind != _SEPARATOR
    begins[1:] &= (kind[1:] == _WHOLE) | (kind[:-1] != kind[1:])
    starts = np.flatnonzero(begins)
    if unit == "words":
        hashes = word_hashes(codes, starts, _character_hashes())
    elif unit == "characters":
        # The words' characters, with one space before each word but a text's first. A word's space is the separator
        # before it; words without one between them have none.
        kept = kind != _SEPARATOR
        spaces = starts[(starts > 0) & ~kept[starts - 1]] - 1
        kept[spaces] = True
        # The first word of a text has no space: what is before it may belong to the text before.
        first_words = np.searchsorted(starts, ends[:-1])
        before_texts = (
            starts[np.append(0, first_words[first_words < len(starts)])] - 1 if len(starts) else starts
        )
        kept[before_texts[before_texts >= 0]] = False
        starts = np.flatnonzero(kept)
        hashes = _character_hashes()[codes[starts]]
        hashes[hashes == 0] = _SPACE
        hashes = mix(hashes)
    else:
        # What precedes a text's first word is a segment of its own, which is no unit.
        segments = np.union1d(starts, np.append(0, ends[:-1]))
        segments = segments[segments < len(codes)]
        hashes = word_hashes(codes, segments, _exact_hashes())[np.searchsorted(segments, starts)]
    first = np.concatenate([[0], np.searchsorted(starts, ends)])
    return TextUnits(hashes, first, starts, joined)


def word_hashes(codes: np.ndarray, starts: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Hash the words that begin at `starts`, each up to the next one: uint64 [words].

    table: uint64 [0x110000], of their characters; 0 for those that count for nothing.
    """
    # In stretches of whole words, so that the memory does not grow with the text.
    hashes = np.zeros(len(starts), np.uint64)
    first = 0
    while first < len(starts):
        end = np.searchsorted(starts, starts[first] + BATCH_CHARACTERS)
        stop = starts[end] if end < len(starts) else len(codes)
        stretch, begins = codes[starts[first] : stop], starts[first:end] - starts[first]
        position = np.arange(len(stretch)) - np.repeat(begins, np.diff(begins, append=len(stretch)))
        position &= _POSITIONS - 1
        # Hash x multiplier of the position, summed over each word's characters; separators add zero.
        products = table[stretch]
        products *= _POSITION_MULTIPLIERS[position]
        hashes[first:end] = np.add.reduceat(products, begins)
        first = end
    return mix(hashes)


def ngrams_of(units: TextUnits, n: int) -> Ngrams:
    """Hash all n-grams of each text; a text of fewer than `n` units has one, of all its units."""
    counts = np.diff(units.first)
    # n - 1 zeros after each text: a window that reaches past a short text sums over its units alone.
    padded = np.zeros(len(units.hashes) + len(counts) * (n - 1), np.uint64)
    shift = np.arange(len(counts)) * (n - 1)
    places = np.arange(len(units.hashes)) + np.repeat(shift, counts)
    padded[places] = units.hashes
    per_text = np.where(counts > 0, np.maximum(counts - n + 1, 1), 0)
    first = np.concatenate([[0], np.cumsum(per_text)])
    begins = np.arange(first[-1]) + np.repeat(units.first[:-1] + shift - first[:-1], per_text)
    # Of the n units from each position on.
    sums = padded * _NGRAM_MULTIPLIERS[0]
    for offset in range(1, min(n, len(padded))):
        sums[:-offset] += padded[offset:] * _NGRAM_MULTIPLIERS[offset]
    return Ngrams(mix(sums)[begins], first)


_SEPARATOR, _PART, _WHOLE = 0, 1, 2
"""Kinds of characters: between words, in a word (letter, mark, digit), or in a script written without spaces."""

_WITHOUT_SPACES = (
    (0x0E00, 0x0F00),  # Thai, Lao
    (0x1000, 0x10A0),  # Myanmar
    (0x1780, 0x1800),  # Khmer
    (0x3040, 0x3100),  # Hiragana, Katakana
    (0x31F0, 0x3200),
    (0x3400, 0x4DC0),  # Han
    (0x4E00, 0xA000),
    (0x20000, 0x40000),
)

_LISTED = 0x20000
"""The category of code points below is looked up. Above, only the Han planes hold words."""

NUM_CODE_POINTS = 0x110000
_CHARACTER_SEED = 11


@cache
def _kinds() -> np.ndarray:
    """Build the table of kinds: uint8 [0x110000], _SEPARATOR, _PART or _WHOLE for each code point."""
    table = np.zeros(NUM_CODE_POINTS, np.uint8)
    table[:_LISTED] = [unicodedata.category(chr(code))[0] in "LMN" for code in range(_LISTED)]
    table[_LISTED : _WITHOUT_SPACES[-1][1]] = _PART
    for first, end in _WITHOUT_SPACES:
        table[first:end] *= _WHOLE
    return table


@cache
def _exact_hashes() -> np.ndarray:
    """Build the table of random numbers for all characters: uint64 [0x110000]."""
    return random_words(NUM_CODE_POINTS, 16)


@cache
def _character_hashes() -> np.ndarray:
    """Build the table of hashes: uint64 [0x110000], a random number for each lower-case character, 0 for separators.

    Only those that lower to one character are lowered (all but U+0130, which NFKC leaves alone).
    """
    lowered = np.arange(NUM_CODE_POINTS, dtype=np.uint32)
    for code in range(_LISTED):
        lower = chr(code).lower()
        lowered[code] = ord(lower) if len(lower) == 1 else code
    hashes = random_words(NUM_CODE_POINTS, _CHARACTER_SEED)[lowered]
    hashes[_kinds() == _SEPARATOR] = 0
    return hashes
