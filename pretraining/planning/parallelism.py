"""Layouts of data x tensor x pipeline x context parallelism that fit a cluster, fastest first."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from pretraining.errors import UserError
from pretraining.planning.flops import flops_per_token
from pretraining.planning.gpus import Gpu
from pretraining.planning.layout_memory import (
    BF16,
    FP32,
    LayerShape,
    LayoutMemory,
    layer_shape,
    layout_memory,
)
from pretraining.planning.sizes import ModelSize, model_size
from pretraining.planning.throughput import pipeline_bubble

SHORTEST_CONTEXT_SHARD = 4096
"""Tokens below which splitting a sequence over GPUs is not considered."""
MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Layout:
    """One way to lay a model over the GPUs; data x tensor x pipeline x context GPUs."""

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
    """Idle over ideal time of the pipeline."""
    memory: LayoutMemory
    compute_seconds: float
    """Of one step, bubble included."""
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
        """Plain JSON values, derived ones included."""
        return {**asdict(self), "memory": self.memory.to_dict(), "step_seconds": self.step_seconds}


@dataclass(frozen=True)
class _Cluster:
    """What every layout of one question shares."""

    size: ModelSize
    shape: LayerShape
    sequence_length: int
    sequences: int
    """Per optimizer step."""
    num_gpus: int
    gpu: Gpu
    flops_per_second: float
    """What the kernels of one GPU reach."""
    optimizer_width: float
    """Bytes a parameter of master weights and the optimizer's states."""


def layouts(
    model: dict,
    sequence_length: int,
    tokens_per_step: int,
    num_gpus: int,
    gpu: Gpu,
    kernel_efficiency: float,
    optimizer_width: float = 3 * FP32,
) -> list[Layout]:
    """Every layout that divides the model, the step and the GPUs, and fits their memory; fastest first.

    Tensor parallelism stays inside a node (Narayanan et al. 2021, takeaway 1). A layout recomputes only where
    it would not fit otherwise.

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
    return sorted(fitting, key=lambda layout: (layout.step_seconds, layout.tensor, layout.pipeline))


def _candidates(cluster: _Cluster) -> Iterator[Layout]:
    """Both kinds of each division: without recomputation, and with it where the first does not fit."""
    for tensor, pipeline, context, data, micro_batch in _divisions(cluster):
        layout = _layout(cluster, data, tensor, pipeline, context, micro_batch, recompute=False)
        if layout.memory.total > cluster.gpu.memory_bytes:
            layout = _layout(cluster, data, tensor, pipeline, context, micro_batch, recompute=True)
        yield layout


def _divisions(cluster: _Cluster) -> Iterator[tuple[int, int, int, int, int]]:
    shape = cluster.shape
    node = min(cluster.gpu.gpus_per_node, cluster.num_gpus)
    tensors = [n for n in range(1, node + 1) if node % n == 0]
    tensors = [n for n in tensors if shape.heads % n == 0 and shape.key_value_heads % n == 0]
    for tensor in tensors:
        for pipeline in _divisors(shape.layers):
            for context in _contexts(cluster.sequence_length):
                data, rest = divmod(cluster.num_gpus, tensor * pipeline * context)
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
    tokens = micro_batch * cluster.sequence_length / context
    bubble = pipeline_bubble(pipeline, microbatches)
    counted = flops_per_token(size, cluster.sequence_length)
    flops = (
        (counted.hardware if recompute else counted.training) * cluster.sequences * cluster.sequence_length
    )
    ideal = flops / (cluster.num_gpus * cluster.flops_per_second)
    passes, layers = microbatches * (1 + bubble), shape.layers // pipeline
    in_flight = min(pipeline, microbatches)
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
        / _link(gpu, cluster.num_gpus),
        data_seconds=_data_bytes(memory, data * context) / _link(gpu, data * context * tensor),
    )


def _tensor_bytes(shape: LayerShape, tokens: float, tensor: int, recompute: bool) -> float:
    """A layer's all-reduces: two forward, two backward, and two more where the forward pass is repeated.

    Megatron-LM (Shoeybi et al. 2019), figure 4; a ring sends 2 (t - 1) / t of the message.
    """
    message = BF16 * shape.width * tokens
    return (6 if recompute else 4) * message * 2 * (tensor - 1) / tensor


def _context_bytes(shape: LayerShape, tokens: float, tensor: int, context: int) -> float:
    """A layer's keys and values passed round the ring, forward and twice as much backward (Liu et al. 2023)."""
    message = BF16 * 2 * shape.key_value_width / tensor * tokens
    return 3 * message * (context - 1)


def _pipeline_bytes(shape: LayerShape, tokens: float, tensor: int, pipeline: int) -> float:
    """Activations to the next stage and gradients back, each once a micro-batch; a stage's ranks share them."""
    return 2 * BF16 * shape.width * tokens / tensor if pipeline > 1 else 0.0


def _data_bytes(memory: LayoutMemory, shards: int) -> float:
    """Reduce-scatter of fp32 gradients and all-gather of bf16 weights, once a step (ZeRO, section 7)."""
    return memory.weights_and_gradients * (shards - 1) / shards


def _link(gpu: Gpu, group: int) -> float:
    """Bytes per second of the slowest link in a group of neighbouring GPUs."""
    inside = gpu.link_bytes_per_second
    return inside if group <= gpu.gpus_per_node else min(inside, gpu.network_bytes_per_second)


def _contexts(sequence_length: int) -> list[int]:
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
