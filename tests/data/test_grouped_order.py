"""Orders that need few shards at a time: still a permutation, still a pure function, mixed as well as measured."""

import pickle
import sys
from itertools import product

import numpy as np
import pytest

from pretraining.data.interleaving import InterleavedStage, Interleaving
from pretraining.data.order import (
    GlobalOrder,
    GroupedOrder,
    MixedOrder,
    OrderWithout,
    WindowedOrder,
    blocks_starting,
    shards_at_once,
)
from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.shards import SplitWriter, TokenSplit
from pretraining.schema import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
from order import full_shuffle_share, mixing_quality

LENGTH = 8
GROUP_SIZE = 4
KEPT = [7, 6, 25, 60]
"""The first samples in windows of 64."""


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> TokenSplit:
    """24,000 tokens in documents of 5 to 60 and in 35 or so shards."""
    writer = SplitWriter(tmp_path_factory.mktemp("data") / "train", np.dtype(np.uint16), 700)
    lengths = np.random.default_rng(0).integers(5, 60, 2000)
    for start, length in zip(np.cumsum(lengths), lengths, strict=True):
        if start + length <= 24_000:
            writer.append(np.arange(start, start + length, dtype=np.uint16), 40)
    return TokenSplit(writer.folder, writer.finish())


def grouped(split: TokenSplit, seed: int = 1, group_size: int = GROUP_SIZE) -> GroupedOrder:
    starts = blocks_starting(split.token_starts, LENGTH, split.num_blocks(LENGTH))
    return GroupedOrder(starts, group_size, seed, "data")


def mixed(split: TokenSplit) -> MixedOrder:
    orders = [grouped(split, seed=5), GlobalOrder(700, 5, "other")]
    return MixedOrder(Interleaving([InterleavedStage(0, None, (2, 1))]), orders)


@pytest.mark.parametrize("num_blocks, window", [(1, 1), (1000, 7), (1000, 250), (1000, 5000)])
def test_windows_come_in_sequence_and_hold_each_block_once(num_blocks, window):
    """An epoch is a permutation that never leaves its window, another one in each epoch."""
    order = WindowedOrder(num_blocks, window, seed=1)
    epochs = order.blocks(np.arange(3 * num_blocks)).reshape(3, num_blocks)
    assert (np.sort(epochs, axis=1) == np.arange(num_blocks)).all()
    assert (epochs // window == np.arange(num_blocks) // window).all()
    assert window < 100 or not (epochs[0] == epochs[1]).all()


def test_windows_do_not_depend_on_what_comes_behind_them():
    """Known before the data is whole, at any place in O(1): only the last window depends on the number of blocks."""
    order, samples = WindowedOrder(10**12, 64, seed=1), np.arange(640)
    longer = WindowedOrder(660, 64, seed=1)
    assert (order.blocks(samples) == longer.blocks(samples)).all()
    assert order.blocks(np.array([10**12 - 1])) // 64 == (10**12 - 1) // 64
    for other in (WindowedOrder(660, 64, seed=2), WindowedOrder(660, 64, seed=1, label="1")):
        assert not (other.blocks(samples) == longer.blocks(samples)).all()
    assert order.blocks(np.arange(4)).tolist() == KEPT, "runs are resumed by later versions"


def test_samples_are_ready_where_their_positions_are():
    """Of a run that left windows of the order out: each ready sample's position is ready, and the next one's is not."""
    order = WindowedOrder(1000, 10, seed=1)
    order.ready_until = lambda: 60
    for left_out in ([], [(0, 5)], [(20, 30), (55, 70)], [(70, 80)]):
        ready = OrderWithout(order, left_out).ready_until()
        positions = OrderWithout(order, left_out).positions(np.arange(ready + 1))
        assert positions[-1] >= 60 and (ready == 0 or positions[-2] < 60)


def test_windows_need_the_shards_they_span(split):
    """As a cache must hold them: never more in one window than `shards_at_once` says, and that many in one."""
    starts = blocks_starting(split.token_starts, LENGTH, split.num_blocks(LENGTH))
    for window in (1, 50, 300, 10**6):
        order = WindowedOrder(split.num_blocks(LENGTH), window, seed=1)
        shards = PackedDataset(split, LENGTH, order).shard_needs().of(np.arange(order.num_blocks))[:, 1]
        spans = [np.ptp(shards[first : first + window]) + 1 for first in range(0, len(shards), window)]
        assert max(spans) == shards_at_once(starts, window)


@pytest.mark.parametrize("group_size", [1, 3, 7, 1000])
@pytest.mark.parametrize("length", [3, 8, 900])
def test_every_block_of_an_epoch_exactly_once(split, group_size, length):
    """Whatever the group, and with blocks longer than a shard (some shards then start none)."""
    starts = blocks_starting(split.token_starts, length, split.num_blocks(length))
    order = GroupedOrder(starts, group_size, 1, "data")
    epochs = order.blocks(np.arange(3 * order.num_blocks)).reshape(3, order.num_blocks)
    assert (np.sort(epochs, axis=1) == np.arange(order.num_blocks)).all()
    assert order.num_blocks < 100 or (epochs[0] == epochs[1]).mean() < 0.05


def test_the_order_never_changes():
    """Runs are resumed by later versions of this code: these values are for ever."""
    order = GroupedOrder(np.array([0, 4, 4, 9, 12]), 2, 0, "a")
    assert order.blocks(np.arange(12)).tolist() == [0, 8, 4, 7, 5, 6, 1, 2, 3, 10, 11, 9]
    assert order.blocks(np.array([12 * 10**12 + 5])).tolist() == [6]


def test_a_group_needs_no_more_shards_than_it_says(split):
    """The samples of one group start in `group_size` shards."""
    dataset = PackedDataset(split, LENGTH, grouped(split))
    needs = dataset.shard_needs()
    shards = needs.of(np.arange(len(dataset)))[:, 1]
    in_sequence = list(dict.fromkeys(shards.tolist()))
    for first in range(0, len(in_sequence), GROUP_SIZE):
        group = np.isin(shards, in_sequence[first : first + GROUP_SIZE])
        assert np.diff(np.flatnonzero(group)).max() == 1, "a group is over before the next begins"


def test_the_shards_named_are_those_that_are_read(split, monkeypatch):
    """Of a mixed run, from the middle on: reading the samples opens the named shards and the next ones' heads."""
    other = split.part(0, len(split.shard_entries))
    dataset = PackedDataset([split, other], LENGTH, _two_of(split), num_samples=10**6)
    samples = np.arange(5000, 5040)
    needed = {tuple(row) for row in dataset.shard_needs().of(samples).tolist()}
    opened = set()
    for number, part in enumerate((split, other)):
        original = part._shard
        monkeypatch.setattr(
            part, "_shard", lambda shard, n=number, f=original: opened.add((n, shard)) or f(shard)
        )
    dataset.__getitems__(samples.tolist())
    assert needed <= opened <= needed | {(number, shard + 1) for number, shard in needed}


def _two_of(split: TokenSplit) -> MixedOrder:
    return MixedOrder(
        Interleaving([InterleavedStage(0, None, (2, 1))]), [grouped(split, seed=seed) for seed in (5, 6)]
    )


RANKS = (1, 2, 3, 8, 64, 512)


def test_ranks_and_micro_batches_share_an_epoch_out(split):
    """1 to 512 ranks, any micro-batch, through accelerate's own sharding: each sample of the run exactly once."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler, SequentialSampler

    num_samples = 1536
    orders = [GlobalOrder(num_samples, 1, "a"), grouped(split), mixed(split)]
    expected = [order.blocks(np.arange(num_samples)) for order in orders]
    assert (np.sort(expected[0]) == np.arange(num_samples)).all()
    for ranks, micro_batch in product(RANKS, (1, 3)):
        batches = BatchSampler(SequentialSampler(range(num_samples)), micro_batch, drop_last=False)
        shares = [list(BatchSamplerShard(batches, ranks, rank)) for rank in range(ranks)]
        together = [index for step in zip(*shares, strict=True) for batch in step for index in batch]
        for order, blocks in zip(orders, expected, strict=True):
            assert (order.blocks(np.array(together[:num_samples])) == blocks).all()


def test_grouped_samples_mix_nearly_as_well_as_a_full_shuffle(split):
    """Two samples of a step come from different documents as often as a full shuffle gives, within 5 %."""
    documents = documents_of_blocks(split, LENGTH)
    for order in (GlobalOrder(len(documents), 3, "data"), grouped(split)):
        measured = mixing_quality(order, documents, samples_per_step=16)
        assert 0.95 < measured.different_ratio <= 1.001
    sequential = mixing_quality(InSequence(len(documents)), documents, samples_per_step=16)
    assert sequential.different_ratio < 0.95, "the measure tells an unshuffled stream apart"


def documents_of_blocks(split: TokenSplit, sequence_length: int) -> np.ndarray:
    """[blocks]: the document that each block's first token belongs to."""
    starts = np.arange(split.num_blocks(sequence_length)) * sequence_length
    return np.searchsorted(split.document_ends(0, split.num_tokens), starts, side="right")


class InSequence:
    """No shuffle at all."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks

    def blocks(self, samples: np.ndarray) -> np.ndarray:
        return samples % self.num_blocks


def test_the_expected_share_is_that_of_all_pairs():
    """Documents of 2, 1 and 3 blocks: 4 of the 15 pairs of blocks share one."""
    assert full_shuffle_share(np.array([0, 0, 1, 2, 2, 2])) == pytest.approx(4 / 15)


def test_workers_carry_an_order_along(split):
    """DataLoader workers started afresh receive the dataset pickled, and find the same samples."""
    dataset = PackedDataset([split], LENGTH, grouped(split), num_samples=100)
    dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert (copy[71]["labels"] == dataset[71]["labels"]).all()
