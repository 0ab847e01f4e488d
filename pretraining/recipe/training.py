"""The `training` section: TrainingArguments' keyword arguments, verbatim, but those that have another owner."""

import json
from typing import Any

from pretraining.schema import check, problem

_ORDER = "data order is a pure function of (data, seed, position)"
_EVALUATION = "evaluation computes the loss of the validation tokens and nothing else"
_CHECKPOINTS = "every checkpoint is complete and can be resumed"
_HUB = "publishing is a step of its own: upload runs/<name>/export after the run"
_LAUNCHER = "the launcher sets it (deepspeed, torchrun, accelerate launch)"
_VERB = "train.py always trains and evaluates; leave it out"
_COMPILE = "the recipe's speed section compiles (compile, compile_backend, compile_mode)"
_FSDP = "not supported: ranks are sharded by DeepSpeed, as a file of ds_configs/ says"

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
    "local_rank": _LAUNCHER,
    "ddp_find_unused_parameters": "always off: every parameter of a language model is used",
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
NOT_REENTRANT = ("determinism_check", "early_stop", "debug")


class Keyword:
    """A keyword that this package reads: the recipe's value, or what TrainingArguments takes if it is left out."""

    def __init__(self, default: Any = None):
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, training: dict | None, owner: type) -> Any:
        return self if training is None else training.get(self.name, self.default)


class Training(dict):
    """TrainingArguments' keyword arguments, verbatim: a dict of what the recipe gives.

    Attributes are the keywords that this package reads itself, with TrainingArguments' own defaults.
    """

    per_device_train_batch_size: int = Keyword(8)
    """Sequences per rank and forward pass."""
    per_device_eval_batch_size: int = Keyword(8)
    learning_rate: float = Keyword(5e-5)
    """The peak of the schedule."""
    lr_scheduler_type: str = Keyword("linear")
    lr_scheduler_kwargs: dict | None = Keyword()
    warmup_steps: float = Keyword(0)
    """Steps, or a share of the run below 1."""
    weight_decay: float = Keyword(0.0)
    max_grad_norm: float = Keyword(1.0)
    optim: str = Keyword(DEFAULT_OPTIM)
    optim_args: str | None = Keyword()
    adam_beta1: float = Keyword(0.9)
    adam_beta2: float = Keyword(0.999)
    adam_epsilon: float = Keyword(1e-8)
    seed: int = Keyword(42)
    data_seed: int | None = Keyword()
    """Of the samples' order; None: `seed`."""
    bf16: bool = Keyword(False)
    fp16: bool = Keyword(False)
    activation_checkpointing: bool | None = Keyword()
    activation_checkpointing_kwargs: dict | None = Keyword()
    use_liger_kernel: bool = Keyword(False)
    logging_steps: float = Keyword(500)
    eval_strategy: str = Keyword("no")
    eval_steps: float | None = Keyword()
    save_strategy: str = Keyword("steps")
    save_steps: float = Keyword(500)
    report_to: str | list[str] = Keyword("none")
    dataloader_num_workers: int = Keyword(0)
    dataloader_prefetch_factor: int | None = Keyword()

    @property
    def steps_between_validations(self) -> float:
        """Steps between validations: the Trainer takes `logging_steps` if `eval_steps` is left out."""
        return self.eval_steps or self.logging_steps

    def check(self, where: str) -> None:
        """Raise `UserError` for the first keyword that the Trainer would refuse late, or read otherwise."""
        self._check_recomputation(where)
        self._check_cadences(where)
        self._check_optimizer_arguments(where)
        if self.bf16 and self.fp16:
            raise problem(where, "training.fp16", "and training.bf16 are both true; choose one")

    def _check_recomputation(self, where: str) -> None:
        """Keywords of activation_checkpointing_enable() and of torch.utils.checkpoint.checkpoint()."""
        given, key = self.activation_checkpointing_kwargs or {}, "training.activation_checkpointing_kwargs"
        schema = {"type": "object", "properties": RECOMPUTATION, "additionalProperties": False}
        check(given, schema, where, key)
        # torch.utils.checkpoint refuses or ignores them with use_reentrant=True
        if given.get("use_reentrant"):
            for name in given:
                if name in NOT_REENTRANT:
                    what = "goes with use_reentrant false alone; leave one of them out"
                    raise problem(where, f"{key}.{name}", what)

    def _check_cadences(self, where: str) -> None:
        """Steps between two logs, validations or saves: whole ones, or a share of the run below 1."""
        for key in ("logging_steps", "eval_steps", "save_steps"):
            # null and a missing key are left to TrainingArguments' own defaults
            every = self.get(key) or 1
            if every > 1 and every != int(every):
                what = f"is {every:g}; write a whole number of steps, or a share of the run below 1"
                raise problem(where, f"training.{key}", what)

    def _check_optimizer_arguments(self, where: str) -> None:
        """`optim_args` is a list of names and values, as transformers takes it apart."""
        given = self.optim_args
        # transformers removes blanks, then splits at commas and at one "=" each
        for pair in (given or "").replace(" ", "").split(",") if given else ():
            name, equals, value = pair.partition("=")
            if not (name and equals and value) or "=" in value:
                what = f"is {json.dumps(given)}; write name=value, several with commas between them"
                raise problem(where, "training.optim_args", what)
