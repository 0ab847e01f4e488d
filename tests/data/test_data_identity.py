"""Promises 1 and 3 for data: a finished data set never changes unasked, and its identity is what decides its bytes."""

import json
import pickle
import shlex
import shutil
from itertools import product
from pathlib import Path

import pytest

from data_prep import parse_arguments
from pretraining.data.manifest import DECIDING_KEYS, DECIDING_SOURCE_KEYS, deciding_section, read_manifest
from pretraining.data.preparation.prepare import prepare_data
from pretraining.data.preparation.tokenizing import MakeTokenizer
from pretraining.data.prepared import open_prepared
from pretraining.data.tokenizer import train_tokenizer
from pretraining.recipe import load_recipe, recipe_schema
from tests.gear.finished_data import (
    change_manifest,
    cut_into_shards,
    data_prep,
    make_texts,
    prepare,
    recipe_file,
    recipe_for,
    refusal,
    write_jsonl,
)
from tests.gear.runs import bytes_of, completed, execute

FILTER = {"rule": "length", "min_words": 5}
READING_KEYS = ("name", "encoder", "mixture", "shuffle_shards", "shuffle_blocks", "sequence_length")
READING_KEYS += ("document_masking", "packing", "prepare")
READING_SOURCE_KEYS = ("name", "weight", "max_epochs", "max_tokens", "max_documents")


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
    values["data"] |= {"sources": mixed(made, weights=(1, 3)).data.to_dict()["sources"], "filters": [FILTER]}
    recipe = tmp_path / "mixed.json"
    recipe.write_text(json.dumps(values))
    text, shown = (execute(data_prep(recipe, made / "data", *more)).stdout for more in ((), ("--json",)))
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
    sources = [{"path": str(folder / f"{name}.jsonl"), "name": name} for name in ("notes", "web")]
    for source, weight in zip(sources, weights, strict=True):
        source["weight"] = weight
    return recipe_for(*sources, **{"filters": [FILTER], **data})


def test_every_key_of_the_data_section_decides_the_bytes_or_is_only_read():
    """A new key has to be put on one side."""
    properties = recipe_schema()["properties"]["data"]["properties"]
    assert sorted(properties) == sorted(DECIDING_KEYS + READING_KEYS)
    of_sources = properties["sources"]["items"]["properties"]
    assert sorted(of_sources) == sorted(DECIDING_SOURCE_KEYS + READING_SOURCE_KEYS)


DECIDING = {
    "data.filters.0.min_words: 5 there, 7 here": {"filters": [{**FILTER, "min_words": 7}]},
    'data.filters.1: null there, {"rule": "pii"': {"filters": [FILTER, {"rule": "pii"}]},
    "data.tokenizer.train_vocab_size: 280 there, 300 here": {"tokenizer": {"train_vocab_size": 300}},
    "data.validation_share: 0.2 there, 0.3 here": {"validation_share": 0.3},
    'data.dedup: null there, {"exact": true': {"dedup": {"exact": True}},
    "data.skip_undecodable: false there, true here": {"skip_undecodable": True},
}


def test_what_decides_the_bytes_is_refused_by_the_value_that_differs(made, root):
    """Nothing is written; a run that would read it gets the same message."""
    before = bytes_of(root)
    for (said, data), action in product(DECIDING.items(), (prepare_data, open_prepared)):
        message = refusal(action, mixed(made, **data), root)
        assert said in message and "--replace" in message
    assert bytes_of(root) == before


READING = {
    "weights": {"weights": (0.3, 0.7)},
    "encoder": {"encoder": "tokenizers"},
    "mixture": {"mixture": {"temperature": 2}},
    "packing": {"packing": "best_fit", "document_masking": True, "shuffle_shards": 1},
    "windows": {"shuffle_blocks": 2},
    "a default spelled out": {"filters": [{**FILTER, "max_words": None}]},
}


@pytest.mark.parametrize("data", READING.values(), ids=READING)
def test_what_is_only_read_needs_no_preparation(made, root, data):
    """The data set stays, down to the file, and opens."""
    before, recipe = file_state(root), mixed(made, **data)
    outcome = prepare_data(recipe, root, replace=True)
    assert outcome.kept_aside is None and file_state(root) == before
    assert open_prepared(recipe, root).fingerprint == outcome.manifest["fingerprint"]


def file_state(root: Path) -> tuple[int, int]:
    status = (root / "corpus" / "manifest.json").stat()
    return status.st_ino, status.st_mtime_ns


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
    "bytes in 1 file there, 3": lambda path: path.open("a").write('{"text": "more"}\n'),
    "1 file of the same size, but written since": lambda path: path.write_bytes(path.read_bytes()),
}


@pytest.mark.parametrize("said", FILES)
def test_a_source_whose_files_changed_is_named(made, root, tmp_path, said):
    for name in ("notes", "web"):
        shutil.copy2(made / f"{name}.jsonl", tmp_path)
    section = deciding_section(mixed(tmp_path).data.to_dict())
    change_manifest(root / "corpus", lambda manifest: manifest["data"].update(section))
    FILES[said](tmp_path / "web.jsonl")
    message = refusal(prepare_data, mixed(tmp_path), root)
    assert "data.sources.1: " in message and said in message


def test_a_replaced_data_set_is_kept_beside_the_new_one(made, root):
    """Byte for byte, under the first free name; the second one as well. A new one that fails leaves it in its place."""
    (root / "corpus.replaced-1").write_text("of somebody")
    before = bytes_of(root / "corpus")
    nothing = mixed(made, filters=[{**FILTER, "min_words": 10**6}])
    assert "the corpus is empty" in refusal(prepare, root, nothing, replace=True)
    assert bytes_of(root / "corpus") == before
    recipes = (mixed(made, validation_share=share) for share in (0.3, 0.4))
    first, second = (prepare_data(recipe, root, False, replace=True).kept_aside for recipe in recipes)
    assert [first.name, second.name] == ["corpus.replaced-2", "corpus.replaced-3"]
    assert bytes_of(first) == before and read_manifest(second)["data"]["validation_share"] == 0.3
    names = ["corpus", *(f"corpus.replaced-{number}" for number in (1, 2, 3))]
    assert sorted(path.name for path in root.iterdir()) == names


def test_the_command_refuses_in_one_line_and_names_what_it_keeps(made, tmp_path):
    """Exit code 2 without --replace; with it the new data set is ready and the old one has a name, in --json too."""
    recipe, root = recipe_file(tmp_path, made / "notes.jsonl"), tmp_path / "data"
    completed(data_prep(recipe, root))
    changed = data_prep(recipe, root, "--set", "data.validation_share=0.3")
    assert "data.validation_share: 0.2 there, 0.3 here" in execute(changed).refusal
    said = "its runs go on with the recipe as it was, and --set data.name=corpus.replaced-1"
    assert execute([*changed, "--replace"]).stdout.splitlines()[-1].endswith(said)
    again = execute(data_prep(recipe, root, "--json", "--replace"))
    assert json.loads(again.stdout)["kept_aside"] == str(root / "corpus.replaced-2")


def test_a_refusal_names_the_command_that_makes_what_was_asked_for(made, root, tmp_path):
    """Pasted, it means the same data section: every `--set` that was given stands in it."""
    written = recipe_file(tmp_path, made / "notes.jsonl")
    settings = ["data.name=of its own", "data.validation_share=0.3", "training.learning_rate=0.002"]
    recipe = load_recipe(str(written), settings)
    for state in ("missing", "another"):
        command = refusal(open_prepared, recipe, root).rpartition("python data_prep.py ")[2]
        options = parse_arguments(shlex.split(command))
        assert load_recipe(options.recipe, options.set) == recipe and options.data_dir == root
        assert options.replace == (state == "another")
        shutil.copytree(root / "corpus", root / "of its own", dirs_exist_ok=True)


def test_runs_of_a_replaced_data_set_are_told_its_name(made, root):
    """Under it the data opens, with the tokens and the order that it had."""
    recipe, before = mixed(made), read_manifest(root / "corpus")["fingerprint"]
    prepare(root, mixed(made, validation_share=0.3), replace=True)
    (root / "corpus.replaced-2").mkdir()
    (root / "corpus.replaced-of-old").mkdir()
    for action in (prepare_data, open_prepared):
        assert "corpus.replaced-1 fits: --set data.name=corpus.replaced-1" in refusal(action, recipe, root)
    assert open_prepared(mixed(made, name="corpus.replaced-1"), root).fingerprint == before
    (root / "linked").mkdir()
    (root / "linked" / "corpus").symlink_to(root / "corpus")
    for action in (prepare_data, open_prepared):
        assert f"fits: --data_dir {root} --set data.name" in refusal(action, recipe, root / "linked")


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


def test_what_filters_and_decontamination_read_is_a_part_of_the_identity(made, tmp_path):
    """A word list, a function, evaluation sets: changed, they are named; missing, they say nothing."""
    (tmp_path / "words.txt").write_text("tensorflow\n")
    (tmp_path / "own.py").write_text("def keep(text):\n    return True\n")
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "quiz.txt").write_text("one two three four five six seven eight nine ten")
    rules = [{"rule": "blocklist", "path": str(tmp_path / "words.txt")}]
    rules += [{"rule": "callable", "import": f"{tmp_path / 'own.py'}:keep"}]
    recipe = mixed(made, filters=rules, decontaminate={"folder": str(tmp_path / "sets"), "tasks": []})
    prepare(tmp_path / "data", recipe)
    prepare(tmp_path / "data", recipe)
    read = {"words.txt": "filters.0", "own.py": "filters.1", "sets/quiz.txt": "decontaminate.folder"}
    for path, key in read.items():
        before = (tmp_path / path).read_text()
        (tmp_path / path).write_text(before + "\n# and more\n")
        assert f"data.{key}: what it reads has changed since" in refusal(prepare, tmp_path / "data", recipe)
        (tmp_path / path).write_text(before)
    (tmp_path / "words.txt").unlink()
    (tmp_path / "sets" / "quiz.txt").unlink()
    prepare(tmp_path / "data", recipe)


@pytest.mark.parametrize(("borders", "token"), [("eos", "eos_token"), ("bos", "bos_token")])
def test_the_token_at_a_border_is_a_part_of_the_tokenizer(made, tmp_path, borders, token):
    """A folder that names another one is refused, and its tasks are not reused; other companions decide nothing."""
    folder = tmp_path / "tokenizer"
    train_tokenizer(make_texts(60), 280, folder, special_tokens=["<|stop|>"])
    recipe = mixed(made, tokenizer=str(folder), borders=borders)
    prepare(tmp_path / "data", recipe)
    keys = MakeTokenizer(tmp_path, None, str(folder), None, 0.1).keys
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 99}))
    prepare(tmp_path / "data", recipe)
    assert MakeTokenizer(tmp_path, None, str(folder), None, 0.1).keys == keys
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, token: "<|stop|>"}))
    for action in (prepare_data, open_prepared):
        message = refusal(action, recipe, tmp_path / "data")
        assert f"{token}_id 1 (tokenizer_config.json), the data was made with 0" in message
    assert MakeTokenizer(tmp_path, None, str(folder), None, 0.1).keys != keys
    # A manifest of an older version knows tokenizer.json alone.
    old = ("eos_token_id", "bos_token_id", "files")
    change_manifest(
        tmp_path / "data" / "corpus", lambda manifest: [manifest["tokenizer"].pop(key) for key in old]
    )
    prepare(tmp_path / "data", recipe)


def test_a_dataset_is_known_by_its_commit_and_a_folder_by_its_files(tmp_path, monkeypatch):
    """It has no commit: another file in it is another source; data of an earlier version knew none of them."""
    (tmp_path / "rows").mkdir()
    write_jsonl(tmp_path / "rows" / "a.jsonl", make_texts(60))
    recipe = recipe_for({"dataset": str(tmp_path / "rows"), "split": "train"})
    folder = prepare(tmp_path / "data", recipe)
    write_jsonl(tmp_path / "rows" / "b.jsonl", make_texts(60, seed=1))
    assert "bytes in 1 file there" in refusal(prepare, tmp_path / "data", recipe)

    def as_before(manifest: dict) -> None:
        for key in ("files", "bytes", "fingerprint"):
            del manifest["sources"][0][key]

    change_manifest(folder, as_before)
    prepare(tmp_path / "data", recipe)
    # A silent hub has what was prepared from it: offline the commit is not known. Another one than the data's is named.
    change_manifest(folder, lambda manifest: manifest["sources"][0].update(commit="abc"))
    known = {"dataset": str(tmp_path / "rows"), "config": None, "split": "train"}
    for commit in (None, "def"):
        now = {**known, "commit": commit}
        monkeypatch.setattr("pretraining.data.corpus.HubSource.fingerprint", lambda self, now=now: dict(now))
        if commit is None:
            prepare(tmp_path / "data", recipe)
    assert 'data.sources.0.commit: "abc" there, "def" here' in refusal(prepare, tmp_path / "data", recipe)


def test_a_run_never_reads_the_tokens_of_the_next_data_set(made, root):
    """Shards are mapped when they are first touched: those of a set that took the place are refused, copies are not."""
    prepare(root, mixed(made, name="mixed"))
    cut_into_shards(root / "mixed", 3_000)
    recipe = mixed(made, name="mixed")
    data = open_prepared(recipe, root)
    for path in (root / "mixed" / "train").glob("*.arrow"):
        path.write_bytes(path.read_bytes())
    first = data.train.read(0, 10).tolist()
    prepare(root, mixed(made, name="mixed", validation_share=0.3), replace=True)
    cut_into_shards(root / "mixed", 3_000)
    assert data.train.read(0, 10).tolist() == first
    for stream in (data.train, pickle.loads(pickle.dumps(data.train))):
        assert "the data set was replaced while it was read" in refusal(stream.read, 6_000, 6_010)
    (root / "mixed").rename(root / "new")
    assert "was replaced while it was read" in refusal(data.train.read, 6_000, 6_010)


def test_a_place_that_nothing_can_be_renamed_into_is_refused_at_once(made, tmp_path, disk_of):
    disk = disk_of("10m")
    assert "a disk is mounted there" in refusal(prepare, disk.parent, mixed(made, name=disk.name))
    assert not any(disk.iterdir())
    shutil.copytree(made / "data" / "corpus", disk, dirs_exist_ok=True)
    assert prepare(disk.parent, mixed(made, name=disk.name)) == disk, "what is finished there is read"


@pytest.mark.parametrize(
    "content", ["[]", '{"format": 2}', '{"format": 2, "name": "x", "fingerprint": "y", "data": {}}']
)
def test_a_manifest_that_is_none_is_one_line(made, root, content):
    (root / "corpus" / "manifest.json").write_text(content)
    for action in (prepare_data, open_prepared):
        assert "manifest.json: damaged manifest" in refusal(action, mixed(made), root)
