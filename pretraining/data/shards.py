"""Read token shards: an Arrow dataset on disk, mapped as one flat stream of tokens.

Each split is a folder in the layout of `datasets.save_to_disk`. A row is a document: `input_ids` (its tokens with
the EOS that closes it) and `num_bytes` (the UTF-8 length of its text). A shard is one record batch, so the
values buffer of `input_ids` is the shard's token stream and its offsets are the document ends.
"""

import mmap
import os
import resource
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns
from typing import BinaryIO, Self

import numpy as np

from pretraining.data.checksums import checksum_of_file, digest_of_documents
from pretraining.data.manifest import read_manifest
from pretraining.errors import UserError
from pretraining.outside.files import regular

PROBE_INTERVAL = 64
"""One of this many reads is timed, to learn if the shard's pages are in memory."""

SLOW_TOUCH_NS = 20_000
"""Nanoseconds. A page in memory is touched in less than 5,000, a page on a disk in more than 50,000."""
MOST_MAPPED = 4096
"""Shards that are mapped at once: Linux allows a process 65,530 mappings (vm.max_map_count)."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Choose the smallest unsigned type that holds every id: uint16 up to 65,536 ids, uint32 above."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class Shard:
    """The arrays of one open shard. `reads` counts calls of `view`, so that idle shards can be unmapped.

    tokens [tokens]: uint16 or uint32. ends [documents]: int64, where each document ends, in tokens of this
    shard. num_bytes [documents]: uint64, the UTF-8 bytes of each document's text.
    """

    __slots__ = ("_advise", "_mapped", "_tokens_at", "ends", "num_bytes", "reads", "tokens")

    def __init__(self, mapped: mmap.mmap, entry: dict, dtype: np.dtype):
        at, count = entry["buffers"], entry["documents"]
        self._mapped, self._tokens_at = mapped, at["input_ids"]
        self.tokens = np.frombuffer(mapped, dtype, entry["tokens"], at["input_ids"])
        self.ends = np.frombuffer(mapped, "<i8", count + 1, at["offsets"])[1:]
        self.num_bytes = np.frombuffer(mapped, "<u8", count, at["num_bytes"])
        self.reads, self._advise = 0, False

    def view(self, start: int, count: int) -> np.ndarray:
        """View up to `count` tokens from `start`."""
        self.reads = reads = self.reads + 1
        view = self.tokens[start : start + count]
        probes = reads % PROBE_INTERVAL == 1
        if not probes and not self._advise:
            return view
        if probes and len(view):
            began = perf_counter_ns()
            view[0]
            self._advise = perf_counter_ns() - began > SLOW_TOUCH_NS
        if self._advise:
            first = self._tokens_at + start * view.itemsize
            page = first - first % mmap.PAGESIZE  # madvise takes only the start of a page
            # One request for all pages: without it the disk is asked page by page.
            self._mapped.madvise(mmap.MADV_WILLNEED, page, first + view.nbytes - page)
        return view


def map_shard(file: BinaryIO, where: str, entry: dict, dtype: np.dtype) -> Shard:
    """Map one shard by the buffer positions of its manifest entry; UserError if it is not that shard.

    The mapping keeps its own descriptor, and with it any lock on `file`, until its last view is gone.
    """
    # Not pyarrow's map, which has the kernel read the whole file ahead (`MemoryMappedFile::ReadAt`). Blocks are read in
    # random order, so only the pages that are asked for are worth reading.
    try:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_RANDOM)
        shard = Shard(mapped, entry, dtype)
    except ValueError as error:  # positions behind its end
        raise UserError(f"{where}: damaged shard: {error}; prepare it again") from None
    if entry["documents"] and shard.ends[-1] != entry["tokens"]:
        raise UserError(f"{where}: damaged shard: its documents do not end with its tokens; prepare it again")
    return shard


def open_shard(path: Path, entry: dict, dtype: np.dtype) -> Shard:
    """Map the shard at `path`; UserError if it is not the one of its manifest entry."""
    with open(path, "rb", opener=regular) as file:
        return map_shard(file, str(path), entry, dtype)


def between(ends: np.ndarray, low: int, high: int) -> np.ndarray:
    """Select from the ordered `ends` those with low < end <= high."""
    return ends[slice(*np.searchsorted(ends, (low, high), side="right"))]


class TokenSplit:
    """One split as a flat, memory-mapped stream of tokens; shards are mapped when first touched.

    `entry` is the split's part of the manifest. Picklable: a copy in another process maps the shards itself.
    """

    def __init__(self, folder: Path, entry: dict):
        self.folder = Path(folder)
        self._take(entry)
        self._open: dict[int, Shard] = {}
        # Each mapped shard needs a file descriptor: leave half of them to the rest of the process.
        self._most_open = max(1, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, MOST_MAPPED))
        self._written: dict[str, int] = {}
        """When each file had been written, in ns, as seen when this stream was opened."""
        self._check_shards()

    def _take(self, entry: dict) -> None:
        """Be the stream of these shards."""
        self._entry = entry
        self.dtype = np.dtype(entry["dtype"])
        self.num_tokens: int = entry["tokens"]
        self.num_documents: int = entry["documents"]
        self.num_bytes: int = entry["bytes"]
        # What is before each shard, then all: [shards + 1] int64.
        self.token_starts = np.cumsum([0] + [shard["tokens"] for shard in entry["shards"]], dtype=np.int64)
        self._starts_list: list[int] = self.token_starts.tolist()  # bisect is four times numpy's speed
        self._byte_starts = np.cumsum([0] + [shard["bytes"] for shard in entry["shards"]], dtype=np.int64)

    @property
    def shard_entries(self) -> list[dict]:
        """The manifest's entries of the shards, in the order of the stream."""
        return self._entry["shards"]

    def part(self, first: int, stop: int) -> Self:
        """Open the stream of the shards [first, stop) alone: one source of several."""
        shards = self._entry["shards"][first:stop]
        totals = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
        return self._of_entry({**self._entry, **totals, "shards": shards})

    def _of_entry(self, entry: dict) -> Self:
        return type(self)(self.folder, entry)

    def _check_shards(self) -> None:
        """Raise UserError for the first shard that is missing or has another size."""
        try:
            # One listing of the folder, however many shards there are.
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
        return {**self.__dict__, "_open": {}}  # maps cannot be pickled

    def _shard(self, number: int) -> Shard:
        """Return the shard; map it if it is not mapped yet."""
        if number not in self._open:
            while len(self._open) >= self._most_open:
                del self._open[next(iter(self._open))]  # the one opened first
            self._open[number] = self.map_anew(number)
        return self._open[number]

    def map_anew(self, number: int) -> Shard:
        """Map the shard; UserError if its file belongs to another data set than when this one was opened."""
        entry = self._entry["shards"][number]
        path = self.folder / entry["file"]
        with suppress(FileNotFoundError), open(path, "rb", opener=regular) as file:
            written = os.fstat(file.fileno()).st_mtime_ns
            # The checksum only if the time differs: a copy or a restored backup may hold the same bytes.
            if written == self._written[entry["file"]] or checksum_of_file(path) == entry["checksum"]:
                return map_shard(file, str(path), entry, self.dtype)
        if (moved := self._moved(entry)) is not None:
            return moved
        raise UserError(
            f"{path}: the data set was replaced while it was read; go on with the earlier one, which data_prep.py "
            f"--replace keeps beside it: --set data.name={self.folder.parent.name}.replaced-N",
            on_every_rank=False,
        )

    def _moved(self, entry: dict) -> Shard | None:
        """Find the shard's documents in a data set that has been prepared further since; None if they are not there."""
        # Names hold the number of shards, and the last shard of a source may have more documents now.
        shards = (read_manifest(self.folder.parent) or {"splits": {}})["splits"].get(self.folder.name, {})
        for now in shards.get("shards", ()):
            fewer = any(now[key] < entry[key] for key in ("documents", "tokens"))
            if fewer or now.get("source", 0) != entry.get("source", 0):
                continue
            same = {**entry, "buffers": now["buffers"]}
            with suppress(FileNotFoundError, UserError), (self.folder / now["file"]).open("rb") as file:
                shard = map_shard(file, str(self.folder / now["file"]), same, self.dtype)
                if digest_of_documents(shard.tokens, shard.ends) == entry.get("tokens_digest"):
                    return shard
        return None

    def locate(self, token: int) -> tuple[int, int]:
        """Find the shard that holds the token at position `token` of the stream, and the position in it."""
        number = bisect_right(self._starts_list, token) - 1
        return number, token - self._starts_list[number]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [stop - start] of the stream: a read-only view inside a shard, a copy across a border."""
        if not 0 <= start < stop <= self.num_tokens:
            if 0 <= start == stop <= self.num_tokens:
                return np.empty(0, self.dtype)
            raise IndexError(f"tokens {start}:{stop} of a stream of {self.num_tokens}")
        starts = self._starts_list
        number = bisect_right(starts, start) - 1
        # The common case first: one mapped shard holds the whole range.
        offset, shard = start - starts[number], self._open.get(number)
        if shard is not None and stop <= starts[number + 1]:
            return shard.view(offset, stop - start)
        pieces = [self._first_piece(number, offset, stop - start)]
        while (missing := stop - start - sum(map(len, pieces))) > 0:
            number += 1
            pieces.append(self._next_piece(number, missing))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _first_piece(self, number: int, offset: int, count: int) -> np.ndarray:
        return self._shard(number).view(offset, count)

    def _next_piece(self, number: int, count: int) -> np.ndarray:
        """Read up to `count` tokens from the beginning of a shard that is read only because a block ends in it."""
        return self._shard(number).view(0, count)

    def num_blocks(self, sequence_length: int) -> int:
        """Count the blocks of `sequence_length` inputs and as many targets."""
        # Minus 1: neighbours share a token, and only the last block needs one more than its inputs.
        return max(0, (self.num_tokens - 1) // sequence_length)

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """List the positions p of the stream, start < p <= stop, at which a document has just ended: [ends] int64."""
        if start >= stop:
            return np.empty(0, np.int64)
        first, last = self.locate(start)[0], self.locate(stop - 1)[0]
        pieces = []
        for number in range(first, last + 1):
            base = self.token_starts[number]
            pieces.append(self._ends_between(number, start - base, stop - base) + base)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _ends_between(self, number: int, low: int, high: int) -> np.ndarray:
        """List the ends p of documents in shard `number`, low < p <= high, in tokens of the shard."""
        return between(self._shard(number).ends, low, high)

    def bytes_before(self, token: int) -> float:
        """Count the UTF-8 bytes of text in the first `token` tokens of the stream.

        The count is exact for whole documents. A document that is cut counts by its share of tokens, its EOS included.
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

    def document_at(self, token: int) -> tuple[str, int]:
        """Find the shard's file, and the row in it, of the document that holds the token of the stream."""
        number, offset = self.locate(token)
        row = int(np.searchsorted(self._shard(number).ends, offset, side="right"))
        return self._entry["shards"][number]["file"], row
