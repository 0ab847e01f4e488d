"""Promise: nothing committed is lost. A save comes before the validation of its step, which then may die."""

import json
from pathlib import Path

import pytest

from pretraining.checkpoints.background import CheckpointWriter
from pretraining.checkpoints.format import MARKER, commit_checkpoint, read_marker
from pretraining.checkpoints.retention import Retention
from pretraining.recipe.sections import Checkpoints
from pretraining.runtime.run_folder import RunFolder
from tests.gear.runs import REPOSITORY, Run, committed, completed, execute, start_and_kill
from tests.gear.scored_tasks import write_items
from tests.gear.small_checkpoints import identity_of

DYING = f"extensions={json.dumps([str(REPOSITORY / 'tests' / 'gear' / 'dying.py')])}"
EVERY_4 = (DYING, "training.eval_steps=4", "training.save_steps=4")
PLATEAU = (
    DYING,
    "training.eval_steps=2",
    "training.lr_scheduler_type=reduce_lr_on_plateau",
    'training.lr_scheduler_kwargs={"factor": 0.5, "patience": 0, "threshold": 0.5}',
    "training.warmup_steps=0",
    "checkpoints.background=false",
)
"""A rate that each validation halves: one that is left out, or counted twice, changes every later loss."""
CASES = {
    # where it runs, its settings; what dies and in which call, after how many steps
    "validation": ("zero3", 2, EVERY_4, "validation:2", 8),
    "sample, a rate that follows the loss": ("null", 1, PLATEAU, "sample:4", 8),
    "sample at steps of its own": ("null", 1, (*EVERY_4, "evaluation.sample_steps=4"), "sample:2", 8),
    "task, one save at the end": ("null", 1, (DYING, "training.save_strategy=epoch"), "task:2", 10),
}


def same_run(run: Run, reference: Run) -> None:
    """Losses, rates, validations and samples to the last digit, each once, and the same numbers in markers."""
    assert run.losses == reference.losses and run.samples == reference.samples
    rates, validations = (
        [[(row["step"], row[key]) for row in getattr(each, rows)] for each in (run, reference)]
        for rows, key in (("training_rows", "train/learning_rate"), ("validation_rows", "eval/loss"))
    )
    assert rates[0] == rates[1] and validations[0] == validations[1]
    assert committed(run.folder) == committed(reference.folder)
    for name in committed(run.folder):
        ours, theirs = (read_marker(each.folder / name)["metrics"] for each in (run, reference))
        assert ours == theirs and "eval_loss" in ours, name


@pytest.mark.parametrize("case", CASES)
def test_an_evaluation_that_raises_costs_no_step(workshop, tmp_path, case):
    """The checkpoint of its step counts although it was still being written; the next start repeats the evaluation."""
    stage, ranks, settings, dies, step = CASES[case]
    if "task" in dies:
        items = write_items(workshop.folder / "dying_items.jsonl", 4)
        settings = (*settings, f"evaluation.hellaswag={items}")
    choices = (stage, ranks, "forked" if ranks > 1 else "plain", settings)
    output = tmp_path / "run"
    died = execute(workshop.command(output, *choices), DIES=f"{dies}:raises")
    assert died.code and "died on purpose" in died.output
    assert committed(output)[0] == f"checkpoint-{step}"
    completed(workshop.command(output, *choices))
    run = Run(output)
    assert [e["step"] for e in run.events if e["event"] in ("start", "resume")] == [0, step]
    same_run(run, workshop.run(*choices))


def test_killed_inside_a_validation_it_continues_from_its_step(workshop, tmp_path):
    """SIGKILL to two ranks under ZeRO-3, once the checkpoint is there."""
    choices, output = ("zero3", 2, "forked", EVERY_4), tmp_path / "run"
    start_and_kill(
        workshop.command(output, *choices),
        (output / "checkpoint-8" / MARKER).exists,
        DIES="validation:2:sleeps",
    )
    assert "eval_loss" not in read_marker(output / "checkpoint-8")["metrics"]
    completed(workshop.command(output, *choices))
    run = Run(output)
    assert next(e["checkpoint"] for e in run.events if e["event"] == "resume") == "checkpoint-8"
    same_run(run, workshop.run(*choices))


def test_a_resume_knows_what_was_measured_after_the_save(workshop, tmp_path):
    """The marker alone has it: no second validation, its row stays, and the rate is the one after it."""
    whole = workshop.run("null", 1, "plain", PLATEAU)
    resumed = workshop.continued(whole, tmp_path / "run", settings=PLATEAU)
    state = json.loads((whole.dir.checkpoint(8) / "trainer_state.json").read_text())
    assert [row["step"] for row in state["log_history"] if "eval_loss" in row] == [2, 4, 6]
    same_run(resumed, whole)
    files = (run.dir.checkpoint(10) / "trainer_state.json" for run in (resumed, whole))
    histories = [json.loads(file.read_text())["log_history"] for file in files]
    assert histories[0] == histories[1]


@pytest.mark.parametrize("background", [True, False])
def test_no_better_checkpoint_goes_before_the_new_one_is_measured(tmp_path, background):
    """keep_last 1 and keep_best 1: the new one counts at once; a worse one goes once both are measured."""
    run, identity, uploaded = RunFolder(tmp_path), identity_of(), []
    writer = CheckpointWriter(
        run,
        commit_checkpoint,
        after_commit=lambda: Retention(Checkpoints(keep_last=1, keep_best=1)).apply(run),
        on_committed=uploaded.append,
        background=background,
    )
    writer.validation_follows = True
    expected = {1: [1], 2: [2, 1], 3: [3], 4: [4, 3]}
    for step, loss in zip(expected, (2.0, 3.0, 1.0, float("nan")), strict=True):
        before = committed(tmp_path)
        writer.save(step, {}, marker=identity.marker_at(step, [{"step": step, "loss": 0.5}]))
        writer.wait_for_marker()
        writer.poll()
        assert committed(tmp_path) == [f"checkpoint-{step}", *before]
        assert len(uploaded) == step - 1
        assert writer.add_validation({"eval_loss": loss}) and not writer.add_validation({})
        writer.wait()
        assert committed(tmp_path) == [f"checkpoint-{each}" for each in expected[step]]
        metrics = read_marker(run.checkpoint(step))["metrics"]
        assert metrics["loss"] == 0.5 and repr(metrics["eval_loss"]) == repr(loss)
    assert [Path(each).name for each in uploaded] == [f"checkpoint-{step}" for step in expected]
