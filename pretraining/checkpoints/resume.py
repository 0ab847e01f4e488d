"""Find where a run begins or continues, do the first writes of that start, and go back to a checkpoint that was good.

`find_start`: rank 0 looks at the folder and decides. All ranks verify the bytes of the checkpoint together, before
anything is loaded. `begin_run` writes. Between the two calls the caller builds model and Trainer: if one of them
refuses the start, nothing has been written yet. `roll_back` leaves out the samples that spoilt a run.
"""

import socket
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from pretraining.checkpoints.choosing import choose_checkpoint
from pretraining.checkpoints.folders import (
    COMMITTED,
    DiskPlace,
    health,
    remove_uncommitted,
    set_aside_after,
    step_in,
)
from pretraining.checkpoints.format import GIVEN, MARKER, Identity, Start, described_data, read_marker
from pretraining.checkpoints.remote import RUN_FILES, RemoteRun, fetch_absent
from pretraining.checkpoints.shard_files import read_state
from pretraining.data.documents import cuts_text
from pretraining.data.manifest import ORIGIN
from pretraining.data.mixture import format_table
from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.prepared import PreparedData
from pretraining.errors import GaveUp, UserError
from pretraining.extend import copy_extensions
from pretraining.outside.files import TEXT, object_of, parse_json, read_json_value
from pretraining.outside.schema import check, differences, display_path, in_brief, listed
from pretraining.planning.quantities import several
from pretraining.planning.run_plan import RunPlan
from pretraining.planning.screen import plan_line, run_line
from pretraining.planning.sizes import balance_of_experts, model_size
from pretraining.recipe import Recipe
from pretraining.recipe.budget import RAMP, STEP_SIZE
from pretraining.recipe.fixed_keys import (
    DATA_FINGERPRINT,
    Change,
    changed_parts,
    changes_of_run,
    refuse_changes,
)
from pretraining.recipe.sections import Weights
from pretraining.recipe.training import BY_METRIC, CONSTANT, DECAYING
from pretraining.runtime.durable_files import replacing, replacing_folder, rows_of, write_json
from pretraining.runtime.heartbeat import this_machine
from pretraining.runtime.journal import Journal, Rollback
from pretraining.runtime.lock import move_lock
from pretraining.runtime.process_group import from_rank, from_rank_0, gather_from_ranks, own_rank, together
from pretraining.runtime.processes import launch_details, resume_after_restart
from pretraining.runtime.run_folder import STARTS, RunFolder

_MEETING = ".nodes"  # file of the store by which every node shows that it reads what rank 0 writes
TOKENIZER = "data.tokenizer"
STEP_SIZES = (STEP_SIZE, RAMP)  # keys that say how many tokens a step has
PEAKS = ("training.learning_rate", "optimizer.groups")  # keys that say the rate from which a schedule begins


def find_start(
    run: RunFolder, recipe: Recipe, data: PreparedData, resume: str, allowed: Sequence[str], layout: dict
) -> Start:
    """Find where to begin or continue; rank 0 decides, and every rank gets the same answer or the same `UserError`.

    Writes only the checkpoints that it fetches from a store, and an event for a damaged one that it passes over.

    allowed: keys of the recipe, or sections, that may differ from what the run was so far. resume, layout: as in
    `choose_checkpoint`.
    """
    refuse_lone_disks(run, recipe)
    upload = recipe.checkpoints.upload
    # Also on one disk that was one of several before, as that of the last node which is left.
    in_parts = not run.disks.shared or from_rank_0(run.holds_parts)
    if in_parts and resume != "never":
        bring_history(run, upload)
    # A launcher that restarts the run repeats the command line: a typed `never` must not begin the run anew each time.
    typed, resume = resume, from_rank_0(lambda: resume_after_restart(run, resume))

    def check_stored(place: str, marker: dict, accepted: bytes) -> None:
        recorded = [*recorded_changes(run), *changes_in(accepted, place)]
        changes_since(place, marker, recipe, data.manifest, allowed, recorded)

    check_folder = partial(changes_of_run, run.path, recipe.to_dict(), allowed)
    if resume != "never":
        from_rank_0(check_folder)  # the cheap check first: verifying a checkpoint reads all its bytes
    checkpoint, source = choose_checkpoint(run, resume, upload, layout, check_stored, in_parts)
    if checkpoint is None and typed not in ("auto", "never"):  # restarted before it had saved
        checkpoint, source = choose_checkpoint(run, typed, upload, layout, check_stored, in_parts)
    if resume == "never":
        return Start(starts_over=True)
    if checkpoint is None:
        from_rank_0(lambda: refuse_lost_beginning(run))
    from_rank_0(check_folder)  # the recipe may have come from the store meanwhile

    def start_at_checkpoint() -> Start:
        journal = Journal.read(run.journal)
        if checkpoint is None:
            return Start(journal=journal)
        read_state(checkpoint)  # refuses another format before the model is built
        marker, start = read_marker(checkpoint), Start.at(checkpoint)
        changes = changes_since(checkpoint, marker, recipe, data.manifest, allowed, recorded_changes(run))
        refuse_lost_rollbacks(checkpoint, run, journal)
        if changes and start.step >= start.progress(recipe).last_step:
            keys = ", ".join(each.key for each in changes)
            what = f"all {start.step:,} steps are done, so that changing {keys} would change none of them"
            remedy = "make a run of its own (python -m pretraining.checkpoints branch)"
            raise UserError(f"{run.path}: {what}; {remedy}, or start over with --resume never")
        accepted = [each.accepted_at(start.step) for each in changes]
        return replace(start, changes=(*start.changes, *accepted), journal=journal)

    start = from_rank_0(start_at_checkpoint)
    return replace(start, fetch=source and partial(fetch_absent, source, checkpoint))


def refuse_lost_beginning(run: RunFolder) -> None:
    """Raise `UserError` if the last start went on from a checkpoint and none is left: a drawn model is another run."""
    begun = run.last_event(*STARTS) or {}
    if begun.get("step"):
        what = f"the last start went on from {begun.get('checkpoint')}, and no checkpoint is here"
        remedy = (
            "--resume PATH goes on from that one again, --resume never keeps this run aside and begins anew"
        )
        raise UserError(f"{run.path}: {what}; {remedy}")


def refuse_lost_rollbacks(checkpoint: Path, run: RunFolder, journal: Journal) -> None:
    """Raise `UserError` if a checkpoint was trained after rollbacks that the journal does not hold."""
    # The journal says which samples each rollback left out: without it the data would be another from here on.
    known = read_marker(checkpoint).get("rollbacks", 0)
    if known > len(journal.rollbacks):
        raise UserError(
            f"{run.journal}: {checkpoint} was trained after {known} rollbacks and this journal holds "
            f"{len(journal.rollbacks)}: the samples they left out are not known; bring back the journal of its run, "
            "or begin a run of its own from it: python -m pretraining.checkpoints branch"
        )


def changes_since(
    checkpoint: Path | str,
    marker: dict,
    recipe: Recipe,
    manifest: dict,
    allowed: Sequence[str],
    accepted: Sequence[dict],
) -> list[Change]:
    """Return how recipe and data differ from the checkpoint's.

    accepted: what earlier starts accepted, which stays accepted. Raises `UserError` for a change that is not allowed,
    and for one that no checkpoint can follow: other shapes of the weights.
    """
    try:
        changes = changed_parts(recipe.to_dict(), marker["recipe"])
        # no request can change the weights' shapes
        if any(change.key.startswith("model.") for change in changes):
            held, now = Weights.split(marker["recipe"]["model"])[0], recipe.model
            if held["model_type"] != now["model_type"] or model_size(held).parts != model_size(now).parts:
                what = f"holds weights of other shapes: {listed(differences(held, now, 'model'))}"
                remedy = "give this model its own folder with --output_dir, or start over with --resume never"
                raise UserError(f"{checkpoint} {what}; {remedy}")
        data, data_now = marker["data"], described_data(recipe, manifest)
        # of tokens that were not there yet, their origin counts
        is_early = any(each["fingerprint"].startswith(ORIGIN) for each in (data, data_now))
        key = "origin" if is_early else "fingerprint"
        # A changed key of `data` explains the other tokens: one change is not listed twice.
        if data.get(key) != data_now.get(key) and not any(each.key.startswith("data.") for each in changes):
            changes.append(Change(DATA_FINGERPRINT, data["fingerprint"], data_now["fingerprint"]))
        # but other ids are a change of their own: another source may have trained another vocabulary
        tokenizers = Change(TOKENIZER, data.get("tokenizer"), data_now.get("tokenizer"))
        has_others = tokenizers.earlier not in (None, tokenizers.now)
        if has_others and not any(each.key == TOKENIZER for each in changes):
            changes.append(tokenizers)
    # a marker that somebody else has written
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        what = f"{MARKER} holds no recipe and data of a run ({type(error).__name__})"
        raise UserError(f"{checkpoint}: {what}; choose another checkpoint") from error
    # A start may have been killed before it saved, so that the checkpoint does not know what it had accepted.
    recorded = [(each["key"], each["to"]) for each in accepted]
    new = [change for change in changes if (change.key, change.now) not in recorded]
    if has_others and any(each.key == TOKENIZER and not each.is_allowed(allowed) for each in new):
        what = f"was trained with another tokenizer ({tokenizers.earlier}, and {data_now['name']} has {tokenizers.now})"
        remedy = f"prepare the data with the run's own, which its folder has (--set {TOKENIZER}=RUN/model)"
        raise UserError(f"{checkpoint}: {what}; {remedy}, or accept it with --allow_change {TOKENIZER}")
    refuse_changes(new, allowed, checkpoint, "checkpoint")
    return changes


_CHANGES = {"type": "array", "items": object_of({"key": TEXT, "to": {}})}


def recorded_changes(run: RunFolder) -> list[dict]:
    """Return what earlier starts in this folder accepted: {"step", "key", "from", "to"} each."""
    where = f"{run.changes} (remove it, or choose another --output_dir)"
    try:
        return check(read_json_value(run.changes), _CHANGES, where) if run.changes.exists() else []
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: cannot be read ({error})") from error


def changes_in(content: bytes, place: str) -> list[dict]:
    """Return the same of a run in a store; place: for messages."""
    where = f"{place}: changes.json beside it"
    try:
        return check(parse_json(content), _CHANGES, where)
    except ValueError as error:
        raise UserError(f"{where}: {error}; remove it there") from error


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
        if start.starts_over and run.recipe.exists():  # without a recipe no start had opened a run here
            when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            aside = run.path.with_name(f"{run.path.name}.{when}")
            run.path.rename(aside)
            move_lock(aside, run.path)  # this process goes on holding the new folder
            print(f"the earlier run of {run.path} is kept as {aside}")
        remove_uncommitted(run)
        if moved := set_aside_after(run, start.step, spared=start.checkpoint):
            names = ", ".join(each.name for each in moved)
            print(f"set aside, as the run goes on from step {start.step:,}: {run.aside}: {names}")
        if not run.disks.has_rank_0:
            write_json(run.recipe, identity.recipe.to_dict())
            run.add_event(kind, step=start.step, **launch_details())

    def write() -> None:
        record_changes(run, start, identity.recipe)  # before the recipe: see there
        write_json(run.recipe, identity.recipe.to_dict())  # before all by which another's folder is known
        copy_extensions(identity.recipe.extensions, run.path)
        write_json(run.plan, plan.to_dict())
        write_json(run.environment, identity.environment)
        # an export needs them, and checkpoints do not hold them
        with replacing_folder(run.model) as description:
            model.config.save_pretrained(description)
            data.tokenizer.save_pretrained(description)
        print(start_text(run, identity, plan), flush=True)
        if data.mixture is not None:
            table = data.mixture.table(identity.recipe.num_samples)
            write_json(run.mixture, table)
            print(format_table(table))
            changed = [each["step"] for each in start.changes if each["key"].startswith("data.")]
            if changed:
                print(f"mixed so from step {max(changed):,} on; the table is that of a run of nothing else")
        cuts = dataset.cut_shares()
        if cuts is not None:
            print(cuts_text(cuts))
        begun = {"step": start.step, "checkpoint": start.checkpoint and start.checkpoint.name, **plan.layout}
        share = {} if cuts is None else {"cuts": cuts}  # None: the blocks are not packed
        run.add_event(kind, **begun, **disks, **launch_details(), **share)
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
    rows = [("run", run_line(plan, display_path(run.path), identity.environment["device"]))]
    if not run.disks.shared:
        upload = recipe.checkpoints.upload
        where = f"checkpoints meet in {upload}" if upload else "nothing is saved"
        folders = f"{run.disks.count} run folders, each with the files of its own ranks"
        rows.append(("disks", f"no shared disk: {folders}; {where}"))
    words, given, place = "fresh", start.initial_weights, start.checkpoint
    if place is not None:
        marker = read_marker(place)
        # Only the name of a checkpoint of this run: its folder is in the line above.
        name = place.name if place.parent.absolute() == run.path.absolute() else display_path(place)
        stage = "without DeepSpeed" if marker["zero_stage"] is None else f"zero{marker['zero_stage']}"
        host = f" on {marker['host']}" if "host" in marker else ""  # older markers do not name it
        words = f"continued from {name} (saved {marker['saved']} by {several(marker['ranks'], 'rank')}, {stage}{host}"
        words += f"): step {start.step:,} of {progress.last_step:,}, {start.tokens:,} tokens seen"
    elif given is not None:
        words = f"from the weights of {given['source']} ({given['digest']})"
        if given["tokenizer"] != "the same":
            words += "; no tokenizer there to compare"
        for name, added in given["added_rows"].items():
            words += f"; {name}: {added:,} new rows, each the mean of the others" if added > 0 else ""
            words += f"; {name}: without the last {-added:,} rows" if added < 0 else ""
        words += f"; not in use: {listed(given['unused'])}" if given["unused"] else ""
    rows.append(("start", words))
    if (balance := balance_of_experts(recipe)) is not None:
        rows.append(("router", balance or "not balanced"))
    rows.append(("plan", plan_line(plan, left)))
    return "\n".join(f"{label:<7}{line}" for label, line in rows)


def record_changes(run: RunFolder, start: Start, recipe: Recipe) -> None:
    """Print and keep what was changed on request."""
    # Comes before the recipe is written: if a start is killed in between, the next one asks again for its changes.
    known = recorded_changes(run)
    for change in start.changes:
        if change in known:
            continue
        effect = _effect_on_rate(change, recipe, start)
        run.add_event("change_accepted", **change, **({"effect": effect} if effect else {}))
        words = f"accepted: {change['key']} is {in_brief(change['to'])} from step {change['step']:,} on"
        print(f"{words}, and was {in_brief(change['from'])}{'; ' if effect else ''}{effect}", flush=True)
    if start.changes or known:
        write_json(run.changes, list(start.changes))


def _effect_on_rate(change: dict, recipe: Recipe, start: Start) -> str:
    """Return what a recorded change of the peak or of the steps' sizes means for the learning rate; "" if nothing."""
    kind, progress = recipe.training.lr_scheduler_type, start.progress(recipe)
    if change["key"] in PEAKS and kind in BY_METRIC:
        return f"the learning rate stays where it is: {kind} changes it by validations alone"
    place, last = progress.schedule_place(start.step), progress.last_step
    # After its warm-up, a constant rate is the same at any step.
    is_flat = kind == CONSTANT[0] or (
        kind in CONSTANT and place >= recipe.warmup_steps(progress.schedule_place(last))
    )
    if change["key"] not in STEP_SIZES or progress.counts_tokens or is_flat:
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


def refuse_lone_disks(run: RunFolder, recipe: Recipe) -> None:
    """Raise `UserError` if nodes have run folders of their own and no store in which their checkpoints meet."""
    if run.disks.shared or recipe.training.save_strategy == "no":
        return
    upload = recipe.checkpoints.upload
    disks = several(run.disks.count, "disk")
    what = f"{run.path} is a folder of its own on {disks}, and ranks see only theirs"
    if upload is None:
        raise UserError(
            f"{what}: a lost node would take its part of every checkpoint with it; set checkpoints.upload to a store "
            "that all nodes reach, give --output_dir on a shared disk, or save nothing: "
            '--set training.save_strategy="no"'
        )
    if recipe.checkpoints.demote_to_weights:
        why = "checkpoints.demote_to_weights needs all files of a checkpoint in one place"
        raise UserError(f"{what}: {why}; set it to false, or give --output_dir on a shared disk")
    remote, token = RemoteRun(upload, run.path.name).at_first_contact(), uuid.uuid4().hex.encode()

    def write() -> bool:
        with suppress(UserError):
            remote.write_bytes(_MEETING, token)
            return True
        return False

    # A store that does not answer is another matter: the run may continue from what the disks hold.
    if not from_rank_0(write):
        return
    # A node may have another folder there, or reach another store, by the same address.
    token = from_rank(0, token)
    reads = together(lambda: not run.disks.is_first or remote.read_if_there(_MEETING) == token)
    hosts = gather_from_ranks(socket.gethostname())
    apart = [host for host, same in zip(hosts, gather_from_ranks(reads), strict=True) if not same]
    if apart:
        what = f"{remote.address} is another place on {', '.join(apart)} than on {hosts[0]}"
        raise UserError(f"checkpoints.upload: {what}; all nodes must reach the same store")


def bring_history(run: RunFolder, upload: str | None) -> None:
    """Give rank 0 the newest history of the run (journal, metrics, events), if its own disk holds an older one."""
    remote = None if upload is None else RemoteRun(upload, run.path.name).at_first_contact()
    in_store = remote and partial(remote.read_if_there, run.events.name)

    def num_starts(read: Callable[[], bytes | None]) -> int:
        with suppress(UserError):  # a store does not answer, which the search for a checkpoint reports
            rows = rows_of((read() or b"").decode(errors="replace"))
            return sum(row.get("event") in STARTS for row in rows)
        return 0

    def write(history: dict[str, bytes | None]) -> None:
        for name, content in history.items():
            if content is None:
                (run.path / name).unlink(missing_ok=True)
                continue
            with replacing(run.path / name, "wb") as file:
                file.write(content)

    # Each start of the run adds an event to the history that it continues: the newest history has the most.
    own = num_starts(run.events.read_bytes) if run.events.exists() else 0
    starts = gather_from_ranks(own if run.disks.is_first else -1)
    owner = max(range(len(starts)), key=lambda rank: (starts[rank], -rank))
    if remote is not None and from_rank_0(lambda: num_starts(in_store)) > starts[owner]:
        from_rank_0(lambda: write({name: remote.read_if_there(name) for name in RUN_FILES}))
    elif starts[owner] > starts[0]:
        paths = [run.path / name for name in RUN_FILES if own_rank() == owner]
        history = from_rank(owner, {path.name: path.read_bytes() for path in paths if path.exists()})
        from_rank_0(lambda: write(history))


def roll_back(run: RunFolder, start: Start, recipe: Recipe, step: int, why: str) -> str:
    """Write a rollback into the journal, which the next `find_start` follows; every rank calls it.

    The samples of `monitors.spikes.skip_steps` steps before the step whose loss was the reason, and of as many steps
    from it on, are left out. When the run is opened again, the checkpoints saved since are set aside. start: where this
    attempt began. Returns the next attempt's `--resume`. Raises `GaveUp` on every rank, if the policy is another one,
    has no rollback left, or finds no checkpoint from before that step.
    """

    def write() -> tuple[str, str]:
        """Return the next `--resume` and "", or "" and the run's last line."""
        spikes, done = recipe.monitors.spikes, len(start.journal.rollbacks)
        allowed, reason = spikes.max_rollbacks, why
        # Counted from 0, `step - 1` is the step whose loss was the reason. At the first steps of a run there are fewer
        # before it.
        first_step, last_step = max(0, step - 1 - spikes.skip_steps), step - 1 + spikes.skip_steps
        resume, to_step = _checkpoint_before(run, start, step, first_step) or ("auto", 0)
        # the beginning of a run is where nothing was saved yet
        none_left = to_step == 0 and (start.checkpoint is not None or bool(run.committed()))
        if spikes.policy == "rollback" and done < allowed and none_left:
            reason += "; no whole checkpoint from before it is left to go back to (checkpoints.keep_last)"
        if spikes.policy != "rollback" or done >= allowed or none_left:
            run.add_event("gave_up", step=step, why=reason, policy=spikes.policy, rollbacks=done)
            after = f" after {done} rollbacks" if done else ""
            return "", (
                f"{run.path}: training gave up{after} (monitors.spikes.policy {spikes.policy}): {reason}; {run.events} "
                "says what happened and what to try; the committed checkpoints are kept, and the same command "
                "without --resume continues from the newest"
            )
        progress = start.progress(recipe)
        # What a nearer checkpoint has trained on cannot be left out.
        first, last = progress.samples_at(max(first_step, to_step)), progress.samples_at(last_step)
        # Positions in the global order, from which earlier rollbacks have left out samples already.
        positions = start.journal.position(first), start.journal.position(last - 1) + 1
        rollback = Rollback(step, to_step, positions, spikes.lr_factor, spikes.lr_steps)
        # The journal first: if the process is killed after it, the next start still follows it.
        Journal((*start.journal.rollbacks, rollback)).write(run.journal)
        run.add_event("rollback", **asdict(rollback), why=why, rollback=done + 1, of=allowed)
        nearer = ", the oldest checkpoint there is, nearer than monitors.spikes.skip_steps"
        nearer = nearer if to_step > first_step else ""
        print(f"rollback {done + 1} of {allowed}: {why}; back to step {to_step}{nearer}", flush=True)
        return resume, ""

    resume, last_words = from_rank_0(write)
    if last_words:
        raise GaveUp(last_words)
    return resume


def _checkpoint_before(run: RunFolder, start: Start, step: int, wanted: int) -> tuple[str, int] | None:
    """Find the newest checkpoint of at most `wanted` steps, else the oldest one before `step`: (its `--resume`, step).

    Not below another run's, from which this attempt began: what is older in this folder is of another course.
    """
    given = start.checkpoint
    given = given if given and given.parent.resolve() != run.path.resolve() else None
    found = [(str(given), start.step)] if given and start.step < step else []
    place, above = DiskPlace(run.path), start.step if given else -1
    for name in reversed(place.checkpoints()):
        if not above < step_in(name) < step:
            continue
        # Marker and sizes suffice here: the next start compares the bytes, and takes an earlier one if they have
        # changed. What other disks hold of it shows then, too.
        state = health(place, name, is_part=not run.disks.shared)
        left_behind = start.journal.overtakes(step_in(name), state.marker.get("rollbacks", 0))
        if state.word == COMMITTED and not left_behind:
            found.append(("auto", step_in(name)))
    return next((each for each in reversed(found) if each[1] <= wanted), found[0] if found else None)
