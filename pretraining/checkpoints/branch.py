"""A decay that starts from a stable checkpoint of a run, as a run of its own (Hu et al. 2024; Hägele et al. 2024)."""

import math
import os
import shutil
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from pretraining.checkpoints.identity import Start
from pretraining.checkpoints.marker import MARKER, flush_folder, read_marker
from pretraining.curve import changed_parts
from pretraining.errors import UserError
from pretraining.recipe import Recipe, load_recipe
from pretraining.run_dir import RunDir, append_row, read_rows, write_json

STABLE = ("constant", "constant_with_warmup", "warmup_stable_decay")


class Decay(NamedTuple):
    """How the rate goes from its stable value to `min_lr_ratio` of it."""

    shape: str
    """linear, cosine or 1-sqrt."""
    steps: int
    min_lr_ratio: float = 0.0


def branch(checkpoint: Path, decay: Decay, output: Path) -> dict:
    """Make `output` a run that goes on from `checkpoint`, whole and verified, with a decay; returns its recipe.

    The checkpoint's files are linked, or copied where the disk cannot: the run they are from is only read. The new
    recipe is the checkpoint's own but for name, schedule and budget, whose change counts as accepted. `output`
    appears with all in it or not at all.

    Raises:
        UserError: the rate is not stable at that step, or the step's size still rises.
    """
    marker, folder = read_marker(checkpoint), output.absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=folder) as unfinished:
        run = RunDir(Path(unfinished) / output.name)
        write_json(run.recipe, {**marker["recipe"], "name": output.name})
        recipe = decaying_recipe(load_recipe(str(run.recipe)), marker, decay, checkpoint)
        write_json(run.recipe, recipe)
        load_recipe(str(run.recipe))  # what is written can be read
        _record(run, recipe, marker, decay, checkpoint)
        link_checkpoint(checkpoint, run.checkpoint(marker["step"]))
        run.path.rename(output)
    flush_folder(folder)
    return recipe


def _record(run: RunDir, recipe: dict, marker: dict, decay: Decay, checkpoint: Path) -> None:
    """Where it comes from, what differs, and the rollbacks that led to the checkpoint."""
    step = marker["step"]
    changes = [
        {"step": step, "key": each.key, "from": each.earlier, "to": each.now}
        for each in changed_parts(recipe, marker["recipe"])
    ]
    write_json(run.changes, [*marker["changes"], *changes])
    for row in read_rows(RunDir(checkpoint.parent).journal)[: marker["rollbacks"]]:
        append_row(run.journal, row)
    run.add_event("branch", step=step, parent=str(checkpoint), **decay._asdict())


def link_checkpoint(folder: Path, target: Path) -> None:
    """The same checkpoint at `target`, its marker last."""
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    for name in sorted(names, key=lambda name: name.name == MARKER):
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(folder / name, place)
        except OSError:  # another file system, or one without links
            shutil.copy2(folder / name, place)
    flush_folder(target)


def decaying_recipe(recipe: Recipe, marker: dict, decay: Decay, checkpoint: Path) -> dict:
    """The recipe of a checkpoint's run, whose rate decays in the `decay.steps` steps after it and ends there."""
    start = Start(checkpoint, marker["step"], marker["samples"], marker["tokens"])
    sizes, values, total = recipe.step_sizes, recipe.to_dict(), start.last_step(recipe)
    if start.step < sizes.ramp_steps:
        raise UserError(
            f"{checkpoint}: the size of a step still rises, for {sizes.ramp_steps:,} steps (budget.ramp); choose a "
            "later --at"
        )
    warmup = _stable_since(recipe.training, start.step, total, checkpoint)
    earlier = recipe.training.get("lr_scheduler_kwargs") or {}
    kwargs = {key: earlier[key] for key in ("warmup_type",) if key in earlier}
    kwargs |= {"num_decay_steps": decay.steps, "decay_type": decay.shape, "min_lr_ratio": decay.min_lr_ratio}
    schedule = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": kwargs}
    values["training"] |= {**schedule, "warmup_steps": warmup}
    tokens = start.tokens + decay.steps * sizes.full
    values["budget"]["tokens"] = -(-tokens // sizes.full) * sizes.full
    if (values["data"]["mixture"] or {}).get("stages"):
        values["data"]["mixture"]["stages"] = _stages_until(tokens, recipe)
    return values


def _stable_since(training: dict, step: int, total: int, checkpoint: Path) -> int:
    """Warm-up steps before the stable rate; `UserError` where the rate at `step` is another one."""
    kind, kwargs = training.get("lr_scheduler_type", "linear"), training.get("lr_scheduler_kwargs") or {}
    if kind not in STABLE:
        raise UserError(
            f"{checkpoint}: its rate is never stable (training.lr_scheduler_type is {kind}); a decay begins from "
            f"{', '.join(STABLE)}"
        )
    given = 0 if kind == "constant" else training.get("warmup_steps", 0)
    warmup = int(given) if given >= 1 else math.ceil(total * given)
    end = total
    if kind == "warmup_stable_decay":
        stable_steps = kwargs.get("num_stable_steps")
        end = total - kwargs["num_decay_steps"] if stable_steps is None else warmup + stable_steps
    if not warmup <= step <= end:
        raise UserError(
            f"{checkpoint}: the rate is stable from step {warmup:,} to {end:,}; choose --at there"
        )
    return warmup


def _stages_until(tokens: int, recipe: Recipe) -> list[dict]:
    """The mixture's stages where they were, now that the run ends after `tokens`; the one it ends in is the last."""
    stages, length = [], recipe.sequence_length
    for stage in recipe.data["mixture"]["stages"]:
        until = stage.get("until")
        if until is not None and until < 1:
            until = round(Fraction(repr(until)) * recipe.num_samples) * length
        if until is None or until >= tokens:
            return [*stages, {key: value for key, value in stage.items() if key != "until"}]
        stages.append({**stage, "until": until})
    return stages
