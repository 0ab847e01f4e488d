"""Refuse layouts, degrees of tensor, sequence and expert parallelism, that a model or what a recipe asks for rules out.

A degree that does not divide is refused with the nearest that does. `refusals.py` asks these checks among its own.
"""

from collections.abc import Iterator

from pretraining.ds_config import degrees_of, hpz_ranks, optimizer_device, parameter_device
from pretraining.errors import UserError
from pretraining.recipe import Recipe, model_with_defaults
from pretraining.recipe.model import DROPOUTS, EXACT, EXPERTS, MIXTURES, is_exact, value_of
from pretraining.recipe.training import DEFAULT_OPTIM, ELEMENTWISE
from pretraining.schema import display_path, problem

SPLIT_KERNELS = ("sdpa", "sdpa_causal", "torch_varlen")
"""Values of `model.attn_implementation` that need no mask from transformers: they work on split sequences."""
_WITH_ZERO = "use --deepspeed zero1:expert=2, or another stage"


def check_layout(recipe: Recipe, ds_config: dict | None, where: str) -> None:
    """Refuse degrees of parallelism that the model's shape does not allow, and what they do not know."""
    degrees, name = degrees_of(ds_config), f"deepspeed {recipe.deepspeed}"
    if recipe.speed.compile == "deepcompile":
        for size, split in zip(degrees, ("layers", "sequences", "experts"), strict=True):
            if size > 1:
                what = f"is deepcompile, which is not tried with split {split}; --set speed.compile=auto"
                raise problem(where, "speed.compile", what)
    if degrees.tensor > 1:
        _check_tensor_degree(recipe, ds_config or {}, degrees.tensor, name)
    if degrees.sequence > 1:
        _check_sequence_degree(recipe, degrees.sequence, name, degrees.tensor)
    if degrees.expert > 1:
        _check_expert_degree(recipe, ds_config or {}, name, where)


def _check_expert_degree(recipe: Recipe, ds_config: dict, name: str, where: str) -> None:
    """Refuse expert parallelism without experts, where it does not divide them, and with what does not know it."""
    model, degrees, zero = (
        model_with_defaults(recipe.model),
        degrees_of(ds_config),
        ds_config["zero_optimization"],
    )
    size, name = degrees.expert, f"{name}: expert {degrees.expert}"
    if model["model_type"] not in MIXTURES:
        what = (
            f"is for mixtures of experts of the types {' and '.join(MIXTURES)}, not for {model['model_type']}"
        )
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
        what = "zero_optimization.zero_hpz_partition_size: does not go with split experts: DeepSpeed has no second copy"
        raise UserError(f"{name}: {what} of them; leave it out")
    for key in ("contiguous_gradients", "reduce_scatter"):
        if zero["stage"] in (1, 2) and not zero.get(key, True):
            raise UserError(
                f"{name}: zero_optimization.{key} is false, which DeepSpeed refuses; leave it out"
            )
    if recipe.monitors.noise_scale_steps:
        what = "does not go with split experts: their gradients are of the samples of several ranks"
        raise problem(where, "monitors.noise_scale_steps", f"{what}; set it to null")
    if recipe.training.fp16 and not zero["stage"]:
        raise problem(where, "training.fp16", f"is not tried with split experts at stage 0; {_WITH_ZERO}")
    if recipe.speed.fp8 != "none":
        raise problem(where, "speed.fp8", "is not tried with split experts; --set speed.fp8=none")
    if recipe.training.optim not in ELEMENTWISE:
        what = f"is {recipe.training.optim}, whose update looks at whole parameters, and each rank has some experts"
        raise problem(where, "training.optim", f"{what}; --set training.optim={DEFAULT_OPTIM}")


def _check_tensor_degree(recipe: Recipe, ds_config: dict, size: int, name: str) -> None:
    """Refuse tensor parallelism of models that AutoTP cannot split evenly, and what needs whole parameters."""
    model, where = model_with_defaults(recipe.model), display_path(recipe.path)
    if model["model_type"] == "gpt2":
        what = "gpt2 keeps queries, keys and values in one convolution, which AutoTP does not split"
        raise UserError(f"{name}: tensor {size}: {what}; take model_type llama, or sequence parallelism")
    if not is_exact(model):
        known = ", ".join(each for each in EXACT if each != "gpt2")
        raise UserError(f"{name}: tensor {size}: is tested for {known} alone, not for {model['model_type']}")
    if ds_config["tensor_parallel"].get("partition_config"):
        what = "the model's type says which layers are split; leave it out"
        raise UserError(f"{name}: tensor_parallel.partition_config: {what}")
    if parameter_device(ds_config) == "nvme" or optimizer_device(ds_config) == "nvme":
        raise UserError(f"{name}: tensor {size}: is not tried with states on NVMe; use zero3_offload")
    if hpz_ranks(ds_config) > 1:
        what = "hpZ keeps copies of parameters by node, and split ones are partitioned over other ranks"
        raise UserError(f"{name}: tensor {size}: {what}; leave zero_hpz_partition_size out")
    for key, is_asked_for, what in _whole_parameters_needed(recipe, model, size):
        if is_asked_for:
            raise problem(where, key, what)
    heads = value_of(model, "num_attention_heads")
    counts = {"attention heads": heads, "key-value heads": model.get("num_key_value_heads") or heads}
    if model["model_type"] not in MIXTURES:
        counts["columns of model.intermediate_size"] = value_of(model, "intermediate_size")
    _check_divides(name, "tensor", size, counts)


def _whole_parameters_needed(recipe: Recipe, model: dict, size: int) -> Iterator[tuple[str, bool, str]]:
    """Yield (key, whether the recipe asks for it, why it does not go with split layers)."""
    optim, speed = recipe.training.optim, recipe.speed
    split = f"tensor {size} leaves a rank a part of each matrix"
    muon = "orthogonalises whole matrices, and " + split
    yield "optimizer.name", recipe.optimizer.name == "muon", f"muon {muon}; --set optimizer.name=null"
    adaptive = (
        f"compares norms of whole rows and columns, and {split}; set it to null, or use optimizer.clip_value"
    )
    yield "optimizer.adaptive_clip", bool(recipe.optimizer.adaptive_clip), adaptive
    whole = f"is {optim}, whose update looks at whole parameters, and {split}; --set training.optim={DEFAULT_OPTIM}"
    yield "training.optim", optim not in ELEMENTWISE, whole
    fp8 = "is for the products of whole layers; --set speed.fp8=none, or leave layers whole"
    yield "speed.fp8", speed.fp8 != "none", fp8
    keeps_products = recipe.training.activation_checkpointing and speed.recompute == "operators"
    kept = "is operators, which keeps products, and AutoTP adds the other ranks' to them; --set speed.recompute=layers"
    yield "speed.recompute", keeps_products, kept
    for key in DROPOUTS:
        dropped = "would drop the same places of the heads of every rank; set it to 0"
        yield f"model.{key}", bool(model.get(key)), dropped


def _check_divides(name: str, degree: str, size: int, counts: dict[str, int]) -> None:
    """Refuse a degree that does not divide all the counts, and name the nearest that does."""
    for what, count in counts.items():
        if count % size:
            fitting = [
                each for each in range(2, count + 1) if all(not number % each for number in counts.values())
            ]
            nearest_size = min(fitting, key=lambda each: abs(each - size), default=1)
            raise UserError(
                f"{name}: {degree} {size}: does not divide the {count:,} {what}; {nearest_size} does"
            )


def _check_sequence_degree(recipe: Recipe, size: int, name: str, tensor: int = 1) -> None:
    """Refuse sequence parallelism where it does not divide heads and length, or where parts are not enough."""
    model = model_with_defaults(recipe.model)
    if not is_exact(model):
        raise UserError(
            f"{name}: sequence {size}: is tested for {', '.join(EXACT)} alone, not for {model['model_type']}"
        )
    if recipe.monitors.noise_scale_steps:
        what = "does not go with split sequences: a rank's gradient is not that of whole sequences"
        raise problem(display_path(recipe.path), "monitors.noise_scale_steps", f"{what}; set it to null")
    asked_for, windows = model.get("attn_implementation"), model.get("sliding_window")
    if windows and (model["model_type"] == "mixtral" or model.get("use_sliding_window")):
        what = (
            "is set, and split sequences are attended to without a mask, which windows need; set it to null"
        )
        raise problem(display_path(recipe.path), "model.sliding_window", what)
    if asked_for not in (None, *SPLIT_KERNELS):
        what = f"is {asked_for}; split sequences go with {', '.join(SPLIT_KERNELS)}; leave it out"
        raise problem(display_path(recipe.path), "model.attn_implementation", what)
    heads = value_of(model, "num_attention_heads")
    key_value_heads = (model.get("num_key_value_heads") or heads) // tensor
    of_rank = " that tensor parallelism leaves to a rank" if tensor > 1 else ""
    counts = {f"attention heads{of_rank}": heads // tensor, "tokens of a sequence": recipe.sequence_length}
    # fewer key-value heads than ranks are copied, as often as they divide these
    if size % key_value_heads:
        counts[f"key-value heads{of_rank}"] = key_value_heads
    _check_divides(name, "sequence", size, counts)


def check_ranks(name: str | None, ds_config: dict | None, world_size: int) -> None:
    """Refuse degrees of parallelism, or a group size of hpZ, that do not divide the ranks."""
    degrees = degrees_of(ds_config)
    for size, what in (
        (degrees.ranks_per_sample, str(degrees)),
        (degrees.expert, f"expert {degrees.expert}"),
    ):
        if world_size % size:
            fitting = ", ".join(str(each) for each in range(1, world_size + 1) if not world_size % each)
            there = f"there is {world_size}" if world_size == 1 else f"there are {world_size}"
            remedy = f"; degrees that divide {world_size}: {fitting}" if world_size > 1 else ""
            raise UserError(
                f"deepspeed {name}: {what}: needs a multiple of {size} ranks, and {there}{remedy}"
            )
    group = hpz_ranks(ds_config)
    if group > 1 and world_size % group:
        what = (
            f"zero_optimization.zero_hpz_partition_size is {group}, which does not divide {world_size} ranks"
        )
        raise UserError(
            f"deepspeed {name}: {what}; set it to the number of GPUs of a node, or use --deepspeed zero3"
        )
