"""Count the tokens of a recipe's sources before anything is prepared."""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pretraining.data.corpus import CLEANING_KEYS, Batch, Corpus, prefetch, read_batches
from pretraining.data.progress import ProgressBar
from pretraining.data.sources import open_sources
from pretraining.recipe.recipe import Recipe

if TYPE_CHECKING:
    from pretraining.data.encoder import Encoder


@dataclass(frozen=True)
class TokenCounts:
    """The texts of a recipe's sources, counted as they are read: before filters and deduplication."""

    name: str
    encoder: str
    documents_of_each_source: int | None
    """The most that were counted; None: all."""
    before_cleaning: bool
    """Whether the recipe asks for cleaning, which leaves less."""
    sources: list[dict]
    """For each source documents, text_bytes, tokens (EOS included), bytes_per_token, and compression: bytes of text for
    each byte on disk."""
    total: dict
    skipped: dict[str, int]

    def to_dict(self) -> dict:
        return asdict(self)

    def as_text(self) -> str:
        """Show the counts as a table."""
        limit = self.documents_of_each_source
        lines = [f"data {self.name}" + (f", the first {limit:,} documents of each source" if limit else "")]
        lines.append(f"  {'source':<32}{'documents':>13}{'text bytes':>17}{'tokens':>16}{'bytes/token':>13}")
        for row in [*self.sources, {"source": "total", **self.total}]:
            lines.append(
                f"  {row['source'][-31:]:<32}{row['documents']:>13,}{row['text_bytes']:>17,}{row['tokens']:>16,}"
                f"{row['bytes_per_token']:>13.2f}"
            )
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.items())
        lines.append(f"  documents left out: {left_out}")
        if self.before_cleaning:
            lines.append("  counted as read: before filters, deduplication and decontamination")
        return "\n".join(lines)


def count_data(recipe: Recipe, num_documents: int | None = None, show_progress: bool = True) -> TokenCounts:
    """Count documents, bytes of text and tokens of each source in `recipe.data`; no shard is written.

    `num_documents` limits the count to the first documents of each source. Raises UserError as a preparation does.
    """
    data = recipe.data
    sources = open_sources(data)[: len(data.sources)]  # of training
    with ProgressBar("counting", show_progress) as progress, tempfile.TemporaryDirectory() as folder:
        # A tokenizer that is to be trained is trained in the temporary folder, and is gone after the count.
        encoder = _open_encoder(recipe, Corpus.of(data, sources), Path(folder), progress)
        progress.label("counting")
        rows, skips = [], []
        for number, source in enumerate(sources):
            skipped: dict[str, int] = {}
            batches = read_batches(number, source.documents(), skipped, data.skip_undecodable)
            row = {"documents": 0, "text_bytes": 0, "tokens": 0}
            # Reads the next batches while this one is encoded.
            for batch in prefetch(_first_documents(batches, num_documents)):
                tokens, _ = encoder.encode(batch.texts, batch.wheres)
                row["documents"] += len(batch.texts)
                row["text_bytes"] += sum(batch.num_bytes)
                row["tokens"] += len(tokens)
                progress.add(len(batch.texts), sum(batch.num_bytes), len(tokens))
            rows.append(row)
            skips.append(skipped)
    token_bytes = encoder.dtype.itemsize
    total = {key: sum(row[key] for row in rows) for key in rows[0]}
    return TokenCounts(
        name=data.name,
        encoder=encoder.backend.name,
        documents_of_each_source=num_documents,
        before_cleaning=any(getattr(data, key) for key in CLEANING_KEYS),
        sources=[
            {"source": spec.called, **_with_ratios(row, token_bytes)}
            for spec, row in zip(data.sources, rows, strict=True)
        ],
        total=_with_ratios(total, token_bytes),
        skipped={key: sum(skipped[key] for skipped in skips) for key in skips[0]},
    )


def _open_encoder(recipe: Recipe, corpus: Corpus, folder: Path, progress: ProgressBar) -> "Encoder":
    """Open the encoder that a preparation of the recipe would use; its tokenizer is made in `folder`."""
    # numpy, tokenizers and pyarrow are needed from here on
    from pretraining.data.encoder import Encoder
    from pretraining.data.preparation.tokenizing import MakeTokenizer

    data, vocab_size = recipe.data, recipe.model.vocab_size
    stage = MakeTokenizer(folder, corpus, data.tokenizer, vocab_size, data.validation_share)
    # Run directly, without `run_task`: the folder is temporary, so nothing is published or synced.
    stage.run(0, folder / "tokenizer", progress)
    info = stage.describe(folder / "tokenizer")
    # Empty and undecodable texts tell nothing about the encoder.
    sample = [text for text, _ in islice(corpus.sources[0].documents(), 20) if text]
    encoder = Encoder.open(folder / "tokenizer", info, data.encoder, sample)
    if encoder.note and progress.shown:
        print(encoder.note, file=sys.stderr)
    return encoder


def _first_documents(batches: Iterator[Batch], count: int | None) -> Iterator[Batch]:
    """Yield the batches, cut after `count` documents."""
    for batch in batches:
        columns = (batch.texts, batch.wheres, batch.num_bytes, batch.draws)
        yield Batch(batch.source, *(list(islice(column, count)) for column in columns))
        # Stop before the next batch is read: the source may be a hub dataset of many files.
        if count is not None and (count := count - len(batch.texts)) <= 0:
            return


def _with_ratios(row: dict, token_bytes: int) -> dict:
    # max: a source without text has no tokens.
    bytes_per_token = row["text_bytes"] / max(1, row["tokens"])
    return {**row, "bytes_per_token": bytes_per_token, "compression": bytes_per_token / token_bytes}
