"""The order of a run and the samples cut along it: pure functions of (seed, fingerprint, sample), mixed as measured."""

import pickle
from itertools import pairwise, product

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
from pretraining.data.shards import TokenSplit
from tests.data.test_shards import write_split
from tests.gear.mixing import full_shuffle_share, mixing_quality

LENGTH = 8
GROUP_SIZE = 4


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> TokenSplit:
    """Some 24,000 distinct tokens (token = position) in documents of 5 to 60 and in 35 or so shards."""
    borders = np.cumsum([0, *np.random.default_rng(0).integers(5, 60, 750)])
    documents = [np.arange(*ends, dtype=np.uint16) for ends in pairwise(borders)]
    return write_split(tmp_path_factory.mktemp("data") / "train", documents, 700)


def grouped(split, seed: int = 1, group_size: int = GROUP_SIZE, length: int = LENGTH) -> GroupedOrder:
    starts = blocks_starting(split.token_starts, length, split.num_blocks(length))
    return GroupedOrder(starts, group_size, seed, "data")


def mixed(*orders) -> MixedOrder:
    return MixedOrder(Interleaving([InterleavedStage(0, None, (2, 1))]), orders)


def test_every_block_of_an_epoch_exactly_once(split):
    """An epoch is a permutation, another in each epoch, whatever groups and windows; some shards may start no block."""
    orders = [GlobalOrder(number, 1, "data") for number in (1, 2, 3, 5, 64, 1001, 4097)]
    orders += [WindowedOrder(*sizes, seed=1) for sizes in ((1, 1), (1000, 7), (1000, 250), (1000, 5000))]
    orders += [grouped(split, 1, size, length) for size, length in product((1, 3, 7, 1000), (3, 8, 900))]
    for order in orders:
        epochs = order.blocks(np.arange(3 * order.num_blocks)).reshape(3, order.num_blocks)
        assert (np.sort(epochs, axis=1) == np.arange(order.num_blocks)).all(), vars(order)
        alike = max(0.05, 1.5 / getattr(order, "window", 30))
        assert order.num_blocks < 100 or (epochs[0] == epochs[1]).mean() < alike, vars(order)


def test_epochs_seeds_and_data_are_shuffled_apart():
    """Another epoch, seed or fingerprint: another order."""
    samples = np.arange(1000)
    order = GlobalOrder(1000, 1, "data")
    others = [order.blocks(samples + 1000), GlobalOrder(1000, 2, "data").blocks(samples)]
    others.append(GlobalOrder(1000, 1, "other").blocks(samples))
    for other in others:
        assert (order.blocks(samples) == other).mean() < 0.01


FOR_EVER = [
    (GlobalOrder(10, 0, "a"), range(10), [6, 8, 9, 2, 1, 4, 3, 0, 5, 7]),
    (GlobalOrder(10**9, 42, "b"), [0, 10**9, 10**15], [71145284, 915105033, 896030464]),
    (GroupedOrder(np.array([0, 4, 4, 9, 12]), 2, 0, "a"), range(12), [0, 8, 4, 7, 5, 6, 1, 2, 3, 10, 11, 9]),
    (GroupedOrder(np.array([0, 4, 4, 9, 12]), 2, 0, "a"), [12 * 10**12 + 5], [6]),
    (WindowedOrder(10**12, 64, seed=1), range(4), [7, 6, 25, 60]),
]


@pytest.mark.parametrize("order, samples, blocks", FOR_EVER)
def test_the_order_never_changes(order, samples, blocks):
    """Runs are resumed by later versions of this code."""
    assert order.blocks(np.array(samples)).tolist() == blocks


def test_neighbours_are_uncorrelated():
    """Samples of one step come from everywhere: correlations stay within four standard errors."""
    num_blocks = 50_021
    order = GlobalOrder(num_blocks, 7, "data")
    blocks = order.blocks(np.arange(num_blocks))
    next_epoch = order.blocks(np.arange(num_blocks) + num_blocks)
    limit = 4 / np.sqrt(num_blocks)
    for lag in (1, 2, 8, 64):
        assert abs(np.corrcoef(blocks[:-lag], blocks[lag:])[0, 1]) < limit
    assert abs(np.corrcoef(blocks, np.arange(num_blocks))[0, 1]) < limit
    assert abs(np.corrcoef(blocks, next_epoch)[0, 1]) < limit
    close = (np.abs(np.diff(blocks)) <= 100).mean()
    assert abs(close - 200 / num_blocks) < 4 * np.sqrt(200) / num_blocks


def test_each_place_of_an_epoch_gets_every_block_alike():
    """Over many epochs the block at any place is uniform (chi-squared, 15 degrees of freedom)."""
    blocks = GlobalOrder(16, 3, "data").blocks(np.arange(16 * 3200)).reshape(3200, 16)
    for place in (0, 7, 15):
        counts = np.bincount(blocks[:, place], minlength=16)
        assert ((counts - 200) ** 2 / 200).sum() < 45


@pytest.mark.parametrize("num_blocks", [2, 3, 37, 4097, 10**9 + 7, 2**40 + 1])
def test_samples_do_not_depend_on_how_they_are_asked_for(num_blocks):
    """One at a time, which takes a path of its own, backwards, or in a batch, across an epoch's end: the same blocks.

    Any of them in O(1): a table of so many would not fit.
    """
    order = GlobalOrder(num_blocks, 9, "data")
    samples = np.arange(64) + 10 * num_blocks - 30
    expected = order.blocks(samples)
    assert 0 <= expected.min() <= expected.max() < num_blocks
    assert [int(order.blocks(samples[[place]])[0]) for place in range(64)] == expected.tolist()
    assert (order.blocks(samples[::-1])[::-1] == expected).all()


def test_windows_do_not_depend_on_what_comes_behind_them():
    """Known before the data is whole, at any place in O(1): only the last window depends on the number of blocks."""
    order, samples = WindowedOrder(10**12, 64, seed=1), np.arange(640)
    longer = WindowedOrder(660, 64, seed=1)
    assert (order.blocks(samples) == longer.blocks(samples)).all()
    assert (order.blocks(samples) // 64 == samples // 64).all()
    assert order.blocks(np.array([10**12 - 1])) // 64 == (10**12 - 1) // 64
    for other in (WindowedOrder(660, 64, seed=2), WindowedOrder(660, 64, seed=1, label="1")):
        assert not (other.blocks(samples) == longer.blocks(samples)).all()


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
        shards = PackedDataset(split, LENGTH, order).shard_needs()(np.arange(order.num_blocks))[:, 1]
        spans = [np.ptp(shards[first : first + window]) + 1 for first in range(0, len(shards), window)]
        assert max(spans) == shards_at_once(starts, window)


def test_a_group_needs_no_more_shards_than_it_says(split):
    """The samples of one group start in `group_size` shards."""
    dataset = PackedDataset(split, LENGTH, grouped(split))
    shards = dataset.shard_needs()(np.arange(len(dataset)))[:, 1]
    in_sequence = list(dict.fromkeys(shards.tolist()))
    for first in range(0, len(in_sequence), GROUP_SIZE):
        group = np.isin(shards, in_sequence[first : first + GROUP_SIZE])
        assert np.diff(np.flatnonzero(group)).max() == 1, "a group is over before the next begins"


def test_the_shards_named_are_those_that_are_read(split, monkeypatch):
    """Of a mixed run, from the middle on: reading the samples opens the named shards and the next ones' heads."""
    other = split.part(0, len(split.shard_entries))
    order = mixed(grouped(split, 5), grouped(split, 6))
    dataset = PackedDataset([split, other], LENGTH, order, num_samples=10**6)
    samples = np.arange(5000, 5040)
    needed = {tuple(row) for row in dataset.shard_needs()(samples).tolist()}
    opened = set()
    for number, part in enumerate((split, other)):
        original = part._shard
        monkeypatch.setattr(
            part, "_shard", lambda shard, n=number, f=original: opened.add((n, shard)) or f(shard)
        )
    dataset.__getitems__(samples.tolist())
    assert needed <= opened <= needed | {(number, shard + 1) for number, shard in needed}


def test_samples_mix_nearly_as_well_in_groups_as_in_a_full_shuffle(split):
    """Two samples of a step come from different documents as often as a full shuffle gives, within 5 %."""
    firsts = np.arange(split.num_blocks(LENGTH)) * LENGTH
    documents = np.searchsorted(split.document_ends(0, split.num_tokens), firsts, side="right")
    for order in (GlobalOrder(len(documents), 3, "data"), grouped(split)):
        measured = mixing_quality(order, documents, samples_per_step=16)
        assert 0.95 < measured.different_ratio <= 1.001
    sequential = mixing_quality(WindowedOrder(len(documents), 1, 0), documents, samples_per_step=16)
    assert sequential.different_ratio < 0.95, "the measure tells an unshuffled stream apart"
    # Documents of 2, 1 and 3 blocks: 4 of the 15 pairs of blocks share one.
    assert full_shuffle_share(np.array([0, 0, 1, 2, 2, 2])) == pytest.approx(4 / 15)


def test_labels_are_the_next_tokens_and_every_token_is_a_target_once(split):
    """Blocks overlap by one token: every token but the first is a target exactly once."""
    dataset = PackedDataset(split, LENGTH)
    samples = dataset.__getitems__(list(range(len(dataset))))
    for sample in samples:
        assert sample["input_ids"].dtype == sample["labels"].dtype == np.int64
        assert (sample["labels"] == sample["input_ids"] + 1).all()
    targets = np.concatenate([sample["labels"] for sample in samples])
    assert targets.tolist() == list(range(1, len(dataset) * LENGTH + 1))
    assert len(dataset) == (split.num_tokens - 1) // LENGTH


def test_a_resumed_run_goes_on_and_reads_nothing_that_it_skips(split, monkeypatch):
    """`first_sample` shifts the run: what follows is what it would have read, from its own blocks alone."""
    order = GlobalOrder(split.num_blocks(LENGTH), 1, "data")
    whole = PackedDataset(split, LENGTH, order, num_samples=300)
    resumed = PackedDataset(split, LENGTH, order, first_sample=170, num_samples=130)
    for index in (0, 1, 129):
        assert (resumed[index]["input_ids"] == whole[170 + index]["input_ids"]).all()
    with pytest.raises(IndexError):
        resumed[130]
    late = PackedDataset(split, LENGTH, order, first_sample=10**12, num_samples=64)
    read, original = [], split.read
    monkeypatch.setattr(split, "read", lambda start, stop: read.append(start) or original(start, stop))
    late.__getitems__([0, 1, 2, 3])
    assert read == [block * LENGTH for block in order.blocks(np.arange(4) + 10**12)]


def test_workers_carry_an_order_along(split):
    """DataLoader workers started afresh receive the dataset pickled, and find the same samples."""
    dataset = PackedDataset([split], LENGTH, grouped(split), num_samples=100)
    dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert (copy[71]["labels"] == dataset[71]["labels"]).all()


def test_ranks_and_micro_batches_share_an_epoch_out(split):
    """1 to 512 ranks, any micro-batch, through accelerate's own sharding: each sample of the run once, in its step."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler, SequentialSampler

    num_samples = 1536
    orders = [GlobalOrder(num_samples, 1, "a"), grouped(split)]
    orders.append(mixed(grouped(split, 5), GlobalOrder(700, 5, "other")))
    expected = [order.blocks(np.arange(num_samples)) for order in orders]
    assert (np.sort(expected[0]) == np.arange(num_samples)).all()
    for ranks, micro_batch in product((1, 3, 64, 512), (1, 3)):
        batches = BatchSampler(SequentialSampler(range(num_samples)), micro_batch, drop_last=False)
        shares = [list(BatchSamplerShard(batches, ranks, rank)) for rank in range(ranks)]
        together = [index for step in zip(*shares, strict=True) for batch in step for index in batch]
        for order, blocks in zip(orders, expected, strict=True):
            assert (order.blocks(np.array(together[:num_samples])) == blocks).all()
