"""Gradient noise scale and norms by layer: true where the truth is known, and the same at every stage."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pretraining.training.gradients import (
    PREFIX,
    LayerNormsCallback,
    NoiseScale,
    NoiseScaleCallback,
    layer_of,
)
from tests.gear.runs import STEPS
from tests.training.test_curve import beginning

SCALE = "stability/gradient_noise_scale"
WIDTH, MICRO_BATCH, ACCUMULATION = 4096, 4, 8


def measured_noise_scale(spread: float, steps: int, seed: int = 0) -> float:
    """Of a loss |w - x|^2 / 2 with x normal around a point at distance 1: in samples, through the real callback."""
    torch.manual_seed(seed)
    model = nn.Linear(WIDTH, 1, bias=False)
    centre = model.weight.detach() - torch.nn.functional.normalize(torch.ones(1, WIDTH))
    callback = NoiseScaleCallback(every_steps=1, sequence_length=1)
    args = SimpleNamespace(gradient_accumulation_steps=ACCUMULATION, world_size=1)
    args.per_device_train_batch_size = MICRO_BATCH
    state, optimizer = SimpleNamespace(stateful_callbacks={}, global_step=0), SimpleNamespace()
    callback.on_train_begin(args, state, None, model=model, optimizer=optimizer)
    for _ in range(steps):
        callback.on_step_begin(args, state, None, optimizer=optimizer)
        for _ in range(ACCUMULATION):
            samples = centre + spread * torch.randn(MICRO_BATCH, WIDTH)
            loss = (model.weight - samples).square().sum() / 2
            (loss / MICRO_BATCH / ACCUMULATION).backward()
            callback.on_substep_end(args, state, None)
        callback.on_gradient_norm(model.weight.grad.norm())
        callback.on_step_end(args, state, None)
        model.zero_grad()
    logs = {"loss": 0.0}
    callback.on_log(args, state, None, logs=logs)
    return logs[SCALE]


@pytest.mark.parametrize("samples", [3.0, 40.0])
def test_the_noise_scale_is_the_analytic_one(samples):
    """tr(Sigma) = width * spread^2 over |G|^2 = 1, below and above the batch of 32: within 10 %."""
    spread = math.sqrt(samples / WIDTH)
    assert measured_noise_scale(spread, 30) == pytest.approx(samples, rel=0.1)


def test_the_estimator_is_exact_on_exact_norms():
    """E|G_B|^2 = |G|^2 + tr(Sigma) / B at both sizes gives back tr(Sigma) / |G|^2; what is not finite is left out."""
    scale = NoiseScale(512)
    assert scale.value is None
    scale.add(2.0 + 300 / 512, 2.0 + 300 / 4096, 4096)
    scale.add(2.0 + 300 / 512, 2.0 + 300 / 1024, 1024)  # a ramp's smaller step
    scale.add(math.nan, 1.0, 4096)
    assert scale.value == pytest.approx(150)
    resumed = NoiseScale(512, signal=scale.signal, noise=scale.noise)
    assert resumed.value == scale.value


def test_nothing_is_left_on_the_model_between_measurements():
    """The normal step costs nothing: no hook stays on a parameter or an optimizer."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise, layers = NoiseScaleCallback(1, 1), LayerNormsCallback(None, 1, lambda: None)
    args = SimpleNamespace(gradient_accumulation_steps=2, world_size=1, per_device_train_batch_size=1)
    state = SimpleNamespace(global_step=0, stateful_callbacks={})
    noise.on_train_begin(args, state, None, model, optimizer)
    for each in (noise, layers):
        each.on_step_begin(args, state, None, model=model, optimizer=optimizer)
    assert all(parameter._backward_hooks for parameter in model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    for each in (noise, layers):
        each.on_step_end(args, state, None)
    square = sum(parameter.grad.square().sum().item() for parameter in model.parameters())
    assert math.hypot(*layers.latest.values()) == pytest.approx(math.sqrt(square))
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks


def test_a_layer_is_a_block_or_a_module_outside_the_blocks():
    """Whatever the architecture calls its blocks."""
    assert layer_of("transformer.h.10.attn.c_attn.weight") == "transformer.h.10"
    assert layer_of("model.layers.3.mlp.experts.gate_up_proj") == "model.layers.3"
    assert layer_of("model.embed_tokens.weight") == "model.embed_tokens"


def test_a_run_has_them_on_the_steps_asked_for(workshop):
    """Every layer's norm, before clipping: together they are the norm of the whole gradient.

    Every stage has the columns of this plain process (test_one_curve.py).
    """
    for run in (workshop.plain(), workshop.run("zero0", settings=("training.max_grad_norm=0",))):
        rows = run.training_rows
        assert [row["step"] for row in rows if SCALE in row] == [2, 4, 6, 8, 10]
        assert [row["step"] for row in rows if beginning(row, (PREFIX,))] == [5, STEPS]
        norms = beginning(rows[4], (PREFIX,))
        assert {f"{PREFIX}transformer.h.1", f"{PREFIX}transformer.wte"} <= norms.keys()
        assert math.hypot(*norms.values()) == pytest.approx(rows[4]["train/grad_norm"], rel=1e-4)
