"""The commit marker `committed.json`: written last, it makes a checkpoint exist.

Its last line holds the checksum of all its bytes before. That, and the name of the key `format`, stay as they
are in every later format, so that a newer marker is told from a damaged one.
"""

import json
import os
from pathlib import Path

from pretraining.errors import UserError

MARKER = "committed.json"
FORMAT = 1
_SEAL = b',\n  "checksum": '


class MarkerDamage(ValueError):
    """A marker that does not say what was committed: it cannot be read, was edited, or is of another step."""


def write_marker(folder: Path, content: dict) -> None:
    """Commit: `folder` is a checkpoint once this returns, whatever happens then (written and flushed as one).

    content: plain JSON values; `format` and the marker's own checksum are added.
    """
    partial = folder / f"{MARKER}.partial"
    with partial.open("wb") as file:
        file.write(_sealed({"format": FORMAT, **content}))
        file.flush()
        os.fsync(file.fileno())
    flush_folder(folder)  # the names of the files that the marker vouches for
    partial.replace(folder / MARKER)
    for each in (folder, folder.parent):
        flush_folder(each)


def read_marker(folder: Path) -> dict:
    """What a committed checkpoint's marker says.

    Raises:
        FileNotFoundError: there is none: the folder does not count.
        MarkerDamage: it was edited or damaged.
        UserError: a newer version wrote it, or one from before this format.
    """
    return parse_marker((folder / MARKER).read_bytes(), folder)


def marker_or_nothing(folder: Path) -> dict:
    """The marker, or an empty one where it is missing, damaged or of another version: for what can do without."""
    try:
        return read_marker(folder)
    except (OSError, MarkerDamage, UserError):
        return {}


def parse_marker(raw: bytes, folder: Path | str) -> dict:
    """As `read_marker`, of a marker's bytes; `folder`, or its address, is for messages."""
    body, found, _ = raw.rpartition(_SEAL)
    if not found or raw != _with_checksum(body):
        _refuse_earlier(raw, folder)
        raise MarkerDamage(f"{MARKER} was edited or damaged: its own checksum does not hold")
    content = json.loads(raw)
    if content["format"] > FORMAT:
        raise UserError(
            f"{folder}: written by a newer version (format {content['format']}; this one reads up to {FORMAT}): "
            "update this repository"
        )
    return content


def flush_folder(folder: Path) -> None:
    """Return once the disk holds the names in `folder`; a filesystem that cannot say so is believed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _sealed(content: dict) -> bytes:
    return _with_checksum(json.dumps(content, indent=2, ensure_ascii=False).removesuffix("\n}").encode())


def _with_checksum(body: bytes) -> bytes:
    import xxhash

    return body + _SEAL + f'"xxh128:{xxhash.xxh128(body).hexdigest()}"\n}}\n'.encode()


def _refuse_earlier(raw: bytes, folder: Path | str) -> None:
    """`UserError` for a marker from before `format`: sizes under `files`, their checksums beside them."""
    try:
        content = json.loads(raw)
    except ValueError:
        return
    if isinstance(content, dict) and "checksums" in content and "format" not in content:
        raise UserError(
            f"{folder}: written by an earlier version of this repository, in another format; finish that run with "
            "it, give this one its own folder with --output_dir, or start over with --resume never"
        )
