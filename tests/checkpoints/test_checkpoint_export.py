"""A checkpoint alone, without its ranks and DeepSpeed, is the model: exported offline, demoted, its changes told."""

import json
import shutil
import sys

import pytest
from transformers import AutoModelForCausalLM

from pretraining.checkpoints.format import read_marker
from pretraining.runtime.run_folder import RunFolder
from tests.gear.runs import Run, completed, execute


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_the_export_of_the_last_checkpoint_is_the_runs_own(workshop, tmp_path, stage):
    """Same weights and config to the byte, from two ranks' fragments; the card tells the step."""
    run = workshop.run(stage)
    verb = ["-m", "pretraining.checkpoints", "export", run.folder, "--to", tmp_path / "export"]
    completed(["forked", "0", *verb])
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "export" / name).read_bytes() == (run.dir.export / name).read_bytes()
    assert "| step | 10 |" in (tmp_path / "export" / "README.md").read_text()


def test_pruning_can_keep_the_weights(workshop, tmp_path):
    """`--demote_to_weights`: what goes stays as a model that loads."""
    run = RunFolder(shutil.copytree(workshop.plain().folder, tmp_path / "run"))
    options = ["--keep_last", "1", "--demote_to_weights", "--yes"]
    completed(["forked", "0", "-m", "pretraining.checkpoints", "prune", run.path, *options])
    assert not run.checkpoint(8).exists() and run.checkpoint(10).exists()
    model = AutoModelForCausalLM.from_pretrained(run.weights(8))
    assert sum(p.numel() for p in model.parameters()) > 0 and not list(run.path.glob("*.partial"))


def test_an_accepted_change_is_recorded(workshop, tmp_path):
    """Steps twice as large from step 8 on: refused, then accepted by name; event, marker, budget and position tell."""
    shutil.copytree(workshop.plain().folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "export")
    shutil.rmtree(tmp_path / "run" / "checkpoint-10")
    setting = ("budget.tokens_per_step=1024",)
    command = workshop.command(tmp_path / "run", "null", 1, "plain", setting)
    refused = execute(command)
    assert refused.code == 2 and "--allow_change budget.tokens_per_step" in refused.stderr
    finished = completed([*command, "--allow_change", "budget.tokens_per_step"])
    run = Run(tmp_path / "run")
    change = {"step": 8, "key": "budget.tokens_per_step", "from": 512, "to": 1024}
    told = [row for row in run.events if row["event"] == "change_accepted"]
    assert [{key: row[key] for key in change} for row in told] == [change]
    assert "accepted: budget.tokens_per_step is 1024 from step 8 on, and was 512" in finished.stdout
    assert "the learning rate stays where it was" in finished.stdout
    marker = read_marker(run.dir.checkpoint(9))
    assert marker["changes"] == [change] and (marker["tokens"], marker["samples"]) == (5120, 80)
    assert [row["step"] for row in run.training_rows] == list(range(1, 10))
    assert json.loads(run.dir.recipe.read_text())["budget"]["tokens_per_step"] == 1024
    completed([sys.executable, "-m", "pretraining.checkpoints", "verify", run.folder])
