"""Where text is read from: pieces of files that together are the file, stores by address, web archives, hub data."""

import gzip
import json
import os
from decimal import Decimal
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pretraining.data.corpus import Corpus, HubSource, open_source, open_sources, read_batches
from pretraining.data.preparation.prepare import prepare_data
from pretraining.data.text_files import Extent
from pretraining.errors import UserError
from pretraining.recipe import load_recipe
from pretraining.recipe.data import Data, Source
from tests.gear.finished_data import recipe_for, refusal, write_jsonl
from tests.gear.runs import REPOSITORY
from tests.gear.served import Served

TEXTS = [f"document {number} " + "word " * (number % 50) for number in range(400)]


def write_lines(path):
    return write_jsonl(path, TEXTS)


def write_rows(path):
    pq.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=25)
    return path


def texts_of(source, pieces) -> list[str]:
    return [document.text for extents in pieces for document in source.documents(extents)]


def test_a_folder_is_read_whole_and_what_is_not_is_said(tmp_path, capsys, monkeypatch):
    """Links to folders are entered, each folder once; other suffixes are counted; what may not be read is refused.

    What is hidden is no data: copies of a notebook's files would double texts.
    """
    root, disk, sets = (tmp_path / name for name in ("corpus", "disk", "sets"))
    for folder in (root / "part", disk / "deep", root / ".git", sets):
        folder.mkdir(parents=True)
        write_lines(folder / "a.jsonl")
    for link, target in {"b": disk, "a": root / "part", "loop": root, "up": tmp_path, "disk": disk}.items():
        (root / link).symlink_to(target)
    (root / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    for name in ("1.json.gz", "2.JSON.gz", "part/3.csv", "README", ".git/x"):
        (root / name).touch()
    write_jsonl(sets / "a.jsonl", ["another text of as many words as are looked for"])
    (sets / "quiz.json").touch()
    for name in ("part/._a.jsonl", "._README"):
        (root / name).write_bytes(b"\0\5\26\7")  # macOS's tar leaves such files
    data = {"sources": [{"path": str(root)}], "decontaminate": {"folder": str(sets)}}
    assert [file.name for file in open_source(Source.of(data["sources"][0])).files] == [
        "b/deep/a.jsonl",
        "part/a.jsonl",
    ]
    of_globs = {f"{root}/p*/*.jsonl": ["part/a.jsonl"], f"{root}/.g*/*.jsonl": [".git/a.jsonl"]}
    of_globs |= {f"memory://{root}/**/*.jsonl": ["part/a.jsonl"], f"memory://{root}": ["part/a.jsonl"]}
    for name in ("part/a.jsonl", "part/._a.jsonl", ".git/a.jsonl"):
        fsspec.filesystem("memory").pipe_file(f"{root}/{name}", (root / name).read_bytes())
    for pattern, names in of_globs.items():
        assert [file.name for file in open_source(Source.of({"path": pattern})).files] == names, pattern
    prepare_data(recipe_for(*data.pop("sources"), **data), tmp_path / "data", False)
    said = capsys.readouterr().err
    note = "5 of 7 files are not read: .json.gz (2), .csv (1), broken links (1), no suffix (1); rename lines of JSON"
    assert f"note: data.sources.0.path {root}: {note}" in said
    assert "note: data.decontaminate.folder: 1 of 2 files is not read: .json (1); convert" in said
    real = os.scandir

    def forbidding(path):
        if Path(path).name == "deep":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", forbidding)
    assert "deep cannot be read (Permission denied)" in refusal(open_source, Source.of({"path": str(disk)}))


@pytest.mark.parametrize("write, name", [(write_lines, "a.jsonl"), (write_rows, "a.parquet")])
@pytest.mark.parametrize("piece_bytes", [1, 100, 3000, 1 << 20])
def test_pieces_together_are_the_file(tmp_path, write, name, piece_bytes):
    """Cut anywhere, every document is in exactly one piece, in order."""
    source = open_source(Source(path=str(write(tmp_path / name))))
    pieces = source.cut(piece_bytes)
    assert texts_of(source, pieces) == TEXTS
    assert (len(pieces) > 1) == (piece_bytes < 1 << 20)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.fa", "a.fasta.zst"])
@pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 20])
def test_lines_and_records_are_documents_wherever_a_file_is_cut(tmp_path, name, piece_bytes):
    """An empty line is an empty text; a sequence has its lines without ends; a name line alone has none."""
    texts = [text.replace(" ", "") if "fa" in name else text for text in TEXTS[:100]] + ["", "GATT"]
    lines = [f">{n} about it\n{text[:9]}\r\n{text[9:]}" for n, text in enumerate(texts)]
    content = "\n".join(lines if "fa" in name else texts).encode()
    packed = {".gz": gzip.compress, "zst": partial(pa.compress, codec="zstd", asbytes=True)}.get(name[-3:])
    (tmp_path / name).write_bytes(packed(content) if packed else content)
    for other in ("b.jsonl", "picture.png"):
        (tmp_path / other).write_text("not one of them")
    source = open_source(Source(path=str(tmp_path), format="fasta" if "fa" in name else "lines"))
    pieces = source.cut(piece_bytes)
    assert texts_of(source, pieces) == texts
    assert packed or (len(pieces) > 1) == (piece_bytes < 1 << 20)


ROWS = [
    {"text": str(n), "score": n / 10, "meta": {"set": "ab"[n % 2], "of": n}, "good": n > 5} for n in range(30)
]
INSIDE = [{"field": "meta.set", "not_among": ["b"]}, {"field": "score", "at_least": 2}]
KEPT = {
    "a number": ([{"field": "score", "at_least": 1.1, "at_most": 2}], range(11, 21)),
    "inside of another": (INSIDE, range(20, 30, 2)),
    "a value": ([{"field": "good", "among": [False]}, {"field": "meta.of", "among": [3, 4, 9]}], (3, 4)),
}


@pytest.mark.parametrize("conditions, kept", KEPT.values(), ids=KEPT)
def test_rows_are_read_by_what_their_fields_say(tmp_path, conditions, kept):
    """Of JSON lines and of tables, and counted; what a table lacks is one line, a row without it is left out."""
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    decimals = [{**row, "score": Decimal(str(row["score"]))} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(decimals), tmp_path / "decimals.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, {"text": "none"}]))
    for name, lacking in (("rows.parquet", 0), ("decimals.parquet", 0), ("rows.jsonl", 1)):
        source = open_source(Source.of({"path": str(tmp_path / name), "keep": conditions}))
        skipped: dict = {}
        (batch,) = read_batches(0, source.documents(), skipped, skip_undecodable=False)
        assert batch.texts == list(map(str, kept))
        assert skipped["unwanted"] == len(ROWS) + lacking - len(batch.texts)
        plain = open_source(Source(path=str(tmp_path / name)))
        assert source.digest_of([Extent(0)]) != plain.digest_of([Extent(0)])
    scores = [{"field": "scores", "at_least": 1}]
    wrong = open_source(Source.of({"path": str(tmp_path / "rows.parquet"), "keep": scores}))
    said = "no column 'scores'; did you mean 'score'?; correct data.sources.0.keep"
    assert said in refusal(next, wrong.documents())
    (tmp_path / "plain.txt").write_text("no fields")
    with pytest.raises(UserError, match=r"data.sources.0.keep: asks for fields, and .*plain.txt has none"):
        open_source(Source.of({"path": str(tmp_path), "keep": conditions}))


def test_pieces_are_a_function_of_the_files_and_change_with_them(tmp_path):
    """What a finished task is known by: its own part of the input, and nothing else."""
    write_lines(tmp_path / "a.jsonl")
    changing = write_lines(tmp_path / "b.jsonl")

    def digests():
        source = open_source(Source(path=str(tmp_path)))
        return [source.digest_of(extents) for extents in source.cut(1 << 15)]

    before = digests()
    assert before == digests() and len(set(before)) == len(before)
    changing.write_text(changing.read_text().replace("document 7 ", "document 8 "))
    same = [one == other for one, other in zip(before, digests(), strict=True)]
    assert True in same and False in same


def test_another_column_of_the_same_rows_is_another_text(tmp_path):
    """Of files and of a dataset: what is finished of one column is never taken for another; `text` keeps its key."""
    pq.write_table(pa.table({"text": ["one"], "title": ["two"]}), tmp_path / "rows.parquet")
    for place in ({"path": str(tmp_path / "rows.parquet")}, {"dataset": str(tmp_path), "split": "train"}):
        keys = set()
        for column in ({}, {"text_column": "text"}, {"text_column": "title"}):
            sources = [{**place, **column}]
            section = Data.of({"name": "rows", "sources": sources, "tokenizer": "x"})
            keys.add(tuple(Corpus.of(section, open_sources(section)).keys))
        assert len(keys) == 2


def test_tasks_are_neighbours_of_one_source(tmp_path, monkeypatch):
    """A shard never mixes two sources."""
    monkeypatch.setattr("pretraining.data.corpus.PIECE_BYTES", 2000)
    monkeypatch.setattr("pretraining.data.corpus.TASK_PIECES", 3)
    specs = [{"path": str(write_lines(tmp_path / name))} for name in ("a.jsonl", "b.jsonl")]
    section = Data.of({"name": "two", "sources": specs, "tokenizer": "x"})
    corpus = Corpus.of(section, open_sources(section))
    pieces, tasks = corpus.pieces, corpus.tasks
    assert [number for task in tasks for number in task] == list(range(len(pieces)))
    assert all(len({pieces[number].source for number in task}) == 1 and len(task) <= 3 for task in tasks)


@pytest.fixture
def store():
    """A store of fsspec, in the memory of this process."""
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/en/a.jsonl.gz", gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    system.pipe("/bucket/en/b.jsonl", b'{"text": "three"}\n')
    system.pipe("/bucket/notes.bin", b"not text")
    yield system
    system.rm("/bucket", recursive=True)


WHOLE = ["one", "two", "three"]
PLACES = {"bucket": WHOLE, "bucket/en": WHOLE, "bucket/*/*.jsonl*": WHOLE, "bucket/en/b.jsonl": WHOLE[2:]}


@pytest.mark.parametrize("place", PLACES)
def test_a_store_is_read_like_a_folder(store, place):
    """Folder, glob and single file at an fsspec address."""
    source = open_source(Source(path=f"memory://{place}"))
    assert [document.text for document in source.documents()] == PLACES[place]
    assert source.fingerprint()["files"] == (2 if PLACES[place] is WHOLE else 1)


def test_a_web_server_is_read_like_a_disk(tmp_path):
    """A real HTTP server on this machine: plain and compressed files, one that is not there, one too large for it."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    (tmp_path / "b.txt").write_text("three")
    (tmp_path / "d.jsonl").write_text('{"text": "four"}\n{"text": "five"}\n')
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with Served(handler) as server:
        address = server.address
        sources = [open_source(Source(path=f"{address}/{n}")) for n in ("a.jsonl.gz", "b.txt", "d.jsonl")]
        texts = [[document.text for document in source.documents()] for source in sources]
        with pytest.raises(UserError, match=f"{address}/d.jsonl: cannot be read .*range requests"):
            list(sources[2].documents([Extent(0, 17, 34)]))
        assert f"{address}/c.txt" in refusal(open_source, Source(path=f"{address}/c.txt"))
        listed = open_source(Source(path=f"{address}/*.jsonl"))
        assert listed.fingerprint()["bytes"] == (tmp_path / "d.jsonl").stat().st_size
        # as long as before, an hour later: the server says so by its Last-Modified alone
        (tmp_path / "d.jsonl").write_text('{"text": "FOUR"}\n{"text": "five"}\n')
        os.utime(tmp_path / "d.jsonl", (1e9, 1e9))
        for before, path in ((listed, "*.jsonl"), (sources[2], "d.jsonl")):
            assert open_source(Source(path=f"{address}/{path}")).fingerprint() != before.fingerprint()
            assert f"{address}/d.jsonl: changed or removed" in refusal(before.check_unchanged)
    assert texts == [["one", "two"], ["three"], ["four", "five"]]


NOT_HELD = {
    "memory://bucket/fr": "no such file or folder can be reached there",
    "memory://bucket/notes.bin": "unknown suffix",
    "nowhere://bucket": "cannot be reached",
}


@pytest.mark.parametrize("address", NOT_HELD)
def test_what_a_store_does_not_hold_is_one_line(store, address):
    said = refusal(open_source, Source(path=address))
    assert NOT_HELD[address] in said and address.partition("://")[2] in said


def test_web_archives(tmp_path):
    """The text of WET records, each with the page it is from."""
    from warcio.warcwriter import WARCWriter

    path, texts = tmp_path / "crawl.warc.wet.gz", [f"page {number} is in Zürich" for number in range(3)]
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=True)
        for number, text in enumerate(texts):
            payload = gzip.io.BytesIO(text.encode())
            record = writer.create_warc_record(f"http://a/{number}", "conversion", payload=payload)
            writer.write_record(record)
    documents = list(open_source(Source(path=str(path))).documents())
    assert [document.text for document in documents] == texts
    assert documents[2].where == f"{path}:http://a/2"


WEB_RECORD = "WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Target-URI: http://a/{}\r\nContent-Length: {}\r\n\r\n{}\r\n\r\n"


def web_archive(length_of_second=None) -> list[bytes]:
    """Twelve records of plain text; the second may state another length than it has."""
    texts = [f"page {number} " + "word " * number for number in range(12)]
    lengths = [len(text) for text in texts]
    lengths[1] = length_of_second or lengths[1]
    return [WEB_RECORD.format(n, lengths[n], text).encode() for n, text in enumerate(texts)]


@pytest.mark.parametrize("suffix, pack", [(".warc", bytes), (".wet", bytes), (".warc.gz", gzip.compress)])
def test_a_web_archive_that_ends_early_is_refused(tmp_path, suffix, pack):
    """Nothing is lost without a word: cut at any byte, what is read is whole records up to the end, or an error."""
    path, packed = tmp_path / f"crawl{suffix}", [pack(record) for record in web_archive()[:3]]
    whole, refused = b"".join(packed), 0
    ends = [sum(map(len, packed[:count])) for count in range(4)]
    for size in range(1, len(whole) + 1):
        path.write_bytes(whole[:size])
        try:
            found = len(list(open_source(Source(path=str(path))).documents()))
        except UserError as error:
            refused += 1
            assert f"{path}:record " in str(error) and "truncated or damaged" in str(error)
        else:  # without the blank lines that end it a record is still whole
            assert min(abs(size - end) for end in ends) <= 4
            assert found == sum(end <= size + 4 for end in ends[1:])
    assert refused > len(whole) - 20


@pytest.mark.parametrize("length", [3, 20, 700, 10**6, 10**15, -5, "many"])
@pytest.mark.parametrize("suffix, pack", [(".warc", bytes), (".warc.gz", gzip.compress)])
def test_a_web_archive_with_a_wrong_length_is_refused(tmp_path, suffix, pack, length):
    """A Content-Length that is too large would swallow the records after it, one too small would cut its own."""
    path = tmp_path / f"crawl{suffix}"
    path.write_bytes(b"".join(map(pack, web_archive(length))))
    with pytest.raises(UserError, match=rf"{path}:record 2: .*Content-Length"):
        list(open_source(Source(path=str(path))).documents())


def test_a_line_longer_than_memory_should_hold_is_refused(tmp_path, monkeypatch):
    """One 2 GB line does not fill the memory: it is named."""
    monkeypatch.setattr("pretraining.data.text_files.MAX_LINE_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "short"}\n' + json.dumps({"text": "x" * 5000}) + "\n")
    said = refusal(list, open_source(Source(path=str(path))).documents())
    assert f"{path}:line 2: longer than 1,000 bytes" in said


def test_a_hub_dataset_is_cut_by_its_files(tmp_path):
    """Through `datasets`, on a local stand-in of a hub repository: two files, two pieces, every row once."""
    folder = tmp_path / "stand-in"
    folder.mkdir()
    half = len(TEXTS) // 2
    for number, texts in enumerate((TEXTS[:half], TEXTS[half:])):
        write_jsonl(folder / f"train-{number:05d}.jsonl", texts)
    source = open_source(Source(dataset=str(folder)))
    assert isinstance(source, HubSource)
    pieces = source.cut(1 << 24)
    assert pieces == [[Extent(0)], [Extent(1)]] and texts_of(source, pieces) == TEXTS


# The columns of the published data sets, for stand-ins of them.
ROW = dict.fromkeys(("text", "id", "dump", "url", "file_path", "language"), "x")
ROW |= {"language_score": 0.9, "token_count": 7, "score": 3.1, "int_score": 3}


def stand_in(spec: dict, folder: Path) -> dict:
    """The source entry of a recipe, led to a few rows on this disk in the form the published data has."""
    folder.mkdir()
    texts = [f"{spec.get('name', 'web')} {text}" for text in TEXTS]
    if spec.get("dataset"):
        rows = pa.Table.from_pylist([{**ROW, "text": text} for text in texts])
        pq.write_table(rows, folder / "0.parquet")
        return {**spec, "dataset": str(folder), "config": None}
    lines = [json.dumps({"text": text, "meta": {"redpajama_set_name": "x"}}) + "\n" for text in texts]
    with pa.CompressedOutputStream(str(folder / "chunk1.jsonl.zst"), "zstd") as file:
        file.write("".join(lines).encode())
    return {**spec, "path": str(folder)}


@pytest.mark.parametrize("name", ["124m", "1.5b", "30b"])
def test_the_data_section_of_a_recipe_prepares(name, tmp_path):
    """Every entry of the shipped recipes, loaded by the code that would load the published data."""
    values = json.loads((REPOSITORY / "recipes" / f"{name}.json").read_text())
    sources = [stand_in(spec, tmp_path / f"source-{n}") for n, spec in enumerate(values["data"]["sources"])]
    values["data"] |= {"sources": sources, "tokenizer": {"train_vocab_size": 300}, "validation_share": 0.3}
    values["model"] |= {"n_positions": 64}
    del values["$schema"]
    (tmp_path / "recipe.json").write_text(json.dumps(values))
    recipe = load_recipe(str(tmp_path / "recipe.json"))
    summary = prepare_data(recipe, tmp_path / "data", show_progress=False).to_dict()
    assert summary["train"]["documents"] + summary["validation"]["documents"] == len(TEXTS) * len(sources)
