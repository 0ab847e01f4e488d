"""The stage `clean`: the texts of a piece that filters and decontamination leave, and what compares them."""

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pretraining.data.corpus import Batch, read_batches
from pretraining.data.dedup.minhash import MinHashSpec, sign_piece
from pretraining.data.dedup.pairs import hash_texts, write_array
from pretraining.data.shard_writer import write_durably
from pretraining.data.text_files import Document

TEXTS_NAME, REPORT_NAME = "texts.arrow", "report.json"
INDEX_NAME = "index.pickle"
ROWS_AT_ONCE = 256


def index_evaluation_sets(preparation, folder: Path) -> None:
    """The stage `evaluation sets`: the n-grams that no text may hold."""
    from pretraining.data.dedup.decontamination import DecontaminationSpec, build_index, read_evaluation_sets

    section = dict(preparation.data["decontaminate"])
    sets = read_evaluation_sets(section.pop("folder"), section.pop("tasks"))
    (folder / INDEX_NAME).write_bytes(pickle.dumps(build_index(sets, DecontaminationSpec(**section))))


def clean(preparation, piece: int, folder: Path) -> None:
    """Read a piece, leave out what the recipe does not want, write the rest with hashes and signatures."""
    cleaner, skipped = Cleaner(preparation), {}
    documents = cleaner.documents(preparation.read_pieces(range(piece, piece + 1), skipped))
    source = preparation.pieces[piece].source
    batches = read_batches(source, documents, {}, skip_undecodable=False)
    compared = Comparisons(preparation.data.get("dedup"))
    with _texts_file(folder / TEXTS_NAME) as write:
        for batch in batches:
            write(batch)
            compared.add(batch)
    compared.save(folder)
    write_durably(folder / REPORT_NAME, json.dumps({"skipped": skipped, **cleaner.reports()}))


class Cleaner:
    """The recipe's filters and its evaluation sets, and what they took out."""

    def __init__(self, preparation):
        from pretraining.data.quality.chain import FilterChain

        self.chain = FilterChain.of(preparation.data.get("filters") or [])
        index = preparation.evaluation_index
        self.index = pickle.loads(index.read_bytes()) if index else None
        self.contaminations: list[dict] = []

    def documents(self, batches: Iterator[Batch]) -> Iterator[Document]:
        """The texts that stay, as the filters leave them."""
        for batch in batches:
            texts = self.chain.apply(batch.texts, batch.wheres)
            kept = [
                (text, where) for text, where in zip(texts, batch.wheres, strict=True) if text is not None
            ]
            yield from (Document(*each) for each in self._decontaminated(kept))

    def _decontaminated(self, kept: list[tuple[str, str]]) -> list[tuple[str, str]]:
        if self.index is None or not kept:
            return kept
        contaminated, report = self.index.check([text for text, _ in kept])
        self.contaminations.append(report)
        return [each for each, found in zip(kept, contaminated, strict=True) if not found]

    def reports(self) -> dict:
        """What was taken out, for the manifest."""
        return {"filters": self.chain.report.to_dict(), "decontamination": self.contaminations}


@contextmanager
def _texts_file(path: Path) -> Iterator[Callable[[Batch], None]]:
    """Columns `text` and `where`, compressed: the tokenizer reads them, a few rows at a time."""
    import pyarrow as pa

    schema = pa.schema({"text": pa.large_string(), "where": pa.large_string()})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with path.open("wb") as file, pa.ipc.new_file(file, schema, options=options) as writer:

        def write(batch: Batch) -> None:
            for start in range(0, len(batch.texts), ROWS_AT_ONCE):
                rows = slice(start, start + ROWS_AT_ONCE)
                columns = [
                    pa.array(values[rows], pa.large_string()) for values in (batch.texts, batch.wheres)
                ]
                writer.write_batch(pa.record_batch(columns, schema=schema))

        yield write


class Comparisons:
    """What tells equal texts (hashes) and similar ones (band keys and sketches), a row a document."""

    def __init__(self, dedup: dict | None):
        self.hashes_wanted = bool(dedup and dedup["exact"])
        self.spec = MinHashSpec.from_recipe(dedup["minhash"]) if dedup and dedup["minhash"] else None
        self._columns: dict[str, list[np.ndarray]] = {}

    def add(self, batch: Batch) -> None:
        """The next documents of the piece."""
        self._append("draws", np.array(batch.draws, np.float64))
        if self.hashes_wanted:
            self._append("hashes", hash_texts(batch.texts))
        if self.spec:
            signatures = sign_piece(batch.texts, self.spec)
            self._append("keys", signatures.keys.T)
            self._append("sketch", signatures.sketch)

    def _append(self, name: str, rows: np.ndarray) -> None:
        self._columns.setdefault(name, []).append(rows)

    def save(self, folder: Path) -> None:
        """A file for each kind; a piece without documents has them too."""
        if not self._columns:
            self.add(Batch(0))
        for name, parts in self._columns.items():
            rows = np.concatenate(parts)
            write_array(folder / f"{name}.npy", np.ascontiguousarray(rows.T) if name == "keys" else rows)


def read_texts(folder: Path) -> Iterator[Document]:
    """The documents that `clean` wrote."""
    import pyarrow as pa

    with pa.OSFile(str(folder / TEXTS_NAME)) as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            for text, where in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                yield Document(text, where)
