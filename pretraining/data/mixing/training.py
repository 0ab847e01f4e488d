"""The dataset of a run: its sources, their mixture and the order of their blocks, from the recipe and the data."""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import NamedTuple

from pretraining.data.left_out import OrderWithout
from pretraining.data.mixing.epochs import check_epochs
from pretraining.data.mixing.grouped import GroupedOrder, blocks_starting
from pretraining.data.mixing.guard import BlockGuard
from pretraining.data.mixing.mixed import MixedOrder
from pretraining.data.mixing.schedule import Schedule, Stage
from pretraining.data.mixing.sources import open_by_source
from pretraining.data.mixing.table import mixture_table, validation_note
from pretraining.data.mixing.token_bytes import tokens_of_file
from pretraining.data.order import GlobalOrder, Order
from pretraining.data.packed import PackedDataset
from pretraining.data.shards import TokenSplit
from pretraining.errors import UserError
from pretraining.recipe.data import is_mixed, read_stages, source_names
from pretraining.schema import display_path, problem


class Mixture(NamedTuple):
    """Several sources and the schedule between them."""

    names: list[str]
    splits: list[TokenSplit]
    """The training tokens of each source."""
    schedule: Schedule
    sequence_length: int
    validation_tokens: list[int]
    """[sources]"""

    @property
    def num_blocks(self) -> list[int]:
        """[sources]: blocks of each."""
        return [split.num_blocks(self.sequence_length) for split in self.splits]

    def table(self, num_samples: int) -> dict:
        """Promised and realised shares of the run's first `num_samples` samples (see `mixture_table`), and in
        `validation_note` how the validation's differ.
        """
        table = mixture_table(self.schedule, self.names, self.num_blocks, self.sequence_length, num_samples)
        return {**table, "validation_note": validation_note(table, self.validation_tokens)}


def build_mixture(data, recipe, num_samples: int) -> Mixture | None:
    """The recipe's mixture over the prepared data, for a run of `num_samples` samples; None where it has none.

    Raises:
        UserError: a source too small for one block or for its share, or what `read_stages` refuses.
    """
    section, where = recipe.data, display_path(recipe.path)
    names = source_names(section, where)
    if not is_mixed(section):
        _check_epochs_of_stream(recipe, data.train.num_blocks(recipe.sequence_length), num_samples, where)
        return None
    parts = open_by_source(data.train)
    splits = [_large_enough(parts.get(n), name, recipe) for n, name in enumerate(names)]
    length = recipe.sequence_length
    sizes = [split.num_blocks(length) for split in splits]
    wished = read_stages(section, names, sizes, num_samples, length, where)
    held_out = open_by_source(data.validation)
    validation_tokens = [held_out[n].num_tokens if n in held_out else 0 for n in range(len(names))]
    schedule = Schedule([Stage.of(*stage) for stage in wished])
    mixture = Mixture(names, splits, schedule, length, validation_tokens)
    caps = [source.get("max_epochs") for source in section["sources"]]
    check_epochs(
        mixture.schedule,
        wished,
        mixture.num_blocks,
        caps,
        names,
        num_samples,
        length,
        recipe.tokens_per_step,
        where,
    )
    return mixture


def build_training_dataset(
    data,
    recipe,
    mixture: Mixture | None,
    first_sample: int,
    num_samples: int,
    guard: BlockGuard | None = None,
    left_out: Sequence[tuple[int, int]] = (),
) -> PackedDataset:
    """`num_samples` samples of the run from `first_sample` on, in the order that (data, seed, recipe) give.

    left_out: windows [first, last) of that order which the run does not read (`Journal.left_out`).
    """
    splits = data.train if mixture is None else mixture.splits
    order = _order_of_run(data, recipe, mixture)
    order = OrderWithout(order, left_out) if left_out else order
    masks, packing = recipe.data.get("document_masking", False), recipe.data.get("packing", "in_sequence")
    return PackedDataset(
        splits, recipe.sequence_length, order, first_sample, num_samples, guard, masks, packing
    )


def _order_of_run(data, recipe, mixture: Mixture | None) -> Order:
    length, seed, group_size = recipe.sequence_length, recipe.data_seed, recipe.data.get("shuffle_shards")
    if mixture is None:
        return _order_of(data.train, length, seed, data.fingerprint, group_size)
    orders = [
        _order_of(split, length, seed, f"{data.fingerprint}/{source}", group_size)
        for source, split in enumerate(mixture.splits)
    ]
    return MixedOrder(mixture.schedule, orders)


def validation_by_source(data, recipe) -> TokenSplit | dict[str, TokenSplit]:
    """The validation split, as {source: its part} where several sources with names of their own hold text."""
    names, parts = source_names(recipe.data, display_path(recipe.path)), open_by_source(data.validation)
    if len(parts) < 2 or len(set(names)) < len(names):
        return data.validation
    return {names[number]: part for number, part in parts.items()}


def open_guard(path: Path, data, recipe) -> BlockGuard:
    """What flags degenerate blocks of the run in the file `path`."""
    token_bytes = tokens_of_file(data.tokenizer_path / "tokenizer.json")
    return BlockGuard(path, token_bytes, source_names(recipe.data, display_path(recipe.path)))


def _order_of(split: TokenSplit, length: int, seed: int, fingerprint: str, group_size: int | None) -> Order:
    num_blocks = split.num_blocks(length)
    if group_size is None:
        return GlobalOrder(num_blocks, seed, fingerprint)
    first_blocks = blocks_starting(split.token_starts, length, num_blocks)
    return GroupedOrder(first_blocks, group_size, seed, fingerprint)


def _large_enough(split: TokenSplit | None, name: str, recipe) -> TokenSplit:
    num_tokens, wanted = split.num_tokens if split else 0, recipe.sequence_length + 1
    if num_tokens < wanted:
        raise UserError(
            f"{display_path(recipe.path)}: data.sources: {name!r} has {num_tokens:,} training tokens, too few "
            f"for one block of {wanted:,}; add text or leave the source out"
        )
    return split


def _check_epochs_of_stream(recipe, num_blocks: int, num_samples: int, where: str) -> None:
    """Without a mixture all sources are read equally often; epochs are limited only where the recipe says so."""
    caps: dict[int, float] = {
        place: source["max_epochs"]
        for place, source in enumerate(recipe.data["sources"])
        if source.get("max_epochs") is not None
    }
    if not caps or num_samples <= Fraction(repr(min(caps.values()))) * num_blocks:
        return
    epochs = ceil(100 * num_samples / num_blocks) / 100
    raised = " ".join(
        f"--set data.sources.{place}.max_epochs={epochs:g}" for place in caps if caps[place] < epochs
    )
    steps = int(Fraction(repr(min(caps.values()))) * num_blocks / recipe.samples_per_step)
    fewer = f", or --set budget.tokens={steps * recipe.tokens_per_step}" if steps else ""
    what = f"is {min(caps.values()):g}, but budget.tokens reads the data {epochs:g} times; {raised}, add text{fewer}"
    raise problem(where, "data.sources max_epochs", what)
