"""Embeddings and head in fp32 beside layers in bf16 (model.keep_in_fp32), at every stage."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from pretraining.ds_config import load_ds_config
from pretraining.model.build import build_model
from pretraining.model.loss import build_loss
from pretraining.planning.gpus import find_gpu
from pretraining.planning.memory.need import memory_need
from pretraining.planning.memory.states import state_of
from pretraining.planning.setup import Setup
from pretraining.planning.shapes import parameter_tensors
from pretraining.planning.throughput import ceiling
from pretraining.recipe import load_recipe
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.recipe.sections import Weights
from pretraining.upstream.wide_weights import is_wide
from tests.checkpoints.test_export import evaluated
from tests.gear.finished_data import refusal
from tests.gear.runs import LLAMA, MODELS, OTHER_MODELS, TOKENIZER, completed, section_of
from tests.training.test_curve import BF16, IN_BF16

UNTIED = {**LLAMA, "tie_word_embeddings": False}
BOTH = ["embeddings", "head"]
WIDE = (section_of(UNTIED, keep_in_fp32=BOTH), *IN_BF16)
TABLES = {"model.embed_tokens.weight", "lm_head.weight"}
OF_A_STAGE = {"bf16": True, "fp16": False, "deepspeed": {"zero_optimization": {"stage": 2}}, "device": "cpu"}


def built(section: dict, parts: list[str]):
    """A model in bf16, as ZeRO-1 and 2 get it."""
    arguments = SimpleNamespace(**OF_A_STAGE, process_index=1, seed=7)
    return build_model(section, TOKENIZER, arguments, weights=Weights(keep_in_fp32=parts))


@pytest.mark.parametrize(
    "section, parts, wide",
    [
        (MODELS["gpt2"], ["embeddings"], {"transformer.wte.weight", "transformer.wpe.weight"}),
        (MODELS["gpt2"], ["head"], {"transformer.wte.weight"}),
        (UNTIED, ["head"], {"lm_head.weight"}),
        (UNTIED, ["embeddings"], {"model.embed_tokens.weight"}),
    ],
)
def test_the_parts_are_fp32_and_the_layers_get_bf16(section, parts, wide):
    """A tied weight is both parts; a head in fp32 gives the very logits of an fp32 product, to the fused loss too."""
    model = built(section, parts)
    found = {name for name, each in model.named_parameters() if is_wide(each)}
    assert found == wide == {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    seen, head = {}, model.get_output_embeddings()
    layer = model.base_model.h[0] if section["model_type"] == "gpt2" else model.base_model.layers[0]
    layer.register_forward_pre_hook(lambda module, inputs: seen.update(layer=inputs[0].dtype))
    head.register_forward_pre_hook(lambda module, inputs: seen.update(head=inputs[0]))
    ids = torch.arange(128).view(2, 64) * 3 % 512
    logits = model.eval()(input_ids=ids).logits
    assert seen["layer"] == seen["head"].dtype == torch.bfloat16
    if head.weight.dtype != torch.float32:
        assert logits.dtype == torch.bfloat16
        return
    expected = torch.nn.functional.linear(seen["head"].float(), head.weight)
    assert torch.equal(logits, expected)
    labels = ids.roll(-1, 1)
    plain = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
    fused = build_loss(model, load_recipe("features/gpt2").loss)
    loss = fused(model.train()(input_ids=ids), labels)
    assert loss.item() == pytest.approx(plain.item(), abs=1e-6)
    loss.backward()
    assert head.weight.grad.dtype == torch.float32
    # nothing was rounded to bf16 on the way
    assert not torch.equal(head.weight.grad, head.weight.grad.bfloat16().float())


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_every_stage_has_them_and_one_curve(workshop, stage):
    """Two ranks, within the rounding of bf16; the export holds both parts as they were trained, and is evaluated so."""
    run, plain = workshop.run(stage, settings=WIDE), workshop.plain(WIDE)
    assert max(abs(a - b) for a, b in zip(run.losses, plain.losses, strict=True)) <= BF16
    weights = load_file(run.dir.export / "model.safetensors")
    assert {name for name, each in weights.items() if each.dtype == torch.float32} == TABLES
    assert json.loads((run.dir.export / "config.json").read_text())["dtype"] == "bfloat16"
    for name in TABLES:
        assert not torch.equal(weights[name], weights[name].bfloat16().float())
    if stage == "zero3":
        found = evaluated(workshop, run, "--no-sample")["loss"]
        assert found == pytest.approx(run.events[-1]["eval_loss"], abs=1e-5)


def test_a_checkpoint_goes_on_at_another_stage(workshop, tmp_path):
    """Saved by two ranks under ZeRO-3, continued by one under ZeRO-1; its own export is that of the run."""
    run = workshop.run("zero3", settings=WIDE)
    resumed = workshop.continued(run, tmp_path / "resumed", "zero1", 1, "forked", WIDE)
    assert "continued from checkpoint-8" in resumed.finished.stdout
    assert resumed.losses[-2:] == pytest.approx(run.losses[-2:], abs=1e-3)
    verb = ["forked", "0", "-m", "pretraining.checkpoints", "export"]
    completed([*verb, run.folder, "--to", tmp_path / "later"])
    folders = (run.dir.export, tmp_path / "later")
    at_the_end, later = (load_file(each / "model.safetensors") for each in folders)
    assert all(torch.equal(later[name], each) for name, each in at_the_end.items())
    assert all(later[name].dtype == each.dtype for name, each in at_the_end.items())


def test_the_plan_counts_them():
    """Two more bytes a weight, shared from ZeRO-3 on; larger logits; a slower head. At stage 0 all weights are fp32."""
    settings = ["training.bf16=true"]
    wide = [*settings, f"model.keep_in_fp32={json.dumps(BOTH)}"]
    recipes = [load_recipe("features/gpt2", each) for each in (settings, wide)]
    table = sum(tensor.numel for tensor in parameter_tensors(recipes[0].model) if tensor.kind == "embedding")
    for stage, ranks in (("zero0", 1), ("zero1", 1), ("zero2", 1), ("zero3", 2)):
        setups = [Setup(each, load_ds_config(stage), 2) for each in recipes]
        before, after = map(state_of, setups)
        more = 0 if stage == "zero0" else 2 * table / ranks
        assert after.gpu - before.gpu == pytest.approx(more, rel=0.01)
        before, after = (memory_need(each, 80e9).phases["loss"] for each in setups)
        assert after["logits and loss"] > before["logits and loss"]
    gpu = find_gpu("H100")
    before, after = (ceiling(Setup(each, load_ds_config("zero1")), gpu, "bf16") for each in recipes)
    assert after.seconds["products"] > before.seconds["products"]


DEEPCOMPILE = ["speed.compile=deepcompile", "loss.kind=plain"]
REFUSED = [
    (["training.bf16=false"], "zero2", "goes with training.bf16: all is in fp32; --set training.bf16=true"),
    ([], "zero3_hpz", "second copy of the weights in each node (hpZ), in one type; use --deepspeed zero3"),
    ([], "zero3_nvme", "offloads the weights, in one type"),
    (DEEPCOMPILE, "zero2", "not tried with speed.compile deepcompile"),
    (['model.keep_in_fp32=["mlp"]'], "zero2", "model.keep_in_fp32.0: is "),
]


@pytest.mark.parametrize("settings, stage, message", REFUSED)
def test_what_cannot_be_is_refused_by_name(settings, stage, message):
    always = ["training.bf16=true", 'model.keep_in_fp32=["head"]']
    assert message in refusal(load_recipe_and_ds_config, "features/gpt2", [*always, *settings], stage)


def test_other_models_are_refused():
    model = section_of(OTHER_MODELS["gpt_neox"], vocab_size=1024, keep_in_fp32=["head"])
    settings = [model, "training.bf16=true"]
    found = refusal(load_recipe_and_ds_config, "features/gpt2", settings, "zero2")
    assert "is for gpt2, llama, " in found and "not gpt_neox" in found and "--deepspeed zero0" in found
