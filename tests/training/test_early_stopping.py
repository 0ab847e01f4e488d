"""Early stopping: as transformers judges, the same after a kill, and a clean end."""

import math
import random
import shutil
from types import SimpleNamespace

import pytest
from transformers import EarlyStoppingCallback

from pretraining.recipe.sections import Evaluation
from pretraining.runtime.metric_names import is_better
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.stopping import EarlyStopping, best_step, validations_without_gain
from tests.gear.runs import Run, committed, completed

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
