"""Refuse what recipe, ds_config and number of ranks alone show to be wrong, degrees of parallelism among it.

The plan, `data_prep.py`, `train.py` and `branch` read their recipe through `load_recipe_and_ds_config`, so none of them
accepts a recipe that training would refuse. What a recipe shows by itself is checked when it is read
(recipe/recipe.py). What depends on the machine and its packages, as `training.optim_args` does, is checked by
`train.py` only.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from pretraining.ds_config import (
    NOT_SPLIT,
    Degrees,
    degrees_of,
    hpz_ranks,
    load_ds_config,
    optimizer_device,
    parameter_device,
    value_at,
    zero_stage,
)
from pretraining.errors import UserError
from pretraining.extend import model_extension
from pretraining.outside.addresses import is_remote
from pretraining.outside.schema import Wrong, refuse_first
from pretraining.recipe import Recipe, accumulation_steps, load_recipe
from pretraining.recipe.data import is_mixed
from pretraining.recipe.model import (
    EXACT,
    Model,
    dropouts,
    experts_key,
    has_experts,
    properties_of,
    value_of,
    why_not,
)
from pretraining.recipe.recipe import check_documents, check_loss
from pretraining.recipe.training import ADAMW, DECAYING, DEFAULT_OPTIM, ELEMENTWISE, SCHEDULE_FREE

UNRESUMABLE = {
    "adamw_torch_8bit": "keeps its states as tensors that checkpoints cannot hold (adamw_bnb_8bit keeps plain ones)",
    "adamw_torch_4bit": "keeps its states as tensors that checkpoints cannot hold",
    "adamw_torch_xla": "is for TPUs, on which nothing here runs",
    "adamw_torch_npu": "is for NPUs, on which nothing here runs",
    "galore": "keeps projections that checkpoints cannot hold",
    "apollo": "keeps projections that checkpoints cannot hold",
    "lomo": "steps inside the backward pass, before gradients are whole",
    "adalomo": "steps inside the backward pass, before gradients are whole",
}
"""{how names of `training.optim` begin: why such an optimizer cannot be used at any stage}"""

CUDA_GRAPHS = ("reduce-overhead", "max-autotune", "cudagraphs")
"""Modes and backends of torch.compile that record CUDA graphs."""

_SHARDED = "not supported: take a file of accelerate_configs/, which shards by DeepSpeed"
LAUNCHER_SETTINGS = {
    "ACCELERATE_USE_FSDP": ("distributed_type FSDP", _SHARDED),
    "ACCELERATE_USE_MEGATRON_LM": ("distributed_type MEGATRON_LM", _SHARDED),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (
        "parallelism_config",
        "not supported: ranks are data-parallel, sharded by ds_configs/; leave it out",
    ),
}
"""{environment variable that accelerate sets: (what its config says, our answer)}"""
ZERO_STAGE = "ACCELERATE_DEEPSPEED_ZERO_STAGE"
SPLIT_KERNELS = ("sdpa", "sdpa_causal", "torch_varlen")
"""Values of `model.attn_implementation` that need no mask from transformers: they work on split sequences."""


def load_recipe_and_ds_config(
    name_or_path: str,
    overrides: Iterable[str] = (),
    deepspeed: str | None = None,
    world_size: int | None = None,
    limit_tokens: int | None = None,
) -> tuple[Recipe, dict | None]:
    """Read a recipe (see `load_recipe`) and its ds_config; `UserError` if they and the number of ranks cannot work."""
    recipe = load_recipe(name_or_path, overrides, deepspeed, limit_tokens, world_size)
    return recipe, checked_ds_config(recipe, world_size)


def checked_ds_config(recipe: Recipe, world_size: int | None = None) -> dict | None:
    """Return the recipe's ds_config, and print the recipe's notes; `UserError` if they cannot work."""
    if os.environ.get("RANK", "0") == "0":
        print(*(f"note: {note}\n" for note in recipe.notes), sep="", end="", file=sys.stderr, flush=True)
    ds_config = load_ds_config(recipe.deepspeed) if recipe.deepspeed else None
    check_run(recipe, ds_config, world_size)
    return ds_config


def check_while_preparing(recipe: Recipe, data_root: Path | str) -> None:
    """Raise `UserError` for what must be known of the whole text before training begins."""
    if is_remote(data_root):
        what = f"--while_preparing: --data_dir {data_root} is an address; give a folder that all ranks share"
        raise UserError(what)
    refuse_first(_needs_the_whole_text(recipe), recipe.where)


def _needs_the_whole_text(recipe: Recipe) -> Wrong:
    data, option, first = recipe.data, "--while_preparing", "or run data_prep.py before train.py"
    if data.shuffle_blocks is None:
        what = f"is missing: {option} reads the text in windows of blocks as they are prepared"
        yield "data.shuffle_blocks", f"{what}; --set data.shuffle_blocks=8192, {first}"
    if data.packing == "cropped":
        what = f"is cropped, whose blocks are counted over all of the text first, which {option} cannot"
        yield "data.packing", f"{what}; take best_fit, {first}"
    if data.dedup and data.dedup.compares:
        what = f"compares all documents before any is trained on, which {option} cannot"
        yield "data.dedup", f"{what}; set it to null, {first}"
    if is_mixed(data):
        what = f"mixes sources, and with {option} the text of one is there long before that of another"
        remedy = f"leave the weights and the mixture out, {first}"
        yield "data.mixture" if data.mixture else "data.sources.0.weight", f"{what}; {remedy}"
    if data.validation_share:
        what = f"is {data.validation_share:g}: which documents it keeps back is known once all are read"
        remedy = f"with {option} set it to 0 and name data.validation.sources, {first}"
        yield "data.validation_share", f"{what}; {remedy}"


def check_run(recipe: Recipe, ds_config: dict | None, world_size: int | None = None) -> None:
    """Raise `UserError` for the first thing in CHECKS that is wrong, then for ranks that do not divide the step."""
    _refuse_launcher_settings(recipe)
    for check in CHECKS:
        refuse_first(check(recipe, ds_config), recipe.where)
    if world_size is not None:
        check_ranks(recipe.deepspeed, ds_config, world_size)
        accumulation_steps(recipe, world_size, ds_config)


def _check_optimizer(recipe: Recipe, ds_config: dict | None) -> Wrong:
    """What makes the steps works under this sharding: `training.optim`, and groups of parameters of their own."""
    stage, optim, key = zero_stage(ds_config), recipe.training.optim, "training.optim"
    offloads = optimizer_device(ds_config) != "gpu"
    in_fp16 = ""
    if recipe.training.fp16 and ds_config and not stage:
        in_fp16 = "does not run in fp16 at stage 0, where DeepSpeed keeps copies of its own"
    # "galore" means galore_adamw and its variants
    for beginning, why in UNRESUMABLE.items():
        if optim.startswith(beginning):
            yield key, f"is {optim}, which {why}; --set {key}={DEFAULT_OPTIM}"
    if optim not in ADAMW and offloads:
        what = f"is {optim}, but offloading the optimizer replaces it by DeepSpeed's CPU Adam"
        yield key, f"{what}; --set {key}={DEFAULT_OPTIM}, or --deepspeed zero{stage}"
    if stage and optim not in ELEMENTWISE:
        what = f"is {optim}, whose update looks at whole parameters, and ZeRO-{stage} gives it slices"
        yield key, f"{what}; use --deepspeed null or zero0, or --set {key}={DEFAULT_OPTIM}"
    if stage and optim == "adagrad":
        what = f"is adagrad, which DeepSpeed builds anew for ZeRO-{stage}, without weight decay and groups"
        yield key, f"{what}; use --deepspeed null or zero0, or --set {key}={DEFAULT_OPTIM}"
    # Muon, muP and rates by kind of parameter are groups of AdamW or Muon, which step where the weights are
    if keys := recipe.own_groups:
        key, name = keys[0], {"mup.base_width": "muP", "optimizer.name": "muon"}.get(keys[0], "adamw")
        if optim not in ADAMW:
            what = f"{name} has groups of its own for AdamW, and training.optim={optim} is another optimizer"
            yield key, f"{what}; --set training.optim={DEFAULT_OPTIM}, or leave {key} out"
        if offloads:
            what = "runs where its weights are; offload_optimizer would replace it by DeepSpeed's CPU Adam"
            yield key, f"{name} {what}; use --deepspeed zero1, zero2 or zero3"
        if in_fp16:
            remedy = "--set training.fp16=false --set training.bf16=true, or --deepspeed zero1"
            yield key, f"{name} {in_fp16}; {remedy}"
    if recipe.optimizer.average_decay is not None:
        key, swapped = "optimizer.average_decay", optimizer_device(ds_config) == "nvme"
        if optim in SCHEDULE_FREE:
            yield key, f"is set, but {optim} averages the weights already; leave it out"
        buffers = ds_config["zero_optimization"]["offload_optimizer"].get("buffer_count", 4) if swapped else 5
        if buffers < 5:
            what = "needs five buffers on NVMe (weights, two moments, average, gradients)"
            yield key, f"{what}; set zero_optimization.offload_optimizer.buffer_count, now {buffers}, to 5"
    for key in ("adaptive_clip", "qk_clip"):
        if getattr(recipe.optimizer, key) and in_fp16:
            yield f"optimizer.{key}", f"{in_fp16}; use --deepspeed zero1"
    if recipe.optimizer.qk_clip and optim in SCHEDULE_FREE:
        yield "optimizer.qk_clip", f"would change weights that {optim} averages; set it to null"


def _check_weights(recipe: Recipe, ds_config: dict | None) -> Wrong:
    """Frozen parameters are in memory when they are saved; weights of two types can be held side by side."""
    zero, by_node = (ds_config or {}).get("zero_optimization", {}), hpz_ranks(ds_config) > 1
    if recipe.weights.frozen and (parameter_device(ds_config) == "nvme" or by_node):
        place = "every node keeps a copy of them" if by_node else "they are on NVMe"
        yield "model.frozen", f"saves parameters from memory, and {place}; use --deepspeed zero3"
    key = "model.keep_in_fp32"
    if not recipe.weights.keep_in_fp32:
        return
    if not recipe.model.is_exact:
        known = f"is for {', '.join(EXACT)}, not {recipe.model.model_type}"
        yield key, f"{known}; leave it out, or --deepspeed zero0, which keeps all weights in fp32"
    if not recipe.training.bf16:
        why = "; fp16 is not tried" if recipe.training.fp16 else ": all is in fp32"
        yield key, f"goes with training.bf16{why}; --set training.bf16=true, or leave it out"
    # DeepSpeed keeps all of these in one buffer of one type
    elsewhere = {
        "offloads the weights": parameter_device(ds_config) != "gpu",
        "keeps the optimizer on NVMe": optimizer_device(ds_config) == "nvme",
        "keeps a second copy of the weights in each node (hpZ)": by_node,
        "sends quantized weights": zero.get("zero_quantized_weights"),
    }
    for what, is_so in elsewhere.items():
        if is_so:
            yield key, f"deepspeed {recipe.deepspeed} {what}, in one type; use --deepspeed zero3"
    degrees = degrees_of(ds_config)
    if recipe.weights.names_modules and max(degrees.tensor, degrees.expert) > 1:
        what = f"names modules, which is not tried with {degrees}"
        yield key, f"{what}; leave these out, or use --deepspeed zero3"
    if recipe.weights.names_modules and recipe.training.use_liger_kernel:
        what = "names modules, whose forward passes Liger's kernels may replace"
        yield key, f"{what}; leave these out, or --set training.use_liger_kernel=false"
    if recipe.speed.compile == "deepcompile":
        yield key, "is not tried with speed.compile deepcompile; --set speed.compile=auto"


def _check_compile(recipe: Recipe, ds_config: dict | None) -> Wrong:
    """The backend knows the mode, and what is compiled stays whole and in its place."""
    speed, stage = recipe.speed, zero_stage(ds_config)
    backend, mode = speed.compile_backend, speed.compile_mode
    if speed.compile == "none":
        return
    # before ZeRO-3 is looked at: it is wrong at every stage
    if mode and backend != "inductor":
        what = f"is {mode}, a mode of inductor, but speed.compile_backend is {backend}"
        yield "speed.compile_mode", f"{what}; --set speed.compile_mode=null"
    # DeepSpeed 0.19.8 removes its hooks, and reduces only the gradients of the compiled graph of `model.forward`.
    if speed.compile == "deepcompile":
        key = "speed.compile"
        if not stage:
            yield key, "is deepcompile, which needs ZeRO; --deepspeed zero1, zero2 or zero3"
        if (parameter_device(ds_config), optimizer_device(ds_config)) != ("gpu", "gpu"):
            yield key, "is deepcompile, which is not tried with offload; --set speed.compile=auto"
        if recipe.loss.kind != "plain":
            # A chunked or fused loss multiplies with the head outside of that graph: nobody would reduce its gradient.
            what = f"is deepcompile, and loss.kind {recipe.loss.kind} leaves the head out of its graph"
            yield key, f"{what}; --set loss.kind=plain"
        if keys := recipe.own_groups:
            what = f"is deepcompile, which does not know the groups of {keys[0]}"
            yield key, f"{what}; --set speed.compile=auto"
        return
    name, value, without = ("mode", mode, "null") if mode else ("backend", backend, "inductor")
    key, degrees = f"speed.compile_{name}", degrees_of(ds_config)
    if value in CUDA_GRAPHS and degrees != NOT_SPLIT:
        what = f"is {value}, which records CUDA graphs, and with {degrees} ranks exchange inside of them"
        yield key, f"{what}, which is not tried; --set {key}={without}"
    if stage != 3:
        return
    if speed.compile == "whole":
        what = "is whole, and ZeRO-3 gathers the weights by hooks, at each of which a graph ends"
        yield "speed.compile", f"{what}; --set speed.compile=blocks, or --deepspeed zero1 or zero2"
    if speed.compile == "blocks" and (why := _why_not_gathered_as_one(ds_config)):
        yield "speed.compile", f"{why}; use --deepspeed zero3_offload, or --set speed.compile=none"
    if value in CUDA_GRAPHS:
        what = f"is {value}, which records CUDA graphs of weights that stay where they are, and ZeRO-3 moves them"
        yield key, f"{what}; --set {key}={without}, or --deepspeed zero1 or zero2"


def compiled_part(recipe: Recipe, ds_config: dict | None, on_gpu: bool = True) -> str:
    """Decide which part training passes compile, for `speed.compile: auto` too: "blocks", "whole" or "none".

    The plan assumes that the compiler works. If it does not, `auto` trains uncompiled (model/build.py).
    """
    if recipe.speed.compile != "auto":
        return recipe.speed.compile
    return "none" if why_not_compiled(recipe, ds_config, on_gpu) else "blocks"


def gathers_blocks(recipe: Recipe, ds_config: dict | None, on_gpu: bool = True) -> bool:
    """Return whether ZeRO-3 gathers all weights of a block at once, for its compiled code, and not module by module."""
    return zero_stage(ds_config) == 3 and compiled_part(recipe, ds_config, on_gpu) == "blocks"


def why_not_compiled(recipe: Recipe, ds_config: dict | None, on_gpu: bool = True) -> str | None:
    """Return why `speed.compile: auto` compiles nothing; None if it compiles the blocks."""
    if not on_gpu:
        return "no GPU"
    model, training = recipe.model.with_defaults(), recipe.training
    recomputes = training.activation_checkpointing
    if reason := why_not(model, "compiled"):
        return reason
    if dropouts(model):
        return "dropout would draw other numbers"
    if training.use_liger_kernel:
        return "training.use_liger_kernel: Liger's kernels take its place"
    if recomputes and (training.activation_checkpointing_kwargs or {}).get("offload"):
        return "recomputed layers keep their inputs on the host"
    if recomputes and recipe.speed.recompute == "operators":
        return "compiled code hides the products that recomputed layers keep"
    return _why_not_gathered_as_one(ds_config)


def _why_not_gathered_as_one(ds_config: dict | None) -> str | None:
    if parameter_device(ds_config) != "nvme":
        return None
    return "a compiled block needs all its weights at once, and they come from NVMe one by one"


def _check_measured(recipe: Recipe, ds_config: dict | None) -> Wrong:
    """What is measured of the class holds; logits that are watched can be seen, and projections can clip them."""
    # of the library's classes this is known when the recipe is read
    if model_extension(recipe.model.model_type):
        yield from check_documents(recipe.data, recipe.model)
        yield from check_loss(recipe.loss, recipe.model)
    kernel, compiled = str(recipe.model.get("attn_implementation")), recipe.speed.compile
    for key in recipe.watched_keys:
        if kernel == "flex_attention" or "/" in kernel:
            what = f"needs queries and keys with a mask that can be read, which {kernel} does not give"
            yield key, f"{what}; set it to null, or --set model.attn_implementation=sdpa"
        if compiled in ("whole", "deepcompile"):
            what = f"ends a graph at every attention, and speed.compile is {compiled}"
            yield key, f"{what}; set it to null, or --set speed.compile=blocks"
    if recipe.optimizer.qk_clip and (reason := why_not(recipe.model, "clipped logits")):
        yield "optimizer.qk_clip", f"{reason}; set it to null"


def _check_fp8(recipe: Recipe, ds_config: dict | None) -> Wrong:
    """fp8 products are in bf16 training of linear layers, and some are left; a decay in bf16 has a beginning."""
    key, kind, speed = "speed.fp8", recipe.speed.fp8, recipe.speed
    if kind == "none":
        for name in ("bf16_blocks", "bf16_layers", "bf16_decay"):
            if getattr(speed, name) not in ([0, 0], [], False):
                yield f"speed.{name}", f"is beside fp8; set {key}, or leave it out"
        return
    # transformers' Conv1D, not nn.Linear
    if recipe.model.model_type == "gpt2":
        what = "is for linear layers, and gpt2 has convolutions in their place"
        yield key, f"{kind} {what}; --set {key}=none, or take model_type llama"
    schedule = recipe.training.lr_scheduler_type
    if speed.bf16_decay and schedule != DECAYING:
        what = f"is for {DECAYING}, whose decay has a first step, not for {schedule}"
        yield "speed.bf16_decay", f"{what}; --set speed.bf16_decay=false"
    if not recipe.training.bf16:
        yield key, f"{kind} goes with training.bf16; --set training.bf16=true, or --set {key}=none"


def _check_recomputation(recipe: Recipe, ds_config: dict | None) -> Wrong:
    """What is computed again is the same; layers that keep their products can see these, and their memory is known."""
    training, key, remedy = recipe.training, "speed.recompute", "--set speed.recompute=layers"
    keywords = "training.activation_checkpointing_kwargs"
    given = training.activation_checkpointing_kwargs or {}
    if given.get("use_reentrant") and has_experts(recipe.model):
        what = "is true, and then losses that balance experts have no gradient"
        yield f"{keywords}.use_reentrant", f"{what}; leave it out"
    if given.get("preserve_rng_state") is False and (keys := dropouts(recipe.model.with_defaults())):
        what = f"is false, and the second pass would drop other places (model.{keys[0]}); leave it out"
        yield f"{keywords}.preserve_rng_state", what
    if training.activation_checkpointing and (reason := why_not(recipe.model, "recomputed")):
        yield "training.activation_checkpointing", f"{reason}; --set training.activation_checkpointing=false"
    if recipe.speed.recompute != "operators" or not training.activation_checkpointing:
        return
    if reason := why_not(recipe.model, "operators"):
        yield key, f"is operators, which {reason}; {remedy}"
    elif has_experts(recipe.model):
        yield key, f"is operators, which is for layers without experts; {remedy}"
    for name in ("use_reentrant", "offload"):
        if given.get(name):
            what = f"is operators, which does not go with activation_checkpointing_kwargs.{name}"
            yield key, f"{what}; leave that out, or {remedy}"
    if recipe.speed.compile not in ("auto", "none"):
        what = f"is operators, and speed.compile {recipe.speed.compile} hides the products that are kept"
        yield key, f"{what}; --set speed.compile=none, or {remedy}"


def _refuse_launcher_settings(recipe: Recipe) -> None:
    """Refuse settings of an accelerate config that would change the run although the recipe does not name them."""
    for variable, (asked_for, what) in LAUNCHER_SETTINGS.items():
        if os.environ.get(variable, "").lower() in ("true", "1", "yes", "y", "on"):
            raise UserError(f"accelerate's config: {asked_for}: {what}")
    # from a config's zero_stage; a config that names a file of DeepSpeed's sets the other one too
    if ZERO_STAGE in os.environ and "ACCELERATE_DEEPSPEED_CONFIG_FILE" not in os.environ:
        what = "a ds_config says how to shard: write deepspeed_config_file: ds_configs/zero2.json, or another"
        raise UserError(f"accelerate's config: zero_stage {os.environ[ZERO_STAGE]}: {what}")
    # accelerate writes "no" if nothing is compiled
    if (backend := os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()) not in ("no", ""):
        what = "the recipe compiles: leave it out, and write --set speed.compile=blocks"
        raise UserError(f"accelerate's config: dynamo_backend {backend}: {what}")
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", "") and not recipe.training.get(precision):
        remedy = f", or --set training.{precision}=true"
        if precision == "fp8":
            remedy = "; fp8 is the recipe's speed.fp8"
        what = f"the recipe decides the precision: write 'no' there{remedy}"
        raise UserError(f"accelerate's config: mixed_precision {precision}: {what}")


def _check_layout(recipe: Recipe, ds_config: dict | None) -> Wrong:
    """The model's shape allows the degrees of parallelism, and what the recipe asks for knows them."""
    degrees, model = degrees_of(ds_config), recipe.model.with_defaults()
    if value_at(ds_config, "communication_data_type") == "fp16" and not recipe.training.fp16:
        what = "adds gradients up in fp16, in which small ones vanish: only training.fp16 scales them"
        yield "deepspeed", f"{recipe.deepspeed} {what}; let communication_data_type be bf16 or fp32"
    if recipe.speed.compile == "deepcompile":
        for size, split in zip(degrees, ("layers", "sequences", "experts"), strict=True):
            if size > 1:
                what = f"is deepcompile, which is not tried with split {split}; --set speed.compile=auto"
                yield "speed.compile", what
    for name, check in (("tensor", _check_tensor), ("sequence", _check_sequence), ("expert", _check_expert)):
        if (size := getattr(degrees, name)) > 1:
            place = f"deepspeed {recipe.deepspeed}: {name} {size}"
            yield from check(recipe, model, ds_config or {}, degrees, place)


def _check_tensor(recipe: Recipe, model: Model, ds_config: dict, degrees: Degrees, name: str) -> Wrong:
    """AutoTP splits the model's layers evenly, and nothing needs whole parameters."""
    size, kind = degrees.tensor, model.model_type
    if kind == "gpt2":
        what = "gpt2 keeps queries, keys and values in one convolution, which AutoTP does not split"
        raise UserError(f"{name}: {what}; take model_type llama, or sequence parallelism")
    _refuse_unable(name, model, "tensor")
    if ds_config["tensor_parallel"].get("partition_config"):
        what = "tensor_parallel.partition_config: the model's type says which layers are split; leave it out"
        raise UserError(f"deepspeed {recipe.deepspeed}: {what}")
    if "nvme" in (parameter_device(ds_config), optimizer_device(ds_config)):
        raise UserError(f"{name}: is not tried with states on NVMe; use zero3_offload")
    if hpz_ranks(ds_config) > 1:
        what = "hpZ keeps copies of parameters by node, and split ones are partitioned over other ranks"
        raise UserError(f"{name}: {what}; leave zero_hpz_partition_size out")
    optim, split = recipe.training.optim, f"tensor {size} leaves a rank a part of each matrix"
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
    for key in dropouts(model):
        yield f"model.{key}", "would drop the same places of the heads of every rank; set it to 0"
    heads = model.num_attention_heads
    counts = {"attention heads": heads, "key-value heads": value_of(model, "num_key_value_heads") or heads}
    # the experts of a mixture stay whole
    if not has_experts(model) and (inner := value_of(model, "intermediate_size")):
        counts["columns of model.intermediate_size"] = inner
    _refuse_uneven(name, size, counts)


def _check_sequence(recipe: Recipe, model: Model, ds_config: dict, degrees: Degrees, name: str) -> Wrong:
    """The degree divides heads and length, and parts of a sequence are enough."""
    size, kernel = degrees.sequence, model.get("attn_implementation")
    _refuse_unable(name, model, "sequence")
    if recipe.monitors.noise_scale_steps:
        what = "does not go with split sequences: a rank's gradient is not that of whole sequences"
        yield "monitors.noise_scale_steps", f"{what}; set it to null"
    if recipe.training.get("neftune_noise_alpha"):
        what = "does not go with split sequences: noise is drawn for a part as if it were a whole sequence"
        yield "training.neftune_noise_alpha", f"{what}; set it to null"
    # a type without the switch has windows as soon as it has their size
    looks_back = model.get("sliding_window") and model.get("use_sliding_window", True)
    by_size = model.is_exact or "layer_types" not in properties_of(model)
    if looks_back and (by_size or {*(model.get("layer_types") or ("unknown",))} != {"full_attention"}):
        key = "sliding_window" if by_size else "layer_types"
        what = "means windows, and split sequences are attended to without a mask, which these need"
        remedy = '"full_attention" for every layer' if key == "layer_types" else "null"
        yield f"model.{key}", f"{what}; set it to {remedy}"
    if kernel not in (None, *SPLIT_KERNELS):
        what = f"is {kernel}; split sequences go with {', '.join(SPLIT_KERNELS)}; leave it out"
        yield "model.attn_implementation", what
    heads, tensor = model.num_attention_heads, degrees.tensor
    key_value_heads = (value_of(model, "num_key_value_heads") or heads) // tensor
    of_rank = " that tensor parallelism leaves to a rank" if tensor > 1 else ""
    counts = {f"attention heads{of_rank}": heads // tensor, "tokens of a sequence": recipe.sequence_length}
    # fewer key-value heads than ranks are copied, as often as they divide these
    if size % key_value_heads:
        counts[f"key-value heads{of_rank}"] = key_value_heads
    _refuse_uneven(name, size, counts)


def _check_expert(recipe: Recipe, model: Model, ds_config: dict, degrees: Degrees, name: str) -> Wrong:
    """There are experts, the degree divides them, and what the run uses knows split ones."""
    size, stage = degrees.expert, zero_stage(ds_config)
    if not has_experts(model):
        raise UserError(f"{name}: is for mixtures of experts, not for {model.model_type}; leave it out")
    _refuse_unable(name, model, "expert")
    _refuse_uneven(name, size, {"experts": model[experts_key(model)]})
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


def _refuse_unable(name: str, model: Model, degree: str) -> None:
    """Refuse a degree that was measured to change what a model of this type learns."""
    if reason := why_not(model, degree):
        raise UserError(f"{name}: {reason}; leave it out, or take another model.model_type")


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
    named = {str(degrees): degrees.ranks_per_sample, f"expert {degrees.expert}": degrees.expert}
    for words, size in named.items():
        if world_size % size:
            fitting = ", ".join(str(each) for each in range(1, world_size + 1) if not world_size % each)
            remedy = f"; degrees that divide {world_size}: {fitting}" if world_size > 1 else ""
            what = f"{words}: needs a multiple of {size} ranks, and {there}{remedy}"
            raise UserError(f"deepspeed {name}: {what}")
    if world_size % group:
        what = f"zero_hpz_partition_size is {group}, which does not divide {world_size} ranks"
        remedy = "set it to the number of GPUs of a node, or use --deepspeed zero3"
        raise UserError(f"deepspeed {name}: zero_optimization.{what}; {remedy}")


CHECKS = (
    _check_layout,
    _check_optimizer,
    _check_weights,
    _check_compile,
    _check_recomputation,
    _check_fp8,
    _check_measured,
)
"""In this order: the first error is the one that is shown."""
