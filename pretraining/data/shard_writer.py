"""Write token shards: the Arrow dataset that `shards` reads, with a digest of its tokens."""

import hashlib
import json
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pretraining.data.checksums import checksum_of_file, digest_of_documents, joined_digest
from pretraining.runtime.durable_files import replacing

if TYPE_CHECKING:
    import pyarrow

SHARD_TOKENS = 64_000_000
"""Tokens of a shard, 128 MB in uint16: few files for 10^11 tokens, and one shard is still fetched quickly."""

SHARD_DOCUMENTS = 4_000_000
"""Documents of a shard: limits its columns by document (16 bytes each) if the documents are tiny."""


class SplitWriter:
    """Append documents to one split through a single buffer, which grows to a shard's size with what is written.

    `finish()` returns the split's entry of the manifest: counts, checksum of the tokens, and its shards.
    """

    def __init__(self, folder: Path, dtype: np.dtype, shard_tokens: int | None = None):
        folder.mkdir(parents=True)
        self.folder, self.dtype = folder, dtype
        self._tokens, self._shard_tokens = np.empty(0, dtype), shard_tokens or SHARD_TOKENS
        self._ends = array("q", [0])
        self._num_bytes = array("Q")
        self._shards: list[dict] = []
        self._source = 0

    @property
    def num_tokens(self) -> int:
        """Count the tokens appended so far, in this shard and those before."""
        return sum(shard["tokens"] for shard in self._shards) + self._ends[-1]

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
        rows = pa.LargeListArray.from_arrays(
            _arrow_array(np.asarray(self._ends)), _arrow_array(self._tokens[:count])
        )
        schema = pa.schema(
            {"input_ids": pa.large_list(pa.from_numpy_dtype(self.dtype)), "num_bytes": pa.uint64()},
            # what `datasets` reads
            metadata={"huggingface": json.dumps({"info": {"features": _features(self.dtype)}})},
        )
        # Numbered without a total, which is known only at the end: `finish` gives the final names.
        path = self.folder / f"data-{len(self._shards):05d}.arrow"
        with replacing(path, "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            num_bytes = _arrow_array(np.asarray(self._num_bytes))
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
    totals = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
    return {**totals, "dtype": dtype, "checksum": checksum, "shards": shards}


def _features(dtype: np.dtype) -> dict:
    """Spell the features of a split as `datasets` does."""
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
        buffers = {
            "input_ids": rows.values.buffers()[1],
            "offsets": rows.buffers()[1],
            "num_bytes": num_bytes.buffers()[1],
        }
        # Both are addresses in the same map of the file.
        return {name: buffer.address - content.address for name, buffer in buffers.items()}
