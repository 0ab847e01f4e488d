"""Name every path of a run folder in one place, and offer the only ways to write there."""

import calendar
import json
import platform
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from pretraining.errors import UserError
from pretraining.extend import FOLDER
from pretraining.outside.files import TEXT, object_of, read_json_value
from pretraining.outside.masking import masked_in
from pretraining.outside.schema import fits
from pretraining.recipe.fixed_keys import curve_parts
from pretraining.recipe.sections import Evaluation
from pretraining.runtime.durable_files import append_row, read_rows, replacing
from pretraining.runtime.installation import IS_WHEEL, REPOSITORY
from pretraining.runtime.lock import find_disks, lock_folder, release
from pretraining.runtime.process_group import ONE_DISK, together

_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"

MARKER = "committed.json"  # of a checkpoint: it makes the checkpoint exist (checkpoints/format.py)
FAILING_SECONDS = 10.0  # how long a rank that fails waits for its last words: its launcher may kill it soon
STARTS = ("start", "resume")  # events with which an attempt of a run begins
PACKAGES = ["torch", "transformers", "deepspeed", "accelerate", "datasets", "tokenizers", "numpy", "pyarrow"]
PACKAGES += ["pretraining-recipes"] if IS_WHEEL else []  # a checkout has a commit


class RunFolder:
    """The folder `runs/<name>/`. It is created with the first file that is written."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.json"
        self.plan = self.path / "plan.json"
        self.pipeline = self.path / "pipeline.json"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.console_log = self.path / "console.log"
        self.report = self.path / "report.html"
        self.mixture = self.path / "mixture.json"
        self.journal = self.path / "journal.jsonl"
        self.flagged_blocks = self.path / "flagged_blocks.jsonl"
        self.export = self.path / "export"
        self.stop_file = self.path / "STOP"
        self.heartbeats = self.path / "heartbeats"
        self.stacks = self.path / "stacks"
        self.logs = self.path / "logs"
        self.failures_folder = self.path / "failures"
        self.profile = self.path / "profile"
        self.model = self.path / "model"
        self.extensions = self.path / FOLDER
        self.changes = self.path / "changes.json"
        self.aside = self.path / "aside"
        self.wandb_id = self.path / "wandb_id"
        self.node_events = self.path / "node_events.jsonl"
        self.node = self.path / "node.json"
        self.disks = ONE_DISK  # which ranks see this folder; known once the run is locked
        self.listeners: list[Callable[[dict], None]] = []  # get each row of our events.jsonl
        self.has_begun = False  # whether the run of this process has begun to write here
        self.at_beginning: list[Callable[[], None]] = []
        self.at_failure: list[Callable[[], None]] = []  # called once it is written how this rank failed

    def checkpoint(self, step: int) -> Path:
        return self.path / f"checkpoint-{step}"

    def weights(self, step: int) -> Path:
        """Return the folder of the weights, if only they are left of that checkpoint."""
        return self.path / f"weights-{step}"

    def saved(self, kind: str = "checkpoint") -> list[Path]:
        """Return every `checkpoint-<step>`, committed or not, newest step first; kind "weights": `weights-<step>`."""
        # Leaves out `weights-8.partial`, and a copy that a user named `checkpoint-8-good`.
        found = (path for path in self.path.glob(f"{kind}-*") if re.fullmatch(rf"{kind}-\d+", path.name))
        return sorted(found, key=step_in_name, reverse=True)

    def committed(self) -> list[Path]:
        """Return the checkpoint folders that have the commit marker, newest step first."""
        return [folder for folder in self.saved() if (folder / MARKER).exists()]

    def exported(self) -> Path:
        """Return the folder of the exported model; `UserError` if there is none."""
        if not (self.export / "config.json").is_file():
            run, step = self.path, "N"
            if (run / MARKER).exists():  # a checkpoint was named
                run, step = run.parent, step_in_name(run)
            what = "no exported model there; train.py writes it at its end, and of a checkpoint"
            remedy = f"python -m pretraining.checkpoints export {run} --step {step}"
            raise UserError(f"{self.export}: {what}: {remedy}")
        return self.export

    def rank_log(self, rank: int) -> Path:
        """Return the file of what a rank prints; rank 0 has console.log."""
        return self.logs / f"rank-{rank:05}.log" if rank else self.console_log

    def failures(self, rank: int) -> Path:
        return self.failures_folder / f"rank-{rank:05}.jsonl"

    def begin(self) -> None:
        """Say that the run of this process writes here from now on. Every rank calls it; again after a rollback."""
        self.has_begun = True
        for call in self.at_beginning:
            call()

    def fail(self) -> None:
        """Say that how this rank fails is written here."""
        # beside this thread: nothing of it that hangs may keep the process from ending
        calls = [threading.Thread(target=call, name="at failure", daemon=True) for call in self.at_failure]
        for call in calls:
            call.start()
        until = time.monotonic() + FAILING_SECONDS
        for call in calls:
            call.join(max(0.0, until - time.monotonic()))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Find which ranks see this folder, and lock each disk; every rank raises `UserError` if another run has it."""
        locks: list[TextIO] = []  # one on the first rank of each disk, none on the others
        disks = find_disks(self.path)
        try:
            together(lambda: locks.append(lock_folder(self.path)) if disks.is_first else None)
            self.disks = disks
            yield
        finally:
            for lock in locks:
                release(lock, self.path)

    def is_finished(self, recipe: dict) -> bool:
        """Return whether the finished run of this recipe is here; only what changes no result of it may differ."""
        try:
            written = read_json_value(self.recipe)
            # an older version's file may lack keys or have another shape: then it is not the same recipe
            same = results_of(written) == results_of(recipe)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return False
        # a start after the last end, such as that of a longer run which was killed, has left something to do
        end = self.last_event(*STARTS, "end") or {}
        if not same or "eval_loss" not in end:
            return False
        # every file of the export that its run wrote, in full size; others may have come since, and the card is edited
        sizes = self.export_sizes() if self.export.is_dir() else {}
        # without "export", the configuration alone is looked for
        written = end.get("export", {"config.json": sizes.get("config.json")})
        return bool(sizes) and all(
            sizes.get(name) == written[name] for name in written if name != "README.md"
        )

    def last_event(self, *kinds: str) -> dict | None:
        return next((row for row in reversed(read_events(self.events)) if row.get("event") in kinds), None)

    def holds_parts(self) -> bool:
        """Return whether checkpoints here may be the part of one node: the last start found several run folders."""
        start = self.last_event(*STARTS) or {}
        return self.node_events.exists() or start.get("run_folders", 1) > 1

    def add_end(self, results: dict) -> None:
        """Add the event of a finished run: its results, and the export's files with their sizes."""
        self.add_event("end", **results, export=self.export_sizes())
        # one that came too late would stop the next run of this folder after its first step
        self.stop_file.unlink(missing_ok=True)

    def export_sizes(self) -> dict[str, int]:
        """Return {file: bytes} of the export."""
        return {path.name: path.stat().st_size for path in sorted(self.export.iterdir())}

    def add_event(self, kind: str, **details: Any) -> None:
        """Append a row (what, when in UTC, details) to events.jsonl; node_events.jsonl on a disk without rank 0."""
        row = {"time": utc_now(), "event": kind, **masked_in(details)}
        append_row(self.events if self.disks.has_rank_0 else self.node_events, row)
        # what happens to the run is reported by the disk of rank 0
        for listener in self.listeners if self.disks.has_rank_0 else ():
            listener(row)


_STEP = {"type": ["number", "null"], "minimum": 0, "maximum": 1 << 53}
_STEPS = ("step", "steps", "own_seconds", "median_seconds", "blocked_seconds", "world_size")
_MEASURED = {"type": ["object", "null"]}
_EVENT = object_of({}, {"time": TEXT, "event": TEXT, "measured": _MEASURED, **dict.fromkeys(_STEPS, _STEP)})


def step_in_name(folder: Path) -> int:
    """Return the step of a folder that `saved` returns."""
    return int(folder.name.rpartition("-")[2])


def read_events(path: Path) -> list[dict]:
    return events_of(read_rows(path))


def events_of(rows: list[dict]) -> list[dict]:
    """Return the rows of an events.jsonl without those with a time that is none, or a value of another type."""
    events = []
    for row in rows:
        with suppress(ValueError):
            unix_seconds(row.get("time", "2026-01-01T00:00:00Z") if fits(row, _EVENT) else "")
            events.append(row)
    return events


def results_of(recipe: dict) -> dict:
    """Return the parts of a resolved recipe on which the results of its run depend."""
    evaluation = Evaluation.of(recipe.get("evaluation", {}))  # a recipe from before a key means its default
    named = {key: recipe.get(key) for key in ("name", "data")}
    return {**curve_parts(recipe), "evaluation": evaluation.to_dict(), **named}


def utc_now() -> str:
    """Return the current time in the format of events and markers, `2026-01-31T12:00:00Z`."""
    return time.strftime(_TIME_FORMAT, time.gmtime(time.time()))


def unix_seconds(when: str) -> int:
    """Return the UNIX seconds of a time that `utc_now` returned."""
    # not time.mktime, which takes the fields as local time
    return calendar.timegm(time.strptime(when, _TIME_FORMAT))


def event_seconds(event: dict) -> float:
    """Read the UNIX seconds of an event; infinity if it has no time."""
    with suppress(KeyError, TypeError, ValueError):
        return float(unix_seconds(event["time"]))
    return float("inf")


def step_of_event(event: dict) -> float | None:
    """Read the step that an event names, or its checkpoint's; None if it names neither."""
    if isinstance(event.get("step"), int | float):
        return float(event["step"])
    number = str(event.get("checkpoint") or "").rpartition("-")[2]
    if number.isdecimal() and len(number) < 16:  # more digits are no step, and may be no number
        return float(number)
    return 0.0 if event.get("event") == "start" else None


class StepTotals(NamedTuple):
    """Time and tokens of all steps of a run. Every report of speed comes from here, so that the numbers agree."""

    steps: float
    seconds: float
    tokens: float

    @classmethod
    def of(cls, logged: Iterable[tuple[float, float, float]], first_step: float = 0) -> "StepTotals":
        """Add up rows of (step, seconds of a step, tokens per second): means since the row before, or `first_step`."""
        seconds = tokens = 0.0
        before = first_step
        for step, step_seconds, tokens_per_second in logged:
            lasted = max(0, step - before) * step_seconds
            seconds, tokens, before = seconds + lasted, tokens + lasted * tokens_per_second, step
        return cls(before - first_step, seconds, tokens)

    def speed(self) -> dict[str, float]:
        """Return {"tokens_per_second", "step_seconds", "training_seconds"}; empty if no step was timed."""
        if self.steps <= 0 or self.seconds <= 0:
            return {}
        step_seconds, rate = self.seconds / self.steps, self.tokens / self.seconds
        return {"tokens_per_second": rate, "step_seconds": step_seconds, "training_seconds": self.seconds}


def first_step(events: list[dict]) -> int:
    """Return the step after which a run began: 0, or its checkpoint's step if it began as a branch of another run."""
    began = next((event for event in events if event.get("event") in STARTS), {})
    return int(step_of_event(began) or 0)


def keep_past_rows(
    path: Path, step: int, log_history: list[dict], of_validation: Callable[[dict], bool]
) -> list[dict]:
    """Remove the rows of steps and validations that a run repeats when it continues after `step`; return the others.

    log_history: the checkpoint's. of_validation: whether a row belongs to the validation after its step.
    """
    # one that was cut short is measured again
    validated, kept = is_validated(step, log_history), []
    for row in read_rows(path):
        made = row.get("step", 0)
        if made < step or (made == step and (validated or not of_validation(row))):
            kept.append(row)
    if path.exists():
        with replacing(path) as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
    return kept


def is_validated(step: int, log_history: list[dict]) -> bool:
    return any("eval_loss" in row and row["step"] == step for row in log_history)


def installed_versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return {package: its version; None: not installed}."""
    versions: dict[str, str | None] = dict.fromkeys(packages)
    for name in versions:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def describe_environment(device: str, world_size: int) -> dict:
    """Return versions, device and git state, for environment.json and the model card; no variables, no secrets."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": device,
        "world_size": world_size,
        "versions": installed_versions(PACKAGES),
        "git_commit": git("rev-parse", "HEAD"),
        # Kept measurements are no part of what runs.
        "git_modified": bool(git("status", "--porcelain", "--untracked-files=no", ":!benchmarks/results")),
    }


def trained_on_processor(environment: dict) -> bool:
    return str(environment.get("device", "")).startswith("CPU")


def git(*arguments: str) -> str | None:
    """Return what git says of this checkout; None without git, and in a wheel: a repository around it is not ours."""
    command, settings = ["git", "-C", str(REPOSITORY), *arguments], {"errors": "replace", "timeout": 10}
    with suppress(OSError, subprocess.SubprocessError):
        said = None if IS_WHEEL else subprocess.run(command, capture_output=True, check=True, **settings)
        return said and said.stdout.strip()
    return None
