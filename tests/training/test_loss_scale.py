"""fp16 with DeepSpeed's loss scaling, run for real: overflows are counted, no spikes, and a resume keeps the scale."""

import json

import pytest

from pretraining.ds_config import load_ds_config
from tests.gear.runs import Run, completed

HALF = ("training.fp16=true", "training.bf16=false")


@pytest.fixture(scope="module")
def far_too_high(shared):
    """ds_configs/zero2_fp16.json with a scale that overflows, and one that rises again after two steps."""
    accelerator = pytest.importorskip("deepspeed.accelerator")
    if not accelerator.get_accelerator().is_fp16_supported():
        pytest.skip("this processor does not compute in fp16")
    config = load_ds_config("zero2_fp16")
    config["fp16"] |= {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 2}
    path = shared / "far_too_high.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_overflows_lower_the_scale_and_are_no_spikes(workshop, far_too_high):
    run = workshop.run(far_too_high, settings=HALF)
    rows = run.training_rows
    overflows = [row["stability/overflow_steps"] for row in rows]
    assert 0 < overflows[-1] < len(rows) and overflows == sorted(overflows)
    for before, row in zip([None, *rows], rows, strict=False):
        overflowed = row["stability/overflow_steps"] > (before["stability/overflow_steps"] if before else 0)
        scale, found = before["stability/loss_scale"] if before else 2.0**24, row["stability/loss_scale"]
        assert found == scale / 2 if overflowed else found >= scale
    assert rows[-1]["stability/refused_steps"] == overflows[-1]
    assert rows[-1]["stability/spikes"] == rows[-1]["stability/non_finite_steps"] == 0
    assert not {"spike", "non_finite", "gradient_explosion"} & {event["event"] for event in run.events}


def test_a_resume_keeps_the_scaler_s_state(workshop, far_too_high, tmp_path):
    """To the last digit: the same losses, scales and counts as the run that went on."""
    run = workshop.run(far_too_high, settings=HALF)
    more = ("--resume", run.folder / "checkpoint-8")
    completed(workshop.command(tmp_path / "again", far_too_high, settings=HALF, more=more))
    again = Run(tmp_path / "again").training_rows
    for theirs, ours in zip(run.training_rows[-len(again) :], again, strict=True):
        for key in ("step", "train/loss", "stability/loss_scale", "stability/overflow_steps"):
            assert ours[key] == theirs[key], key


def test_the_shipped_scaling_reaches_the_loss_of_fp32(workshop, far_too_high):
    """Nothing overflows at its scale on this small run, and what fp16 rounds off is small."""
    rows = workshop.run("zero2_fp16", settings=HALF).training_rows
    assert {row["stability/loss_scale"] for row in rows} == {2.0**16}
    losses = workshop.plain().losses
    assert max(abs(row["train/loss"] - loss) for row, loss in zip(rows, losses, strict=True)) < 0.02
