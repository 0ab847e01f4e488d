"""Promise: the curve belongs to the recipe. No gradient is freed while it is still on its way to other ranks."""

import json
from dataclasses import replace

import pytest

from pretraining.ds_config import ds_config_names, load_ds_config
from pretraining.planning.gate import check_plan
from pretraining.planning.memory.states import unprotected_gradient
from pretraining.planning.memory.tensors import EMBEDDING, Family, Tensor
from pretraining.planning.run_plan import Machine
from pretraining.recipe import load_recipe, recipe_names
from tests.gear.freed_gradients import NUMEL, WAYS, stage_2
from tests.gear.runs import execute

ON_GPUS = Machine(gpu_memory_bytes=1e15)
RANKS = 3


def judged(recipe, config: dict | None, found: Machine = ON_GPUS, world_size: int = 2) -> list[str]:
    """What is refused of the buckets."""
    refusals = check_plan(recipe, config, world_size, found).refusals
    return [str(each) for each in refusals if "reduce_bucket_size" in str(each)]


def test_what_deepspeed_frees_too_early_is_what_the_plan_says(tmp_path):
    """DeepSpeed's own backward pass on three ranks, as on GPUs: a gradient that no stream was told of is freed."""
    finished = execute(["forked", str(RANKS), "-m", "tests.gear.freed_gradients", tmp_path])
    assert finished.code == 0, finished.output
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    tensors = 2 * (Tensor(NUMEL, EMBEDDING, None, 20),)
    of_rank = [Family(tensors, (), 2 * NUMEL, 2 * NUMEL, RANKS)]
    for name, settings in WAYS.items():
        said = unprotected_gradient({"zero_optimization": stage_2(settings)}, of_rank, 10)
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
    is_refused = deepspeed in ("zero2", "zero2_fp16", "zero2_ep2") and name in (
        "30b",
        "65b",
        "llama-70b",
        "moe-30b-a3b",
    )
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
