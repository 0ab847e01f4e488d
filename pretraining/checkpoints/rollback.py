"""Go back to the last good committed checkpoint, and continue without the samples that spoilt the run."""

from dataclasses import asdict
from typing import Protocol

from pretraining.checkpoints.folders import committed_checkpoints, quick_damage, step_in_name
from pretraining.checkpoints.identity import Start
from pretraining.checkpoints.resume import is_left_behind
from pretraining.errors import GaveUp
from pretraining.recipe import Recipe
from pretraining.runtime.journal import Journal, Rollback
from pretraining.runtime.process_group import from_rank_0
from pretraining.runtime.run_folder import RunFolder


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
        if quick_damage(folder, of_run=True)[0] is None:
            return step
    return 0


def _last_words(run: RunFolder, why: str, policy: str, rollbacks: int) -> str:
    done = f" after {rollbacks} rollbacks" if rollbacks else ""
    return (
        f"{run.path}: training gave up{done} (monitors.spikes.policy {policy}): {why}; {run.events} says what "
        "happened and what to try; the committed checkpoints are kept, and the same command continues from the newest"
    )
