"""List, cut and read files of text, here or at any fsspec address (`s3://`, `hf://`, `gs://`, `https://`).

The suffix decides how a file is read: .txt, .jsonl (.gz, .zst), .parquet, .warc(.gz), .wet, plain sources. If the
recipe says so, each line, or each record of FASTA, is a document.
"""

import glob
import gzip
import io
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

import orjson

from pretraining.errors import UserError, nearest, reason_of, require
from pretraining.outside.addresses import is_remote
from pretraining.outside.files import UNREADABLE, regular
from pretraining.recipe.data import Condition

WHOLE_FILE_SUFFIXES = (".txt", ".py", ".rst", ".md", ".html")
"""Each file is one document. In a user's folder only .txt of these is searched for, in the standard library all."""

WARC_SUFFIXES = (".warc", ".warc.gz", ".warc.wet.gz", ".wet")
EXPANSION = 3
"""Bytes of text for each byte of a compressed file: about that of English under gzip, zstd and snappy."""

ROW_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
READABLE_SUFFIXES = (".txt", *ROW_SUFFIXES, *WARC_SUFFIXES)

HOW_TO_READ = (
    'rename lines of JSON to .jsonl, .jsonl.gz or .jsonl.zst; "format": "lines" reads .txt.gz and .txt.zst; '
)
HOW_TO_READ += "convert others to .jsonl or .parquet"

_PACKED = ("", ".gz", ".zst")
_PACKINGS = (".gz", ".zst", ".bz2", ".xz", ".zip", ".lz4", ".snappy")
"""Of which the suffix before them says more."""
_MOST_KINDS = 5
"""Kinds of files that a note names."""
SUFFIXES_OF = {
    None: READABLE_SUFFIXES,
    "lines": tuple(f".txt{packed}" for packed in _PACKED),
    "fasta": tuple(f".{name}{packed}" for name in ("fasta", "fa", "faa", "fna", "ffn") for packed in _PACKED),
}
"""By the `format` of a source."""

VERSION_KEYS = (
    "ETag",
    "etag",
    "md5Hash",
    "crc32c",
    "mtime",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "created",
)
"""The names that stores give to a value that changes with a file's content, best first."""

BUFFER_BYTES = 1 << 20
"""Bytes read from a file at once. A line of JSON holds a whole document, often more than Python's default of 8 KB."""

MAX_LINE_BYTES = 1 << 30
"""Bytes. A longer line would fill the memory, and no document of a corpus is that long."""

_PARQUET_ROWS = 256  # decoded at once


class InputFile(NamedTuple):
    """One file of a source."""

    address: str
    """A local path, or an fsspec address."""
    name: str
    """Its path below the source's root, with `/`."""
    num_bytes: int
    version: str
    """Changes when the content does: modification time in ns, or the store's own tag."""

    def open(self) -> BinaryIO:
        """Open the file for reading bytes; a remote one is fetched as it is read."""
        if not is_remote(self.address):
            return open(self.address, "rb", buffering=BUFFER_BYTES, opener=regular)
        fsspec = require("fsspec", f"reading {self.address}")
        # Buffered: the files of fsspec read no line of limited length.
        return io.BufferedReader(fsspec.open(self.address, "rb").open(), BUFFER_BYTES)


class Document(NamedTuple):
    """One text and the place it came from, for error messages. `text` is None if the bytes are not UTF-8."""

    text: str | None
    where: str
    is_wanted: bool = True
    """Whether the conditions of its source hold."""


class Extent(NamedTuple):
    """A part of a source: of its file number `file`, the bytes, row groups or rows from `start` to `stop`."""

    file: int
    start: int = 0
    stop: int | None = None
    """None: to the end."""


@dataclass(frozen=True)
class TextColumn:
    """Where the texts of a source are: in a column, or key, of its rows; or how else its files are read."""

    name: str = "text"
    key: str = "data.sources"
    """The recipe's key that names it, for error messages."""
    format: str | None = None
    """`format` of the source."""
    conditions: tuple[dict, ...] = ()
    """`keep` of the source."""

    @cached_property
    def _conditions(self) -> list[Condition]:
        return [Condition.of(each) for each in self.conditions]

    @property
    def identity(self) -> list:
        """What texts depend on beside the files; empty for plain ones, so that what is finished of them stays."""
        further = [self.format, self.conditions] if self.format or self.conditions else []
        return further if self.name == TextColumn.name else [self.name, *further]

    def fields(self, columns: list[str], where: str) -> list[str]:
        """List the columns to read of a table; UserError if one is missing."""
        self.check(columns, where)
        names = [each.field for each in self._conditions]
        tops = [name if name in columns else name.partition(".")[0] for name in names]
        for name in tops:
            if name not in columns:
                remedy = f"correct {self.key.rpartition('.')[0]}.keep"
                raise UserError(f"{where}: no column {name!r}{nearest(name, map(str, columns))}; {remedy}")
        return list(dict.fromkeys([self.name, *tops]))

    def document(self, row: dict, where: str) -> Document:
        """Make the document of one row; UserError if it is wanted, and its column is missing or is not a text."""
        if not all(each.holds(row) for each in self._conditions):
            return Document("", where, False)
        if self.name not in row:
            self.check(list(row), where)
        text = row[self.name]
        if not isinstance(text, str):
            found = "null" if text is None else type(text).__name__
            raise UserError(f"{where}: {self.name!r} is {found}, expected a text; mend or remove the row")
        return Document(text, where)

    def check(self, columns: list[str], where: str) -> None:
        """Raise UserError, which lists `columns`, unless the column is one of them."""
        if self.name not in columns:
            listed = ", ".join(map(str, columns)) or "none"
            what = f"no column {self.name!r}{nearest(self.name, map(str, columns))} (columns: {listed})"
            raise UserError(f"{where}: {what}; set {self.key}")


def list_files(
    spec: str, key: str = "data.sources", form: str | None = None, unread: Counter[str] | None = None
) -> list[InputFile]:
    """List the files that a path, folder or glob names, by name; UserError if there is none to read.

    In a folder only readable suffixes count, and others are counted in `unread`; a file or glob with others is refused.
    form: `format` of the source.
    """
    unread = Counter() if unread is None else unread
    if not spec.strip():
        raise UserError(f"{key}: path is empty; name a file, a folder or a glob")
    suffixes = SUFFIXES_OF[form]
    list_them = _remote_files if is_remote(spec) else _local_files
    found = list_them(spec, key, suffixes, unread)
    if not found:
        looked_in = "" if is_remote(spec) else f" (looked in {Path.cwd()})"
        there = f"; there are {counted(unread)}" if unread else ""
        raise UserError(f"{key}: {spec}: no readable file there ({', '.join(suffixes)}){looked_in}{there}")
    # By parts, not by the whole string: the order of folders, the same on every machine.
    return sorted(found, key=lambda file: PurePosixPath(file.name).parts)


def local_file(path: Path, root: Path) -> InputFile:
    status = path.stat()
    return InputFile(str(path), path.relative_to(root).as_posix(), status.st_size, str(status.st_mtime_ns))


def files_below(folder: Path, key: str, suffixes: tuple[str, ...], unread: Counter[str]) -> list[Path]:
    """List the files with these suffixes in a folder and all folders in it; UserError if one of these cannot be read.

    The others are counted in `unread`; what is hidden (`is_hidden`) is not there. A link to a folder is entered if it
    leads to one that is neither around `folder`, nor in it, nor entered already: no file is read twice.
    """

    def refuse(error: OSError) -> None:
        what = f"{error.filename} cannot be read ({error.strerror})"
        raise UserError(f"{key}: {what}; make it readable, or move it elsewhere") from error

    found: list[Path] = []
    entered, waiting = {_identity_of(each) for each in folder.resolve().parents}, [folder]
    while waiting:
        # What has a place of its own comes first, so that links change no name.
        begin = min(waiting)
        waiting.remove(begin)
        for root, folders, names in os.walk(begin, onerror=refuse):
            if (identity := _identity_of(Path(root))) in entered:
                folders.clear()
                continue
            entered.add(identity)
            # in place: `os.walk` enters only the folders that are left in this list
            folders[:] = [name for name in folders if not is_hidden(name)]
            waiting += [path for name in folders if (path := Path(root, name)).is_symlink()]
            for path in (Path(root, name) for name in names if not is_hidden(name)):
                if not path.name.lower().endswith(suffixes):
                    _count_unread(path.name, unread)
                elif path.is_file():
                    found.append(path)
                elif path.is_symlink():
                    unread["broken links"] += 1
    return found


def is_hidden(*parts: str) -> bool:
    """Return whether names below a source's folder are no data: of .git, of a notebook's copies, macOS's `._name`."""
    return any(part.startswith(".") for part in parts)


def _identity_of(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _count_unread(name: str, unread: Counter[str]) -> None:
    endings = PurePosixPath(name.lower()).suffixes[-2:]
    is_packed = name.lower().endswith(_PACKINGS)
    unread["".join(endings if is_packed else endings[-1:]) or "no suffix"] += 1


def unread_note(key: str, unread: dict[str, int], num_read: int, remedy: str) -> str:
    """Say in one line which files of a folder are not read, and what would read them."""
    count = sum(unread.values())
    verb = "is" if count == 1 else "are"
    return (
        f"note: {key}: {count:,} of {num_read + count:,} files {verb} not read: {counted(unread)}; {remedy}"
    )


def counted(unread: dict[str, int]) -> str:
    """List how many files there are of each kind, the most frequent first."""
    kinds = [
        f"{kind} ({count:,})" for kind, count in sorted(unread.items(), key=lambda each: (-each[1], each[0]))
    ]
    return ", ".join([*kinds[:_MOST_KINDS], *(["..."] if len(kinds) > _MOST_KINDS else [])])


def _local_files(spec: str, key: str, suffixes: tuple[str, ...], unread: Counter[str]) -> list[InputFile]:
    path = Path(spec).expanduser()
    if path.is_dir():
        return [local_file(each, path) for each in files_below(path, key, suffixes, unread)]
    root, matches = path.parent, [path]
    if not path.is_file():
        # After files and folders, whose own names may hold a bracket or a star.
        if not glob.has_magic(spec):
            raise UserError(f"{key}: {spec}: no such file or folder (looked in {Path.cwd()})")
        fixed = next(number for number, part in enumerate(path.parts) if glob.has_magic(part))
        root = Path(*path.parts[:fixed])
        wildcards = path.parts[fixed:]
        found = root.glob(str(Path(*wildcards)))
        # as in a shell: hidden ones only where the pattern names them
        shown = (
            each for each in found if is_hidden(*wildcards) or not is_hidden(*each.relative_to(root).parts)
        )
        matches = [each for each in shown if each.is_file()]
    _refuse_unreadable(map(str, matches), key, suffixes)
    return [local_file(each, root) for each in matches]


def _refuse_unreadable(paths: Iterable[str], key: str, suffixes: tuple[str, ...]) -> None:
    for path in paths:
        if not path.lower().endswith(suffixes):
            readable = f"readable are {', '.join(suffixes)}, and folders or globs of them"
            raise UserError(f"{key}: {path}: unknown suffix; {readable}")


def _remote_files(spec: str, key: str, suffixes: tuple[str, ...], unread: Counter[str]) -> list[InputFile]:
    fsspec = require("fsspec", f"reading {spec}")
    try:
        system, path = fsspec.core.url_to_fs(spec)
        # not PurePosixPath: the path may be a whole URL
        root, parts = path.rstrip("/"), path.split("/")
        if glob.has_magic(path):
            # The folder above the first part that holds a wildcard.
            fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
            root = "/".join(parts[:fixed])
            found = system.glob(path, detail=True)
            found = found if is_hidden(*parts[fixed:]) else _shown(found, root)
            # What a web server lists are names alone: it is asked for sizes and versions one by one.
            entries = {
                name: info if info.get("size") is not None else system.info(name)
                for name, info in found.items()
                if info["type"] == "file"
            }
        # Not `exists`, which would take every fault of the network for an absence. Not `isdir`: to answer, fsspec's
        # HTTP would fetch a whole file.
        elif (info := system.info(path))["type"] == "file":
            root, entries = "/".join(parts[:-1]), {path: info}
        else:
            found = _shown(system.find(path, detail=True), root)
            entries = {name: info for name, info in found.items() if name.lower().endswith(suffixes)}
            for name in found.keys() - entries.keys():
                _count_unread(name, unread)
    except FileNotFoundError as error:
        raise UserError(f"{key}: {spec}: no such file or folder can be reached there") from error
    except ImportError as error:  # fsspec names the package that this kind of address needs
        raise UserError(f"{key}: {spec}: {error}") from error
    except Exception as error:  # every store has its own classes
        reason = reason_of(error)
        what = f"cannot be reached ({type(error).__name__}: {reason})"
        remedy = "check the address, the credentials and the network"
        raise UserError(f"{key}: {spec}: {what}; {remedy}") from error
    _refuse_unreadable(entries, key, suffixes)
    files = []
    for name, info in entries.items():
        version = next((str(info[key]) for key in VERSION_KEYS if info.get(key)), "")
        below, size = name.removeprefix(root).lstrip("/"), int(info.get("size") or 0)
        files.append(InputFile(system.unstrip_protocol(name), below, size, version))
    return files


def _shown(found: dict[str, dict], root: str) -> dict[str, dict]:
    """Leave out of files of a store, by their paths, what is hidden below `root`."""
    return {name: info for name, info in found.items() if not is_hidden(*name.removeprefix(root).split("/"))}


def cut_file(
    file: InputFile, number: int, piece_bytes: int, form: str | None = None
) -> list[tuple[Extent, int]]:
    """Cut the file into extents of about `piece_bytes` of text, each with its size in bytes of text (estimated).

    Plain .jsonl is cut at any byte (a line belongs to the extent in which it begins), and so is what has a `form`;
    .parquet between row groups.
    """
    name, size = file.name.lower(), file.num_bytes
    if (name.endswith(".jsonl") or (form and not name.endswith((".gz", ".zst")))) and size > piece_bytes:
        # At any byte, without a look for the end of a line: cutting reads nothing.
        ends = [(at, min(at + piece_bytes, size)) for at in range(0, size, piece_bytes)]
        return [(Extent(number, start, stop), stop - start) for start, stop in ends]
    text_bytes = size * (EXPANSION if name.endswith((".gz", ".zst", ".parquet")) else 1)
    if not name.endswith(".parquet") or text_bytes <= piece_bytes:
        return [(Extent(number), text_bytes)]
    # The sizes of the row groups are in the file's footer.
    with _open_parquet(file) as parquet:
        rows = parquet.metadata
        sizes = [rows.row_group(group).total_byte_size for group in range(rows.num_row_groups)]
    extents, start, size = [], 0, 0
    for group, group_bytes in enumerate(sizes):
        size += group_bytes
        if size >= piece_bytes or group == len(sizes) - 1:
            extents.append((Extent(number, start, group + 1), size))
            start, size = group + 1, 0
    # A file without row groups is still read, so that a missing column is reported.
    return extents or [(Extent(number), 0)]


def read_documents(
    file: InputFile, column: TextColumn | None = None, extent: Extent | None = None
) -> Iterator[Document]:
    """Stream the documents of `file` (of an extent of it), in order, holding a few of them at a time.

    Raises UserError for a damaged file, an invalid JSON line, a missing or null text column.
    """
    column, extent, name = column or TextColumn(), extent or Extent(0), file.name.lower()
    try:
        if column.format == "lines":
            for _, raw, where in _lines(file, extent):
                yield _decode(raw.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n"), where)
        elif column.format == "fasta":
            yield from _read_fasta(file, extent)
        elif name.endswith(".parquet"):
            yield from _read_parquet(file, column, extent)
        elif name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
            yield from _read_json_lines(file, column, extent)
        elif name.endswith(WARC_SUFFIXES):
            yield from _read_warc(file)
        else:
            with file.open() as opened:
                yield _decode(opened.read().removeprefix(b"\xef\xbb\xbf"), file.address)
    except PermissionError as error:
        remedy = "make it readable or leave it out"
        raise UserError(f"{file.address}: no permission to read it; {remedy}") from error
    except FileNotFoundError as error:
        raise UserError(f"{file.address}: it was there when the preparation began and is gone now") from error
    except ValueError as error:  # of fsspec: a web server that only sends whole files
        if not is_remote(file.address):
            raise
        raise UserError(f"{file.address}: cannot be read ({error}); copy the file to this machine") from error


def _decode(raw: bytes, where: str) -> Document:
    """Decode UTF-8; if that fails, return a Document without text whose `where` names the line of the bad byte."""
    try:
        return Document(raw.decode("utf-8"), where)
    except UnicodeDecodeError as error:
        line = 1 + raw.count(b"\n", 0, error.start)
        return Document(None, f"{where}:line {line}")


def _damaged(address: str, error: Exception | str) -> UserError:
    reason = reason_of(error).rstrip(".")
    return UserError(f"{address}: the file is truncated or damaged ({reason}); fetch it again")


def _lines(file: InputFile, extent: Extent, goes_on: bool = False) -> Iterator[tuple[int, bytes, str]]:
    """Read (its first byte, line, place) of the lines that begin in the extent; goes_on: and of those behind it."""
    at = 0
    with closing(_open_lines(file)) as lines:
        if extent.start:
            # One byte before: if it ends a line, the first line of this extent begins right at its start.
            # Else what is read here is the rest of a line that began in the extent before.
            lines.seek(extent.start - 1)
            at = extent.start - 1 + len(lines.readline())
        for number in itertools.count(1):
            try:
                raw = lines.readline(MAX_LINE_BYTES)
            except UNREADABLE as error:
                raise _damaged(file.address, error) from error
            if not raw or (extent.stop is not None and at >= extent.stop and not goes_on):
                return
            # Inside a file nobody has counted the lines before.
            where = f"{file.address}:{f'byte {at}' if extent.start else f'line {number}'}"
            if len(raw) == MAX_LINE_BYTES:
                raise UserError(f"{where}: longer than {MAX_LINE_BYTES:,} bytes; split the document")
            yield at, raw, where
            at += len(raw)


def _read_json_lines(file: InputFile, column: TextColumn, extent: Extent) -> Iterator[Document]:
    for _, raw, where in _lines(file, extent):
        # A third of `json`'s time. But orjson knows neither NaN nor half of a surrogate pair.
        try:
            row = orjson.loads(raw)
            text = row[column.name]
        except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
            text = None
        if isinstance(text, str):
            yield column.document(row, where) if column.conditions else Document(text, where)
        elif not raw.isspace():
            if (line := _decode(raw, where).text) is None:
                yield Document(None, where)
                continue
            try:
                row = json.loads(line.removeprefix("\ufeff"))
            # also brackets a thousand deep, and a number of thousands of digits
            except (RecursionError, ValueError) as error:
                reason = str(error).partition(";")[0]
                if isinstance(error, json.JSONDecodeError):
                    reason = f"{error.msg} at column {error.colno}"
                raise UserError(f"{where}: not valid JSON ({reason}); mend or remove the line") from error
            if not isinstance(row, dict):
                what = f"expected a JSON object with the key {column.name!r}, found {line[:40]!r}"
                raise UserError(f"{where}: {what}")
            yield column.document(row, where)


def _read_fasta(file: InputFile, extent: Extent) -> Iterator[Document]:
    """Read the sequence of each record that begins in the extent: its lines, joined, without the one with its name."""
    place, parts = None, []
    for at, raw, where in _lines(file, extent, goes_on=True):
        if raw.startswith(b">"):
            if place is not None:
                yield _decode(b"".join(parts), place)
            place, parts = where, []
            if extent.stop is not None and at >= extent.stop:
                return
        elif place is not None:
            parts.append(raw.strip())
        elif not extent.start and not raw.isspace():
            raise UserError(f"{where}: not FASTA: the first line of a record begins with '>'")
    if place is not None:
        yield _decode(b"".join(parts), place)


def _open_lines(file: InputFile) -> BinaryIO:
    # Both readers would find no line in an empty file. Of a file whose length a web server does not say it is 0 here.
    if file.name.lower().endswith((".gz", ".zst")) and not (file.num_bytes or is_remote(file.address)):
        raise _damaged(file.address, "0 bytes")
    opened = file.open()
    if file.name.lower().endswith(".gz"):
        return gzip.open(opened, "rb")
    if file.name.lower().endswith(".zst"):
        # pyarrow: only this reader of zstd reports a stream that ends too early.
        pyarrow = require("pyarrow", f"reading {file.address}")
        return io.BufferedReader(pyarrow.CompressedInputStream(opened, "zstd"), 1 << 20)
    return opened


def _read_parquet(file: InputFile, column: TextColumn, extent: Extent) -> Iterator[Document]:
    with _open_parquet(file) as parquet:
        import pyarrow as pa

        fields = column.fields(parquet.schema_arrow.names, file.address)
        counts = [parquet.metadata.row_group(n).num_rows for n in range(parquet.metadata.num_row_groups)]
        groups, row = [*range(len(counts))[extent.start : extent.stop]], sum(counts[: extent.start])
        chosen = {"row_groups": groups, "columns": fields, "use_threads": False}
        try:
            for batch in parquet.iter_batches(_PARQUET_ROWS, **chosen):
                for values in batch.to_pylist():
                    row += 1
                    yield column.document(values, f"{file.address}:row {row}")
        except (pa.ArrowInvalid, OSError) as error:
            raise _damaged(file.address, error) from error


def _open_parquet(file: InputFile):
    require("pyarrow", f"reading {file.address}")
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        return parquet.ParquetFile(file.open() if is_remote(file.address) else file.address)
    except (pa.ArrowInvalid, OSError) as error:
        raise _damaged(file.address, error) from error


def _read_warc(file: InputFile) -> Iterator[Document]:
    """Read plain-text records (WET) as they are, and from web pages (WARC) the main text that trafilatura finds."""
    require("warcio", f"reading {file.address}")
    with closing(_open_lines(file)) as archive:
        for number in itertools.count(1):
            place = f"{file.address}:record {number}"
            try:
                record = _next_record(archive, place)
                if record is None:
                    return
                kind, where = record.rec_type, f"{file.address}:{record.rec_headers['WARC-Target-URI']}"
                document = None
                if kind == "conversion":
                    document = _decode(record.content_stream().read(), where)
                elif kind == "response":
                    headers = record.http_headers
                    mime = headers.get_header("Content-Type", "") if headers else ""
                    if mime.startswith(("text/html", "application/xhtml")):
                        trafilatura = require("trafilatura", f"the text of web pages in {file.address}")
                        page = record.content_stream().read()
                        text = trafilatura.extract(page, favor_precision=True, include_comments=False)
                        document = Document(text or "", where)
                # What is left of the record must end where its Content-Length says.
                while record.raw_stream.read(BUFFER_BYTES):
                    pass
                if record.raw_stream.limit:
                    missing = f"it ends {record.raw_stream.limit:,} bytes before its Content-Length says"
                    raise _damaged(place, missing)
                if archive.readline(BUFFER_BYTES).strip():
                    raise _damaged(place, "text follows its last byte: its Content-Length is wrong")
            except UNREADABLE as error:
                raise _damaged(place, error) from error
            if document is not None:
                yield document


def _next_record(archive: BinaryIO, place: str):
    """Read the head of the next record, an `ArcWarcRecord`; None at the end of the file."""
    # Not warcio's ArchiveIterator: to it a file that is cut ends there, and after a wrong length it goes on.
    from warcio.recordloader import ArcWarcRecordLoader

    loader = ArcWarcRecordLoader(verify_http=False)
    first = b"\r\n"
    while first and not first.strip():  # blank lines are between records
        first = archive.readline(MAX_LINE_BYTES)
    if not first:
        return None
    if not first.decode("latin-1").upper().startswith(tuple(loader.WARC_TYPES)):
        raise _damaged(place, "no WARC record begins there, or the Content-Length of the one before is wrong")
    record = loader.parse_record_stream(archive, first, "warc", no_record_parse=True)
    length = record.rec_headers["Content-Length"] or ""
    if not length.isdecimal():
        raise _damaged(place, "its head has no Content-Length, or ends early")
    if int(length) >= MAX_LINE_BYTES and record.rec_type in ("conversion", "response"):
        what = f"longer than {MAX_LINE_BYTES:,} bytes, if its Content-Length is right"
        raise UserError(f"{place}: {what}; leave it out")
    if record.rec_type == "response":
        address = record.rec_headers["WARC-Target-URI"] or ""
        record.http_headers = loader.load_http_headers("response", address, record.raw_stream, record.length)
    return record
