"""Say how much of each source a run reads: the first documents, as the recipe's caps and budget ask for.

What a run sees is a function of its recipe. If the data set on the disk holds more, the run sees what it would have
seen without (`excerpt_of`): files stay as they are, and the manifest's entries are cut.
"""

from bisect import bisect_left
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pretraining.data.checksums import content_fingerprint, digest_of_documents
from pretraining.errors import UserError
from pretraining.recipe.data import TEXT_OF_CROPPED, read_stages, run_shares

if TYPE_CHECKING:
    import numpy as np

    from pretraining.data.shards import TokenSplit
    from pretraining.recipe.recipe import Recipe


class Portion(NamedTuple):
    """The first documents of a source, up to the document of training with which either number is reached."""

    tokens: int | None = None
    """Tokens of training."""
    documents: int | None = None
    """Documents of training."""

    def is_reached(self, documents: int, tokens: int) -> bool:
        """Return whether so many documents and tokens of training are enough."""
        has_tokens = self.tokens is not None and tokens >= self.tokens
        return has_tokens or (self.documents is not None and documents >= self.documents)

    def less(self, documents: int, tokens: int) -> "Portion":
        """Return what is still to read after so many documents and tokens, which were not enough."""
        tokens_left = None if self.tokens is None else self.tokens - tokens
        return Portion(tokens_left, None if self.documents is None else self.documents - documents)

    def last_document(self, ends: "np.ndarray") -> int | None:
        """Find, among documents that end at `ends` [documents] tokens, the one that reaches it; None if none does."""
        reaching = [] if self.documents is None else [self.documents - 1]
        if self.tokens is not None:
            reaching.append(bisect_left(ends, self.tokens))
        last = min(reaching)
        return last if last < len(ends) else None


def portions_of(recipe: "Recipe") -> list[Portion | None]:
    """Compute what the recipe asks for of each source; None: all of it."""
    needed: list[int | None] = [None] * len(recipe.data.sources)
    if recipe.data.prepare == "budget":
        # The tokens of training that the run reads of each source if it repeats none.
        samples = recipe.num_samples
        draws = [samples]
        if len(needed) > 1:
            # numpy takes a while to import, and most preparations are found finished.
            from pretraining.data.interleaving import InterleavedStage, Interleaving

            # The shares are written in the recipe (`check_mixture`), so that any sizes will do.
            stages = read_stages(recipe.data, [1] * len(needed), samples, recipe.sequence_length)
            drawn = Interleaving([InterleavedStage.of(*stage) for stage in stages]).realised(samples)
            # Shares are rounded to a grid: enough for them as written, and as they are drawn.
            shares = zip(run_shares(stages, samples), drawn, strict=True)
            draws = [max(ceil(share * samples), number) for share, number in shares]
        # One more than the inputs: the target of the last one.
        times = TEXT_OF_CROPPED if recipe.data.packing == "cropped" else 1
        needed = [int(blocks) * recipe.sequence_length * times + 1 for blocks in draws]
    portions = []
    for source, tokens in zip(recipe.data.sources, needed, strict=True):
        limits = [limit for limit in (tokens, source.max_tokens) if limit is not None]
        portions.append(Portion(min(limits, default=None), source.max_documents))
    return [None if portion == Portion() else portion for portion in portions]


def lacking(manifest: dict, portions: list[Portion | None]) -> list[int]:
    """List the sources of which a data set holds less than is asked for."""
    each = enumerate(zip(manifest.get("sources", []), portions, strict=False))
    return [number for number, (source, portion) in each if not _holds(source, portion)]


def _holds(source: dict, portion: Portion | None) -> bool:
    """Return whether a data set, whose manifest has the entry `source`, holds as much of it."""
    cut = source.get("cut")
    return not cut or bool(portion and portion.is_reached(cut["documents"], cut["tokens"]))


def targets_beside(manifest: dict, portions: list[Portion | None]) -> list[Portion | None]:
    """Compute what to prepare of each source so that nothing that a data set holds is lost."""
    targets = []
    for source, portion in zip(manifest["sources"], portions, strict=True):
        held = Portion(source["cut"]["tokens"]) if "cut" in source else None
        targets.append(held if _holds(source, portion) else portion)
    return targets


def check_enough(manifest: dict, portions: list[Portion | None], place: Path | str, command: str) -> None:
    """Raise UserError for the first source of which a data set holds less than the run asks for."""
    for number in lacking(manifest, portions):
        source, portion = manifest["sources"][number], portions[number]
        wanted = "all of it"
        if portion is not None:
            wanted = f"{portion.tokens:,} tokens" if portion.tokens else f"{portion.documents:,} documents"
        what = f"has the first {source['cut']['tokens']:,} training tokens of {source['name']!r}, and this run reads"
        raise UserError(f"{place}: {what} {wanted}; prepare the rest, which keeps what is there: {command}")


def may_hold_more(manifest: dict, portions: list[Portion | None]) -> dict[int, Portion]:
    """Return {source: its portion} for the sources of which a data set may hold more, by its manifest alone."""
    sources = manifest.get("sources", [])
    more = {number: portion for number, portion in enumerate(portions) if portion is not None}
    for number, portion in list(more.items()):
        cut = sources[number].get("cut") if number < len(sources) else None
        if cut and portion.is_reached(cut["documents"], cut["tokens"]):
            # Does the data set end exactly where the portion does?
            before = cut["documents"] - 1, cut["tokens"] - cut["last_document_tokens"]
            if not portion.is_reached(*before):
                del more[number]
    return more


def excerpt_of(
    manifest: dict,
    splits: dict[str, "TokenSplit"],
    portions: list[Portion | None],
    read_positions: "Callable[[], np.ndarray]",
) -> dict:
    """Return the manifest of the part of a data set that the portions name; the same object if that is all of it.

    read_positions: reads `validation_positions` [documents of validation], only if they are needed.
    """
    cuts = {}
    for number, portion in may_hold_more(manifest, portions).items():
        if held := _exact_portion(splits["train"], number, portion):
            cuts[number] = held
    if not cuts:
        return manifest
    # numpy takes a while to import, and most preparations are found finished.
    from pretraining.data.shards import summed_entry

    validation = splits["validation"].shard_entries
    kept = {"train": cut_shards(splits["train"], {n: cut.documents for n, cut in cuts.items()})}
    kept["validation"] = validation
    # Of data from before there were positions, or converted, only training is cut.
    if "validation_positions" in manifest:
        positions = read_positions()
        # Behind the last document of training nothing has been read.
        counts = {
            n: bisect_left(positions[rows_of_source(validation, n)], cut.tokens) for n, cut in cuts.items()
        }
        kept["validation"] = cut_shards(splits["validation"], counts)
    if kept == {"train": splits["train"].shard_entries, "validation": validation}:
        return manifest
    entries = {}
    for name, shards in kept.items():
        whole = manifest["splits"][name]
        entries[name] = {**whole, **summed_entry(shards, whole["dtype"])}
        # The bits a byte are known of the whole split alone.
        entries[name].pop("unigram_bits_per_byte", None)
    return {**manifest, "splits": entries, "fingerprint": content_fingerprint(entries)}


def _exact_portion(split: "TokenSplit", source: int, portion: Portion) -> Portion | None:
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


def rows_of_source(shards: list[dict], source: int) -> slice:
    """Find the documents of one source in a split: they are neighbours."""
    before = sum(shard["documents"] for shard in shards if shard.get("source", 0) < source)
    own = sum(shard["documents"] for shard in shards if shard.get("source", 0) == source)
    return slice(before, before + own)


def cut_shards(split: "TokenSplit", counts: dict[int, int]) -> list[dict]:
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


def _first_documents(split: "TokenSplit", number: int, documents: int) -> dict:
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
