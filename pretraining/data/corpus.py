"""The texts of all sources in one fixed order, each with the split its own hash puts it in."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from queue import Empty, Full, Queue

import xxhash

from pretraining.data.text_files import Document
from pretraining.errors import UserError

SPLIT_SEED = 0x73706C6974
BATCH_BYTES = 1 << 20
"""Text handed to the tokenizer at once: enough to keep every core busy, little enough to hold a few of."""

CLEANING_KEYS = ("filters", "dedup", "decontaminate")
"""Of the data section: what stands between reading a text and encoding it."""

TRAINING_BYTES = 256 << 20
"""Text the tokenizer is trained on at most, the same of each source: BPE gains little beyond it. How a run weighs the
sources is no matter of it, so that other weights need no other tokens."""


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
        """The texts that go to train."""
        kept = [number for number, draw in enumerate(self.draws) if draw >= validation_share]
        columns = (self.texts, self.wheres, self.num_bytes, self.draws)
        return Batch(self.source, *([column[number] for number in kept] for column in columns))


def draw_of(encoded: bytes) -> float:
    """A number in [0, 1) that depends on the text alone, so equal texts never sit in both splits."""
    return (xxhash.xxh3_64_intdigest(encoded, SPLIT_SEED) >> 11) * 2.0**-53


def read_batches(
    source: int, documents: Iterable[Document], skipped: dict, skip_undecodable: bool
) -> Iterator[Batch]:
    """Every text that is not empty, in batches of about `BATCH_BYTES`.

    `skipped` counts what is left out. UserError on other than UTF-8, unless `skip_undecodable`.
    """
    skipped.update(undecodable=0, empty=0)
    batch, size = Batch(source), 0
    for text, where in documents:
        encoded = _utf8(text)
        if not encoded:
            _leave_out(where, encoded is None, skipped, skip_undecodable)
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


def _leave_out(where: str, undecodable: bool, skipped: dict, skip_undecodable: bool) -> None:
    if undecodable and not skip_undecodable:
        raise UserError(
            f"{where}: not UTF-8 text; convert the file, or set data.skip_undecodable to true to leave "
            "such documents out and have them counted"
        )
    skipped["undecodable" if undecodable else "empty"] += 1


def empty_corpus(data: dict, skipped: dict) -> UserError:
    """The sentence for sources without a single text, or of which nothing is left."""
    places = [spec.get("path") or spec.get("dataset") or spec["builtin"] for spec in data["sources"]]
    left_out = [f"{count:,} {reason}" for reason, count in skipped.items() if count]
    if any(data.get(key) for key in CLEANING_KEYS):
        left_out.append(f"what {', '.join(key for key in CLEANING_KEYS if data.get(key))} took out")
    return UserError(
        f"data {data['name']!r}: the corpus is empty: no text of {', '.join(places)} is left (left out: "
        f"{', '.join(left_out) or 'nothing'}); add text or change the recipe's data section"
    )


def _utf8(text: str | None) -> bytes | None:
    """The text in UTF-8; None where the bytes were not, or where JSON spelled half of a surrogate pair."""
    try:
        return None if text is None else text.encode("utf-8")
    except UnicodeEncodeError:
        return None


_END = object()


def prefetch(items: Iterable, depth: int = 2) -> Iterator:
    """Yield `items` in order while a thread works up to `depth` of them ahead; its errors are raised here."""
    ready, stopped = Queue(depth), threading.Event()
    thread = threading.Thread(target=_fill, args=(items, ready, stopped), daemon=True)
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
        stopped.set()
        _drain(ready)
        thread.join()


def _fill(items: Iterable, ready: Queue, stopped: threading.Event) -> None:
    try:
        for item in items:
            _put(ready, (item, None), stopped)
            if stopped.is_set():
                return
        _put(ready, (_END, None), stopped)
    except BaseException as error:  # raised again in the thread that reads the queue
        _put(ready, (None, error), stopped)


def _put(ready: Queue, item: tuple, stopped: threading.Event) -> None:
    while not stopped.is_set():
        try:
            return ready.put(item, timeout=0.1)
        except Full:
            continue


def _drain(ready: Queue) -> None:
    try:
        while True:
            ready.get_nowait()
    except Empty:
        pass
