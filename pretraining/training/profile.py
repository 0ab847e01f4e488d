"""Trace chosen steps into `profile/` of the run folder, tabulate their costs, and measure the peak of memory."""

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity
from transformers import TrainerCallback

from pretraining.recipe.sections import Profile
from pretraining.runtime.process_group import gather_from_ranks
from pretraining.runtime.run_folder import RunFolder
from pretraining.upstream.torch import start_memory_history, write_memory_history

MOST_ALLOCATIONS = 200_000
"""The largest number of events in the memory history, at some hundred bytes each."""


class ProfileCallback(TrainerCallback):
    """Trace the steps that `monitors.profile` names: they are slower than others, and the rows of metrics show it."""

    def __init__(self, run: RunFolder, settings: Profile) -> None:
        steps = settings.steps
        self.run, self.settings = run, settings
        self.first, self.last = steps if isinstance(steps, list) else (steps, steps)
        self.profiler: torch.profiler.profile | None = None

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        traced = args.process_index == 0 or self.settings.every_rank
        if self.profiler is not None or not traced or not self.first <= state.global_step + 1 <= self.last:
            return
        self.began_at_step = state.global_step + 1
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            if self.settings.memory:
                start_memory_history(MOST_ALLOCATIONS)
        self.profiler = torch.profiler.profile(activities=activities)
        self.profiler.start()
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step >= self.last:
            self.on_train_end(args, state, control)

    # before the last traced step too, if the run was asked to stop
    def on_train_end(self, args, state, control, **kwargs) -> None:
        profiler, self.profiler, step = self.profiler, None, state.global_step
        if profiler is None:
            return
        if torch.cuda.is_available():
            # the time and the trace must include the kernels that are still queued
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.began
        profiler.stop()
        steps = f"{self.began_at_step}-{step}" if step > self.began_at_step else f"{step}"
        self.run.profile.mkdir(parents=True, exist_ok=True)
        stem = self.run.profile / f"step-{steps}-rank-{args.process_index:05}"
        files = [stem.with_name(f"{stem.name}.json.gz"), stem.with_name(f"{stem.name}.txt")]
        profiler.export_chrome_trace(str(files[0]))
        if self.settings.memory and torch.cuda.is_available():
            # every GPU allocation of these steps, for https://pytorch.org/memory_viz
            files.append(stem.with_name(f"{stem.name}-memory.pickle"))
            write_memory_history(files[-1])
        title = f"step {steps}, rank {args.process_index} of {args.world_size}"
        num_steps = step - self.began_at_step + 1
        table = cost_table(operations_of(profiler.key_averages()), title, num_steps, seconds)
        files[1].write_text(table, encoding="utf-8")
        if args.process_index == 0:
            print(f"{table}\ntrace: {files[0]} (open it in https://ui.perfetto.dev)", flush=True)
            self.run.add_event("profile", step=step, files=[file.name for file in files])


MOST_OPERATIONS = 15

KINDS = {
    "messages between ranks": r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|broadcast|barrier",
    "attention": r"attention|flash|fmha|sdpa",
    "optimizer": r"optimizer|adam|lamb|lion|multi_tensor_apply",
    "matrix products": r"\bmm\b|addmm|bmm|matmul|linear|gemm|cutlass|grouped_mm|wgmma",
    "softmax and loss": r"softmax|nll_loss|cross_entropy|logsumexp|token_?nats|FusedNats|ChunkedNats",
    "normalization": r"(layer|rms|group)_?norm",
    "norms of gradients": r"norm",
    "look-ups": r"embedding|index|gather|scatter|topk|sort",
    "copies and casts": r"copy|memcpy|memset|\bto\b|\bcat\b|clone|contiguous|zero_|fill_|zeros|empty",
    "waiting": r"synchronize|\bitem\b|_local_scalar_dense|wait|dataloader",
    "views (nothing is copied)": r"view|slice|narrow|as_strided|detach|select|expand|reshape|transpose|\bt\b|split",
    "autograd itself": r"autograd",
    "arithmetic on elements": (
        r"aten::_?(foreach_)?(add|sub|mul|div|pow|sqrt|rsqrt|exp|log|tanh|sigmoid|gelu|silu|relu|neg|abs|clamp|where|"
        r"sum|mean|square|lerp)|elementwise|reduce_kernel"
    ),
}
"""Kind of work -> pattern in names of operations and kernels. The first that matches counts."""


class Operation(NamedTuple):
    """One operation or kernel over all traced steps. Its time excludes what it calls."""

    name: str
    calls: int
    host_seconds: float
    device_seconds: float


def operations_of(averages: Iterable) -> list[Operation]:
    """Read the rows of torch's `key_averages()`, whose times are in microseconds."""
    # A kernel's time is in its own row, in that of the operation that launched it, and in those of the annotations
    # around it (torch 2.15, autograd/profiler_util.py). Count the device's time from kernels alone.
    rows = [each for each in averages if not (_on_device(each) and each.is_user_annotation)]
    counts_device = _on_device if any(map(_on_device, rows)) else lambda each: True
    return [
        Operation(
            each.key,
            each.count,
            each.self_cpu_time_total / 1e6,
            each.self_device_time_total / 1e6 if counts_device(each) else 0.0,
        )
        for each in rows
    ]


def _on_device(average) -> bool:
    return average.device_type.name == "CUDA"


def kind_of(name: str) -> str:
    found = (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(found, "everything else")


def cost_table(operations: list[Operation], title: str, num_steps: int, seconds: float) -> str:
    """Make a table of costs by kind and of the costliest operations, as means per step.

    The costs are the device's if the trace has any, else the host's. seconds: the traced steps' wall time.
    """
    on_device = any(each.device_seconds for each in operations)
    cost = {each: each.device_seconds if on_device else each.host_seconds for each in operations}
    # 1.0: an empty trace must not divide by zero
    total = sum(cost.values()) or 1.0
    by_kind: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for each in operations:
        if cost[each]:
            by_kind[kind_of(each.name)][0] += cost[each]
            by_kind[kind_of(each.name)][1] += each.calls
    costliest = sorted((each for each in operations if cost[each]), key=cost.get, reverse=True)
    kinds = sorted(by_kind.items(), key=lambda item: item[1][0], reverse=True)
    share = total / seconds
    busy = f"the GPU's kernels add up to {share:.0%} of that (more than 100% where they overlap)"
    if not on_device:
        busy = f"the processor spent {share:.0%} of that in the operations below, the rest in Python and in waiting"
    elif share < 0.7:
        busy = f"the GPU computed {share:.0%} of that: it waits for the host, for data or for other ranks"
    lines = [
        f"profile of {title}: {1e3 * seconds / num_steps:,.1f} ms a step",
        busy,
        "",
        _header("by kind of work"),
        *(_line(kind, spent, calls, num_steps, total) for kind, (spent, calls) in kinds),
        "",
        _header("the costliest operations"),
        *(
            _line(f"{each.name[:60]} ({kind_of(each.name)})", cost[each], each.calls, num_steps, total)
            for each in costliest[:MOST_OPERATIONS]
        ),
    ]
    return "\n".join(lines) + "\n"


def _header(words: str) -> str:
    return f"{words:<90} {'ms a step':>12} {'share':>6} {'calls a step':>13}"


def _line(words: str, spent: float, calls: int, num_steps: int, total: float) -> str:
    milliseconds = 1e3 * spent / num_steps
    return f"  {words:<88} {milliseconds:>12,.3f} {spent / total:>6.1%} {calls / num_steps:>13,.1f}"


STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
FORGET_PEAK = "5"
"""Written to CLEAR: resets the process's peak to its present memory (proc(5))."""


class PeakMemory:
    """Measure the peak of memory until `of_fullest_rank` is called. Make it before the model.

    On a GPU it is what torch allocated there. Else it is the process's memory beyond what it had at the start.
    """

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            # if the system refuses, the peak may be one from before the model
            CLEAR.write_text(FORGET_PEAK)
        self.held_before = _status_bytes("VmRSS") or 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def of_fullest_rank(self) -> int | None:
        """Return the largest peak of all ranks, in bytes; None if the system does not report it. A collective."""
        if torch.cuda.is_available():
            here = torch.cuda.max_memory_allocated()
        else:
            here = max(0, (_status_bytes("VmHWM") or 0) - self.held_before)
        return max(gather_from_ranks(here)) or None


def _status_bytes(key: str) -> int | None:
    """Read a line of the process's status, such as `VmHWM:  123 kB`, in bytes; None if there is no such file."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)
