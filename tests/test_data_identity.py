"""Promises 1 and 3 for data: a finished data set never changes unasked, and its identity is what decides its bytes."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from pretraining.data import open_prepared, prepare_data
from pretraining.data.manifest import DECIDING_KEYS, DECIDING_SOURCE_KEYS, deciding_section, read_manifest
from pretraining.errors import UserError
from pretraining.recipe import recipe_schema
from tests.finished_data import change_manifest
from tests.test_data_prep import (
    bytes_of,
    data_prep,
    make_texts,
    prepare,
    recipe_file,
    recipe_for,
    write_jsonl,
)

FILTER = {"rule": "length", "min_words": 5}
READING_KEYS = (
    "name",
    "encoder",
    "mixture",
    "shuffle_shards",
    "sequence_length",
    "document_masking",
    "packing",
)
READING_SOURCE_KEYS = ("name", "weight", "max_epochs")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with two sources and the data set that is made of them."""
    folder = tmp_path_factory.mktemp("identity")
    for name, seed in (("notes", 1), ("web", 2)):
        write_jsonl(folder / f"{name}.jsonl", make_texts(60, seed))
    prepare(folder / "data", mixed(folder))
    return folder


def test_what_is_left_of_each_source_is_printed(made, tmp_path):
    """Documents and tokens, their share, and the weight that a run gives them; of a single source nothing."""
    values = json.loads(recipe_file(tmp_path, made / "notes.jsonl").read_text())
    values["data"] |= {"sources": mixed(made, weights=(1, 3)).data["sources"], "filters": [FILTER]}
    recipe = tmp_path / "mixed.json"
    recipe.write_text(json.dumps(values))
    text = subprocess.run(data_prep(recipe, made / "data"), capture_output=True, text=True, check=True).stdout
    shown = subprocess.run(data_prep(recipe, made / "data", "--json"), capture_output=True, check=True).stdout
    notes, web = json.loads(shown)["sources"]
    assert notes["documents"] == web["documents"] == 60 and notes["share"] + web["share"] == pytest.approx(1)
    assert (notes["weight"], web["weight"], web["name"]) == (1, 3, "web")
    line = next(line for line in text.splitlines() if line.split()[:1] == ["web"])
    assert line.split()[1:] == ["60", f"{web['tokens']:,}", f"{web['share']:.2%}", "3"]


@pytest.fixture
def root(made, tmp_path) -> Path:
    """A copy of the data set to do something with."""
    shutil.copytree(made / "data", tmp_path / "data")
    return tmp_path / "data"


def mixed(folder: Path, weights=(None, None), **data):
    names = ("notes", "web")
    sources = [
        {"path": str(folder / f"{name}.jsonl"), "name": name, "weight": weight}
        for name, weight in zip(names, weights, strict=True)
    ]
    return recipe_for(*sources, **{"filters": [FILTER], **data})


def test_every_key_of_the_data_section_decides_the_bytes_or_is_only_read():
    """A new key has to be put on one side."""
    properties = recipe_schema()["properties"]["data"]["properties"]
    assert sorted(properties) == sorted(DECIDING_KEYS + READING_KEYS)
    assert sorted(properties["sources"]["items"]["properties"]) == sorted(
        DECIDING_SOURCE_KEYS + READING_SOURCE_KEYS
    )


DECIDING = {
    "a threshold": ({"filters": [{**FILTER, "min_words": 7}]}, "data.filters.0.min_words: 5 there, 7 here"),
    "a rule more": ({"filters": [FILTER, {"rule": "pii"}]}, "data.filters.1: null there"),
    "tokenizer": (
        {"tokenizer": {"train_vocab_size": 300}},
        "data.tokenizer.train_vocab_size: 280 there, 300 here",
    ),
    "split": ({"validation_share": 0.3}, "data.validation_share: 0.2 there, 0.3 here"),
    "dedup": ({"dedup": {"exact": True}}, 'data.dedup: null there, {"exact": true'),
    "undecodable": ({"skip_undecodable": True}, "data.skip_undecodable: false there, true here"),
}


@pytest.mark.parametrize("data, said", DECIDING.values(), ids=DECIDING)
def test_what_decides_the_bytes_is_refused_by_the_value_that_differs(made, root, data, said):
    """Nothing is written; a run that would read it is told the same."""
    before = bytes_of(root)
    for action in (prepare_data, open_prepared):
        with pytest.raises(UserError) as refused:
            action(mixed(made, **data), root)
        assert said in str(refused.value) and "--replace" in str(refused.value)
    assert bytes_of(root) == before


READING = {
    "weights": {"weights": (0.3, 0.7)},
    "encoder": {"encoder": "tokenizers"},
    "mixture": {"mixture": {"temperature": 2}},
    "packing": {"packing": "best_fit", "document_masking": True, "shuffle_shards": 1},
    "a default spelled out": {"filters": [{**FILTER, "max_words": None}]},
}


@pytest.mark.parametrize("data", READING.values(), ids=READING)
def test_what_is_only_read_needs_no_preparation(made, root, data):
    """The data set stays, down to the file, and opens."""
    before = (root / "corpus" / "manifest.json").stat()
    outcome = prepare_data(mixed(made, **data), root, replace=True)
    after = (root / "corpus" / "manifest.json").stat()
    assert outcome.kept_aside is None and (before.st_ino, before.st_mtime_ns) == (
        after.st_ino,
        after.st_mtime_ns,
    )
    assert open_prepared(mixed(made, **data), root).fingerprint == outcome.manifest["fingerprint"]


def test_weights_do_not_change_a_byte(made, tmp_path):
    """Of the tokenizer that is trained on the sources neither."""
    weighted = prepare(tmp_path / "data", mixed(made, weights=(0.1, 0.9)))
    assert bytes_of(weighted) == bytes_of(made / "data" / "corpus")


def test_data_of_an_earlier_version_still_opens(made, root):
    """Their manifests hold weights, leave out what was a default, and have a key."""

    def as_before(manifest: dict) -> None:
        manifest["key"] = "0" * 32
        manifest["data"].pop("decontaminate")
        manifest["data"]["filters"] = [FILTER]
        for source in manifest["data"]["sources"]:
            source.pop("split")
            source["weight"] = 0.5

    change_manifest(root / "corpus", as_before)
    recipe = mixed(made, weights=(0.3, 0.7))
    assert prepare_data(recipe, root).manifest["key"] and open_prepared(recipe, root)


FILES = {
    "a line more": (lambda path: path.open("a").write('{"text": "more"}\n'), "bytes in 1 file there, 3"),
    "written anew": (
        lambda path: path.write_bytes(path.read_bytes()),
        "1 file of the same size, but written since",
    ),
}


@pytest.mark.parametrize("change, said", FILES.values(), ids=FILES)
def test_a_source_whose_files_changed_is_named(made, root, tmp_path, change, said):
    for name in ("notes", "web"):
        shutil.copy2(made / f"{name}.jsonl", tmp_path)
    change_manifest(
        root / "corpus", lambda manifest: manifest["data"].update(deciding_section(mixed(tmp_path).data))
    )
    change(tmp_path / "web.jsonl")
    with pytest.raises(UserError, match=r"data\.sources\.1: ") as refused:
        prepare_data(mixed(tmp_path), root)
    assert said in str(refused.value)


def test_a_replaced_data_set_is_kept_beside_the_new_one(made, root):
    """Byte for byte, under the first name that is free; the second one as well."""
    (root / "corpus.replaced-1").write_text("of somebody")
    before = bytes_of(root / "corpus")
    first = prepare_data(mixed(made, validation_share=0.3), root, show_progress=False, replace=True)
    second = prepare_data(mixed(made, validation_share=0.4), root, show_progress=False, replace=True)
    assert [first.kept_aside.name, second.kept_aside.name] == ["corpus.replaced-2", "corpus.replaced-3"]
    assert bytes_of(first.kept_aside) == before
    assert read_manifest(second.kept_aside)["data"]["validation_share"] == 0.3
    assert sorted(path.name for path in root.iterdir()) == [
        "corpus",
        *(f"corpus.replaced-{n}" for n in (1, 2, 3)),
    ]


def test_a_replacement_that_fails_keeps_the_old_data(made, root, tmp_path):
    """In its place: what was committed stays until its successor is complete."""
    before = bytes_of(root / "corpus")
    with pytest.raises(UserError, match="the corpus is empty"):
        prepare(root, mixed(made, filters=[{**FILTER, "min_words": 10**6}]), replace=True)
    assert bytes_of(root / "corpus") == before


@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_between_the_renames_loses_nothing(made, root, tmp_path, renames):
    """After the first the old one is put back, after the second it gets its name; and the same command goes on."""
    before, recipe = bytes_of(root / "corpus"), mixed(made, validation_share=0.3)
    (root / "corpus").rename(root / ".corpus.previous")
    if renames == 2:
        prepare(tmp_path / "new", recipe).rename(root / "corpus")
    outcome = prepare_data(recipe, root, show_progress=False, replace=True)
    assert outcome.manifest["data"]["validation_share"] == 0.3
    assert bytes_of(outcome.kept_aside) == before and not list(root.glob(".corpus*"))
