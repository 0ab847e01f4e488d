"""Files of strangers (SECURITY.md): nothing of them runs code, leads out of its folder, or keeps a reader waiting."""

import ast
import json
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pretraining.checkpoints import __main__ as checkpoints
from pretraining.checkpoints.folders import health
from pretraining.checkpoints.format import MARKER, read_receipt, write_json, write_marker
from pretraining.checkpoints.publish import LIST, to_store
from pretraining.checkpoints.remote import RemoteRun
from pretraining.data.finished import source_names
from pretraining.data.manifest import parse_manifest
from pretraining.data.publishing import preparation_lock
from pretraining.data.streaming.cache import ShardCache
from pretraining.data.streaming.remote_data import RemoteData
from pretraining.errors import UserError
from pretraining.outside.files import inside, parse_json, read_bytes
from pretraining.planning.comparison import measured_beside_planned
from pretraining.postmortem import main as postmortem
from pretraining.recipe import load_recipe
from pretraining.reporting.__main__ import main as reporting
from pretraining.runtime.durable_files import append_row, read_rows
from pretraining.runtime.durable_files import write_json as replace_json
from pretraining.runtime.journal import Journal
from pretraining.runtime.lock import holder_of, lock_folder
from pretraining.runtime.run_folder import RunFolder
from tests.gear.finished_data import refusal
from tests.gear.outside_fuzz import DEFECTS, OutsideFuzz
from tests.gear.runs import REPOSITORY, execute, refused

MUTATIONS = 250
ELSEWHERE = ["../victim", "x/../../victim", "/tmp/victim", "..", ".", "", "a\\b", "a\x00b", "a\nb", 7, None]


@pytest.fixture
def precious(tmp_path) -> Path:
    """A file, and a folder, that belong to somebody else."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "precious.txt").write_text("precious")
    return tmp_path / "victim" / "precious.txt"


@pytest.fixture
def run(tmp_path, workshop) -> RunFolder:
    """A copy of a finished run."""
    return RunFolder(shutil.copytree(workshop.plain().folder, tmp_path / "runs" / "run"))


def test_mutated_files_are_read_or_refused_with_one_line(workshop, tmp_path):
    """Promise: a traceback means a bug of ours. No reader of outside files fails, hangs, or writes elsewhere.

    `benchmarks/outside_fuzz.py` draws more of them.
    """
    fuzz = OutsideFuzz(workshop, tmp_path, seed=20)
    outcomes = [fuzz.try_one() for _ in range(MUTATIONS)]
    assert not [outcome for outcome in outcomes if outcome.kind in DEFECTS]
    assert {outcome.reader for outcome in outcomes} == set(fuzz.readers)
    kinds = [outcome.kind for outcome in outcomes]
    assert min(kinds.count("read"), kinds.count("refused")) > MUTATIONS / 5


def test_the_fuzz_would_see_a_defect(workshop, tmp_path):
    """A reader that trusts its file is caught: it fails, waits, or writes elsewhere."""
    fuzz = OutsideFuzz(workshop, tmp_path, seed=1)
    name, reader = "hostfile", fuzz.readers["hostfile"]
    trusting_ones = {"traceback": lambda: int(reader.path.read_text().split("=")[1])}
    trusting_ones["outside"] = partial((tmp_path / "sentinel" / "new").write_text, "x")
    for kind, trusting in trusting_ones.items():
        fuzz.readers = {name: type(reader)(reader.path, trusting)}
        assert kind in {fuzz.try_one().kind for _ in range(20)}


@pytest.mark.parametrize("name", ELSEWHERE, ids=repr)
def test_a_name_stays_below_its_folder(tmp_path, name):
    assert inside(tmp_path, "a/b") == tmp_path / "a" / "b"
    with pytest.raises(ValueError, match="is no name of a file below"):
        inside(tmp_path, name)


CHANGES = {
    "tokenizer": lambda m, wrong: m["tokenizer"].update(fingerprint=wrong),
    "fingerprint": lambda m, wrong: m.update(fingerprint=wrong),
    "file": lambda m, wrong: m["splits"]["train"]["shards"][0].update(file=wrong),
    "checksum": lambda m, wrong: m["splits"]["train"]["shards"][0].update(checksum=f"xxh128:{wrong}"),
    "split": lambda m, wrong: m["splits"].update({wrong: m["splits"]["train"]}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wrong", ["x/../../../victim", "{victim}"])
def test_a_manifest_names_no_path_elsewhere(workshop, tmp_path, precious, change, wrong):
    """Promise: nothing of the user's is lost. A stranger's manifest removed a folder outside of the cache."""
    prepared = next(workshop.data.glob("*/manifest.json")).parent
    folder = Path(shutil.copytree(prepared, tmp_path / "data" / "corpus"))
    manifest = json.loads((folder / "manifest.json").read_text())
    CHANGES[change](manifest, wrong.replace("{victim}", str(precious.parent)))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    remote = RemoteData(folder.as_uri(), ShardCache(tmp_path / "cache", 1 << 30))
    with pytest.raises(UserError, match=r"damaged manifest: .+; copy the data there again"):
        remote.local_folder(remote.read_manifest())
    assert [path.name for path in precious.parent.iterdir()] == ["precious.txt"]
    assert not (tmp_path / "cache").exists()


def test_a_marker_and_a_receipt_name_no_file_elsewhere(run, precious):
    """Whoever makes a marker can make its checksum too."""
    folder = max(run.path.glob("checkpoint-*"))
    marker = json.loads((folder / MARKER).read_text())
    entry = {"bytes": 8, "checksum": "xxh128:" + 32 * "0"}
    for name in ("../../../victim/precious.txt", str(precious)):
        kept = {key: value for key, value in marker.items() if key not in ("format", "checksum")}
        write_marker(folder, {**kept, "files": {**marker["files"], name: entry}})
        remote = RemoteRun(run.path.parent.as_uri(), run.path.name)
        assert "unknown key" in health(remote, folder.name).reason
        write_json(folder / "rank-00000-of-00001.json", {"files": {name: entry}})
        assert "unknown key" in refusal(read_receipt, folder, 0, 1)
    assert precious.read_text() == "precious"


def test_a_list_of_what_was_published_removes_nothing_elsewhere(tmp_path, precious):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / LIST).write_text(json.dumps({"../victim/precious.txt": {}}))
    assert "no list of what was published" in refusal(to_store, {}, str(tmp_path / "store"))
    assert precious.exists()


def test_nothing_of_others_is_published_over(tmp_path, monkeypatch):
    """An interrupted `push` goes on; one into a repository of somebody else leaves its README as it is."""
    export, mine = tmp_path / "export", tmp_path / "mine"
    for folder, text in ((export, "a model"), (mine, "my repository")):
        folder.mkdir()
        (folder / "README.md").write_text(text)
    files = {"README.md": export / "README.md", "config.json": export / "config.json"}
    said = "README.md would be written over, and nothing was published there before"
    assert said in refusal(to_store, {"README.md": files["README.md"]}, str(mine))
    assert [path.read_text() for path in mine.iterdir()] == ["my repository"]
    place = tmp_path / "place"
    files["config.json"].write_text("{}")
    with monkeypatch.context() as broken:
        gone = UserError("the network is gone")
        broken.setattr(RemoteRun, "write_file", lambda *_: (_ for _ in ()).throw(gone))
        assert "the network is gone" in refusal(to_store, files, str(place))
    (place / "README.md").write_text("half")
    to_store(files, str(place))
    assert sorted(path.name for path in place.iterdir()) == sorted([*files, LIST])
    assert (place / "README.md").read_text() == "a model"


@pytest.mark.parametrize("row", ["{}", '{"step": 1, "to_step": 0, "samples": [1]}', '{"step": "x"}'])
def test_a_damaged_journal_is_one_line(tmp_path, row):
    """It decides which samples a step has, so that nothing of it is left out in silence."""
    (tmp_path / "journal.jsonl").write_text(row)
    assert "journal is damaged" in refusal(Journal.read, tmp_path / "journal.jsonl")


def test_nothing_is_written_through_a_link(tmp_path, precious):
    """Promise: nothing of the user's is lost. `ln -s ../precious.txt runs/x/.lock` made every command empty it."""
    run = tmp_path / "run"
    run.mkdir()
    for name in (".lock", "events.jsonl", "recipe.json.partial"):
        (run / name).symlink_to(precious)
    (tmp_path / ".data.lock").symlink_to(precious)
    writes = [partial(lock_folder, run), partial(holder_of, run)]
    writes.append(preparation_lock(tmp_path / "data").__enter__)
    writes += [partial(append_row, run / "events.jsonl", {}), partial(replace_json, run / "recipe.json", {})]
    for write in writes:
        with pytest.raises(OSError, match="symbolic links"):
            write()
    prune = ["prune", str(run), "--keep_last", "1", "--force"]
    refused(execute(["python", "-m", "pretraining.checkpoints", *prune]))
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("name", ["committed.json", "events.jsonl", "metrics.jsonl", "recipe.json"])
def test_a_pipe_keeps_nobody_waiting(run, name, capsys):
    """Each command answers, or says one line."""
    path = max(run.path.glob("checkpoint-*")) / name if name == MARKER else run.path / name
    path.unlink()
    os.mkfifo(path)
    place = str(run.path)
    commands = [partial(reporting, ["csv", place]), partial(postmortem, [place])]
    commands += [partial(checkpoints.main, ["list", place]), partial(load_recipe, str(run.recipe))]
    for command in commands:
        try:
            command()
        except (UserError, OSError) as error:
            assert "is no regular file" in str(error)
    with pytest.raises(OSError, match="is no regular file"):
        read_bytes(path)


def test_brackets_without_end_are_no_rows(run, capsys):
    """In events.jsonl and metrics.jsonl: the other lines count."""
    before = len(read_rows(run.events))
    for path in (run.events, run.metrics):
        with path.open("a") as file:
            file.write("[" * 100_000 + "\n" + "9" * 5000 + "\n")
    assert len(read_rows(run.events)) == before
    for command in (["analyze"], ["csv"], []):
        reporting([*command, str(run.path)])
    postmortem([str(run.path)])
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)


def test_a_data_set_of_another_shape_is_one_line(workshop):
    manifest = next(workshop.data.glob("*/manifest.json"))
    whole = json.loads(manifest.read_text())
    for change in ({"tokens": "x"}, {"buffers": {}}, {"size": -1}, {"documents": 1.5}):
        entry = {**whole["splits"]["train"], "shards": [{**whole["splits"]["train"]["shards"][0], **change}]}
        content = json.dumps({**whole, "splits": {**whole["splits"], "train": entry}})
        with pytest.raises(UserError, match=rf"damaged manifest: splits.train.shards.0.{next(iter(change))}"):
            parse_manifest(content, "it", "copy it", "make it")


def test_a_data_set_of_other_sources_than_it_names_is_one_line(workshop):
    manifest = json.loads(next(workshop.data.glob("*/manifest.json")).read_text())
    assert source_names(manifest) == ["corpus"]
    with pytest.raises(UserError, match="counts 0 sources, and its data section names 1"):
        source_names({**manifest, "sources": []})


def test_a_run_is_compared_with_its_plan_whatever_a_marker_holds(run):
    """What a stranger wrote there ended `planning compare`, and the last line of a finished run, in a traceback."""
    marker = max(run.path.glob("checkpoint-*/committed.json"), key=lambda path: path.stat().st_mtime)
    for wrong in ("[]", '{"files": []}', '{"files": {"a": {"bytes": "x"}}}', "[" * 100_000):
        marker.write_text(wrong)
        assert measured_beside_planned(run.path)
    marker.unlink()
    os.mkfifo(marker)
    assert measured_beside_planned(run.path)


def test_no_pickle_is_read_without_a_list_of_classes(tmp_path):
    """Promise: files of strangers run no code. A pickle runs whatever it names, unless its classes are listed.

    `torch.load` has torch's list with weights_only=True, `np.load` reads none by default; any other way is an
    `Unpickler` with a `find_class` of its own.
    """
    faults = []
    for path in [*(REPOSITORY / "pretraining").rglob("*.py"), *REPOSITORY.glob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        listing = [c for c in classes if any(getattr(each, "name", "") == "find_class" for each in c.body)]
        checked, file = [base for node in listing for base in node.bases], path.relative_to(REPOSITORY)
        for node in ast.walk(tree):
            place = f"{file}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None)
                names = {alias.name for alias in node.names} | {module}
                pickles = {"dill", "cloudpickle", "joblib", "shelve", "marshal", "_pickle"}
                faults += [place] if names & pickles or module == "pickle" else []
            elif isinstance(node, ast.Attribute) and node not in checked:
                read = ast.unparse(node) if node.attr in ("load", "loads", "Unpickler") else ""
                faults += [place] if read.startswith("pickle.") else []
            elif isinstance(node, ast.Call):
                options = {each.arg: each.value for each in node.keywords}
                weights_only = getattr(options.get("weights_only"), "value", None)
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                is_torch = called == "load" and ast.unparse(node.func).startswith("torch.")
                unlisted = is_torch and weights_only is not True
                unlisted |= weights_only is False or "allow_pickle" in options
                # torch's own readers of distributed checkpoints unpickle `.metadata`
                reads_metadata = called.endswith("FileSystemReader")
                unlisted |= reads_metadata and path.stem != "weight_files"
                faults += [place] if unlisted else []
    assert not faults
    np.save(tmp_path / "pickled.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        np.load(tmp_path / "pickled.npy")
