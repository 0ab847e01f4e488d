"""Open the recipe's `data.sources`: each streams documents in a fixed order and knows its fingerprint."""

import os
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from pretraining.data.checksums import digest_of
from pretraining.data.text_files import (
    WHOLE_FILE_SUFFIXES,
    Document,
    Extent,
    InputFile,
    TextColumn,
    cut_file,
    list_files,
    local_file,
    read_documents,
)
from pretraining.errors import UserError, require
from pretraining.outside.addresses import is_remote
from pretraining.recipe.data import Data, Source, TextOrigin

# Folders of packages installed beside the library, of tests and bytecode: none is text of the library.
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class FileSource:
    """Text files of this machine or of a store, sorted by their path below the source's root."""

    files: list[InputFile]
    column: TextColumn = field(default_factory=TextColumn)
    large_pieces: ClassVar[bool] = False

    def documents(self, extents: Iterable[Extent] | None = None) -> Iterator[Document]:
        """Read every document of the extents (of every file), one file open at a time."""
        for extent in [Extent(number) for number in range(len(self.files))] if extents is None else extents:
            yield from read_documents(self.files[extent.file], self.column, extent)

    def cut(self, piece_bytes: int) -> list[list[Extent]]:
        """Cut the source into pieces of about `piece_bytes` of text; only the files decide where."""
        pieces, size = [[]], 0
        for number, file in enumerate(self.files):
            for extent, num_bytes in cut_file(file, number, piece_bytes):
                if size + num_bytes > piece_bytes and pieces[-1]:
                    pieces.append([])
                    size = 0
                pieces[-1].append(extent)
                size += num_bytes
        return pieces

    def digest_of(self, extents: Iterable[Extent]) -> str:
        return digest_of([(*self._identity(self.files[extent.file]), *extent[1:]) for extent in extents])

    def check_unchanged(self) -> None:
        for file in self.files:
            file.check_unchanged()

    @staticmethod
    def _identity(file: InputFile) -> tuple:
        # Not the address: a corpus that moved to another folder is the same.
        return file.name, file.num_bytes, file.version

    def to_json(self) -> dict:
        """Describe the source, with every file, for a process on another machine."""
        return {"files": [astuple(file) for file in self.files], "column": astuple(self.column)}

    def content(self) -> str:
        """Hash relative path and bytes of every file of this machine; the version of one in a store."""
        from concurrent.futures import ThreadPoolExecutor

        from pretraining.data.checksums import checksum_of_file

        def of(file: InputFile) -> str:
            return file.version if is_remote(file.address) else checksum_of_file(Path(file.address))

        # Hashing releases Python's lock.
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            checksums = threads.map(of, self.files)
            return digest_of([(file.name, each) for file, each in zip(self.files, checksums, strict=True)])

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
    key: str = "data.sources"
    """The key of the recipe that names the dataset, for error messages."""
    large_pieces: ClassVar[bool] = True
    """A file of a hub dataset holds hundreds of megabytes, so each file is a piece."""

    def documents(self, extents: Iterable[Extent] | None = None) -> Iterator[Document]:
        """Read every row of the extents (of the split) in the hub's order; nothing is kept on disk."""
        rows = self._stream()
        # Some streams do not know their columns: then each row is checked.
        if rows.column_names:
            self.column.check(rows.column_names, self.dataset)
        for extent in [Extent(number) for number in range(rows.num_shards)] if extents is None else extents:
            place = f"{self.dataset}:part {extent.file}" if rows.num_shards > 1 else self.dataset
            try:
                for number, row in enumerate(rows.shard(rows.num_shards, extent.file), start=1):
                    where = f"{place}:row {number}"
                    yield Document(self.column.text_of(row, where), where)
            except (OSError, ValueError, RuntimeError) as error:
                raise self._unreachable(error) from error

    def cut(self, piece_bytes: int) -> list[list[Extent]]:
        return [[Extent(number)] for number in range(self._stream().num_shards)]

    def digest_of(self, extents: Iterable[Extent]) -> str:
        return digest_of([self.fingerprint(), [list(extent) for extent in extents]])

    def check_unchanged(self) -> None:
        pass  # the hub keeps its commits

    def to_json(self) -> dict:
        return {**asdict(self), "fingerprint": self._fingerprint}

    def _stream(self):
        datasets = require("datasets", f"the dataset {self.dataset!r}")
        try:
            return datasets.load_dataset(
                self.dataset, self.config, split=self.split, revision=self.revision, streaming=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> UserError:
        reason = str(error).strip().partition("\n")[0]
        return UserError(
            f"dataset {self.dataset!r}: cannot be read ({type(error).__name__}: {reason}); "
            f"check dataset, config, split and revision in {self.key}, and the network"
        )

    def content(self) -> str:
        return digest_of(self._fingerprint)

    def fingerprint(self) -> dict:
        """Return name, config, split and the commit that the revision stands for (null if the hub does not answer).

        For a folder, its files take the place of a commit, as in a `FileSource`.
        """
        return dict(self._fingerprint)  # a copy: the caller may fill in a missing commit

    @cached_property
    def _fingerprint(self) -> dict:
        known = {"dataset": self.dataset, "config": self.config, "split": self.split}
        folder = Path(self.dataset)
        if not folder.exists():
            commit = self.revision
            # 40 hex digits are a commit. Else the hub says which one the revision stands for, so that a dataset that
            # has changed is prepared again.
            if not commit or len(commit) != 40:
                hub = require("huggingface_hub", f"the dataset {self.dataset!r}")
                # every way of being offline has its own class; documents() reports a real fault
                with suppress(Exception):
                    commit = hub.HfApi().dataset_info(self.dataset, revision=commit, timeout=10).sha
            return {**known, "commit": commit}
        inside = [each.relative_to(folder) for each in sorted(folder.rglob("*")) if each.is_file()]
        # Hidden files (.git, caches) are no data, and change without it.
        shown = [folder / name for name in inside if not any(part.startswith(".") for part in name.parts)]
        return {**known, **FileSource([local_file(path, folder) for path in shown]).fingerprint()}


TextSource = FileSource | HubSource
"""Both stream documents, can be cut into extents, and know what their text depends on."""


def open_source(spec: TextOrigin, key: str = "data.sources.0") -> TextSource:
    """Open the source that the entry at `key` of the recipe describes; UserError if there is nothing to read."""
    column = TextColumn(spec.text_column, f"{key}.text_column")
    if isinstance(spec, Source) and spec.builtin is not None:
        root = Path(sysconfig.get_path("stdlib"))
        paths = []
        for folder, subfolders, names in os.walk(root):
            # In place: `os.walk` enters only the subfolders that are left in this list.
            subfolders[:] = [name for name in subfolders if name not in STDLIB_LEFT_OUT]
            paths += [Path(folder, name) for name in names if name.endswith(WHOLE_FILE_SUFFIXES)]
        return FileSource([local_file(path, root) for path in sorted(paths)])
    if spec.dataset is not None:
        return HubSource(spec.dataset, spec.config, spec.split, spec.revision, column, key)
    # the recipe names one of the three
    return FileSource(list_files(str(spec.path), key=f"{key}.path"), column)


def open_sources(data: Data) -> list[TextSource]:
    """Open the sources of training, then those of validation."""
    return [open_source(spec, key) for key, spec in data.text_origins]


def source_from_json(values: dict) -> TextSource:
    """Open the source that a `to_json` describes."""
    if "files" in values:
        return FileSource([InputFile(*file) for file in values["files"]], TextColumn(*values["column"]))
    fields = {key: value for key, value in values.items() if key != "fingerprint"}
    source = HubSource(**{**fields, "column": TextColumn(**values["column"])})
    # All tasks go by the commit that was there at the start.
    source.__dict__["_fingerprint"] = values["fingerprint"]
    return source
