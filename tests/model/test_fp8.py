"""fp8 products: the blocks' linear layers and nothing else, close to them, at every stage; what stays in bf16."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from pretraining.ds_config import load_ds_config
from pretraining.errors import UserError
from pretraining.model.build import build_model, check_speed, compile_model, convert_products
from pretraining.planning.gate import check_plan
from pretraining.planning.gpus import find_gpu
from pretraining.planning.run_plan import Machine
from pretraining.planning.setup import Setup
from pretraining.planning.sizes import fp8_tensors
from pretraining.planning.step_time import ceiling
from pretraining.recipe import load_recipe
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.recipe.sections import Speed
from pretraining.training.optimizers import Bf16InDecay
from tests.gear.finished_data import refusal
from tests.gear.on_ranks import on_ranks
from tests.gear.runs import LLAMA, OTHER_MODELS, section_of
from tests.model.test_compiling import IDS, TOKENIZER

TENSORWISE = Speed(fp8="tensorwise")


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_converted_model_is_the_model_within_fp8_s_rounding(arguments, name):
    """The same parameters under the same names, gradients a few percent off by a real product, the head exact."""
    pytest.importorskip("torchao")
    whole = build_model(LLAMA, TOKENIZER, arguments).bfloat16()
    fp8 = build_model(LLAMA, TOKENIZER, arguments).bfloat16()
    assert convert_products(fp8, Speed(fp8=name)) == 2 * 7
    assert [n for n, _ in fp8.named_parameters()] == [n for n, _ in whole.named_parameters()]
    assert type(fp8.lm_head) is torch.nn.Linear
    gradients = []
    for model in (whole, fp8):
        logits = model(input_ids=IDS).logits.float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten()).backward()
        gradients.append(torch.cat([p.grad.float().flatten() for p in model.parameters()]))
    ours, theirs = gradients[1], gradients[0]
    assert 0 < (ours - theirs).norm() / theirs.norm() < 0.1


def test_validations_are_those_of_the_exported_weights(arguments):
    """Promise: honest numbers. Only training multiplies in fp8: the logits of a validation are the plain model's."""
    pytest.importorskip("torchao")
    whole, fp8 = (build_model(LLAMA, TOKENIZER, arguments).bfloat16() for _ in range(2))
    convert_products(fp8, Speed(fp8="rowwise"))
    with torch.no_grad():
        assert not torch.equal(fp8.train()(input_ids=IDS).logits, whole.train()(input_ids=IDS).logits)
        assert torch.equal(fp8.eval()(input_ids=IDS).logits, whole.eval()(input_ids=IDS).logits)


# {case: (stage, layers are recomputed, bf16, speed)}
CUT = {"compile": "blocks", "compile_backend": "aot_eager_decomp_partition"}
FP8 = {"fp8": "tensorwise"}
CASES = {
    "zero0": (0, False, False, FP8),
    "zero2": (2, False, False, FP8),
    "zero3": (3, True, False, FP8),
    "zero3 blocks": (3, False, False, {**FP8, **CUT}),
    "bf16": (2, False, True, {}),
    "zero3 beside bf16": (3, False, True, FP8),
}


def trained_in_fp8() -> dict[str, dict]:
    """What `compiled_ranks.trained` finds; by the processor's own fp8 product, which a run refuses as too slow."""
    from tests.gear.compiled_ranks import Gathered, trained

    gathered, found = Gathered(singly=True), {}
    with mock.patch("pretraining.model.build.check_speed"):
        for case, (stage, recomputes, bf16, speed) in CASES.items():
            found[case] = trained(gathered, "llama", stage, recomputes, speed, bf16=bf16)
    return found


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, dict]:
    """It takes a quarter of a minute: six short trainings on two ranks."""
    pytest.importorskip("torchao")
    return on_ranks(2, trained_in_fp8)[0]


@pytest.mark.parametrize("case", ["zero0", "zero3", "zero3 blocks"])
def test_every_stage_has_one_curve_in_fp8(on_two_ranks, case):
    """First gradients and losses of four steps; from the third on within what fp8 makes of a last digit.

    On an AMD EPYC a last digit differs at ZeRO-3 (not with MKL_CBWR=COMPATIBLE), of which fp8 makes up to 8 % of a
    gradient's norm. The bounds of that case are wider there, and there alone.
    """
    found, wanted = on_two_ranks[case], on_two_ranks["zero2"]
    if case == "zero3" and "AuthenticAMD" in Path("/proc/cpuinfo").read_text():
        for name, gradient in found["gradients"].items():
            off = (gradient - wanted["gradients"][name]).norm() / wanted["gradients"][name].norm()
            assert off < 0.15, name
        assert found["losses"] == pytest.approx(wanted["losses"], abs=2e-2)
        return
    for name, gradient in found["gradients"].items():
        torch.testing.assert_close(gradient, wanted["gradients"][name], atol=1e-6, rtol=1e-3)
    assert found["losses"][:2] == pytest.approx(wanted["losses"][:2], abs=1e-5)
    assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-3)


def test_the_curve_is_beside_that_of_bf16(on_two_ranks):
    """Close to it, and another one, as are its gradients."""
    ours, theirs = on_two_ranks["zero3 beside bf16"], on_two_ranks["bf16"]
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=0.01) and ours["losses"] != theirs["losses"]
    gradients = [torch.cat([g.flatten() for g in each["gradients"].values()]) for each in (ours, theirs)]
    assert 0.01 < (gradients[0] - gradients[1]).norm() / gradients[1].norm() < 0.2


@pytest.mark.parametrize("case", ["zero3", "zero3 blocks", "zero3 beside bf16"])
def test_no_gathered_weight_is_kept_for_the_backward_pass(on_two_ranks, case):
    """torchao's own layer keeps all of them, 122,880 elements here; gloo may hold the last one for a moment."""
    largest = LLAMA["hidden_size"] * LLAMA["intermediate_size"]
    assert on_two_ranks[case]["held_too_long"] <= largest
    assert on_two_ranks[case]["graphs"] == ("blocks" in case)


NEOX = {**OTHER_MODELS["gpt_neox"], "vocab_size": 512}
KEPT = {
    "blocks": (LLAMA, {"bf16_blocks": [1, 0]}, 7, ["model.layers.0."]),
    "names": (
        LLAMA,
        {"bf16_layers": ["down_proj", "layers.1.self_attn"]},
        8,
        [".down_proj", ".1.self_attn."],
    ),
    "both": (LLAMA, {"bf16_blocks": [0, 1], "bf16_layers": ["mlp"]}, 4, [".mlp.", "layers.1."]),
    "counted": (NEOX, {"bf16_layers": ["attention.d*"]}, 6, ["attention.dense"]),
}


@pytest.mark.parametrize("name", KEPT)
def test_layers_are_left_in_bf16_and_the_plan_counts_the_rest(arguments, name):
    """The plan's layers are those that are converted, of a type with a formula and of one that is counted."""
    pytest.importorskip("torchao")
    section, kept, count, without = KEPT[name]
    model = build_model(section, TOKENIZER, arguments)
    number = convert_products(model, Speed(fp8="tensorwise", **kept))
    found = {name for name, layer in model.named_modules() if hasattr(layer, "in_fp8")}
    assert number == len(found) == count
    assert not any(part in layer for layer in found for part in without)
    settings = [section_of({**section, "vocab_size": 1024}), "training.bf16=true", "speed.fp8=tensorwise"]
    settings += [f"speed.{key}={json.dumps(value)}" for key, value in kept.items()]
    tensors = fp8_tensors(load_recipe("features/gpt2", settings))
    assert {tensor.name for tensor in tensors} == {f"{layer}.weight" for layer in found}


def test_the_plan_has_them_faster_until_the_decay():
    """Products take less and casts are added; less of both the fewer layers and steps are in fp8; rows gain nothing."""
    settings = ["training.bf16=true", "speed.compile=blocks"]
    stable = ["training.lr_scheduler_type=warmup_stable_decay", "budget.decay_tokens=20000000000"]
    stable += ["training.lr_scheduler_kwargs={}", "budget.tokens=100000000000"]
    gpu, found = find_gpu("H100"), {}
    for name, more in {
        "bf16": [],
        "fp8": ["speed.fp8=tensorwise"],
        "some": ["speed.fp8=tensorwise", "speed.bf16_blocks=[8,8]"],
        "decay": ["speed.fp8=tensorwise", "speed.bf16_decay=true"],
        "rows": ["speed.fp8=rowwise"],
    }.items():
        recipe = load_recipe("7b", [*settings, *stable, *more])
        found[name] = ceiling(Setup(recipe, load_ds_config("zero3"), 8), gpu, "bf16").seconds
    saved = {name: found["bf16"]["products"] - each["products"] for name, each in found.items()}
    cast = {name: each["other kernels"] - found["bf16"]["other kernels"] for name, each in found.items()}
    for each in (saved, cast):
        assert each["some"] == pytest.approx(each["fp8"] / 2)
        assert each["decay"] == pytest.approx(each["fp8"] * 0.8, rel=1e-3)
    assert 0.45 < saved["fp8"] / found["bf16"]["products"] < 0.5 and 0 < cast["fp8"] < saved["fp8"]
    assert saved["rows"] == 0 and cast["rows"] == cast["fp8"]


def test_a_gpu_without_fp8_is_refused_by_the_plan():
    recipe = load_recipe("7b", ["speed.fp8=tensorwise"])
    setup = Setup(recipe, load_ds_config("zero3"), 8)
    for name, words in (("A100", "A100-80GB is of Ampere"), ("L40S", "Ada"), ("H100", ""), ("B200", "")):
        gpu = find_gpu(name)
        refusals = [str(each) for each in check_plan(setup, Machine(gpu.memory_bytes, gpu)).refusals]
        assert [each for each in refusals if "speed.fp8" in each and words in each] or not words
        assert words or not any("speed.fp8" in each for each in refusals)


@pytest.mark.usefixtures("nothing_compiled")
def test_the_decay_is_in_bf16_after_one_more_compilation(arguments):
    """From the step at which the rate begins to fall, also in a run that continues there: a function of the step."""
    pytest.importorskip("torchao")
    settings = ["training.bf16=true", "speed.fp8=tensorwise", "speed.bf16_decay=true"]
    settings += [section_of({**LLAMA, "vocab_size": 1024}), "training.lr_scheduler_type=warmup_stable_decay"]
    settings += [
        "training.lr_scheduler_kwargs={}",
        "budget.tokens_per_step=1024",
        "budget.tokens=10240",
        "budget.decay_tokens=4096",
    ]
    callback = Bf16InDecay(load_recipe("features/gpt2", [*settings, "training.warmup_steps=2"]), float)
    model, plain = (build_model(LLAMA, TOKENIZER, arguments).train() for _ in range(2))
    convert_products(model, TENSORWISE)
    compile_model(model, Speed(compile="blocks", compile_backend="eager"))
    same, graphs = [], []
    for step in [*range(10), 6]:
        callback.on_step_begin(None, SimpleNamespace(global_step=step, max_steps=10), None, model)
        same.append(torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits))
        graphs.append(counters["stats"]["unique_graphs"])
    assert same == [*[False] * 6, *[True] * 5]
    assert graphs == [*[1] * 6, *[2] * 5]


def test_hardware_without_it_is_one_line(monkeypatch):
    """Bad input: no GPU, or one from before Hopper."""
    rowwise = Speed(fp8="rowwise")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "9.0 (Hopper) or later, and there is no GPU here" in refusal(check_speed, rowwise)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    assert "this one has 8.0" in refusal(check_speed, rowwise)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    check_speed(rowwise)


DECAYS = "speed.fp8=tensorwise speed.bf16_decay=true training.lr_scheduler_kwargs={}"
UNKEPT = {
    "speed.bf16_blocks=[1,1]": "speed.bf16_blocks: is beside fp8; set speed.fp8",
    'speed.bf16_layers=["mlp"]': "speed.bf16_layers: is beside fp8",
    f"{DECAYS} training.lr_scheduler_type=linear": "speed.bf16_decay: is for warmup_stable_decay, whose",
    'speed.fp8=tensorwise speed.bf16_layers=["q_prj"]': 'bf16_layers.0: is "q_prj", which matches none of the 196',
    "speed.fp8=tensorwise speed.bf16_blocks=[14,14]": "leaves none of the 28 blocks in fp8; --set speed.fp8=none",
    "speed.fp8=tensorwise speed.bf16_blocks=[1]": "speed.bf16_blocks: ",
}


@pytest.mark.parametrize("typed", UNKEPT)
def test_what_cannot_stay_in_bf16_is_one_line(typed):
    settings = ["training.bf16=true", *typed.split()]
    said = refusal(lambda: fp8_tensors(load_recipe_and_ds_config("qk-norm", settings, "zero3")[0]))
    assert UNKEPT[typed] in said


def test_a_missing_package_is_one_line(arguments, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torchao.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match=r"speed\.fp8 needs the package 'torchao.*pip install torchao"):
        convert_products(build_model(LLAMA, TOKENIZER, arguments), TENSORWISE)
