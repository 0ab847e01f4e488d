"""Bytes that ZeRO needs beside the model states in a pass or a step: buckets, gathered weights, flat copies."""

from collections.abc import Sequence
from dataclasses import dataclass

from pretraining.ds_config import optimizer_device, zero_stage
from pretraining.planning.memory.split import Family, held_tensors, wide_of
from pretraining.planning.memory.tensors import FP32, Tensor, layer_numel, precision_of
from pretraining.recipe import Recipe, accumulation_steps
from pretraining.recipe.model import value_of
from pretraining.recipe.refusals import gathers_blocks

REDUCE_BUCKET = 500_000_000
MAX_REUSE_DISTANCE = 1_000_000_000
PREFETCH_BUCKET = 50_000_000
MAX_LIVE_PARAMETERS = 1_000_000_000
SUB_GROUP = 1_000_000_000
"""Elements: DeepSpeed 0.19.8's defaults (runtime/zero/config.py)."""


@dataclass(frozen=True)
class Buffers:
    """Bytes on the GPU."""

    buckets: float
    """Gradients on their way to other ranks, during the backward pass."""
    gathered: float
    """At stage 3: whole weights that are in use, kept for reuse, or prefetched."""
    in_flight: float
    """Whole gradients that have not reached their bucket yet."""
    step: float
    """Copies of gradients that are made in the optimizer step."""


def buffers(recipe: Recipe, config: dict | None, world_size: int, of_rank: Sequence[Family]) -> Buffers:
    """Return buffers of the stage.

    of_rank: the parameters of one rank (`split.families`), of the size that it would hold without ZeRO.
    """
    if config is None:
        return Buffers(0, 0, 0, 0)
    stage, zero = zero_stage(config), config["zero_optimization"]
    precision, accumulation = precision_of(recipe, config), accumulation_steps(recipe, world_size, config)
    # the model's width decides what `"auto"` becomes (transformers 5.23, integrations/deepspeed.py)
    element, width = precision.weights, value_of(recipe.model, "hidden_size")
    tensors, total = held_tensors(of_rank), sum(family.trained_numel for family in of_rank)
    # elements that a rank steps
    share = sum(family.trained_numel / family.ranks for family in of_rank)
    wide = [tensor for family in of_rank for tensor in wide_of(family, recipe, config)]
    bucket = element * reduce_bucket(config, width)
    wider = (FP32 - element) * sum(tensor.numel for tensor in wide)
    if stage == 3:
        # a block's weights may be gathered as one, and its gradients reduced together
        as_one = gathers_blocks(recipe, config)
        return Buffers(
            buckets=bucket,
            gathered=element * _gathered(zero, tensors, width, as_one) + wider,
            # whole gradients: those of a block together, else one tensor at a time
            in_flight=max(
                element * layer_numel(tensors) * as_one,
                *((FP32 if tensor in wide else element) * tensor.numel for tensor in tensors),
            ),
            # stage 3 steps one sub-group after another; an offloaded optimizer copies in host memory
            step=0
            if optimizer_device(config) != "gpu"
            else FP32 * min(share, _elements(zero, "sub_group_size", SUB_GROUP, SUB_GROUP)),
        )
    # two buffers take turns if the backward pass goes on during a reduction (`setup_buckets`, stage_1_and_2.py)
    turns = 2 if zero.get("overlap_comm") else 1
    if stage == 2:
        # with accumulation, the fp32 sums of the rank's share are held beside its gradients
        in_flight = element * share + wider / world_size + (FP32 * share if accumulation > 1 else 0)
        # offloaded gradients leave the GPU one by one
        if optimizer_device(config) != "gpu":
            in_flight = element * max(tensor.numel for tensor in tensors)
        return Buffers(turns * bucket, 0, in_flight, FP32 * share)
    if stage == 1 and precision.name == "bf16":
        # BF16_Optimizer reduces its fp32 sums after the pass, cast to 16 bit (engine.py `allreduce_bucket`)
        return Buffers(0, 0, 0, element * total)
    # in fp32 and fp16 DeepSpeed uses the optimizer of stage 2 at stage 1 too, with whole gradients
    if stage == 1:
        return Buffers(turns * bucket, 0, 0, FP32 * share)
    # stage 0: DeepSpeed's engine flattens the gradients that it reduces, a bucket at a time
    return Buffers(0, 0, 0, element * min(total, REDUCE_BUCKET) if world_size > 1 else 0)


def reduce_bucket(config: dict, width: int) -> float:
    """Return how many elements of gradients are reduced together; width: the model's."""
    return _elements(config["zero_optimization"], "reduce_bucket_size", REDUCE_BUCKET, width**2)


def unprotected_gradient(
    config: dict | None, tensors: Sequence[Tensor], width: int, world_size: int
) -> Tensor | None:
    """Return the largest gradient that ZeRO-2 frees on a GPU while another stream may still read it.

    A gradient that is larger than the bucket is reduced in its own place. With `overlap_comm` this happens on a stream
    of its own. A rank that keeps no part of the gradient frees it at once, but does not notify the allocator about that
    stream. So the next kernel may write into it (deepspeed 0.19.8, zero/stage_1_and_2.py, `average_tensor`,
    `clear_grad_attribute`).
    """
    # with an offloaded optimizer DeepSpeed notifies the allocator; a single rank keeps all gradients
    if zero_stage(config) != 2 or optimizer_device(config) != "gpu" or world_size == 1:
        return None
    zero, largest = config["zero_optimization"], max(tensors, key=lambda tensor: tensor.numel)
    frees_at_once = zero.get("overlap_comm") and zero.get("contiguous_gradients", True)
    return largest if frees_at_once and largest.numel > reduce_bucket(config, width) else None


def optimizer_copies(
    config: dict | None, tensors: Sequence[Tensor], world_size: int, copied: str | None
) -> float:
    """Return the bytes of the fp32 copies that an optimizer's step makes of a rank's share of these tensors."""
    numel = sum(tensor.numel for tensor in tensors if tensor.kind == copied)
    # without ZeRO, and at stage 0, each rank steps all weights
    return FP32 * numel / (world_size if zero_stage(config) else 1)


def _gathered(zero: dict, tensors: Sequence[Tensor], width: int, as_one: bool) -> float:
    """Return the elements of whole weights that are held at a time.

    A weight stays gathered after its forward pass if it is used again within `stage3_max_reuse_distance` elements
    (zero/partitioned_param_coordinator.py). The layer at work and the prefetched weights come on top.
    """
    if as_one:
        zero = {**zero, **block_gathering(zero, layer_numel(tensors))}
    reuse = _elements(zero, "stage3_max_reuse_distance", MAX_REUSE_DISTANCE, MAX_REUSE_DISTANCE)
    prefetch = _elements(zero, "stage3_prefetch_bucket_size", PREFETCH_BUCKET, 0.9 * width**2)
    tables = max((tensor.numel for tensor in tensors if tensor.layer is None), default=0)
    at_work = max(layer_numel(tensors), tables)
    # a weight of the last half of that distance before the loss comes back within it, on the way back
    return min(sum(tensor.numel for tensor in tensors), reuse / 2 + at_work + prefetch)


def block_gathering(zero: dict, block_numel: int) -> dict:
    """Return the keys of `zero_optimization` for gathering ahead, if weights are gathered a block at a time.

    A number in the file stays; only `"auto"` is replaced.

    Args:
        block_numel: parameters of the largest block.
    """
    keys = {}
    if zero.get("stage3_prefetch_bucket_size", "auto") == "auto":
        # the next block is gathered while one computes; transformers' "auto" is only a share of a block,
        # so that the next one would wait for the rest
        keys["stage3_prefetch_bucket_size"] = block_numel
    if zero.get("stage3_max_live_parameters", "auto") == "auto":
        keys["stage3_max_live_parameters"] = max(MAX_LIVE_PARAMETERS, 3 * block_numel)
    return keys


def _elements(zero: dict, key: str, default: float, automatic: float) -> float:
    """Return a size of the ds_config in elements; `automatic` is what transformers writes for `"auto"`."""
    value = zero.get(key, default)
    return automatic if value == "auto" else value
