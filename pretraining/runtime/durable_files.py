"""Write files that a reader, or a restart after a kill, never sees half-written.

A file is written under another name beside its place, synced to the disk, and then renamed.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO]:
    """Write a file anew. What the block writes replaces `path` once the disk holds all of it.

    mode: "w" for text in UTF-8, "wb" for bytes. If the block raises, the old file stays, with
    `<name>.partial` beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # in the same folder: a rename is atomic only within one filesystem
    partial = path.with_name(path.name + ".partial")
    with partial.open(mode, encoding=None if "b" in mode else "utf-8") as file:
        yield file
        # before the rename: else a power cut could leave the new name with no content
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def sync_to_disk(path: Path) -> None:
    """Wait until the disk holds this file, or the names in this folder (fsync)."""
    # read-only, because a folder cannot be opened for writing
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: object) -> None:
    """Write one JSON value, indented by two spaces."""
    with replacing(path) as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def append_row(path: Path, row: dict) -> None:
    """Append one JSON line in a single write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        # one write, so that a kill can leave at most the last line half-written
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_rows(path: Path) -> list[dict]:
    """Read the rows of a JSON-lines file up to the first line that is no row. No file: no rows."""
    # "replace": a line that was cut inside a character must not raise
    return rows_of(path.read_text(encoding="utf-8", errors="replace")) if path.exists() else []


def rows_of(text: str) -> list[dict]:
    """Read the rows of a JSON-lines file's content, as `read_rows` does."""
    rows = []
    # not splitlines(): it also splits at characters that JSON leaves as they are within a string
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        # the end of the file, or a line that a dying run left half-written
        except json.JSONDecodeError:
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows


def keep_rows(path: Path, stays: Callable[[dict], bool]) -> list[dict]:
    """Remove the rows that a resumed run is about to repeat, and return those that stay."""
    kept = [row for row in read_rows(path) if stays(row)]
    if path.exists():
        with replacing(path) as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
    return kept
