"""The published filter rules: datatrove's verdict on every text, the splitting behind them, and a chain's report."""

import hashlib
import json
import os
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
from datatrove.data import Document
from datatrove.pipeline import filters
from datatrove.utils.text import PUNCTUATION_SET, TERMINAL_PUNCTUATION

from pretraining.data.quality.chain import RULES, FilterChain, FilterReport, filters_schema
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
from pretraining.outside.schema import check
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


NO_LIMIT = {"rule": "fineweb", "max_short_lines": None}
BIGRAMS = {"rule": "gopher_repetition", "max_top_ngrams": {"2": 0.01}}
BREACHES = {
    "hashes": ({"rule": "gopher_quality"}, PROSE + " #" * 30, "hashes", "at most 0.1"),
    "stop words": ({"rule": "gopher_quality"}, "apple pear plum melon " * 20, "stop_words", "at least 2"),
    "own limit": ({"rule": "gopher_quality", "min_words": 90}, PROSE, "too_few_words", "at least 90"),
    "length": ({"rule": "length", "max_characters": 99}, PROSE, "too_many_characters", "at most 99"),
    "length in words": ({"rule": "length", "min_words": 3}, "two -- words !", "too_few_words", "at least 3"),
    "list": (NO_LIMIT, "one.\ntwo.\n" + "x" * 40 + ".", "newlines_per_word", "at most 0.3"),
    "ngram": (BIGRAMS, PROSE, "top_2_gram", "at most 0.01"),
    "code": ({"rule": "c4"}, PROSE + "\nif (a) { return to the start now. }.", "curly_bracket", "none"),
}


@pytest.mark.parametrize("spec, text, cause, wanted", BREACHES.values(), ids=BREACHES)
def test_a_breach_is_named_with_its_limit(spec, text, cause, wanted):
    """Each rejection names the cause and the limit that the recipe set."""
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


# What filters cost: every text is accounted for, with examples; and a chain's identity.

SPECS = [
    {"rule": "pii"},
    {"rule": "gopher_quality"},
    {"rule": "c4", "reject_curly_brackets": False},
    {"rule": "blocklist", "words": ["license"]},
    {"rule": "blocklist", "words": ["python"], "max_occurrences": 2},
]


def test_every_document_and_byte_is_accounted_for(texts):
    """Honest counts: read = kept + rejected by rule, in documents and bytes; what is kept is what came back."""
    chain = FilterChain(SPECS)
    kept = chain.apply(texts, [str(n) for n in range(len(texts))])
    report = chain.report
    rejected = [entry for rule in report.rules for entry in rule["rejected"].values()]
    gone = [text for text, result in zip(texts, kept, strict=True) if result is None]
    assert report.documents == len(texts) and report.num_bytes == sum(len(t.encode()) for t in texts)
    assert sum(entry["documents"] for entry in rejected) == len(gone)
    assert report.kept_documents == report.documents - len(gone)
    assert sum(entry["num_bytes"] for entry in rejected) == sum(len(text.encode()) for text in gone)
    assert report.kept_bytes == sum(len(text.encode()) for text in kept if text is not None)
    assert [rule["name"] for rule in report.rules][-2:] == ["blocklist", "blocklist 2"]


def test_the_report_does_not_depend_on_workers(texts):
    """Merged in document order, the reports of any division of the work are one worker's, examples included."""
    wheres = [f"corpus:{number}" for number in range(len(texts))]
    whole = FilterChain(SPECS)
    kept = whole.apply(texts, wheres)
    reports, together = [], []
    for first in range(0, len(texts), 37):
        chain = FilterChain(SPECS)
        together += chain.apply(texts[first : first + 37], wheres[first : first + 37])
        reports.append(pickle.loads(pickle.dumps(chain.report)))
    assert together == kept
    merged = FilterReport.merged(reports)
    assert merged.to_dict() == whole.report.to_dict()
    assert json.dumps(merged.to_dict()) == json.dumps(whole.report.to_dict())
    assert FilterReport(**json.loads(json.dumps(merged.to_dict()))).as_text() == merged.as_text()


def test_the_report_shows_the_first_examples():
    """A user sees what a filter costs: counts, shares, and the first three texts with measure and limit."""
    chain = chain_of({"rule": "length", "min_words": 5})
    chain.apply(["short text", PROSE, *["another one"] * 5], [f"file:{n}" for n in range(7)])
    entry = chain.report.rules[0]["rejected"]["too_few_words"]
    assert [example["where"] for example in entry["examples"]] == ["file:0", "file:2", "file:3"]
    first = {"where": "file:0", "text": "short text", "measured": 2, "wanted": "at least 5"}
    assert entry["examples"][0] == first
    shown = chain.report.as_text().splitlines()
    row = next(line for line in shown if line.startswith("length: too_few_words "))
    assert row.split()[2:4] == ["6", "85.71%"]


def test_the_first_rule_that_rejects_wins_and_sees_what_those_before_left():
    """Order is the recipe's: masking before a blocklist hides what it masked."""
    mask, block = {"rule": "pii"}, {"rule": "blocklist", "words": ["secret"]}
    text = "Write to secret@mail.org about it."
    assert chain_of(block, mask).apply([text], ["x"]) == [None]
    assert chain_of(mask, block).apply([text], ["x"]) == ["Write to email@example.com about it."]


def test_a_text_of_which_nothing_is_left_is_rejected():
    """No empty text comes out of a chain."""
    chain = chain_of({"rule": "c4", "min_sentences": None})
    assert chain.apply(["no end of a sentence"], ["x"]) == [None]
    assert list(chain.report.rules[0]["rejected"]) == ["nothing_left"]


def test_the_identity_changes_with_all_that_verdicts_depend_on(tmp_path):
    """The key of a preparation: another limit, another list in the same file, another function body."""
    own_rule, words = tmp_path / "own.py", tmp_path / "words.txt"
    own_rule.write_text("def keep(text):\n    return False\n")
    words.write_text("one")
    specs = [{"rule": "blocklist", "path": str(words)}, {"rule": "callable", "import": f"{own_rule}:keep"}]
    specs.append({"rule": "language", "languages": ["en"]})
    before = FilterChain(specs).identity
    assert FilterChain(specs).identity == before and json.dumps(before)
    model = RULES["language"](languages=["en"])._path
    assert before[2]["model"] == hashlib.sha256(model.read_bytes()).hexdigest()
    words.write_text("two")
    own_rule.write_text("def keep(text):\n    return True\n")
    after = FilterChain(specs).identity
    assert after[0] != before[0] and after[1] != before[1] and after[2] == before[2]


BOUND = "from functools import partial\ndef kept(text, least, but=()):\n    return len(text) {sign} least\n{made}\n"
KEPT = {"sign": ">", "made": "keep = partial(kept, least=5, but={'a', 'b', kept.__name__})"}
PARTIALS = {
    "the function": {"sign": ">="},
    "an argument": {"made": "keep = partial(kept, least=6, but={'a', 'b', kept.__name__})"},
}


@pytest.mark.parametrize("changed", PARTIALS.values(), ids=PARTIALS)
def test_a_partial_function_is_known_by_what_it_wraps_and_passes(tmp_path, changed):
    """In any process: neither the order of a set nor an address is a part of it."""
    own_rule = tmp_path / "own.py"
    program = "import json, sys; from pretraining.data.quality.chain import FilterChain as C; "
    program += "print(json.dumps(C(json.loads(sys.argv[1])).identity))"
    specs = [{"rule": "callable", "import": f"{own_rule}:keep"}]

    def identity(seed: str = "") -> list[dict]:
        if not seed:
            return FilterChain(specs).identity
        words = [sys.executable, "-c", program, json.dumps(specs)]
        hashed = {**os.environ, "PYTHONHASHSEED": seed}
        return json.loads(subprocess.run(words, env=hashed, check=True, capture_output=True).stdout)

    own_rule.write_text(BOUND.format(**KEPT))
    before = identity()
    assert identity("1") == identity("2") == before
    # Longer: bytecode of the same second and size would be taken for it.
    own_rule.write_text(BOUND.format(**{**KEPT, **changed}) + "# changed\n")
    assert identity() != before


def test_the_schema_describes_every_parameter():
    """An editor completes each rule's keys; each has a description, and a default unless it is required."""
    schema = filters_schema(described=True)
    assert check([{"rule": "gopher_quality"}], schema, "x") == [{"rule": "gopher_quality"}]
    branches = schema["items"]["allOf"]
    assert len(branches) == len(RULES)
    for branch in branches:
        then = branch["then"]
        for key, value in then["properties"].items():
            assert value["description"], key
            # `sources`: left out for all
            assert key in ("rule", "sources") or ("default" in value) != (key in then.get("required", []))
    json.dumps(schema)
