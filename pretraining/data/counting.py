"""How many tokens a recipe's sources hold, before anything is prepared."""

import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pretraining.data.corpus import CLEANING_KEYS, Batch, prefetch, read_batches
from pretraining.data.progress import Progress
from pretraining.data.sources import open_source
from pretraining.data.tokenizer import describe_tokenizer

if TYPE_CHECKING:
    from pretraining.data.encoder import Encoder


def count_data(recipe, num_documents: int | None = None, show_progress: bool = True) -> dict:
    """Documents, bytes of text and tokens (EOS included) of each source in `recipe.data`; no shard is written.

    The texts are counted as they are read: nothing is filtered, deduplicated or decontaminated.

    With `num_documents`, the first so many of each source. Returns `sources` and their `total`; beside the
    counts, `bytes_per_token` and `compression`, bytes of text for each byte on disk. A tokenizer that is to
    be trained is trained, and forgotten. Raises UserError as a preparation does.
    """
    sources = [open_source(spec) for spec in recipe.data.sources]
    with Progress("counting", show_progress) as progress, tempfile.TemporaryDirectory() as folder:
        encoder = _open_encoder(recipe, sources, Path(folder), progress)
        progress.label("counting")
        allowed = recipe.data.skip_undecodable
        rows = []
        for number, source in enumerate(sources):
            skipped: dict = {}
            batches = read_batches(number, source.documents(), skipped, allowed)
            rows.append(
                {**_count(_first_documents(batches, num_documents), encoder, progress), "skipped": skipped}
            )
    counts = [
        {"source": spec.called, **_with_ratios(row, encoder.dtype.itemsize)}
        for spec, row in zip(recipe.data.sources, rows, strict=True)
    ]
    total = {key: sum(row[key] for row in rows) for key in ("documents", "text_bytes", "tokens")}
    return {
        "name": recipe.data.name,
        "encoder": encoder.backend.name,
        "documents_of_each_source": num_documents,
        "before_cleaning": any(getattr(recipe.data, key) for key in CLEANING_KEYS),
        "sources": counts,
        "total": _with_ratios(total, encoder.dtype.itemsize),
        "skipped": {key: sum(row["skipped"][key] for row in rows) for key in rows[0]["skipped"]},
    }


def _open_encoder(recipe, sources: list, folder: Path, progress: Progress) -> "Encoder":
    """The encoder that a preparation of the recipe would use; its tokenizer is made in `folder`."""
    # numpy, tokenizers and pyarrow are needed from here on
    from pretraining.data.encoder import Encoder
    from pretraining.data.engine.preparation import Preparation
    from pretraining.data.engine.tokenizer_stage import make_tokenizer
    from pretraining.data.shards import token_dtype

    preparation = Preparation.of(recipe, sources, folder / "data", [])
    preparation.progress, preparation.data = (
        progress,
        {**recipe.data.to_dict(), **dict.fromkeys(CLEANING_KEYS)},
    )
    make_tokenizer(preparation, folder / "tokenizer")
    info = describe_tokenizer(folder / "tokenizer", str(recipe.data.tokenizer))
    sample = [text for text, _ in islice(sources[0].documents(), 20) if text]
    wanted = recipe.data.encoder
    encoder = Encoder.open(folder / "tokenizer", info, token_dtype(info.vocab_size), wanted, sample=sample)
    if encoder.note and progress.shown:
        print(encoder.note, file=sys.stderr)
    return encoder


def _count(batches: Iterator[Batch], encoder: "Encoder", progress: Progress) -> dict:
    row = {"documents": 0, "text_bytes": 0, "tokens": 0}
    for batch in prefetch(batches):
        tokens, _ = encoder.encode(batch.texts, batch.wheres)
        row["documents"] += len(batch.texts)
        row["text_bytes"] += sum(batch.num_bytes)
        row["tokens"] += len(tokens)
        progress.add(len(batch.texts), sum(batch.num_bytes), len(tokens))
    return row


def _first_documents(batches: Iterator[Batch], count: int | None) -> Iterator[Batch]:
    """The batches, cut after `count` documents."""
    for batch in batches:
        columns = (batch.texts, batch.wheres, batch.num_bytes, batch.draws)
        yield Batch(batch.source, *(list(islice(column, count)) for column in columns))
        if count is not None and (count := count - len(batch.texts)) <= 0:
            return


def _with_ratios(row: dict, token_bytes: int) -> dict:
    bytes_per_token = row["text_bytes"] / max(1, row["tokens"])
    return {**row, "bytes_per_token": bytes_per_token, "compression": bytes_per_token / token_bytes}


def count_as_text(counts: dict) -> str:
    """The answer of `count_data` as a table."""
    limit = counts["documents_of_each_source"]
    lines = [f"data {counts['name']}" + (f", the first {limit:,} documents of each source" if limit else "")]
    lines.append(f"  {'source':<32}{'documents':>13}{'text bytes':>17}{'tokens':>16}{'bytes/token':>13}")
    for row in [*counts["sources"], {"source": "total", **counts["total"]}]:
        lines.append(
            f"  {row['source'][-31:]:<32}{row['documents']:>13,}{row['text_bytes']:>17,}{row['tokens']:>16,}"
            f"{row['bytes_per_token']:>13.2f}"
        )
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in counts["skipped"].items())
    lines.append(f"  documents left out: {left_out}")
    if counts["before_cleaning"]:
        lines.append("  counted as read: before filters, deduplication and decontamination")
    return "\n".join(lines)
