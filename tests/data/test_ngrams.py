"""N-gram hashes stand for the n-grams of the stated normalisation, and for nothing else."""

import random
import re
import unicodedata

import numpy as np
import pytest

from pretraining.data.dedup.signatures import BATCH_CHARACTERS
from tests.gear.similar_texts import ngram_sets


def plain_words(text: str) -> list[str]:
    """The stated normalisation, written a second time: character by character."""
    text = unicodedata.normalize("NFKC", text)
    kept = "".join(c.lower() if unicodedata.category(c)[0] in "LMN" else " " for c in text)
    return re.sub(r"([\u0e00-\u0eff\u3040-\u30ff\u4e00-\u9fff])", r" \1 ", kept).split()


def plain_characters(text: str) -> str:
    """Words with one space between; letters of a script without spaces stand beside their neighbours."""
    text = unicodedata.normalize("NFKC", text)
    kept = "".join(c.lower() if unicodedata.category(c)[0] in "LMN" else " " for c in text)
    return " ".join(kept.split())


@pytest.mark.parametrize("unit", ["words", "characters"])
@pytest.mark.parametrize("n", [1, 5, 13])
def test_ngrams_are_those_of_the_stated_normalisation(unit, n):
    """Two texts share hashes exactly where they share n-grams, counted by plain Python sets."""
    chance = random.Random(n)
    texts = [
        "",
        "a",
        "!?",
        "Hello, World! foo_bar 12",
        "日本語 text です。と",
        "ﬁne Ünïcode ① x",
        " a b ",
        "a b c d e f g",
    ]
    texts += ["".join(chance.choices("aB ,.é語3_\n", k=chance.randrange(60))) for _ in range(200)]
    sets = ngram_sets(texts, n, unit)
    plain = [plain_words(text) if unit == "words" else plain_characters(text) for text in texts]
    expected = [
        {tuple(units[i : i + n]) for i in range(max(len(units) - n + 1, 1))} if units else set()
        for units in plain
    ]
    assert [len(found) for found in sets] == [len(truth) for truth in expected]
    for first in range(0, len(sets), 3):
        for second in range(len(sets)):
            shared = len(np.intersect1d(sets[first], sets[second]))
            assert shared == len(expected[first] & expected[second])


def test_a_text_hashes_alike_alone_and_among_others():
    """Batches, neighbours and wide characters beside a text leave its n-grams what they are."""
    chance = random.Random(1)

    def prose(num_words: int) -> str:
        return " ".join(f"w{chance.randrange(3000)}" for _ in range(num_words))

    texts = [prose(40), "日本", prose(BATCH_CHARACTERS // 4), "", "two words", "x" * 5000]
    together = ngram_sets(texts, 5)
    for text, found in zip(texts, together, strict=True):
        assert np.array_equal(ngram_sets([text], 5)[0], found)
