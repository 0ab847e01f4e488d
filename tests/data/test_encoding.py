"""Encoding: fast backends give the reference's tokens, differences are caught, and flat writing changes no byte."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from pretraining.data.block_guard import tokens_of_file
from pretraining.data.corpus import Batch, Corpus, open_source, open_sources
from pretraining.data.encoder import (
    BACKENDS,
    CHECKED_ONE_IN,
    Encoder,
    Fastokens,
    adversarial_texts,
    close_documents,
    is_checked,
    uncovered_texts,
)
from pretraining.data.preparation.execution import Execution
from pretraining.data.preparation.prepare import count_data, prepare_data
from pretraining.data.preparation.tokenizing import MakeTokenizer
from pretraining.data.shards import SplitWriter
from pretraining.data.tokenizer import END_OF_TEXT, Borders, describe_tokenizer, make_units, train_tokenizer
from pretraining.errors import UserError
from pretraining.recipe.data import Data, Source
from pretraining.recipe.model import Model
from tests.gear.finished_data import prepare, recipe_for, refusal, write_jsonl
from tests.gear.runs import bytes_of, execute, refused

UINT16 = np.dtype(np.uint16)
FAST = ("fastokens", "gigatoken")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A byte-level BPE of 2,000 ids, trained on this repository's sources and on what is adversarial.

    It has merges across quotes and letters of Unicode 17, which libraries with older tables take for symbols.
    """
    sources = sorted(Path(__file__).resolve().parents[2].joinpath("pretraining").rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in sources]
    path = tmp_path_factory.mktemp("encoding") / "tokenizer"
    new_letters = [f' "{chr(code)}"),' for code in range(0x16EA0, 0x16EB9)] * 40
    train_tokenizer([*texts, *adversarial_texts((), seed=1) * 3, *new_letters], 2000, path)
    return path


def open_encoder(folder: Path, backend: str, **options) -> Encoder:
    return Encoder(folder, describe_tokenizer(folder, "test"), backend, **options)


def random_texts(count: int, seed: int) -> list[str]:
    """Strings of any code points, biased to ASCII, spaces and the planes in use."""
    draw = random.Random(seed)
    ranges = [(32, 127), (9, 14), (32, 33), (0x80, 0x2FF), (0x300, 0x36F), (0x400, 0x3100), (0x3100, 0xD800)]
    ranges += [(0xE000, 0x10000), (0x10000, 0x20000), (0x20000, 0x110000)]
    weights = [30, 6, 20, 8, 4, 8, 6, 3, 4, 2]
    lengths = [draw.choice((1, 3, 20, 200)) for _ in range(count)]
    chosen = [draw.choices(ranges, weights, k=length) for length in lengths]
    return ["".join(chr(draw.randrange(*each)) for each in text) for text in chosen]


@pytest.mark.parametrize("name", FAST)
def test_a_fast_backend_gives_the_tokens_of_the_reference(folder: Path, name: str) -> None:
    """Exactness: adversarial and random strings, unassigned and private-use code points included."""
    pytest.importorskip(name)
    texts = [*adversarial_texts((END_OF_TEXT,), seed=2, num_random=1500), *random_texts(3000, seed=3)]
    texts += [f'("a", "{chr(code)}"),' for code in range(0x16EA0, 0x16EB9)]
    fast, reference = open_encoder(folder, name), open_encoder(folder, "tokenizers")
    assert fast.backend.name == name
    for found, expected in zip(fast.encode(texts, texts), reference.encode(texts, texts), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", (*FAST, "tokenizers"))
def test_text_that_spells_a_special_token_stays_text(folder: Path, name: str) -> None:
    """No text can end a document: EOS comes from the encoder alone, once for each text, and decodes back."""
    if name != "tokenizers":
        pytest.importorskip(name)
    encoder = open_encoder(folder, name)
    texts = [END_OF_TEXT, f"a{END_OF_TEXT}b", f"{END_OF_TEXT}{END_OF_TEXT}", "", " plain"]
    tokens, ends = encoder.encode(texts, texts)
    assert tokens.dtype == UINT16 and ends.dtype == np.int64
    np.testing.assert_array_equal(np.flatnonzero(tokens == encoder.borders.closing), ends - 1)
    decode = encoder.reference._tokenizer.decode
    assert [decode(part[:-1].tolist()) for part in np.split(tokens, ends[:-1])] == texts


class Lying(Fastokens):
    """fastokens, but the first id of each document is another one; other texts are left alone."""

    def encode_flat(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, offsets = super().encode_flat(texts)
        ids = ids.copy()
        ids[offsets[[n for n, text in enumerate(texts) if text.startswith("document")]]] += 1
        return ids, offsets


def test_a_lie_during_encoding_stops_with_the_document_named(folder: Path, monkeypatch) -> None:
    """One difference in the checked share raises UserError with the document's place and the way out."""
    pytest.importorskip("fastokens")
    texts = [f"document {number}" for number in range(3 * CHECKED_ONE_IN)]
    checked = [number for number, text in enumerate(texts) if is_checked(text)]
    monkeypatch.setitem(BACKENDS, "fastokens", Lying)
    encoder = open_encoder(folder, "auto")
    assert checked and encoder.backend.name == "fastokens"
    said = rf'^corpus\.jsonl:line {checked[0]}: .*data\.encoder to "tokenizers"'
    with pytest.raises(UserError, match=said):
        encoder.encode(texts, [f"corpus.jsonl:line {number}" for number in range(len(texts))])


@pytest.mark.parametrize("remedy", ["tokenizers", "a mended version"])
def test_what_a_lying_backend_has_encoded_is_encoded_anew(tmp_path, monkeypatch, small_tasks, remedy) -> None:
    """Also tasks that had finished before the lie was found, whichever way out is taken."""
    pytest.importorskip("fastokens")
    texts = sorted(
        (f"document {number} of some words" for number in range(2 * CHECKED_ONE_IN)), key=is_checked
    )
    path = write_jsonl(tmp_path / "texts.jsonl", texts)
    expected = bytes_of(prepare(tmp_path / "right", recipe_for(path)))
    lying = recipe_for(path, encoder="auto")
    with monkeypatch.context() as patched:
        patched.setattr("pretraining.data.encoder.SAMPLE_CHARACTERS", 1)
        patched.setitem(BACKENDS, "fastokens", Lying)
        here = (lying, tmp_path / "data", False, Execution("inline"))
        assert "what fastokens has encoded is then encoded anew" in refusal(prepare_data, *here)
    made = [*(tmp_path / "data" / ".corpus.work").glob("tokenize/*/result.json")]
    assert made and all('"fastokens"' in result.read_text() for result in made)
    mended = prepare(tmp_path / "data", recipe_for(path) if remedy == "tokenizers" else lying)
    found = bytes_of(mended)
    assert [name for name in expected if found[name] != expected[name] and name != "manifest.json"] == []


def test_the_checked_share_depends_on_the_text_alone(folder: Path) -> None:
    """About one document in 500 is checked, the same ones in whatever batches they come."""
    pytest.importorskip("fastokens")
    texts = [f"document {number}" for number in range(10_000)]
    one, other = open_encoder(folder, "fastokens"), open_encoder(folder, "fastokens")
    one.encode(texts, texts)
    for start in range(0, len(texts), 300):
        other.encode(texts[start : start + 300], texts[start : start + 300])
    assert one.num_checked == other.num_checked == sum(map(is_checked, texts))
    assert 5 <= one.num_checked <= 50


def test_a_backend_that_fails_the_first_check_is_replaced_by_the_reference(folder: Path, monkeypatch) -> None:
    """`auto` falls back with one sentence where the corpus shows a difference; a named backend is refused."""
    pytest.importorskip("fastokens")
    monkeypatch.setitem(BACKENDS, "fastokens", Lying)
    sample = ["document of the corpus"]
    encoder = open_encoder(folder, "auto", sample=sample)
    assert encoder.backend.name == "tokenizers"
    assert "fastokens encodes 'document of the corpus' differently" in encoder.note
    assert "\n" not in encoder.note
    assert encoder.encode(sample, sample)[0][-1] == encoder.borders.closing
    with pytest.raises(UserError, match=r"data\.encoder: fastokens encodes .* differently"):
        open_encoder(folder, "fastokens", sample=sample)


def test_a_missing_backend_costs_a_sentence(folder: Path, monkeypatch) -> None:
    """Without fastokens `auto` encodes by the reference and says how to be fast."""
    monkeypatch.setitem(sys.modules, "fastokens", None)
    encoder = open_encoder(folder, "auto")
    assert encoder.backend.name == "tokenizers" and "pip install fastokens" in encoder.note


def test_a_tokenizer_no_fast_backend_loads_falls_back(tmp_path: Path) -> None:
    """What a fast backend cannot read (here a Unigram model) is encoded by the reference."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    pieces = [("<unk>", 0.0), ("<eos>", -9.0), ("\u2581a", -1.0), ("b", -2.0), ("\u2581", -3.0), ("a", -2.5)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = open_encoder(tmp_path, "auto")
    assert encoder.encode(["ab a"], ["here"])[0].tolist() == [2, 3, 2, encoder.borders.closing]
    assert encoder.backend.name == "tokenizers" and encoder.note.startswith("fastokens cannot use")


def test_a_special_token_the_model_itself_produces_is_refused(tmp_path: Path) -> None:
    """A tokenizer in which text can spell EOS whatever one does is not used silently."""
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", -1.0), ("a", -2.0)], unk_id=0))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    said = refusal(open_encoder, tmp_path, "auto")
    assert said.startswith("data.tokenizer: ") and "'</s>'" in said


def test_texts_beyond_the_unicode_tables_are_found() -> None:
    """Unassigned and private-use code points are left to the reference, ordinary text in any script is not."""
    texts = ["plain", "caf\u00e9 \u4e2d\u6587 \U0001f642", "\u0378", "x\ue000", "\U0010fffd", "\u0301e"]
    assert uncovered_texts(texts) == [2, 3, 4]


@pytest.mark.parametrize("closing, opening", [(0, None), (None, 7), (0, 7), (7, 7)])
def test_documents_are_closed_one_by_one(closing, opening) -> None:
    """Special tokens around each text, empty ones and an empty batch too, as appending one by one would put them."""
    draw = np.random.default_rng(0)
    for count in (0, 1, 50):
        parts = [draw.integers(10, 19, draw.integers(0, 9)).tolist() for _ in range(count)]
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        ids = np.array([token for part in parts for token in part], np.uint32)
        tokens, ends = close_documents(ids, offsets, Borders(closing, opening), UINT16)
        before, behind = ([] if token is None else [token] for token in (opening, closing))
        documents = [[*before, *part, *behind] for part in parts]
        assert tokens.tolist() == [token for document in documents for token in document]
        assert ends.tolist() == np.cumsum(list(map(len, documents))).tolist()


@pytest.mark.parametrize("shard_documents", [4, 4_000_000])
def test_flat_runs_write_the_shards_of_single_documents(tmp_path, monkeypatch, shard_documents: int) -> None:
    """The shards' bytes depend on the documents, not on the runs they were appended in; long ones included."""
    monkeypatch.setattr("pretraining.data.shards.SHARD_DOCUMENTS", shard_documents)
    draw = np.random.default_rng(4)
    sizes = draw.choice([1, 3, 9, 60, 130], 70)
    documents = [draw.integers(0, 60_000, size).astype(UINT16) for size in sizes]
    num_bytes, entries = np.arange(len(documents)), []
    for run in (1, 7, 70):
        writer = SplitWriter(tmp_path / str(run), UINT16, 100)
        for first in range(0, len(documents), run):
            batch = documents[first : first + run]
            ends = np.cumsum(list(map(len, batch)))
            writer.extend(np.concatenate(batch), ends, num_bytes[first : first + run])
        entries.append(writer.finish())
    single = SplitWriter(tmp_path / "append", UINT16, 100)
    for tokens, size in zip(documents, num_bytes, strict=True):
        single.append(tokens, size)
    assert [single.finish()] * 3 == entries and len(entries[0]["shards"]) > 10


def test_a_trained_tokenizer_has_special_tokens_and_a_least_frequency(tmp_path: Path) -> None:
    """Ids in their order, known to transformers; text that spells one stays text; rare pairs are not merged."""
    from transformers import AutoTokenizer

    texts = ["the cat sat <|user|> on the mat"] * 5 + ["zyxwv zyxwv"] * 2
    special = ["<|user|>", "<|assistant|>"]
    train_tokenizer(texts, 270, tmp_path / "few", min_frequency=5, special_tokens=special)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "few")
    assert tokenizer.convert_tokens_to_ids([END_OF_TEXT, *special]) == [0, 1, 2] and len(tokenizer) == 270
    assert set(special) <= set(tokenizer.all_special_tokens)
    assert tokenizer.decode(tokenizer("<|user|>cat").input_ids, skip_special_tokens=True) == "cat"
    info = describe_tokenizer(tmp_path / "few", "few")
    encoder = Encoder(tmp_path / "few", info, "auto", sample=texts)
    tokens, _ = encoder.encode(["<|user|> on"], ["here"])
    assert not set(tokens[:-1].tolist()) & {0, 1, 2}
    assert "zy" not in tokenizer.get_vocab() and "at" in tokenizer.get_vocab()
    said = refusal(train_tokenizer, texts, 400, tmp_path / "more", min_frequency=6)
    assert "or lower min_frequency" in said


def test_a_pattern_says_what_is_never_merged(tmp_path: Path) -> None:
    """GPT-4's keeps numbers to three digits and a line's end alone; one of your own; what is none is refused."""
    texts = [f"in 2024 and 2024, we're\n\n  here {n}" for n in range(99)]
    names = {"gpt2": "2024", "gpt4": "202", r"\d|\D+": "2"}
    for number, (split, longest) in enumerate(names.items()):
        folder = tmp_path / str(number)
        train_tokenizer(texts, 275, folder, split=split)
        encoder = Encoder(folder, describe_tokenizer(folder, "own"), "auto", sample=texts)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        pieces = [text.replace("Ġ", "") for text in tokenizer.get_vocab() if "2" in text]
        assert max(pieces, key=len) == longest and encoder.note is None
        tokens, _ = encoder.encode(texts[:1], ["here"])
        assert tokenizer.decode(tokens[:-1].tolist()) == texts[0]
    with pytest.raises(UserError, match=r"data\.tokenizer\.split: '\(a': .*unmatched"):
        train_tokenizer(texts, 275, tmp_path / "none", split="(a")


@pytest.mark.parametrize("units", ["bytes", "characters"])
def test_a_tokenizer_of_units_spells_any_text(tmp_path: Path, units: str) -> None:
    """A token for each byte, or each character that the corpus has often enough; others come in bytes."""
    least = {} if units == "bytes" else {"min_frequency": 2}
    make_units(["naïve 数据 naïve"], units, tmp_path, **least, special_tokens=["<|x|>"])
    info = describe_tokenizer(tmp_path, "own")
    assert (info.eos_token_id, info.bos_token_id, info.vocab_size) == (0, 0, 258 if units == "bytes" else 264)
    encoder, text = Encoder(tmp_path, info, "auto", sample=["naïve"]), "ïa数 <|x|>"
    tokens, ends = encoder.encode([text], ["here"])
    assert len(tokens) == ends[0] == 1 + (len(text.encode()) if units == "bytes" else len(text) + 2)
    spelled = tokens_of_file(tmp_path / "tokenizer.json")
    assert b"".join(spelled[token] for token in tokens[:-1]) == text.encode() and encoder.note is None


def test_the_training_sample_takes_as_much_of_each_source(tmp_path: Path, monkeypatch) -> None:
    """A tokenizer sees all sources, whatever a run's weights, and never the validation documents."""
    monkeypatch.setattr("pretraining.data.preparation.tokenizing.TRAINING_BYTES", 40_000)
    monkeypatch.setattr("pretraining.data.corpus.BATCH_BYTES", 500)
    specs = []
    for name, weight in (("a", 1), ("b", 3)):
        path = tmp_path / f"{name}.jsonl"
        write_jsonl(path, [f"{number} of {path}" for number in range(2_000)])
        specs.append({"path": str(path), "weight": weight})
    data = Data.of({"name": "c", "sources": specs, "tokenizer": "x"})
    corpus = Corpus.of(data, open_sources(data))
    stage = MakeTokenizer(tmp_path, corpus, {"train_vocab_size": 300}, None, validation_share=0.3)
    seen: list[Batch] = list(stage.training_batches({}))
    sizes = [sum(sum(batch.num_bytes) for batch in seen if batch.source == source) for source in (0, 1)]
    assert all(abs(size - 20_000) < 1000 for size in sizes)
    assert min(draw for batch in seen for draw in batch.draws) >= 0.3


ODD_LINES = [
    '{"text": "a\\ud83d\\ude42\\u0000b", "x": NaN}',
    '{"text": "half \\ud800"}',
    ' {"text": "first", "text": "last"} ',
    '{"n": 123456789012345678901234567890, "text": "caf\\u00e9 \u4e2d"}',
    "  ",
    '{"text": ""}',
]


def test_the_fast_json_reader_gives_what_json_gives(tmp_path: Path) -> None:
    """Lines that orjson reads otherwise, or not at all, give the text of the standard library's parser."""
    path = tmp_path / "odd.jsonl"
    path.write_text("\n".join(ODD_LINES), encoding="utf-8")
    expected = [json.loads(line)["text"] for line in ODD_LINES if line.strip()]
    assert [text for text, *_ in open_source(Source(path=str(path))).documents()] == expected


@pytest.mark.parametrize("words", ["--count_documents 5", "--count --replace", "--count --workers 2"])
def test_options_beside_count_that_would_do_nothing_are_refused(words, tmp_path):
    said = refused(
        execute(["python", "data_prep.py", "--recipe", "tiny", "--data_dir", tmp_path, *words.split()])
    )
    assert said.startswith(f"error: {words.split()[0]}: ") and not any(tmp_path.iterdir())


def test_count_agrees_with_the_sources_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    """`--count` gives documents, bytes and tokens by source, and of the first documents only where asked."""
    texts = [[f"text {number} of {name}" for number in range(30)] for name in "ab"]
    paths = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for path, lines in zip(paths, texts, strict=True):
        write_jsonl(path, lines)
    recipe = recipe_for(*paths, tokenizer=str(folder), encoder="auto")
    recipe.model = Model(vocab_size=None)
    before = sorted(tmp_path.rglob("*"))
    counts, first = (count_data(recipe, limit, False) for limit in (None, 4))
    reference = open_encoder(folder, "tokenizers")
    for row, lines in zip(counts["sources"], texts, strict=True):
        assert row["tokens"] == len(reference.encode(lines, lines)[0])
        assert (row["documents"], row["text_bytes"]) == (30, len("".join(lines)))
        assert row["compression"] == row["bytes_per_token"] / 2
    assert counts["total"]["documents"] == 60 and first["total"]["documents"] == 8
    assert sorted(tmp_path.rglob("*")) == before
