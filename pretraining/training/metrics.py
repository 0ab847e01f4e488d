"""metrics.jsonl: one row per logged step, complete before any tracker sees it."""

import math
import resource
import time
from collections.abc import Sequence

from transformers import TrainerCallback

from pretraining.metric_names import grouped_names
from pretraining.runtime.durable_files import append_row
from pretraining.runtime.run_folder import RunFolder, keep_past_rows
from pretraining.training.goodput import Goodput
from pretraining.training.speed import SpeedMeter, device_memory
from pretraining.training.stragglers import Stragglers
from pretraining.training.timed_trainer import time_optimizer


class MetricsCallback(TrainerCallback):
    """Adds tokens, epoch, throughput and memory to the Trainer's logs, and writes them under grouped names.

    Comes first among the callbacks that log, so that metrics.jsonl and the trackers hold the same numbers.
    """

    def __init__(self, run: RunFolder, speed: SpeedMeter, tokens_per_epoch: float):
        self.run, self.speed, self.tokens_per_epoch = run, speed, tokens_per_epoch

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        # On resume the Trainer restores the cadence of the old run: the recipe's is the one that counts.
        state.compute_steps(args, state.max_steps)
        if state.is_world_process_zero:
            past = keep_past_rows(
                self.run.metrics, state.global_step, state.log_history, lambda row: "eval/loss" in row
            )
            self.goodput = Goodput(self.run, past)
        self.stragglers = Stragglers()
        self.logged_step = state.global_step
        time_optimizer(optimizer, self.speed.clock)
        self.speed.clock.start()

    def on_step_end(self, args, state, control, **kwargs):
        state.epoch = self.speed.tokens_at(state.global_step) / self.tokens_per_epoch
        self.speed.clock.settle()
        if not control.should_log:
            self._enter_pause(control)

    def on_log(self, args, state, control, logs, **kwargs):
        if "train_runtime" in logs:  # the Trainer's closing summary repeats what the rows say
            return
        logs["tokens"] = self.speed.tokens_at(state.global_step)
        if "loss" in logs:
            logs.update(self._measured(state))
        if state.is_world_process_zero:
            place = {"step": state.global_step, "time": round(time.time(), 3)}
            append_row(self.run.metrics, {**place, **grouped_names(logs)})
        if "loss" in logs:
            self._enter_pause(control)

    def on_evaluate(self, args, state, control, **kwargs):
        self.speed.clock.enter("saving" if control.should_save else "other")

    def _enter_pause(self, control) -> None:
        """What the Trainer does next; the wait for the next batch ends it."""
        if control.should_evaluate or control.should_save:
            self.speed.clock.enter("evaluation" if control.should_evaluate else "saving")

    def _measured(self, state) -> dict[str, float]:
        """Metrics of the steps since the last log. Every rank must call it."""
        before, self.logged_step = self.logged_step, state.global_step
        steps, seconds = state.global_step - before, self.speed.clock.take()
        rates = self.speed.rates(seconds, before, state.global_step)
        step_seconds = rates["throughput/step_seconds"]
        own = (seconds.get("data_wait", 0.0) + seconds.get("forward", 0.0)) / max(steps, 1)
        device = device_memory()
        host_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        ranks = self.stragglers.gather([own, host_peak, *device.values()])
        most = dict(zip(device, [_largest(column) for column in zip(*ranks, strict=True)][2:], strict=True))
        measured = {
            **rates,
            **self.speed.progress(state.global_step, step_seconds),
            "memory/host_peak_bytes": max(row[1] for row in ranks),
            **{name: value for name, value in most.items() if not math.isnan(value)},
        }
        if len(ranks) > 1:
            measured["throughput/slowest_rank_own_seconds"] = round(max(row[0] for row in ranks), 6)
        if state.is_world_process_zero:
            measured["throughput/goodput"] = round(self.goodput.add(steps, step_seconds), 6)
            for slow in self.stragglers.judge([row[0] for row in ranks], step_seconds, steps):
                self.run.add_event("straggler", step=state.global_step, **slow)
        return measured


def _largest(values: Sequence[float]) -> float:
    """Of those that are known; NaN if none is."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)
