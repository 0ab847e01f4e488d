"""The steps that train: the examination of the machine, and the run."""

import shlex
import sys
from pathlib import Path

from pretraining.api import train_command
from pretraining.checkpoints.folders import committed_checkpoints
from pretraining.checkpoints.format import read_marker
from pretraining.data.manifest import read_manifest
from pretraining.errors import UserError
from pretraining.outside.files import read_json_value
from pretraining.pipeline.step import NOT_NEEDED, Decision, Step
from pretraining.recipe.curve import changed_parts
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.processes import CommandEnded
from pretraining.schema import differences, display_path, listed


class Doctor(Step):
    """Examine this machine, each time before training starts: what it will do to the run is no content of a file."""

    name = "doctor"

    def examine(self) -> Decision:
        if "--limit_tokens" in self.pipeline.recipe_words:
            why = "--limit_tokens is a trial, cheap enough to fail; python -m pretraining.doctor examines the machine"
            return Decision(False, why, NOT_NEEDED)
        if Train(self.pipeline).look().runs:
            return Decision(True, "training is about to start here")
        return Decision(False, "training is done", NOT_NEEDED)

    def run(self) -> dict:
        pipeline, launcher = self.pipeline, shlex.split(self.pipeline.launcher)
        words = [*pipeline.recipe_words, *pipeline.train_words, *Train(pipeline).start_words]
        if launcher:
            module = "--module" if Path(launcher[0]).name == "deepspeed" else "-m"
            pipeline.call(*launcher, module, "pretraining.doctor", *words)
        else:
            words += ["--world_size", str(pipeline.world_size)]
            pipeline.call(sys.executable, "-m", "pretraining.doctor", *words)
        return {}

    def words(self, facts: dict) -> str:
        return "nothing will break"


class Train(Step):
    """The run, until its end."""

    name = "train"

    def inputs(self) -> dict:
        """Name the tokens; what else counts, the run folder's own recipe says."""
        manifest = read_manifest(self.pipeline.data_folder) or {}
        return {"data": {key: manifest.get(key) for key in ("fingerprint", "origin")}}

    def examine(self) -> Decision:
        """Compare the run folder with the recipe and the prepared data."""
        run, recipe = self.pipeline.run, self.pipeline.recipe.to_dict()
        place = display_path(run.path)
        if run.is_finished(recipe):
            if self._has_other_data():
                holds = f"{recipe['data']['name']} holds now"
                return Decision(True, f"{place} was trained on other tokens than {holds}")
            return Decision(False, f"{place} is finished")
        if not run.recipe.exists():
            return Decision(True, f"{place} holds no run yet")
        earlier = self._earlier()
        if changes := [str(change) for change in changed_parts(recipe, earlier)]:
            aside = "; the earlier run is kept beside it" if self.starts_over else ""
            return Decision(True, listed(changes) + aside)
        if run.is_finished(earlier):
            # its steps stay: what follows them is measured again
            measured = differences(earlier.get("evaluation"), recipe.get("evaluation"), "evaluation")
            return Decision(True, listed(measured) or f"{place} is another recipe's")
        return Decision(True, f"{place} is not finished: it goes on after step {self._last_step():,}")

    def _earlier(self) -> dict:
        try:
            return read_json_value(self.pipeline.run.recipe)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.pipeline.run.recipe}: cannot be read; move the folder away") from error

    def _last_step(self) -> int:
        rows = read_rows(self.pipeline.run.metrics)
        return int(rows[-1].get("step", 0)) if rows else 0

    def _has_other_data(self) -> bool:
        """Return whether the finished run was made of other tokens; a data set that has only grown is the same."""
        now = self.inputs()["data"]
        kept = self.pipeline.record.steps.get(self.name)
        committed = committed_checkpoints(self.pipeline.run)
        if kept is not None:
            before = kept["inputs"]["data"]
        elif committed:
            before = read_marker(committed[0])["data"]
        else:
            return False
        # a run of another machine may be here without its data
        known = [key for key in now if before.get(key) and now[key]]
        return bool(known) and all(before[key] != now[key] for key in known)

    @property
    def starts_over(self) -> bool:
        """Whether the run in the folder is set aside: it is finished and another is asked for, or --replace says so."""
        run = self.pipeline.run
        if not run.recipe.exists():
            return False
        earlier = self._earlier()
        finished = run.is_finished(earlier)
        if finished and self.name in self.pipeline.forced:
            return True
        changed = bool(changed_parts(self.pipeline.recipe.to_dict(), earlier))
        other = changed or (finished and self._has_other_data())
        return other and (finished or self.pipeline.replace)

    @property
    def start_words(self) -> list[str]:
        """List the options that say how it begins, which the doctor shares."""
        pipeline = self.pipeline
        resume = "never" if self.starts_over and not pipeline.allow_change else pipeline.resume
        return ["--resume", resume, *(w for key in pipeline.allow_change for w in ("--allow_change", key))]

    def run(self) -> dict:
        pipeline = self.pipeline
        words = [*pipeline.recipe_words, *pipeline.train_words, *self.start_words]
        words += ["--force"] * pipeline.force
        # started again after a crash or a hang
        supervise = [
            sys.executable,
            "-m",
            "pretraining.supervise",
            "--restarts",
            str(pipeline.restarts),
            "--",
        ]
        pipeline.call(*supervise, *train_command(words, pipeline.launcher))
        end = pipeline.run.last_event("end") or {}
        if not pipeline.run.is_finished(pipeline.recipe.to_dict()):
            place = display_path(pipeline.run.path)
            raise CommandEnded(1, f"{place} holds no finished run; see its console.log")
        measured = {key: end[key] for key in end if key.startswith("eval_") and isinstance(end[key], float)}
        return {"folder": str(pipeline.run.path), "step": self._last_step(), **measured}

    def words(self, facts: dict) -> str:
        loss = f", validation loss {facts['eval_loss']:.4f}" if "eval_loss" in facts else ""
        return f"{facts['step']:,} steps in {display_path(Path(facts['folder']))}{loss}"
