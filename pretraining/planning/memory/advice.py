"""What makes the largest part of a run's memory smaller, given what the run does already."""

from pretraining.ds_config import optimizer_device, zero_stage
from pretraining.planning.memory.need import MemoryNeed, recomputed_one_in
from pretraining.recipe import Recipe

SMALLER_BATCH = "a smaller micro-batch (--set training.per_device_train_batch_size={})"
FIXED = {
    "reduce buckets": "a smaller reduce_bucket_size in the ds_config",
    "gathered weights": "a smaller stage3_max_reuse_distance in the ds_config",
    "copies for the step": "more GPUs",
}
SHARDED_FROM = {"weights": 3, "gradients": 2, "gradient sums": 2, "fp32 masters": 1}
"""The ZeRO stage from which on the ranks share a part; the optimizer's states from 1 on."""


def shrink(need: MemoryNeed, recipe: Recipe, ds_config: dict | None) -> str:
    """What would shrink the largest part; what is on already is not offered again."""
    part = need.largest
    if part in FIXED:
        return FIXED[part]
    if part in SHARDED_FROM or part == need.optimizer_states:
        return _state(SHARDED_FROM.get(part, 1), part, need, ds_config)
    if part == "activations" and not recomputed_one_in(recipe):
        return "--set training.activation_checkpointing=true, or a smaller micro-batch"
    if recipe.micro_batch > 1:
        return SMALLER_BATCH.format(recipe.micro_batch // 2)
    return (
        "a shorter data.sequence_length"
        if part == "activations"
        else "a smaller vocabulary or sequence length"
    )


def _state(stage: int, part: str, need: MemoryNeed, ds_config: dict | None) -> str:
    if need.num_gpus > 1 and zero_stage(ds_config) < stage:
        return f"the GPUs share it from --deepspeed zero{stage} on"
    offloads = optimizer_device(ds_config) != "gpu"
    away = "" if offloads or part == "weights" else ", or host memory takes it: --deepspeed zero3_offload"
    return (
        f"more GPUs{away}"
        if zero_stage(ds_config) >= stage
        else f"more GPUs and --deepspeed zero{stage}{away}"
    )
