"""Attach the trackers of `training.report_to`: metrics.jsonl's names, one run across resumes, no effect on training."""

import os
import uuid
from collections.abc import Callable
from functools import partialmethod
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from pretraining.errors import UserError
from pretraining.recipe.sections import Prometheus
from pretraining.recipe.training import TRACKER_PACKAGES
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.metric_names import grouped_names
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.operations import OPERATIONS, numbers_of
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
                callback = get_reporting_integration_callbacks([name])[0]()
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
