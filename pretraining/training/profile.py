"""A trace of chosen steps under `profile/` of the run folder, and a table of what they spend their time on."""

import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity
from transformers import TrainerCallback

from pretraining.runtime.run_folder import RunFolder
from pretraining.training.profile_table import cost_table, operations_of

MOST_ALLOCATIONS = 200_000
"""Events of the memory history: some hundred bytes each."""


class ProfileCallback(TrainerCallback):
    """Traces the steps that `monitors.profile` names; on all others it does nothing.

    The traced steps are slower than others, and so are the rows of metrics that hold them.
    """

    def __init__(self, run: RunFolder, settings: dict):
        """settings: `monitors.profile` of the recipe."""
        steps = settings["steps"]
        self.run, self.settings = run, settings
        self.first, self.last = steps if isinstance(steps, list) else (steps, steps)
        self.profiler: torch.profiler.profile | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        traced = args.process_index == 0 or self.settings["every_rank"]
        if self.profiler is None and traced and self.first <= state.global_step + 1 <= self.last:
            self._start(state.global_step + 1)

    def on_step_end(self, args, state, control, **kwargs):
        if self.profiler is not None and state.global_step >= self.last:
            self._finish(args, state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        if self.profiler is not None:  # asked to stop on the way
            self._finish(args, state.global_step)

    def _start(self, step: int) -> None:
        self.began_at_step = step
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            if self.settings["memory"]:
                torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        self.profiler = torch.profiler.profile(activities=activities)
        self.profiler.start()
        self.began = time.perf_counter()

    def _finish(self, args, step: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.began
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        steps = f"{self.began_at_step}-{step}" if step > self.began_at_step else f"{step}"
        self.run.profile.mkdir(parents=True, exist_ok=True)
        stem = self.run.profile / f"step-{steps}-rank-{args.process_index:05}"
        files = [stem.with_name(f"{stem.name}.json.gz"), stem.with_name(f"{stem.name}.txt")]
        profiler.export_chrome_trace(str(files[0]))
        files += self._memory_snapshot(stem)
        title = f"step {steps}, rank {args.process_index} of {args.world_size}"
        num_steps = step - self.began_at_step + 1
        table = cost_table(operations_of(profiler.key_averages()), title, num_steps, seconds)
        files[1].write_text(table, encoding="utf-8")
        if args.process_index == 0:
            print(f"{table}\ntrace: {files[0]} (open it in https://ui.perfetto.dev)", flush=True)
            self.run.add_event("profile", step=step, files=[file.name for file in files])

    def _memory_snapshot(self, stem: Path) -> list[Path]:
        """Every allocation of these steps on the GPU, for https://pytorch.org/memory_viz; none without a GPU."""
        if not (self.settings["memory"] and torch.cuda.is_available()):
            return []
        path = stem.with_name(f"{stem.name}-memory.pickle")
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
        return [path]
