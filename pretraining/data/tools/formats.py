"""Writers and readers of the token files of other tools.

Megatron-LM: PREFIX.bin and PREFIX.idx. The .bin is the token stream. The .idx (little-endian, version 1, as
Megatron-Core's `IndexedDataset` reads it): magic, version, type code, number of sequences, number of document marks,
then int32 sequence lengths, int64 byte offsets of the sequences, and int64 document marks (sequence numbers, a 0
first). A document that is written here is one sequence; in a foreign file it may be several.

datatrove: NAME.ds, NAME.ds.index and NAME.ds.metadata. The .ds is the token stream (uint16 or uint32, little-endian),
the index one uint64 a document: its end, in tokens. The metadata is three lines: tokenizer and bytes a token, number
of tokens, and that number for people.

In two more, which are read alone, the end-of-text token separates documents:

.bin: uint16 or uint32, little-endian, nothing else (nanoGPT); or behind a header of 1,024 bytes that names type and
number of the tokens (llm.c, and the speed runs made of it).

MDS (mosaicml-streaming, version 2): index.json lists shards. A shard is the number of samples n, n + 1 offsets of
samples, both uint32, and a copy of the columns. A sample is the uint32 sizes of its columns that have no fixed size,
then the columns' bytes.
"""

import math
import mmap
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from pretraining.data.finished import SplitDocuments
from pretraining.data.progress import ProgressBar
from pretraining.data.shards import token_dtype
from pretraining.errors import UserError, nearest
from pretraining.outside.files import COUNT, NAME, object_of, read_json_value
from pretraining.outside.schema import check

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron's type codes of integers; 6 and 7 are floats."""

MEGATRON_CODES = {np.dtype(np.uint16): 8, np.dtype(np.uint32): 4}
"""Codes of our types. Megatron has no uint32, but ids below 2**31 have the same bytes in int32."""

LONGEST_SEQUENCE = 2**31 - 1


def write_megatron(split: SplitDocuments, prefix: Path, progress: ProgressBar) -> None:
    """Write one split as PREFIX.bin and PREFIX.idx, a shard at a time."""
    with _beside(prefix, "bin").open("wb") as file:
        for entry, shard in split.shards():
            file.write(shard.tokens.data)
            progress.add_shard(entry)
    with _beside(prefix, "idx").open("wb") as file:
        count = split.num_documents
        file.write(HEADER.pack(MAGIC, 1, MEGATRON_CODES[split.dtype], count, count + 1))
        for entry, shard in split.shards():
            lengths = np.diff(shard.ends, prepend=0)
            if len(lengths) and lengths.max() > LONGEST_SEQUENCE:
                what = f"a document of {lengths.max():,} tokens; Megatron's index holds at most"
                raise UserError(f"{split.folder / entry['file']}: {what} {LONGEST_SEQUENCE:,} a document")
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


def mapped(path: Path, dtype: np.dtype, start: int = 0) -> np.ndarray:
    """Map the numbers that a file holds from byte `start` on, to be read once from the first to the last."""
    count = (path.stat().st_size - start) // dtype.itemsize
    if not count:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    content.madvise(mmap.MADV_SEQUENTIAL)
    return np.frombuffer(content, dtype, count, start)


class MegatronFile:
    """One PREFIX.bin and PREFIX.idx, mapped; UserError if they are not whole."""

    def __init__(self, prefix: Path):
        self.bin, self.idx = _beside(prefix, "bin"), _beside(prefix, "idx")
        for path in (self.bin, self.idx):
            if not path.is_file():
                what = "no such file; --from megatron takes PREFIX of PREFIX.bin and PREFIX.idx"
                raise UserError(f"{path}: {what}")
        with self.idx.open("rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise UserError(f"{self.idx}: not a Megatron index: it does not begin with {MAGIC[:7].decode()}")
        _, version, code, self.num_sequences, num_marks = HEADER.unpack(header)
        if version != 1 or code not in MEGATRON_TYPES:
            what = f"index version {version}, type code {code}; can read version 1 of integers"
            raise UserError(f"{self.idx}: {what}")
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
        # Every sequence must be inside the .bin, and every mark inside the sequences.
        end, wrong, marks = 0, [], self.marks
        for start in range(0, self.num_sequences, 1 << 20):
            lengths, offsets = (each[start : start + (1 << 20)] for each in (self.lengths, self.offsets))
            if lengths.min() < 0 or offsets.min() < 0:
                wrong.append("a sequence of negative length or place")
            if (offsets % self.dtype.itemsize).any():
                wrong.append("a sequence that begins inside a token")
            end = max(end, int((offsets + lengths.astype(np.int64) * self.dtype.itemsize).max()))
        if len(marks) and not (marks[0] == 0 and marks[-1] == self.num_sequences):
            wrong.append("its documents do not cover its sequences")
        if (marks[1:] < marks[:-1]).any():
            wrong.append("its documents do not follow each other")
        if wrong:
            raise UserError(f"{self.idx}: damaged: {wrong[0]}; copy it again")
        self.size = self.bin.stat().st_size
        if end > self.size:
            what = f"truncated: {self.size:,} bytes, its index names {end:,}"
            raise UserError(f"{self.bin}: {what}; copy it again")

    def documents(self) -> Iterator[np.ndarray]:
        tokens, width = mapped(self.bin, self.dtype), self.dtype.itemsize
        for first, last in pairwise(map(int, self.marks)):
            places = zip(self.offsets[first:last] // width, self.lengths[first:last], strict=True)
            pieces = [tokens[start : start + length] for start, length in places]
            # A view without a copy, as most documents are one sequence.
            yield pieces[0] if len(pieces) == 1 else np.concatenate([tokens[:0], *pieces])


DATATROVE_TYPES = {2: "<u2", 4: "<u4"}
"""Types of the tokens, by the bytes of one token."""


def write_datatrove(split: SplitDocuments, folder: Path, tokenizer: str, progress: ProgressBar) -> None:
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
        progress.add_shard(entry)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


class DatatroveFile:
    """One .ds with its index, mapped; UserError unless it holds 2 or 4 bytes for each token that the index counts."""

    def __init__(self, path: Path):
        self.path, self.index = path, _beside(path, "index")
        for needed in (self.path, self.index):
            if not needed.is_file():
                what = "no such file; a .ds needs its .index, which says where documents end"
                raise UserError(f"{needed}: {what} (datatrove's save_index)")
        if self.index.stat().st_size % 8:
            raise UserError(f"{self.index}: truncated: not a whole number of document ends; copy it again")
        self.ends = mapped(self.index, np.dtype("<i8"))
        count = int(self.ends[-1]) if len(self.ends) else 0
        if (self.ends[1:] < self.ends[:-1]).any() or (self.ends[:1] < 0).any():
            raise UserError(f"{self.index}: damaged: its document ends do not ascend; copy it again")
        self.size = path.stat().st_size
        if self.size not in (2 * count, 4 * count):
            what = f"truncated or damaged: {self.size:,} bytes, its index counts {count:,} tokens of 2 or 4 bytes"
            raise UserError(f"{self.path}: {what}; copy it again")
        # From the size, because the metadata file may be missing.
        self.dtype = np.dtype(DATATROVE_TYPES[self.size // count if count else 2])

    def documents(self) -> Iterator[np.ndarray]:
        tokens, start = mapped(self.path, self.dtype), 0
        for first in range(0, len(self.ends), 1 << 20):
            for end in self.ends[first : first + (1 << 20)].tolist():
                yield tokens[start:end]
                start = end


HEADER_BYTES = 1024
HEADER_TYPES = {20240520: "<u2", 20240801: "<u4"}
"""Magic numbers of llm.c's headers, for tokens of GPT-2 and of Llama 3 (its dev/data/data_common.py)."""

RAW_TYPES = ("uint16", "uint32", "int32", "int64")
CHUNK_TOKENS = 1 << 20

_NAMES_OF_SPLITS = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation"}


def named_splits(names: Sequence[str]) -> list[str | None]:
    """Return the split that each name says (train.bin, fineweb_val_000000.bin); None for all if one says none."""
    words = [set(re.split(r"[^a-z]+", name.lower())) for name in names]
    found = [{_NAMES_OF_SPLITS[word] for word in each & _NAMES_OF_SPLITS.keys()} for each in words]
    if all(len(each) == 1 for each in found) and len(set().union(*found)) == 2:
        return [each.pop() for each in found]
    return [None] * len(names)


def documents_between(chunks: Iterable[np.ndarray], eos: int, path: Path) -> Iterator[np.ndarray]:
    """Cut a stream [tokens] behind every `eos`, which the last document may lack; one without own tokens is empty.

    UserError, which names `path`, for a whole stream without one.
    """
    rest: list[np.ndarray] = []
    first = True
    for chunk in chunks:
        start = 0
        for stop in (np.flatnonzero(chunk == eos) + 1).tolist():
            document = np.concatenate([*rest, chunk[start:stop]]) if rest else chunk[start:stop]
            rest, start = [], stop
            # llm.c writes the token before each document, and before the first one there is none.
            if len(document) > 1 or not first:
                yield document if len(document) > 1 else document[:0]
            first = False
        if start < len(chunk):
            rest.append(chunk[start:])
    if rest and first:
        what = f"the end-of-text token {eos} does not occur"
        raise UserError(f"{path}: {what}; give the --tokenizer and the --dtype that it was made with")
    if rest:
        yield np.concatenate(rest)


class BinFile:
    """One .bin, mapped; UserError if it is not whole."""

    def __init__(self, path: Path, dtype: str | None, vocab_size: int, eos: int):
        """dtype: of a file without a header; None: the smaller of uint16 and uint32 that holds `vocab_size` ids."""
        self.path, self.eos, self.start = path, eos, 0
        if not path.is_file():
            raise UserError(f"{path}: no such file; --from bin takes a .bin file or a folder of them")
        size, self.dtype = path.stat().st_size, np.dtype(dtype or token_dtype(vocab_size)).newbyteorder("<")
        with path.open("rb") as file:
            header = np.frombuffer(file.read(12).ljust(12, b"\0"), "<i4").tolist()
        if size >= 12 and header[0] in HEADER_TYPES:
            self.dtype, self.start = np.dtype(HEADER_TYPES[header[0]]), HEADER_BYTES
            if size != (expected := HEADER_BYTES + header[2] * self.dtype.itemsize):
                what = f"truncated or damaged: {size:,} bytes, its header counts {expected:,}"
                raise UserError(f"{path}: {what}; copy it again")
        elif size % self.dtype.itemsize:
            what = f"{size:,} bytes are no whole number of {self.dtype.name} tokens"
            remedy = f"copy it again, or give the --dtype it was written with ({', '.join(RAW_TYPES)})"
            raise UserError(f"{path}: {what}; {remedy}")
        self.size = size - self.start

    def documents(self) -> Iterator[np.ndarray]:
        tokens = mapped(self.path, self.dtype, self.start)
        chunks = (tokens[start : start + CHUNK_TOKENS] for start in range(0, len(tokens), CHUNK_TOKENS))
        yield from documents_between(chunks, self.eos, self.path)


TOKEN_COLUMNS = ("tokens", "input_ids")
BYTES_TYPE = "int64"
"""What llm-foundry writes into a column of plain bytes."""

_TEXT_IS_NONE = "Text is no tokens: write it as .jsonl or .parquet, and name that in data.sources"
_ARRAY_TYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
"""Codes of integers in a column `ndarray` that does not name its type."""


_CODECS = {"zstd": "zstd", "gz": "gzip", "bz2": "bz2"}
"""Arrow's names of what a shard is packed with."""

_NAMES = {"type": "array", "items": {"type": "string"}}
_MDS_FILE = object_of({"basename": NAME, "bytes": COUNT})
_MDS_COLUMNS = {"column_names": _NAMES, "column_encodings": _NAMES}
_MDS_COLUMNS |= {"column_sizes": {"type": "array", "items": {"anyOf": [COUNT, {"type": "null"}]}}}
_MDS_SHARD = {"format": {"type": "string"}, **_MDS_COLUMNS, "samples": COUNT, "raw_data": _MDS_FILE}
_MDS_PACKED = {
    "zip_data": {"anyOf": [_MDS_FILE, {"type": "null"}]},
    "compression": {"type": ["string", "null"]},
}
_MDS_SHARDS = {"type": "array", "items": object_of(_MDS_SHARD, _MDS_PACKED)}
_MDS = object_of({"shards": _MDS_SHARDS, "version": {}})
"""What an index.json of MDS says that is read here."""


class MdsFolder:
    """The shards that one index.json lists; UserError for what is missing or cannot be read."""

    def __init__(self, index: Path, column: str | None, dtype: str | None, eos: int):
        """column: None for `tokens` or `input_ids`. dtype: of a column of plain bytes."""
        self.index, self.folder, self.eos = index, index.parent, eos
        try:
            values = check(read_json_value(index), _MDS, str(index))
            self.shards = values["shards"]
            odd = {shard["format"] for shard in self.shards} - {"mds"} or values["version"] != 2
            for shard in self.shards:
                if len({len(shard[f"column_{part}"]) for part in ("names", "encodings", "sizes")}) > 1:
                    raise ValueError("names, encodings and sizes of columns are not as many")
        except (OSError, ValueError, UserError) as error:
            raise UserError(f"{index}: no index of MDS shards ({error}); copy it again") from error
        if odd or not self.shards:
            raise UserError(f"{index}: lists no MDS shards of version 2; convert reads no others")
        names = self.shards[0]["column_names"]
        self.column = column or next((name for name in TOKEN_COLUMNS if name in names), "")
        if not all(self.column in shard["column_names"] for shard in self.shards):
            encodings = zip(names, self.shards[0]["column_encodings"], strict=True)
            listed = ", ".join(f"{name} ({encoding})" for name, encoding in encodings)
            hint = nearest(column, names) if column else "; name that of the tokens: --column NAME"
            what = f"no column {column or 'tokens'!r}{hint}; it has {listed}. {_TEXT_IS_NONE}"
            raise UserError(f"{index}: {what}")
        encoding = self.shards[0]["column_encodings"][names.index(self.column)]
        # What turns a column's bytes into tokens: `bytes`, or `ndarray[:TYPE[:SHAPE]]`.
        where, (kind, _, parameters) = f"{index}: column {self.column}", encoding.partition(":")
        if kind not in ("bytes", "ndarray"):
            raise UserError(f"{where}: is {encoding}; tokens are bytes or ndarray. {_TEXT_IS_NONE}")
        named, _, shape = parameters.partition(":")
        if kind == "bytes":
            named = dtype or BYTES_TYPE

        def decode(value: memoryview) -> np.ndarray:
            place, array_type = 0, np.dtype(named).newbyteorder("<") if named else None
            if array_type is None:
                if value[0] not in _ARRAY_TYPES:
                    raise UserError(f"{where}: holds no integers (type code {value[0]})")
                place, array_type = 1, np.dtype(_ARRAY_TYPES[value[0]])
            if kind == "ndarray" and not shape:
                # one byte: the number of axes times 4, and the power of two of the bytes of each axis' length
                axes, width = value[place] >> 2, 1 << (value[place] & 3)
                place += 1 + axes * width
            return np.frombuffer(value[place:], array_type)

        self.decode = decode
        self.size = sum(shard["raw_data"]["bytes"] for shard in self.shards)

    def documents(self) -> Iterator[np.ndarray]:
        """Yield [tokens] of every document: samples of different lengths; packed ones of one length are cut."""
        lengths = {len(sample) for sample in self._samples(self.shards[0])}
        samples = (sample for shard in self.shards for sample in self._samples(shard))
        if len(lengths) == 1 and sum(shard["samples"] for shard in self.shards) > 1:
            yield from documents_between(samples, self.eos, self.index)
        else:
            yield from samples

    def _samples(self, shard: dict) -> Iterator[np.ndarray]:
        count, size = shard["samples"], shard["raw_data"]["bytes"]
        place = self.folder / shard["raw_data"]["basename"]
        if place.is_file():
            content = memoryview(place.read_bytes())
        else:
            packed = self.folder / (shard.get("zip_data") or {}).get("basename", place.name)
            if not packed.is_file():
                raise UserError(f"{place}: no such file, and {self.index} names it; copy it too")
            kind = (shard.get("compression") or "").partition(":")[0]
            if kind not in _CODECS:
                what = f"compressed with {kind}; convert reads {', '.join(_CODECS)}; unpack it first"
                raise UserError(f"{packed}: {what}")
            import pyarrow

            try:
                with pyarrow.CompressedInputStream(pyarrow.OSFile(str(packed)), _CODECS[kind]) as stream:
                    content = memoryview(stream.read())
            except (OSError, ValueError) as error:
                raise UserError(f"{packed}: cannot be unpacked ({error}); copy it again") from error
        has_offsets = len(content) >= 8 + 4 * count
        offsets = np.frombuffer(content, "<u4", count + 1, 4) if has_offsets else np.zeros(1)
        if len(content) != size or offsets[-1] != size:
            what = f"truncated or damaged: {len(content):,} bytes, its index names {size:,}"
            raise UserError(f"{place}: {what}; copy it again")
        number, fixed = shard["column_names"].index(self.column), shard["column_sizes"]
        sizes_bytes = 4 * sum(not size for size in fixed)
        for start in offsets[:-1].tolist():
            try:
                found = iter(np.frombuffer(content, "<u4", sizes_bytes // 4, start).tolist())
                sizes = [size or next(found) for size in fixed]
                first = start + sizes_bytes + sum(sizes[:number])
                tokens = self.decode(content[first : first + sizes[number]])
            except (IndexError, ValueError, TypeError) as error:
                raise UserError(f"{place}: damaged, or of another type ({error}); copy it again") from error
            yield tokens


ForeignFile = MegatronFile | DatatroveFile | BinFile | MdsFolder
"""Each has `size`, the bytes of its tokens, and `documents()`."""
