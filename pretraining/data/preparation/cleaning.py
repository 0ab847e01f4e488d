"""Clean before the tokenizer: filters and evaluation sets piece by piece, then duplicates across all pieces.

    evaluation-sets    one task        the n-grams that no text may hold
    clean              a piece         the texts that stay, with hashes and signatures to compare them by
    match              a slice         pairs of equal and of similar documents
    fates              one task        what becomes of every document

`CleanedCorpus` reads what they leave.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretraining.data.checksums import digest_of
from pretraining.data.corpus import Batch, Corpus, TextPiece, read_batches
from pretraining.data.dedup.decontamination import (
    ContaminationIndex,
    DecontaminationSpec,
    build_index,
    fingerprint_of_sets,
    merge_reports,
    read_evaluation_sets,
)
from pretraining.data.dedup.duplicates import (
    HASHES_NAME,
    KEYS_NAME,
    SKETCH_NAME,
    TRAIN,
    VALIDATION,
    SignatureParts,
    assign_fates,
    cluster,
    duplicates_report,
    exact_pairs,
    hash_texts,
    match_slice,
    write_array,
)
from pretraining.data.dedup.signatures import MinHashSpec, sign_piece
from pretraining.data.preparation.stage import Stage
from pretraining.data.progress import ProgressBar
from pretraining.data.quality.chain import FilterChain, FilterReport
from pretraining.data.text_files import Document
from pretraining.errors import UserError
from pretraining.recipe.data import Data, Dedup
from pretraining.runtime.durable_files import write_json

TEXTS_NAME, DRAWS_NAME, REPORT_NAME, INDEX_NAME = "texts.arrow", "draws.npy", "report.json", "index.json"
ROWS_AT_ONCE = 256
"""Texts in a record batch: all of them are decompressed to read one."""

PIECES_PER_SLICE = 32
"""Pieces for each slice of the comparison: a slice then needs the memory of some hundred pieces of text."""


class Deduplication(NamedTuple):
    """What `data.dedup` asks for."""

    exact: bool
    minhash: MinHashSpec | None
    remove: bool

    @classmethod
    def from_recipe(cls, section: Dedup | None) -> "Deduplication | None":
        """Read `data.dedup`; None if no documents are compared."""
        if section is None or not (section.exact or section.minhash):
            return None
        # `"minhash": {}` asks for near duplicates too, by the defaults.
        minhash = MinHashSpec.from_recipe(section.minhash.to_dict()) if section.minhash else None
        return cls(section.exact, minhash, section.remove)


@dataclass(frozen=True)
class EvaluationSets(Stage):
    """One task: the n-grams of the evaluation sets."""

    name = "evaluation-sets"
    sets_folder: str | None
    lm_eval_tasks: list[str]
    spec: DecontaminationSpec
    own: Corpus | None = None
    """The texts of `data.validation`, if no training text may hold a stretch of them."""
    own_names: tuple[str, ...] = ()
    """What the recipe calls their sources."""
    own_documents: tuple[int | None, ...] = ()
    """How many of their first documents count; None: all."""

    @classmethod
    def from_recipe(cls, work: Path, data: Data, validation: Corpus | None) -> "EvaluationSets | None":
        """Read `data.decontaminate`; None if there is none. `validation`: the texts of `data.validation`."""
        section = data.decontaminate
        if section is None:
            return None
        spec = DecontaminationSpec(section.ngram, section.shortest, section.share)
        if not section.validation or validation is None or data.validation is None:
            return cls(work, section.folder, section.tasks, spec)
        names = tuple(source.called for source in data.validation.sources)
        # What filters leave, and how many tokens it has, is not known yet: all documents count.
        filters = data.validation.filters and data.filters
        most = tuple(None if filters else source.max_documents for source in data.validation.sources)
        return cls(work, section.folder, section.tasks, spec, validation, names, most)

    @cached_property
    def keys(self) -> list[str]:
        """Make one key, of the files of the folder and the names of the tasks."""
        spec = asdict(self.spec)
        if self.own is None:
            return [digest_of(spec, fingerprint_of_sets(self.sets_folder, self.lm_eval_tasks))]
        named = self.sets_folder is not None or self.lm_eval_tasks
        files = fingerprint_of_sets(self.sets_folder, self.lm_eval_tasks) if named else None
        return [digest_of(spec, files, self.own.keys, self.own_names, self.own_documents)]

    def run(self, number: int, folder: Path, progress: ProgressBar) -> None:
        """Write the index: its arrays as .npy, all else as JSON."""
        sets = read_evaluation_sets(self.sets_folder, self.lm_eval_tasks)
        index = build_index(chain(sets, self._own_texts()), self.spec)
        for length, hashes in index.hashes.items():
            write_array(folder / f"{length}.hashes.npy", hashes)
            write_array(folder / f"{length}.owners.npy", index.owners[length])
        values = {"names": index.names, "texts": index.texts, "too_short": index.too_short}
        write_json(folder / INDEX_NAME, {**values, "lengths": list(index.hashes)})

    def _own_texts(self) -> Iterator[tuple[str, str]]:
        """Read (source's name, text) of `data.validation`."""
        left = list(self.own_documents)
        for number, piece in enumerate(self.own.pieces if self.own else ()):
            if left[piece.source] == 0:
                continue
            for batch in self.own.batches(range(number, number + 1), {}):
                texts = batch.texts[: left[piece.source]]
                yield from ((self.own_names[piece.source], text) for text in texts)
                if left[piece.source] is not None:
                    left[piece.source] -= len(texts)
                    if not left[piece.source]:
                        break

    def index(self) -> ContaminationIndex:
        (folder,) = self.outputs()
        values = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
        lengths = values.pop("lengths")
        hashes, owners = (
            {length: np.load(folder / f"{length}.{kind}.npy") for length in lengths}
            for kind in ("hashes", "owners")
        )
        return ContaminationIndex(self.spec, hashes=hashes, owners=owners, **values)


@dataclass(frozen=True)
class Clean(Stage):
    """A task for each piece: filters, decontamination, signatures."""

    name = "clean"
    corpus: Corpus
    filters: list[dict]
    """`data.filters` of the recipe."""
    consulted: dict
    """What the filters use, with checksums of the files they read."""
    evaluation_sets: EvaluationSets | None
    dedup: Deduplication | None

    @cached_property
    def keys(self) -> list[str]:
        evaluation = self.evaluation_sets.keys if self.evaluation_sets else []
        compared = [self.dedup.exact, self.dedup.minhash and asdict(self.dedup.minhash)] if self.dedup else []
        return [digest_of(self.consulted, evaluation, compared, key) for key in self.corpus.keys]

    def run(self, number: int, folder: Path, progress: ProgressBar) -> None:
        """Read a piece, leave out what the recipe does not want, write the rest with hashes and signatures."""
        import pyarrow as pa

        cleaner, skipped = Cleaner(self.filters, self.evaluation_sets), {}
        # Batches again: what is left of a text may be empty, and its draw follows from the text as it is now.
        documents = cleaner.documents(self.corpus.batches(range(number, number + 1), skipped))
        batches = read_batches(self.corpus.pieces[number].source, documents, {}, skip_undecodable=False)
        # Taken in the same pass as the texts, so that no text is read twice.
        columns: dict[str, list[np.ndarray]] = defaultdict(list)
        schema = pa.schema({"text": pa.large_string(), "where": pa.large_string()})
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with (
            (folder / TEXTS_NAME).open("wb") as file,
            pa.ipc.new_file(file, schema, options=options) as writer,
        ):
            # The empty batch gives the files of a piece without documents their shapes.
            for batch in chain(batches, [Batch(0)]):
                # The tokenizer reads a few rows at a time.
                for start in range(0, len(batch.texts), ROWS_AT_ONCE):
                    rows = slice(start, start + ROWS_AT_ONCE)
                    arrays = [
                        pa.array(values[rows], pa.large_string()) for values in (batch.texts, batch.wheres)
                    ]
                    writer.write_batch(pa.record_batch(arrays, schema=schema))
                columns[DRAWS_NAME].append(np.array(batch.draws, np.float64))
                if self.dedup and self.dedup.exact:
                    columns[HASHES_NAME].append(hash_texts(batch.texts))
                if self.dedup and self.dedup.minhash:
                    signatures = sign_piece(batch.texts, self.dedup.minhash)
                    columns[KEYS_NAME].append(signatures.keys)
                    columns[SKETCH_NAME].append(signatures.sketch)
        for name, parts in columns.items():
            write_array(folder / name, np.concatenate(parts, axis=1 if name == KEYS_NAME else 0))
        write_json(folder / REPORT_NAME, {"skipped": skipped, **cleaner.reports()})

    def texts(self, number: int) -> Iterator[Document]:
        """Read the documents that a finished task has written."""
        import pyarrow as pa

        with pa.OSFile(str(self.folder(number) / TEXTS_NAME)) as file:
            reader = pa.ipc.open_file(file)
            for batch in map(reader.get_batch, range(reader.num_record_batches)):
                for text, where in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    yield Document(text, where)

    def reports(self) -> list[dict]:
        return [json.loads((output / REPORT_NAME).read_text(encoding="utf-8")) for output in self.outputs()]


class CleanValidation(Clean):
    """The same for texts of `data.validation`: filters alone."""

    name = "clean-validation"


class Cleaner:
    """Apply the recipe's filters and evaluation sets to a piece, and keep count of what they take out."""

    def __init__(self, filters: list[dict], evaluation_sets: EvaluationSets | None):
        self._chain = FilterChain.of(filters)
        self._index = evaluation_sets.index() if evaluation_sets else None
        self._contaminations: list[dict] = []

    def documents(self, batches: Iterator[Batch]) -> Iterator[Document]:
        """Yield the texts that stay, as the filters leave them."""
        for batch in batches:
            texts = self._chain.apply(batch.texts, batch.wheres)
            kept = [
                Document(text, where)
                for text, where in zip(texts, batch.wheres, strict=True)
                if text is not None
            ]
            if self._index is not None and kept:
                contaminated, report = self._index.check([document.text for document in kept])
                self._contaminations.append(report)
                kept = [document for document, found in zip(kept, contaminated, strict=True) if not found]
            yield from kept

    def reports(self) -> dict:
        return {"filters": self._chain.report.to_dict(), "decontamination": self._contaminations}


@dataclass(frozen=True)
class Match(Stage):
    """A task for each slice of the comparison: pairs of equal and of similar documents."""

    name = "match"
    clean: Clean
    dedup: Deduplication

    @cached_property
    def keys(self) -> list[str]:
        # At least one slice, also for a small corpus.
        slices = range(max(1, len(self.clean.corpus.pieces) // PIECES_PER_SLICE))
        return [digest_of(self.clean.keys, number) for number in slices]

    def run(self, number: int, folder: Path, progress: ProgressBar) -> None:
        """Write the pairs of one slice."""
        pieces, position = self.clean.outputs(), (number, len(self.keys))
        if self.dedup.exact:
            write_array(folder / "exact.npy", exact_pairs(pieces, *position))
        if self.dedup.minhash:
            signatures = SignatureParts(pieces)
            write_array(folder / "similar.npy", match_slice(signatures, self.dedup.minhash, *position))


@dataclass(frozen=True)
class Fates(Stage):
    """One task: clusters, and what becomes of each document."""

    name = "fates"
    match: Match
    validation_share: float
    source_names: list[str]

    @cached_property
    def keys(self) -> list[str]:
        return [digest_of(self.match.keys, self.match.dedup.remove, self.validation_share)]

    def run(self, number: int, folder: Path, progress: ProgressBar) -> None:
        """Write what becomes of every document, a file a piece, and a report."""
        clean, dedup = self.match.clean, self.match.dedup
        paths = [path for output in self.match.outputs() for path in sorted(output.glob("*.npy"))]
        # Loaded when asked for, one at a time: all pairs may not fit into memory.
        pairs = [lambda path=path: np.load(path) for path in paths]
        # Without similar pairs only equal texts (similarity 1) are in question.
        accepted = dedup.minhash.accepted if dedup.minhash else 1.0
        clusters = cluster(pairs, accepted)
        # Which documents the draw puts into validation.
        drawn = [np.load(output / DRAWS_NAME) < self.validation_share for output in clean.outputs()]
        fates = assign_fates(drawn, clusters, pairs, dedup.remove)
        for piece, own in enumerate(fates):
            write_array(folder / f"{piece:05d}.npy", own)
        sources = [piece.source for piece in clean.corpus.pieces]
        write_json(folder / REPORT_NAME, duplicates_report(clusters, fates, sources, self.source_names))

    def report(self) -> dict:
        return json.loads((self.outputs()[0] / REPORT_NAME).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class _Cleaned:
    """The texts that cleaning leaves of a corpus; they are read as those of a `Corpus`."""

    corpus: Corpus
    cleaned_by: list[str]
    """The keys of the data section that ask for it."""
    clean: Clean
    fates: Fates | None = None

    @property
    def pieces(self) -> list[TextPiece]:
        return self.corpus.pieces

    @property
    def tasks(self) -> list[range]:
        return self.corpus.tasks

    @cached_property
    def keys(self) -> list[str]:
        fates = self.fates.keys if self.fates else []
        return [digest_of(key, fates) for key in self.clean.keys]

    def is_empty(self, skipped: dict[str, int]) -> UserError:
        return self.corpus.is_empty(skipped, self.cleaned_by)

    def _reports(self, cleaned: list[dict]) -> dict:
        """Join what cleaners report for the manifest, as far as the recipe asks for it."""
        merged, reports = merged_reports(cleaned), {}
        if self.clean.filters:
            reports["filters"] = merged["filters"]
        if self.clean.evaluation_sets:
            reports["decontamination"] = merge_reports(merged["decontamination"])
        return reports


@dataclass(frozen=True)
class CleanedCorpus(_Cleaned):
    """The texts that filters, decontamination and deduplication leave, cleaned before the first one is read."""

    validation_share: float = 0.0

    @property
    def stages(self) -> list[Stage]:
        comparing = [self.fates.match, self.fates] if self.fates else []
        return [*filter(None, [self.clean.evaluation_sets]), self.clean, *comparing]

    def batches(self, numbers: range, skipped: dict) -> Iterator[Batch]:
        """Read neighbouring pieces, each text with the draw that decides its split; `skipped` stays as it is."""
        for number in numbers:
            kept: list[int | None] = []
            documents = self._kept_documents(number, kept)
            # A dict of its own: `Clean` has counted what was skipped.
            for batch in read_batches(self.pieces[number].source, documents, {}, skip_undecodable=False):
                # `kept` grows as documents are read: its first fates are those of this batch.
                fates, kept[: len(batch.texts)] = kept[: len(batch.texts)], []
                # A fate moves a draw to its side of the share; half of the share is surely below it.
                for place, fate in enumerate(fates):
                    if fate == TRAIN:
                        batch.draws[place] = max(batch.draws[place], self.validation_share)
                    elif fate == VALIDATION:
                        batch.draws[place] = min(batch.draws[place], self.validation_share / 2)
                yield batch

    def _kept_documents(self, number: int, kept: list[int | None]) -> Iterator[Document]:
        """Read the documents that stay; the fate of each is appended to `kept` as it is read."""
        fates = np.load(self.fates.outputs()[0] / f"{number:05d}.npy") if self.fates else None
        for row, document in enumerate(self.clean.texts(number)):
            fate = None if fates is None else int(fates[row])
            if fate in (None, TRAIN, VALIDATION):
                kept.append(fate)
                yield document

    def skipped(self) -> list[dict]:
        """Read what each piece left out while its files were read."""
        return [piece["skipped"] for piece in self.clean.reports()]

    def reports(self, accounts: list[dict]) -> dict:
        """Report what cleaning took out of all pieces: {"filters", "decontamination", "duplicates"}."""
        reports = self._reports(self.clean.reports())
        return {**reports, "duplicates": self.fates.report()} if self.fates else reports


@dataclass(frozen=True)
class CleanedAsRead(_Cleaned):
    """The texts that filters and decontamination leave, cleaned while they are read: no more than what is wanted.

    The texts are those of a `CleanedCorpus` without deduplication, in the same order.
    """

    @property
    def stages(self) -> list[Stage]:
        return [*filter(None, [self.clean.evaluation_sets])]

    def batches(self, numbers: range, account: dict) -> Iterator[Batch]:
        """Read neighbouring pieces; `account` counts what is skipped, and holds the `cleaner` with its reports."""
        cleaner = Cleaner(self.clean.filters, self.clean.evaluation_sets)
        documents = cleaner.documents(self.corpus.batches(numbers, account))
        for batch in read_batches(self.pieces[numbers.start].source, documents, {}, skip_undecodable=False):
            # Not before: to read the first batch empties the account.
            account["cleaner"] = cleaner
            yield batch
        account["cleaner"] = cleaner

    def reports(self, accounts: list[dict]) -> dict:
        """Report what cleaning took out of the texts that were read: {"filters", "decontamination"}."""
        return self._reports([account["cleaned"] for account in accounts])


def merged_reports(reports: list[dict]) -> dict:
    """Merge what cleaners report of neighbouring texts: {"filters", "decontamination": one or none}."""
    filters = FilterReport.merged([FilterReport(**report["filters"]) for report in reports])
    found = [each for report in reports for each in report["decontamination"]]
    return {"filters": filters.to_dict(), "decontamination": [merge_reports(found)] if found else []}
