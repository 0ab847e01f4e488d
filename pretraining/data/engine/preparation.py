"""All that a task needs to know, on whichever machine it runs, and the stages of one preparation."""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from pretraining.data.corpus import Batch, read_batches
from pretraining.data.dedup.clusters import TRAIN, VALIDATION
from pretraining.data.engine.clean_stage import INDEX_NAME, clean, index_evaluation_sets, read_texts
from pretraining.data.engine.duplicate_stages import decide_fates, gather_signatures, match, num_slices
from pretraining.data.engine.pieces import Piece, cut_sources, gather
from pretraining.data.engine.tasks import Stage
from pretraining.data.engine.tokenize_stage import tokenize
from pretraining.data.engine.tokenizer_stage import make_tokenizer
from pretraining.data.manifest import FORMAT, consulted, digest_of
from pretraining.data.progress import Progress, Silence
from pretraining.data.publishing import work_folder
from pretraining.data.text_files import Document
from pretraining.data.tokenizer import local_fingerprint

STATE_NAME = "preparation.pickle"


@dataclass
class Preparation:
    """The data section of a recipe, its sources cut into pieces, and the folder the tasks write into."""

    folder: Path
    """Where the finished data set goes."""
    data: dict
    vocab_size: int | None
    """Of the model; None where there is no model to fit."""
    sequence_length: int
    sources: list
    fingerprints: list[dict]
    """What each source is, for the manifest."""
    pieces: list[Piece]
    token_tasks: list[range]
    """The pieces that each task of the stage `tokenize` takes."""
    progress: Progress | Silence = field(default_factory=Silence, repr=False)

    @classmethod
    def of(cls, recipe, sources: list, folder: Path, fingerprints: list[dict]) -> "Preparation":
        """The preparation of a recipe's data; the sources are cut, which may read their files' footers."""
        fitting = recipe.model.vocab_size, recipe.sequence_length
        pieces = cut_sources(sources)
        return cls(
            folder, recipe.data.to_dict(), *fitting, sources, fingerprints, pieces, gather(pieces, sources)
        )

    @property
    def work(self) -> Path:
        """Where the tasks keep what they have finished."""
        return work_folder(self.folder)

    def save(self) -> None:
        """Keep it in the work folder, for tasks in other processes."""
        self.work.mkdir(parents=True, exist_ok=True)
        part = self.work / f".{STATE_NAME}.part"
        part.write_bytes(pickle.dumps(Preparation(**self._state())))
        part.rename(self.work / STATE_NAME)

    def _state(self) -> dict:
        kept = [each for each in self.__dataclass_fields__ if each != "progress"]
        return {name: getattr(self, name) for name in kept}

    @classmethod
    def load(cls, work: Path) -> "Preparation":
        """What `save` kept."""
        return pickle.loads((work / STATE_NAME).read_bytes())

    def stages(self) -> list[Stage]:
        """The stages in their order; each may use the outputs of those before."""
        cleaning = [self.evaluation_stage, self.clean_stage] if self.cleans else []
        comparing = [self.signatures_stage, self.match_stage, self.fates_stage] if self.compares else []
        stages = [*cleaning, *comparing, self.tokenizer_stage, self.tokenize_stage]
        return [stage for stage in stages if stage is not None]

    @property
    def compares(self) -> bool:
        """Are documents compared with each other?"""
        dedup = self.data.get("dedup")
        return bool(dedup and (dedup["exact"] or dedup["minhash"]))

    @property
    def cleans(self) -> bool:
        """Does anything stand between reading a text and encoding it?"""
        return self.compares or bool(self.data.get("filters") or self.data.get("decontaminate"))

    @cached_property
    def read_keys(self) -> list[str]:
        """A digest for each piece, of its text as it is read."""
        options = self.data.get("skip_undecodable")
        return [digest_of(FORMAT, options, self.sources[p.source].digest_of(p.extents)) for p in self.pieces]

    @cached_property
    def text_keys(self) -> list[str]:
        """A digest for each piece, of its text as the tokenizer gets it."""
        if not self.cleans:
            return self.read_keys
        fates = self.fates_stage.keys if self.compares else []
        return [digest_of(key, fates) for key in self.clean_stage.keys]

    @cached_property
    def consulted(self) -> dict:
        """What filters and decontamination go by, as it is at the beginning."""
        return consulted(self.data)

    @cached_property
    def evaluation_stage(self) -> Stage | None:
        """One task: the n-grams of the evaluation sets."""
        section = self.data.get("decontaminate")
        if not section:
            return None
        from pretraining.data.dedup.decontamination import fingerprint_of_sets

        key = digest_of(section, fingerprint_of_sets(section["folder"], section["tasks"]))
        return Stage("evaluation-sets", [key], lambda number, folder: index_evaluation_sets(self, folder))

    @property
    def evaluation_index(self) -> Path | None:
        """The finished index, where the recipe names evaluation sets."""
        stage = self.evaluation_stage
        return stage.outputs(self.work)[0] / INDEX_NAME if stage else None

    @cached_property
    def clean_stage(self) -> Stage:
        """A task for each piece: filters, decontamination, signatures."""
        evaluation = self.evaluation_stage.keys if self.evaluation_stage else []
        dedup = self.data.get("dedup") or {}
        shared = [self.consulted, evaluation, dedup.get("exact"), dedup.get("minhash")]
        keys = [digest_of(shared, key) for key in self.read_keys]
        return Stage("clean", keys, lambda number, folder: clean(self, number, folder))

    @cached_property
    def signatures_stage(self) -> Stage:
        """One task: the files of all pieces in one folder."""
        key = digest_of(self.clean_stage.keys)
        return Stage("signatures", [key], lambda number, folder: gather_signatures(self, folder))

    @cached_property
    def match_stage(self) -> Stage:
        """A task for each slice of the comparison."""
        slices = range(num_slices(len(self.pieces)))
        keys = [digest_of(self.signatures_stage.keys, number) for number in slices]
        return Stage("match", keys, lambda number, folder: match(self, number, folder))

    @cached_property
    def fates_stage(self) -> Stage:
        """One task: clusters, and what becomes of each document."""
        key = digest_of(self.match_stage.keys, self.data["dedup"]["remove"], self.data["validation_share"])
        return Stage("fates", [key], lambda number, folder: decide_fates(self, folder))

    @cached_property
    def tokenizer_stage(self) -> Stage:
        """One task: load the tokenizer, or train it on the text before it."""
        spec = self.data["tokenizer"]
        trained_on = [self.text_keys, self.data["validation_share"]] if isinstance(spec, dict) else []
        key = digest_of(spec, local_fingerprint(spec), self.vocab_size, trained_on)
        return Stage("tokenizer", [key], lambda number, folder: make_tokenizer(self, folder))

    @cached_property
    def tokenize_stage(self) -> Stage:
        """A task for each 256 MB of text: its shards of train and its part of validation."""
        shared = [self.tokenizer_stage.keys, self.data["validation_share"]]
        keys = [digest_of(shared, self.text_keys[task.start : task.stop]) for task in self.token_tasks]
        return Stage("tokenize", keys, lambda number, folder: tokenize(self, number, folder))

    @property
    def tokenizer_folder(self) -> Path:
        """The finished tokenizer."""
        return self.tokenizer_stage.outputs(self.work)[0]

    def read_pieces(self, numbers: range, skipped: dict) -> Iterator[Batch]:
        """The text of neighbouring pieces of one source as it is read; `skipped` counts what is left out."""
        source = self.pieces[numbers.start].source
        extents = [extent for number in numbers for extent in self.pieces[number].extents]
        documents = self.sources[source].documents(extents)
        yield from read_batches(source, documents, skipped, self.data.get("skip_undecodable", False))

    def batches(self, numbers: range, skipped: dict) -> Iterator[Batch]:
        """The text of neighbouring pieces as the tokenizer gets it, each with the draw that decides its split."""
        if not self.cleans:
            yield from self.read_pieces(numbers, skipped)
            return
        for number in numbers:
            folder = self.clean_stage.folder(self.work, number)
            fates, kept = self._fates(number), []
            documents = _kept_documents(read_texts(folder), fates, kept)
            for batch in read_batches(self.pieces[number].source, documents, {}, skip_undecodable=False):
                batch.draws = self._draws(batch.draws, [kept.pop(0) for _ in batch.texts])
                yield batch

    def _fates(self, number: int) -> np.ndarray | None:
        """uint8 [documents] of a piece; None where documents are not compared."""
        return (
            np.load(self.fates_stage.outputs(self.work)[0] / f"{number:05d}.npy") if self.compares else None
        )

    def _draws(self, draws: list[float], fates: list[int | None]) -> list[float]:
        """The draws, moved to the side of the share that the fates say."""
        share = self.data["validation_share"]
        sides = {None: lambda d: d, TRAIN: lambda d: max(d, share), VALIDATION: lambda d: min(d, share / 2)}
        return [sides[fate](draw) for draw, fate in zip(draws, fates, strict=True)]


def _kept_documents(
    documents: Iterator[Document], fates: np.ndarray | None, kept: list
) -> Iterator[Document]:
    """The documents that stay; the fate of each is appended to `kept` as it is read."""
    for row, document in enumerate(documents):
        fate = None if fates is None else int(fates[row])
        if fate in (None, TRAIN, VALIDATION):
            kept.append(fate)
            yield document
