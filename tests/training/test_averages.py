"""The exponential average of the weights: that of a plain loop at every stage, and the same wherever it is read."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from pretraining.checkpoints.shard_files import CheckpointReader, assemble
from pretraining.data.prepared import open_prepared
from pretraining.evaluation.validation import Validation
from pretraining.recipe import load_recipe
from pretraining.recipe.optimizer import AVERAGE, Optimizer
from pretraining.training.optimizers import keep_average
from tests.gear.runs import EXPERTS, LLAMA, STEPS, Run, completed, execute, section_of
from tests.training.test_curve import IN_BF16

DECAY, EVERY = 0.8, 2
SETTINGS = (
    f"optimizer.average_decay={DECAY}",
    f"optimizer.average_steps={EVERY}",
    "training.save_steps=1",
    "checkpoints.keep_last=null",
)


def averages_of(run: Run, step: int = STEPS) -> dict[str, torch.Tensor]:
    """{parameter: average} in a checkpoint."""
    reader = CheckpointReader(run.dir.checkpoint(step))
    found = {name: assemble(reader, name, AVERAGE) for name in reader.parameters}
    reader.close()
    return found


def in_a_loop(run: Run) -> dict[str, torch.Tensor]:
    """The same from the weights after every step, in fp64."""
    averages: dict[str, torch.Tensor] = {}
    for step in range(1, STEPS + 1):
        reader = CheckpointReader(run.dir.checkpoint(step))
        for name in reader.parameters:
            weights = assemble(reader, name).double()
            if step == 1:
                averages[name] = weights
            elif step % EVERY == 0:
                averages[name] = DECAY**EVERY * averages[name] + (1 - DECAY**EVERY) * weights
        reader.close()
    return averages


def average_losses(run: Run) -> list[float]:
    return [row["eval/average_loss"] for row in run.validation_rows]


def same(ours: dict, theirs: dict, tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name].double(), theirs[name].double(), rtol=0, atol=tolerance)


def test_a_step_in_parts_moves_each_tensor_once():
    """As ZeRO-3 steps: one tensor of the group after the other; a step without gradients leaves the average."""
    tensors = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer, finished = torch.optim.SGD(tensors, lr=1.0), 0
    keep_average(optimizer, Optimizer(average_decay=0.75), lambda: finished)
    for finished in range(3):  # noqa: B007 (read by the optimizer)
        for tensor in tensors:
            tensor.grad = torch.ones(3)
            optimizer.param_groups[0]["params"] = [tensor]
            optimizer.step()
            tensor.grad = None
            optimizer.step()
    # weights 0, -1, -2: the average 0, then -0.25, then -0.6875
    for tensor in tensors:
        assert optimizer.state[tensor][AVERAGE].tolist() == [-0.6875] * 3


@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2_offload", "zero3"])
def test_the_stage_does_not_change_the_average(workshop, stage):
    """fp32, two ranks: within 1e-5 of a loop over the weights of a single plain process; its validations too."""
    plain, ours = workshop.plain(SETTINGS), workshop.run(stage, settings=SETTINGS)
    same(averages_of(ours), in_a_loop(plain), 1e-5)
    assert average_losses(ours) == pytest.approx(average_losses(plain), abs=1e-4)
    weights = [row["eval/loss"] for row in plain.validation_rows]
    assert all(abs(a - b) > 1e-3 for a, b in zip(average_losses(plain), weights, strict=True))


SPLIT = {
    "experts under Muon": (
        "zero3:expert=2",
        (section_of(EXPERTS), "optimizer.name=muon", "monitors.noise_scale_steps=null"),
    ),
    "layers in bf16": ("zero1:tensor=2", (section_of(LLAMA), *IN_BF16)),
}


@pytest.mark.parametrize("case", SPLIT)
def test_parts_of_layers_are_averaged_where_they_are(workshop, case):
    """Two ranks with other experts, or other parts of a layer: a loop over their weights, within rounding."""
    stage, settings = SPLIT[case]
    run = workshop.run(stage, settings=(*SETTINGS, *settings))
    same(averages_of(run), in_a_loop(run), 1e-6)
    assert 0 < abs(average_losses(run)[-1] - run.validation_rows[-1]["eval/loss"]) < 1


def test_the_curve_is_that_of_a_run_without_one(workshop):
    """Exchanged for the average and back in each validation: training goes on from the very bits."""
    run = workshop.plain(SETTINGS)
    assert run.losses == workshop.plain().losses
    assert [row["eval/loss"] for row in run.validation_rows] == [
        row["eval/loss"] for row in workshop.plain().validation_rows
    ]
    same(averages_of(run), in_a_loop(run), 1e-6)


@pytest.mark.parametrize(
    "stage, ranks, by, tolerance", [("zero3", 2, "forked", 0), ("null", 1, "plain", 1e-5)]
)
def test_a_resume_goes_on_with_it(workshop, tmp_path, stage, ranks, by, tolerance):
    """Promise: nothing committed is lost. Bit for bit at the same layout, and at another one within rounding."""
    whole, output = workshop.run("zero3", settings=SETTINGS), tmp_path / "run"
    shutil.copytree(
        whole.folder, output, ignore=shutil.ignore_patterns("checkpoint-9", "checkpoint-10", "export")
    )
    completed(workshop.command(output, stage, ranks, by, SETTINGS))
    same(averages_of(Run(output)), averages_of(whole), tolerance)
    assert average_losses(Run(output)) == pytest.approx(average_losses(whole), abs=tolerance)


def test_the_export_is_what_was_validated(workshop, tmp_path):
    """`export --average`, of ranks under ZeRO-3: its loss is the run's; a run without an average has none."""
    run, verb = (
        workshop.run("zero3", settings=SETTINGS),
        ["forked", "0", "-m", "pretraining.checkpoints", "export"],
    )
    completed([*verb, run.folder, "--average", "--to", tmp_path / "export"])
    recipe = load_recipe(workshop.recipe)
    validation = Validation(open_prepared(recipe, workshop.data).validation, recipe)
    measured = validation.measure(AutoModelForCausalLM.from_pretrained(tmp_path / "export"))
    assert measured["loss"] == pytest.approx(average_losses(run)[-1], abs=1e-5)
    card = (tmp_path / "export" / "README.md").read_text()
    assert "their exponential average" in card and f"{average_losses(run)[-1]:.4f}" in card
    without = execute([*verb, workshop.run("zero2").folder, "--average", "--to", tmp_path / "none"])
    assert without.code == 2 and "no average is kept there" in without.stderr
    assert without.stderr.count("\n") == 1 and not (tmp_path / "none").exists()
