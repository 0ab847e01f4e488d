"""Schedule-free optimizers: the method of their paper, one curve at every stage, and the average wherever it counts."""

import pytest
import torch
from schedulefree import AdamWScheduleFree, SGDScheduleFree
from transformers import AutoModelForCausalLM

from pretraining.checkpoints.export import averaged
from pretraining.checkpoints.shard_files import CheckpointReader, assemble
from pretraining.data.prepared import open_prepared
from pretraining.evaluation.validation import Validation
from pretraining.recipe import load_recipe
from pretraining.recipe.training import AVERAGING, Z
from pretraining.training.optimizers import counting_by_tensor
from tests.gear.runs import completed

SETTINGS = (
    "training.optim=schedule_free_adamw",
    "training.lr_scheduler_type=constant_with_warmup",
    "training.lr_scheduler_kwargs={}",
)


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


def test_counts_of_the_package_alone_would_differ():
    """Why counts are kept by tensor: stepped in turn, a group's own rise twice as fast."""
    tensors = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    ours, theirs = (kind(tensors) for kind in (counting_by_tensor(AdamWScheduleFree), AdamWScheduleFree))
    theirs.train()
    for optimizer in (ours, theirs):
        for tensor in tensors:
            tensor.grad = torch.ones(2)
            optimizer.param_groups[0]["params"] = [tensor]
            optimizer.step()
    assert theirs.param_groups[0]["k"] == 2 and [ours.state[each]["k"] for each in tensors] == [1, 1]


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


def validation_losses(run) -> list[float]:
    return [row["eval/loss"] for row in run.validation_rows]


def test_validations_do_not_move_the_curve(workshop):
    """The average is measured, then training goes on from the very weights it had: losses equal to the digit."""
    seldom = workshop.plain((*SETTINGS, "training.eval_strategy=no"))
    assert seldom.losses == workshop.plain(SETTINGS).losses


@pytest.mark.parametrize("stage", ["null", "zero2", "zero3"])
def test_validation_export_and_checkpoint_agree_on_the_average(workshop, tmp_path, stage):
    """Promise: honest metrics. The loss that the run reports is that of the weights it hands out."""
    run = workshop.plain(SETTINGS) if stage == "null" else workshop.run(stage, settings=SETTINGS)
    model = AutoModelForCausalLM.from_pretrained(run.dir.export)
    recipe = load_recipe(workshop.recipe)
    data = open_prepared(recipe, workshop.data)
    measured = Validation(data.validation, recipe).measure(model)
    assert measured["loss"] == pytest.approx(validation_losses(run)[-1], abs=1e-5)

    verb = ["-m", "pretraining.checkpoints", "export", run.folder, "--to", tmp_path / "export"]
    completed(["forked", "0", *verb])
    reader = CheckpointReader(run.dir.checkpoint(10))
    offline = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    for name, ours in model.named_parameters():
        torch.testing.assert_close(ours, offline[name], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(ours.detach(), averaged(reader, name), rtol=1e-6, atol=1e-7)
        assert not torch.allclose(ours, assemble(reader, name), atol=1e-6), f"{name} is what was trained"
    reader.close()
