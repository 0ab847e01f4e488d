"""Layouts of data x tensor x pipeline x context parallelism that fit, fastest first.

For frameworks with those dimensions; this repository trains data-parallel with ZeRO.
"""

import argparse

from pretraining.errors import UserError
from pretraining.planning.constants import table
from pretraining.planning.gpus import find_gpu
from pretraining.planning.memory import checkpoint_bytes
from pretraining.planning.memory.optimizers import optimizer_states
from pretraining.planning.memory.tensors import parameter_tensors
from pretraining.planning.parallelism import Layout, layouts
from pretraining.planning.quantities import columns, duration, gpu_count, num_bytes, share
from pretraining.planning.throughput import model_flops_utilization
from pretraining.planning.workload import Workload, add_workload_arguments, workload_of

EXAMPLES = """  python -m pretraining.planning parallelism --recipe 65b --world_size 512 --gpu H100
  python -m pretraining.planning parallelism --recipe 30b --world_size 64 --gpu A100 --top 3 --json"""
NOTE = """
Time is of kernels at {efficiency} of the dense peak plus every message at its link's peak, nothing overlapped:
good for an order, not for a promise. `ac` recomputes every layer (activation checkpointing)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe, the cluster, and how many layouts to show."""
    add_workload_arguments(parser)
    parser.add_argument("--world_size", type=gpu_count, required=True, metavar="N", help="number of GPUs")
    parser.add_argument("--gpu", required=True, metavar="NAME", help="which kind (see the verb gpus)")
    parser.add_argument("--top", type=gpu_count, default=5, metavar="K", help="layouts to show (default 5)")
    parser.add_argument("--kernel_efficiency", type=share, metavar="SHARE", help="instead of the table's")


def answer(options: argparse.Namespace) -> dict:
    """The best layouts, one of each division of the GPUs."""
    workload, gpu = workload_of(options), find_gpu(options.gpu)
    if workload.recipe is None:
        raise UserError("layouts need the model's shape: give --recipe NAME (and --set to change it)")
    recipe = workload.recipe
    efficiency = options.kernel_efficiency or table("rates")["kernel_efficiency"]["value"]
    found = layouts(
        recipe.model,
        workload.sequence_length,
        recipe.tokens_per_step,
        options.world_size,
        gpu,
        efficiency,
        checkpoint_bytes(parameter_tensors(recipe.model), optimizer_states(recipe)) / workload.size.total,
    )
    best: dict[tuple, Layout] = {}
    for layout in found:
        best.setdefault((layout.tensor, layout.pipeline, layout.context), layout)
    peak = gpu.peak_flops(gpu.training_precision)
    shown = list(best.values())[: options.top]
    return {
        "name": workload.name,
        "gpu": gpu.name,
        "memory_bytes": gpu.memory_bytes,
        "world_size": options.world_size,
        "kernel_efficiency": efficiency,
        "fitting": len(found),
        "layouts": [
            {**layout.to_dict(), "mfu": _mfu(layout, workload, options.world_size, peak)} for layout in shown
        ],
    }


def _mfu(layout: Layout, workload: Workload, num_gpus: int, peak: float) -> float:
    rate = workload.recipe.tokens_per_step / layout.step_seconds
    return model_flops_utilization(rate, workload.training_flops_per_token, num_gpus, peak)


def as_text(answer: dict) -> str:
    """A table, the best first."""
    header = ["data", "tensor", "pipeline", "context", "micro-batch", "layers/stage"]
    header += ["bubble", "memory", "step", "MFU", "ac"]
    rows = [_row(layout) for layout in answer["layouts"]]
    title = f"{answer['name']} on {answer['world_size']:,} x {answer['gpu']}: {answer['fitting']} layouts fit"
    efficiency = f"{answer['kernel_efficiency']:.0%}"
    return f"{title}\n\n{columns(header, rows, left=0)}\n{NOTE.format(efficiency=efficiency)}"


def _row(layout: dict) -> list[str]:
    sizes = ("data", "tensor", "pipeline", "context", "micro_batch", "layers_per_stage")
    return [
        *(str(layout[name]) for name in sizes),
        f"{layout['bubble']:.0%}",
        num_bytes(layout["memory"]["total"]),
        duration(layout["step_seconds"]),
        f"{layout['mfu']:.0%}",
        "yes" if layout["recompute"] else "no",
    ]
