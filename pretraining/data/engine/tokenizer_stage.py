"""The stage `tokenizer`: one task that loads the tokenizer, or trains it on a sample of the sources."""

from collections.abc import Iterator
from pathlib import Path

from pretraining.data.corpus import TRAINING_BYTES, empty_corpus, prefetch
from pretraining.data.tokenizer import check_vocabulary, describe_tokenizer, save_tokenizer, train_tokenizer


def make_tokenizer(preparation, folder: Path) -> None:
    """Fill `folder` with tokenizer.json and its companions; UserError where they do not fit the model."""
    spec = preparation.data["tokenizer"]
    if isinstance(spec, str):
        save_tokenizer(spec, folder)
    else:
        check_vocabulary(spec["train_vocab_size"], preparation.vocab_size)
        preparation.progress.label("training the tokenizer")
        train_tokenizer(_training_texts(preparation), spec["train_vocab_size"], folder)
    check_vocabulary(describe_tokenizer(folder, str(spec)).vocab_size, preparation.vocab_size)


def _training_texts(preparation) -> Iterator[str]:
    """The beginning of each source, of all as much, without its validation documents."""
    skipped, empty = {}, True
    for batch in prefetch(_training_batches(preparation, skipped)):
        empty = False
        preparation.progress.add(len(batch.texts), sum(batch.num_bytes))
        yield from batch.texts
    if empty:
        raise empty_corpus(preparation.data, skipped)


def _training_batches(preparation, skipped: dict) -> Iterator:
    share = preparation.data["validation_share"]
    num_sources = len(preparation.sources)
    for source in range(num_sources):
        num_bytes = TRAINING_BYTES // num_sources
        for task in preparation.token_tasks:
            if preparation.pieces[task.start].source != source or num_bytes <= 0:
                continue
            for batch in preparation.batches(task, skipped):
                kept = batch.without_validation(share)
                num_bytes -= sum(kept.num_bytes)
                yield kept
                if num_bytes <= 0:
                    break
