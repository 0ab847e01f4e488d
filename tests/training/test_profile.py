"""`monitors.profile`: a trace of the steps asked for, and a table that says in words what they cost."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from pretraining.recipe import load_recipe
from pretraining.recipe.sections import Profile
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.profile import Operation, ProfileCallback, cost_table, kind_of, operations_of
from pretraining.upstream.torch import start_memory_history


def profiled(tmp_path, steps, last_step: int, rank: int = 0, **settings) -> RunFolder:
    """A run of matrix products, one of another size a step, stopped after `last_step`."""
    run, state = RunFolder(tmp_path), SimpleNamespace(global_step=0)
    callback = ProfileCallback(run, Profile(steps=steps, **settings))
    args = SimpleNamespace(process_index=rank, world_size=2)
    for step in range(1, last_step + 1):
        callback.on_step_begin(args, state, None)
        with torch.profiler.record_function(f"work of step {step}"):
            torch.ones(64, 64) @ torch.ones(64, 64)
        state.global_step = step
        callback.on_step_end(args, state, None)
    callback.on_train_end(args, state, None)
    return run


def test_the_trace_holds_the_chosen_steps_and_no_others(tmp_path):
    """As Chrome's trace viewer reads it, compressed; the table stands beside it and in the events."""
    run = profiled(tmp_path, [2, 3], 5)
    names = [path.name for path in sorted(run.profile.iterdir())]
    assert names[:2] == ["step-2-3-rank-00000.json.gz", "step-2-3-rank-00000.txt"]
    trace = json.loads(gzip.decompress((run.profile / names[0]).read_bytes()))
    seen = {event.get("name") for event in trace["traceEvents"]}
    assert {step for step in range(1, 6) if f"work of step {step}" in seen} == {2, 3}
    table = (run.profile / names[1]).read_text()
    assert "step 2-3, rank 0 of 2" in table and "matrix products" in table
    (event,) = read_rows(run.events)
    assert event["event"] == "profile" and event["files"] == names


def test_a_run_that_stops_on_the_way_keeps_what_was_traced(tmp_path):
    """And one that starts behind the steps traces nothing."""
    run = profiled(tmp_path, [4, 9], 5)
    assert (run.profile / "step-4-5-rank-00000.txt").exists()
    assert not profiled(tmp_path / "later", [8, 9], 5).profile.exists()


def test_rank_0_alone_unless_every_rank_is_asked_for(tmp_path):
    """One step is given as a number; other ranks write a file of their own and no event."""
    assert not profiled(tmp_path, 2, 3, rank=1).profile.exists()
    run = profiled(tmp_path, 2, 3, rank=1, every_rank=True)
    assert (run.profile / "step-2-rank-00001.json.gz").exists() and not read_rows(run.events)


def test_the_history_of_memory_leaves_the_frames_of_c_out(monkeypatch):
    """They would be walked through at every allocation, so that the traced steps would not be like the others."""
    asked = {}
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", asked.update)
    start_memory_history(5)
    assert asked == {"max_entries": 5, "stacks": "python"}


def test_the_table_adds_up_by_kind():
    """By hand: 6 ms of 10 in products over two steps; the device's time counts where there is any."""
    host = [Operation("aten::addmm", 4, 0.006, 0.0), Operation("aten::_fused_adamw_", 2, 0.002, 0.0)]
    host.append(Operation("gloo:all_reduce", 2, 0.002, 0.0))
    lines = cost_table(host, "step 1-2", 2, 0.02).splitlines()
    assert lines[0].endswith("10.0 ms a step") and "50%" in lines[1]
    columns = [line.split()[-3:] for line in lines[4:7]]
    assert columns == [["3.000", "60.0%", "2.0"], *[["1.000", "20.0%", "1.0"]] * 2]
    device = [*host, Operation("sm90_xmma_gemm_bf16", 2, 0.0, 0.004)]
    assert "GPU computed 20%" in cost_table(device, "step 1-2", 2, 0.02)


def test_the_device_s_time_is_counted_once():
    """Honest numbers: torch's averages hold one GEMM of 1 ms as operation, as kernel, and in the step's annotation."""
    from torch.autograd import DeviceType
    from torch.autograd.profiler_util import EventList, FunctionEvent

    def event(number, name, device, start, end, **more):
        times = {"start_us": start, "end_us": end, "device_type": device, "use_device": "cuda", "stack": []}
        return FunctionEvent(id=number, name=name, thread=1, **times, **more)

    launch = event(1, "aten::mm", DeviceType.CPU, 0, 10)
    launch.append_kernel("sm90_xmma_gemm_bf16", 0, 1000)
    kernel = event(2, "sm90_xmma_gemm_bf16", DeviceType.CUDA, 5, 1005)
    step = event(3, "ProfilerStep#1", DeviceType.CUDA, 0, 1005, is_user_annotation=True)
    events = EventList([launch, kernel, step], use_device="cuda")
    events._build_tree()
    operations = operations_of(events.key_averages())
    assert sum(each.device_seconds for each in operations) == pytest.approx(1e-3)
    assert sum(each.host_seconds for each in operations) == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matrix products"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16", "messages between ranks"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::native_layer_norm_backward", "normalization"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("aten::_local_scalar_dense", "waiting"),
        ("aten::mul", "arithmetic on elements"),
        ("cudaLaunchKernel", "everything else"),
    ],
)
def test_operations_have_a_kind_in_plain_words(name, kind):
    assert kind_of(name) == kind


def test_steps_that_are_good_are_filled_up_with_the_defaults():
    assert load_recipe("features/gpt2", ["monitors.profile.steps=7"]).monitors.profile == Profile(steps=7)
