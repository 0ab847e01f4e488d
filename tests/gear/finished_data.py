"""A small finished data set of several shards, and what tests of the data tools do with one."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pretraining.data.__main__ import main
from pretraining.data.checksums import content_fingerprint
from pretraining.data.finished import open_finished
from pretraining.data.manifest import read_manifest
from pretraining.data.shards import SplitWriter
from pretraining.errors import UserError
from tests.data.test_data_prep import make_texts, prepare, recipe_for, write_jsonl


def make_data(root: Path) -> SimpleNamespace:
    """A data set whose train split has several shards, with its texts and their file."""
    texts = make_texts(120)
    source = write_jsonl(root / "corpus.jsonl", texts)
    folder = prepare(root / "data", recipe_for(source))
    cut_into_shards(folder, 4_000)
    return SimpleNamespace(root=root, folder=folder, texts=texts, source=source)


def cut_into_shards(folder: Path, shard_tokens: int) -> None:
    """Write the train split anew in small shards, as a large corpus has many."""
    split = open_finished(folder).split("train")
    documents = [split.document(number) for number in range(split.num_documents)]
    writer = SplitWriter(folder / "small", split.dtype, shard_tokens)
    for document in documents:
        writer.append(document.tokens, document.num_bytes)
    entry = writer.finish()
    for path in (folder / "train").iterdir():
        path.unlink()
    for path in (folder / "small").iterdir():
        path.rename(folder / "train" / path.name)
    (folder / "small").rmdir()
    change_manifest(folder, lambda manifest: manifest["splits"].update(train=entry))


def entry_of_sources(folder: Path, sources: list[list[np.ndarray]], shard_tokens: int) -> dict:
    """Write the documents of several sources into shards of their own; return the split's part of a manifest."""
    shards = []
    for number, documents in enumerate(sources):
        writer = SplitWriter(folder / str(number), np.dtype(np.uint16), shard_tokens)
        for document in documents:
            writer.append(document.astype(np.uint16), 3 * len(document))
        for shard in writer.finish()["shards"]:
            name = f"{number}-{shard['file']}"
            (writer.folder / shard["file"]).rename(folder / name)
            shards.append({**shard, "source": number, "file": name})
    totals = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
    return {**totals, "dtype": "uint16", "shards": shards}


def change_manifest(folder: Path, change) -> None:
    """Change a manifest, with the fingerprint that goes with its checksums."""
    manifest = read_manifest(folder)
    change(manifest)
    manifest["fingerprint"] = content_fingerprint(manifest["splits"])
    (folder / "manifest.json").write_text(json.dumps(manifest))


def copy_of(folder: Path, target: Path) -> Path:
    """A copy of a data set, at `target`."""
    return Path(shutil.copytree(folder, target))


def refusal(action, *arguments, **options) -> str:
    """The one line of the UserError that the action must raise."""
    with pytest.raises(UserError) as caught:
        action(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def documents_of(folder: Path, name: str = "train") -> list[np.ndarray]:
    """[tokens] of every document of a split."""
    split = open_finished(folder).split(name)
    return [np.array(split.document(number).tokens) for number in range(split.num_documents)]


def answer(capsys, *words) -> dict | list:
    """What a verb prints with --json."""
    main([*map(str, words), "--json"])
    return json.loads(capsys.readouterr().out)
