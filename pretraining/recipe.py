"""The recipe: what to train, read strictly, with nothing stated twice and everything derivable derived."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path

from pretraining.addresses import refuse_credentials
from pretraining.ds_config import short_name
from pretraining.errors import UserError, nearest
from pretraining.model_types import (
    checked_model,
    is_exact,
    other_properties,
    refuse_names_of_others,
    value_of,
)
from pretraining.overrides import apply_overrides
from pretraining.owned_keys import TRAINING_KEYS
from pretraining.recipe_checks import check_fit, check_folder_name
from pretraining.recipe_defaults import with_defaults
from pretraining.schema import REPOSITORY, check, display_path, problem, read_json
from pretraining.step_sizes import StepSizes, check_division, nearest_multiples

RECIPES = REPOSITORY / "recipes"
NO_DEEPSPEED = ("null", "none")


@dataclass(frozen=True)
class Recipe:
    """One pretraining run, checked, with the defaults of our own sections filled in."""

    name: str
    """Name of the run and of its folder `runs/<name>/`: the recipe's own, else the file's."""
    path: Path = field(compare=False)
    """The file it came from."""
    description: str
    model: dict
    """`model_type` and that configuration class's keyword arguments."""
    data: dict
    budget: dict
    training: dict
    """TrainingArguments' keyword arguments."""
    loss: dict
    """How the loss is computed."""
    optimizer: dict
    """Muon, and rates by kind of parameter."""
    mup: dict
    """The base model whose rates are used."""
    speed: dict
    """What makes a step faster: compilation, fp8."""
    deepspeed: str | None
    """Name or path of a ds_config, or None for no DeepSpeed."""
    checkpoints: dict
    monitors: dict
    """What watches the run, and what it does about what it sees."""
    evaluation: dict
    report: dict
    overrides: tuple[str, ...] = field(default=(), compare=False)
    """The `--set` texts it was read with."""

    @property
    def words(self) -> list[str]:
        """What a command takes to read this recipe again: `--recipe`, its name or path, and every `--set`."""
        reference = self.path.stem if self.path.parent == RECIPES else str(self.path)
        return ["--recipe", reference, *(word for text in self.overrides for word in ("--set", text))]

    @property
    def sequence_length(self) -> int:
        """Tokens per sample: data.sequence_length where it is given, else the model's positions."""
        return self.data["sequence_length"] or model_positions(self.model)

    @cached_property
    def step_sizes(self) -> StepSizes:
        """Tokens of each optimizer step."""
        return StepSizes.of(self.budget)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, over all ranks and micro-batches; less while `budget.ramp` rises."""
        return self.budget["tokens_per_step"]

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.step_sizes.steps_within(self.budget["tokens"])

    @property
    def num_tokens(self) -> int:
        """Tokens of those steps: the budget's, but for less than a step that a ramp may leave over."""
        return self.step_sizes.tokens_at(self.num_steps)

    @property
    def micro_batch(self) -> int:
        """Sequences per rank and forward pass."""
        return self.training["per_device_train_batch_size"]

    @property
    def samples_per_step(self) -> int:
        """Sequences per full optimizer step, over all ranks and micro-batches."""
        return self.tokens_per_step // self.sequence_length

    @property
    def num_samples(self) -> int:
        """Sequences of the whole run."""
        return self.num_tokens // self.sequence_length

    @property
    def most_samples(self) -> int:
        """Sequences of as many steps, all of them full: what the Trainer's loop counts with during a ramp too."""
        return self.num_steps * self.samples_per_step

    @property
    def data_seed(self) -> int:
        """Seed of the samples' order: TrainingArguments' `data_seed`, else its `seed` (42 by default)."""
        data_seed = self.training.get("data_seed")
        return self.training.get("seed", 42) if data_seed is None else data_seed

    @property
    def schedule_counts_tokens(self) -> bool:
        """Whether the learning rate's schedule counts tokens, in units of a full step, and not steps."""
        return self.budget["warmup_tokens"] is not None or self.budget["decay_tokens"] is not None

    def warmup_steps(self, num_steps: int) -> int:
        """Full steps of rising rate in a run of `num_steps`; `training.warmup_steps` may be a share of it."""
        given = self.training_keywords.get("warmup_steps", 0)
        return int(given) if given >= 1 else math.ceil(num_steps * given)

    @property
    def training_keywords(self) -> dict:
        """`training`, with what the budget says of the schedule in tokens, in full steps."""
        found = dict(self.training)
        if (tokens := self.budget["warmup_tokens"]) is not None:
            found["warmup_steps"] = tokens // self.tokens_per_step
        if (tokens := self.budget["decay_tokens"]) is not None:
            given = self.training.get("lr_scheduler_kwargs") or {}
            found["lr_scheduler_kwargs"] = {**given, "num_decay_steps": tokens // self.tokens_per_step}
        return found

    def to_dict(self) -> dict:
        """The resolved recipe: written to a file and loaded again, it is this recipe."""
        values = asdict(self)
        del values["path"], values["overrides"]
        return values


def load_recipe(name_or_path: str, overrides: Iterable[str] = (), deepspeed: str | None = None) -> Recipe:
    """Read a recipe by its name in recipes/ or by its path, apply `--set` overrides, and check all of it.

    Args:
        name_or_path: `tiny`, `features/muon`, or a path that ends in .json.
        overrides: `section.key=value` texts, applied in order.
        deepspeed: takes the place of the recipe's `deepspeed`; "null" means none.

    Raises:
        UserError: one line naming the file (or option), the dotted key, what is wrong, and the nearest valid
            key or value.
    """
    path = _find(str(name_or_path))
    where = display_path(path)
    values = _read(path)
    refuse_names_of_others(values.get("model"), where)
    schema = recipe_schema()
    overrides = list(overrides)
    for override in overrides:
        nested = _as_nested(override)
        _check_owners(nested, f"--set {override}")
        if override.partition("=")[0] == "base":
            raise problem(
                f"--set {override}", "base", "is named in a recipe's file alone; --recipe takes another"
            )
        if isinstance(model := values.get("model"), dict):
            kind = {"model_type": model.get("model_type")}
            refuse_names_of_others({**nested.get("model", {}), **kind}, f"--set {override}")
    values = apply_overrides(check(values, schema, where), overrides, schema)
    if deepspeed is not None:
        values["deepspeed"] = None if deepspeed in NO_DEEPSPEED else deepspeed
    values = with_defaults(values, schema, path.stem)
    if values["deepspeed"] is not None:
        values["deepspeed"] = short_name(values["deepspeed"])
    if values["checkpoints"]["upload"] is not None:  # first, since later messages repeat what --set said
        refuse_credentials(values["checkpoints"]["upload"], f"{where}: checkpoints.upload")
    where += f" with --set {' '.join(overrides)}" if overrides else ""
    values["model"] = checked_model(values, where, schema)
    check_folder_name(values["name"], "name", where)
    check_folder_name(values["data"]["name"], "data.name", where)
    check_fit(values, model_with_defaults(values["model"]), model_positions(values["model"]), where)
    return Recipe(path=path, **values, overrides=tuple(overrides))


@cache
def recipe_schema() -> dict:
    """recipes/schema.json, generated from the installed libraries."""
    return json.loads((RECIPES / "schema.json").read_text(encoding="utf-8"))


def recipe_names() -> list[str]:
    """Names of the recipes in recipes/."""
    return sorted(path.stem for path in RECIPES.glob("*.json") if path.name != "schema.json")


def model_with_defaults(model: dict) -> dict:
    """A recipe's model section over its configuration class's own defaults (as the schema records them)."""
    exact = recipe_schema()["$defs"]
    properties = exact[model["model_type"]]["properties"] if is_exact(model) else other_properties(model)
    defaults = {key: value["default"] for key, value in properties.items() if "default" in value}
    return {**defaults, **model}


def model_positions(model: dict) -> int:
    """The longest sequence the model is built for."""
    return value_of(model, "max_position_embeddings")


def accumulation_steps(recipe: Recipe, world_size: int) -> int:
    """Micro-batches per full optimizer step and rank, so that it holds exactly `tokens_per_step` tokens.

    Raises:
        UserError: ranks x micro-batch x length does not divide it, or a smaller step of the ramp; the nearest values
            that it does divide.
    """
    ranks, micro_batch, length = world_size, recipe.micro_batch, recipe.sequence_length
    tokens_at_once = ranks * micro_batch * length
    steps, rest = divmod(recipe.tokens_per_step, tokens_at_once)
    if rest:
        product = (
            f"{tokens_at_once} = {ranks} ranks x {micro_batch} per_device_train_batch_size x {length} tokens"
        )
        multiples = nearest_multiples(recipe.tokens_per_step, tokens_at_once)
        where, per_rank = display_path(recipe.path), recipe.samples_per_step // ranks
        if recipe.samples_per_step % ranks:
            what = f"{recipe.tokens_per_step} is not a multiple of {product}; {multiples}"
            raise problem(where, "budget.tokens_per_step", what)
        fitting = next(size for size in range(min(micro_batch, per_rank), 0, -1) if per_rank % size == 0)
        raise problem(
            where,
            "training.per_device_train_batch_size",
            f"is {micro_batch}; {product} do not divide budget.tokens_per_step {recipe.tokens_per_step}; "
            f"{fitting} does (or for tokens_per_step, {multiples})",
        )
    check_division(recipe.step_sizes, recipe.sequence_length, ranks, micro_batch, display_path(recipe.path))
    return steps


def _read(path: Path) -> dict:
    """The sections of a recipe's file, over those of the one base it may name."""
    where, own = display_path(path), read_json(path)
    _check_owners(own, where)
    if "base" not in own:
        return own
    name = check(own.pop("base"), recipe_schema()["properties"]["base"], where, "base")
    try:
        base_path = path.parent / name if name.endswith(".json") else _find(name)
    except UserError as error:
        raise problem(where, "base", str(error).removeprefix("--recipe ")) from None
    base = read_json(base_path)
    if "base" in base:
        what = f"{display_path(base_path)} has a base itself; name that one, or a recipe without"
        raise problem(where, "base", what)
    load_recipe(str(base_path))  # so that a mistake in the base is reported with the base's name
    return _merged(base, own)


def _merged(base: dict, own: dict) -> dict:
    """`own` over `base`, key by key in each section; lists and objects in a section replace the base's whole.

    A model that names its type is another model and inherits nothing. The base's name and description stay its own.
    """
    merged = {key: value for key, value in base.items() if key not in ("name", "description")}
    for key, value in own.items():
        inherited = merged.get(key)
        extends = isinstance(value, dict) and isinstance(inherited, dict) and "model_type" not in value
        merged[key] = {**inherited, **value} if extends else value
    return merged


def _find(name_or_path: str) -> Path:
    if name_or_path.endswith(".json"):
        return Path(name_or_path)
    if "/" in name_or_path:  # a name in a folder of recipes/: features/muon
        path = RECIPES / f"{name_or_path}.json"
        return path if path.is_file() else Path(name_or_path)
    path = RECIPES / f"{name_or_path}.json"
    if name_or_path == "schema" or not path.is_file():
        names = recipe_names()
        raise UserError(
            f"--recipe {name_or_path}: no such recipe{nearest(name_or_path, names)}; "
            f"there are: {', '.join(names)} (or give a path that ends in .json)"
        )
    return path


def _check_owners(values: dict, where: str) -> None:
    for key in values:
        if key in TRAINING_KEYS and key not in recipe_schema()["properties"]:
            raise problem(where, key, f"does not belong here: {TRAINING_KEYS[key]}")
    training = values.get("training")
    for key in training if isinstance(training, dict) else ():
        if key in TRAINING_KEYS:
            raise problem(where, f"training.{key}", f"does not belong here: {TRAINING_KEYS[key]}")


def _as_nested(override: str) -> dict:
    """The first two parts of an override's key as a recipe would write them."""
    section, _, rest = override.partition("=")[0].partition(".")
    return {section: {rest.partition(".")[0]: None}}
