"""Promise: ranks may split the experts, and curve, checkpoints and exports stay the recipe's."""

import copy
import json
from itertools import product

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from pretraining.checkpoints.shard_files import CheckpointReader, assemble
from pretraining.ds_config import degrees_of, load_ds_config
from pretraining.model.parallel import split_experts
from pretraining.planning.memory.need import BUILT, memory_need
from pretraining.recipe import load_recipe
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.training.experts import PREFIX
from pretraining.upstream.deepspeed import own_rows
from tests.checkpoints.test_reshard import unfinished
from tests.gear.finished_data import refusal
from tests.gear.on_ranks import on_ranks
from tests.gear.runs import EXPERTS, Run, execute
from tests.training.test_curve import FP32, column, largest_difference

OTHERS = ("moe_intermediate_size", "head_dim", "num_experts")
MIXTRAL = {key: value for key, value in EXPERTS.items() if key not in OTHERS}
MIXTRAL |= {"model_type": "mixtral", "num_local_experts": EXPERTS["num_experts"]}
BALANCED = ("loss.router_z_loss=0.01", "monitors.expert_load=true", "monitors.noise_scale_steps=null")
QWEN = (f"model={json.dumps({**EXPERTS, 'router_aux_loss_coef': 0.1})}", *BALANCED)
BLOCKS = ("speed.compile=blocks", "speed.compile_backend=aot_eager")
MUON = ("optimizer.name=muon", "optimizer.adaptive_clip=0.01", "monitors.layer_norms_steps=1")
ASKED = {
    "mixtral, documents apart": (
        "zero2_ep2",
        2,
        (f"model={json.dumps(MIXTRAL)}", *BALANCED, "data.document_masking=true"),
    ),
    "qwen3_moe, weights sharded too": ("zero3:expert=2", 4, QWEN),
    "qwen3_moe, compiled blocks": ("zero1:expert=2", 2, (*QWEN, *BLOCKS)),
    "qwen3_moe, Muon, clipping by units": ("zero1:expert=2", 4, (*QWEN, *MUON)),
    "without ZeRO, clipping by units": ("zero0:expert=2", 2, (*QWEN, *MUON[1:])),
    "sequences split too, offloaded": ("zero2_offload:expert=2,sequence=2", 4, QWEN),
}


@pytest.mark.parametrize("stage, ranks, settings", ASKED.values(), ids=ASKED)
def test_split_experts_have_the_curve_of_one_plain_process(workshop, stage, ranks, settings):
    """Losses, gradient norms whole and of layers, tokens, loads of experts and validations."""
    alone = workshop.plain(tuple(each for each in settings if each not in BLOCKS))
    together = workshop.run(stage, ranks, settings=settings)
    assert largest_difference(together.losses, alone.losses) <= FP32
    for name, most in (("train/grad_norm", 1e-3), ("train/tokens", 0)):
        assert largest_difference(column(together, name), column(alone, name)) <= most
    for ours, theirs in zip(together.training_rows, alone.training_rows, strict=True):
        measured = [name for name in theirs if name.startswith((PREFIX, "stability/gradient_norm/"))]
        assert any(name.startswith(PREFIX) for name in measured)
        for name in measured:
            assert ours[name] == pytest.approx(theirs[name], rel=0.02), name
    for ours, theirs in zip(together.validation_rows, alone.validation_rows, strict=True):
        assert ours["eval/loss"] == pytest.approx(theirs["eval/loss"], abs=FP32)
    [start] = [event for event in together.events if event["event"] == "start"]
    assert start["expert"] == degrees_of(load_ds_config(stage)).expert == 2


@pytest.mark.parametrize(
    "saved_by, resumed_by",
    [
        (("zero3:expert=2", 4), ("null", 1, "plain")),
        (("null", 1), ("zero2:expert=4", 4)),
        (("zero3:expert=2", 4), ("zero1:expert=2", 2)),
    ],
)
def test_a_run_goes_on_with_experts_split_or_whole(workshop, tmp_path, saved_by, resumed_by):
    """Every later loss is that of the unbroken run."""
    whole = workshop.run(*saved_by, settings=QWEN) if saved_by[0] != "null" else workshop.plain(QWEN)
    folder = unfinished(whole, tmp_path / "run")
    finished = execute(workshop.command(folder, *resumed_by, settings=QWEN))
    assert finished.code == 0, finished.output
    assert Run(folder).losses == pytest.approx(whole.losses, abs=1e-5)


@pytest.mark.parametrize("stage, ranks", [("zero2_ep2", 2), ("zero3:expert=2", 4)])
def test_an_export_holds_all_experts_under_the_same_names(workshop, stage, ranks):
    """The names and shapes of a plain process, and the bits of the last checkpoint."""
    settings = next(each[2] for each in ASKED.values() if each[0] == stage)
    alone, together = workshop.plain(settings), workshop.run(stage, ranks, settings=settings)
    ours, theirs = (load_file(run.folder / "export" / "model.safetensors") for run in (together, alone))
    assert {name: each.shape for name, each in ours.items()} == {
        name: each.shape for name, each in theirs.items()
    }
    saved = CheckpointReader(together.folder / "checkpoint-10")
    loaded = AutoModelForCausalLM.from_pretrained(together.folder / "export").state_dict()
    assert saved.parameters.keys() == loaded.keys()
    for name in saved.parameters:
        assert torch.equal(loaded[name], assemble(saved, name)), name


CHOICES = {"all": [0, 1, 2, 3], "those of the first rank": [0, 1], "those of the second": [3, 2], "one": [2]}
IMPLEMENTATIONS = ("eager", "grouped_mm")
TOKENS, CHOSEN = 24, 2


def split_and_whole_differ_by(choices: list[int], implementation: str) -> float:
    """Between outputs, and gradients of tokens, weights and scores, of whole and of split experts."""
    config = AutoConfig.for_model(**MIXTRAL)
    config._experts_implementation = implementation
    torch.manual_seed(0)
    whole = nn.ModuleDict({"layer": nn.ModuleDict({"experts": MixtralExperts(config)})})
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.1)
    split = copy.deepcopy(whole)
    split_experts(split, 2)
    for ours, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        ours.data.copy_(own_rows(ours, theirs.data))
    torch.manual_seed(dist.get_rank())
    tokens, scores = torch.randn(TOKENS, config.hidden_size), torch.rand(TOKENS, CHOSEN)
    chosen = torch.tensor(choices)[torch.randint(len(choices), (TOKENS, CHOSEN))]
    found = []
    for model in (whole, split):
        inputs = [tokens.clone().requires_grad_(), scores.clone().requires_grad_()]
        output = model["layer"]["experts"](inputs[0], chosen, inputs[1])
        (output**2).sum().backward()
        weights = [parameter.grad for parameter in model.parameters()]
        if model is whole:
            for gradient in weights:
                dist.all_reduce(gradient)
            weights = [own_rows(p, each) for p, each in zip(split.parameters(), weights, strict=True)]
        found.append([output.detach(), *(each.grad for each in inputs), *weights])
    return max(
        float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6))
        for theirs, ours in zip(*found, strict=True)
    )


def largest_differences() -> dict[str, float]:
    """Of this rank, case by case."""
    cases = product(CHOICES.items(), IMPLEMENTATIONS)
    return {f"{name}, {how}": split_and_whole_differ_by(choices, how) for (name, choices), how in cases}


def test_a_rank_to_which_no_token_comes_takes_part():
    """Outputs and gradients of split experts, on ranks that are all, some or none of them chosen."""
    for found in on_ranks(2, largest_differences):
        assert len(found) == 8 and all(difference < 1e-5 for difference in found.values()), found


NOISE, GRAPHS = ("monitors.noise_scale_steps=5",), ("speed.compile_mode=reduce-overhead",)


@pytest.mark.parametrize(
    "deepspeed, settings, ranks, said",
    [
        ("zero2:expert=3", (), 3, "zero2:expert=3: expert 3: does not divide the 4 experts; 2 does"),
        ("zero2_ep2", (), 2, "expert 2: is for mixtures of experts, not for gpt2"),
        ("zero2:expert=8", (), 8, "does not divide the 4 experts; 4 does"),
        (
            "zero2_ep2",
            (),
            3,
            "expert 2: needs a multiple of 2 ranks, and there are 3; degrees that divide 3: 1, 3",
        ),
        ("zero2_ep2", NOISE, 2, "noise_scale_steps: does not go with split experts"),
        ("zero2_ep2", GRAPHS, 2, "is reduce-overhead, which records CUDA graphs, and with expert 2"),
        ("zero0:expert=2", ("training.optim=adafactor",), 2, "whose update looks at whole parameters"),
        ("zero3_hpz:expert=2", (), 8, "zero_hpz_partition_size: does not go with split experts"),
    ],
)
def test_experts_that_cannot_be_split_are_refused_in_one_line(deepspeed, settings, ranks, said):
    """From the plan already, with the nearest degree that divides."""
    recipe = (
        "tiny" if "mixtures" in said else "features/mixture-of-experts"
    )  # a dense model has none to split
    assert said in refusal(load_recipe_and_ds_config, recipe, settings, deepspeed, ranks)


def test_building_split_experts_takes_their_part_and_one_layer_whole():
    """In host memory, before the model moves to its GPU; `moe-30b-a3b` holds 16 of 128 experts a rank."""
    recipe, layer = load_recipe("moe-30b-a3b"), 128 * 3 * 768 * 2048
    built = {
        way: memory_need(recipe, load_ds_config(way), 8).host[BUILT] for way in ("zero1", "zero1:expert=8")
    }
    assert built["zero1"] == 2 * 30_532_122_624
    assert built["zero1:expert=8"] == built["zero1"] - 2 * 48 * layer * 7 / 8 + 4 * layer
