"""Promise: nothing committed is lost. Kill anything at any moment; the same command continues."""

import json
import os
import shutil
from pathlib import Path

import pytest

from pretraining.checkpoints.choosing import choose_checkpoint
from pretraining.checkpoints.folders import step_of
from pretraining.checkpoints.format import read_marker, write_marker
from pretraining.errors import UserError
from pretraining.runtime.durable_files import append_row, read_rows
from pretraining.runtime.run_folder import RunFolder, keep_past_rows
from tests.gear.runs import Run, bytes_of, committed, completed, contents, execute, refused, start_and_kill
from tests.gear.small_checkpoints import save


def same_curve(run: Run, reference: Run) -> None:
    """Every loss to the last digit, every step once, the export's metrics and the samples too."""
    assert run.losses == reference.losses
    assert run.samples == reference.samples
    measured = ("step", "eval/loss", "eval/bits_per_byte", "eval/perplexity")
    rows = [[[row[key] for key in measured] for row in r.validation_rows] for r in (run, reference)]
    assert rows[0] == rows[1]


def test_killed_at_a_random_step_continues_the_same_curve(workshop, resumed):
    """SIGKILL to all processes of a two-rank ZeRO-2 run: every loss equals the uninterrupted run's exactly."""
    run, before = resumed
    same_curve(run, workshop.run("zero2"))
    kind = "resume" if before else "start"
    starts = [event for event in run.events if event["event"] in ("start", "resume")]
    assert [event["event"] for event in starts] == ["start", kind]
    assert starts[1]["checkpoint"] == (before[0] if before else None)
    assert run.events[-1]["event"] == "end"


def test_killed_inside_a_save_continues_from_the_checkpoint_before(workshop):
    """ZeRO-3, killed while checkpoint-8 is being written: it does not exist, checkpoint-4 does."""
    for attempt in range(5):  # the save takes milliseconds, and a busy machine may kill after it
        output = workshop.folder / f"killed-inside-a-save-{attempt}"
        command = workshop.command(output, "zero3")
        start_and_kill(command, (output / "checkpoint-8").exists)
        if "checkpoint-8" not in committed(output):
            break
    assert committed(output) == ["checkpoint-4"]
    completed(command)
    run = Run(output)
    same_curve(run, workshop.run("zero3"))
    found = [(event["event"], event.get("checkpoint")) for event in run.events]
    assert ("uncommitted_checkpoint_removed", "checkpoint-8") in found
    assert ("resume", "checkpoint-4") in found


def test_a_row_over_a_resume_is_the_row_of_an_unbroken_run(workshop, tmp_path):
    """Logged every three steps and at the last, saved at step 8: the row of step 9 holds the mean of all three losses.

    Killed after its closing validation, the run measures that again, and has one row of it.
    """
    settings = ("training.logging_steps=3", "training.logging_first_step=false", "training.eval_steps=3")
    whole = workshop.run("zero2", settings=settings)
    expected = _losses_by_step(whole)
    assert list(expected[0]) == [3, 6, 9, 10] and [step for step, _ in expected[1]] == [3, 6, 9, 10]
    output = tmp_path / "run"
    shutil.copytree(whole.folder, output)
    for lost in (("export",), ("export", "checkpoint-10")):
        for name in lost:
            shutil.rmtree(output / name)
        completed(workshop.command(output, "zero2", settings=settings))
        assert _losses_by_step(Run(output)) == expected
        assert Run(output).samples == whole.samples


def test_a_resume_makes_no_validation_that_the_undisturbed_run_does_not(workshop, tmp_path):
    """The rate follows the validations; none is due at step 4, and the one at the beginning is not made again."""
    settings = ("training.eval_steps=2", "training.eval_delay=6", "training.eval_on_start=true")
    settings += ("checkpoints.keep_last=5", "training.lr_scheduler_type=reduce_lr_on_plateau")
    settings += ('training.lr_scheduler_kwargs={"factor": 0.5, "patience": 0, "threshold": 0.5}',)
    whole = workshop.run("zero2", settings=settings)
    assert list(_losses_by_step(whole)[1]) and [row["step"] for row in whole.validation_rows] == [0, 6, 8, 10]
    output = tmp_path / "run"
    shutil.copytree(whole.folder, output)
    for lost in ("export", "checkpoint-10", "checkpoint-8"):
        shutil.rmtree(output / lost)
    completed(workshop.command(output, "zero2", settings=settings))
    same_curve(Run(output), whole)


def _losses_by_step(run: Run) -> tuple[dict, list]:
    training = {row["step"]: row["train/loss"] for row in run.training_rows}
    return training, [(row["step"], row["eval/loss"]) for row in run.validation_rows]


@pytest.fixture
def unfinished(workshop, tmp_path) -> Path:
    """A copy of the two-rank ZeRO-2 run as a kill before its export would have left it."""
    output = tmp_path / "unfinished"
    shutil.copytree(workshop.run("zero2").folder, output)
    shutil.rmtree(output / "export")
    return output


def test_damaged_and_uncommitted_checkpoints_are_passed_over(workshop, unfinished):
    """The newest is uncommitted, the next one is cut short: the run continues from the one before."""
    shutil.copytree(unfinished / "checkpoint-8", unfinished / "checkpoint-9")
    (unfinished / "checkpoint-9" / "committed.json").unlink()
    shard = unfinished / "checkpoint-10" / "rank-00001-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    completed(workshop.command(unfinished))
    run = Run(unfinished)
    same_curve(run, workshop.run("zero2"))
    passed_over = next(event for event in run.events if event["event"] == "checkpoint_passed_over")
    assert passed_over["checkpoint"] == "checkpoint-10" and shard.name in passed_over["reason"]
    assert next(event for event in run.events if event["event"] == "resume")["checkpoint"] == "checkpoint-8"
    assert (unfinished / "export" / "model.safetensors").exists()
    assert committed(unfinished) == ["checkpoint-10", "checkpoint-8"]


def test_a_finished_run_started_again_changes_nothing(workshop):
    """The same command says where the result lies and touches no file."""
    run = workshop.run("zero2")
    before = contents(run.folder)
    again = execute(workshop.command(run.folder))
    assert again.code == 0 and str(run.dir.export) in again.stdout
    watched = execute(workshop.command(run.folder, "zero3", settings=("monitors.layer_norms_steps=3",)))
    assert watched.code == 0 and str(run.dir.export) in watched.stdout, (
        "what is trained and measured is the same"
    )
    assert contents(run.folder) == before


def test_a_run_that_went_on_from_a_lost_checkpoint_is_not_begun_anew(workshop, unfinished):
    """Begun with --resume PATH, killed before its first save, and started by hand without PATH."""
    for folder in unfinished.glob("checkpoint-*"):
        shutil.rmtree(folder)
    RunFolder(unfinished).add_event("resume", step=8, checkpoint="checkpoint-8")
    before = contents(unfinished)
    refused(
        execute(workshop.command(unfinished)),
        "the last start went on from checkpoint-8, and no checkpoint is here",
    )
    assert contents(unfinished) == before


def test_resume_never_keeps_the_earlier_run_aside(workshop, resumed, tmp_path):
    """A fresh start loses nothing either: what was there is kept whole under another name, tracked run included."""
    output = tmp_path / "run"
    shutil.copytree(resumed[0].folder, output, symlinks=True)
    before = bytes_of(output)
    settings = ("training.report_to=wandb",)
    command = workshop.command(output, "null", 1, "plain", settings, ["--resume", "never"])
    completed(command)
    (aside,) = (path for path in tmp_path.iterdir() if path != output)
    assert bytes_of(aside) == before
    run = Run(output)
    told = [event["event"] for event in run.events if event["event"] != "save"]
    assert told == ["start", "end"]
    assert run.losses == workshop.plain().losses
    assert run.dir.wandb_id.read_text() != resumed[0].dir.wandb_id.read_text()


def test_a_checkpoint_of_another_format_is_refused_in_one_line(workshop, unfinished):
    """One that this version cannot read, as DeepSpeed wrote them for one, is not passed over in silence."""
    folder = unfinished / "checkpoint-10"
    (folder / "state.json").unlink()
    marker = read_marker(folder)
    del marker["files"]["state.json"], marker["checksum"], marker["format"]
    write_marker(folder, marker)
    before = contents(unfinished)
    said = "checkpoint-10 is no checkpoint of this version's format"
    refused(execute(workshop.command(unfinished)), said)
    assert contents(unfinished) == before


def test_a_path_means_what_is_committed_by_the_step_of_its_marker(tmp_path):
    """--resume PATH takes what is complete, also if it was copied or renamed, and nothing else."""
    saved = RunFolder(tmp_path)
    for step in (4, 8):
        save(saved, step)
    for name in ("best", "my-2", "checkpoint-5"):
        copy = shutil.copytree(saved.checkpoint(8), saved.path / "kept" / name)
        assert choose_checkpoint(saved, str(copy)).folder == copy and step_of(copy) == 8
    (saved.checkpoint(4) / "committed.json").unlink()
    with pytest.raises(UserError, match="no committed checkpoint"):
        choose_checkpoint(saved, str(saved.checkpoint(4)))


def test_rows_of_repeated_steps_are_dropped(tmp_path):
    """A line that a dying run left half-written is no row; later steps are written again."""
    path = tmp_path / "metrics.jsonl"
    for step in range(1, 7):
        append_row(path, {"step": step, "loss": float(step)})
    with path.open("a") as file:
        file.write('{"step": 7, "lo')
    keep_past_rows(path, 4, [], lambda row: False)
    append_row(path, {"step": 5, "loss": 0.5})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]
    assert read_rows(path)[-1] == {"step": 5, "loss": 0.5}
    # and of a file that nobody rewrites, as events.jsonl: what comes later is read
    with path.open("a") as file:
        file.write('[1]\n{"step": 6, "lo')
    append_row(path, {"step": 7, "loss": 0.7})
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4, 5, 7]
