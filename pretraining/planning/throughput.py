"""Seconds of one optimizer step: its products, its messages, and what offloading moves."""

from dataclasses import dataclass

from pretraining.ds_config import optimizer_device, parameter_device
from pretraining.planning.constants import table
from pretraining.planning.gpus import Gpu
from pretraining.planning.memory.need import recomputed_one_in, recomputed_share
from pretraining.planning.messages import (
    GRADIENTS,
    LAYER_MESSAGES,
    step_messages,
    stops_for_gradients,
)
from pretraining.planning.roofline import ceiling, recipe_utilization, tokens_per_second
from pretraining.planning.sizes import flops_per_token, model_size, size_of_recipe
from pretraining.recipe import Recipe, accumulation_steps
from pretraining.recipe.refusals import compiled_part

# read: gradient, master and two moments; written: master and moments
ADAM_BYTES = 28
"""Bytes that the CPU optimizer moves for one element: it reads four fp32 numbers and writes three of them."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, and what decides them."""

    compute_seconds: float
    """The FLOPs of the step at the utilization, recomputed ones included."""
    communication_seconds: float
    """The step's bytes at the peak of the slowest link on their way: a lower bound."""
    offload_seconds: float = 0.0
    """Seconds of transfers to the host and NVMe, and of the host's optimizer; they come after the products."""
    waiting_seconds: float = 0.0
    """Part of `compute_seconds` in which passes wait for messages: of split layers, sequences and experts, and the
    gradients of ZeRO-2."""
    launch_seconds: float = 0.0
    """Seconds that Python needs to launch the step's kernels; the GPU waits for it if the model is small."""

    @property
    def seconds(self) -> float:
        """Return the seconds of the step: the longest of the other parts, and offload after it."""
        # not their sum: a utilization already includes what could not be hidden
        at_once = max(self.compute_seconds, self.communication_seconds, self.launch_seconds)
        return at_once + self.offload_seconds

    @property
    def bound_by(self) -> str:
        """Return the longest part, which is what to improve first."""
        parts = {
            "compute": self.compute_seconds - self.waiting_seconds,
            "links": max(self.communication_seconds, self.waiting_seconds),
            "offload": self.offload_seconds,
            "kernel launches": self.launch_seconds,
        }
        return max(parts, key=parts.get)


def step_time(
    recipe: Recipe,
    ds_config: dict | None,
    world_size: int,
    gpu: Gpu,
    mfu: float | None = None,
    precision: str | None = None,
) -> StepTime:
    """Return the step of a recipe on `world_size` GPUs.

    Args:
        mfu: share of the dense peak without recomputation; None for the expected one.
        precision: that of the products; None for the recipe's.

    Raises:
        UserError: the ranks do not divide the recipe's step, or the GPU lacks the precision.
    """
    accumulation = accumulation_steps(recipe, world_size, ds_config)
    precision = precision or precision_of_products(recipe)
    used = None
    if not mfu:
        at_best = ceiling(recipe, ds_config, world_size, gpu, precision)
        used = recipe_utilization(recipe, gpu, at_best)
    counted = flops_per_token(size_of_recipe(recipe), recipe.sequence_length)
    # the kernels of recomputed layers run as fast, on more FLOPs; only products and attention are FLOPs that count
    again = 0.0 if recipe.speed.recompute == "operators" else recomputed_share(recomputed_one_in(recipe))
    flops, peak = counted.training + again * counted.recomputed, gpu.peak_flops(precision)
    rate = tokens_per_second(flops, world_size, peak, used.mfu if used else mfu)
    compute, waiting = recipe.tokens_per_step / rate, 0.0
    # a compiled model launches fewer kernels; how many is not known
    launches = 0
    if compiled_part(recipe, ds_config) == "none":
        launches = accumulation * model_size(recipe.model).num_layers
    sent = step_messages(recipe, ds_config, world_size, gpu)
    alone = {*LAYER_MESSAGES, *([GRADIENTS] if stops_for_gradients(ds_config) else [])}
    if used and used.assumed:
        # the seconds of every kernel are counted: no need to derive them from FLOPs and an MFU
        kernels = sum(seconds for name, seconds in at_best.seconds.items() if name not in LAYER_MESSAGES)
        waiting = sum(message.seconds for message in sent if message.name in alone)
        compute = accumulation * kernels + waiting
    return StepTime(
        compute_seconds=compute,
        communication_seconds=sum(message.seconds for message in sent if message.name not in LAYER_MESSAGES),
        offload_seconds=_offload_seconds(recipe, ds_config, world_size, accumulation, gpu),
        waiting_seconds=waiting,
        launch_seconds=launches * table("rates")["launch_seconds_per_layer"]["value"],
    )


def precision_of_products(recipe: Recipe) -> str:
    """Return bf16, fp16, tf32 or fp32, as the recipe's `training` says."""
    # tf32 last: it concerns the products of fp32 alone
    return next((name for name in ("bf16", "fp16", "tf32") if recipe.training.get(name)), "fp32")


def scaling_over_nodes(gpu: Gpu, num_gpus: int, utilization_is_assumed: bool = True) -> dict | None:
    """Return {"nodes", "assumption"} for GPUs in more than one node; None if one node holds all.

    The tables hold no measured loss between nodes. The links' peaks only give a lower bound of the time.
    """
    nodes = -(-num_gpus // gpu.gpus_per_node)
    if nodes == 1:
        return None
    words = "perfect scaling is assumed: each GPU is as fast as in one node"
    if utilization_is_assumed:
        rate = f"{gpu.network_bytes_per_second / 1e9:g} GB/s a GPU"
        words += f", unless a step's messages at the network's peak ({rate}) take longer than its products"
    return {"nodes": nodes, "assumption": f"{words}; latency, congestion and slow nodes are not counted"}


def _offload_seconds(
    recipe: Recipe, config: dict | None, world_size: int, accumulation: int, gpu: Gpu
) -> float:
    """Return the seconds of transfers and of the CPU's optimizer, nothing overlapped.

    The rates are those of tables/memory.json and of the GPU's PCIe (ZeRO-Offload, Ren et al. 2021, section 4).
    """
    rates, share = table("memory"), model_size(recipe.model).total / world_size
    in_node = min(world_size, gpu.gpus_per_node)
    seconds = 0.0
    if optimizer_device(config) != "gpu":
        # 16-bit gradients go to the host once a micro-batch, 16-bit weights return once a step
        seconds += 2 * share * (accumulation + 1) / gpu.pcie_bytes_per_second
        # ranks of a node share its memory's bandwidth
        seconds += ADAM_BYTES * share * in_node / rates["host_bandwidth_bytes_per_second"]["value"]
    if optimizer_device(config) == "nvme":
        # fp32 masters and moments: 12 bytes an element, read and written
        seconds += 2 * 12 * share * in_node / rates["nvme_bytes_per_second"]["value"]
    if parameter_device(config) == "nvme":
        # 16-bit weights, read for the forward and again for the backward pass
        seconds += 2 * 2 * share * in_node * accumulation / rates["nvme_bytes_per_second"]["value"]
    elif parameter_device(config) == "cpu":
        # PCIe's rate is per GPU (`gpus.Gpu`), so that the ranks of a node do not share it
        seconds += 2 * 2 * share * accumulation / gpu.pcie_bytes_per_second
    return seconds
