"""A text as the rules see it: its lines, paragraphs and sentences. Words need numpy and are in `words`."""

from functools import cached_property
from typing import TYPE_CHECKING

from pretraining.data.quality.punctuation import TERMINAL

if TYPE_CHECKING:
    from pretraining.data.quality.words import Words


class TextView:
    """A text with its words, lines and paragraphs, each found once, when a rule first asks."""

    def __init__(self, text: str):
        self.text = text

    @cached_property
    def words(self) -> "Words":
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
    # Only a period can belong to an abbreviation: other marks always end a sentence.
    if word[-1] != ".":
        return True
    stem = word[:-1].lstrip(_OPENING).lower()
    is_initials = stem.isascii() and all(len(part) == 1 and part.isalpha() for part in stem.split("."))
    return stem not in _ABBREVIATED and not is_initials
