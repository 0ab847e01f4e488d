"""Before a start: the checkpoint it goes on from may lie in a store."""

from pathlib import Path

from pretraining.addresses import is_remote, refuse_credentials
from pretraining.checkpoints.fetch import fetch_checkpoint, fetch_newest, refuse_newer
from pretraining.checkpoints.folders import committed_checkpoints, step_in_name, step_of
from pretraining.checkpoints.remote import RemoteRun
from pretraining.errors import UserError
from pretraining.runtime.process_group import from_rank_0
from pretraining.runtime.restarts import resume_after_restart
from pretraining.runtime.run_folder import RunFolder


def bring_checkpoint(run: RunFolder, upload: str | None, resume: str) -> str:
    """What `--resume auto|never|PATH|ADDRESS` means once everything is on this machine; every rank calls this.

    upload: the recipe's `checkpoints.upload`. auto: the store's newest checkpoint comes where it is newer than the
    newest here. Raises `UserError` where the store cannot be used, or holds what this start would mix with.
    """
    resume = from_rank_0(lambda: resume_after_restart(run, resume))
    if is_remote(resume):
        return _bring(run, resume)
    if upload is None:
        return resume
    remote = RemoteRun(upload, run.path.name)
    if resume == "auto":
        here = from_rank_0(lambda: [step_in_name(folder) for folder in committed_checkpoints(run)])
        fetch_newest(run, remote, max(here, default=None))
    else:
        step = 0 if resume == "never" else from_rank_0(lambda: _step_at(Path(resume)))
        refuse_newer(remote, step, resume)
    return resume


def _bring(run: RunFolder, address: str) -> str:
    refuse_credentials(address, "--resume")
    above, _, name = address.rstrip("/").rpartition("/")
    place, _, run_name = above.rpartition("/")
    wrong = fetch_checkpoint(run, RemoteRun(place, run_name), name)
    if wrong is not None:
        raise UserError(f"--resume {address}: {wrong}")
    return str(run.path / name)


def _step_at(folder: Path) -> int:
    """The step of a checkpoint's marker; 0 for what is none: the choice of the start tells it."""
    try:
        return step_of(folder)
    except (OSError, ValueError):
        return 0
