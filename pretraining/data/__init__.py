"""From raw text to token blocks in their global order: sources, tokenizer, shards, manifest, order, mixture,
packing.

The names below are imported when first used, so that a check of names and paths never waits for numpy or
pyarrow.
"""

from pretraining.lazy import imported_at_first_use

_HOME = {
    "prepare_data": "prepare",
    "CacheSettings": "streaming.settings",
    "open_prepared": "prepared",
    "PreparedData": "prepared",
    "verify": "manifest",
    "TokenSplit": "shards",
}

__all__ = list(_HOME)

__getattr__ = imported_at_first_use(__name__, _HOME)
