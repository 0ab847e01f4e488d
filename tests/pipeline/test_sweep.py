"""`python -m pretraining.sweep`, and the same from Python: what runs, what is skipped, what is best."""

import json
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from pretraining.api import Prepared, RunResult, checked_run, prepare, run, settings_of, words_of
from pretraining.errors import UserError
from pretraining.sweep import Point, _folder_name, _parsed, _short_keys, as_text, train_all
from tests.gear.finished_data import refusal
from tests.gear.runs import REPOSITORY, Workshop, answer_of, completed, execute, forked_programs, refused

SHORT = ("budget.tokens=1024", "training.logging_steps=5", "evaluation.sample_tokens=0")
SWEEP = ["python", "-m", "pretraining.sweep", "--deepspeed", "null"]
OVER = ["--over", "training.learning_rate=0.01,1e-3"]


def sets(texts) -> list[str]:
    return [word for text in texts for word in ("--set", text)]


def finished_run(workshop: Workshop, folder: Path, settings) -> None:
    """A run made by a process that starts at once, where a sweep or a notebook would make it."""
    options = workshop.options("--deepspeed", "null", "--output_dir", folder, *sets(settings))
    completed(["forked", "0", "train.py", *options])


def test_a_sweep_skips_what_is_finished_stops_goes_on_and_names_the_best(workshop, tmp_path):
    """Its first point is there already; the second one is asked to stop after its first step."""
    name = f'name="{workshop.recipe.stem}-learning_rate=0.01"'
    finished_run(workshop, tmp_path / "learning_rate=0.01", [*SHORT, "training.learning_rate=0.01", name])
    second = tmp_path / "learning_rate=1e-3"
    second.mkdir()
    (second / "STOP").touch()
    command = [*SWEEP, *workshop.options("--output_dir", tmp_path, *sets(SHORT), *OVER)]
    stopped = execute(command, **forked_programs())
    assert stopped.code == 75, stopped.output
    assert "learning_rate=0.01: finished before" in stopped.stdout
    assert re.search(r"^ +1e-3 +stopped +1 ", stopped.stdout, re.M), stopped.stdout
    ended = completed([*command, "--json"], **forked_programs())
    answer = answer_of(ended.stdout)
    states = [(point["settings"]["training.learning_rate"], point["state"]) for point in answer["points"]]
    assert states == [("0.01", "finished"), ("1e-3", "finished")]
    assert answer["best"] == str(tmp_path / "learning_rate=0.01") and answer["metric"] == "eval/loss"
    assert answer["points"][1]["metrics"]["step"] == 2
    assert answer == json.loads((tmp_path / "sweep.json").read_text())
    # The loss of the last step, though rows are logged more rarely than that.
    rows = (tmp_path / "learning_rate=1e-3" / "metrics.jsonl").read_text().splitlines()
    last = next(row for row in map(json.loads, reversed(rows)) if "train/loss" in row)
    assert last["step"] == 2 and last["train/loss"] == answer["points"][1]["metrics"]["train/loss"]
    page = Path(answer["report"]).read_text()
    assert '["training.learning_rate","0.01","0.001"]' in page
    shown = execute([*command, "--show"])
    assert shown.code == 0 and shown.stdout.rstrip() == as_text(answer)


def test_jobs_are_submitted_once(workshop, tmp_path, monkeypatch):
    """With the folder, the launcher and the options of each point; a queued one is not submitted again."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "sbatch").write_text('#!/bin/sh\necho "$RUN|$@" >> "$CALLS"\necho 12$(wc -l < "$CALLS")\n')
    (commands / "squeue").write_text("#!/bin/sh\n[ $3 = 121 -o $3 = 124 ] && echo RUNNING || true\n")
    for path in commands.iterdir():
        path.chmod(0o755)
    calls = tmp_path / "calls"
    options = workshop.options(
        "--output_dir", tmp_path / "sweep", "--slurm=--nodes=1 --time=1:00:00", "--json"
    )
    path = f"{commands}:{Path(sys.executable).parent}:/usr/bin:/bin"
    variables = {"CALLS": str(calls), "PATH": path}
    for _ in range(2):
        done = completed([*SWEEP, *options, *OVER], **variables)
    lines = calls.read_text().splitlines()
    # the job of the second point has left the queue without a run
    rates = ["learning_rate=0.01", "learning_rate=1e-3", "learning_rate=1e-3"]
    assert [Path(line.partition("|")[0]).name for line in lines] == rates
    folder, words = lines[0].split("|")
    assert folder == str(tmp_path / "sweep" / "learning_rate=0.01")
    assert words.startswith("--parsable --nodes=1 --time=1:00:00 --job-name=small-learning_rate=0.01 ")
    assert f"slurm.sh --recipe {workshop.recipe} " in words and " --set training.learning_rate=0.01" in words
    assert "--output_dir" not in words
    assert [point["state"] for point in answer_of(done.stdout)["points"]] == ["queued", "not begun"]
    # jobs of other values are not forgotten; one that is refused afterwards takes no job's id with it
    ds_config = os.path.relpath(REPOSITORY / "ds_configs" / "zero1.json")
    other = ["--over", "training.seed=1,2", "--deepspeed", ds_config]
    completed([*SWEEP, *options, *other], folder=Path.cwd(), **variables)
    assert f"--deepspeed {REPOSITORY / 'ds_configs' / 'zero1.json'}" in calls.read_text().splitlines()[-1]
    (commands / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    assert "sbatch refused learning_rate=1e-3" in execute([*SWEEP, *options, *OVER], **variables).stderr
    jobs = {"learning_rate=0.01": "121", "learning_rate=1e-3": "123", "seed=1": "124", "seed=2": "125"}
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["jobs"] == jobs
    refused(execute([*SWEEP, *options, *OVER, "--launcher", "deepspeed"]), "--launcher", "leave it out")


def test_a_stop_that_comes_too_late_for_a_run_begins_no_other(workshop, tmp_path):
    """Its ranks end well, or crash, although they were asked to stop; from Python a crash is an interrupt then."""
    (stops := tmp_path / "stops.py").write_text(
        "import os, signal, sys, time\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "sys.exit('crash' in ' '.join(sys.argv))\n"
    )
    points = []
    for name in ("first", "second"):
        given = {"recipe": workshop.recipe, "output_dir": tmp_path / name, "deepspeed": "null"}
        points.append(Point({}, tmp_path / name, given, checked_run(words_of(given))[0]))
    assert train_all(points, f"python {stops}", {}) == 75
    with pytest.raises(KeyboardInterrupt) as interrupted:
        run(workshop.recipe, launcher=f"python {stops}", output_dir=tmp_path / "crash")
    assert "ended with exit code 1" in str(interrupted.value.__cause__)


WRONG = {
    "training.learning_rate": "write section.key=value,value",
    "training.learning_rate=": "write section.key=value,value",
    "training.learning_rte=1,2": "did you mean 'training.learning_rate'",
    "training.learning_rate=1e-3,1e-3": "the value 1e-3 is there twice",
    "training.learning_rate=1e-3,0.001": "learning_rate=1e-3 and learning_rate=0.001 are the same run",
    "name=a,b": "name=a and name=b are the same run",
    "training.seed=1,x": "training.seed",
}


@pytest.mark.parametrize("over", WRONG)
def test_a_wrong_value_is_refused_before_anything_is_trained(over, tmp_path):
    command = [*SWEEP, "--recipe", "tiny", "--over", over, "--output_dir", tmp_path / "sweep"]
    refused(execute(command), WRONG[over])
    assert not (tmp_path / "sweep").exists()


def test_values_and_folders_have_names_that_can_be_read():
    assert _parsed('evaluation.tasks=[],["a","b"]') == ("evaluation.tasks", ["[]", '["a","b"]'])
    assert _parsed('data.name="a,b",c') == ("data.name", ['"a,b"', "c"])
    assert _short_keys(["training.seed", "data.dedup.minhash.seed"])["training.seed"] == "training.seed"
    assert _folder_name(["learning_rate=1e-3", "seed=1"]) == "learning_rate=1e-3,seed=1"
    # what a folder cannot be called, and what is too long, differs by a digest
    first, second = _folder_name(['tasks=["a"]']), _folder_name(["tasks=['a']"])
    assert first != second and not re.search(r"[^\w.,=+-]", first)
    assert len(_folder_name(["prompt=" + "x" * 500])) <= 120


def test_keywords_are_the_options_of_the_commands():
    given = {"set": {"a.b": [1, "x"]}, "allow_change": ["a", "b"], "force": True, "resume": None}
    assert words_of({"recipe": "tiny", **given}) == [
        *("--recipe", "tiny", "--set", 'a.b=[1, "x"]'),
        *("--allow_change", "a", "--allow_change", "b", "--force"),
    ]
    assert settings_of("a=1") == settings_of(["a=1"]) == settings_of({"a": 1}) == ["a=1"]
    assert settings_of({"a": np.int64(3), "b": Path("my")}) == ["a=3", 'b="my"']


def test_what_is_wrong_is_raised_with_the_line_of_the_command(workshop, tmp_path):
    """In this process where it can be; else the command's own line, and nothing else."""
    assert "did you mean 'budget.tokens'" in refusal(run, "tiny", set={"budget.tokns": 1})
    assert "unrecognized arguments: --outputdir" in refusal(run, "tiny", outputdir=tmp_path)
    assert "start no run" in refusal(run, "tiny", rehearse="here", world_size=2)
    assert "python train.py --help" in refusal(run, "tiny", help=True)
    with pytest.raises(UserError, match=r"^.*data_prep\.py.*$"):
        run(workshop.recipe, data_dir=tmp_path, output_dir=tmp_path / "run", show=False)
    with pytest.raises(UserError, match="unknown key"):
        prepare(workshop.recipe, set={"data.nme": "x"}, data_dir=tmp_path, show=False)


def test_the_page_on_python_draws_the_losses(workshop, tmp_path, monkeypatch):
    """docs/python.md's last block as it is, on a run of the small recipe: a picture with two lines a run."""
    pytest.importorskip("matplotlib").use("agg")
    page = (REPOSITORY / "docs" / "python.md").read_text()
    block = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[-1]
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for name in ("tiny", "slower"):
        Path("runs", name).symlink_to(workshop.plain().folder)
    Path("cell.py").write_text(block)
    names = runpy.run_path("cell.py")
    assert Path("losses.png").read_bytes().startswith(b"\x89PNG")
    assert len(names["plt"].gca().get_legend_handles_labels()[1]) == 4


def test_the_notebook_runs(workshop, tmp_path, capsys, monkeypatch):
    """docs/notebook.py as it is, on the small recipe; its runs are there already."""
    source = (REPOSITORY / "docs" / "notebook.py").read_text()
    places = f"RECIPE, DATA, RUNS = {str(workshop.recipe)!r}, {str(workshop.data)!r}, {str(tmp_path)!r}"
    source, changed = re.subn(r"^RECIPE, DATA, RUNS = .*$", lambda _: places, source, flags=re.M)
    assert changed == 1 and "81_920" in source
    (tmp_path / "notebook.py").write_text(source.replace("81_920", "1024"))
    for rate in ("0.002", "0.005"):
        settings = (f"training.learning_rate={rate}", "budget.tokens=1024", "training.logging_steps=2")
        finished_run(workshop, tmp_path / f"notebook-{rate}", settings)
    shutil.rmtree(tmp_path / "notebook-0.005" / "checkpoint-2")  # a finished run needs none
    names = runpy.run_path(str(tmp_path / "notebook.py"))
    data, result = names["data"], names["results"][0.005]
    assert isinstance(data, Prepared) and isinstance(result, RunResult)
    assert data.folder == workshop.data / "corpus"
    assert len(data.tokens()) == workshop.summary["train"]["tokens"]
    assert data.tokens("validation", 5, 9).shape == (4,)
    assert "there is no split 'test'; there are train and validation" in refusal(data.tokens, "test")
    assert (result.exit_reason, result.step) == ("finished", 2) and result.export.is_dir()
    last = [row for row in result.rows if "eval/loss" in row][-1]
    assert result.metrics["eval/loss"] == last["eval/loss"]
    assert "finished" in capsys.readouterr().out
