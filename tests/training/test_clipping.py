"""Clipping by value and adaptive clipping: their papers' formulas, and the same at every stage."""

import json
import math

import pytest
import torch

from pretraining.recipe import load_recipe
from pretraining.training.gradients import Clipping, UnitDivision
from tests.gear.runs import MODELS, execute
from tests.training.test_muon import built

CLIPPED = ("optimizer.adaptive_clip=0.002", "optimizer.clip_value=0.0005", "training.max_grad_norm=0")


def clipped(model, *settings: str) -> list[torch.Tensor]:
    """Gradients as the optimizer's step finds them, drawn at random with some far too long."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = (
            torch.randn_like(parameter) * torch.rand(parameter.shape[-1:], dtype=torch.float64) ** 4
        )
    before = [parameter.grad.clone() for parameter in model.parameters()]
    Clipping(load_recipe("tiny", settings)).begin(model, optimizer)
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
    model = built("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    Clipping(load_recipe("tiny")).on_train_begin(None, None, None, model, optimizer)
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 4, 3)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_slice_knows_its_units(shape, transposed):
    """However a parameter is cut, each element is in one block, under the unit that the formula gives it."""
    numel = math.prod(shape)
    table, units = torch.arange(numel).reshape(shape), UnitDivision.of(shape, transposed)
    if len(shape) < 2:
        expected = torch.zeros(numel, dtype=torch.int64)
    else:
        rows = math.prod(shape[:-1])
        by_row = torch.arange(rows).repeat_interleave(shape[-1])
        by_column = (torch.arange(rows) // shape[-2]).repeat_interleave(shape[-1]) * shape[
            -1
        ] + table.ravel() % shape[-1]
        expected = by_column if transposed else by_row
    assert units.count == expected.max() + 1
    for start in range(numel):
        for size in range(1, numel - start + 1):
            found = torch.full((size,), -1)
            for block in units.parts(start, size):
                inside = torch.arange(block.rows * block.columns).reshape(block.rows, block.columns)
                among = inside % block.columns if transposed and len(shape) > 1 else inside // block.columns
                found[block.offset : block.offset + inside.numel()] = block.first + among.ravel()
            assert torch.equal(found, expected[start : start + size]), (start, size)


@pytest.mark.parametrize("stage", ["zero1", "zero2_offload", "zero3"])
def test_the_stage_does_not_change_what_is_clipped(workshop, stage):
    """On slices of two ranks as on whole gradients of one, offloaded or not; and it is at work."""
    plain, sharded = workshop.plain(CLIPPED).losses, workshop.run(stage, settings=CLIPPED).losses
    assert max(abs(a - b) for a, b in zip(plain, sharded, strict=True)) <= 1e-5
    assert max(abs(a - b) for a, b in zip(plain, workshop.plain().losses, strict=True)) > 1e-3


def test_the_norm_that_is_read_once_makes_the_same_steps(tmp_path):
    """To the last digit at every stage, and a step that is not finite is refused as DeepSpeed refuses it."""
    finished = execute(["forked", "1", "-m", "tests.gear.norms_read_once", tmp_path / "found"])
    assert finished.code == 0, finished.output
    for name, (theirs, ours) in json.loads((tmp_path / "found").read_text()).items():
        assert ours == theirs, name
        assert ours[1] == [False, False, True, False], name
