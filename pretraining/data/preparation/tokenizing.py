"""Run the last stages: load or train the tokenizer, then turn texts into shards of train and parts of validation."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np

from pretraining.data.corpus import Batch, Corpus, prefetch
from pretraining.data.encoder import Encoder
from pretraining.data.manifest import digest_of
from pretraining.data.preparation.cleaning import CleanedCorpus
from pretraining.data.preparation.execution import Stage
from pretraining.data.preparation.split_sizes import SplitSizes
from pretraining.data.progress import Progress, Silence
from pretraining.data.shard_writer import SplitWriter
from pretraining.data.shards import token_dtype
from pretraining.data.tokenizer import (
    TokenizerInfo,
    check_vocabulary,
    describe_tokenizer,
    local_fingerprint,
    save_tokenizer,
    train_tokenizer,
)
from pretraining.runtime.durable_files import write_json

TRAINING_BYTES = 256 << 20
"""The most text that the tokenizer is trained on, in equal parts from each source: BPE gains little from more. The
weights of a run do not count here, so that other weights need no other tokens."""

SPLITS = ("train", "validation")
ALL = 1.0
"""The validation_share of texts that are for validation only: every draw is below it."""
RESULT_NAME, COUNTS_NAME = "result.json", "validation_counts.npy"


@dataclass(frozen=True)
class MakeTokenizer(Stage):
    """One task: load the tokenizer, or train it on a sample of the sources."""

    name = "tokenizer"
    texts: Corpus | CleanedCorpus
    tokenizer: str | dict
    """`data.tokenizer` of the recipe: a name, a folder, or {"train_vocab_size": ids, ...}."""
    vocab_size: int | None
    """The model's vocabulary size; None if there is no model to fit."""
    validation_share: float

    @cached_property
    def keys(self) -> list[str]:
        """Make one key; if the tokenizer is trained, it depends on all texts."""
        trained = isinstance(self.tokenizer, dict)
        trained_on = [self.texts.keys, self.validation_share] if trained else []
        return [digest_of(self.tokenizer, local_fingerprint(self.tokenizer), self.vocab_size, trained_on)]

    def run(self, number: int, folder: Path, progress: Progress | Silence) -> None:
        """Fill `folder` with tokenizer.json and its companions; UserError if they do not fit the model."""
        if isinstance(self.tokenizer, str):
            save_tokenizer(self.tokenizer, folder)
        else:
            vocab_size = self.tokenizer["train_vocab_size"]
            # Before the training, which takes long.
            check_vocabulary(vocab_size, self.vocab_size)
            progress.label("training the tokenizer")
            further = {key: value for key, value in self.tokenizer.items() if key != "train_vocab_size"}
            train_tokenizer(self._training_texts(progress), vocab_size, folder, **further)
        check_vocabulary(self.describe(folder).vocab_size, self.vocab_size)

    def describe(self, folder: Path) -> TokenizerInfo:
        """Describe the tokenizer in `folder`."""
        return describe_tokenizer(folder, str(self.tokenizer))

    @property
    def output(self) -> Path:
        """Return the folder of the finished tokenizer."""
        return self.outputs()[0]

    def _training_texts(self, progress: Progress | Silence) -> Iterator[str]:
        skipped, empty = {}, True
        for batch in prefetch(self.training_batches(skipped)):
            empty = False
            progress.add(len(batch.texts), sum(batch.num_bytes))
            yield from batch.texts
        if empty:
            raise self.texts.is_empty(skipped)

    def training_batches(self, skipped: dict) -> Iterator[Batch]:
        """Read the beginning of each source, equally much of each, without its validation documents."""
        sources = sorted({piece.source for piece in self.texts.pieces})
        for source in sources:
            num_bytes = TRAINING_BYTES // len(sources)
            for task in self.texts.tasks:
                if self.texts.pieces[task.start].source != source or num_bytes <= 0:
                    continue
                for batch in self.texts.batches(task, skipped):
                    # Validation must stay unseen, also by the tokenizer.
                    kept = batch.without_validation(self.validation_share)
                    num_bytes -= sum(kept.num_bytes)
                    yield kept
                    if num_bytes <= 0:
                        break


@dataclass(frozen=True)
class Tokenize(Stage):
    """A task for each 256 MB of text: its shards of train and its part of validation."""

    name = "tokenize"
    texts: Corpus | CleanedCorpus
    tokenizer: MakeTokenizer
    encoder: str
    """`data.encoder` of the recipe."""
    validation_share: float

    @cached_property
    def keys(self) -> list[str]:
        """Make a key for each task, which depends on the tokenizer and on the texts of its pieces."""
        shared = [self.tokenizer.keys, self.validation_share]
        return [digest_of(shared, self.texts.keys[task.start : task.stop]) for task in self.texts.tasks]

    def run(self, number: int, folder: Path, progress: Progress | Silence) -> None:
        """Encode the pieces of a task: write a folder for each split, `result.json`, and counts for the manifest."""
        task, skipped = self.texts.tasks[number], {}
        batches = self.texts.batches(task, skipped)
        # The encoder is checked on these texts before it encodes; `chain` puts them back.
        first = list(islice(batches, 1))
        info = self.tokenizer.describe(self.tokenizer.output)
        encoder = self._open_encoder(info, first, progress)
        writers = {split: SplitWriter(folder / split, encoder.dtype) for split in SPLITS}
        counts, sizes = np.zeros(info.vocab_size, np.int64), SplitSizes()
        # The encoder runs ahead of the writer, and reading ahead of the encoder.
        for batch, tokens, ends in prefetch(_encoded(encoder, chain(first, batches))):
            self._append(batch, tokens, ends, writers, counts)
            sizes.extend(batch.draws, np.diff(ends, prepend=0).tolist())
            progress.add(len(batch.texts), sum(batch.num_bytes), len(tokens))
        splits = {split: writer.finish() for split, writer in writers.items()}
        np.save(folder / COUNTS_NAME, counts)
        sizes.save(folder)
        encoding = {"backend": encoder.backend.name, "checked_documents": encoder.num_checked}
        result = {"source": self.texts.pieces[task.start].source, "splits": splits, "skipped": skipped}
        write_json(folder / RESULT_NAME, {**result, "encoding": encoding})

    def _open_encoder(self, info: TokenizerInfo, first: list[Batch], progress: Progress | Silence) -> Encoder:
        """Open the encoder that `data.encoder` asks for, checked against the reference on the first texts."""
        sample = [text for batch in first for text in batch.texts]
        dtype = token_dtype(info.vocab_size)
        encoder = Encoder.open(self.tokenizer.output, info, dtype, self.encoder, sample=sample)
        # Silent in workers, else each task would print it.
        if encoder.note and progress.shown:
            print(encoder.note, file=sys.stderr)
        return encoder

    def _append(
        self, batch: Batch, tokens: np.ndarray, ends: np.ndarray, writers: dict, counts: np.ndarray
    ) -> None:
        """Give each run of neighbours of one split to its writer, and count the ids of validation."""
        validation, num_bytes = np.array(batch.draws) < self.validation_share, np.array(batch.num_bytes)
        for first, last in runs_of(validation):
            # Runs, not single documents: one call of the writer copies many.
            start = int(ends[first - 1]) if first else 0
            run = tokens[start : ends[last - 1]]
            writer = writers["validation" if validation[first] else "train"]
            writer.extend(run, ends[first:last] - start, num_bytes[first:last])
            if validation[first]:
                counts += np.bincount(run, minlength=len(counts))

    def results(self) -> list[dict]:
        """Read what each task reports about its output: {"source", "splits", "skipped", "encoding"}."""
        return [json.loads((output / RESULT_NAME).read_text(encoding="utf-8")) for output in self.outputs()]


class TokenizeValidation(Tokenize):
    """The same for texts of `data.validation`, whose share is `ALL`."""

    name = "tokenize-validation"


def _encoded(encoder: Encoder, batches: Iterator[Batch]) -> Iterator[tuple[Batch, np.ndarray, np.ndarray]]:
    """Encode batches to tokens and ends; reading runs ahead of the encoder."""
    for batch in prefetch(batches):
        yield batch, *encoder.encode(batch.texts, batch.wheres)


def runs_of(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """Split `values` [n] into runs of equal neighbours: (first, last + 1) of each."""
    changes = np.flatnonzero(values[1:] != values[:-1]) + 1
    return pairwise([0, *changes.tolist(), len(values)])
