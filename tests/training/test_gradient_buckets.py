"""Promise: the curve belongs to the recipe. No gradient is freed while it is still on its way to other ranks."""

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad
from transformers.integrations import HfDeepSpeedConfig

from pretraining.ds_config import ds_config_names, load_ds_config
from pretraining.errors import UserError
from pretraining.model.build import build_model
from pretraining.planning.gate import check_plan
from pretraining.planning.gpus import find_gpu
from pretraining.planning.memory.states import buffers, reduce_bucket, unprotected_gradient
from pretraining.planning.messages import GRADIENTS, step_messages
from pretraining.planning.run_plan import Machine
from pretraining.planning.setup import Family, Setup
from pretraining.planning.shapes import EMBEDDING, Tensor
from pretraining.recipe import load_recipe, recipe_names
from tests.gear.on_ranks import on_ranks
from tests.gear.runs import LLAMA, TOKENIZER, looped_model
from tests.training.test_curve import SHORT, column

ON_GPUS = Machine(gpu_memory_bytes=1e15)
RANKS = 3


def judged(recipe, config: dict | None, found: Machine = ON_GPUS, world_size: int = 2) -> list[str]:
    """What is refused of the buckets."""
    refusals = check_plan(Setup(recipe, config, world_size), found).refusals
    return [str(each) for each in refusals if "reduce_bucket_size" in str(each)]


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_blocks_that_are_called_twice_have_one_curve(workshop, tmp_path_factory, stage):
    """In bf16 on two ranks, where DeepSpeed once sent the gradient of a module at its first use alone."""
    looped = ("training.bf16=true", *looped_model(tmp_path_factory.getbasetemp()), *SHORT)
    one, other = (column(workshop.run(each, settings=looped), "train/loss") for each in ("zero0", stage))
    assert other == pytest.approx(one, abs=0.002)
    assert other[-1] < other[0] - 0.2


NUMEL = 100
"""Of each of two tensors: on three ranks each is cut, and one rank keeps no part of it."""
WAYS = {
    "larger than the bucket": {"reduce_bucket_size": NUMEL - 1},
    "as large as the bucket": {"reduce_bucket_size": NUMEL},
    "offloaded": {"reduce_bucket_size": NUMEL - 1, "offload_optimizer": {"device": "cpu"}},
}


class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.ones(10, 10)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first @ self.second).float().sum()


class Stream:
    """A stream, or an event on one, that nobody has to wait for."""

    def _nothing(self, *_) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing


def stage_2(settings: dict) -> dict:
    return {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, **settings}


def freed_unprotected(settings: dict) -> int:
    """How many gradients one backward pass frees whose memory no stream was given and no bucket holds."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": stage_2(settings),
    }
    model = Weights().bfloat16()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    optimizer.reduction_stream, given, freed = Stream(), set(), []
    torch.Tensor.record_stream = lambda tensor, stream: given.add(address(tensor))
    clear = optimizer.clear_grad_attribute

    def note(parameter: torch.nn.Parameter) -> None:
        if parameter.grad is not None:
            buckets = {address(each) for bucket in optimizer.ipg_buckets.values() for each in bucket.buffer}
            owned = optimizer.is_param_in_current_partition[optimizer.get_param_id(parameter)]
            freed.append(not owned and address(parameter.grad) not in given | buckets)
        clear(parameter)

    optimizer.clear_grad_attribute = note
    engine.backward(engine(torch.ones(1, 10, dtype=torch.bfloat16)))
    return sum(freed)


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def freed_by_all() -> dict[str, int]:
    """{way: what `freed_unprotected` counts}. There is no GPU: DeepSpeed is told that its streams run by themselves."""
    device = get_accelerator()
    device.resolves_data_dependency, device.synchronize = lambda: False, lambda *_: None
    device.current_stream = device.default_stream = lambda *_: Stream()
    device.stream = lambda _: contextlib.nullcontext()
    type(device).Event = Stream
    return {name: freed_unprotected(settings) for name, settings in WAYS.items()}


def test_what_deepspeed_frees_too_early_is_what_the_plan_says():
    """DeepSpeed's own backward pass on three ranks, as on GPUs: a gradient that no stream was told of is freed."""
    ranks = on_ranks(RANKS, freed_by_all)
    tensors = 2 * (Tensor(NUMEL, EMBEDDING, None, 20),)
    held = {"families": [Family(tensors, (), 2 * NUMEL, 2 * NUMEL, RANKS)], "held": tensors}
    held |= {"stage": 2, "recipe": load_recipe("124m")}
    for name, settings in WAYS.items():
        case = SimpleNamespace(**held, ds_config={"zero_optimization": stage_2(settings)})
        said = unprotected_gradient(case)
        assert any(rank[name] for rank in ranks) == (said is not None), name
    assert any(rank["larger than the bucket"] for rank in ranks)


@pytest.mark.parametrize("deepspeed", ds_config_names())
@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_with_every_ds_config_is_right_or_refused(name, deepspeed):
    """None as shipped; with overlapped messages ZeRO-2 is refused for the largest weights alone."""
    recipe = load_recipe(name, ["training.per_device_train_batch_size=1"], deepspeed)
    config = load_ds_config(deepspeed)
    assert not judged(recipe, config, world_size=4)
    config["zero_optimization"]["overlap_comm"] = True
    large = ("30b", "65b", "llama-70b", "llama-405b", "moe-30b-a3b")
    is_refused = deepspeed in ("zero2", "zero2_fp16", "zero2_ep2") and name in large
    assert bool(judged(recipe, config, world_size=4)) == is_refused


def test_the_refusal_names_the_tensor_its_size_and_the_key():
    """A ds_config with buckets that are too small: on GPUs, with more than one rank, and nowhere else."""
    recipe, config = load_recipe("moe-1.5b", deepspeed="zero2"), load_ds_config("zero2")
    config["zero_optimization"] |= {"overlap_comm": True, "reduce_bucket_size": 50_000_000}
    (line,) = judged(recipe, config)
    assert "the embedding has 51,511,296 elements" in line
    assert 'a copy of ds_configs/zero2.json: "reduce_bucket_size": 51511296' in line
    (line,) = judged(replace(recipe, deepspeed="mine/zero2.json"), config)
    assert 'in mine/zero2.json: "reduce_bucket_size": 51511296' in line
    assert not judged(recipe, config, world_size=1)
    assert not judged(recipe, config, Machine(trains_on_processor=True))
    config["zero_optimization"]["overlap_comm"] = False
    assert not judged(recipe, config)


PASSES = 2
"""Micro-batches of a step."""
SMALL = {
    2: {"reduce_bucket_size": 20_000},
    3: {
        "reduce_bucket_size": 20_000,
        "stage3_prefetch_bucket_size": 1000,
        "stage3_param_persistence_threshold": 0,
    },
}
ADDED_UP = ["zero2", "zero1:reduce=fp32", "zero2:reduce=fp32", "zero3:reduce=fp32"]


def error_of_sums(name: str) -> float:
    """How far the gradients of a step in bf16 are from the fp32 sum of what the ranks' passes gave: of the largest."""
    config = load_ds_config(name)
    stage = config["zero_optimization"]["stage"]
    config["zero_optimization"] |= SMALL.get(stage, {})
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": PASSES}
    config |= {"train_batch_size": 2 * PASSES, "gradient_clipping": 0.0, "bf16": {"enabled": True}}
    alive = HfDeepSpeedConfig(config)
    arguments = SimpleNamespace(bf16=True, fp16=False, deepspeed=config, process_index=1, seed=7)
    model = build_model(LLAMA, TOKENIZER, arguments).train()
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    sums = {}

    def add(name: str, gradient: torch.Tensor) -> None:
        sums[name] = sums.get(name, 0) + gradient.float()

    for parameter_name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=parameter_name: add(name, gradient))
    order = torch.Generator().manual_seed(dist.get_rank())
    for number in range(PASSES):
        ids = torch.randint(512, (1, 64), generator=order)
        logits = engine(input_ids=ids).logits.float().flatten(0, 1)
        engine.backward(torch.nn.functional.cross_entropy(logits, ids.roll(-1, 1).flatten()))
        if number < PASSES - 1:
            engine.step()
    errors = []
    for parameter_name, parameter in model.named_parameters():
        found, wanted = safe_get_full_grad(parameter).float(), sums[parameter_name] / 2
        dist.all_reduce(wanted)
        errors.append(((found - wanted).abs().max() / wanted.abs().max()).item())
    engine.destroy()
    del alive
    return max(errors)


def errors_of_all() -> dict[str, float]:
    return {name: error_of_sums(name) for name in ADDED_UP}


def test_gradients_are_added_up_in_fp32_on_request():
    """Two ranks: the sum is the very sum in fp32 at every stage; by default, here at ZeRO-2, it is rounded to bf16."""
    for errors in on_ranks(2, errors_of_all):
        for name, error in errors.items():
            assert error == 0 if "reduce" in name else 1e-3 < error < 0.01, (name, error)


def test_the_plan_counts_sums_in_fp32():
    """Twice the bytes of gradients on their way, and a cast of a bucket; weights are sent as before."""
    recipe, gpu = load_recipe("7b"), find_gpu("H100")
    for stage in ("zero1", "zero2", "zero3"):
        plain, wide = (Setup(recipe, load_ds_config(f"{stage}{each}"), 8) for each in ("", ":reduce=fp32"))
        sent = [{each.name: each.total for each in step_messages(setup, gpu)} for setup in (plain, wide)]
        assert sent[1] == {name: size * (2 if name == GRADIENTS else 1) for name, size in sent[0].items()}
        if stage != "zero1":
            largest = max(tensor.numel for tensor in plain.held)
            numel = max(reduce_bucket(plain), largest)
            assert buffers(wide).buckets - buffers(plain).buckets == 4 * numel


def test_a_type_that_is_none_or_would_be_ignored_is_one_line(tmp_path):
    with pytest.raises(UserError, match='communication_data_type: is the string "fp64", not one of'):
        load_ds_config("zero2:reduce=fp64")
    config = load_ds_config("zero3")
    config["zero_optimization"]["zero_quantized_gradients"] = True
    (path := tmp_path / "quantized.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match="zero_quantized_gradients: sends 4 bits, and communication_data_type is"
    ):
        load_ds_config(f"{path}:reduce=fp32")
