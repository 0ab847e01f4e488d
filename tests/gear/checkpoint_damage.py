"""Random damage to the committed checkpoints of a run, undone afterwards: for the tests and the benchmark."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretraining.checkpoints.folders import files_in
from pretraining.checkpoints.format import MARKER
from pretraining.runtime.run_folder import RunFolder

KINDS = ("flip", "truncate", "delete", "swap")


@contextmanager
def damaged(run: RunFolder, chance: random.Random) -> Iterator[tuple[str, list[Path]]]:
    """One random damage; yields its kind and the checkpoints that are not what was committed any more."""
    kind = chance.choice(KINDS)
    folders = run.committed()
    before = {path: path.read_bytes() for folder in folders for path in files_in(folder)}
    for path, content in _harm(kind, before, chance).items():
        path.unlink() if content is None else path.write_bytes(content)
    try:
        yield kind, [folder for folder in folders if _differs(folder, before)]
    finally:
        for path, content in before.items():
            path.write_bytes(content)


def _harm(kind: str, files: dict[Path, bytes], chance: random.Random) -> dict[Path, bytes | None]:
    """{file: its new content, or None where it goes}; never what it was."""
    path = chance.choice([path for path, content in files.items() if content])
    content = files[path]
    if kind == "delete":
        return {path: None}
    if kind == "truncate":
        return {path: content[: chance.randrange(len(content))]}
    if kind == "flip":
        flipped, place = bytearray(content), chance.randrange(len(content))
        flipped[place] ^= 1 << chance.randrange(8)
        return {path: bytes(flipped)}
    other = chance.choice([each for each in files if files[each] != content])
    return {path: files[other], other: content}


def _differs(folder: Path, before: dict[Path, bytes]) -> bool:
    files = {path: content for path, content in before.items() if path.is_relative_to(folder)}
    return any(not path.exists() or path.read_bytes() != content for path, content in files.items())


def judged_rightly(run: RunFolder, harmed: list[Path], folders: list[Path]) -> bool:
    """Whether the choice is the newest whole checkpoint, and each damaged one that was tried left its event."""
    from pretraining.checkpoints.choosing import choose_checkpoint
    from pretraining.runtime.durable_files import read_rows

    run.events.unlink(missing_ok=True)
    whole = [folder for folder in folders if folder not in harmed]
    expected = whole[0] if whole else None
    tried = folders[: folders.index(expected)] if expected else folders
    chosen = choose_checkpoint(run, "auto").folder
    told = {row["checkpoint"] for row in read_rows(run.events) if row["event"] == "checkpoint_passed_over"}
    # A checkpoint without its marker was never committed, as far as anyone can tell.
    return chosen == expected and told == {folder.name for folder in tried if (folder / MARKER).exists()}
