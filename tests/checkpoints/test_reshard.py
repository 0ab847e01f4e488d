"""Promise: a checkpoint of any ZeRO stage on any ranks goes on at any other, with the curve intact."""

import shutil
from pathlib import Path

import pytest
import torch

from pretraining.checkpoints.export import reshard
from pretraining.checkpoints.folders import damage
from pretraining.checkpoints.shard_files import CheckpointReader, assemble
from tests.gear.runs import Run, completed, execute

# (saved by stage, ranks; resumed at stage, ranks): shrinking and growing, sharded and not, offloaded and not.
PAIRS = [
    ("zero2", 2, "null", 1),
    ("zero2", 2, "zero2_offload", 2),
    ("zero3", 2, "zero1", 4),
    ("zero3", 2, "zero3_offload", 1),
    ("zero3_hpz:hpz=2", 4, "zero1", 1),
    ("zero2", 2, "zero3_hpz:hpz=2", 4),
]


def unfinished(run: Run, folder: Path) -> Path:
    """A copy of a run as a kill after its checkpoint at 8 of 10 steps would have left it."""
    shutil.copytree(run.folder, folder)
    shutil.rmtree(folder / "export")
    shutil.rmtree(folder / "checkpoint-10")
    return folder


@pytest.mark.parametrize(("stage", "ranks", "to_stage", "to_ranks"), PAIRS)
def test_any_stage_on_any_ranks_goes_on_at_any_other(workshop, tmp_path, stage, ranks, to_stage, to_ranks):
    """The same command with another stage and other ranks: every later loss within 1e-5 of the unbroken run's."""
    whole = workshop.run(stage, ranks)
    folder = unfinished(whole, tmp_path / "run")
    by = "plain" if to_stage == "null" else "forked"
    completed(workshop.command(folder, to_stage, to_ranks, by))
    run = Run(folder)
    resume = next(event for event in run.events if event["event"] == "resume")
    assert (resume["checkpoint"], resume["world_size"]) == ("checkpoint-8", to_ranks)
    assert run.losses == pytest.approx(whole.losses, abs=1e-5)
    rates = [[row["train/learning_rate"] for row in each.training_rows] for each in (run, whole)]
    assert rates[0] == rates[1]


def test_the_command_writes_what_a_run_goes_on_from(workshop, tmp_path):
    """`reshard` refuses to overwrite, and its folder is a checkpoint for --resume PATH, also of as many ranks."""
    whole = workshop.run("zero2", 2)
    source, target = whole.folder / "checkpoint-8", tmp_path / "target"
    verb = ["-m", "pretraining.checkpoints", "reshard", source, "--files", "2", "--to", target]
    words = ["forked", "0", *verb]
    assert execute(words).code == 0 and damage(target) is None
    again = execute(words)
    assert (again.code, again.stderr.count("\n")) == (2, 1) and "is there already" in again.stderr
    # data and schedule go on after step 8 as its marker says, whatever the folder is called
    finished = completed(workshop.command(tmp_path / "run", "zero2", 2, more=("--resume", target)))
    assert "missing keys" not in finished.output
    assert [row["train/loss"] for row in Run(tmp_path / "run").training_rows] == whole.losses[8:]


def test_other_files_hold_the_same_checkpoint(workshop, tmp_path):
    """Rewritten into five files, and those into one: committed, whole, and every state the same bit for bit."""
    source = workshop.run("zero3", 2).folder / "checkpoint-8"
    reshard(source, tmp_path / "five", 5)
    reshard(tmp_path / "five", tmp_path / "one", 1)
    saved = CheckpointReader(source)
    for folder, ranks in ((tmp_path / "five", 5), (tmp_path / "one", 1)):
        assert damage(folder) is None
        rewritten = CheckpointReader(folder)
        assert rewritten.ranks == ranks and rewritten.state == saved.state
        for name in saved.parameters:
            assert rewritten.states(name) == saved.states(name) == ["exp_avg", "exp_avg_sq", "master"]
            for state in saved.states(name):
                assert torch.equal(assemble(rewritten, name, state), assemble(saved, name, state))
