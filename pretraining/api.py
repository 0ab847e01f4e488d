"""Prepare and train from Python, as in a notebook: what the commands do, with their results as objects.

    from pretraining.api import prepare, run

    data = prepare("tiny")
    result = run("tiny", set={"budget.tokens": 204_800}, output_dir="runs/short")
    result.metrics["eval/loss"], result.export

Keywords are the options of `train.py` and `data_prep.py`. Each call starts the command as a process of its own: the
notebook keeps its signals, its threads and its GPU memory, and a launcher may start several ranks.
"""

import json
import shlex
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretraining.command_line import number_of_tokens, parse_train_arguments
from pretraining.errors import UserError
from pretraining.outside.files import read_json_value
from pretraining.recipe import Recipe
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.runtime import processes
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.exit_codes import FINISHED, GAVE_UP, HANG, INTERRUPTED, STOPPED
from pretraining.runtime.installation import REPOSITORY, WORKPLACE
from pretraining.runtime.run_folder import RunFolder
from pretraining.supervise.supervisor import Supervisor

if TYPE_CHECKING:
    import numpy as np

REASONS = {FINISHED: "finished", STOPPED: "stopped", HANG: "hang", GAVE_UP: "gave up"}
"""{exit code: why a run ended}; any other code is an error."""


class CommandFailed(RuntimeError):
    """A command crashed: its last lines."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended, and where its files are."""

    name: str
    folder: Path
    exit_reason: str  # finished; stopped (on request, with a checkpoint: call again); hang; gave up
    step: int  # the last step that was logged
    metrics: dict[str, float]  # newest value of every metric, by its name in metrics.jsonl: `eval/loss`, ...
    export: Path | None  # the `from_pretrained` folder of a finished run
    report: Path | None
    stop_asked: bool = False
    """Also of a run that finished, if the request came during its last step or its export."""

    @classmethod
    def of(cls, folder: Path, exit_reason: str, stop_asked: bool) -> "RunResult":
        """Read what the run has written."""
        run, metrics = RunFolder(folder), {}
        for row in read_rows(run.metrics):
            metrics |= row
        recipe = read_json_value(run.recipe) if run.recipe.exists() else {}
        step = metrics.pop("step", 0)
        metrics.pop("time", None)
        exported = exit_reason == REASONS[FINISHED] and run.export.is_dir()
        export, report = run.export if exported else None, run.report if run.report.exists() else None
        name = recipe.get("name", folder.name)
        return cls(name, folder, exit_reason, step, metrics, export, report, stop_asked)

    @property
    def metrics_file(self) -> Path:
        """One JSON object a line: `pandas.read_json(result.metrics_file, lines=True)`."""
        return RunFolder(self.folder).metrics

    @property
    def rows(self) -> list[dict]:
        return read_rows(self.metrics_file)


SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Prepared:
    folder: Path
    summary: dict  # what `data_prep.py --json` prints
    recipe: Recipe

    def tokens(self, split: str = "train", start: int = 0, stop: int | None = None) -> "np.ndarray":
        """Return tokens `start` up to `stop` of a split, by default all, document after document; or `UserError`."""
        from pretraining.data.prepared import open_prepared

        if split not in SPLITS:
            raise UserError(f"tokens: there is no split {split!r}; there are {' and '.join(SPLITS)}")
        if "folder" not in self.summary:
            raise UserError("tokens: nothing was written: leave out `count`, or wait for the submitted jobs")
        part = getattr(open_prepared(self.recipe, self.folder.parent), split)
        return part.read(start, part.num_tokens if stop is None else min(stop, part.num_tokens))


def prepare(recipe: str | Path, *, show: bool = True, **options: Any) -> Prepared:
    """Prepare a recipe's data; returns at once if that is done.

    options: those of data_prep.py by name: `set={"data.name": "mine"}`, `data_dir`, `workers`, `replace`, ...
    show: print what the command prints.

    Raises:
        UserError: what the command says in one line.
        KeyboardInterrupt: it was interrupted; the same call goes on.
    """
    words = [*words_of({"recipe": recipe, **options}), "--json"]
    command = [sys.executable, str(REPOSITORY / "data_prep.py"), *words]
    try:
        answer, _ = processes.call(command, captured=True, show=_print_line if show else lambda line: None)
    except processes.CommandEnded as ended:
        if ended.code in (INTERRUPTED, STOPPED):
            raise KeyboardInterrupt from None
        raise _failure(command, ended.code, ended.lines) from None
    summary = json.loads(answer.strip().splitlines()[-1])
    tokens, settings = options.get("limit_tokens"), settings_of(options.get("set", {}))
    limit = None if tokens is None else number_of_tokens(str(tokens))
    loaded, _ = load_recipe_and_ds_config(str(recipe), settings, limit_tokens=limit)
    return Prepared(Path(summary.get("folder", "")), summary, loaded)


def run(recipe: str | Path, *, launcher: str = "", show: bool = True, **options: Any) -> RunResult:
    """Train a recipe, or continue its run; a finished one is not started again.

    An interrupt (the stop button of a notebook) asks the run to save and stop.

    Args:
        launcher: what starts the ranks: "deepspeed --num_gpus=8"; by default one process without any.
        show: print what the run prints.
        options: those of train.py by name: `set={"training.learning_rate": 1e-3}`, `output_dir`, `deepspeed`,
            `data_dir`, `resume`, `allow_change=["data"]`, `force=True`, ...

    Raises:
        UserError: what the command says in one line.
        CommandFailed: it crashed.
        KeyboardInterrupt: it was interrupted, and ended without a checkpoint of that moment.
    """
    words = words_of({"recipe": recipe, **options})
    command, (_, folder) = train_command(words, launcher), checked_run(words)
    last: deque[str] = deque(maxlen=processes.LINES_KEPT)

    def keep(line: str) -> None:
        last.append(line)
        if show:
            _print_line(line)

    variables = processes.environment() | {"PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory(prefix="run_") as place, processes.handlers_kept():
        supervisor = Supervisor(command, Path(place), keep, variables)
        code = supervisor.run(0)
    if code in REASONS:
        return RunResult.of(folder, REASONS[code], supervisor.asked)
    failure = _failure(command, code, last)
    if supervisor.asked:
        raise KeyboardInterrupt from failure
    raise failure


def checked_run(words: Sequence[str]) -> tuple[Recipe, Path]:
    """Check the options of train.py and the recipe in this process; return the recipe and the folder of the run."""
    options = parse_train_arguments(list(words))
    if options.plan or options.rehearse:
        answers = "python -m pretraining.planning answers, or train.py --plan or --rehearse with --json"
        raise UserError(f"plan and rehearse: start no run; {answers}")
    typed = options.recipe, options.set, options.deepspeed
    recipe, _ = load_recipe_and_ds_config(*typed, limit_tokens=options.limit_tokens)
    return recipe, Path(options.output_dir or WORKPLACE / "runs" / recipe.name)


def train_command(words: Sequence[str], launcher: str) -> list[str]:
    return [*(shlex.split(launcher) or [sys.executable]), str(REPOSITORY / "train.py"), *words]


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Write keywords as a command's options: `force=True` as --force, a list as an option that is repeated."""
    words = []
    for name, value in options.items():
        if name == "help":
            raise UserError("help: ask in a shell: python train.py --help, or data_prep.py")
        values = value if isinstance(value, list | tuple) else [value]
        if name in ("set", "slurm"):
            values = settings_of(value)
        for each in values:
            if each is True:
                words.append(f"--{name}")
            elif each is not None and each is not False:
                words += [f"--{name}", str(each)]
    return words


def settings_of(settings: Mapping[str, Any] | Sequence[str] | str) -> list[str]:
    """Return the texts that `--set` takes, of {"section.key": value} or of such texts."""
    if isinstance(settings, str):
        return [settings]
    if not isinstance(settings, Mapping):
        return list(settings)

    def plain(value: Any) -> Any:
        # a path, or a number or an array of numpy
        return value.tolist() if hasattr(value, "tolist") else str(value)

    return [f"{key}={json.dumps(value, default=plain)}" for key, value in settings.items()]


def _print_line(line: str) -> None:
    if not line.startswith("error: "):
        print(line, end="", flush=True)


def _failure(command: list[str], code: int, last: Iterable[str]) -> Exception:
    if error := processes.error_line(last):
        return UserError(error)
    return CommandFailed(f"{shlex.join(command)}\nended with exit code {code}:\n{''.join(last)}")
