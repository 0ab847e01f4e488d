"""The members of a family: one recipe in several sizes, each a recipe that trains by itself.

The dial is the width; layers, heads and inner widths keep their ratio to it, the vocabulary stays. Every member is
trained at a stable rate with a decay at its end, so that decays can branch off at other token counts.
"""

import argparse
import json
import math
import re
import shlex
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, product
from operator import attrgetter
from pathlib import Path
from typing import Any

from pretraining.api import words_of
from pretraining.checkpoints.branch import StageChanges, branch
from pretraining.checkpoints.folders import damage
from pretraining.errors import UserError
from pretraining.outside.files import read_json_value
from pretraining.outside.schema import differences, read_json
from pretraining.planning.constants import table
from pretraining.planning.costs import forecast
from pretraining.planning.gpus import Gpu
from pretraining.planning.ladder import matmul_parameters
from pretraining.planning.setup import Setup
from pretraining.planning.shapes import widths_of
from pretraining.planning.sizes import model_size
from pretraining.recipe import Recipe, load_recipe
from pretraining.recipe.loading import recipe_of
from pretraining.recipe.model import own_key, value_of
from pretraining.recipe.optimizer import FAMILIES, RULES
from pretraining.recipe.piecewise import shrink_points
from pretraining.recipe.refusals import checked_ds_config
from pretraining.recipe.training import DECAYING
from pretraining.runtime.durable_files import read_rows, write_json
from pretraining.runtime.installation import as_typed
from pretraining.runtime.metric_names import grouped
from pretraining.runtime.run_folder import RunFolder, results_of
from pretraining.sweep import Point

UNITS = ((2048, 64), (0, 8))
"""(least width, what widths from there on are multiples of)."""
INNER = re.compile(r"intermediate_size$|^n_inner$|^ffn_dim$|inner_dim$")
"""Keys of a model section that hold an inner width."""
WIDEST = 100_000
SPAN = 2
"""Width of the largest member over that of the smallest, unless widths are given."""
DECAY, DECAY_SHARE = {"decay_type": "1-sqrt", "min_lr_ratio": 0.0}, 0.2
"""How, and over which share of a run, the rate falls if the recipe does not say (Hägele et al. 2024)."""
LEAST_WARM_UP = 0.02
"""Share of the shortest run."""
FEWEST_STEPS = 4
"""Steps before the first decay."""
LAYERS_OFF = 0.1
"""Of the layers that keep the shape; a member that is further off is named."""
QUIET: dict[str, dict[str, Any]] = {
    "training": {"save_strategy": "steps", "eval_strategy": "steps", "logging_strategy": "steps"},
    "budget": dict.fromkeys(("ramp", "warmup_tokens", "decay_tokens")),
    "checkpoints": {"keep_last": None, "keep_best": 0, "keep_every": None, "upload": None},
    "monitors": {"profile": None, "notify": None},
    "evaluation": {"sample_tokens": 0, "patience": None},
    "report": {"every_seconds": None, "target_loss": None, "ladder": None},
}
"""What no member does: it keeps the checkpoints of its branches, and tells nobody."""


MEMBER = "A member of the ladder of"
"""How the description of a member's recipe begins."""


@dataclass(frozen=True)
class Member:
    """One size at one rate and batch: its longest run, and where the others branch off."""

    name: str
    size: str
    """The name without rate and batch."""
    recipe: Recipe
    branches: tuple[tuple[int, int], ...]
    """(step at which a decay begins, its steps) of the shorter runs, the shortest first."""

    @property
    def parameters(self) -> int:
        return matmul_parameters(self.recipe)

    def write(self) -> None:
        """Write its recipe, with extensions where they are now: they are copied with each run."""
        extensions = [each.module for each in self.recipe.extensions]
        write_json(self.recipe.path, {**self.recipe.to_dict(), "extensions": extensions})

    @property
    def is_base(self) -> bool:
        """Whether it has the rate and batch of its size."""
        return self.name == self.size


def family_of(target: Recipe, asked: argparse.Namespace, folder: Path) -> list[Member]:
    """Make every member, a recipe of `folder`: the smallest first, of a size its own rate and batch first.

    asked: the options of the ladder's command.

    Raises:
        UserError: there are no such sizes, or one of them is no recipe.
    """
    if target.weights.initial_weights is not None:
        what = "weights of one size; a ladder draws those of each, so leave it out"
        raise UserError(f"model.initial_weights: {what}")
    members: list[Member] = []
    seen: dict[tuple, str] = {}
    shapes = {f"w{width}": shaped_recipe(target, width) for width in _widths(target, asked)}
    # all sizes read as many tokens: if tokens grew with the size, no law could tell which of the two helped
    largest = max(model_size(shaped.model).matmul for shaped in shapes.values())
    tokens = asked.longest * largest / model_size(target.model).matmul
    for size, shaped in shapes.items():
        for factors in sorted(product(asked.rates, asked.batches), key=lambda each: each != (1.0, 1.0)):
            parts = [f"-{what}{factor:g}" for what, factor in zip(("rate", "batch"), factors, strict=True)]
            name = size + "".join(part for part, factor in zip(parts, factors, strict=True) if factor != 1)
            values, branches = _member(shaped, target, asked, factors, tokens)
            values["name"] = f"{target.name}-{name}"
            recipe = recipe_of(values, folder / f"{name}.json")
            dials = size, recipe.tokens_per_step, recipe.training.learning_rate
            if (twin := seen.setdefault(dials, name)) != name:
                what = (
                    f"{name} would be {twin} again, as a step is of {recipe.tokens_per_step:,} tokens in both"
                )
                raise UserError(f"--batches: {what}; take factors that are further apart")
            members.append(Member(name, size, recipe, branches))
    sizes = {member.size: member.parameters for member in members}
    if len(set(sizes.values())) < len(sizes):
        raise UserError(f"two of the sizes {', '.join(sizes)} have as many parameters: leave one out")
    return sorted(members, key=lambda member: member.parameters)


def shape_notes(target: Recipe, members: list[Member]) -> list[str]:
    """Say which members are clearly deeper or shallower than the recipe: no law of sizes and tokens holds those."""
    own, off = widths_of(target.model), []
    for size, recipe in {member.size: member.recipe for member in members}.items():
        widths = widths_of(recipe.model)
        wanted = own.layers * widths.hidden / own.hidden
        if abs(widths.layers / wanted - 1) > LAYERS_OFF:
            off.append(f"{widths.layers} for {wanted:.3g} in {size}")
    unit = own.hidden // math.gcd(own.hidden, own.layers)
    what = f"layers are rounded ({', '.join(off)}), so the sizes may not follow one law"
    return [f"{what}: widths that are multiples of {unit} keep the shape"] if off else []


def _widths(target: Recipe, asked: argparse.Namespace) -> list[int]:
    if asked.widths:
        return sorted(asked.widths)
    most = matmul_parameters(target) * math.sqrt(asked.up_to / asked.longest)
    widest, unit = width_for(target, most), _unit(target)
    spread = [SPAN ** (number / max(1, asked.sizes - 1) - 1) for number in range(asked.sizes)]
    widths = sorted({max(unit, round(widest * share / unit) * unit) for share in spread})
    if len(widths) < asked.sizes:
        what = f"leaves room for {len(widths)} widths ({', '.join(map(str, widths))})"
        raise UserError(f"--up_to {asked.up_to:g}: {what}; raise it, take fewer --sizes, or name --widths")
    return widths


def shaped_recipe(target: Recipe, width: int) -> Recipe:
    """Return the recipe at another width of its family, with the rest as it is."""
    settings = (*target.overrides, *_shape(target, width))
    return load_recipe(str(target.path), settings, target.deepspeed or "null")


def _unit(target: Recipe) -> int:
    own = value_of(target.model, "hidden_size")
    return next(unit for least, unit in UNITS if own >= least)


def width_for(target: Recipe, parameters: float) -> int:
    """Return the width whose member has about so many parameters (`matmul_parameters`), without building any."""
    size, own = model_size(target.model), value_of(target.model, "hidden_size")

    def reached(width: int) -> float:
        # a head grows with the width; layers with its square, and they grow in number
        share = width / own
        return size.head * share + (size.matmul - size.head) * share**3

    unit = _unit(target)
    # at this width the layers alone have so many
    most = min(WIDEST, own * (parameters / (size.matmul - size.head)) ** (1 / 3))
    widths = range(unit, int(most) + 2 * unit, unit)
    above = bisect_left(widths, parameters, key=reached)
    near = widths[max(0, above - 1) : above + 1]
    return min(near, key=lambda width: abs(math.log(reached(width) / parameters)))


def _shape(target: Recipe, width: int) -> list[str]:
    """Return the `--set` texts of the model at another width: the same ratios, in whole layers and heads."""
    model, widths = target.model, widths_of(target.model)
    full, share = model.with_defaults(), width / widths.hidden
    layers = max(1, round(widths.layers * share))
    # heads keep their size, or come near to it: rotary positions need an even one
    heads = max(1, round(widths.heads * share))
    if not isinstance(value_of(model, "head_dim"), int):
        fitting = [n for n in range(1, width // 2 + 1) if width % n == 0 and width // n % 2 == 0]
        # groups of queries that share keys stay whole, unless that moves the heads far
        group = widths.heads // widths.key_value_heads
        wanted = widths.heads * share
        heads = min(fitting, key=lambda n: abs(math.log(n / wanted)) + 0.3 * (n % group > 0), default=0)
        if not heads:
            raise UserError(f"--widths {width}: no head of an even size divides it; take a multiple of 8")
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    shape = {own_key(model, name): value for name, value in shape.items()}
    if isinstance(value_of(full, "num_key_value_heads"), int):
        most = max(1, round(widths.key_value_heads * share))
        groups = max(n for n in range(1, most + 1) if heads % n == 0)
        shape[own_key(model, "num_key_value_heads")] = groups
    for key, value in model.items():
        if INNER.search(key) and isinstance(value, int):
            shape[key] = max(8, round(value * share / 8) * 8)
        elif isinstance(value, list) and len(value) == widths.layers:
            # an entry for each layer
            shape[key] = value[:layers]
    return [f"model.{key}={json.dumps(value)}" for key, value in shape.items()]


def _member(
    shaped: Recipe, target: Recipe, asked: argparse.Namespace, factors: tuple[float, float], tokens: float
) -> tuple[dict, tuple[tuple[int, int], ...]]:
    """Return the whole recipe of a size at these factors of rate and batch, and its branches.

    Batch and rate follow by the Step Law (Li et al. 2025) from the tokens of the shortest run, as longer ones lose
    nothing by a small batch, but short ones much by a large one; the rate also from the parameters, unless muP or Muon
    carries it over from width to width. Weight decay forgets the same share of the weights over a run of middle length
    (Wang and Aitchison 2024).

    tokens: of the longest run, over the target's.
    """
    size, whole = model_size(shaped.model), model_size(target.model)
    law, doublings = table("scaling_laws")["step_law"], 2 ** (asked.points - 1)
    shortest, middle = tokens / doublings, tokens / math.sqrt(doublings)
    wanted = target.samples_per_step * shortest ** law["batch_tokens"]["tokens"]
    samples, own = (_whole_batch(wanted * factor, target, asked.world_size) for factor in (factors[1], 1.0))
    # the rate goes with the root of the batch, as Adam wants it: in the law, and with what is rounded of the batch
    rate = shortest ** law["learning_rate"]["tokens"] * math.sqrt(own / wanted)
    values, mup = shaped.to_dict(), target.mup.to_dict()
    if mup["base_width"] is None and target.model.model_type in FAMILIES:
        mup |= {"base_width": value_of(target.model, "hidden_size"), "base_layers": whole.num_layers}
    if mup["base_width"] is None and target.optimizer.name == "muon":
        width = value_of(target.model, "hidden_size") / value_of(shaped.model, "hidden_size")
        rate *= width ** RULES[target.optimizer.scale]
    elif mup["base_width"] is None:
        inside = (size.matmul - size.head) / (whole.matmul - whole.head)
        rate *= inside ** law["learning_rate"]["parameters"]
    # steps, over the recipe's
    steps = middle * target.samples_per_step / own
    decays = {"rate": 1 / (rate * steps), "share": 1 / steps, "one": 1 / steps}
    scale_rates(values, rate * factors[0], decays)
    total = tokens * target.num_tokens / (samples * target.sequence_length)
    training = target.training_keywords
    decay, falling = DECAY, DECAY_SHARE
    if training.lr_scheduler_type == DECAYING:
        decay = {**training.lr_scheduler_kwargs}
        falling = float(decay.pop("num_decay_steps")) / target.num_steps
        decay.pop("num_stable_steps", None)
    first = max(FEWEST_STEPS, round(total * (1 - falling) / doublings))
    falls = max(1, round(first * falling / (1 - falling)))
    warm_up = max(LEAST_WARM_UP, target.warmup_steps(target.num_steps) / target.num_steps)
    unit = samples * target.sequence_length
    shrink_points(values["optimizer"]["groups"], (first + falls) * doublings / target.num_steps)
    for section, keys in QUIET.items():
        values[section] |= keys
    values["budget"] |= {"tokens": (first + falls) * doublings * unit, "tokens_per_step": unit}
    values["training"] |= {
        "lr_scheduler_type": DECAYING,
        "lr_scheduler_kwargs": {**decay, "num_decay_steps": falls * doublings},
        "warmup_steps": min(first, max(1, round(warm_up * (first + falls)))),
        "save_steps": first,
        "eval_steps": first,
        "logging_steps": max(1, first // 4),
        "report_to": "none",
        "per_device_train_batch_size": max(
            n for n in range(1, target.micro_batch + 1) if samples // asked.world_size % n == 0
        ),
    }
    # tasks are scored at the end alone
    if values["evaluation"]["tasks"] or values["evaluation"]["hellaswag"]:
        values["evaluation"]["task_steps"] = first * 2 * doublings
    values |= {"mup": mup, "published": {}, "description": f"{MEMBER} {target.name}."}
    values["extensions"] = [
        str(each.path.absolute()) if each.is_file else each.module for each in shaped.extensions
    ]
    return values, tuple((first * 2**n, falls * 2**n) for n in range(asked.points - 1))


def _whole_batch(wanted: float, target: Recipe, world_size: int) -> int:
    """Return the sequences of a step nearest to `wanted` that the ranks can share, in whole micro-batches if many."""
    unit = world_size * target.micro_batch
    unit = unit if wanted >= 4 * unit else world_size
    return max(1, round(wanted / unit)) * unit


def scale_rates(values: dict, rate: float, decays: dict[str, float]) -> None:
    """Multiply every rate and every weight decay, points included; rounded, so that a recipe can be read.

    decays: the factor of a decay, by what it is multiplied with in a step (`decay_times`).
    """
    for place in (values["training"], values["optimizer"], *values["optimizer"]["groups"]):
        decay = decays[place.get("decay_times") or "rate"]
        for key, factor in (("learning_rate", rate), ("weight_decay", decay)):
            for name in (key, f"matrix_{key}", f"embedding_{key}"):
                if isinstance(given := place.get(name), int | float):
                    place[name] = float(f"{given * factor:.4g}")
                elif given:
                    place[name] = [[at, float(f"{value * factor:.4g}"), *way] for at, value, *way in given]


# The runs of a ladder: what each takes, training those that are not finished, and what the finished ones measured.

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
    # of a member's runs the first has its recipe
    for rung in (each for each in rungs if not each.begins):
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
    hours = speed and speed["expected_seconds"] * share / 3600
    prices = [price["dollars"] * share for price in speed["cost"]["prices"]] if speed else []
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
        words.append(as_typed(shlex.join([*start, "train.py", *words_of(rung.options)])))
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
