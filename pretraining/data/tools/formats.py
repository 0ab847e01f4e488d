"""Writers and readers of the token files of other tools.

Megatron-LM: PREFIX.bin and PREFIX.idx. The .bin is the token stream. The .idx (little-endian, version 1, as
Megatron-Core's `IndexedDataset` reads it): magic, version, type code, number of sequences, number of document marks,
then int32 sequence lengths, int64 byte offsets of the sequences, and int64 document marks (sequence numbers, a 0
first). A document that is written here is one sequence; in a foreign file it may be several.

datatrove: NAME.ds, NAME.ds.index and NAME.ds.metadata. The .ds is the token stream (uint16 or uint32, little-endian),
the index one uint64 a document: its end, in tokens. The metadata is three lines: tokenizer and bytes a token, number
of tokens, and that number for people.
"""

import math
import mmap
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from pretraining.data.tools.finished import SplitDocuments
from pretraining.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron's type codes of integers; 6 and 7 are floats."""

MEGATRON_CODES = {np.dtype(np.uint16): 8, np.dtype(np.uint32): 4}
"""Codes of our types. Megatron has no uint32, but ids below 2**31 have the same bytes in int32."""

LONGEST_SEQUENCE = 2**31 - 1


def write_megatron(split: SplitDocuments, prefix: Path, on_shard: Callable[[dict], None]) -> None:
    """Write one split as PREFIX.bin and PREFIX.idx, a shard at a time."""
    with prefix.with_name(prefix.name + ".bin").open("wb") as file:
        for entry, shard in split.shards():
            file.write(shard.tokens.data)
            on_shard(entry)
    with prefix.with_name(prefix.name + ".idx").open("wb") as file:
        count = split.num_documents
        file.write(HEADER.pack(MAGIC, 1, MEGATRON_CODES[split.dtype], count, count + 1))
        for entry, shard in split.shards():
            lengths = np.diff(shard.ends, prepend=0)
            if len(lengths) and lengths.max() > LONGEST_SEQUENCE:
                raise UserError(
                    f"{split.folder / entry['file']}: a document of {lengths.max():,} tokens; Megatron's index "
                    f"holds at most {LONGEST_SEQUENCE:,} a document"
                )
            file.write(lengths.astype("<i4").data)
        base = 0
        for entry, shard in split.shards():
            starts = np.concatenate([[0], shard.ends[:-1]])[: len(shard.ends)]
            file.write(((starts + base) * split.dtype.itemsize).astype("<i8").data)
            # Offsets are counted in bytes from the start of the .bin, which holds all shards.
            base += entry["tokens"]
        # The document marks: each document is one sequence. Written in parts, so that memory does not grow with the
        # split.
        for start in range(0, count + 1, 1 << 20):
            file.write(np.arange(start, min(start + (1 << 20), count + 1), dtype="<i8").data)


def mapped(path: Path) -> mmap.mmap:
    """Map a file that is not empty into memory, to be read once from its beginning to its end."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    content.madvise(mmap.MADV_SEQUENTIAL)
    return content


class MegatronFile:
    """One PREFIX.bin and PREFIX.idx, mapped; UserError if they are not whole."""

    def __init__(self, prefix: Path):
        self.bin, self.idx = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
        for path in (self.bin, self.idx):
            if not path.is_file():
                raise UserError(
                    f"{path}: no such file; --from megatron takes PREFIX of PREFIX.bin and PREFIX.idx"
                )
        self._read_index()
        self._check()

    @property
    def size(self) -> int:
        return self.bin.stat().st_size

    def _read_index(self) -> None:
        with self.idx.open("rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise UserError(f"{self.idx}: not a Megatron index: it does not begin with {MAGIC[:7].decode()}")
        _, version, code, self.num_sequences, num_marks = HEADER.unpack(header)
        if version != 1 or code not in MEGATRON_TYPES:
            raise UserError(
                f"{self.idx}: index version {version}, type code {code}; can read version 1 of integers"
            )
        self.dtype = np.dtype(MEGATRON_TYPES[code])
        # 12 bytes for a sequence: its length (4) and its offset (8)
        wanted, found = HEADER.size + 12 * self.num_sequences + 8 * num_marks, self.idx.stat().st_size
        if found < wanted:
            raise UserError(f"{self.idx}: truncated: {found:,} bytes, expected {wanted:,}; copy it again")
        content = np.memmap(self.idx, np.uint8, mode="r")
        self.lengths = np.frombuffer(content, "<i4", self.num_sequences, HEADER.size)
        at = HEADER.size + self.lengths.nbytes
        self.offsets = np.frombuffer(content, "<i8", self.num_sequences, at)
        self.marks = np.frombuffer(content, "<i8", num_marks, at + self.offsets.nbytes)

    def _check(self) -> None:
        """Check that every sequence is inside the .bin, and every mark inside the sequences."""
        end = 0
        for start in range(0, self.num_sequences, 1 << 20):
            part = slice(start, start + (1 << 20))
            ends = self.offsets[part] + self.lengths[part].astype(np.int64) * self.dtype.itemsize
            if self.lengths[part].min() < 0 or self.offsets[part].min() < 0:
                raise UserError(f"{self.idx}: damaged: a sequence of negative length or place; copy it again")
            if (self.offsets[part] % self.dtype.itemsize).any():
                raise UserError(f"{self.idx}: damaged: a sequence that begins inside a token; copy it again")
            end = max(end, int(ends.max()))
        if end > self.size:
            raise UserError(
                f"{self.bin}: truncated: {self.size:,} bytes, its index names {end:,}; copy it again"
            )
        if len(self.marks) and not (self.marks[0] == 0 and self.marks[-1] == self.num_sequences):
            raise UserError(f"{self.idx}: damaged: its documents do not cover its sequences; copy it again")
        if (self.marks[1:] < self.marks[:-1]).any():
            raise UserError(f"{self.idx}: damaged: its documents do not follow each other; copy it again")

    def documents(self) -> Iterator[np.ndarray]:
        if not self.size:
            return
        content = mapped(self.bin)
        # A .bin may be longer than its index says, by less than a token.
        tokens = np.frombuffer(content, self.dtype, len(content) // self.dtype.itemsize)
        for number in range(len(self.marks) - 1):
            sequences = slice(int(self.marks[number]), int(self.marks[number + 1]))
            starts = (self.offsets[sequences] // self.dtype.itemsize).tolist()
            lengths = self.lengths[sequences].tolist()
            pieces = [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]
            # A view without a copy, as most documents are one sequence.
            yield pieces[0] if len(pieces) == 1 else np.concatenate([tokens[:0], *pieces])


DATATROVE_TYPES = {2: "<u2", 4: "<u4"}
"""Types of the tokens, by the bytes of one token."""


def write_datatrove(
    split: SplitDocuments, folder: Path, tokenizer: str, on_shard: Callable[[dict], None]
) -> None:
    """Write one split into `folder`, a .ds with its index and metadata for each shard that holds documents."""
    folder.mkdir(parents=True)
    for entry, shard in split.shards():
        if entry["documents"]:
            path = folder / Path(entry["file"]).with_suffix(".ds").name
            path.write_bytes(shard.tokens.data)
            _beside(path, "index").write_bytes(shard.ends.astype("<u8").data)
            count = entry["tokens"]
            # As humanize.metric, which datatrove 0.10.1 calls: three digits, a metric prefix, T for tokens ("1.23 MT").
            digits = int(math.log10(count)) if count else 0
            short = f"{count / 1000 ** (digits // 3):.{2 - digits % 3}f} {' kMGTP'[digits // 3].strip()}T"
            lines = [f"{tokenizer}|{split.dtype.itemsize}", str(count), short]
            _beside(path, "metadata").write_text("\n".join(lines))
        on_shard(entry)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


class DatatroveFile:
    """One .ds with its index, mapped; UserError if they are not whole."""

    def __init__(self, path: Path):
        self.path, self.index = path, _beside(path, "index")
        for needed in (self.path, self.index):
            if not needed.is_file():
                raise UserError(
                    f"{needed}: no such file; a .ds needs its .index, which says where documents end "
                    "(datatrove's save_index)"
                )
        if self.index.stat().st_size % 8:
            raise UserError(f"{self.index}: truncated: not a whole number of document ends; copy it again")
        self.ends = (
            # An empty file cannot be mapped.
            np.memmap(self.index, "<i8", mode="r") if self.index.stat().st_size else np.zeros(0, "<i8")
        )
        self._check()

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def _check(self) -> None:
        """Check that the file holds 2 or 4 bytes for each token that the index counts."""
        count = int(self.ends[-1]) if len(self.ends) else 0
        if (self.ends[1:] < self.ends[:-1]).any() or (self.ends[:1] < 0).any():
            raise UserError(f"{self.index}: damaged: its document ends do not ascend; copy it again")
        if self.size not in (2 * count, 4 * count):
            raise UserError(
                f"{self.path}: truncated or damaged: {self.size:,} bytes, its index counts {count:,} tokens of 2 "
                "or 4 bytes; copy it again"
            )
        # From the size, because the metadata file may be missing.
        self.dtype = np.dtype(DATATROVE_TYPES[self.size // count if count else 2])

    def documents(self) -> Iterator[np.ndarray]:
        if not self.size:
            return
        tokens, start = np.frombuffer(mapped(self.path), self.dtype), 0
        for first in range(0, len(self.ends), 1 << 20):
            for end in self.ends[first : first + (1 << 20)].tolist():
                yield tokens[start:end]
                start = end
