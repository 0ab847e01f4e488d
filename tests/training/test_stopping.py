"""Promise: nothing committed is lost. A run that is asked to stop saves, and says so by its exit code.

Early stopping: as transformers judges, the same after a kill, and a clean end.

`python -m tests.training.test_stopping OPTIONS` is `train.py OPTIONS`, and prints what is left once it has ended.
"""

import json
import math
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

from pretraining.recipe import load_recipe
from pretraining.recipe.sections import Evaluation
from pretraining.runtime.exit_codes import STOPPED
from pretraining.runtime.metric_names import is_better
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.stopping import EarlyStopping, best_step, validations_without_gain
from tests.gear.runs import (
    REPOSITORY,
    SMALL_RECIPE,
    TIMEOUT_SECONDS,
    TOKENIZER,
    Run,
    Started,
    committed,
    completed,
    execute,
)

LISTENING = (
    "import os, sys, time\n"
    "sys.path.append('.')\n"
    "from pretraining.runtime import processes\n"
    "processes.SAME_REQUEST_SECONDS = 0.3\n"
    "listener = processes.SignalListener()\n"
    "print('ready', flush=True)\n"
)
IN_A_COLLECTIVE = (
    "import ctypes\n"
    "lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)\n"
    "lock(mutex), lock(mutex)\n"
)
"""The main thread in C code without end, where Python runs no handler."""


def wait_until(reached: Callable[[], bool]) -> None:
    until = time.monotonic() + TIMEOUT_SECONDS
    while not reached():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.005)


@pytest.fixture
def listening():
    """Starts a program after `SignalListener()`; yields the process once it listens."""
    started = []

    def start(program: str) -> subprocess.Popen:
        words = [sys.executable, "-c", LISTENING + program]
        started.append(subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_signals_are_heard_at_once_and_insisting_ends_the_process(listening):
    """One Ctrl-C, which comes twice through a launcher, is one request; another one later stops C code too."""
    process = listening(
        "import threading\n"
        "def tell():\n"
        "    while listener.received is None: time.sleep(0.001)\n"
        "    print(listener.received, flush=True)\n"
        "threading.Thread(target=tell, daemon=True).start()\n" + IN_A_COLLECTIVE
    )
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    # of two signals that wait for a process Linux delivers the one of the lower number first
    assert int(process.stdout.readline()) in (signal.SIGTERM, signal.SIGINT)
    assert process.poll() is None
    time.sleep(0.4)
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_SECONDS) == 128 + signal.SIGTERM


def test_a_forked_process_does_not_ask_its_parent_to_stop(listening):
    """A data worker that is signalled dies of it alone: its copy of the pipe is the parent's no more."""
    process = listening(
        "child = os.fork()\n"
        "if child == 0: time.sleep(60), os._exit(0)\n"
        "os.kill(child, 15)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
        "time.sleep(0.1)\n"
        "print(listener.received, flush=True)\n"
    )
    assert process.stdout.readline() == f"{-signal.SIGTERM}\n"
    assert process.stdout.readline() == "None\n"


def test_the_reason_is_who_asked(tmp_path, monkeypatch):
    """The run's own file is not the supervisor's, whose request counts where both are there."""
    from pretraining.runtime.exit_codes import SUPERVISOR
    from pretraining.training import stopping

    monkeypatch.setattr(stopping, "SignalListener", lambda in_vain: SimpleNamespace(received=None))
    monkeypatch.setenv(SUPERVISOR, str(tmp_path / "supervisor"))
    (tmp_path / "supervisor").mkdir()
    run, reasons = RunFolder(tmp_path), []
    for file in (run.stop_file, tmp_path / "supervisor" / "STOP"):
        file.touch()
        stop = stopping.StopRequests(run, None)
        assert stop.agreed()
        reasons.append(stop.reason)
    assert reasons == ["a stop file", "its supervisor was asked to stop"]


@pytest.mark.parametrize(
    "by_deepspeed, number, said",
    [
        (True, signal.SIGTERM, "SIGTERM (deepspeed sends it for Ctrl-C too)"),
        (False, signal.SIGTERM, "SIGTERM"),
        (True, signal.SIGINT, "SIGINT"),
    ],
)
def test_a_sigterm_of_deepspeed_may_be_a_ctrl_c(tmp_path, monkeypatch, capsys, by_deepspeed, number, said):
    """Honest output: its launcher ends the ranks by SIGTERM whichever of the two it was sent itself."""
    from pretraining.training import stopping

    monkeypatch.setattr(stopping, "SignalListener", lambda in_vain: SimpleNamespace(received=number))
    monkeypatch.setattr(stopping, "started_by_deepspeed", lambda: by_deepspeed)
    stop = stopping.StopRequests(RunFolder(tmp_path), None)
    assert stop.agreed() and stop.reason == number.name
    with pytest.raises(SystemExit):
        stop.leave_if_agreed(6)
    assert (
        capsys.readouterr().err == f"stopped at step 6: {said}; the same command without --resume continues\n"
    )
    assert Run(tmp_path).events[-1]["reason"] == number.name


def test_a_stop_file_inside_a_validation(workshop, tmp_path):
    """Two ranks agree between two rounds, save, and leave with 75; started again, the curve is the undisturbed one."""
    settings = ("budget.tokens=15360",)  # thirty steps: seconds are left for the file
    output, reference = tmp_path / "run", workshop.run("zero2", settings=settings)
    command = workshop.command(output, "zero2", settings=settings)
    started, run = Started(command), Run(output)
    try:
        wait_until(lambda: len(run.training_rows) >= 5 or started.process.poll() is not None)
        run.dir.stop_file.touch()
    finally:
        finished = started.finish()
    assert finished.code == STOPPED and finished.strays == (), finished.output
    stopped, saves = run.events[-1], [event["checkpoint"] for event in run.events if event["event"] == "save"]
    assert (stopped["event"], stopped["reason"]) == ("stopped", "a stop file")
    assert len(saves) == len(set(saves))  # one state is saved once
    assert committed(output)[0] == f"checkpoint-{stopped['step']}" and not run.dir.stop_file.exists()
    assert not run.dir.heartbeats.exists() and not run.dir.export.exists()
    completed(command)
    for rows, loss in (("training_rows", "train/loss"), ("validation_rows", "eval/loss")):
        ours, theirs = ([(row["step"], row[loss]) for row in getattr(r, rows)] for r in (run, reference))
        assert ours == theirs


def test_the_time_limit_stops_a_run(workshop, tmp_path):
    """`checkpoints.time_limit_hours`, here over before the first step is: one step, saved once, 75.

    The step is also one to validate at, which the stop cuts short, and one to save at.
    """
    output = tmp_path / "run"
    settings = ("checkpoints.time_limit_hours=1e-6", "training.eval_steps=1", "training.save_steps=1")
    finished = execute(workshop.command(output, "null", 1, "plain", settings))
    assert finished.code == STOPPED, finished.output
    assert [event["event"] for event in Run(output).events] == ["start", "save", "stopped"]
    assert Run(output).events[-1]["reason"] == "checkpoints.time_limit_hours"
    assert committed(output) == ["checkpoint-1"]


def test_a_launchers_sigterm_to_every_process_spares_the_data_workers(workshop, tmp_path):
    """`deepspeed` terminates whole trees: the rank saves, and does not die of its worker's death."""
    output = tmp_path / "run"
    settings = ("training.dataloader_num_workers=1", "budget.tokens=512000")
    started, run = Started(workshop.command(output, "null", 1, "plain", settings)), Run(output)
    try:
        wait_until(lambda: len(run.training_rows) >= 2 or started.process.poll() is not None)
        rank_and_worker = started.processes()[1:]
        assert len(rank_and_worker) > 1
        for process in reversed(rank_and_worker):
            os.kill(process, signal.SIGTERM)
    finally:
        finished = started.finish()
    assert finished.code == STOPPED and "Traceback" not in finished.stderr, finished.output
    assert run.events[-1]["reason"] == "SIGTERM" and len(committed(output)) >= 1


def test_closed_the_listener_leaves_signals_to_the_system(listening):
    """After training one SIGTERM ends the process, as it does any other, though the listener has heard one before."""
    process = listening(
        "os.kill(os.getpid(), 15)\n"
        "while listener.received is None: time.sleep(0.001)\n"
        "listener.close()\n"
        "os.kill(os.getpid(), 15)\n"
        "time.sleep(60)\n"
    )
    assert process.wait(TIMEOUT_SECONDS) == -signal.SIGTERM


def test_the_exit_does_not_wait_for_a_data_worker():
    """multiprocessing would send SIGTERM, which a worker ignores, and then wait for ever."""
    program = (
        "import atexit, multiprocessing, time\n"
        "from pretraining.runtime.processes import ignore_in_worker, kill_workers\n"
        "context = multiprocessing.get_context('fork')\n"
        "ignores = context.Event()\n"
        "def work(): ignore_in_worker(), ignores.set(), time.sleep(600)\n"
        "context.Process(target=work, daemon=True).start()\n"
        "ignores.wait()\n"
        "atexit.register(kill_workers)\n"
    )
    finished = execute([sys.executable, "-c", program], timeout=60)
    assert (finished.code, finished.stderr, finished.strays) == (0, "", ())


def test_no_data_worker_outlives_a_training_that_fails(tmp_path):
    """The traceback keeps the loader; a persistent worker of a run that ends well is looked for below."""
    from pretraining.model.build import build_model
    from pretraining.model.loss import build_loss
    from pretraining.training.arguments import build_arguments
    from pretraining.training.trainer import PretrainingTrainer, RunParts

    settings = ("dataloader_num_workers=2", "eval_strategy=no", "save_strategy=no")
    recipe = load_recipe("features/gpt2", [f"training.{each}" for each in settings])
    arguments = build_arguments(recipe, None, tmp_path, 1, 2)
    model = build_model(SMALL_RECIPE["model"], TOKENIZER, arguments)

    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError(f"{len(multiprocessing.active_children())} workers")

    trainer = PretrainingTrainer(
        recipe,
        model,
        arguments,
        loss=build_loss(model),
        train_dataset=[{"input_ids": np.arange(8), "labels": np.arange(8)}] * 64,
        parts=RunParts(callbacks=[Fails()]),
    )
    with pytest.raises(RuntimeError, match="2 workers") as ended:
        trainer.train()
    left = multiprocessing.active_children()
    for worker in left:
        worker.kill()
    assert ended.tb is not None and not left  # the traceback refers to the iterator


def test_nothing_is_left_after_a_run(workshop, tmp_path):
    """A finished run has no data worker that its exit could wait for, and one SIGTERM would end it."""
    settings = ("training.dataloader_num_workers=2", "training.dataloader_persistent_workers=true")
    command = workshop.command(tmp_path / "run", "null", 1, "plain", (*settings, "training.eval_strategy=no"))
    place = command.index("train.py")
    finished = completed([*command[:place], "-m", "tests.training.test_stopping", *command[place + 1 :]])
    assert Run(tmp_path / "run").events[-1]["event"] == "end"
    assert json.loads(finished.stdout.splitlines()[-1]) == {"workers": 0, "handler": signal.SIG_DFL}


STOPS_AT_4 = ("training.eval_steps=2", "evaluation.patience=1", "evaluation.min_improvement=100")
PLAIN = ("null", 1, "plain")


def counted_by_transformers(values: list[float], greater_is_better: bool, threshold: float) -> int:
    """What the Trainer and its callback count, in the order in which they do."""
    callback = EarlyStoppingCallback(10**6, threshold)
    arguments, state = SimpleNamespace(greater_is_better=greater_is_better), SimpleNamespace(best_metric=None)
    for value in values:
        callback.check_metric_value(arguments, state, None, value)
        if state.best_metric is None:
            state.best_metric = -math.inf if greater_is_better else math.inf
        if (value > state.best_metric) if greater_is_better else (value < state.best_metric):
            state.best_metric = value
    return callback.early_stopping_patience_counter


@pytest.mark.parametrize("threshold", [0.0, 0.15])
@pytest.mark.parametrize("metric", ["loss", "hellaswag/acc_norm"])
def test_validations_without_gain_are_counted_as_transformers_does(metric, threshold):
    """200 random histories, some with a NaN, whichever direction is better."""
    draw = random.Random(5)
    for _ in range(200):
        draws = range(draw.randrange(9))
        values = [draw.choice([draw.random(), draw.random(), 0.5, math.nan]) for _ in draws]
        expected = counted_by_transformers(values, metric != "loss", threshold)
        assert validations_without_gain(values, metric, threshold) == expected, values


def test_the_best_step_is_the_first_of_the_best():
    assert best_step({5: 2.0, 10: 1.0, 15: 1.0}, "loss") == 10
    assert best_step({5: math.nan, 10: 0.2, 15: 0.3}, "arc/acc") == 15
    assert not is_better("loss", math.nan, 1.0) and is_better("bits_per_byte", 1.0, 2.0)


def test_a_branch_counts_its_own_validations(tmp_path):
    """Its parent had stopped at step 4: the branch begins, and is judged from its own first validation on."""
    run, control = RunFolder(tmp_path), SimpleNamespace(should_training_stop=False, should_save=False)
    run.add_event("branch", step=4)
    run.add_event("resume", step=4, checkpoint="checkpoint-4")
    rows = [{"step": step, "eval_loss": loss} for step, loss in ((2, 5.0), (4, 5.0), (6, 7.0), (8, 7.0))]
    state = SimpleNamespace(log_history=rows[:2], global_step=4, max_steps=10, is_world_process_zero=True)
    callback = EarlyStopping(run, Evaluation(patience=1))
    callback.on_train_begin(None, state, control)
    assert not control.should_training_stop
    for count, is_over in ((3, False), (4, True)):
        state.log_history, state.global_step = rows[:count], rows[count - 1]["step"]
        callback.on_evaluate(None, state, control)
        assert control.should_training_stop == is_over
    told = run.last_event("early_stop")
    assert (told["step"], told["best_step"], told["best"]) == (8, 6, 7.0)


def test_a_run_without_gain_ends_in_order(workshop):
    """Stopped at the second validation: a checkpoint, an export, the event, and the results of that step."""
    run = workshop.run(*PLAIN, STOPS_AT_4)
    assert [row["step"] for row in run.training_rows] == [1, 2, 3, 4]
    told = next(event for event in run.events if event["event"] == "early_stop")
    losses = {row["step"]: row["eval/loss"] for row in run.validation_rows}
    best = min(losses, key=losses.get)
    assert (told["step"], told["metric"], told["best_step"], told["best"]) == (4, "loss", best, losses[best])
    assert run.events[-1]["event"] == "end" and run.events[-1]["eval_loss"] == losses[4]
    assert run.dir.export.exists() and committed(run.folder)[0] == "checkpoint-4"
    saves = [event["checkpoint"] for event in run.events if event["event"] == "save"]
    assert saves == ["checkpoint-4"]  # a step to save at, too: one state is saved once


def test_killed_before_its_export_it_does_not_train_on(workshop, tmp_path):
    """The same command starts at the checkpoint it had stopped at, and ends there with the same export."""
    stopped, output = workshop.run(*PLAIN, STOPS_AT_4), tmp_path / "run"
    shutil.copytree(stopped.folder, output)
    shutil.rmtree(output / "export")
    run = Run(output, completed(workshop.command(output, *PLAIN, STOPS_AT_4)))
    assert run.training_rows == stopped.training_rows
    weights = [each.dir.export / "model.safetensors" for each in (run, stopped)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


if __name__ == "__main__":
    runpy.run_path("train.py", run_name="__main__")
    left = {
        "workers": len(multiprocessing.active_children()),
        "handler": signal.getsignal(signal.SIGTERM),
    }
    print(json.dumps(left))
