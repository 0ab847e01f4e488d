"""Clipping by value and adaptive clipping: their papers' formulas, and the same at every stage."""

import contextlib
import math

import deepspeed
import pytest
import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage3

from pretraining.recipe import load_recipe
from pretraining.training.gradients import Clipping, UnitDivision
from pretraining.upstream.deepspeed import read_norm_once
from tests.gear.on_ranks import on_ranks
from tests.gear.runs import MODELS
from tests.training.test_muon import built

CLIPPED = ("optimizer.adaptive_clip=0.002", "optimizer.clip_value=0.0005", "training.max_grad_norm=0")


def clipped(model, *settings: str) -> list[torch.Tensor]:
    """Gradients as the optimizer's step finds them, drawn at random with some far too long."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(1)
    for parameter in model.parameters():
        sizes = torch.rand(parameter.shape[-1:], dtype=torch.float64) ** 4
        parameter.grad = torch.randn_like(parameter) * sizes
    before = [parameter.grad.clone() for parameter in model.parameters()]
    Clipping(load_recipe("features/gpt2", settings)).begin(model, optimizer)
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
    Clipping(load_recipe("features/gpt2")).on_train_begin(None, None, None, model, optimizer)
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    "shape, transposed",
    [((7,), False), ((7,), True), ((5, 3), False), ((5, 3), True), ((2, 4, 3), False), ((2, 4, 3), True)],
)
def test_every_slice_knows_its_units(shape, transposed):
    """However a parameter is cut, each element is in one block, under the unit that the formula gives it."""
    numel = math.prod(shape)
    table, units = torch.arange(numel).reshape(shape), UnitDivision.of(shape, transposed)
    if len(shape) < 2:
        expected = torch.zeros(numel, dtype=torch.int64)
    else:
        by_row = torch.arange(math.prod(shape[:-1])).repeat_interleave(shape[-1])
        by_column = table // math.prod(shape[-2:]) * shape[-1] + table % shape[-1]
        expected = by_column.ravel() if transposed else by_row
    assert units.count == expected.max() + 1
    for start in range(numel):
        for size in range(1, numel - start + 1):
            found = torch.full((size,), -1)
            for block in units.parts(start, size):
                inside = torch.arange(block.rows * block.columns).reshape(block.rows, block.columns)
                among = inside % block.columns if transposed and len(shape) > 1 else inside // block.columns
                found[block.offset : block.offset + inside.numel()] = block.first + among.ravel()
            assert torch.equal(found, expected[start : start + size]), (start, size)


THEIRS = (bf16_optimizer.get_global_norm_of_tensors, stage3.combine_grad_norm_groups)
STAGES = (1, 2, 3)
STEPS, NOT_FINITE = 4, 2


def stepped(stage: int, in_bf16: bool, reads_once: bool) -> list:
    """[norms, whether each step was refused, weights after the last] of a model with clipping, one step not finite."""
    bf16_optimizer.get_global_norm_of_tensors, stage3.combine_grad_norm_groups = THEIRS
    torch.manual_seed(1)
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).to(dtype)
    matrices, vectors = ([p for p in model.parameters() if p.ndim == ndim] for ndim in (2, 1))
    groups = [{"params": matrices}, {"params": vectors}]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.05,
        "bf16": {"enabled": in_bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 50_000},
    }
    adamw = torch.optim.AdamW(groups)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=adamw, config=config)
    if reads_once:
        read_norm_once(engine.optimizer)
    norms, refused = [], []
    for step in range(STEPS):
        inputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
        inputs[0, 0] += float("nan") if step == NOT_FINITE else 0.0
        engine.backward(engine(inputs).float().square().mean())
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
        refused.append(bool(optimizer.overflow))
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters) if stage == 3 else contextlib.nullcontext():
        weights = [parameter.tolist() for parameter in parameters]
    engine.destroy()
    return [norms, refused, weights]


def stepped_both_ways() -> dict[str, list]:
    """{stage and type: what `stepped` returns of their way and of ours}."""
    return {
        f"zero{stage}{' in bf16' * in_bf16}": [stepped(stage, in_bf16, once) for once in (False, True)]
        for stage in STAGES
        for in_bf16 in (True, False)
    }


def test_the_norm_that_is_read_once_makes_the_same_steps():
    """To the last digit at every stage, and a step that is not finite is refused as DeepSpeed refuses it."""
    (found,) = on_ranks(1, stepped_both_ways)
    for name, (theirs, ours) in found.items():
        assert ours == theirs, name
        assert ours[1] == [False, False, True, False], name
