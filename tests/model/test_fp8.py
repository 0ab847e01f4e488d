"""fp8 products: the blocks' linear layers and nothing else, close to them; refused where they cannot be."""

import sys

import pytest
import torch

from pretraining.errors import UserError
from pretraining.model.build import build_model, check_speed, convert_products
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.recipe.sections import Speed
from tests.gear.runs import LLAMA
from tests.model.test_compiling import IDS, TOKENIZER


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_converted_model_is_the_model_within_fp8_s_rounding(arguments, name):
    """Emulated: the same parameters under the same names, logits and gradients a few percent off, the head exact."""
    pytest.importorskip("torchao")
    whole = build_model(LLAMA, TOKENIZER, arguments).bfloat16()
    fp8 = build_model(LLAMA, TOKENIZER, arguments).bfloat16()
    assert convert_products(fp8, name, emulate=True) == 2 * 7
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
    convert_products(fp8, "rowwise", emulate=True)
    with torch.no_grad():
        assert not torch.equal(fp8.train()(input_ids=IDS).logits, whole.train()(input_ids=IDS).logits)
        assert torch.equal(fp8.eval()(input_ids=IDS).logits, whole.eval()(input_ids=IDS).logits)


def refusal(speed: str) -> str:
    with pytest.raises(UserError) as error:
        check_speed(Speed(fp8=speed))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_hardware_without_it_is_one_line(monkeypatch):
    """Bad input: no GPU, or one from before Hopper."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "9.0 (Hopper) or later, and there is no GPU here" in refusal("rowwise")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    assert "this one has 8.0" in refusal("rowwise")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    check_speed(Speed(fp8="rowwise"))


UNFIT = {
    "gpt2": ("features/gpt2", "zero2", "gpt2 has convolutions"),
    "fp32": ("qk-norm", "zero2", "goes with training.bf16"),
    "sharded weights": ("qk-norm", "zero3", "use --deepspeed zero1 or zero2"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_it_does_not_go_with_is_one_line(name):
    """Bad input: the plan refuses it as train.py does."""
    recipe, stage, words = UNFIT[name]
    in_bf16 = str(name != "fp32").lower()
    with pytest.raises(UserError, match=words) as error:
        load_recipe_and_ds_config(recipe, ["speed.fp8=tensorwise", f"training.bf16={in_bf16}"], stage)
    assert "\n" not in str(error.value)


def test_a_missing_package_is_one_line(arguments, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torchao.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match=r"speed\.fp8 needs the package 'torchao.*pip install torchao"):
        convert_products(build_model(LLAMA, TOKENIZER, arguments), "rowwise")
