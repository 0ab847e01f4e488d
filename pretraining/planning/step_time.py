"""Seconds of one optimizer step of a recipe: its products, its messages, and what offloading moves."""

from dataclasses import replace

from pretraining.ds_config import optimizer_device, parameter_device, zero_stage
from pretraining.planning.constants import table
from pretraining.planning.gpus import Gpu
from pretraining.planning.memory.need import recomputed_one_in, recomputed_share
from pretraining.planning.memory.precision import precision_of
from pretraining.planning.roofline import ceiling, recipe_utilization
from pretraining.planning.sizes import model_size
from pretraining.planning.throughput import StepTime, predicted_step_seconds
from pretraining.recipe import Recipe, accumulation_steps
from pretraining.refusals import compiled_part

ADAM_BYTES = 28
"""Moved by the CPU optimizer for one element: fp32 gradient, master and moments read, the last three written."""


def precision_of_products(recipe: Recipe) -> str:
    """bf16, fp16, tf32 or fp32, as the recipe's `training` says."""
    return next((name for name in ("bf16", "fp16", "tf32") if recipe.training.get(name)), "fp32")


def step_time(
    recipe: Recipe,
    ds_config: dict | None,
    world_size: int,
    gpu: Gpu,
    mfu: float | None = None,
    precision: str | None = None,
) -> StepTime:
    """The step of a recipe on `world_size` GPUs.

    Args:
        mfu: share of the dense peak without recomputation; None for the expected one.
        precision: of the products; None for the recipe's.

    Raises:
        UserError: the ranks do not divide the recipe's step, or the GPU lacks the precision.
    """
    accumulation = accumulation_steps(recipe, world_size)
    precision = precision or precision_of_products(recipe)
    used = None
    if not mfu:
        at_best = ceiling(recipe, ds_config, world_size, gpu, precision)
        used = recipe_utilization(recipe, gpu, at_best)
    time = predicted_step_seconds(
        model_size(recipe.model),
        recipe.sequence_length,
        recipe.tokens_per_step,
        world_size,
        gpu,
        stage=zero_stage(ds_config),
        accumulation=accumulation,
        mfu=used.mfu if used else mfu,
        precision=precision,
        recomputed=recomputed_share(recomputed_one_in(recipe)),
        width=precision_of(recipe, ds_config).weights,
        hpz=(ds_config or {}).get("zero_optimization", {}).get("zero_hpz_partition_size", 1),
    )
    if used and used.assumed:
        time = replace(time, compute_seconds=accumulation * sum(at_best.seconds.values()))
    return replace(
        time,
        offload_seconds=_offload_seconds(recipe, ds_config, world_size, accumulation, gpu),
        launch_seconds=_launch_seconds(recipe, ds_config, accumulation),
    )


def _launch_seconds(recipe: Recipe, ds_config: dict | None, accumulation: int) -> float:
    """Of all micro-batches of a rank; not known of compiled models, which launch fewer kernels."""
    if compiled_part(recipe, ds_config) != "none":
        return 0.0
    layers = model_size(recipe.model).num_layers
    return accumulation * layers * table("rates")["launch_seconds_per_layer"]["value"]


def _offload_seconds(
    recipe: Recipe, config: dict | None, world_size: int, accumulation: int, gpu: Gpu
) -> float:
    """Gradients to the host once a micro-batch, weights back once a step, the CPU's optimizer, NVMe both ways.

    Nothing overlapped; rates are tables/memory.json's and the GPU's PCIe (ZeRO-Offload, Ren et al. 2021, section 4).
    """
    rates, share = table("memory"), model_size(recipe.model).total / world_size
    in_node = min(world_size, gpu.gpus_per_node)
    seconds = 0.0
    if optimizer_device(config) != "gpu":
        seconds += 2 * share * (accumulation + 1) / gpu.pcie_bytes_per_second
        seconds += ADAM_BYTES * share * in_node / rates["host_bandwidth_bytes_per_second"]["value"]
    if optimizer_device(config) == "nvme":
        seconds += 2 * 12 * share * in_node / rates["nvme_bytes_per_second"]["value"]
    if parameter_device(config) == "nvme":
        seconds += 2 * 2 * share * in_node * accumulation / rates["nvme_bytes_per_second"]["value"]
    elif parameter_device(config) == "cpu":
        seconds += 2 * 2 * share * accumulation / gpu.pcie_bytes_per_second
    return seconds
