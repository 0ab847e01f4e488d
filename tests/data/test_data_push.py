"""`python -m pretraining.data push`: what arrives at the hub is the data set, and loads as one."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest

from pretraining.data.__main__ import main
from pretraining.data.manifest import read_manifest
from pretraining.data.tools.finished import verify_data
from pretraining.data.tools.push import plan_push
from tests.gear.finished_data import documents_of, make_data, refusal
from tests.gear.local_hub import REPOSITORY_ID, local_hub
from tests.gear.runs import execute

TOOL = [sys.executable, "-m", "pretraining.data"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    """One data set for all tests, which leave it as it is."""
    return make_data(tmp_path_factory.mktemp("push"))


def test_the_card_is_what_datasets_loads_by(made):
    """With the card beside the shards, `load_dataset` finds both splits with all their documents."""
    import datasets
    import yaml

    card = plan_push(made.folder, REPOSITORY_ID)["card"]
    configs = yaml.safe_load(card.split("---")[1])["configs"]
    files = {file["split"]: str(made.folder / file["path"]) for file in configs[0]["data_files"]}
    found = datasets.load_dataset("arrow", data_files=files, cache_dir=str(made.root / "cache"))
    for split in ("train", "validation"):
        assert found[split]["input_ids"][:] == [d.tolist() for d in documents_of(made.folder, split)]
    manifest = read_manifest(made.folder)
    for number in (manifest["splits"]["train"]["tokens"], manifest["tokenizer"]["vocab_size"]):
        assert f"{number:,}" in card


def test_push_sends_everything_and_the_manifest_last(made, tmp_path):
    """What arrives at the hub is the data set, whole; the manifest comes with the last commit, stale shards go."""
    with local_hub() as hub:
        hub.files["train/data-00099-of-00100.arrow"] = b"of an earlier push"
        words = [*TOOL, "push", made.folder, REPOSITORY_ID, "--private", "--json"]
        finished = execute(words, **hub.environment)
        assert finished.code == 0, finished.output
        assert json.loads(finished.stdout)["url"].endswith(REPOSITORY_ID)
        assert hub.created[0]["type"] == "dataset" and "manifest.json" not in hub.commits[0]
        assert set(hub.commits[-1]) == {"README.md", "manifest.json", "train/data-00099-of-00100.arrow"}
        for name, content in hub.files.items():
            (tmp_path / "got" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "got" / name).write_bytes(content)
        assert verify_data(tmp_path / "got")["documents"] == 120
        hub.refuse_with = 403
        finished = execute(words, **hub.environment)
    assert finished.code == 2 and "HF_TOKEN" in finished.stderr and finished.stderr.count("\n") == 1


def test_an_older_manifest_with_a_credential_is_not_published(made, tmp_path):
    """Data that was prepared before recipes with credentials were refused."""
    folder = tmp_path / "old"
    shutil.copytree(made.folder, folder)
    manifest = read_manifest(folder)
    manifest["sources"][0]["path"] = "s3://AKIDEXAMPLE:sesame@bucket/text"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    said = refusal(plan_push, folder, REPOSITORY_ID)
    assert "manifest.json: sources.0.path: s3://***@bucket/text holds a credential" in said


def test_push_without_a_hub_or_a_name_is_one_line(made, tmp_path, capsys):
    """A dry run sends nothing and needs no network; a wrong name and a silent hub cost one line."""
    main(["push", str(made.folder), REPOSITORY_ID, "--dry_run"])
    shown = capsys.readouterr().out
    assert all(path.name in shown for path in (made.folder / "train").iterdir())
    assert "is not a repository name" in refusal(main, ["push", str(made.folder), "a/b/c"])
    finished = execute([*TOOL, "push", made.folder, REPOSITORY_ID, "--json"], HF_TOKEN="hf_local")
    assert finished.code == 2 and "the hub cannot be reached" in finished.stderr
    assert finished.stderr.count("\n") == 1
