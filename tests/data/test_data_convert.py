"""`python -m pretraining.data convert`: what it writes others can read, and it reads what others wrote."""

import gzip
import json
import os
import signal
import struct
import sys
import time
from functools import partial
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest

from pretraining.data.__main__ import main
from pretraining.data.finished import verify_data
from pretraining.data.manifest import read_manifest
from pretraining.data.prepared import open_prepared
from pretraining.data.tokenizer import train_tokenizer
from pretraining.data.tools.convert import TokenBytes, TokenFiles, draw_of_tokens, export_data, import_data
from pretraining.runtime.exit_codes import INTERRUPTED
from tests.gear.finished_data import documents_of, make_texts, prepare, recipe_for, refusal, write_jsonl
from tests.gear.runs import Started, completed

TOOL = [sys.executable, "-m", "pretraining.data"]


@pytest.mark.parametrize("form", ["megatron", "datatrove"])
def test_there_and_back_is_the_same_data(made, tmp_path, form):
    """Splits, tokens, document ends, text bytes, fingerprint: all return, so a run could go on with them.

    Files whose names say train and validation keep these splits. A recipe opens converted data by naming what it was
    converted from, and by no other source.
    """
    out = export_data(made.folder, form, tmp_path / "out")
    if form == "megatron":  # other names that say the same
        for path in (tmp_path / "out").glob("*.*"):
            path.rename(path.with_name(f"web_{path.name.replace('validation', 'val')}"))
    folder = tmp_path / "data" / "corpus"
    import_data(folder, TokenFiles(form, tmp_path / "out"), None, 0.5)
    verify_data(folder)
    there, back = read_manifest(made.folder), read_manifest(folder)
    assert out["train"]["tokens"] == there["splits"]["train"]["tokens"]
    assert back["fingerprint"] == there["fingerprint"] and back["tokenizer"] == there["tokenizer"]
    for split, key in product(("train", "validation"), ("documents", "tokens", "bytes", "checksum")):
        assert back["splits"][split][key] == there["splits"][split][key]
    entropies = [m["splits"]["validation"]["unigram_bits_per_byte"] for m in (there, back)]
    assert entropies[0] == pytest.approx(entropies[1], abs=2e-6)
    opened = open_prepared(recipe_for(tmp_path / "out"), tmp_path / "data")
    assert opened.fingerprint == there["fingerprint"]
    cleaned = recipe_for(tmp_path / "out", filters=[{"rule": "length", "min_words": 5}])
    assert "data.filters has no effect" in refusal(open_prepared, cleaned, tmp_path / "data")
    message = refusal(open_prepared, recipe_for(made.source), tmp_path / "data")
    assert f"converted from {form} files" in message and str(tmp_path / "out") in message


@pytest.mark.parametrize("borders", ["bos_eos", "bos"])
def test_what_begins_a_document_is_no_text_there_and_back(tmp_path, borders):
    """The bytes of the texts alone are counted, and it stays known; documents without an end-of-text token get one."""
    source = write_jsonl(tmp_path / "texts.jsonl", make_texts(60))
    train_tokenizer([], 258, tmp_path / "tokenizer", special_tokens=["<|begin|>"])
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "bos_token": "<|begin|>"}))
    folder = prepare(tmp_path / "data", recipe_for(source, tokenizer=str(config.parent), borders=borders))
    export_data(folder, "megatron", tmp_path / "out")
    made = import_data(tmp_path / "back", TokenFiles("megatron", tmp_path / "out"), None, 0.5)
    verify_data(tmp_path / "back")
    there, back = read_manifest(folder), read_manifest(tmp_path / "back")
    assert back["data"]["borders"] == "bos_eos" and back["tokenizer"] == there["tokenizer"]
    for split in ("train", "validation"):
        assert back["splits"][split]["bytes"] == there["splits"][split]["bytes"]
    assert made["eos_added"] == (0 if borders == "bos_eos" else 60)
    assert (back["fingerprint"] == there["fingerprint"]) == (borders == "bos_eos")


def read_megatron(prefix: Path) -> list[np.ndarray]:
    """An independent reader of the published layout: sequence i lies at its pointer with its length."""
    index = prefix.with_name(prefix.name + ".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, marks = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1 and len(index) == 34 + 12 * sequences + 8 * marks
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    assert struct.unpack_from(f"<{marks}q", index, 34 + 12 * sequences) == tuple(range(sequences + 1))
    content = prefix.with_name(prefix.name + ".bin").read_bytes()
    kind = {8: np.uint16, 4: np.int32}[code]
    return [np.frombuffer(content, kind, n, at) for n, at in zip(lengths, pointers, strict=True)]


def test_megatron_files_have_the_published_layout(made, tmp_path):
    """Read byte by byte as Megatron does, the documents are ours; so they are by Megatron-Core, if it is installed."""
    export_data(made.folder, "megatron", tmp_path / "out")
    for split in ("train", "validation"):
        found, expected = read_megatron(tmp_path / "out" / split), documents_of(made.folder, split)
        assert [document.tolist() for document in found] == [document.tolist() for document in expected]
    if find_spec("megatron"):
        program = (
            "import sys, numpy\n"
            "from megatron.core.datasets.indexed_dataset import IndexedDataset\n"
            "data = IndexedDataset(sys.argv[1])\n"
            "numpy.save(sys.argv[2], numpy.concatenate([data[i] for i in range(len(data))]))"
        )
        words = [sys.executable, "-c", program, tmp_path / "out" / "train", tmp_path / "found.npy"]
        completed(words, PYTHONPATH=os.pathsep.join(sys.path))
        assert (np.load(tmp_path / "found.npy") == np.concatenate(documents_of(made.folder))).all()


def write_megatron_by_hand(prefix: Path, documents: list[list[list[int]]], kind: type, code: int) -> None:
    """An independent writer: documents of several sequences."""
    sequences = [np.array(sequence, kind) for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    pointers = [sum(lengths[:i]) * np.dtype(kind).itemsize for i in range(len(lengths))]
    marks = np.cumsum([0] + [len(document) for document in documents]).tolist()
    prefix.with_suffix(".bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    header = struct.pack("<9sQBQQ", b"MMIDIDX", 1, code, len(lengths), len(marks))
    tail = struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(marks)}q", *lengths, *pointers, *marks)
    prefix.with_suffix(".idx").write_bytes(header + tail)


def test_documents_of_several_sequences_and_without_eos(made, tmp_path):
    """Sequences are joined, a missing end of text is added, empty documents are left out; all of it counted."""
    draw = np.random.default_rng(0)
    documents = [[draw.integers(1, 280, n).tolist() for n in (5, 0, 3)] for _ in range(30)]
    documents[3], documents[4] = [], [[7, 8, 0]]
    write_megatron_by_hand(tmp_path / "theirs", documents, np.int64, 5)
    counts = convert(made, tmp_path, "megatron", share=0.3)
    assert (counts["documents"], counts["eos_added"], counts["empty"]) == (29, 28, 1)
    verify_data(tmp_path / "ours")
    joined = [list(chain(*document)) for document in documents if document]
    closed = [ids if ids[-1] == 0 else [*ids, 0] for ids in joined]
    for split, here in (("train", False), ("validation", True)):
        expected = [ids for ids in closed if (draw_of_tokens(np.array(ids[:-1])) < 0.3) is here]
        assert [d.tolist() for d in documents_of(tmp_path / "ours", split)] == expected


def convert(made, folder: Path, form: str, origin: str = "theirs", share: float = 0.5, **more: str) -> dict:
    """Make `folder / "ours"` of another tool's files with the tokenizer that they are made with."""
    files = TokenFiles(form, folder / origin, **more)
    return import_data(folder / "ours", files, str(made.folder / "tokenizer"), share)


def test_datatrove_itself_reads_and_writes_them(made, tmp_path):
    """Its dataset sees our tokens and document starts; its writer's files, metadata included, are as ours."""
    pytest.importorskip("datatrove")
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile
    from datatrove.utils.dataset import DatatroveFolderDataset

    export_data(made.folder, "datatrove", tmp_path / "out")
    files = sorted((tmp_path / "out" / "train").glob("*.ds"))
    windows = DatatroveFolderDataset(str(files[0].parent), 99, token_size=2, return_positions=True)
    stream = np.concatenate(documents_of(made.folder))
    first = [windows[i] for i in range(10)]
    assert len(files) > 5 and (np.concatenate([w["input_ids"] for w in first]) == stream[:1000]).all()
    starts = np.flatnonzero(np.concatenate([w["positions"] for w in first]) == 0)
    assert set(np.flatnonzero(stream[:999] == 0) + 1) <= set(starts.tolist())
    name = (tmp_path / "out" / "train" / f"{files[0].name}.metadata").read_text().partition("|")[0]
    named = {"tokenizer_name_or_path": name, "save_final_metadata": True}
    theirs = TokenizedFile(str(tmp_path / "theirs"), files[0].name, **named)
    for document in documents_of(made.folder)[: len(np.fromfile(f"{files[0]}.index", "<u8"))]:
        theirs.write(document.tolist(), None)
    theirs.close()
    for path in (tmp_path / "theirs").iterdir():
        assert path.read_bytes() == (files[0].parent / path.name).read_bytes()


def write_bin(path: Path, documents: list[np.ndarray], kind: str, magic: int = 0) -> None:
    """nanoGPT's way: documents with their ends; with a magic number llm.c's: a header, ends before documents."""
    path.parent.mkdir(exist_ok=True)
    if magic:
        documents = [np.concatenate([document[-1:], document[:-1]]) for document in documents]
    tokens = np.concatenate(documents)
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, len(tokens)
    path.write_bytes((header.tobytes() if magic else b"") + tokens.astype(kind).tobytes())


def same_data(made, folder: Path, added: int = 0) -> None:
    """The splits, document by document; `added` of them had no end of text."""
    verify_data(folder)
    for split in ("train", "validation"):
        found, expected = documents_of(folder, split), documents_of(made.folder, split)
        assert [document.tolist() for document in found] == [document.tolist() for document in expected]
    assert read_manifest(folder)["converted_from"]["eos_added"] == added
    assert read_manifest(folder)["fingerprint"] == read_manifest(made.folder)["fingerprint"]


BINS = {
    "nanoGPT": (("train", "val"), "<u2", 0, None, 0),
    "uint32": (("train", "val"), "<u4", 0, "uint32", 0),
    "llm.c": (("fineweb_train_000001", "fineweb_val_000000"), "<u2", 20240520, None, 2),
    "llm.c, llama 3": (("fineweb_train_000001", "fineweb_val_000000"), "<u4", 20240801, None, 2),
}


@pytest.mark.parametrize("names, kind, magic, dtype, added", BINS.values(), ids=BINS)
def test_raw_bins_are_read(made, tmp_path, monkeypatch, names, kind, magic, dtype, added):
    """With a header or without, the end of text behind documents or before: the same documents and splits."""
    monkeypatch.setattr("pretraining.data.tools.formats.CHUNK_TOKENS", 100)  # documents go over the borders
    for name, split in zip(names, ("train", "validation"), strict=True):
        write_bin(tmp_path / "theirs" / f"{name}.bin", documents_of(made.folder, split), kind, magic)
    words = ["convert", tmp_path / "ours", "--from", "bin", tmp_path / "theirs"]
    words += ["--tokenizer", made.folder / "tokenizer", *(["--dtype", dtype] if dtype else [])]
    main([*map(str, words)])
    same_data(made, tmp_path / "ours", added)


def write_mds(folder: Path, samples: list[np.ndarray], encoding: str, compression: str | None = None) -> None:
    """An independent writer of the published layout: a shard of two columns, `id` of a fixed size before `tokens`."""
    folder.mkdir(parents=True)
    rows, name = [], "shard.00000.mds"
    for number, tokens in enumerate(samples):
        shape = bytes([1 << 2 | 2]) + struct.pack("<I", len(tokens))
        value = {
            "bytes": tokens.astype("<i8").tobytes(),
            "ndarray": bytes([16]) + shape + tokens.astype("<u2").tobytes(),
            "ndarray:int32": shape + tokens.astype("<i4").tobytes(),
        }[encoding]
        rows.append(struct.pack("<Iq", len(value), number) + value)
    config = json.dumps({"column_names": ["id", "tokens"]}).encode()
    start = 4 + 4 * (len(rows) + 1) + len(config)
    offsets = np.cumsum([start, *map(len, rows)]).astype("<u4")
    content = struct.pack("<I", len(rows)) + offsets.tobytes() + config + b"".join(rows)
    packed = gzip.compress(content) if compression else content
    (folder / (f"{name}.gz" if compression else name)).write_bytes(packed)
    zipped = {"basename": f"{name}.gz", "bytes": len(packed), "hashes": {}} if compression else None
    columns = {"names": ["id", "tokens"], "encodings": ["int", encoding], "sizes": [8, None]}
    shard = {f"column_{key}": value for key, value in columns.items()}
    shard |= {"format": "mds", "version": 2, "samples": len(rows), "compression": compression}
    shard |= {"raw_data": {"basename": name, "bytes": len(content), "hashes": {}}, "zip_data": zipped}
    (folder / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))


@pytest.mark.parametrize("compression", [None, "gz:6"])
@pytest.mark.parametrize("encoding", ["bytes", "ndarray", "ndarray:int32"])
def test_mds_is_read(made, tmp_path, encoding, compression):
    """A sample a document, as they are."""
    for name, split in (("train", "train"), ("val", "validation")):
        write_mds(tmp_path / "theirs" / name, documents_of(made.folder, split), encoding, compression)
    convert(made, tmp_path, "mds")
    same_data(made, tmp_path / "ours")


def test_packed_samples_of_mds_are_cut_into_documents(made, tmp_path):
    """Samples of one length hold a stream: documents go over their borders; the last tokens that fill none are gone."""
    stream = np.concatenate(documents_of(made.folder))
    packed = stream[: len(stream) // 64 * 64].reshape(-1, 64)
    write_mds(tmp_path / "theirs" / "train", list(packed), "bytes")
    write_mds(tmp_path / "theirs" / "val", documents_of(made.folder, "validation"), "bytes")
    convert(made, tmp_path, "mds")
    found = np.concatenate(documents_of(tmp_path / "ours"))
    assert (found[: packed.size] == packed.reshape(-1)).all() and len(found) - packed.size in (0, 1)
    assert abs(len(documents_of(tmp_path / "ours")) - len(documents_of(made.folder))) <= 2


def test_mosaicml_streaming_itself_writes_them(made, tmp_path):
    """Its own MDSWriter, where it is installed, several shards, compressed."""
    streaming = pytest.importorskip("streaming")
    for name, split in (("train", "train"), ("val", "validation")):
        columns = {"tokens": "ndarray:uint16", "source": "str"}
        place = {"out": str(tmp_path / "theirs" / name), "columns": columns}
        with streaming.MDSWriter(**place, compression="zstd", size_limit=1 << 12) as out:
            for document in documents_of(made.folder, split):
                out.write({"tokens": document.astype(np.uint16), "source": "here"})
    assert len(list((tmp_path / "theirs" / "train").glob("*.zstd"))) > 1
    convert(made, tmp_path, "mds")
    same_data(made, tmp_path / "ours")


def test_streams_that_cannot_be_read_are_named(made, tmp_path):
    """A cut header file, the wrong type or tokenizer, a missing shard, a column of text: one line, nothing left."""
    documents, refused = documents_of(made.folder), partial(refusal, convert, made, tmp_path)
    path = tmp_path / "a.bin"
    write_bin(path, documents, "<u2", 20240520)
    path.write_bytes(path.read_bytes()[:-2])
    assert "a.bin: truncated or damaged" in refused("bin", "a.bin")
    path.write_bytes(np.full(99, 5, "<u2").tobytes())
    assert "the end-of-text token 0 does not occur" in refused("bin", "a.bin")
    assert "no whole number of uint32 tokens" in refused("bin", "a.bin", dtype="uint32")
    (tmp_path / "stub.bin").write_bytes(b"abc")
    assert "3 bytes are no whole number of uint16 tokens" in refused("bin", "stub.bin")
    write_mds(tmp_path / "mds", documents, "bytes")
    assert "column 'token'; did you mean 'tokens'" in refused("mds", "mds", column="token")
    assert "column id: is int; tokens are bytes or ndarray" in refused("mds", "mds", column="id")
    (tmp_path / "mds" / "shard.00000.mds").unlink()
    assert "shard.00000.mds: no such file, and" in refused("mds", "mds")
    (tmp_path / "empty").mkdir()
    kinds = {"bin": ".bin", "mds": "index.json", "megatron": "PREFIX.idx", "datatrove": ".ds"}
    for form, kind in kinds.items():
        assert f"no {kind} files in this folder" in refused(form, "empty")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("form", "name", "keep", "said"),
    [
        ("megatron", "train.bin", -2, "train.bin: truncated"),
        ("megatron", "train.idx", -8, "train.idx: truncated"),
        ("megatron", "train.idx", 20, "train.idx: not a Megatron index"),
        ("datatrove", "train/{0}.ds", -2, ".ds: truncated"),
        ("datatrove", "train/{0}.ds.index", -3, ".ds.index: truncated"),
        ("datatrove", "train/{0}.ds.index", None, ".ds.index: no such file"),
    ],
)
def test_truncated_foreign_files_are_named(made, tmp_path, form, name, keep, said):
    """Nothing is written of files that are not whole."""
    export_data(made.folder, form, tmp_path / "out")
    first = min((path.stem for path in (tmp_path / "out" / "train").glob("*.ds")), default="")
    path = tmp_path / "out" / name.format(first)
    path.write_bytes(path.read_bytes()[:keep]) if keep else path.unlink()
    assert said in refusal(import_data, tmp_path / "back", TokenFiles(form, tmp_path / "out"), None, 0.5)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_cannot_be_converted_is_one_line_and_leaves_nothing(made, tmp_path):
    """Wrong tokenizer, no tokenizer, an existing target, an empty split, an unknown form."""
    export_data(made.folder, "megatron", tmp_path / "out")
    before, ours = sorted(tmp_path.rglob("*")), tmp_path / "ours"
    files = TokenFiles("megatron", tmp_path / "out" / "train")
    write_megatron_by_hand(tmp_path / "out" / "wide", [[[5, 300, 0]]], np.int32, 4)
    message = refusal(convert, made, tmp_path, "megatron", "out/wide")
    assert "token id 300, but the tokenizer has 280" in message
    assert "give the --tokenizer" in refusal(import_data, ours, files, None, 0.5)
    assert refusal(import_data, ours, files, "./nowhere", 0.5).startswith("--tokenizer: ./nowhere")
    assert "validation would be empty" in refusal(convert, made, tmp_path, "megatron", "out/train", 1e-9)
    assert "exists already" in refusal(export_data, made.folder, "datatrove", tmp_path / "out")
    words = ["convert", str(made.folder), "--to", "arrow", str(tmp_path / "b")]
    assert "unknown form" in refusal(main, words)
    assert [p for p in sorted(tmp_path.rglob("*")) if not p.name.startswith("wide")] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_conversion_leaves_nothing(made, tmp_path, number):
    """Stopped in the middle: one line, exit code 130, no folder."""
    count = 4_000_000
    np.tile(np.array([5, 6, 7, 0], "<u2"), count).tofile(tmp_path / "theirs.ds")
    np.arange(4, 4 * count + 1, 4, dtype="<u8").tofile(tmp_path / "theirs.ds.index")
    words = ["convert", tmp_path / "ours", "--from", "datatrove", tmp_path / "theirs.ds"]
    started = Started([*TOOL, *words, "--tokenizer", made.folder / "tokenizer", "--json"])
    while started.process.poll() is None and not (tmp_path / ".ours.building" / "train").exists():
        time.sleep(0.005)
    os.kill(started.process.pid, number)
    finished = started.finish()
    assert finished.code == INTERRUPTED and finished.stderr.count("\n") == 1, finished.output
    assert "interrupted; nothing was changed" in finished.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs.ds", "theirs.ds.index"]


@pytest.mark.parametrize("kind", ["byte-level", "with byte fallback"])
def test_text_bytes_are_counted_from_tokens_alone(tmp_path, kind):
    """What bits per byte divide by: the table of byte-level ids, or decoding, gives the text's own length."""
    from tokenizers import Tokenizer, decoders, models, trainers

    texts = [*make_texts(80), "", " \t\n", "ünï" * 40, "\x00\x7f"]
    if kind == "byte-level":
        train_tokenizer(texts, 280, tmp_path / "tokenizer")
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        spelled = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=spelled)
        tokenizer.train_from_iterator(texts[:40], trainer)
        (tmp_path / "tokenizer").mkdir()
        tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    ids = [np.array(encoding.ids, np.uint32) for encoding in tokenizer.encode_batch(texts)]
    ends = np.cumsum([len(document) for document in ids])
    counter = TokenBytes(tmp_path / "tokenizer", 512)
    counts = counter.count(np.concatenate(ids), np.concatenate([[0], ends[:-1]]), ends)
    assert counts.tolist() == [len(text.encode()) for text in texts]
    assert (counter._table is not None) is (kind == "byte-level")
