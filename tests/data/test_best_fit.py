"""Best-fit packing: every token in exactly one block, few documents cut, and blocks that never change."""

import pickle
from itertools import pairwise

import numpy as np
import pytest

from pretraining.data.documents import (
    IGNORED,
    WINDOW_BLOCKS,
    BestFit,
    blocks_by_shard,
    count_blocks,
    crop,
    cut_shares,
    cuts_of_split,
    pack,
)
from pretraining.data.order import GlobalOrder
from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.shards import TokenSplit
from tests.data.test_shards import write_split

LENGTH = 32


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> TokenSplit:
    """30,000 distinct tokens (token = position): documents of 1 to 200 tokens, in shards of some 9,000."""
    borders = np.cumsum([0, *np.random.default_rng(3).geometric(1 / 20, 1500).clip(max=200)])
    documents = [np.arange(*ends, dtype=np.uint16) for ends in pairwise(borders)]
    return write_split(tmp_path_factory.mktemp("data") / "train", documents, 9_000)


@pytest.fixture(scope="module")
def ends(split) -> set[int]:
    """Where documents end."""
    return set(split.document_ends(0, split.num_tokens).tolist())


def straight_from_the_paper(borders: list[int], length: int) -> list[list[int]]:
    """The sizes in each block by best-fit-decreasing, looking at every block each time; None of it is cut."""
    sizes = []
    for start, stop in pairwise(borders):
        sizes += [length] * ((stop - start) // length) + [(stop - start) % length]
    blocks: list[list[int]] = [[] for _ in range((borders[-1] - borders[0]) // length)]
    for size in sorted(filter(None, sizes), reverse=True):
        fitting = [block for block in blocks if sum(block) + size <= length]
        if fitting:
            max(fitting, key=sum).append(size)
    return blocks


@pytest.mark.parametrize("seed", range(20))
def test_a_window_is_packed_as_the_paper_does_and_then_filled(seed):
    """Blocks of exactly the length, each token once; what was not cut lies where best-fit-decreasing puts it."""
    length, borders = window_of(seed, begin=1000)
    blocks = pack(borders, length)
    assert {sum(stop - start for start, stop in block) for block in blocks} == {length}
    covered = sorted(stretch for block in blocks for stretch in block)
    assert all(before[1] == after[0] for before, after in pairwise(covered))
    assert (covered[0][0], covered[-1][1]) == (borders[0], borders[-1])
    assert all(stop in borders for block in blocks for _, stop in block[:-1]), "only a block's end cuts"
    whole = [[b - a for a, b in block if is_whole(a, b, borders, length)] for block in blocks]
    for sizes, packed in zip(sorted(straight_from_the_paper(borders, length)), sorted(whole), strict=True):
        assert packed[: len(sizes)] == sizes


def window_of(seed: int, begin: int) -> tuple[int, list[int]]:
    """The length of a block, and borders of documents in a window of some blocks."""
    draw = np.random.default_rng(seed)
    length, num_blocks = int(draw.integers(2, 60)), int(draw.integers(1, 50))
    inside = draw.integers(1, length * num_blocks, draw.integers(0, 200)).tolist()
    return length, sorted({begin + place for place in (0, length * num_blocks, *inside)})


def is_whole(start: int, stop: int, borders: list[int], length: int) -> bool:
    """Whether a stretch is a document, a whole block of one, or the remainder behind those."""
    begin = max(border for border in borders if border <= start)
    return (start - begin) % length == 0 and (stop in borders or stop - start == length)


def test_an_epoch_has_every_token_once_and_starts_anywhere(split):
    """The order and where it is begun do not know of the packing: blocks, epochs and resuming are as ever."""
    num_blocks = split.num_blocks(LENGTH)
    order = GlobalOrder(num_blocks, 1, "data")
    dataset = PackedDataset(split, LENGTH, order, num_samples=num_blocks, packing="best_fit")
    inputs = np.stack([sample["input_ids"] for sample in dataset])
    assert (np.sort(inputs.reshape(-1)) == np.arange(num_blocks * LENGTH)).all()
    later = PackedDataset(split, LENGTH, order, first_sample=num_blocks // 2, packing="best_fit")
    assert (np.stack([sample["input_ids"] for sample in later]) == inputs[num_blocks // 2 :]).all()


@pytest.mark.parametrize("masks", [False, True])
def test_targets_are_the_next_tokens_of_the_same_document(split, ends, masks):
    """Where a document goes on, its next token, also behind the block's end; a masked border has no target."""
    dataset = PackedDataset(split, LENGTH, masks_documents=masks, packing="best_fit")
    moved = 0
    for block in range(len(dataset)):
        sample = dataset[block]
        for token, label in zip(sample["input_ids"], sample["labels"], strict=True):
            if token + 1 not in ends:
                assert label == token + 1
            elif masks:
                assert label == IGNORED
            moved += label != token + 1
    assert moved > len(dataset) / 2


@pytest.mark.parametrize("seed", range(20))
def test_what_does_not_end_with_its_document_ends_its_block(seed):
    """Its true next token is then the block's last target; also of the document that the window's end cuts."""
    length, borders = window_of(seed, begin=0)
    blocks = pack(borders, length, goes_on=True)
    tokens = sorted(token for block in blocks for part in block for token in range(*part))
    assert tokens == list(range(borders[-1]))
    assert all(sum(stop - start for start, stop in block) == length for block in blocks)
    assert all(stop in borders[:-1] for block in blocks for _, stop in block[:-1])


def test_fewer_documents_are_cut_and_the_shares_are_true(split, ends):
    """The reported shares are those a look at every document gives; packing cuts a fifth of what a sequence does."""
    packed, num_blocks = BestFit(split, LENGTH), split.num_blocks(LENGTH)
    block_of = {}
    for block in range(num_blocks):
        block_of |= {token: block for part in packed.stretches(block) for token in range(*part)}
    every = [range(*each) for each in pairwise([0, *sorted(ends)])]
    documents = [each for each in every if len(each) <= LENGTH and each.stop <= len(block_of)]
    shares = cuts_of_split(split, LENGTH)
    assert shares["documents"] == len(documents)
    for packing, where in (("in_sequence", lambda token: token // LENGTH), ("best_fit", block_of.get)):
        behind = [sum(where(token) != where(each[0]) for token in each) for each in documents]
        assert shares[packing]["cut"] == pytest.approx(np.count_nonzero(behind) / len(documents), rel=0.02)
        assert shares[packing]["cropped"] == pytest.approx(sum(behind) / sum(map(len, documents)), rel=0.02)
    assert shares["best_fit"]["cut"] < shares["in_sequence"]["cut"] / 5
    assert shares["best_fit"]["cropped"] < shares["in_sequence"]["cropped"] / 10
    assert 0 < cut_shares([(packed, *packed.window_around(0))])["documents"] < shares["documents"] / 2
    assert cuts_of_split(split, 10**6) == {"documents": 0}


def test_a_block_over_a_shards_end_stays_as_it_is(split):
    """Shards are fetched for the blocks that start in them: no other block reads from two."""
    packed = BestFit(split, LENGTH)
    borders = split.token_starts[1:-1].tolist()
    crossing = [border // LENGTH for border in borders if border % LENGTH]
    assert crossing
    for block in range(split.num_blocks(LENGTH)):
        stretches = packed.stretches(block)
        if block in crossing:
            assert stretches == [(block * LENGTH, (block + 1) * LENGTH)]
        else:
            assert len({split.locate(start)[0] for start, _ in stretches}) == 1


def straight_crop(sizes: list[int], room: int) -> list[list[tuple[int, int]]]:
    """Blocks by the words of `Cropped`, looking at every document each time."""
    left, blocks = dict(enumerate(sizes)), []
    while left:
        block, free = [], room
        while left and free:
            # by size, of equal ones the first
            longest = sorted(left, key=lambda number: (-left[number], number))
            fitting = [number for number in longest if left[number] <= free]
            chosen = longest[0] if not block else fitting[0] if fitting else longest[-1]
            block.append((chosen, min(left.pop(chosen), free)))
            free -= block[-1][1]
        blocks += [block] if not free else []
    return blocks


@pytest.mark.parametrize("seed", range(20))
def test_cropped_documents_fill_blocks_as_the_rule_says(seed):
    draw = np.random.default_rng(seed)
    sizes, room = draw.geometric(1 / 20, draw.integers(0, 90)).tolist(), int(draw.integers(2, 60))
    blocks = crop(sizes, room)
    assert sorted(blocks) == sorted(straight_crop(sizes, room))
    assert all(taken == sizes[number] for block in blocks for number, taken in block[:-1])


@pytest.mark.parametrize("masks", [False, True])
def test_every_cropped_block_begins_with_a_document(split, ends, masks):
    """It holds documents from their starts on, none twice and none of two shards, and each target is the next token."""
    dataset = PackedDataset(split, LENGTH, masks_documents=masks, packing="cropped")
    starts, read, shards = ends | {0}, set(), []
    for block in range(len(dataset)):
        sample, (_, stretches) = dataset[block], dataset.place(block)
        tokens, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        assert len(tokens) == LENGTH and tokens[0] in starts and not read & set(tokens)
        read |= set(tokens)
        for token, following, label in zip(tokens, [*tokens[1:], None], labels, strict=True):
            begins = label in starts or (masks and token + 1 in ends)
            assert begins or label == token + 1
            assert following is None or label == (IGNORED if masks and following in starts else following)
        shards.append(split.locate(stretches[0][0])[0])
        assert {split.locate(start)[0] for start, _ in stretches} == {shards[-1]}
    first_blocks = blocks_by_shard(split, LENGTH, "cropped")
    assert first_blocks.tolist() == [0, *np.cumsum(np.bincount(shards)).tolist()]
    assert dataset.cut_shares()["read"] == len(read) / split.num_tokens > 0.7


def test_cropped_blocks_are_the_same_in_a_worker_and_from_any_start(split):
    order = GlobalOrder(count_blocks(split, LENGTH, "cropped"), 1, "data")
    whole = PackedDataset(split, LENGTH, order, num_samples=order.num_blocks, packing="cropped")
    later = pickle.loads(pickle.dumps(PackedDataset(split, LENGTH, order, 100, packing="cropped")))
    for number in range(0, len(later), 7):
        assert (later[number]["input_ids"] == whole[100 + number]["input_ids"]).all()


def test_the_packing_never_changes():
    """Runs are resumed by later versions of this code: windows and places are for ever."""
    assert WINDOW_BLOCKS == 128
    assert pack([0, 3, 4, 9, 11, 30, 32, 40], 10) == [
        [(11, 21)],
        [(21, 30), (3, 4)],
        [(32, 40), (9, 11)],
        [(4, 9), (0, 3), (30, 32)],
    ]
    assert pack([0, 7, 14, 20], 10) == [[(0, 7), (17, 20)], [(7, 14), (14, 17)]]
