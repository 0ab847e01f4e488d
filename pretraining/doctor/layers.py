"""Train the recipe's own layers for a minute: are real model, loss, optimizer and engine as fast and large as planned?

Some of the recipe's layers, at their own width, train for a few steps on made-up tokens: first under the recipe's own
ds_config, then at every ZeRO stage that it allows. The losses of all stages must be those of stage 0.
"""

import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback

from pretraining.data.documents import masked_block
from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding
from pretraining.doctor.rates import largest_of_ranks, now_of_device
from pretraining.ds_config import load_ds_config
from pretraining.errors import UserError
from pretraining.model.build import build_from_recipe
from pretraining.model.loss import build_loss
from pretraining.planning.comparison import predicted
from pretraining.planning.gpus import known_gpu
from pretraining.planning.memory.need import memory_need
from pretraining.planning.quantities import duration, num_bytes, several, three_digits
from pretraining.planning.setup import Setup
from pretraining.planning.sizes import flops_per_token, model_size
from pretraining.planning.step_time import model_flops_utilization
from pretraining.recipe import Recipe, accumulation_steps
from pretraining.recipe.budget import Budget
from pretraining.recipe.model import is_exact, own_key, value_of
from pretraining.recipe.refusals import check_run
from pretraining.runtime.process_group import device_name
from pretraining.training.arguments import build_arguments
from pretraining.training.profile import PeakMemory
from pretraining.training.trainer import PretrainingTrainer, RunParts

STAGES = ("zero0", "zero1", "zero2", "zero3")
STEPS, WARM_STEPS = 6, 2
MOST_PARAMETERS = 500_000_000
"""Each rank draws so many on its cores before every stage, which takes some seconds."""
MOST_LAYERS = 4
MOST_ACCUMULATION = 4
MEMORY_SHARE = 0.9
"""Share of the GPU's memory that the model may take by the plan without any sharding, as stage 0 has it."""
ON_PROCESSOR = {"n_embd": 128, "n_inner": 512, "hidden_size": 128, "intermediate_size": 256, "n_head": 4}
ON_PROCESSOR |= {"moe_intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
ON_PROCESSOR |= {"head_dim": 32, "vocab_size": 2048, "num_local_experts": 4, "num_experts": 4}
ON_PROCESSOR["num_experts_per_tok"] = 2
"""The largest values that the model may have if the processor trains."""
PROCESSOR_LENGTH, PROCESSOR_LAYERS, PROCESSOR_MICRO_BATCH = 128, 2, 2
PROCESSOR_PARAMETERS = 20_000_000
"""The most on a processor. A model type that is not exact keeps its width, and may have more: then it is not run."""
TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 3e-2}
"""Nats, by precision. Ten steps on a CPU differ by at most 5e-7 in fp32 and 4e-4 in bf16 (benchmarks/curve.py). Kernels
of a GPU add in another order, and the rates here do not warm up. A wrong gradient moves the loss by more. fp16 is not
here: each stage looks for its own loss scale, and skips other steps."""
MEMORY_ABOVE_PLAN = 1.1
"""Times the plan's peak, which should be right within a tenth."""
HALF_OF_THE_PLAN = 0.5
"""Share of the planned MFU. With few layers head and optimizer cost relatively more, but not so much as half."""
# They count steps of the whole run, or belong to validation, which is off here.
DROPPED_TRAINING_KEYS = ("warmup_steps", "lr_scheduler_kwargs", "eval_steps", "save_steps")
DROPPED_TRAINING_KEYS += ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")


class Trained(NamedTuple):
    """What a few steps under one ds_config showed."""

    losses: list[float]
    step_seconds: float
    peak_memory_bytes: int | None


def examine_layers(
    recipe: Recipe, ds_config: dict | None, world_size: int, seconds: float, say: Callable[[str], None]
) -> list[Finding]:
    """Compare speed and memory with the plan, and the curve of each stage with stage 0's.

    Every rank of the process group calls it. A stage that would probably not end within `seconds` is left out.
    """
    began = time.monotonic()
    on_gpu = torch.cuda.is_available()
    try:
        reduced = reduced_recipe(recipe, world_size, on_gpu)
    except UserError as error:
        return [Finding("layers", COSTS, f"not run: {error}", "train a few steps of the recipe itself")]
    own = recipe.deepspeed or "null"
    configs: dict[str, dict | None] = {own: ds_config}
    # without a tolerance their curves could not be compared
    for stage in STAGES if recipe.training.product_precision in TOLERANCE else ():
        configs.setdefault(stage, load_ds_config(stage))
    trained: dict[str, Trained] = {}
    left_out: list[str] = []
    longest = 0.0
    for name, config in configs.items():
        # the slowest rank's clock decides, so that all ranks leave out the same stages
        if trained and largest_of_ranks(time.monotonic() - began)[0] + longest > seconds:
            left_out.append(f"{name} (no time)")
            continue
        chosen = replace(reduced, deepspeed=None if name == "null" else name)
        try:
            check_run(chosen, config, world_size)
        except UserError as error:
            left_out.append(f"{name} (refused: {str(error).partition('; ')[0]})")
            continue
        say(f"layers under {name}")
        stage_began = time.monotonic()
        trained[name] = train_some_steps(chosen, config, world_size)
        (longest,) = largest_of_ranks(max(longest, time.monotonic() - stage_began))
    findings = _beside_plan(recipe, reduced, ds_config, trained[own], world_size)
    return findings + _curve(reduced, trained, left_out)


def reduced_recipe(recipe: Recipe, world_size: int, on_gpu: bool) -> Recipe:
    """Reduce the recipe to as many of its layers as fit, and to a short budget; on a processor make it narrower too.

    `UserError` if one layer is already too much.
    """
    model, length, micro_batch = dict(recipe.model), recipe.sequence_length, recipe.micro_batch
    if on_gpu:
        accumulation = min(MOST_ACCUMULATION, accumulation_steps(recipe, world_size))
    else:
        length, micro_batch = min(length, PROCESSOR_LENGTH), min(micro_batch, PROCESSOR_MICRO_BATCH)
        accumulation = 1
        if is_exact(model):
            # without ids of special tokens, which may be beyond the smaller vocabulary
            model = {key: value for key, value in model.items() if not key.endswith("_token_id")}
            for key, most in ON_PROCESSOR.items():
                if isinstance(model.get(key), int):
                    model[key] = min(model[key], most)
            # the limits may leave heads that do not share keys evenly, such as 3 and 2
            if model.get("num_attention_heads", 1) % (model.get("num_key_value_heads") or 1):
                model["num_key_value_heads"] = 1
    layers = value_of(model, "num_hidden_layers")
    tokens = world_size * micro_batch * length * accumulation
    training = {key: value for key, value in recipe.training.items() if key not in DROPPED_TRAINING_KEYS}
    training |= {"per_device_train_batch_size": micro_batch, "lr_scheduler_type": "constant"}
    training |= {"eval_strategy": "no", "save_strategy": "no", "logging_steps": 1}
    training["dataloader_num_workers"] = 0
    reduced = replace(
        recipe,
        budget=Budget(tokens_per_step=tokens, tokens=tokens * STEPS),
        training=training,
        data=replace(recipe.data, sequence_length=length),
        speed=replace(recipe.speed, compile="none"),  # compiling takes longer than the minute
    )
    # the most layers that fit
    for count in range(min(MOST_LAYERS if on_gpu else PROCESSOR_LAYERS, layers), 0, -1):
        shorter = {**model, own_key(model, "num_hidden_layers"): count}
        if isinstance(model.get("layer_types"), list):
            shorter["layer_types"] = model["layer_types"][:count]
        reduced = replace(reduced, model=shorter)
        parameters = model_size(shorter).total
        fits = parameters <= PROCESSOR_PARAMETERS
        if on_gpu:
            whole = Setup(replace(reduced, deepspeed="zero0"), load_ds_config("zero0"), world_size)
            need = memory_need(whole)
            memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            fits = (parameters <= MOST_PARAMETERS or count == 1) and need.total <= MEMORY_SHARE * memory
        if fits:
            return reduced
    raise UserError(f"one layer of {recipe.name} is too large for {'this GPU' if on_gpu else 'a processor'}")


class MadeUpTokens(Dataset):
    """Make blocks of random tokens, the same on every rank. Low ids are frequent, so a few steps lower the loss."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe

    def __len__(self) -> int:
        return self.recipe.num_samples

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        length = self.recipe.sequence_length
        drawn = np.random.default_rng(index).random(length + 1)
        # the fourth power moves most numbers towards 0
        tokens = (drawn**4 * self.recipe.model.vocab_size).astype(np.int64)
        if self.recipe.data.document_masking:
            return masked_block(tokens, np.array([length // 2, length]))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


class _Clock(TrainerCallback):
    """Record the seconds of each step until the device has finished."""

    def __init__(self):
        self.seconds: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = now_of_device()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(now_of_device() - self.began)


def train_some_steps(recipe: Recipe, ds_config: dict | None, world_size: int) -> Trained:
    """Train the recipe's few steps with the same parts as train.py; leave nothing behind."""
    folder = Path(tempfile.mkdtemp(prefix="doctor-"))
    memory, clock = PeakMemory(), _Clock()
    arguments = build_arguments(recipe, ds_config, folder, accumulation_steps(recipe, world_size, ds_config))
    no_tokenizer = SimpleNamespace(bos_token_id=None, eos_token_id=None)
    language_model = build_from_recipe(recipe, no_tokenizer, arguments, draw_weights=True)
    trainer = PretrainingTrainer(
        recipe,
        language_model,
        arguments,
        loss=build_loss(language_model, recipe.resolved_loss),
        train_dataset=MadeUpTokens(recipe),
        parts=RunParts(callbacks=[clock]),
    )
    try:
        trainer.train()
        peak_bytes = memory.of_fullest_rank()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    finally:
        del language_model
        trainer.release()
        del trainer, arguments  # transformers builds for ZeRO-3 as long as they live
        gc.collect()
        shutil.rmtree(folder, ignore_errors=True)
    # without the warm-up steps
    return Trained(losses, statistics.median(clock.seconds[WARM_STEPS:]), peak_bytes)


def _beside_plan(
    recipe: Recipe, reduced: Recipe, ds_config: dict | None, found: Trained, world_size: int
) -> list[Finding]:
    """Compare speed, and the peak of the fullest rank's memory, with the plan of the reduced model."""
    on_gpu, size = torch.cuda.is_available(), model_size(reduced.model)
    gpu, precision = known_gpu(device_name()) if on_gpu else None, reduced.training.product_precision
    setup = Setup(reduced, ds_config, world_size)
    rate = reduced.tokens_per_step / found.step_seconds
    # such as `2 of 32 layers of width 4,096`
    layers, of = (value_of(each.model, "num_hidden_layers") for each in (reduced, recipe))
    width, own_width = (value_of(each.model, "hidden_size") for each in (reduced, recipe))
    narrow = "" if width == own_width else f" for {own_width:,}: a stand-in for the processor"
    message = f"{layers} of {several(of, 'layer')} of width {width:,}{narrow} under "
    message += f"{recipe.deepspeed or 'no ds_config'}, {reduced.tokens_per_step:,} tokens a step: "
    message += f"{rate:,.0f} tokens/s, {duration(found.step_seconds)} a step"
    values = {"tokens_per_second": rate, "step_seconds": found.step_seconds}
    values |= {"layers": layers, "parameters": size.total}
    remedy = ""
    if gpu is not None and precision in gpu.dense_peak_flops:
        flops = flops_per_token(size, reduced.sequence_length).training
        mfu = model_flops_utilization(rate, flops, world_size, gpu.peak_flops(precision))
        planned = predicted(setup, gpu)["mfu"]
        values |= {"mfu": mfu, "predicted_mfu": planned}
        message += f", MFU {mfu:.0%} (the plan of these layers: {planned:.0%})"
        if mfu < HALF_OF_THE_PLAN * planned:
            remedy = "see slow ranks and messages above; a larger micro-batch (--set training."
            remedy += "per_device_train_batch_size=N), or --set speed.compile=blocks, which was off here"
    findings = [Finding("layers", COSTS if remedy else FINE, message, remedy, values=values)]
    if (peak := found.peak_memory_bytes) is not None:
        planned = predicted(setup, None, on_processor=not on_gpu)["peak_memory_bytes"]
        message = f"peak {num_bytes(peak)}, the plan of these layers says {num_bytes(planned)}"
        values = {"peak_memory_bytes": peak, "predicted_peak_memory_bytes": planned}
        remedy = ""
        # No verdict on a processor: much of its plan is assumed.
        if on_gpu and peak > MEMORY_ABOVE_PLAN * planned:
            remedy = "leave as much more room than the plan says: a smaller micro-batch "
            remedy += "(--set training.per_device_train_batch_size=N), or --deepspeed zero3"
        findings.append(Finding("layers' memory", COSTS if remedy else FINE, message, remedy, values=values))
    return findings


def _curve(reduced: Recipe, trained: dict[str, Trained], left_out: list[str]) -> list[Finding]:
    """Find each ds_config's largest difference of a step's loss to stage 0's."""
    if reduced.training.product_precision not in TOLERANCE:
        return []
    more = f"; left out: {', '.join(left_out)}" if left_out else ""
    if (reference := trained.get("zero0")) is None:
        remedy = "run the doctor again; see what took so long"
        return [Finding("curve of stages", COSTS, f"not compared{more}", remedy)]
    apart = {
        name: float(np.abs(np.subtract(found.losses, reference.losses)).max())  # NaN if one of them is
        for name, found in trained.items()
        if name != "zero0"
    }
    tolerance = TOLERANCE[reduced.training.product_precision]
    losses = {name: found.losses for name, found in trained.items()}
    values = {"loss_difference_by_stage": apart, "tolerance": tolerance, "losses_by_stage": losses}
    # "not <=" and not ">", because a NaN must count as far
    far = [name for name, difference in apart.items() if not difference <= tolerance]
    shown = ", ".join(f"{name} {three_digits(difference)}" for name, difference in apart.items())
    message = f"largest difference of the loss to zero0's in {STEPS} steps: {shown}"
    message += f" (up to {tolerance:g} is rounding){more}"
    if not far:
        return [Finding("curve of stages", FINE, message, values=values)]
    good = next((name for name in trained if name not in far), "zero0")
    remedy = f"do not train under {' or '.join(far)} here: --deepspeed {good}; "
    remedy += "or try another version of torch, DeepSpeed or the driver"
    return [Finding("curve of stages", BREAKS, message, remedy, values=values)]
