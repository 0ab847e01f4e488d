"""The start of a run: rank 0 opens the run folder, decides where to continue, and tells the others."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pretraining.checkpoints.changes import (
    changes_since,
    effect_on_rate,
    recorded_changes,
)
from pretraining.checkpoints.find import choose_checkpoint
from pretraining.checkpoints.folders import remove_uncommitted, set_aside_after
from pretraining.checkpoints.identity import Identity, Start
from pretraining.checkpoints.lock import move_lock
from pretraining.checkpoints.marker import read_marker
from pretraining.checkpoints.shard_files import read_state
from pretraining.checkpoints.weights import describe_model
from pretraining.curve import changes_of_run
from pretraining.data.mixture import Mixture, format_table
from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.packing import cuts_text
from pretraining.errors import UserError
from pretraining.planning import RunPlan, run_facts
from pretraining.planning.quantities import facts, several
from pretraining.recipe import Recipe
from pretraining.runtime.durable_files import write_json
from pretraining.runtime.journal import Journal
from pretraining.runtime.process_group import from_rank_0
from pretraining.runtime.restarts import launch_details
from pretraining.runtime.run_folder import RunFolder
from pretraining.schema import display_path


def find_start(run: RunFolder, recipe, manifest: dict, resume: str, allowed: Sequence[str]) -> Start:
    """Where to begin or continue, on every rank: rank 0 decides, every rank gets its answer or its `UserError`.

    resume: as `bring_checkpoint` resolved it. allowed: keys of the recipe, or sections, that may differ from what the
    run was so far. Writes nothing but the event of a damaged checkpoint that is passed over.
    """
    if resume != "never":
        from_rank_0(lambda: changes_of_run(run, recipe.to_dict(), allowed))
    journal = from_rank_0(lambda: Journal() if resume == "never" else Journal.read(run.journal))
    checkpoint = choose_checkpoint(run, resume, journal)
    start = from_rank_0(lambda: _start_at(checkpoint, run, recipe, manifest, allowed))
    from_rank_0(lambda: _refuse_lost_rollbacks(checkpoint, run, journal))
    return replace(start, journal=journal)


def _refuse_lost_rollbacks(checkpoint: Path | None, run: RunFolder, journal: Journal) -> None:
    known = read_marker(checkpoint).get("rollbacks", 0) if checkpoint else 0
    if known > len(journal.rollbacks):
        raise UserError(
            f"{run.journal}: {checkpoint} was trained after {known} rollbacks and this journal holds "
            f"{len(journal.rollbacks)}: the samples they left out are not known; bring back the journal of its run, "
            "or begin a run of its own from it: python -m pretraining.checkpoints branch"
        )


def _start_at(checkpoint: Path | None, run: RunFolder, recipe, manifest: dict, allowed) -> Start:
    if checkpoint is None:
        return Start()
    read_state(checkpoint)  # refuses another format before anything starts
    changes = changes_since(checkpoint, read_marker(checkpoint), recipe, manifest, run, allowed)
    start = Start.at(checkpoint)
    accepted = [
        {"step": start.step, "key": each.key, "from": each.earlier, "to": each.now} for each in changes
    ]
    if accepted and start.step >= start.last_step(recipe):
        keys = ", ".join(each["key"] for each in accepted)
        raise UserError(
            f"{run.path}: all {start.step:,} steps are done, so that changing {keys} would change none of them; make a "
            "run of its own (python -m pretraining.checkpoints branch), or start over with --resume never"
        )
    return replace(start, changes=(*start.changes, *accepted))


def open_run(
    run: RunFolder,
    identity: Identity,
    plan: RunPlan,
    resume: str,
    mixture: Mixture | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: PackedDataset,
) -> None:
    """Rank 0 writes what the run is into its folder, after every check: recipe, plan, environment, mixture, and
    the model's config with the tokenizer. It prints what the run is, what a mixture promises, and what packing brings.
    """

    def write() -> None:
        if resume == "never":
            _set_aside(run)
        remove_uncommitted(run)
        start = identity.start
        set_aside_after(run, start.step, spared=start.checkpoint)
        record_changes(run, start, identity.recipe)
        write_json(run.recipe, identity.recipe.to_dict())
        write_json(run.plan, plan.to_dict())
        write_json(run.environment, identity.environment)
        describe_model(run, model, tokenizer)
        print(start_text(run, identity, plan), flush=True)
        if mixture is not None:
            table = mixture.table(identity.recipe.num_samples)
            write_json(run.mixture, table)
            print(format_table(table))
        cuts = dataset.cut_shares()
        if cuts is not None:
            print(cuts_text(cuts))
        run.add_event(
            "resume" if start.checkpoint else "start",
            step=start.step,
            checkpoint=start.checkpoint and start.checkpoint.name,
            **plan.layout,
            **launch_details(),
            **({} if cuts is None else {"cuts": cuts}),
        )

    from_rank_0(write)


def start_text(run: RunFolder, identity: Identity, plan: RunPlan) -> str:
    """What a run is and where it begins, in a few lines."""
    recipe, start = identity.recipe, identity.start
    rows = [("run", f"{recipe.name} in {display_path(run.path)}, on {identity.environment['device']}")]
    rows += run_facts(recipe, plan, "rank")
    if start.checkpoint is not None:
        marker, place = read_marker(start.checkpoint), start.checkpoint
        name = place.name if place.parent.absolute() == run.path.absolute() else display_path(place)
        stage = "no DeepSpeed" if marker["zero_stage"] is None else f"zero{marker['zero_stage']}"
        done = f"step {start.step:,} of {start.last_step(recipe):,}, {start.tokens:,} tokens seen"
        rows.append(("continues", f"from {name} ({several(marker['ranks'], 'rank')}, {stage}): {done}"))
    return facts(rows)


def record_changes(run: RunFolder, start: Start, recipe: Recipe) -> None:
    """Say and keep what was changed on request. Before the recipe is written: a start killed in between is asked again
    for what it accepted.
    """
    known = recorded_changes(run)
    for change in start.changes:
        if change in known:
            continue
        effect = effect_on_rate(change, recipe, start)
        run.add_event("change_accepted", **change, **({"effect": effect} if effect else {}))
        words = (
            f"{change['key']} is {change['to']!r} from step {change['step']:,} on, and was {change['from']!r}"
        )
        print(f"accepted: {words}{'; ' if effect else ''}{effect}", flush=True)
    if start.changes or known:
        write_json(run.changes, list(start.changes))


def _set_aside(run: RunFolder) -> None:
    """Keep what an earlier run left in this folder, under another name."""
    if run.recipe.exists():
        aside = run.path.with_name(f"{run.path.name}.{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
        run.path.rename(aside)
        move_lock(aside, run.path)
        print(f"the earlier run of {run.path} is kept as {aside}")
