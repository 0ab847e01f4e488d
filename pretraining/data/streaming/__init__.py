"""Shards from any fsspec address: fetched on demand and ahead of need, checked, kept in a bounded local cache."""
