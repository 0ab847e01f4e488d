"""The parts that judge a run and keep its history: score, journal, order without windows, refused steps."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from pretraining.data.order import GlobalOrder, OrderWithout
from pretraining.errors import UserError
from pretraining.model.build import build_model
from pretraining.model.loss import next_token_loss
from pretraining.recipe import load_recipe
from pretraining.recipe.budget import Progress, StepSizes
from pretraining.recipe.sections import Monitors, Spikes
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.journal import Journal, Rollback
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.arguments import build_arguments
from pretraining.training.gradients import LayerNormsCallback
from pretraining.training.metrics import MetricsCallback
from pretraining.training.schedule import follow_run
from pretraining.training.stability import (
    Deviations,
    NonFiniteGuard,
    NumberOnItsWay,
    Plateau,
    SpikeScore,
    StabilityMonitor,
)
from pretraining.training.throughput import SpeedMeter
from pretraining.training.trainer import PretrainingTrainer, RunParts
from pretraining.upstream.torch import rates_now, set_rates
from tests.gear.on_ranks import on_ranks
from tests.gear.runs import SMALL_RECIPE, TOKENIZER

SPIKES = Spikes(non_finite_streak=3)
WEIGHT = "transformer.h.0.mlp.c_fc.weight"


def falling(num_steps: int, seed: int = 0) -> list[float]:
    """A healthy curve: a cliff, then a power law, with 2 % of noise."""
    draw = random.Random(seed)
    means = [3 + 6 * math.exp(-step / 20) + 2 * (step + 1) ** -0.2 for step in range(num_steps)]
    return [mean * math.exp(draw.gauss(0, 0.02)) for mean in means]


def scores(losses: list[float], course: SpikeScore) -> list[float]:
    """The score of each loss before it is remembered, as the monitor does it."""
    found = []
    for loss in losses:
        found.append(course.score(loss))
        course.add(loss, found[-1] > 6)
    return found


@pytest.mark.parametrize("factor", [1.3, 2.0, 5.0])
def test_a_spike_is_found_at_its_first_step_and_a_healthy_curve_raises_none(factor):
    """Cliff, fall and noise stay below the limit; a rise of 1.3 and more does not."""
    losses = falling(600)
    assert max(scores(losses, SpikeScore(128))) < 6
    losses[300:305] = [loss * factor for loss in losses[300:305]]
    found = [step for step, score in enumerate(scores(losses, SpikeScore(128))) if score > 6]
    assert found == [*range(300, 305)]


def test_the_limit_is_the_loss_at_which_the_score_is_reached():
    """What is compared on the device before the step is what the score says after it."""
    course = SpikeScore(64)
    assert course.limit(6.0) == math.inf and course.score(math.nan) == math.inf
    scores(falling(100), course)
    assert course.score(course.limit(6.0)) == pytest.approx(6.0)


def test_a_new_level_is_taken_for_the_course_after_a_while():
    """A lasting jump (another stage of the data) is told of, then lived with."""
    losses = falling(300)
    found = scores([*losses, *(loss * 1.5 for loss in falling(200, 1)[100:])], SpikeScore(64))
    assert found[300] > 6 and max(found[-30:]) < 6


def test_a_restored_score_goes_on_as_if_nothing_had_happened():
    """The state is JSON, and the scores after it are the unbroken run's to the last digit."""
    losses, whole, saved = falling(300), SpikeScore(64), SpikeScore(64)
    expected = scores(losses, whole)
    scores(losses[:170], saved)
    resumed = SpikeScore(64)
    resumed.restore(json.loads(json.dumps(saved.state())))
    assert scores(losses[170:], resumed) == expected[170:]


@pytest.mark.parametrize(("earlier", "now"), [("robust", "deviations"), ("deviations", "robust")])
def test_a_window_kept_by_another_rule_begins_anew(tmp_path, earlier, now):
    """One keeps logarithms, the other losses. What no rule concerns goes on."""
    monitors = [
        StabilityMonitor(RunFolder(tmp_path), Monitors(spikes=Spikes(rule=rule)), lambda step: {})
        for rule in (earlier, earlier, now, now)
    ]
    saved, same, other, fresh = monitors
    scores(falling(200), saved.loss_course)
    scores(falling(200), saved.norm_course)
    saved.spikes = 3
    state = SimpleNamespace(stateful_callbacks={"StabilityMonitor": json.loads(json.dumps(saved.state()))})
    for each in (same, other):
        kept = SimpleNamespace(stateful_callbacks=dict(state.stateful_callbacks))
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        each.on_train_begin(SimpleNamespace(fp16=False), kept, None, optimizer, None)
    assert same.state() == saved.state()
    assert other.state()["attributes"] == {**fresh.state()["attributes"], "spikes": 3}


def test_deviations_are_those_of_olmo_3(tmp_path):
    """A value is judged by mean and deviation of the window before it, spikes in it too, once half of it is there."""
    values, window, course = falling(150), 16, Deviations(16)
    values[40], values[90:92] = values[40] * 2, [math.nan, math.inf]
    for step, value in enumerate(values):
        finite = [each for each in values[:step] if math.isfinite(each)]
        before = torch.tensor(finite[-window:], dtype=torch.float64)
        if len(before) < window // 2:
            assert course.score(value) == 0 and course.limit(6) == math.inf
        elif math.isfinite(value):
            deviation, mean = torch.std_mean(before)
            assert course.limit(6) == pytest.approx((mean + 6 * deviation).item())
            assert course.score(value) == pytest.approx(((value - mean) / deviation).item())
        course.add(value, is_spike=value > course.limit(6))
        again = Deviations(window)
        again.restore(json.loads(json.dumps(course.state())))
        course = again
    assert course.score(math.nan) == math.inf


def test_a_step_is_left_out_by_its_norm_alone(tmp_path):
    """The loss is as ever and the gradient is not: the event says both."""
    spikes = Spikes(policy="skip", rule="deviations", window=32)
    watched = Watched(
        tmp_path, [3.0 + 0.01 * (step % 3) for step in range(40)], spikes, bad_gradients=(30,), factor=100.0
    )
    assert [step for step, applied in enumerate(watched.applied()) if not applied] == [30]
    (spike,) = (event for event in read_rows(watched.run.events) if event["event"] == "spike")
    assert spike["step"] == 31 and spike["grad_norm"] > 10 * spike["expected_grad_norm"]
    assert [kind for kind, _ in watched.told() if kind == "plateau"] == ["plateau"]


@pytest.mark.gpu
def test_the_loss_is_known_before_the_device_is_done_with_the_step():
    """What is queued after the loss is not waited for."""

    matrix = torch.randn(8192, 8192, device="cuda")
    number = NumberOnItsWay(torch.full((), 2.5, device="cuda"))
    for _ in range(50):
        matrix = matrix @ matrix
    end = torch.cuda.Event()
    end.record()
    assert number.read() == 2.5 and not end.query()


def test_a_plateau_shows_once():
    """No gain of 0.1 % for ten steps; again only after the loss fell and stopped once more."""
    plateau = Plateau(10)
    losses = [5 - 0.1 * step for step in range(20)] + [3.0] * 40 + [2.5] * 30
    shown = [step for step, loss in enumerate(losses) if plateau.shows(step, loss)]
    assert shown == [30, 70]
    assert not any(Plateau(None).shows(step, 3.0) for step in range(100))


def windows(seed: int) -> list[tuple[int, int]]:
    """Some windows, which overlap, touch and lie apart."""
    draw = random.Random(seed)
    starts = [draw.randrange(200) for _ in range(draw.randint(1, 6))]
    return [(start, start + draw.randint(1, 30)) for start in starts]


@pytest.mark.parametrize("seed", range(10))
def test_left_out_windows_move_later_samples_forward_and_drop_nothing_else(seed):
    """The run reads exactly the positions outside the windows, in order, whether asked one by one or in batches."""
    left_out = windows(seed)
    journal = Journal(tuple(Rollback(9, 1, window) for window in left_out))
    kept = [p for p in range(2000) if not any(first <= p < last for first, last in left_out)]
    assert [journal.position(sample) for sample in range(1500)] == kept[:1500]
    order = GlobalOrder(97, 3, "fingerprint")
    without = OrderWithout(order, journal.left_out)
    assert without.positions(np.arange(1500)).tolist() == kept[:1500]
    assert without.blocks(np.arange(700, 760)).tolist() == order.blocks(np.array(kept[700:760])).tolist()


def test_a_journal_is_read_back_and_a_half_written_line_was_never_in_force(tmp_path):
    """Rows survive the disk; what a dying run left behind counts for nothing."""
    path = tmp_path / "journal.jsonl"
    journal = Journal((Rollback(61, 40, (440, 520)), Rollback(75, 60, (560, 580), 0.5, 10)))
    assert Journal.read(path) == Journal()
    journal.write(path)
    assert Journal.read(path) == journal
    path.write_text(path.read_text() + '{"step": 90, "to_')
    assert Journal.read(path) == journal


def test_a_checkpoint_of_an_abandoned_course_is_overtaken():
    """Later than the step that was returned to, and committed before: whatever is saved afterwards is good."""
    journal = Journal((Rollback(61, 40, (440, 520)),))
    assert [journal.overtakes(step, 0) for step in (20, 40, 60)] == [False, False, True]
    assert not journal.overtakes(60, 1)


def test_the_lowered_rate_is_a_function_of_the_step(tmp_path):
    """Lower after a rollback for as long as the journal says, then the schedule's own; resuming changes nothing."""
    journal = Journal((Rollback(9, 4, (0, 1), 0.5, 3),))

    def rates(first_step: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=8.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        follow_run(scheduler, load_recipe("features/gpt2").progress(), journal=journal)
        scheduler.last_epoch = first_step
        set_rates(scheduler, rates_now(scheduler))
        seen = []
        for _ in range(first_step, 10):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return seen

    halved = [4, 5, 6]
    assert rates(0) == [8 / (1 + step) * (0.5 if step in halved else 1) for step in range(10)]
    assert rates(5) == rates(0)[5:]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    with pytest.raises(UserError, match="lr_factor"):
        follow_run(plateau, load_recipe("features/gpt2").progress(), journal=journal)


@pytest.fixture(autouse=True)
def one_thread():
    """On a busy machine the threads of small operations wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Watched:
    """A Trainer on a small model whose loss at step k is made to read losses[k]."""

    def __init__(
        self,
        tmp_path: Path,
        losses: list[float],
        policy: str | Spikes,
        bad_gradients=(),
        logging_steps=1,
        factor=math.inf,
    ):
        settings = (
            "per_device_train_batch_size=1",
            "learning_rate=5e-5",
            "warmup_steps=0",
            "save_strategy=no",
        )
        settings += ("eval_strategy=no", "logging_first_step=false", f"logging_steps={logging_steps}")
        recipe = load_recipe("features/gpt2", [f"training.{each}" for each in settings])
        arguments = build_arguments(recipe, None, tmp_path, 1, len(losses))
        self.model = build_model(SMALL_RECIPE["model"], TOKENIZER, arguments)
        self.run, self.weights, self.refused = RunFolder(tmp_path / "run"), [], []
        spikes = policy if isinstance(policy, Spikes) else replace(SPIKES, policy=policy)
        monitors = Monitors(spikes=spikes, plateau_steps=30)
        self.monitor = StabilityMonitor(self.run, monitors, lambda step: {"samples": [step - 1, step]})
        remaining = iter(enumerate(losses))
        speed = SpeedMeter(Progress(StepSizes.of(8), 8, 8 * len(losses)))

        def loss(outputs, labels, num_items_in_batch=None):
            self.weights.append(self.model.get_parameter(WEIGHT).detach().clone())
            self.refused.append(self.monitor.refused_last_step)
            step, value = next(remaining)
            real = next_token_loss(outputs, labels, num_items_in_batch)
            if step in bad_gradients:
                real.register_hook(lambda gradient: gradient * factor)
            return real - real.detach() + value

        layers = LayerNormsCallback(self.run, None, lambda: self.monitor.alerted_step)
        PretrainingTrainer(
            recipe,
            self.model,
            arguments,
            loss=self.monitor.watch.around(loss),
            train_dataset=[{"input_ids": np.arange(8), "labels": np.arange(8)}] * len(losses),
            parts=RunParts(callbacks=[self.monitor, layers, MetricsCallback(self.run, speed, lambda: 80)]),
        ).train()

    def applied(self) -> list[bool]:
        """Of each step but the last: whether it changed the weights."""
        return [not torch.equal(a, b) for a, b in zip(self.weights, self.weights[1:], strict=False)]

    @property
    def rows(self) -> list[dict]:
        return read_rows(self.run.metrics)

    def told(self) -> list[tuple[str, int]]:
        """Kind and step of every event."""
        return [(event["event"], event["step"]) for event in read_rows(self.run.events)]


def test_a_nan_is_shown_as_a_nan_and_only_where_it_was(tmp_path):
    """Promise: honest numbers. A row is the mean of its steps, and the rows after a NaN are numbers again."""
    losses = [5.0, 4.0, 3.0, 2.0, math.nan, 1.0, 6.0, 8.0, 2.0, math.inf, 1.0, 3.0]
    rows = Watched(tmp_path, losses, "log", logging_steps=2).rows
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    assert [row["train/tokens"] for row in rows] == [16, 32, 48, 64, 80, 96]
    shown = [row["train/loss"] for row in rows]
    assert math.isnan(shown.pop(2)) and shown == [4.5, 2.5, 7.0, math.inf, 2.0]


def test_an_explosion_of_gradients_is_told_once(tmp_path):
    """A norm far above its course: one event for the whole stretch, with what it may be from and what to try."""
    run, draw = RunFolder(tmp_path / "run"), random.Random(0)
    settings = Monitors(spikes=SPIKES)
    monitor = StabilityMonitor(run, settings, lambda step: {"samples": [step - 1, step]})
    norms = [math.exp(draw.gauss(0, 0.1)) for _ in range(100)]
    norms[70:72], norms[80] = [9.0, 8.0], math.nan
    for step, norm in enumerate(norms, 1):
        state = SimpleNamespace(global_step=step, is_world_process_zero=True)
        monitor.on_log(None, state, None, logs={"loss": 3.0, "grad_norm": norm})
    (event,) = read_rows(run.events)
    assert (event["event"], event["step"], event["grad_norm"]) == ("gradient_explosion", 71, 9.0)
    assert event["score"] > 6 and event["causes"] and event["try"] and event["samples"] == [70, 71]
    assert monitor.alerted_step == 71


@pytest.mark.parametrize("policy", ["log", "skip", "rollback"])
def test_a_spike_is_told_once_and_skipped_only_where_the_recipe_says_so(tmp_path, policy):
    """Judged before the optimizer's step: a skipped one leaves the weights as they are, at any ratio.

    A rollback leaves training there: the caller learns the step and why; nothing more is trained.
    """
    losses = falling(70)
    losses[60:63] = [loss * 2 for loss in losses[60:63]]
    watched = Watched(tmp_path, losses, policy)
    if policy == "rollback":
        assert watched.monitor.finding.step == 61 and "deviations" in watched.monitor.finding.sentence
        assert len(watched.weights) == 61
        return
    after = [("layer_norms", 62)] if policy == "log" else []  # a step that is left out has no gradients
    assert watched.told() == [("spike", 61), *after]
    left = [step for step, applied in enumerate(watched.applied()) if not applied]
    assert left == ([60, 61, 62] if policy == "skip" else [])
    assert [step for step, refused in enumerate(watched.refused[1:]) if refused] == left
    rows = watched.rows
    assert [row["train/loss"] for row in rows] == pytest.approx(losses)
    assert rows[-1]["stability/refused_steps"] == len(left)
    assert (rows[59]["stability/spikes"], rows[-1]["stability/spikes"]) == (0, 1)


def test_gradients_that_are_not_finite_are_never_applied(tmp_path):
    """Whatever the policy; a loss that is NaN is told of, and a streak of such steps ends a run that may not go on."""
    losses = falling(12)
    losses[8] = math.nan
    watched = Watched(tmp_path, losses, "log", bad_gradients=(4,))
    assert watched.applied()[4] is False and all(watched.applied()[5:8])
    told = [("non_finite", 5), ("layer_norms", 6), ("non_finite", 9), ("layer_norms", 10)]
    assert watched.told() == told and watched.monitor.finding is None
    norms = read_rows(watched.run.events)[1]["gradient_norms"]
    assert norms["transformer.h.1"] > 0 and "transformer.wte" in norms
    stopped = Watched(tmp_path / "stopped", falling(12), "stop", bad_gradients=(5, 6, 7, 8))
    assert stopped.monitor.finding.step == 8 and len(stopped.weights) == 8


@pytest.mark.parametrize(
    ("gradient", "norm", "applied"),
    [
        (1.0, None, True),
        (math.nan, None, False),
        (math.inf, None, False),
        (1.0, math.inf, False),
        (1.0, 1.0, True),
    ],
)
def test_the_guard_looks_for_itself_where_nobody_told_the_norm(gradient, norm, applied):
    """What was told holds for one step."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    guard = NonFiniteGuard(optimizer)
    if norm is not None:
        guard.on_gradient_norm(torch.tensor(norm))
    weight.grad = torch.full((3,), gradient)
    optimizer.step()
    assert weight.tolist() == [-1.0 if applied else 0.0] * 3
    assert guard.refused_last_step() is not applied
    weight.grad = torch.ones(3)
    optimizer.step()
    assert weight.tolist() == [-2.0 if applied else -1.0] * 3 and not guard.refused_last_step()


WAYS = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero2_offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero3_offload": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}
FACTORS = (1.0, float("inf"), 1.0, float("nan"), 1.0)
"""Of the loss of each step."""


def refused_steps(zero: dict) -> list[bool]:
    """Which of the steps were refused, by bf16 weights with fp32 sums of two micro-batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    choose = DeepSpeedCPUAdam if "offload_optimizer" in zero else torch.optim.AdamW
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {**zero, "reduce_bucket_size": 1000},
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=choose(model.parameters(), lr=0.01), config=config
    )
    wrapped = SimpleNamespace(optimizer=optimizer, step_was_skipped=False)  # as accelerate wraps it
    guard, refused = NonFiniteGuard(wrapped), []
    for factor in FACTORS:
        for _ in range(2):
            loss = engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().mean() * factor
            engine.backward(loss)
            engine.step()
        wrapped.step_was_skipped = optimizer.overflow
        refused.append(guard.refused_last_step())
    return refused


def refused_steps_of_all() -> dict[str, list[bool]]:
    return {name: refused_steps(zero) for name, zero in WAYS.items()}


def test_one_refused_step_does_not_refuse_the_next():
    """A step that is not finite costs itself alone, at every stage: bf16 weights, fp32 sums of gradients."""
    (story,) = on_ranks(1, refused_steps_of_all)
    assert len(story) == 5
    assert all(refused == [False, True, False, True, False] for refused in story.values()), story
