"""The ds_config schema from the installed DeepSpeed: its pydantic models, defaults and removed keys."""

import typing

from schema_generator.from_types import described, first_sentence, object_schema, type_schema

from pretraining.ds_config import DS_CONFIG_KEYS, SHARED_KEYS
from pretraining.recipe.section import JSON_TYPES, texts_beneath

# The three keys that the Trainer fills from the hidden size when they say "auto".
AUTO_KEYS = {"reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"}

# Top-level values that DeepSpeed reads without a block around them, with their defaults.
TOP_LEVEL_VALUES = {
    "communication_data_type": None,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "zero_allow_untested_optimizer": False,
    "zero_force_ds_cpu_optimizer": True,
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "dump_state": False,
    "disable_python_gc": False,
    "log_level": None,
}
LARGEST_BUCKET = 2**33
"""Elements: more of them fit no GPU."""


def pydantic_schema(model_class: type) -> dict:
    """The schema of a DeepSpeed configuration model; its deprecated keys are listed under `removed`."""
    documented = texts_beneath(model_class)
    properties, removed = {}, {}
    for name, field in model_class.model_fields.items():
        key, extra = field.alias or name, field.json_schema_extra or {}
        if extra.get("deprecated"):
            removed[key] = f"is deprecated; write {extra['new_param']}"
            continue
        schema = field_schema(field)
        if key.endswith("bucket_size"):
            schema = {**schema, "minimum": 1, "maximum": LARGEST_BUCKET}
        if key in AUTO_KEYS:
            schema = {"anyOf": [{"const": "auto"}, schema]}
        properties[key] = described(schema, first_sentence(documented.get(name)), field.default)
    schema = object_schema(properties)
    return {**schema, "removed": removed} if removed else schema


def field_schema(field) -> dict:
    """A pydantic field's type with its bounds."""
    nested = [part for part in typing.get_args(field.annotation) if hasattr(part, "model_fields")]
    nested += [field.annotation] if hasattr(field.annotation, "model_fields") else []
    if nested:
        schema = pydantic_schema(nested[0])
        return {**schema, "type": ["object", "null"]} if field.default is None else schema
    schema = type_schema(field.annotation)
    names = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    for bound in field.metadata:
        schema |= {word: getattr(bound, short) for short, word in names.items() if hasattr(bound, short)}
    return schema


def block_schema(defaults: dict, **types_of_none: str) -> dict:
    """The schema of a DeepSpeed block that has no pydantic model, from its default values."""
    properties = {}
    for key, default in defaults.items():
        names = [types_of_none[key], "null"] if default is None else JSON_TYPES[type(default)]
        properties[key] = {"type": names, "default": default}
    return object_schema(properties)


def precision_schema(model_class: type) -> dict:
    """bf16 or fp16: whether it is on is the recipe's to say."""
    schema = pydantic_schema(model_class)
    description = "Always auto: training.bf16 and training.fp16 of the recipe decide."
    schema["properties"]["enabled"] = {"const": "auto", "description": description}
    return {**schema, "required": ["enabled"]}


def degree_schema(description: str) -> dict:
    return {"type": "integer", "minimum": 1, "default": 1, "description": description}


def ds_config_blocks() -> dict:
    """The blocks of a DeepSpeed configuration that make sense below the Trainer."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.profiling import constants as profiler
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    dtype, off = {"enum": ["fp32", "bf16", "fp16", None]}, {"type": "boolean", "default": False}
    dtypes = {"grad_accum_dtype": {"const": "fp32"}, "param_dtype": dtype, "buffer_dtype": dtype}
    names = ("enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed")
    profiled = {name: getattr(profiler, f"FLOPS_PROFILER_{name.upper()}_DEFAULT") for name in names}
    # AutoTP: its size, and the rules for layers of a model that it does not know
    split = "Ranks that split each layer's matrices, embedding and head; they are neighbours."
    rules = {"type": ["object", "null"], "default": None}
    tensor = {"autotp_size": degree_schema(split), "tp_overlap_comm": off, "partition_config": rules}
    # AutoEP: its size. The model's own experts compute.
    size = degree_schema("Ranks that split the experts of each mixture layer.")
    return {
        "zero_optimization": {**pydantic_schema(DeepSpeedZeroConfig), "required": ["stage"]},
        "bf16": precision_schema(DeepSpeedBF16Config),
        "fp16": precision_schema(DeepSpeedFP16Config),
        "data_types": object_schema(dtypes),
        "aio": block_schema(AIO_DEFAULT_DICT),
        "comms_logger": pydantic_schema(CommsLoggerConfig),
        "flops_profiler": block_schema({**profiled, "output_file": None}, output_file="string"),
        "tensor_parallel": object_schema(tensor, ["autotp_size"]),
        "expert_parallel": object_schema({"enabled": off, "autoep_size": size}, ["enabled", "autoep_size"]),
    }


def ds_config_schema() -> dict:
    """The whole schema of a file in ds_configs/, with what the installed DeepSpeed refuses to read."""
    from deepspeed.runtime import config
    from deepspeed.utils.logging import log_levels

    shared = {
        key: {"const": "auto", "description": f"Always auto: {why}."} for key, why in SHARED_KEYS.items()
    }
    of_none = {"communication_data_type": "string", "log_level": "string"}
    values = block_schema(TOP_LEVEL_VALUES, **of_none)["properties"]
    values["communication_data_type"] = {"enum": ["fp32", "bf16", "fp16", None], "default": None}
    values["log_level"] = {"enum": [*log_levels, None], "default": None}
    values["gradient_predivide_factor"]["exclusiveMinimum"] = 0
    values["sequence_parallel_size"] = degree_schema("Ranks that split each sequence (Ulysses).")
    properties = {"$schema": {"type": "string"}, **shared, **ds_config_blocks(), **values}
    owned = sorted(set(properties) & set(DS_CONFIG_KEYS))
    if owned:
        raise SystemExit(f"keys both allowed and owned elsewhere: {owned}")
    removed, removed_zero = (
        {key: first_sentence(text) for key, text in keys.items()}
        for keys in (config._REMOVED_TOP_LEVEL_CONFIG_KEYS, config._REMOVED_ZERO_CONFIG_KEYS)
    )
    zero = properties["zero_optimization"]
    zero["removed"] = {**zero.get("removed", {}), **removed_zero}
    title = "How to shard: a DeepSpeed configuration"
    required = [*SHARED_KEYS, "zero_optimization", "bf16", "data_types"]
    return {"title": title, **object_schema(properties, required), "removed": removed}
