"""Say how much of each source a run reads: the first documents, as the recipe's caps and budget ask for."""

from bisect import bisect_left
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pretraining.errors import UserError
from pretraining.recipe.data import read_stages, run_shares, source_names
from pretraining.schema import display_path

if TYPE_CHECKING:
    import numpy as np

    from pretraining.recipe.recipe import Recipe


class Portion(NamedTuple):
    """The first documents of a source, up to the document of training with which either number is reached."""

    tokens: int | None = None
    """Tokens of training."""
    documents: int | None = None
    """Documents of training."""

    def is_reached(self, documents: int, tokens: int) -> bool:
        """Return whether so many documents and tokens of training are enough."""
        return (self.tokens is not None and tokens >= self.tokens) or (
            self.documents is not None and documents >= self.documents
        )

    def less(self, documents: int, tokens: int) -> "Portion":
        """Return what is still to read after so many documents and tokens, which were not enough."""
        return Portion(
            None if self.tokens is None else self.tokens - tokens,
            None if self.documents is None else self.documents - documents,
        )

    def last_document(self, ends: "np.ndarray") -> int | None:
        """Find, among documents that end at `ends` [documents] tokens, the one that reaches it; None if none does."""
        reaching = [] if self.documents is None else [self.documents - 1]
        if self.tokens is not None:
            reaching.append(bisect_left(ends, self.tokens))
        last = min(reaching)
        return last if last < len(ends) else None


def portions_of(recipe: "Recipe") -> list[Portion | None]:
    """Compute what the recipe asks for of each source; None: all of it."""
    needed = _needed_tokens(recipe) if recipe.data.prepare == "budget" else [None] * len(recipe.data.sources)
    portions: list[Portion | None] = []
    for source, tokens in zip(recipe.data.sources, needed, strict=True):
        limits = [limit for limit in (tokens, source.max_tokens) if limit is not None]
        portion = Portion(min(limits, default=None), source.max_documents)
        portions.append(None if portion == Portion() else portion)
    return portions


def _needed_tokens(recipe: "Recipe") -> list[int | None]:
    """Compute the training tokens that the run reads of each source if it repeats none."""
    samples, length, where = recipe.num_samples, recipe.sequence_length, display_path(recipe.path)
    draws = [samples]
    if len(recipe.data.sources) > 1:
        # numpy takes a while to import, and most preparations are found finished.
        from pretraining.data.interleaving import InterleavedStage, Interleaving

        names = source_names(recipe.data, where)
        # The shares are written in the recipe (`check_mixture`), so that any sizes will do.
        stages = read_stages(recipe.data, names, [1] * len(names), samples, length, where)
        drawn = Interleaving([InterleavedStage.of(*stage) for stage in stages]).realised(samples).tolist()
        # Shares are rounded to a grid: enough for them as written, and as they are drawn.
        written = [ceil(share * samples) for share in run_shares(stages, samples)]
        draws = [max(pair) for pair in zip(drawn, written, strict=True)]
    # One more than the inputs: the target of the last one.
    return [int(blocks) * length + 1 for blocks in draws]


def lacking(manifest: dict, portions: list[Portion | None]) -> list[int]:
    """List the sources of which a data set holds less than is asked for."""
    cuts = [source.get("cut") for source in manifest.get("sources", [])]
    return [
        number
        for number, (cut, portion) in enumerate(zip(cuts, portions, strict=False))
        if cut and not (portion and portion.is_reached(cut["documents"], cut["tokens"]))
    ]


def targets_beside(manifest: dict, portions: list[Portion | None]) -> list[Portion | None]:
    """Compute what to prepare of each source so that nothing that a data set holds is lost."""
    targets: list[Portion | None] = []
    for source, portion in zip(manifest["sources"], portions, strict=True):
        cut = source.get("cut")
        if cut is None:
            targets.append(None)
        elif portion and portion.is_reached(cut["documents"], cut["tokens"]):
            targets.append(Portion(cut["tokens"]))
        else:
            targets.append(portion)
    return targets


def check_enough(manifest: dict, portions: list[Portion | None], place: Path | str, command: str) -> None:
    """Raise UserError for the first source of which a data set holds less than the run asks for."""
    for number in lacking(manifest, portions):
        source, portion = manifest["sources"][number], portions[number]
        wanted = "all of it"
        if portion is not None:
            wanted = f"{portion.tokens:,} tokens" if portion.tokens else f"{portion.documents:,} documents"
        raise UserError(
            f"{place}: has the first {source['cut']['tokens']:,} training tokens of {source['name']!r}, and this run "
            f"reads {wanted}; prepare the rest, which keeps what is there: {command}"
        )
