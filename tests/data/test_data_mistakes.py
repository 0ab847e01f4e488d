"""What a user can get wrong around a preparation is one line, and nothing of theirs is lost."""

import json
import sys

import pytest

from pretraining.data.preparation.prepare import count_data
from pretraining.errors import UserError
from pretraining.recipe import load_recipe
from tests.data.test_data_prep import make_texts, prepare, recipe_for, refusal, write_jsonl
from tests.gear.local_hub import local_hub
from tests.gear.runs import REPOSITORY, execute


@pytest.fixture
def root(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def corpus(tmp_path):
    return write_jsonl(tmp_path / "corpus.jsonl", make_texts(80))


def test_a_folder_of_somebody_s_files_is_not_replaced(root, corpus):
    """Only what a preparation made is ever removed; an empty folder is no obstacle."""
    (root / "corpus").mkdir(parents=True)
    (root / "corpus" / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="holds files that are no prepared data"):
        prepare(root, recipe_for(corpus))
    assert (root / "corpus" / "thesis.tex").read_text() == "precious"
    (root / "corpus" / "thesis.tex").unlink()
    assert (prepare(root, recipe_for(corpus)) / "manifest.json").exists()


def test_terms_that_nobody_accepted_are_named_before_text_is_read(tmp_path, corpus):
    """What to accept and set, in one line; no folder is made."""
    sources = json.dumps([{"path": str(corpus)}])
    command = [sys.executable, "data_prep.py", "--recipe", "tiny", "--data_dir", tmp_path / "data"]
    command += ["--set", "data.tokenizer=someone/gated", "--set", f"data.sources={sources}"]
    with local_hub() as hub:
        hub.gated.add("someone/gated")
        refused = execute(command, **{**hub.environment, "HF_TOKEN": "", "HF_HOME": tmp_path / "hub"})
    assert refused.code == 2 and refused.stderr.count("\n") == 1
    for word in (
        "data.tokenizer: someone/gated",
        "accept them at https://huggingface.co/someone/gated",
        "HF_TOKEN",
    ):
        assert word in refused.stderr
    assert not (tmp_path / "data").exists()


def test_a_tokenizer_that_the_hub_does_not_have_is_named_before_text_is_read(tmp_path, corpus):
    """Cleaning comes before the tokenizer is needed, and may take hours."""
    sources = json.dumps([{"path": str(corpus)}])
    command = [sys.executable, "data_prep.py", "--recipe", "tiny", "--data_dir", tmp_path / "data"]
    command += ["--set", "data.tokenizer=gpt3", "--set", f"data.sources={sources}"]
    with local_hub() as hub:
        hub.missing.add("gpt3")
        refused = execute(command, **{**hub.environment, "HF_HOME": tmp_path / "hub"})
    assert refused.code == 2 and refused.stderr.count("\n") == 1
    assert "data.tokenizer: the hub has no model gpt3 that this account may see" in refused.stderr
    assert not (tmp_path / "data").exists()


def test_a_link_is_followed_to_another_disk(root, corpus, tmp_path):
    """The data lies where the link leads, and the link stays."""
    root.mkdir()
    (root / "corpus").symlink_to(tmp_path / "large" / "corpus")
    for share in (0.2, 0.3):
        prepare(root, recipe_for(corpus, validation_share=share), replace=True)
    assert (root / "corpus").is_symlink() and (tmp_path / "large" / "corpus" / "manifest.json").exists()
    assert (tmp_path / "large" / "corpus.replaced-1" / "manifest.json").exists()


LINES = {
    "deep": ('{"text": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 81: not valid JSON"),
    "digits": ('{"text": "a", "x": ' + "1" * 5000 + "}", "line 81: not valid JSON"),
}


@pytest.mark.parametrize("line, said", LINES.values(), ids=LINES)
def test_json_that_python_cannot_take(root, corpus, line, said):
    with corpus.open("a") as file:
        file.write(line + "\n")
    assert said in refusal(root, recipe_for(corpus))


def test_a_byte_order_mark_before_json_lines_is_no_text(root, corpus):
    """As Windows' editors write it."""
    corpus.write_bytes(b"\xef\xbb\xbf" + corpus.read_bytes())
    prepare(root, recipe_for(corpus))


@pytest.mark.parametrize("content", [b"{}", b"{nonsense", b"\xff\xfe"])
def test_a_tokenizer_that_is_none(root, corpus, tmp_path, content):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "tokenizer.json").write_bytes(content)
    assert "tokenizer.json cannot be read" in refusal(
        root, recipe_for(corpus, tokenizer=str(tmp_path / "own"))
    )


def test_an_empty_path_is_not_this_folder(root):
    assert "path is empty" in refusal(root, recipe_for(""))


def test_filters_that_leave_nothing_are_named(root, corpus):
    recipe = recipe_for(corpus, filters=[{"rule": "length", "min_words": 10**6}])
    assert "the corpus is empty" in (message := refusal(root, recipe)) and "what filters took out" in message


def test_a_count_needs_nothing_cleaned(corpus):
    """With a tokenizer that is to be trained: on the texts as they are read."""
    recipe = recipe_for(corpus, dedup={"exact": True, "minhash": None}, filters=[{"rule": "pii"}])
    counts = count_data(recipe, None, show_progress=False)
    assert counts["total"]["documents"] == 80 and counts["before_cleaning"]


MIXTURES = {
    "unknown": ({"stages": [{"weights": {"nots": 1}}]}, "names no source; did you mean 'notes'"),
    "unread": ({"stages": [{"weights": {"notes": 1}}]}, "no stage reads the source 'web'"),
}


@pytest.mark.parametrize("mixture, said", MIXTURES.values(), ids=MIXTURES)
def test_a_mixture_is_refused_before_its_data_is_prepared(tmp_path, mixture, said):
    values = json.loads((REPOSITORY / "recipes" / "tiny.json").read_text())
    sources = [{"path": "x.txt", "name": name, "weight": 1} for name in ("notes", "web")]
    values["data"] = {**values["data"], "sources": sources, "mixture": mixture}
    (tmp_path / "mixed.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=said):
        load_recipe(str(tmp_path / "mixed.json"))
