"""The start of a run: rank 0 opens the run folder, decides where to continue, and tells the others."""

import json
import time
from pathlib import Path

from pretraining.checkpoints.agreement import from_rank_0
from pretraining.checkpoints.find import choose_checkpoint, refuse_other_layout, remove_uncommitted
from pretraining.checkpoints.lock import move_lock
from pretraining.curve import refuse_other_curve
from pretraining.data import format_table
from pretraining.errors import UserError
from pretraining.planning import RunPlan
from pretraining.restarts import launch_details, resume_after_restart
from pretraining.run_dir import RunDir, write_json


def find_start(run: RunDir, recipe: dict, plan: RunPlan, resume: str) -> Path | None:
    """The checkpoint to continue from, or None: rank 0 decides, every rank gets its answer or its `UserError`.

    Writes nothing but the event of a damaged checkpoint that is passed over.
    """
    return from_rank_0(lambda: _find_on_rank_0(run, recipe, plan, resume_after_restart(run, resume)))


def _find_on_rank_0(run: RunDir, recipe: dict, plan: RunPlan, resume: str) -> Path | None:
    if resume != "never" and run.recipe.exists():
        refuse_other_curve(recipe, _read_recipe(run), run.path)
    checkpoint = choose_checkpoint(run, resume)
    if checkpoint is not None:
        refuse_other_layout(checkpoint, plan.layout)
    return checkpoint


def open_run(
    run: RunDir,
    recipe: dict,
    plan: RunPlan,
    environment: dict,
    checkpoint: Path | None,
    resume: str,
    mixture: dict | None,
) -> None:
    """Rank 0 writes recipe, plan, environment and the mixture's table into the run folder, after every check."""

    def write() -> None:
        if resume_after_restart(run, resume) == "never":
            _set_aside(run)
        remove_uncommitted(run)
        write_json(run.recipe, recipe)
        write_json(run.plan, plan.to_dict())
        write_json(run.environment, environment)
        if mixture is not None:
            write_json(run.mixture, mixture)
            print(format_table(mixture))
        kind = "resume" if checkpoint else "start"
        run.add_event(kind, checkpoint=checkpoint and checkpoint.name, **plan.layout, **launch_details())

    from_rank_0(write)


def _set_aside(run: RunDir) -> None:
    """Keep what an earlier run left in this folder, under another name."""
    if run.recipe.exists():
        aside = run.path.with_name(f"{run.path.name}.{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
        run.path.rename(aside)
        move_lock(aside, run.path)
        print(f"the earlier run of {run.path} is kept as {aside}")


def _read_recipe(run: RunDir) -> dict:
    try:
        return json.loads(run.recipe.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{run.recipe}: cannot be read ({error}); remove it or choose another --output_dir"
        ) from error
