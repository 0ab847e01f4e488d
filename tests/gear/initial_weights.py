"""Build models as a run does, in a run's process group: their initial weights."""

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaPreTrainedModel, integrations

from pretraining.ds_config import degrees_of, load_ds_config
from pretraining.model.build import build_model
from pretraining.model.counting import build_on_meta
from pretraining.model.given_weights import GivenWeights
from pretraining.model.weight_files import open_weights
from pretraining.recipe.model import Model
from pretraining.recipe.optimizer import Mup
from pretraining.recipe.sections import Speed, Weights
from pretraining.recipe.training import Training
from pretraining.runtime.process_group import rank_groups
from pretraining.training.arguments import build_arguments
from pretraining.upstream.deepspeed import share_of
from pretraining.upstream.split_weights import whole_experts
from tests.gear.runs import MODELS, OTHER_MODELS, SMALL_RECIPE, TOKENIZER

STAGES = ("null", "zero2", "zero3")
SPLIT = [
    ("qwen3_moe", stage, bf16) for stage in ("zero2:expert=2", "zero3:expert=2") for bf16 in (False, True)
]
"""Of two ranks each has half of the experts."""
MUP = Mup(base_width=32)
DRAW = [
    {"kind": "hidden", "std": 1.0, "over": "spectral"},
    {"kind": "embedding", "std": 0.5, "cut": 2.0},
    {"names": "*.k_proj.weight", "std": 0.6, "over": "inputs"},
    {"names": "*.o_proj.weight", "std": 0.0},
    {"names": "*.down_proj*", "std": 0.02, "over": "layers", "cut": 3.0},
]
CONTINUED = "halved"
"""A Llama whose MLPs halve what their down projections have drawn."""


def initial_weights(
    model: dict, stage: str, bf16: bool, given: GivenWeights | None = None, **sections: Mup | Weights
) -> dict[str, torch.Tensor]:
    """{parameter name: full tensor} of a freshly built model, whose weights are drawn or given."""
    training = Training({**SMALL_RECIPE["training"], "bf16": bf16})
    recipe = SimpleNamespace(training=training, training_keywords=training, num_steps=10, where="small.json")
    recipe.speed, recipe.extensions = Speed(compile="none"), []
    recipe.model, recipe.weights = Model(model), Weights()
    ds_config = None if stage == "null" else load_ds_config(stage)
    arguments = build_arguments(recipe, ds_config, Path("unused"), 1)
    groups = rank_groups(degrees_of(ds_config))
    built = build_model(model, TOKENIZER, arguments, given=given, groups=groups, **sections)
    is_sharded = Path(stage).name.startswith("zero3")
    assert any(hasattr(p, "ds_id") for p in built.parameters()) == is_sharded
    split = whole_experts(built)
    others = [parameter for parameter in built.parameters() if share_of(parameter) is None]
    with deepspeed.zero.GatheredParameters(others, enabled=is_sharded):
        found = {name: parameter.detach().clone() for name, parameter in built.named_parameters()}
    return found | split


def refuse_to_draw(model) -> None:
    """Transformers' own draw under ZeRO-3 gathers every module once more, for weights that ours replace."""
    raise AssertionError("transformers drew the weights too")


def rule_that_continues(self, module) -> None:
    """Llama's own rule, and one that goes on from what a child's rule has drawn."""
    super(LlamaPreTrainedModel, self)._init_weights(module)
    if type(module).__name__ == "LlamaMLP":
        module.down_proj.weight.mul_(0.5)


def special_weights(stage: str, bf16: bool) -> dict[tuple, dict[str, torch.Tensor]]:
    """Weights with muP's factors, and those of a rule that continues from its children's."""
    scaled = initial_weights(MODELS["llama"], stage, bf16, mup=MUP)
    drawn = initial_weights(MODELS["qwen3_moe"], stage, bf16, weights=Weights.of({"draw": DRAW}))
    with mock.patch.object(LlamaPreTrainedModel, "_init_weights", rule_that_continues):
        continued = initial_weights(MODELS["llama"], stage, bf16)
    return {("mup", stage, bf16): scaled, ("drawn", stage, bf16): drawn, (CONTINUED, stage, bf16): continued}


def with_copies_on_the_node(folder: Path) -> str:
    """A ds_config of ZeRO-3 in which both ranks keep a second copy (hpZ): then no rank can set its part alone."""
    config = load_ds_config("zero3_hpz")
    config["zero_optimization"]["zero_hpz_partition_size"] = 2
    path = folder / f"zero3-{dist.get_rank()}.json"
    path.write_text(json.dumps(config))
    return str(path)


def given_weights(model: dict, folder: Path) -> GivenWeights:
    """The weights of a folder that rank 0 writes, as transformers saves a model of this section that it has drawn."""
    source, _ = build_on_meta(model)
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(source.config).save_pretrained(folder)
    dist.barrier()
    return GivenWeights(str(folder), open_weights(folder), source)


def weights_of_all(folder: Path) -> dict:
    """{(model, stage, bf16): weights} of every case, and beside it those of given ones, for which there is a folder.

    On rank 0; nothing on the others, which would say the same.
    """
    integrations.deepspeed.initialize_weights_zero3 = refuse_to_draw
    found = {
        (name, stage, bf16): initial_weights(model, stage, bf16)
        for name, model in (MODELS | OTHER_MODELS).items()
        for stage in STAGES
        for bf16 in (False, True)
    }
    for stage, bf16 in product(STAGES, (False, True)):
        found |= special_weights(stage, bf16)
    split = SPLIT if dist.get_world_size() == 2 else []
    found |= {(name, stage, bf16): initial_weights(MODELS[name], stage, bf16) for name, stage, bf16 in split}
    rows = Weights.of({"draw": DRAW})
    for name, stage, bf16 in split:
        found["drawn", stage, bf16] = initial_weights(MODELS[name], stage, bf16, weights=rows)
    digests = {}
    if dist.get_world_size() == 2:
        # DeepSpeed makes the groups of such copies once a process
        found["gpt2", "hpz", False] = initial_weights(MODELS["gpt2"], with_copies_on_the_node(folder), False)
    for name, model in (MODELS | OTHER_MODELS).items() if dist.get_world_size() < 3 else ():
        given = given_weights(model, folder / str(dist.get_world_size()) / name)
        digests[name] = given.digest()
        for stage, bf16 in product(STAGES, (False, True)):
            found["given", name, stage, bf16] = initial_weights(model, stage, bf16, given)
        for _, stage, bf16 in (each for each in split if each[0] == name):
            found["given", name, stage, bf16] = initial_weights(model, stage, bf16, given)
    return found | {"digests": digests} if dist.get_rank() == 0 else {}
