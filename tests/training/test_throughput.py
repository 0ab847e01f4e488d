"""Honest numbers: where a step's time goes, what counts as good, which rank is slow, on runs and on known inputs."""

import json
import math
import os
import random
import re
import time
from types import SimpleNamespace

import pytest
import torch
from deepspeed.utils.config import get_timers_config

from pretraining.ds_config import ds_config_names, load_ds_config
from pretraining.planning.sizes import flops_per_token, model_size
from pretraining.postmortem import attempts_of
from pretraining.recipe import accumulation_steps, load_recipe
from pretraining.reporting.analysis import analyze, sentences
from pretraining.reporting.run_record import RunRecord
from pretraining.runtime.durable_files import append_row
from pretraining.runtime.metric_names import GROUPS, PLACE, grouped
from pretraining.runtime.run_folder import RunFolder, unix_seconds
from pretraining.runtime.wall_time import CAUSES, Goodput, Price, Row, WallTime
from pretraining.training import arguments
from pretraining.training.arguments import engine_config
from pretraining.training.throughput import (
    STEPS,
    SpeedMeter,
    StepClock,
    Stragglers,
    device_peak_flops,
    time_optimizer,
)

PHASES = ("data_wait", "forward_backward", "optimizer")


NAMES = {
    "loss": "train/loss",
    "eval_bits_per_byte": "eval/bits_per_byte",
    "tokens_per_second": "throughput/tokens_per_second",
    "stability/spike_score": "stability/spike_score",
    "step": "step",
}


@pytest.mark.parametrize("name, told", NAMES.items())
def test_every_metric_has_a_group_once(name, told):
    """One rule for files and trackers; naming twice changes nothing."""
    assert grouped(name) == told == grouped(told)


@pytest.mark.parametrize("stage", ds_config_names())
def test_deepspeed_s_own_timer_is_off(stage):
    """It would wait for the device in every micro-batch, for a line that nobody prints."""
    assert not get_timers_config(engine_config(load_recipe("qk-norm"), load_ds_config(stage))).enabled


@pytest.mark.parametrize("stage", ["zero2", "null"])
def test_the_rows_of_a_run_say_where_its_time_went(workshop, stage):
    """Grouped names alone; phases within the step; the optimizer is seen inside DeepSpeed's engine as outside it."""
    run = workshop.run("zero2") if stage == "zero2" else workshop.plain()
    for row in run.rows:
        assert {name.partition("/")[0] for name in row if name not in PLACE} <= set(GROUPS)
    for row in run.training_rows:
        parts = {name: row[f"throughput/{name}_seconds"] for name in PHASES}
        assert all(seconds > 0 for seconds in parts.values())
        assert sum(parts.values()) <= row["throughput/step_seconds"] * 1.001
        assert 0 < row["throughput/goodput"] <= 1
        assert "throughput/mfu" not in row or torch.cuda.is_available()
        assert row["train/perplexity"] == pytest.approx(math.exp(row["train/loss"]))
        samples = row["throughput/tokens_per_second"] / 64
        assert row["throughput/samples_per_second"] == pytest.approx(samples, abs=2e-3)
        assert row["stability/spikes"] == row["stability/non_finite_steps"] == 0
        assert not [name for name in row if name.startswith("hardware/")] or torch.cuda.is_available()
    last = run.training_rows[-1]
    assert (last["throughput/budget_share"], last["throughput/seconds_left"]) == (1.0, 0.0)
    after_validation = next(row for row in run.training_rows if row["step"] == 6)
    assert after_validation["throughput/evaluation_seconds"] > 0
    after_checkpoint = next(row for row in run.training_rows if row["step"] == 5)
    assert after_checkpoint["throughput/saving_seconds"] > 0


def test_the_phases_add_up_to_the_time():
    """Exactly one phase runs at any moment, nested ones included."""
    clock = StepClock(on_gpu=False)
    outer = time.perf_counter()
    clock.start()
    inner = time.perf_counter()
    clock.enter("forward")
    time.sleep(0.02)
    with clock.during("optimizer"):
        time.sleep(0.01)
    shortest = time.perf_counter() - inner
    middle = time.perf_counter()
    seconds = clock.take()
    assert shortest <= sum(seconds.values()) <= time.perf_counter() - outer
    assert clock.phase == "forward" and seconds["forward"] >= 0.02 and seconds["optimizer"] >= 0.01
    assert sum(clock.take().values()) <= time.perf_counter() - middle


@pytest.mark.gpu
def test_the_device_times_its_own_phases():
    """Work that the host has only queued counts for the phase that queued it."""
    clock, matrix = StepClock(), torch.randn(4096, 4096, device="cuda")
    clock.start()
    clock.enter("forward")
    for _ in range(50):
        matrix = matrix @ matrix
    clock.enter("other")
    assert clock.take()["forward"] > 1e-3


def test_an_optimizer_that_is_none_of_torchs_is_timed_too():
    """DeepSpeed's is one: its step is wrapped, and still returns what it did."""
    clock = StepClock(on_gpu=False)
    clock.start()
    inner = SimpleNamespace(step=lambda: time.sleep(0.01) or "stepped")
    time_optimizer(SimpleNamespace(optimizer=inner), clock)
    assert inner.step() == "stepped" and clock.take()["optimizer"] >= 0.01


def test_utilization_is_the_planners_flops_over_the_dense_peak():
    """By hand: 2,048 tokens in 0.5 s on two devices of 1e12 FLOP/s; recomputed layers count for HFU alone."""
    recipe = load_recipe("features/gpt2", ["training.activation_checkpointing=true"])
    speed = SpeedMeter.of(recipe, 2, recipe.progress())
    speed.peak_flops = 1e12
    counted = flops_per_token(model_size(recipe.model), recipe.sequence_length)
    rates = speed.rates({"forward": 2.0, "backward": 2.5, "data_wait": 0.5, "evaluation": 60.0}, 20, 30)
    assert rates["throughput/step_seconds"] == 0.5
    assert rates["throughput/tokens_per_second_per_device"] == 2048
    assert rates["throughput/mfu"] == pytest.approx(2048 * counted.training / 1e12, rel=1e-4)
    assert rates["throughput/hfu"] == pytest.approx(2048 * counted.hardware / 1e12, rel=1e-4)


def event_of(kind: str, seconds_ago: float, **details) -> dict:
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - seconds_ago))
    return {"time": when, "event": kind, **details}


CRASHED = {3600: "start", 1800: "stopped", 0: "resume"}
STOPPED = {33_600: "start", 32_000: "stopped", 22_000: "resume", 21_000: "stopped", 1000: "resume"}


@pytest.mark.parametrize("times, asked", [(CRASHED, False), (STOPPED, True)])
def test_goodput_charges_what_was_done_twice_and_the_time_between_unless_it_was_asked_for(
    tmp_path, times, asked
):
    """Of an hour 1,200 s in steps whose rows stayed: a crash's time until the resume is lost, and a stop on request,
    here of 10,000 s and again of 20,000 s, is not the run's."""
    run = RunFolder(tmp_path / "run")
    for seconds_ago, kind in times.items():
        append_row(run.events, event_of(kind, seconds_ago, **({} if kind != "stopped" else {"asked": asked})))
    kept = [{"step": step, "throughput/step_seconds": 10.0} for step in (20, 60, 100)]
    kept.insert(1, {"step": 50, "eval/loss": 3.0})
    assert Goodput(run, kept).add(20, 10.0) == pytest.approx(1 / 3, rel=1e-2)


def test_every_second_of_a_run_is_a_step_or_lost_to_one_cause():
    """A crash, a rollback and a stop: what each took is known to the second, and all causes add up."""
    events = [
        {"time": "2026-01-01T00:00:00Z", "event": "start", "world_size": 4},
        {"time": "2026-01-01T00:10:00Z", "event": "resume", "world_size": 2, "step": 100},
        {"time": "2026-01-01T00:15:00Z", "event": "rollback"},
        {"time": "2026-01-01T00:15:00Z", "event": "resume", "world_size": 2, "step": 100},
        {"time": "2026-01-01T00:20:00Z", "event": "stopped"},
        {"time": "2026-01-01T05:00:00Z", "event": "resume", "world_size": 2, "step": 200},
        {"time": "2026-01-01T05:10:00Z", "event": "end"},
    ]
    began = unix_seconds(events[0]["time"])
    rows = [
        Row(100, began + 400, step_seconds=3.0, data=0.5, saving=20.0),
        # the rows between are done again after the rollback, and replaced
        Row(200, began + 15 * 60 + 250, step_seconds=2.0, slow_rank=0.25),
        Row(300, began + 300 * 60 + 330, step_seconds=2.5, validation=50.0),
    ]
    spent = WallTime.of(events, rows, until=began + 10**6)
    assert spent.seconds == 600 + 300 + 300 + 600
    assert spent.rank_seconds == 4 * 600 + 2 * 1200
    assert spent.lost == {
        "data": 100 * 0.5,
        "slow_rank": 100 * 0.25,
        "saving": 20.0,
        "validation": 50.0,
        # until the first step, after the last, and around the stop
        "start": (400 - 320) + (300 - 250) + (330 - 300) + (600 - 330),
        "restart": 600 - 400,
        "hang": 0.0,
        "rollback": 300 + (250 - 200),
    }
    # waits are parts of the steps
    assert spent.counted == 100 * (3.0 + 2.0 + 2.5) - spent.lost["data"] - spent.lost["slow_rank"]
    assert sum(spent.lost.values()) + spent.counted == spent.seconds
    assert spent.stopped == 280 * 60
    closed = WallTime.of(events, rows, until=began + 10**6, validated=rows[-1].time + 12)
    changed = {"validation": 50.0 + 12, "start": spent.lost["start"] - 12}
    assert closed.lost == spent.lost | changed, "the validation after the last row is one"
    saves = [{"event": "save", "checkpoint": f"checkpoint-{k}", "blocked_seconds": 5.0} for k in (200, 300)]
    closed = WallTime.of([*events, *saves], rows, until=began + 10**6, validated=rows[-1].time + 12)
    changed |= {"validation": 50.0 + 7, "saving": 20.0 + 5}
    assert closed.lost == spent.lost | changed, "and so is the last save, which no row tells of"
    # the same time, if it was a hang that ended the first attempt
    events.insert(1, {"time": "2026-01-01T00:09:00Z", "event": "hang"})
    again = WallTime.of(events, rows, until=began + 10**6).lost
    assert again == spent.lost | {"restart": 0.0, "hang": 600 - 400}
    # torchrun ends the ranks by a signal to take in a node: the pause is the run's, and no request's
    events[-2]["restart"] = 1
    after_a_node = WallTime.of(events, rows, until=began + 10**6)
    assert after_a_node.stopped == 0
    assert after_a_node.seconds == spent.seconds + 280 * 60
    assert after_a_node.lost["restart"] == 280 * 60 + (300 - 250) + (330 - 300)


def test_an_attempt_counts_no_step_that_the_one_before_has_done():
    """Killed between two rows: the first row after it holds means of twenty steps, of which the last ten are new."""
    events = [
        {"time": "2026-01-01T00:00:00Z", "event": "start", "step": 0},
        {"time": "2026-01-01T00:10:00Z", "event": "resume", "checkpoint": "checkpoint-30"},
        {"time": "2026-01-01T00:20:00Z", "event": "end"},
    ]
    began = unix_seconds(events[0]["time"])
    rows = [Row(20, began + 500, step_seconds=10.0), Row(40, began + 1000, step_seconds=10.0)]
    spent = WallTime.of(events, rows, until=0.0)
    assert spent.counted == 20 * 10.0 + 10 * 10.0
    assert spent.lost["restart"] == (600 - 500) + (400 - 100)


def random_record(draw: random.Random) -> tuple[list[dict], list[dict]]:
    """Events and rows of a run that is started, killed, stopped, rolled back, by clocks that jump, with gaps."""
    now, step, events, rows = 1.8e9, 0, [], []
    kinds = ["start", "stopped", "hang", "rollback", "failed", "gave_up", "end", "save", *["resume"] * 3]

    def written() -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))

    if draw.random() < 0.8:
        events.append({"time": written(), "event": "start", "step": 0})
    for _ in range(draw.randrange(1, 60)):
        now += draw.choice([draw.random(), draw.random() * 100, draw.random() * 5000, -draw.random() * 3000])
        if draw.random() < 0.35:
            event = {"time": written(), "event": draw.choice(kinds), "world_size": draw.randrange(1, 5)}
            if draw.random() < 0.7:
                event["step"] = step = draw.randrange(max(0, step - 30), step + 5)
            if draw.random() < 0.05:
                event["time"] = draw.choice(["", None, "yesterday"])
            events.append(event | {"restart": draw.randrange(2)} | {"asked": draw.random() < 0.7})
        else:
            step += draw.randrange(1, 20)
            row = {"step": step, "time": now}
            if draw.random() < 0.8:
                for name in ("step", "data_wait", "slow_rank", "evaluation", "saving"):
                    row[f"throughput/{name}_seconds"] = draw.random() * draw.choice([0.01, 1, 300])
            else:
                row["eval/loss"] = 3.0
            rows.append(row)
    return events, draw.sample(rows, len(rows)) if draw.random() < 0.1 else rows


def test_no_second_of_any_run_is_counted_twice_or_lost(tmp_path):
    """Whatever happened, in any order: shares are none below 0, add up to the wall time, and to 100 % in words."""
    run, num_said = RunFolder(tmp_path), 0
    for seed in range(300):
        events, rows = random_record(random.Random(seed))
        for path, lines in ((run.events, events), (run.metrics, rows)):
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        record = RunRecord(run.path)
        spent = record.wall_time()
        if spent is None:
            assert not rows
            continue
        parts = [spent.counted, *spent.lost.values()]
        assert min(parts) >= 0 and sum(parts) == pytest.approx(spent.seconds, rel=1e-9, abs=1e-6), seed
        assert spent.stopped >= 0 and spent.rank_seconds >= spent.seconds, seed
        reported = sum(each.seconds for each in attempts_of(record, record.state))
        assert reported == pytest.approx(spent.seconds), seed
        for said in [line for line in sentences(analyze(record)) if "of the wall time" in line]:
            shares = [float(share) for share in re.findall(r"([0-9.]+)% ", said)]
            assert sum(shares) == pytest.approx(100, abs=0.05 * (len(CAUSES) + 1)), (seed, said)
            num_said += 1
    assert num_said > 50


def test_the_cost_so_far_counts_every_rank_of_every_attempt(tmp_path):
    """Two GPUs for an hour, of which half went into steps, at three dollars: six; as much again for as many steps."""
    run = RunFolder(tmp_path / "run")
    append_row(run.events, event_of("start", 3600, world_size=2))
    goodput = Goodput(run, [], ranks=2, price=Price(3.0, "given"))
    cost = goodput.cost(in_steps=900.0, paused=900.0, seconds_left=1800.0)
    assert cost == {
        "cost/gpu_hours": pytest.approx(2.0, rel=1e-3),
        "cost/dollars": pytest.approx(6.0, rel=1e-3),
        "cost/dollars_at_end": pytest.approx(12.0, rel=1e-3),
    }
    assert Goodput(run, [], ranks=2).cost(900.0, 900.0, 1800.0) == {}


def test_a_slow_rank_is_named_once_with_its_host_and_again_only_after_it_recovered():
    """Only a lasting and notable difference; the fast ranks are never named."""
    stragglers = Stragglers()
    stragglers.hosts, stragglers.slow_steps = ["a", "b", "c"], [0, 0, 0]
    slow, fast = [0.5, 0.9, 0.5], [0.5, 0.5, 0.5]
    assert not stragglers.judge(slow, 1.0, STEPS // 2)
    (named,) = stragglers.judge(slow, 1.0, STEPS // 2)
    assert (named["rank"], named["host"], named["steps"]) == (1, "b", STEPS)
    assert not stragglers.judge(slow, 1.0, STEPS)
    assert not stragglers.judge(fast, 1.0, STEPS)
    assert stragglers.judge(slow, 1.0, STEPS)[0]["rank"] == 1
    assert not stragglers.judge([0.5, 0.6, 0.5], 10.0, 10 * STEPS), "a hundredth of a step is no matter"


TF32 = {
    (): ("highest", "none"),
    ("training.bf16=true",): ("high", "tf32"),
    ("training.bf16=true", "training.tf32=false"): ("highest", "ieee"),
}


@pytest.mark.parametrize("settings", TF32)
def test_tf32_is_for_what_stays_fp32_beside_bf16(tmp_path, monkeypatch, settings):
    """On GPUs that have it; a recipe in fp32 means fp32, and one that names `tf32` is heard.

    Both of torch's switches agree: inductor's max-autotune asks the older one. This machine is told that it has TF32.
    """
    for module in ("pretraining.training.arguments", "transformers.training_args"):
        monkeypatch.setattr(f"{module}.is_torch_tf32_available", lambda: True)
    before = torch.get_float32_matmul_precision()
    try:
        arguments.build_arguments(load_recipe("features/gpt2", settings), None, tmp_path, 1)
        assert (torch.get_float32_matmul_precision(), torch.backends.fp32_precision) == TF32[settings]
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision(before)


GB = 1_000_000_000


@pytest.mark.parametrize(
    "name, ranks, settings, free, wanted",
    [
        ("124m", 1, (), 16 * GB, 16),  # 32 micro-batches by two workers
        ("30b", 8, (), 16 * GB, 64),
        ("30b", 256, (), 16 * GB, 2),  # torch's own, which holds the step
        ("30b", 8, (), 64_000_000, 3),  # a container's shared memory, eight ranks: 2 MB each
        # 64 MiB, of 16 rows as validated
        ("124m", 1, ("training.per_device_train_batch_size=1",), 16 * GB, 128),
        ("moe-1.5b", 1, ("data.document_masking=true",), 16 * GB, 32),
        ("124m", 1, ("training.dataloader_prefetch_factor=5",), 16 * GB, 5),
        ("124m", 1, ("training.dataloader_num_workers=0",), 16 * GB, None),
    ],
)
def test_workers_keep_a_whole_step_ready(tmp_path, monkeypatch, name, ranks, settings, free, wanted):
    """The Trainer asks for all micro-batches of a step at once; within bounds of memory, and the recipe's word wins."""
    monkeypatch.setattr(arguments.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(ranks, 8)))
    recipe = load_recipe(name, ("training.bf16=false", *settings))
    built = arguments.build_arguments(recipe, None, tmp_path, accumulation_steps(recipe, ranks))
    assert built.dataloader_prefetch_factor == wanted


def test_determinism_begins_before_the_model_is_built(tmp_path, monkeypatch):
    """Promise: the same bits again on a GPU, if the recipe asks for them: also cuBLAS's and FlashAttention's."""
    for name in ("CUDA_LAUNCH_BLOCKING", "ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC"):
        monkeypatch.setenv(name, "")
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "not set")
    try:
        recipe = load_recipe("features/gpt2", ["training.full_determinism=true"])
        arguments.build_arguments(recipe, None, tmp_path, 1)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


@pytest.mark.parametrize(
    "name, said",
    [
        ("NVIDIA TITAN V", "no MFU: NVIDIA TITAN V or its bf16 peak is not in "),
        ("Tesla T4", "no MFU: Tesla T4 or its bf16 peak is not in "),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "MIG 1g.10gb is a slice of a GPU, and its peak is not in "),
        ("NVIDIA H200", ""),
    ],
)
def test_a_gpu_without_a_peak_is_logged_once(monkeypatch, capsys, name, said):
    """Honest numbers: no MFU, and why, also of a run that starts again after a rollback."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: name)
    recipe = load_recipe("124m")
    peaks = [device_peak_flops(recipe) for _ in range(2)]
    lines = capsys.readouterr().out.splitlines()
    assert (peaks[0] is None) == bool(said) and len(lines) == bool(said)
    assert said in "".join(lines) and "".join(lines).endswith("tables/gpus.json" if said else "")
