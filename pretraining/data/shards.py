"""Token shards, writer and reader side by side: an Arrow dataset on disk, read as one flat stream of tokens.

Each split is a folder as `datasets.save_to_disk` writes it. A row is a document: `input_ids` (its tokens with
the EOS that closes it) and `num_bytes` (the UTF-8 length of its text). A shard is one record batch, so the
values buffer of `input_ids` is the shard's token stream and its offsets are the document ends.
"""

import os
import resource
from array import array
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np

from pretraining.data.arrow_layout import arrow_array, arrow_schema, buffer_positions, write_dataset_files
from pretraining.data.mapped_shard import Shard, map_shard
from pretraining.data.token_digest import digest_of_documents, joined_digest
from pretraining.errors import UserError

SHARD_TOKENS = 64_000_000
"""128 MB a shard in uint16: few files at 10^11 tokens, and one shard is still a quick fetch."""

SHARD_DOCUMENTS = 4_000_000
"""Bounds the offsets of a shard (16 bytes a document) where the documents are tiny."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned type that holds every id: uint16 up to 65,536 ids, uint32 above."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def checksum_of_file(path: Path) -> str:
    """`xxh128:<hex>` of the whole file: several GB/s, against damage rather than forgery."""
    import xxhash

    digest = xxhash.xxh128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return f"xxh128:{digest.hexdigest()}"


class SplitWriter:
    """Appends documents to one split through a single preallocated buffer of a shard's size.

    `finish()` returns the split's entry of the manifest: counts, checksum of the tokens, and its shards.
    """

    def __init__(self, folder: Path, dtype: np.dtype, shard_tokens: int | None = None):
        folder.mkdir(parents=True)
        self.folder, self.dtype = folder, dtype
        self._tokens = np.empty(shard_tokens or SHARD_TOKENS, dtype)
        self._ends = array("q", [0])
        self._num_bytes = array("Q")
        self._shards: list[dict] = []
        self._source = 0

    @property
    def num_tokens(self) -> int:
        """Tokens appended so far, in this shard and those before."""
        return sum(shard["tokens"] for shard in self._shards) + self._ends[-1]

    def begin_source(self, number: int) -> None:
        """What follows is of source `number`: a shard holds documents of one source."""
        if number != self._source and self._num_bytes:
            self._write_shard()
        self._source = number

    def append(self, tokens: np.ndarray, num_bytes: int) -> None:
        """Add one document: its tokens with the closing EOS, and the bytes of its text."""
        self.extend(tokens, np.array([len(tokens)]), np.array([num_bytes]))

    def extend(self, tokens: np.ndarray, ends: np.ndarray, num_bytes: np.ndarray) -> None:
        """Add a run of documents: document i is `tokens[ends[i - 1]:ends[i]]`, its text has `num_bytes[i]` bytes.

        The shards do not depend on how documents are gathered into runs.
        """
        first = start = 0
        while first < len(ends):
            fitting = self._num_fitting(ends[first:] - start)
            if fitting:
                last = first + fitting
                self._append_run(
                    tokens[start : ends[last - 1]], ends[first:last] - start, num_bytes[first:last]
                )
                first, start = last, int(ends[last - 1])
            elif self._num_bytes:
                self._write_shard()
            else:  # one document larger than a shard gets a shard of its own
                self._tokens = np.empty(int(ends[first]) - start, self.dtype)

    def _num_fitting(self, ends: np.ndarray) -> int:
        """How many of the documents that end at `ends` the open shard still takes."""
        fitting = int(np.searchsorted(ends, len(self._tokens) - self._ends[-1], side="right"))
        return min(fitting, SHARD_DOCUMENTS - len(self._num_bytes))

    def _append_run(self, tokens: np.ndarray, ends: np.ndarray, num_bytes: np.ndarray) -> None:
        start = self._ends[-1]
        self._tokens[start : start + len(tokens)] = tokens
        self._ends.frombytes((ends + start).astype(np.int64).tobytes())
        self._num_bytes.frombytes(np.asarray(num_bytes).astype(np.uint64).tobytes())

    def _write_shard(self) -> None:
        import pyarrow as pa

        count = self._ends[-1]
        values = arrow_array(self._tokens[:count])
        rows = pa.LargeListArray.from_arrays(arrow_array(np.asarray(self._ends)), values)
        schema = arrow_schema(self.dtype)
        path = self.folder / f"data-{len(self._shards):05d}.arrow"
        with path.open("wb") as file:
            with pa.ipc.new_stream(file, schema) as stream:
                num_bytes = arrow_array(np.asarray(self._num_bytes))
                stream.write_batch(pa.record_batch([rows, num_bytes], schema=schema))
            file.flush()
            os.fsync(file.fileno())
        self._shards.append(self._entry(path))
        self._ends, self._num_bytes = array("q", [0]), array("Q")

    def _entry(self, path: Path) -> dict:
        return {
            "file": path.name,
            "source": self._source,
            "documents": len(self._num_bytes),
            "tokens": self._ends[-1],
            "bytes": sum(self._num_bytes),
            "size": path.stat().st_size,
            "buffers": buffer_positions(path),
            "checksum": checksum_of_file(path),
            "tokens_digest": digest_of_documents(self._tokens, np.asarray(self._ends)[1:]),
        }

    def finish(self) -> dict:
        """Write the last shard and the JSON files `load_from_disk` expects; returns the manifest entry."""
        if self._num_bytes or not self._shards:
            self._write_shard()
        for number, shard in enumerate(self._shards):
            name = f"data-{number:05d}-of-{len(self._shards):05d}.arrow"
            (self.folder / shard["file"]).rename(self.folder / name)
            shard["file"] = name
        return split_entry(self.folder, self._shards, self.dtype.name)


def split_entry(folder: Path, shards: list[dict], dtype: str) -> dict:
    """A split's part of the manifest, from its shards' entries; writes the JSON files `load_from_disk` expects."""
    checksum = joined_digest([s["tokens_digest"] for s in shards], [s["documents"] for s in shards])
    write_dataset_files(folder, [shard["file"] for shard in shards], np.dtype(dtype), checksum)
    totals = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
    return {**totals, "dtype": dtype, "checksum": checksum, "shards": shards}


def between(ends: np.ndarray, low: int, high: int) -> np.ndarray:
    """Those of the ordered `ends` with low < end <= high."""
    return ends[slice(*np.searchsorted(ends, (low, high), side="right"))]


def open_shard(path: Path, entry: dict, dtype: np.dtype) -> Shard:
    """Map the shard at `path`; UserError where it is not the one of its manifest entry."""
    with path.open("rb") as file:
        return map_shard(file, str(path), entry, dtype)


def _most_open_shards() -> int:
    """A mapped shard holds a file descriptor: half of those a process may have."""
    return max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class TokenSplit:
    """One split as a flat, memory-mapped stream of tokens; shards are mapped when first touched.

    `entry` is the split's part of the manifest. Picklable: a copy in another process maps the shards anew.
    """

    def __init__(self, folder: Path, entry: dict):
        self.folder, self._entry = Path(folder), entry
        self.dtype = np.dtype(entry["dtype"])
        self.num_tokens: int = entry["tokens"]
        self.num_documents: int = entry["documents"]
        self.num_bytes: int = entry["bytes"]
        self._token_starts = self._starts("tokens")
        self._starts_list: list[int] = self._token_starts.tolist()  # bisect is four times numpy's speed
        self._byte_starts = self._starts("bytes")
        self._open: dict[int, Shard] = {}
        self._most_open = _most_open_shards()
        self._written: dict[str, int] = {}
        """When each file was written, in ns, as this stream was opened."""
        self._check_shards()

    @property
    def shard_entries(self) -> list[dict]:
        """The manifest's entries of the shards, in the order of the stream."""
        return self._entry["shards"]

    def part(self, first: int, stop: int) -> Self:
        """The stream of the shards [first, stop) alone: one source of several."""
        shards = self._entry["shards"][first:stop]
        totals = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
        return self._of_entry({**self._entry, **totals, "shards": shards})

    def _of_entry(self, entry: dict) -> Self:
        return type(self)(self.folder, entry)

    def _starts(self, key: str) -> np.ndarray:
        """[shards + 1], int64: the sum of `key` over the shards before each one."""
        return np.cumsum([0] + [shard[key] for shard in self._entry["shards"]], dtype=np.int64)

    def _check_shards(self) -> None:
        """UserError for the first shard that is not there with its size; one look at the folder finds all."""
        try:
            with os.scandir(self.folder) as files:
                found = {file.name: file.stat() for file in files}
        except FileNotFoundError:
            found = {}
        for shard in self._entry["shards"]:
            status = found.get(shard["file"])
            size = status and status.st_size
            if size != shard["size"]:
                state = "missing" if size is None else f"truncated or damaged: {size:,} bytes"
                raise UserError(
                    f"{self.folder / shard['file']}: shard is {state}, expected {shard['size']:,} bytes; delete "
                    f"{self.folder.parent} and prepare the data again (data_prep.py), or copy it again"
                )
            self._written[shard["file"]] = status.st_mtime_ns

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": {}}

    def _shard(self, number: int) -> Shard:
        """The shard, mapped now or before."""
        if number not in self._open:
            while len(self._open) >= self._most_open:
                del self._open[next(iter(self._open))]  # the one opened first
            self._open[number] = self.map_anew(number)
        return self._open[number]

    def map_anew(self, number: int) -> Shard:
        """The shard, mapped by its file; UserError if the file is of another data set than when this one was opened."""
        entry = self._entry["shards"][number]
        path = self.folder / entry["file"]
        with suppress(FileNotFoundError), path.open("rb") as file:
            written = os.fstat(file.fileno()).st_mtime_ns
            if written == self._written[entry["file"]] or checksum_of_file(path) == entry["checksum"]:
                return map_shard(file, str(path), entry, self.dtype)
        raise UserError(
            f"{path}: the data set was replaced while it was read; go on with the earlier one, which data_prep.py "
            f"--replace keeps beside it: --set data.name={self.folder.parent.name}.replaced-N",
            on_every_rank=False,
        )

    def locate(self, token: int) -> tuple[int, int]:
        """The shard that holds the token at position `token` of the stream, and its position in there."""
        number = bisect_right(self._starts_list, token) - 1
        return number, token - self._starts_list[number]

    def shards_at(self, tokens: np.ndarray) -> np.ndarray:
        """[n] numbers (int64) of the shards that hold the tokens at positions [n] of the stream."""
        return np.searchsorted(self._token_starts, tokens, side="right") - 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [stop - start] of the stream: a read-only view inside a shard, a copy across a border."""
        if not 0 <= start < stop <= self.num_tokens:
            return self._no_tokens(start, stop)
        starts = self._starts_list
        number = bisect_right(starts, start) - 1
        offset, shard = start - starts[number], self._open.get(number)
        if shard is not None and stop <= starts[number + 1]:
            return shard.view(offset, stop - start)
        return self._gather(number, offset, stop - start)

    def _no_tokens(self, start: int, stop: int) -> np.ndarray:
        if 0 <= start == stop <= self.num_tokens:
            return np.empty(0, self.dtype)
        raise IndexError(f"tokens {start}:{stop} of a stream of {self.num_tokens}")

    def _gather(self, number: int, offset: int, wanted: int) -> np.ndarray:
        """`wanted` tokens from `offset` of shard `number` on, out of as many shards as it takes."""
        pieces = [self._first_piece(number, offset, wanted)]
        while (missing := wanted - sum(map(len, pieces))) > 0:
            number += 1
            pieces.append(self._next_piece(number, missing))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _first_piece(self, number: int, offset: int, count: int) -> np.ndarray:
        return self._shard(number).view(offset, count)

    def _next_piece(self, number: int, count: int) -> np.ndarray:
        """Up to `count` tokens from the beginning of a shard that is read only because a block ends in it."""
        return self._shard(number).view(0, count)

    def num_blocks(self, sequence_length: int) -> int:
        """Blocks of `sequence_length` inputs and as many targets; neighbours share one token."""
        return max(0, (self.num_tokens - 1) // sequence_length)

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """[ends], int64: positions p of the stream, start < p <= stop, at which a document has just ended."""
        if start >= stop:
            return np.empty(0, np.int64)
        first, last = self.locate(start)[0], self.locate(stop - 1)[0]
        pieces = []
        for number in range(first, last + 1):
            base = self._token_starts[number]
            pieces.append(self._ends_between(number, start - base, stop - base) + base)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _ends_between(self, number: int, low: int, high: int) -> np.ndarray:
        """Ends p of documents in shard `number`, low < p <= high, in tokens of the shard."""
        return between(self._shard(number).ends, low, high)

    def bytes_before(self, token: int) -> float:
        """UTF-8 bytes of text in the first `token` tokens of the stream.

        Exact for whole documents; the document the cut falls in counts by its share of tokens (its EOS is one
        of them).
        """
        if token >= self.num_tokens:
            return float(self.num_bytes)
        number, offset = self.locate(token)
        shard = self._shard(number)
        whole = int(np.searchsorted(shard.ends, offset, side="right"))
        start = int(shard.ends[whole - 1]) if whole else 0
        share = (offset - start) / int(shard.ends[whole] - start)
        before = int(self._byte_starts[number]) + int(shard.num_bytes[:whole].sum())
        return before + share * int(shard.num_bytes[whole])

    @property
    def token_starts(self) -> np.ndarray:
        """[shards + 1], int64: tokens of the stream before each shard, then all of them."""
        return self._token_starts

    def document_at(self, token: int) -> tuple[str, int]:
        """The shard's file and the row in it that hold the document which the token of the stream belongs to."""
        number, offset = self.locate(token)
        row = int(np.searchsorted(self._shard(number).ends, offset, side="right"))
        return self._entry["shards"][number]["file"], row
