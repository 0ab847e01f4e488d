"""`python -m pretraining.data verify`: every byte of a data set is what was written, or the file is named."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pretraining.data.manifest import read_manifest
from pretraining.data.shards import SplitWriter
from pretraining.data.tools.finished import verify_data
from tests.gear.finished_data import answer, change_manifest, copy_of, make_data, refusal


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    """One data set for all tests, which leave it as it is."""
    return make_data(tmp_path_factory.mktemp("verify"))


@pytest.fixture
def copy(made, tmp_path) -> Path:
    """A copy of the data set that a test may damage."""
    return copy_of(made.folder, tmp_path / "corpus")


def test_verify_reads_everything(made, capsys):
    """A whole data set passes, and the answer counts what was read."""
    found = answer(capsys, "verify", made.folder)
    manifest = read_manifest(made.folder)
    splits = manifest["splits"].values()
    assert found["shards"] == sum(len(split["shards"]) for split in splits) > 5
    assert (found["documents"], found["size"]) == (120, sum(s["size"] for e in splits for s in e["shards"]))


@pytest.mark.parametrize(
    "damage", ["flip", "cut", "missing", "tokenizer", "tokenizer_config", "state", "swap"]
)
def test_verify_names_the_damaged_file(copy, damage):
    """Any damaged file is named in one line that says what to do."""
    shards = sorted((copy / "train").glob("*.arrow"))
    broken = {
        "tokenizer": copy / "tokenizer" / "tokenizer.json",
        "tokenizer_config": copy / "tokenizer" / "tokenizer_config.json",
        "state": copy / "train" / "state.json",
    }
    path = broken.get(damage, shards[2])
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "swap":
        shards[3].rename(path)
        shards[3].write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:-8])
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.write_text(path.read_text().replace("o", "0", 1))
    message = refusal(verify_data, copy)
    assert str(path) in message and "copy it again" in message


@pytest.mark.parametrize(
    ("document", "num_bytes", "problem"),
    [([5, 6, 7], 3, "does not end with"), ([5, 279, 280, 0], 3, "token id 280"), ([], 0, "has no tokens")],
)
def test_verify_finds_what_checksums_cannot(copy, document, num_bytes, problem):
    """Shards with right checksums are still refused where their documents are not what a model can read."""
    writer = SplitWriter(copy / "wrong", np.dtype(np.uint16))
    writer.append(np.array([5, 0], np.uint16), 1)
    writer.append(np.array(document, np.uint16), num_bytes)
    entry = {**writer.finish(), "unigram_bits_per_byte": 1.0}
    for path in (copy / "validation").iterdir():
        path.unlink()
    for path in (copy / "wrong").iterdir():
        path.rename(copy / "validation" / path.name)
    change_manifest(copy, lambda manifest: manifest["splits"].update(validation=entry))
    assert problem in refusal(verify_data, copy)


def test_verify_finds_a_changed_manifest(copy):
    """Counts that do not add up, and a fingerprint that is not that of the checksums."""
    manifest = read_manifest(copy)
    manifest["splits"]["train"]["tokens"] += 1
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert "damaged manifest: the shards of train hold" in refusal(verify_data, copy)
    manifest["splits"]["train"]["tokens"] -= 1
    manifest["fingerprint"] = "0" * 32
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert "its fingerprint is not that of its checksums" in refusal(verify_data, copy)
