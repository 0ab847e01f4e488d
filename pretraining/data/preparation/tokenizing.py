"""Run the last stages: load or train the tokenizer, then turn texts into shards of train and parts of validation."""

import json
import shutil
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, compress, groupby, islice, pairwise
from math import floor, log10
from pathlib import Path

import numpy as np

from pretraining.data.checksums import digest_of
from pretraining.data.corpus import Batch, Corpus, read_ahead
from pretraining.data.encoder import Encoder, WrongTokens
from pretraining.data.portions import Portion
from pretraining.data.preparation.cleaning import CleanedCorpus, Cleaner
from pretraining.data.preparation.stage import Stage
from pretraining.data.progress import ProgressBar
from pretraining.data.shards import SplitWriter
from pretraining.data.tokenizer import (
    TokenizerInfo,
    check_vocabulary,
    configured_borders,
    describe_tokenizer,
    local_fingerprint,
    make_units,
    note_prefix,
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
RESULT_NAME, POSITIONS_NAME, SIZES_NAME = "result.json", "positions.npy", "sizes.npz"
WRONG_SUFFIX = ".wrong"
"""Of an empty file that is named after a backend whose tokens were found to be wrong."""
RECORDED_DOCUMENTS = 1 << 16
"""Documents whose draws are kept for an exact suggestion: a corpus with more is rarely too small."""

Texts = Corpus | CleanedCorpus


@dataclass(frozen=True)
class MakeTokenizer(Stage):
    """One task: load the tokenizer, or train it on a sample of the sources."""

    name = "tokenizer"
    texts: Texts
    tokenizer: str | dict
    """`data.tokenizer` of the recipe: a name, a folder, or {"train_vocab_size": ids, ...}."""
    vocab_size: int | None
    """The model's vocabulary size; None if there is no model to fit."""
    validation_share: float
    borders: str = "eos"

    @cached_property
    def keys(self) -> list[str]:
        trained = isinstance(self.tokenizer, dict)
        trained_on = [self.texts.keys, self.validation_share] if trained else []
        # The default is not part of it: tasks that had finished before there was the key stay.
        borders = [] if self.borders == "eos" else [self.borders]
        fingerprint = local_fingerprint(self.tokenizer)
        # tokenizer.json does not say which of its tokens end and begin a document.
        named = configured_borders(Path(self.tokenizer).expanduser()) if fingerprint else []
        return [digest_of(self.tokenizer, fingerprint, self.vocab_size, trained_on, *borders, *named)]

    def run(self, number: int, folder: Path, progress: ProgressBar) -> None:
        """Fill `folder` with tokenizer.json and its companions; UserError if they do not fit the model."""
        if isinstance(self.tokenizer, str):
            save_tokenizer(self.tokenizer, folder)
        else:
            progress.label("training the tokenizer")
            further, texts = dict(self.tokenizer), self._training_texts(progress)
            if "units" in further:
                make_units(texts, further.pop("units"), folder, **further)
            else:
                vocab_size = further.pop("train_vocab_size")
                # Before the training, which takes long.
                check_vocabulary(vocab_size, self.vocab_size)
                train_tokenizer(texts, vocab_size, folder, **further)
        info = describe_tokenizer(folder, str(self.tokenizer))
        check_vocabulary(info.vocab_size, self.vocab_size)
        note_prefix(folder, info, self.borders)

    @property
    def output(self) -> Path:
        return self.outputs()[0]

    @property
    def info(self) -> TokenizerInfo:
        return describe_tokenizer(self.output, str(self.tokenizer))

    def _training_texts(self, progress: ProgressBar) -> Iterator[str]:
        skipped, empty = {}, True
        for batch in read_ahead(self.training_batches(skipped)):
            empty = False
            progress.add(len(batch.texts), sum(batch.num_bytes))
            yield from batch.texts
        if empty:
            raise self.texts.is_empty(skipped)

    def training_batches(self, skipped: dict) -> Iterator[Batch]:
        """Read the beginning of each source, equally much of each, without its validation documents."""
        by_source = groupby(self.texts.tasks, lambda task: self.texts.pieces[task.start].source)
        tasks = [list(own) for _, own in by_source]
        for own in tasks:
            num_bytes = TRAINING_BYTES // len(tasks)
            for batch in chain.from_iterable(self.texts.batches(task, skipped) for task in own):
                # Validation must stay unseen, also by the tokenizer.
                kept = [draw >= self.validation_share for draw in batch.draws]
                columns = (batch.texts, batch.wheres, batch.num_bytes, batch.draws)
                trained = Batch(batch.source, *([*compress(column, kept)] for column in columns))
                num_bytes -= sum(trained.num_bytes)
                yield trained
                if num_bytes <= 0:
                    break


@dataclass(frozen=True)
class Tokenize(Stage):
    """A task for each 256 MB of text: its shards of train and its part of validation."""

    name = "tokenize"
    texts: Texts
    tokenizer: MakeTokenizer
    encoder: str
    validation_share: float
    bounds: dict[int, Portion] = field(default_factory=dict)
    """What to take of a task, at which a portion of its source ends; all of every other one."""

    @cached_property
    def keys(self) -> list[str]:
        return [self._key(number) for number in range(len(self.texts.tasks))]

    def _key(self, number: int) -> str:
        task = self.texts.tasks[number]
        # Results have positions: a finished task of an older program has none, and is not taken for these.
        shared = [self.tokenizer.keys, self.validation_share, "positions"]
        # The tokens are the same; but the task counts what is taken out, as `Clean` does otherwise.
        shared += ["as read"] if isinstance(self.texts, CleanedCorpus) and self.texts.as_read else []
        return digest_of(shared, self.texts.keys[task.start : task.stop], *self.bounds.get(number, ()))

    def folder(self, number: int) -> Path:
        # A survey asks for many, each with bounds of its own: no key of the others is made.
        return self.work / self.name / f"{number:05d}-{self._key(number)[:12]}"

    def run(self, number: int, folder: Path, progress: ProgressBar) -> None:
        """Encode the pieces of a task: write a folder for each split, and `result.json` with what they hold."""
        task, account, bound = self.texts.tasks[number], {}, self.bounds.get(number)
        batches = self.texts.batches(task, account)
        # The encoder is checked on these texts before it encodes; `chain` puts them back.
        first = list(islice(batches, 1))
        sample = [text for batch in first for text in batch.texts]
        made = self.tokenizer
        encoder = Encoder(made.output, made.info, self.encoder, sample, made.borders)
        # Silent in workers, else each task would print it.
        if encoder.note and progress.shown:
            print(encoder.note, file=sys.stderr)
        output = _Output(folder, encoder.dtype, self.validation_share)
        # The encoder runs ahead of the writer, and reading ahead of the encoder. Before a bound neither does, so that
        # the counts are those of what was read up to it.
        ahead = read_ahead if bound is None else iter
        read = ahead(chain(first, batches))
        encoded = ((batch, *encoder.encode(batch.texts, batch.wheres)) for batch in read)
        try:
            for batch, tokens, ends in ahead(encoded):
                progress.add(len(batch.texts), sum(batch.num_bytes), len(tokens))
                if output.append(batch, tokens, ends, bound):
                    break
        except WrongTokens:
            # Other tasks may still finish with it, in other processes: the next preparation drops them.
            (self.work / f"{encoder.backend.name}{WRONG_SUFFIX}").touch()
            raise
        encoding = {"backend": encoder.backend.name, "checked_documents": encoder.num_checked}
        cleaner: Cleaner | None = account.pop("cleaner", None)
        result = {"source": self.texts.pieces[task.start].source, "skipped": account, "encoding": encoding}
        output.finish({**result, **({"cleaned": cleaner.reports()} if cleaner else {})})

    def result(self, number: int) -> dict:
        """Read what a finished task reports: {"source", "splits", "skipped", "encoding", "cut", "cleaned"}."""
        return json.loads((self.folder(number) / RESULT_NAME).read_text(encoding="utf-8"))


class _Output:
    """Write what a task has encoded: documents of each split, and of validation its places."""

    def __init__(self, folder: Path, dtype: np.dtype, validation_share: float):
        self._folder, self._validation_share = folder, validation_share
        self._writers = {split: SplitWriter(folder / split, dtype) for split in SPLITS}
        # Draws and sizes of the first documents, to suggest a share that works.
        self._draws, self._lengths, self._num_documents = array("d"), array("q"), 0
        self._documents = self._tokens = 0
        """What a bound counts, so far: documents and tokens of training, or of texts that are for validation only."""
        self._trained_tokens = 0
        self._positions: list[np.ndarray] = []
        self._cut: dict | None = None

    def append(self, batch: Batch, tokens: np.ndarray, ends: np.ndarray, bound: Portion | None) -> bool:
        """Write a batch, up to the document that reaches `bound`; return whether it was reached."""
        validation, lengths = np.array(batch.draws) < self._validation_share, np.diff(ends, prepend=0)
        # Of a text of training and validation, a bound counts what is trained on.
        counted = validation if self._validation_share == ALL else ~validation
        if bound is not None:
            remaining = bound.less(self._documents, self._tokens)
            last = remaining.last_document(np.cumsum(lengths[counted]))
            if last is not None:
                stop = int(np.flatnonzero(counted)[last]) + 1
                validation, lengths, counted = validation[:stop], lengths[:stop], counted[:stop]
                self._cut = {"last_document_tokens": int(lengths[-1])}
        stop = len(lengths)
        # Tokens of training up to the end of each document, from the beginning of the task.
        train_ends = self._trained_tokens + np.cumsum(np.where(validation, 0, lengths))
        ends, num_bytes = ends[:stop], np.array(batch.num_bytes[:stop])
        # Runs of neighbours of one split, not single documents: one call of the writer copies many.
        changes = np.flatnonzero(validation[1:] != validation[:-1]) + 1
        for first, last in pairwise([0, *changes.tolist(), stop]):
            start = int(ends[first - 1]) if first else 0
            writer = self._writers["validation" if validation[first] else "train"]
            writer.extend(tokens[start:], ends[first:last] - start, num_bytes[first:last])
        # Documents beyond the recorded ones count too: with them the suggestion cannot be exact.
        self._num_documents += stop
        recorded = min(stop, RECORDED_DOCUMENTS - len(self._draws))
        self._draws.extend(batch.draws[:recorded])
        self._lengths.extend(lengths[:recorded].tolist())
        self._positions.append(train_ends[validation])
        self._documents += int(counted.sum())
        self._tokens += int(lengths[counted].sum())
        self._trained_tokens = int(train_ends[-1])
        return self._cut is not None

    def finish(self, result: dict) -> None:
        """Write the last shards, and `result.json` with what they hold."""
        splits = {split: writer.finish() for split, writer in self._writers.items()}
        np.save(self._folder / POSITIONS_NAME, np.concatenate([np.empty(0, np.int64), *self._positions]))
        recorded = {"draws": self._draws, "tokens": self._lengths, "num_documents": self._num_documents}
        np.savez(self._folder / SIZES_NAME, **recorded)
        write_json(self._folder / RESULT_NAME, {**result, "splits": splits, "cut": self._cut})


class TokenizeValidation(Tokenize):
    """The same for texts of `data.validation`, whose share is `ALL`."""

    name = "tokenize-validation"


def drop_wrong_tokens(work: Path) -> None:
    """Remove all tasks of a work folder that were encoded by a backend whose tokens were found to be wrong."""
    wrong = {path.stem: path for path in work.glob(f"*{WRONG_SUFFIX}")}
    stages = (Tokenize.name, TokenizeValidation.name) if wrong else ()
    for path in [path for stage in stages for path in work.glob(f"{stage}/[0-9]*/{RESULT_NAME}")]:
        if json.loads(path.read_text(encoding="utf-8"))["encoding"]["backend"] in wrong:
            # At once: half of a task must not be taken for a finished one.
            hidden = path.parent.with_name(f".{path.parent.name}")
            shutil.rmtree(hidden, ignore_errors=True)
            path.parent.rename(hidden)
            shutil.rmtree(hidden)
    for path in wrong.values():
        path.unlink()


def workable_share(folders: list[Path], num_tokens: int, wanted: int) -> float | None:
    """Find the shortest validation_share that leaves each split `wanted` of `num_tokens` tokens, or None.

    folders: the outputs of the tasks, with the draws and sizes of their first documents.
    """

    def round_up(value: float, digits: int) -> float:
        """Find the smallest number of `digits` significant decimal digits above `value`."""
        unit = 10.0 ** (floor(log10(max(value, 1e-12))) - digits + 1)
        return float(f"{(floor(value / unit) + 1) * unit:.{digits}g}")

    recorded = [np.load(folder / SIZES_NAME) for folder in folders]
    if sum(int(each["num_documents"]) for each in recorded) > RECORDED_DOCUMENTS:
        # Not all draws are known: aim at twice what is wanted, if the corpus has room for it.
        return round_up(2 * wanted / num_tokens, digits=1) if num_tokens > 4 * wanted else None
    columns = (zip(each["draws"].tolist(), each["tokens"].tolist(), strict=True) for each in recorded)
    documents = sorted(chain.from_iterable(columns))
    sums = accumulate(tokens for _, tokens in documents)
    # The first document with which validation has enough. It is there if its draw is below the share.
    draw = next((draw for (draw, _), held in zip(documents, sums, strict=True) if held >= wanted), None)
    # Try the shortest decimal first.
    for share in [] if draw is None else [round_up(draw, digits) for digits in range(1, 16)]:
        below = sum(size for place, size in documents if place < share)
        if wanted <= below <= num_tokens - wanted and share < 1:
            return share
    return None
