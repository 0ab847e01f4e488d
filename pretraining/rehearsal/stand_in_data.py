"""Stand in for prepared data that is on another machine: as many tokens, sources and shards as the run reads."""

from collections.abc import Callable
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pretraining.data.checksums import content_fingerprint
from pretraining.data.manifest import FORMAT
from pretraining.data.prepared import PreparedData
from pretraining.data.shards import TokenSplit, token_dtype
from pretraining.recipe import Recipe
from pretraining.recipe.data import is_mixed, read_stages, run_shares

SHARD_TOKENS = 1 << 27
DOCUMENT_TOKENS = 1000
BYTES_PER_TOKEN = 4


class StandInSplit(TokenSplit):
    """A stream whose shards do not exist: documents of equal length, whose tokens are all 0."""

    def _check_shards(self) -> None:
        """Do nothing: there are no files."""

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.zeros(stop - start, self.dtype) if start < stop else super().read(start, stop)

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        first = start // DOCUMENT_TOKENS * DOCUMENT_TOKENS + DOCUMENT_TOKENS
        return np.arange(first, stop + 1, DOCUMENT_TOKENS, dtype=np.int64)

    def bytes_before(self, token: int) -> float:
        return float(BYTES_PER_TOKEN * token)

    def document_at(self, token: int) -> tuple[str, int]:
        number, offset = self.locate(token)
        return self._entry["shards"][number]["file"], offset // DOCUMENT_TOKENS


class StandInTokenizer(SimpleNamespace):
    """What a run asks of its tokenizer before the first validation."""

    bos_token_id = eos_token_id = 0

    def save_pretrained(self, folder: Path) -> None:
        """Write nothing."""


class StandInData(PreparedData):
    """Data as the recipe would have it, with no file behind it."""

    tokenizer = StandInTokenizer()  # type: ignore[assignment]

    def read_tokenizer(self, read: Callable[[Path], Any]) -> None:
        """Read nothing: there is no file."""


def stand_in_data(recipe: Recipe, folder: Path) -> StandInData:
    """Make data of which the recipe's run reads as much as it may, in shards that only have names."""
    dtype = str(token_dtype(recipe.model.vocab_size))
    # {source: the tokens that the run needs of it}, with `max_epochs` and rounding allowed for
    length, total = recipe.sequence_length, recipe.num_samples
    if is_mixed(recipe.data):
        stages = read_stages(recipe.data, [1] * len(recipe.data.sources), total, length)
        read = zip(run_shares(stages, total), recipe.data.sources, strict=True)
        blocks = [ceil(total * float(share) / (source.max_epochs or 1)) + 2 for share, source in read]
    else:
        limits = [source.max_epochs for source in recipe.data.sources if source.max_epochs]
        blocks = [ceil(total / min([1, *limits]) + 2)]
    train = _entry("train", {number: count * length for number, count in enumerate(blocks)}, dtype)
    held_out = max(recipe.evaluation.max_validation_tokens or 0, 64 * (recipe.sequence_length + 1))
    own = recipe.data.validation.sources if recipe.data.validation else []
    # the sources of validation are numbered behind those of training
    numbers = range(len(recipe.data.sources), len(recipe.data.sources) + len(own)) if own else [0]
    validation = _entry("validation", dict.fromkeys(numbers, held_out), dtype)
    splits = {"train": train, "validation": validation}
    manifest = {"format": FORMAT, "name": recipe.data.name, "fingerprint": content_fingerprint(splits)}
    manifest |= {"data": recipe.data.to_dict(), "splits": splits}
    opened = {name: StandInSplit(folder / name, entry) for name, entry in splits.items()}
    return StandInData(folder, manifest, opened["train"], opened["validation"])


def _entry(split: str, tokens_by_source: dict[int, int], dtype: str) -> dict:
    shards: list[dict] = []
    for source, tokens in tokens_by_source.items():
        for start in range(0, tokens, SHARD_TOKENS):
            held = min(SHARD_TOKENS, tokens - start)
            shards.append({"file": f"{split}-{len(shards):05d}", "source": source, **_sizes(held)})
    totals = _sizes(sum(tokens_by_source.values()))
    return {**totals, "dtype": dtype, "checksum": f"stand-in of {totals['tokens']}", "shards": shards}


def _sizes(tokens: int) -> dict[str, int]:
    documents = -(-tokens // DOCUMENT_TOKENS)
    return {"tokens": tokens, "documents": documents, "bytes": BYTES_PER_TOKEN * tokens, "size": 0}
