"""The `training` section: TrainingArguments' keyword arguments, verbatim, but those that have another owner.

With the names, keywords and limits of the learning rate's schedules, which are those of the functions in
transformers/optimization.py (a test compares the two), and of the optimizers with rules of their own.
"""

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pretraining.errors import nearest
from pretraining.outside.schema import Wrong, check
from pretraining.recipe.budget import Budget
from pretraining.recipe.piecewise import POINTS, check_points
from pretraining.recipe.section import schema_file
from pretraining.recipe.sections import Spikes

_ORDER = "data order is a pure function of (data, seed, position)"
_EVALUATION = "evaluation computes the loss of the validation tokens and nothing else"
_CHECKPOINTS = "every checkpoint is complete and can be resumed"
_HUB = "publishing is a step of its own: upload runs/<name>/export after the run"
_VERB = "train.py always trains and evaluates; leave it out"
_COMPILE = "the recipe's speed section compiles (compile, compile_backend, compile_mode)"
_FSDP = "not supported: ranks are sharded by DeepSpeed, as a file of ds_configs/ says"

TRACKER_PACKAGES = {"prometheus": "prometheus_client"}
TRACKER_PACKAGES |= {"opentelemetry": "opentelemetry-exporter-otlp-proto-http"}
"""{tracker: the package for pip that provides it, if that has another name}; a module's name begins it."""

TRAINING_KEYS = {
    "max_steps": "derived from budget.tokens / budget.tokens_per_step",
    "num_train_epochs": "derived from budget.tokens",
    "gradient_accumulation_steps": "derived from budget.tokens_per_step, ranks and micro-batch",
    "auto_find_batch_size": "the micro-batch is per_device_train_batch_size; it does not change within a run",
    "output_dir": "set on the command line (--output_dir)",
    "deepspeed": 'the recipe\'s own top-level key ("deepspeed": "zero2"), or --deepspeed',
    "resume_from_checkpoint": "set on the command line (--resume)",
    "do_train": _VERB,
    "do_eval": _VERB,
    "do_predict": _VERB,
    "use_cpu": "decided by the machine: CPU where there is no GPU",
    "local_rank": "the launcher sets it (deepspeed, torchrun, accelerate launch)",
    "ddp_find_unused_parameters": "always off: every parameter of a language model is used",
    "ddp_static_graph": "ranks fail with it without DeepSpeed, which does not read it",
    "ddp_timeout": "follows from monitors.hang_minutes, so that a hang is named before a message is given up",
    "ddp_backend": "decided by the machine: nccl with GPUs, gloo without",
    "parallelism_config": "not supported: ranks are data-parallel, sharded by ds_configs/",
    "fsdp": _FSDP,
    "fsdp_config": _FSDP,
    "save_total_limit": "set by checkpoints.keep_last",
    "save_only_model": _CHECKPOINTS,
    "save_on_each_node": "checkpoints go once to storage that every node sees",
    "enable_jit_checkpoint": f"{_CHECKPOINTS}, which this one is not under DeepSpeed",
    "restore_callback_states_from_checkpoint": "resuming restores the callbacks' state by itself",
    "load_best_model_at_end": "the last step is what is exported",
    "metric_for_best_model": "set by evaluation.metric",
    "greater_is_better": "told by the name in evaluation.metric",
    "train_sampling_strategy": _ORDER,
    "length_column_name": _ORDER,
    "ignore_data_skip": _ORDER,
    "dataloader_drop_last": _ORDER,
    "dataloader_in_order": _ORDER,
    "accelerator_config": f"{_ORDER}; batches are neither split nor dispatched",
    "remove_unused_columns": "the columns are ours: the model gets what PackedDataset gives",
    "label_names": "the columns are ours: the model gets what PackedDataset gives",
    "average_tokens_across_devices": "always on: the loss is the mean over all tokens of the step",
    "prediction_loss_only": _EVALUATION,
    "include_for_metrics": _EVALUATION,
    "include_num_input_tokens_seen": "every row of metrics.jsonl counts the tokens (train/tokens)",
    "label_smoothing_factor": "the loss is the next token's, as the recipe's loss section says",
    "optim_target_modules": "for GaLore and APOLLO, whose projections checkpoints cannot hold",
    "skip_memory_metrics": "what it measures is shown nowhere, and takes as long as the step",
    "disable_tqdm": "the bar is shown on a terminal alone; in a file there is a line for each logged step",
    "batch_eval_metrics": _EVALUATION,
    "eval_accumulation_steps": _EVALUATION,
    "eval_do_concat_batches": _EVALUATION,
    "eval_use_gather_object": _EVALUATION,
    "bf16_full_eval": "evaluation runs in the training precision (bf16)",
    "fp16_full_eval": "evaluation runs in the training precision (fp16)",
    "logging_nan_inf_filter": "always off: a NaN is shown as a NaN",
    "gradient_checkpointing": "its name is activation_checkpointing now",
    "gradient_checkpointing_kwargs": "its name is activation_checkpointing_kwargs now",
    "warmup_ratio": "its name is warmup_steps now, and below 1 it is a share of the run, as 0.03",
    "use_cache": "set by model.use_cache",
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "push_to_hub": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
}
"""Keys of TrainingArguments that a recipe may not hold, each with the place that owns it."""

DEFAULT_OPTIM = "adamw_torch_fused"
ADAMW = ("adamw_torch", DEFAULT_OPTIM)

RECOMPUTATION = {
    "use_reentrant": {"type": "boolean"},
    "every_n_layers": {"type": "integer", "minimum": 1},
    "offload": {"type": "boolean"},
    "preserve_rng_state": {"type": "boolean"},
    "determinism_check": {"enum": ["default", "none"]},
    "early_stop": {"type": "boolean"},
    "debug": {"type": "boolean"},
}

CONSTANT = ("constant", "constant_with_warmup")
DECAYING = "warmup_stable_decay"
STABLE = (*CONSTANT, DECAYING)
"""Schedules that hold their peak: a stage may begin there."""
BY_METRIC = ("reduce_lr_on_plateau", "greedy")
"""Schedules that follow the validation loss and not the number of steps."""
PIECEWISE = "piecewise"
"""Our own schedule: shares of the peak, given by points (recipe/piecewise.py)."""
WITHOUT_WARMUP = ("constant", *BY_METRIC, PIECEWISE)

SCHEDULE_FREE = ("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd")
"""Optimizers that average in place of a decay (Defazio et al. 2024, The Road Less Scheduled)."""
# Such an optimizer takes gradients at y, but its result is the average x. It keeps a sequence z as a state, and
# x = y + `AVERAGING` (z - y). It keeps this number too, for every tensor that it has stepped.
Z = "z"
AVERAGING = "averaging"
"""Names of these two states."""
ELEMENTWISE = (*ADAMW, *SCHEDULE_FREE, "sgd", "adagrad", "rmsprop", "lion_32bit", "adamw_bnb_32bit")
"""Names of `training.optim` whose update of a weight uses no other weight, so that it may be cut anywhere."""

_SHARE = {"type": "number", "minimum": 0, "maximum": 1}
_RATE = {"type": "number", "minimum": 0}
_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
_COUNT, _STEPS = {"type": "integer", "minimum": 0}, {"type": "integer", "minimum": 1}
_SHAPE = {"enum": ["linear", "cosine", "1-sqrt"]}
# either of the first two: see ONE_OF
_LEAST_RATE = {"min_lr": _RATE, "min_lr_rate": _SHARE, "num_cycles": _POSITIVE}
_JUDGING = {
    "mode": {"enum": ["min"]},  # what is judged is the validation loss
    "factor": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "patience": _COUNT,
    "threshold": _RATE,
    "threshold_mode": {"enum": ["rel", "abs"]},
    "cooldown": _COUNT,
    "min_lr": _RATE,
    "eps": _RATE,
}
KEYWORDS: dict[str, dict] = {
    "linear": {},
    "cosine": {"num_cycles": _POSITIVE},
    "cosine_with_restarts": {"num_cycles": _STEPS},
    "polynomial": {"lr_end": _RATE, "power": _POSITIVE},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": _STEPS},
    "reduce_lr_on_plateau": _JUDGING,
    "cosine_with_min_lr": _LEAST_RATE,
    "cosine_warmup_with_min_lr": {**_LEAST_RATE, "warmup_lr_rate": _SHARE},
    DECAYING: {
        "num_decay_steps": _STEPS,
        "num_stable_steps": _COUNT,
        "warmup_type": _SHAPE,
        "decay_type": _SHAPE,
        "min_lr_ratio": _SHARE,
        "num_cycles": _POSITIVE,
    },
    "greedy": {
        **_JUDGING,
        "warmup": _COUNT,
        "max_lr": _POSITIVE,
        "verbose": {"type": "boolean"},
        "smooth": {"type": "boolean"},
        "window_size": _STEPS,
        "reset_start": _COUNT,
    },
}
"""Schema of every keyword that `training.lr_scheduler_kwargs` takes, by `training.lr_scheduler_type`."""
ONE_OF = {
    name: [{"required": ["min_lr"]}, {"required": ["min_lr_rate"]}]
    for name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
} | {PIECEWISE: [{"required": ["points"]}]}
"""Keywords of which a schedule needs exactly one."""
LOWEST = {
    "polynomial": ("lr_end", 1e-7),
    "greedy": ("min_lr", 1e-3),
    **dict.fromkeys((*ONE_OF, "reduce_lr_on_plateau"), ("min_lr", 0.0)),
}
"""{schedule: (its keyword for the lowest rate, transformers' default)}"""


class Training(dict):
    """TrainingArguments' keyword arguments, verbatim: a dict of what the recipe gives.

    Attributes are the keywords that this package reads itself, with TrainingArguments' own defaults, which
    recipes/schema.json holds.
    """

    per_device_train_batch_size: int
    """Sequences per rank and forward pass."""
    per_device_eval_batch_size: int
    learning_rate: float
    """The peak of the schedule."""
    lr_scheduler_type: str
    lr_scheduler_kwargs: dict | None
    warmup_steps: float
    """Steps, or a share of the run below 1."""
    weight_decay: float
    max_grad_norm: float
    optim: str
    optim_args: str | None
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    seed: int
    data_seed: int | None
    """Of the samples' order; None: `seed`."""
    bf16: bool
    fp16: bool
    activation_checkpointing: bool | None
    activation_checkpointing_kwargs: dict | None
    use_liger_kernel: bool
    logging_steps: float
    eval_strategy: str
    eval_steps: float | None
    eval_delay: float
    save_strategy: str
    save_steps: float
    report_to: str | list[str]
    dataloader_num_workers: int
    dataloader_prefetch_factor: int | None

    if not TYPE_CHECKING:  # which takes no other names than these

        def __getattr__(self, name: str) -> Any:
            schema = schema_file()["properties"]["training"]["properties"].get(name)
            if schema is None:
                raise AttributeError(name)
            return self.get(name, schema["default"])

    def unread(self) -> list[str]:
        """Say if validations have a cadence and are switched off, as by default, and what happens at the end alone."""
        notes, at_end = [], "the run is validated at its end alone"
        if "eval_steps" in self and self.eval_strategy == "no":
            what = f"is set, and training.eval_strategy is no: {at_end}"
            notes.append(f"training.eval_steps: {what}; --set training.eval_strategy=steps")
        once = {
            "eval": at_end,
            "save": "the first checkpoint is that of the end",
            "logging": "losses are logged at its end alone",
        }
        for name, result in once.items():
            if self.get(key := f"{name}_strategy") == "epoch":
                what = f"is epoch, and the whole run is one: {result}"
                notes.append(f"training.{key}: {what}; --set training.{key}=steps")
        return notes

    def in_steps(self, budget: Budget) -> "Training":
        """With what the budget says of the schedule in tokens, in full steps."""
        # a copy: the recipe itself stays as it was written
        keywords = Training(self)
        if (tokens := budget.warmup_tokens) is not None:
            keywords["warmup_steps"] = tokens // budget.tokens_per_step
        if (tokens := budget.decay_tokens) is not None:
            given = self.lr_scheduler_kwargs or {}
            keywords["lr_scheduler_kwargs"] = {**given, "num_decay_steps": tokens // budget.tokens_per_step}
        return keywords

    @property
    def validated_every(self) -> float:
        """Steps, or a share of the run below 1: the Trainer takes `logging_steps` if `eval_steps` is left out."""
        return self.eval_steps or self.logging_steps

    @property
    def recomputed_one_in(self) -> int:
        """n if one layer in n is computed again for the backward pass; 0: none is."""
        keywords = self.activation_checkpointing_kwargs or {}
        return int(keywords.get("every_n_layers") or 1) if self.activation_checkpointing else 0

    @property
    def recomputed_share(self) -> float:
        return 1 / self.recomputed_one_in if self.recomputed_one_in else 0.0

    @property
    def product_precision(self) -> str:
        """Of the products: bf16, fp16, tf32 or fp32."""
        # tf32 last: it concerns the products of fp32 alone
        return next((name for name in ("bf16", "fp16", "tf32") if self.get(name)), "fp32")

    def check(self, where: str) -> Wrong:
        """Yield the first keyword that the Trainer would refuse late, or read otherwise. where: the file."""
        # keywords of activation_checkpointing_enable() and of torch.utils.checkpoint.checkpoint()
        given, key = self.activation_checkpointing_kwargs or {}, "training.activation_checkpointing_kwargs"
        schema = {"type": "object", "properties": RECOMPUTATION, "additionalProperties": False}
        check(given, schema, where, key)
        for name in given if given.get("use_reentrant") else ():
            # torch.utils.checkpoint refuses or ignores them with use_reentrant=True
            if name in ("determinism_check", "early_stop", "debug"):
                yield f"{key}.{name}", "goes with use_reentrant false alone; leave one of them out"
        for name in ("logging_steps", "eval_steps", "save_steps"):
            # null and a missing key are left to TrainingArguments' own defaults
            yield from _check_steps(f"training.{name}", self.get(name) or 1)
        # transformers removes blanks, then splits at commas and at one "=" each
        for pair in self.optim_args.replace(" ", "").split(",") if self.optim_args else ():
            name, equals, value = pair.partition("=")
            if not (name and equals and value) or "=" in value:
                what = f"is {json.dumps(self.optim_args)}; write name=value, several with commas between them"
                yield "training.optim_args", what
        if self.bf16 and self.fp16:
            yield "training.fp16", "and training.bf16 are both true; choose one"


def steps_of(given: float, num_steps: float) -> int:
    """Steps that a number of them is, or a share below 1 of a run of `num_steps`, as the Trainer counts them."""
    return int(given) if given >= 1 else math.ceil(num_steps * given)


def _check_steps(key: str, given: float) -> Wrong:
    if given > 1 and given != int(given):
        yield key, f"is {given:g}; write a whole number of steps, or a share of the run below 1"


def check_schedule(
    budget: Budget, training: Training, num_steps: int, where: str, others: Sequence[str]
) -> Wrong:
    """Yield what of a schedule transformers would refuse, or follow otherwise than it reads.

    num_steps: of the whole run. others: names of schedules of extensions.
    """
    kind, keywords = training.lr_scheduler_type, training.lr_scheduler_kwargs or {}
    key, optim = "training.lr_scheduler_kwargs", training.optim
    if kind not in (names := (*KEYWORDS, PIECEWISE, *others)):
        near = f"; known are {', '.join(names)}, or one of your own, from a module in extensions"
        yield "training.lr_scheduler_type", f"is {kind!r}, which is no schedule{nearest(kind, names) or near}"
    # averaging takes the place of a decay, and needs a momentum to average over
    if optim in SCHEDULE_FREE and kind not in CONSTANT:
        what = f"is {kind}, but {optim} does without a decay; write {' or '.join(CONSTANT)}"
        yield "training.lr_scheduler_type", what
    if optim in SCHEDULE_FREE and not training.adam_beta1:
        what = f"is 0: {optim} would train weights that do not tell their average; write 0.9"
        yield "training.adam_beta1", what
    # what the budget says of the schedule in tokens, `training` does not say in steps
    if budget.warmup_tokens is not None:
        if training.warmup_steps:
            what = "and training.warmup_steps are both there; leave one out, or set training.warmup_steps=0"
            yield "budget.warmup_tokens", what
        if kind in WITHOUT_WARMUP:
            what = f"is set, but training.lr_scheduler_type {kind} has no warm-up; write constant_with_warmup"
            yield "budget.warmup_tokens", what
    if budget.decay_tokens is not None:
        if kind != DECAYING:
            what = f"is for training.lr_scheduler_type {DECAYING}, and that is {kind}"
            yield "budget.decay_tokens", f"{what}; set that, or leave this out"
        # either would fix the same border a second time, in steps
        for name in [each for each in ("num_decay_steps", "num_stable_steps") if each in keywords]:
            what = f"and training.lr_scheduler_kwargs.{name} are both there; leave one out"
            yield "budget.decay_tokens", what
    yield from _check_steps("training.warmup_steps", training.warmup_steps)
    if kind not in others:
        known = {**KEYWORDS, PIECEWISE: {"points": POINTS}}[kind]
        for name in keywords:
            if name not in known:
                takes = nearest(name, known) or f"; it takes {', '.join(known) or 'none'}"
                remedy = "" if known else f": --set {key}={{}}"
                yield f"{key}.{name}", f"is no keyword of {kind}{takes}{remedy}"
        one_of = {"oneOf": ONE_OF[kind]} if kind in ONE_OF else {}
        check(keywords, {"type": "object", "properties": known, **one_of}, where, key)
    if kind == PIECEWISE:
        if training.warmup_steps:
            yield "training.warmup_steps", f"is given, but {kind} has its warm-up in its points; set it to 0"
        yield from check_points(keywords["points"], f"{key}.points", num_steps)
    if kind in LOWEST:
        (name, default), peak = LOWEST[kind], training.learning_rate
        if (lowest := keywords.get(name, default)) >= peak:
            what = f"is {lowest:g}{'' if name in keywords else ' if it is left out'}"
            yield f"{key}.{name}", f"{what}, which is not below training.learning_rate {peak:g}: lower it"
    if kind != DECAYING:
        return
    # the parts of such a schedule fit into the run: it would begin in the middle of its decay
    in_steps = training.in_steps(budget)
    key, keywords = f"{key}.num_decay_steps", in_steps.lr_scheduler_kwargs or {}
    if "num_decay_steps" not in keywords:
        yield key, f"is missing: {DECAYING} needs the number of its last steps, or budget.decay_tokens"
    full_steps = num_steps if training == in_steps else budget.tokens // budget.tokens_per_step
    decay, stable = keywords["num_decay_steps"], keywords.get("num_stable_steps", 0)
    warmup = steps_of(in_steps.warmup_steps, full_steps)
    if warmup + stable + decay > full_steps:
        parts = f"{warmup} steps of warm-up" + f", {stable} stable" * bool(stable)
        what = f"is {decay} steps; with {parts} that is more than the run's {full_steps} steps: shorten them"
        yield "budget.decay_tokens" if budget.decay_tokens else key, what


def check_judged(budget: Budget, training: Training, spikes: Spikes) -> Wrong:
    """A schedule that follows the validation loss is no function of the step: nothing can be multiplied with it.

    fp16 finds its loss scale by steps that are refused, so that none is refused for its norm.
    """
    kind, ramp = training.lr_scheduler_type, budget.ramp
    if spikes.rule == "deviations" and training.fp16:
        what = "is deviations, whose refused steps would lower the loss scale of training.fp16"
        yield "monitors.spikes.rule", f"{what}; --set training.fp16=false --set training.bf16=true, or robust"
    if kind not in BY_METRIC:
        return
    if training.eval_strategy != "steps":
        what = f"is {kind}, which follows the validation loss, and nothing is validated before the end"
        yield "training.lr_scheduler_type", f"{what}; --set training.eval_strategy=steps"
    remedy = f"the validation loss sets the rate of {kind}; leave it out, or choose another schedule"
    if ramp is not None and ramp.lr_scaling != "none":
        yield "budget.ramp.lr_scaling", f"is {ramp.lr_scaling}, but {remedy}"
    if spikes.lr_factor != 1 and spikes.lr_steps:
        yield "monitors.spikes.lr_factor", f"is {spikes.lr_factor:g}, but {remedy}"
