"""Find where a run begins or continues, do the first writes of that start, and go back to a checkpoint that was good.

`find_start`: rank 0 looks at the folder and decides. All ranks verify the bytes of the checkpoint together, before
anything is loaded. `begin_run` writes. Between the two calls the caller builds model and Trainer: if one of them
refuses the start, nothing has been written yet. `roll_back` leaves out the samples that spoilt a run.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel

from pretraining.checkpoints.agreement import bring_history, choose_on_disks, refuse_lone_disks
from pretraining.checkpoints.export import describe_model
from pretraining.checkpoints.fetch import fetch_again, fetch_newest, resolve_resume
from pretraining.checkpoints.folders import (
    changed_files,
    committed_checkpoints,
    quick_damage,
    remove_uncommitted,
    set_aside_after,
    share_of,
    step_in_name,
)
from pretraining.checkpoints.format import MARKER, marker_or_nothing, read_marker
from pretraining.checkpoints.identity import GIVEN, Identity, Start, described_data
from pretraining.checkpoints.remote import RemoteRun
from pretraining.checkpoints.shard_files import read_state
from pretraining.data.arriving import is_from_origin
from pretraining.data.mixture import format_table
from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.packing import cuts_text
from pretraining.data.prepared import PreparedData
from pretraining.errors import GaveUp, UserError
from pretraining.extend import copy_extensions
from pretraining.outside.files import read_json_value
from pretraining.planning.quantities import several
from pretraining.planning.run_plan import RunPlan
from pretraining.planning.screen import plan_line, run_line
from pretraining.planning.sizes import balance_of_experts, model_size
from pretraining.recipe import Recipe
from pretraining.recipe.curve import DATA_FINGERPRINT, Change, changed_parts, changes_of_run, refuse_changes
from pretraining.recipe.progress import RAMP, STEP_SIZE
from pretraining.recipe.sections import Weights
from pretraining.recipe.training import CONSTANT, DECAYING
from pretraining.runtime.durable_files import write_json
from pretraining.runtime.heartbeat import this_machine
from pretraining.runtime.journal import NOTHING_HEALED, Journal, Rollback
from pretraining.runtime.lock import move_lock
from pretraining.runtime.process_group import from_rank_0, gather_from_ranks, rank_and_world_size, together
from pretraining.runtime.restarts import launch_details
from pretraining.runtime.run_folder import RunFolder
from pretraining.schema import check, differences, display_path, listed

STEP_SIZES = (STEP_SIZE, RAMP)
"""Keys that say how many tokens a step has."""


def find_start(
    run: RunFolder,
    recipe: Recipe,
    data: PreparedData,
    resume: str,
    allowed: Sequence[str],
    layout: dict | None = None,
) -> Start:
    """Find where to begin or continue; rank 0 decides, and every rank gets the same answer or the same `UserError`.

    Writes only the checkpoints that it fetches from a store, and an event for a damaged one that it passes over.

    resume: `--resume auto|never|PATH|ADDRESS`. allowed: keys of the recipe, or sections, that may differ from what
    the run was so far. layout: that of this start (`RunPlan.layout`), by which a node knows the files that it needs if
    it has a run folder of its own; None: it gets all.
    """
    refuse_lone_disks(run, recipe)
    upload = recipe.checkpoints.upload
    # Also on one disk that was one of several before, as that of the last node which is left.
    in_parts = not run.disks.shared or from_rank_0(run.holds_parts)
    if in_parts and resume != "never":
        bring_history(run, upload)

    def check(place: str, marker: dict, accepted: list[dict]) -> None:
        changes_since(place, marker, recipe, data.manifest, run, allowed, accepted)

    resume, fetched = resolve_resume(run, upload, resume, in_parts, check)
    if resume == "never":
        return Start(starts_over=True)
    # The cheap check first: verifying a checkpoint reads all its bytes.
    from_rank_0(lambda: changes_of_run(run.path, recipe.to_dict(), allowed))
    journal, source = from_rank_0(lambda: Journal.read(run.journal)), None
    if in_parts:
        checkpoint, source = choose_on_disks(run, upload, resume, journal, layout)
    else:
        checkpoint = choose_checkpoint(run, resume, journal, fetched, upload)
    start = from_rank_0(lambda: _start_at(checkpoint, run, recipe, data.manifest, allowed))
    from_rank_0(lambda: _refuse_lost_rollbacks(checkpoint, run, journal))
    return replace(start, journal=journal, source=source)


def _start_at(
    checkpoint: Path | None, run: RunFolder, recipe: Recipe, manifest: dict, allowed: Sequence[str]
) -> Start:
    if checkpoint is None:
        return Start()
    read_state(checkpoint)  # refuses another format before the model is built
    changes = changes_since(checkpoint, read_marker(checkpoint), recipe, manifest, run, allowed)
    start = Start.at(checkpoint)
    accepted = [
        {"step": start.step, "key": each.key, "from": each.earlier, "to": each.now} for each in changes
    ]
    if accepted and start.step >= start.progress(recipe).last_step:
        keys = ", ".join(each["key"] for each in accepted)
        raise UserError(
            f"{run.path}: all {start.step:,} steps are done, so that changing {keys} would change none of them; make a "
            "run of its own (python -m pretraining.checkpoints branch), or start over with --resume never"
        )
    return replace(start, changes=(*start.changes, *accepted))


def _refuse_lost_rollbacks(checkpoint: Path | None, run: RunFolder, journal: Journal) -> None:
    # The journal says which samples each rollback left out: without it the data would be another from here on.
    known = read_marker(checkpoint).get("rollbacks", 0) if checkpoint else 0
    if known > len(journal.rollbacks):
        raise UserError(
            f"{run.journal}: {checkpoint} was trained after {known} rollbacks and this journal holds "
            f"{len(journal.rollbacks)}: the samples they left out are not known; bring back the journal of its run, "
            "or begin a run of its own from it: python -m pretraining.checkpoints branch"
        )


def choose_checkpoint(
    run: RunFolder,
    resume: str,
    journal: Journal = NOTHING_HEALED,
    fetched: Path | None = None,
    upload: str | None = None,
) -> Path | None:
    """Return the checkpoint that `--resume auto|never|PATH` means, on every rank; None begins the run.

    auto: the newest committed checkpoint that is whole and that no rollback of `journal` has left behind. Damaged files
    are fetched again from `upload`, the recipe's store, if it holds that checkpoint; else it is passed over with an
    event and a line. fetched: the folder of one whose bytes were verified as they arrived, which are not read again.
    Raises `UserError` for a PATH that is not a committed, whole checkpoint, and for another version's.
    """
    if resume == "never":
        return None
    if resume != "auto":
        return _whole(Path(resume), fetched)
    candidates = from_rank_0(lambda: _candidates(run, journal))
    for folder, before in itertools.zip_longest(candidates, candidates[1:]):
        reason = _damage_found_together(folder, fetched, of_run=True)
        if reason is None or fetch_again(run, upload, folder, reason):
            return folder
        from_rank_0(lambda folder=folder, reason=reason: _pass_over(run, folder, reason))
        # the store may hold a newer one than the next one here
        if upload is not None:
            remote, step = RemoteRun(upload, run.path.name), step_in_name(before) if before else None
            if (found := fetch_newest(run, remote, step, damaged_here=folder)) is not None:
                return found
    return None


def _damage_found_together(folder: Path, fetched: Path | None, of_run: bool = False) -> str | None:
    """Return the `damage` of a checkpoint; each rank reads a share of the bytes, and every rank calls it."""
    reason, files = from_rank_0(lambda: quick_damage(folder, of_run))
    if reason is not None or folder == fetched:
        return reason
    # Because the ranks share the reading, verifying a large checkpoint takes only as long as loading it.
    rank, ranks = rank_and_world_size()
    found = gather_from_ranks(changed_files(folder, share_of(files, rank, ranks)))
    return next((reason for changed in found for reason in changed.values()), None)


def is_left_behind(folder: Path, journal: Journal) -> bool:
    """Say if a rollback went back behind a checkpoint since it was saved; False if the marker is damaged."""
    # A damaged marker does not tell. The checkpoint stays a candidate, so that its damage is reported.
    marker = marker_or_nothing(folder)
    return bool(marker) and journal.overtakes(marker["step"], marker.get("rollbacks", 0))


def _candidates(run: RunFolder, journal: Journal) -> list[Path]:
    return [folder for folder in committed_checkpoints(run) if not is_left_behind(folder, journal)]


def _pass_over(run: RunFolder, folder: Path, reason: str) -> None:
    run.add_event("checkpoint_passed_over", checkpoint=folder.name, reason=reason)
    print(f"{folder} is damaged ({reason}): passed over for the one before", flush=True)


def _whole(folder: Path, fetched: Path | None) -> Path:
    """Return the folder; `UserError` unless it is a committed checkpoint without damage."""
    from_rank_0(lambda: _refuse_uncommitted(folder))
    reason = _damage_found_together(folder, fetched)
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


def changes_since(
    checkpoint: Path | str,
    marker: dict,
    recipe: Recipe,
    manifest: dict,
    run: RunFolder,
    allowed: Sequence[str],
    accepted: Sequence[dict] = (),
) -> list[Change]:
    """Return how recipe and data differ from the checkpoint's.

    What an earlier start in this folder accepted stays accepted, and what `accepted` lists. Raises `UserError` for a
    change that is not allowed, and for one that no checkpoint can follow: other shapes of the weights.
    """
    try:
        changes = changed_parts(recipe.to_dict(), marker["recipe"])
        # no request can change the weights' shapes
        if any(change.key.startswith("model.") for change in changes):
            _refuse_other_shape(checkpoint, marker["recipe"]["model"], recipe.model)
        changes += _data_change(marker["data"], described_data(recipe, manifest), changes)
    # a marker that somebody else has written
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        what = f"{MARKER} holds no recipe and data of a run ({type(error).__name__})"
        raise UserError(f"{checkpoint}: {what}; choose another checkpoint") from error
    # A start may have been killed before it saved, so that the checkpoint does not know what it had accepted.
    recorded = [(each["key"], each["to"]) for each in (*_recorded_changes(run), *accepted)]
    new = [change for change in changes if (change.key, change.now) not in recorded]
    refuse_changes(new, allowed, checkpoint, "checkpoint")
    return changes


_CHANGE = {"type": "object", "required": ["key", "to"], "properties": {"key": {"type": "string"}}}
_CHANGES = {"type": "array", "items": _CHANGE}


def _recorded_changes(run: RunFolder) -> list[dict]:
    """Return what earlier starts in this folder accepted: {"step", "key", "from", "to"} each."""
    where = f"{run.changes} (remove it, or choose another --output_dir)"
    return check(_read_json(run.changes), _CHANGES, where) if run.changes.exists() else []


def _data_change(earlier: dict, now: dict, changes: list[Change]) -> list[Change]:
    """Return the change to other tokens under the same recipe; [] if a key of `data` has changed too."""
    key = "fingerprint"
    if any(is_from_origin(each["fingerprint"]) for each in (earlier, now)):
        key = "origin"  # of tokens that were not there yet
    # A changed key of `data` explains the other tokens: one change is not listed twice.
    if earlier.get(key) == now.get(key) or any(each.key.startswith("data.") for each in changes):
        return []
    return [Change(DATA_FINGERPRINT, earlier["fingerprint"], now["fingerprint"])]


def _refuse_other_shape(checkpoint: Path | str, earlier: dict, now: dict) -> None:
    earlier, _ = Weights.split(earlier)
    if earlier["model_type"] != now["model_type"] or model_size(earlier).parts != model_size(now).parts:
        raise UserError(
            f"{checkpoint} holds weights of other shapes: {listed(differences(earlier, now, 'model'))}; give this "
            "model its own folder with --output_dir, or start over with --resume never"
        )


def _read_json(path: Path) -> dict | list:
    try:
        return read_json_value(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); remove it or choose another --output_dir"
        ) from error


def begin_run(
    run: RunFolder,
    plan: RunPlan,
    data: PreparedData,
    identity: Identity,
    model: PreTrainedModel,
    dataset: PackedDataset,
) -> None:
    """Write what the run is into its folder, on rank 0, after every check, and print it.

    First removes or sets aside checkpoints that do not count any more: the files of a killed save, and what was saved
    after the step from which the run continues. Then writes recipe, plan, environment, the model's config with the
    tokenizer, and the mixture; and an event for the start and for each of the plan's warnings.
    """

    def tidy() -> None:
        if start.starts_over:
            _set_aside(run)
        remove_uncommitted(run)
        set_aside_after(run, start.step, spared=start.checkpoint)
        if not run.disks.has_rank_0:
            write_json(run.recipe, identity.recipe.to_dict())
            run.add_event(kind, step=start.step, **launch_details())

    def write() -> None:
        record_changes(run, start, identity.recipe)  # before the recipe: see there
        copy_extensions(identity.recipe.extensions, run.path)
        write_json(run.recipe, identity.recipe.to_dict())
        write_json(run.plan, plan.to_dict())
        write_json(run.environment, identity.environment)
        describe_model(run, model, data.tokenizer)
        print(start_text(run, identity, plan), flush=True)
        if data.mixture is not None:
            table = data.mixture.table(identity.recipe.num_samples)
            write_json(run.mixture, table)
            print(format_table(table))
        cuts = dataset.cut_shares()
        if cuts is not None:
            print(cuts_text(cuts))
        run.add_event(
            kind,
            step=start.step,
            checkpoint=start.checkpoint and start.checkpoint.name,
            **plan.layout,
            **disks,
            **launch_details(),
            # None: the blocks are not packed.
            **({} if cuts is None else {"cuts": cuts}),
        )
        if start.initial_weights and start.checkpoint is None:
            run.add_event(GIVEN, **start.initial_weights)
        plan.verdict.keep(run, start.step)

    start = identity.start
    kind = "resume" if start.checkpoint else "start"
    disks = {"run_folders": run.disks.count} if len(set(gather_from_ranks(this_machine()))) > 1 else {}
    together(lambda: tidy() if run.disks.is_first else None)
    from_rank_0(write)
    run.begin()


def start_text(run: RunFolder, identity: Identity, plan: RunPlan) -> str:
    """Return what a run is, where it begins and what is planned, a line each."""
    recipe, start = identity.recipe, identity.start
    progress = start.progress(recipe)
    left = 1 - start.tokens / max(1, progress.tokens_at(progress.last_step))
    rows = [
        ("run", run_line(recipe, plan, display_path(run.path), identity.environment["device"])),
        *([] if run.disks.shared else [("disks", _disks_line(run, recipe))]),
        ("start", _start_line(run, start, progress.last_step)),
        *(
            []
            if (balance := balance_of_experts(recipe.model)) is None
            else [("router", balance or "not balanced")]
        ),
        ("plan", plan_line(recipe, plan, left)),
    ]
    return "\n".join(f"{label:<7}{line}" for label, line in rows)


def _start_line(run: RunFolder, start: Start, last_step: int) -> str:
    """Write `fresh`, or from which checkpoint a run continues, and when, where and by what that was saved."""
    if start.checkpoint is None:
        return _given_words(start.initial_weights) if start.initial_weights else "fresh"
    marker, place = read_marker(start.checkpoint), start.checkpoint
    # Only the name of a checkpoint of this run: its folder is in the line above.
    name = place.name if place.parent.absolute() == run.path.absolute() else display_path(place)
    stage = "without DeepSpeed" if marker["zero_stage"] is None else f"zero{marker['zero_stage']}"
    host = f" on {marker['host']}" if "host" in marker else ""  # older markers do not name it
    saved = f"saved {marker['saved']} by {several(marker['ranks'], 'rank')}, {stage}{host}"
    return (
        f"continued from {name} ({saved}): step {start.step:,} of {last_step:,}, {start.tokens:,} tokens seen"
    )


def _disks_line(run: RunFolder, recipe: Recipe) -> str:
    """Say that nodes have run folders of their own, and where their checkpoints meet."""
    where = (
        f"checkpoints meet in {recipe.checkpoints.upload}"
        if recipe.checkpoints.upload
        else "nothing is saved"
    )
    return f"no shared disk: {run.disks.count} run folders, each with the files of its own ranks; {where}"


def _given_words(given: dict) -> str:
    """Describe the weights from which a run begins."""
    words = f"from the weights of {given['source']} ({given['digest']})"
    if given["tokenizer"] != "the same":
        words += "; no tokenizer there to compare"
    for name, rows in given["added_rows"].items():
        words += f"; {name}: {rows:,} new rows, each the mean of the others" if rows > 0 else ""
        words += f"; {name}: without the last {-rows:,} rows" if rows < 0 else ""
    return words + (f"; not in use: {listed(given['unused'])}" if given["unused"] else "")


def record_changes(run: RunFolder, start: Start, recipe: Recipe) -> None:
    """Print and keep what was changed on request."""
    # Comes before the recipe is written: if a start is killed in between, the next one asks again for its changes.
    known = _recorded_changes(run)
    for change in start.changes:
        if change in known:
            continue
        effect = _effect_on_rate(change, recipe, start)
        run.add_event("change_accepted", **change, **({"effect": effect} if effect else {}))
        words = (
            f"{change['key']} is {change['to']!r} from step {change['step']:,} on, and was {change['from']!r}"
        )
        print(f"accepted: {words}{'; ' if effect else ''}{effect}", flush=True)
    if start.changes or known:
        write_json(run.changes, list(start.changes))


def _effect_on_rate(change: dict, recipe: Recipe, start: Start) -> str:
    """Return what a recorded change of the steps' sizes means for the learning rate; "" if nothing."""
    kind, progress = recipe.training.lr_scheduler_type, start.progress(recipe)
    place, last = progress.schedule_steps_at(start.step), progress.last_step
    # After its warm-up, a constant rate is the same at any step.
    is_flat = kind == CONSTANT[0] or (
        kind in CONSTANT and place >= recipe.warmup_steps(progress.schedule_steps_at(last))
    )
    if change["key"] not in STEP_SIZES or recipe.schedule_counts_tokens or is_flat:
        return ""
    keys = "budget.warmup_tokens (in place of training.warmup_steps)"
    keys += " or budget.decay_tokens" if kind == DECAYING else ""
    if any(resize.step == start.step for resize in progress.resizes):
        size = progress.resizes[0].earlier
        return (
            f"the learning rate stays where it was: the schedule {kind} goes on in steps of {size:,} tokens, and so do "
            f"training.warmup_steps and its other lengths; {keys} says the same in tokens"
        )
    return (
        f"the learning rate moves by it: the schedule {kind} counts steps, and has {last - start.step:,} left after "
        f"{start.step:,}, whatever their tokens; {keys} lets it count tokens, so that the rate stays where it is"
    )


def _set_aside(run: RunFolder) -> None:
    """Keep what an earlier run left in this folder under another name."""
    # Without a recipe the folder holds no run that a start had opened.
    if run.recipe.exists():
        aside = run.path.with_name(f"{run.path.name}.{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
        run.path.rename(aside)
        move_lock(aside, run.path)  # this process goes on holding the new folder
        print(f"the earlier run of {run.path} is kept as {aside}")


class Finding(Protocol):
    """Why the attempt was stopped: the optimizer step whose loss was the reason, and a sentence."""

    step: int
    sentence: str


def roll_back(run: RunFolder, start: Start, finding: Finding, recipe: Recipe) -> None:
    """Write a rollback into the journal, which the next `find_start` follows; every rank calls it.

    The samples of `monitors.spikes.skip_steps` steps before the step of the finding, and of as many steps from it on,
    are left out. When the run is opened again, the checkpoints saved since are set aside.

    start: where this attempt began. finding: the `step` whose loss was the reason, and why (`sentence`).

    Raises:
        GaveUp: on every rank, if the policy is another one or has no rollback left.
    """
    last_words = from_rank_0(lambda: _roll_back_on_rank_0(run, start, finding, recipe))
    if last_words is not None:
        raise GaveUp(last_words)


def _roll_back_on_rank_0(run: RunFolder, start: Start, finding: Finding, recipe: Recipe) -> str | None:
    """Return the run's last line, or None after a rollback."""
    spikes, done = recipe.monitors.spikes, len(start.journal.rollbacks)
    step, why, allowed = finding.step, finding.sentence, spikes.max_rollbacks
    if spikes.policy != "rollback" or done >= allowed:
        run.add_event("gave_up", step=step, why=why, policy=spikes.policy, rollbacks=done)
        return _last_words(run, why, spikes.policy, done)
    rollback = _planned(run, start, step, recipe)
    # The journal first: if the process is killed after it, the next start still follows it.
    start.journal.with_rollback(rollback).write(run.journal)
    run.add_event("rollback", **asdict(rollback), why=why, rollback=done + 1, of=allowed)
    print(f"rollback {done + 1} of {allowed}: {why}; back to step {rollback.to_step}", flush=True)
    return None


def _planned(run: RunFolder, start: Start, step: int, recipe: Recipe) -> Rollback:
    """Plan the rollback from the loss of optimizer step `step`."""
    spikes = recipe.monitors.spikes
    # Counted from 0, `step - 1` is the step whose loss was the reason.
    # At the first steps of a run there are fewer before it.
    first_step = max(0, step - 1 - spikes.skip_steps)
    last_step = step - 1 + spikes.skip_steps
    progress = start.progress(recipe)
    first, last = progress.samples_at(first_step), progress.samples_at(last_step)
    # Positions in the global order, from which earlier rollbacks have left out samples already.
    positions = start.journal.position(first), start.journal.position(last - 1) + 1
    to_step = _good_step(run, start.journal, first_step)
    return Rollback(step, to_step, positions, spikes.lr_factor, spikes.lr_steps)


def _good_step(run: RunFolder, journal: Journal, most_steps: int) -> int:
    """Return the steps of the newest checkpoint with at most `most_steps`; 0, the beginning, if there is none."""
    # Marker and sizes suffice here: the next start compares the bytes, and takes an earlier one if they have changed.
    for folder in committed_checkpoints(run):
        step = step_in_name(folder)
        if step > most_steps or is_left_behind(folder, journal):
            continue
        # What other disks hold of it shows at the next start.
        if quick_damage(folder, of_run=True, is_part=not run.disks.shared)[0] is None:
            return step
    return 0


def _last_words(run: RunFolder, why: str, policy: str, rollbacks: int) -> str:
    done = f" after {rollbacks} rollbacks" if rollbacks else ""
    return (
        f"{run.path}: training gave up{done} (monitors.spikes.policy {policy}): {why}; {run.events} says what "
        "happened and what to try; the committed checkpoints are kept, and the same command continues from the newest"
    )
