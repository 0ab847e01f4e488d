"""Small texts, a recipe's data section for them, the data set that is made of them, and what tests do with one."""

import json
import random
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pretraining.data.checksums import content_fingerprint
from pretraining.data.finished import open_finished
from pretraining.data.manifest import read_manifest
from pretraining.data.preparation.prepare import prepare_data
from pretraining.data.shards import SplitWriter
from pretraining.errors import UserError
from pretraining.recipe.data import Data
from pretraining.recipe.model import Model
from tests.gear.runs import REPOSITORY

WORDS = "def return tensor shard café naïve ранг 模型 🙂 import x == loss"


def make_texts(count: int, seed: int = 0, num_words: int = 60) -> list[str]:
    draw, words = random.Random(seed), WORDS.split()
    return [f"{number} " + " ".join(draw.choices(words, k=num_words)) for number in range(count)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts))
    return path


def recipe_for(*sources: Path | str | dict, **data) -> SimpleNamespace:
    """A stand-in for a recipe: the attributes the data room reads."""
    entries = [source if isinstance(source, dict) else {"path": str(source)} for source in sources]
    section = {"name": "corpus", "sources": entries, "tokenizer": {"train_vocab_size": 280}}
    # each task would check another encoder against this one
    section |= {"validation_share": 0.2, "encoder": "tokenizers", **data}
    asked = {"name": "small", "words": ["--recipe", "small"], "sequence_length": 32, "extensions": ()}
    return SimpleNamespace(**asked, data=Data.of(section), model=Model(vocab_size=512))


def prepare(root: Path, recipe, replace: bool = False) -> Path:
    return prepare_data(recipe, root, show_progress=False, replace=replace).folder


def recipe_file(folder: Path, source: Path, **data) -> Path:
    """A real recipe: the small GPT-2 with another data section."""
    values = json.loads((REPOSITORY / "recipes" / "features" / "gpt2.json").read_text())
    values["data"] = {"name": "corpus", "sources": [{"path": str(source)}], "sequence_length": 32}
    values["data"] |= {"tokenizer": {"train_vocab_size": 280}, "validation_share": 0.2, **data}
    path = folder / "small.json"
    path.write_text(json.dumps(values))
    return path


def data_prep(recipe: Path, root: Path, *more: str) -> list[str]:
    script = str(REPOSITORY / "data_prep.py")
    return [sys.executable, script, "--recipe", str(recipe), "--data_dir", str(root), *more]


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
    put_split(folder, "train", writer)


def put_split(folder: Path, name: str, writer: SplitWriter, **more) -> None:
    """Put what was written, and what else the manifest says of it, in the place of a split."""
    entry = {**writer.finish(), **more}
    shutil.rmtree(folder / name)
    writer.folder.rename(folder / name)
    change_manifest(folder, lambda manifest: manifest["splits"].update({name: entry}))


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
