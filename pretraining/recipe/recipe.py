"""The recipe: what to train, with nothing stated twice and everything derivable derived."""

import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pretraining.recipe.budget import Budget, StepSizes, check_division, nearest_multiples
from pretraining.recipe.checks import (
    check_documents,
    check_evaluation,
    check_kernels,
    check_profile,
    check_router_loss,
    check_vocabulary,
)
from pretraining.recipe.data import Data, check_mixture
from pretraining.recipe.model import Model
from pretraining.recipe.mup import Mup, check_mup
from pretraining.recipe.schedule import check_schedule
from pretraining.recipe.section import Section, check_folder_name
from pretraining.recipe.sections import (
    Checkpoints,
    Evaluation,
    Loss,
    Monitors,
    Optimizer,
    Report,
    Speed,
)
from pretraining.recipe.training import Training
from pretraining.schema import REPOSITORY, display_path, problem

RECIPES = REPOSITORY / "recipes"
SECTIONS: dict[str, type[Section]] = {
    "data": Data,
    "budget": Budget,
    "loss": Loss,
    "optimizer": Optimizer,
    "mup": Mup,
    "speed": Speed,
    "checkpoints": Checkpoints,
    "monitors": Monitors,
    "evaluation": Evaluation,
    "report": Report,
}
"""Our own."""
TOP_LEVEL = {
    "$schema": {"type": "string"},
    "base": {
        "type": "string",
        "minLength": 1,
        "description": "Another recipe, by name or by its path from this file, without a base of its own: its keys "
        "hold where this file says nothing. Lists and objects in a section replace the base's; so does a model with a "
        "model_type.",
    },
    "name": {
        "type": "string",
        "description": "Name of the run and of its folder runs/<name>; the file's name where left out.",
    },
    "description": {
        "type": "string",
        "description": "One or two sentences: what it is, where the values come from, what it should reach.",
    },
    "deepspeed": {
        "type": ["string", "null"],
        "minLength": 1,
        "default": None,
        "description": "How to shard: a name from ds_configs/ (zero0 ... zero3, zero2_offload, ...), a path, or null "
        "for none.",
    },
}
"""JSON Schema of the keys beside the sections."""
KEYWORDS: dict[str, type[dict]] = {"model": Model, "training": Training}
"""Keyword arguments of a library's classes."""


@dataclass(frozen=True)
class Recipe:
    """One pretraining run, checked, with the defaults of our own sections filled in."""

    name: str
    """Name of the run and of its folder `runs/<name>/`: the recipe's own, else the file's."""
    path: Path = field(compare=False)
    """The file it came from."""
    description: str
    model: Model
    data: Data
    budget: Budget
    training: Training
    loss: Loss
    optimizer: Optimizer
    mup: Mup
    speed: Speed
    deepspeed: str | None
    """Name or path of a ds_config, or None for no DeepSpeed."""
    checkpoints: Checkpoints
    monitors: Monitors
    evaluation: Evaluation
    report: Report
    overrides: tuple[str, ...] = field(default=(), compare=False)
    """The `--set` texts it was read with."""

    def __post_init__(self) -> None:
        """Sections are built from the JSON objects of a file, or of `dataclasses.replace`."""
        for name, section in SECTIONS.items():
            value = getattr(self, name)
            if not isinstance(value, section):
                # the dataclass is frozen
                object.__setattr__(self, name, section.of(value))
        for name, keywords in KEYWORDS.items():
            if not isinstance(getattr(self, name), keywords):
                object.__setattr__(self, name, keywords(getattr(self, name)))

    @property
    def words(self) -> list[str]:
        """What a command takes to read this recipe again: `--recipe`, its name or path, and every `--set`."""
        # a recipe of ours is named as `load_recipe` takes it: features/muon
        ours = self.path.is_relative_to(RECIPES)
        reference = self.path.relative_to(RECIPES).with_suffix("").as_posix() if ours else str(self.path)
        return ["--recipe", reference, *(word for text in self.overrides for word in ("--set", text))]

    @property
    def sequence_length(self) -> int:
        """Tokens per sample: data.sequence_length where it is given, else the model's positions."""
        return self.data.sequence_length or self.model.max_position_embeddings

    @cached_property
    def step_sizes(self) -> StepSizes:
        """Tokens of each optimizer step."""
        return self.budget.step_sizes

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, over all ranks and micro-batches; less while `budget.ramp` rises."""
        return self.budget.tokens_per_step

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.step_sizes.steps_within(self.budget.tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of those steps: the budget's, but for less than a step that a ramp may leave over."""
        return self.step_sizes.tokens_at(self.num_steps)

    @property
    def micro_batch(self) -> int:
        """Sequences per rank and forward pass."""
        return self.training.per_device_train_batch_size

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
        training = self.training
        return training.seed if training.data_seed is None else training.data_seed

    @property
    def schedule_counts_tokens(self) -> bool:
        """Whether the learning rate's schedule counts tokens, in units of a full step, and not steps."""
        return self.budget.warmup_tokens is not None or self.budget.decay_tokens is not None

    def warmup_steps(self, num_steps: int) -> int:
        """Full steps of rising rate in a run of `num_steps`; `training.warmup_steps` may be a share of it."""
        given = self.training_keywords.warmup_steps
        return int(given) if given >= 1 else math.ceil(num_steps * given)

    @property
    def training_keywords(self) -> Training:
        """`training`, with what the budget says of the schedule in tokens, in full steps."""
        # a copy: the recipe itself stays as it was written
        found = Training(self.training)
        if (tokens := self.budget.warmup_tokens) is not None:
            found["warmup_steps"] = tokens // self.tokens_per_step
        if (tokens := self.budget.decay_tokens) is not None:
            given = self.training.lr_scheduler_kwargs or {}
            found["lr_scheduler_kwargs"] = {**given, "num_decay_steps": tokens // self.tokens_per_step}
        return found

    def to_dict(self) -> dict:
        """The resolved recipe: written to a file and loaded again, it is this recipe."""
        values = {name: getattr(self, name) for name in ("name", "description", "deepspeed")}
        # a deep copy as plain dicts
        values |= {name: json.loads(json.dumps(getattr(self, name))) for name in KEYWORDS}
        return values | {name: getattr(self, name).to_dict() for name in SECTIONS}

    def check(self, where: str) -> None:
        """Raise `UserError` for the first value that its schema cannot judge: fields, then sections, then what these
        ask of each other.
        """
        check_folder_name(self.name, "name", where)
        model, length = self.model.with_defaults(), self.sequence_length
        self.data.check(where, "data")
        self.model.check(where)
        check_documents(self.data, model, where)
        check_router_loss(self.loss, model, where)
        self.training.check(where)
        check_kernels(self.training, model, where)
        if length > self.model.max_position_embeddings:
            what = f"is {length}, but the model has {self.model.max_position_embeddings} positions"
            raise problem(where, "data.sequence_length", what)
        self.budget.check_length(
            length, where
        )  # before its own checks: a wrong size of a step is the cause of others
        for name in SECTIONS:
            getattr(self, name).check(where, name)
        check_schedule(self.budget, self.training, self.monitors, self.num_steps, where)
        check_mixture(self.data, self.num_samples, length, where)
        check_mup(self.mup, model, where)
        check_vocabulary(self.data, model, where)
        sources = [source.called for source in self.data.sources]
        check_evaluation(self.evaluation, self.checkpoints.keep_best, self.training, sources, where)
        if self.monitors.profile is not None:
            check_profile(self.monitors.profile.steps, self.num_steps, where)


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
        # the largest micro-batch that divides, not above the one that was asked for
        fitting = next(size for size in range(min(micro_batch, per_rank), 0, -1) if per_rank % size == 0)
        raise problem(
            where,
            "training.per_device_train_batch_size",
            f"is {micro_batch}; {product} do not divide budget.tokens_per_step {recipe.tokens_per_step}; "
            f"{fitting} does (or for tokens_per_step, {multiples})",
        )
    check_division(recipe.step_sizes, recipe.sequence_length, ranks, micro_batch, display_path(recipe.path))
    return steps
