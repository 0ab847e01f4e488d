"""Open the recipe's sources, and read their texts in one order, cut into pieces; a text's hash decides its split."""

import os
import sysconfig
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import xxhash

from pretraining.data.checksums import checksum_of_file, digest_of
from pretraining.data.manifest import FORMAT
from pretraining.data.text_files import (
    ROW_SUFFIXES,
    WHOLE_FILE_SUFFIXES,
    Document,
    Extent,
    InputFile,
    TextColumn,
    cut_file,
    is_hidden,
    list_files,
    local_file,
    read_documents,
)
from pretraining.errors import UserError, reason_of, require
from pretraining.outside.addresses import is_remote
from pretraining.outside.files import UNREADABLE
from pretraining.recipe.data import Data, Source, TextOrigin, ValidationSource

# Folders of packages installed beside the library, of tests and bytecode: none is text of the library.
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

SPLIT_SEED = 0x73706C6974
BATCH_BYTES = 1 << 20
"""Bytes of text given to the tokenizer at once: enough to keep every core busy, few enough to keep some batches
in memory."""

PIECE_BYTES = 16 << 20
"""Bytes of text in a piece, the unit of filtering: minutes for the slowest filter, seconds for the others."""

TASK_PIECES = 16
"""Pieces that are tokenized together: 256 MB of text, about one shard of 64 M tokens."""

CLEANING_KEYS = ("filters", "dedup", "decontaminate")
"""Keys of the data section for what is done between reading a text and encoding it."""


@dataclass(frozen=True)
class FileSource:
    """Text files of this machine or of a store, sorted by their path below the source's root."""

    files: list[InputFile]
    column: TextColumn = field(default_factory=TextColumn)
    unread: dict[str, int] = field(default_factory=dict)
    """Files of the same folder that are not read, by kind."""
    listed_again: Callable[[], list[InputFile]] | None = None
    """Lists the files of a store as they are now."""
    large_pieces: ClassVar[bool] = False

    def documents(self, extents: Iterable[Extent] | None = None) -> Iterator[Document]:
        """Read every document of the extents (of every file), one file open at a time."""
        for extent in map(Extent, range(len(self.files))) if extents is None else extents:
            yield from read_documents(self.files[extent.file], self.column, extent)

    def cut(self, piece_bytes: int) -> list[list[Extent]]:
        """Cut the source into pieces of about `piece_bytes` of text; only the files decide where."""
        pieces, size = [[]], 0
        for number, file in enumerate(self.files):
            for extent, num_bytes in cut_file(file, number, piece_bytes, self.column.format):
                if size + num_bytes > piece_bytes and pieces[-1]:
                    pieces.append([])
                    size = 0
                pieces[-1].append(extent)
                size += num_bytes
        return pieces

    def digest_of(self, extents: Iterable[Extent]) -> str:
        read = [(*self._identity(self.files[extent.file]), *extent[1:]) for extent in extents]
        return digest_of(read, *self.column.identity)

    def check_unchanged(self) -> None:
        """Raise UserError if a file has changed since the files were listed."""
        if self.listed_again is not None:
            now = {file.address: file for file in self.listed_again()}
            if changed := [file.address for file in self.files if now.get(file.address) != file]:
                raise _changed(changed[0])
            return
        for file in self.files:
            path = Path(file.address)
            if not path.is_file() or local_file(path, path.parent)._replace(name=file.name) != file:
                raise _changed(file.address)

    @staticmethod
    def _identity(file: InputFile) -> tuple:
        # Not the address: a corpus that moved to another folder is the same.
        return file.name, file.num_bytes, file.version

    def content(self) -> str:
        """Hash relative path and bytes of every file of this machine; the version of one in a store."""

        def of(file: InputFile) -> tuple[str, str]:
            is_away = is_remote(file.address)
            return file.name, file.version if is_away else checksum_of_file(Path(file.address))

        # Hashing releases Python's lock.
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            return digest_of([*threads.map(of, self.files)])

    def fingerprint(self) -> dict:
        """Hash relative path, size in bytes and version of every file."""
        # No file is read: a corpus may hold terabytes.
        digest = digest_of([self._identity(file) for file in self.files])
        num_bytes = sum(file.num_bytes for file in self.files)
        return {"files": len(self.files), "bytes": num_bytes, "fingerprint": digest}


@dataclass(frozen=True)
class HubSource:
    """A Hugging Face dataset, streamed through `datasets`: a hub name, or a folder `load_dataset` opens."""

    dataset: str
    config: str | None
    split: str
    revision: str | None
    column: TextColumn = field(default_factory=TextColumn)
    identity: dict = field(default_factory=dict)
    """`identity_of_dataset` as it was found at the start, by which all tasks go."""
    large_pieces: ClassVar[bool] = True
    """A file of a hub dataset holds hundreds of megabytes, so each file is a piece."""

    def documents(self, extents: Iterable[Extent] | None = None) -> Iterator[Document]:
        """Read every row of the extents (of the split) in the hub's order; nothing is kept on disk."""
        rows = self._stream()
        # Some streams do not know their columns: then each row is checked.
        if rows.column_names:
            self.column.fields(rows.column_names, self.dataset)
        for extent in map(Extent, range(rows.num_shards)) if extents is None else extents:
            place = f"{self.dataset}:part {extent.file}" if rows.num_shards > 1 else self.dataset
            try:
                for number, row in enumerate(rows.shard(rows.num_shards, extent.file), start=1):
                    yield self.column.document(row, f"{place}:row {number}")
            except (*UNREADABLE, ValueError, RuntimeError) as error:
                raise self._unreachable(error) from error

    def cut(self, piece_bytes: int) -> list[list[Extent]]:
        return [[Extent(number)] for number in range(self._stream().num_shards)]

    def digest_of(self, extents: Iterable[Extent]) -> str:
        return digest_of([self.fingerprint(), [list(extent) for extent in extents]], *self.column.identity)

    def check_unchanged(self) -> None:
        """Raise UserError if a folder has changed since it was opened; the hub keeps its commits."""
        now = (self.dataset, self.config, self.split, self.revision)
        if "commit" not in self.identity and identity_of_dataset(*now) != self.identity:
            raise _changed(self.dataset)

    def _stream(self):
        datasets = require("datasets", f"the dataset {self.dataset!r}")
        # Not by the name of a branch, which may stand for other text before the last task has read it.
        named = {"split": self.split, "revision": self.identity.get("commit") or self.revision}
        try:
            return datasets.load_dataset(self.dataset, self.config, **named, streaming=True)
        except (*UNREADABLE, ValueError, RuntimeError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> UserError:
        reason = reason_of(error)
        what = f"cannot be read ({type(error).__name__}: {reason})"
        key = self.column.key.rpartition(".")[0]
        remedy = f"check dataset, config, split and revision in {key}, and the network"
        return UserError(f"dataset {self.dataset!r}: {what}; {remedy}")

    def content(self) -> str:
        return digest_of(self.identity)

    def fingerprint(self) -> dict:
        return dict(self.identity)  # a copy: the caller may fill in a missing commit


def _changed(place: str) -> UserError:
    what = "changed or removed while it was being prepared"
    return UserError(f"{place}: {what}; run the same command again once nobody writes there")


def identity_of_dataset(dataset: str, config: str | None, split: str, revision: str | None) -> dict:
    """Return name, config, split and the commit of the revision (null: the hub is silent), or a folder's files."""
    known, folder = {"dataset": dataset, "config": config, "split": split}, Path(dataset)
    if not folder.exists():
        # 40 hex digits are a commit. Else the hub says which one the revision stands for, so that a dataset that has
        # changed is prepared again.
        if not revision or len(revision) != 40:
            hub = require("huggingface_hub", f"the dataset {dataset!r}")
            # every way of being offline has its own class; documents() reports a real fault
            with suppress(Exception):
                revision = hub.HfApi().dataset_info(dataset, revision=revision, timeout=10).sha
        return {**known, "commit": revision}
    inside = [each.relative_to(folder) for each in sorted(folder.rglob("*")) if each.is_file()]
    # what is hidden (.git, caches) changes without the data
    shown = [folder / name for name in inside if not is_hidden(*name.parts)]
    return {**known, **FileSource([local_file(path, folder) for path in shown]).fingerprint()}


TextSource = FileSource | HubSource
"""Both stream documents, can be cut into extents, and know what their text depends on."""


def open_source(spec: TextOrigin, key: str = "data.sources.0") -> TextSource:
    """Open the source that the entry at `key` of the recipe describes; UserError if there is nothing to read."""
    conditions = tuple(each.to_dict() for each in spec.keep or ())
    column = TextColumn(spec.text_column, f"{key}.text_column", spec.format, conditions)
    if isinstance(spec, Source) and spec.builtin is not None:
        root, paths = Path(sysconfig.get_path("stdlib")), []
        for folder, subfolders, names in os.walk(root):
            # In place: `os.walk` enters only the subfolders that are left in this list.
            subfolders[:] = [name for name in subfolders if name not in STDLIB_LEFT_OUT]
            paths += [Path(folder, name) for name in names if name.endswith(WHOLE_FILE_SUFFIXES)]
        return FileSource([local_file(path, root) for path in sorted(paths)])
    if spec.dataset is not None:
        named = (spec.dataset, spec.config, spec.split, spec.revision)
        return HubSource(*named, column, identity_of_dataset(*named))
    # the recipe names one of the three
    unread: Counter[str] = Counter()
    files = list_files(str(spec.path), f"{key}.path", spec.format, unread)
    for file in files if conditions else ():
        if not file.name.lower().endswith(ROW_SUFFIXES):
            what = f"asks for fields, and {file.address} has none; leave one of them out"
            raise UserError(f"{key}.keep: {what}")
    again = (
        partial(list_files, str(spec.path), f"{key}.path", spec.format) if is_remote(str(spec.path)) else None
    )
    return FileSource(files, column, dict(unread), again)


def open_sources(data: Data) -> list[TextSource]:
    """Open the sources of training, then those of validation."""
    return [open_source(spec, key) for key, spec in data.text_origins]


def source_from_json(values: dict) -> TextSource:
    """Make the source whose fields JSON gives back."""
    column = TextColumn(**values["column"])
    if "files" in values:
        return FileSource([InputFile(*file) for file in values["files"]], column)
    return HubSource(**{**values, "column": column})


@dataclass
class Batch:
    """Consecutive texts of one source."""

    source: int
    texts: list[str] = field(default_factory=list)
    wheres: list[str] = field(default_factory=list)
    """The place each text came from, for error messages."""
    num_bytes: list[int] = field(default_factory=list)
    draws: list[float] = field(default_factory=list)
    """A number in [0, 1) for each text, from its hash: below validation_share means validation."""


def draw_of(encoded: bytes) -> float:
    """Draw a number in [0, 1) from the text alone, so that equal texts are never in both splits."""
    # 53 bits are what a double holds exactly.
    return (xxhash.xxh3_64_intdigest(encoded, SPLIT_SEED) >> 11) * 2.0**-53


def read_batches(
    source: int, documents: Iterable[Document], skipped: dict, skip_undecodable: bool
) -> Iterator[Batch]:
    """Read every text that is not empty, in batches of about `BATCH_BYTES`; `skipped` counts those that are left out.

    Raises UserError if a text is not UTF-8, unless `skip_undecodable`.
    """
    skipped.update(undecodable=0, empty=0)
    batch, size = Batch(source), 0
    for text, where, is_wanted in documents:
        if not is_wanted:
            # Counted only if there are such: most sources have no conditions.
            skipped["unwanted"] = skipped.get("unwanted", 0) + 1
            continue
        try:
            # None: the bytes of the file were not UTF-8.
            encoded = None if text is None else text.encode("utf-8")
        except UnicodeEncodeError:  # JSON spelled half of a surrogate pair
            encoded = None
        if encoded is None and not skip_undecodable:
            remedy = "set data.skip_undecodable to true to leave such documents out and have them counted"
            raise UserError(f"{where}: not UTF-8 text; convert the file, or {remedy}")
        if not encoded:
            skipped["undecodable" if encoded is None else "empty"] += 1
            continue
        batch.texts.append(text)
        batch.wheres.append(where)
        batch.num_bytes.append(len(encoded))
        batch.draws.append(draw_of(encoded))
        size += len(encoded)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = Batch(source), 0
    if batch.texts:
        yield batch


def summed_skips(skips: Iterable[dict[str, int]]) -> dict[str, int]:
    total = Counter({"undecodable": 0, "empty": 0})
    for skipped in skips:
        total.update(skipped)
    return dict(total)


class TextPiece(NamedTuple):
    """Some 16 MB of text of one source."""

    source: int
    extents: list[Extent]


@dataclass(frozen=True)
class Corpus:
    """The texts of all sources. The input alone decides where pieces and tasks are cut, not the number of workers."""

    name: str
    places: list[str]
    """What the recipe calls each source, for error messages."""
    sources: list[TextSource]
    skip_undecodable: bool
    pieces: list[TextPiece]
    """In the order of the sources and of their files."""
    tasks: list[range]
    """The pieces that are tokenized together: neighbours of one source."""

    @classmethod
    def of(cls, data: Data, sources: list[TextSource], specs: Sequence[TextOrigin] | None = None) -> "Corpus":
        """Cut the opened sources `specs` of a data section, which may read their files' footers.

        specs: None for its training sources. One of validation that is capped is a single task, read up to its cap.
        """
        specs = data.sources if specs is None else specs
        places = [spec.path or spec.dataset or spec.called for spec in specs]
        pieces, tasks = [], []
        for number, (source, spec) in enumerate(zip(sources, specs, strict=True)):
            start, own = len(pieces), [TextPiece(number, extents) for extents in source.cut(PIECE_BYTES)]
            pieces += own
            # A piece of the hub is a whole file, already about as large as a task.
            size = 1 if source.large_pieces else TASK_PIECES
            if isinstance(spec, ValidationSource) and spec.is_capped:
                size = max(1, len(own))
            stop = len(pieces)
            tasks += [range(first, min(first + size, stop)) for first in range(start, stop, size)]
        return cls(data.name, places, sources, data.skip_undecodable, pieces, tasks)

    @cached_property
    def keys(self) -> list[str]:
        """Make a digest for each piece, of its text as it is read."""
        return [
            # FORMAT is part of it: finished tasks of an older format are never taken for these.
            digest_of(FORMAT, self.skip_undecodable, self.sources[piece.source].digest_of(piece.extents))
            for piece in self.pieces
        ]

    def batches(self, numbers: range, skipped: dict) -> Iterator[Batch]:
        """Read neighbouring pieces of one source; `skipped` counts what is left out."""
        source = self.pieces[numbers.start].source
        extents = [extent for number in numbers for extent in self.pieces[number].extents]
        documents = self.sources[source].documents(extents)
        yield from read_batches(source, documents, skipped, self.skip_undecodable)

    def is_empty(self, skipped: dict[str, int], cleaned_by: Sequence[str] = ()) -> UserError:
        """Make the error of a corpus without a single text, or of which `cleaned_by` left nothing."""
        left_out = [f"{count:,} {reason}" for reason, count in skipped.items() if count]
        if cleaned_by:
            left_out.append(f"what {', '.join(cleaned_by)} took out")
        what = f"no text of {', '.join(self.places)} is left (left out: {', '.join(left_out) or 'nothing'})"
        remedy = "add text or change the recipe's data section"
        return UserError(f"data {self.name!r}: the corpus is empty: {what}; {remedy}")

    @classmethod
    def from_json(cls, values: dict) -> "Corpus":
        """Make the corpus whose fields JSON gives back; of a range both ends."""
        pieces = [TextPiece(source, [Extent(*each) for each in own]) for source, own in values["pieces"]]
        tasks, sources = [range(*task) for task in values["tasks"]], map(source_from_json, values["sources"])
        return cls(**{**values, "pieces": pieces, "tasks": tasks, "sources": list(sources)})


# An object of its own: None may be an item.
_END = object()


def read_ahead(items: Iterable, depth: int = 2) -> Iterator:
    """Yield `items` in order while a thread works up to `depth` of them ahead; raise its errors here."""
    iterator, thread = iter(items), ThreadPoolExecutor(1)
    try:
        ahead = deque(thread.submit(next, iterator, _END) for _ in range(depth))
        while (item := ahead.popleft().result()) is not _END:
            ahead.append(thread.submit(next, iterator, _END))
            yield item
    finally:
        # Also if the reader stops early: the thread ends with the item that it is at.
        thread.shutdown(cancel_futures=True)
