"""Embeddings, head and modules in fp32 beside layers in bf16 (model.keep_in_fp32), at every stage."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from pretraining.ds_config import load_ds_config
from pretraining.model.build import build_model, convert_products
from pretraining.model.loss import build_loss
from pretraining.planning.gpus import find_gpu
from pretraining.planning.memory.need import memory_need
from pretraining.planning.memory.states import state_of
from pretraining.planning.setup import Setup
from pretraining.planning.shapes import parameter_tensors
from pretraining.planning.sizes import wide_tensors
from pretraining.planning.step_time import ceiling
from pretraining.recipe import load_recipe
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.recipe.sections import Speed, Weights
from pretraining.upstream.wide_weights import _cast_all, is_wide
from tests.checkpoints.test_export import evaluated
from tests.gear.finished_data import refusal
from tests.gear.runs import LLAMA, MODELS, OTHER_MODELS, TOKENIZER, completed, section_of
from tests.training.test_curve import BF16, IN_BF16

UNTIED = {**LLAMA, "tie_word_embeddings": False}
BOTH = ["embeddings", "head"]
WIDE = (section_of(UNTIED, keep_in_fp32=[*BOTH, "norm", "layers.0.self_attn"]), *IN_BF16)
KEPT = {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
KEPT |= {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"}
OF_A_STAGE = {"bf16": True, "fp16": False, "deepspeed": {"zero_optimization": {"stage": 2}}, "device": "cpu"}


def built(section: dict, parts: list[str] | None):
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


@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2", "zero3"])
def test_every_stage_has_them_and_one_curve(workshop, stage):
    """Two ranks, within the rounding of bf16; the export holds all parts as they were trained, and is evaluated so.

    At stage 0 all weights are fp32, under autocast; what is named computes in fp32.
    """
    run, plain = workshop.run(stage, settings=WIDE), workshop.plain(WIDE)
    assert run.losses == pytest.approx(plain.losses, abs=BF16)
    weights = load_file(run.dir.export / "model.safetensors")
    wide = {name for name, each in weights.items() if each.dtype == torch.float32}
    assert wide == (weights.keys() if stage == "zero0" else KEPT)
    if stage == "zero0":
        return
    assert json.loads((run.dir.export / "config.json").read_text())["dtype"] == "bfloat16"
    for name in KEPT:
        assert not torch.equal(weights[name], weights[name].bfloat16().float())
    if stage == "zero3":
        found = evaluated(workshop, run, "--no-sample")["loss"]
        assert found == pytest.approx(run.events[-1]["eval_loss"], abs=1e-5)


MODULES = {
    "last norm": (MODELS["llama"], ["norm"], 1),
    "all norms": (MODELS["llama"], ["*norm*"], 5),
    "attention": (MODELS["gpt2"], ["h.0.attn", "ln_f"], 6),
    "routers": (MODELS["qwen3_moe"], ["mlp.gate"], 2),
    "all but tables": (MODELS["gpt2"], ["*"], 26),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_compute_in_fp32_and_give_bf16(name):
    """The plan's parameters are those that are wide; what a module gives is what fp32 gives, rounded once."""
    section, names, count = MODULES[name]
    model, plain = built(section, names), built(section, None)
    wide = {each for each, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    planned = section_of({**section, "vocab_size": 1024}, keep_in_fp32=names)
    tensors = wide_tensors(load_recipe("features/gpt2", [planned, "training.bf16=true"]))
    assert {tensor.name for tensor in tensors} == wide and len(wide) == count
    drawn = dict(plain.named_parameters())
    assert all(torch.equal(each.bfloat16(), drawn[name]) for name, each in model.named_parameters())
    of_fp32 = {
        each: kind
        for each, kind in plain.named_modules()
        if type(model.get_submodule(each)) is not type(kind)
    }
    assert of_fp32
    for each, alone in of_fp32.items():
        module, seen = model.get_submodule(each), []
        module.register_forward_hook(lambda module, *passed, seen=seen: seen.extend(passed), with_kwargs=True)
        model(input_ids=torch.arange(128).view(2, 64) * 3 % 512)
        args, kwargs, given = seen
        args, kwargs = _cast_all((args, kwargs), torch.float32)
        alone.float().load_state_dict(module.state_dict())
        wanted = alone(*args, **kwargs)
        given, wanted = (each[0] if isinstance(each, tuple) else each for each in (given, wanted))
        assert given.dtype == torch.bfloat16 and torch.equal(given, wanted.bfloat16())


@pytest.mark.usefixtures("nothing_compiled")
def test_modules_are_compiled_with_their_block_and_stay_out_of_fp8():
    """One graph for all blocks; a product in fp32 is none in fp8."""
    arguments = SimpleNamespace(**OF_A_STAGE, process_index=1, seed=7)
    speed = Speed(compile="blocks", compile_backend="aot_eager")
    kept = Weights(keep_in_fp32=["*norm*", "down_proj"])
    model = build_model(LLAMA, TOKENIZER, arguments, weights=kept, speed=speed).train()
    model(input_ids=torch.arange(128).view(2, 64) * 3 % 512).logits.float().sum().backward()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert all(p.grad.dtype == p.dtype for p in model.parameters())
    pytest.importorskip("torchao")
    assert convert_products(built(LLAMA, ["self_attn", "down_proj"]), Speed(fp8="tensorwise")) == 2 * 2


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
    modules = load_recipe("7b", ['model.keep_in_fp32=["self_attn"]'])
    setups = [Setup(each, load_ds_config("zero3"), 8) for each in (load_recipe("7b"), modules)]
    numel = sum(tensor.numel for tensor in setups[1].wide)
    assert numel == setups[0].size.parts["attention"]
    assert state_of(setups[1]).gpu - state_of(setups[0]).gpu == pytest.approx(2 * numel / 8, rel=0.01)
    kept = [memory_need(each, 80e9).phases["loss"]["activations"] for each in setups]
    assert kept[0] < kept[1] < 2 * kept[0]
    gpu = find_gpu("H100")
    times = [ceiling(each, gpu, "bf16").seconds["products"] for each in setups]
    assert 1.1 * times[0] < times[1] < 2 * times[0]
    before, after = (ceiling(Setup(each, load_ds_config("zero1")), gpu, "bf16") for each in recipes)
    assert after.seconds["products"] > before.seconds["products"]


MIXTURE = {**MODELS["qwen3_moe"], "vocab_size": 1024}
DEEPCOMPILE = ["speed.compile=deepcompile", "loss.kind=plain"]
REFUSED = [
    (["training.bf16=false"], "zero2", "goes with training.bf16: all is in fp32; --set training.bf16=true"),
    ([], "zero3_hpz", "second copy of the weights in each node (hpZ), in one type; use --deepspeed zero3"),
    ([], "zero3_nvme", "offloads the weights, in one type"),
    (DEEPCOMPILE, "zero2", "not tried with speed.compile deepcompile"),
    (
        ['model.keep_in_fp32=["head", "mpl"]'],
        "zero2",
        'keep_in_fp32.1: is "mpl", which matches none of the 25 modules',
    ),
    (
        ['model.keep_in_fp32=["embeddings", "*"]'],
        "zero2",
        "leaves nothing in bf16; --set training.bf16=false",
    ),
    (
        [section_of(MIXTURE, keep_in_fp32=["mlp"])],
        "zero2",
        "names experts, which multiply together in bf16 alone",
    ),
    (
        [section_of(MIXTURE, keep_in_fp32=["norm"])],
        "zero2_ep2",
        "names modules, which is not tried with expert 2",
    ),
    (
        [section_of(MIXTURE, keep_in_fp32=["norm"]), "training.use_liger_kernel=true"],
        "zero2",
        "Liger's kernels may replace; leave these out, or --set training.use_liger_kernel=false",
    ),
]


def planned(recipe: str, settings: list[str], stage: str) -> None:
    recipe, ds_config = load_recipe_and_ds_config(recipe, settings, stage)
    state_of(Setup(recipe, ds_config, 2))


@pytest.mark.parametrize("settings, stage, message", REFUSED)
def test_what_cannot_be_is_refused_by_name(settings, stage, message):
    always = ["training.bf16=true", 'model.keep_in_fp32=["head"]']
    assert message in refusal(planned, "features/gpt2", [*always, *settings], stage)


def test_other_models_are_refused():
    model = section_of(OTHER_MODELS["gpt_neox"], vocab_size=1024, keep_in_fp32=["head"])
    settings = [model, "training.bf16=true"]
    found = refusal(load_recipe_and_ds_config, "features/gpt2", settings, "zero2")
    assert "is for gpt2, llama, " in found and "not gpt_neox" in found and "--deepspeed zero0" in found
