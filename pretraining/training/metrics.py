"""metrics.jsonl: one row per logged step, complete before any tracker sees it."""

import time

from transformers import TrainerCallback

from pretraining.run_dir import RunDir, append_row, drop_rows_after


class MetricsCallback(TrainerCallback):
    """Adds tokens, epoch, and throughput to the Trainer's logs, and writes them.

    Comes first among the callbacks that log, so that metrics.jsonl and the trackers hold the same numbers.
    `tokens_before`: what earlier, larger or smaller steps have consumed more than as many of these would.
    """

    def __init__(self, run: RunDir, tokens_per_step: int, epochs_per_step: float, tokens_before: int = 0):
        self.run = run
        self.tokens_per_step, self.tokens_before = tokens_per_step, tokens_before
        self.epochs_per_step = epochs_per_step
        self._reset()

    def _reset(self):
        self.num_steps, self.step_seconds, self.wait_seconds = 0, 0.0, 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        # On resume the Trainer restores the cadence of the old run: the recipe's is the one that counts.
        state.compute_steps(args, state.max_steps)
        if state.is_world_process_zero:
            drop_rows_after(self.run.metrics, state.global_step)
        self._pause_ended = time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        self._step_began = time.perf_counter()
        self.wait_seconds += self._step_began - self._pause_ended

    def on_step_end(self, args, state, control, **kwargs):
        self._pause_ended = time.perf_counter()
        self.step_seconds += self._pause_ended - self._step_began
        self.num_steps += 1
        state.epoch = state.global_step * self.epochs_per_step

    def on_log(self, args, state, control, logs, **kwargs):
        if "train_runtime" in logs:  # the Trainer's closing summary repeats what the rows say
            return
        tokens = self.tokens_before + state.global_step * self.tokens_per_step
        row = {"step": state.global_step, "tokens": tokens}
        if "loss" in logs:
            logs.update(self._throughput())
        logs["tokens"] = row["tokens"]
        if state.is_world_process_zero:
            append_row(self.run.metrics, {**row, **logs})
        self._pause_ended = time.perf_counter()

    def on_evaluate(self, args, state, control, **kwargs):
        self._pause_ended = time.perf_counter()

    def on_save(self, args, state, control, **kwargs):
        self._pause_ended = time.perf_counter()

    def _throughput(self) -> dict:
        seconds = self.step_seconds + self.wait_seconds
        measured = {
            "tokens_per_second": round(self.num_steps * self.tokens_per_step / max(seconds, 1e-9), 1),
            "step_seconds": round(seconds / max(self.num_steps, 1), 6),
            "data_wait_share": round(self.wait_seconds / max(seconds, 1e-9), 6),
        }
        self._reset()
        return measured
