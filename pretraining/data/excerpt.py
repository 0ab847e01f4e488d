"""Find the excerpt of a data set that a run sees: the first documents of each source.

What a run sees is a function of its recipe. The data set on the disk may hold more, because another recipe has had more
prepared: the run then sees what it would have seen without. Files stay as they are; the manifest's entries are cut.
"""

from collections.abc import Callable

import numpy as np

from pretraining.data.checksums import content_fingerprint, digest_of_documents
from pretraining.data.portions import Portion
from pretraining.data.shards import TokenSplit, summed_entry


def excerpt_of(
    manifest: dict,
    splits: dict[str, TokenSplit],
    portions: list[Portion | None],
    read_positions: Callable[[], np.ndarray],
) -> dict:
    """Return the manifest of the part of a data set that the portions name; the same object if that is all of it.

    read_positions: reads `validation_positions` [documents of validation], only if they are needed.
    """
    cuts = {
        number: cut
        for number, portion in enumerate(portions)
        if portion and not _ends_there(manifest, number, portion)
        if (cut := _exact_portion(splits["train"], number, portion))
    }
    if not cuts:
        return manifest
    train, validation = splits["train"].shard_entries, splits["validation"].shard_entries
    kept = {"train": _cut_shards(splits["train"], {n: cut.documents for n, cut in cuts.items()})}
    if "validation_positions" in manifest:
        counts, positions = {}, read_positions()
        for number, cut in cuts.items():
            own = positions[rows_of(validation, number)]
            # Behind the last document of training nothing has been read.
            counts[number] = int(np.searchsorted(own, cut.tokens))
        kept["validation"] = _cut_shards(splits["validation"], counts)
    else:
        # Data from before there were positions, or converted: only training is cut.
        kept["validation"] = validation
    if kept == {"train": train, "validation": validation}:
        return manifest
    entries = {}
    for name, shards in kept.items():
        # The bits a byte are known of the whole split alone.
        rest = {
            key: value for key, value in manifest["splits"][name].items() if key != "unigram_bits_per_byte"
        }
        entries[name] = {**rest, **summed_entry(shards, rest["dtype"])}
    return {**manifest, "splits": entries, "fingerprint": content_fingerprint(entries)}


def _ends_there(manifest: dict, number: int, portion: Portion) -> bool:
    """Return whether the data set ends exactly where the portion does."""
    sources = manifest.get("sources", [])
    cut = sources[number].get("cut") if number < len(sources) else None
    if cut is None:
        return False
    before = cut["documents"] - 1, cut["tokens"] - cut["last_document_tokens"]
    return portion.is_reached(cut["documents"], cut["tokens"]) and not portion.is_reached(*before)


def _exact_portion(split: TokenSplit, source: int, portion: Portion) -> Portion | None:
    """Count documents and tokens of training of a portion; None if the split has less. At most one shard is opened."""
    documents = tokens = 0
    for number, entry in enumerate(split.shard_entries):
        if entry.get("source", 0) != source:
            continue
        if portion.is_reached(documents + entry["documents"], tokens + entry["tokens"]):
            ends = split.map_anew(number).ends
            last = portion.less(documents, tokens).last_document(ends)
            assert last is not None
            return Portion(tokens + int(ends[last]), documents + last + 1)
        documents, tokens = documents + entry["documents"], tokens + entry["tokens"]
    return None


def rows_of(shards: list[dict], source: int) -> slice:
    """Find the documents of one source in a split: they are neighbours."""
    before = sum(shard["documents"] for shard in shards if shard.get("source", 0) < source)
    own = sum(shard["documents"] for shard in shards if shard.get("source", 0) == source)
    return slice(before, before + own)


def _cut_shards(split: TokenSplit, counts: dict[int, int]) -> list[dict]:
    """Keep the first `counts[source]` documents of each source that is named; the last shard of it is cut."""
    left, kept = dict(counts), []
    for number, entry in enumerate(split.shard_entries):
        source = entry.get("source", 0)
        documents = min(left.get(source, entry["documents"]), entry["documents"])
        if source in left:
            left[source] -= documents
        if documents == entry["documents"]:
            kept.append(entry)
        elif documents:
            kept.append(_first_documents(split, number, documents))
    # A split has at least one shard, so that it opens like any other.
    return kept or [_first_documents(split, 0, 0)]


def _first_documents(split: TokenSplit, number: int, documents: int) -> dict:
    """Make the entry of a shard's first documents: its file stays as it is."""
    shard = split.map_anew(number)
    ends = shard.ends[:documents]
    return {
        **split.shard_entries[number],
        "documents": documents,
        "tokens": int(ends[-1]) if documents else 0,
        "bytes": int(shard.num_bytes[:documents].sum()),
        "tokens_digest": digest_of_documents(shard.tokens, ends),
    }
