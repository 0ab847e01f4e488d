"""`python -m pretraining.pipeline`: each step runs if its inputs changed, a stop or a failure repeats nothing."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pretraining.errors import UserError
from pretraining.pipeline import steps
from pretraining.pipeline.__main__ import main
from pretraining.pipeline.steps import NAMES, ranks_of
from pretraining.runtime.lock import lock_idle_run
from pretraining.runtime.processes import CommandEnded, CommandOutput, call
from tests.gear.local_hub import REPOSITORY_ID, LocalHub
from tests.gear.object_store import BUCKET, s3_server, use_here
from tests.gear.runs import REPOSITORY, Workshop, completed, execute, refused

SHORT = ("budget.tokens=1024", "evaluation.sample_tokens=0", "training.report_to=none")
OF_A_RUN = ("plan", "prepare", "doctor", "train", "evaluate", "report")


def forked(command: list[str], captured: bool = False, show: object = None) -> CommandOutput:
    """`call`, but what imports torch is forked from a process that has done so; two ranks in place of a launcher."""
    if "pretraining.supervise" in command:
        command = command[command.index("pretraining.supervise") + 1 :]
    starts = ("-m", "--module", "train.py", "data_prep.py")
    place, start = next(each for each in enumerate(command) if each[1].endswith(starts))
    words = ["-m" if start in starts[:2] else Path(start).name, *command[place + 1 :]]
    finished = execute(["forked", "2" if "deepspeed" in command else "0", *words])
    if finished.code:
        raise CommandEnded(finished.code, f"{finished.stdout}{finished.stderr}")
    return CommandOutput(finished.stdout, stop_asked=False)


class Place:
    """A recipe with its own text, data and run."""

    def __init__(self, folder: Path, workshop: Workshop, capsys):
        self.run, self.data, self.texts = folder / "run", folder / "data", folder / "texts"
        self.folder, self.capsys = folder, capsys
        shutil.copytree(workshop.folder / "corpus", self.texts)
        values = json.loads(workshop.recipe.read_text())
        values["data"]["sources"] = [{"path": str(self.texts)}]
        values["deepspeed"] = None
        (folder / "small.json").write_text(json.dumps(values))

    def words(self, *more: str, settings=()) -> list[str]:
        found = ["--recipe", str(self.folder / "small.json"), "--data_dir", str(self.data)]
        found += ["--output_dir", str(self.run), "--json"]
        return [*found, *(word for text in (*SHORT, *settings) for word in ("--set", text)), *more]

    def pipeline(self, *more: str, settings=()) -> tuple[int, dict[str, str], dict[str, str]]:
        """Exit code, {step: state} and {step: why} of a pipeline in this process."""
        self.capsys.readouterr()
        code = main(self.words(*more, settings=settings))
        answer = json.loads(self.capsys.readouterr().out)
        assert answer["exit_code"] == code
        rows = answer["steps"]
        return code, {row["step"]: row["state"] for row in rows}, {row["step"]: row["why"] for row in rows}

    def files(self) -> dict[str, bytes]:
        found = [path for path in self.folder.rglob("*") if path.is_file()]
        return {str(path): path.read_bytes() for path in found}


@pytest.fixture
def place(tmp_path, workshop, capsys, monkeypatch) -> Place:
    monkeypatch.setattr(steps, "call", forked)
    return Place(tmp_path, workshop, capsys)


def done(*names: str) -> dict[str, str]:
    """States of a pipeline that runs these steps and no other."""
    found = dict.fromkeys(NAMES, "up to date") | dict.fromkeys(names, "done")
    found["publish"] = "done" if "publish" in names else "not asked for"
    return found | ({} if "train" in names else {"doctor": "not needed"})


def test_each_step_runs_if_its_inputs_changed(place):
    """Stopped, gone on with by the same command, then nothing; then what a changed rate, page or tokenizer touches."""
    place.run.mkdir()
    (place.run / "STOP").touch()
    code, states, _ = place.pipeline()
    ended = {**dict.fromkeys(("plan", "prepare", "doctor"), "done"), "train": "stopped"}
    assert code == 75 and states == ended
    # a real process with its real supervisor
    gone_on = execute([sys.executable, "-m", "pretraining.pipeline", *place.words("--until", "train")])
    assert gone_on.code == 0 and not gone_on.strays, gone_on.output
    for said in ("prepare   up to date: ", "not finished: it goes on after step 1"):
        assert said in gone_on.stderr
    code, states, _ = place.pipeline()
    assert code == 0 and states == done("evaluate", "report")
    before = place.files()
    assert place.pipeline()[:2] == (0, done())
    assert place.files() == before
    # the same content, written again
    for path in place.texts.iterdir():
        os.utime(path, (1, 1))
    code, states, why = place.pipeline()
    assert code == 0 and states == done() and "the same content" in why["prepare"]
    (place.run / "report.html").write_text("spoilt")
    assert place.pipeline()[:2] == (0, done("report"))
    published = place.folder / "published"
    assert place.pipeline("--publish", str(published))[1] == done("publish")
    assert place.pipeline("--publish", str(published))[1] == done() | {"publish": "up to date"}
    code, states, why = place.pipeline(settings=["training.learning_rate=0.02"])
    assert code == 0 and states == done(*OF_A_RUN) | {"prepare": "up to date"}
    assert why["train"].startswith("training.learning_rate: 0.01 there, 0.02 here; the earlier run is kept")
    assert len(list(place.folder.glob("run.*"))) == 1 and (place.run / "pipeline.json").exists()


def test_what_would_take_away_prepared_data_needs_a_word(place):
    """Another tokenizer is refused with exit code 2, and nothing after it runs; with --replace everything does."""
    assert place.pipeline("--until", "prepare")[0] == 0
    other = ["data.tokenizer.train_vocab_size=500"]
    code, states, why = place.pipeline(settings=other)
    assert code == 2 and states == {"plan": "done", "prepare": "failed"} and "--replace" in why["prepare"]
    shown = place.pipeline("--replace", "--show", settings=other)[2]
    assert shown["prepare"].startswith("data.tokenizer.train_vocab_size: 512 there, 500 here")
    assert shown["train"] == "prepare comes before it"
    code, states, _ = place.pipeline("--replace", "--until", "prepare", settings=other)
    assert code == 0 and states["prepare"] == "done"


def test_a_failed_training_repeats_no_preparation(place, monkeypatch):
    """A launcher that fails at once, as a real command: its code, and what comes before it stays."""
    monkeypatch.setattr(steps, "call", call)
    options = ["--launcher", "false", "--restarts", "0", "--skip", "doctor"]
    code, states, _ = place.pipeline(*options)
    assert code == 1 and states == {"plan": "done", "prepare": "done", "train": "failed"}
    code, states, why = place.pipeline(*options)
    assert code == 1 and states == {"plan": "up to date", "prepare": "up to date", "train": "failed"}
    assert why["train"].endswith("holds no run yet")


def test_a_stop_that_comes_too_late_for_a_step_begins_no_other(place, monkeypatch):
    """The command of `prepare` ends well although it was asked to stop: nothing is trained, and 75 is returned."""
    monkeypatch.setattr(steps, "call", lambda *words: forked(*words)._replace(stop_asked=True))
    code, states, _ = place.pipeline()
    assert code == 75 and states == {"plan": "done", "prepare": "done"}
    monkeypatch.setattr(steps, "call", forked)
    code, states, _ = place.pipeline("--until", "prepare")
    assert code == 0 and set(states.values()) == {"up to date"}


def test_a_refused_plan_is_one_line_and_nothing_is_written(tmp_path):
    places = ["--output_dir", tmp_path / "run", "--data_dir", tmp_path / "data"]
    command = [sys.executable, "-m", "pretraining.pipeline", "--recipe", "65b", "--gpu", "H100"]
    finished = execute([*command, *places])
    refused(finished, "error: plan refused: 65b needs ", "--deepspeed")
    assert "prepare" not in finished.stdout and not list(tmp_path.iterdir())


def test_nothing_is_planned_beside_a_living_run(place):
    """Typed again while it trains, also to look only: who trains it, and how to stop it; nothing is written."""
    place.run.mkdir()
    (place.run / "metrics.jsonl").write_text("")
    with lock_idle_run(place.run):
        before = place.files()
        for more in ([], ["--show"]):
            said = rf"is being trained \(process {os.getpid()} on .*/STOP and type"
            with pytest.raises(UserError, match=said):
                main(place.words(*more))
        assert place.files() == before
    assert main(place.words("--show")) == 0


@pytest.mark.parametrize(
    "words, said",
    [
        (["--from", "report", "--until", "train"], "comes after --until"),
        (["--private"], "goes with --publish"),
        (["--set", "training.learnin_rate=1"], "did you mean"),
        (["--slurm", "partitoin=cpu"], "did you mean 'partition'"),
        # before hours of training, and not behind them
        (["--publish", "a b/c"], "a b/c"),
        (["--allow_change", "training.sede"], "did you mean 'training.seed'"),
        (["--launcher", "deepspeed '--num_gpus=2"], "no closing quotation"),
    ],
)
def test_options_that_make_no_sense_are_one_line(words, said):
    with pytest.raises(UserError, match=said):
        main(["--recipe", "tiny", *words])


def test_the_ranks_that_are_planned_for_are_those_of_the_launcher(tmp_path):
    (tmp_path / "hosts").write_text("alpha slots=8\nbeta slots=8\ngamma slots=4\n")
    assert ranks_of(f"deepspeed --hostfile {tmp_path / 'hosts'} --exclude beta") == 12
    assert ranks_of("deepspeed --num_gpus=8") == ranks_of("torchrun --nproc_per_node 8") == 8
    assert ranks_of("torchrun --nnodes=2 --nproc-per-node=8") == 16
    assert ranks_of("accelerate launch --num_machines 2 --num_processes 16") == 16
    assert ranks_of("") is None and ranks_of("deepspeed") is None


def test_an_export_reaches_a_store_once_and_its_list_last(tmp_path, monkeypatch, capsys):
    """To a real S3 server: what is there is not sent again; a file that is gone from the export goes there too."""
    from pretraining.checkpoints.__main__ import main as checkpoints

    run = tmp_path / "run"
    (run / "export").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "old.json"):
        (run / "export" / name).write_bytes(name.encode() * 1000)

    def push(*more: str) -> dict:
        capsys.readouterr()
        checkpoints(["push", str(run), f"s3://{BUCKET}/small", "--json", *more])
        return json.loads(capsys.readouterr().out)

    with s3_server(tmp_path / "log") as address:
        use_here(monkeypatch, address)
        assert push("--dry_run")["sent"] == [] and len(push()["sent"]) == 3
        (run / "export" / "old.json").unlink()
        (run / "report.html").write_text("page")
        assert push()["sent"] == ["report.html"] and push()["sent"] == []
        import fsspec

        system = fsspec.filesystem("s3", skip_instance_cache=True)
        there = {path.rpartition("/")[2] for path in system.ls(f"{BUCKET}/small", detail=False)}
        assert there == {"config.json", "model.safetensors", "published.json", "report.html"}


def test_an_export_reaches_the_hub_in_one_commit(tmp_path):
    run = tmp_path / "run"
    (run / "export").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "README.md"):
        (run / "export" / name).write_text("---\ntags: [a]\n---\n")
    (run / "report.html").write_text("page")
    words = ["python", "-m", "pretraining.checkpoints", "push", run, REPOSITORY_ID, "--private", "--json"]
    with LocalHub() as hub:
        finished = completed(words, **hub.environment)
        assert "private" in hub.created[0].values() and hub.created[0].get("type") != "dataset"
        assert [set(commit) for commit in hub.commits] == [set(json.loads(finished.stdout)["sent"])]
        assert hub.files["report.html"] == b"page" and len(hub.files) == 4
        hub.refuse_with = 403
        refused(execute(words, **hub.environment), "HF_TOKEN")


CHILD = """
import signal, sys, time
signal.signal({}, lambda *_: sys.exit(75))
print("ready", flush=True)
time.sleep(60)
"""
PARENT = """
import sys
from pretraining.runtime.processes import CommandOutput, CommandEnded, call
try:
    print(call([sys.executable, "-c", sys.argv[1]]))
except CommandEnded as ended:
    print("ended with", ended.code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_reaches_the_command_of_the_step(number):
    """Ctrl-C and SIGTERM reach it once, and its exit code counts."""
    command = [sys.executable, "-u", "-c", PARENT, CHILD.format(int(number))]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == "ended with 75\n"


@pytest.mark.parametrize(
    "handler, said",
    [
        ("signal.SIG_DFL", "ended with 75"),
        ("lambda *_: sys.exit()", "CommandOutput(text='', stop_asked=True)"),
    ],
)
def test_a_command_that_has_no_word_for_a_stop_was_stopped_too(handler, said):
    """The signal ends it: a stop and no failure. It ends well nevertheless: whoever asked is told."""
    child = CHILD.format(int(signal.SIGTERM)).replace("lambda *_: sys.exit(75)", handler)
    command = [sys.executable, "-u", "-c", PARENT, child]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == f"{said}\n"


def test_the_same_steps_are_a_target_of_make():
    shown = execute(["make", "--dry-run", "pipeline", "RECIPE=tiny"]).stdout.splitlines()
    words = shlex.split(next(line for line in shown if "pretraining.pipeline" in line))
    assert words[:6] == ["python", "-m", "pretraining.pipeline", "--recipe", "tiny", "--launcher"]
