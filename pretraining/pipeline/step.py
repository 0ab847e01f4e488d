"""What the steps of a pipeline (steps.py) share: its settings, the record of what was done, and how both compare."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

from pretraining.checkpoints.folders import files_in
from pretraining.checkpoints.format import file_entry
from pretraining.data.checksums import digest_of
from pretraining.outside.files import read_json_value
from pretraining.recipe import Recipe
from pretraining.runtime.durable_files import write_json
from pretraining.runtime.processes import call
from pretraining.runtime.run_folder import RunFolder, utc_now
from pretraining.schema import differences, listed

UP_TO_DATE, NOT_NEEDED, NOT_ASKED = "up to date", "not needed", "not asked for"


@dataclass
class Pipeline:
    """A recipe, where its files go, how its steps are started, and what they have done."""

    recipe: Recipe
    ds_config: dict | None
    run: RunFolder
    data_root: Path
    recipe_words: list[str]
    """The options that name the recipe: --recipe, --set, --limit_tokens."""
    deepspeed: str | None = None
    launcher: str = ""
    world_size: int = 1
    gpu: str | None = None
    prepare_words: list[str] = field(default_factory=list)
    """Options of data_prep.py alone: --executor, --workers, --slurm."""
    resume: str = "auto"
    allow_change: list[str] = field(default_factory=list)
    restarts: int = 3
    force: bool = False
    replace: bool = False
    to: str | None = None
    """Where the model is published; None: nowhere."""
    private: bool = False
    forced: frozenset[str] = frozenset()
    """Steps that run even if they are up to date."""
    output: IO[str] | None = None
    """Where the output of commands is shown; None: as this process's own."""

    def __post_init__(self) -> None:
        self.record = Record(self.run)

    @property
    def data_folder(self) -> Path:
        return self.data_root / self.recipe.data.name

    @property
    def train_words(self) -> list[str]:
        """List the options that the doctor and train.py share."""
        chosen = ["--deepspeed", self.deepspeed] if self.deepspeed else []
        return [*chosen, "--output_dir", str(self.run.path), "--data_dir", str(self.data_root)]

    def content(self, name: str) -> str | None:
        """Compute the digest of the export or of the report; None if it is not there."""
        path = getattr(self.run, name)
        paths = files_in(path) if path.is_dir() else [path]
        return self.record.content(name, {str(each.relative_to(self.run.path)): each for each in paths})

    def call(self, *command: str, captured: bool = False) -> str:
        """Run a command of a step to its end; `captured`: return what it printed.

        Raises:
            CommandEnded: with its exit code.
        """

        def show(line: str) -> None:
            print(line, end="", file=self.output, flush=True)

        return call(list(command), captured, None if self.output is None else show)


class Record:
    """What each step took and made when it ran last, in `pipeline.json` of the run folder."""

    def __init__(self, run: RunFolder):
        self.path = run.pipeline
        self.steps: dict[str, dict] = {}
        self.files: dict[str, dict] = {}
        try:
            kept = read_json_value(self.path)
            self.steps, self.files = dict(kept["steps"]), dict(kept["files"])
        # none yet, or another file of that name: then every step looks at what is there
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def add(self, step: str, entry: Mapping[str, Any]) -> None:
        """Keep what a step has done; the whole record is written, also into a folder that has replaced the old one."""
        self.steps[step] = {**entry, "time": utc_now()}
        write_json(self.path, {"steps": self.steps, "files": self.files})

    def facts(self, step: str) -> dict:
        """Return what the step made when it ran last; empty if it has not run."""
        return self.steps.get(step, {}).get("facts", {})

    def content(self, name: str, files: Mapping[str, Path]) -> str | None:
        """Compute the digest of the content of files; None if one is missing.

        Size and time of each only say whether it must be read again.

        name: under which the digest is kept.
        """
        try:
            stats = {each: path.stat() for each, path in sorted(files.items())}
        except FileNotFoundError:
            return None
        states = digest_of([(each, stat.st_size, stat.st_mtime_ns) for each, stat in stats.items()])
        known = self.files.get(name)
        if known is None or known.get("states") != states:
            entries = {each: file_entry(files[each]) for each in stats}
            known = self.files[name] = {"states": states, "content": digest_of(entries)}
        return known["content"]


@dataclass(frozen=True)
class Decision:
    """Whether a step is to run, and why."""

    runs: bool
    why: str
    state: str = UP_TO_DATE
    """Of a step that does not run."""


class Step(ABC):
    """One step of a pipeline."""

    name: ClassVar[str]

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline

    def look(self) -> Decision:
        """Decide whether it runs: if its inputs have changed, or --from asks for it."""
        found = self.examine()
        if not found.runs and found.state == UP_TO_DATE and self.name in self.pipeline.forced:
            return Decision(True, "--from asks for it")
        return found

    @abstractmethod
    def examine(self) -> Decision:
        """Compare what the step depends on with what it was; --from does not count."""

    @abstractmethod
    def run(self) -> dict:
        """Run the step; returns what is worth knowing of it.

        Raises:
            CommandEnded: its command ended with an exit code.
            UserError: it is refused.
        """

    @abstractmethod
    def words(self, facts: dict) -> str:
        """Write what a finished step has made."""

    def inputs(self) -> dict:
        return {}

    def kept_inputs(self) -> dict:
        """Describe its inputs as a file gives them back."""
        return json.loads(json.dumps(self.inputs()))

    def changes(self) -> list[str] | None:
        """List how its inputs differ from those of its last run; None if it has not run."""
        before = self.pipeline.record.steps.get(self.name)
        if before is None:
            return None
        now = self.kept_inputs()
        there, here = before["inputs"].get("contents", {}), now.pop("contents", {})
        values = {key: value for key, value in before["inputs"].items() if key != "contents"}
        contents = [f"{name} has changed" for name in here if there.get(name) != here[name]]
        return list(map(str, differences(values, now))) + contents

    def look_at_inputs(self, made: str) -> Decision:
        """Return whether its inputs are those of its last run. made: what is there if they are."""
        changes = self.changes()
        if changes is None:
            return Decision(True, "it has not run here")
        return Decision(True, listed(changes)) if changes else Decision(False, made)
