"""The guard flags blocks from which nothing can be learned, where they lie, and leaves real text alone."""

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from pretraining.data.block_guard import (
    DISTINCT_SHARE,
    DOMINANT_SHARE,
    BlockGuard,
    repeated_ngram,
    tokens_of_file,
)
from pretraining.data.documents import IGNORED
from pretraining.data.order import GlobalOrder
from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.shards import TokenSplit
from pretraining.data.tokenizer import END_OF_TEXT, train_tokenizer
from pretraining.recipe import load_recipe
from pretraining.recipe.fixed_keys import changed_parts, check_allowed
from pretraining.recipe.sections import RepeatedNgrams
from tests.data.test_shards import write_split

LENGTH = 512


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """Of a byte-level BPE of 2,000 ids, trained on some modules of the standard library."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(library_texts()[:60], 2000, folder)
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def tokenizer(file) -> Tokenizer:
    return Tokenizer.from_file(str(file))


@pytest.fixture(scope="module")
def token_bytes(file) -> list[bytes]:
    return tokens_of_file(file)


def library_texts() -> list[str]:
    """Modules of the standard library: English and code."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(folder.glob("[a-m]*.py")) + sorted(folder.glob("asyncio/*.py"))
    return [path.read_text(encoding="utf-8") for path in paths]


def test_token_bytes_spell_the_text(tokenizer, token_bytes):
    """Joined, they are the text's own bytes, whatever the characters."""
    text = "def naïve():\n\treturn '数据 \N{GRINNING FACE}'  # …"
    assert b"".join(token_bytes[token] for token in tokenizer.encode(text).ids) == text.encode()
    assert token_bytes[tokenizer.token_to_id(END_OF_TEXT)] == END_OF_TEXT.encode()


def test_byte_fallback_tokens_are_single_bytes(tmp_path):
    """SentencePiece's way: <0xE6> is a byte, U+2581 a space."""
    vocabulary = {"<unk>": 0, "<0xE6>": 1, "\u2581the": 2}
    content = {"model": {"type": "BPE", "vocab": vocabulary}, "decoder": {"type": "Sequence", "decoders": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert tokens_of_file(tmp_path / "tokenizer.json") == [b"<unk>", b"\xe6", b" the"]


def test_real_text_raises_hardly_a_flag(tokenizer, token_bytes, tmp_path):
    """At most one block in 300 of English and code, and what is flagged repeats itself."""
    encoded = tokenizer.encode_batch(library_texts())
    ids = np.concatenate([np.array(each.ids, np.uint16) for each in encoded])
    guard = BlockGuard(tmp_path / "flags.jsonl", token_bytes)
    for length in (128, 512, 2048):
        starts = range(0, len(ids) - length, length)
        flagged = list(filter(None, (guard.reasons(ids[start : start + length + 1]) for start in starts)))
        assert len(starts) > 300 and len(flagged) <= len(starts) / 300
        assert all(set(reasons) == {"repeated"} for reasons in flagged)


def test_text_of_other_scripts_is_decodable(tokenizer, token_bytes, tmp_path):
    """Characters of several tokens each, none of which is text by itself, are not taken for broken ones."""
    text = "数据是训练的基础。" * 3 + "\N{GRINNING FACE}".join("абвгдежзийклмнопрстуфх")
    ids = tokenizer.encode(text + "".join(map(chr, range(0x4E00, 0x4E80)))).ids
    assert not BlockGuard(tmp_path / "flags", token_bytes).reasons(np.array(ids, np.uint16))


RANDOM = np.random.default_rng(4)
PERIOD = np.resize(RANDOM.permutation(2000)[:37], LENGTH + 1)
NOISE = RANDOM.integers(0, 2000, LENGTH + 1)
DEGENERATE = {
    "dominant": np.where(RANDOM.random(LENGTH + 1) < 0.7, 9, NOISE),
    "few_tokens": RANDOM.integers(0, 4, LENGTH + 1),
    "repeated": np.where(RANDOM.random(LENGTH + 1) < 0.03, NOISE, PERIOD),
}


@pytest.mark.parametrize("reason", DEGENERATE)
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_degenerate_blocks_are_flagged(reason, dtype, tmp_path):
    """With some noise among them; of a period the shortest is named."""
    guard = BlockGuard(tmp_path / "flags")
    found = guard.reasons(DEGENERATE[reason].astype(dtype))
    assert reason in found and (reason != "repeated" or found[reason] == 37)
    assert not guard.reasons(np.arange(5, dtype=dtype)) and not guard.reasons(np.arange(400, dtype=dtype))


def test_undecodable_text_is_flagged(tokenizer, token_bytes, tmp_path):
    """Bytes read as text and replaced character by character, and tokens whose bytes are no text."""
    guard = BlockGuard(tmp_path / "flags", token_bytes)
    broken = RANDOM.integers(32, 256, 600, np.uint8).tobytes().decode(errors="replace")
    assert "undecodable" in guard.reasons(np.array(tokenizer.encode(broken).ids, np.uint16))
    lone = np.array([token for token, text in enumerate(token_bytes) if text in {b"\xc3", b"\xe6", b"\xf0"}])
    text = np.array(tokenizer.encode(library_texts()[0]).ids)[:LENGTH]
    text[::4] = lone[RANDOM.integers(0, len(lone), len(text[::4]))]
    assert "undecodable" in guard.reasons(text.astype(np.uint16))


@pytest.fixture
def split(tmp_path) -> TokenSplit:
    """Ten documents of 1,000 tokens, three in a shard; the fifth is one token alone."""
    documents = list(RANDOM.integers(0, 2000, (10, 1000), np.uint16))
    documents[4][:] = 7
    return write_split(tmp_path / "train", documents, 3000)


def test_a_flag_says_where_the_block_lies(split, tmp_path):
    """Position in the run, block, source, shard and document; samples are returned as they are."""
    guard = BlockGuard(tmp_path / "run" / "flags.jsonl", source_names=["web"])
    order = GlobalOrder(split.num_blocks(100), 1, "data")
    guarded = PackedDataset(split, 100, order, first_sample=30, guard=guard)
    plain = PackedDataset(split, 100, order, first_sample=30)
    for one, other in zip(guarded.__getitems__(range(60)), plain.__getitems__(range(60)), strict=True):
        assert (one["labels"] == other["labels"]).all()
    rows = [json.loads(line) for line in guard.path.read_text().splitlines()]
    blocks = order.blocks(np.arange(30, 90)).tolist()
    assert {row["block"] for row in rows} == {block for block in blocks if 40 <= block < 50}
    for row in rows:
        assert blocks[row["sample"] - 30] == row["block"] and row["source"] == "web"
        assert row["document"] == 1 and row["shard"] == split.shard_entries[1]["file"]
        assert row["reasons"]["dominant"] > 0.9


@pytest.mark.parametrize("masks", [False, True])
def test_what_is_skipped_is_no_target_wherever_a_run_begins(split, tmp_path, masks):
    """Flagged blocks keep their place and inputs and lose all labels; every other sample is as it was."""
    order = GlobalOrder(split.num_blocks(100), 1, "data")
    plain = PackedDataset(split, 100, order, masks_documents=masks).__getitems__(range(90))
    for first in (0, 17):
        guard = BlockGuard(tmp_path / f"{first}.jsonl", skips=True)
        dataset = PackedDataset(split, 100, order, first, guard=guard, masks_documents=masks)
        read = dataset.__getitems__(range(90 - first))
        rows = [json.loads(line) for line in guard.path.read_text().splitlines()]
        skipped = {row["sample"] for row in rows}
        assert len(skipped) > 5 and all(row["skipped"] for row in rows)
        for sample, (one, other) in enumerate(zip(read, plain[first:], strict=True), first):
            assert (one["input_ids"] == other["input_ids"]).all()
            assert (one["labels"] == (IGNORED if sample in skipped else other["labels"])).all()
        kept = PackedDataset(split, 100, order, first).__getitems__(range(90 - first))
        assert skipped == {first + place for place, each in enumerate(kept) if len(set(each["labels"])) < 3}


def straight_repeats(tokens: list[int], longest: int, times: int) -> int | None:
    """The size of the shortest n-gram that comes so often in a row, by a look at every place."""
    sizes, places = range(1, longest + 1), range(len(tokens))
    found = [n for n in sizes for at in places if tokens[at : at + n * times] == tokens[at : at + n] * times]
    return min([n for n in found if n * times <= len(tokens)], default=None)


@pytest.mark.parametrize("seed", range(20))
def test_an_ngram_that_comes_often_in_a_row_is_found_wherever_it_is(seed):
    """Exactly as often as asked for, and at either end of the block; once more is not found."""
    draw = np.random.default_rng(seed)
    size, times = draw.integers(1, 9), draw.integers(2, 8)
    tokens = draw.integers(0, 30, 150).astype(np.uint16)
    at = draw.choice([0, len(tokens) - size * times, draw.integers(0, len(tokens) - size * times)])
    tokens[at : at + size * times] = np.tile(tokens[at : at + size], times)
    for asked in (int(times), int(times) + 1):
        assert repeated_ngram(tokens, 8, asked) == straight_repeats(tokens.tolist(), 8, asked)


def test_a_block_that_repeats_an_ngram_is_left_out_alone(split, tmp_path):
    """Others that are flagged are trained on, unless they are skipped too."""
    guard = BlockGuard(tmp_path / "flags.jsonl", ngrams=RepeatedNgrams(longest=3, times=20))
    tokens = np.concatenate([NOISE[:100], np.tile([5, 6, 7], 20), NOISE[100:]])
    assert guard.reasons(tokens) == {"ngram": 3} and guard.leaves_out({"ngram": 3})
    assert "few_tokens" in guard.reasons(DEGENERATE["few_tokens"]) and not guard.leaves_out({"few_tokens": 4})
    dataset = PackedDataset(split, 100, GlobalOrder(split.num_blocks(100), 1, "data"), guard=guard)
    left_out = sum((sample["labels"] == IGNORED).all() for sample in dataset.__getitems__(range(99)))
    assert left_out == len(guard.path.read_text().splitlines()) >= 9


def test_what_becomes_of_flagged_blocks_is_part_of_the_curve():
    """A run goes on with it as it began; a run from before the key trained on them."""
    ways = [f"monitors.flagged_blocks={each}" for each in ("log", "skip")]
    now, skips, before = (load_recipe("features/gpt2", [way]).to_dict() for way in (*ways, ways[0]))
    before["monitors"] = {key: v for key, v in before["monitors"].items() if key != "flagged_blocks"}
    assert not changed_parts(now, before)
    assert [each.key for each in changed_parts(skips, before)] == ["monitors.flagged_blocks"]
    assert check_allowed("monitors.flagged_blocks") and check_allowed("optimizer.momentum")


def test_the_quick_look_misses_nothing(token_bytes):
    """Blocks around every threshold: flagged exactly as by counting."""
    guard, draw = BlockGuard("unused", None), np.random.default_rng(0)
    for _ in range(400):
        tokens = draw.integers(1, draw.integers(2, 60), LENGTH + 1).astype(np.uint16)
        tokens[draw.random(LENGTH + 1) < draw.uniform(0.4, 0.8)] = 0
        counts = np.bincount(np.sort(tokens) if draw.random() < 0.5 else tokens)
        expected = set()
        if counts.max() >= int(DOMINANT_SHARE * len(tokens)):
            expected.add("dominant")
        if np.count_nonzero(counts) < max(3, DISTINCT_SHARE * len(tokens)):
            expected.add("few_tokens")
        assert guard.reasons(tokens).keys() - {"repeated"} == expected
