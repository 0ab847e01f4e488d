"""The published rules that measure a text's form: length, Gopher's quality and repetition, C4's and FineWeb's.

A new rule is entered in RULES of chain.py.
"""

import re
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from pretraining.data.quality.rule import Changed, Rejection, Rule, above, below
from pretraining.recipe.section import key

if TYPE_CHECKING:
    from pretraining.data.quality.text import TextView


class Length(Rule):
    """Number of words (symbols alone are none) and of characters. At least one limit must be given."""

    name: ClassVar[str] = "length"
    together: ClassVar[dict] = {"some_of": ["min_words", "max_words", "min_characters", "max_characters"]}
    min_words: int | None = key(default=None, minimum=1)
    """Fewest words; null: no limit."""
    max_words: int | None = key(default=None, minimum=1)
    """Most words; null: no limit."""
    min_characters: int | None = key(default=None, minimum=1)
    """Fewest characters; null: no limit."""
    max_characters: int | None = key(default=None, minimum=1)
    """Most characters; null: no limit."""

    def judge(self, view: "TextView") -> Rejection | None:
        # Characters first: most texts then need no words.
        characters = len(view.text)
        found = below("too_few_characters", characters, self.min_characters)
        found = found or above("too_many_characters", characters, self.max_characters)
        if found or (self.min_words is None and self.max_words is None):
            return found
        words = int(view.words.is_more_than_punctuation.sum())
        return below("too_few_words", words, self.min_words) or above("too_many_words", words, self.max_words)


class Alphabetic(Rule):
    """Share of alphabetic characters, of any script: few are in tables of numbers, dumps and binary files.
    The least share is that of StarCoder's alpha filter for code (Li et al. 2023, arXiv:2305.06161, section 3.1).
    Gopher's rule for web text, 80 % of words with a letter, is min_alphabetic_words of gopher_quality.

    StarCoder's authors warn of languages of code that need few letters. All characters count below, white space too.
    """

    name: ClassVar[str] = "alphabetic"
    together: ClassVar[dict] = {"some_of": ["min_share", "max_share"]}
    min_share: float | None = key(default=0.25, minimum=0, maximum=1)
    """Least share of the characters; null: no limit."""
    max_share: float | None = key(default=None, minimum=0, maximum=1)
    """Greatest share of the characters; null: no limit."""

    def judge(self, view: "TextView") -> Rejection | None:
        share = view.words.num_letters / max(1, len(view.text))
        found = below("too_few_letters", share, self.min_share)
        return found or above("too_many_letters", share, self.max_share)


_ELLIPSES = ("...", "…")
_BULLETS = ("•", "-")


class GopherQuality(Rule):
    """Gopher's quality rules (Rae et al. 2021, arXiv:2112.11446, A1.1), in English by their stop words.

    Symbols count as words (see `Words`) but for the number and the mean length of the words, as in FineWeb.
    """

    name: ClassVar[str] = "gopher_quality"
    min_words: int | None = key(default=50, minimum=0)
    """Fewest words; null: no limit."""
    max_words: int | None = key(default=100_000, minimum=1)
    """Most words; null: no limit."""
    min_mean_word_length: float | None = key(default=3, minimum=0)
    """Characters; null: no limit."""
    max_mean_word_length: float | None = key(default=10, minimum=0)
    """Characters; null: no limit."""
    max_symbols_per_word: float | None = key(default=0.1, minimum=0)
    """For hashes and for ellipses; null: no limit."""
    max_bullet_lines: float | None = key(default=0.9, minimum=0, maximum=1)
    """Share of lines that start with a bullet; null: no limit."""
    max_ellipsis_lines: float | None = key(default=0.3, minimum=0, maximum=1)
    """Share of lines that end with an ellipsis; null: no limit."""
    min_alphabetic_words: float | None = key(default=0.8, minimum=0, maximum=1)
    """Share of words with an alphabetic character; null: no limit."""
    min_stop_words: int | None = key(default=2, minimum=0)
    """How many of stop_words must occur; null: no limit."""
    stop_words: list[str] = key(default=["the", "be", "to", "of", "and", "that", "have", "with"])
    """Words of ordinary text, lower case."""

    def judge(self, view: "TextView") -> Rejection | None:
        """Reject by the first of the paper's rules that the text breaks."""
        # The shares below divide by the number of words.
        if not len(view.words):
            return Rejection("too_few_words", 0, f"at least {self.min_words or 1}")
        # Symbols alone are not words here, as in FineWeb's pipeline.
        lengths = view.words.lengths[view.words.is_more_than_punctuation]
        mean_length = float(lengths.mean()) if len(lengths) else 0.0
        hashes = view.text.count("#") / len(view.words)
        ellipses = sum(map(view.text.count, _ELLIPSES)) / len(view.words)
        bullets, ending, num_lines = 0, 0, 1
        # Most texts hold neither: one search is cheaper than a look at every line.
        if any(symbol in view.text for symbol in _ELLIPSES + _BULLETS):
            lines = view.text.splitlines()
            num_lines = len(lines)
            bullets = sum(line.lstrip().startswith(_BULLETS) for line in lines)
            ending = sum(line.rstrip().endswith(_ELLIPSES) for line in lines)
        return (
            below("too_few_words", len(lengths), self.min_words)
            or above("too_many_words", len(lengths), self.max_words)
            or below("words_too_short", mean_length, self.min_mean_word_length)
            or above("words_too_long", mean_length, self.max_mean_word_length)
            or above("hashes", hashes, self.max_symbols_per_word)
            or above("ellipses", ellipses, self.max_symbols_per_word)
            or above("bullet_lines", bullets / num_lines, self.max_bullet_lines)
            or above("ellipsis_lines", ending / num_lines, self.max_ellipsis_lines)
            or below("alphabetic_words", float(view.words.is_alphabetic.mean()), self.min_alphabetic_words)
            or below("stop_words", view.words.count_distinct(tuple(self.stop_words)), self.min_stop_words)
        )


_NGRAM_SHARES = {
    "propertyNames": {"pattern": "^([2-9]|[1-9][0-9])$", "description": "write a size of n-grams, 2 to 99"},
    "additionalProperties": {"type": "number", "minimum": 0, "maximum": 1},
}


class GopherRepetition(Rule):
    """Gopher's repetition rules (Rae et al. 2021, arXiv:2112.11446, table A1).

    Shares of characters are of the whole text, its white space included.
    """

    name: ClassVar[str] = "gopher_repetition"
    max_duplicate_paragraphs: float | None = key(default=0.3, minimum=0, maximum=1)
    """Share of paragraphs that stood before; null: no limit."""
    max_duplicate_paragraph_characters: float | None = key(default=0.2, minimum=0, maximum=1)
    """Share of characters in them; null: no limit."""
    max_duplicate_lines: float | None = key(default=0.3, minimum=0, maximum=1)
    """Share of lines that stood before; null: no limit."""
    max_duplicate_line_characters: float | None = key(default=0.2, minimum=0, maximum=1)
    """Share of characters in them; null: no limit."""
    max_top_ngrams: dict = key(default={"2": 0.20, "3": 0.18, "4": 0.16}, **_NGRAM_SHARES)
    """n -> share of characters in the most frequent n-gram."""
    max_duplicate_ngrams: dict = key(
        default={"5": 0.15, "6": 0.14, "7": 0.13, "8": 0.12, "9": 0.11, "10": 0.10}, **_NGRAM_SHARES
    )
    """n -> share of characters in n-grams that stood before."""

    def judge(self, view: "TextView") -> Rejection | None:
        """Reject by the first row of the table that the text breaks."""
        if not view.text:
            return Rejection("empty", 0, "at least 1")
        # Paragraphs before lines, as in the table of the paper.
        for kind, parts in (("paragraph", view.paragraphs), ("line", view.lines)):
            count, characters = view.repeated(parts)
            shares = {f"{kind}s": count / len(parts), f"{kind}_characters": characters / len(view.text)}
            for name, share in shares.items():
                if broken := above(f"duplicate_{name}", share, getattr(self, f"max_duplicate_{name}")):
                    return broken
        # Imported here, so that a check of a recipe does not wait for numpy.
        from pretraining.data.quality import text

        top = ("top", self.max_top_ngrams, text.characters_of_most_frequent)
        measures = (top, ("duplicate", self.max_duplicate_ngrams, text.characters_in_duplicates))
        largest = max(map(int, [*self.max_top_ngrams, *self.max_duplicate_ngrams]), default=0)
        # Once for all sizes: each n looks only where the n-gram before it repeats.
        for ngrams in text.repeated_ngrams(view.words, largest):
            for kind, limits, characters_of in measures:
                share = limits.get(str(ngrams.n))
                if share is not None:
                    measured = characters_of(view.words, ngrams) / len(view.text)
                    if broken := above(f"{kind}_{ngrams.n}_gram", measured, share):
                        return broken
        return None


_SENTENCE_ENDS = (".", "?", "!", '"', "'")
_POLICY_PHRASES = ("terms of use", "privacy policy", "cookie policy")
_POLICY_PHRASES += ("uses cookies", "use of cookies", "use cookies")
_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")


class C4(Rule):
    """C4's rules (Raffel et al. 2020, arXiv:1910.10683, section 2.2, and its code). Takes lines out of texts.

    The list of bad words that C4 applied is not part of it: give your own to the rule `blocklist`.
    """

    name: ClassVar[str] = "c4"
    only_lines_with_terminal: bool = key(default=True)
    """Take out lines that do not end a sentence."""
    min_words_per_line: int | None = key(default=3, minimum=0)
    """Take out lines with fewer; null: none."""
    max_word_characters: int | None = key(default=1000, minimum=1)
    """Take out lines with a longer word; null: none."""
    remove_citations: bool = key(default=True)
    """Take out [1], [edit] and [citation needed]."""
    remove_javascript_lines: bool = key(default=True)
    """Take out lines that say javascript."""
    remove_policy_lines: bool = key(default=True)
    """Take out lines about cookies and terms of use."""
    reject_lorem_ipsum: bool = key(default=True)
    """Reject texts with lorem ipsum."""
    reject_curly_brackets: bool = key(default=True)
    """Reject texts with a curly bracket: they are code."""
    min_sentences: int | None = key(default=5, minimum=0)
    """Fewest sentences left in a text; null: no limit."""

    def judge(self, view: "TextView") -> Rejection | Changed | None:
        """Reject the text, or keep the lines that pass, stripped and joined by newlines."""
        kept, gone = [], Counter()
        for line in view.text.splitlines():
            line, cause = self._line(line.strip())
            if cause in ("lorem_ipsum", "curly_bracket"):
                return Rejection(cause, line[:40], "none")
            if cause:
                gone[cause] += 1
            else:
                kept.append(line)
        # Rules on the whole text come last, as in C4's code: they see the lines that are left.
        if self.min_sentences:
            count = 0
            for line in kept:
                count += view.count_sentences(line)
                # Enough are found after a few lines of most texts.
                if count >= self.min_sentences:
                    break
            else:
                return below("too_few_sentences", count, self.min_sentences)
        text = "\n".join(kept).strip()
        return None if text == view.text else Changed(text, dict(gone))

    def _line(self, line: str) -> tuple[str, str | None]:
        """Return the line without citations, and why it (or the whole text) is left out."""
        # Split before citations are removed, as in datatrove 0.10.1's C4 filter.
        words = line.split()
        most = self.max_word_characters
        # A shorter line cannot hold such a word: the length spares most lines the search.
        if most is not None and len(line) > most and max(map(len, words)) > most:
            return line, "long_word"
        if self.remove_citations and "[" in line:
            line = _CITATION.sub("", line)
        if self.only_lines_with_terminal and (not line.endswith(_SENTENCE_ENDS) or line.endswith("...")):
            return line, "no_terminal"
        if self.min_words_per_line and len(words) < self.min_words_per_line:
            return line, "few_words"
        lowered = line.lower()
        if self.reject_lorem_ipsum and "lorem ipsum" in lowered:
            return line, "lorem_ipsum"
        if self.remove_javascript_lines and "javascript" in lowered:
            return line, "javascript"
        if self.reject_curly_brackets and "{" in line:
            return line, "curly_bracket"
        if self.remove_policy_lines and any(phrase in lowered for phrase in _POLICY_PHRASES):
            return line, "policy"
        return line, None


class FineWeb(Rule):
    """FineWeb's own rules (Penedo et al. 2024, arXiv:2406.17557, section 3.6 and its pipeline's list rule)."""

    name: ClassVar[str] = "fineweb"
    min_lines_with_terminal: float | None = key(default=0.12, minimum=0, maximum=1)
    """Share of lines that end a sentence; null: no limit."""
    max_short_lines: float | None = key(default=0.67, minimum=0, maximum=1)
    """Share of short lines; null: no limit."""
    short_line_characters: int = key(default=30, minimum=0)
    """Characters of the longest short line."""
    max_duplicate_line_characters: float | None = key(default=0.01, minimum=0, maximum=1)
    """Share of characters in repeated lines; null: no limit."""
    max_newlines_per_word: float | None = key(default=0.3, minimum=0)
    """Lists have many; null: no limit."""

    def judge(self, view: "TextView") -> Rejection | None:
        """Reject by the first of the four rules that the text breaks; empty lines do not count."""
        lines = [line for line in view.text.split("\n") if line and not line.isspace()]
        if not lines:
            return Rejection("empty", 0, "at least 1")
        terminal = sum(line[-1] in view.terminal for line in lines) / len(lines)
        short = sum(len(line) <= self.short_line_characters for line in lines) / len(lines)
        newlines = view.text.count("\n")
        # Both divisors are positive: a line that is not blank holds a character and a word.
        duplicate = view.repeated(lines)[1] / (len(view.text) - newlines)
        return (
            below("lines_with_terminal", terminal, self.min_lines_with_terminal)
            or above("short_lines", short, self.max_short_lines)
            or above("duplicate_line_characters", duplicate, self.max_duplicate_line_characters)
            or above("newlines_per_word", newlines / len(view.words), self.max_newlines_per_word)
        )
