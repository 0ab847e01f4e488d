"""Clean before the tokenizer: filters and evaluation sets piece by piece, then duplicates across all pieces.

    evaluation-sets    one task        the n-grams that no text may hold
    clean              a piece         the texts that stay, with hashes and signatures to compare them by
    match              a slice         pairs of equal and of similar documents
    fates              one task        what becomes of every document
    passages           a slice         passages that occur in an earlier one too

`CleanedCorpus` reads what they leave.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain, islice, pairwise, repeat
from pathlib import Path

import numpy as np

from pretraining.data.checksums import digest_of
from pretraining.data.corpus import Batch, Corpus, TextPiece, read_batches
from pretraining.data.dedup import decontamination, duplicates
from pretraining.data.dedup.minhash import MinHashSpec, sign_piece
from pretraining.data.preparation.stage import Stage
from pretraining.data.progress import ProgressBar
from pretraining.data.quality.chain import FilterChain, FilterReport
from pretraining.data.text_files import Document
from pretraining.errors import UserError
from pretraining.recipe.data import Data, Decontaminate, Dedup, RepeatedPassages
from pretraining.runtime.durable_files import write_json

TEXTS_NAME, DRAWS_NAME, REPORT_NAME, INDEX_NAME = "texts.arrow", "draws.npy", "report.json", "index.json"
ROWS_AT_ONCE = 256
"""Texts in a record batch: all of them are decompressed to read one."""

PIECES_PER_SLICE = 32
"""Pieces for each slice of the comparison: a slice then needs the memory of some hundred pieces of text."""


@dataclass(frozen=True)
class EvaluationSets(Stage):
    """One task: the n-grams of the evaluation sets."""

    name = "evaluation-sets"
    section: Decontaminate
    files: str
    """`fingerprint_of_sets` at the beginning."""
    data: Data
    validation: Corpus | None
    """The texts of `data.validation`."""

    @property
    def own(self) -> list[tuple[str, int | None]]:
        """List the sources of validation of which no training text may hold a stretch.

        Each with the number of its first documents that count; None: all.
        """
        own = self.data.validation
        if own is None or not self.section.validation:
            return []
        # What filters leave, and how many tokens it has, is not known yet: all documents count.
        all_count = own.filters and self.data.filters
        return [(source.called, None if all_count else source.max_documents) for source in own.sources]

    @cached_property
    def keys(self) -> list[str]:
        """Make one key, of the files of the folder, the names of the tasks and the texts of `data.validation`."""
        section = self.section
        own = [self.validation.keys, *zip(*self.own, strict=True)] if self.own else None
        return [digest_of(section.ngram, section.shortest, section.share, self.files, own)]

    def run(self, number: int, folder: Path, progress: ProgressBar) -> None:
        """Write the index: its arrays as .npy, all else as JSON."""
        texts = decontamination.read_evaluation_sets(self.section.folder, self.section.tasks)
        for source, (name, documents) in enumerate(self.own):
            pieces = [n for n, piece in enumerate(self.validation.pieces) if piece.source == source]
            # Generators: what is behind the last document that counts is not read.
            batches = self.validation.batches(range(pieces[0], pieces[-1] + 1), {})
            own = chain.from_iterable(batch.texts for batch in batches)
            texts = chain(texts, zip(repeat(name), islice(own, documents)))
        index = decontamination.build_index(texts, self.section)
        for name, there, short in zip(index.names, index.texts, index.too_short, strict=True):
            if short:
                what = f"{short:,} of {there:,} texts have fewer than {self.section.shortest} words"
                note = f"note: data.decontaminate: {name}: {what}, and are not looked for"
                print(note, file=sys.stderr, flush=True)
        if not index.hashes:
            remedy = "lower data.decontaminate.shortest, or leave data.decontaminate out"
            raise UserError(f"data.decontaminate: no text is long enough to be looked for; {remedy}")
        for length, hashes in index.hashes.items():
            np.save(folder / f"{length}.hashes.npy", hashes)
            np.save(folder / f"{length}.owners.npy", index.owners[length])
        values = {"names": index.names, "texts": index.texts, "too_short": index.too_short}
        write_json(folder / INDEX_NAME, {**values, "lengths": list(index.hashes)})

    def index(self) -> decontamination.ContaminationIndex:
        """Read what `run` has written."""
        (folder,) = self.outputs()
        values = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
        lengths = values.pop("lengths")
        for kind in ("hashes", "owners"):
            values[kind] = {length: np.load(folder / f"{length}.{kind}.npy") for length in lengths}
        return decontamination.ContaminationIndex(self.section, **values)


@dataclass(frozen=True)
class Clean(Stage):
    """A task for each piece: filters, decontamination, signatures."""

    name = "clean"
    corpus: Corpus
    filters: list[dict]
    consulted: dict
    """What the filters use, with checksums of the files they read."""
    evaluation_sets: EvaluationSets | None
    dedup: Dedup | None
    """`data.dedup` of the recipe, if documents are compared."""
    source_names: tuple[str, ...]
    """What the recipe calls the sources, which rules may be for."""

    @cached_property
    def minhash(self) -> MinHashSpec | None:
        # `"minhash": {}` asks for near duplicates too, by the defaults.
        asked = self.dedup and self.dedup.minhash
        return MinHashSpec.from_recipe(asked.to_dict()) if asked else None

    @cached_property
    def keys(self) -> list[str]:
        evaluation = self.evaluation_sets.keys if self.evaluation_sets else []
        compared: list = [self.dedup.exact, self.minhash and asdict(self.minhash)] if self.dedup else []
        if self.dedup and self.dedup.passages:
            compared += [self.dedup.passages.words, duplicates.WINDOWS_FORM]
        # A rule for some sources knows them by name.
        names = [self.source_names] if any(rule.get("sources") for rule in self.filters) else []
        return [digest_of(self.consulted, evaluation, compared, key, *names) for key in self.corpus.keys]

    def run(self, number: int, folder: Path, progress: ProgressBar) -> None:
        """Read a piece, leave out what the recipe does not want, write the rest with hashes and signatures."""
        import pyarrow as pa

        cleaner, skipped = Cleaner(self), {}
        # Batches again: what is left of a text may be empty, and its draw follows from the text as it is now.
        documents = cleaner.documents(self.corpus.batches(range(number, number + 1), skipped))
        batches = read_batches(self.corpus.pieces[number].source, documents, {}, skip_undecodable=False)
        # Taken in the same pass as the texts, so that no text is read twice.
        columns: dict[str, list[np.ndarray]] = defaultdict(list)
        schema = pa.schema({"text": pa.large_string(), "where": pa.large_string()})
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        path = folder / TEXTS_NAME
        with path.open("wb") as file, pa.ipc.new_file(file, schema, options=options) as writer:
            # The empty batch gives the files of a piece without documents their shapes.
            for batch in chain(batches, [Batch(0)]):
                table = pa.table([batch.texts, batch.wheres], schema=schema)
                # The tokenizer reads a few rows at a time.
                writer.write_table(table, max_chunksize=ROWS_AT_ONCE)
                columns[DRAWS_NAME].append(np.array(batch.draws, np.float64))
                if self.dedup and self.dedup.exact:
                    columns[duplicates.HASHES_NAME].append(duplicates.hash_texts(batch.texts))
                if self.minhash:
                    signatures = sign_piece(batch.texts, self.minhash)
                    columns[duplicates.KEYS_NAME].append(signatures.keys)
                    columns[duplicates.SKETCH_NAME].append(signatures.sketch)
                if self.dedup and self.dedup.passages:
                    hashes, counts = duplicates.windows_of(batch.texts, self.dedup.passages.words)
                    columns[duplicates.WINDOWS_NAME].append(hashes)
                    columns[duplicates.FIRST_NAME].append(counts)
        if duplicates.FIRST_NAME in columns:
            counted = np.cumsum(np.concatenate([[0], *columns[duplicates.FIRST_NAME]]))
            columns[duplicates.FIRST_NAME] = [counted.astype(np.int64)]
        for name, parts in columns.items():
            axis = 1 if name == duplicates.KEYS_NAME else 0
            np.save(folder / name, np.concatenate(parts, axis))
        write_json(folder / REPORT_NAME, {"skipped": skipped, **cleaner.reports()})

    def texts(self, number: int) -> Iterator[Document]:
        import pyarrow as pa

        with pa.OSFile(str(self.folder(number) / TEXTS_NAME)) as file:
            reader = pa.ipc.open_file(file)
            for batch in map(reader.get_batch, range(reader.num_record_batches)):
                for text, where in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    yield Document(text, where)

    def where(self, piece: int, row: int) -> str:
        return next(islice(self.texts(piece), row, None)).where

    def reports(self) -> list[dict]:
        return [json.loads((output / REPORT_NAME).read_text(encoding="utf-8")) for output in self.outputs()]


class CleanValidation(Clean):
    """The same for texts of `data.validation`: filters alone."""

    name = "clean-validation"


class Cleaner:
    """Apply the recipe's filters and evaluation sets to a piece, and keep count of what they take out."""

    def __init__(self, clean: Clean):
        self._chain, self._names = FilterChain(clean.filters), clean.source_names
        self._index = clean.evaluation_sets.index() if clean.evaluation_sets else None
        self._contaminations: list[dict] = []  # of batches

    def documents(self, batches: Iterator[Batch]) -> Iterator[Document]:
        """Yield the texts that stay, as the filters leave them."""
        for batch in batches:
            texts = self._chain.apply(batch.texts, batch.wheres, self._names[batch.source])
            read = map(Document, texts, batch.wheres)
            kept = [document for document in read if document.text is not None]
            if self._index is not None and kept:
                texts, wheres = zip(*(document[:2] for document in kept), strict=True)
                contaminated, report = self._index.check(texts, wheres)
                self._contaminations.append(report)
                kept = [document for document, found in zip(kept, contaminated, strict=True) if not found]
            yield from kept

    def reports(self) -> dict:
        found = self._contaminations
        merged = [decontamination.merge_reports(found)] if found else []
        return {"filters": self._chain.report.to_dict(), "decontamination": merged}


@dataclass(frozen=True)
class Match(Stage):
    """A task for each slice of the comparison: pairs of equal and of similar documents."""

    name = "match"
    clean: Clean

    @cached_property
    def keys(self) -> list[str]:
        # At least one slice, also for a small corpus.
        slices = range(max(1, len(self.clean.corpus.pieces) // PIECES_PER_SLICE))
        return [digest_of(self.clean.keys, number) for number in slices]

    def run(self, number: int, folder: Path, progress: ProgressBar) -> None:
        pieces, num_slices = self.clean.outputs(), len(self.keys)
        if self.clean.dedup and self.clean.dedup.exact:
            np.save(folder / "exact.npy", duplicates.exact_pairs(pieces, number, num_slices))
        if minhash := self.clean.minhash:
            pairs = duplicates.match_slice(duplicates.SignatureParts(pieces), minhash, number, num_slices)
            np.save(folder / "similar.npy", pairs)


@dataclass(frozen=True)
class Fates(Stage):
    """One task: clusters, and what becomes of each document."""

    name = "fates"
    match: Match
    remove: bool
    validation_share: float

    @cached_property
    def keys(self) -> list[str]:
        return [digest_of(self.match.keys, self.remove, self.validation_share)]

    def run(self, number: int, folder: Path, progress: ProgressBar) -> None:
        """Write what becomes of every document, a file a piece, and a report."""
        clean = self.match.clean
        paths = [path for output in self.match.outputs() for path in sorted(output.glob("*.npy"))]
        pairs = duplicates.StoredPairs(paths)
        # Without similar pairs only equal texts (similarity 1) are in question.
        accepted = clean.minhash.accepted if clean.minhash else 1.0
        clusters = duplicates.cluster(pairs, accepted)
        # Which documents the draw puts into validation.
        drawn = [np.load(output / DRAWS_NAME) < self.validation_share for output in clean.outputs()]
        fates = duplicates.assign_fates(drawn, clusters, pairs, self.remove)
        for piece, own in enumerate(fates):
            np.save(folder / f"{piece:05d}.npy", own)
        sources = [piece.source for piece in clean.corpus.pieces]
        report = duplicates.duplicates_report(clusters, fates, sources, clean.source_names, clean.where)
        write_json(folder / REPORT_NAME, report)


@dataclass(frozen=True)
class Passages(Stage):
    """A task for each slice of the hashes: which windows of words occurred before, among the documents that stay."""

    name = "passages"
    fates: Fates
    section: RepeatedPassages

    @cached_property
    def keys(self) -> list[str]:
        return [digest_of(self.fates.keys, key) for key in self.fates.match.keys]

    def run(self, number: int, folder: Path, progress: ProgressBar) -> None:
        """Write the numbers of the windows that repeat another, and of their documents."""
        pieces = self.fates.match.clean.outputs()
        (decided,) = self.fates.outputs()
        fates = [np.load(decided / f"{piece:05d}.npy") for piece in range(len(pieces))]
        found = duplicates.repeated_windows(pieces, fates, self.section.words, number, len(self.keys))
        for name, numbers in zip(("windows", "documents"), found, strict=True):
            np.save(folder / f"{name}.npy", numbers)

    @cached_property
    def _bases(self) -> np.ndarray:
        """[pieces + 1]: the windows before each piece."""
        outputs = self.fates.match.clean.outputs()
        return np.cumsum([0, *(int(np.load(output / duplicates.FIRST_NAME)[-1]) for output in outputs)])

    def of_piece(self, piece: int) -> Iterator[np.ndarray]:
        """Yield for each document of a piece, in order, the windows of it that occurred before."""
        start, stop = self._bases[piece : piece + 2].tolist()
        inside = []
        for output in self.outputs():
            windows = np.load(output / "windows.npy", mmap_mode="c")
            inside.append(windows[slice(*np.searchsorted(windows, (start, stop)))])
        windows = np.sort(np.concatenate(inside)) - start
        first = np.load(self.fates.match.clean.folder(piece) / duplicates.FIRST_NAME)
        borders = np.searchsorted(windows, first).tolist()
        for number, (low, high) in enumerate(pairwise(borders)):
            yield windows[low:high] - first[number]

    def report(self) -> dict:
        """Count {"words" of a window, "windows", "repeated" of them, "documents" that hold such, "removed"}."""
        repeated = [np.load(output / "documents.npy") for output in self.outputs()]
        counts = {"windows": int(self._bases[-1]), "repeated": sum(map(len, repeated))}
        return {**self.section.to_dict(), **counts, "documents": len(np.unique(np.concatenate(repeated)))}


@dataclass(frozen=True)
class CleanedCorpus:
    """The texts that cleaning leaves of a corpus; they are read as those of a `Corpus`.

    They are cleaned before the first one is read or, `as_read`, while they are read: no more than what is wanted.
    Without deduplication these are the same texts in the same order.
    """

    cleaned_by: list[str]
    """The keys of the data section that ask for it."""
    clean: Clean
    fates: Fates | None = None
    validation_share: float = 0.0
    as_read: bool = False
    passages: Passages | None = None

    @property
    def pieces(self) -> list[TextPiece]:
        return self.clean.corpus.pieces

    @property
    def tasks(self) -> list[range]:
        return self.clean.corpus.tasks

    @property
    def stages(self) -> list[Stage]:
        comparing: list[Stage] = [self.fates.match, self.fates] if self.fates else []
        comparing += [self.passages] if self.passages else []
        before = [] if self.as_read else [self.clean, *comparing]
        return [*filter(None, [self.clean.evaluation_sets]), *before]

    @cached_property
    def keys(self) -> list[str]:
        fates = self.fates.keys if self.fates else []
        cut = [self.passages.keys] if self.passages and self.passages.section.remove else []
        return [digest_of(key, fates, *cut) for key in self.clean.keys]

    def is_empty(self, skipped: dict) -> UserError:
        counts = {reason: count for reason, count in skipped.items() if reason != "cleaner"}
        return self.clean.corpus.is_empty(counts, self.cleaned_by)

    def batches(self, numbers: range, account: dict) -> Iterator[Batch]:
        """Read neighbouring pieces, each text with the draw that decides its split.

        as_read: `account` counts what is skipped, and holds the `cleaner` with its reports; else `Clean` has counted.
        """
        source = self.pieces[numbers.start].source
        if self.as_read:
            account["cleaner"] = cleaner = Cleaner(self.clean)
            documents = cleaner.documents(self.clean.corpus.batches(numbers, account))
            yield from read_batches(source, documents, {}, skip_undecodable=False)
            return
        for number in numbers:
            kept: list[int | None] = []
            documents = self._kept_documents(number, kept)
            for batch in read_batches(source, documents, {}, skip_undecodable=False):
                # `kept` grows as documents are read: its first fates are those of this batch.
                fates, kept[: len(batch.texts)] = kept[: len(batch.texts)], []
                # A fate moves a draw to its side of the share; half of the share is surely below it.
                for place, fate in enumerate(fates):
                    if fate == duplicates.TRAIN:
                        batch.draws[place] = max(batch.draws[place], self.validation_share)
                    elif fate == duplicates.VALIDATION:
                        batch.draws[place] = min(batch.draws[place], self.validation_share / 2)
                yield batch

    def _kept_documents(self, number: int, kept: list[int | None]) -> Iterator[Document]:
        """Read the documents that stay; the fate of each is appended to `kept` as it is read."""
        fates = self.fates and np.load(self.fates.outputs()[0] / f"{number:05d}.npy").tolist()
        cuts: Iterable = repeat(())
        if self.passages and self.passages.section.remove:
            cuts = self.passages.of_piece(number)
        decided = zip(self.clean.texts(number), fates or repeat(None), cuts, strict=False)
        for document, fate, windows in decided:
            if fate in (None, duplicates.TRAIN, duplicates.VALIDATION):
                if len(windows):
                    text = duplicates.without_windows(document.text, windows, self.passages.section.words)
                    document = document._replace(text=text)
                # A text of which nothing is left is no document, and has no fate.
                if document.text:
                    kept.append(fate)
                    yield document

    def reports(self, accounts: list[dict]) -> dict:
        """Report what cleaning took out, as far as the recipe asks for it.

        Returns {"filters", "decontamination", "duplicates", "passages"}. accounts: of texts cleaned as they were read.
        """
        cleaned = [account["cleaned"] for account in accounts] if self.as_read else self.clean.reports()
        merged, reports = merged_reports(cleaned), {}
        if self.clean.filters:
            reports["filters"] = merged["filters"]
        if self.clean.evaluation_sets:
            reports["decontamination"] = decontamination.merge_reports(merged["decontamination"])
        if self.fates:
            (output,) = self.fates.outputs()
            reports["duplicates"] = json.loads((output / REPORT_NAME).read_text(encoding="utf-8"))
        if self.passages:
            reports["passages"] = self.passages.report()
        return reports


def merged_reports(reports: list[dict]) -> dict:
    """Merge what cleaners report of neighbouring texts: {"filters", "decontamination": one or none}."""
    filters = FilterReport.merged([FilterReport(**report["filters"]) for report in reports])
    found = [each for report in reports for each in report["decontamination"]]
    merged = [decontamination.merge_reports(found)] if found else []
    return {"filters": filters.to_dict(), "decontamination": merged}
