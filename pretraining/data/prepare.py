"""From the data section of a recipe to data/<name>/: at once if it is there, else built and published."""

import errno
import os
import shutil
from pathlib import Path

from pretraining.data.execution import Execution
from pretraining.data.manifest import digest_of, read_manifest, shaping_section
from pretraining.data.publishing import preparation_lock, work_folder
from pretraining.data.sources import open_source
from pretraining.data.split_sizes import check_blocks
from pretraining.data.tokenizer import check_vocabulary, local_fingerprint
from pretraining.errors import UserError

DISK_FAULTS = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "disk quota exceeded",
    errno.EACCES: "no permission to write there",
    errno.EROFS: "the file system is read-only",
}


def prepare_data(
    recipe, data_root: Path, show_progress: bool = True, execution: Execution | None = None
) -> Path | list[str]:
    """Prepare the recipe's data section under `data_root`; the finished folder, or ids of submitted jobs.

    Returns at once where the same sources, tokenizer and split are prepared already. Uses `recipe.data`, and
    checks that the tokenizer fits `recipe.model["vocab_size"]` and that each split holds a block of
    `recipe.sequence_length`. `execution` says where the tasks run. Raises UserError for what the section, the
    sources or the disk have wrong; finished tasks are kept.
    """
    data, folder = recipe.data, _place(Path(data_root) / recipe.data["name"])
    sources = [open_source(spec) for spec in data["sources"]]
    fingerprints = _fingerprints(sources, data, read_manifest(folder))
    key = _key(data, fingerprints)
    try:
        if not _finished(folder, key):
            with preparation_lock(folder):
                if not _finished(folder, key) and (
                    jobs := _build(recipe, folder, sources, fingerprints, show_progress, execution)
                ):
                    return jobs
    except OSError as error:
        if error.errno in DISK_FAULTS:
            raise UserError(f"{error.filename or folder}: {DISK_FAULTS[error.errno]}") from error
        raise
    manifest = read_manifest(folder)
    check_vocabulary(manifest["tokenizer"]["vocab_size"], recipe.model["vocab_size"])
    check_blocks(manifest["splits"], data, recipe.sequence_length)
    return folder


def _place(folder: Path) -> Path:
    """Where a link leads, else the folder; UserError where somebody keeps something else there."""
    folder = Path(os.path.realpath(folder)) if folder.is_symlink() else folder
    if folder.is_dir() and any(folder.iterdir()) and read_manifest(folder) is None:
        raise UserError(
            f"{folder}: holds files that are no prepared data (there is no manifest.json); choose another data.name, "
            "or move them"
        )
    return folder


def _fingerprints(sources: list, data: dict, previous: dict | None) -> list[dict]:
    """What each source is now. A silent hub is taken to hold what was prepared from it before."""
    now = [source.fingerprint() for source in sources]
    if previous and "converted_from" not in previous and previous["data"] == shaping_section(data):
        for fingerprint, before in zip(now, previous["sources"], strict=True):
            if fingerprint.get("commit", "") is None:
                fingerprint["commit"] = before["commit"]
    return now


def _key(data: dict, fingerprints: list[dict]) -> str:
    """Digest of everything that shapes the output: same key, same shards."""
    return digest_of(shaping_section(data), fingerprints, local_fingerprint(data["tokenizer"]))


def _finished(folder: Path, key: str) -> bool:
    manifest = read_manifest(folder)
    if manifest and "converted_from" in manifest:
        raise UserError(f"{folder}: holds converted data; choose another data.name, or delete the folder")
    return manifest is not None and manifest["key"] == key


def _build(
    recipe, folder: Path, sources: list, fingerprints: list, show_progress: bool, execution
) -> list[str] | None:
    """Run the stages and publish; where a cluster is to run them, submit them and return the jobs' ids."""
    # numpy, tokenizers and pyarrow are needed from here on
    from pretraining.data.engine.executors import run_stages, submit_to_slurm
    from pretraining.data.engine.preparation import Preparation
    from pretraining.data.progress import Progress

    execution = execution or Execution()
    preparation = Preparation.of(recipe, sources, folder, fingerprints)
    if execution.executor == "slurm":
        return submit_to_slurm(preparation, execution)
    try:
        with Progress("preparing", show_progress) as preparation.progress:
            run_stages(preparation, execution)
        _finish(preparation)
    except UserError:
        _keep_finished_tasks(preparation)
        raise
    return None


def finish_prepared(preparation) -> None:
    """Publish what the tasks of a cluster have prepared."""
    with preparation_lock(preparation.folder):
        _finish(preparation)


def _finish(preparation) -> None:
    from pretraining.data.engine.finish import finish

    for source in preparation.sources:
        source.check_unchanged()
    finish(preparation, _key(preparation.data, preparation.fingerprints))


def _keep_finished_tasks(preparation) -> None:
    """After an error only the finished ones of many tasks are worth keeping."""
    if not any(_is_under_way(stage, preparation.work) for stage in preparation.stages()):
        shutil.rmtree(work_folder(preparation.folder), ignore_errors=True)


def _is_under_way(stage, work: Path) -> bool:
    return len(stage.pending(work)) < len(stage.keys) > 1
