"""The recipe: what to train, with nothing stated twice and everything derivable derived.

Below the class stands what its sections ask of each other.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

from pretraining.ds_config import degrees_of
from pretraining.errors import nearest
from pretraining.extend import Extension, check_defined, defined, model_extension
from pretraining.outside.schema import Wrong, display_path, problem, refuse_first
from pretraining.recipe import sections
from pretraining.recipe.budget import Budget, Progress, StepSizes, kept_resizes, nearest_multiples
from pretraining.recipe.data import Data, check_mixture
from pretraining.recipe.model import (
    CROSSES_DOCUMENTS,
    ROUTER_COEFFICIENT,
    Model,
    has_experts,
    own_key,
    why_not,
    why_not_apart,
)
from pretraining.recipe.optimizer import Mup, Optimizer, check_mup
from pretraining.recipe.section import RECIPES, TEXT, Section, check_folder_name, described
from pretraining.recipe.training import DECAYING, Training, check_judged, check_schedule, steps_of
from pretraining.runtime.metric_names import GROUPS, LOWER_IS_BETTER, OF_AVERAGE

_MODULE: dict = {"type": "object", "properties": {"module": TEXT, "digest": {"type": "string"}}}
_MODULE |= {"required": ["module"], "additionalProperties": False}
TOP_LEVEL = {
    "$schema": {"type": "string"},
    "base": described(
        "Another recipe, by name or by its path from this file, without a base of its own: its keys hold where this "
        "file says nothing. Lists and objects in a section replace the base's; so do a model with a model_type, and "
        "published.",
        **TEXT,
    ),
    "name": described(
        "Name of the run and of its folder runs/<name>; the file's name where left out.", type="string"
    ),
    "description": described(
        "One or two sentences: what it is, where the values come from, what it should reach.", type="string"
    ),
    "extensions": described(
        "Modules of your own with callbacks, metrics, losses, schedules, filters or models: paths from this file, or "
        "names that can be imported. A run's recipe.json adds the digest of each.",
        type="array",
        default=[],
        items={"anyOf": [_MODULE, TEXT]},
    ),
    "deepspeed": described(
        "How to shard: a name from ds_configs/ (zero0 ... zero3, zero2_offload, ...), a path, or null for none.",
        type=["string", "null"],
        minLength=1,
        default=None,
    ),
}
"""JSON Schema of the keys beside the sections."""
KEYWORDS: dict[str, type[dict]] = {"model": Model, "training": Training}
"""Keyword arguments of a library's classes."""


def where_of(path: Path, overrides: Sequence[str] = (), limit_tokens: int | None = None) -> str:
    """Write a recipe's file and the options over it: what a message about a key names."""
    changes = f" with --set {' '.join(overrides)}" if overrides else ""
    limit = "" if limit_tokens is None else f" with --limit_tokens {limit_tokens}"
    return f"{display_path(path)}{changes}{limit}"


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
    loss: sections.Loss
    optimizer: Optimizer
    mup: Mup
    speed: sections.Speed
    deepspeed: str | None
    """Name or path of a ds_config, or None for no DeepSpeed."""
    checkpoints: sections.Checkpoints
    monitors: sections.Monitors
    evaluation: sections.Evaluation
    report: sections.Report
    published: sections.Published = field(default_factory=sections.Published)
    weights: sections.Weights = field(default_factory=sections.Weights)
    """The keys of `model` that are ours: what it begins with, what of it is trained."""
    origin: dict = field(default_factory=dict)
    """Where the model's shape was read: `from`, `revision` and `digest`; empty if the recipe states it."""
    extensions: tuple[Extension, ...] = ()
    """Modules of the user's own, read and not run."""
    overrides: tuple[str, ...] = field(default=(), compare=False)
    """The `--set` texts it was read with."""
    limit_tokens: int | None = field(default=None, compare=False)
    """The `--limit_tokens` it was read with."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What was read otherwise than it is written."""

    def __post_init__(self) -> None:
        """Sections are built from the JSON objects of a file, or of `dataclasses.replace`."""
        makers = {name: (section, section.of) for name, section in SECTIONS.items()}
        makers |= {name: (keywords, keywords) for name, keywords in KEYWORDS.items()}
        for name, (kind, make) in makers.items():
            if not isinstance(getattr(self, name), kind):
                object.__setattr__(self, name, make(getattr(self, name)))  # the dataclass is frozen

    @property
    def where(self) -> str:
        return where_of(self.path, self.overrides, self.limit_tokens)

    @property
    def words(self) -> list[str]:
        """What a command takes to read this recipe again: its name or path, every `--set`, and its limit."""
        # a recipe of ours is named as `load_recipe` takes it: features/muon
        ours = self.path.is_relative_to(RECIPES)
        reference = self.path.relative_to(RECIPES).with_suffix("").as_posix() if ours else str(self.path)
        limit = [] if self.limit_tokens is None else ["--limit_tokens", str(self.limit_tokens)]
        return ["--recipe", reference, *(word for text in self.overrides for word in ("--set", text)), *limit]

    @property
    def sequence_length(self) -> int:
        """Tokens per sample: data.sequence_length where it is given, else the model's positions."""
        return self.data.sequence_length or self.model.max_position_embeddings

    @cached_property
    def step_sizes(self) -> StepSizes:
        return self.budget.step_sizes

    def progress(self, step: int = 0, tokens: int = 0, changes: Sequence[dict] = ()) -> Progress:
        """Where a run is that begins, or goes on, after `step` steps and `tokens` tokens.

        changes: what the run has accepted on the way, in order: {"step", "key", "from", "to"} each.
        """
        resizes = kept_resizes(changes, self.step_sizes)
        sizes, by_tokens = self.step_sizes, self.schedule_counts_tokens
        return Progress(sizes, self.sequence_length, self.budget.tokens, step, tokens, resizes, by_tokens)

    @property
    def own_groups(self) -> list[str]:
        """Keys that give some kinds of parameters their own rate or rule; empty with one plain group."""
        settings = self.optimizer
        keys = ["mup.base_width"] if self.mup.base_width is not None else []
        keys += ["optimizer.name"] if settings.name == "muon" else []
        rates = [key for key in settings.to_dict() if key.startswith(("matrix_", "embedding_", "groups"))]
        return keys + [f"optimizer.{key}" for key in rates if getattr(settings, key) not in (None, [])]

    @property
    def watched_keys(self) -> list[str]:
        """Keys for which attention is watched."""
        watching = {"optimizer.qk_clip": self.optimizer.qk_clip}
        watching["monitors.activations_steps"] = self.monitors.activations_steps
        return [key for key, value in watching.items() if value is not None]

    @property
    def resolved_loss(self) -> sections.Loss:
        """The section `loss` with the way that `auto` takes: plain, chunked or fused."""
        if self.loss.function is not None:
            return replace(self.loss, kind="plain")
        if self.loss.kind != "auto":
            return self.loss
        return replace(self.loss, kind="chunked" if why_not(self.model, "fused") else "fused")

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, over all ranks and micro-batches; less while `budget.ramp` rises."""
        return self.budget.tokens_per_step

    @property
    def num_steps(self) -> int:
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

    def warmup_steps(self, num_steps: float) -> int:
        """Full steps of rising rate in a run of `num_steps`."""
        return steps_of(self.training_keywords.warmup_steps, num_steps)

    def decay_start(self, num_steps: float) -> float | None:
        """Full steps before the rate falls in a run of `num_steps`; None if not by `warmup_stable_decay`."""
        keywords = self.training_keywords.lr_scheduler_kwargs or {}
        if self.training.lr_scheduler_type != DECAYING:
            return None
        # the stable steps if the recipe gives them; else all that the decay at the end leaves
        stable_steps = keywords.get("num_stable_steps")
        if stable_steps is None:
            return num_steps - keywords["num_decay_steps"]
        return self.warmup_steps(num_steps) + stable_steps

    def is_before_decay(self, step: int, progress: Progress) -> bool:
        """Return whether the rate, by `warmup_stable_decay`, has not begun to fall after `step`."""
        start = self.decay_start(progress.schedule_place(progress.last_step))
        return start is not None and progress.schedule_place(step) <= start

    @property
    def training_keywords(self) -> Training:
        """`training`, with what the budget says of the schedule in tokens, in full steps."""
        return self.training.in_steps(self.budget)

    def to_dict(self) -> dict:
        """The resolved recipe: written to a file and loaded again, it is this recipe."""
        values = {name: getattr(self, name) for name in ("name", "description", "deepspeed")}
        # a deep copy as plain dicts
        values |= {name: json.loads(json.dumps(getattr(self, name))) for name in KEYWORDS}
        values["model"] = {**self.origin, **values["model"], **self.weights.to_dict()}
        if self.extensions:
            values["extensions"] = [each.to_dict() for each in self.extensions]
        return values | {name: getattr(self, name).to_dict() for name in SECTIONS}

    def check(self) -> None:
        """Raise `UserError` for the first value that its schema cannot judge."""
        refuse_first(self._wrong(), self.where)

    def unread(self) -> Iterable[str]:
        """Yield a note for each value that changes nothing, for want of another key or by the kind of model."""
        for name in SECTIONS:
            yield from getattr(self, name).unread(name)
        yield from self.training.unread()
        reason = "" if has_experts(self.model) else "the model has no experts"
        if not reason and ROUTER_COEFFICIENT in self.model.with_defaults():
            reason = f"model.{ROUTER_COEFFICIENT} is the weight of this type's balancing loss"
        for name in ("balance_weight", "sequence_balance") if reason and self.loss.balance == "auto" else ():
            if getattr(self.loss, name) != getattr(sections.Loss, name):
                yield f"loss.{name}: does nothing: {reason}"
        if (padding := self.model.with_defaults().get("pad_token_id")) is not None:
            yield f"model.pad_token_id: no text is padded here, and the input row of token {padding:,} learns nothing"
        if self.weights.draw and self.weights.initial_weights:
            yield "model.draw: does nothing: model.initial_weights has all of them"
        is_asked = "prometheus" in self.training.report_to
        if self.monitors.prometheus != sections.Prometheus() and not is_asked:
            yield "monitors.prometheus: does nothing without training.report_to=prometheus"

    def _wrong(self) -> Wrong:
        """Fields, then sections, then what these ask of each other."""
        yield from check_folder_name(self.name, "name")
        model, length, extensions = self.model.with_defaults(), self.sequence_length, self.extensions
        yield from check_folder_name(self.data.name, "data.name")
        yield from self.data.check("data")
        yield from self.model.check()
        # else its code would run: before it trains (refusals.py)
        if model_extension(model.model_type) is None:
            yield from check_documents(self.data, model)
            yield from check_loss(self.loss, model)
        for number, rule in enumerate(self.data.filters):
            if rule["rule"] == "callable" and ":" not in rule["import"]:
                at = f"data.filters.{number}.import"
                yield from check_defined(extensions, "filter", rule["import"], at)
        if self.loss.function is not None:
            yield from check_defined(extensions, "loss", self.loss.function, "loss.function")
        yield from self.training.check(self.where)
        if self.training.use_liger_kernel and model.model_type == "gpt2":
            what = "is true, and Liger has no kernels for gpt2: set it to false, or take model_type llama"
            yield "training.use_liger_kernel", what
        if length > (longest := model.max_position_embeddings):
            what = f"is {length}, but the model has {longest} positions; shorten it, or --set model."
            yield "data.sequence_length", f"{what}{own_key(model, 'max_position_embeddings')}={length}"
        # before the budget's own checks: a wrong size of a step is the cause of others
        yield from self.budget.check_length(length)
        for name in SECTIONS:
            yield from getattr(self, name).check(name)
        schedules = defined(extensions, "schedule")
        yield from check_schedule(self.budget, self.training, self.num_steps, self.where, schedules)
        yield from self.optimizer.check_course(self.num_steps)
        yield from check_judged(self.budget, self.training, self.monitors.spikes)
        yield from check_mixture(self.data, self.num_samples, length)
        yield from check_mup(self.mup, model, self.weights.draw or ())
        # a tokenizer that is trained here has no more tokens than the model has rows
        if (fewest := self.data.fewest_ids) > model.vocab_size:
            key = "train_vocab_size" if "train_vocab_size" in self.data.tokenizer else "units"
            what = f"is {fewest}" if key == "train_vocab_size" else f"need {fewest} ids"
            yield f"data.tokenizer.{key}", f"{what}, more than model.vocab_size {model.vocab_size}"
        yield from self._check_judgement(defined(extensions, "metric"))
        if self.monitors.profile is not None:
            steps = self.monitors.profile.steps
            if (steps[-1] if isinstance(steps, list) else steps) > self.num_steps:
                yield "monitors.profile.steps", f"is {steps}, but the run has {self.num_steps} steps"

    def _check_judgement(self, metrics: Sequence[str]) -> Wrong:
        """What is judged is measured, when it is judged. metrics: those of extensions."""
        evaluation, training, keep_best = self.evaluation, self.training, self.checkpoints.keep_best
        save, evaluate = (
            steps_of(each, self.num_steps) for each in (training.save_steps, training.validated_every)
        )
        # a save between two validations has no loss of its own step
        is_validated = training.save_strategy == training.eval_strategy == "steps" and not save % evaluate
        if keep_best and not is_validated:
            what = f"is {keep_best}, but not every save is validated: set eval_strategy and save_strategy to steps, and"
            remedy = f"training.save_steps (now {save}) to a multiple of training.eval_steps (now {evaluate})"
            yield "checkpoints.keep_best", f"{what} {remedy}"
        if evaluation.patience is not None and training.eval_strategy != "steps":
            what = f"is {evaluation.patience}, but nothing is validated while training"
            yield "evaluation.patience", f"{what}: set training.eval_strategy to steps"
        if self.optimizer.average_decay is not None:
            metrics = [*metrics, *(f"{OF_AVERAGE}{name}" for name in LOWER_IS_BETTER)]
        yield from check_metric(evaluation, self.data, metrics)
        task_steps = evaluation.task_steps
        if task_steps is not None and training.eval_strategy == "steps" and task_steps % evaluate:
            what = f"is {task_steps}, no multiple of training.eval_steps {evaluate}"
            yield "evaluation.task_steps", f"{what}: scores come with the validations"


SECTIONS: dict[str, type[Section]] = {
    each.name: each.type
    for each in fields(Recipe)
    if isinstance(each.type, type) and issubclass(each.type, Section) and each.name != "weights"
}
"""Our own; the keys of `Weights` are in `model`."""


def accumulation_steps(recipe: Recipe, world_size: int, ds_config: dict | None = None) -> int:
    """Micro-batches per full optimizer step and rank, so that it holds exactly `tokens_per_step` tokens.

    `UserError` if ranks x micro-batch x length does not divide it, or a smaller step of the ramp; it names the nearest
    values that do. ds_config: may let several ranks work on the same samples (`ds_config.Degrees`).
    """
    per_sample = degrees_of(ds_config).ranks_per_sample
    ranks, micro_batch, length = world_size // per_sample, recipe.micro_batch, recipe.sequence_length
    ranks_words = f"{ranks} ranks" if per_sample == 1 else f"{ranks} groups of {per_sample} ranks"
    tokens_at_once, where = ranks * micro_batch * length, recipe.where
    steps, rest = divmod(recipe.tokens_per_step, tokens_at_once)
    if rest:
        together = f"{ranks_words} x {micro_batch} per_device_train_batch_size x {length} tokens"
        product = f"{tokens_at_once} = {together}"
        multiples = nearest_multiples(recipe.tokens_per_step, tokens_at_once)
        per_rank = recipe.samples_per_step // ranks
        if recipe.samples_per_step % ranks:
            what = f"{recipe.tokens_per_step} is not a multiple of {product}; {multiples}"
            dividing = [
                each for each in range(1, recipe.samples_per_step + 1) if recipe.samples_per_step % each == 0
            ]
            near = [
                *[each for each in dividing if each < ranks][-1:],
                *[each for each in dividing if each > ranks][:1],
            ]
            numbers = " or ".join(str(each * per_sample) for each in near)
            raise problem(where, "budget.tokens_per_step", f"{what}; or take {numbers} ranks")
        # the largest micro-batch that divides, not above the one that was asked for
        fitting = next(size for size in range(min(micro_batch, per_rank), 0, -1) if per_rank % size == 0)
        what = f"is {micro_batch}; {product} do not divide budget.tokens_per_step {recipe.tokens_per_step}"
        remedy = f"{fitting} does (or for tokens_per_step, {multiples})"
        raise problem(where, "training.per_device_train_batch_size", f"{what}; {remedy}")
    for size in recipe.step_sizes.all:
        if size % tokens_at_once:
            what = f"a step of {size // length} sequences is not a multiple of {ranks * micro_batch} = {ranks} ranks x "
            what += f"{micro_batch} per_device_train_batch_size; "
            # what divides every size divides their greatest common divisor
            shared, rest = divmod(math.gcd(*recipe.step_sizes.all) // length, ranks)
            if rest:
                what += f"make from_tokens_per_step and increment multiples of {ranks * length}, or take fewer ranks"
            else:
                fitting = next(each for each in range(min(micro_batch, shared), 0, -1) if shared % each == 0)
                what += f"training.per_device_train_batch_size={fitting} divides every step"
            raise problem(where, "budget.ramp", what)
    return steps


MOST_NAMES = 12
"""Metrics that a message lists."""


def check_documents(data: Data, model: Model) -> Wrong:
    """Documents are kept apart only by a type and a kernel for which that is known to be exact."""
    if not data.document_masking:
        return
    name = model.get("attn_implementation")
    if reason := why_not_apart(model, None):
        yield "data.document_masking", f"{reason}; set it to false"
    # a name with a slash is a kernel of the hub, which nothing here has tested
    if name is not None and (name in CROSSES_DOCUMENTS or "/" in name or why_not_apart(model, name)):
        what = f"is {name}, which is not known to keep documents apart, as data.document_masking wants; leave it out"
        yield "model.attn_implementation", what


def check_loss(loss: sections.Loss, model: Model) -> Wrong:
    """The logits are a product that can be fused with their loss, and the routers' are there, if that is wanted."""
    if loss.kind == "fused" and (reason := why_not(model, "fused")):
        yield "loss.kind", f"is fused: {reason}; use chunked"
    if has_experts(model) and model.get("output_router_logits") is False and loss.balance == "auto":
        what = "is false, so that nothing balances the experts; leave it out, or set loss.balance to none"
        yield "model.output_router_logits", what
    if has_experts(model) and loss.balance == "auto" and (reason := why_not(model, "balanced")):
        yield "loss.balance", f"{reason}; set it to none"
    # a model of the user's own is asked again once it is built
    if loss.router_z_loss and not model.get("output_router_logits"):
        what = "needs a mixture of experts with model.output_router_logits true"
        yield "loss.router_z_loss", f"{what}; set it, or leave router_z_loss out"


def check_metric(evaluation: sections.Evaluation, data: Data, metrics: Sequence[str]) -> Wrong:
    """What evaluation.metric names is measured by every validation. metrics: those of extensions."""
    metric, task_steps = evaluation.metric, evaluation.task_steps
    # scores are <task>/<metric>
    is_score = "/" in metric and metric.partition("/")[0] not in GROUPS
    by_set = [f"{name}_{kind}" for name in data.validation_names for kind in LOWER_IS_BETTER]
    names = [*LOWER_IS_BETTER, *by_set, *metrics]
    if not is_score and metric not in names:
        near = nearest(metric, (*names, "hellaswag/acc", "hellaswag/acc_norm"))
        called = [source.called for source in data.sources]
        if len(called) == 1 and metric in [f"{called[0]}_{kind}" for kind in LOWER_IS_BETTER]:
            # a single source's loss is the whole validation's
            near = f"; with a single source that is {metric.removeprefix(called[0] + '_')!r}"
        shown = ", ".join(names if len(names) <= MOST_NAMES else [*names[:MOST_NAMES], "..."])
        what = f"is {metric!r}, which no validation of this recipe measures; there are {shown}"
        yield "evaluation.metric", f"{what}, and scores as <task>/<metric>{near}"
    if is_score and task_steps is not None:
        what = f"is {task_steps}, but evaluation.metric {metric} is wanted at each validation: leave it out"
        yield "evaluation.task_steps", what
    if is_score and not evaluation.tasks and evaluation.hellaswag is None:
        what = f"is {metric!r}, but nothing scores it"
        yield "evaluation.metric", f"{what}: name evaluation.tasks, or data for evaluation.hellaswag"
