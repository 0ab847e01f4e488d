"""Decontamination: documents that hold a stretch of an evaluation set are found, and no others."""

import gzip
import json
import random
import sys

import numpy as np
import pytest

from pretraining.data.dedup.decontamination import (
    build_index,
    fingerprint_of_sets,
    merge_reports,
    read_evaluation_sets,
)
from pretraining.data.manifest import consulted, read_manifest
from pretraining.recipe.data import Decontaminate
from tests.gear.finished_data import prepare, recipe_for, refusal, write_jsonl

CHANCE = random.Random(0)
VOCABULARY = [f"v{number}" for number in range(5000)]
QUESTION = "Which Of These, said the owl, is heavier than a feather but lighter than the old stone?"
SHORT = "Name the nine muses of ancient Greece now"


def prose(num_words: int) -> str:
    return " ".join(CHANCE.choices(VOCABULARY, k=num_words))


def index_of(*texts: str, **settings):
    return build_index([("quiz", text) for text in texts], Decontaminate(**settings))


def checked(index, texts: list[str]):
    return index.check(texts, [f"text {number}" for number in range(len(texts))])


def shout(text: str) -> str:
    """The same words in another dress."""
    return text.upper().replace(" ", " \n* ")


def test_a_planted_stretch_is_found_whatever_its_dress():
    """13 shared words at any place, in any case and punctuation, drop the document; 12 do not."""
    words = QUESTION.split()
    texts = [prose(50) + " " + shout(QUESTION) + prose(20), prose(50), ""]
    texts += [" ".join([prose(9), *words[2:stop], prose(9)]) for stop in (15, 14)]
    contaminated, report = checked(index_of(QUESTION), texts)
    assert contaminated.tolist() == [True, False, False, True, False]
    assert report["dropped"] == report["sets"]["quiz"]["dropped"] == 2
    example = report["sets"]["quiz"]["examples"][1]
    assert example["where"] == "text 3"
    assert example["words"].split() == " ".join(words[2:15]).lower().split()


def test_short_evaluation_texts_are_looked_for_whole():
    """8 to 12 words match as they are; fewer are counted and left out."""
    index = index_of(SHORT, "What is it", QUESTION)
    texts = [prose(5) + " " + SHORT + " " + prose(5), prose(3) + " what is it", SHORT]
    contaminated, _ = checked(index, texts)
    assert contaminated.tolist() == [True, False, True]
    assert index.too_short == [1] and index.texts == [3]


def test_a_share_keeps_documents_that_only_quote():
    """With a share, a long document that quotes one stretch stays and a copy goes."""
    quoting = prose(400) + " " + QUESTION
    contaminated, report = checked(index_of(QUESTION, share=0.5), [quoting, QUESTION])
    assert contaminated.tolist() == [False, True]
    assert report["dropped"] == 1


def test_finds_are_those_of_plain_sets_of_words():
    """Against Python sets of tuples, on texts that share stretches of random lengths."""
    evaluation = [prose(60) for _ in range(20)]
    texts = []
    for _ in range(120):
        start, length = CHANCE.randrange(40), CHANCE.randrange(20)
        stretch = CHANCE.choice(evaluation).split()[start : start + length]
        texts.append(" ".join([prose(CHANCE.randrange(30)), *stretch, prose(CHANCE.randrange(30))]))
    known = {tuple(words[i : i + 13]) for words in map(str.split, evaluation) for i in range(48)}
    split = [text.split() for text in texts]
    expected = [any(tuple(words[i : i + 13]) in known for i in range(len(words) - 12)) for words in split]
    assert 10 < sum(expected) < 110
    contaminated, _ = checked(index_of(*evaluation), texts)
    assert contaminated.tolist() == expected


def test_reports_of_pieces_add_up():
    """The sum over pieces is the count of the whole, examples too: five at most."""
    index = index_of(QUESTION, SHORT)
    pieces = [[QUESTION, prose(30)], [prose(30)], [SHORT, QUESTION]]
    total = merge_reports(checked(index, piece)[1] for piece in pieces)
    assert (total["documents"], total["dropped"], total["sets"]["quiz"]["dropped"]) == (5, 3, 3)
    examples = total["sets"]["quiz"]["examples"]
    assert [example["where"] for example in examples] == ["text 0", "text 0", "text 1"]
    twice = {"dropped": 6, "examples": [*examples, *examples][:5]}
    assert merge_reports([total, total])["sets"]["quiz"] == twice
    assert merge_reports([]) == {"documents": 0, "dropped": 0, "sets": {}}


@pytest.mark.parametrize("caps", [(None,), (2000, 6000)], ids=["before", "as read"])
def test_examples_say_where_the_document_is(tmp_path, monkeypatch, small_tasks, caps):
    """File and line, as those of filters do: whatever was left out before, and however the text was cut."""
    monkeypatch.setattr("pretraining.data.corpus.BATCH_BYTES", 500)
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "quiz.txt").write_text(QUESTION)
    texts = [text for n in range(60) for text in ("short", prose(40) + (QUESTION if n in (4, 25) else ""))]
    web = write_jsonl(tmp_path / "web.jsonl", texts)
    cleaned = {"filters": [{"rule": "length", "min_words": 5}]}
    cleaned["decontaminate"] = {"folder": str(tmp_path / "sets")}
    for cap in caps:  # the second preparation goes on from the first
        source = {"path": str(web), "max_tokens": cap}
        manifest = read_manifest(prepare(tmp_path / "data", recipe_for(source, **cleaned)))
    examples = manifest["decontamination"]["sets"]["quiz.txt"]["examples"]
    # Within a file that is cut, nobody knows the number of the line.
    byte = sum(map(len, web.read_bytes().splitlines(keepends=True)[:51]))
    assert [example["where"] for example in examples] == [f"{web}:line 10", f"{web}:byte {byte}"]


def test_texts_that_are_not_looked_for_are_told(tmp_path, capsys):
    """A report of nothing found would read as clean."""
    (tmp_path / "sets").mkdir()
    write_jsonl(tmp_path / "sets" / "short.jsonl", ["Who wrote it?", "Nobody knows."])
    web = write_jsonl(tmp_path / "web.jsonl", [prose(40) for _ in range(60)])
    recipe = recipe_for(web, decontaminate={"folder": str(tmp_path / "sets")})
    assert "no text is long enough" in refusal(prepare, tmp_path / "data", recipe)
    (tmp_path / "sets" / "quiz.txt").write_text(QUESTION)
    prepare(tmp_path / "data", recipe)
    said = "note: data.decontaminate: short.jsonl: 2 of 2 texts have fewer than 8 words"
    assert said in capsys.readouterr().err


def test_a_folder_of_evaluation_sets_is_read(tmp_path):
    """.txt whole; of .jsonl(.gz) every string of a row, however deep; each file a set."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("all of it\nis one")
    (tmp_path / "b.jsonl").write_text(json.dumps({"q": "why", "n": 3, "choices": ["x", {"t": "y"}]}) + "\n\n")
    with gzip.open(tmp_path / "deep" / "c.jsonl.gz", "wt") as file:
        file.write('{"text": "packed"}\n')
    found = list(read_evaluation_sets(str(tmp_path)))
    assert found[0] == ("a.txt", "all of it\nis one") and found[-1] == ("deep/c.jsonl.gz", "packed")
    assert found[1:-1] == [("b.jsonl", text) for text in ("why", "x", "y")]


@pytest.mark.parametrize(("content", "said"), [(None, "holds no"), ("{", "b.jsonl:line 2: not valid JSON")])
def test_bad_evaluation_sets_are_told_in_one_line(tmp_path, content, said):
    """What is wrong and where."""
    if content:
        (tmp_path / "b.jsonl").write_text("{}\n" + content)
    assert said in refusal(list, read_evaluation_sets(str(tmp_path)))


def test_a_missing_lm_eval_costs_one_sentence(monkeypatch):
    """No traceback where the optional package is not installed."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks", raising=False)
    assert "pip install lm_eval" in refusal(list, read_evaluation_sets(tasks=["hellaswag"]))


def test_a_task_of_lm_eval_is_read(tmp_path, monkeypatch):
    """Questions, answers and prompts of a real task file, without network."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": QUESTION, "answer": "a pebble"}) + "\n")
    task = tmp_path / "owl.yaml"
    task.write_text(
        "task: owl\ndataset_path: json\noutput_type: generate_until\ntest_split: test\n"
        f"dataset_kwargs:\n  data_files:\n    test: {rows}\n"
        'doc_to_text: "Question: {{question}}"\ndoc_to_target: "{{answer}}"\n'
    )
    found = list(read_evaluation_sets(tasks=[str(task)]))
    assert [text for _, text in found] == [QUESTION, "a pebble", "Question: " + QUESTION]
    # What the file says is a part of the identity; of data from before it was, nobody knows.
    asked = {"decontaminate": {"tasks": [str(task), "arc_easy"]}}
    before = fingerprint_of_sets(None, [str(task)]), consulted(asked)
    task.write_text(task.read_text().replace("Question: ", "Q: "))
    after = fingerprint_of_sets(None, [str(task)]), consulted(asked)
    assert before[0] != after[0] and before[1] != after[1] and list(after[1]) == ["data.decontaminate.tasks"]
    index = build_index(found, Decontaminate())
    assert np.all(checked(index, [prose(10) + QUESTION, prose(40)])[0] == [True, False])
