"""A checkpoint alone, without its ranks and DeepSpeed, is the model: exported offline, demoted, its changes told."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pretraining.checkpoints.__main__ import main
from pretraining.checkpoints.format import read_marker, write_marker
from pretraining.runtime.run_folder import RunFolder
from tests.gear.finished_data import refusal
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


def weights_of(folder) -> dict:
    return load_file(folder / "model.safetensors")


def test_merged_weights_are_the_average_of_their_parts(workshop, tmp_path):
    """By hand from the exports of each part; a part of which only weights are left counts as its checkpoint did."""
    run, verb = shutil.copytree(workshop.plain().folder, tmp_path / "run"), ["-m", "pretraining.checkpoints"]
    for step in ("8", "10"):
        completed(["forked", "0", *verb, "export", run, "--step", step, "--to", tmp_path / step])
    data = ["--data_dir", workshop.data, "--validate", "--json"]
    said = completed(["forked", "0", *verb, "merge", run, "--last", "2", *data]).stdout
    answer = json.loads(said[said.index("{") :])
    parts = [weights_of(tmp_path / step) for step in ("8", "10")]
    assert [(each["step"], each["share"]) for each in answer["parts"]] == [(8, 0.5), (10, 0.5)]
    for name, merged in weights_of(run / "merged-8-10").items():
        torch.testing.assert_close(merged, (parts[0][name] + parts[1][name]) / 2, rtol=1e-6, atol=1e-8)
    before, last = (each["loss"] for each in answer["parts"])
    assert before is None and 0 < abs(answer["loss"] - last) < 0.5  # step 8 was not validated
    assert "| averaged checkpoints | 2 |" in (run / "merged-8-10" / "README.md").read_text()
    # as retention leaves it
    completed(["forked", "0", *verb, "prune", run, "--keep_last", "1", "--demote_to_weights", "--yes"])
    chosen = ["--steps", "10,8", "--weights", "1,3", "--to", tmp_path / "weighted"]
    shown = completed(["forked", "0", *verb, "merge", run, *chosen]).stdout
    measure = f"-m pretraining.evaluation {tmp_path / 'weighted'} --of {run}"
    assert "weights-8" in shown and f"measure it: python {measure}\n" in shown
    command = ["forked", "0", *measure.split(), "--data_dir", workshop.data, "--json", "--no-sample"]
    assert abs(json.loads(completed(command).stdout.splitlines()[-1])["loss"] - last) < 0.5
    for name, merged in weights_of(tmp_path / "weighted").items():
        torch.testing.assert_close(merged, (parts[0][name] + 3 * parts[1][name]) / 4, rtol=1e-6, atol=1e-8)


UNMERGED = {
    "more than there are": (["--last", "3"], "--last 3: {run} has 2: 8, 10"),
    "one": (["--last", "1"], "one checkpoint is no average; `export` writes its weights"),
    "no such step": (["--steps", "8,9"], "--steps 8,9: is not a list of different steps that are there"),
    "a digit that is no number": (["--steps", "8,\u00b2"], "is not a list of different steps that are there"),
    "no sum": (["--last", "2", "--weights", "1e308,1e308"], "needs 2 numbers, one a part, not all 0"),
    "too few weights": (["--last", "2", "--weights", "1"], "--weights 1: needs 2 numbers, one a part"),
    "no number": (["--last", "2", "--weights", "1,x"], "--weights 1,x: "),
    "written before": (["--last", "2", "--to", "{run}"], "{run}: is there already"),
}


@pytest.mark.parametrize("case", UNMERGED)
def test_what_cannot_be_merged_is_one_line(case, workshop):
    """Bad input: nothing is written."""
    run = workshop.plain().folder
    words, message = UNMERGED[case]
    said = refusal(main, ["merge", str(run), *(word.format(run=run) for word in words)])
    assert message.format(run=run) in said and not list(run.glob("merged-*"))


def test_a_checkpoint_of_another_run_is_not_merged(workshop, tmp_path):
    """Promise: nothing wrong without a word. The same shape and step, of another rate; unless the run accepted it."""
    run = shutil.copytree(workshop.plain().folder, tmp_path / "run")
    earlier, last = (read_marker(run / f"checkpoint-{step}") for step in (8, 10))
    earlier["recipe"]["training"]["learning_rate"] *= 2
    write_marker(run / "checkpoint-8", without_head(earlier))
    said = "-8: is of another run, with another training.learning_rate;"
    assert said in refusal(main, ["merge", str(run), "--last", "2"]) and not list(run.glob("merged-*"))
    last["changes"] = [{"step": 8, "key": "training.learning_rate", "from": 1.0, "to": 0.5}]
    write_marker(run / "checkpoint-10", without_head(last))
    main(["merge", str(run), "--last", "2"])
    assert (run / "merged-8-10" / "model.safetensors").is_file()


def without_head(marker: dict) -> dict:
    """A marker without what `write_marker` adds."""
    return {key: value for key, value in marker.items() if key not in ("format", "checksum")}


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
