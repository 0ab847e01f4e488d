"""Layouts of data x tensor x pipeline x context parallelism that fit a cluster, fastest first."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from pretraining.ds_config import load_ds_config
from pretraining.errors import UserError
from pretraining.planning.constants import table
from pretraining.planning.gpus import Gpu, find_gpu
from pretraining.planning.megatron import megatron_arguments
from pretraining.planning.memory.states import checkpoint_bytes, optimizer_states
from pretraining.planning.memory.tensors import parameter_tensors
from pretraining.planning.quantities import columns, duration, gpu_count, num_bytes, share
from pretraining.planning.roofline import model_flops_utilization
from pretraining.planning.shapes import shape_of, widths_of
from pretraining.planning.sizes import ModelSize, flops_per_token, model_size
from pretraining.planning.workload import Workload, add_workload_arguments, workload_of
from pretraining.recipe import Recipe
from pretraining.recipe.refusals import check_run

# bytes an element
BF16, FP32 = 2, 4
RESERVES = ("fragmentation", "cuda_context_bytes", "nccl_bytes")
SHORTEST_CONTEXT_SHARD = 4096
"""Tokens below which splitting a sequence over GPUs is not considered."""
# sequences per pipeline and pass
MICRO_BATCHES = (1, 2, 4, 8, 16)
NOTE = """
Time is of kernels at {efficiency} of the dense peak plus every message at its link's peak, nothing overlapped:
good for an order, not for a promise. `ac` recomputes every layer (activation checkpointing). `here`: what --deepspeed
takes for such a row. Pipeline stages cannot be trained here: neither the Trainer nor DeepSpeed cuts a model of
Transformers into them. --megatron ROW prints a row as arguments of Megatron-LM."""


@dataclass(frozen=True)
class LayerShape:
    """The part of a model's shape that decides its activations and messages."""

    width: int
    heads: int
    key_value_heads: int
    head_size: int
    layers: int
    inner: int
    """Width of the feed-forward layers that a token passes; in a mixture, of all experts it is routed to."""
    gated: bool
    vocab_size: int

    @property
    def key_value_width(self) -> int:
        """Width of the keys, or of the values."""
        return self.key_value_heads * self.head_size


@dataclass(frozen=True)
class LayoutMemory:
    """Bytes on the fullest GPU of a layout."""

    weights_and_gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """Bytes of all parts, with the allocator's and the framework's reserve."""
        held = self.weights_and_gradients + self.optimizer + self.activations + self.logits
        # fragmentation grows with what is held; the context and NCCL take the same for every layout
        assumed = {name: table("memory")[name]["value"] for name in RESERVES}
        return held * (1 + assumed["fragmentation"]) + assumed["cuda_context_bytes"] + assumed["nccl_bytes"]

    def to_dict(self) -> dict:
        """Return the parts and the total."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class Layout:
    """One way to split a model over data x tensor x pipeline x context GPUs."""

    data: int
    tensor: int
    pipeline: int
    context: int
    micro_batch: int
    """Sequences per pipeline and pass."""
    microbatches: int
    """Per pipeline and optimizer step."""
    recompute: bool
    """Activation checkpointing of every layer."""
    layers_per_stage: int
    bubble: float
    """The pipeline's idle time over its ideal time."""
    memory: LayoutMemory
    compute_seconds: float
    """Seconds of one step, bubble included."""
    tensor_seconds: float
    context_seconds: float
    pipeline_seconds: float
    data_seconds: float

    @property
    def step_seconds(self) -> float:
        """Seconds of an optimizer step, nothing overlapped."""
        messages = self.tensor_seconds + self.context_seconds + self.pipeline_seconds + self.data_seconds
        return self.compute_seconds + messages

    def to_dict(self) -> dict:
        """Return plain JSON values, derived ones included."""
        return {**asdict(self), "memory": self.memory.to_dict(), "step_seconds": self.step_seconds}


@dataclass(frozen=True)
class _Cluster:
    """Values that all layouts of one question share."""

    size: ModelSize
    shape: LayerShape
    sequence_length: int
    sequences: int
    """Per optimizer step."""
    num_gpus: int
    gpu: Gpu
    flops_per_second: float
    """FLOPs that the kernels of one GPU reach in a second."""
    optimizer_width: float
    """Bytes of master weights and optimizer states per parameter."""


def layouts(
    model: dict,
    sequence_length: int,
    tokens_per_step: int,
    num_gpus: int,
    gpu: Gpu,
    kernel_efficiency: float,
    optimizer_width: float = 3 * FP32,
) -> list[Layout]:
    """Return every layout that divides the model, the step and the GPUs, and fits their memory; fastest first.

    A layout recomputes only if it does not fit otherwise.

    Args:
        kernel_efficiency: share of the dense peak that a layer's kernels reach, before messages and bubbles.
        optimizer_width: bytes a parameter of master weights and the optimizer's states.

    Raises:
        UserError: no layout divides what is given, or none fits (with the nearest one's memory).
    """
    peak = gpu.peak_flops(gpu.training_precision)
    sequences = tokens_per_step // sequence_length
    cluster = _Cluster(
        size=model_size(model),
        shape=layer_shape(model),
        sequence_length=sequence_length,
        sequences=sequences,
        num_gpus=num_gpus,
        gpu=gpu,
        flops_per_second=peak * kernel_efficiency,
        optimizer_width=optimizer_width,
    )
    found = list(_candidates(cluster))
    if not found:
        raise UserError(_nothing_divides(cluster))
    fitting = [layout for layout in found if layout.memory.total <= gpu.memory_bytes]
    if not fitting:
        raise UserError(_nothing_fits(found, cluster))
    # of equally fast layouts, the one that splits the model least comes first
    return sorted(fitting, key=lambda layout: (layout.step_seconds, layout.tensor, layout.pipeline))


def _candidates(cluster: _Cluster) -> Iterator[Layout]:
    """Yield one layout for each division: without recomputation, or with it if the first does not fit."""
    for tensor, pipeline, context, data, micro_batch in _divisions(cluster):
        layout = _layout(cluster, data, tensor, pipeline, context, micro_batch, recompute=False)
        if layout.memory.total > cluster.gpu.memory_bytes:
            layout = _layout(cluster, data, tensor, pipeline, context, micro_batch, recompute=True)
        yield layout


def _divisions(cluster: _Cluster) -> Iterator[tuple[int, int, int, int, int]]:
    shape = cluster.shape
    # tensor ranks stay in one node: each layer's all-reduces must not cross the network
    # (Narayanan et al. 2021, takeaway 1)
    node = min(cluster.gpu.gpus_per_node, cluster.num_gpus)
    tensors = [n for n in range(1, node + 1) if node % n == 0]
    # each rank holds whole heads, of the queries and of the keys
    tensors = [n for n in tensors if shape.heads % n == 0 and shape.key_value_heads % n == 0]
    for tensor in tensors:
        for pipeline in _divisors(shape.layers):
            for context in _contexts(cluster.sequence_length):
                data, rest = divmod(cluster.num_gpus, tensor * pipeline * context)
                # every GPU has work, and every pipeline gets the same number of sequences
                if data == 0 or rest or cluster.sequences % data:
                    continue
                share = cluster.sequences // data
                for micro_batch in (n for n in MICRO_BATCHES if share % n == 0):
                    yield tensor, pipeline, context, data, micro_batch


def _layout(
    cluster: _Cluster, data: int, tensor: int, pipeline: int, context: int, micro_batch: int, recompute: bool
) -> Layout:
    size, shape, gpu = cluster.size, cluster.shape, cluster.gpu
    microbatches = cluster.sequences // (data * micro_batch)
    # per GPU and pass: context parallelism splits each sequence
    tokens = micro_batch * cluster.sequence_length / context
    bubble = pipeline_bubble(pipeline, microbatches)
    counted = flops_per_token(size, cluster.sequence_length)
    flops = (
        (counted.hardware if recompute else counted.training) * cluster.sequences * cluster.sequence_length
    )
    # seconds without bubbles and messages
    ideal = flops / (cluster.num_gpus * cluster.flops_per_second)
    # the bubble counts as extra passes, in messages as in products
    passes, layers = microbatches * (1 + bubble), shape.layers // pipeline
    # 1F1B: the first stage begins as many micro-batches as there are stages before the first returns
    in_flight = min(pipeline, microbatches)
    # context ranks hold the same weights as data ranks, so they share the optimizer's states too
    shards, width = data * context, cluster.optimizer_width
    memory = layout_memory(size, shape, tokens, tensor, pipeline, shards, in_flight, recompute, width)
    return Layout(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        micro_batch=micro_batch,
        microbatches=microbatches,
        recompute=recompute,
        layers_per_stage=layers,
        bubble=bubble,
        memory=memory,
        compute_seconds=ideal * (1 + bubble),
        # tensor ranks are neighbours inside a node (`_divisions`)
        tensor_seconds=passes
        * layers
        * _tensor_bytes(shape, tokens, tensor, recompute)
        / gpu.link_bytes_per_second,
        context_seconds=passes
        * layers
        * _context_bytes(shape, tokens, tensor, context)
        / _link(gpu, tensor * context),
        pipeline_seconds=passes
        * _pipeline_bytes(shape, tokens, tensor, pipeline)
        # stages are the outermost dimension: with several nodes, some neighbours are in different ones
        / _link(gpu, cluster.num_gpus),
        data_seconds=_data_bytes(memory, data * context) / _link(gpu, data * context * tensor),
    )


def layer_shape(model: dict) -> LayerShape:
    """Return the shape of a recipe's model section."""
    shape = shape_of(model)
    widths = widths_of(shape)
    return LayerShape(
        width=widths.hidden,
        heads=widths.heads,
        key_value_heads=widths.key_value_heads,
        head_size=widths.head_size,
        layers=widths.layers,
        # a dense model counts as one expert (`shapes.Widths`)
        inner=widths.expert_inner * widths.chosen_experts,
        # of the types that `shapes.shape_of` returns, only gpt2 is not gated
        gated=shape["model_type"] != "gpt2",
        vocab_size=shape["vocab_size"],
    )


def layout_memory(
    size: ModelSize,
    shape: LayerShape,
    tokens: float,
    tensor: int,
    pipeline: int,
    shards: int,
    in_flight: int,
    recompute: bool,
    optimizer_width: float = 3 * FP32,
) -> LayoutMemory:
    """Return memory of the fullest GPU in bytes: the model states, the activations and the logits.

    Args:
        tokens: of one micro-batch on one GPU, that is after context parallelism.
        shards: data- and context-parallel ranks, which share the optimizer's states.
        in_flight: micro-batches whose activations are held at once.
        optimizer_width: bytes of master weights and optimizer states per parameter.
    """
    held, layers = gpu_parameters(size, tensor, pipeline), shape.layers / pipeline
    # with sequence parallelism, tensor ranks divide all activations (Korthikanti et al. 2022, table 2)
    one_layer = activation_bytes_per_token(shape) * tokens / tensor
    # with recomputation only each layer's input stays
    kept = BF16 * shape.width * tokens / tensor if recompute else one_layer
    # 1F1B: the first stage holds `in_flight` micro-batches (Narayanan et al. 2021, section 2.2);
    # the recomputed activations exist for one layer at a time
    activations = in_flight * layers * kept + (one_layer if recompute else 0)
    return LayoutMemory(
        # bf16 weights, fp32 gradients
        weights_and_gradients=held * (BF16 + FP32),
        # shared as by Megatron-LM's distributed optimizer (ZeRO stage 1)
        optimizer=held * optimizer_width / shards,
        activations=activations,
        # as a plain loss in memory/activations.py: fp32 log-probabilities, their gradient, the logits' gradient
        logits=3 * FP32 * tokens * shape.vocab_size / tensor,
    )


def gpu_parameters(size: ModelSize, tensor: int, pipeline: int) -> float:
    """Return the parameters on one GPU of the fuller end of the pipeline: its layers and a table."""
    # the first stage holds the embedding, the last one the head
    vocabulary = max(size.embedding, size.parts.head)
    layers = size.total - size.embedding - size.parts.head
    whole = layers + size.embedding + size.parts.head if pipeline == 1 else layers / pipeline + vocabulary
    return whole / tensor


def activation_bytes_per_token(shape: LayerShape) -> int:
    """Return bytes one layer keeps per token for its backward pass, in bf16 with fused attention.

    Korthikanti et al. 2022, section 4.1, without dropout masks: 32 h for GPT. A layer keeps the inputs of its two
    norms, the input of the attention, queries, keys, values and their result, the input of the feed-forward
    layer, and that layer's inner values.
    """
    queries = shape.heads * shape.head_size
    attention = shape.width + queries + 2 * shape.key_value_width + queries
    # inner values before and after the activation function; a gated layer keeps four
    feed_forward = shape.width + shape.inner * (4 if shape.gated else 2)
    return BF16 * (2 * shape.width + attention + feed_forward)


def pipeline_bubble(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Return idle time over ideal time of a pipeline, (p - 1) / (v m): Narayanan et al. 2021, section 2.2.

    Args:
        microbatches: m, per pipeline and optimizer step.
        chunks: v, model chunks per GPU of the interleaved schedule.
    """
    return (stages - 1) / (chunks * microbatches)


def _tensor_bytes(shape: LayerShape, tokens: float, tensor: int, recompute: bool) -> float:
    """Return the bytes of one layer's all-reduces (Megatron-LM, Shoeybi et al. 2019, figure 4)."""
    message = BF16 * shape.width * tokens
    # two forward, two backward, two more if the forward pass is repeated; a ring sends 2 (t - 1) / t of each
    return (6 if recompute else 4) * message * 2 * (tensor - 1) / tensor


def _context_bytes(shape: LayerShape, tokens: float, tensor: int, context: int) -> float:
    """Return the bytes of one layer's keys and values on their way round the ring (Liu et al. 2023)."""
    message = BF16 * 2 * shape.key_value_width / tensor * tokens
    # once forward, and twice as much backward
    return 3 * message * (context - 1)


def _pipeline_bytes(shape: LayerShape, tokens: float, tensor: int, pipeline: int) -> float:
    """Return the bytes of a micro-batch's activations to the next stage and of its gradients back."""
    # a stage's tensor ranks share the message
    return 2 * BF16 * shape.width * tokens / tensor if pipeline > 1 else 0.0


def _data_bytes(memory: LayoutMemory, shards: int) -> float:
    """Return the bytes of a step's gradients and weights between data ranks (ZeRO, section 7)."""
    # once a step: reduce-scatter of the fp32 gradients, all-gather of the bf16 weights
    return memory.weights_and_gradients * (shards - 1) / shards


def _link(gpu: Gpu, group: int) -> float:
    """Return bytes per second of the slowest link in a group of neighbouring GPUs."""
    inside = gpu.link_bytes_per_second
    return inside if group <= gpu.gpus_per_node else min(inside, gpu.network_bytes_per_second)


def _contexts(sequence_length: int) -> list[int]:
    # ring attention gives each GPU two pieces of a sequence, so that all have the same work under the causal mask
    longest = max(1, sequence_length // SHORTEST_CONTEXT_SHARD)
    return [2**n for n in range(longest.bit_length()) if sequence_length % (2 * 2**n) == 0 or n == 0]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _nothing_divides(cluster: _Cluster) -> str:
    return (
        f"no layout divides {cluster.num_gpus:,} GPUs: {cluster.shape.layers} layers, {cluster.shape.heads} heads "
        f"and {cluster.sequences:,} sequences a step have no common split with them; "
        f"take a number of GPUs that divides {cluster.sequences:,}"
    )


def _nothing_fits(found: list[Layout], cluster: _Cluster) -> str:
    best = min(found, key=lambda layout: layout.memory.total)
    need = best.memory.total / cluster.gpu.memory_bytes
    return (
        f"no layout fits: the smallest (tensor {best.tensor}, pipeline {best.pipeline}, context {best.context}, "
        f"data {best.data}) needs {best.memory.total / 1e9:,.1f} GB on each {cluster.gpu.name} of "
        f"{cluster.gpu.memory_bytes / 1e9:,.0f} GB; take about {need:.1f} times as many GPUs, or larger ones"
    )


class ParallelismVerb:
    """Layouts of data x tensor x pipeline x context parallelism that fit, fastest first.

    A row without pipeline stages can be trained here, if the ds_config beside it is given (docs/layouts.md).
    """

    EXAMPLES = """  python -m pretraining.planning parallelism --recipe 65b --world_size 512 --gpu H100
  python -m pretraining.planning parallelism --recipe 30b --world_size 64 --gpu A100 --top 3 --json
  python -m pretraining.planning parallelism --recipe 65b --world_size 512 --gpu H100 --megatron 1"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Take the recipe, the cluster, and how many layouts to show."""
        add_workload_arguments(parser)
        parser.add_argument("--world_size", type=gpu_count, required=True, metavar="N", help="number of GPUs")
        parser.add_argument("--gpu", required=True, metavar="NAME", help="which kind (see the verb gpus)")
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
        # --parameters gives a size alone: no heads, widths or layers
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
            # the layouts are sorted: the first of each division is its fastest
            best.setdefault((layout.tensor, layout.pipeline, layout.context), layout)
        peak = gpu.peak_flops(gpu.training_precision)
        rows = list(best.values())
        shown = rows[: options.top]
        row = options.megatron
        if row and row > len(rows):
            raise UserError(f"--megatron {row}: there are {len(rows)} rows; give one of them")
        return {
            "name": workload.name,
            "gpu": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "world_size": options.world_size,
            "kernel_efficiency": efficiency,
            "fitting": len(found),
            "layouts": [
                {
                    **layout.to_dict(),
                    "mfu": _mfu(layout, workload, options.world_size, peak),
                    "here": way_here(layout, recipe),
                }
                for layout in shown
            ],
            "megatron": megatron_arguments(recipe, rows[row - 1], gpu.gpus_per_node) if row else None,
        }

    def as_text(self, answer: dict) -> str:
        """Write a table, the best first."""
        if answer["megatron"]:
            return " \\\n    ".join(answer["megatron"])
        header = ["row", "data", "tensor", "pipeline", "context", "micro-batch", "layers/stage"]
        header += ["bubble", "memory", "step", "MFU", "ac", "here"]
        rows = [_row(number, layout) for number, layout in enumerate(answer["layouts"], 1)]
        title = (
            f"{answer['name']} on {answer['world_size']:,} x {answer['gpu']}: {answer['fitting']} layouts fit"
        )
        efficiency = f"{answer['kernel_efficiency']:.0%}"
        return f"{title}\n\n{columns(header, rows, left=0)}\n{NOTE.format(efficiency=efficiency)}"


def _mfu(layout: Layout, workload: Workload, num_gpus: int, peak: float) -> float:
    rate = workload.recipe.tokens_per_step / layout.step_seconds
    return model_flops_utilization(rate, workload.training_flops_per_token, num_gpus, peak)


def way_here(layout: Layout, recipe: Recipe) -> str | None:
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


def _row(number: int, layout: dict) -> list[str]:
    sizes = ("data", "tensor", "pipeline", "context", "micro_batch", "layers_per_stage")
    return [
        str(number),
        *(str(layout[name]) for name in sizes),
        f"{layout['bubble']:.0%}",
        num_bytes(layout["memory"]["total"]),
        duration(layout["step_seconds"]),
        f"{layout['mfu']:.0%}",
        "yes" if layout["recompute"] else "no",
        layout["here"] or "no",
    ]
