"""The published filter rules: datatrove's verdict on every text, and the splitting behind them."""

import random

import numpy as np
import pytest
from datatrove.data import Document
from datatrove.pipeline import filters
from datatrove.utils.text import PUNCTUATION_SET, TERMINAL_PUNCTUATION

from pretraining.data.quality.chain import RULES
from pretraining.data.quality.rule import Changed, Rejection
from pretraining.data.quality.text import (
    PUNCTUATION,
    TERMINAL,
    TextView,
    Words,
    characters_in_duplicates,
    count_sentences,
    repeated_ngrams,
)
from tests.gear.quality_texts import PROSE, chain_of, many_texts, verdict_of
from tests.gear.reference_splitter import ReferenceSplitter


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return many_texts()


PUBLISHED = {
    "gopher_quality": (filters.GopherQualityFilter, 4),
    "gopher_repetition": (filters.GopherRepetitionFilter, 6),
    "c4": (filters.C4QualityFilter, 2),
    "fineweb": (filters.FineWebQualityFilter, 3),
}


@pytest.mark.parametrize("rule", PUBLISHED)
def test_every_verdict_is_datatroves(rule, texts):
    """The published rules: same verdict, same cause and same remaining text as datatrove's, text by text."""
    reference_class, least_causes = PUBLISHED[rule]
    reference, causes, kept = reference_class(language=ReferenceSplitter()), {}, 0
    for text in texts:
        if not text.strip():
            continue  # datatrove divides by zero there
        document = Document(text=text, id="")
        answer = reference.filter(document)
        verdict = verdict_of({"rule": rule}, text)
        rejected = isinstance(verdict, Rejection)
        assert rejected == (answer is not True), (text[:200], verdict, answer)
        if rejected:
            assert causes.setdefault(answer[1], verdict.cause) == verdict.cause, text[:200]
        else:
            kept += 1
            assert document.text == (verdict.text if verdict else text)
    assert len(set(causes.values())) == len(causes) >= least_causes
    assert kept > 20


def test_ngrams_are_those_of_a_plain_count():
    """Repetition: hashed n-grams on narrowing positions find what comparing all words finds."""
    draw = random.Random(3)
    for size in (3, 30, 400):
        words = [draw.choice(["ab", "a", "b", "ba", "cé", "x" * 5000]) for _ in range(size)]
        found = Words(" ".join(words))
        for ngrams in repeated_ngrams(found, 6):
            grams = [tuple(words[i : i + ngrams.n]) for i in range(size - ngrams.n + 1)]
            assert ngrams.positions.tolist() == [i for i, g in enumerate(grams) if grams.count(g) > 1]
            assert characters_in_duplicates(found, ngrams) == plain_duplicates(words, ngrams.n)


def plain_duplicates(words: list[str], n: int) -> int:
    seen, total, at = set(), 0, 0
    while at <= len(words) - n:
        gram = tuple(words[at : at + n])
        if gram in seen:
            total += sum(map(len, gram))
            at += n
        else:
            seen.add(gram)
            at += 1
    return total


def test_words_and_sentences():
    """The splitting that every rule shares, spelled out."""
    text = "Don't stop, e.g. at 1,000.5 or 12:30... snake_case (a-b) \U0001f600\U0001f600 ==!"
    words = "Don't stop , e.g . at 1,000.5 or 12:30 ... snake_case ( a - b ) \U0001f600 \U0001f600 = = !"
    assert Words(text).texts == words.split()
    lines = ("", "One", "Mr. X met Dr. Young. He left.", '"So?" Yes! No')
    assert list(map(count_sentences, lines)) == [0, 1, 2, 3]


def test_every_character_but_white_space_is_in_one_word(texts):
    """No text is lost or counted twice by the word splitter, in any script."""
    for text in texts:
        assert "".join(Words(text).texts) == "".join(text.split())


def test_punctuation_is_the_published_set():
    """Gopher's symbols and FineWeb's sentence ends are FineWeb's own sets."""
    assert PUNCTUATION == PUNCTUATION_SET and TERMINAL == TERMINAL_PUNCTUATION


def test_words_have_no_limit_of_length():
    """Two long words that differ anywhere in their first 4,096 characters differ; equal ones are equal."""
    a, b = "x" * 5000, "x" * 3000 + "y" + "x" * 1999
    hashes = Words(f"{a} {b} {a}").hashes
    assert hashes[0] == hashes[2] != hashes[1]
    assert hashes.dtype == np.uint64 and isinstance(verdict_of({"rule": "c4"}, PROSE + "\nx"), Changed)


BREACHES = {
    "hashes": ({"rule": "gopher_quality"}, PROSE + " #" * 30, "hashes", "at most 0.1"),
    "stop words": ({"rule": "gopher_quality"}, "apple pear plum melon " * 20, "stop_words", "at least 2"),
    "own limit": ({"rule": "gopher_quality", "min_words": 90}, PROSE, "too_few_words", "at least 90"),
    "length": ({"rule": "length", "max_characters": 99}, PROSE, "too_many_characters", "at most 99"),
    "length in words": ({"rule": "length", "min_words": 3}, "two -- words !", "too_few_words", "at least 3"),
    "list": ({"rule": "fineweb"}, "one.\ntwo.\n" + "x" * 40 + ".", "newlines_per_word", "at most 0.3"),
    "ngram": (
        {"rule": "gopher_repetition", "max_top_ngrams": {"2": 0.01}},
        PROSE,
        "top_2_gram",
        "at most 0.01",
    ),
    "code": ({"rule": "c4"}, PROSE + "\nif (a) { return to the start now. }.", "curly_bracket", "none"),
}


@pytest.mark.parametrize("spec, text, cause, wanted", BREACHES.values(), ids=BREACHES)
def test_a_breach_is_named_with_its_limit(spec, text, cause, wanted):
    """Each rejection tells the cause and the limit that the recipe set."""
    if spec["rule"] == "fineweb":
        spec = {**spec, "max_short_lines": None}
    verdict = verdict_of(spec, text)
    assert (verdict.cause, verdict.wanted) == (cause, wanted)
    assert verdict_of(spec, PROSE) is None or text == PROSE


def test_null_turns_a_limit_off(texts):
    """A parameter that may be null is no limit then: with all of them null, every text with a word stays."""
    for name in ("gopher_quality", "fineweb"):
        properties = RULES[name].schema()["properties"]
        optional = [key for key, value in properties.items() if "null" in value.get("type", ())]
        rule = chain_of({"rule": name, **dict.fromkeys(optional)}).rules[0]
        assert len(optional) > 3
        assert all(rule.judge(TextView(text)) is None for text in texts if text.strip())
