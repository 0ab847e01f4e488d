"""Read a ds_config, which says how to shard and nothing else, and check each key against the installed DeepSpeed."""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pretraining.errors import UserError, nearest
from pretraining.outside.schema import Wrong, check, display_path, read_json, refuse_first
from pretraining.runtime.installation import REPOSITORY

DS_CONFIGS = REPOSITORY / "ds_configs"
_MONITOR = "the recipe's training.report_to chooses the trackers"

DS_CONFIG_KEYS = {
    "torch_autocast": "the recipe's training.bf16 decides the precision; at stage 0 it is autocast by itself",
    "optimizer": "the recipe's training section owns the optimizer and its schedule; an optimizer block here would "
    "also put weight decay on norms and biases",
    "scheduler": "the recipe's training section owns the schedule (lr_scheduler_type, warmup_steps)",
    "tensorboard": _MONITOR,
    "wandb": _MONITOR,
    "csv_monitor": _MONITOR,
    "comet": _MONITOR,
    "data_efficiency": "the recipe's data section owns the order of the samples",
    "dataloader_drop_last": "the recipe's data section owns the order of the samples",
    "gradient_allreduce_op": "gradients are means over the tokens of a step",
    "compile": "the recipe's speed.compile does it: --set speed.compile=deepcompile for DeepSpeed's own passes",
    "steps_per_print": "the recipe's training.logging_steps sets the cadence",
    "activation_checkpointing": "the recipe's training.activation_checkpointing does it; no model here calls "
    "DeepSpeed's functions for it",
    "checkpoint": "checkpoints are the project's own, and any layout resumes from them",
    "seq_parallel_communication_data_type": "communication_data_type is that of split sequences too",
}
"""Keys that a ds_config may not hold, each with the key or section that decides instead."""

# Both the recipe and DeepSpeed know these: they must say "auto".
SHARED_KEYS = {
    "train_batch_size": "derived from the budget",
    "train_micro_batch_size_per_gpu": "the recipe's training.per_device_train_batch_size",
    "gradient_accumulation_steps": "derived from the budget",
    "gradient_clipping": "the recipe's training.max_grad_norm",
}
BY_RECIPE = "the recipe decides it"
_FP32_MASTERS = "checkpoints, plans and the curve count on master weights and optimizer states in fp32"
_OWN_CHECKPOINTS = "checkpoints are the project's own"
SUPPORTED_VALUES = {
    "fp16.fp16_master_weights_and_grads": ((False,), _FP32_MASTERS),
    "bf16.check_grad_overflow": ((True,), "a step whose gradients are not finite must be refused"),
    "data_types.param_dtype": ((None,), BY_RECIPE),
    "data_types.buffer_dtype": (
        (None, "fp32"),
        "rotary frequencies would be rounded, and the exported model computes with those that are not",
    ),
    "bf16.bf16_master_weights_and_grads": ((False,), _FP32_MASTERS),
    "bf16.bf16_optimizer_states": ((False,), _FP32_MASTERS),
    "zero_optimization.legacy_stage1": ((False,), "DeepSpeed has no such stage 1 any more"),
    "zero_optimization.compute_grad_norm": ((True,), "the norm of every step is clipped and logged"),
    "zero_optimization.zenflow": (
        (None,),
        "it takes the optimizer's step apart, which a checkpoint cannot resume",
    ),
    "zero_optimization.elastic_checkpoint": ((False,), _OWN_CHECKPOINTS),
    "zero_optimization.load_from_fp32_weights": ((True,), _OWN_CHECKPOINTS),
    "zero_optimization.pipeline_loading_checkpoint": ((False,), _OWN_CHECKPOINTS),
    "zero_optimization.allgather_partitions": ((True,), "DeepSpeed does not read it any more"),
    "zero_optimization.leaf_module": (
        (None,),
        "gradients are lost of a module whose input needs none; speed.compile=blocks gathers blocks as one",
    ),
    "zero_optimization.offload_optimizer.ratio": (
        (1,),
        "what stays on the GPU is stepped by a second optimizer, whose learning rate no schedule changes",
    ),
    "zero_optimization.stage3_module_granularity_threshold": (
        (0, 0.0),
        "the loss reads weights of modules that would be gathered with their parents alone",
    ),
    "zero_optimization.offload_optimizer.super_offload": (
        (None, False),
        "it is for one kind of machine, and untested",
    ),
}
"""{dotted key: (its values that work here, why others do not)}"""

DEGREES = {
    "tensor": "tensor_parallel.autotp_size",
    "sequence": "sequence_parallel_size",
    "expert": "expert_parallel.autoep_size",
    "hpz": "zero_optimization.zero_hpz_partition_size",
}
"""{degree, as in `--deepspeed zero3:sequence=4`: the dotted key of a ds_config that holds it}, DeepSpeed's own."""
REDUCE = "reduce"
"""As in `--deepspeed zero2:reduce=fp32`: the type in which gradients are added up over the ranks."""


class Degrees(NamedTuple):
    """Over how many ranks a ds_config splits what plain data parallelism would copy to each of them.

    Ranks are numbered with tensor parallelism innermost, then sequence parallelism, then data.
    """

    tensor: int = 1
    """Ranks that split each layer's matrices (AutoTP), embedding and head."""
    sequence: int = 1
    """Ranks that split each sequence (Ulysses)."""
    expert: int = 1
    """Ranks that split the experts of each mixture layer. They read different samples."""

    @property
    def ranks_per_sample(self) -> int:
        """Ranks that work on the same samples."""
        return self.tensor * self.sequence

    def __str__(self) -> str:
        """Name the degrees above 1, as `tensor 2 x sequence 4`."""
        return " x ".join(f"{name} {size}" for name, size in self._asdict().items() if size > 1)


NOT_SPLIT = Degrees()


def value_at(config: dict | None, dotted: str) -> Any:
    """Return the value of a dotted key; None without it, or without a block that holds it."""
    value: Any = config
    for name in dotted.split("."):
        value = (value or {}).get(name)
    return value


def degrees_of(config: dict | None) -> Degrees:
    degrees = {name: value_at(config, DEGREES[name]) or 1 for name in Degrees._fields}
    if not value_at(config, "expert_parallel.enabled"):
        degrees["expert"] = 1
    return Degrees(**degrees)


def hpz_ranks(config: dict | None) -> int:
    """Return how many ranks share the second copy of the weights (ZeRO++); 1: there is none."""
    return value_at(config, DEGREES["hpz"]) or 1


def load_ds_config(name_or_path: str) -> dict:
    """Read a ds_config by its name in ds_configs/ or by its path, and check all of it.

    Degrees of parallelism may follow, and replace those of the file: `zero3:sequence=4`, `my.json:tensor=2,sequence=2`.
    So may the type of reductions: `zero2:reduce=fp32`.

    Raises `UserError`, which names the file and the dotted key, for a key that is unknown, removed from DeepSpeed or
    the recipe's, and for a shared value that is not "auto".
    """
    name_or_path, _, degrees = str(name_or_path).partition(":")
    path = DS_CONFIGS / f"{name_or_path}.json"
    if name_or_path.endswith(".json") or "/" in name_or_path:
        path = Path(name_or_path)
    # schema.json is in the same folder and is no ds_config
    elif name_or_path == "schema" or not path.is_file():
        names = ds_config_names()
        there = f"there are: {', '.join(names)} (or give a path that ends in .json)"
        raise UserError(f"deepspeed {name_or_path}: no such ds_config{nearest(name_or_path, names)}; {there}")
    where, schema = display_path(path), ds_config_schema()
    config = read_json(path)
    for text in filter(None, degrees.split(",")):
        config = _with_degree(config, text)
    # These first: they know the reason; the schema would only say that the key or value is unknown.
    refuse_first(_owned_elsewhere(config, schema), where)
    config = check(config, schema, where)
    refuse_first(_unsupported(config), where)
    # "$schema" is for editors; DeepSpeed does not know it
    return {key: value for key, value in config.items() if key != "$schema"}


@cache
def ds_config_schema() -> dict:
    return json.loads((DS_CONFIGS / "schema.json").read_text(encoding="utf-8"))


def ds_config_names() -> list[str]:
    return sorted(path.stem for path in DS_CONFIGS.glob("*.json") if path.name != "schema.json")


def short_name(name_or_path: str) -> str:
    """Return the name of a file in ds_configs/, however its path is written; return any other path as it is."""
    file, colon, degrees = name_or_path.partition(":")
    path = Path(file)
    is_ours = path.suffix == ".json" and path.absolute().parent == DS_CONFIGS
    return f"{path.stem}{colon}{degrees}" if is_ours else name_or_path


def zero_stage(config: dict | None) -> int:
    """Return 0 (nothing is sharded), 1 (optimizer states), 2 (and gradients) or 3 (and parameters)."""
    return config["zero_optimization"]["stage"] if config else 0


def optimizer_device(config: dict | None) -> str:
    """Return where master weights and moments live: "gpu", "cpu" or "nvme"."""
    return _device(config, "offload_optimizer")


def parameter_device(config: dict | None) -> str:
    """Return where the partitioned parameters live between uses: "gpu", "cpu" or "nvme"."""
    return _device(config, "offload_param")


def _device(config: dict | None, block: str) -> str:
    device = value_at(config, f"zero_optimization.{block}.device")
    # DeepSpeed writes "none" for states that stay on the GPU
    return "gpu" if device in (None, "none") else device


def _with_degree(config: dict, text: str) -> dict:
    """Set a degree as `sequence=4` gives it, or the type of reductions."""
    name, _, value = text.partition("=")
    if name == REDUCE:
        return {**config, "communication_data_type": value}  # the schema knows which there are
    if name not in DEGREES:
        known = f"there are {', '.join(DEGREES)}, as in zero3:sequence=4, and {REDUCE}=fp32"
        near = nearest(name, (*DEGREES, REDUCE))
        raise UserError(f"deepspeed: {text}: there is no degree {name!r}{near}; {known}")
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"deepspeed: {text}: {value!r} is no number of ranks; write {name}=2")
    *blocks, key = DEGREES[name].split(".")
    values = config = dict(config)
    for block in blocks:
        inner = values.get(block) or {}
        if not isinstance(inner, dict):
            return config  # the check of the whole file says what is wrong
        values[block] = dict(inner)
        values = values[block]
    values[key] = int(value)
    if name == "expert":
        values["enabled"] = int(value) > 1
    return config


def _owned_elsewhere(config: dict, schema: dict) -> Wrong:
    """No key that DeepSpeed dropped, or that the recipe owns; "auto" for each that the recipe decides."""
    zero, of_zero = config.get("zero_optimization"), schema["properties"]["zero_optimization"]
    places = (config, schema["removed"], ""), (zero, of_zero["removed"], "zero_optimization.")
    for values, removed, prefix in places:
        # a block of another type is left to the schema
        for key in values if isinstance(values, dict) else ():
            if key in removed:
                yield prefix + key, f"removed from DeepSpeed: {removed[key]}"
    for key in config:
        if key in DS_CONFIG_KEYS:
            yield key, f"does not belong here: {DS_CONFIG_KEYS[key]}"
    blocks = ("bf16", "fp16") if "fp16" in config else ("bf16",)
    fixed = [(config, key, key, "auto", BY_RECIPE) for key in SHARED_KEYS]
    fixed += [(config.get(block), "enabled", f"{block}.enabled", "auto", BY_RECIPE) for block in blocks]
    key, lost = "grad_accum_dtype", "sums of bf16 gradients lose their small terms"
    fixed.append((config.get("data_types"), key, f"data_types.{key}", "fp32", lost))
    for values, key, dotted, wanted, why in fixed:
        # A key that is left out would not do: DeepSpeed would take its own default.
        given = values.get(key) if isinstance(values, dict) else None
        if given != wanted:
            shown = "is missing" if given is None else f"is {json.dumps(given)}"
            yield dotted, f'{shown}; it must be "{wanted}": {why}'
    fp16 = config.get("fp16")
    scale = fp16.get("loss_scale") if isinstance(fp16, dict) else None
    if isinstance(scale, int | float) and scale and scale <= 1:
        what = f"is {scale:g}, which scales nothing: small gradients vanish in fp16; write 0, which finds the scale"
        yield "fp16.loss_scale", what


def _unsupported(config: dict) -> Wrong:
    """What DeepSpeed would ignore, would refuse only after everything is built, or would do against a promise."""
    zero, key = config["zero_optimization"], "zero_optimization"
    stage = zero["stage"]
    weights, optimizer = (zero.get(block) or {} for block in ("offload_param", "offload_optimizer"))
    if weights.get("device", "none") != "none" and stage != 3:
        yield f"{key}.offload_param", f"needs stage 3, the stage is {stage}"
    if optimizer.get("device", "none") != "none" and stage == 0:
        yield f"{key}.offload_optimizer", "needs stage 1, 2 or 3, the stage is 0"
    if optimizer.get("device") == "nvme" and stage < 3:
        yield (
            f"{key}.offload_optimizer.device",
            f"is nvme, which needs stage 3; the stage is {stage}: write cpu",
        )
    at_stage_3 = {
        "zero_hpz_partition_size": zero.get("zero_hpz_partition_size", 1) > 1,
        "zero_quantized_weights": zero.get("zero_quantized_weights"),
        "zero_quantized_gradients": zero.get("zero_quantized_gradients"),
    }
    for name, is_set in at_stage_3.items():
        if is_set and stage != 3:
            yield f"{key}.{name}", f"needs stage 3, the stage is {stage}"
    if stage in (2, 3) and config.get("prescale_gradients") and zero.get("reduce_scatter", True):
        what = f"is true, which ZeRO-{stage} refuses beside {key}.reduce_scatter; leave it out"
        yield "prescale_gradients", what
    if stage in (1, 2) and zero.get("allgather_bucket_size", 0) % 2:
        yield (
            f"{key}.allgather_bucket_size",
            "is odd, and messages are cut at even places; write an even number",
        )
    if zero.get("sub_group_size") == 0:
        yield f"{key}.sub_group_size", "is 0; write the elements of a sub-group, or leave it out"
    for block, values in (("offload_param", weights), ("offload_optimizer", optimizer)):
        if values.get("device") == "nvme" and not values.get("nvme_path"):
            yield f"{key}.{block}.nvme_path", "is missing; device is nvme"
    for dotted, (supported, why) in SUPPORTED_VALUES.items():
        value = value_at(config, dotted)
        if value is not None and value not in supported:
            # a block (zenflow) is too long for one line
            shown = "set" if isinstance(value, dict) else json.dumps(value)
            yield dotted, f"is {shown}, which is not supported: {why}; leave it out"
    if config.get("communication_data_type") == "fp32" and zero.get("zero_quantized_gradients"):
        what = "sends 4 bits, and communication_data_type is fp32; leave one out"
        yield f"{key}.zero_quantized_gradients", what
    if (factor := config.get("gradient_predivide_factor", 1.0)) != 1 and stage:
        what = f"is {factor:g}, and ZeRO-{stage} scatters gradients undivided; leave it out, or take stage 0"
        yield "gradient_predivide_factor", what
