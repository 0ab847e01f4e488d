"""Trackers of `report_to`: a killed and resumed run stays one run, and a missing one costs a sentence."""

import json
import os
import sqlite3
import sys
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback, TrainerState

from pretraining.errors import UserError
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.trackers import PROJECT, SHOW_TEXT, RunIdentity, Tracker, Trackers, build_trackers
from tests.gear.runs import REPOSITORY, Run, completed, execute, without_packages

TEXT = "samples/1/text_summary"
"""What TensorBoard calls the first prompt's samples."""
SAMPLE = {"step": 3, "prompt": "def", "text": "def f"}


@pytest.fixture(scope="module")
def run(resumed) -> Run:
    return resumed[0]


def test_a_resumed_run_continues_the_same_wandb_run(run):
    """Offline, without an account: two starts, one run id, the one that lies in the run folder."""
    ids = [path.name.rpartition("-")[2] for path in run.folder.glob("wandb/offline-run-*")]
    assert len(ids) == 2
    assert set(ids) == {run.dir.wandb_id.read_text().strip()}


def test_a_run_says_each_thing_once(run):
    """Two trackers are not one callback too many, and of the ranks one alone prints."""
    said = run.finished.stdout + run.finished.stderr
    assert "there is already one" not in said, run.finished.output
    assert said.count("\nplan   ") == 1


def test_without_an_account_wandb_is_kept_offline(tmp_path, monkeypatch):
    """A key in the environment or in netrc is an account; the run has one name and id either way."""
    run, arguments = RunFolder(tmp_path), SimpleNamespace(run_name=None)
    state, netrc = SimpleNamespace(is_world_process_zero=True), tmp_path / "netrc"
    seen = []
    for account in ({}, {"WANDB_API_KEY": "k"}, {}):
        monkeypatch.setattr(os, "environ", {"NETRC": str(netrc), **account})
        RunIdentity(run, "small", ["wandb"]).on_train_begin(arguments, state, None)
        seen.append(dict(os.environ))
        netrc.write_text("machine api.wandb.ai\n" if account else "")
    assert [variables.get("WANDB_MODE") for variables in seen] == ["offline", None, None]
    assert len({(variables["WANDB_RUN_ID"], variables["WANDB_NAME"]) for variables in seen}) == 1
    monkeypatch.setattr(os, "environ", {})
    arguments.run_name = "mine"  # as `training.run_name` says
    RunIdentity(run, "small", ["wandb"]).on_train_begin(arguments, state, None)
    assert os.environ["WANDB_NAME"] == arguments.run_name == "mine"


@pytest.mark.parametrize("project", [None, "mine"])
def test_all_trackers_file_a_run_under_one_project(tmp_path, monkeypatch, project):
    """`training.project`, else the repository's; what the environment says stays."""
    schema = json.loads((REPOSITORY / "recipes" / "schema.json").read_text())
    assert schema["properties"]["training"]["properties"]["project"]["default"] == PROJECT
    monkeypatch.setattr(os, "environ", {"MLFLOW_EXPERIMENT_NAME": "given"})
    arguments = SimpleNamespace(run_name=None, project="huggingface")
    state, names = SimpleNamespace(is_world_process_zero=True), ["mlflow", "trackio", "clearml"]
    RunIdentity(RunFolder(tmp_path), "small", names, project).on_train_begin(arguments, state, None)
    assert (arguments.project, arguments.run_name) == (project or PROJECT, "small")
    assert os.environ == {"MLFLOW_EXPERIMENT_NAME": "given", "CLEARML_PROJECT": project or PROJECT}


@pytest.fixture(scope="module")
def events(run):
    """TensorBoard's files, which lie in the run folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run.folder / "tensorboard")).Reload()


def test_tensorboard_holds_the_numbers_of_metrics_jsonl(run, events):
    """Of steps that the resume has done again, those of before are hidden; the Trainer's summary is not there."""
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    assert len(shown) == len(events.Scalars("train/loss"))
    rows = {row["step"]: row["train/loss"] for row in run.training_rows}
    # of steps before the kill, what TensorBoard had not written yet is lost
    assert shown == pytest.approx({step: rows[step] for step in shown})
    resumed_at = next((e["checkpoint"] for e in run.events if e["event"] == "resume"), "checkpoint-0")
    assert shown.keys() >= set(range(int(resumed_at.partition("-")[2]) + 1, max(rows) + 1))
    assert not [name for name in events.Tags()["scalars"] if "runtime" in name or "train_loss" in name]
    assert not [name for name in events.Tags()["scalars"] if name.startswith("train/throughput")]
    assert events.Scalars("throughput/step_seconds")
    last = events.Scalars("eval/bits_per_byte")[-1]
    assert last.value == pytest.approx(run.validation_rows[-1]["eval/bits_per_byte"])


def test_tensorboard_forgets_undone_steps(tmp_path, monkeypatch):
    """Steps that were written, then done again with another loss, after a rollback in the same process."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    run = RunFolder(tmp_path / "run")
    (_, trackers), control = build_trackers("tensorboard", run, "small"), SimpleNamespace()
    arguments = SimpleNamespace(to_json_string=lambda: "{}", output_dir=str(tmp_path))
    for first, loss in ((0, 1.0), (2, 2.0)):
        state = TrainerState(global_step=first, is_world_process_zero=True)
        trackers.on_train_begin(arguments, state, control)
        for state.global_step in range(first + 1, 5):
            trackers.on_log(arguments, state, control, logs={"train/loss": loss})
        trackers.on_log(arguments, state, control, logs={"train_loss": 0.5, "train_runtime": 1.0})
        trackers.on_train_end(arguments, state, control)
    events = EventAccumulator(str(tmp_path)).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert shown == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)] and not read_rows(run.events)
    assert events.Tags()["scalars"] == ["train/loss"]


def test_samples_are_texts_in_the_trackers(run, events):
    """Those of samples.jsonl, at their steps."""
    shown = {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors(TEXT)}
    paths = sorted(run.folder.glob("wandb/offline-run-*/files/media/table/samples_*"), reverse=True)
    last, *_ = tables = [json.loads(path.read_text()) for path in paths]
    for sample in run.samples[-1:]:
        assert shown[sample["step"]] == "".join(f"    {line}\n" for line in sample["text"].split("\n"))
        row = [sample["step"], sample["prompt"], sample["text"]]
        assert row in [row for table in tables for row in table["data"]]
    assert last["columns"] == ["step", "prompt", "text"]


def test_nothing_is_tracked_unless_the_recipe_says_so(workshop):
    """`report_to` none: no event files, no wandb folder, no id."""
    run = workshop.run("zero2")
    assert not {"wandb", "tensorboard", "wandb_id"} & {path.name for path in run.folder.iterdir()}


def test_a_missing_tracker_is_one_line(workshop, tmp_path):
    """Exit code 2, one line that says what to install, nothing written."""
    output = tmp_path / "run"
    command = workshop.command(output, "null", 1, "python", ("training.report_to=wandb",))
    finished = execute(command, **without_packages(tmp_path, "wandb"))
    assert (finished.code, finished.stderr.count("\n")) == (2, 1), finished.output
    assert finished.stderr.startswith("error: ") and "pip install wandb" in finished.stderr
    assert not output.exists()


def test_an_unknown_tracker_is_one_sentence(workshop):
    """Which one, and which there are."""
    with pytest.raises(UserError, match=r"wandbb.*tensorboard"):
        build_trackers("wandbb", workshop.plain().dir, "small")


class Moody(TrainerCallback):
    """A tracker that raises while it is `broken`."""

    def __init__(self):
        self.broken, self.seen = False, []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.broken:
            raise ConnectionError("no route\nto host")
        self.seen.append(logs)


def test_a_failing_tracker_stops_nothing_and_is_told_once(tmp_path):
    """Tried again, left alone for longer each time, back when it works: two events, never an exception."""
    run, moody = RunFolder(tmp_path / "run"), Moody()
    trackers = Trackers([Tracker("moody", moody, run)])
    state = SimpleNamespace(is_world_process_zero=True, global_step=7)
    for number in range(40):
        moody.broken = 5 <= number < 20
        trackers.on_log(None, state, None, logs={"loss": number})
    first, second = read_rows(run.events)
    assert (first["event"], first["tracker"], first["step"]) == ("tracker_failed", "moody", 7)
    assert first["reason"] == "ConnectionError: no route to host"
    assert second["event"] == "tracker_recovered"
    assert [logs["loss"] for logs in moody.seen][:5] == [0, 1, 2, 3, 4] and moody.seen[-1] == {"loss": 39}


TRACKED = """
import sys
from types import SimpleNamespace
from transformers import TrainerState, TrainingArguments
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.trackers import build_trackers
args = TrainingArguments(output_dir=sys.argv[1], use_cpu=True)
state = TrainerState(is_world_process_zero=True, global_step=3)
given = args, state, None
model = SimpleNamespace(config=None, num_parameters=lambda: 1)
callbacks = build_trackers("trackio", RunFolder(sys.argv[1]), "small")
for callback in callbacks:
    callback.on_train_begin(*given, model=model)
RunFolder(sys.argv[1]).samples.write_text(sys.argv[2])
for callback in callbacks:
    callback.on_log(*given, model=model, logs={"loss": 2.5, "eval_loss": 3.0})
    callback.on_evaluate(*given, model=model)
    callback.on_train_end(*given, model=model)
"""


def test_trackio_holds_the_names_of_metrics_jsonl(tmp_path):
    """Local, inside the run folder, without an account."""
    pytest.importorskip("trackio", reason="trackio is not installed (requirements-trackers.txt)")
    (tmp_path / "run").mkdir()
    (tmp_path / "program.py").write_text(TRACKED)
    completed(["forked", "0", tmp_path / "program.py", tmp_path / "run", json.dumps(SAMPLE) + "\n"])
    assert not (tmp_path / "run" / "events.jsonl").exists(), read_rows(tmp_path / "run" / "events.jsonl")
    (database,) = (tmp_path / "run" / "trackio").glob("*.db")
    assert database.stem == "pretraining"
    logged = [row[0] for row in sqlite3.connect(database).execute("select metrics from metrics")]
    assert json.loads(logged[0]) == {"train/loss": 2.5, "eval/loss": 3.0, "train/global_step": 3}
    shown = json.loads(logged[1])["samples"]
    assert shown["_value"] == [SAMPLE]


def test_mlflow_gets_the_samples_of_a_step_as_a_text(monkeypatch):
    """By mlflow's own function, of which the test needs no more than the call."""
    kept = []
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(log_text=lambda *words: kept.append(words)))
    SHOW_TEXT["mlflow"](None, [SAMPLE, {**SAMPLE, "prompt": "", "text": "x"}])
    ((text, name),) = kept
    assert name == "samples/step-00000003.txt" and "prompt: 'def'\n\ndef f" in text and text.endswith("x\n")
