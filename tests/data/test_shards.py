"""Token shards: what is written is what `datasets` writes, and is read back as one flat stream."""

import json
import pickle
import resource
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pretraining.data.manifest import read_manifest, verify
from pretraining.data.prepared import open_prepared
from pretraining.data.shards import SplitWriter, TokenSplit, token_dtype
from pretraining.errors import UserError
from tests.gear.finished_data import make_texts, prepare, recipe_for, refusal, write_jsonl
from tests.gear.runs import REPOSITORY, completed


def write_split(folder: Path, documents: list[np.ndarray], shard_tokens: int, dtype=np.uint16) -> TokenSplit:
    writer = SplitWriter(folder, np.dtype(dtype), shard_tokens)
    for document in documents:
        writer.append(document, 3 * len(document))
    return TokenSplit(folder, writer.finish())


def random_documents(count: int, longest: int = 40) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 60_000, draw.integers(1, longest), dtype=np.uint16) for _ in range(count)]


@pytest.fixture
def prepared(tmp_path) -> SimpleNamespace:
    """A small prepared data set, its recipe, and the path of a train shard."""
    recipe = recipe_for(write_jsonl(tmp_path / "corpus.jsonl", make_texts(80)))
    folder = prepare(tmp_path / "data", recipe)
    shard = next((folder / "train").glob("*.arrow"))
    return SimpleNamespace(root=tmp_path / "data", folder=folder, recipe=recipe, shard=shard)


def test_the_folder_is_what_save_to_disk_writes(tmp_path):
    """Same file names, same JSON keys, same features, same schema, same table as `datasets` itself."""
    import datasets
    import pyarrow as pa

    documents = random_documents(20)
    write_split(tmp_path / "ours", documents, 10_000)
    features = datasets.load_from_disk(str(tmp_path / "ours")).features
    rows = {"input_ids": documents, "num_bytes": [3 * len(document) for document in documents]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "theirs"))
    ours, theirs = (sorted(p.name for p in (tmp_path / name).iterdir()) for name in ("ours", "theirs"))
    assert ours == theirs
    for name in ("state.json", "dataset_info.json"):
        mine, other = (json.loads((tmp_path / side / name).read_text()) for side in ("ours", "theirs"))
        assert {**mine, "_fingerprint": ""} == {**other, "_fingerprint": ""}
    shard = "data-00000-of-00001.arrow"
    tables = [pa.ipc.open_stream(tmp_path / side / shard).read_all() for side in ("ours", "theirs")]
    assert tables[0].equals(tables[1]) and tables[0].schema.metadata == tables[1].schema.metadata
    assert tables[0].column(0).num_chunks == 1


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_tokens_take_the_smallest_type_that_holds_them(tmp_path, vocab_size, dtype):
    """uint16 where the vocabulary allows, uint32 above; the highest id survives the disk."""
    assert token_dtype(vocab_size) == dtype
    split = write_split(tmp_path / "s", [np.array([0, vocab_size - 1], dtype)], 10, dtype)
    assert split.read(0, 2).tolist() == [0, vocab_size - 1] and split.dtype == dtype


def test_the_stream_crosses_shard_borders(tmp_path):
    """Any range of the stream is the same range of the documents laid end to end; a long one has a shard of its own."""
    documents = [*random_documents(100), np.arange(500, dtype=np.uint16), *random_documents(100)]
    split = write_split(tmp_path / "s", documents, 150)
    stream = np.concatenate(documents)
    assert len(list(split.folder.glob("*.arrow"))) > 20
    assert (split.num_tokens, split.num_documents) == (len(stream), 201)
    draw = np.random.default_rng(1)
    for start, stop in np.sort(draw.integers(0, len(stream) + 1, (300, 2)), axis=1).tolist():
        assert (split.read(start, stop) == stream[start:stop]).all()
        ends = np.cumsum([len(document) for document in documents])
        assert (split.document_ends(start, stop) == ends[(ends > start) & (ends <= stop)]).all()
    with pytest.raises(IndexError):
        split.read(0, len(stream) + 1)


def test_reading_inside_a_shard_copies_nothing(tmp_path):
    """A range inside a shard is a read-only view of the memory-mapped file."""
    split = write_split(tmp_path / "s", random_documents(50), 10_000)
    views = [split.read(3, 60), split.read(3, 60)]
    assert np.shares_memory(*views) and not views[0].flags.writeable


def test_a_small_corpus_takes_little_memory(tmp_path):
    """The writer's buffer grows with what is written: a whole shard's would be 128 MB."""
    write_split(tmp_path / "first", random_documents(1), 1000)  # what is imported is not counted
    tracemalloc.start()
    documents = random_documents(2000)
    writer = SplitWriter(tmp_path / "train", np.dtype(np.uint16))
    for document in documents:
        writer.append(document, 1)
    split = TokenSplit(tmp_path / "train", writer.finish())
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert np.array_equal(split.read(0, split.num_tokens), np.concatenate(documents))


def test_bytes_before_counts_whole_documents_exactly(tmp_path):
    """Exact at document ends, by share of tokens inside a document, over shard borders."""
    writer = SplitWriter(tmp_path / "s", np.dtype(np.uint16), 25)
    sizes, num_bytes = [10, 10, 20, 4], [35, 7, 100, 0]
    for size, count in zip(sizes, num_bytes, strict=True):
        writer.append(np.zeros(size, np.uint16), count)
    split = TokenSplit(writer.folder, writer.finish())
    assert [split.bytes_before(token) for token in (0, 10, 20, 40, 44)] == [0, 35, 42, 142, 142]
    assert split.bytes_before(5) == 17.5 and split.bytes_before(25) == 42 + 25


def test_a_pickled_split_reads_the_same(tmp_path):
    """DataLoader workers get a copy that maps the shards anew."""
    split = write_split(tmp_path / "s", random_documents(50), 100)
    split.read(0, split.num_tokens)
    state = pickle.dumps(split)
    assert len(state) < 20_000
    assert (pickle.loads(state).read(0, 300) == split.read(0, 300)).all()


def test_more_shards_than_file_descriptors(tmp_path):
    """A run touches every shard of its data in one process, whatever `ulimit -n` says."""
    split = write_split(tmp_path / "s", random_documents(200, longest=4), 1)
    tokens = split.read(0, split.num_tokens).tolist()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 100, hard))
    try:
        narrow = TokenSplit(split.folder, split._entry)
        narrow._most_open = min(narrow._most_open, 90)
        twice = [*range(split.num_tokens), *range(split.num_tokens)]
        assert [int(narrow.read(start, start + 1)[0]) for start in twice] == tokens * 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_truncated_shard_says_expected_and_found_size(prepared):
    """Sizes are checked at every open."""
    size = prepared.shard.stat().st_size
    with prepared.shard.open("r+b") as file:
        file.truncate(size - 64)
    message = refusal(open_prepared, prepared.recipe, prepared.root)
    assert str(prepared.shard) in message and f"{size:,}" in message and f"{size - 64:,}" in message
    prepared.shard.unlink()
    assert "shard is missing" in refusal(open_prepared, prepared.recipe, prepared.root)


def test_one_flipped_bit_is_found(prepared):
    """Same size, other content: found by `verify`, which every open of a small data set includes."""
    manifest = read_manifest(prepared.folder)
    verify(prepared.folder, manifest)
    content = bytearray(prepared.shard.read_bytes())
    content[len(content) // 2] ^= 1
    prepared.shard.write_bytes(content)
    with pytest.raises(UserError, match=r"damaged shard: checksum xxh128:.*, expected xxh128:"):
        verify(prepared.folder, manifest)
    assert "damaged shard" in refusal(open_prepared, prepared.recipe, prepared.root)


def test_an_exchanged_tokenizer_file_is_found(prepared):
    """The shards are worthless with another vocabulary, and so is a model that has fewer ids."""
    prepared.recipe.model["vocab_size"] = 256
    said = "it has 280 ids, the model only 256"
    assert said in refusal(open_prepared, prepared.recipe, prepared.root)
    prepared.recipe.model["vocab_size"] = 512
    path = prepared.folder / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    assert "tokenizer.json: not the one" in refusal(open_prepared, prepared.recipe, prepared.root)


def test_a_hundred_billion_tokens_open_at_once():
    """10^11 tokens (sparse files): the first batch needs less than 200 MB; benchmarks/data_open.py has the seconds."""
    script = REPOSITORY / "benchmarks" / "data_open.py"
    command = [sys.executable, str(script), "--num_tokens", str(10**11)]
    measured = json.loads(completed(command).stdout)
    assert measured["tokens"] == 10**11 and measured["peak_bytes"] < 200e6
