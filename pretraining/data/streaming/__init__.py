"""Shards from any fsspec address: fetched on demand and ahead of need, checked, kept in a bounded local cache."""

from pretraining.lazy import imported_at_first_use

_HOME = {
    "CacheSettings": "settings",
    "Prefetcher": "prefetch",
    "PrefetchedDataset": "prefetched_dataset",
    "RemoteData": "remote_data",
    "ShardCache": "cache",
    "StreamedSplit": "streamed_split",
    "is_remote": "address",
}

__all__ = list(_HOME)

__getattr__ = imported_at_first_use(__name__, _HOME)
