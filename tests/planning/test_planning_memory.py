"""You know before you pay: the memory a plan predicts is what DeepSpeed and torch really hold."""

import json
import math
import os
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from pretraining.ds_config import degrees_of, load_ds_config
from pretraining.errors import UserError
from pretraining.planning.__main__ import main
from pretraining.planning.comparison import QUANTITIES, predicted
from pretraining.planning.fit import SAME, candidates, fitting, nearest_fit, worth_choosing
from pretraining.planning.gate import check_plan
from pretraining.planning.gpus import find_gpu
from pretraining.planning.memory.need import memory_need, pinned_bytes, shrink
from pretraining.planning.memory.states import optimizer_states
from pretraining.planning.quantities import num_bytes
from pretraining.planning.run_plan import Machine, build_run_plan
from pretraining.planning.screen import as_text, full_plan
from pretraining.planning.setup import Setup
from pretraining.planning.shapes import parameter_tensors
from pretraining.planning.step_time import step_time
from pretraining.recipe import load_recipe, recipe_names
from pretraining.recipe.fixed_keys import changed_parts
from pretraining.recipe.model import other_model_types
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.runtime.durable_files import write_json
from pretraining.runtime.imports import MOST_ROUNDED_MIB, _pin_what_is_asked_for
from pretraining.runtime.run_folder import RunFolder
from tests.gear.runs import LLAMA, completed
from tests.gear.small_models import measurable
from tests.gear.tracked_memory import predict, trace
from tests.planning.test_planning import H200, MODELS, SHIPPED, build, setup

SMALL = {"vocab_size": 3000, "n_positions": 192, "n_embd": 192, "n_layer": 2, "n_head": 4}
SMALL = {"model_type": "gpt2", **SMALL, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GROUPED = {"hidden_size": 192, "intermediate_size": 528, "num_attention_heads": 6, "num_key_value_heads": 2}
GROUPED |= {"vocab_size": 3000, "max_position_embeddings": 192, "num_hidden_layers": 2}
TRACED = {
    "gpt2": SMALL,
    "llama": {"model_type": "llama", **GROUPED},
    "qwen3": {"model_type": "qwen3", **GROUPED, "head_dim": 48},
}
# (attention, precision, one layer in how many is recomputed): each value with each other value once at least;
# benchmarks/memory.py takes all.
WAYS = [("sdpa", "bf16", 0), ("sdpa", "autocast", 1), ("eager", "bf16", 2), ("eager", "fp32", 0)]
WAYS_OF_ALL = {
    f"{name}-{attention}-{precision}-{n}": ({**model, "attn_implementation": attention}, 2, 192, precision, n)
    for name, model in TRACED.items()
    for attention, precision, n in WAYS
}
# a large model on few tokens peaks at the end of the backward pass: all gradients and one layer's activations
LARGE = {**SMALL, "n_layer": 4, "vocab_size": 256}
WAYS_OF_ALL |= {f"large on few tokens-bf16-{n}": (LARGE, 1, 24, "bf16", n) for n in (0, 1)}


def need_of(name: str, world_size: int, *settings: str, way: str | None = None):
    return memory_need(setup(name, world_size, *settings, way=way))


def judge(name: str, world_size: int, *settings: str, way: str | None = None, **found):
    return check_plan(setup(name, world_size, *settings, way=way), Machine(**found))


def settings_in(arguments: str) -> list[str]:
    """The values of `--set` in words that a plan says."""
    return [after for before, after in pairwise(arguments.split()) if before == "--set"]


@pytest.mark.parametrize("way", WAYS_OF_ALL)
def test_activations_are_those_of_torchs_tracker(way):
    """Against MemTracker on fake tensors: what is kept within 2 %, the peak within 5 %.

    The narrow layers peak inside a layer's backward pass; in fp32 that is known to a tenth only.
    """
    traced, foreseen = trace(*WAYS_OF_ALL[way]), predict(*WAYS_OF_ALL[way])
    assert foreseen["kept"] == pytest.approx(traced["kept"], rel=0.02)
    assert foreseen["peak"] == pytest.approx(traced["peak"], rel=0.05 if "bf16" in way else 0.1)


@pytest.mark.parametrize("attention, precision", [("sdpa", "bf16"), ("eager", "fp32"), ("sdpa", "autocast")])
@pytest.mark.parametrize("name", TRACED)
def test_activations_of_layers_that_keep_their_products(name, attention, precision):
    """`speed.recompute` operators, against the same tracker: more than the layers' inputs, and less than all."""
    model = {**TRACED[name], "attn_implementation": attention}
    traced, foreseen = (each(model, 2, 192, precision, 1, keeps_products=True) for each in (trace, predict))
    assert foreseen["kept"] == pytest.approx(traced["kept"], rel=0.02)
    inputs, everything = (predict(model, 2, 192, precision, n)["kept"] for n in (1, 0))
    assert inputs < foreseen["kept"] < everything


@pytest.mark.parametrize(
    "optimizer, ways",
    [
        ("adamw", "zero2 zero3 zero3:sequence=2 zero2:tensor=2 zero3:tensor=2 zero2:expert=2 zero3:expert=2"),
        ("muon", "zero0 zero1 zero2 zero3"),
        ("averaged", "zero1 zero2:tensor=2 zero3:expert=2"),
    ],
)
def test_model_states_are_those_of_deepspeed(optimizer, ways):
    """Within 1 % of the live tensors of both ranks, in the middle of a step: real Trainer, real DeepSpeed."""
    command = ["forked", "0", "benchmarks/model_states.py", "--ranks", "2", "--precisions", "bf16"]
    finished = completed([*command, "--optimizers", optimizer, "--ways", *ways.split()])
    rows = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    assert {row["way"] for row in rows} == set(ways.split())
    for row in rows:
        assert row["ratio"] == pytest.approx(1, abs=0.01), json.dumps(row)
        assert row["moments_ratio"] == pytest.approx(1, abs=0.01), json.dumps(row)


OPTIMIZERS = {
    "adamw_torch_fused": "Adam's moments",
    "sgd": "SGD's momentum",
    "adagrad": "Adagrad's sums",
    "rmsprop": "RMSprop's mean squares",
    "adafactor": "Adafactor's factors",
    "schedule_free_adamw": "schedule-free Adam's states",
    "schedule_free_radam": "schedule-free Adam's states",
    "schedule_free_sgd": "schedule-free SGD's sequence",
    "lion_32bit": "Lion's momentum",
    "lion_8bit": "8-bit Lion's momentum",
    "adamw_8bit": "8-bit Adam's moments",
    "ademamix_8bit": "8-bit AdEMAMix's moments",
    "sgd momentum=0.9": "SGD's momentum",
    "rmsprop momentum=0.5,centered=true": "RMSprop's mean squares",
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_keeps_what_the_plan_says(name, tmp_path):
    """A step of the very optimizer that the Trainer makes for `training.optim`: the bytes of its states, by tensor."""
    from transformers import Trainer, TrainingArguments

    if name.startswith(("lion", "adamw_8bit", "ademamix")):
        pytest.importorskip("bitsandbytes")
    optim, _, given = name.partition(" ")
    values = [f"training.optim={optim}", *([f'training.optim_args="{given}"'] if given else [])]
    if optim.startswith("schedule_free"):
        values += ["training.lr_scheduler_type=constant_with_warmup", "training.lr_scheduler_kwargs=null"]
    recipe = load_recipe("features/gpt2", values)
    states = optimizer_states(recipe)
    assert states.name == OPTIMIZERS[name]
    keys = ("optim", "optim_args", "learning_rate", "lr_scheduler_type")
    chosen = {key: recipe.training[key] for key in keys if key in recipe.training}
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **chosen)
    trainer = Trainer(model=build(recipe.model, "cpu"), args=arguments)
    optimizer = trainer.create_optimizer()
    if optim.startswith("schedule_free"):
        optimizer.train()
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = sum(
        tensor.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for key, tensor in state.items()
        if torch.is_tensor(tensor) and tensor.numel() > 1 and not key.startswith("qmap")
    )
    assert held == sum(map(states.bytes_of, parameter_tensors(recipe.model)))


def test_muon_keeps_one_momentum_for_hidden_matrices():
    """The optimizer that training builds, stepped: two moments for tables, norms and biases, one for the rest."""
    from pretraining.training.optimizers import build_optimizer

    for name, model in {**MODELS, "features/gpt2": SHIPPED["features/gpt2"]}.items():
        recipe = replace(load_recipe("features/gpt2", ["optimizer.name=muon"]), model=model)
        network = build(model, "cpu")
        for parameter in network.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = build_optimizer(network, recipe.optimizer, recipe.training)
        optimizer.step()
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        held = sum(4 * tensor.numel() for tensor in states if tensor.dim())
        tensors = parameter_tensors(model)
        assert held == sum(map(optimizer_states(recipe).bytes_of, tensors)), name
        assert held < 8 * sum(tensor.numel for tensor in tensors)


def test_the_plan_names_and_counts_the_chosen_optimizer():
    """Memory, checkpoint and advice of Muon are less than Adam's, and no row speaks of Adam's moments alone."""
    names = ("adamw", "muon")
    cases = {name: setup("1.5b", 8, f"optimizer.name={name}", way="zero1") for name in names}
    plans = {name: full_plan(case, find_gpu("H100")) for name, case in cases.items()}
    assert "Muon's and Adam's moments" in as_text(plans["muon"])
    assert plans["muon"]["checkpoint_bytes"] < 0.75 * plans["adamw"]["checkpoint_bytes"]
    assert plans["muon"]["model_state"]["moments"] < 0.6 * plans["adamw"]["model_state"]["moments"]
    parts = plans["muon"]["memory"]["phases"]["loss"]
    assert parts["Muon's and Adam's moments"] == plans["muon"]["model_state"]["moments"]
    case = setup("7b", 8, "optimizer.name=muon", "training.activation_checkpointing=true", way="zero0")
    need = memory_need(case)
    assert "zero1" in shrink(replace(need, phases={"loss": {need.optimizer_states: 1.0}}), case)


def test_a_step_peaks_at_its_largest_phase():
    """The parts add up, and the largest is among them."""
    need = need_of("1.5b", 8)
    assert need.peak_phase == "loss" and need.largest == "activations"
    assert need.allocated == pytest.approx(sum(need.parts.values()))
    assert need.allocated == max(sum(parts.values()) for parts in need.phases.values())
    assert need.total > need.allocated


@pytest.mark.parametrize("name", ["30b", "65b"])
def test_the_large_recipes_fit_the_gpus_they_are_sized_for(name):
    """Eight H200 hold them with activations, loss and buffers, and the state alone takes less than half of each.

    65b's offloaded states stand in the host's column.
    """
    need, there = need_of(name, 8), H200.memory_bytes
    assert need.total < there and need.state.gpu < 0.5 * there
    assert ("offloaded states" in need.host) == (name == "65b")


ALLOCATOR = {
    "PYTORCH_ALLOC_CONF=": "PYTORCH_ALLOC_CONF=pinned_max_cached_size_mb:64",
    "PYTORCH_CUDA_ALLOC_CONF=a:1": "PYTORCH_CUDA_ALLOC_CONF=a:1,pinned_max_cached_size_mb:64",
    "PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1": "PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1",
}


@pytest.mark.parametrize("there", ALLOCATOR)
def test_pinned_memory_is_counted_as_torch_is_told_to_take_it(monkeypatch, there):
    """Small buffers are rounded up to a power of two, large ones are taken as they are.

    In the variable that the user has set, if one is; what the user has chosen stays.
    """
    assert [pinned_bytes(size) for size in (1, 4096, 4097)] == [1, 4096, 8192]
    limit = MOST_ROUNDED_MIB << 20
    assert pinned_bytes(limit - 1) == limit and pinned_bytes(limit + 1) == limit + 1
    name, _, value = there.partition("=")
    variables = {name: value} if value else {}
    monkeypatch.setattr(os, "environ", variables)
    _pin_what_is_asked_for()
    assert [f"{key}={text}" for key, text in variables.items()] == [ALLOCATOR[there]]


def test_the_plan_counts_the_copy_for_a_save_and_pinned_buffers():
    """Of 30b on eight GPUs a copy of an eighth of the checkpoint; none without it; small pinned buffers rounded up."""
    need, plan = need_of("30b", 8), build_run_plan(setup("30b", 8))
    assert need.snapshot == pytest.approx(plan.checkpoint_bytes / 8, rel=1e-6)
    assert need.host_bytes == need.host["process"] + need.snapshot and need.host_counted == 0
    assert not need_of("30b", 8, "checkpoints.background=false").snapshot
    assert not need_of("30b", 8, "training.save_strategy=no").snapshot
    built = need_of("1.5b", 8, way="zero1")
    assert built.host_bytes == built.host["process"] + built.host["model while it is built"]
    small = setup("features/gpt2", 2, way="zero2_offload")
    assert memory_need(small).host["rounding of pinned buffers"] > 0
    small.ds_config["zero_optimization"]["offload_optimizer"]["pin_memory"] = False
    assert "rounding of pinned buffers" not in memory_need(small).host
    answer = full_plan(setup("30b", 16), H200)
    memory = json.loads(json.dumps(answer))["memory"]
    assert memory["gpus_of_node"] == 8 and memory["host_node_bytes"] == 8 * memory["host_bytes"]
    assert "copy for a save), " in " ".join(as_text(answer).split())
    assert "for a node of 8 GPUs" in " ".join(as_text(answer).split())


def test_nothing_is_pinned_for_experts_that_are_frozen():
    """They are a family of their own if they are split, with nothing to step."""
    frozen = 'model.frozen=["model.layers.*.experts.*"]'
    split, whole = (setup("moe-30b-a3b", 8, frozen, way=f"zero2_offload{way}") for way in (":expert=2", ""))
    assert len(split.families) == 2
    assert memory_need(split).pinned == memory_need(whole).pinned > 0


def test_a_plan_says_what_is_pinned_when_and_what_happens_without_room():
    """The first save waits for pages that are pinned; offloading pins before that. All of it belongs to a node."""
    case = setup("65b", 8)
    state, text = memory_need(case), " ".join(as_text(full_plan(case, H200)).split())
    # sums of gradients and their copies for the step (deepspeed 0.19.8, stage3.py), in fp32
    assert state.pinned == pytest.approx(8 * case.parameters / 8, rel=0.01)
    assert f"pinned {num_bytes(state.pinned)} a GPU before the first step; " in text
    copies = f"{num_bytes(state.snapshot)} a GPU, {num_bytes(8 * state.snapshot)} a node"
    less = f"a node with less than {num_bytes(8 * state.host_bytes)} of host memory"
    assert f"{copies}, in the first save" in text and f"{less} stops training for" in text
    assert "pinned" not in as_text(full_plan(setup("30b", 8, "checkpoints.background=false"), H200))


def test_no_room_for_the_copy_is_warned_of_and_not_refused():
    """The run goes on without it, slower; what is offloaded to the host it cannot do without."""
    memory = {"gpu_memory_bytes": 141e9, "ranks_per_host": 8}
    verdict = judge("30b", 8, host_memory_bytes=300e9, **memory)
    (warning,) = verdict.warnings
    assert not verdict.refusals and "a copy of the state (310 GB for 8 ranks)" in warning.what
    assert not judge("30b", 8, host_memory_bytes=320e9, **memory).warnings
    (refusal,) = judge("65b", 8, host_memory_bytes=1.2e12, **memory).refusals
    assert "8 ranks keep 1.30 TB in host memory" in refusal.what


def test_memory_falls_where_it_should():
    """Recomputation, a smaller micro-batch, a higher stage and offload each take less of the GPU."""
    base = need_of("1.5b", 8, way="zero1").total
    for less in ("training.activation_checkpointing=true", "training.per_device_train_batch_size=4"):
        assert need_of("1.5b", 8, less, way="zero1").total < base
    ways = ("zero0", "zero1", "zero2", "zero3", "zero3_offload")
    stages = [need_of("1.5b", 8, way=way).state.gpu for way in ways]
    assert stages == sorted(stages, reverse=True)
    assert need_of("1.5b", 8, "model.attn_implementation=eager", way="zero1").total > base


def test_a_run_that_cannot_fit_is_refused_with_what_does():
    """The remedy, put into the command line, is accepted."""
    memory = 36e9
    verdict = judge("1.5b", 8, gpu_memory_bytes=memory)
    (refusal,) = verdict.refusals
    assert "activations" in refusal.what
    with pytest.raises(UserError, match="--force"):
        verdict.enforce()
    verdict.enforce(force=True)
    words, settings = refusal.remedy.split(), settings_in(refusal.remedy)
    deepspeed = words[words.index("--deepspeed") + 1] if "--deepspeed" in words else None
    assert settings or deepspeed
    assert not judge("1.5b", 8, *settings, way=deepspeed, gpu_memory_bytes=memory).refusals


def test_the_nearest_fit_changes_least():
    case = setup("1.5b", 8)
    nearest = nearest_fit(case, lambda need: need.total <= 36e9)
    fits = [each for each in candidates(case) if each.need.total <= 36e9]
    assert len(nearest.changes) == min(len(each.changes) for each in fits) == 1
    assert nearest_fit(case, lambda need: need.total <= 1e9) is None


REFUSED = {
    "disk": ({"disk_room_bytes": 40e9}, "checkpoints.keep_last=1"),
    "no disk": ({"disk_room_bytes": 1e9}, "--output_dir"),
    "host": ({"host_memory_bytes": 16e9, "ranks_per_host": 8}, "zero3"),
    "processor": ({"host_memory_bytes": 64e9, "ranks_per_host": 2, "trains_on_processor": True}, "this fits"),
}


def test_weights_of_earlier_checkpoints_need_room_too():
    """They stay to the end: a run that fills the disk in its middle was told that it fits."""
    demoting = ["checkpoints.demote_to_weights=true", "training.save_steps=100"]
    recipe, ds_config = load_recipe_and_ds_config("1.5b", demoting)
    plan = build_run_plan(Setup(recipe, ds_config, 8))
    assert plan.saved_bytes > 2 * plan.checkpoint_disk_bytes
    room = (plan.saved_bytes + plan.checkpoint_disk_bytes) // 2
    (refusal,) = check_plan(plan.setup, Machine(disk_room_bytes=room)).refusals
    assert "earlier ones" in refusal.what and "demote_to_weights=false" in refusal.remedy


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_with_a_remedy(name):
    found, remedy = REFUSED[name]
    (refusal,) = judge("1.5b", 8, **found).refusals
    assert remedy in refusal.remedy and "\n" not in str(refusal)


def test_what_fits_is_neither_refused_nor_warned_of():
    """The shipped recipe on the GPUs it is meant for, and unknown machines, meet no complaint."""
    plenty = {"disk_room_bytes": 1e15, "data_tokens": 10**13, "has_bf16": True}
    verdict = judge("1.5b", 8, gpu_memory_bytes=80e9, host_memory_bytes=1e12, ranks_per_host=8, **plenty)
    assert not verdict.refusals and not verdict.warnings
    assert not judge("1.5b", 8).refusals
    small = {"host_memory_bytes": 4e9, "ranks_per_host": 2, "trains_on_processor": True}
    assert not judge("features/gpt2", 2, **small).refusals and not judge("features/gpt2", 2, **small).warnings
    # what is assumed refuses nothing
    assert not judge("1.5b", 8, host_memory_bytes=24e9, ranks_per_host=8).refusals


@pytest.mark.parametrize("name", [name for name in recipe_names() if name != "tiny"])
def test_no_shipped_recipe_makes_a_mistake_of_ours(name):
    """On the eight GPUs of the table's H200 that the largest are sized for: nothing refused, nothing warned of."""
    # the largest need many nodes
    ranks = {"llama-70b": 256, "llama-405b": 512}.get(name, 8)
    verdict = judge(name, ranks, gpu_memory_bytes=H200.memory_bytes, gpu=H200, has_bf16=True)
    assert not verdict.refusals and not verdict.warnings


H200_MEMORY = {"gpu_memory_bytes": 141e9}
GPT2, DENSE = "1.5b", "124m"
CONSTANT = ("training.lr_scheduler_type=constant", "training.lr_scheduler_kwargs={}")
FP16, FP32 = ("training.bf16=false", "training.fp16=true"), ("training.bf16=false",)
CHANGING = {
    "fp16": (GPT2, FP16, None, {"has_bf16": True}, "training.bf16=true"),
    "fp32": (GPT2, FP32, None, {"has_bf16": True}, "training.bf16=true"),
    "rate": (GPT2, ("training.learning_rate=3e4",), None, {}, "1e-5 to 1e-2"),
    "long warm-up": (GPT2, ("training.warmup_steps=1000000",), None, {}, "training.warmup_steps=2510"),
    "warm-up": (GPT2, ("training.warmup_steps=10",), None, {}, "training.warmup_steps=357"),
    "no warm-up": (GPT2, CONSTANT, None, {}, "lr_scheduler_type=constant_with_warmup"),
    "clipping": (GPT2, ("training.max_grad_norm=0",), None, {}, "training.max_grad_norm=1.0"),
    "repeats": (GPT2, (), None, {"data_tokens": 5 * 10**9}, "data.sources.0.max_epochs=6"),
    "experts in fp32": ("moe-1.5b", FP32, None, H200_MEMORY, "training.bf16=true"),
}
"""Mistakes whose remedy changes the curve: recipe, values, ds_config, machine, and what is said."""
AGAIN = ("training.activation_checkpointing=true",)
KEEPING = {
    "no checkpoint before the end": (
        GPT2,
        ("training.save_strategy=epoch",),
        None,
        {},
        "training.save_strategy=steps --set training.save_steps=2510",
    ),
    "no checkpoint": (GPT2, ("training.save_steps=1000000",), None, {}, "training.save_steps=2510"),
    "stage": (GPT2, (), "zero3", H200_MEMORY, "--deepspeed zero1"),
    "offload": (GPT2, (), "zero2_offload", H200_MEMORY, "--deepspeed zero2"),
    "tight": (GPT2, (), None, {"gpu_memory_bytes": 41e9}, "activation_checkpointing=true"),
    "needless": (GPT2, AGAIN, None, H200_MEMORY, "activation_checkpointing=false"),
    "too few checkpoints for a rollback": (
        DENSE,
        ("monitors.spikes.policy=rollback", "checkpoints.keep_last=1"),
        None,
        H200_MEMORY,
        "keep_last 1 .* none as old as .*skip_steps.*keep_last=2",
    ),
    "small buckets": (DENSE, (), "zero3", H200_MEMORY, "reduce_bucket_size"),
    # under autocast weights of experts stay fp32, which torch multiplies one after another; in bf16 all at once
    "experts alone": ("moe-1.5b", (), "null", H200_MEMORY, "experts in fp32.* zero1"),
    "experts at stage 0": ("moe-1.5b", (), "zero0", H200_MEMORY, "experts in fp32.* zero1"),
    # CUDA 13 left out Volta
    "a GPU without kernels": (DENSE, (), None, {"gpu": find_gpu("V100")}, "CUDA 13.*CUDA 12"),
}
WARNED = CHANGING | KEEPING


@pytest.mark.parametrize("name", WARNED)
def test_mistakes_are_warned_of_with_a_remedy(name):
    """A run that continues is given no remedy that its curve refuses: it said that at its first start."""
    recipe, settings, way, found, said = WARNED[name]
    began_with = load_recipe(recipe, settings).to_dict()
    for continues in (False, True):
        verdict = judge(recipe, 8, *settings, way=way, **found, continues=continues)
        warned = [each for each in verdict.warnings if re.search(said, str(each))]
        assert bool(warned) == (name in KEEPING or not continues) and not verdict.refusals, verdict
    for each in verdict.warnings:
        asked = [word for word in each.remedy.split() if "=" in word]
        assert not changed_parts(load_recipe(recipe, [*settings, *asked]).to_dict(), began_with)


def test_small_batches_are_warned_of_and_a_dense_model_of_nothing_about_experts():
    single = judge(DENSE, 512, "training.per_device_train_batch_size=1").warnings
    assert [each for each in single if "tokens_per_step" in each.remedy]
    # nor of kernels that a GPU has
    dense = judge(DENSE, 8, gpu=find_gpu("T4"), **H200_MEMORY).warnings
    assert not [each for each in dense if "expert" in each.what or "CUDA" in each.what]


RECOMPUTED = {
    "speed.recompute=operators": range(1, 8),
    "training.activation_checkpointing_kwargs.every_n_layers=2": range(6, 15),
    "training.activation_checkpointing=true": range(16, 34),
}
"""What is computed again -> percent of a step."""


@pytest.mark.parametrize("how", RECOMPUTED)
def test_the_cost_of_recomputation_is_counted(how):
    """Every second layer, or all but products and attention, cost a part of a third more FLOPs."""
    settings = [how, "training.activation_checkpointing=true"]
    warnings = judge("1.5b", 8, *settings, gpu=H200, **H200_MEMORY).warnings
    [warning] = [each for each in warnings if "checkpointing" in each.what]
    again, once = (step_time(setup("1.5b", 8, *each, way="zero1"), H200).seconds for each in (settings, []))
    percent = round(100 * (again / once - 1))
    assert f"makes a step {percent}% longer" in warning.what and percent in RECOMPUTED[how]


def test_checkpoints_that_are_close_and_many_are_warned_of():
    """954 of them, 45 s apart, are no plan with nothing tight. The remedy is the end of it, short runs have few."""
    gpu = find_gpu("A100")

    def close(*settings: str) -> list[str]:
        warnings = judge("124m", 1, *settings, gpu=gpu, gpu_memory_bytes=80e9).warnings
        return [each.remedy for each in warnings if "where failures ask for" in each.what]

    [remedy] = close("training.save_steps=20")
    assert re.fullmatch(r"--set training.save_steps=\d+", remedy)
    assert not close(remedy.removeprefix("--set "))
    assert not close("training.save_steps=20", "budget.tokens=524288000")


def test_links_that_decide_are_warned_of_with_larger_micro_batches():
    """30b is for one node: over two, gathers for two sequences take longer than the products. The remedy ends it."""

    def remedies(ranks: int, *settings: str) -> list[str]:
        warnings = judge("30b", ranks, *settings, gpu=H200, gpu_memory_bytes=H200.memory_bytes).warnings
        return [each.remedy for each in warnings if each.what.startswith("messages take")]

    [remedy] = remedies(16)
    assert not remedies(8)
    assert not remedies(16, *[word for word in remedy.split() if word != "--set"])


WITHOUT_LOSS = {**LLAMA, "model_type": "deepseek_v3", "n_routed_experts": 8, "n_group": 4}
WITHOUT_LOSS["first_k_dense_replace"] = 1
UNBALANCED = {
    "loss.balance=none": "--set loss.balance=auto",
    "loss.balance=none model.output_router_logits=false loss.router_z_loss=0": "--set loss.balance=auto",
    "model.router_aux_loss_coef=0": "model.router_aux_loss_coef=0.01",
    f"model={json.dumps(WITHOUT_LOSS, separators=(',', ':'))} loss.balance=none": "--set loss.balance=auto",
}


@pytest.mark.parametrize("settings, remedy", UNBALANCED.items())
def test_a_mixture_that_nothing_balances_is_warned_of_at_its_first_start(settings, remedy):
    """Its routers may come to send all tokens to a few experts, and nothing else would say why."""
    for continues in (False, True):
        verdict = judge("moe-1.5b", 8, *settings.split(), continues=continues)
        warned = [each for each in verdict.warnings if "nothing balances the experts" in each.what]
        assert [remedy in each.remedy for each in warned] == ([] if continues else [True])


ODD = {"model.moe_intermediate_size": 772, "model.hidden_size": 2052}
PLAIN_PRODUCTS = "model.experts_implementation=batched_mm"


def between_borders(name: str, *settings: str, way: str | None = None) -> list:
    refusals = judge(name, 8, *settings, way=way, **H200_MEMORY).refusals
    return [each for each in refusals if "16 bytes" in each.what]


@pytest.mark.parametrize("key", ODD)
def test_experts_between_borders_of_16_bytes_are_refused_on_a_gpu(key):
    """There torch's grouped product stops, and no test on a processor would show it."""
    setting = f"{key}={ODD[key]}"
    (refused,) = between_borders("moe-30b-a3b", setting)
    assert key in refused.what and PLAIN_PRODUCTS in refused.remedy
    assert not between_borders("moe-30b-a3b", setting, PLAIN_PRODUCTS)
    assert not between_borders("moe-30b-a3b")


def test_the_inner_width_of_mixtral_counts_too():
    """Its experts have the width that other types give their dense layers."""
    model = {**MODELS["mixtral"], "vocab_size": 1024, "intermediate_size": 100}
    settings = [f"model={json.dumps(model)}", "data.sequence_length=32", "training.bf16=true"]
    (refused,) = between_borders("features/gpt2", *settings, way="zero3")
    assert "model.intermediate_size 100 leaves" in refused.what


def test_a_vector_before_experts_in_zero_s_buffer_is_seen():
    """The decay of qwen3_next's heads is in the group of the matrices; ZeRO-3 gathers each weight for itself."""
    small = measurable("qwen3_next", other_model_types()["types"]["qwen3_next"])
    model = {**small, "vocab_size": 1024, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    settings = [f"model={json.dumps(model)}", "data.sequence_length=32", "training.bf16=true"]
    for stage, number in (("zero1", 1), ("zero2", 1), ("zero3", 0)):
        said = between_borders("features/gpt2", *settings, way=stage)
        assert len([each for each in said if "A_log has 4 elements" in each.what]) == number


NAMED = {"7b": (8, "H100"), "30b": (8, "H200"), "65b": (8, "H200"), "moe-30b-a3b": (8, "H100")}
"""GPUs that a recipe says it is sized for."""


@pytest.mark.parametrize("name", [*NAMED, "llama-70b"])
def test_a_recipe_takes_the_fastest_layout_on_the_gpus_that_it_names(name):
    """Or its description says what is faster, by how much, and why it is not taken."""
    ranks, gpu = NAMED.get(name, (1024, "H100"))
    case, gpu = setup(name, ranks), find_gpu(gpu)
    saved = 1 - fitting(case, gpu)[0].step_seconds / step_time(case, gpu).seconds
    said = re.search(r"which leaves room for .* is planned (\d+) % faster", case.recipe.description)
    assert saved < 0.05 or round(100 * saved) == int(said[1])


SEARCHED = [(name, 64, "H100") for name in recipe_names() if name != "tiny"]
SEARCHED += [("7b", 8, "H200"), ("7b", 64, "A10G"), ("features/gpt2", 2, "H100"), ("1.5b", 8, "H100")]
SEARCHED += [("7b", 8, "A100-80GB"), ("774m", 2, "A100-40GB"), ("xl", 8, "A10G")]


def burdens(way) -> tuple:
    """What it costs beyond its time: offload, layers computed twice, split layers, messages in every micro-batch."""
    recomputed, config = 1 / way.every_n_layers if way.every_n_layers else 0, load_ds_config(way.deepspeed)
    offloads = "offload" in way.deepspeed or "nvme" in way.deepspeed
    return offloads, recomputed, math.prod(degrees_of(config)), max(1, int(way.deepspeed[4]))


@pytest.mark.parametrize("name, gpus, kind", SEARCHED)
def test_the_search_names_ways_that_fit_the_best_first(name, gpus, kind):
    """All fit; the first is as fast as any, leaves room if one can, and trains if pasted; none listed is beaten."""
    gpu = find_gpu(kind)
    there, found = gpu.memory_bytes, fitting(Setup(load_recipe(name), None, gpus), gpu)
    listed = worth_choosing(found)
    assert all(each.need.total <= there for each in found) and listed[0] is found[0]
    # a way at 95 % of the memory is behind all others, however fast it is, and says what it is
    safe = [each for each in found if each.need.total <= 0.95 * there]
    assert found[: len(safe)] == safe and all(("tight: " in each.why) != (each in safe) for each in found)
    fastest = min(each.step_seconds for each in safe)
    as_fast = [each for each in safe if each.step_seconds <= SAME * fastest]
    # 15 % stay free if a way as fast leaves them; then the simplest, so no needless offload
    roomy = [each for each in as_fast if each.need.total <= 0.85 * there] or as_fast
    best = found[0]
    assert best in roomy and (not best.offload_seconds or all(each.offload_seconds for each in roomy))
    settings = settings_in(best.arguments)
    chosen = setup(name, gpus, *settings, way=best.deepspeed)
    assert memory_need(chosen, there).total == best.need.total
    verdict = judge(name, gpus, *settings, way=best.deepspeed, gpu=gpu, gpu_memory_bytes=there)
    assert not verdict.refusals and not [each for each in verdict.warnings if "fragmentation" in each.what]
    assert all(SAME * after.need.total < before.need.total for before, after in pairwise(listed))
    # none is as fast and smaller, without being offloaded, recomputed or sharded more
    found_burdens = [burdens(each) for each in found]
    for way in listed:
        own = burdens(way)
        for other, others in zip(found, found_burdens, strict=True):
            cheaper = all(a <= b for a, b in zip(others, own, strict=True))
            smaller = SAME * other.need.total < way.need.total
            assert not (cheaper and smaller and other.step_seconds <= way.step_seconds), (way, other)


def test_tight_ways_are_offered_if_nothing_else_fits():
    case, gpu = setup("7b", 8), find_gpu("H100")
    least = min(each.need.total for each in candidates(case, gpu))
    (first, *_) = worth_choosing(fitting(case, gpu, 1.04 * least))
    assert "tight: 96% of the memory" in first.why


REFUSING = {
    "optimizer.name=muon": "zero2_offload zero3_offload zero3_nvme",
    "training.optim=adafactor": "zero1 zero2 zero3 zero2_offload zero3_offload",
    "speed.compile=whole": "zero3 zero3_hpz zero3_offload zero3_nvme",
}


@pytest.mark.parametrize("setting", REFUSING)
def test_the_search_offers_nothing_that_training_refuses(setting):
    """Offload beside Muon, ZeRO beside Adafactor, ZeRO-3 beside a model compiled whole are no remedies."""
    settings = ("optimizer.name=adamw", setting)
    case = setup("qk-norm", 16, *settings, way="zero0")
    offered = {each.deepspeed for each in candidates(case, find_gpu("H100"))}
    assert offered and not offered & {*REFUSING[setting].split()}
    for way in offered:
        load_recipe_and_ds_config("qk-norm", settings, way)


def test_time_over_nodes_says_what_it_assumes(capsys):
    """Plan, cost and search of more than one node name perfect scaling, as text and as JSON; of one node none does."""
    for world_size, is_said in ((8, False), (64, True)):
        common = ["--recipe", "7b", "--world_size", str(world_size), "--gpu", "H100"]
        answer = full_plan(setup("7b", world_size, way="zero3"), find_gpu("H100"))
        assert ("perfect scaling" in as_text(answer)) == is_said == bool(answer["forecast"]["scaling"])
        for verb in ("cost", "fit"):
            main([verb, *common])
            assert ("perfect scaling is assumed" in " ".join(capsys.readouterr().out.split())) == is_said
            main([verb, *common, "--json"])
            assert bool(json.loads(capsys.readouterr().out)["scaling"]) == is_said
    main(["cost", "--parameters", "7b", "--tokens", "1t", "--world_size", "64", "--gpu", "H100", "--json"])
    assert json.loads(capsys.readouterr().out)["scaling"]["nodes"] == 8


def test_some_layers_are_recomputed_where_that_is_enough():
    """Every second or fourth layer lies between all and none, in memory and in time, and may be pasted."""
    found = candidates(setup("7b", 8), find_gpu("A100"))
    ways = {each.every_n_layers: each for each in found if (each.deepspeed, each.micro_batch) == ("zero2", 2)}
    ordered = [ways[every_n_layers] for every_n_layers in (0, 4, 2, 1)]
    assert [*sorted(ordered, key=lambda way: -way.need.total)] == ordered
    assert [*sorted(ordered, key=lambda way: way.step_seconds)] == ordered
    chosen = need_of("7b", 8, *settings_in(ways[4].arguments), way="zero2")
    assert chosen.total == ways[4].need.total < ways[0].need.total


def test_the_search_keeps_the_step():
    """Promise: the curve belongs to the recipe: every candidate has its tokens per step."""
    case = setup("7b", 16)
    for each in candidates(case):
        groups = 16 // degrees_of(load_ds_config(each.deepspeed)).ranks_per_sample
        tokens = groups * each.micro_batch * each.accumulation * case.recipe.sequence_length
        assert tokens == case.recipe.tokens_per_step


def test_compare_shows_both_sides(tmp_path, capsys):
    """plan.json's prediction beside what the run's end event, rows and checkpoint say; the speeds multiply out."""
    plan = {"predicted": predicted(setup("features/gpt2", 2), find_gpu("H100"))}
    run = RunFolder(tmp_path / "run")
    write_json(run.plan, plan)
    for number, seconds in enumerate((9.0, 0.5, 0.5, 0.7), start=1):
        row = {"step": 20 * number, "throughput/step_seconds": seconds}
        row |= {"throughput/tokens_per_second": 2048 / seconds}
        run.metrics.open("a").write(json.dumps(row) + "\n")
    run.add_event("end", measured={"peak_memory_bytes": 5_000_000, "mfu": 0.25})
    main(["compare", str(run.path), "--json"])
    (answer,) = json.loads(capsys.readouterr().out)["runs"]
    assert answer["finished"] and set(QUANTITIES) < set(answer)
    seconds = answer["training_seconds"]["measured"]
    assert seconds == pytest.approx(20 * 10.7)
    assert 80 * answer["step_seconds"]["measured"] == pytest.approx(seconds)
    assert seconds * answer["tokens_per_second"]["measured"] == pytest.approx(80 * 2048)
    whole, one = (answer[name]["predicted"] for name in ("training_seconds", "step_seconds"))
    assert whole == pytest.approx(1000 * one)
    share = 5_000_000 / plan["predicted"]["peak_memory_bytes"]
    assert answer["peak_memory_bytes"]["ratio"] == pytest.approx(share)
    assert answer["checkpoint_bytes"]["measured"] is None
    main(["compare", str(run.path)])
    text = capsys.readouterr().out
    assert "25%" in text and "peak memory" in text


@pytest.mark.parametrize("device", ["CPU (x86_64)", "NVIDIA H100"])
def test_compare_says_which_memory_is_assumed(tmp_path, capsys, device):
    """Without a GPU a share of the prediction is the same for every run: a note says so, and no ratio judges it."""
    run, on_processor, case = RunFolder(tmp_path / "run"), device.startswith("CPU"), setup("features/gpt2", 2)
    write_json(run.plan, {"predicted": predicted(case, None, on_processor)})
    write_json(run.environment, {"device": device})
    run.add_event("end", measured={"peak_memory_bytes": 100_000_000})
    main(["compare", str(run.path), "--json"])
    (answer,) = json.loads(capsys.readouterr().out)["runs"]
    assert (answer["peak_memory_bytes"]["ratio"] is None) == answer["on_processor"] == on_processor
    main(["compare", str(run.path)])
    assert ("195 MB of what is predicted are assumed" in capsys.readouterr().out) == on_processor
    # what a machine without a GPU needs is said first
    alone = as_text(full_plan(case, None))
    assert "for each process beyond its libraries, 195 MB of them assumed" in alone
    assert "MB of memory for each process without GPUs, " in alone.splitlines()[2]
    assert "without GPUs" not in as_text(full_plan(case, find_gpu("H100")))
    values = predicted(setup("features/gpt2", way="null"), None)
    assert values["step_seconds"] is None and values["peak_memory_bytes"] > 0


def test_compare_leaves_out_what_it_cannot_compare(tmp_path, capsys):
    """Its own example, runs/*: whatever else lies there, each run is compared and each other thing has a line."""
    plan = {"predicted": predicted(setup("features/gpt2", 2), None)}
    for name in ("a-begun", "z-whole"):
        write_json(RunFolder(tmp_path / name).plan, plan)
    row = {"step": 1, "throughput/tokens_per_second": 4096.0, "throughput/step_seconds": 0.5}
    unclear = {**row, "step": 2, "throughput/step_seconds": None}
    RunFolder(tmp_path / "z-whole").metrics.write_text(f"{json.dumps(row)}\n{json.dumps(unclear)}\n")
    contents = {"folder": None, "older": '{"name": "features/gpt2"}', "cut": '{"name": ', "list": "[]"}
    for name, text in contents.items():
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "plan.json").write_text(text)
    (tmp_path / "file").write_text("no folder")
    everything = sorted(map(str, tmp_path.iterdir()))
    main(["compare", *everything, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert [run["run"] for run in answer["runs"]] == [str(tmp_path / name) for name in ("a-begun", "z-whole")]
    assert answer["runs"][1]["tokens_per_second"]["measured"] == 4096
    why = {each["run"].rpartition("/")[2]: each["why"] for each in answer["left_out"]}
    assert set(why) == {"folder", "older", "cut", "list", "file"} and all(why.values())
    main(["compare", *everything])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("left out: ") for line in lines) == len(why)
    with pytest.raises(UserError, match=r"no plan.json there.*\(1 more"):
        main(["compare", str(tmp_path / "folder"), str(tmp_path / "file")])


def test_a_recipe_may_name_its_own_sizes_of_buckets():
    """What the ds_config says is what is counted."""
    case = setup("7b", 8, way="zero2")
    case.ds_config["zero_optimization"]["overlap_comm"] = False
    before = memory_need(case).parts["reduce buckets"]
    case.ds_config["zero_optimization"]["overlap_comm"] = True  # a bucket is filled while another one is sent
    assert memory_need(case).parts["reduce buckets"] == before * 2 == 2 * 2 * 200_000_000
