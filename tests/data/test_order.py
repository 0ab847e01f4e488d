"""The global order and the samples cut along it: a pure function of (seed, fingerprint, sample)."""

from itertools import chain

import numpy as np
import pytest

from pretraining.data.order import GlobalOrder
from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.shards import SplitWriter, TokenSplit

LENGTH = 8


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> TokenSplit:
    """1,000 distinct tokens (token = position) in documents of 10, in shards of about 130 tokens."""
    writer = SplitWriter(tmp_path_factory.mktemp("data") / "train", np.dtype(np.uint16), 130)
    for start in range(0, 1000, 10):
        writer.append(np.arange(start, start + 10, dtype=np.uint16), 40)
    return TokenSplit(writer.folder, writer.finish())


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5, 64, 1001, 4097])
def test_every_block_of_an_epoch_exactly_once(num_blocks):
    """An epoch is a permutation, whatever the number of blocks."""
    order = GlobalOrder(num_blocks, seed=1, fingerprint="data")
    epochs = order.blocks(np.arange(4 * num_blocks)).reshape(4, num_blocks)
    assert (np.sort(epochs, axis=1) == np.arange(num_blocks)).all()


def test_epochs_seeds_and_data_are_shuffled_apart():
    """Another epoch, seed or fingerprint: another order."""
    samples = np.arange(1000)
    order = GlobalOrder(1000, 1, "data")
    others = [order.blocks(samples + 1000), GlobalOrder(1000, 2, "data").blocks(samples)]
    others.append(GlobalOrder(1000, 1, "other").blocks(samples))
    for other in others:
        assert (order.blocks(samples) == other).mean() < 0.01


def test_the_order_never_changes():
    """Runs are resumed by later versions of this code: these values are for ever."""
    assert GlobalOrder(10, 0, "a").blocks(np.arange(10)).tolist() == [6, 8, 9, 2, 1, 4, 3, 0, 5, 7]
    assert GlobalOrder(10**9, 42, "b").blocks(np.array([0, 10**9, 10**15])).tolist() == [
        71145284,
        915105033,
        896030464,
    ]


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
    order = GlobalOrder(16, 3, "data")
    blocks = order.blocks(np.arange(16 * 3200)).reshape(3200, 16)
    for place in (0, 7, 15):
        counts = np.bincount(blocks[:, place], minlength=16)
        assert ((counts - 200) ** 2 / 200).sum() < 45


def test_any_sample_costs_the_same():
    """O(1): a step at position 10^15 of 10^9 blocks; a table of them would need 8 GB for each epoch."""
    order = GlobalOrder(10**9, 0, "data")
    blocks = order.blocks(np.arange(512) + 10**15)
    assert len(np.unique(blocks)) == 512 and 0 <= blocks.min() <= blocks.max() < 10**9


def test_samples_do_not_depend_on_how_they_are_asked_for():
    """One at a time, in batches, backwards, across an epoch border: the same blocks."""
    order = GlobalOrder(37, 5, "data")
    samples = np.arange(100)
    expected = order.blocks(samples)
    assert (order.blocks(samples[::-1])[::-1] == expected).all()
    assert [int(order.blocks(np.array([sample]))[0]) for sample in samples] == expected.tolist()


def test_labels_are_the_next_tokens_and_every_token_is_a_target_once(split):
    """Blocks overlap by one token: every token but the first is a target exactly once."""
    dataset = PackedDataset(split, LENGTH)
    samples = dataset.__getitems__(list(range(len(dataset))))
    for sample in samples:
        assert sample["input_ids"].dtype == sample["labels"].dtype == np.int64
        assert (sample["labels"] == sample["input_ids"] + 1).all()
    targets = np.concatenate([sample["labels"] for sample in samples])
    assert targets.tolist() == list(range(1, len(dataset) * LENGTH + 1))
    assert len(dataset) == (split.num_tokens - 1) // LENGTH == 124


def test_resuming_continues_the_same_run(split):
    """`first_sample` shifts the run: what follows is what the uninterrupted run would have read."""
    order = GlobalOrder(split.num_blocks(LENGTH), 1, "data")
    whole = PackedDataset(split, LENGTH, order, num_samples=300)
    resumed = PackedDataset(split, LENGTH, order, first_sample=170, num_samples=130)
    for index in (0, 1, 129):
        assert (resumed[index]["input_ids"] == whole[170 + index]["input_ids"]).all()
    with pytest.raises(IndexError):
        resumed[130]


def test_resuming_reads_nothing_it_skips(split, monkeypatch):
    """The first batch after a resume touches its own blocks alone."""
    order = GlobalOrder(split.num_blocks(LENGTH), 1, "data")
    dataset = PackedDataset(split, LENGTH, order, first_sample=10**12, num_samples=64)
    read, original = [], split.read
    monkeypatch.setattr(split, "read", lambda start, stop: read.append(start) or original(start, stop))
    dataset.__getitems__([0, 1, 2, 3])
    assert read == [block * LENGTH for block in order.blocks(np.arange(4) + 10**12)]


@pytest.mark.parametrize("num_blocks", [2, 3, 37, 4097, 10**9 + 7, 2**40 + 1])
def test_few_samples_are_those_of_many(num_blocks):
    """Small micro-batches take a path of their own to the same blocks."""
    order = GlobalOrder(num_blocks, 9, "data")
    samples = np.arange(64) + 10 * num_blocks - 30
    one_by_one = [int(order.blocks(samples[[place]])[0]) for place in range(64)]
    assert one_by_one == order.blocks(np.append(samples, samples))[:64].tolist()


LAYOUTS = [(1, 1, 8), (1, 4, 2), (2, 2, 2), (2, 4, 1)]


def test_samples_of_a_step_do_not_depend_on_the_layout(split):
    """(ranks, micro-batch, accumulation): the same samples in every step, through real accelerate."""
    order = GlobalOrder(split.num_blocks(LENGTH), 1, "data")
    dataset = PackedDataset(split, LENGTH, order, num_samples=160)
    steps = {layout: _samples_by_step(dataset, *layout) for layout in LAYOUTS}
    assert all(found == steps[LAYOUTS[0]] for found in steps.values())
    assert len(steps[LAYOUTS[0]]) == 20
    assert all(len(set(step)) == 8 for step in steps[LAYOUTS[0]][:15])


@pytest.mark.parametrize("ranks, micro_batch", [(1, 1), (3, 5), (8, 4), (64, 2), (512, 1), (512, 3)])
def test_the_ranks_of_an_epoch_read_every_block_once(ranks, micro_batch):
    """1 to 512 ranks and any micro-batch: what accelerate deals to them is the epoch, each step the run's samples."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    step = ranks * micro_batch
    order = GlobalOrder(step * -(-1500 // step), seed=1, fingerprint="data")
    batches = BatchSampler(range(order.num_blocks), micro_batch, drop_last=False)
    dealt = [list(BatchSamplerShard(batches, ranks, rank)) for rank in range(ranks)]
    samples = np.array(dealt).transpose(1, 0, 2).reshape(-1, step)
    assert (np.sort(samples, axis=1).reshape(-1) == np.arange(order.num_blocks)).all()
    assert (np.sort(order.blocks(samples.reshape(-1))) == np.arange(order.num_blocks)).all()


def _samples_by_step(dataset: PackedDataset, ranks: int, micro_batch: int, accumulation: int) -> list:
    """First tokens of the samples of each optimizer step, over all ranks, sorted."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

    batches = BatchSampler(SequentialSampler(dataset), micro_batch, drop_last=False)
    loaders = [
        DataLoader(dataset, batch_sampler=BatchSamplerShard(batches, ranks, rank)) for rank in range(ranks)
    ]
    micro_steps = [
        [int(first) for batch in of_all_ranks for first in batch["input_ids"][:, 0]]
        for of_all_ranks in zip(*loaders, strict=True)
    ]
    grouped = [
        list(chain(*micro_steps[k : k + accumulation])) for k in range(0, len(micro_steps), accumulation)
    ]
    return [sorted(step) for step in grouped]
