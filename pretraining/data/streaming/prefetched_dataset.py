"""A dataset in the order of the run that tells the prefetcher where the run is."""

from collections.abc import Sequence

from pretraining.data.streaming.prefetch import SHARE_OF_CACHE, Prefetcher
from pretraining.errors import UserError


class PrefetchedDataset:
    """`dataset` (map-style, with `first_sample`), the same samples; each read moves the prefetcher on."""

    def __init__(self, dataset, prefetcher: Prefetcher):
        self.dataset, self.prefetcher = dataset, prefetcher
        self._remote = prefetcher.splits[0].remote

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict]:
        """A batch at once."""
        self.prefetcher.advance(self.dataset.first_sample + min(indices))
        self._remote.count_reads(len(indices))
        return self.dataset.__getitems__(indices)


def prefetched(dataset) -> PrefetchedDataset:
    """A PackedDataset over StreamedSplits in an order, prefetched; UserError where the cache is too small for it."""
    orders = getattr(dataset.order, "orders", [dataset.order])
    groups = [getattr(order, "group_size", None) for order in orders]
    check_room(dataset.splits, groups)
    end = dataset.first_sample + len(dataset)
    return PrefetchedDataset(dataset, Prefetcher(dataset.shard_needs(), dataset.splits, end))


def check_room(splits: Sequence, groups: Sequence[int | None]) -> None:
    """UserError where the cache may not keep what the order needs at once.

    groups: for each split the number of shards that are shuffled together, None for all of them.
    """
    sizes = [sorted((e["size"] for e in split.shard_entries), reverse=True) for split in splits]
    kept = [size for shards, group in zip(sizes, groups, strict=True) for size in shards[:group]]
    cache = splits[0].remote.cache
    if sum(kept) > cache.max_bytes * SHARE_OF_CACHE:
        most = int(cache.max_bytes * SHARE_OF_CACHE // max(kept) // len(splits))
        raise UserError(
            f"{cache.root}: the order of the run needs {len(kept):,} shards ({sum(kept) / 1e9:.3g} GB) at once, the "
            f"cache may hold {cache.max_bytes / 1e9:.3g} GB: raise --data_cache_gb to "
            f"{sum(kept) / SHARE_OF_CACHE / 1e9 + 0.05:.1f}"
            + (f", or shuffle by groups of shards: --set data.shuffle_shards={most}" if most else "")
        )
