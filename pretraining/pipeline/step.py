"""What the steps of a pipeline (steps.py) share: its settings, the record of what was done, and how both compare."""

import argparse
import json
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar

from pretraining.api import words_of
from pretraining.checkpoints.folders import files_in
from pretraining.checkpoints.format import file_entry
from pretraining.data.checksums import digest_of
from pretraining.data.preparation.slurm import read_slurm_options
from pretraining.doctor.gpus import read_gpus
from pretraining.errors import UserError
from pretraining.outside.files import read_json_value
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.runtime.durable_files import write_json
from pretraining.runtime.installation import WORKPLACE
from pretraining.runtime.processes import call
from pretraining.runtime.run_folder import RunFolder, utc_now
from pretraining.schema import differences, listed
from pretraining.supervise.hosts import HostfileCommand

UP_TO_DATE, NOT_NEEDED, NOT_ASKED = "up to date", "not needed", "not asked for"


class Pipeline:
    """A recipe, where its files go, how its steps are started, and what they have done.

    options: the command line's (`__main__.py`), which are checked here; nothing is written. forced: steps that run even
    if they are up to date. output: where the output of commands is shown; None: as this process's own. Raises
    `UserError` for a recipe or options that make no sense.
    """

    def __init__(
        self, options: argparse.Namespace, forced: Collection[str] = (), output: IO[str] | None = None
    ) -> None:
        self.options, self.forced, self.output = options, forced, output
        ranks, gpus = options.world_size or ranks_of(options.launcher), read_gpus()
        # without a number in its words, deepspeed takes every GPU
        all_gpus = len(gpus.found) if options.launcher.split()[:1] == ["deepspeed"] else 1
        self.world_size = ranks or max(1, all_gpus)
        self.recipe, self.ds_config = load_recipe_and_ds_config(
            options.recipe, options.set, options.deepspeed, self.world_size, options.limit_tokens
        )
        read_slurm_options(options.slurm)
        self.gpu = options.gpu or (gpus.known.name if gpus.known else None)
        self.run = RunFolder(options.output_dir or WORKPLACE / "runs" / self.recipe.name)
        self.data_folder = options.data_dir / self.recipe.data.name
        self.record = Record(self.run)

    @property
    def recipe_words(self) -> list[str]:
        return words_of({key: getattr(self.options, key) for key in ("recipe", "set", "limit_tokens")})

    @property
    def train_words(self) -> list[str]:
        chosen = {"deepspeed": self.options.deepspeed or None, "output_dir": self.run.path}
        return self.recipe_words + words_of({**chosen, "data_dir": self.options.data_dir})

    def content(self, name: str) -> str | None:
        """Compute the digest of the export or of the report; None if it is not there."""
        path = getattr(self.run, name)
        paths = files_in(path) if path.is_dir() else [path]
        return self.record.content(name, {str(each.relative_to(self.run.path)): each for each in paths})

    def call(self, *command: str, captured: bool = False) -> str:
        """Run a command of a step to its end; `CommandEnded` with its exit code. captured: return what it printed."""

        show = partial(print, end="", file=self.output, flush=True)
        return call(list(command), captured, None if self.output is None else show)

    def say(self, name: str, text: str) -> None:
        print(f"{name:<9} {text}", file=self.output, flush=True)


class Record:
    """What each step took and made when it ran last, in `pipeline.json` of the run folder."""

    def __init__(self, run: RunFolder):
        self.path = run.pipeline
        self.steps: dict[str, dict] = {}
        self.files: dict[str, dict] = {}
        if not self.path.exists():
            return
        try:
            kept = read_json_value(self.path)
            self.steps, self.files = dict(kept["steps"]), dict(kept["files"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = "is no record of a pipeline; move it away, or choose another --output_dir"
            raise UserError(f"{self.path}: {what}") from error

    def add(self, step: str, entry: Mapping[str, Any]) -> None:
        """Keep what a step has done; the whole record is written, also into a folder that has replaced the old one."""
        self.steps[step] = {**entry, "time": utc_now()}
        write_json(self.path, {"steps": self.steps, "files": self.files})

    def facts(self, step: str) -> dict:
        """Return what the step made when it ran last; empty if it has not run."""
        return self.steps.get(step, {}).get("facts", {})

    def content(self, name: str, files: Mapping[str, Path]) -> str | None:
        """Compute the digest of files, read again if a size or time differs, and keep it; None if one is missing."""
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
    runs: bool
    why: str
    state: str = UP_TO_DATE  # of a step that does not run


class Step(ABC):
    """One step of a pipeline.

    `examine` decides by what the step depends on; --from does not count. `run` returns what is worth knowing of it, and
    `words` writes that. `run` raises `CommandEnded` if its command ended with an exit code, and `UserError` if it is
    refused.
    """

    name: ClassVar[str]

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline

    def look(self) -> Decision:
        """Decide whether it runs: if its inputs have changed, or --from asks for it."""
        found = self.examine()
        if not found.runs and found.state == UP_TO_DATE and self.name in self.pipeline.forced:
            return Decision(True, "--from asks for it")
        return found

    def examine(self) -> Decision:
        facts = self.pipeline.record.facts(self.name)
        return self.look_at_inputs(self.words(facts) if facts else "")

    @abstractmethod
    def run(self) -> dict: ...

    @abstractmethod
    def words(self, facts: dict) -> str: ...

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


def ranks_of(launcher: str) -> int | None:
    """Read from a launcher's words how many ranks it starts; None if they do not say."""

    def of(*names: str) -> int | None:
        found = re.search(rf"(?:{'|'.join(names)})[= ](\d+)(?!\S)", launcher)
        return int(found[1]) if found else None

    hosted = HostfileCommand.of([*shlex.split(launcher), "train.py"])
    if hosted is not None:
        return sum(map(len, hosted.slots().values()))
    if total := of("--num_processes"):
        return total  # accelerate counts those of all machines
    ranks = of("--num_gpus", "--nproc_per_node", "--nproc-per-node")
    return ranks and ranks * (of("--num_nodes", "--nnodes") or 1)
