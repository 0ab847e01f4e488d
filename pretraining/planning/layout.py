"""One layout of data x tensor x pipeline x context parallelism: the memory it takes, and the seconds of its step."""

from dataclasses import asdict, dataclass
from typing import NamedTuple

from pretraining.planning.constants import table
from pretraining.planning.gpus import Gpu
from pretraining.planning.shapes import widths_of
from pretraining.planning.sizes import ModelSize, flops_per_token

# bytes an element
BF16, FP32 = 2, 4
RESERVES = ("fragmentation", "cuda_context_bytes", "nccl_bytes")


class Division(NamedTuple):
    """How many GPUs each part of the work is divided over."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    micro_batch: int = 1
    """Sequences per pipeline and pass."""


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
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class ParallelLayout:
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
        return {**asdict(self), "memory": self.memory.to_dict(), "step_seconds": self.step_seconds}


@dataclass(frozen=True)
class Cluster:
    """The model, the step and the GPUs that all layouts of one question share."""

    size: ModelSize
    shape: dict
    """Of `shapes.shape_of`."""
    sequence_length: int
    sequences: int
    """Per optimizer step."""
    num_gpus: int
    gpu: Gpu
    flops_per_second: float
    """FLOPs that the kernels of one GPU reach in a second."""
    optimizer_width: float = 3 * FP32
    """Bytes of master weights and optimizer states per parameter."""


def layout_of(cluster: Cluster, division: Division, recompute: bool) -> ParallelLayout:
    """Return the layout of a division that divides the model, the step and the GPUs."""
    data, tensor, pipeline, context, micro_batch = division
    size, gpu, widths = cluster.size, cluster.gpu, widths_of(cluster.shape)
    microbatches, layers = cluster.sequences // (data * micro_batch), widths.layers // pipeline
    # per GPU and pass: context parallelism splits each sequence
    tokens = micro_batch * cluster.sequence_length / context
    bubble = pipeline_bubble(pipeline, microbatches)
    counted = flops_per_token(size, cluster.sequence_length)
    per_token = counted.hardware if recompute else counted.training
    # seconds without bubbles and messages
    ideal = per_token * cluster.sequences * cluster.sequence_length
    ideal /= cluster.num_gpus * cluster.flops_per_second
    # the bubble counts as extra passes, in messages as in products
    passes = microbatches * (1 + bubble)
    memory = layout_memory(cluster, division, recompute)
    # all-reduces of a layer (Megatron-LM, Shoeybi et al. 2019, figure 4): two forward, two backward, two more if the
    # forward pass is repeated; a ring sends 2 (t - 1) / t of each
    tensor_bytes = (6 if recompute else 4) * BF16 * widths.hidden * tokens * 2 * (tensor - 1) / tensor
    # a layer's keys and values go round the ring once forward, and twice as much backward (Liu et al. 2023)
    context_bytes = 3 * (BF16 * 2 * widths.keys / tensor * tokens) * (context - 1)
    # a micro-batch's activations to the next stage and its gradients back, shared by a stage's tensor ranks
    pipeline_bytes = 2 * BF16 * widths.hidden * tokens / tensor if pipeline > 1 else 0.0
    # once a step: reduce-scatter of the fp32 gradients, all-gather of the bf16 weights (ZeRO, section 7); context ranks
    # hold the same weights as data ranks
    shards = data * context
    data_bytes = memory.weights_and_gradients * (shards - 1) / shards

    def link(group: int) -> float:
        """Return bytes per second of the slowest link in a group of neighbouring GPUs."""
        inside = gpu.link_bytes_per_second
        return inside if group <= gpu.gpus_per_node else min(inside, gpu.network_bytes_per_second)

    return ParallelLayout(
        **division._asdict(),
        microbatches=microbatches,
        recompute=recompute,
        layers_per_stage=layers,
        bubble=bubble,
        memory=memory,
        compute_seconds=ideal * (1 + bubble),
        # tensor ranks are neighbours inside a node (`parallelism._divisions`)
        tensor_seconds=passes * layers * tensor_bytes / gpu.link_bytes_per_second,
        context_seconds=passes * layers * context_bytes / link(tensor * context),
        # stages are the outermost dimension: with several nodes, some neighbours are in different ones
        pipeline_seconds=passes * pipeline_bytes / link(cluster.num_gpus),
        data_seconds=data_bytes / link(shards * tensor),
    )


def layout_memory(cluster: Cluster, division: Division, recompute: bool) -> LayoutMemory:
    """Return memory of the fullest GPU in bytes: the model states, the activations and the logits."""
    data, tensor, pipeline, context, micro_batch = division
    tokens, widths = micro_batch * cluster.sequence_length / context, widths_of(cluster.shape)
    held = gpu_parameters(cluster.size, tensor, pipeline)
    # with sequence parallelism, tensor ranks divide all activations (Korthikanti et al. 2022, table 2)
    one_layer = activation_bytes_per_token(cluster.shape) * tokens / tensor
    # with recomputation only each layer's input stays
    kept = BF16 * widths.hidden * tokens / tensor if recompute else one_layer
    # 1F1B: the first stage begins as many micro-batches as there are stages before the first returns (Narayanan et al.
    # 2021, section 2.2); the recomputed activations exist for one layer at a time
    in_flight = min(pipeline, cluster.sequences // (data * micro_batch))
    activations = in_flight * (widths.layers / pipeline) * kept
    return LayoutMemory(
        # bf16 weights, fp32 gradients
        weights_and_gradients=held * (BF16 + FP32),
        # shared as by Megatron-LM's distributed optimizer (ZeRO stage 1), over context ranks too
        optimizer=held * cluster.optimizer_width / (data * context),
        activations=activations + (one_layer if recompute else 0),
        # as a plain loss in memory/activations.py: fp32 log-probabilities, their gradient, the logits' gradient
        logits=3 * FP32 * tokens * cluster.shape["vocab_size"] / tensor,
    )


def gpu_parameters(size: ModelSize, tensor: int, pipeline: int) -> float:
    """Return the parameters on one GPU of the fuller end of the pipeline: its layers and a table."""
    # the first stage holds the embedding, the last one the head
    vocabulary = max(size.embedding, size.parts.head)
    layers = size.total - size.embedding - size.parts.head
    return (size.total if pipeline == 1 else layers / pipeline + vocabulary) / tensor


def activation_bytes_per_token(shape: dict) -> int:
    """Return bytes one layer keeps per token for its backward pass, in bf16 with fused attention.

    Korthikanti et al. 2022, section 4.1, without dropout masks: 32 h for GPT. A layer keeps the inputs of its two
    norms, the input of the attention, queries, keys, values and their result, the input of the feed-forward
    layer, and that layer's inner values.
    """
    widths = widths_of(shape)
    attention = widths.hidden + 2 * widths.queries + 2 * widths.keys
    # inner values before and after the activation function; a gated layer keeps four
    kept = 2 if shape["model_type"] == "gpt2" else 4
    # a mixture's: of all experts that a token is routed to; a dense model counts as one expert
    feed_forward = widths.hidden + kept * widths.expert_inner * widths.chosen_experts
    return BF16 * (2 * widths.hidden + attention + feed_forward)


def pipeline_bubble(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Return idle time over ideal time of a pipeline, (p - 1) / (v m): Narayanan et al. 2021, section 2.2.

    Args:
        microbatches: m, per pipeline and optimizer step.
        chunks: v, model chunks per GPU of the interleaved schedule.
    """
    return (stages - 1) / (chunks * microbatches)
