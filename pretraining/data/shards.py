"""Write token shards, and read them: an Arrow dataset on disk, mapped as one flat stream of tokens.

Each split is a folder in the layout of `datasets.save_to_disk`. A row is a document: `input_ids` (its tokens with
the EOS that closes it) and `num_bytes` (the UTF-8 length of its text). A shard is one record batch, so the
values buffer of `input_ids` is the shard's token stream and its offsets are the document ends.
"""

import hashlib
import json
import mmap
import os
import resource
from array import array
from bisect import bisect_right
from contextlib import suppress
from copy import copy
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from pretraining.data.checksums import checksum_of_file, digest_of_documents, joined_digest
from pretraining.data.manifest import COUNTED, read_manifest
from pretraining.errors import UserError
from pretraining.outside.files import regular
from pretraining.runtime.durable_files import replacing

if TYPE_CHECKING:
    import pyarrow

SHARD_TOKENS = 64_000_000
"""Tokens of a shard, 128 MB in uint16: few files for 10^11 tokens, and one shard is still fetched quickly."""

SHARD_DOCUMENTS = 4_000_000
"""Documents of a shard: limits its columns by document (16 bytes each) if the documents are tiny."""

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
        self._entry = entry
        self.cropped: dict[int, Any] = {}
        """By sequence length, once it was asked for (`Cropped.of`)."""
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

    def part(self, first: int, stop: int) -> "TokenSplit":
        """Return the stream of the shards [first, stop) alone: one source of several."""
        part, shards = copy(self), self._entry["shards"][first:stop]
        part._take({**self._entry, **_totals(shards), "shards": shards})
        return part

    def _check_shards(self) -> None:
        """Raise UserError for the first shard that is missing or has another size."""
        found = {}
        # One listing of the folder, however many shards there are.
        with suppress(FileNotFoundError), os.scandir(self.folder) as files:
            found = {file.name: file.stat() for file in files}
        for shard in self._entry["shards"]:
            status = found.get(shard["file"])
            size = status and status.st_size
            if size != shard["size"]:
                state = "missing" if size is None else f"truncated or damaged: {size:,} bytes"
                what = f"shard is {state}, expected {shard['size']:,} bytes; delete {self.folder.parent} and prepare"
                remedy = "the data again (data_prep.py), or copy it again"
                raise UserError(f"{self.folder / shard['file']}: {what} {remedy}")
            self._written[shard["file"]] = status.st_mtime_ns

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": {}}  # maps cannot be pickled

    def _shard(self, number: int) -> Shard:
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
        # Perhaps it has been prepared further since. Names hold the number of shards, and the last shard of a source
        # may have more documents now.
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
        what = "the data set was replaced while it was read; go on with the earlier one, which data_prep.py"
        remedy = f"--replace keeps beside it: --set data.name={self.folder.parent.name}.replaced-N"
        raise UserError(f"{path}: {what} {remedy}", on_every_rank=False)

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
        number, offset = self.locate(start)
        shard = self._open.get(number)
        # The common case first: one mapped shard holds the whole range.
        if shard is not None and stop <= self._starts_list[number + 1]:
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
        bases = self.token_starts
        numbers = range(self.locate(start)[0], self.locate(stop - 1)[0] + 1)
        pieces = [self._ends_between(n, start - bases[n], stop - bases[n]) + bases[n] for n in numbers]
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


class SplitWriter:
    """Append documents to one split through a single buffer, which grows to a shard's size with what is written."""

    def __init__(self, folder: Path, dtype: np.dtype, shard_tokens: int | None = None):
        folder.mkdir(parents=True)
        self.folder, self.dtype = folder, dtype
        self._tokens, self._shard_tokens = np.empty(0, dtype), shard_tokens or SHARD_TOKENS
        self._ends = array("q", [0])
        self._num_bytes = array("Q")
        self._shards: list[dict] = []
        self._source = 0

    def begin_source(self, number: int) -> None:
        # A shard holds documents of one source, so that a run can open each source alone.
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
            # The documents that the open shard still takes.
            fitting = np.searchsorted(ends[first:] - start, self._shard_tokens - self._ends[-1], side="right")
            last = first + min(int(fitting), SHARD_DOCUMENTS - len(self._num_bytes))
            if last > first:
                stop, begin = int(ends[last - 1]), self._ends[-1]
                if (needed := begin + stop - start) > len(self._tokens):
                    # In place; no view of the buffer outlives `_write_shard`.
                    size = min(self._shard_tokens, max(needed, 2 * len(self._tokens)))
                    self._tokens.resize(size, refcheck=False)
                self._tokens[begin:needed] = tokens[start:stop]
                # Through bytes: `extend` would make a Python integer of each end.
                self._ends.frombytes((ends[first:last] - start + begin).astype(np.int64).tobytes())
                self._num_bytes.frombytes(np.asarray(num_bytes[first:last]).astype(np.uint64).tobytes())
                first, start = last, stop
            elif self._num_bytes:
                self._write_shard()
            else:  # one document larger than a shard gets a shard of its own
                self._shard_tokens = int(ends[first]) - start

    def _write_shard(self) -> None:
        import pyarrow as pa

        count = self._ends[-1]
        ends, tokens = _arrow_array(np.asarray(self._ends)), _arrow_array(self._tokens[:count])
        rows = pa.LargeListArray.from_arrays(ends, tokens)
        num_bytes = _arrow_array(np.asarray(self._num_bytes))
        schema = pa.schema(
            {"input_ids": pa.large_list(pa.from_numpy_dtype(self.dtype)), "num_bytes": pa.uint64()},
            # what `datasets` reads
            metadata={"huggingface": json.dumps({"info": {"features": _features(self.dtype)}})},
        )
        # Numbered without a total, which is known only at the end: `finish` gives the final names.
        path = self.folder / f"data-{len(self._shards):05d}.arrow"
        with replacing(path, "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            # One batch, so that the values of `input_ids` are one stream of tokens in the file.
            stream.write_batch(pa.record_batch([rows, num_bytes], schema=schema))
        self._shards.append(
            {
                "file": path.name,
                "source": self._source,
                "documents": len(self._num_bytes),
                "tokens": count,
                "bytes": sum(self._num_bytes),
                "size": path.stat().st_size,
                "buffers": buffer_positions(path),
                "checksum": checksum_of_file(path),
                "tokens_digest": digest_of_documents(self._tokens, np.asarray(self._ends)[1:]),
            }
        )
        self._ends, self._num_bytes = array("q", [0]), array("Q")

    def finish(self) -> dict:
        """Write the last shard and the JSON files that `load_from_disk` expects; return the manifest entry."""
        # An empty split has a shard too, so that it opens like any other.
        if self._num_bytes or not self._shards:
            self._write_shard()
        for number, shard in enumerate(self._shards):
            name = f"data-{number:05d}-of-{len(self._shards):05d}.arrow"
            (self.folder / shard["file"]).rename(self.folder / name)
            shard["file"] = name
        return split_entry(self.folder, self._shards, self.dtype.name)


def split_entry(folder: Path, shards: list[dict], dtype: str) -> dict:
    """Make a split's part of the manifest from its shards' entries; write the JSON files `load_from_disk` expects."""
    entry = summed_entry(shards, dtype)
    # As `datasets.save_to_disk` lays them out.
    state = {
        "_data_files": [{"filename": shard["file"]} for shard in shards],
        # Made from the content, so that equal data sets have equal fingerprints.
        "_fingerprint": hashlib.blake2b(entry["checksum"].encode(), digest_size=8).hexdigest(),
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    features = _features(np.dtype(dtype))
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    for name, values in {"state.json": state, "dataset_info.json": info}.items():
        with replacing(folder / name) as file:
            json.dump(values, file, indent=2)
    return entry


def summed_entry(shards: list[dict], dtype: str) -> dict:
    """Make the manifest entry of the stream of these shards."""
    checksum = joined_digest([s["tokens_digest"] for s in shards], [s["documents"] for s in shards])
    return {**_totals(shards), "dtype": dtype, "checksum": checksum, "shards": shards}


def _totals(shards: list[dict]) -> dict[str, int]:
    return {key: sum(shard[key] for shard in shards) for key in COUNTED}


def _features(dtype: np.dtype) -> dict:
    return {
        "input_ids": {"feature": {"dtype": dtype.name, "_type": "Value"}, "_type": "LargeList"},
        "num_bytes": {"dtype": "uint64", "_type": "Value"},
    }


def _arrow_array(values: np.ndarray) -> "pyarrow.Array":
    """Hand a contiguous array to Arrow without a copy."""
    import pyarrow as pa

    # Not `pyarrow.array`, which would import pandas first. None: no value is null.
    buffers = [None, pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


def buffer_positions(path: Path) -> dict[str, int]:
    """Find where in the file, in bytes, the values and offsets of `input_ids` and `num_bytes` begin."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        content = file.read_buffer()
        file.seek(0)
        rows, num_bytes = pa.ipc.open_stream(file).read_next_batch().columns
        columns = {"input_ids": rows.values, "offsets": rows, "num_bytes": num_bytes}
        # Both are addresses in the same map of the file.
        return {name: each.buffers()[1].address - content.address for name, each in columns.items()}
