"""Judge a plan on the machine that was found: refuse it with the nearest change that fits, or warn with a remedy.

memory/need.py counts the bytes. `data/` refuses two more mistakes when it is opened: a vocabulary larger than the
model's, and data that is read more often than `max_epochs` allows.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from pretraining.ds_config import ds_config_names, load_ds_config, optimizer_device, parameter_device
from pretraining.planning.comparison import predicted
from pretraining.planning.costs import cost_of_checkpoints
from pretraining.planning.fit import fitting, nearest_fit
from pretraining.planning.memory.need import BUILT, ROOMY, TIGHT, memory_need
from pretraining.planning.memory.states import reduce_bucket, unprotected_gradient
from pretraining.planning.messages import EXPERT, SEQUENCE, TENSOR, layer_messages, spans_nodes
from pretraining.planning.quantities import duration, num_bytes, several
from pretraining.planning.run_plan import Machine, Objection, RunPlan, Verdict, build_run_plan, save_every
from pretraining.planning.setup import Setup
from pretraining.planning.shapes import ROUTER, parameter_tensors
from pretraining.planning.sizes import balance_of_experts, model_size
from pretraining.planning.step_time import StepTime, step_time
from pretraining.recipe.model import ROUTER_COEFFICIENT, has_experts, own_key, properties_of
from pretraining.recipe.training import ADAMW, WITHOUT_WARMUP

# up to four epochs are nearly as good as new text (Muennighoff et al. 2023, section 5)
MANY_EPOCHS = 4
HIDDEN = 0.5
"""Share of the products' time up to which messages at the links' peak are hidden behind them."""
NOTABLY_LONGER = 1.01
"""A step with recomputation over one without."""
NOTABLY_SLOWER = 1.2
"""The recipe's step over that of its best other layout."""
MANY_CHECKPOINTS = 100
CLOSE_CHECKPOINTS = 0.1
"""Of the interval that loses least time: so many checkpoints that are closer keep the disk busy for nothing."""
SMALL_BUCKET = 5_000_000
"""Elements below which messages are bound by latency (DeepSpeed's own default is 500 million)."""
BF16_FROM = 10_000_000
"""Parameters. A smaller model waits for launches of kernels, in any precision."""
HIGHEST_RATE = 0.1
"""Of Adam. Weights are drawn with a standard deviation of about 0.02; the largest rates of papers are near 0.01."""
GROUPED = 8
"""Weights of 16 bits in 16 bytes."""
WARM_UP_TOKENS = 375_000_000
"""GPT-3 warms up over 375 million tokens at every size (Brown et al. 2020, appendix B)."""


def judge_plan(plan: RunPlan, machine: Machine, force: bool = False) -> RunPlan:
    """Return the plan with its verdict, and what it predicts, on this machine; rank 0 prints the warnings.

    `UserError` if the run does not fit, or ZeRO-2 could overwrite a gradient, and `force` is not set; or if the ranks
    do not divide the recipe's step.
    """
    verdict = check_plan(plan.setup, machine).enforce(force)
    values = predicted(plan.setup, machine.gpu, machine.trains_on_processor, machine.gpu_memory_bytes)
    return replace(plan, machine=machine, verdict=verdict, predicted=values)


def check_plan(setup: Setup, machine: Machine) -> Verdict:
    """Judge a recipe on ranks of the machine found; `UserError` if they do not divide the recipe's step.

    It reads no device, and no file but tables and ds_configs.
    """
    warnings: list[Objection | None] = []
    if machine.gpu and machine.gpu.architecture == "Volta":
        name = machine.gpu.name
        what = f"CUDA 13, for which the pinned torch is built, has no kernels for {name} and its generation"
        warnings.append(Objection(what, "install a build of torch for CUDA 12, or take a later GPU"))
    if machine.gpu and setup.recipe.training.product_precision not in machine.gpu.dense_peak_flops:
        # its speed in that precision is not known; its memory is, and still counts
        machine = replace(machine, gpu=None)
    case = _Case(setup, machine)
    refusals = [_memory(case), *_other_refusals(case)]
    # these remedies change the curve, which a run that continues may not
    warnings += [] if machine.continues else _curve_warnings(case)
    warnings += [*_save_warnings(case), _placement(case), _links(case)]
    warnings += [*_way_warnings(case), _checkpointing(case), _snapshot(case)]
    return Verdict([each for each in refusals if each], [each for each in warnings if each])


class _Case:
    """One plan to judge, with the values that several rules need."""

    def __init__(self, setup: Setup, machine: Machine):
        self.setup, self.machine, self.recipe, self.ds_config = setup, machine, setup.recipe, setup.ds_config
        self.limit = machine.gpu_memory_bytes
        self.need = memory_need(setup, self.limit)
        self.plan = build_run_plan(setup)

    @cached_property
    def step(self) -> StepTime | None:
        """The step on the GPU of the table; None if it has none."""
        return step_time(self.setup, self.machine.gpu) if self.machine.gpu else None

    def with_training(self, **training) -> Setup:
        recipe = replace(self.recipe, training={**self.recipe.training, **training})
        return replace(self.setup, recipe=recipe)


def _memory(case: _Case) -> Objection | None:
    """Refuse a run on GPUs that cannot hold it, or on processors whose host cannot hold all of its ranks."""
    name, ranks, there = case.recipe.name, case.machine.ranks_per_host, case.machine.host_memory_bytes
    if case.machine.trains_on_processor:
        needed = case.need.on_processor
        if there is None or ranks * needed <= there:
            return None
        what = f"{name} needs {num_bytes(needed)} for each of {ranks} processes here"
        what += f", this machine has {num_bytes(there)} of memory"
        # without a GPU, so that no speed decides: the table has none for processors
        fit = nearest_fit(case.setup, lambda need: ranks * need.on_processor <= there)
        remedy = "no stage or micro-batch fits: take a smaller model, or a machine with more memory"
        if fit is not None:
            remedy = f"this fits ({num_bytes(fit.need.on_processor)} each): {fit.arguments}"
        return Objection(what, remedy)
    if case.limit is None or case.need.total <= case.limit:
        return None
    part, ranks = case.need.largest, case.setup.world_size
    gpus = f"each of {ranks} GPUs" if ranks > 1 else "1 GPU"
    what = f"{name} needs {num_bytes(case.need.total)} on {gpus} of {num_bytes(case.limit)}"
    what += f": {part} alone {num_bytes(case.need.parts[part])}"
    eval_batch = case.recipe.training.per_device_eval_batch_size
    if part == "validation" and eval_batch > 1:
        # a smaller batch of validation changes nothing of the run, so it is tried before another way to train
        need = memory_need(case.with_training(per_device_eval_batch_size=1), case.limit).total
        if need <= case.limit:
            remedy = "--set training.per_device_eval_batch_size=1"
            return Objection(what, f"this fits ({num_bytes(need)}): {remedy}")
    # with the GPU's memory, which decides the chunks of the loss
    fit = nearest_fit(case.setup, lambda need: need.total <= case.limit, case.machine.gpu, case.limit)
    if fit is None:
        return Objection(what, "no stage, offload or micro-batch fits: take more or larger GPUs")
    return Objection(what, f"this fits ({num_bytes(fit.need.total)}): {fit.arguments}")


def _other_refusals(case: _Case) -> Iterator[Objection]:
    """Refuse what host memory or the disk cannot hold, gradients that are overwritten, and kernels that stop."""
    ranks, there = case.machine.ranks_per_host, case.machine.host_memory_bytes
    on_processor, gpu = case.machine.trains_on_processor, case.machine.gpu
    # without what a process is assumed to take: an assumption must not refuse a run
    needed = ranks * case.need.host_counted
    if there is not None and not on_processor and needed > there:
        what = f"{ranks} ranks keep {num_bytes(needed)} in host memory, the machine has {num_bytes(there)}"
        remedy = "build the weights sharded: --deepspeed zero3"
        if case.need.state and case.need.state.host:
            remedy = "more GPUs share the offloaded states, or use --deepspeed zero3_nvme"
        yield Objection(what, remedy)
    plan, room = case.plan, case.machine.disk_room_bytes
    if room is not None and plan.saved_bytes > room:
        kept = several(plan.checkpoints_kept, "checkpoint")
        if plan.weights_kept:
            kept += f", the weights of {plan.weights_kept:,} earlier ones"
        what = f"{kept} and one being written need {num_bytes(plan.saved_bytes)} of disk"
        remedy = "fewer do not fit either: give --output_dir on a larger disk"
        for fewer in range(plan.checkpoints_kept - 1, 0, -1):
            recipe = replace(case.recipe, checkpoints=replace(case.recipe.checkpoints, keep_last=fewer))
            if build_run_plan(replace(case.setup, recipe=recipe)).saved_bytes <= room:
                remedy = f"keep fewer: --set checkpoints.keep_last={fewer}"
                break
        if plan.checkpoint_disk_bytes <= room:
            remedy = "save more rarely (training.save_steps), or --set checkpoints.demote_to_weights=false"
        yield Objection(f"{what}, there is room for {num_bytes(room)}", remedy)
    # a gradient that GPUs may overwrite before it is reduced
    tensor = unprotected_gradient(case.setup)
    if tensor is not None and not on_processor:
        place = "" if tensor.layer is None else f" of layer {tensor.layer}"
        what = f"the {tensor.kind}{place} has {tensor.numel:,} elements, more than reduce_bucket_size"
        why = "frees its gradient while it is still being reduced, and nothing would say that it is wrong"
        what = f"{what}: with overlap_comm ZeRO-2 {why}"
        yield Objection(what, f"{_larger_buckets(case, tensor.numel)}, or --deepspeed zero1")
    if between_borders := _borders(case):
        yield between_borders
    # as `check_speed` does at the start
    if case.recipe.speed.fp8 != "none" and gpu and not gpu.architecture.startswith(("Hopper", "Blackwell")):
        what = f"speed.fp8 needs Hopper or later, and {gpu.name} is of {gpu.architecture}"
        yield Objection(what, "--set speed.fp8=none")


def _placement(case: _Case) -> Objection | None:
    """Warn about ranks that wait for each other in every layer, and are in different nodes."""
    degrees, gpu = case.setup.degrees, case.machine.gpu
    if gpu is None:
        return None
    # the machine found may have fewer GPUs than those that are sold with this one
    node = case.machine.ranks_per_host if case.machine.ranks_per_host > 1 else gpu.gpus_per_node
    gpu = replace(gpu, gpus_per_node=node)
    # the ranks of the groups that wait, and how far apart they are
    inner = degrees.tensor
    groups = {TENSOR: (inner, 1), SEQUENCE: (degrees.sequence, inner), EXPERT: (degrees.expert, inner)}
    outside = [name for name, group in groups.items() if spans_nodes(*group, node)]
    # long sequences may need more ranks than a node has, layers never do
    if degrees.ranks_per_sample > node:
        outside = [name for name in outside if name == TENSOR]
    if not outside or case.setup.world_size <= node:
        return None
    as_one = replace(gpu, gpus_per_node=case.setup.world_size)
    seconds, inside = (
        sum(message.seconds for message in layer_messages(case.setup, each) if message.name in outside)
        for each in (gpu, as_one)
    )
    slow = f"take at least {duration(seconds)} of a step, and {duration(inside)} inside a node"
    what = f"{degrees}: groups do not fit nodes of {several(node, 'GPU')}, so that {' and '.join(outside)} {slow}"
    return Objection(what, f"degrees whose product divides {node}: tensor first, then sequence, data outside")


def _links(case: _Case) -> Objection | None:
    """Warn about messages that take longer than the products, if other micro-batches or recomputation are faster."""
    gpu, time = case.machine.gpu, case.step
    if time is None or case.limit is None:
        return None
    if time.bound_by != "links" or case.need.total > case.limit:
        return None
    best = fitting(case.setup, gpu, case.limit, own_ds_config=True)[0]
    if NOTABLY_SLOWER * best.step_seconds > time.seconds:
        return None
    messages = max(time.communication_seconds, time.waiting_seconds)
    kernels = time.compute_seconds - time.waiting_seconds
    what = f"messages take {duration(messages)} of a step, kernels {duration(kernels)}"
    return Objection(f"{what}; a step of {duration(best.step_seconds)} fits", best.arguments)


def _curve_warnings(case: _Case) -> Iterator[Objection]:
    """Warn about precision, learning rate, warm-up and clipping, data that is read too often, unbalanced experts."""
    training, parameters = case.recipe.training, model_size(case.recipe.model).total
    if training.fp16 and case.machine.has_bf16:
        what = "fp16 overflows above 65,504 and needs loss scaling, and this GPU has bf16"
        yield Objection(what, "--set training.fp16=false --set training.bf16=true")
    in_fp32 = not training.bf16 and not training.fp16
    if in_fp32 and case.machine.has_bf16 and parameters >= BF16_FROM:
        what = "products in fp32 (TF32 at best) take several times as long as in bf16, which this GPU has"
        yield Objection(what, "--set training.bf16=true")
    # probably a slip, such as 3e4
    if training.optim in ADAMW and training.learning_rate >= HIGHEST_RATE:
        what = f"Adam moves a weight by up to the learning rate in a step, and {training.learning_rate:g} is larger "
        yield Objection(f"{what}than the weights are at the start", "rates of 1e-5 to 1e-2 are usual")
    steps = case.recipe.num_steps
    given, kind = case.recipe.warmup_steps(steps), training.lr_scheduler_type
    # Ma and Yarats 2021, section 5: 2 / (1 - beta2) steps; `max` avoids a division by zero
    needed = round(2 / max(1 - training.adam_beta2, 1e-9))
    # from a billion parameters on, at least the tokens of GPT-3's warm-up
    if parameters >= 1e9:
        needed = max(needed, WARM_UP_TOKENS // case.recipe.tokens_per_step)
    # a short run cannot spend more than a tenth of itself on it
    needed = min(needed, max(1, steps // 10))
    if kind in WITHOUT_WARMUP:
        if given:
            what = f"training.lr_scheduler_type {kind} has no warm-up: the rate is whole from the first step on, "
            what += "whatever training.warmup_steps says"
            remedy = "--set training.lr_scheduler_type=constant_with_warmup, or --set training.warmup_steps=0"
            yield Objection(what, remedy)
    elif given >= steps or given < needed:
        short = "is short for this run: the optimizer's running means are not settled"
        what = f"warm-up of {given} steps {short}"
        if given >= steps:
            what = f"the warm-up takes {given:,} of {steps:,} steps: the rate rises until the end"
            needed = max(1, steps // 10)
        remedy = f"--set training.warmup_steps={needed}"
        if case.recipe.budget.warmup_tokens is not None:
            remedy = f"--set budget.warmup_tokens={needed * case.recipe.tokens_per_step}"
        yield Objection(what, remedy)
    if not training.max_grad_norm:
        what = "gradients are not clipped: one bad batch can end the run"
        yield Objection(what, "--set training.max_grad_norm=1.0")
    tokens, there = case.recipe.budget.tokens, case.machine.data_tokens
    # Muennighoff et al. 2023, section 5; whoever sets `max_epochs` has decided it
    stated = any(source.max_epochs for source in case.recipe.data.sources)
    if there and not stated and tokens > MANY_EPOCHS * there:
        what = f"budget.tokens reads the {there:,} training tokens {tokens / there:.1f} times: "
        # whole steps
        unit = case.recipe.tokens_per_step
        fewer = f", or --set budget.tokens={MANY_EPOCHS * there // unit * unit}" if there >= unit else ""
        states = f"--set data.sources.0.max_epochs={math.ceil(tokens / there)} states it"
        yield Objection(f"{what}after four it teaches little", f"add text{fewer}; {states}")
    if balance_of_experts(case.recipe) == "":
        asked = case.recipe.loss.balance == "none"
        remedy = "--set loss.balance=auto" if asked else f"--set model.{ROUTER_COEFFICIENT}=0.01"
        what = "nothing balances the experts of this mixture: a few of them may get all tokens"
        yield Objection(what, remedy)


def _save_warnings(case: _Case) -> Iterator[Objection]:
    """Warn about a first checkpoint that is the last step's, too few for a rollback, and many that nobody asks for."""
    training, steps, gpu = case.recipe.training, case.recipe.num_steps, case.machine.gpu
    by_epoch = training.save_strategy == "epoch"
    if by_epoch or (training.save_strategy == "steps" and training.save_steps > steps):
        given = "save_strategy is epoch" if by_epoch else f"save_steps is {training.save_steps:,.0f}"
        what = f"the first checkpoint is that of the end: training.{given}"
        what = f"{what}, the run has {several(steps, 'step')}"
        by_steps = "--set training.save_strategy=steps " if by_epoch else ""
        yield Objection(what, f"{by_steps}--set training.save_steps={max(1, steps // 10)}")
    spikes, kept = case.recipe.monitors.spikes, case.recipe.checkpoints.keep_last
    every = save_every(case.recipe)
    if spikes.policy == "rollback" and kept is not None and every and (kept - 1) * every < spikes.skip_steps:
        # right after a save, the oldest one that is kept is so many intervals old
        what = f"checkpoints.keep_last {kept} of one every {several(every, 'step')} may leave none as old as "
        what += f"monitors.spikes.skip_steps ({spikes.skip_steps}) asks for: a rollback goes back less far"
        yield Objection(what, f"--set checkpoints.keep_last={1 + math.ceil(spikes.skip_steps / every)}")
    saved = cost_of_checkpoints(case.plan, case.step.seconds, gpu) if case.step else None
    if saved is None or saved.written < MANY_CHECKPOINTS:
        return
    best = saved.best_every_seconds
    if saved.every_seconds <= CLOSE_CHECKPOINTS * best:
        what = f"{saved.written:,} checkpoints of {num_bytes(saved.bytes)}, one every {duration(saved.every_seconds)}"
        what = f"{what}, where failures ask for one every {duration(best)}"
        yield Objection(what, f"--set training.save_steps={saved.best_every_steps}")


def _borders(case: _Case) -> Objection | None:
    """Refuse experts whose weights or rows begin between borders of 16 bytes: torch's grouped product stops there.

    On a GPU alone. ZeRO-1 and 2 lay the weights of a parameter group end to end in one buffer.
    """
    precision, model = case.setup.precision, case.recipe.model
    if case.limit is None or precision.name != "bf16" or precision.is_autocast or not has_experts(model):
        return None
    if model.get("experts_implementation", "grouped_mm") != "grouped_mm":
        return None
    stops = "between borders of 16 bytes, where torch's grouped product stops on a GPU"
    remedy = "choose multiples of 8, or --set model.experts_implementation=batched_mm"
    # else the experts have the width that other types give their dense layers
    own = "moe_intermediate_size" in properties_of(model)
    inner = "moe_intermediate_size" if own else "intermediate_size"
    for key in (own_key(model, "hidden_size"), own_key(model, inner)):
        if (width := model.get(key)) and width % GROUPED:
            return Objection(f"model.{key} {width} leaves experts' rows {stops}", remedy)
    stage = case.setup.stage
    if stage not in (1, 2):
        return None
    # norms and biases, which do not decay, have a buffer of their own
    flat = (each for each in parameter_tensors(model) if each.part != "norms")
    odd = next((each for each in flat if each.numel % GROUPED and not each.name.endswith("bias")), None)
    if odd is None:
        return None
    what = f"{odd.name or odd.part} has {odd.numel:,} elements: in the buffer of ZeRO-{stage} the experts"
    return Objection(f"{what} behind it begin {stops}", f"--deepspeed zero3; or {remedy}")


def _way_warnings(case: _Case) -> Iterator[Objection]:
    """Warn about what slows every step and is not needed: experts one by one, a batch, a stage, offload, buckets."""
    recipe, config, on_gpus = case.recipe, case.ds_config, case.limit is not None
    precision, stage, several_gpus = case.setup.precision, case.setup.stage, case.setup.world_size > 1
    has_router = any(tensor.kind == ROUTER for tensor in parameter_tensors(recipe.model))
    # grouped products need bf16 weights; autocast does not help (transformers 5.24, integrations/moe.py `_grouped_mm`)
    if on_gpus and has_router and (precision.name != "bf16" or precision.is_autocast):
        weights = "fp32" if precision.is_autocast else precision.name
        what = f"weights of experts in {weights} are multiplied one expert after another, "
        what += "and every layer waits for the GPU"
        if precision.name == "bf16":
            yield Objection(what, "--deepspeed zero1, which keeps them in bf16")
        # this remedy changes the precision, and with it the curve
        elif not case.machine.continues:
            yield Objection(what, "--set training.bf16=true --deepspeed zero1")
    if recipe.micro_batch <= 1 and case.setup.accumulation <= 1:
        what = "one sequence a GPU and step, without accumulation: small kernels, and a message after each"
        yield Objection(what, "use fewer GPUs, or a larger budget.tokens_per_step")
    offloads = optimizer_device(config) != "gpu" or parameter_device(config) != "gpu"
    # the links are known and carry a step's messages well within the time of its products
    time = case.step
    hides_messages = time is not None and time.communication_seconds <= HIDDEN * time.compute_seconds
    # without the split other ranks would divide the step
    if on_gpus and case.setup.degrees.ranks_per_sample == 1:
        # the simpler way, or the shipped ds_config of the same stage without offload, must fit with room to spare
        name = f"zero{stage}" if offloads else "zero1"
        if offloads or (stage == 3 and several_gpus and not hides_messages):
            need = memory_need(replace(case.setup, ds_config=load_ds_config(name)), case.limit).total
            what = f"ZeRO-3 gathers the weights twice in every pass, and ZeRO-1 would fit ({num_bytes(need)})"
            if offloads:
                what = f"offloading slows every step, and all of it fits the GPU ({num_bytes(need)})"
            if need <= ROOMY * case.limit:
                yield Objection(what, f"--deepspeed {name}")
    # only messages between GPUs are slowed by latency
    if on_gpus and several_gpus and stage >= 2:
        bucket = reduce_bucket(case.setup)
        ranks = {"experts": case.setup.degrees.expert}
        numels = [each.numel // ranks.get(each.part, 1) for each in parameter_tensors(recipe.model)]
        # a parameter that is larger than the bucket is a message of its own
        alone = [numel for numel in numels if numel > bucket]
        messages = len(alone) + (sum(numels) - sum(alone)) / bucket
        # four messages for the whole model are few, however small they are
        if sum(numels) / messages < SMALL_BUCKET and messages > 4:
            what = f"reduce buckets of {bucket:,} elements send many small messages"
            yield Objection(what, _larger_buckets(case, 50_000_000))


def _larger_buckets(case: _Case, elements: int) -> str:
    name = case.recipe.deepspeed
    file = f"a copy of ds_configs/{name}.json" if name in ds_config_names() else name
    return f'in {file}: "reduce_bucket_size": {elements}'


def _checkpointing(case: _Case) -> Objection | None:
    if case.limit is None:
        return None
    if not case.recipe.training.recomputed_one_in:
        # above the limit it is refused (`_memory`), below TIGHT there is room
        if not TIGHT * case.limit < case.need.total <= case.limit:
            return None
        what = f"{num_bytes(case.need.total)} of {num_bytes(case.limit)}: fragmentation can end the run"
        return Objection(what, "--set training.activation_checkpointing=true")
    kept = case.with_training(activation_checkpointing=False)
    without = memory_need(kept, case.limit).total
    if without > ROOMY * case.limit:
        return None
    longer = "longer"
    if case.machine.gpu and case.step:
        once = step_time(kept, case.machine.gpu).seconds
        # nothing is gained where messages, not products, take the time
        if case.step.seconds < NOTABLY_LONGER * once:
            return None
        longer = f"{case.step.seconds / once - 1:.0%} longer"
    what = f"activation checkpointing makes a step {longer}, and it fits without ({num_bytes(without)})"
    return Objection(what, "--set training.activation_checkpointing=false")


def _snapshot(case: _Case) -> Objection | None:
    """Warn if training must wait during a save, as host memory has no room for a copy (`checkpoints/background.py`)."""
    ranks, there, need = case.machine.ranks_per_host, case.machine.host_memory_bytes, case.need
    # the model that was built in host memory is on the GPU by then
    held = need.host_counted - need.host.get(BUILT, 0)
    held = need.on_processor if case.machine.trains_on_processor else held
    if there is None or not need.snapshot or ranks * (held + need.snapshot) <= there:
        return None
    copies = f"{num_bytes(ranks * need.snapshot)} for {several(ranks, 'rank')}"
    what = f"{num_bytes(there)} of host memory leave no room for a copy of the state ({copies})"
    what = f"{what}: training waits while a checkpoint is written"
    return Objection(what, "more nodes share it, or save less often (training.save_steps)")
