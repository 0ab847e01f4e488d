"""Read the texts of all sources in one fixed order, cut into pieces. The hash of a text decides its split."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from queue import Empty, Full, Queue
from typing import NamedTuple

import xxhash

from pretraining.data.checksums import digest_of
from pretraining.data.manifest import FORMAT
from pretraining.data.sources import TextSource, source_from_json
from pretraining.data.text_files import Document, Extent
from pretraining.errors import UserError
from pretraining.recipe.data import Data, TextOrigin, ValidationSource

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

    def without_validation(self, validation_share: float) -> "Batch":
        kept = [number for number, draw in enumerate(self.draws) if draw >= validation_share]
        columns = (self.texts, self.wheres, self.num_bytes, self.draws)
        return Batch(self.source, *([column[number] for number in kept] for column in columns))


def draw_of(encoded: bytes) -> float:
    """Draw a number in [0, 1) from the text alone, so that equal texts are never in both splits."""
    # 53 bits are what a double holds exactly.
    return (xxhash.xxh3_64_intdigest(encoded, SPLIT_SEED) >> 11) * 2.0**-53


def read_batches(
    source: int, documents: Iterable[Document], skipped: dict, skip_undecodable: bool
) -> Iterator[Batch]:
    """Read every text that is not empty, in batches of about `BATCH_BYTES`.

    `skipped` counts the texts that are left out. Raises UserError if a text is not UTF-8, unless
    `skip_undecodable`.
    """
    skipped.update(undecodable=0, empty=0)
    batch, size = Batch(source), 0
    for text, where in documents:
        try:
            # None: the bytes of the file were not UTF-8.
            encoded = None if text is None else text.encode("utf-8")
        except UnicodeEncodeError:  # JSON spelled half of a surrogate pair
            encoded = None
        if encoded is None and not skip_undecodable:
            raise UserError(
                f"{where}: not UTF-8 text; convert the file, or set data.skip_undecodable to true to leave "
                "such documents out and have them counted"
            )
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
        pieces = [
            TextPiece(number, extents)
            for number, source in enumerate(sources)
            for extents in source.cut(PIECE_BYTES)
        ]
        capped = [isinstance(spec, ValidationSource) and spec.is_capped for spec in specs]
        # A piece of the hub is a whole file, already about as large as a task.
        sizes = [
            len(pieces) if cap else 1 if source.large_pieces else TASK_PIECES
            for cap, source in zip(capped, sources, strict=True)
        ]
        tasks, start = [], 0
        for stop in range(1, len(pieces) + 1):
            source = pieces[start].source
            full = stop - start == sizes[source]
            if stop == len(pieces) or full or pieces[stop].source != source:
                tasks.append(range(start, stop))
                start = stop
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
        yield from read_batches(
            source, self.sources[source].documents(extents), skipped, self.skip_undecodable
        )

    def is_empty(self, skipped: dict[str, int], cleaned_by: Sequence[str] = ()) -> UserError:
        """Make the error of a corpus without a single text, or of which `cleaned_by` left nothing."""
        left_out = [f"{count:,} {reason}" for reason, count in skipped.items() if count]
        if cleaned_by:
            left_out.append(f"what {', '.join(cleaned_by)} took out")
        return UserError(
            f"data {self.name!r}: the corpus is empty: no text of {', '.join(self.places)} is left (left out: "
            f"{', '.join(left_out) or 'nothing'}); add text or change the recipe's data section"
        )

    def check_unchanged(self) -> None:
        for source in self.sources:
            source.check_unchanged()

    def to_json(self) -> dict:
        """Describe the corpus, for a process on another machine."""
        return {
            "name": self.name,
            "places": self.places,
            "sources": [source.to_json() for source in self.sources],
            "skip_undecodable": self.skip_undecodable,
            "pieces": self.pieces,
            "tasks": [[task.start, task.stop] for task in self.tasks],
        }

    @classmethod
    def from_json(cls, values: dict) -> "Corpus":
        pieces = [
            TextPiece(source, [Extent(*extent) for extent in extents]) for source, extents in values["pieces"]
        ]
        opened = {
            "sources": [source_from_json(source) for source in values["sources"]],
            "pieces": pieces,
            "tasks": [range(*task) for task in values["tasks"]],
        }
        return cls(**{**values, **opened})


# Reading ahead, in a thread.

# An object of its own: None may be an item.
_END = object()


def prefetch(items: Iterable, depth: int = 2) -> Iterator:
    """Yield `items` in order while a thread works up to `depth` of them ahead; raise its errors here."""
    ready, stopped = Queue(depth), threading.Event()

    def put(item: object, error: BaseException | None) -> None:
        while not stopped.is_set():
            with suppress(Full):
                return ready.put(
                    (item, error), timeout=0.1
                )  # seconds; a reader that has stopped frees no place

    def fill() -> None:
        try:
            for item in items:
                put(item, None)
                if stopped.is_set():
                    return
            put(_END, None)
        except BaseException as error:  # raised again in the thread that reads the queue
            put(None, error)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        # Also if the reader stops early: an empty queue lets a thread that waits in `put` see `stopped`.
        stopped.set()
        with suppress(Empty):
            while True:
                ready.get_nowait()
        thread.join()
