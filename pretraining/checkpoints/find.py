"""Which checkpoint a run continues from: rank 0 decides, all ranks verify, nothing is loaded before."""

from pathlib import Path

from pretraining.checkpoints.folders import committed_checkpoints
from pretraining.checkpoints.marker import MARKER, marker_or_nothing
from pretraining.checkpoints.verification import changed_files, quick_damage, share_of
from pretraining.errors import UserError
from pretraining.runtime.journal import NOTHING_HEALED, Journal
from pretraining.runtime.process_group import from_rank_0, gather_from_ranks, rank_and_world_size
from pretraining.runtime.run_folder import RunFolder


def choose_checkpoint(run: RunFolder, resume: str, journal: Journal = NOTHING_HEALED) -> Path | None:
    """The checkpoint that `--resume auto|never|PATH` means, on every rank; None starts from the beginning.

    auto: the newest committed checkpoint that is whole and that no rollback of `journal` has left behind; a damaged
    one is passed over with an event and a line.
    Raises `UserError` for a PATH that is not a committed, whole checkpoint, and for another version's.
    """
    if resume == "never":
        return None
    if resume != "auto":
        return _checked(Path(resume))
    for folder in from_rank_0(lambda: _candidates(run, journal)):
        reason = damage_seen_by_all(folder, of_run=True)
        if reason is None:
            return folder
        from_rank_0(lambda folder=folder, reason=reason: _pass_over(run, folder, reason))
    return None


def damage_seen_by_all(folder: Path, of_run: bool = False) -> str | None:
    """`damage` of a checkpoint, each rank reading a share of its bytes; every rank must call this."""
    reason, files = from_rank_0(lambda: quick_damage(folder, of_run))
    if reason is not None:
        return reason
    rank, ranks = rank_and_world_size()
    found = gather_from_ranks(changed_files(folder, share_of(files, rank, ranks)))
    return next((reason for changed in found for reason in changed.values()), None)


def is_overtaken(folder: Path, journal: Journal) -> bool:
    """Whether a checkpoint lies on a course that a rollback has left since; a damaged marker does not say."""
    marker = marker_or_nothing(folder)
    return bool(marker) and journal.overtakes(marker["step"], marker.get("rollbacks", 0))


def _candidates(run: RunFolder, journal: Journal) -> list[Path]:
    return [folder for folder in committed_checkpoints(run) if not is_overtaken(folder, journal)]


def _pass_over(run: RunFolder, folder: Path, reason: str) -> None:
    run.add_event("checkpoint_passed_over", checkpoint=folder.name, reason=reason)
    print(f"{folder} is damaged ({reason}): passed over for the one before", flush=True)


def _checked(folder: Path) -> Path:
    from_rank_0(lambda: _refuse_uncommitted(folder))
    reason = damage_seen_by_all(folder)
    if reason is not None:
        raise UserError(f"--resume {folder}: the checkpoint is damaged: {reason}")
    return folder


def _refuse_uncommitted(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(
            f"--resume {folder}: no such folder; it takes auto, never or the path of a checkpoint"
        )
    if not (folder / MARKER).exists():
        raise UserError(f"--resume {folder}: no committed checkpoint there ({MARKER} is missing)")
