"""Keys that a recipe's `training` or a ds_config may not hold, each with the place that owns it."""

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

_OPTIMIZER = (
    "the recipe's training section owns the optimizer and its schedule; "
    "an optimizer block here would also put weight decay on norms and biases"
)
_MONITOR = "the recipe's training.report_to chooses the trackers"

DS_CONFIG_KEYS = {
    "torch_autocast": "the recipe's training.bf16 decides the precision; at stage 0 it is autocast by itself",
    "optimizer": _OPTIMIZER,
    "scheduler": "the recipe's training section owns the schedule (lr_scheduler_type, warmup_steps)",
    "tensorboard": _MONITOR,
    "wandb": _MONITOR,
    "csv_monitor": _MONITOR,
    "comet": _MONITOR,
    "data_efficiency": "the recipe's data section owns the order of the samples",
    "dataloader_drop_last": "the recipe's data section owns the order of the samples",
    "gradient_allreduce_op": "gradients are means over the tokens of a step",
    "compile": "the recipe's speed.compile does it; DeepSpeed's own passes (DeepCompile) are not started here",
    "steps_per_print": "the recipe's training.logging_steps sets the cadence",
}
