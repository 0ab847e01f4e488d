"""Bytes of model state per GPU and per host, at every ZeRO stage, and of the buffers that ZeRO needs beside it."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import accumulate

from pretraining.ds_config import hpz_ranks, optimizer_device, parameter_device, value_at
from pretraining.planning.setup import FP32, SIXTEEN_BIT, Family, Setup
from pretraining.planning.shapes import EMBEDDING, HEAD, HIDDEN, ROUTER, VECTOR, Tensor, layer_numel
from pretraining.planning.sizes import check_rows, frozen_tensors, trained_tensors
from pretraining.recipe import Recipe
from pretraining.recipe.refusals import gathers_blocks

ELEMENTS_A_SCALE, SMALLEST_IN_8_BIT = 256, 4096
"""Elements that share a scale, and the least elements of a tensor that is kept in 8 bit (bitsandbytes 0.50)."""
# the first part found in the name counts, so the longer of two names that contain each other comes first
FAMILIES = {
    "schedule_free_sgd": ("schedule-free SGD's sequence", 1),
    "schedule_free": ("schedule-free Adam's states", 2),
    "ademamix": ("AdEMAMix's moments", 3),
    "adafactor": ("Adafactor's factors", 0),
    "adam": ("Adam's moments", 2),
    "lion": ("Lion's momentum", 1),
    "rmsprop": ("RMSprop's mean squares", 1),
    "adagrad": ("Adagrad's sums", 1),
    "sgd": ("SGD's momentum", 0),
}
"""Part of a name of `training.optim` -> what its states are called, and how many numbers it keeps for each weight."""
ALIGNMENT = 2
"""Elements to a multiple of which a rank's share is padded (`nccl_start_alignment_factor`, deepspeed 0.19.8)."""
Groups = Sequence[Sequence[Tensor]]


@dataclass(frozen=True)
class OptimizerStates:
    """The states of one optimizer."""

    name: str
    """As the plan calls them."""
    bytes_of: Callable[[Tensor], float]
    """For a whole tensor."""
    groups: tuple[tuple[str, ...], ...] | None = None
    """Kinds of tensors in each parameter group; None: the Trainer's two groups, with and without weight decay."""
    copied: str | None = None
    """The kind of tensors that a step copies in fp32 once more."""

    def in_groups(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        # ZeRO puts the tensors of each group end to end before it cuts the group into slices
        if self.groups is None:
            return [[t for t in tensors if t.decays is decays] for decays in (True, False)]
        return [[t for t in tensors if t.kind in kinds] for kinds in self.groups]


def optimizer_states(recipe: Recipe) -> OptimizerStates:
    """Return the states of the recipe's optimizer, an average of the weights included; `UserError` as `check_rows`."""
    check_rows(recipe)
    own = _states_of(recipe)
    if recipe.optimizer.average_decay is None:
        return own
    name = f"{own.name} and the average"
    return replace(own, name=name, bytes_of=lambda tensor: own.bytes_of(tensor) + FP32 * tensor.numel)


def _states_of(recipe: Recipe) -> OptimizerStates:
    """Return what the optimizer itself keeps; as Adam if no family names it."""
    if recipe.optimizer.name == "muon":
        return MUON
    if recipe.own_groups:
        return replace(ADAM, groups=MUON.groups)
    optim = recipe.training.optim
    # Adam as the default: its states are seldom the smaller ones
    family = next((part for part in FAMILIES if part in optim), "adam")
    name, numbers = FAMILIES[family]
    if family == "adafactor":
        # a mean of every row and of every column (Shazeer and Stern 2018); no first moment
        return OptimizerStates(name, lambda tensor: FP32 * tensor.factors)
    if family in ("sgd", "rmsprop"):
        words = (recipe.training.optim_args or "").replace(" ", "").lower().split(",")
        given = dict(pair.partition("=")[::2] for pair in words)
        # a momentum above 0 ("0", "0.0" and ".0" leave nothing), and RMSprop's centered mean are one more each
        numbers += given.get("momentum", "0").strip("0.") != ""
        numbers += given.get("centered") in ("true", "1", "yes")
    # the block sizes above are those of bitsandbytes
    if "8bit" in optim and "torch" not in optim:

        def in_8_bit(tensor: Tensor) -> float:
            # embeddings stay fp32 (transformers 5.24, trainer.py), as small tensors do
            if tensor.numel < SMALLEST_IN_8_BIT or tensor.kind == EMBEDDING:
                return FP32 * numbers * tensor.numel
            # one byte for each number, and an fp32 scale for each group of them
            return numbers * (tensor.numel + FP32 * -(-tensor.numel // ELEMENTS_A_SCALE))

        return OptimizerStates(f"8-bit {name}", in_8_bit)
    return OptimizerStates(name, lambda tensor: FP32 * numbers * tensor.numel)


ADAM = OptimizerStates(FAMILIES["adam"][0], lambda tensor: 2 * FP32 * tensor.numel)
MUON = OptimizerStates(
    "Muon's and Adam's moments",
    # of a hidden matrix its momentum, of any other tensor AdamW's two moments
    lambda tensor: FP32 * (1 if tensor.kind == HIDDEN else 2) * tensor.numel,
    groups=((EMBEDDING, HEAD, ROUTER), (VECTOR,), (HIDDEN,)),
    copied=HIDDEN,
)


@dataclass(frozen=True)
class ModelState:
    """Bytes that the fullest rank holds between the passes of a step, by use.

    Activations, logits, communication buckets and gathered parameters come on top of these.
    """

    parameters: float
    """Weights in the precision of the forward pass."""
    gradients: float
    """Gradients as the backward pass leaves them. 0 at stage 1 in 16 bit: each is added to its fp32 sum at once. 0 from
    stage 2 on: they exist only inside a bucket."""
    gradient_accumulation: float
    """fp32 sums over the micro-batches of a step."""
    masters: float
    """fp32 master weights; 0 if the weights themselves are the masters."""
    moments: float
    """The optimizer's states beside the masters: for AdamW, two moments in fp32."""
    host: float
    """Offloaded bytes in host memory; not part of `gpu`."""
    nvme: float = 0.0
    """Offloaded bytes on NVMe."""

    @property
    def master_and_moments(self) -> float:
        return self.masters + self.moments

    @property
    def gpu(self) -> float:
        return self.parameters + self.gradients + self.gradient_accumulation + self.master_and_moments

    def to_dict(self) -> dict:
        return {**asdict(self), "master_and_moments": self.master_and_moments, "gpu": self.gpu}


def state_of(setup: Setup) -> ModelState:
    """Return the model state of the fullest rank, with the recipe's optimizer."""
    states = [model_state(setup, family) for family in setup.families]
    # every part of one family comes on top of that of the other
    return ModelState(*(sum(parts) for parts in zip(*map(astuple, states), strict=True)))


def model_state(setup: Setup, family: Family) -> ModelState:
    """Return model state of the fullest rank of those that share a family of parameters.

    The stages shard as in ZeRO (Rajbhandari et al. 2020, section 5 and figure 1): stage 1 the optimizer states,
    stage 2 also the gradients, stage 3 also the parameters. The paper counts 2 + 2 + 12 = 16 bytes per parameter.
    Here gradients are accumulated in fp32 (`data_types.grad_accum_dtype`), so stage 3 holds 2 + 4 + 12 = 18 over all
    ranks. Without DeepSpeed, weights stay fp32 (autocast), and every rank holds 4 + 4 + 8.
    """
    config, optimizer, wide = setup.ds_config, optimizer_states(setup.recipe), setup.wide_of(family)
    parameters, world_size = family.trained_numel, family.ranks
    groups = optimizer.in_groups(family.trained)
    if config is None:
        # DistributedDataParallel keeps its buckets beside the sums while it accumulates (torch 2.13, reducer.cpp)
        gradients = 2 if world_size > 1 and setup.accumulation > 1 else 1
        moments = _moments(optimizer, groups, world_size, 0)
        # no masters: under autocast the fp32 weights are the masters
        return ModelState(FP32 * family.numel, gradients * FP32 * parameters, 0, 0, moments, 0)
    stage, width = setup.stage, setup.precision.weights
    sixteen_bit = width == SIXTEEN_BIT
    share, of_wide = _share(world_size, stage, groups), FP32 - width
    if stage == 3:
        # small tensors stay whole on every rank
        elements = share + _share(world_size, 3, [family.frozen]) + _persistent(config, family.tensors)
        of_wide *= _share(world_size, 3, [wide]) + _persistent(config, wide)
        weights = float(width * elements + of_wide)
    else:
        weights = width * family.numel + of_wide * _numel(wide)
    if (group := hpz_ranks(config)) > 1:
        # the second copy of the weights, sharded inside a node (ZeRO++, Wang et al. 2023)
        weights += width * family.numel / min(group, world_size)
    # from stage 1 on, each rank keeps masters for its share alone
    held = share if stage else parameters
    if stage == 3:
        sums = FP32 * share
    elif stage == 2:
        # in fp32 a rank holds the whole sum of every tensor that reaches into its slice, so that several ranks hold a
        # large table (`get_all_grad_tensors`, deepspeed 0.19.8 zero/stage_1_and_2.py); in 16 bit it holds the slice
        # alone (`_use_compact_grad_partition_buffer`)
        sums = FP32 * (share if sixteen_bit else _fullest_straddle(groups, world_size))
    else:
        # whole at stage 1 in 16 bit (BF16_Optimizer); else the gradients themselves are the sums
        sums = FP32 * parameters if stage == 1 and sixteen_bit else 0
    state = ModelState(
        parameters=weights,
        gradients=width * parameters if stage == 0 or (stage == 1 and not sixteen_bit) else 0,
        gradient_accumulation=sums,
        masters=FP32 * held if sixteen_bit or stage > 0 else 0,
        moments=_moments(optimizer, groups, world_size, stage),
        host=0,
    )
    weight_share = width * share + (FP32 - width) * _numel(wide) / world_size
    return _offloaded(setup, state, FP32 * share, weight_share)


def _share(world_size: int, stage: int, groups: Groups) -> int:
    """Return the elements of one rank: a slice of each flat group at stages 1 and 2, of each tensor at stage 3."""
    if stage == 3:
        return sum(-(-tensor.numel // world_size) for group in groups for tensor in group)
    return sum(_slice(_numel(group), world_size) for group in groups)


def _moments(optimizer: OptimizerStates, groups: Groups, world_size: int, stage: int) -> float:
    """Return the bytes of the optimizer's states for one rank's share, padding included."""
    if stage == 0:
        return sum(optimizer.bytes_of(tensor) for group in groups for tensor in group)
    if stage == 3:
        tensors = [tensor for group in groups for tensor in group]
        return sum(optimizer.bytes_of(t) * -(-t.numel // world_size) / t.numel for t in tensors)
    # stages 1 and 2 cut a whole group into equal slices: a rank's share of its states is its share of the elements
    sizes = [(sum(map(optimizer.bytes_of, group)), _numel(group)) for group in groups if group]
    return sum(size * _slice(numel, world_size) / numel for size, numel in sizes)


def _numel(group: Sequence[Tensor]) -> int:
    return sum(tensor.numel for tensor in group)


def _slice(numel: int, world_size: int) -> int:
    # the group is padded until all ranks have equal, aligned slices
    unit = ALIGNMENT * world_size
    return -(-numel // unit) * unit // world_size


def _fullest_straddle(groups: Groups, world_size: int) -> int:
    """Return the elements of all tensors that reach into a rank's slices, at the rank that has most."""
    held = [0] * world_size
    for group in filter(None, groups):
        sizes, size = [tensor.numel for tensor in group], _slice(_numel(group), world_size)
        ends = list(accumulate(sizes))
        for rank in range(world_size):
            # the tensor that holds the slice's first element
            first = bisect_right(ends, rank * size)
            last = min(bisect_right(ends, (rank + 1) * size - 1), len(sizes) - 1)
            # a last slice may hold padding alone
            held[rank] += ends[last] - ends[first] + sizes[first] if first < len(sizes) else 0
    return max(held)


def _persistent(config: dict, tensors: Sequence[Tensor]) -> int:
    """Return the elements of tensors that stage 3 never releases (`param_persistence_threshold`, zero/config.py)."""
    threshold = config["zero_optimization"].get("stage3_param_persistence_threshold", 100_000)
    if threshold == "auto":
        # 10 x the hidden size (transformers 5.24, integrations/deepspeed.py); the last norm is as wide as the model
        outside = [t.numel for t in tensors if t.layer is None and not t.decays]
        threshold = 10 * max(outside, default=0)
    return sum(tensor.numel for tensor in tensors if tensor.numel <= threshold)


def _offloaded(setup: Setup, state: ModelState, fp32_share: float, weight_share: float) -> ModelState:
    """Move what the ds_config offloads off the GPU; gradients go to host memory, never to NVMe."""
    config, zero, places = setup.ds_config, setup.stage, {"gpu": 0.0, "cpu": 0.0, "nvme": 0.0}
    if optimizer_device(config) != "gpu":
        places[optimizer_device(config)] += state.master_and_moments
        # sums move with the optimizer; stages 1 and 2 need them only with accumulation (zero/stage_1_and_2.py)
        sums = fp32_share if zero == 1 else state.gradient_accumulation
        sums = sums if zero == 3 or setup.accumulation > 1 else 0
        # each master has a `.grad` for the step (deepspeed 0.19.8, zero/stage3.py `initialize_optimizer_states`);
        # stages 1 and 2 also keep the slice in 16 bit (`param_buffer_of_bit16_for_cpu_offload_groups`)
        places["cpu"] += sums + fp32_share + (weight_share if zero < 3 else 0)
        state = replace(state, gradients=0, gradient_accumulation=0, masters=0, moments=0)
    if parameter_device(config) != "gpu":
        on_host = min(state.parameters, setup.precision.weights * held_on_host(config))
        places["cpu"] += on_host
        # if not all weights find room on the host, whole sub-groups do not: up to all are on NVMe
        places["nvme"] += state.parameters if on_host < state.parameters else 0
        state = replace(state, parameters=0)
    return replace(state, host=places["cpu"], nvme=places["nvme"])


def held_on_host(config: dict | None) -> float:
    """Return how many elements of offloaded weights DeepSpeed 0.19.8 keeps in host memory, also if they go to NVMe."""
    settings = value_at(config, "zero_optimization.offload_param") or {}
    return settings.get("max_in_cpu", MAX_IN_CPU) if settings.get("device") == "nvme" else math.inf


def pinned_by_offload(setup: Setup) -> list[int]:
    """Return the bytes of each buffer that offloading pins on a rank (deepspeed 0.19.8)."""
    zero = (setup.ds_config or {}).get("zero_optimization") or {}
    settings = zero.get("offload_optimizer") or {}
    states_are_pinned = settings.get("device") == "cpu" and settings.get("pin_memory", True)
    pinned, width, most = [], setup.precision.weights, int(zero.get("sub_group_size", SUB_GROUP))
    for family in (each for each in setup.families if each.trained):
        groups = optimizer_states(setup.recipe).in_groups(family.trained)
        if parameter_device(setup.ds_config) != "gpu":
            # the weights in one buffer (stage3.py, `_create_param_groups_fp16_flat_cpu_memory`)
            weights = _share(family.ranks, 3, groups)
            pinned.append(int(width * min(weights, held_on_host(setup.ds_config))))
        if not states_are_pinned:
            continue
        if setup.stage < 3:
            # for each group: masters, their gradients and their 16-bit copy; and one gradient on its way
            # (stage_1_and_2.py)
            slices = [_slice(_numel(group), family.ranks) for group in groups if group]
            pinned += [size * held for held in slices for size in (FP32, FP32, width)]
            pinned.append(width * max(tensor.numel for tensor in family.trained))
        else:
            # the gradient sums in one buffer, and one buffer for the gradients of each sub-group (stage3.py)
            share = _share(family.ranks, 3, groups)
            pinned += [FP32 * share, *(FP32 * min(most, share - start) for start in range(0, share, most))]
    return pinned


def checkpoint_bytes(recipe: Recipe, width: int) -> int:
    """Return the bytes of a checkpoint over all ranks, at any stage: fp32 weights and optimizer states.

    width: bytes of a weight; of frozen parameters the weights alone are saved.
    """
    optimizer = optimizer_states(recipe)
    trained = sum(FP32 * each.numel + round(optimizer.bytes_of(each)) for each in trained_tensors(recipe))
    return trained + width * _numel(frozen_tensors(recipe))


REDUCE_BUCKET, PREFETCH_BUCKET = 500_000_000, 50_000_000
MAX_REUSE_DISTANCE = MAX_LIVE_PARAMETERS = SUB_GROUP = 1_000_000_000
MAX_IN_CPU = 1_000_000_000
"""Elements: DeepSpeed 0.19.8's defaults (runtime/zero/config.py, offload_config.py)."""


@dataclass(frozen=True)
class Buffers:
    """Bytes on the GPU."""

    buckets: float
    """Gradients on their way to other ranks, during the backward pass."""
    gathered: float
    """At stage 3: whole weights that are in use, kept for reuse, or prefetched."""
    in_flight: float
    """Whole gradients that have not reached their bucket yet."""
    step: float
    """Copies of gradients that are made in the optimizer step."""


def buffers(setup: Setup) -> Buffers:
    """Return buffers of the stage, for parameters of the size that a rank would hold without ZeRO."""
    if setup.ds_config is None:
        return Buffers(0, 0, 0, 0)
    config, stage, zero = setup.ds_config, setup.stage, setup.ds_config["zero_optimization"]
    element, tensors = setup.precision.weights, setup.held
    total = sum(family.trained_numel for family in setup.families)
    # elements that a rank steps
    share = sum(family.trained_numel / family.ranks for family in setup.families)
    wide = [tensor for family in setup.families for tensor in setup.wide_of(family)]
    bucket = element * reduce_bucket(setup)
    wider = (FP32 - element) * _numel(wide)
    # they are cast a bucket at a time, or one that is larger than it
    sent = setup.gradient_bytes
    if sent > element:
        bucket += sent * max(bucket / element, *(tensor.numel for tensor in tensors))
    if stage == 3:
        # a block's weights may be gathered as one, and its gradients reduced together
        as_one = gathers_blocks(setup.recipe, config)
        gathered = _gathered(setup, as_one)
        # of the layers that modules in fp32 are in, as many are gathered as of all
        inside = _numel([tensor for tensor in wide if tensor.layer is not None])
        wider -= (FP32 - element) * inside * (1 - gathered / _numel(tensors))
        # one sub-group is stepped after another
        stepped = min(share, _elements(zero, "sub_group_size", SUB_GROUP, SUB_GROUP))
        return Buffers(
            buckets=bucket,
            gathered=element * gathered + wider,
            # whole gradients: those of a block together, else one tensor at a time
            in_flight=max(
                element * layer_numel(tensors) * as_one,
                *((FP32 if tensor in wide else element) * tensor.numel for tensor in tensors),
            ),
            # an offloaded optimizer copies in host memory
            step=FP32 * stepped if optimizer_device(config) == "gpu" else 0,
        )
    # two buffers take turns if the backward pass goes on during a reduction (`setup_buckets`, stage_1_and_2.py)
    turns = 2 if zero.get("overlap_comm") else 1
    if stage == 2:
        # with accumulation, the fp32 sums of the rank's share are held beside its gradients
        in_flight = element * share + wider / setup.world_size
        in_flight += FP32 * share if setup.accumulation > 1 else 0
        # offloaded gradients leave the GPU one by one
        if optimizer_device(config) != "gpu":
            in_flight = element * max(tensor.numel for tensor in tensors)
        return Buffers(turns * bucket, 0, in_flight, FP32 * share)
    if stage == 1 and setup.precision.name == "bf16":
        # BF16_Optimizer reduces its fp32 sums after the pass: cast to 16 bit, or laid end to end (engine.py
        # `allreduce_bucket`)
        return Buffers(0, 0, 0, element * total if sent == element else sent * min(total, REDUCE_BUCKET))
    # in fp32 and fp16 DeepSpeed uses the optimizer of stage 2 at stage 1 too, with whole gradients
    if stage == 1:
        return Buffers(turns * bucket, 0, 0, FP32 * share)
    # stage 0: DeepSpeed's engine flattens the gradients that it reduces, a bucket at a time
    return Buffers(0, 0, 0, element * min(total, REDUCE_BUCKET) if setup.world_size > 1 else 0)


def reduce_bucket(setup: Setup) -> float:
    """Return how many elements of gradients are reduced together, at most all of a rank's."""
    automatic = setup.recipe.model.hidden_size**2
    asked = _elements(setup.ds_config["zero_optimization"], "reduce_bucket_size", REDUCE_BUCKET, automatic)
    return min(asked, _numel(setup.held))


def unprotected_gradient(setup: Setup) -> Tensor | None:
    """Return the largest gradient that ZeRO-2 frees on a GPU while another stream may still read it.

    A gradient that is larger than the bucket is reduced in its own place. With `overlap_comm` this happens on a stream
    of its own. A rank that keeps no part of the gradient frees it at once, but does not notify the allocator about that
    stream. So the next kernel may write into it (deepspeed 0.19.8, zero/stage_1_and_2.py, `average_tensor`,
    `clear_grad_attribute`).
    """
    # with an offloaded optimizer DeepSpeed notifies the allocator; a single rank keeps all gradients
    several = any(family.ranks > 1 for family in setup.families)
    if setup.stage != 2 or optimizer_device(setup.ds_config) != "gpu" or not several:
        return None
    zero = setup.ds_config["zero_optimization"]
    largest = max(setup.held, key=lambda tensor: tensor.numel)
    frees_at_once = zero.get("overlap_comm") and zero.get("contiguous_gradients", True)
    return largest if frees_at_once and largest.numel > reduce_bucket(setup) else None


def _gathered(setup: Setup, as_one: bool) -> float:
    """Return the elements of whole weights that are held at a time.

    A weight stays gathered after its forward pass if it is used again within `stage3_max_reuse_distance` elements
    (zero/partitioned_param_coordinator.py). The layer at work and the prefetched weights come on top. What one rank
    alone holds takes part in these distances, but is not copied (`NoGatherHandle`, zero/partition_parameters.py).
    """
    zero, tensors, width = setup.ds_config["zero_optimization"], setup.held, setup.recipe.model.hidden_size
    if as_one:
        zero = {**zero, **block_gathering(zero, layer_numel(tensors))}
    shared = [each for family in setup.families if family.ranks > 1 for each in family.tensors] or tensors
    share = layer_numel(shared) / layer_numel(tensors)
    reuse = _elements(zero, "stage3_max_reuse_distance", MAX_REUSE_DISTANCE, MAX_REUSE_DISTANCE)
    prefetch = _elements(zero, "stage3_prefetch_bucket_size", PREFETCH_BUCKET, 0.9 * width**2)
    tables = max((tensor.numel for tensor in shared if tensor.layer is None), default=0)
    at_work = max(layer_numel(shared), tables)
    # a weight of the last half of that distance before the loss comes back within it, on the way back
    return min(sum(tensor.numel for tensor in shared), share * (reuse / 2 + prefetch) + at_work)


def block_gathering(zero: dict, block_numel: int) -> dict:
    """Return the keys of `zero_optimization` for gathering ahead, if weights are gathered a block at a time.

    A number in the file stays; only `"auto"` is replaced. block_numel: parameters of the largest block.
    """
    keys = {}
    if zero.get("stage3_prefetch_bucket_size", "auto") == "auto":
        # the next block is gathered while one computes; transformers' "auto" is only a share of a block,
        # so that the next one would wait for the rest
        keys["stage3_prefetch_bucket_size"] = block_numel
    if zero.get("stage3_max_live_parameters", "auto") == "auto":
        keys["stage3_max_live_parameters"] = max(MAX_LIVE_PARAMETERS, 3 * block_numel)
    return keys


def _elements(zero: dict, key: str, default: float, automatic: float) -> float:
    """Return a size of the ds_config in elements; `automatic` is what transformers writes for `"auto"`."""
    # the model's width decides it (transformers 5.24, integrations/deepspeed.py)
    value = zero.get(key, default)
    return automatic if value == "auto" else value
