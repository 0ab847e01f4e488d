"""The exponential average of the weights: that of a plain loop at every stage, and the same wherever it is read.

Schedule-free optimizers: the method of their paper, and their average wherever it counts.
"""

import shutil

import pytest
import torch
from schedulefree import SGDScheduleFree
from transformers import AutoModelForCausalLM

from pretraining.checkpoints.export import averaged
from pretraining.checkpoints.shard_files import CheckpointReader, assemble
from pretraining.data.prepared import open_prepared
from pretraining.evaluation.validation import Validation
from pretraining.recipe import load_recipe
from pretraining.recipe.optimizer import AVERAGE, Optimizer
from pretraining.recipe.training import AVERAGING, Z
from pretraining.training.optimizers import counting_by_tensor, keep_average
from tests.gear.runs import EXPERTS, LLAMA, STEPS, Run, completed, execute, section_of
from tests.training.test_curve import IN_BF16

DECAY, EVERY = 0.8, 2
SETTINGS = (
    f"optimizer.average_decay={DECAY}",
    f"optimizer.average_steps={EVERY}",
    "training.save_steps=1",
    "checkpoints.keep_last=null",
)


SCHEDULE_FREE = (
    "training.optim=schedule_free_adamw",
    "training.lr_scheduler_type=constant_with_warmup",
    "training.lr_scheduler_kwargs={}",
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


def loss_of(model, workshop) -> float:
    """By a validation of its own."""
    recipe = load_recipe(workshop.recipe)
    data = open_prepared(recipe, workshop.data)
    return Validation(data.validation, recipe).measure(model)["loss"]


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
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert loss_of(exported, workshop) == pytest.approx(average_losses(run)[-1], abs=1e-5)
    card = (tmp_path / "export" / "README.md").read_text()
    assert "their exponential average" in card and f"{average_losses(run)[-1]:.4f}" in card
    without = execute([*verb, workshop.run("zero2").folder, "--average", "--to", tmp_path / "none"])
    assert without.code == 2 and "no average is kept there" in without.stderr
    assert without.stderr.count("\n") == 1 and not (tmp_path / "none").exists()


def gradients(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, dtype=torch.float64, generator=generator) for name in "ab"}


def rate(step: int) -> float:
    """Of a warm-up over three steps."""
    return 0.1 * min(1.0, step / 3)


def of_the_paper(steps: int, beta: float) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """{name: (y, x)} after SGD, equations 3-5 of Defazio et al. 2024 with the average weighted by the rate squared."""
    found = {}
    for name in "ab":
        x = z = y = torch.ones(4, dtype=torch.float64)
        weights, highest = 0.0, 0.0
        for step in range(steps):
            highest = max(highest, rate(step))
            weights += highest**2
            share = highest**2 / weights if weights else 0.0
            z = z - rate(step) * gradients(step)[name]
            x = (1 - share) * x + share * z
            y = (1 - beta) * z + beta * x
        found[name] = y, x
    return found


@pytest.mark.parametrize("in_turn", [False, True], ids=["at once", "sub-groups in turn"])
def test_the_method_is_the_papers(in_turn):
    """fp64; also stepped as ZeRO-3 does it: a tensor of the group after the other, each by a step of its own."""
    tensors = {name: torch.nn.Parameter(torch.ones(4, dtype=torch.float64)) for name in "ab"}
    optimizer = counting_by_tensor(SGDScheduleFree)(tensors.values(), lr=0.1, momentum=0.9)
    for step in range(6):
        for name, gradient in gradients(step).items():
            tensors[name].grad = gradient
        (group,) = optimizer.param_groups
        group["lr"] = rate(step)
        for some in [[each] for each in tensors.values()] if in_turn else [list(tensors.values())]:
            group["params"] = some
            optimizer.step()
    for name, (y, x) in of_the_paper(6, 0.9).items():
        state, tensor = optimizer.state[tensors[name]], tensors[name].detach()
        torch.testing.assert_close(tensor, y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(tensor.lerp(state[Z], state[AVERAGING]), x, rtol=1e-12, atol=1e-12)


def test_another_momentum_takes_over_the_average():
    """A resume with another `adam_beta1`: weights as that one would have them, beside the same average."""
    tensors = [torch.nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2)]
    averages = []
    for tensor, momentum in zip(tensors, (0.5, 0.9), strict=True):
        optimizer = counting_by_tensor(SGDScheduleFree)([tensor], lr=0.1, momentum=0.9)
        for step in range(4):
            if step == 3:
                optimizer.param_groups[0].update(momentum=momentum, lr=0.0)
            tensor.grad = gradients(step)["a"]
            optimizer.step()
        state = optimizer.state[tensor]
        averages.append(tensor.detach().lerp(state[Z], state[AVERAGING]))
    torch.testing.assert_close(*averages, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(*tensors)


def test_validations_do_not_move_the_curve(workshop):
    """The average is measured, then training goes on from the very weights it had: losses equal to the digit."""
    seldom = workshop.plain((*SCHEDULE_FREE, "training.eval_strategy=no"))
    assert seldom.losses == workshop.plain(SCHEDULE_FREE).losses


@pytest.mark.parametrize("stage", ["null", "zero2", "zero3"])
def test_validation_export_and_checkpoint_agree_on_the_average(workshop, tmp_path, stage):
    """Promise: honest metrics. The loss that the run reports is that of the weights it hands out."""
    run = workshop.plain(SCHEDULE_FREE) if stage == "null" else workshop.run(stage, settings=SCHEDULE_FREE)
    model = AutoModelForCausalLM.from_pretrained(run.dir.export)
    assert loss_of(model, workshop) == pytest.approx(run.validation_rows[-1]["eval/loss"], abs=1e-5)
    verb = ["-m", "pretraining.checkpoints", "export", run.folder, "--to", tmp_path / "export"]
    completed(["forked", "0", *verb])
    reader = CheckpointReader(run.dir.checkpoint(10))
    offline = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    for name, ours in model.named_parameters():
        torch.testing.assert_close(ours, offline[name], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(ours.detach(), averaged(reader, name), rtol=1e-6, atol=1e-7)
        assert not torch.allclose(ours, assemble(reader, name), atol=1e-6), f"{name} is what was trained"
    reader.close()
