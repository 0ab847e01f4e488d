"""A text as the rules see it: its lines, paragraphs and sentences. Words need numpy and are in `words`."""

import string
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretraining.data.quality.words import Words


class TextView:
    """A text with its words, lines and paragraphs, each found once, when a rule first asks."""

    def __init__(self, text: str):
        self.text = text

    @cached_property
    def words(self) -> "Words":
        """The words of the text."""
        # Imported here, so that a check of a recipe does not wait for numpy.
        from pretraining.data.quality.words import Words

        return Words(self.text)

    @cached_property
    def lines(self) -> list[str]:
        """Stretches between newlines, empty ones left out; a newline at either end adds one empty block."""
        # As datatrove's split by `\n+` gives them: its repetition shares count the empty block.
        beyond = self.text.startswith("\n") + self.text.endswith("\n")
        return [line for line in self.text.split("\n") if line] + [""] * beyond

    @cached_property
    def paragraphs(self) -> list[str]:
        """Stretches between empty lines."""
        # Of three or more newlines in a row, the ones left over begin the next part.
        parts = [part.lstrip("\n") for part in self.text.strip().split("\n\n")]
        # At least one, because the rules divide by their number.
        return [part for part in parts if part] or [""]


def repeated(parts: list[str]) -> tuple[int, int]:
    """Count the `parts` that occurred before, and their characters."""
    if len(set(parts)) == len(parts):  # most texts: spares the loop
        return 0, 0
    seen, count, characters = set(), 0, 0
    for part in parts:
        if part in seen:
            count += 1
            characters += len(part)
        else:
            seen.add(part)
    return count, characters


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

    A terminal mark ends a sentence; closing quotes and brackets after it belong to it. The period of an
    abbreviation (Mr., etc.) or of initials (U.S., e.g.) ends none.
    """
    words = line.split()
    return sum(map(_ends_sentence, words[:-1])) + 1 if words else 0


def _ends_sentence(word: str) -> bool:
    word = word.rstrip(_CLOSING)
    if not word or word[-1] not in _ENDS:
        return False
    stem = word[:-1].lstrip(_OPENING).lower()
    # Only a period can belong to an abbreviation: other marks always end a sentence.
    return word[-1] != "." or not (stem in _ABBREVIATED or _is_initials(stem))


def _is_initials(stem: str) -> bool:
    return stem.isascii() and all(len(part) == 1 and part.isalpha() for part in stem.split("."))
