"""Judge a plan on the machine that was found: refuse it with the nearest change that fits, or warn with a remedy.

memory/need.py counts the bytes. `data/` refuses two more mistakes when it is opened: a vocabulary larger than the
model's, and data that is read more often than `max_epochs` allows.
"""

import math
import os
import sys
from dataclasses import asdict, dataclass, field, replace

from pretraining.ds_config import (
    degrees_of,
    ds_config_names,
    load_ds_config,
    optimizer_device,
    parameter_device,
    zero_stage,
)
from pretraining.errors import UserError
from pretraining.planning.cadence import cost_of_checkpoints
from pretraining.planning.comparison import predicted
from pretraining.planning.gpus import Gpu
from pretraining.planning.memory.buffers import reduce_bucket, unprotected_gradient
from pretraining.planning.memory.need import ROOMY, TIGHT, memory_need, recomputed_one_in
from pretraining.planning.memory.split import families, held_tensors
from pretraining.planning.memory.tensors import ROUTER, parameter_tensors, precision_of
from pretraining.planning.messages import TENSOR, layer_messages, misplaced
from pretraining.planning.quantities import duration, num_bytes, several
from pretraining.planning.run_plan import RunPlan, build_run_plan
from pretraining.planning.search import fitting, nearest_fit
from pretraining.planning.sizes import balance_of_experts, model_size
from pretraining.planning.throughput import precision_of_products, step_time
from pretraining.recipe import Recipe, accumulation_steps
from pretraining.recipe.model import ROUTER_COEFFICIENT, model_with_defaults, value_of
from pretraining.recipe.training import ADAMW, WITHOUT_WARMUP
from pretraining.runtime.run_folder import RunFolder

# up to four epochs are nearly as good as new text (Muennighoff et al. 2023, section 5)
MANY_EPOCHS = 4
HIDDEN = 0.5
"""Share of the products' time up to which messages at the links' peak are hidden behind them."""
NOTABLY_LONGER, NOTABLY_SLOWER = 1.01, 1.2
"""Steps, with recomputation and with other micro-batches, over those without."""
MANY_CHECKPOINTS = 100
CLOSE_CHECKPOINTS = 0.1
"""Share of the interval that loses least: closer checkpoints, and so many, keep the disk busy for nothing."""
SMALL_BUCKET = 5_000_000
"""Elements below which messages are bound by latency (DeepSpeed's own default is 500 million)."""
BF16_FROM = 10_000_000
"""Parameters. A smaller model waits for launches of kernels, in any precision."""
HIGHEST_RATE = 0.1
"""Of Adam. Weights are drawn with a standard deviation of about 0.02; the largest rates of papers are near 0.01."""
WARM_UP_TOKENS = 375_000_000
"""GPT-3 warms up over 375 million tokens at every size (Brown et al. 2020, appendix B)."""


@dataclass(frozen=True)
class Machine:
    """The machine and the prepared data, as they were found; None for values that are not known."""

    gpu_memory_bytes: float | None = None
    """Bytes of one GPU; also None if the processor trains."""
    gpu: Gpu | None = None
    """Its entry in tables/gpus.json, if it has one."""
    has_bf16: bool | None = None
    disk_room_bytes: float | None = None
    """Bytes for this run's checkpoints on the run folder's disk: free ones, and those that its checkpoints take now."""
    host_memory_bytes: float | None = None
    """Bytes of this machine, or as many as its container allows."""
    ranks_per_host: int = 1
    trains_on_processor: bool = False
    data_tokens: int | None = None
    """Training tokens of the prepared data."""
    continues: bool = False
    """Whether the run has begun already; then its recipe may no longer change the loss curve."""


@dataclass(frozen=True)
class Objection:
    """One thing that is wrong or unwise, and what to do about it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


@dataclass(frozen=True)
class Verdict:
    """Refusals stop a run, unless it is forced; warnings are printed."""

    refusals: list[Objection] = field(default_factory=list)
    warnings: list[Objection] = field(default_factory=list)

    def enforce(self, force: bool = False) -> "Verdict":
        """Print warnings on rank 0 and return itself; raise `UserError` with the first refusal, unless forced."""
        if self.refusals and not force:
            raise UserError(f"{self.refusals[0]} (--force goes on regardless)")
        # every rank judges the same plan: one prints
        if _is_rank_0():
            for objection in (*self.refusals, *self.warnings):
                print(f"warning: {objection}", file=sys.stderr, flush=True)
        return self

    def keep(self, run: RunFolder, step: int) -> None:
        """Write an event for each refusal that was forced and each warning, on rank 0.

        step: the step at which the run starts.
        """
        for kind, objections in {"forced": self.refusals, "warning": self.warnings}.items():
            for objection in objections if _is_rank_0() else ():
                run.add_event(kind, step=step, **asdict(objection))


def _is_rank_0() -> bool:
    # the launcher's variable; a process without a launcher is rank 0
    return os.environ.get("RANK", "0") == "0"


def judge_plan(plan: RunPlan, recipe: Recipe, machine: Machine, force: bool = False) -> RunPlan:
    """Return the plan with its verdict, and what it predicts, on this machine; rank 0 prints the warnings.

    Raises:
        UserError: the run does not fit, and `force` is not set.
    """
    verdict = check_plan(recipe, plan.ds_config, plan.world_size, machine).enforce(force)
    on_processor, gpu_memory = machine.trains_on_processor, machine.gpu_memory_bytes
    values = predicted(recipe, plan.ds_config, plan.world_size, machine.gpu, on_processor, gpu_memory)
    return replace(plan, machine=machine, verdict=verdict, predicted=values)


def check_plan(recipe: Recipe, ds_config: dict | None, world_size: int, machine: Machine) -> Verdict:
    """Judge a recipe on `world_size` ranks of the machine found. Pure: it reads no device and no file except tables.

    Raises:
        UserError: the ranks do not divide the recipe's step.
    """
    kernels = _without_kernels(machine.gpu)
    if machine.gpu and precision_of_products(recipe) not in machine.gpu.dense_peak_flops:
        # its speed in that precision is not known; its memory is, and still counts
        machine = replace(machine, gpu=None)
    case = _Case(recipe, ds_config, world_size, machine)
    refusals = [_memory(case), _host(case), _disk(case), _gradients(case)]
    return Verdict([each for each in refusals if each], [*kernels, *_mistakes(case)])


class _Case:
    """One plan to judge, with the values that several rules need."""

    def __init__(self, recipe: Recipe, ds_config: dict | None, world_size: int, machine: Machine):
        self.recipe, self.ds_config, self.world_size, self.machine = recipe, ds_config, world_size, machine
        self.limit = machine.gpu_memory_bytes
        self.need = memory_need(recipe, ds_config, world_size, self.limit)

    def total_with(self, ds_config: dict | None, **training) -> float:
        """Return bytes on a GPU under another ds_config or other training keys."""
        recipe = replace(self.recipe, training={**self.recipe.training, **training})
        return memory_need(recipe, ds_config, self.world_size, self.limit).total


def _memory(case: _Case) -> Objection | None:
    if case.machine.trains_on_processor:
        return _processor_memory(case)
    if case.limit is None or case.need.total <= case.limit:
        return None
    part, ranks = case.need.largest, case.world_size
    what = (
        f"{case.recipe.name} needs {num_bytes(case.need.total)} on {'each of ' if ranks > 1 else ''}{ranks} "
        f"GPU{'s' if ranks > 1 else ''} of {num_bytes(case.limit)}: {part} alone {num_bytes(case.need.parts[part])}"
    )
    eval_batch = case.recipe.training.per_device_eval_batch_size
    if part == "validation" and eval_batch > 1:
        # a smaller batch of validation changes nothing of the run, so it is tried before another way to train
        need = case.total_with(case.ds_config, per_device_eval_batch_size=1)
        if need <= case.limit:
            return Objection(
                what, f"this fits ({num_bytes(need)}): --set training.per_device_eval_batch_size=1"
            )
    # with the GPU's memory, which decides the chunks of the loss
    fit = nearest_fit(case.recipe, ranks, lambda need: need.total <= case.limit, case.machine.gpu, case.limit)
    if fit is None:
        return Objection(what, "no stage, offload or micro-batch fits: take more or larger GPUs")
    return Objection(what, f"this fits ({num_bytes(fit.need.total)}): {fit.arguments}")


def _processor_memory(case: _Case) -> Objection | None:
    """Refuse a run on processors that host memory cannot hold, once for every rank of the host."""
    ranks, there = case.machine.ranks_per_host, case.machine.host_memory_bytes
    if there is None or ranks * case.need.on_processor <= there:
        return None
    what = (
        f"{case.recipe.name} needs {num_bytes(case.need.on_processor)} for each of {ranks} processes here, "
        f"this machine has {num_bytes(there)} of memory"
    )
    # without a GPU, so that no speed decides: the table has none for processors
    fit = nearest_fit(case.recipe, case.world_size, lambda need: ranks * need.on_processor <= there)
    if fit is None:
        return Objection(
            what, "no stage or micro-batch fits: take a smaller model, or a machine with more memory"
        )
    return Objection(what, f"this fits ({num_bytes(fit.need.on_processor)} each): {fit.arguments}")


def _host(case: _Case) -> Objection | None:
    """Refuse a run on GPUs if host memory cannot hold what is offloaded to it or built in it."""
    ranks, there = case.machine.ranks_per_host, case.machine.host_memory_bytes
    # without what a process is assumed to take: an assumption must not refuse a run
    needed = ranks * case.need.host_counted
    if there is None or case.machine.trains_on_processor or needed <= there:
        return None
    what = f"{ranks} ranks keep {num_bytes(needed)} in host memory, the machine has {num_bytes(there)}"
    if case.need.state and case.need.state.host:
        return Objection(what, "more GPUs share the offloaded states, or use --deepspeed zero3_nvme")
    return Objection(what, "build the weights sharded: --deepspeed zero3")


def _disk(case: _Case) -> Objection | None:
    plan, room = build_run_plan(case.recipe, case.ds_config, case.world_size), case.machine.disk_room_bytes
    if room is None or plan.checkpoint_disk_bytes <= room:
        return None
    kept = f"{plan.checkpoints_kept} checkpoint" + ("s" if plan.checkpoints_kept > 1 else "")
    what = (
        f"{kept} and one being written need {num_bytes(plan.checkpoint_disk_bytes)} of disk, "
        f"there is room for {num_bytes(room)}"
    )
    fewer = _fewer_checkpoints(case, plan.checkpoints_kept, room)
    if fewer:
        return Objection(what, f"keep fewer: --set checkpoints.keep_last={fewer}")
    return Objection(what, "fewer do not fit either: give --output_dir on a larger disk")


def _gradients(case: _Case) -> Objection | None:
    """Refuse a gradient that GPUs may overwrite before it is reduced (`buffers.unprotected_gradient`)."""
    if case.machine.trains_on_processor:
        return None
    of_rank = families(case.recipe, case.ds_config, case.world_size)
    width, ranks = value_of(case.recipe.model, "hidden_size"), max(family.ranks for family in of_rank)
    tensor = unprotected_gradient(case.ds_config, held_tensors(of_rank), width, ranks)
    if tensor is None:
        return None
    place = "" if tensor.layer is None else f" of layer {tensor.layer}"
    what = (
        f"the {tensor.kind}{place} has {tensor.numel:,} elements, more than reduce_bucket_size: with overlap_comm "
        "ZeRO-2 frees its gradient while it is still being reduced, and nothing would say that it is wrong"
    )
    return Objection(what, f"{_larger_buckets(case, tensor.numel)}, or --deepspeed zero1")


def _fewer_checkpoints(case: _Case, kept: int, room: float) -> int | None:
    """Return the largest `checkpoints.keep_last` below `kept` for which there is room."""
    for keep in range(kept - 1, 0, -1):
        recipe = replace(case.recipe, checkpoints=replace(case.recipe.checkpoints, keep_last=keep))
        if build_run_plan(recipe, case.ds_config, case.world_size).checkpoint_disk_bytes <= room:
            return keep
    return None


def _mistakes(case: _Case) -> list[Objection]:
    """Return every mistake whose remedy can still be applied."""
    # a checkpoint holds what these remedies change, and a run that continues with other values is refused
    of_the_curve = (_fp16, _no_bf16, _rate, _warm_up, _clipping, _repeats, _unbalanced)
    rules = (
        _no_checkpoint,
        _close_checkpoints,
        _placement,
        _links,
        _experts,
        _tiny_batch,
        _needless_zero_3,
        _offload,
        _buckets,
        _checkpointing,
        _snapshot,
    )
    rules = rules if case.machine.continues else (*of_the_curve, *rules)
    return [objection for objection in (rule(case) for rule in rules) if objection]


def _placement(case: _Case) -> Objection | None:
    """Warn about ranks that wait for each other in every layer, and are in different nodes."""
    degrees, gpu = degrees_of(case.ds_config), case.machine.gpu
    if gpu is None:
        return None
    # the machine found may have fewer GPUs than those that are sold with this one
    node = case.machine.ranks_per_host if case.machine.ranks_per_host > 1 else gpu.gpus_per_node
    gpu = replace(gpu, gpus_per_node=node)
    outside = misplaced(degrees, node) if case.world_size > node else []
    # long sequences may need more ranks than a node has, layers never do
    if degrees.ranks_per_sample > node:
        outside = [name for name in outside if name == TENSOR]
    if not outside:
        return None
    sent = layer_messages(case.recipe, case.ds_config, case.world_size, gpu)
    seconds = sum(message.seconds for message in sent if message.name in outside)
    as_one = replace(gpu, gpus_per_node=case.world_size)
    there = layer_messages(case.recipe, case.ds_config, case.world_size, as_one)
    inside = sum(message.seconds for message in there if message.name in outside)
    what = (
        f"{degrees}: groups do not fit nodes of {several(node, 'GPU')}, so that {' and '.join(outside)} take at least "
        f"{duration(seconds)} of a step, and {duration(inside)} inside a node"
    )
    return Objection(what, f"degrees whose product divides {node}: tensor first, then sequence, data outside")


def _links(case: _Case) -> Objection | None:
    """Warn about messages that take longer than the products, if other micro-batches or recomputation are faster."""
    gpu = case.machine.gpu
    if gpu is None or case.limit is None:
        return None
    time = step_time(case.recipe, case.ds_config, case.world_size, gpu)
    if time.bound_by != "links" or case.need.total > case.limit:
        return None
    best = fitting(case.recipe, case.world_size, gpu, case.limit, own_ds_config=True)[0]
    if NOTABLY_SLOWER * best.step_seconds > time.seconds:
        return None
    messages = max(time.communication_seconds, time.waiting_seconds)
    kernels = time.compute_seconds - time.waiting_seconds
    what = f"messages take {duration(messages)} of a step, kernels {duration(kernels)}"
    return Objection(f"{what}; a step of {duration(best.step_seconds)} fits", best.arguments)


def _without_kernels(gpu: Gpu | None) -> list[Objection]:
    """Warn about a GPU for which the pinned torch has no kernels, whatever the recipe."""
    if gpu is None or gpu.architecture != "Volta":
        return []
    what = f"CUDA 13, for which the pinned torch is built, has no kernels for {gpu.name} and its generation"
    return [Objection(what, "install a build of torch for CUDA 12, or take a later GPU")]


def _fp16(case: _Case) -> Objection | None:
    if not (case.recipe.training.fp16 and case.machine.has_bf16):
        return None
    what = "fp16 overflows above 65,504 and needs loss scaling, and this GPU has bf16"
    return Objection(what, "--set training.fp16=false --set training.bf16=true")


def _no_bf16(case: _Case) -> Objection | None:
    training, size = case.recipe.training, model_size(case.recipe.model).total
    if training.bf16 or training.fp16 or not case.machine.has_bf16 or size < BF16_FROM:
        return None
    what = "products in fp32 (TF32 at best) take several times as long as in bf16, which this GPU has"
    return Objection(what, "--set training.bf16=true")


def _rate(case: _Case) -> Objection | None:
    """Warn about a learning rate that is probably a slip, such as 3e4."""
    training = case.recipe.training
    if training.optim not in ADAMW or training.learning_rate < HIGHEST_RATE:
        return None
    what = f"Adam moves a weight by up to the learning rate in a step, and {training.learning_rate:g} is more than "
    return Objection(f"{what}weights are large at the start", "rates of 1e-5 to 1e-2 are usual")


def _no_checkpoint(case: _Case) -> Objection | None:
    """Warn about a run whose first checkpoint is its last step's."""
    training, steps = case.recipe.training, case.recipe.num_steps
    if training.save_strategy != "steps" or training.save_steps <= steps:
        return None
    what = f"the first checkpoint is that of the end: training.save_steps is {training.save_steps:,.0f}, the run has "
    return Objection(f"{what}{several(steps, 'step')}", f"--set training.save_steps={max(1, steps // 10)}")


def _close_checkpoints(case: _Case) -> Objection | None:
    """Warn about many checkpoints which come far more often than failures ask for."""
    if case.machine.gpu is None:
        return None
    seconds = step_time(case.recipe, case.ds_config, case.world_size, case.machine.gpu).seconds
    plan = build_run_plan(case.recipe, case.ds_config, case.world_size)
    saved = cost_of_checkpoints(plan, case.recipe, seconds, case.machine.gpu, case.world_size)
    if (
        saved is None
        or saved.written < MANY_CHECKPOINTS
        or saved.every_seconds > CLOSE_CHECKPOINTS * saved.best_every_seconds
    ):
        return None
    what = f"{saved.written:,} checkpoints of {num_bytes(saved.bytes)}, one every {duration(saved.every_seconds)}"
    return Objection(
        f"{what}, where failures ask for one every {duration(saved.best_every_seconds)}",
        f"--set training.save_steps={saved.best_every_steps}",
    )


def _warm_up(case: _Case) -> Objection | None:
    """Warn about a warm-up that is too short, or that the scheduler does not have."""
    steps = case.recipe.num_steps
    given, kind = case.recipe.warmup_steps(steps), case.recipe.training.lr_scheduler_type
    if given and kind in WITHOUT_WARMUP:
        what = f"training.lr_scheduler_type {kind} has no warm-up: the rate is whole from the first step on"
        return Objection(
            f"{what}, whatever training.warmup_steps says", "write constant_with_warmup, or 0 steps"
        )
    if given >= steps:
        what = f"the warm-up takes {given:,} of {steps:,} steps: the rate rises until the end"
        return Objection(what, _warm_up_of(max(1, steps // 10), case.recipe))
    # Ma and Yarats 2021, section 5: 2 / (1 - beta2) steps; `max` avoids a division by zero
    needed = round(2 / max(1 - case.recipe.training.adam_beta2, 1e-9))
    # from a billion parameters on, at least the tokens of GPT-3's warm-up
    if model_size(case.recipe.model).total >= 1e9:
        needed = max(needed, WARM_UP_TOKENS // case.recipe.tokens_per_step)
    # a short run cannot spend more than a tenth of itself on it
    needed = min(needed, max(1, steps // 10))
    if given >= needed:
        return None
    what = f"warm-up of {given} steps is short for this size: the optimizer's running means are not settled"
    return Objection(what, _warm_up_of(needed, case.recipe))


def _warm_up_of(steps: int, recipe: Recipe) -> str:
    """Write how to set the warm-up, by the key that the recipe uses."""
    if recipe.budget.warmup_tokens is not None:
        return f"--set budget.warmup_tokens={steps * recipe.tokens_per_step}"
    return f"--set training.warmup_steps={steps}"


def _clipping(case: _Case) -> Objection | None:
    if case.recipe.training.max_grad_norm:
        return None
    return Objection(
        "gradients are not clipped: one bad batch can end the run", "--set training.max_grad_norm=1.0"
    )


def _experts(case: _Case) -> Objection | None:
    """Warn about experts that are multiplied one after another."""
    precision = precision_of(case.recipe, case.ds_config)
    experts = any(tensor.kind == ROUTER for tensor in parameter_tensors(case.recipe.model))
    # grouped products need bf16 weights; autocast does not help (transformers 5.23, integrations/moe.py `_grouped_mm`)
    if case.limit is None or not experts or (precision.name == "bf16" and not precision.is_autocast):
        return None
    weights = "fp32" if precision.is_autocast else precision.name
    what = f"weights of experts in {weights} are multiplied one expert after another, and every layer waits for the GPU"
    if precision.name == "bf16":
        return Objection(what, "--deepspeed zero1, which keeps them in bf16")
    # this remedy changes the precision, and with it the curve
    return None if case.machine.continues else Objection(what, "--set training.bf16=true --deepspeed zero1")


def _unbalanced(case: _Case) -> Objection | None:
    """Warn about a mixture whose routers may come to send all tokens to a few experts."""
    if balance_of_experts(case.recipe.model) != "":
        return None
    keys = model_with_defaults(case.recipe.model)
    has_loss = ROUTER_COEFFICIENT in keys and "output_router_logits" in keys
    remedy = (
        f"--set model.output_router_logits=true --set model.{ROUTER_COEFFICIENT}=0.01"
        if has_loss
        else f"take a model_type with model.{ROUTER_COEFFICIENT}, as qwen3_moe"
    )
    return Objection("nothing balances the experts of this mixture: a few of them may get all tokens", remedy)


def _tiny_batch(case: _Case) -> Objection | None:
    if case.recipe.micro_batch > 1 or accumulation_steps(case.recipe, case.world_size, case.ds_config) > 1:
        return None
    what = "one sequence a GPU and step, without accumulation: small kernels, and a message after each"
    return Objection(what, "use fewer GPUs, or a larger budget.tokens_per_step")


def _needless_zero_3(case: _Case) -> Objection | None:
    if (
        case.limit is None
        or zero_stage(case.ds_config) != 3
        or case.world_size == 1
        or degrees_of(case.ds_config).ranks_per_sample
        > 1  # without the split other ranks would divide the step
        or _offloads(case.ds_config)
    ):
        return None
    simple = case.total_with(load_ds_config("zero1"))
    # gathers that are hidden behind the products cost nothing
    if _hidden(case):
        return None
    # the simpler way must fit with room to spare
    if simple > ROOMY * case.limit:
        return None
    what = f"ZeRO-3 gathers the weights twice in every pass, and ZeRO-1 would fit ({num_bytes(simple)})"
    return Objection(what, "--deepspeed zero1")


def _offload(case: _Case) -> Objection | None:
    split = degrees_of(case.ds_config).ranks_per_sample > 1
    if case.limit is None or split or not _offloads(case.ds_config):
        return None
    # the shipped ds_config of the same stage, without offload
    name = f"zero{zero_stage(case.ds_config)}"
    here = case.total_with(load_ds_config(name))
    if here > ROOMY * case.limit:
        return None
    return Objection(
        f"offloading slows every step, and all of it fits the GPU ({num_bytes(here)})", f"--deepspeed {name}"
    )


def _offloads(config: dict | None) -> bool:
    return optimizer_device(config) != "gpu" or parameter_device(config) != "gpu"


def _buckets(case: _Case) -> Objection | None:
    # only messages between GPUs are slowed by latency
    on_gpus = case.limit is not None and case.world_size > 1
    if not on_gpus or zero_stage(case.ds_config) < 2:
        return None
    bucket = reduce_bucket(case.ds_config, value_of(case.recipe.model, "hidden_size"))
    # four messages for the whole model are few, however small they are
    if bucket >= min(SMALL_BUCKET, model_size(case.recipe.model).total / 4):
        return None
    what = f"reduce buckets of {bucket:,} elements send many small messages"
    return Objection(what, _larger_buckets(case, 50_000_000))


def _larger_buckets(case: _Case, elements: int) -> str:
    """Write how to set the buckets of the ds_config in use."""
    name = case.recipe.deepspeed
    file = f"a copy of ds_configs/{name}.json" if name in ds_config_names() else name
    return f'in {file}: "reduce_bucket_size": {elements}'


def _checkpointing(case: _Case) -> Objection | None:
    if case.limit is None:
        return None
    if not recomputed_one_in(case.recipe):
        # above the limit it is refused (`_memory`), below TIGHT there is room
        if not TIGHT * case.limit < case.need.total <= case.limit:
            return None
        what = f"{num_bytes(case.need.total)} of {num_bytes(case.limit)}: fragmentation can end the run"
        return Objection(what, "--set training.activation_checkpointing=true")
    without = case.total_with(case.ds_config, activation_checkpointing=False)
    if without > ROOMY * case.limit:
        return None
    longer = "longer"
    if case.machine.gpu:
        training = {**case.recipe.training, "activation_checkpointing": False}
        once, again = (
            step_time(recipe, case.ds_config, case.world_size, case.machine.gpu).seconds
            for recipe in (replace(case.recipe, training=training), case.recipe)
        )
        # nothing is gained where messages, not products, take the time
        if again < NOTABLY_LONGER * once:
            return None
        longer = f"{again / once - 1:.0%} longer"
    what = f"activation checkpointing makes a step {longer}, and it fits without ({num_bytes(without)})"
    return Objection(what, "--set training.activation_checkpointing=false")


def _repeats(case: _Case) -> Objection | None:
    """Warn about data that is read more often than is useful (Muennighoff et al. 2023, section 5)."""
    tokens, there = case.recipe.budget.tokens, case.machine.data_tokens
    # whoever sets `max_epochs` has decided it
    stated = any(source.max_epochs for source in case.recipe.data.sources)
    if not there or stated or tokens <= MANY_EPOCHS * there:
        return None
    what = f"budget.tokens reads the {there:,} training tokens {tokens / there:.1f} times: after four it teaches little"
    # whole steps
    unit = case.recipe.tokens_per_step
    fewer = f", or --set budget.tokens={MANY_EPOCHS * there // unit * unit}" if there >= unit else ""
    return Objection(
        what, f"add text{fewer}; --set data.sources.0.max_epochs={math.ceil(tokens / there)} states it"
    )


def _hidden(case: _Case) -> bool:
    """Return whether the links are known and carry a step's messages well within the time of its products."""
    if case.machine.gpu is None:
        return False
    time = step_time(case.recipe, case.ds_config, case.world_size, case.machine.gpu)
    return time.communication_seconds <= HIDDEN * time.compute_seconds


def _snapshot(case: _Case) -> Objection | None:
    """Warn if training must wait during a save, as host memory has no room for a copy (`checkpoints/background.py`)."""
    ranks, there, need = case.machine.ranks_per_host, case.machine.host_memory_bytes, case.need
    held = need.on_processor if case.machine.trains_on_processor else need.host_running
    if there is None or not need.snapshot or ranks * (held + need.snapshot) <= there:
        return None
    copies = f"{num_bytes(ranks * need.snapshot)} for {several(ranks, 'rank')}"
    what = f"{num_bytes(there)} of host memory leave no room for a copy of the state ({copies})"
    what = f"{what}: training waits while a checkpoint is written"
    return Objection(what, "more nodes share it, or save less often (training.save_steps)")
