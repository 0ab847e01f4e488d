"""Show how a run goes where operations look: to Prometheus, which asks, and by OpenTelemetry, which is sent to.

Both get the same few numbers, from rank 0 alone, with the run as their label. They live as long as the process: a run
that rolls back trains several times, and its end comes after training.
"""

import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from pretraining.errors import UserError
from pretraining.recipe.sections import Prometheus
from pretraining.runtime.metric_names import grouped_names
from pretraining.runtime.notices import EVENTS
from pretraining.runtime.run_folder import RunFolder

LOGGED = {
    "loss": "train/loss",
    "validation_loss": "eval/loss",
    "gradient_norm": "train/grad_norm",
    "tokens": "train/tokens",
    "tokens_per_second": "throughput/tokens_per_second",
    "step_seconds": "throughput/step_seconds",
    "mfu_ratio": "throughput/mfu",
    "goodput_ratio": "throughput/goodput",
    "budget_ratio": "throughput/budget_share",
    "left_seconds": "throughput/seconds_left",
    "gpu_peak_memory_bytes": "memory/peak_bytes",
    "host_peak_memory_bytes": "memory/host_peak_bytes",
    "gpu_utilization_ratio": "hardware/gpu_utilization",
    "gpu_power_watts": "hardware/gpu_power_watts",
    "cost_dollars": "cost/dollars",
    "spikes": "stability/spikes",
}
"""{name behind `pretraining_`: its metric in metrics.jsonl}"""
STATES = {"end": "finished", "stopped": "stopped", "hang": "hang", "gave_up": "gave_up", "failed": "failed"}
"""{event of the run: the state after it}; before them it is running."""
LEAST_MILLISECONDS = 100
"""Between two sends."""
RECEIVER_SECONDS = 5
"""How long a receiver may take, and how long the end of a run waits for it."""


class Numbers(TrainerCallback):
    """What both show. A subclass says how."""

    name = ""

    def __init__(self, run: RunFolder, settings: Prometheus) -> None:
        self.run, self.settings = run, settings
        self.label, self.state, self.step, self.alerts = "", "running", 0, 0
        self.logged: dict[str, Any] = {}
        self.gauges: dict[str, Callable[[float, dict], Any]] = {}
        self.stepped = time.time()
        self.is_open = self.has_told = False

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.label, self.state = args.run_name, "running"
        self.step, self.stepped = state.global_step, time.time()
        if state.is_world_process_zero:
            if self.on_event not in self.run.listeners:
                self.run.listeners.append(self.on_event)
            self.show()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.step, self.stepped = state.global_step, time.time()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if state.is_world_process_zero:
            self.logged.update(grouped_names(logs or {}))
            self.show()

    def on_event(self, row: dict) -> None:
        """Take a row of events.jsonl: a new state, or an alert."""
        self.alerts += row["event"] in EVENTS["alert"]
        self.state = STATES.get(row["event"], self.state)
        self.show(is_last=row["event"] in STATES)

    def show(self, is_last: bool = False) -> None:
        """Hand the numbers on; of failures the first is an event of the run, and so is the recovery.

        is_last: the process may end after this.
        """
        reason = ""
        try:
            self.set_gauges()  # before anybody can ask
            if not self.is_open:  # a port that was taken may be free by the next log
                self.open()
                self.is_open = True
            self.publish(is_last)
        except Exception as error:  # whatever a receiver does, training goes on
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if bool(reason) != self.has_told:
            self.has_told = bool(reason)
            kind, more = ("tracker_failed", {"reason": reason}) if reason else ("tracker_recovered", {})
            self.run.add_event(kind, step=self.step, tracker=self.name, **more)

    def open(self) -> None:
        """Begin to answer, or to send."""

    def gauge(self, name: str, what: str, labels: list[str]) -> Callable[[float, dict], Any]:
        """Make a gauge; return what sets it, with its labels."""
        raise NotImplementedError

    def publish(self, is_last: bool) -> None:
        """Hand on what the gauges say."""

    def set_gauges(self) -> None:
        numbers: dict[str, float] = {
            "step": self.step,
            "alerts": self.alerts,
            "seconds_since_last_step": time.time() - self.stepped,
            "last_step_timestamp_seconds": self.stepped,
        }
        numbers |= {name: self.logged[metric] for name, metric in LOGGED.items() if metric in self.logged}
        # 1 for the one in which the run is
        states = [
            ("state", float(each == self.state), {"state": each}) for each in ("running", *STATES.values())
        ]
        for name, number, labels in [*((*each, {}) for each in numbers.items()), *states]:
            if name not in self.gauges:
                what = f"{LOGGED[name]} of metrics.jsonl" if name in LOGGED else name.replace("_", " ")
                self.gauges[name] = self.gauge(f"pretraining_{name}", what, ["run", *labels])
            self.gauges[name](number, {"run": self.label, **labels})


class PrometheusNumbers(Numbers):
    """Answer on a port, and write a file for node_exporter's textfile collector, as `monitors.prometheus` says."""

    name = "prometheus"

    def __init__(self, run: RunFolder, settings: Prometheus) -> None:
        import prometheus_client

        super().__init__(run, settings)
        self.client, self.registry = prometheus_client, prometheus_client.CollectorRegistry()

    def open(self) -> None:
        if self.settings.port is not None:
            self.client.start_http_server(self.settings.port, self.settings.host, self.registry)

    def gauge(self, name: str, what: str, labels: list[str]) -> Callable[[float, dict], Any]:
        gauge = self.client.Gauge(name, what, labels, registry=self.registry)
        if name.endswith("_since_last_step"):  # as of the moment in which somebody asks
            return lambda number, at: gauge.labels(**at).set_function(lambda: time.time() - self.stepped)
        return lambda number, at: gauge.labels(**at).set(number)

    def publish(self, is_last: bool) -> None:
        if self.settings.textfile is not None:
            # written beside it and renamed: a reader finds the old file or the new one
            self.client.write_to_textfile(str(self.run.path / self.settings.textfile), self.registry)


class OpenTelemetryNumbers(Numbers):
    """Send to the receiver that the OTEL_EXPORTER_OTLP_... variables name, by OTLP over HTTP, behind training."""

    name = "opentelemetry"

    def __init__(self, run: RunFolder, settings: Prometheus) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider, export
        from opentelemetry.sdk.resources import Resource

        super().__init__(run, settings)
        # what it has to say of a receiver that fails is an event of the run
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        exporter, self.has_failed = OTLPMetricExporter(timeout=RECEIVER_SECONDS), False
        send = exporter.export

        def send_and_see(*arguments: Any, **options: Any) -> Any:
            result = send(*arguments, **options)
            self.has_failed = result is not export.MetricExportResult.SUCCESS
            return result

        exporter.export = send_and_see
        # no thread of its own, which would go on in every process that this one forks
        reader = export.PeriodicExportingMetricReader(exporter, math.inf)
        resource = Resource.create({"service.name": "pretraining"})
        self.provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        self.wake, self.sent = threading.Event(), threading.Condition()
        self.asked = self.answered = 0
        name = "OTEL_METRIC_EXPORT_INTERVAL"  # of its specification, in milliseconds
        text = os.environ.get(name) or "15000"
        if not re.fullmatch("[0-9]{1,9}", text) or int(text) < LEAST_MILLISECONDS:
            what = (
                f"{name}: {text!r} is no number of milliseconds from {LEAST_MILLISECONDS} on, such as 15000"
            )
            raise UserError(f"{what}; mend or unset it")
        self.seconds = int(text) / 1000

    def open(self) -> None:
        threading.Thread(target=self._send_again_and_again, name=self.name, daemon=True).start()

    def gauge(self, name: str, what: str, labels: list[str]) -> Callable[[float, dict], Any]:
        return self.provider.get_meter("pretraining").create_gauge(name, description=what).set

    def _send_again_and_again(self) -> None:
        while True:
            self.wake.wait(self.seconds)
            self.wake.clear()
            asked = self.asked
            with suppress(Exception):
                self.set_gauges()  # a gauge is sent once for each time that it is set
                self.provider.force_flush(1000 * RECEIVER_SECONDS)
            with self.sent:
                self.answered = asked
                self.sent.notify_all()

    def publish(self, is_last: bool) -> None:
        if is_last:
            self.asked += 1
            self.wake.set()
            with self.sent:
                # a message that is under way has older numbers
                self.sent.wait_for(lambda: self.answered == self.asked, RECEIVER_SECONDS)
        if self.has_failed:
            raise ConnectionError("the receiver did not take the last numbers")


OPERATIONS = {"prometheus": PrometheusNumbers, "opentelemetry": OpenTelemetryNumbers}
"""Trackers of ours, beside those of transformers."""
_made: dict[tuple[str, Path], Numbers] = {}


def numbers_of(name: str, run: RunFolder, settings: Prometheus) -> Numbers:
    """Return a run's tracker of this name: the same in each attempt, because its port stays open."""
    if (name, run.path) not in _made:
        _made[name, run.path] = OPERATIONS[name](run, settings)
    _made[name, run.path].run = run
    return _made[name, run.path]
