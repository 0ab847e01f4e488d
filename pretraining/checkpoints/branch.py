"""Make a stage that follows a stable checkpoint, as a run of its own.

A stage is a decay of the rate (Hu et al. 2024; Hägele et al. 2024), a longer context, other data, or several of these.
"""

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from pretraining.checkpoints.folders import files_in
from pretraining.checkpoints.format import MARKER, Start, read_marker
from pretraining.errors import UserError
from pretraining.outside.schema import display_path, problem, read_json, suggestion
from pretraining.planning.shapes import parameter_tensors
from pretraining.planning.sizes import model_size
from pretraining.recipe import Recipe, load_recipe, recipe_schema
from pretraining.recipe.data import block_of
from pretraining.recipe.fixed_keys import changed_parts
from pretraining.recipe.piecewise import placed
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.recipe.training import DECAYING, SCHEDULE_FREE, STABLE
from pretraining.runtime.durable_files import (
    append_row,
    flush_folder,
    read_rows,
    replacing_folder,
    write_json,
)
from pretraining.runtime.run_folder import RunFolder, step_in_name

DECIDED = {"training": ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")}
DECIDED |= {"budget": ("tokens", "warmup_tokens", "decay_tokens")}
"""Keys that a stage may not set, because --steps and --decay determine them."""


class StageChanges(NamedTuple):
    """What follows the checkpoint."""

    steps: int
    decay: str | None = None  # linear, cosine or 1-sqrt, to `min_lr_ratio` of the stable rate; None: it stays
    min_lr_ratio: float = 0.0
    settings: tuple[str, ...] = ()  # `section.key=value` of the recipe, as `--set` takes them
    deepspeed: str | None = None  # another ds_config; None: the run's own


def branch(checkpoint: Path, stage: StageChanges, output: Path) -> dict:
    """Make `output` a run that continues from `checkpoint` for one stage; returns its recipe.

    The caller has verified the checkpoint. Its files are linked, or copied if the disk has no links. The new recipe is
    that of the checkpoint with another name, schedule and budget, and with the settings of the stage, whose changes
    count as accepted. Stages of a mixture, and points of decay and momentum, keep their places. `output` appears
    complete or not at all. Raises `UserError` if the rate is not stable at that step, the step's size still rises, a
    setting is wrong, or the checkpoint could not be loaded with it.
    """
    marker = read_marker(checkpoint)
    with replacing_folder(output.absolute(), is_new=True) as unfinished:
        run = RunFolder(unfinished)
        # Both recipes are read from this file, so that the message for a wrong setting names it as in a recipe.
        write_json(run.recipe, {**marker["recipe"], "name": output.name})
        if (own := RunFolder(checkpoint.parent).extensions).is_dir():
            shutil.copytree(own, run.extensions)
        earlier = load_recipe(str(run.recipe))
        changed = load_recipe(str(run.recipe), stage.settings, stage.deepspeed)
        recipe = _staged_recipe(earlier, changed, marker, stage, checkpoint)
        write_json(run.recipe, recipe)
        # checks that the recipe can be read and trained, before any file is linked
        load_recipe_and_ds_config(str(run.recipe))
        # From where the run comes, what differs, and the rollbacks that came before the checkpoint.
        step = marker["step"]
        changes = [each.accepted_at(step) for each in changed_parts(recipe, marker["recipe"])]
        write_json(run.changes, [*marker["changes"], *changes])
        # Only the rollbacks that the checkpoint knows of: its run may have rolled back again since.
        for row in read_rows(RunFolder(checkpoint.parent).journal)[: marker["rollbacks"]]:
            append_row(run.journal, row)
        run.add_event("branch", step=step, parent=str(checkpoint), **stage._asdict())
        target = run.checkpoint(step)
        names = [path.relative_to(checkpoint) for path in files_in(checkpoint)]
        # False sorts before True: the marker comes last.
        for name in sorted(names, key=lambda name: name.name == MARKER):
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(checkpoint / name, place)
            except OSError:  # another file system, or one without links
                shutil.copy2(checkpoint / name, place)
        flush_folder(target)
    return recipe


def read_stage(path: Path) -> tuple[tuple[str, ...], str | None]:
    """Read a file of sections and keys that a stage changes (recipes/stages/), as `StageChanges` has them.

    A `base` in it makes the file a recipe too, which can be planned, and trained by itself. Raises `UserError` if it is
    no JSON object of a recipe's sections.
    """
    where, settings, found = display_path(path), [], read_json(path)
    sections = recipe_schema()["properties"]
    for section, values in found.items():
        if section in ("description", "base", "deepspeed"):
            continue
        if section not in sections or not isinstance(values, dict):
            near = suggestion(section, recipe_schema()) or ""
            what = f"{section} is no section of a recipe{near}"
            raise UserError(f"{where}: {what}; write {{section: {{key: value}}}}")
        for key, value in values.items():
            if not key.isidentifier():
                raise problem(where, f"{section}.{json.dumps(key)}", "is no key of a recipe")
            settings.append(f"{section}.{key}={json.dumps(value)}")
    return tuple(settings), found.get("deepspeed")


def _staged_recipe(
    earlier: Recipe, changed: Recipe, marker: dict, stage: StageChanges, checkpoint: Path
) -> dict:
    """Return the recipe of the `stage.steps` steps after a checkpoint of recipe `earlier`.

    changed: `earlier` with the stage's settings. Raises `UserError` for settings that the stage determines, or with
    which the checkpoint cannot be loaded.
    """
    for section, keys in DECIDED.items():
        for key in keys:
            if getattr(getattr(changed, section), key) != getattr(getattr(earlier, section), key):
                raise UserError(f"{section}.{key}: follows from --steps and --decay; leave it out")
    optimizers = [(each.training.optim, each.optimizer.name) for each in (earlier, changed)]
    if optimizers[0] != optimizers[1]:
        what = "holds the states of another optimizer"
        raise UserError(f"{checkpoint} {what}; leave training.optim and optimizer.name")
    if parameter_tensors(earlier.model) != parameter_tensors(changed.model):
        held, wanted = (model_size(each.model).total for each in (earlier, changed))
        what = f"holds weights of other shapes than the stage's model has ({held:,} parameters, {wanted:,})"
        raise UserError(f"{checkpoint} {what}; leave out what changes them")
    if stage.decay and changed.training.optim in SCHEDULE_FREE:
        what = "a schedule-free run needs none: every checkpoint of it is exported averaged"
        raise UserError(f"--decay: {what}")
    start = Start.at(checkpoint)
    sizes, values = changed.step_sizes, changed.to_dict()
    if start.step < sizes.ramp_steps:
        what = f"the size of a step still rises, for {sizes.ramp_steps:,} steps (budget.ramp)"
        raise UserError(f"{checkpoint}: {what}; choose a later --at")
    # Checked with the earlier recipe: the checkpoint was trained by its schedule.
    warmup = _stable_since(earlier, start, checkpoint)
    if changed.budget.warmup_tokens is None:
        # the new schedule counts the steps as they are now; the warm-up is over in any size
        values["training"]["warmup_steps"] = min(warmup, start.step)
    # Without a decay the rate stays; the tokens of a decay are None if the schedule counts steps.
    schedule, decay_tokens = {"lr_scheduler_type": "constant_with_warmup", "lr_scheduler_kwargs": {}}, None
    if stage.decay is not None:
        kwargs = {"decay_type": stage.decay, "min_lr_ratio": stage.min_lr_ratio}
        if changed.schedule_counts_tokens:
            decay_tokens = stage.steps * sizes.full
        else:
            kwargs["num_decay_steps"] = stage.steps
        schedule = {"lr_scheduler_type": DECAYING, "lr_scheduler_kwargs": kwargs}
    values["training"] |= schedule
    values["budget"]["decay_tokens"] = decay_tokens
    tokens = start.tokens + stage.steps * sizes.full
    values["budget"]["tokens"] = -(-tokens // sizes.full) * sizes.full  # whole steps, rounded up
    # A mixture that the stage sets itself has its own stages.
    if changed.data.mixture == earlier.data.mixture and earlier.data.mixture and earlier.data.mixture.stages:
        stages = values["data"]["mixture"]["stages"] = []
        for each in earlier.data.mixture.stages:
            until = each.until
            # A fraction is a share of the earlier run: in tokens it keeps its place when the budget changes.
            if until is not None and until < 1:
                length = earlier.sequence_length
                until = block_of(until, earlier.num_samples, length) * length
            if until is None or until >= tokens:  # the run ends in this one
                stages.append({key: value for key, value in each.to_dict().items() if key != "until"})
                break
            stages.append({**each.to_dict(), "until": until})
    _keep_points(earlier, changed, start, values)
    return values


def _keep_points(earlier: Recipe, changed: Recipe, start: Start, values: dict) -> None:
    """Give points of decay and momentum that the stage does not set the steps at which they were, in its `values`.

    A share, or the end, is one of the earlier run. Raises `UserError` if steps have another size now.
    """
    progress = start.progress(earlier)
    num_steps = progress.schedule_place(progress.last_step)
    groups = zip(earlier.optimizer.groups, changed.optimizer.groups, strict=False)
    for number, (was, now) in enumerate(groups):
        for name in ("weight_decay", "momentum"):
            points = getattr(now, name)
            if not isinstance(points, list) or points != getattr(was, name):
                continue
            if earlier.step_sizes != changed.step_sizes:
                key = f"optimizer.groups.{number}.{name}"
                what = "its points count steps of the earlier size, and the stage has another"
                raise UserError(
                    f"{key}: {what}; write those of the stage: --set {key}='[[STEP, VALUE], ...]'"
                )
            values["optimizer"]["groups"][number][name] = placed(points, num_steps)


def _stable_since(recipe: Recipe, start: Start, checkpoint: Path) -> int:
    """Return the full steps of warm-up before the stable rate; `UserError` if the rate at `start` is not stable."""
    training = recipe.training_keywords
    progress, unit = start.progress(recipe), recipe.tokens_per_step
    now, total = progress.schedule_place(progress.step), progress.schedule_place(progress.last_step)
    kind = training.lr_scheduler_type
    if kind not in STABLE:
        what = f"its rate is never stable (training.lr_scheduler_type is {kind})"
        raise UserError(f"{checkpoint}: {what}; a decay begins from {', '.join(STABLE)}")
    warmup, decay_start = 0 if kind == "constant" else recipe.warmup_steps(total), recipe.decay_start(total)
    end = total if decay_start is None else decay_start
    if not warmup <= now <= end:
        span = f"from step {warmup:,} to {end:,}"
        if progress.counts_tokens:
            span = f"from {warmup * unit:,} to {round(end * unit):,} tokens, and this is at {start.tokens:,}"
        steps = [step_in_name(each) for each in RunFolder(checkpoint.parent).committed()]
        there = [step for step in steps if warmup <= progress.schedule_place(step) <= end]
        choose = f"--at {', '.join(map(str, sorted(there)))}" if there else "no checkpoint of it is there"
        raise UserError(f"{checkpoint}: the rate is stable {span}: {choose}")
    return warmup
