"""The runs of a ladder: what each takes, training those that are not finished, and what the finished ones measured."""

import argparse
import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from pretraining.checkpoints.branch import StageChanges, branch
from pretraining.checkpoints.folders import damage
from pretraining.errors import UserError
from pretraining.ladder.family import MEMBER, Member, shape_notes
from pretraining.outside.files import read_json_value
from pretraining.planning.costs import forecast
from pretraining.planning.gpus import Gpu
from pretraining.planning.setup import Setup
from pretraining.planning.shapes import widths_of
from pretraining.recipe import Recipe, load_recipe
from pretraining.recipe.refusals import checked_ds_config
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.installation import as_typed
from pretraining.runtime.metric_names import grouped
from pretraining.runtime.run_folder import RunFolder, results_of
from pretraining.schema import differences, read_json
from pretraining.sweep import Point

RISE = 1.05
"""A run diverged whose loss is so many times that of a shorter one of its size."""


@dataclass(frozen=True)
class Rung(Point):
    """One run: the whole run of a member, or the decay that branches off from it."""

    member: Member
    trunk: Path
    """Folder of the member's whole run."""
    begins: int
    """Step at which it begins: that of its branch point, or 0."""
    steps: int

    @property
    def tokens(self) -> int:
        """Of the weights at its end."""
        return (self.begins + self.steps) * self.member.recipe.tokens_per_step

    @property
    def decay(self) -> tuple[str, float]:
        """How its rate falls, and to which share of the peak."""
        kwargs = self.member.recipe.training.lr_scheduler_kwargs
        return kwargs.get("decay_type", "linear"), kwargs.get("min_lr_ratio", 0.0)

    @property
    def is_finished(self) -> bool:
        # a branch has a recipe of its own once it is there
        file = Path(self.options["recipe"])
        return file.is_file() and RunFolder(self.folder).is_finished(load_recipe(str(file)).to_dict())

    def branch_off(self) -> None:
        """Make the folder of a decay from its branch point.

        Raises:
            UserError: the run that it branches off from has not come so far, or its checkpoint is damaged.
        """
        if not self.begins or self.folder.exists():
            return
        checkpoint = RunFolder(self.trunk).checkpoint(self.begins)
        if not checkpoint.is_dir():
            raise UserError(f"{checkpoint}: is not there: its run has not come so far")
        if reason := damage(checkpoint):
            raise UserError(f"{checkpoint}: {reason}")
        branch(checkpoint, StageChanges(self.steps, *self.decay), self.folder)


def rungs_of(members: Sequence[Member], folder: Path, options: argparse.Namespace) -> list[Rung]:
    """List every run, each member's whole run before those that branch off from it."""
    rungs = []
    names = ("data_dir", "data_cache", "data_cache_gb", "force")
    passed_on = {name: getattr(options, name) for name in names if getattr(options, name)}
    for member in members:
        trunk = folder.absolute() / member.name
        runs = [(trunk, member.recipe.path, 0, member.recipe.num_steps)]
        for begins, steps in member.branches:
            tokens = (begins + steps) * member.recipe.tokens_per_step
            place = trunk.with_name(f"{member.name}-{tokens}")
            runs.append((place, RunFolder(place).recipe, begins, steps))
        for place, file, begins, steps in runs:
            given: dict[str, Any] = {"recipe": str(file), "output_dir": place, **passed_on}
            rungs.append(Rung({}, place, given, member.recipe, member, trunk, begins, steps))
    return rungs


def check_begun(rungs: Sequence[Rung]) -> None:
    """Refuse runs that another recipe has begun, or another way to validate, which branches keep: no law is both's."""
    for rung in rungs:
        own, file = results_of(rung.recipe.to_dict()), rung.member.recipe.path
        if file.exists() and MEMBER not in str(read_json(file).get("description")):
            raise UserError(f"{file}: is no member of a ladder; choose another --output_dir")
        # a file that cannot be read stops its run in a line of its own
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            begun = results_of(read_json_value(RunFolder(rung.trunk).recipe))
            if others := differences(begun, own):
                raise UserError(
                    f"{rung.trunk}: is of another recipe: {others[0]}; choose another --output_dir"
                )


def costs_of(rungs: Sequence[Rung], target: Recipe, gpu: Gpu | None, world_size: int) -> dict[str, Any]:
    """Return {"rows": one a member, "ladder", "target", "notes"}; with hours and dollars on a known GPU."""
    rows = []
    # a member's whole run, then its branches
    for member, group in groupby(rungs, key=attrgetter("member")):
        runs, recipe = list(group), member.recipe
        tokens = sum(rung.steps for rung in runs) * recipe.tokens_per_step
        row = {"name": member.name, "runs": len(runs), "tokens": runs[0].tokens}
        row |= {"parameters": member.parameters, "layers": widths_of(recipe.model).layers}
        row |= {"tokens_per_step": recipe.tokens_per_step, "learning_rate": recipe.training.learning_rate}
        rows.append(row | _cost(recipe, tokens, gpu, world_size))
    sums = {key: [row[key] for row in rows] for key in ("flops", "hours", "dollars")}
    ladder = {key: None if None in values else math.fsum(values) for key, values in sums.items()}
    whole = _cost(target, target.num_tokens, gpu, world_size)
    notes = shape_notes(target, [rung.member for rung in rungs])
    return {"rows": rows, "ladder": ladder, "target": whole, "notes": notes}


def _cost(recipe: Recipe, tokens: float, gpu: Gpu | None, world_size: int) -> dict[str, float | None]:
    setup = Setup(recipe, checked_ds_config(recipe), world_size)
    # the ranks divide its step, or the line says what does
    setup.accumulation  # noqa: B018
    speed = forecast(setup, gpu) if gpu else None
    share = tokens / recipe.num_tokens
    hours = speed and speed.expected_seconds * share / 3600
    prices = [price["dollars"] * share for price in speed.cost.prices] if speed else []
    return {"flops": setup.flops.training * tokens, "hours": hours, "dollars": min(prices, default=None)}


def commands_of(rungs: Sequence[Rung], launcher: str) -> list[str]:
    """Return one line of shell for every member that is not finished: its whole run, then its branches.

    Lines need nothing of each other: they can be tasks of a job array.
    """
    lines: dict[str, list[str]] = {}
    for rung in rungs:
        if rung.is_finished:
            continue
        words = lines.setdefault(rung.member.name, [])
        if rung.begins and not rung.folder.exists():
            kind, ratio = rung.decay
            made = ["python", "-m", "pretraining.checkpoints", "branch", rung.trunk, "--at", rung.begins]
            made += ["--decay", kind, "--steps", rung.steps, "--min_lr_ratio", ratio, "--output", rung.folder]
            words.append(shlex.join(map(str, made)))
        start = shlex.split(launcher) or ["python"]
        given = [word for key, value in rung.options.items() for word in (f"--{key}", str(value))]
        words.append(as_typed(shlex.join([*start, "train.py", *given])))
    return [" && ".join(words) for words in lines.values()]


def measured(rungs: Sequence[Rung]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a point for every finished run, and what is wrong with others, in words."""
    points: list[dict[str, Any]] = []
    faults: list[str] = []
    finished = {rung.trunk for rung in rungs if not rung.begins and rung.is_finished}
    for rung in rungs:
        name, recipe, run = rung.folder.name, rung.member.recipe, RunFolder(rung.folder)
        last = run.last_event("start", "resume", "end", "gave_up") or {}
        if last.get("event") == "gave_up":
            faults.append(f"{name} diverged and gave up")
        # a branch of an earlier ladder in this folder is none of this one
        if rung.trunk not in finished or not rung.is_finished:
            continue
        values = {grouped(key).removeprefix("eval/"): last[key] for key in last if key.startswith("eval_")}
        if not values["loss"] < math.log(recipe.model.vocab_size):
            faults.append(f"{name} diverged: loss {values['loss']:.3g}, no better than a guess")
            continue
        member: dict[str, Any] = {"member": rung.member.name, "size": rung.member.size}
        point = {"run": name, **member, "tokens": rung.tokens}
        point |= {"parameters": rung.member.parameters, "base": rung.member.is_base}
        point |= {"flops": Setup(recipe, None).flops.training * rung.tokens, "metrics": values}
        point |= {"learning_rate": recipe.training.learning_rate, "tokens_per_step": recipe.tokens_per_step}
        if not rung.begins:
            # validations before the rate falls
            falls = recipe.num_steps - recipe.training.lr_scheduler_kwargs["num_decay_steps"]
            rows = [row for row in read_rows(run.metrics) if "eval/loss" in row and row["step"] <= falls]
            point["stable"] = [[row["step"] * recipe.tokens_per_step, row["eval/loss"]] for row in rows]
        points.append(point)
    for point in list(points):
        others = [other for other in points if other["member"] == point["member"]]
        shorter = [other["metrics"]["loss"] for other in others if other["tokens"] < point["tokens"]]
        if point["metrics"]["loss"] > RISE * min(shorter, default=math.inf):
            faults.append(f"{point['run']} diverged: its loss is above that of a shorter run")
            points.remove(point)
    return points, faults
