"""Write one row of metrics.jsonl per logged step, complete before any tracker sees it, and show the progress bar.

The loss of each source comes from the forward passes of training itself.
metric_names.py groups the names (`loss` becomes `train/loss`).
"""

import re
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm
from transformers import TrainerCallback

from pretraining.data.documents import IGNORED
from pretraining.errors import UserError
from pretraining.runtime.durable_files import append_row
from pretraining.runtime.metric_names import grouped_names, perplexity
from pretraining.runtime.process_group import sum_over_ranks
from pretraining.runtime.run_folder import RunFolder, keep_past_rows
from pretraining.runtime.wall_time import Goodput, Price
from pretraining.training import throughput


def logged_number(name: str, value: Any) -> Any:
    """Return a tensor or a scalar of numpy as the number that it holds; what JSON knows stays."""
    if value is None or isinstance(value, str | int | float | list | dict):
        return value
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):
        what = f"the logged value {name!r} is no number ({type(value).__name__})"
        raise UserError(f"{what}; a callback's on_log may add numbers alone") from None


class MetricsCallback(TrainerCallback):
    """Add tokens, epoch, throughput and memory to the Trainer's logs, and write them under grouped names.

    It comes first among the callbacks that log, so that metrics.jsonl and the trackers have the same numbers.
    """

    def __init__(
        self,
        run: RunFolder,
        speed: throughput.SpeedMeter,
        tokens_per_epoch: Callable[[], int | None],
        price: Price | None = None,
        low_use: throughput.UseWatch | None = None,
    ) -> None:
        self.run, self.speed, self.tokens_per_epoch = run, speed, tokens_per_epoch
        self.price, self.low_use = price, low_use

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs) -> None:
        # On resume the Trainer restores the old run's intervals of logs and saves. Use the recipe's.
        state.compute_steps(args, state.max_steps)
        if state.is_world_process_zero:
            past = keep_past_rows(
                self.run.metrics, state.global_step, state.log_history, lambda row: "eval/loss" in row
            )
            self.goodput = Goodput(self.run, past, self.speed.world_size, self.price)
        self.stragglers, self.gpu = throughput.Stragglers(), throughput.GpuReadings()
        self.logged_step = state.global_step
        throughput.time_optimizer(optimizer, self.speed.clock)
        self.speed.clock.start()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        # by tokens: the steps of a ramp differ in size
        if (tokens_per_epoch := self.tokens_per_epoch()) is not None:
            state.epoch = self.speed.tokens_at(state.global_step) / tokens_per_epoch
        self.speed.clock.settle()
        if state.global_step >= state.max_steps and args.logging_strategy == "steps":
            # whatever the cadence: the end of a run is what it is compared by
            control.should_log = True
        if not control.should_log:
            self._enter_pause(control)

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if "train_runtime" in logs:  # the Trainer's closing summary repeats what the rows say
            return
        # callbacks of a user's own come before this one
        logs.update({name: logged_number(name, value) for name, value in logs.items()})
        if self.tokens_per_epoch() is None:
            logs.pop("epoch", None)  # the Trainer's, of as many samples as the run has
        logs["tokens"] = self.speed.tokens_at(state.global_step)
        if "loss" in logs:
            logs["perplexity"] = perplexity(logs["loss"])
            logs.update(self._measured(state))
        if state.is_world_process_zero:
            place = {"step": state.global_step, "time": round(time.time(), 3)}
            append_row(self.run.metrics, {**place, **grouped_names(logs)})
        if "loss" in logs:
            self._enter_pause(control)

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        self.speed.clock.enter("saving" if control.should_save else "other")

    def _enter_pause(self, control) -> None:
        """Mark what the Trainer does next. The wait for the next batch ends the pause."""
        if control.should_evaluate or control.should_save:
            self.speed.clock.enter("evaluation" if control.should_evaluate else "saving")

    def _measured(self, state) -> dict[str, float]:
        """Return the metrics of the steps since the last log. Every rank must call it."""
        before, self.logged_step = self.logged_step, state.global_step
        steps, seconds = state.global_step - before, self.speed.clock.take()
        rates = self.speed.rates(seconds, before, state.global_step)
        step_seconds = rates["throughput/step_seconds"]
        # the backward pass is left out: it waits for the other ranks' messages
        own = (seconds.get("data_wait", 0.0) + seconds.get("forward", 0.0)) / max(steps, 1)
        device, gpu = {}, self.gpu.read()
        if torch.cuda.is_available():
            device["memory/peak_bytes"] = torch.cuda.max_memory_allocated()
            device["memory/reserved_bytes"] = torch.cuda.max_memory_reserved()
        # Linux reports ru_maxrss in KiB
        host_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        ranks = self.stragglers.gather([own, host_peak, *device.values(), *gpu.values()])
        most = [max(column) for column in zip(*ranks, strict=True)]
        measured = {
            **rates,
            **self.speed.remaining(state.global_step, step_seconds),
            "memory/host_peak_bytes": most[1],
            **dict(zip(device, most[2:], strict=False)),
            **throughput.of_all_ranks([row[2 + len(device) :] for row in ranks]),
        }
        if len(ranks) > 1:
            measured["throughput/slowest_rank_own_seconds"] = round(most[0], 6)
            # the others wait for it in every step
            typical = statistics.median_low(row[0] for row in ranks)
            measured["throughput/slow_rank_seconds"] = round(most[0] - typical, 6)
        if state.is_world_process_zero:
            # on rank 0 only: it alone has the events and the rows that count
            measured["throughput/goodput"] = round(self.goodput.add(steps, step_seconds), 6)
            paused = sum(seconds.get(name, 0.0) for name in throughput.PAUSES)
            left = measured["throughput/seconds_left"]
            measured.update(self.goodput.cost(steps * step_seconds, paused, left))
            for slow in self.stragglers.judge([row[0] for row in ranks], step_seconds, steps):
                self.run.add_event("straggler", step=state.global_step, **slow)
            for low in self.low_use.judge(measured, steps) if self.low_use else ():
                self.run.add_event("low_use", step=state.global_step, **low)
        return measured


class ProgressCallback(TrainerCallback):
    """Show the progress on stderr, on rank 0."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if state.is_world_process_zero:
            self.on_terminal = sys.stderr.isatty()
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc="step",
                unit="step",
                dynamic_ncols=True,
                # a log file gets one line per logged step instead
                disable=not self.on_terminal,
            )

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.bar is not None:
            self.bar.update(1)

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if self.bar is None or not ("loss" in logs or "eval_loss" in logs):
            return
        if "eval_loss" in logs:
            line = f"validation loss {logs['eval_loss']:.4f}, {logs['eval_bits_per_byte']:.4f} bits per byte"
            # of each source, if the validation has several
            names = [re.fullmatch(r"eval_(.+)_loss", name) for name in logs]
            losses = [f"{name[1]} {logs[name[0]]:.4f}" for name in names if name]
            line += f"; loss of {', '.join(losses)}" if losses else ""
            self.bar.write(f"step {state.global_step}: {line}", file=sys.stderr)
        elif self.on_terminal:
            self.bar.set_postfix_str(
                f"loss {logs['loss']:.4f}, {logs['throughput/tokens_per_second']:,.0f} tokens/s"
            )
        else:
            minutes, seconds = divmod(round(logs["throughput/seconds_left"]), 60)
            self.bar.write(
                f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}  "
                f"{logs['throughput/tokens_per_second']:,.0f} tokens/s  "
                f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left",
                file=sys.stderr,
            )

    def on_train_end(self, args, state, control, **kwargs) -> None:
        if self.bar is not None:
            self.bar.close()


class SourceLoss(TrainerCallback):
    """Add up nats and targets by source on the device. At logging the ranks' sums become `train/<source>_loss`.

    A z-loss is part of it. The losses of a mixture of experts' routers are not. Sources that the logged steps did not
    read are left out.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.sources: torch.Tensor | None = None
        self.sums: torch.Tensor | None = None

    def on_sources(self, sources: torch.Tensor) -> None:
        self.sources = sources

    def around(self, compute_loss: Callable) -> Callable:
        """Wrap the Trainer's `compute_loss_func`, so that the nats of every token are counted."""

        def watched(outputs, labels, num_items_in_batch=None):
            if self.sources is None:
                return compute_loss(outputs, labels, num_items_in_batch=num_items_in_batch)
            # the loss fills this, so that the nats of each token are not computed twice
            each = torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)
            loss = compute_loss(outputs, labels, num_items_in_batch=num_items_in_batch, each=each.view(-1))
            # nats and targets of each sample, [batch]
            nats, targets = each.sum(1), (labels != IGNORED).sum(1)
            if self.sums is None:
                self.sums = torch.zeros(len(self.names), 2, dtype=torch.float64, device=nats.device)
            # fp64 counts up to 2^53 targets exactly
            self.sums.index_add_(0, self.sources.to(nats.device), torch.stack([nats, targets], 1).double())
            self.sources = None
            return loss

        return watched

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if "loss" not in logs or self.sums is None:
            return
        flat, self.sums = sum_over_ranks(self.sums.flatten().tolist()), None
        for name, nats, targets in zip(self.names, flat[::2], flat[1::2], strict=True):
            if targets:
                logs[f"train/{name}_loss"] = nats / targets
