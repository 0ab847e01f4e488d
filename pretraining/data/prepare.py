"""From the data section of a recipe to data/<name>/: at once if it is there, else built and published."""

import errno
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from pretraining.data.execution import Execution
from pretraining.data.manifest import data_differences, fitting_beside, read_manifest, reading_options
from pretraining.data.publishing import is_half_published, preparation_lock, work_folder
from pretraining.data.sources import open_source
from pretraining.data.split_sizes import check_blocks
from pretraining.data.tokenizer import check_vocabulary
from pretraining.errors import UserError
from pretraining.schema import listed

DISK_FAULTS = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "disk quota exceeded",
    errno.EACCES: "no permission to write there",
    errno.EROFS: "the file system is read-only",
}


class Outcome(NamedTuple):
    """What became of a preparation."""

    folder: Path
    manifest: dict | None = None
    """None: `jobs` will make it."""
    kept_aside: Path | None = None
    """Where the data set is now whose place this one took."""
    jobs: tuple[str, ...] = ()
    """Ids of submitted jobs."""


def prepare_data(
    recipe,
    data_root: Path,
    show_progress: bool = True,
    execution: Execution | None = None,
    replace: bool = False,
) -> Outcome:
    """Prepare the recipe's data section under `data_root`.

    Returns at once if what decides the bytes is what was prepared already; uses `recipe.data`, and checks that the
    tokenizer fits `recipe.model.vocab_size` and that each split holds a block of `recipe.sequence_length`.
    `execution` says where the tasks run. A finished data set that differs is refused; with `replace` the new one
    takes its place once it is finished, and the old one is kept beside it. Raises UserError for what the section,
    the sources or the disk have wrong; finished tasks are kept.
    """
    data, named = recipe.data.to_dict(), Path(data_root) / recipe.data.name
    folder = _place(named)
    sources = [open_source(spec) for spec in recipe.data.sources]
    fingerprints = [source.fingerprint() for source in sources]
    try:
        outcome = Outcome(folder, _finished(named, data, fingerprints, replace))
        if outcome.manifest is None or is_half_published(folder):
            _refuse_no_place(folder)
            with preparation_lock(folder) as kept:
                outcome = Outcome(folder, _finished(named, data, fingerprints, replace), kept)
                if outcome.manifest is None:
                    outcome = _build(recipe, folder, sources, fingerprints, show_progress, execution)
    except OSError as error:
        if error.errno in DISK_FAULTS:
            raise UserError(f"{error.filename or folder}: {DISK_FAULTS[error.errno]}") from error
        raise
    if (manifest := outcome.manifest) is not None:
        check_vocabulary(manifest["tokenizer"]["vocab_size"], recipe.model.vocab_size)
        check_blocks(manifest["splits"], data, recipe.sequence_length)
    return outcome


LONGEST_NAME = 200
"""Bytes of a folder's name: file systems take 255, and what is put before and after it needs some."""


def _place(folder: Path) -> Path:
    """Where a link leads, else the folder; UserError if somebody keeps something else there."""
    folder = Path(os.path.realpath(folder)) if folder.is_symlink() else folder
    if folder.is_dir() and any(folder.iterdir()) and read_manifest(folder) is None:
        raise UserError(
            f"{folder}: holds files that are no prepared data (there is no manifest.json); choose another data.name, "
            "or move them"
        )
    return folder


def _refuse_no_place(folder: Path) -> None:
    """UserError if nothing can be renamed into the place of `folder`: found out now, not after hours of work."""
    if (length := len(os.fsencode(folder.name))) > LONGEST_NAME:
        raise UserError(
            f"data.name: has {length} bytes; it must have at most {LONGEST_NAME}: it names a folder"
        )
    if folder.is_mount():
        raise UserError(
            f"{folder}: a disk is mounted there, and a data set is renamed into its place; give a folder of that disk "
            "to --data_dir, or choose another data.name"
        )


def _finished(folder: Path, data: dict, fingerprints: list[dict], replace: bool) -> dict | None:
    """The manifest of what is prepared already; None if it is still to be made, or made anew.

    A hub that is silent (a commit of None) is taken to hold what was prepared from it before. UserError for a data
    set that differs, unless it is to be replaced.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    if "converted_from" not in manifest and len(manifest["sources"]) == len(fingerprints):
        for now, before in zip(fingerprints, manifest["sources"], strict=True):
            if now.get("commit", "") is None and now["dataset"] == before.get("dataset"):
                now["commit"] = before.get("commit")
    differing = data_differences(manifest, data, fingerprints)
    if differing and not replace:
        raise UserError(
            f"{folder}: holds another data set, and runs made from it need it: {listed(differing)}; give the new one a "
            "data.name of its own, or add --replace, which keeps the old one beside it"
            f"{fitting_beside(folder, data, fingerprints)}"
        )
    return None if differing else manifest


def _build(
    recipe, folder: Path, sources: list, fingerprints: list, show_progress: bool, execution
) -> Outcome:
    """Run the stages and publish; if a cluster is to run them, submit them."""
    # numpy, tokenizers and pyarrow are needed from here on
    from pretraining.data.engine.executors import run_stages, submit_to_slurm
    from pretraining.data.engine.preparation import Preparation
    from pretraining.data.progress import Progress

    execution = execution or Execution()
    preparation = Preparation.of(recipe, sources, folder, fingerprints)
    if execution.executor == "slurm":
        return Outcome(folder, jobs=tuple(submit_to_slurm(preparation, execution)))
    try:
        with Progress("preparing", show_progress) as preparation.progress:
            run_stages(preparation, execution)
        kept = _finish(preparation)
    except UserError:
        _keep_finished_tasks(preparation)
        raise
    return Outcome(folder, read_manifest(folder), kept)


def finish_prepared(preparation) -> None:
    """Publish what the tasks of a cluster have prepared."""
    with preparation_lock(preparation.folder):
        if kept := _finish(preparation):
            print(kept_text(kept, kept.parent))


def kept_text(kept: Path, data_root: Path) -> str:
    """The sentence about a data set whose place another one took."""
    options = reading_options(kept, data_root)
    return (
        f"the data set before it is kept in {kept}: its runs go on with the recipe as it was, and {options}"
    )


def _finish(preparation) -> Path | None:
    from pretraining.data.engine.finish import finish

    for source in preparation.sources:
        source.check_unchanged()
    return finish(preparation)


def _keep_finished_tasks(preparation) -> None:
    """After an error only the finished ones of many tasks are worth keeping."""
    if not any(_is_under_way(stage, preparation.work) for stage in preparation.stages()):
        shutil.rmtree(work_folder(preparation.folder), ignore_errors=True)


def _is_under_way(stage, work: Path) -> bool:
    return len(stage.pending(work)) < len(stage.keys) > 1
