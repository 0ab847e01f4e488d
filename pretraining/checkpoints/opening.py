"""The first writes of a start: rank 0 puts what the run is into its folder, after every check."""

import time

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pretraining.checkpoints.export import describe_model
from pretraining.checkpoints.folders import remove_uncommitted, set_aside_after
from pretraining.checkpoints.format import read_marker
from pretraining.checkpoints.identity import Identity, Start
from pretraining.checkpoints.lock import move_lock
from pretraining.checkpoints.resume import (
    effect_on_rate,
    recorded_changes,
)
from pretraining.data import PackedDataset, cuts_of_run, cuts_text, format_table
from pretraining.data.mixing.training import Mixture
from pretraining.planning import RunPlan, run_facts
from pretraining.planning.quantities import facts, several
from pretraining.recipe import Recipe
from pretraining.runtime.durable_files import write_json
from pretraining.runtime.process_group import from_rank_0
from pretraining.runtime.restarts import launch_details
from pretraining.runtime.run_folder import RunFolder
from pretraining.schema import display_path


def open_run(
    run: RunFolder,
    identity: Identity,
    plan: RunPlan,
    mixture: Mixture | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: PackedDataset,
) -> None:
    """Write what the run is into its folder, on rank 0, after every check, and print it.

    Checkpoints that do not count any more go first: the files of a killed save, and what was saved after the step
    from which the run goes on. Then recipe, plan, environment, the model's config with the tokenizer, mixture.
    """

    def write() -> None:
        start = identity.start
        if start.starts_over:
            _set_aside(run)
        remove_uncommitted(run)
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
        cuts = cuts_of_run(dataset)
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
    """Return what a run is and where it begins, in a few lines."""
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
    """Print and keep what was changed on request."""
    # Before the recipe is written: a start that is killed in between is asked again for what it accepted.
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
    """Keep what an earlier run left in this folder under another name."""
    if run.recipe.exists():
        aside = run.path.with_name(f"{run.path.name}.{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
        run.path.rename(aside)
        move_lock(aside, run.path)  # this process goes on holding the new folder
        print(f"the earlier run of {run.path} is kept as {aside}")
