"""The documents of a split, by number and by position in its token stream."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pretraining.data.shards import Shard, TokenSplit


@dataclass(frozen=True)
class StoredDocument:
    """One document where it lies."""

    split: str
    number: int
    """Counted over the shards of the split, from 0."""
    shard: str
    row: int
    """Its number inside the shard."""
    source: str
    start: int
    """Position of its first token in the split's stream."""
    tokens: np.ndarray
    """[tokens], its closing EOS included: a view of the shard"""
    num_bytes: int

    @property
    def stop(self) -> int:
        """Position behind its last token in the split's stream."""
        return self.start + len(self.tokens)

    def place(self) -> dict:
        """Everything but the tokens themselves, as JSON values."""
        values = {key: value for key, value in vars(self).items() if key != "tokens"}
        return {**values, "tokens": len(self.tokens)}


class SplitDocuments:
    """One split, one shard mapped at a time.

    `entry` is the split's part of the manifest. UserError where a shard is missing or of another size.
    """

    def __init__(self, folder: Path, name: str, entry: dict, sources: list[str]):
        self.folder, self.name, self.sources = folder / name, name, sources
        self.stream = TokenSplit(self.folder, entry)
        self.dtype = self.stream.dtype
        self.entries: list[dict] = entry["shards"]
        self.num_documents, self.num_tokens = self.stream.num_documents, self.stream.num_tokens
        self._document_starts = self._starts("documents")
        self._token_starts = self._starts("tokens")
        self._opened: tuple[int, Shard] | None = None

    def _starts(self, key: str) -> np.ndarray:
        return np.cumsum([0] + [entry[key] for entry in self.entries], dtype=np.int64)

    def shards(self) -> Iterator[tuple[dict, Shard]]:
        """Every shard in order, with its manifest entry."""
        for number, entry in enumerate(self.entries):
            yield entry, self.shard(number)

    def shard(self, number: int) -> Shard:
        """Shard `number`, mapped; the one before is let go."""
        if self._opened is None or self._opened[0] != number:
            self._opened = number, self.stream.map_anew(number)
        return self._opened[1]

    def source_of(self, entry: dict) -> str:
        """Name of the source a shard came from; of several where its manifest does not say which."""
        number = entry.get("source", 0 if len(self.sources) == 1 else None)
        return "one of several" if number is None else self.sources[number]

    def read(self, number: int) -> StoredDocument:
        """Document `number`; IndexError beyond the last."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents}")
        place = int(np.searchsorted(self._document_starts, number, side="right")) - 1
        shard, entry = self.shard(place), self.entries[place]
        row = number - int(self._document_starts[place])
        start, stop = int(shard.ends[row - 1]) if row else 0, int(shard.ends[row])
        base, num_bytes = int(self._token_starts[place]), int(shard.num_bytes[row])
        where = (self.name, number, entry["file"], row, self.source_of(entry), base + start)
        return StoredDocument(*where, shard.tokens[start:stop], num_bytes)

    def number_at(self, token: int) -> int:
        """Number of the document that holds the token at position `token` of the stream."""
        place = int(np.searchsorted(self._token_starts, token, side="right")) - 1
        offset = token - int(self._token_starts[place])
        row = int(np.searchsorted(self.shard(place).ends, offset, side="right"))
        return int(self._document_starts[place]) + row

    def between(self, start: int, stop: int) -> Iterator[StoredDocument]:
        """The documents that hold the tokens [start, stop) of the stream, in order."""
        for number in range(self.number_at(start), self.number_at(stop - 1) + 1):
            yield self.read(number)
