"""The documents of one text file, by its suffix: .txt, .jsonl (.gz, .zst), .parquet, .warc(.gz), plain sources."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import closing
from typing import BinaryIO

import orjson

from pretraining.data.documents import Document, Extent, damaged, decode, text_of
from pretraining.data.files import InputFile
from pretraining.data.packages import require
from pretraining.data.parquet_files import cut_parquet, read_parquet
from pretraining.data.warc_files import read_warc
from pretraining.errors import UserError

WHOLE_FILE_SUFFIXES = (".txt", ".py", ".rst", ".md", ".html")
"""One document a file. Of these, a user's folder is searched for .txt alone; the standard library for all."""

MAX_LINE_BYTES = 1 << 30
"""A longer line would fill the memory, and no document of a corpus is that long."""

WARC_SUFFIXES = (".warc", ".warc.gz", ".warc.wet.gz", ".wet")
EXPANSION = 3
"""Text a compressed file holds, in bytes per byte: about what English gives under gzip, zstd and snappy."""

READABLE_SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", *WARC_SUFFIXES)


def cut_file(file: InputFile, number: int, piece_bytes: int) -> list[tuple[Extent, int]]:
    """The file in extents of about `piece_bytes` of text, each with its size in bytes of text (estimated).

    Plain .jsonl is cut anywhere (a line belongs to the extent it begins in), .parquet between row groups; all
    else is one extent.
    """
    if file.num_bytes <= piece_bytes and not file.name.endswith(".parquet"):
        return [(Extent(number), _text_bytes(file))]
    if file.name.lower().endswith(".jsonl"):
        starts = range(0, file.num_bytes, piece_bytes)
        return [
            (Extent(number, at, min(at + piece_bytes, file.num_bytes)), min(piece_bytes, file.num_bytes - at))
            for at in starts
        ]
    if file.name.lower().endswith(".parquet") and file.num_bytes * EXPANSION > piece_bytes:
        return cut_parquet(file, number, piece_bytes)
    return [(Extent(number), _text_bytes(file))]


def _text_bytes(file: InputFile) -> int:
    compressed = file.name.lower().endswith((".gz", ".zst", ".parquet"))
    return file.num_bytes * (EXPANSION if compressed else 1)


def read_documents(file: InputFile, text_column: str, extent: Extent | None = None) -> Iterator[Document]:
    """Stream the documents of `file` (of an extent of it), in order, holding a few of them at a time.

    Raises UserError for a damaged file, an invalid JSON line, a missing or null text column.
    """
    extent, name = extent or Extent(0), file.name.lower()
    try:
        if name.endswith(".parquet"):
            yield from read_parquet(file, text_column, extent)
        elif name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
            yield from _read_json_lines(file, text_column, extent)
        elif name.endswith(WARC_SUFFIXES):
            yield from read_warc(file)
        else:
            with file.open() as opened:
                yield decode(opened.read().removeprefix(b"\xef\xbb\xbf"), file.address)
    except PermissionError as error:
        raise UserError(
            f"{file.address}: no permission to read it; make it readable or leave it out"
        ) from error
    except FileNotFoundError as error:
        raise UserError(f"{file.address}: it was there when the preparation began and is gone now") from error


def _read_json_lines(file: InputFile, text_column: str, extent: Extent) -> Iterator[Document]:
    with closing(_open_lines(file)) as lines:
        for place, raw in _lines_of(lines, file, extent):
            where = f"{file.address}:{place}"
            text = _text_of_line(raw, text_column)
            if text is not None:
                yield Document(text, where)
            elif not raw.isspace():
                yield _json_document(raw, where, text_column)


def _lines_of(lines: BinaryIO, file: InputFile, extent: Extent) -> Iterator[tuple[str, bytes]]:
    """The lines that begin in the extent, each with its place: a line number, or a byte where none is known."""
    at = 0
    if extent.start:
        lines.seek(extent.start - 1)
        at = extent.start - 1 + len(lines.readline())  # the rest of a line that began in the extent before
    for number, raw in enumerate(_whole_lines(lines, file), start=1):
        if extent.stop is not None and at >= extent.stop:
            return
        place = f"byte {at}" if extent.start else f"line {number}"
        if len(raw) == MAX_LINE_BYTES:
            raise UserError(
                f"{file.address}:{place}: longer than {MAX_LINE_BYTES:,} bytes; split the document"
            )
        yield place, raw
        at += len(raw)


def _text_of_line(raw: bytes, text_column: str) -> str | None:
    """The text of an ordinary JSON line, in a third of `json`'s time; None for `json` to take or explain.

    orjson knows neither NaN nor half a surrogate pair.
    """
    try:
        text = orjson.loads(raw)[text_column]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        return None
    return text if isinstance(text, str) else None


def _open_lines(file: InputFile) -> BinaryIO:
    """A byte stream of lines. pyarrow reads zstd, for it alone reports a stream that ends too early."""
    opened = file.open()
    if file.name.lower().endswith(".gz"):
        return gzip.open(opened, "rb")
    if file.name.lower().endswith(".zst"):
        pyarrow = require("pyarrow", f"reading {file.address}")
        return io.BufferedReader(pyarrow.CompressedInputStream(opened, "zstd"), 1 << 20)
    return opened


def _whole_lines(lines: BinaryIO, file: InputFile) -> Iterator[bytes]:
    try:
        while raw := lines.readline(MAX_LINE_BYTES):
            yield raw
    except (EOFError, OSError, zlib.error) as error:
        raise damaged(file.address, error) from error


def _json_document(raw: bytes, where: str, text_column: str) -> Document:
    line = decode(raw, where).text
    if line is None:
        return Document(None, where)
    row = _parse(line.removeprefix("\ufeff"), where)
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object with the key {text_column!r}, found {line[:40]!r}")
    return Document(text_of(row, text_column, where), where)


def _parse(line: str, where: str):
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.colno}"
    except (RecursionError, ValueError) as error:  # brackets a thousand deep, a number of thousands of digits
        reason = str(error).partition(";")[0]
    raise UserError(f"{where}: not valid JSON ({reason}); mend or remove the line")
