"""The stage `tokenize`: some 256 MB of text to shards of train and a part of validation."""

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from pretraining.data.corpus import Batch, prefetch
from pretraining.data.encoder import Encoder
from pretraining.data.shard_writer import SplitWriter, write_durably
from pretraining.data.shards import token_dtype
from pretraining.data.split_sizes import SplitSizes
from pretraining.data.tokenizer import describe_tokenizer

SPLITS = ("train", "validation")
RESULT_NAME = "result.json"


def tokenize(preparation, number: int, folder: Path) -> None:
    """Encode the pieces of task `number`: a folder a split, `result.json`, and counts for the manifest."""
    task, skipped = preparation.token_tasks[number], {}
    batches = preparation.batches(task, skipped)
    first = next(batches, None)
    encoder = _open_encoder(preparation, first)
    writers = {split: SplitWriter(folder / split, encoder.dtype) for split in SPLITS}
    counts, sizes = np.zeros(encoder.vocab_size, np.int64), SplitSizes()
    for batch, tokens, ends in prefetch(_encoded(encoder, first, batches)):
        _append(batch, tokens, ends, writers, preparation.data["validation_share"], counts)
        sizes.extend(batch.draws, np.diff(ends, prepend=0).tolist())
        preparation.progress.add(len(batch.texts), sum(batch.num_bytes), len(tokens))
    splits = {split: writer.finish() for split, writer in writers.items()}
    np.save(folder / "validation_counts.npy", counts)
    sizes.save(folder / "sizes.npz")
    encoding = {"backend": encoder.backend.name, "checked_documents": encoder.num_checked}
    result = {"source": preparation.pieces[task.start].source, "splits": splits, "skipped": skipped}
    write_durably(folder / RESULT_NAME, json.dumps({**result, "encoding": encoding}))


def _open_encoder(preparation, first: Batch | None) -> Encoder:
    """The encoder that `data.encoder` asks for, checked against the reference on the first texts."""
    folder, spec = preparation.tokenizer_folder, preparation.data["tokenizer"]
    info = describe_tokenizer(folder, str(spec))
    wanted = preparation.data.get("encoder", "auto")
    sample = first.texts if first else []
    encoder = Encoder.open(folder, info, token_dtype(info.vocab_size), wanted, sample=sample)
    if encoder.note and preparation.progress.shown:
        print(encoder.note, file=sys.stderr)
    return encoder


def _encoded(encoder: Encoder, first: Batch | None, rest: Iterator[Batch]) -> Iterator[tuple]:
    """Batches with tokens and ends: reading runs ahead of the encoder, the encoder ahead of the writer."""
    for batch in prefetch(_chained(first, rest)):
        yield batch, *encoder.encode(batch.texts, batch.wheres)


def _chained(first: Batch | None, rest: Iterator[Batch]) -> Iterator[Batch]:
    if first is not None:
        yield first
        yield from rest


def _append(
    batch: Batch, tokens: np.ndarray, ends: np.ndarray, writers: dict, share: float, counts: np.ndarray
) -> None:
    """Hand each run of neighbours of one split to its writer, and count the ids of validation."""
    validation, num_bytes = np.array(batch.draws) < share, np.array(batch.num_bytes)
    for first, last in runs_of(validation):
        start = int(ends[first - 1]) if first else 0
        run = tokens[start : ends[last - 1]]
        writer = writers["validation" if validation[first] else "train"]
        writer.extend(run, ends[first:last] - start, num_bytes[first:last])
        if validation[first]:
            counts += np.bincount(run, minlength=len(counts))


def runs_of(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of each run of equal neighbours in `values` [n]."""
    changes = np.flatnonzero(values[1:] != values[:-1]) + 1
    return pairwise([0, *changes.tolist(), len(values)])
