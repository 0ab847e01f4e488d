"""data_prep.py and the preparation behind it: what comes in, what comes out, and what is refused."""

import errno
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pretraining.data.corpus import read_ahead
from pretraining.data.manifest import read_manifest, report_text
from pretraining.data.preparation.prepare import count_data
from pretraining.data.prepared import open_prepared
from pretraining.data.progress import ProgressBar
from pretraining.data.publishing import preparation_lock
from pretraining.errors import UserError
from pretraining.recipe.data import Source
from tests.gear import finished_data
from tests.gear.finished_data import data_prep, make_texts, prepare, recipe_file, recipe_for, write_jsonl
from tests.gear.local_hub import LocalHub
from tests.gear.runs import bytes_of, completed, execute


def refused(root: Path, recipe) -> str:
    """The line of the refusal; nothing may be written."""
    said = finished_data.refusal(prepare, root, recipe)
    assert not root.exists()
    return said


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def corpus(tmp_path) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl", make_texts(80))


def test_rows_decode_back_to_the_texts_in_order(root, tmp_path):
    """`load_from_disk` opens the result: one row a document, its text complete, EOS at its end and nowhere else.

    Copies of a text are in one split: the hash of the text decides. A text that spells EOS stays text.
    """
    import datasets
    from transformers import AutoTokenizer

    texts = [*make_texts(80), *(f"{text} <|endoftext|> more" for text in make_texts(20)), *make_texts(60)]
    random.Random(1).shuffle(texts)
    folder = prepare(root, recipe_for(write_jsonl(tmp_path / "corpus.jsonl", texts)))
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    found = {}
    for split, rows in datasets.load_from_disk(str(folder)).items():
        found[split] = [tokenizer.decode(row["input_ids"][:-1]) for row in rows]
        for row in rows:
            assert row["input_ids"].index(tokenizer.eos_token_id) == len(row["input_ids"]) - 1
        assert [row["num_bytes"] for row in rows] == [len(text.encode()) for text in found[split]]
        assert rows.features["input_ids"].feature.dtype == "uint16"
    assert found["train"] == [text for text in texts if text not in found["validation"]]
    assert found["validation"] == [text for text in texts if text not in found["train"]]
    assert len(found["train"]) + len(found["validation"]) == len(texts)


KINDS = ["txt", "jsonl", "jsonl of Windows", "jsonl.gz", "jsonl.zst", "parquet", "glob", "dataset"]


def test_every_kind_of_source_gives_the_same_tokens(tmp_path):
    """The tokens depend on the texts, not on the files that hold them; a byte order mark is no text."""
    found = {}
    for kind in KINDS:
        recipe = recipe_for(_source_of(kind, tmp_path / kind, make_texts(60)))
        found[kind] = read_manifest(prepare(tmp_path / f"{kind}-data", recipe))["fingerprint"]
    assert len(set(found.values())) == 1, found


def _source_of(kind: str, folder: Path, texts: list[str]) -> str | dict:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    folder.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if kind == "txt":
        for number, text in enumerate(texts):
            (folder / f"{number:03d}.txt").write_text(text)
    elif kind in ("jsonl", "jsonl of Windows", "dataset"):
        (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" * (kind == KINDS[2]) + lines)
    elif kind == "jsonl.gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    elif kind == "jsonl.zst":
        with pa.CompressedOutputStream(str(folder / "a.jsonl.zst"), "zstd") as file:
            file.write(lines)
    else:
        half = len(texts) // 2
        for name, part in (("a", texts[:half]), ("b", texts[half:])):
            parquet.write_table(pa.table({"text": part}), folder / f"{name}.parquet", row_group_size=7)
    if kind == "dataset":
        return {"dataset": str(folder), "split": "train"}
    return str(folder / "*.parquet") if kind == "glob" else str(folder)


def test_the_embedded_default_needs_nothing_but_python():
    """builtin python_stdlib: megabytes of real text, without tests and installed packages."""
    from pretraining.data.corpus import open_source

    source = open_source(Source(builtin="python_stdlib"))
    assert source.fingerprint()["bytes"] > 5_000_000
    assert not [f for f in source.files if {"site-packages", "test"} & set(f.name.split("/")[:-1])]
    assert "json/decoder.py" in [file.name for file in source.files]


def test_second_run_returns_at_once(root, corpus, tmp_path):
    """Same inputs: nothing is rewritten, and nothing heavy is imported to find that out."""
    recipe = recipe_file(tmp_path, corpus)
    completed(data_prep(recipe, root))
    before = (root / "corpus" / "manifest.json").stat()
    program = (
        "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "print('\\n'.join(sys.modules))"
    )
    command = [sys.executable, "-c", program, *data_prep(recipe, root, "--json")[1:]]
    summary, *imported = completed(command).stdout.splitlines()
    assert json.loads(summary)["validation"]["documents"] > 0
    after = (root / "corpus" / "manifest.json").stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)
    assert "pretraining.data.preparation.prepare" in imported
    heavy = {"numpy", "pyarrow", "tokenizers", "datasets", "torch", "transformers"}
    assert not heavy & set(imported)


def test_two_preparations_give_identical_bytes(tmp_path, corpus):
    """Tokenizer, shards and manifest are a function of the input, whatever number of threads encodes."""
    found = []
    for threads in ("1", "4"):
        command = data_prep(recipe_file(tmp_path, corpus), tmp_path / f"with-{threads}")
        completed(command, RAYON_NUM_THREADS=threads, PYTHONHASHSEED=threads)
        found.append(bytes_of(tmp_path / f"with-{threads}" / "corpus"))
    assert found[0] == found[1] and len(found[0]) == 11


OF_WORK = ("tokenizer/.*", "tokenizer/00000-*", "tokenize/.*/validation", "tokenize/00000-*")
OF_WORK += ("tokenize/.*/train/data-00000.arrow",)
MOMENTS = [*(f".corpus.work/{moment}" for moment in OF_WORK), ".corpus.building"]


def test_killed_at_any_moment_leaves_nothing_that_looks_finished(tmp_path, root):
    """SIGKILL while reading, training, encoding, writing; the next run gives the undisturbed bytes."""
    source = write_jsonl(tmp_path / "large.jsonl", make_texts(4000))
    recipe = recipe_file(tmp_path, source)
    completed(data_prep(recipe, tmp_path / "reference"))
    for moment in MOMENTS:
        assert any(_kill_when(data_prep(recipe, root), root, moment) for _ in range(5)), moment
    completed(data_prep(recipe, root))
    assert bytes_of(root / "corpus") == bytes_of(tmp_path / "reference" / "corpus")
    assert sorted(path.name for path in root.iterdir()) == ["corpus"]


def _kill_when(command: list[str], root: Path, moment: str) -> bool:
    """Start the command from nothing, SIGKILL it once `moment` is there; whether that came before it was done."""
    shutil.rmtree(root / "corpus", ignore_errors=True)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not any(root.glob(moment)):
        time.sleep(0.0005)
    process.kill()
    killed = process.wait() == -signal.SIGKILL
    assert killed != (root / "corpus").exists()
    return killed


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """24 MB more text: the same peak but for the allocator's mood (buffers and shards are full in both).

    It takes more than ten seconds: with less text not every buffer is full.
    """
    peaks = [_peak_bytes(tmp_path, megabytes) for megabytes in (16, 40)]
    assert peaks[1] - peaks[0] < 16 << 20, peaks


def _peak_bytes(folder: Path, megabytes: int) -> int:
    source = folder / f"{megabytes}.jsonl"
    texts = make_texts(2000, num_words=80)
    line_bytes = write_jsonl(source, texts).stat().st_size
    with source.open("w") as file:
        for repeat in range((megabytes << 20) // line_bytes):
            file.writelines(json.dumps({"text": f"{repeat} {text}"}) + "\n" for text in texts)
    program = (
        "import sys; from pathlib import Path; from tests.gear.finished_data import *\n"
        "from pretraining.data import shards; shards.SHARD_TOKENS = 1 << 18\n"
        f"prepare(Path({str(folder / 'data')!r}), recipe_for({str(source)!r}, name='m{megabytes}', encoder='auto'))\n"
        "print(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')))"
    )
    return 1024 * int(completed([sys.executable, "-c", program]).stdout)


def test_undecodable_text_names_file_and_line_or_is_counted(root, tmp_path):
    """Not UTF-8: refused with file and line; left out and counted where the recipe asks for it."""
    source = write_jsonl(tmp_path / "mixed.jsonl", make_texts(60))
    source.write_bytes(source.read_bytes() + b'{"text": "caf\xe9"}\n{"text": "\\ud800 half a pair"}\n')
    assert f"{source}:line 61: not UTF-8" in refused(root, recipe_for(source))
    recipe = recipe_for(source, skip_undecodable=True)
    manifest = read_manifest(prepare(root, recipe))
    assert manifest["skipped"] == {"undecodable": 2, "empty": 0}
    assert sum(split["documents"] for split in manifest["splits"].values()) == 60
    (tmp_path / "latin.txt").write_bytes(b"first\nsecond\nna\xefve\n")
    assert "latin.txt:line 3: not UTF-8" in refused(tmp_path / "none", recipe_for(tmp_path / "latin.txt"))


BAD_LINES = {
    '{"text": 1': "line 1: not valid JSON",
    '{"txt": "a"}': "no column 'text'; did you mean 'txt'? (columns: txt)",
    '{"text": null}': "line 1: 'text' is null",
    '{"text": 3}': "line 1: 'text' is int",
    '["text"]': "line 1: expected a JSON object",
    '{"text": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}": "line 1: not valid JSON",
    '{"text": "a", "x": ' + "1" * 5000 + "}": "line 1: not valid JSON",
}


def test_bad_json_lines_say_which_line_and_what(root, tmp_path):
    """Bad input is one line: the file, the line, what is wrong."""
    for line, said in BAD_LINES.items():
        (tmp_path / "bad.jsonl").write_text(line + "\n")
        message = refused(root, recipe_for(tmp_path / "bad.jsonl"))
        assert "bad.jsonl:line 1" in message and said in message


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst", "parquet"])
def test_truncated_files_are_refused(root, tmp_path, suffix):
    """Half a file is never taken for a short one."""
    source = _source_of(suffix, tmp_path / "input", make_texts(3000))
    path = next(Path(source).iterdir())
    for size in (path.stat().st_size // 2, 0):
        path.write_bytes(path.read_bytes()[:size])
        message = refused(root, recipe_for(path))
        assert path.name in message and "truncated or damaged" in message, size


def test_paths_that_hold_nothing_readable_are_refused(root, tmp_path):
    """Missing path, unknown suffix, no readable files, a table without the column; from where a path counts."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("x")
    looked_in = f"(looked in {Path.cwd()})"
    assert f"no such file or folder {looked_in}" in refused(root, recipe_for(tmp_path / "nowhere"))
    assert looked_in in refused(root, recipe_for("nowhere/*.txt"))
    assert "unknown suffix" in refused(root, recipe_for(tmp_path / "a.csv"))
    assert "no readable file" in refused(root, recipe_for(tmp_path / "empty"))
    assert "no readable file" in refused(root, recipe_for(tmp_path / "empty" / "*.txt"))
    assert "path is empty" in refused(root, recipe_for(""))
    parquet.write_table(pa.table({"content": ["a"], "url": ["b"]}), tmp_path / "a.parquet")
    assert "(columns: content, url)" in refused(root, recipe_for(tmp_path / "a.parquet"))


def test_empty_corpus_is_refused(root, corpus, tmp_path):
    """Only empty documents, or filters that leave nothing: no data set, whatever the tokenizer."""
    source = write_jsonl(tmp_path / "empty.jsonl", ["", ""])
    local = prepare(tmp_path / "t", recipe_for(corpus)) / "tokenizer"
    assert "the corpus is empty" in refused(root, recipe_for(source))
    assert "the corpus is empty" in refused(root, recipe_for(source, tokenizer=str(local)))
    # cleaned before they are read, and as they are
    for sources in (corpus, {"path": str(corpus), "max_tokens": 3000}):
        message = refused(root, recipe_for(sources, filters=[{"rule": "length", "min_words": 10**6}]))
        assert "the corpus is empty" in message and "what filters took out" in message


def test_a_corpus_too_small_for_blocks_says_what_would_do(root, corpus):
    """A share that works with the same corpus; tokens if none does; so too if the recipe wants longer blocks later."""
    recipe = recipe_for(corpus, validation_share=1e-6)
    message = refused(root, recipe)
    assert "validation has 0 of the corpus's" in message
    share = float(message.partition("set data.validation_share to ")[2].split()[0])
    recipe = recipe_for(corpus, validation_share=share)
    recipe.sequence_length = 100_000
    assert "add text: two blocks need 200,002 tokens" in refused(root, recipe)
    prepare(root, recipe_for(corpus, validation_share=share))
    assert "too few for one block of 100,001" in finished_data.refusal(prepare, root, recipe)


def test_a_source_of_a_mixture_without_a_block_is_refused_here(root, corpus, tmp_path):
    """And not by the run, after hours of preparation: no row has what `keep` asks for."""
    other = write_jsonl(tmp_path / "other.jsonl", make_texts(300))
    kept = {"path": str(other), "weight": 1, "keep": [{"field": "scoer", "at_least": 3}]}
    recipe = recipe_for({"path": str(corpus), "weight": 1}, kept)
    said = finished_data.refusal(prepare, root, recipe)
    assert "data.sources.1 (other.jsonl) has 0 tokens, too few for one block" in said
    assert not (root / "corpus" / "manifest.json").exists()


def test_a_tokenizer_that_does_not_fit_is_refused(root, corpus, tmp_path):
    """More ids than embeddings, too few merges, no way to close documents, no tokenizer at all."""
    large = recipe_for(corpus, tokenizer={"train_vocab_size": 600})
    assert "it has 600 ids, the model only 512" in refused(root, large)
    few = write_jsonl(tmp_path / "few.jsonl", ["ab", "abc"] * 20)
    assert "the corpus gives" in refused(root, recipe_for(few, tokenizer={"train_vocab_size": 500}))
    assert "no such folder" in refused(root, recipe_for(corpus, tokenizer="./nowhere"))
    folder = prepare(tmp_path / "t", recipe_for(corpus)) / "tokenizer"
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = []
    content["model"]["vocab"]["<unused>"] = content["model"]["vocab"].pop("<|endoftext|>")
    broken = {json.dumps(content).encode(): "no end-of-text token"}
    broken |= dict.fromkeys((b"{}", b"{nonsense", b"\xff\xfe"), "tokenizer.json cannot be read")
    for written, said in broken.items():
        (folder / "tokenizer.json").write_bytes(written)
        assert said in refused(root, recipe_for(corpus, tokenizer=str(folder)))


def test_a_tokenizer_without_a_config_still_names_its_end_of_text(root, corpus, tmp_path):
    """An export's config takes the id from the tokenizer: null, if tokenizer.json alone were asked."""
    there = prepare(tmp_path / "t", recipe_for(corpus)) / "tokenizer" / "tokenizer.json"
    (tmp_path / "alone").mkdir()
    shutil.copy(there, tmp_path / "alone")
    recipe = recipe_for(corpus, tokenizer=str(tmp_path / "alone"))
    prepare(root, recipe)
    data = open_prepared(recipe, root)
    assert data.tokenizer.eos_token_id == data.manifest["tokenizer"]["eos_token_id"] == 0


def test_missing_package_is_one_sentence(root, corpus, monkeypatch):
    """An optional package that is not installed costs a sentence that says how to install it."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = refused(root, recipe_for({"dataset": str(corpus.parent), "split": "train"}))
    assert "'datasets'" in message and "pip install datasets" in message


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, root):
    """Through the real command: one line on stderr that names the source's place in the list, nothing written."""
    recipe = recipe_file(tmp_path, write_jsonl(tmp_path / "a.jsonl", make_texts(1)))
    sources = json.dumps([{"path": str(tmp_path / name)} for name in ("a.jsonl", "nowhere.txt")])
    said = execute(data_prep(recipe, root, "--set", f"data.sources={sources}")).refusal
    assert said.startswith(f"error: {recipe} with --set data.sources=") and not root.exists()
    assert f": data.sources.1.path: {tmp_path / 'nowhere.txt'}: no such file" in said


def test_a_log_file_gets_lines_and_no_bar(capsys, monkeypatch):
    """Where stderr is no terminal: now and then a whole line, none for what is over at once."""
    with ProgressBar("counting", True, 2_000_000) as progress:
        progress.add(3, 1_000_000)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr("pretraining.data.progress.LOG_SECONDS", 0.0)
        progress.add(2, 500_000)
        progress.label("matching")
    assert capsys.readouterr().err == "counting: 1.5 of 2.0 MB, 5 documents\nmatching: begins\n"


def test_copies_that_are_kept_are_counted_too():
    """None removed is not none found."""
    fates = {"train": 230, "validation": 30, "duplicate": 0, "validation_twin": 8}
    found = {"documents": 268, "clusters": 12, "largest_cluster": 11, "dropped": 40, "fates": fates}
    said = "40 of 268 documents repeat another, in 12 clusters (the largest has 11); 0 of them removed, and 8 more"
    assert said in report_text({"duplicates": found})


TOO_MANY = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/a/file")
FAULTS = {
    "Cannot allocate memory; take fewer processes": MemoryError("Unable to allocate 122. MiB"),
    "/a/file: Too many open files; allow more open files (ulimit -n)": TOO_MANY,
    "Too many open files in system; end programs": OSError(errno.ENFILE, os.strerror(errno.ENFILE)),
}


@pytest.mark.parametrize("remedy", FAULTS)
def test_what_a_machine_refuses_is_one_line(root, corpus, monkeypatch, remedy):
    def refuse(writer):
        raise FAULTS[remedy]

    monkeypatch.setattr("pretraining.data.shards.SplitWriter._write_shard", refuse)
    assert remedy in finished_data.refusal(prepare, root, recipe_for(corpus))  # finished work is kept


def test_a_limit_on_the_size_of_files_is_one_line(tmp_path, root):
    """Through the real command, under a real limit (8 KiB)."""
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(200))
    # Python itself would cut short, and keep, what it compiles of the package
    limited = 'ulimit -f 8; PYTHONDONTWRITEBYTECODE=1 exec "$@"'
    command = ["bash", "-c", limited, "-", *data_prep(recipe_file(tmp_path, source), root)]
    result = execute(command)
    assert result.code == 2 and result.stderr.splitlines()[-1].startswith("error: "), result.stderr
    assert "File too large; allow larger files (ulimit -f)" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_full_disk_keeps_the_finished_work(tmp_path, disk_of):
    """One line; with more room only what was not finished is made, with the bytes of an undisturbed preparation."""
    source = write_jsonl(tmp_path / "large.jsonl", make_texts(8000))
    disk = disk_of("1500k")
    command = data_prep(recipe_file(tmp_path, source), disk / "data")
    result, said = execute(command), f"error: {disk / 'data' / 'corpus'}: No space left on device; free"
    assert result.code == 2 and result.stderr.splitlines()[-1].startswith(said)
    (tokenizer,) = (disk / "data").glob(".corpus.work/tokenizer/*/tokenizer.json")
    made = tokenizer.stat().st_mtime_ns
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    completed(command)
    kept = disk / "data" / "corpus" / "tokenizer" / "tokenizer.json"
    assert kept.stat().st_mtime_ns == made
    completed(data_prep(tmp_path / "small.json", tmp_path / "data"))
    assert bytes_of(disk / "data" / "corpus") == bytes_of(tmp_path / "data" / "corpus")


@pytest.mark.parametrize("what", ["input", "output"])
def test_no_permission_is_one_line(tmp_path, root, corpus, what):
    """What may not be read or written is named; root is no exception here."""
    root.mkdir()
    (corpus if what == "input" else root).chmod(0o500 if what == "output" else 0)
    like_anyone = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    result = execute([*like_anyone, *data_prep(recipe_file(tmp_path, corpus), root)])
    said = result.stderr.splitlines()[-1]
    assert result.code == 2 and "permission" in said.lower() and not any(root.iterdir())
    assert str(corpus if what == "input" else root) in said


def test_reading_ahead_keeps_order_and_raises_where_it_is_read():
    """The pipeline's threads neither reorder documents nor swallow errors, and end with a reader that stops."""

    def numbers():
        yield from range(50)
        raise UserError("the fifty-first")

    found, running = [], threading.active_count()
    with pytest.raises(UserError, match="fifty-first"):
        for number in read_ahead(numbers()):
            found.append(number)
    assert found == list(range(50))
    reader = read_ahead(iter(lambda: None, 1))
    next(reader)
    reader.close()
    assert threading.active_count() == running


def test_a_preparation_waits_for_another_of_its_folder(root, corpus, capsys):
    """It says so, touches nothing, and goes on when the other has ended."""
    second, said = threading.Thread(target=prepare, args=(root, recipe_for(corpus))), ""
    with preparation_lock(root / "corpus"):
        second.start()
        while second.is_alive() and "waiting: another process is preparing" not in said:
            said += capsys.readouterr().err
            time.sleep(0.02)
        assert second.is_alive() and not (root / "corpus").exists()
    second.join()
    assert (root / "corpus" / "manifest.json").exists() and said.count("waiting") == 1


def test_a_folder_of_somebody_s_files_is_not_replaced(root, corpus):
    """Only what a preparation made is ever removed; an empty folder is no obstacle."""
    (root / "corpus").mkdir(parents=True)
    (root / "corpus" / "thesis.tex").write_text("precious")
    said = finished_data.refusal(prepare, root, recipe_for(corpus))
    assert "holds files that are no prepared data" in said
    assert (root / "corpus" / "thesis.tex").read_text() == "precious"
    (root / "corpus" / "thesis.tex").unlink()
    assert (prepare(root, recipe_for(corpus)) / "manifest.json").exists()


HUB = {
    "gated": ("someone/gated", ["accept them at https://huggingface.co/someone/gated", "HF_TOKEN"]),
    "missing": ("gpt3", ["the hub has no model gpt3 that this account may see"]),
}


@pytest.mark.parametrize("name, said", HUB.values(), ids=HUB)
def test_a_tokenizer_that_the_hub_does_not_give_is_named_before_text_is_read(tmp_path, corpus, name, said):
    """In one line, and no folder is made: cleaning comes before the tokenizer is needed, and may take hours."""
    sources = json.dumps([{"path": str(corpus)}])
    command = [sys.executable, "data_prep.py", "--recipe", "features/gpt2", "--data_dir", tmp_path / "data"]
    command += ["--set", f"data.tokenizer={name}", "--set", f"data.sources={sources}"]
    with LocalHub() as hub:
        hub.gated.add("someone/gated")
        hub.missing.add("gpt3")
        told = execute(command, **{**hub.environment, "HF_TOKEN": "", "HF_HOME": tmp_path / "hub"}).refusal
    assert "data.tokenizer: " in told and all(words in told for words in said)
    assert not (tmp_path / "data").exists()


def test_a_link_is_followed_to_another_disk(root, corpus, tmp_path):
    """The data lies where the link leads, and the link stays."""
    root.mkdir()
    (root / "corpus").symlink_to(tmp_path / "large" / "corpus")
    for share in (0.2, 0.3):
        prepare(root, recipe_for(corpus, validation_share=share), replace=True)
    assert (root / "corpus").is_symlink() and (tmp_path / "large" / "corpus" / "manifest.json").exists()
    assert (tmp_path / "large" / "corpus.replaced-1" / "manifest.json").exists()


def test_a_count_needs_nothing_cleaned(corpus):
    """With a tokenizer that is to be trained: on the texts as they are read."""
    recipe = recipe_for(corpus, dedup={"exact": True, "minhash": None}, filters=[{"rule": "pii"}])
    counts = count_data(recipe, None, show_progress=False)
    assert counts["total"]["documents"] == 80 and counts["before_cleaning"]
