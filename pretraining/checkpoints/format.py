"""Define the format of a checkpoint on disk: files with their checksums, a receipt of each rank, and the marker.

identity.py makes the marker's fields (`marker_at`).

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from pretraining.errors import UserError
from pretraining.outside.files import CHECKSUM, COUNT, NAME, parse_json, read_bytes, regular
from pretraining.runtime.durable_files import replacing, sync_to_disk, write_json
from pretraining.runtime.heartbeat import work_done
from pretraining.runtime.run_folder import unix_seconds
from pretraining.schema import check

MARKER = "committed.json"
FORMAT = 1
THREADS = 8  # files read at once: the checksum releases the interpreter's lock while it computes
# With the comma and the indent that json.dumps(indent=2) writes: the sealed marker is still JSON.
_SEAL = b',\n  "checksum": '
_CHUNK_BYTES = 4 << 20


_ENTRY = {
    "type": "object",
    "required": ["bytes", "checksum"],
    "properties": {"bytes": COUNT, "checksum": CHECKSUM},
}
_FILES = {
    "type": "object",
    "patternProperties": {NAME["pattern"]: _ENTRY},
    "additionalProperties": False,
}
_LOSS = {
    "type": "object",
    "required": ["sum", "steps"],
    "properties": {"sum": {"type": "number"}, "steps": COUNT},
}
RECEIPT = {"type": "object", "required": ["files"], "properties": {"files": _FILES, "running_loss": _LOSS}}
"""What every reader of a receipt relies on. Names of files become paths below the checkpoint."""
_FORMAT = {"type": "object", "required": ["format"], "properties": {"format": COUNT}}
SHAPE = {
    "type": "object",
    "required": ["files"],
    "properties": {
        "files": _FILES,
        **dict.fromkeys(("step", "tokens", "samples", "rollbacks"), COUNT),
        "ranks": {"type": "integer", "minimum": 1, "maximum": 1 << 20},
        "zero_stage": {"type": ["integer", "null"]},
        "saved": {"type": "string"},
        "changes": {"type": "array", "items": {"type": "object"}},
        "metrics": {"type": "object", "patternProperties": {"(?s:.*)": {"type": ["number", "null"]}}},
        **{key: {"type": "object"} for key in ("data", "environment", "recipe")},
    },
}
"""The same of a marker."""


class MarkerDamage(ValueError):
    """A marker that does not say what was committed: it cannot be read, was edited, or is of another step."""


def no_progress(num_bytes: int) -> None:
    """Count nothing."""


def file_entry(path: Path, progress: Callable[[int], None] = no_progress) -> dict:
    """Return {"bytes", "checksum": "xxh128:<hex>"} of a file as it is now.

    progress: called with the number of bytes of each read.
    """
    digest, num_bytes = xxhash.xxh128(), 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(
        path, "rb", buffering=0, opener=regular
    ) as file:  # unbuffered: Python would copy each byte once more
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            num_bytes += count
            work_done(count)
            progress(count)
    return digest_entry(num_bytes, digest)


def write_bytes(path: Path, content: bytes) -> dict:
    """Write a small file; returns its `file_entry` once the disk holds it (fsync)."""
    with open(path, "wb", opener=regular) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return digest_entry(len(content), xxhash.xxh128(content))


def digest_entry(num_bytes: int, digest: xxhash.xxh128) -> dict:
    """Return the `file_entry` of bytes that were digested on their way."""
    return {"bytes": num_bytes, "checksum": f"xxh128:{digest.hexdigest()}"}


def flush_folder(folder: Path) -> None:
    """Return once the disk holds the names in `folder`."""
    try:
        sync_to_disk(folder)
    except FileNotFoundError:
        raise
    except OSError:
        pass  # some network filesystems cannot sync a folder; they keep its names by themselves


def receipt_name(rank: int, ranks: int) -> str:
    """Return `rank-00000-of-00002.json`."""
    return f"rank-{rank:05d}-of-{ranks:05d}.json"


def is_of_rank(name: str) -> bool:
    """Return whether a file of a checkpoint is one that each rank writes for itself: its tensors, or its receipt."""
    return name.startswith("rank-")


def is_receipt(name: str) -> bool:
    """Return whether a file of a checkpoint is a rank's receipt."""
    return is_of_rank(name) and name.endswith(".json")


def write_receipt(folder: Path, rank: int, ranks: int, files: dict[str, dict], **more: Any) -> None:
    """Write a rank's receipt, once the disk holds its `files`: {name relative to the checkpoint: its `file_entry`}.

    more: what else the rank saves as JSON, such as the states of Python's and numpy's generators.
    """
    write_json(folder / receipt_name(rank, ranks), {"files": files, **more})


def read_receipt(folder: Path, rank: int, ranks: int) -> dict:
    """Read what a rank wrote with `write_receipt`."""
    name = receipt_name(rank, ranks)
    return parse_receipt(read_bytes(folder / name), folder / name)


def parse_receipt(raw: bytes, where: Path | str) -> dict:
    """Parse the bytes of a receipt; `UserError` if it is none, or names files outside the checkpoint."""
    try:
        return check(parse_json(raw), RECEIPT, str(where))
    except ValueError as error:
        raise UserError(
            f"{where}: damaged receipt ({error}); remove this checkpoint, and go on from another"
        ) from None


def commit_checkpoint(folder: Path, content: dict) -> None:
    """Write the marker of a checkpoint once all its `content["ranks"]` ranks have written their receipts.

    The marker's files are those of the receipts, and the receipts themselves.

    Raises:
        FileNotFoundError: a receipt is missing.
    """
    files, receipts, ranks = {}, {}, content["ranks"]
    for rank in range(ranks):
        name = receipt_name(rank, ranks)
        try:
            raw = read_bytes(folder / name)
        except FileNotFoundError:
            raise FileNotFoundError(f"{folder}: no receipt of rank {rank} of {ranks}") from None
        # The files are not read again: each rank computed the checksums of its own while it wrote them.
        files |= parse_receipt(raw, folder / name)["files"]
        receipts[name] = digest_entry(len(raw), xxhash.xxh128(raw))
    write_marker(folder, {**content, "files": {**files, **receipts}})


def write_marker(folder: Path, content: dict) -> None:
    """Commit: once this returns, `folder` is a checkpoint, even if the power fails afterwards.

    content: plain JSON values; `format` and the marker's own checksum are added.
    """
    place_marker(folder, _sealed({"format": FORMAT, **content}))


def place_marker(folder: Path, sealed: bytes) -> None:
    """Do the same with the bytes of a marker that another node, or a store, holds already."""
    # First the names of the files, so that the disk never holds a marker without them; then the marker's own name.
    flush_folder(folder)
    with replacing(folder / MARKER, "wb") as file:
        file.write(sealed)
    flush_folder(folder)
    flush_folder(folder.parent)  # which holds the name of the checkpoint itself


def read_marker(folder: Path) -> dict:
    """Read the marker of a committed checkpoint.

    Raises:
        FileNotFoundError: there is none, so that the folder does not count as a checkpoint.
        MarkerDamage: it was edited or damaged.
        UserError: a newer version wrote it, or one from before this format.
    """
    return parse_marker(read_bytes(folder / MARKER), folder)


def marker_or_nothing(folder: Path) -> dict:
    """Read the marker; {} if it is missing, damaged or of another version: for callers that can do without."""
    try:
        return read_marker(folder)
    except (OSError, MarkerDamage, UserError):
        return {}


def parse_marker(raw: bytes, folder: Path | str) -> dict:
    """Do the same as `read_marker` with a marker's bytes; `folder`, or its address, is for messages."""
    # The checksum before the format: only a marker whose bytes are right can say that it is newer.
    body, found, _ = raw.rpartition(_SEAL)
    if not found or raw != _with_checksum(body):
        _refuse_earlier(raw, folder)
        raise MarkerDamage(f"{MARKER} was edited or damaged: its own checksum does not hold")
    # Anybody can compute that checksum: what the marker says is checked too.
    try:
        content = check(parse_json(raw), _FORMAT, MARKER)
    except (ValueError, UserError) as error:
        raise MarkerDamage(str(error)) from None
    if content["format"] > FORMAT:
        raise UserError(
            f"{folder}: written by a newer version (format {content['format']}; this one reads up to {FORMAT}): "
            "update this repository"
        )
    try:
        if "saved" in check(content, SHAPE, MARKER):
            unix_seconds(content["saved"])
    except (ValueError, UserError) as error:
        raise MarkerDamage(str(error)) from None
    return content


def _sealed(content: dict) -> bytes:
    return _with_checksum(json.dumps(content, indent=2, ensure_ascii=False).removesuffix("\n}").encode())


def _with_checksum(body: bytes) -> bytes:
    return body + _SEAL + f'"xxh128:{xxhash.xxh128(body).hexdigest()}"\n}}\n'.encode()


def _refuse_earlier(raw: bytes, folder: Path | str) -> None:
    """Raise `UserError` for a marker from before `format`, which holds sizes in `files` and checksums beside it."""
    try:
        content = parse_json(raw)
    except ValueError:
        return
    if isinstance(content, dict) and "checksums" in content and "format" not in content:
        raise UserError(
            f"{folder}: written by an earlier version of this repository, in another format; finish that run with "
            "it, give this one its own folder with --output_dir, or start over with --resume never"
        )
