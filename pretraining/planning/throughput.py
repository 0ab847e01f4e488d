"""Tokens per second and hours: from a utilization, and from what the links must carry."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pretraining.errors import UserError
from pretraining.planning.constants import table
from pretraining.planning.flops import flops_per_token
from pretraining.planning.gpus import Gpu, find_gpu
from pretraining.planning.machine_rates import kept_rates
from pretraining.planning.sizes import ModelSize
from pretraining.schema import REPOSITORY, display_path

RESULTS = REPOSITORY / "benchmarks" / "results"
SAME_SIZE = 1.25
"""Models whose parameters differ by no more than this factor count as the same size."""


@dataclass(frozen=True)
class Utilization:
    """A model FLOPs utilization (share of the dense peak) and where it comes from."""

    mfu: float
    """Where nothing is recomputed."""
    source: str
    assumed: bool
    """Neither given nor measured here: it knows nothing of this run's messages."""


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


def expected_utilization(
    gpu: Gpu, parameters: int, results: Path = RESULTS, recomputation: float = 1.0
) -> Utilization:
    """What this repository measured on this GPU at this size, else the assumption of tables/rates.json.

    A measurement is a line of benchmarks/results/*.jsonl with `mfu` and `parameters` beside the device's name.

    Args:
        recomputation: FLOPs with every layer recomputed over those without. A line is raised by as much of it as
            its `recomputes`, the share of the layers that were recomputed.
    """
    found = [row for row in measured_utilizations(results) if _is_like(row, gpu, parameters)]
    if found:
        row = max(found, key=lambda row: row.get("when", ""))
        source = f"measured by benchmarks/{row['benchmark']}.py on {row['environment']['device']}"
        mfu = row["mfu"] * (1 + row.get("recomputes", 0) * (recomputation - 1))
        return Utilization(mfu, f"{source}, {row.get('when', 'undated')}", assumed=False)
    assumed = table("rates")["mfu"]
    entry = assumed.get(gpu.name, assumed["*"])
    return Utilization(entry["value"], entry["source"], assumed=True)


@cache
def measured_utilizations(results: Path) -> tuple[dict, ...]:
    """The kept results that tell a utilization.

    Raises:
        UserError: a line that is not JSON.
    """
    files = {path: path.read_text(encoding="utf-8").splitlines() for path in sorted(results.glob("*.jsonl"))}
    rows = [_row(path, n, line) for path in files for n, line in enumerate(files[path], 1) if '"mfu"' in line]
    return tuple(row for row in rows if row.get("mfu") and row.get("parameters"))


def _row(path: Path, number: int, line: str) -> dict:
    try:
        return json.loads(line)
    except ValueError as error:
        raise UserError(f"{display_path(path)}: line {number}: not JSON ({error}); remove it") from None


def _is_like(row: dict, gpu: Gpu, parameters: int) -> bool:
    try:
        device = find_gpu(row["environment"]["device"])
    except (UserError, KeyError):
        return False
    return device == gpu and 1 / SAME_SIZE <= row["parameters"] / parameters <= SAME_SIZE


def tokens_per_second(flops: float, num_gpus: int, peak_flops: float, mfu: float) -> float:
    """Tokens per second of all GPUs, at `flops` FLOPs a token (the MFU's definition, PaLM appendix B)."""
    return num_gpus * peak_flops * mfu / flops


def model_flops_utilization(
    tokens_per_second: float, flops: float, num_gpus: int, peak_flops: float
) -> float:
    """MFU: the share of the dense peak spent on `flops` FLOPs a token (PaLM, section 4.1 and appendix B)."""
    return tokens_per_second * flops / (num_gpus * peak_flops)


def communication(
    parameters: int, stage: int, num_ranks: int, accumulation: int = 1, width: int = 2, hpz: int = 1
) -> Communication:
    """Bytes one rank sends per optimizer step: ZeRO (Rajbhandari et al. 2020), section 7.

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
    if stage == 2:
        return Communication(once * accumulation, once, 0.0)
    gathers = once * accumulation
    if hpz <= 1:
        return Communication(gathers, 2 * gathers, 0.0)
    return Communication(gathers, gathers, accumulation * parameters * width * (hpz - 1) / hpz)


def communication_seconds(volume: Communication, gpu: Gpu, num_ranks: int) -> float:
    """Seconds at the rate that the doctor measured on this machine, else at the peak of the links.

    The peak is that of the link inside a node, else of the slower of link and network.
    """
    measured = kept_rates(gpu.name, num_ranks).get("all_reduce_bytes_per_second")
    if measured:
        return volume.total / measured["value"]
    inside = gpu.link_bytes_per_second
    across = inside if num_ranks <= gpu.gpus_per_node else min(inside, gpu.network_bytes_per_second)
    return (volume.gradients + volume.parameters) / across + volume.inside_node / inside


def scaling_over_nodes(gpu: Gpu, num_gpus: int, utilization_is_assumed: bool = True) -> dict | None:
    """{"nodes", "assumption"} of GPUs that lie in more than one node; None in one.

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
    """Seconds of one optimizer step of data-parallel training.

    Args:
        mfu: share of the dense peak without recomputation; None for the expected one.
        precision: of the products; None for the GPU's training precision.
        recomputed: share of the layers under activation checkpointing: the kernels run as fast, on more FLOPs.
        width: bytes an element that is sent; 4 where the weights are held in fp32, under autocast too.
    """
    precision = precision or gpu.training_precision
    counted = flops_per_token(size, sequence_length)
    ratio = counted.hardware / counted.training
    mfu = mfu or expected_utilization(gpu, size.total, recomputation=ratio).mfu
    flops = counted.training + recomputed * counted.recomputed
    rate = tokens_per_second(flops, num_gpus, gpu.peak_flops(precision), mfu)
    volume = communication(size.total, stage, num_gpus, accumulation, width, hpz)
    return StepTime(tokens_per_step / rate, communication_seconds(volume, gpu, num_gpus))


def pipeline_bubble(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Idle time over ideal time of a pipeline, (p - 1) / (v m): Narayanan et al. 2021, section 2.2.

    Args:
        microbatches: m, per pipeline and optimizer step.
        chunks: v, model chunks per GPU of the interleaved schedule.
    """
    return (stages - 1) / (chunks * microbatches)
