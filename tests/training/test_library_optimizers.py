"""Promise: the curve belongs to the recipe. Optimizers of other packages (`training.optim`), where each is allowed."""

import json

import pytest

pytest.importorskip("bitsandbytes")
SLICED = {"lion_32bit": ("zero1", "zero2", "zero3")}
"""Steps a weight by itself, so that ZeRO may hand it slices."""
WHOLE = {"adafactor": ("zero0",), "adamw_8bit": ("zero0",)}
CASES = [(optim, stage) for optim, stages in {**SLICED, **WHOLE}.items() for stage in stages]


def settings_of(optim: str) -> tuple:
    return (f"training.optim={optim}", "training.learning_rate=0.001", "training.eval_strategy=no")


@pytest.mark.parametrize("optim, stage", CASES, ids=[f"{optim}-{stage}" for optim, stage in CASES])
def test_the_stage_does_not_change_the_curve(workshop, optim, stage):
    """fp32, two ranks: the losses of a single plain process within 1e-4."""
    plain, ours = workshop.plain(settings_of(optim)), workshop.run(stage, settings=settings_of(optim))
    assert ours.losses == pytest.approx(plain.losses, abs=1e-4)
    assert plain.losses[-1] < plain.losses[0] - 0.1
    assert ours.saved_state_bytes == json.loads(ours.dir.plan.read_text())["checkpoint_bytes"]
