"""Seconds of one optimizer step: its products, its messages, and what offloading moves."""

from dataclasses import dataclass, replace

from pretraining.ds_config import optimizer_device, parameter_device, zero_stage
from pretraining.planning.constants import table
from pretraining.planning.gpus import Gpu, kept_rates
from pretraining.planning.memory.need import recomputed_one_in, recomputed_share
from pretraining.planning.memory.tensors import precision_of
from pretraining.planning.roofline import ceiling, expected_utilization, recipe_utilization, tokens_per_second
from pretraining.planning.sizes import ModelSize, flops_per_token, model_size
from pretraining.recipe import Recipe, accumulation_steps
from pretraining.refusals import compiled_part

ADAM_BYTES = 28
"""Moved by the CPU optimizer for one element: fp32 gradient, master and moments read, the last three written."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, and what decides them."""

    compute_seconds: float
    """The FLOPs of the step at the utilization, recomputed ones included."""
    communication_seconds: float
    """The step's bytes at the peak of the slowest link on their way: a lower bound."""
    offload_seconds: float = 0.0
    """Transfers to the host and NVMe, and the host's optimizer, behind the products."""
    launch_seconds: float = 0.0
    """What Python needs to launch the step's kernels: a small model's GPU waits for it."""

    @property
    def seconds(self) -> float:
        """Offload after the longest of the others: a utilization already holds what could not be hidden."""
        at_once = max(self.compute_seconds, self.communication_seconds, self.launch_seconds)
        return at_once + self.offload_seconds

    @property
    def bound_by(self) -> str:
        """What to improve first."""
        parts = {
            "compute": self.compute_seconds,
            "links": self.communication_seconds,
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
        hpz=hpz_ranks(ds_config),
    )
    if used and used.assumed:
        # the ceiling counted every kernel, so that it needs no FLOPs over an MFU
        time = replace(time, compute_seconds=accumulation * sum(at_best.seconds.values()))
    return replace(
        time,
        offload_seconds=_offload_seconds(recipe, ds_config, world_size, accumulation, gpu),
        launch_seconds=_launch_seconds(recipe, ds_config, accumulation),
    )


def hpz_ranks(ds_config: dict | None) -> int:
    """Return ranks that share the second copy of the weights (ZeRO++); 1: there is none."""
    return (ds_config or {}).get("zero_optimization", {}).get("zero_hpz_partition_size", 1)


def precision_of_products(recipe: Recipe) -> str:
    """Return bf16, fp16, tf32 or fp32, as the recipe's `training` says."""
    return next((name for name in ("bf16", "fp16", "tf32") if recipe.training.get(name)), "fp32")


def predicted_step_seconds(
    size: ModelSize,
    sequence_length: int,
    tokens_per_step: int,
    num_gpus: int,
    gpu: Gpu,
    *,
    stage: int = 0,
    accumulation: int = 1,
    mfu: float | None = None,
    precision: str | None = None,
    recomputed: float = 0.0,
    width: int = 2,
    hpz: int = 1,
) -> StepTime:
    """Return seconds of one optimizer step of data-parallel training.

    Args:
        mfu: share of the dense peak without recomputation; None for the expected one.
        precision: of the products; None for the GPU's training precision.
        recomputed: share of the layers under activation checkpointing: the kernels run as fast, on more FLOPs.
        width: bytes an element that is sent; 4 if the weights are held in fp32, under autocast too.
    """
    precision = precision or gpu.training_precision
    counted = flops_per_token(size, sequence_length)
    ratio = counted.hardware / counted.training
    mfu = mfu or expected_utilization(gpu, size.total, recomputation=ratio).mfu
    flops = counted.training + recomputed * counted.recomputed
    rate = tokens_per_second(flops, num_gpus, gpu.peak_flops(precision), mfu)
    volume = communication(size.total, stage, num_gpus, accumulation, width, hpz)
    return StepTime(tokens_per_step / rate, communication_seconds(volume, gpu, num_gpus))


@dataclass(frozen=True)
class Communication:
    """Bytes that one rank sends in one optimizer step."""

    gradients: float
    parameters: float
    """Gathered weights; with hpZ only what crosses nodes."""
    inside_node: float
    """What hpZ gathers inside the node instead."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.gradients + self.parameters + self.inside_node


def communication(
    parameters: int, stage: int, num_ranks: int, accumulation: int = 1, width: int = 2, hpz: int = 1
) -> Communication:
    """Return bytes one rank sends per optimizer step: ZeRO (Rajbhandari et al. 2020), section 7.

    Without accumulation 2 psi elements at stages 0 to 2 (gradients reduced and something gathered, psi each)
    and 3 psi at stage 3 (weights gathered for the forward and again for the backward pass). With accumulation,
    DeepSpeed 0.19 reduces at stages 0 and 1 once a step, at stage 2 after every micro-batch (its gradients
    exist only as shards: runtime/zero/stage_1_and_2.py), and stage 3 repeats all of it. A ring sends
    (n - 1) / n of each. hpZ (ZeRO++, Wang et al. 2023) serves the backward pass's gather inside the node.

    Args:
        width: bytes an element; DeepSpeed and torch send gradients in the precision that holds the weights.
        hpz: ranks of a secondary partition (zero_hpz_partition_size), 1 for none.
    """
    once = parameters * width * (num_ranks - 1) / num_ranks
    if stage < 2:
        return Communication(once, once, 0.0)
    # gradients exist only as shards: each micro-batch reduces its own
    if stage == 2:
        return Communication(once * accumulation, once, 0.0)
    # each pass gathers all weights, as none stays whole between them
    gathers = once * accumulation
    if hpz <= 1:
        return Communication(gathers, 2 * gathers, 0.0)
    return Communication(gathers, gathers, accumulation * parameters * width * (hpz - 1) / hpz)


def communication_seconds(volume: Communication, gpu: Gpu, num_ranks: int) -> float:
    """Return seconds at the rate that the doctor measured on this machine, else at the peak of the links.

    The peak is that of the link inside a node, else of the slower of link and network.
    """
    measured = kept_rates(gpu.name, num_ranks).get("all_reduce_bytes_per_second")
    if measured:
        return volume.total / measured["value"]
    inside = gpu.link_bytes_per_second
    # a ring is as fast as its slowest link
    across = inside if num_ranks <= gpu.gpus_per_node else min(inside, gpu.network_bytes_per_second)
    return (volume.gradients + volume.parameters) / across + volume.inside_node / inside


def scaling_over_nodes(gpu: Gpu, num_gpus: int, utilization_is_assumed: bool = True) -> dict | None:
    """Return {"nodes", "assumption"} of GPUs in more than one node; None in one.

    The tables hold no measured loss between nodes: time has a lower bound by the links' peaks, and nothing more.
    """
    nodes = -(-num_gpus // gpu.gpus_per_node)
    if nodes == 1:
        return None
    words = "perfect scaling is assumed: each GPU is as fast as in one node"
    if utilization_is_assumed:
        rate = f"{gpu.network_bytes_per_second / 1e9:g} GB/s a GPU"
        words += f", unless a step's messages at the network's peak ({rate}) take longer than its products"
    return {"nodes": nodes, "assumption": f"{words}; latency, congestion and slow nodes are not counted"}


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
        # 16-bit gradients down once a micro-batch, 16-bit weights up once a step
        seconds += 2 * share * (accumulation + 1) / gpu.pcie_bytes_per_second
        # ranks of a node share its memory's bandwidth
        seconds += ADAM_BYTES * share * in_node / rates["host_bandwidth_bytes_per_second"]["value"]
    if optimizer_device(config) == "nvme":
        # fp32 masters and moments, read and written
        seconds += 2 * 12 * share * in_node / rates["nvme_bytes_per_second"]["value"]
    if parameter_device(config) == "nvme":
        # 16-bit weights for the forward and again for the backward pass
        seconds += 2 * 2 * share * in_node * accumulation / rates["nvme_bytes_per_second"]["value"]
    elif parameter_device(config) == "cpu":
        seconds += 2 * 2 * share * accumulation / gpu.pcie_bytes_per_second
    return seconds
