"""Common mistakes of a recipe on the machine found, each with its reason and its remedy."""

import math

from pretraining.ds_config import (
    ds_config_names,
    load_ds_config,
    optimizer_device,
    parameter_device,
    zero_stage,
)
from pretraining.planning.findings import Case, Finding
from pretraining.planning.gpus import Gpu
from pretraining.planning.memory.buffers import reduce_bucket
from pretraining.planning.memory.need import ROOMY, TIGHT, recomputed_one_in
from pretraining.planning.memory.precision import precision_of
from pretraining.planning.memory.tensors import ROUTER, parameter_tensors
from pretraining.planning.quantities import num_bytes, several
from pretraining.planning.sizes import model_size
from pretraining.planning.step_time import step_time
from pretraining.recipe import accumulation_steps
from pretraining.recipe.model import value_of
from pretraining.recipe.schedule import WITHOUT_WARMUP

MANY_EPOCHS = 4
HIDDEN = 0.5
"""Share of the products' time up to which messages at the links' peak are hidden behind them."""
SMALL_BUCKET = 5_000_000
"""Elements: below this, messages are bound by latency (DeepSpeed's own default is 500 million)."""
WARM_UP_TOKENS = 375_000_000
"""GPT-3 warms up over 375 million tokens at every size (Brown et al. 2020, appendix B)."""


def mistakes(case: Case) -> list[Finding]:
    """Every mistake found whose remedy can still be taken: a run that continues may not change its curve."""
    of_the_curve = (_fp16, _warm_up, _clipping, _repeats)
    rules = (_experts, _tiny_batch, _stage, _offload, _buckets, _checkpointing, _snapshot)
    rules = rules if case.found.continues else (*of_the_curve, *rules)
    return [finding for finding in (rule(case) for rule in rules) if finding]


def without_kernels(gpu: Gpu | None) -> list[Finding]:
    """A GPU for which the pinned torch has no kernels, whatever the recipe."""
    if gpu is None or gpu.architecture != "Volta":
        return []
    what = f"CUDA 13, for which the pinned torch is built, has no kernels for {gpu.name} and its generation"
    return [Finding(what, "install a build of torch for CUDA 12, or take a later GPU")]


def _fp16(case: Case) -> Finding | None:
    if not (case.recipe.training.get("fp16") and case.found.has_bf16):
        return None
    what = "fp16 overflows above 65,504 and needs loss scaling, and this GPU has bf16"
    return Finding(what, "--set training.fp16=false --set training.bf16=true")


def _warm_up(case: Case) -> Finding | None:
    """2 / (1 - beta2) steps (Ma and Yarats 2021, section 5), from a billion parameters on GPT-3's tokens too."""
    steps = case.recipe.num_steps
    given, kind = case.recipe.warmup_steps(steps), case.recipe.training.get("lr_scheduler_type", "linear")
    if given and kind in WITHOUT_WARMUP:
        what = f"training.lr_scheduler_type {kind} has no warm-up: the rate is whole from the first step on"
        return Finding(
            f"{what}, whatever training.warmup_steps says", "write constant_with_warmup, or 0 steps"
        )
    needed = round(2 / max(1 - case.recipe.training.get("adam_beta2", 0.999), 1e-9))
    if model_size(case.recipe.model).total >= 1e9:
        needed = max(needed, WARM_UP_TOKENS // case.recipe.tokens_per_step)
    needed = min(needed, max(1, steps // 10))
    if given >= needed:
        return None
    what = f"warm-up of {given} steps is short for this size: the optimizer's running means are not settled"
    if case.recipe.budget["warmup_tokens"] is not None:
        return Finding(what, f"--set budget.warmup_tokens={needed * case.recipe.tokens_per_step}")
    return Finding(what, f"--set training.warmup_steps={needed}")


def _clipping(case: Case) -> Finding | None:
    if case.recipe.training.get("max_grad_norm", 1.0):
        return None
    return Finding(
        "gradients are not clipped: one bad batch can end the run", "--set training.max_grad_norm=1.0"
    )


def _experts(case: Case) -> Finding | None:
    """Experts that are not bf16, whatever autocast says (transformers 5.23, integrations/moe.py `_grouped_mm`)."""
    precision = precision_of(case.recipe, case.ds_config)
    experts = any(tensor.kind == ROUTER for tensor in parameter_tensors(case.recipe.model))
    if case.limit is None or not experts or (precision.name == "bf16" and not precision.is_autocast):
        return None
    weights = "fp32" if precision.is_autocast else precision.name
    what = f"weights of experts in {weights} are multiplied one expert after another, and every layer waits for the GPU"
    if precision.name == "bf16":
        return Finding(what, "--deepspeed zero1, which keeps them in bf16")
    return None if case.found.continues else Finding(what, "--set training.bf16=true --deepspeed zero1")


def _tiny_batch(case: Case) -> Finding | None:
    if case.recipe.micro_batch > 1 or accumulation_steps(case.recipe, case.world_size) > 1:
        return None
    what = "one sequence a GPU and step, without accumulation: small kernels, and a message after each"
    return Finding(what, "use fewer GPUs, or a larger budget.tokens_per_step")


def _stage(case: Case) -> Finding | None:
    if (
        case.limit is None
        or zero_stage(case.ds_config) != 3
        or case.world_size == 1
        or _offloads(case.ds_config)
    ):
        return None
    simple = case.total_with(load_ds_config("zero1"))
    if _hidden(case):
        return None
    if simple > ROOMY * case.limit:
        return None
    what = f"ZeRO-3 gathers the weights twice in every pass, and ZeRO-1 would fit ({num_bytes(simple)})"
    return Finding(what, "--deepspeed zero1")


def _offload(case: Case) -> Finding | None:
    if case.limit is None or not _offloads(case.ds_config):
        return None
    name = f"zero{zero_stage(case.ds_config)}"
    here = case.total_with(load_ds_config(name))
    if here > ROOMY * case.limit:
        return None
    return Finding(
        f"offloading slows every step, and all of it fits the GPU ({num_bytes(here)})", f"--deepspeed {name}"
    )


def _offloads(config: dict | None) -> bool:
    return optimizer_device(config) != "gpu" or parameter_device(config) != "gpu"


def _buckets(case: Case) -> Finding | None:
    on_gpus = case.limit is not None and case.world_size > 1
    if not on_gpus or zero_stage(case.ds_config) < 2:
        return None
    bucket = reduce_bucket(case.ds_config, value_of(case.recipe.model, "hidden_size"))
    if bucket >= min(SMALL_BUCKET, model_size(case.recipe.model).total / 4):
        return None
    what = f"reduce buckets of {bucket:,} elements send many small messages"
    return Finding(what, larger_buckets(case, 50_000_000))


def larger_buckets(case: Case, elements: int) -> str:
    """How to set the buckets of the ds_config in use."""
    name = case.recipe.deepspeed
    file = f"a copy of ds_configs/{name}.json" if name in ds_config_names() else name
    return f'in {file}: "reduce_bucket_size": {elements}'


def _checkpointing(case: Case) -> Finding | None:
    if case.limit is None:
        return None
    if not recomputed_one_in(case.recipe):
        if not TIGHT * case.limit < case.need.total <= case.limit:
            return None
        what = f"{num_bytes(case.need.total)} of {num_bytes(case.limit)}: fragmentation can end the run"
        return Finding(what, "--set training.activation_checkpointing=true")
    without = case.total_with(case.ds_config, activation_checkpointing=False)
    if without > ROOMY * case.limit:
        return None
    what = f"activation checkpointing costs a third more FLOPs, and it fits without ({num_bytes(without)})"
    return Finding(what, "--set training.activation_checkpointing=false")


def _repeats(case: Case) -> Finding | None:
    """Up to four epochs are nearly as good as new text (Muennighoff et al. 2023, section 5)."""
    tokens, there = case.recipe.budget["tokens"], case.found.data_tokens
    stated = any(source.get("max_epochs") for source in case.recipe.data["sources"])
    if not there or stated or tokens <= MANY_EPOCHS * there:
        return None
    what = f"budget.tokens reads the {there:,} training tokens {tokens / there:.1f} times: after four it teaches little"
    unit = case.recipe.tokens_per_step
    fewer = f", or --set budget.tokens={MANY_EPOCHS * there // unit * unit}" if there >= unit else ""
    return Finding(
        what, f"add text{fewer}; --set data.sources.0.max_epochs={math.ceil(tokens / there)} states it"
    )


def _hidden(case: Case) -> bool:
    """Whether the links are known and carry the step's messages well within the time of its products."""
    if case.found.gpu is None:
        return False
    time = step_time(case.recipe, case.ds_config, case.world_size, case.found.gpu)
    return time.communication_seconds <= HIDDEN * time.compute_seconds


def _snapshot(case: Case) -> Finding | None:
    """Without room for it in host memory a save is written while training waits (`checkpoints/background.py`)."""
    ranks, there, need = case.found.ranks_per_host, case.found.host_memory_bytes, case.need
    held = need.on_processor if case.found.trains_on_processor else need.host_running
    if there is None or not need.snapshot or ranks * (held + need.snapshot) <= there:
        return None
    copies = f"{num_bytes(ranks * need.snapshot)} for {several(ranks, 'rank')}"
    what = f"{num_bytes(there)} of host memory leave no room for a copy of the state ({copies})"
    what = f"{what}: training waits while a checkpoint is written"
    return Finding(what, "more nodes share it, or save less often (training.save_steps)")
