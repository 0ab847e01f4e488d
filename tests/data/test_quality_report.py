"""What filters cost: every text accounted for, whatever the workers, with examples; and a chain's identity."""

import hashlib
import json
import pickle

import pytest

from pretraining.data.quality.chain import RULES, FilterChain, FilterReport, filters_schema
from pretraining.schema import check
from tests.gear.quality_texts import PROSE, chain_of, many_texts


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return many_texts()


SPECS = [
    {"rule": "pii"},
    {"rule": "gopher_quality"},
    {"rule": "c4", "reject_curly_brackets": False},
    {"rule": "blocklist", "words": ["license"]},
    {"rule": "blocklist", "words": ["python"], "max_occurrences": 2},
]


def test_every_document_and_byte_is_accounted_for(texts):
    """Honest counts: read = kept + rejected by rule, in documents and bytes; what is kept is what came back."""
    chain = FilterChain.of(SPECS)
    kept = chain.apply(texts, [str(n) for n in range(len(texts))])
    report = chain.report
    rejected = [entry for rule in report.rules for entry in rule["rejected"].values()]
    gone = [text for text, result in zip(texts, kept, strict=True) if result is None]
    assert report.documents == len(texts) and report.num_bytes == sum(len(t.encode()) for t in texts)
    assert (
        sum(entry["documents"] for entry in rejected) == len(gone) == report.documents - report.kept_documents
    )
    assert sum(entry["num_bytes"] for entry in rejected) == sum(len(text.encode()) for text in gone)
    assert report.kept_bytes == sum(len(text.encode()) for text in kept if text is not None)
    assert [rule["name"] for rule in report.rules][-2:] == ["blocklist", "blocklist 2"]


def test_the_report_does_not_depend_on_workers(texts):
    """Merged in document order, the reports of any division of the work are one worker's, examples included."""
    wheres = [f"corpus:{number}" for number in range(len(texts))]
    whole = FilterChain.of(SPECS)
    kept = whole.apply(texts, wheres)
    reports, together = [], []
    for first in range(0, len(texts), 37):
        chain = FilterChain.of(SPECS)
        together += chain.apply(texts[first : first + 37], wheres[first : first + 37])
        reports.append(pickle.loads(pickle.dumps(chain.report)))
    assert together == kept
    merged = FilterReport.merged(reports)
    assert merged.to_dict() == whole.report.to_dict()
    assert json.dumps(merged.to_dict()) == json.dumps(whole.report.to_dict())
    assert FilterReport(**json.loads(json.dumps(merged.to_dict()))).as_text(True) == merged.as_text(True)


def test_the_report_shows_the_first_examples():
    """A user sees what a filter costs: counts, shares, and the first three texts with measure and limit."""
    chain = chain_of({"rule": "length", "min_words": 5})
    chain.apply(["short text", PROSE, *["another one"] * 5], [f"file:{n}" for n in range(7)])
    entry = chain.report.rules[0]["rejected"]["too_few_words"]
    assert [example["where"] for example in entry["examples"]] == ["file:0", "file:2", "file:3"]
    assert entry["examples"][0] == {
        "where": "file:0",
        "text": "short text",
        "measured": 2,
        "wanted": "at least 5",
    }
    shown = chain.report.as_text(examples=True)
    row = next(line for line in shown.splitlines() if line.startswith("length: too_few_words "))
    assert row.split()[2:4] == ["6", "85.71%"] and "file:0: 2, wanted at least 5" in shown


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
    before = FilterChain.of(specs).identity
    assert FilterChain.of(specs).identity == before and json.dumps(before)
    assert (
        before[2]["model"]
        == hashlib.sha256(RULES["language"](languages=["en"])._path.read_bytes()).hexdigest()
    )
    words.write_text("two")
    own_rule.write_text("def keep(text):\n    return True\n")
    after = FilterChain.of(specs).identity
    assert after[0] != before[0] and after[1] != before[1] and after[2] == before[2]


def test_the_schema_describes_every_parameter():
    """An editor completes each rule's keys; each has a description, and a default unless it is required."""
    schema = filters_schema()
    assert check([{"rule": "gopher_quality"}], schema, "x") == [{"rule": "gopher_quality"}]
    branches = schema["items"]["allOf"]
    assert len(branches) == len(RULES)
    for branch in branches:
        then = branch["then"]
        for key, value in then["properties"].items():
            assert value["description"], key
            assert key == "rule" or ("default" in value) != (key in then.get("required", []))
    json.dumps(schema)
