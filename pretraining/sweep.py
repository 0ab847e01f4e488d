"""Train a recipe once for each value, or each combination of values, and compare the runs.

The runs are in one folder, each in a folder named after what differs. They are trained one after the other, or
submitted to SLURM. The same command skips those that are finished and goes on with the others.
"""

import argparse
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretraining.api import REASONS, CommandFailed, checked_run, run, words_of
from pretraining.checkpoints.folders import refuse_foreign_files
from pretraining.command_line import (
    OneLineParser,
    add_deepspeed,
    add_launcher,
    add_recipe_arguments,
    named_path,
    quoted_words,
)
from pretraining.errors import UserError, one_line_errors
from pretraining.outside.files import read_json_value
from pretraining.outside.masking import as_json
from pretraining.recipe import Recipe
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.reporting.__main__ import write_report
from pretraining.reporting.run_record import RunRecord
from pretraining.runtime.durable_files import write_json
from pretraining.runtime.exit_codes import FINISHED, STOPPED
from pretraining.runtime.installation import REPOSITORY, WORKPLACE
from pretraining.runtime.metric_names import grouped, is_better
from pretraining.runtime.run_folder import RunFolder
from pretraining.runtime.table import aligned

EXAMPLES = """examples:
  python -m pretraining.sweep --recipe tiny --over training.learning_rate=2e-3,5e-3
  python -m pretraining.sweep --recipe tiny --over training.learning_rate=2e-3,5e-3 --over training.seed=1,2,3
  python -m pretraining.sweep --recipe 124m --over optimizer.name=adamw,muon --launcher "deepspeed --num_gpus=8"
  python -m pretraining.sweep --recipe 124m --over training.learning_rate=3e-4,6e-4 \\
      --slurm="--nodes=1 --gpus-per-node=8 --time=12:00:00"
  python -m pretraining.sweep --recipe tiny --over training.learning_rate=2e-3,5e-3 --show

A value is JSON, else a text; a list or a text with commas goes in [...] or "...". Several --over: every combination.
exit codes: 0 all is finished or submitted, 2 a point failed, 75 stopped on request (the same command goes on)."""

JOBS = "sweep.json"  # file of a sweep's folder: the newest table, with the ids of submitted jobs
LONGEST_NAME = 120  # characters of a point's folder; a longer name ends in a digest


@dataclass(frozen=True)
class Point:
    settings: dict[str, str]  # {dotted key: value as it was typed}
    folder: Path
    options: dict[str, Any]  # those of train.py by name, as `api.run` takes them
    recipe: Recipe

    @property
    def is_finished(self) -> bool:
        return RunFolder(self.folder).is_finished(self.recipe.to_dict())


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    typed = options.recipe, options.set, options.deepspeed
    recipe, _ = load_recipe_and_ds_config(*typed, limit_tokens=options.limit_tokens)
    folder = options.output_dir or WORKPLACE / "runs" / f"{recipe.name}-sweep"
    # all of them before the first is started: a wrong value is no surprise after hours
    points = points_of(options, recipe, folder)
    if (folder / "report.html").exists() and not (folder / JOBS).exists():
        raise UserError(f"{folder}: its report.html is of no sweep; choose another --output_dir")
    for point in points:
        refuse_foreign_files(RunFolder(point.folder))
    jobs, failures, code = known_jobs(folder), {}, FINISHED
    if not options.show:
        if options.slurm is not None:
            submit(points, options.slurm, folder, jobs)
        else:
            with redirect_stdout(sys.stderr if options.json else sys.stdout):
                code = train_all(points, options.launcher, failures)
    answer = answer_of(points, folder, recipe, jobs, failures)
    if folder.is_dir():
        write_json(folder / JOBS, answer)
    print(as_json(answer, indent=2) if options.json else as_text(answer), flush=True)
    if failures:
        name, failure = next(iter(failures.items()))
        raise UserError(f"{len(failures)} of {len(points)} points failed; {name}: {failure}")
    return code


def points_of(options: argparse.Namespace, recipe: Recipe, folder: Path) -> list[Point]:
    """Make every combination of values a point, checked as train.py checks it; `UserError` for one that cannot be."""
    over = [_parsed(text) for text in options.over]
    keys = [key for key, _ in over]
    for key, values in over:
        if keys.count(key) > 1:
            raise UserError(f"--over {key}: is named twice; write all of its values with commas between them")
        if doubles := [value for value in values if values.count(value) > 1]:
            raise UserError(f"--over {key}: the value {doubles[0]} is there twice")
    shown = _short_keys(keys)
    points, seen = [], {}
    for values in itertools.product(*(values for _, values in over)):
        settings = dict(zip(keys, values, strict=True))
        name = _folder_name([f"{shown[key]}={value}" for key, value in settings.items()])
        texts = [*options.set, *(f"{key}={value}" for key, value in settings.items())]
        texts.append(f"name={json.dumps(f'{recipe.name}-{name}')}")
        names = ("recipe", "deepspeed", "limit_tokens", "data_dir", "data_cache", "data_cache_gb", "force")
        given = {key: getattr(options, key) for key in names if getattr(options, key)}
        given |= {"set": texts, "output_dir": folder.absolute() / name}
        point, _ = checked_run(words_of(given))
        # 1e-3 is 0.001, and the name decides nothing
        curve = json.dumps({**point.to_dict(), "name": None}, sort_keys=True)
        if curve in seen:
            raise UserError(f"--over: {seen[curve]} and {name} are the same run; leave one out")
        seen[curve] = name
        points.append(Point(settings, folder / name, given, point))
    return points


def _parsed(text: str) -> tuple[str, list[str]]:
    """Split `section.key=1,2,[3,4]` into the key and its values."""
    key, equals, rest = text.partition("=")
    # a comma inside brackets, braces or quotes belongs to the value
    values = re.findall(r'(?:\[[^\]]*\]|\{[^}]*\}|"(?:\\.|[^"\\])*"|[^,])+', rest)
    values = [value.strip() for value in values if value.strip()]
    if not key or not equals or not values:
        raise UserError(f"--over {text}: write section.key=value,value")
    return key, values


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return {key: its last part}, or the whole key if two end alike."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)}


def _folder_name(parts: Sequence[str]) -> str:
    """Join what differs to a name that every disk and tracker takes."""
    text = ",".join(parts)
    name = re.sub(r"[^\w.,=+-]+", "-", text).strip("-.")
    if name != text or len(name) > LONGEST_NAME:
        # other values may have the same letters
        digest = hashlib.blake2b(text.encode(), digest_size=3).hexdigest()
        name = f"{name[: LONGEST_NAME - 7]}-{digest}"
    return name


ANOTHER_SWEEP = "; a sweep of other values needs an --output_dir of its own"  # if another recipe began it


def train_all(
    points: Sequence[Point],
    launcher: str,
    failures: dict[str, str],
    begin: Callable[[Any], None] = lambda point: None,
    called: str = "sweep",
) -> int:
    """Train the points in turn; returns the exit code. What fails is noted, and the next one starts.

    A request to stop reaches the run that is being trained, which saves; no other is started then. begin: is called
    before a point is trained. called: what its lines begin with.
    """
    for number, point in enumerate(points, 1):
        title = f"{called} {number}/{len(points)}: {point.folder.name}"
        if point.is_finished:
            print(f"{title}: finished before", flush=True)
            continue
        print(title, flush=True)
        began = RunFolder(point.folder).recipe.exists()
        try:
            begin(point)
            result = run(launcher=launcher, **point.options)
        except (UserError, CommandFailed) as error:
            failures[point.folder.name] = f"{error}{ANOTHER_SWEEP if began else ''}"
            print(f"{title}: failed: {error}", flush=True)
            continue
        if result.exit_reason not in (REASONS[FINISHED], REASONS[STOPPED]):
            failures[point.folder.name] = result.exit_reason
        if result.stop_asked or result.exit_reason == REASONS[STOPPED]:
            print("stopped; the same command goes on", flush=True)
            return STOPPED
    return FINISHED


def submit(points: Sequence[Point], sbatch_options: str, folder: Path, jobs: dict[str, str]) -> None:
    """Submit a job for each point neither finished nor queued; `UserError` if sbatch cannot.

    jobs: {point: id}; each new one is kept in `folder` at once, so that it is not submitted again after a kill.
    """

    def absolute(value: Any) -> Any:
        # a job begins in another folder
        is_path = isinstance(value, Path) or (isinstance(value, str) and value.endswith(".json"))
        return Path(value).absolute() if is_path else value

    for point in points:
        name = point.folder.name
        if point.is_finished or _is_queued(jobs.get(name)):
            continue
        # launch/slurm.sh adds --output_dir itself
        given = {key: absolute(value) for key, value in point.options.items() if key != "output_dir"}
        command = ["sbatch", "--parsable", *shlex.split(sbatch_options), f"--job-name={point.recipe.name}"]
        command += [str(REPOSITORY / "launch" / "slurm.sh"), *words_of(given)]
        settings: dict = {"env": os.environ | {"RUN": str(point.folder.absolute())}, "cwd": WORKPLACE}
        try:
            done = subprocess.run(command, capture_output=True, text=True, **settings)
        except FileNotFoundError:
            what = "--slurm: sbatch is not installed here; run it where jobs are submitted"
            raise UserError(what) from None
        if done.returncode:
            raise UserError(f"--slurm: sbatch refused {name}: {done.stderr.strip()}")
        jobs[name] = done.stdout.strip().partition(";")[0]
        print(f"submitted {name}: job {jobs[name]}", file=sys.stderr, flush=True)
        kept = read_json_value(folder / JOBS) if (folder / JOBS).exists() else {}
        write_json(folder / JOBS, kept | {"jobs": jobs})


def _is_queued(job: str | None) -> bool:
    if job is None or shutil.which("squeue") is None:
        return False
    done = subprocess.run(["squeue", "--noheader", "--jobs", job], capture_output=True, text=True)
    return done.returncode == 0 and bool(done.stdout.strip())


def known_jobs(folder: Path) -> dict[str, str]:
    if not (folder / JOBS).exists():
        return {}
    try:
        kept = read_json_value(folder / JOBS)
        # an earlier version kept those of its points alone
        points = {Path(each["folder"]).name: each["job"] for each in kept.get("points", ()) if each["job"]}
        return points | kept.get("jobs", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = "is not that of a sweep or a ladder; move it away, or choose another --output_dir"
        raise UserError(f"{folder / JOBS}: {what}") from error


def answer_of(
    points: Sequence[Point], folder: Path, recipe: Recipe, jobs: dict[str, str], failures: dict[str, str]
) -> dict:
    """Describe every point, name the best by the recipe's `evaluation.metric`, and write the overlay."""
    metric = grouped(f"eval_{recipe.evaluation.metric}")
    rows: list[dict] = []
    for point in points:
        run_folder, state, metrics = RunFolder(point.folder), "not begun", {}
        job = jobs.get(point.folder.name)
        if run_folder.metrics.exists() or run_folder.events.exists():
            record = RunRecord(point.folder)
            state = "finished" if point.is_finished else record.state
            names = record.metrics.names()
            metrics = {name: record.metrics.last(name) for name in names} | {"step": int(record.newest_step)}
        if point.folder.name in failures:
            state = "failed"
        elif state not in ("finished", "running") and job and _is_queued(job):
            state = "queued"
        row: dict = {"settings": point.settings, "folder": str(point.folder), "state": state}
        rows.append({**row, "job": job, "metrics": metrics})
    # a run that is not at its end is compared with none
    best: dict | None = None
    for row in rows:
        value = row["metrics"].get(metric) if row["state"] == "finished" else None
        if value is not None and (best is None or is_better(metric, value, best["metrics"][metric])):
            best = row
    logged = [point.folder for point in points if RunFolder(point.folder).metrics.exists()]
    report = str(write_report(logged, folder / "report.html")) if logged else None
    # among the jobs are those of other values, which an earlier command has submitted
    answer = {"metric": metric, "best": best and best["folder"], "report": report}
    return {**answer, "points": rows, "jobs": jobs}


def as_text(answer: dict) -> str:
    """Write the table, with a mark at the best."""
    metric, rows = answer["metric"], answer["points"]
    shown = list(dict.fromkeys([metric, "eval/loss", "train/loss"]))
    keys = list(rows[0]["settings"])
    header = ["", *keys, "state", "step", *shown, "tokens/s"]
    formats = {"step": ",", **dict.fromkeys(shown, ".4f"), "throughput/tokens_per_second": ",.0f"}
    lines = []
    for row in rows:
        metrics, mark = row["metrics"], "*" if row["folder"] == answer["best"] else ""
        values = ((metrics.get(name), spec) for name, spec in formats.items())
        numbers = ["-" if value is None else f"{value:{spec}}" for value, spec in values]
        lines.append([mark, *row["settings"].values(), row["state"], *numbers])
    text = [aligned([header, *lines], left=len(keys) + 2)]
    if answer["best"]:
        text.append(f"* best by {metric}: {answer['best']}")
    best = next((row["settings"] for row in rows if row["folder"] == answer["best"]), {})
    for key, value in best.items():
        tried = {row["settings"][key] for row in rows}
        with suppress(ValueError):  # texts have no order
            if len(tried) > 2 and float(value) in (min(map(float, tried)), max(map(float, tried))):
                text.append(f"{key}={value} is the last value that was tried: a better one may lie beyond")
    if answer["report"]:
        text.append(f"report: {answer['report']}")
    return "\n".join(text)


def add_starting_arguments(parser: argparse.ArgumentParser, run: str) -> None:
    """Add the options of how runs start. run: what --slurm submits a job for, in words."""
    add = parser.add_argument
    add_launcher(parser)
    what = f"submit launch/slurm.sh for {run}, with these options of sbatch"
    add("--slurm", nargs="?", type=quoted_words, const="", metavar="OPTIONS", help=what)
    add("--force", action="store_true", help="go on where the plan says that a run does not fit")


def check_starting_arguments(options: argparse.Namespace, modes: Sequence[str]) -> None:
    """Refuse options that contradict each other. modes: options with which nothing is started."""
    given = [name for name in modes if getattr(options, name)]
    if len(given) > 1 or (given and options.slurm is not None):
        others = ", ".join(f"--{name}" for name in (*modes, "slurm"))
        raise UserError(f"--{given[0]}: starts nothing; leave out the other of {others}")
    if options.slurm is not None and options.launcher:
        what = "launch/slurm.sh starts the ranks of a job itself, one for each GPU; leave it out"
        raise UserError(f"--launcher: {what}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    what = "Train a recipe for each combination of values, and compare the runs."
    shown = {"description": what, "epilog": EXAMPLES}
    parser = OneLineParser("python -m pretraining.sweep", **shown, allow_abbrev=False)
    add_recipe_arguments(parser, remote_data=True)
    add = parser.add_argument
    what = "values to train with (repeatable: every combination)"
    add("--over", action="append", required=True, metavar="SECTION.KEY=A,B,...", help=what)
    add_deepspeed(parser)
    what = "folder of all runs (default: runs/<recipe>-sweep)"
    add("--output_dir", type=named_path, metavar="DIR", help=what)
    add_starting_arguments(parser, "each point")
    add("--show", action="store_true", help="print the table as it is now, and start nothing")
    add("--json", action="store_true", help="the table as JSON; runs print on stderr")
    options = parser.parse_args(arguments)
    check_starting_arguments(options, ("show",))
    return options


if __name__ == "__main__":
    with one_line_errors("what is finished is kept, and the same command goes on"):
        code = main()
    sys.exit(code)
