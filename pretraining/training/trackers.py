"""Attach the trackers of `training.report_to`: metrics.jsonl's names, one run across resumes, no effect on training."""

import logging
import math
import os
import re
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partialmethod
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback, get_reporting_integration_callbacks

from pretraining.errors import UserError
from pretraining.recipe.sections import Prometheus
from pretraining.recipe.training import TRACKER_PACKAGES
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.metric_names import grouped_names
from pretraining.runtime.notices import EVENTS
from pretraining.runtime.run_folder import STARTS, RunFolder
from pretraining.upstream.transformers import name_logs_by

# tracker -> the variable that names its folder, which is set inside the run folder
FOLDERS = {"tensorboard": "TENSORBOARD_LOGGING_DIR", "trackio": "TRACKIO_DIR"}

PROJECT = "pretraining"
"""The project of every tracker, unless `training.project` names another."""

# tracker -> the variable that names its project; trackio takes `training.project` itself
PROJECTS = {
    "wandb": "WANDB_PROJECT",
    "mlflow": "MLFLOW_EXPERIMENT_NAME",
    "comet_ml": "COMET_PROJECT_NAME",
    "clearml": "CLEARML_PROJECT",
    "swanlab": "SWANLAB_PROJECT",
}

# transformers would put `train/` before every name.
name_logs_by(grouped_names)


def build_trackers(
    report_to: str | list[str],
    run: RunFolder,
    run_name: str,
    project: str | None = None,
    prometheus: Prometheus | None = None,
) -> list[TrainerCallback]:
    """Build the trackers' callbacks; `UserError` if a package is missing.

    project: the recipe's `training.project`. prometheus: its `monitors.prometheus`.
    """
    names = [report_to] if isinstance(report_to, str) else report_to
    for name in FOLDERS.keys() & set(names):
        os.environ.setdefault(FOLDERS[name], str(run.path / name))
    trackers = []
    for name in (name for name in names if name != "none"):
        try:
            if name in OPERATIONS:
                callback = numbers_of(name, run, prometheus or Prometheus())
            else:
                kind = get_reporting_integration_callbacks([name])[0]
                callback = TensorBoard() if name == "tensorboard" else kind()
        except (ImportError, RuntimeError) as error:
            package = TRACKER_PACKAGES.get(name, name)
            raise UserError(
                f"training.report_to: the tracker {name!r} needs the package {package}, which is not installed; "
                f"pip install {package}, or leave it out with --set training.report_to=none"
            ) from error
        except (KeyError, ValueError) as error:
            what = f"{error} Ours are {', '.join(OPERATIONS)}."
            raise UserError(f"training.report_to: {what}") from error
        trackers.append(Tracker(name, callback, run))
        if name in SHOW_TEXT:
            trackers.append(Tracker(name, SampleTexts(run, callback, SHOW_TEXT[name]), run))
    return [RunIdentity(run, run_name, names, project), Trackers(trackers)] if trackers else []


class TensorBoard(TensorBoardCallback):
    """Hide in TensorBoard the steps that a rollback or a resume has undone: each training has a file of its own."""

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if state.is_world_process_zero:
            from torch.utils.tensorboard import SummaryWriter  # no import at the head: not everybody has it

            self.tb_writer = SummaryWriter(self.logging_dir, purge_step=state.global_step + 1)
        super().on_train_begin(args, state, control, **kwargs)


class Tracker:
    """Call a tracker's own callback. Its failures do not stop training.

    A call that fails is tried once more. If it fails again, the tracker is not called until the next log, and after
    each further failure for twice as many logs. events.jsonl reports the first failure, and the recovery.
    """

    LONGEST_PAUSE = 1024
    """In logs."""

    def __init__(self, name: str, callback: TrainerCallback, run: RunFolder) -> None:
        self.name, self.callback, self.run = name, callback, run
        self.failures = self.logs_to_pass = 0

    def call(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Pass `event` to the tracker, unless it is paused."""
        # the end is always passed on: trackers finish their files there
        if self.logs_to_pass and event != "on_train_end":
            self.logs_to_pass -= event == "on_log"
            return
        error = self._try(event, args, state, control, **kwargs)
        error = error and self._try(event, args, state, control, **kwargs)
        if error is not None:
            self.logs_to_pass = min(2**self.failures, self.LONGEST_PAUSE)
            self.failures += 1
            if self.failures == 1:
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                self._tell(state, "tracker_failed", during=event.removeprefix("on_"), reason=reason)
        elif self.failures and event == "on_log":
            self.failures = 0
            self._tell(state, "tracker_recovered")

    def _try(self, event: str, args, state, control, **kwargs) -> Exception | None:
        try:
            getattr(self.callback, event)(args, state, control, **kwargs)
        except Exception as error:  # whatever a tracker raises, training goes on
            return error
        return None

    def _tell(self, state, kind: str, **details) -> None:
        if state.is_world_process_zero:
            self.run.add_event(kind, step=state.global_step, tracker=self.name, **details)


class Trackers(TrainerCallback):
    """All trackers of a run as one callback, because Transformers warns of a second callback of the same class."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self.trackers = trackers

    def hand_on(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # the Trainer's closing summary, whose loss and rates are wrong after a resume
        if "train_runtime" in kwargs.get("logs", ()):
            return
        for tracker in self.trackers:
            tracker.call(event, args, state, control, **kwargs)


for _event in [name for name in dir(TrainerCallback) if name.startswith("on_")]:
    setattr(Trackers, _event, partialmethod(Trackers.hand_on, _event))


def _in_table_of(module_name: str) -> Callable[[Any, list[dict]], None]:
    """Show them in a table of wandb, or of trackio, which has the same functions."""

    def show(callback: Any, rows: list[dict]) -> None:
        tracker = import_module(module_name)
        cells = [[row["step"], row["prompt"], row["text"]] for row in rows]
        table = tracker.Table(columns=["step", "prompt", "text"], data=cells)
        # steps as the callback of transformers counts them
        tracker.log({"samples": table, "train/global_step": rows[0]["step"]})

    return show


def _in_mlflow(callback: Any, rows: list[dict]) -> None:
    import mlflow

    text = "\n\n".join(f"prompt: {row['prompt']!r}\n\n{row['text']}" for row in rows)
    mlflow.log_text(text + "\n", f"samples/step-{rows[0]['step']:08d}.txt")


def _in_tensorboard(callback: Any, rows: list[dict]) -> None:
    for number, row in enumerate(rows, start=1):
        # TensorBoard shows Markdown: four blanks before each line leave a text as it is
        text = "".join(f"    {line}\n" for line in row["text"].split("\n"))
        callback.tb_writer.add_text(f"samples/{number}", text, row["step"])


# tracker -> a function that shows rows of samples.jsonl there
SHOW_TEXT: dict[str, Callable[[Any, list[dict]], None]] = {
    "wandb": _in_table_of("wandb"),
    "trackio": _in_table_of("trackio"),
    "tensorboard": _in_tensorboard,
    "mlflow": _in_mlflow,
}


class SampleTexts(TrainerCallback):
    """Show the samples that evaluation/sampling.py has just written, after a validation or a step, in a tracker."""

    def __init__(self, run: RunFolder, callback: Any, show: Callable[[Any, list[dict]], None]) -> None:
        """callback: the tracker's own."""
        self.run, self.callback, self.show, self.seen = run, callback, show, 0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.seen = self._size()

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        size = self._size() if state.is_world_process_zero else self.seen
        if size == self.seen:
            return
        self.seen = size
        if now := [row for row in read_rows(self.run.samples) if row.get("step") == state.global_step]:
            self.show(self.callback, now)

    on_step_begin = on_train_end = on_evaluate

    def _size(self) -> int:
        return self.run.samples.stat().st_size if self.run.samples.exists() else 0


class RunIdentity(TrainerCallback):
    """Keep one run of wandb and trackio across resumes, by its name and, for wandb, an id in the run folder.

    All trackers have the same project. A variable that is set already, such as WANDB_PROJECT, keeps its value.
    Without an account, wandb's run is kept offline.

    It comes before the trackers' own callbacks, which read these variables when training begins.
    """

    def __init__(self, run: RunFolder, run_name: str, names: list[str], project: str | None = None) -> None:
        self.run, self.run_name, self.names, self.project = run, run_name, names, project or PROJECT

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        # `training.run_name`, else the recipe's name
        args.run_name, args.project = args.run_name or self.run_name, self.project
        self.run_name = args.run_name
        if not state.is_world_process_zero:
            return
        variables = {PROJECTS[name]: self.project for name in self.names if name in PROJECTS}
        if "wandb" in self.names:
            if not self.run.wandb_id.exists():
                self.run.wandb_id.write_text(uuid.uuid4().hex[:12])
            variables |= {
                "WANDB_RUN_ID": self.run.wandb_id.read_text().strip(),
                "WANDB_RESUME": "allow",
                "WANDB_NAME": self.run_name,
                "WANDB_DIR": str(self.run.path),
                "WANDB_LOG_MODEL": "false",
            }
            # its key, not by wandb's own functions: they would fix its settings before ours are made
            netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
            in_netrc = netrc.exists() and "wandb" in netrc.read_text()
            if not (os.environ.get("WANDB_API_KEY") or in_netrc):
                variables["WANDB_MODE"] = "offline"
        for key, value in variables.items():
            os.environ.setdefault(key, value)


# Show how a run goes where operations look: to Prometheus, which asks, and by OpenTelemetry, which is sent to.
#
# Both get the same few numbers, from rank 0 alone, with the run as their label. They live as long as the process: a run
# that rolls back trains several times, and its end comes after training.

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
                self.run.at_failure.append(self.on_failure)
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

    def on_failure(self) -> None:
        """Find out how the run ended: another rank may have written it, and of an error there may be no event."""
        last = self.run.last_event(*STARTS, *STATES) or {}
        self.state = STATES.get(last.get("event", ""), "failed")
        self.show(is_last=True)

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
