"""Mix several sources in one run, none of them more often than the recipe allows, and say what the mixture promises.

Which source comes next, and which of its blocks: interleaving.py.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from pretraining.data.documents import count_blocks
from pretraining.data.interleaving import InterleavedStage, Interleaving
from pretraining.data.shards import TokenSplit
from pretraining.errors import UserError
from pretraining.outside.schema import problem
from pretraining.recipe.data import WishedStage, is_mixed, read_stages, run_shares

if TYPE_CHECKING:
    from pretraining.recipe import Recipe

DEFAULT_MAX_EPOCHS = 1
"""Epochs of a source in a mixture: a recipe must ask for more (Muennighoff et al. 2023: up to 4 cost little)."""

_ROUNDING_SLACK = Fraction(1, 500)
"""How far shares rounded to the grid may pass a limit that the shares as written keep."""

_ALIKE = 0.02  # two mixtures are alike if the shares of every source differ by less than this
_MOST_NAMED = 3  # sources that a note names: those that differ most


class SourceMixture(NamedTuple):
    """Several sources and how they are interleaved."""

    names: list[str]
    splits: list[TokenSplit]
    """The training tokens of each source."""
    interleaving: Interleaving
    sequence_length: int
    validation_tokens: list[int]
    """[sources]"""
    packing: str = "in_sequence"
    """`data.packing` of the recipe."""

    @property
    def num_blocks(self) -> list[int]:
        return [count_blocks(split, self.sequence_length, self.packing) for split in self.splits]

    def table(self, num_samples: int) -> dict:
        """Return shares, tokens and epochs of each source, per stage and over the run's first `num_samples` samples.

        "promised" is the printed share: a decimal value, and beside it a fraction. "realised" is that of the blocks
        that are drawn, less than a block away. "validation_note" says how the validation split's shares differ, if so.
        """
        stages = []
        for stage in self.interleaving.stages:
            stop = num_samples if stage.stop is None else min(stage.stop, num_samples)
            # A short run may end before a later stage begins.
            if stop > stage.start:
                stages.append(self._table_part(stage.start, stop, stage))
        run, length = self._table_part(0, num_samples), self.sequence_length
        return {
            "sequence_length": length,
            "samples": num_samples,
            "tokens": num_samples * length,
            "stages": stages,
            "run": run,
            "validation_note": _validation_note(run["sources"], self.validation_tokens, length),
        }

    def _table_part(self, start: int, stop: int, stage: InterleavedStage | None = None) -> dict:
        """Describe the samples [start, stop), of one stage or of the whole run, with a row for each source."""
        drawn = self.interleaving.realised(stop) - self.interleaving.realised(start)
        due_before, due_after = self.interleaving.promised(start), self.interleaving.promised(stop)
        num_blocks, rows = self.num_blocks, []
        for source, name in enumerate(self.names):
            draws, due = int(drawn[source]), due_after[source] - due_before[source]
            row = {"source": name, "promised_share": float(due / (stop - start))}
            if stage is not None:
                row["promised_counts"] = [stage.counts[source], stage.period]
            row |= {
                "realised_share": draws / (stop - start),
                "promised_tokens": float(due * self.sequence_length),
                "realised_tokens": draws * self.sequence_length,
                "source_tokens": num_blocks[source] * self.sequence_length,
                "epochs": draws / num_blocks[source],
            }
            rows.append(row)
        return {"first_sample": start, "samples": stop - start, "sources": rows}


def build_mixture(
    train: TokenSplit, validation: TokenSplit, recipe: "Recipe", num_samples: int
) -> SourceMixture | None:
    """Build the recipe's mixture over the prepared splits, for a run of `num_samples` samples; None if it has none.

    Raises UserError for a source too small for one block or for its share.
    """
    where, length, packing = recipe.where, recipe.sequence_length, recipe.data.packing
    names = recipe.data.source_names
    if not is_mixed(recipe.data):
        _check_epochs_of_stream(recipe, count_blocks(train, length, packing), num_samples, where)
        return None
    # Shards of one source are consecutive, so each source is a stream of its own.
    trained, judged = open_by_source(train), open_by_source(validation)
    splits = [large_enough(trained.get(source), name, length, where) for source, name in enumerate(names)]
    sizes = [count_blocks(split, length, packing) for split in splits]
    wished = read_stages(recipe.data, sizes, num_samples, length)
    interleaving = Interleaving([InterleavedStage.of(*stage) for stage in wished])
    # A source may have no document in validation, and one that has the name of a validation source is judged by that.
    held_out = [judged[n].num_tokens if n in judged else 0 for n in range(len(names))]
    for number, source in enumerate(recipe.data.validation.sources if recipe.data.validation else []):
        if source.called in names:
            held_out[names.index(source.called)] = judged[len(names) + number].num_tokens
    mixture = SourceMixture(names, splits, interleaving, length, held_out, packing)
    _check_epochs(mixture, wished, recipe, num_samples, where)
    return mixture


def open_by_source(split: TokenSplit) -> dict[int, TokenSplit]:
    """Open {source: its part of the split}; shards that name no source belong to source 0."""
    sources = [entry.get("source", 0) for entry in split.shard_entries]
    ends = {source: number + 1 for number, source in enumerate(sources)}  # a source's shards are consecutive
    return {source: split.part(sources.index(source), ends[source]) for source in sorted(ends)}


def large_enough(
    split: TokenSplit | None, name: str, sequence_length: int, where: str, of_validation: bool = False
) -> TokenSplit:
    """Return the tokens of source `name`; UserError if they are not enough for one block."""
    num_tokens, wanted = split.num_tokens if split else 0, sequence_length + 1
    if num_tokens < wanted:
        kind = "validation" if of_validation else "training"
        key = "data.validation.sources" if of_validation else "data.sources"
        what = f"{name!r} has {num_tokens:,} {kind} tokens, too few for one block of {wanted:,}"
        raise UserError(f"{where}: {key}: {what}; add text or leave the source out")
    return split


def _check_epochs(
    mixture: SourceMixture, wished: Sequence[WishedStage], recipe: "Recipe", num_samples: int, where: str
) -> None:
    """Refuse a run which reads a source more often than its `max_epochs`, and list the remedies."""
    draws, length = mixture.interleaving.realised(num_samples), mixture.sequence_length
    shares = run_shares(wished, num_samples)
    for source, (name, num_blocks) in enumerate(zip(mixture.names, mixture.num_blocks, strict=True)):
        limit = recipe.data.sources[source].max_epochs
        limit = DEFAULT_MAX_EPOCHS if limit is None else limit
        # By its decimal text: a limit of 1.1 means 11/10, not the nearest double.
        allowed = Fraction(repr(limit)) * num_blocks
        # The shares as written decide; those rounded to a grid may pass the limit by a hair.
        wish = num_samples * shares[source]
        if wish <= allowed and draws[source] <= allowed * (1 + _ROUNDING_SLACK) + 1:
            continue
        # Rounded up to a hundredth, so that the advised limit is enough.
        needed = ceil(max(wish, Fraction(int(draws[source]))) / num_blocks * 100) / 100
        remedies = [f"--set data.sources.{source}.max_epochs={needed:g}", "add text"]
        # With several stages no single share or budget would do.
        if len(wished) == 1:
            share = wished[0].shares[source]
            # The largest share that fits, rounded down to 6 digits, and the largest budget of whole steps.
            if largest := int(allowed / num_samples * 10**6) / 10**6:
                remedies.append(f"lower its share from {float(share):.6g} to {largest:g}")
            if steps := int(allowed / share / Fraction(recipe.tokens_per_step, length)):
                remedies.append(f"--set budget.tokens={steps * recipe.tokens_per_step}")
        what = f"{name!r} has {num_blocks * length:,} tokens and {float(wish) * length:,.0f} are to be read from it"
        what += f", {needed:g} epochs where {limit:g} {'is' if limit == 1 else 'are'} allowed"
        raise problem(where, f"data.sources.{source}", f"{what}; {', or '.join(remedies)}")


def _check_epochs_of_stream(recipe: "Recipe", num_blocks: int, num_samples: int, where: str) -> None:
    """Refuse a run without a mixture, which reads all sources equally often, if the recipe limits one of them."""
    sources = enumerate(recipe.data.sources)
    limits = {place: source.max_epochs for place, source in sources if source.max_epochs is not None}
    if not limits:
        return
    # All sources of a stream are read equally often, so the lowest limit decides.
    strictest = min(limits.values())
    allowed = Fraction(repr(strictest)) * num_blocks
    if num_samples <= allowed:
        return
    epochs = ceil(100 * num_samples / num_blocks) / 100
    low = [place for place in limits if limits[place] < epochs]
    raised = " ".join(f"--set data.sources.{place}.max_epochs={epochs:g}" for place in low)
    steps = int(allowed / recipe.samples_per_step)
    fewer = f", or --set budget.tokens={steps * recipe.tokens_per_step}" if steps else ""
    what = f"is {strictest:g}, but budget.tokens reads the data {epochs:g} times; {raised}, add text{fewer}"
    raise problem(where, "data.sources max_epochs", what)


def _validation_note(rows: Sequence[dict], validation_tokens: Sequence[int], length: int) -> str | None:
    """Write one sentence for a reader who compares training and validation loss; None if both have the same mixture.

    rows: those of the run (`SourceMixture.table`). length: tokens of a block.
    """
    # The validation loss is never mixed: it keeps the natural proportions of the sources.
    total, read = max(1, sum(validation_tokens)), zip(rows, validation_tokens, strict=True)
    shares = [(row["source"], row["realised_share"], n / total) for row, n in read]
    alike = all(abs(trained - validated) < _ALIKE for _, trained, validated in shares)
    if alike or not sum(validation_tokens):
        return None
    furthest = sorted(shares, key=lambda share: -abs(share[1] - share[2]))[:_MOST_NAMED]
    named = ", ".join(f"{name} {trained:.0%} and {validated:.0%}" for name, trained, validated in furthest)
    differing = f"Training and validation hold different shares of the sources ({named})"
    if min(validation_tokens) > length:
        return f"{differing}: compare the training loss with eval/mixture_loss."
    return f"{differing}: compare their losses by source."


def format_table(table: dict) -> str:
    """Format a mixture's table: a row for each source in each stage, and in the run if there are several stages."""
    width = max(6, *(len(row["source"]) for row in table["run"]["sources"]))
    heads = ("promised", "realised", "tokens", "epochs")
    lines = [f"{'source':<{width}}{heads[0]:>12}{heads[1]:>12}{heads[2]:>20}{heads[3]:>10}"]
    several = len(table["stages"]) > 1
    for number, stage in enumerate(table["stages"], 1):
        if several:
            lines.append(f"stage {number}: {stage['samples'] * table['sequence_length']:,} tokens")
        lines += [_line(row, width) for row in stage["sources"]]
    if several:
        lines.append(f"run: {table['tokens']:,} tokens")
        lines += [_line(row, width) for row in table["run"]["sources"]]
    if table.get("validation_note"):
        lines.append(table["validation_note"])
    return "\n".join(lines)


def _line(row: dict, width: int) -> str:
    shares = f"{row['promised_share']:>12.6%}{row['realised_share']:>12.6%}"
    return f"{row['source']:<{width}}{shares}{row['realised_tokens']:>20,}{row['epochs']:>10.3f}"
