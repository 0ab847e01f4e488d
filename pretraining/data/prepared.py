"""Open a prepared data set: check that it is the recipe's, that it is whole, and that it fits the model."""

import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretraining.data.arriving import MOST_TRIES, PAUSE_SECONDS, ArrivingSplit
from pretraining.data.corpus import CLEANING_KEYS
from pretraining.data.manifest import (
    check_blocks,
    data_differences,
    fitting_beside,
    num_shard_bytes,
    read_manifest,
    read_positions,
    tokenizer_difference,
    verify,
)
from pretraining.data.mixture import SourceMixture, build_mixture
from pretraining.data.portions import check_enough, excerpt_of, lacking, may_hold_more, portions_of
from pretraining.data.shards import TokenSplit
from pretraining.data.streaming.cache import ShardCache
from pretraining.data.streaming.remote_data import RemoteData, StreamedSplit
from pretraining.data.tokenizer import check_vocabulary, tokenizer_fault
from pretraining.errors import UserError
from pretraining.extend import load_pretrained
from pretraining.outside.addresses import is_remote
from pretraining.outside.schema import listed
from pretraining.recipe.recipe import Recipe
from pretraining.runtime.installation import WORKPLACE, as_typed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERIFIED_BYTES = 256 << 20
"""Data sets up to this size are compared with their checksums whenever they are opened (0.1 s), others by `verify`."""


@dataclass(frozen=True)
class PreparedData:
    """A data set that is open for reading: on disk, or at an address whose shards are fetched when needed."""

    folder: Path
    """Holds `tokenizer/`: the data set's own folder, or one of the cache."""
    manifest: dict
    train: TokenSplit
    validation: TokenSplit
    mixture: SourceMixture | None = None
    """The mixture of a run that mixes sources; see `for_run`."""

    def for_run(self, recipe: Recipe) -> "PreparedData":
        """Return the same data with the mixture of a whole run; UserError if it reads a source too often."""
        return replace(self, mixture=build_mixture(self.train, self.validation, recipe, recipe.num_samples))

    def latest(self) -> "PreparedData":
        """Return what is there by now: of a finished data set, the same."""
        return self

    @property
    def known_tokens(self) -> int:
        """Return the tokens of training; 0 if nobody knows yet how many there will be."""
        return self.train.num_tokens

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Load the tokenizer that the data was prepared with."""
        tokenizer = self.read_tokenizer(lambda folder: load_pretrained("AutoTokenizer", folder))
        made_with = self.manifest["tokenizer"]
        if tokenizer.eos_token_id != made_with["eos_token_id"]:  # a folder may hold tokenizer.json alone
            tokenizer.eos_token = made_with["eos_token"]
        return tokenizer

    def read_tokenizer(self, read: Callable[[Path], Any]) -> Any:
        return read(self.tokenizer_path)

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def fingerprint(self) -> str:
        """The identity of the tokens, the same on every machine; the key of the global order."""
        return self.manifest["fingerprint"]


@dataclass(frozen=True)
class ArrivingData(PreparedData):
    """A data set that is being prepared. Of `train` there is ever more; `validation` is whole."""

    train: ArrivingSplit

    @classmethod
    def of(cls, recipe: Recipe, data_root: Path, manifest: dict) -> "ArrivingData":
        """Open what `manifest` says can be read (`read_arrived`)."""
        folder = Path(data_root) / recipe.data.name
        train = ArrivingSplit(folder, portions_of(recipe), manifest)
        return cls(folder, manifest, train, train.open_validation(manifest))

    def for_run(self, recipe: Recipe) -> PreparedData:
        """Return the same data. Whether the text is enough is known at its end: its epochs are checked then."""
        return self

    @property
    def known_tokens(self) -> int:
        return self.train.num_tokens if self.train.is_whole else 0

    def read_tokenizer(self, read: Callable[[Path], Any]) -> Any:
        """Return what `read` makes of the tokenizer's folder, wherever it is by now."""
        for _ in range(MOST_TRIES):
            with suppress(OSError):
                return read(self.tokenizer_path)
            time.sleep(PAUSE_SECONDS)  # published in this moment: gone from one place, not yet in the other
        return read(self.tokenizer_path)

    @property
    def tokenizer_path(self) -> Path:
        """Name the folder of the tokenizer: with the preparation's work, or with the data set once it is there."""
        published = super().tokenizer_path
        return published if published.is_dir() else Path(self.manifest["tokenizer_folder"])

    def latest(self) -> PreparedData:
        self.train.refresh()
        seen = self.train.look()
        return self if seen is None else replace(self, manifest={**self.manifest, **seen[0]})


def is_prepared(recipe: Recipe, data_root: Path) -> bool:
    """Return whether `open_prepared` would find all that the run reads; UserError if another data set is there."""
    folder = Path(data_root) / recipe.data.name
    manifest = read_manifest(folder)
    if manifest is None:
        return False
    _check_manifest(recipe, manifest, folder, f"{preparing_command(recipe, Path(data_root))} --replace")
    return not lacking(manifest, portions_of(recipe))


def open_prepared(recipe: Recipe, data_root: Path | str, cache: ShardCache | None = None) -> PreparedData:
    """Open what `prepare_data` made of the recipe's data section; the sources are no longer needed.

    data_root: a local folder, or an address of fsspec, whose shards are kept in `cache` (default: `ShardCache.of()`).
    Raises UserError if the data is not prepared, was prepared from another data section or tokenizer, has more ids than
    the model, if a shard is missing, truncated or damaged (one at an address is checked when it is fetched), or if the
    part that the run reads has no block of validation.
    """
    if is_remote(data_root):
        return _open_remote(recipe, data_root, cache or ShardCache.of())
    return open_folder(recipe, Path(data_root) / recipe.data.name, preparing_command(recipe, Path(data_root)))


def open_folder(recipe: Recipe, folder: Path, command: str) -> PreparedData:
    """Open the recipe's data in a folder of this machine, whatever its name; command: prepares it."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"{folder}: the data is not prepared; run: {command}")
    _check_manifest(recipe, manifest, folder, f"{command} --replace")
    if fault := tokenizer_fault(folder / "tokenizer", manifest["tokenizer"]):
        remedy = f"put it back, or delete {folder} and run: {command}"
        raise UserError(f"{folder}/tokenizer/{': '.join(fault)}; {remedy}")
    check_enough(manifest, portions_of(recipe), folder, command)
    splits = _splits_of(folder, manifest)
    # Last, because it reads every shard.
    if num_shard_bytes(manifest) <= VERIFIED_BYTES:
        verify(folder, manifest)
    manifest = _part_of(recipe, folder, manifest, splits)
    splits = _splits_of(folder, manifest)
    return PreparedData(folder, manifest, splits["train"], splits["validation"])


def check_part(recipe: Recipe, folder: Path, manifest: dict) -> None:
    """Raise UserError if what the run reads of a data set has no block of training or of validation."""
    _part_of(recipe, folder, manifest, _splits_of(folder, manifest))


def _splits_of(folder: Path, manifest: dict) -> dict[str, TokenSplit]:
    return {name: TokenSplit(folder / name, entry) for name, entry in manifest["splits"].items()}


def _part_of(recipe: Recipe, place: Path | RemoteData, manifest: dict, splits: dict[str, Any]) -> dict:
    """Return the manifest of what the run reads (`excerpt_of`); UserError if a split of it has no block."""
    read = partial(read_positions, place) if isinstance(place, Path) else place.read_positions
    part = excerpt_of(manifest, splits, portions_of(recipe), lambda: read(manifest))
    if part is not manifest:
        check_blocks(part["splits"], recipe.data, recipe.sequence_length, is_part=True)
    return part


def _open_remote(recipe: Recipe, data_root: str, cache: ShardCache) -> PreparedData:
    if recipe.data.packing == "cropped":
        # The number of blocks is counted from every document's length.
        what = "data.packing is cropped, which looks at all shards before the first step"
        raise UserError(f"{data_root}: {what}; copy the data to a disk, or take best_fit")
    remote = RemoteData(f"{data_root}/{recipe.data.name}", cache)
    manifest = remote.read_manifest()
    # data_prep.py writes to a local folder only: data for an address is prepared here and copied there.
    command, copying = preparing_command(recipe, WORKPLACE / "data"), f", then copy it to {remote.address}"
    _check_manifest(recipe, manifest, remote.address, f"{command} --replace{copying}")
    # transformers opens a local folder only, so the tokenizer is fetched at once.
    folder = remote.local_folder(manifest)
    check_enough(manifest, portions_of(recipe), remote.address, command + copying)
    splits = {name: StreamedSplit(remote, name, entry) for name, entry in manifest["splits"].items()}
    manifest = _part_of(recipe, remote, manifest, splits)
    splits = {name: StreamedSplit(remote, name, entry) for name, entry in manifest["splits"].items()}
    return PreparedData(folder, manifest, splits["train"], splits["validation"])


def _check_manifest(recipe: Recipe, manifest: dict, place: Path | str, command: str) -> None:
    """Raise UserError if the data is not what the recipe asks for; `command` makes it anew."""
    data = recipe.data.to_dict()
    if "converted_from" in manifest:
        # It has no data section, so the recipe's one source must be its origin.
        origin = manifest["converted_from"]
        if [source.get("path") for source in data["sources"]] != [origin["path"]]:
            what = f"converted from {origin['format']} files, not prepared from text"
            remedy = f'set data.sources to [{{"path": "{origin["path"]}"}}] to train on it'
            raise UserError(f"{place}: {what}; {remedy}, or data.name to another folder")
        if differing := tokenizer_difference(manifest, data):
            raise UserError(f"{place}: {differing}; name that one, or convert the data again")
        if asked := [key for key in CLEANING_KEYS if data.get(key)]:
            what = f"is of converted tokens, on which data.{asked[0]} has no effect; leave it out"
            raise UserError(f"{place}: {what}, or prepare the text")
    elif changed := data_differences(manifest, data):
        # At an address nothing is kept beside a data set.
        beside = fitting_beside(place, data) if isinstance(place, Path) else ""
        what = f"prepared from another data section: {listed(changed)}; give the recipe a data.name"
        anew = "of its own; or, if no run made from this data is to go on, make it anew in its place"
        raise UserError(f"{place}: {what} {anew}: {command}{beside}")
    check_vocabulary(manifest["tokenizer"]["vocab_size"], recipe.model.vocab_size)


def note_repeats(recipe: Recipe, data_root: Path | str) -> None:
    """Print how often the budget reads what the run reads of prepared data, if that is there, and more than once."""
    folder, portions = Path(data_root) / recipe.data.name, portions_of(recipe)
    manifest = None if is_remote(data_root) else read_manifest(folder)
    if manifest is None or data_differences(manifest, recipe.data.to_dict()) or lacking(manifest, portions):
        return
    has = "has"
    if may_hold_more(manifest, portions):
        try:
            read = partial(read_positions, folder, manifest)
            part = excerpt_of(manifest, _splits_of(folder, manifest), portions, read)
        except UserError:  # said when the data is opened
            return
        manifest, has = part, "has" if part is manifest else "gives this run"
    tokens, budget = manifest["splits"]["train"]["tokens"], recipe.num_tokens
    if (epochs := budget / max(1, tokens)) > 1:
        what = f"{has} {tokens:,} training tokens, which the budget of {budget:,} reads {epochs:.3g} times"
        print(f"note: {folder}: {what}", file=sys.stderr, flush=True)


def preparing_command(recipe: Recipe, data_root: Path) -> str:
    # The default folder needs no option.
    elsewhere = [] if data_root == WORKPLACE / "data" else ["--data_dir", str(data_root)]
    return as_typed(shlex.join(["python", "data_prep.py", *recipe.words, *elsewhere]))
