"""Refuse layouts, degrees of tensor, sequence and expert parallelism, that a model or what a recipe asks for rules out.

A degree that does not divide is refused with the nearest that does. `refusals.py` asks these checks among its own.
"""

from pretraining.ds_config import (
    Degrees,
    degrees_of,
    hpz_ranks,
    optimizer_device,
    parameter_device,
    zero_stage,
)
from pretraining.errors import UserError
from pretraining.recipe import Recipe
from pretraining.recipe.model import DROPOUTS, EXACT, EXPERTS, MIXTURES, Model, value_of
from pretraining.recipe.training import DEFAULT_OPTIM, ELEMENTWISE
from pretraining.schema import Wrong

SPLIT_KERNELS = ("sdpa", "sdpa_causal", "torch_varlen")
"""Values of `model.attn_implementation` that need no mask from transformers: they work on split sequences."""


def check_layout(recipe: Recipe, ds_config: dict | None) -> Wrong:
    """The model's shape allows the degrees of parallelism, and what the recipe asks for knows them."""
    degrees, model = degrees_of(ds_config), recipe.model.with_defaults()
    if recipe.speed.compile == "deepcompile":
        for size, split in zip(degrees, ("layers", "sequences", "experts"), strict=True):
            if size > 1:
                what = f"is deepcompile, which is not tried with split {split}; --set speed.compile=auto"
                yield "speed.compile", what
    for name, check in (("tensor", _check_tensor), ("sequence", _check_sequence), ("expert", _check_expert)):
        if (size := getattr(degrees, name)) > 1:
            yield from check(
                recipe, model, ds_config or {}, degrees, f"deepspeed {recipe.deepspeed}: {name} {size}"
            )


def _check_tensor(recipe: Recipe, model: Model, ds_config: dict, degrees: Degrees, name: str) -> Wrong:
    """AutoTP splits the model's layers evenly, and nothing needs whole parameters."""
    size, kind = degrees.tensor, model.model_type
    if kind == "gpt2":
        what = "gpt2 keeps queries, keys and values in one convolution, which AutoTP does not split"
        raise UserError(f"{name}: {what}; take model_type llama, or sequence parallelism")
    if not model.is_exact:
        known = ", ".join(each for each in EXACT if each != "gpt2")
        raise UserError(f"{name}: is tested for {known} alone, not for {kind}")
    if ds_config["tensor_parallel"].get("partition_config"):
        what = "tensor_parallel.partition_config: the model's type says which layers are split; leave it out"
        raise UserError(f"deepspeed {recipe.deepspeed}: {what}")
    if "nvme" in (parameter_device(ds_config), optimizer_device(ds_config)):
        raise UserError(f"{name}: is not tried with states on NVMe; use zero3_offload")
    if hpz_ranks(ds_config) > 1:
        what = "hpZ keeps copies of parameters by node, and split ones are partitioned over other ranks"
        raise UserError(f"{name}: {what}; leave zero_hpz_partition_size out")
    optim, split = recipe.training.optim, f"tensor {size} leaves a rank a part of each matrix"
    if recipe.optimizer.name == "muon":
        what = f"muon orthogonalises whole matrices, and {split}; --set optimizer.name=null"
        yield "optimizer.name", what
    if recipe.optimizer.adaptive_clip:
        what = f"compares norms of whole rows and columns, and {split}"
        yield "optimizer.adaptive_clip", f"{what}; set it to null, or use optimizer.clip_value"
    if optim not in ELEMENTWISE:
        what = f"is {optim}, whose update looks at whole parameters, and {split}"
        yield "training.optim", f"{what}; --set training.optim={DEFAULT_OPTIM}"
    if recipe.speed.fp8 != "none":
        yield "speed.fp8", "is for the products of whole layers; --set speed.fp8=none, or leave layers whole"
    if recipe.training.activation_checkpointing and recipe.speed.recompute == "operators":
        what = "is operators, which keeps products, and AutoTP adds the other ranks' to them"
        yield "speed.recompute", f"{what}; --set speed.recompute=layers"
    for key in DROPOUTS:
        if model.get(key):
            yield f"model.{key}", "would drop the same places of the heads of every rank; set it to 0"
    heads = model.num_attention_heads
    counts = {"attention heads": heads, "key-value heads": model.get("num_key_value_heads") or heads}
    if kind not in MIXTURES:
        counts["columns of model.intermediate_size"] = value_of(model, "intermediate_size")
    _refuse_uneven(name, size, counts)


def _check_sequence(recipe: Recipe, model: Model, ds_config: dict, degrees: Degrees, name: str) -> Wrong:
    """The degree divides heads and length, and parts of a sequence are enough."""
    size, kernel = degrees.sequence, model.get("attn_implementation")
    if not model.is_exact:
        raise UserError(f"{name}: is tested for {', '.join(EXACT)} alone, not for {model.model_type}")
    if recipe.monitors.noise_scale_steps:
        what = "does not go with split sequences: a rank's gradient is not that of whole sequences"
        yield "monitors.noise_scale_steps", f"{what}; set it to null"
    if model.get("sliding_window") and (model.model_type == "mixtral" or model.get("use_sliding_window")):
        what = (
            "is set, and split sequences are attended to without a mask, which windows need; set it to null"
        )
        yield "model.sliding_window", what
    if kernel not in (None, *SPLIT_KERNELS):
        what = f"is {kernel}; split sequences go with {', '.join(SPLIT_KERNELS)}; leave it out"
        yield "model.attn_implementation", what
    heads, tensor = model.num_attention_heads, degrees.tensor
    key_value_heads = (model.get("num_key_value_heads") or heads) // tensor
    of_rank = " that tensor parallelism leaves to a rank" if tensor > 1 else ""
    counts = {f"attention heads{of_rank}": heads // tensor, "tokens of a sequence": recipe.sequence_length}
    # fewer key-value heads than ranks are copied, as often as they divide these
    if size % key_value_heads:
        counts[f"key-value heads{of_rank}"] = key_value_heads
    _refuse_uneven(name, size, counts)


def _check_expert(recipe: Recipe, model: Model, ds_config: dict, degrees: Degrees, name: str) -> Wrong:
    """There are experts, the degree divides them, and what the run uses knows split ones."""
    size, stage = degrees.expert, zero_stage(ds_config)
    if model.model_type not in MIXTURES:
        what = f"is for mixtures of experts of the types {' and '.join(MIXTURES)}, not for {model.model_type}"
        raise UserError(f"{name}: {what}; leave it out")
    experts = next(value_of(model, key) for key in EXPERTS if value_of(model, key))
    if experts % size:
        fitting = [each for each in range(1, experts + 1) if not experts % each]
        nearest_size = min(fitting, key=lambda each: abs(each - size))
        raise UserError(f"{name}: does not divide the {experts} experts; {nearest_size} does")
    if degrees.tensor > 1:
        raise UserError(f"{name}: is not tried beside tensor {degrees.tensor}; leave one of them out")
    if "nvme" in (parameter_device(ds_config), optimizer_device(ds_config)):
        raise UserError(f"{name}: is not tried with states on NVMe; use zero3_offload")
    if hpz_ranks(ds_config) > 1:
        what = "does not go with split experts: DeepSpeed has no second copy of them; leave it out"
        raise UserError(f"{name}: zero_optimization.zero_hpz_partition_size: {what}")
    for key in ("contiguous_gradients", "reduce_scatter"):
        if stage in (1, 2) and not ds_config["zero_optimization"].get(key, True):
            what = f"zero_optimization.{key} is false, which DeepSpeed refuses; leave it out"
            raise UserError(f"{name}: {what}")
    if recipe.monitors.noise_scale_steps:
        what = "does not go with split experts: their gradients are of the samples of several ranks"
        yield "monitors.noise_scale_steps", f"{what}; set it to null"
    if recipe.training.fp16 and not stage:
        remedy = "use --deepspeed zero1:expert=2, or another stage"
        yield "training.fp16", f"is not tried with split experts at stage 0; {remedy}"
    if recipe.speed.fp8 != "none":
        yield "speed.fp8", "is not tried with split experts; --set speed.fp8=none"
    if (optim := recipe.training.optim) not in ELEMENTWISE:
        what = f"is {optim}, whose update looks at whole parameters, and each rank has some experts"
        yield "training.optim", f"{what}; --set training.optim={DEFAULT_OPTIM}"


def _refuse_uneven(name: str, size: int, counts: dict[str, int]) -> None:
    """Refuse a degree that does not divide all the counts, and name the nearest that does."""
    for what, count in counts.items():
        if count % size:
            dividing = [each for each in range(2, count + 1) if not any(n % each for n in counts.values())]
            nearest_size = min(dividing, key=lambda each: abs(each - size), default=1)
            raise UserError(f"{name}: does not divide the {count:,} {what}; {nearest_size} does")


def check_ranks(name: str | None, ds_config: dict | None, world_size: int) -> None:
    """Refuse degrees of parallelism, or a group size of hpZ, that do not divide the ranks."""
    degrees, group = degrees_of(ds_config), hpz_ranks(ds_config)
    there = f"there is {world_size}" if world_size == 1 else f"there are {world_size}"
    for size, what in (
        (degrees.ranks_per_sample, str(degrees)),
        (degrees.expert, f"expert {degrees.expert}"),
    ):
        if world_size % size:
            fitting = ", ".join(str(each) for each in range(1, world_size + 1) if not world_size % each)
            remedy = f"; degrees that divide {world_size}: {fitting}" if world_size > 1 else ""
            raise UserError(
                f"deepspeed {name}: {what}: needs a multiple of {size} ranks, and {there}{remedy}"
            )
    if world_size % group:
        what = (
            f"zero_optimization.zero_hpz_partition_size is {group}, which does not divide {world_size} ranks"
        )
        remedy = "set it to the number of GPUs of a node, or use --deepspeed zero3"
        raise UserError(f"deepspeed {name}: {what}; {remedy}")
