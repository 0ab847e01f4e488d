"""`python -m pretraining.checkpoints`: what it shows, finds and removes, on small files."""

import json
import os
import shutil
import signal
import sys
import time

import pytest

from pretraining.checkpoints.__main__ import main
from pretraining.checkpoints.format import MARKER
from pretraining.errors import UserError
from pretraining.runtime.lock import lock_idle_run
from pretraining.runtime.run_folder import RunFolder
from tests.gear.finished_data import refusal
from tests.gear.runs import Started, committed, contents, execute
from tests.gear.small_checkpoints import identity_of, save


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """A whole, a changed and an uncommitted checkpoint, one set aside, and weights without one."""
    run = RunFolder(tmp_path / "run")
    for step in (2, 4, 6, 8):
        save(run, step, loss=9.0 - step, eval_loss=1.0 + step)
    changed = run.checkpoint(4) / "state_1.bin"
    changed.write_text(changed.read_text().upper())
    (run.checkpoint(8) / MARKER).unlink()
    shutil.copytree(run.checkpoint(2), run.aside / "checkpoint-2.20260101T000000Z")
    run.weights(1).mkdir()
    run.recipe.write_text(json.dumps(identity_of("checkpoints.keep_last=1").recipe.to_dict()))
    return run


def answered(capsys, *words) -> dict:
    """The JSON that a command line answers."""
    main([*map(str, words), "--json"])
    return json.loads(capsys.readouterr().out)


def states(answer: dict) -> list[tuple]:
    return [(each["step"], each["state"]) for each in answer["checkpoints"]]


def test_list_tells_the_state_of_each(run, capsys):
    """From markers and sizes alone: a changed byte is for `verify`, a cut file is seen at once."""
    whole = [(step, "committed") for step in (6, 4, 2)]
    everything = [(8, "uncommitted"), *whole, (1, "weights only")]
    answer = answered(capsys, "list", run.path)
    assert states(answer) == [*everything, (2, "set aside")]
    newest = answer["checkpoints"][1]
    assert (newest["ranks"], newest["loss"], newest["eval_loss"]) == (1, 3.0, 7.0)
    assert newest["bytes"] > 0 and newest["age_seconds"] >= 0
    (run.checkpoint(4) / "trainer_state.json").write_text("")
    assert states(answered(capsys, "list", run.path))[2] == (4, "damaged")
    main(["list", str(run.path)])
    shown = capsys.readouterr().out
    assert "weights only" in shown and "checkpoint-4: trainer_state.json holds 0 bytes" in shown


def test_verify_reads_every_byte(run, capsys):
    """Each file's verdict, then one line and exit code 2; a whole one alone is fine."""
    with pytest.raises(UserError, match=r"1 of 3 checkpoints damaged: .*checkpoint-4: state_1\.bin has"):
        main(["verify", str(run.path), "--json"])
    answer = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["whole"] for each in answer] == [True, False, True]
    assert [name for name, reason in answer[1]["files"].items() if reason] == ["state_1.bin"]
    main(["verify", str(run.path), "--step", "6"])
    assert "checkpoint-6: whole" in capsys.readouterr().out
    main(["verify", str(run.checkpoint(2))])
    assert "checkpoint-2: whole" in capsys.readouterr().out


def test_prune_shows_first_and_removes_when_told(run, capsys):
    """The recipe keeps one: the rest, the uncommitted and what was set aside would go; weights stay."""
    before = contents(run.path)
    planned = answered(capsys, "prune", run.path)
    assert contents(run.path) == before and not planned["removed"] and planned["kept"] == [6]
    assert states(planned) == [(8, "uncommitted"), (2, "set aside"), (4, "committed"), (2, "committed")]
    main(["prune", str(run.path), "--keep_last", "2", "--keep_best", "1"])
    assert "kept: 6, 4, 2" in capsys.readouterr().out
    done = answered(capsys, "prune", run.path, "--yes")
    assert done["removed"] and committed(run.path) == ["checkpoint-6"]
    left = sorted(path.name for path in run.path.iterdir() if path.is_dir())
    assert left == ["aside", "checkpoint-6", "weights-1"]
    main(["prune", str(run.path)])
    assert "nothing to remove" in capsys.readouterr().out


def test_prune_leaves_alone_what_is_not_the_runs(run, tmp_path):
    """What is behind a link, and notes beside what was set aside."""
    elsewhere = run.checkpoint(2).rename(tmp_path / "larger-disk")
    run.checkpoint(2).symlink_to(elsewhere)
    for name in ("my-notes", "thesis-8"):
        (run.aside / name).mkdir()
    before = contents(elsewhere)
    main(["prune", str(run.path), "--yes"])
    assert contents(elsewhere) == before and not run.checkpoint(2).is_symlink()
    assert sorted(path.name for path in run.aside.iterdir()) == ["my-notes", "thesis-8"]


def test_prune_leaves_a_run_that_is_writing_alone(run):
    """What looks uncommitted may be on its way."""
    with lock_idle_run(run.path):
        before = contents(run.path)
        assert "another run is writing there" in refusal(main, ["prune", str(run.path), "--yes"])
        assert contents(run.path) == before


MISTAKES = {
    "no such folder": (["list", "/nowhere"], "/nowhere: no such folder"),
    "no run": (["list", "{empty}"], "no run folder"),
    "two steps": (
        ["verify", "{run}/checkpoint-2", "--step", "4"],
        "step 4 is asked for, and the path names that of step 2",
    ),
    "no such step": (["verify", "{run}", "--step", "5"], "checkpoint of step 5; there are those of 2, 4"),
    "unknown verb": (["check", "{run}"], "invalid choice: 'check'"),
    "damaged": (["export", "{run}", "--step", "4"], "damaged: state_1.bin has changed"),
    "there already": (["export", "{run}", "--step", "6", "--to", "{empty}"], "is there already"),
}


@pytest.mark.parametrize("words, message", MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_is_one_line(run, tmp_path, words, message):
    (tmp_path / "empty").mkdir()
    typed = [word.format(run=run.path, empty=tmp_path / "empty") for word in words]
    assert message in refusal(main, typed)


def test_a_benchmark_that_is_ended_leaves_no_files(tmp_path):
    """As `timeout` ends it: what it has written of a checkpoint may be gigabytes."""
    words = ["verify", "--gigabytes", "0.07", "--pairs", "100000", "--folder", tmp_path]
    started = Started(["forked", "0", "benchmarks/checkpoint.py", *words])
    while not list(tmp_path.glob("*/checkpoint-1/*")):
        assert started.process.poll() is None, started.finish().output
        time.sleep(0.01)
    _, rank, *_ = started.process.processes()
    os.kill(rank, signal.SIGTERM)
    assert started.finish().code == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_looking_needs_no_torch(run):
    """`list` answers at once; exit code 2 and one line for what a user got wrong."""
    program = (
        "import sys; from pretraining.checkpoints.__main__ import main; "
        f"main(['list', {str(run.path)!r}]); print('torch' in sys.modules)"
    )
    assert execute([sys.executable, "-c", program]).stdout.splitlines()[-1] == "False"
    finished = execute([sys.executable, "-m", "pretraining.checkpoints", "verify", run.path])
    assert finished.code == 2 and "Traceback" not in finished.stderr
    assert finished.stderr.startswith("error: 1 of 3 checkpoints damaged")
