"""Best-fit packing: every token in exactly one block, few documents cut, and blocks that never change."""

from itertools import pairwise

import numpy as np
import pytest

from pretraining.data import GlobalOrder, PackedDataset, TokenSplit
from pretraining.data.best_fit import WINDOW_BLOCKS, BestFit, pack
from pretraining.data.cuts import cut_shares, cuts_of_split
from pretraining.data.document_masking import IGNORED
from pretraining.data.shards import SplitWriter

LENGTH = 32


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> TokenSplit:
    """30,000 distinct tokens (token = position): documents of 1 to 200 tokens, in shards of some 9,000."""
    draw = np.random.default_rng(3)
    writer = SplitWriter(tmp_path_factory.mktemp("data") / "train", np.dtype(np.uint16), 9_000)
    start = 0
    while start < 30_000:
        size = int(min(draw.geometric(1 / 20), 200))
        writer.append(np.arange(start, start + size, dtype=np.uint16), 4 * size)
        start += size
    return TokenSplit(writer.folder, writer.finish())


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
    draw = np.random.default_rng(seed)
    length, num_blocks = int(draw.integers(2, 60)), int(draw.integers(1, 50))
    inside = draw.integers(0, length * num_blocks, draw.integers(0, 200)).tolist()
    borders = sorted({1000, 1000 + length * num_blocks, *(1000 + place for place in inside)})
    blocks = pack(borders, length)
    assert [sum(stop - start for start, stop in block) for block in blocks] == [length] * num_blocks
    covered = sorted(stretch for block in blocks for stretch in block)
    assert all(before[1] == after[0] for before, after in pairwise(covered))
    assert (covered[0][0], covered[-1][1]) == (borders[0], borders[-1])
    assert all(stop in borders for block in blocks for _, stop in block[:-1]), "only a block's end cuts"

    whole = [
        [stop - start for start, stop in block if is_whole(start, stop, borders, length)] for block in blocks
    ]
    for sizes, packed in zip(sorted(straight_from_the_paper(borders, length)), sorted(whole), strict=True):
        assert packed[: len(sizes)] == sizes


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
    window_ends = {stop for block in range(len(dataset)) for _, stop in dataset.place(block)[1]}
    moved = 0
    for block in range(len(dataset)):
        sample = dataset[block]
        for place, (token, label) in enumerate(zip(sample["input_ids"], sample["labels"], strict=True)):
            goes_on = token + 1 not in ends
            if masks and not goes_on:
                assert label == IGNORED
            elif goes_on and (place == LENGTH - 1 or token + 1 not in window_ends):
                assert label == token + 1
            moved += label != token + 1
        if masks:
            starts = np.flatnonzero(sample["position_ids"] == 0)
            before = sample["input_ids"][starts[starts > 0] - 1] + 1
            assert set(before.tolist()) <= window_ends | ends
    assert moved


def test_fewer_documents_are_cut_and_the_shares_are_true(split, ends):
    """The reported shares are those a look at every document gives; packing cuts a tenth of what a sequence does."""
    packed = BestFit(split, LENGTH)
    stretches = {part for block in range(split.num_blocks(LENGTH)) for part in packed.stretches(block)}
    starts = dict(stretches)
    fitting, cut, behind, cut_before = 0, 0, 0, 0
    for start, stop in pairwise([0, *sorted(ends)]):
        first, _ = window = packed.window_around(min(start // LENGTH, split.num_blocks(LENGTH) - 1))
        inside = window[0] * LENGTH < start and stop <= window[1] * LENGTH
        begins_inside = start in split.document_ends(first * LENGTH, window[1] * LENGTH)
        if stop - start <= LENGTH and inside and begins_inside:
            fitting += 1
            cut += starts[start] != stop
            behind += stop - starts[start]
            cut_before += start // LENGTH != (stop - 1) // LENGTH
    shares = cuts_of_split(split, LENGTH)
    assert shares["documents"] == pytest.approx(fitting, rel=0.01)
    assert shares["best_fit"]["cut"] == pytest.approx(cut / fitting, rel=0.02)
    assert shares["in_sequence"]["cut"] == pytest.approx(cut_before / fitting, rel=0.02)
    assert shares["best_fit"]["cut"] < shares["in_sequence"]["cut"] / 5
    assert shares["best_fit"]["cropped"] < shares["in_sequence"]["cropped"] / 10
    assert cut_shares([(packed, 0), (packed, 1)])["documents"] < shares["documents"] / 2


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
            assert len(set(split.shards_at(np.array([start for start, _ in stretches])))) == 1


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
