"""Define the format of a checkpoint on disk: files with their checksums, a receipt of each rank, and the marker.

`Identity.marker_at` says what a marker holds of its run, and `Start` is what a start takes from it.

    checkpoint-<step>/
        rank-00000-of-00002.safetensors   a rank's tensors (shard_files.py)
        rank-00000-of-00002.json          its receipt: the files it wrote, their bytes and checksums
        state.json  trainer_state.json    what is the same on every rank, written by rank 0
        committed.json                    the marker, written last: it makes the checkpoint exist

The marker names every file with its bytes and checksum. Its last line is the checksum of all its earlier bytes. That
line, and the name of the key `format`, never change in a later format: so a reader can tell a marker of a newer version
from a damaged one.
"""

import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from pretraining.data.checksums import checksum_of
from pretraining.errors import UserError
from pretraining.outside.files import (
    CHECKSUM,
    COUNT,
    NAME,
    NUMBER,
    TEXT,
    object_of,
    parse_json,
    read_bytes,
    regular,
)
from pretraining.outside.schema import check
from pretraining.recipe import Recipe
from pretraining.recipe.budget import Progress
from pretraining.recipe.fixed_keys import curve_parts
from pretraining.runtime.durable_files import flush_folder, replacing, write_json
from pretraining.runtime.heartbeat import work_done
from pretraining.runtime.journal import NOTHING_HEALED, Journal
from pretraining.runtime.process_group import from_rank_0
from pretraining.runtime.run_folder import MARKER, RunFolder, unix_seconds, utc_now

GIVEN = "initial_weights"  # the event of a run that begins from weights that exist
FORMAT = 1
THREADS = 8  # files read at once: the checksum releases the interpreter's lock while it computes
# With the comma and the indent that json.dumps(indent=2) writes: the sealed marker is still JSON.
_SEAL = b',\n  "checksum": '
_CHUNK_BYTES = 4 << 20

_ENTRIES = {NAME["pattern"]: object_of({"bytes": COUNT, "checksum": CHECKSUM})}
_FILES = {"files": {"type": "object", "patternProperties": _ENTRIES, "additionalProperties": False}}
RECEIPT = object_of(_FILES, {"running_loss": object_of({"sum": NUMBER, "steps": COUNT})})
"""What every reader of a receipt relies on. Names of files become paths below the checkpoint."""
_OTHERS = {
    **dict.fromkeys(("step", "tokens", "samples", "rollbacks"), COUNT),
    "ranks": {"type": "integer", "minimum": 1, "maximum": 1 << 20},
    "zero_stage": {"type": ["integer", "null"]},
    "saved": TEXT,
    "changes": {"type": "array", "items": {"type": "object"}},
    "metrics": {"type": "object", "patternProperties": {"(?s:.*)": {"type": ["number", "null"]}}},
    **{key: {"type": "object"} for key in ("data", "environment", "recipe")},
}
SHAPE = object_of(_FILES, _OTHERS)  # the same of a marker


class MarkerDamage(ValueError):
    """A marker that does not say what was committed: it cannot be read, was edited, or is of another step."""


def file_entry(path: Path) -> dict:
    """Return {"bytes", "checksum": "xxh128:<hex>"} of a file as it is now."""
    return passed_on(pieces_of(path))


def pieces_of(path: Path) -> Iterator[memoryview]:
    """Read a file from its beginning; a piece is valid until the next."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    # unbuffered: Python would copy each byte once more
    with open(path, "rb", buffering=0, opener=regular) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]


def passed_on(
    pieces: Iterable[bytes | memoryview],
    write: Callable[[memoryview], int] | None = None,
    progress: Callable[[int], object] = work_done,
) -> dict:
    """Checksum the pieces of a file, write them if `write`, of an unbuffered one, is given; returns its `file_entry`.

    progress: gets the bytes of each piece.
    """
    # The checksum is computed on the way, which spares another reading of the file.
    digest, num_bytes = xxhash.xxh128(), 0
    for piece in pieces:
        digest.update(piece)
        written = 0  # an unbuffered write may take less than it is given
        while write and written < len(piece):
            written += write(memoryview(piece)[written:])
        num_bytes += len(piece)
        progress(len(piece))
    return {"bytes": num_bytes, "checksum": f"xxh128:{digest.hexdigest()}"}


def write_bytes(path: Path, content: bytes) -> dict:
    """Write a small file; returns its `file_entry` once the disk holds it (fsync)."""
    with open(path, "wb", opener=regular) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return passed_on([content])


def receipt_name(rank: int, ranks: int) -> str:
    """Return `rank-00000-of-00002.json`."""
    return f"rank-{rank:05d}-of-{ranks:05d}.json"


def is_of_rank(name: str) -> bool:
    """Return whether a file of a checkpoint is one that each rank writes for itself: its tensors, or its receipt."""
    return name.startswith("rank-")


def write_receipt(folder: Path, rank: int, ranks: int, files: dict[str, dict], **more: Any) -> None:
    """Write a rank's receipt, once the disk holds its `files`: {name relative to the checkpoint: its `file_entry`}.

    more: what else the rank saves as JSON, such as the states of Python's and numpy's generators.
    """
    write_json(folder / receipt_name(rank, ranks), {"files": files, **more})


def read_receipt(folder: Path, rank: int, ranks: int) -> dict:
    name = receipt_name(rank, ranks)
    return parse_receipt(read_bytes(folder / name), folder / name)


def parse_receipt(raw: bytes, where: Path | str) -> dict:
    """Parse the bytes of a receipt; `UserError` if it is none, or names files outside the checkpoint."""
    try:
        return check(parse_json(raw), RECEIPT, str(where))
    except ValueError as error:
        remedy = "remove this checkpoint, and go on from another"
        raise UserError(f"{where}: damaged receipt ({error}); {remedy}") from None


def commit_checkpoint(folder: Path, content: dict) -> None:
    """Write the marker, with the files of all `content["ranks"]` receipts; `FileNotFoundError` if one is missing."""
    files, receipts, ranks = {}, {}, content["ranks"]
    for rank in range(ranks):
        name = receipt_name(rank, ranks)
        try:
            raw = read_bytes(folder / name)
        except FileNotFoundError:
            raise FileNotFoundError(f"{folder}: no receipt of rank {rank} of {ranks}") from None
        # The files are not read again: each rank computed the checksums of its own while it wrote them.
        files |= parse_receipt(raw, folder / name)["files"]
        receipts[name] = passed_on([raw])
    write_marker(folder, {**content, "files": {**files, **receipts}})


def write_marker(folder: Path, content: dict) -> None:
    """Commit: once this returns, `folder` is a checkpoint, even if the power fails. content: plain JSON values."""
    text = json.dumps({"format": FORMAT, **content}, indent=2, ensure_ascii=False)
    place_marker(folder, _with_checksum(text.removesuffix("\n}").encode()))


def add_metrics(folder: Path, metrics: Mapping) -> None:
    """Add what was measured after a commit to the marker, which is replaced whole or not at all."""
    marker = read_marker(folder)
    added = {**marker["metrics"], **metrics}
    if added != marker["metrics"]:
        del marker["checksum"]
        write_marker(folder, {**marker, "metrics": added})


def place_marker(folder: Path, sealed: bytes) -> None:
    """Write the bytes of a finished marker, as `write_marker` does: another node or a store has them."""
    # First the names of the files, so that the disk never holds a marker without them; then the marker's own name.
    flush_folder(folder)
    with replacing(folder / MARKER, "wb") as file:
        file.write(sealed)
    flush_folder(folder)
    flush_folder(folder.parent)  # which holds the name of the checkpoint itself


def read_marker(folder: Path) -> dict:
    """Read a marker. Raises `FileNotFoundError` (no checkpoint), `MarkerDamage`, or `UserError` (another version's)."""
    return parse_marker(read_bytes(folder / MARKER), folder)


def marker_or_nothing(folder: Path) -> dict:
    """Read the marker; {} if it is missing, damaged or of another version: for callers that can do without."""
    with suppress(OSError, MarkerDamage, UserError):
        return read_marker(folder)
    return {}


def parse_marker(raw: bytes, folder: Path | str) -> dict:
    """Do the same as `read_marker` with a marker's bytes; `folder`, or its address, is for messages."""
    # The checksum before the format: only a marker whose bytes are right can say that it is newer.
    body, found, _ = raw.rpartition(_SEAL)
    if not found or raw != _with_checksum(body):
        try:
            earlier = parse_json(raw)
        except ValueError:
            earlier = None
        # from before `format`, with sizes in `files` and checksums beside it
        if isinstance(earlier, dict) and "checksums" in earlier and "format" not in earlier:
            raise UserError(
                f"{folder}: written by an earlier version of this repository, in another format; finish that run with "
                "it, give this one its own folder with --output_dir, or start over with --resume never"
            )
        raise MarkerDamage(f"{MARKER} was edited or damaged: its own checksum does not hold")
    # Anybody can compute that checksum: what the marker says is checked too.
    try:
        content = check(parse_json(raw), object_of({"format": COUNT}), MARKER)
    except (ValueError, UserError) as error:
        raise MarkerDamage(str(error)) from None
    if content["format"] > FORMAT:
        what = f"written by a newer version (format {content['format']}; this one reads up to {FORMAT})"
        raise UserError(f"{folder}: {what}: update this repository")
    try:
        if "saved" in check(content, SHAPE, MARKER):
            unix_seconds(content["saved"])
    except (ValueError, UserError) as error:
        raise MarkerDamage(str(error)) from None
    return content


def _with_checksum(body: bytes) -> bytes:
    return body + _SEAL + f'"{checksum_of(body)}"\n}}\n'.encode()


@dataclass(frozen=True)
class Start:
    """The point from which a run begins or goes on."""

    checkpoint: Path | None = None  # None begins the run
    step: int = 0
    tokens: int = 0  # training tokens consumed until then
    changes: tuple[dict, ...] = ()  # changed on request so far: {"step", "key", "from", "to"} each
    journal: Journal = NOTHING_HEALED
    starts_over: bool = False  # `--resume never`: what an earlier run left in the folder is set aside
    fetch: Callable[[str], object] | None = None  # brings a file that is not here from the store
    initial_weights: dict | None = None  # source and digest of given weights; None: the run drew its own
    validation: dict | None = None  # what was measured after its step, and is perhaps in the marker alone

    @classmethod
    def at(cls, checkpoint: Path) -> "Start":
        """Return the start from a checkpoint by its marker, whatever its folder is called."""
        needed = {"type": "object", "required": ["step", "tokens", "changes"]}
        marker = check(read_marker(checkpoint), needed, str(checkpoint / MARKER))
        changes = tuple(marker["changes"])
        given = marker.get("initial_weights")
        metrics = marker.get("metrics", {}).items()
        validation = {key: value for key, value in metrics if key.startswith("eval_")}
        step, tokens = marker["step"], marker["tokens"]
        return cls(checkpoint, step, tokens, changes, initial_weights=given, validation=validation)

    def with_given(self, run: RunFolder, facts: dict | None) -> "Start":
        """Return this start with the weights that it begins with; `UserError` if the run began with others."""
        if facts is None:
            return self
        earlier = None if self.starts_over else from_rank_0(lambda: run.last_event(GIVEN))
        if earlier is not None and earlier["digest"] != facts["digest"]:
            what = f"the run began with other weights of {earlier['source']} ({earlier['digest']}) than are there"
            remedy = "bring them back, or start over with --resume never"
            raise UserError(f"{run.path}: {what} now ({facts['digest']}); {remedy}")
        return replace(self, initial_weights=facts)

    def progress(self, recipe: Recipe) -> Progress:
        return recipe.progress(self.step, self.tokens, self.changes)


@dataclass(frozen=True)
class Identity:
    """What every marker of one start says, at any step."""

    recipe: Recipe
    manifest: dict  # that of the prepared data
    layout: dict  # ranks and ZeRO stage, among others (`RunPlan.layout`)
    environment: dict
    start: Start

    def marker_at(self, step: int, log_history: list[dict]) -> dict:
        """Return the marker after `step`, without its files. log_history: the Trainer's, with metrics of that step."""
        recipe, progress = self.recipe.to_dict(), self.start.progress(self.recipe)
        # Sorted keys, so that a recipe written in another order has the same fingerprint.
        curve = json.dumps(curve_parts(recipe), sort_keys=True, ensure_ascii=False).encode()
        # The next start continues by tokens: the numbers of samples and steps change if their sizes change.
        return {
            "step": step,
            "tokens": progress.tokens_at(step),
            "samples": progress.samples_at(step),
            "ranks": self.layout["world_size"],
            "zero_stage": self.layout["zero_stage"],
            "host": socket.gethostname(),  # of rank 0
            "saved": utc_now(),
            "metrics": metrics_at(step, log_history),
            "recipe_fingerprint": checksum_of(curve),
            "data": described_data(self.recipe, self.manifest),
            "changes": list(self.start.changes),
            "rollbacks": len(self.start.journal.rollbacks),  # a later rollback leaves this checkpoint behind
            "environment": self.environment,
            **({"initial_weights": given} if (given := self.start.initial_weights) else {}),
            **({"before_decay": True} if self.recipe.is_before_decay(step, progress) else {}),
            "recipe": recipe,
        }


def metrics_at(step: int, log_history: list[dict]) -> dict:
    """Return what the Trainer logged at a step of the loss and of the validation, in rows of their own."""
    rows = (row for row in log_history if row.get("step") == step)
    return {key: row[key] for row in rows for key in row if key == "loss" or key.startswith("eval_")}


def described_data(recipe: Recipe, manifest: dict) -> dict:
    """Return what a marker keeps of the manifest of prepared data."""
    # Not every split has all of these keys.
    splits = {
        name: {key: split[key] for key in ("documents", "tokens", "unigram_bits_per_byte") if key in split}
        for name, split in manifest["splits"].items()
    }
    named = {key: manifest[key] for key in ("fingerprint", "origin") if key in manifest}
    tokenizer = {"tokenizer": manifest["tokenizer"]["fingerprint"]} if "tokenizer" in manifest else {}
    return {"name": recipe.data.name, **named, **tokenizer, "splits": splits}
