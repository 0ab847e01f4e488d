"""Clipping by value and adaptive clipping: their papers' formulas, at the stages that can do them."""

import json

import pytest
import torch

from pretraining.errors import UserError
from pretraining.recipe import load_recipe
from pretraining.refusals import load_run
from pretraining.training.optimizers import choose_clipping
from tests.runs import MODELS, SMALL_RECIPE, execute
from tests.test_muon import built

VALUE = ("optimizer.clip_value=0.0005", "training.max_grad_norm=0")


def clipped(model, *settings: str) -> list[torch.Tensor]:
    """Gradients as the optimizer's step finds them, drawn at random with some far too long."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = (
            torch.randn_like(parameter) * torch.rand(parameter.shape[-1:], dtype=torch.float64) ** 4
        )
    before = [parameter.grad.clone() for parameter in model.parameters()]
    choose_clipping(load_recipe("tiny", settings))(model, optimizer)
    optimizer.step()
    return before


def adaptive_of_the_paper(weight: torch.Tensor, gradient: torch.Tensor, ratio: float) -> torch.Tensor:
    """Brock et al. 2021, equation 3, for one unit."""
    longest = ratio * max(weight.norm().item(), 1e-3)
    return gradient if gradient.norm() <= longest else gradient * longest / gradient.norm()


def units(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """What leads into one output; a row of a table; all of a vector."""
    if tensor.ndim < 2:
        return [tensor]
    if ".h." in name:  # GPT-2 keeps its matrices [inputs, outputs]
        return list(tensor.T)
    return list(tensor.reshape(-1, tensor.shape[-1]))


@pytest.mark.parametrize("name", MODELS)
def test_adaptive_clipping_is_the_paper_s(name):
    """fp64, unit by unit; the head is left alone, and some units are within bounds."""
    model = built(name, tie_word_embeddings=False)
    before, kept, cut = clipped(model, "optimizer.adaptive_clip=2.0"), 0, 0
    for (key, parameter), gradient in zip(model.named_parameters(), before, strict=True):
        if key == "lm_head.weight":
            assert torch.equal(parameter.grad, gradient)
            continue
        triples = zip(units(key, parameter), units(key, gradient), units(key, parameter.grad), strict=True)
        for weight, original, found in triples:
            expected = adaptive_of_the_paper(weight.detach(), original, 2.0)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-14)
            kept, cut = kept + torch.equal(original, expected), cut + (not torch.equal(original, expected))
    assert kept > 2 and cut > 2


def test_clipping_by_value_cuts_every_element():
    model = built("gpt2")
    before = clipped(model, "optimizer.clip_value=0.1")
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient.clamp(-0.1, 0.1))


def test_nothing_more_is_clipped_unless_asked():
    assert choose_clipping(load_recipe("tiny")) is None


REFUSED = {
    ("zero2", "optimizer.adaptive_clip=0.01"): "use --deepspeed null or zero0, or clip_value",
    ("zero3", "optimizer.adaptive_clip=0.01"): "ZeRO-3 gives the optimizer slices",
    ("zero3_offload", "optimizer.clip_value=1.0"): "a ds_config without offload_optimizer",
}


@pytest.mark.parametrize("stage, setting", REFUSED)
def test_a_stage_that_cannot_is_refused_by_name(stage, setting):
    with pytest.raises(UserError) as error:
        load_run("tiny", [setting], stage)
    assert REFUSED[stage, setting] in str(error.value) and "\n" not in str(error.value)


def test_the_stage_does_not_change_what_is_clipped_by_value(workshop):
    """On sharded gradients as on whole ones; and it is at work."""
    plain, sharded = workshop.plain(VALUE).losses, workshop.run("zero3", settings=VALUE).losses
    assert max(abs(a - b) for a, b in zip(plain, sharded, strict=True)) <= 1e-4
    assert SMALL_RECIPE["training"]["max_grad_norm"] > 0
    assert max(abs(a - b) for a, b in zip(plain, workshop.plain().losses, strict=True)) > 1e-3


def test_the_norm_that_is_read_once_makes_the_same_steps(tmp_path):
    """To the last digit at every stage, and a step that is not finite is refused as DeepSpeed refuses it."""
    finished = execute(["forked", "1", "-m", "tests.norms_read_once", tmp_path / "found"])
    assert finished.code == 0, finished.output
    for name, (theirs, ours) in json.loads((tmp_path / "found").read_text()).items():
        assert ours == theirs, name
        assert ours[1] == [False, False, True, False], name
