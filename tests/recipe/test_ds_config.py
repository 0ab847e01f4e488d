"""ds_configs say only how to shard, and every key of them is one that the installed DeepSpeed reads."""

import json

import pytest

from pretraining.ds_config import (
    DEGREES,
    Degrees,
    degrees_of,
    ds_config_names,
    load_ds_config,
    optimizer_device,
    parameter_device,
    zero_stage,
)
from tests.gear.finished_data import refusal

NAMES = ds_config_names()
STAGES = {
    "zero0": (0, "gpu", "gpu"),
    "zero1": (1, "gpu", "gpu"),
    "zero2": (2, "gpu", "gpu"),
    "zero3": (3, "gpu", "gpu"),
    "zero2_fp16": (2, "gpu", "gpu"),
    "zero2_offload": (2, "cpu", "gpu"),
    "zero3_offload": (3, "cpu", "gpu"),
    "zero3_nvme": (3, "nvme", "nvme"),
    "zero3_hpz": (3, "gpu", "gpu"),
    "zero3_sp4": (3, "gpu", "gpu"),
    "zero2_ep2": (2, "gpu", "gpu"),
    "zero1_tp2": (1, "gpu", "gpu"),
}


def failing(tmp_path, change: str) -> str:
    """The message that loading zero3 gives after this change: `block.key=JSON`, or `-key` for one that goes."""
    config = load_ds_config("zero3")
    dotted, _, value = change.removeprefix("-").partition("=")
    *blocks, key = dotted.split(".")
    place = config
    for block in blocks:
        place = place.setdefault(block, {})
    if change.startswith("-"):
        del place[key]
    else:
        place[key] = json.loads(value)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(config))
    message = refusal(load_ds_config, str(path))
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize("name", sorted({*NAMES, *STAGES}))
def test_stage_and_offload_are_what_the_name_says(name):
    config = load_ds_config(name)
    assert (zero_stage(config), optimizer_device(config), parameter_device(config)) == STAGES[name]
    assert (zero_stage(None), optimizer_device(None)) == (0, "gpu")


@pytest.mark.parametrize("name", NAMES)
def test_files_are_equal_outside_zero_optimization(name):
    """The curve belongs to the recipe: a ds_config cannot change anything but the sharding and the layout."""
    config, reference = load_ds_config(name), load_ds_config("zero0")
    del config["zero_optimization"], reference["zero_optimization"]
    reads_a_drive = config.pop("aio", None) is not None
    scales_the_loss = config.pop("fp16", None) is not None  # it is read if the recipe asks for fp16
    blocks = [dotted.partition(".")[0] for dotted in DEGREES.values()]
    degrees = {key: config.pop(key) for key in blocks if key in config}
    assert bool(degrees) == (degrees_of(load_ds_config(name)) != Degrees())
    assert config == reference and reads_a_drive == ("nvme" in name) and scales_the_loss == ("fp16" in name)


@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_itself_reads_every_file(name):
    """Validated by DeepSpeed's own models, with the shared values filled in as the Trainer does."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = load_ds_config(name)
    assert int(DeepSpeedZeroConfig(**config["zero_optimization"]).stage) == zero_stage(config)
    filled = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
    config |= {**filled, "gradient_clipping": 1.0, "bf16": {"enabled": True}}
    read = DeepSpeedConfig(config)
    assert read.grad_accum_dtype == "fp32"
    assert read.zero_config.stage == zero_stage(config)


def test_an_unknown_name_lists_those_there_are():
    said = refusal(load_ds_config, "zero4")
    assert "no such ds_config; did you mean 'zero" in said and all(name in said for name in NAMES)


def test_a_degree_for_a_block_that_is_none_is_refused(tmp_path):
    """Bad input: `:sequence=2` and its like are set in blocks, which a file may hold as another type."""
    path = tmp_path / "changed.json"
    path.write_text(json.dumps({**load_ds_config("zero3"), "tensor_parallel": 2}))
    assert "tensor_parallel: is 2 where an object is wanted" in refusal(load_ds_config, f"{path}:tensor=2")


WRONG = """
gradient_cliping=1
    gradient_cliping: unknown key; did you mean
zero_optimization.overlap_com=true
    zero_optimization.overlap_com: unknown key; did you mean 'zero_optimization.overlap_comm'?
stage=3
    stage: unknown key; did you mean 'zero_optimization.stage'?
zero_optimization.offload_optimizer={"devise": "cpu"}
    devise: unknown key; did you mean 'zero_optimization.offload_optimizer.device'?
bf16.enable=true
    bf16.enable: unknown key; did you mean 'bf16.enabled'?
elasticity={"enabled": false}
    elasticity: removed from DeepSpeed: Elastic
zero_optimization.mics_shard_size=8
    zero_optimization.mics_shard_size: removed from DeepSpeed: MiCS
zero_optimization.cpu_offload=true
    write offload_optimizer
optimizer={"type": "AdamW"}
    weight decay on norms and biases
scheduler={"type": "WarmupLR"}
    training section owns the schedule
wandb={"enabled": true}
    training.report_to
train_batch_size=8
    train_batch_size: is 8; it must be "auto"
-gradient_clipping
    gradient_clipping: is missing; it must be "auto"
train_micro_batch_size_per_gpu=1
    it must be "auto"
gradient_accumulation_steps=1
    it must be "auto"
bf16.enabled=true
    bf16.enabled: is true; it must be "auto"
-bf16
    bf16.enabled: is missing; it must be "auto"
fp16={"enabled": true}
    fp16.enabled: is true; it must be "auto"
bf16.bf16_master_weights_and_grads=true
    bf16.bf16_master_weights_and_grads: is true, which is not supported: checkpoints, plans and the curve
zero_optimization.compute_grad_norm=false
    zero_optimization.compute_grad_norm: is false, which is not supported
zero_optimization.zenflow={}
    zero_optimization.zenflow: is set, which is not supported
zero_optimization.stage3_module_granularity_threshold=1000
    stage3_module_granularity_threshold: is 1000, which is not supported
communication_data_type="auto"
    communication_data_type: is the string "auto", not one of
gradient_predivide_factor=2.0
    gradient_predivide_factor: is 2, and ZeRO-
log_level="x"
    log_level: is the string
torch_autocast={"enabled": true}
    training.bf16 decides the precision
zero_optimization.reduce_bucket_size=1000000000000000000000000000000
    reduce_bucket_size: is 1000000000000000000000000000000; it must be at most
fp16={"enabled": "auto", "loss_scale": 0.5}
    fp16.loss_scale: is 0.5, which scales nothing
data_types={"grad_accum_dtype": "bf16"}
    it must be "fp32"
-data_types
    data_types.grad_accum_dtype: is missing
zero_optimization.stage=4
    zero_optimization.stage: is 4, not one of 0, 1, 2, 3
zero_optimization.stage="3"
    zero_optimization.stage: is the string
zero_optimization.sub_group_size="1000"
    write 1000 without quotes
-zero_optimization
    zero_optimization: is missing
zero_optimization.offload_param={"device": "nvme"}
    zero_optimization.offload_param.nvme_path: is missing
zero_optimization={"stage": 2, "offload_param": {"device": "cpu"}}
    zero_optimization.offload_param: needs stage 3
zero_optimization={"stage": 2, "zero_hpz_partition_size": 8}
    zero_optimization.zero_hpz_partition_size: needs stage 3
zero_optimization={"stage": 0, "offload_optimizer": {"device": "cpu"}}
    zero_optimization.offload_optimizer: needs stage 1, 2 or 3
zero_optimization={"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}}
    zero_optimization.offload_optimizer.device: is nvme, which needs stage 3
zero_optimization={"stage": 2, "zero_quantized_gradients": true}
    zero_optimization.zero_quantized_gradients: needs stage 3
zero_optimization.offload_optimizer={"device": "cpu", "ratio": 0.5}
    offload_optimizer.ratio: is 0.5, which is not supported: what stays on the GPU is stepped by a second optimizer
zero_optimization.leaf_module={"classes": ["LlamaModel"]}
    leaf_module: is set, which is not supported: gradients are lost
zero_optimization.elastic_checkpoint=true
    elastic_checkpoint: is true, which is not supported: checkpoints are the project's own
zero_optimization.allgather_partitions=false
    allgather_partitions: is false, which is not supported
zero_optimization.sub_group_size=0
    zero_optimization.sub_group_size: is 0
zero_optimization={"stage": 2, "allgather_bucket_size": 3001}
    zero_optimization.allgather_bucket_size: is odd
prescale_gradients=true
    prescale_gradients: is true, which ZeRO-3 refuses
bf16={"enabled": "auto", "check_grad_overflow": false}
    bf16.check_grad_overflow: is false, which is not supported
fp16={"enabled": "auto", "fp16_master_weights_and_grads": true}
    fp16.fp16_master_weights_and_grads: is true, which is not supported
data_types={"grad_accum_dtype": "fp32", "buffer_dtype": "bf16"}
    data_types.buffer_dtype: is "bf16", which is not supported
data_types={"grad_accum_dtype": "fp32", "param_dtype": "bf16"}
    data_types.param_dtype: is "bf16", which is not supported: the recipe decides it
activation_checkpointing={"cpu_checkpointing": true}
    activation_checkpointing: does not belong here: the recipe's training.activation_checkpointing
checkpoint={"load_universal": true}
    checkpoint: does not belong here
seq_parallel_communication_data_type="fp32"
    seq_parallel_communication_data_type: does not belong here
""".strip().splitlines()
"""A change of zero3, and below it what is said."""


@pytest.mark.parametrize("change, message", list(zip(WRONG[::2], WRONG[1::2], strict=True)))
def test_each_wrong_key_or_value_is_named(change, message, tmp_path):
    """A key nobody reads, or a value the recipe owns, is an error that names it."""
    assert message.strip() in failing(tmp_path, change)


def test_every_key_that_deepspeed_removed_is_called_removed(tmp_path):
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS

    for key in _REMOVED_TOP_LEVEL_CONFIG_KEYS:
        assert f"{key}: removed" in failing(tmp_path, f"{key}={{}}")
    for key in _REMOVED_ZERO_CONFIG_KEYS:
        assert f"{key}: removed" in failing(tmp_path, f"zero_optimization.{key}=1")
