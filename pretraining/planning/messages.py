"""The messages of a step: what each rank sends, to ranks of its node and to other nodes, and how long that takes.

ZeRO's messages may be hidden behind the products, unless a pass stops for them (`stops_for_gradients`). A layer that
is split over ranks waits for its own: those of tensor parallelism (all-reduces), sequence parallelism and expert
parallelism (all-to-alls) are never hidden.

Ranks are numbered with tensor parallelism innermost, then sequence parallelism, then data. So the ranks of a tensor
group are neighbours, and those of a sequence group are as many ranks apart as a tensor group has.
"""

from dataclasses import dataclass, replace

from pretraining.ds_config import NOT_SPLIT, hpz_ranks, zero_stage
from pretraining.planning.gpus import Gpu, kept_rates
from pretraining.planning.memory.need import skips_last_product
from pretraining.planning.setup import FP32, Setup
from pretraining.planning.shapes import key_value_copies, parameter_tensors, ranks_met

GRADIENTS, WEIGHTS, WEIGHTS_IN_NODE = "gradients", "weights", "weights in hpZ groups"
TENSOR, SEQUENCE, EXPERT = "tensor all-reduces", "sequence all-to-alls", "expert all-to-alls"
LAYER_MESSAGES = (TENSOR, SEQUENCE, EXPERT)
"""Names of the messages that a layer waits for."""
FORWARD_SUMS, BACKWARD_SUMS = 2, 5
"""All-reduces of a layer under AutoTP (deepspeed 0.19.8, module_inject/layers.py): forward the results of attention and
of the feed-forward part; backward the gradient of the input of each matrix whose outputs are cut, three and two."""


TABLE_SUMS = 2
"""All-reduces outside the layers (model/parallel.py): the embeddings, and the gradient of the head's input."""
OF_NORMALISER = 8
"""Bytes of each token that a rank sends to the others for the loss: log Z and the target's logit, in fp32."""


@dataclass(frozen=True)
class Message:
    """What one rank sends in a step for one purpose."""

    name: str
    ranks: int
    """Ranks of the group."""
    inside_bytes: float
    """Bytes at the rate of the link inside a node."""
    across_bytes: float
    """Bytes at the rate of the network: a ring over several nodes is as slow as its slowest link."""
    seconds: float
    """At the peak of the links, or at the rate that the doctor measured here; a lower bound."""

    @property
    def total(self) -> float:
        return self.inside_bytes + self.across_bytes


def zero_bytes(
    parameters: int, stage: int, num_ranks: int, accumulation: int = 1, width: int = 2, hpz: int = 1
) -> dict[str, float]:
    """Return the bytes that one rank sends in a step, by what they are for: ZeRO (Rajbhandari et al. 2020), section 7.

    With psi parameters and without accumulation, a rank sends 2 psi elements at stages 0 to 2, and 3 psi at stage 3.

    Args:
        width: bytes of an element.
        hpz: ranks of a secondary partition (zero_hpz_partition_size), 1 for none.
    """
    # a ring sends (n - 1) / n of each message
    once = parameters * width * (num_ranks - 1) / num_ranks
    # reduced once a step in any case; psi are reduced and psi gathered
    if stage < 2:
        return {GRADIENTS: once, WEIGHTS: once}
    # gradients exist only as shards, so every micro-batch reduces (DeepSpeed 0.19, runtime/zero/stage_1_and_2.py)
    if stage == 2:
        return {GRADIENTS: once * accumulation, WEIGHTS: once}
    # the forward and the backward pass each gather all weights, in every micro-batch
    gathers = once * accumulation
    if hpz <= 1:
        return {GRADIENTS: gathers, WEIGHTS: 2 * gathers}
    # hpZ gathers for the backward pass inside the node (ZeRO++, Wang et al. 2023)
    inside = accumulation * parameters * width * (hpz - 1) / hpz
    return {GRADIENTS: gathers, WEIGHTS: gathers, WEIGHTS_IN_NODE: inside}


def stops_for_gradients(ds_config: dict | None) -> bool:
    """Return whether every pass waits for its gradients to be reduced, so that nothing hides these messages."""
    # deepspeed 0.19.8, stage_1_and_2.py `average_tensor`: on the stream of the pass itself, unless `overlap_comm`
    zero = (ds_config or {}).get("zero_optimization") or {}
    return zero_stage(ds_config) == 2 and not zero.get("overlap_comm")


def step_messages(setup: Setup, gpu: Gpu) -> list[Message]:
    """Return the messages of one optimizer step that are not empty; `UserError` if the ranks do not divide the step."""
    width, link, group = setup.precision.weights, gpu.link_bytes_per_second, hpz_ranks(setup.ds_config)
    measured = kept_rates(gpu.name, setup.world_size).get("all_reduce_bytes_per_second")
    sums: dict[str, Message] = {}
    # those that shard model states; the groups of a family reach over all nodes
    for family in setup.families:
        hpz = min(group, family.ranks)
        sent = zero_bytes(family.numel, setup.stage, family.ranks, setup.accumulation, width, hpz)
        for name, size in sent.items():
            of_gradients = setup.gradient_bytes / width * family.trained_numel / family.numel
            size *= of_gradients if name == GRADIENTS else 1
            inside = setup.world_size <= gpu.gpus_per_node or name == WEIGHTS_IN_NODE
            # a ring is as fast as its slowest link, which a measured rate includes already
            rate = link if inside else min(link, gpu.network_bytes_per_second)
            rate = measured["value"] if measured else rate
            ranks = group if name == WEIGHTS_IN_NODE else family.ranks
            # those of dense parameters and of experts are added up
            before = sums.get(name, Message(name, ranks, 0, 0, 0))
            sums[name] = replace(
                before,
                inside_bytes=before.inside_bytes + size * inside,
                across_bytes=before.across_bytes + size * (not inside),
                seconds=before.seconds + size / rate,
            )
    return [message for message in (*sums.values(), *layer_messages(setup, gpu)) if message.total]


def layer_messages(setup: Setup, gpu: Gpu) -> list[Message]:
    """Return the messages of one optimizer step that layers wait for."""
    recipe, degrees, widths = setup.recipe, setup.degrees, setup.widths
    if degrees == NOT_SPLIT:
        return []
    width, again = setup.precision.compute, recipe.training.recomputed_share
    tokens = setup.accumulation * recipe.micro_batch * recipe.sequence_length / degrees.sequence
    # a recomputed layer that stops before its last product does not add it up again either
    again_sums = again * (FORWARD_SUMS - skips_last_product(setup))
    message = width * tokens * widths.hidden * widths.layers
    sums = message * (FORWARD_SUMS + BACKWARD_SUMS + again_sums)
    # an all-gather of a part sends half as much as an all-reduce of all parts
    sums += tokens * (TABLE_SUMS * width * widths.hidden + OF_NORMALISER * degrees.tensor / 2)
    # queries, keys and values there, results back, and their gradients
    keys = widths.keys * key_value_copies(widths, degrees)
    exchanged = width * tokens * widths.layers * (2 * widths.queries + 2 * keys) * (2 + again)
    sparse = len({tensor.layer for tensor in parameter_tensors(recipe.model) if tensor.part == "experts"})
    # a token once to each rank that has any of its experts, a sum back, and their gradients; a recomputed layer sends
    # the tokens again, but no sums
    rows = tokens * sparse * ranks_met(widths.experts, widths.chosen_experts, degrees.expert)
    routed = rows * width * widths.hidden * (4 + again)
    # numbers and weights of its experts, in fp32, and gradients of both
    routed += rows * FP32 * 2 * widths.chosen_experts * (2 + again)
    # all-reduces over neighbouring ranks: a ring sends 2 (t - 1) / t of each message
    sums *= 2 * (degrees.tensor - 1) / degrees.tensor
    near = not spans_nodes(degrees.tensor, 1, gpu.gpus_per_node)
    rate = gpu.link_bytes_per_second
    rate = rate if near else min(gpu.network_bytes_per_second, rate)
    return [
        Message(TENSOR, degrees.tensor, sums * near, sums * (not near), sums / rate),
        _all_to_all(SEQUENCE, exchanged, degrees.sequence, degrees.tensor, gpu),
        _all_to_all(EXPERT, routed, degrees.expert, degrees.tensor, gpu),
    ]


def spans_nodes(ranks: int, stride: int, gpus_per_node: int) -> bool:
    """Return whether a group of ranks, `stride` apart, has members in several nodes."""
    reach = ranks * stride
    return ranks > 1 and (reach > gpus_per_node or gpus_per_node % reach > 0)


def _all_to_all(name: str, size: float, ranks: int, stride: int, gpu: Gpu) -> Message:
    """Return exchanges of `size` bytes, of which each of the ranks, `stride` apart, gets an equal part."""
    near = ranks if not spans_nodes(ranks, stride, gpu.gpus_per_node) else max(1, gpu.gpus_per_node // stride)
    near = min(near, ranks)
    inside, across = size * (near - 1) / ranks, size * (ranks - near) / ranks
    seconds = inside / gpu.link_bytes_per_second + across / gpu.network_bytes_per_second
    return Message(name, ranks, inside, across, seconds)
