"""Open a finished data set from its folder alone, for the tools: splits, documents, tokens; `verify` reads it whole."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pretraining.data.checksums import checksum_of_file, content_fingerprint
from pretraining.data.manifest import (
    MANIFEST_NAME,
    entropy_bits,
    num_shard_bytes,
    read_manifest,
    read_positions,
    source_entries,
)
from pretraining.data.progress import ProgressBar
from pretraining.data.shards import Shard, TokenSplit, buffer_positions
from pretraining.data.tokenizer import Borders, describe_tokenizer, tokenizer_fault
from pretraining.errors import UserError, nearest
from pretraining.outside.files import read_json_value
from pretraining.recipe.data import source_name
from pretraining.runtime.durable_files import replacing

if TYPE_CHECKING:
    import tokenizers

CHUNK_TOKENS = 1 << 22
"""Tokens that are read in one step."""


def open_finished(folder: Path) -> "FinishedData":
    """Open the data set in `folder`; UserError if there is none, or an unfinished one."""
    if not folder.is_dir():
        what = "no such folder; a data set is made from a recipe, that of data/python-stdlib by"
        raise UserError(f"{folder}: {what}: python data_prep.py --recipe tiny")
    manifest = read_manifest(folder)
    if manifest is None:
        # The parent of several data sets is easily given by mistake.
        inside = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST_NAME}"))
        advice = f"data sets inside it: {', '.join(inside)}" if inside else "run data_prep.py to its end"
        raise UserError(f"{folder}: no {MANIFEST_NAME}: this is not a finished data set; {advice}")
    return FinishedData(folder, manifest)


@dataclass(frozen=True)
class FinishedData:
    """A folder whose manifest says that it is complete."""

    folder: Path
    manifest: dict

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def borders(self) -> Borders:
        return Borders.of(self.manifest["data"].get("borders", "eos"), self.manifest["tokenizer"])

    def decoder(self) -> "tokenizers.Tokenizer":
        """Open the tokenizer that turns tokens back into text; UserError if its file is missing or damaged."""
        from tokenizers import Tokenizer

        path = self.tokenizer_folder / "tokenizer.json"
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exceptions
            raise UserError(f"{path}: missing or damaged ({error}); copy it again") from error

    @property
    def split_names(self) -> list[str]:
        return list(self.manifest["splits"])

    def split(self, name: str) -> "SplitDocuments":
        """Open one split; UserError if there is none of this name, or a shard is missing or cut."""
        if name not in self.manifest["splits"]:
            what = f"no split {name!r}{nearest(name, self.split_names)}; it has {', '.join(self.split_names)}"
            raise UserError(f"{self.folder}: {what}")
        entry = self.manifest["splits"][name]
        return SplitDocuments(self.folder, name, entry, source_names(self.manifest))


def source_names(manifest: dict) -> list[str]:
    """Name each source, training's first, by name or end of its path; UserError if the manifest counts others."""
    entries, section = source_entries(manifest), manifest["data"]
    specs = [*section.get("sources", ()), *(section.get("validation") or {}).get("sources", ())]
    if specs and len(specs) != len(entries):
        what = f"it counts {len(entries)} sources, and its data section names {len(specs)}"
        raise UserError(f"manifest of {manifest['name']}: damaged: {what}; copy the data again")
    names: list[str] = []
    for number, (entry, spec) in enumerate(zip(entries, specs or [{}] * len(entries), strict=True)):
        name = entry.get("name") or (source_name(spec) if spec else f"source {number}")
        # Two sources may end in the same part of a path.
        names.append(f"{name} ({number})" if name in names else name)
    return names


class SplitDocuments(TokenSplit):
    """A split, and its documents by number and by position; one shard is mapped at a time."""

    def __init__(self, folder: Path, name: str, entry: dict, sources: list[str]):
        super().__init__(folder / name, entry)
        self.name, self.sources, self._most_open = name, sources, 1

    def _take(self, entry: dict) -> None:
        super()._take(entry)
        self._document_starts = np.cumsum([0] + [e["documents"] for e in entry["shards"]], dtype=np.int64)

    def shards(self) -> Iterator[tuple[dict, Shard]]:
        for number, entry in enumerate(self.shard_entries):
            yield entry, self._shard(number)

    def source_of(self, entry: dict) -> str:
        """Name the source that a shard came from; "one of several" if the manifest does not say which."""
        number = entry.get("source", 0 if len(self.sources) == 1 else None)
        return "one of several" if number is None else self.sources[number]

    def document(self, number: int) -> "StoredDocument":
        """Read document `number`; IndexError beyond the last."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents}")
        # side="right" skips shards without documents, which start at the same number.
        place = int(np.searchsorted(self._document_starts, number, side="right")) - 1
        shard, entry = self._shard(place), self.shard_entries[place]
        row = number - int(self._document_starts[place])
        start, stop = int(shard.ends[row - 1]) if row else 0, int(shard.ends[row])
        where = (entry["file"], row, self.source_of(entry), int(self.token_starts[place]) + start)
        tokens = shard.tokens[start:stop]
        return StoredDocument(self.name, number, *where, tokens, int(shard.num_bytes[row]))

    def number_of(self, shard: str, row: int) -> int:
        """Return the number of the document in a row of a shard's file."""
        files = [entry["file"] for entry in self.shard_entries]
        return int(self._document_starts[files.index(shard)]) + row

    def between(self, start: int, stop: int) -> Iterator["StoredDocument"]:
        """Read the documents that hold the tokens [start, stop) of the stream, in order."""
        numbers = []
        for place, offset in map(self.locate, (start, stop - 1)):
            row = int(np.searchsorted(self._shard(place).ends, offset, side="right"))
            numbers.append(int(self._document_starts[place]) + row)
        yield from map(self.document, range(numbers[0], numbers[1] + 1))


@dataclass(frozen=True)
class StoredDocument:
    """One document and its place."""

    split: str
    number: int
    """Counted over the shards of the split, from 0."""
    shard: str
    row: int
    """Its number inside the shard."""
    source: str
    start: int
    """Position of its first token in the split's stream."""
    tokens: np.ndarray
    """[tokens], with the EOS at its end: a view of the shard."""
    num_bytes: int

    def place(self) -> dict:
        """Describe everything but the tokens themselves, as JSON values."""
        values = {key: value for key, value in vars(self).items() if key != "tokens"}
        return {**values, "tokens": len(self.tokens)}


def count_tokens(split: SplitDocuments, vocab_size: int, progress: ProgressBar | None = None) -> np.ndarray:
    """Count how often each id occurs: [vocab_size] int64; UserError for one beyond."""
    counts = np.zeros(vocab_size, np.int64)
    for entry, shard in split.shards():
        for start in range(0, len(shard.tokens), CHUNK_TOKENS):
            found = np.bincount(shard.tokens[start : start + CHUNK_TOKENS], minlength=vocab_size)
            # bincount is longer than asked for if an id is beyond the vocabulary.
            if len(found) > vocab_size:
                what = f"token id {len(found) - 1} in a vocabulary of {vocab_size:,}"
                remedy = "these are not the tokenizer's shards; prepare or copy the data again"
                raise UserError(f"{split.folder / entry['file']}: {what}: {remedy}")
            counts += found
        if progress:
            progress.add_shard(entry)
    return counts


def complete(folder: Path, manifest: dict) -> None:
    """Make a folder with splits and tokenizer a finished data set: list its splits, and write the manifest last.

    The manifest gains what the tokens of validation cost by their frequencies alone: a model must be better than that.
    """
    entry = manifest["splits"]["validation"]
    split = SplitDocuments(folder, "validation", entry, [])
    counts = count_tokens(split, manifest["tokenizer"]["vocab_size"])
    entry["unigram_bits_per_byte"] = round(entropy_bits(counts) / max(1, entry["bytes"]), 6)
    with replacing(folder / "dataset_dict.json") as file:
        json.dump({"splits": list(manifest["splits"])}, file)
    # Last: where a manifest is, the data set is complete.
    with replacing(folder / MANIFEST_NAME) as file:
        file.write(json.dumps(manifest, indent=2) + "\n")


def verify_data(folder: Path, show_progress: bool = False) -> dict:
    """Read all of `folder` once; return {"folder", "shards", "size", "documents", "tokens"} if it is whole.

    Compares shards with checksums, the tokenizer with its fingerprint, document ends with tokens, ids with the
    vocabulary. UserError names the first file that is damaged.
    """
    data = open_finished(folder)
    # First what is small: a damaged manifest is reported before the shards are read.
    if content_fingerprint(data.manifest["splits"]) != data.manifest["fingerprint"]:
        what = "damaged manifest: its fingerprint is not that of its checksums"
        raise damaged(folder / MANIFEST_NAME, what, folder)
    if fault := tokenizer_fault(data.tokenizer_folder, data.manifest["tokenizer"]):
        raise damaged(data.tokenizer_folder / fault[0], fault[1], folder)
    if "validation_positions" in data.manifest:
        read_positions(folder, data.manifest)
    path = data.tokenizer_folder / "tokenizer.json"
    try:
        described = vars(describe_tokenizer(data.tokenizer_folder, str(path)))
    except Exception as error:  # tokenizers raises bare Exceptions for what it cannot parse
        raise damaged(path, f"damaged tokenizer ({error})", folder) from error
    for key, expected in data.manifest["tokenizer"].items():
        # Keys of the manifest that this version does not describe are not compared.
        if described.get(key, expected) != expected:
            what = f"not the tokenizer of the shards: its {key} is {described[key]}, expected {expected}"
            raise damaged(path, what, folder)
    found: dict[str, Any] = {"folder": str(folder), "shards": 0, "size": 0, "documents": 0, "tokens": 0}
    with ProgressBar("verifying", show_progress, num_shard_bytes(data.manifest)) as progress:
        for name in data.split_names:
            split = data.split(name)
            # `load_from_disk` takes the shards from state.json.
            listing = split.folder / "state.json"
            try:
                listed = [file["filename"] for file in read_json_value(listing)["_data_files"]]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise damaged(listing, f"missing or damaged ({error})", folder) from error
            if listed != [entry["file"] for entry in split.shard_entries]:
                raise damaged(listing, f"lists other shards than {MANIFEST_NAME}", folder)
            for number, entry in enumerate(split.shard_entries):
                path = split.folder / entry["file"]
                # The checksum first: later checks then read what was written.
                if (checksum := checksum_of_file(path)) != entry["checksum"]:
                    what = f"damaged shard: checksum {checksum}, expected {entry['checksum']}"
                    raise damaged(path, what, folder)
                if buffer_positions(path) != entry["buffers"]:
                    raise damaged(path, "its buffers are not where the manifest says", folder)
                if problem := _problem_of(split.map_anew(number), entry, data):
                    raise damaged(path, problem, folder)
                found["shards"] += 1
                for key in ("size", "documents", "tokens"):
                    found[key] += entry[key]
                progress.add_shard(entry)
    return found


def damaged(path: Path, what: str, folder: Path) -> UserError:
    return UserError(f"{path}: {what}; copy it again, or delete {folder} and prepare the data again")


def _problem_of(shard: Shard, entry: dict, data: FinishedData) -> str | None:
    """Check that ends ascend to the last token, documents are in their borders, and ids in the vocabulary."""
    lengths, tokenizer = np.diff(shard.ends, prepend=0), data.manifest["tokenizer"]
    if len(lengths) and lengths.min() < 1:
        return f"document {int(lengths.argmin())} of the shard has no tokens"
    if int(shard.num_bytes.sum()) != entry["bytes"]:
        return f"its texts have {int(shard.num_bytes.sum()):,} bytes, the manifest says {entry['bytes']:,}"
    # Lengths of at least 1 are sure here, so `ends - 1` is inside its own document.
    places = {"end": shard.ends - 1, "begin": shard.ends - lengths}
    for token, (does, at) in zip(data.borders, places.items(), strict=True):
        others = [] if token is None else np.flatnonzero(shard.tokens[at] != token)
        if len(others):
            name = f"{tokenizer['eos_token']} ({token})" if does == "end" else f"token {token}"
            return f"document {int(others[0])} of the shard does not {does} with {name}"
    for start in range(0, len(shard.tokens), CHUNK_TOKENS):
        highest = int(shard.tokens[start : start + CHUNK_TOKENS].max())
        if highest >= tokenizer["vocab_size"]:
            return f"token id {highest} in a vocabulary of {tokenizer['vocab_size']:,}"
    return None
