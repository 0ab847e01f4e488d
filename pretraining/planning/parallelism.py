"""Layouts of data x tensor x pipeline x context parallelism that fit a cluster, fastest first."""

import argparse
from collections.abc import Iterator
from dataclasses import replace

from pretraining.ds_config import load_ds_config
from pretraining.errors import UserError
from pretraining.planning.constants import table
from pretraining.planning.gpus import Gpu, find_gpu
from pretraining.planning.layout import FP32, Cluster, Division, ParallelLayout, layout_of
from pretraining.planning.megatron import megatron_arguments
from pretraining.planning.memory.states import checkpoint_bytes, optimizer_states
from pretraining.planning.memory.tensors import parameter_tensors
from pretraining.planning.quantities import duration, gpu_count, num_bytes, share
from pretraining.planning.roofline import model_flops_utilization
from pretraining.planning.shapes import shape_of, widths_of
from pretraining.planning.sizes import model_size
from pretraining.planning.workload import add_cluster_arguments, add_workload_arguments, workload_of
from pretraining.recipe import Recipe
from pretraining.recipe.refusals import check_run
from pretraining.runtime.table import Column, write_table

SHORTEST_CONTEXT_SHARD = 4096
"""Tokens below which splitting a sequence over GPUs is not considered."""
# sequences per pipeline and pass
MICRO_BATCHES = (1, 2, 4, 8, 16)
NOTE = """
Time is of kernels at {efficiency} of the dense peak plus every message at its link's peak, nothing overlapped:
good for an order, not for a promise. `ac` recomputes every layer (activation checkpointing). `here`: what --deepspeed
takes for such a row. Pipeline stages cannot be trained here: neither the Trainer nor DeepSpeed cuts a model of
Transformers into them. --megatron ROW prints a row as arguments of Megatron-LM."""
COLUMNS = (
    Column("row", "row"),
    Column("data", "data"),
    Column("tensor", "tensor"),
    Column("pipeline", "pipeline"),
    Column("context", "context"),
    Column("micro-batch", "micro_batch"),
    Column("layers/stage", "layers_per_stage"),
    Column("bubble", "bubble", ".0%"),
    Column("memory", lambda layout: layout["memory"]["total"], num_bytes),
    Column("step", "step_seconds", duration),
    Column("MFU", "mfu", ".0%"),
    Column("ac", lambda layout: "yes" if layout["recompute"] else "no"),
    Column("here", lambda layout: layout["here"] or "no"),
)


def layouts(
    model: dict,
    sequence_length: int,
    tokens_per_step: int,
    num_gpus: int,
    gpu: Gpu,
    kernel_efficiency: float,
    optimizer_width: float = 3 * FP32,
) -> list[ParallelLayout]:
    """Return every layout that divides the model, the step and the GPUs, and fits their memory; fastest first.

    A layout recomputes only if it does not fit otherwise.

    Args:
        kernel_efficiency: share of the dense peak that a layer's kernels reach, before messages and bubbles.
        optimizer_width: bytes a parameter of master weights and the optimizer's states.

    Raises:
        UserError: no layout divides what is given, or none fits (with the nearest one's memory).
    """
    cluster = Cluster(
        size=model_size(model),
        shape=shape_of(model),
        sequence_length=sequence_length,
        sequences=tokens_per_step // sequence_length,
        num_gpus=num_gpus,
        gpu=gpu,
        flops_per_second=gpu.peak_flops(gpu.training_precision) * kernel_efficiency,
        optimizer_width=optimizer_width,
    )
    tried = []
    for division in _divisions(cluster):
        layout = layout_of(cluster, division, recompute=False)
        if layout.memory.total > gpu.memory_bytes:
            layout = layout_of(cluster, division, recompute=True)
        tried.append(layout)
    if not tried:
        widths = widths_of(cluster.shape)
        raise UserError(
            f"no layout divides {num_gpus:,} GPUs: {widths.layers} layers, {widths.heads} heads "
            f"and {cluster.sequences:,} sequences a step have no common split with them; "
            f"take a number of GPUs that divides {cluster.sequences:,}"
        )
    fitting = [layout for layout in tried if layout.memory.total <= gpu.memory_bytes]
    if not fitting:
        best = min(tried, key=lambda layout: layout.memory.total)
        raise UserError(
            f"no layout fits: the smallest (tensor {best.tensor}, pipeline {best.pipeline}, context {best.context}, "
            f"data {best.data}) needs {best.memory.total / 1e9:,.1f} GB on each {gpu.name} of "
            f"{gpu.memory_bytes / 1e9:,.0f} GB; take about {best.memory.total / gpu.memory_bytes:.1f} times as many "
            "GPUs, or larger ones"
        )
    # of equally fast layouts, the one that splits the model least comes first
    return sorted(fitting, key=lambda layout: (layout.step_seconds, layout.tensor, layout.pipeline))


def _divisions(cluster: Cluster) -> Iterator[Division]:
    widths, length = widths_of(cluster.shape), cluster.sequence_length
    # tensor ranks stay in one node: each layer's all-reduces must not cross the network
    # (Narayanan et al. 2021, takeaway 1)
    node = min(cluster.gpu.gpus_per_node, cluster.num_gpus)
    tensors = [n for n in range(1, node + 1) if node % n == 0]
    # each rank holds whole heads, of the queries and of the keys
    tensors = [n for n in tensors if widths.heads % n == 0 and widths.key_value_heads % n == 0]
    pipelines = [n for n in range(1, widths.layers + 1) if widths.layers % n == 0]
    # ring attention gives each GPU two pieces of a sequence, so that all have the same work under the causal mask
    longest = max(1, length // SHORTEST_CONTEXT_SHARD)
    contexts = [2**n for n in range(longest.bit_length()) if length % (2 * 2**n) == 0 or n == 0]
    for tensor in tensors:
        for pipeline in pipelines:
            for context in contexts:
                data, rest = divmod(cluster.num_gpus, tensor * pipeline * context)
                # every GPU has work, and every pipeline gets the same number of sequences
                if data == 0 or rest or cluster.sequences % data:
                    continue
                of_pipeline = cluster.sequences // data
                for micro_batch in (n for n in MICRO_BATCHES if of_pipeline % n == 0):
                    yield Division(data, tensor, pipeline, context, micro_batch)


class ParallelismVerb:
    """Layouts of data x tensor x pipeline x context parallelism that fit, fastest first.

    A row without pipeline stages can be trained here, if the ds_config beside it is given (docs/layouts.md).
    """

    EXAMPLES = """  python -m pretraining.planning parallelism --recipe 65b --world_size 512 --gpu H100
  python -m pretraining.planning parallelism --recipe 30b --world_size 64 --gpu A100 --top 3 --json
  python -m pretraining.planning parallelism --recipe 65b --world_size 512 --gpu H100 --megatron 1"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_workload_arguments(parser)
        add_cluster_arguments(parser)
        parser.add_argument(
            "--top", type=gpu_count, default=5, metavar="K", help="layouts to show (default 5)"
        )
        parser.add_argument("--kernel_efficiency", type=share, metavar="SHARE", help="instead of the table's")
        parser.add_argument(
            "--megatron",
            type=gpu_count,
            metavar="ROW",
            help="one row as arguments of Megatron-LM, 1 the first",
        )

    def answer(self, options: argparse.Namespace) -> dict:
        """Return the best layouts, one of each division of the GPUs."""
        workload, gpu = workload_of(options), find_gpu(options.gpu)
        recipe, num_gpus = workload.recipe, options.world_size
        # --parameters gives a size alone: no heads, widths or layers
        if recipe is None:
            raise UserError("layouts need the model's shape: give --recipe NAME (and --set to change it)")
        efficiency = options.kernel_efficiency or table("rates")["kernel_efficiency"]["value"]
        optimizer = checkpoint_bytes(parameter_tensors(recipe.model), optimizer_states(recipe))
        fitting = layouts(
            recipe.model,
            workload.sequence_length,
            recipe.tokens_per_step,
            num_gpus,
            gpu,
            efficiency,
            optimizer / workload.size.total,
        )
        best: dict[tuple, ParallelLayout] = {}
        for layout in fitting:
            # the layouts are sorted: the first of each division is its fastest
            best.setdefault((layout.tensor, layout.pipeline, layout.context), layout)
        rows, row = list(best.values()), options.megatron
        if row and row > len(rows):
            raise UserError(f"--megatron {row}: there are {len(rows)} rows; give one of them")
        flops, peak = workload.training_flops_per_token, gpu.peak_flops(gpu.training_precision)
        shown = []
        for layout in rows[: options.top]:
            rate = recipe.tokens_per_step / layout.step_seconds
            mfu = model_flops_utilization(rate, flops, num_gpus, peak)
            shown.append({**layout.to_dict(), "mfu": mfu, "here": way_here(layout, recipe)})
        return {
            "name": workload.name,
            "gpu": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "world_size": num_gpus,
            "kernel_efficiency": efficiency,
            "fitting": len(fitting),
            "layouts": shown,
            "megatron": megatron_arguments(recipe, rows[row - 1], gpu.gpus_per_node) if row else None,
        }

    def as_text(self, answer: dict) -> str:
        """Write a table, the best first."""
        if answer["megatron"]:
            return " \\\n    ".join(answer["megatron"])
        rows = [{"row": number, **layout} for number, layout in enumerate(answer["layouts"], 1)]
        cluster = f"{answer['world_size']:,} x {answer['gpu']}"
        title = f"{answer['name']} on {cluster}: {answer['fitting']} layouts fit"
        note = NOTE.format(efficiency=f"{answer['kernel_efficiency']:.0%}")
        return f"{title}\n\n{write_table(COLUMNS, rows, left=0)}\n{note}"


def way_here(layout: ParallelLayout, recipe: Recipe) -> str | None:
    """Return the ds_config, with its degrees, that trains such a layout here; None if none does."""
    if layout.pipeline > 1:
        return None
    degrees = {"tensor": layout.tensor, "sequence": layout.context}
    split = ",".join(f"{name}={size}" for name, size in degrees.items() if size > 1)
    # the optimizer's states are shared over the data ranks, as the table counts
    way = f"zero1:{split}" if split else "zero1"
    try:
        check_run(replace(recipe, deepspeed=way), load_ds_config(way))
    except UserError:
        return None
    return way
