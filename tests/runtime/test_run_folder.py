"""Promise: nothing committed is lost, when two runs meet in a folder, a disk fills up, or a file is spoilt."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from pretraining.checkpoints.folders import ON_ITS_WAY, refuse_foreign_files
from pretraining.checkpoints.format import Start, read_marker
from pretraining.checkpoints.resume import start_text
from pretraining.errors import UserError
from pretraining.evaluation import __main__ as evaluation
from pretraining.planning.gate import judge_plan
from pretraining.planning.gpus import find_gpu
from pretraining.planning.run_plan import Machine, build_run_plan
from pretraining.planning.setup import Setup
from pretraining.recipe import load_recipe
from pretraining.runtime.durable_files import append_row, one_line_disk_errors
from pretraining.runtime.lock import lock_folder
from pretraining.runtime.run_folder import RunFolder, read_events, step_of_event
from tests.gear.finished_data import refusal
from tests.gear.runs import Run, committed, completed, contents, execute
from tests.gear.small_checkpoints import identity_of, save

PLAIN = ("null", 1, "plain")


def last_line(finished) -> str:
    """The one error of a run that had begun: the last of its lines, after those of its progress."""
    assert finished.code == 2 and "Traceback" not in finished.stderr, finished.output
    assert finished.stderr.count("error: ") == 1
    return finished.stderr.splitlines()[-1]


def test_a_start_says_in_three_lines_what_it_is_where_it_begins_and_what_is_planned(tmp_path):
    """Of a checkpoint also when, by how many ranks, at which stage and on which host it was saved."""
    run = RunFolder(tmp_path / "run")
    first = replace(identity_of(), environment={"device": "CPU (x86_64)"})
    recipe, processor = first.recipe, Machine(trains_on_processor=True)
    plan = judge_plan(build_run_plan(Setup(recipe, None, 2)), processor)
    lines = start_text(run, first, plan).splitlines()
    model = "gpt2 of 940,800 parameters, 2 ranks on CPU (x86_64), zero2, fp32, 1,000 steps, 2,048,000 tokens"
    assert lines[:2] == [f"run    gpt2 in {run.path}: {model}", "start  fresh"]
    assert re.fullmatch(r"plan   \d+ MB of memory on each rank, no time \(.*\), [\d.]+ MB of disk", lines[2])
    assert len(lines) == 3
    layout = {"world_size": 1, "zero_stage": 3}
    checkpoint = save(run, 141, identity=replace(first, layout=layout))
    again = replace(first, start=Start.at(checkpoint))
    h100 = Machine(80e9, find_gpu("H100"), True)
    plan = judge_plan(build_run_plan(Setup(recipe, None)), h100)
    _, start, planned = start_text(run, again, plan).splitlines()
    when = read_marker(checkpoint)["saved"]
    saved = f"saved {when} by 1 rank, zero3 on {socket.gethostname()}"
    done = "step 141 of 1,000, 288,768 tokens seen"
    assert start == f"start  continued from checkpoint-141 ({saved}): {done}"
    said = r" MB of 80.0 GB .* for what is left at [\d,]+ tokens/s, MFU \d+%, \$.* \(estimated from assumed rates\)"
    assert re.search(said, planned)
    balances = {"auto": "a balancing loss, router_aux_loss_coef 0.01", "none": "not balanced"}
    for asked, balance in balances.items():
        mixture = replace(first, recipe=load_recipe("moe-1.5b", [f"loss.balance={asked}"]))
        plan_of_it = judge_plan(build_run_plan(Setup(mixture.recipe, None, 8)), h100, force=True)
        said = start_text(run, mixture, plan_of_it).splitlines()
        assert said[2] == f"router {balance}", said
    elsewhere = start_text(RunFolder(tmp_path / "other"), again, plan)
    assert f"start  continued from {checkpoint} (saved " in elsewhere


def test_a_second_run_in_the_folder_is_refused(workshop, tmp_path):
    """Which process has it; the folder stays as it is."""
    shutil.copytree(workshop.plain().folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "export")
    with lock_folder(tmp_path / "run"):
        before = contents(tmp_path / "run")
        finished = execute(workshop.command(tmp_path / "run", *PLAIN))
        assert contents(tmp_path / "run") == before
    assert f"process {os.getpid()} on " in last_line(finished) and "--output_dir" in finished.stderr


def test_the_lock_of_a_killed_run_is_free(tmp_path):
    """SIGKILL: the system releases it, though its file stays; a forked data worker does not keep it."""
    reader, writer = os.pipe()
    holder = os.fork()
    if holder == 0:
        try:
            lock = lock_folder(tmp_path)
            worker = os.fork()
            os.write(writer, f"{worker}".encode() if worker else b"")
            signal.pause()
        finally:
            os._exit(lock.fileno())
    worker = int(os.read(reader, 20))
    try:
        assert f"process {holder} on " in refusal(lock_folder, tmp_path, patience_seconds=0.2)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    try:
        lock_folder(tmp_path, patience_seconds=0.2).close()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_stop_file_that_comes_too_late_does_not_stop_the_next_run(tmp_path):
    """Asked for while the model is exported: the run ends, and the request with it."""
    run = RunFolder(tmp_path)
    run.export.mkdir()
    run.stop_file.touch()
    run.add_end({"eval_loss": 1.0})
    assert run.last_event("end") and not run.stop_file.exists()


def test_a_run_folder_that_is_removed_meanwhile_is_one_line(tmp_path):
    """Whichever file was wanted; a file that is missing in a folder that is there stays a bug of ours."""
    for folder, expected in ((tmp_path / "gone", UserError), (tmp_path, FileNotFoundError)):
        with pytest.raises(expected), one_line_disk_errors(folder):
            (folder / "sub" / "metrics.jsonl").open("a")


def test_a_full_disk_costs_no_checkpoint(workshop, disk_of):
    """Foreseen; forced, one line that says so; with more room it goes on from what was committed.

    On one that is read-only no run begins.
    """
    small_disk = disk_of("2800k")  # one checkpoint of the small recipe, not two
    output = small_disk / "run"
    command = workshop.command(output, *PLAIN)
    assert "there is room for" in last_line(execute(command)) and not output.exists()
    assert "No space left on device; free some space" in last_line(execute([*command, "--force"]))
    assert committed(output) == ["checkpoint-4"]
    assert [event for event in Run(output).events if event["event"] == "forced" and "room" in event["what"]]
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    completed(command)
    assert Run(output).losses == workshop.plain().losses
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    line = last_line(execute(workshop.command(small_disk / "another", *PLAIN)))
    assert line.startswith(f"error: {small_disk / 'another'}: Read-only file system; choose a folder")


def test_a_file_where_a_folder_is_wanted(workshop, tmp_path):
    """--output_dir and --data_dir: one line that names it, and it stays."""
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    train = ["forked", "0", "train.py", *workshop.options("--data_dir", file)]
    for command in (workshop.command(file, *PLAIN), train):
        assert str(file) in last_line(execute(command))
    assert file.read_text() == "mine"


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize(
    "theirs", ["export/model.safetensors", "extensions/own.py", "checkpoint-500/model.bin"]
)
def test_a_folder_of_other_files_is_refused_and_stays_as_it_is(workshop, tmp_path, theirs, resume):
    """What a run would replace, empty, or take for a save that was killed, in a folder that no run has begun."""
    file = tmp_path / "mine" / theirs
    file.parent.mkdir(parents=True)
    file.write_text("weeks of work")
    (tmp_path / "mine/notes.txt").write_text("read me")
    before = contents(tmp_path)
    finished = execute(workshop.command(tmp_path / "mine", *PLAIN, more=["--resume", resume]))
    what = f"{theirs.partition('/')[0]} would be written over, and no run has left its recipe.json here"
    assert f"{tmp_path / 'mine'}: {what}; choose another --output_dir" in last_line(finished)
    assert contents(tmp_path) == before


def test_files_beside_those_of_a_run_are_no_matter(tmp_path):
    """A run may begin beside notes, and goes on over what a start of its own has left before its recipe was written."""
    run = RunFolder(tmp_path / "small")
    theirs = ("notes.txt", "checkpoint-8-good/x", "weights-x/y")
    for name in (*theirs, f"checkpoint-4/{ON_ITS_WAY}", "checkpoint-4/half"):
        file = run.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    run.checkpoint(6).mkdir()
    refuse_foreign_files(run)
    run.report.write_text("")
    run.weights(2).mkdir()
    assert "report.html and 1 more would be written over" in refusal(refuse_foreign_files, run)
    run.add_event("upload_unreachable")
    refuse_foreign_files(run)
    run.export.symlink_to(tmp_path / "nowhere")
    assert "export: is a link or a file where the run makes a folder" in refusal(refuse_foreign_files, run)


def test_what_transformers_refuses_is_one_line_and_leaves_nothing(workshop, tmp_path):
    """What only transformers can judge: whether the package of an optimizer is there."""
    line = last_line(execute(workshop.command(tmp_path / "run", *PLAIN, ("training.optim=grokadamw",))))
    assert line.startswith("error: recipe ") and "training: " in line and "grokadamw" in line
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_not_changed_afterwards(workshop, tmp_path):
    """Promise: honest numbers. Its recipe.json would tell of a run that never was."""
    reference, run = workshop.plain(), RunFolder(tmp_path / "run")
    shutil.copytree(reference.folder, run.path)
    before, more = run.recipe.read_text(), ["--allow_change", "training.seed"]
    finished = execute(workshop.command(run.path, *PLAIN, ("training.seed=8",), more=more))
    assert finished.code == 2, finished.output
    assert "all 10 steps are done, so that changing training.seed would change none" in last_line(finished)
    assert run.recipe.read_text() == before and run.last_event("change_accepted") is None


def test_a_spoilt_export_is_told_and_made_again(workshop, tmp_path):
    """The evaluation says that it cannot be loaded; the run's own command does not call it finished."""
    reference, run = workshop.plain(), RunFolder(tmp_path / "run")
    shutil.copytree(reference.folder, run.path)
    (run.export / "model.safetensors").write_text("spoilt")
    command = ["forked", "0", "-m", "pretraining.evaluation", run.path, "--data_dir", workshop.data]
    assert f"{run.export}: the export cannot be loaded" in last_line(execute(command))
    assert execute(workshop.command(run.path, *PLAIN)).code == 0
    weights = [each.export / "model.safetensors" for each in (run, reference.dir)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_an_export_that_somebody_has_changed_is_kept(workshop, tmp_path):
    """An edited card is no reason to export again; where that has one, notes and card are kept beside it."""
    run = RunFolder(tmp_path / "run")
    shutil.copytree(workshop.plain().folder, run.path)
    for name in ("README.md", "notes.md"):
        (run.export / name).write_text("mine")
    before = contents(run.path)
    assert execute(workshop.command(run.path, *PLAIN)).code == 0 and contents(run.path) == before
    (run.export / "model.safetensors").write_text("spoilt")
    assert "has changed since it was written" in completed(workshop.command(run.path, *PLAIN)).stdout
    (kept,) = run.aside.glob("export.*")
    assert (kept / "notes.md").read_text() == (kept / "README.md").read_text() == "mine"
    assert not (run.export / "notes.md").exists() and "mine" not in (run.export / "README.md").read_text()


def test_files_of_a_run_follow_the_umask(workshop):
    """safetensors makes its files 0600; a group that may read the folder reads the weights too."""
    umask = os.umask(0o077)
    os.umask(umask)
    folder = workshop.plain().folder
    modes = {path.stat().st_mode & 0o777 for path in folder.rglob("*.safetensors")}
    assert modes == {0o666 & ~umask}


def test_rows_that_no_run_wrote_are_passed_over(tmp_path):
    """events.jsonl edited by hand or cut: never a traceback, never a finished run that is none."""
    run = RunFolder(tmp_path)
    append_row(run.events, {"event": "start"})
    append_row(run.events, {})
    assert run.last_event("start") == {"event": "start"} and run.last_event("end") is None
    append_row(run.events, {"event": "end"})
    run.recipe.write_text("{}")
    run.export.mkdir()
    assert not run.is_finished({})
    with run.events.open("ab") as file:
        file.write(b"[1]\n\xff\xfe\n")
    assert run.last_event("end") == {"event": "end"}
    for number, step in {"12": 12, "9" * 400: None, "\u00b2": None}.items():
        assert step_of_event({"checkpoint": f"checkpoint-{number}"}) == step
    append_row(run.events, {"event": "save", "blocked_seconds": "long"})
    assert "save" not in [each.get("event") for each in read_events(run.events)]


def test_a_run_is_finished_for_all_settings_that_change_no_result(tmp_path):
    """Other monitors, layout or saves leave nothing to do; another curve, other measures or a killed longer run do."""
    run, recipe = RunFolder(tmp_path), load_recipe("tiny").to_dict()
    run.recipe.write_text(json.dumps(recipe))
    run.export.mkdir()
    (run.export / "config.json").write_text("{}")
    for kind in ("start", "resume"):
        run.add_event(kind)
        assert not run.is_finished(recipe)
        run.add_end({"eval_loss": 1.0})
        assert run.is_finished(recipe)
    earlier = load_recipe("tiny").to_dict()
    del earlier["evaluation"]["sampling"]  # as a version from before the key wrote it
    run.recipe.write_text(json.dumps(earlier))
    assert run.is_finished(recipe)
    same = "monitors.hang_minutes=7 checkpoints.keep_last=9 training.save_steps=7 deepspeed=zero3"
    for setting in same.split():
        assert run.is_finished(load_recipe("tiny", [setting]).to_dict())
    for setting in ("training.seed=7", "budget.tokens=4096", "evaluation.metric=bits_per_byte"):
        assert not run.is_finished(load_recipe("tiny", [setting]).to_dict())


@pytest.mark.parametrize(
    "argument",
    ["--temperature=-1", "--temperature=nan", "--top-k=-5", "--top-p=1.5", "--tokens=-5", "--tokens=many"],
)
def test_arguments_of_the_evaluation_are_checked_before_the_measuring(tmp_path, argument):
    with pytest.raises(UserError, match=re.escape(argument.partition("=")[2])):
        evaluation.main([str(tmp_path), argument])


def test_a_path_that_the_locale_cannot_name(tmp_path):
    """An ASCII locale and a folder that is not: one line, and what to set."""
    words = [sys.executable, "train.py", "--recipe", "tiny", "--plan", "--data_dir", tmp_path / "données"]
    finished = execute(words, LC_ALL="C", PYTHONUTF8="0")
    assert finished.stderr.count("\n") == 1 and "PYTHONUTF8=1" in last_line(finished)
