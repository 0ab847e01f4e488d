"""The seven steps: what each depends on, why it runs or is up to date, and what it does.

Files count by their content: one that was only written again changes nothing. Code is not compared: after an upgrade,
`--from` asks for what is to be done again.
"""

import argparse
import json
import math
import re
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, ClassVar

from pretraining.api import train_command, words_of
from pretraining.checkpoints.folders import files_in
from pretraining.checkpoints.format import file_entry, read_marker
from pretraining.checkpoints.publish import is_at_hub
from pretraining.data.checksums import digest_of
from pretraining.data.corpus import open_sources
from pretraining.data.manifest import deciding_section, num_shard_bytes, read_manifest
from pretraining.data.portions import lacking, portions_of
from pretraining.data.preparation.execution import read_slurm_options
from pretraining.data.preparation.prepare import prepared_differences
from pretraining.doctor.gpus import read_gpus
from pretraining.errors import UserError
from pretraining.outside.files import read_json_value
from pretraining.outside.schema import differences, display_path, listed
from pretraining.planning.gpus import find_gpu
from pretraining.planning.quantities import num_bytes
from pretraining.planning.screen import full_plan, in_short
from pretraining.planning.setup import Setup
from pretraining.recipe.fixed_keys import changed_parts
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.runtime.durable_files import read_rows, write_json
from pretraining.runtime.exit_codes import STOPPED
from pretraining.runtime.installation import REPOSITORY, WORKPLACE
from pretraining.runtime.processes import CommandEnded, call
from pretraining.runtime.run_folder import RunFolder, utc_now
from pretraining.supervise.hosts import Hosts

# What all steps share: its settings, the record of what was done, and how both compare.

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
        if options.publish is not None:
            is_at_hub(options.publish)
        self.gpu = options.gpu or (gpus.known.name if gpus.known else None)
        self.run = RunFolder(options.output_dir or WORKPLACE / "runs" / self.recipe.name)
        self.data_folder = options.data_dir / self.recipe.data.name
        self.record = Record(self.run)
        self.stop_asked = False  # during a step that has ended well nevertheless

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
        answer, asked = call(list(command), captured, None if self.output is None else show)
        self.stop_asked |= asked
        return answer

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

    hosted = Hosts.of([*shlex.split(launcher), "train.py"])
    if hosted is not None:
        return sum(map(len, hosted.slots.values()))
    if total := of("--num_processes"):
        return total  # accelerate counts those of all machines
    ranks = of("--num_gpus", "--nproc_per_node", "--nproc-per-node")
    return ranks and ranks * (of("--num_nodes", "--nnodes") or 1)


REPORTED = ("recipe", "plan", "environment", "metrics", "events", "samples", "mixture")
"""Files of a run that its report shows, as `RunFolder` names them."""


class Plan(Step):
    """What the run will take; refuses one that cannot fit. It comes first: nothing is paid before it."""

    name = "plan"

    def inputs(self) -> dict:
        pipeline = self.pipeline
        return {
            "recipe": pipeline.recipe.to_dict(),
            "ds_config": pipeline.ds_config,
            "world_size": pipeline.world_size,
            "gpu": pipeline.gpu,
            "force": pipeline.options.force,
        }

    def run(self) -> dict:
        pipeline = self.pipeline
        gpu = find_gpu(pipeline.gpu) if pipeline.gpu else None
        plan = full_plan(Setup(pipeline.recipe, pipeline.ds_config, pipeline.world_size), gpu)
        if plan["refusals"] and not pipeline.options.force:
            first = plan["refusals"][0]
            raise UserError(f"plan refused: {first['what']}; {first['remedy']}")
        kept = ("parameters", "tokens", "steps", "disk_bytes", "checkpoint_bytes", "forecast")
        memory = {key: plan["memory"][key] for key in ("total", "on_processor", "host_node_bytes")}
        return {"in_short": in_short(plan), "memory": memory, **{key: plan[key] for key in kept}}

    def words(self, facts: dict) -> str:
        return facts["in_short"]


class Prepare(Step):
    """Token shards of the recipe's texts."""

    name = "prepare"

    @cached_property
    def sources(self) -> list:
        return open_sources(self.pipeline.recipe.data)

    @property
    def kept_sources(self) -> list[dict | None]:
        """List what the last run noted of each source; None of one that it did not have."""
        kept = self.pipeline.record.steps.get(self.name, {}).get("inputs", {}).get("sources", {})
        return [kept.get(key) for key, _ in self.pipeline.recipe.data.text_origins]

    def inputs(self) -> dict:
        data, contents = self.pipeline.recipe.data, {}
        for (key, _), source, known in zip(data.text_origins, self.sources, self.kept_sources, strict=True):
            fingerprint = source.fingerprint()
            # A source whose files were not written since is not read again.
            same = known is not None and known["fingerprint"] == fingerprint
            content = known["content"] if same else source.content()
            contents[key] = {"fingerprint": fingerprint, "content": content}
        portions = [portion and list(portion) for portion in portions_of(self.pipeline.recipe)]
        return {"data": deciding_section(data.to_dict()), "portions": portions, "sources": contents}

    def identity(self) -> str:
        """Compute the digest of the tokens that are asked for, the same wherever the texts are."""
        inputs = self.inputs()
        contents = [each["content"] for each in inputs["sources"].values()]
        return digest_of(inputs["portions"], inputs["data"], contents)

    def examine(self) -> Decision:
        pipeline, place = self.pipeline, display_path(self.pipeline.data_folder)
        manifest = read_manifest(pipeline.data_folder)
        if manifest is None:
            return Decision(True, f"{place} is not there yet")
        fingerprints = [source.fingerprint() for source in self.sources]
        differing = prepared_differences(manifest, pipeline.recipe.data.to_dict(), fingerprints)
        again, kept = "", self.kept_sources
        if differing and pipeline.record.facts(self.name).get("fingerprint") == manifest["fingerprint"]:
            before, now = pipeline.record.steps[self.name]["inputs"], self.kept_inputs()
            contents = [each["content"] for each in now["sources"].values()]
            # the texts are those that were prepared, in files of another time
            if contents == [each and each["content"] for each in kept] and now["data"] == before["data"]:
                again = "; files were written again with the same content"
        if differing and not again:
            needs = "" if pipeline.options.replace else "; it needs --replace"
            return Decision(True, listed(differing) + needs)
        if lacking(manifest, portions_of(pipeline.recipe)):
            return Decision(True, f"{place} holds less than this run reads")
        if self.changes() != []:
            # for the day on which files are written again with the same content
            pipeline.record.add(self.name, {"inputs": self.kept_inputs(), "facts": self._facts(manifest)})
        made = f"{place} holds {self._facts(manifest)['tokens']:,} tokens of these texts"
        return Decision(False, made + again)

    def run(self) -> dict:
        pipeline = self.pipeline
        options = pipeline.options
        keys = ("data_dir", "executor", "workers", "replace", "slurm")
        words = pipeline.recipe_words + words_of({key: getattr(options, key) for key in keys})
        pipeline.call(sys.executable, str(REPOSITORY / "data_prep.py"), *words)
        if (manifest := read_manifest(pipeline.data_folder)) is None:
            what = "its jobs are submitted; the same command goes on once they have ended"
            raise CommandEnded(STOPPED, what)
        return self._facts(manifest)

    def _facts(self, manifest: dict) -> dict:
        tokens = sum(split["tokens"] for split in manifest["splits"].values())
        facts = {"folder": str(self.pipeline.data_folder), "tokens": tokens}
        return facts | {"fingerprint": manifest["fingerprint"], "bytes": num_shard_bytes(manifest)}

    def words(self, facts: dict) -> str:
        return f"{facts['tokens']:,} tokens, {num_bytes(facts['bytes'])}, in {display_path(Path(facts['folder']))}"


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
        pipeline, launcher = self.pipeline, shlex.split(self.pipeline.options.launcher)
        words = [*pipeline.train_words, *Train(pipeline).start_words]
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
        committed = self.pipeline.run.committed()
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
        return other and (finished or self.pipeline.options.replace)

    @property
    def start_words(self) -> list[str]:
        options = self.pipeline.options
        resume = "never" if self.starts_over and not options.allow_change else options.resume
        return words_of({"resume": resume, "allow_change": options.allow_change})

    def run(self) -> dict:
        pipeline = self.pipeline
        words = [*pipeline.train_words, *self.start_words]
        words += ["--force"] * pipeline.options.force
        # started again after a crash or a hang
        supervise = ["-m", "pretraining.supervise", "--restarts", str(pipeline.options.restarts), "--"]
        pipeline.call(sys.executable, *supervise, *train_command(words, pipeline.options.launcher))
        end = pipeline.run.last_event("end") or {}
        # a node with a disk of its own: the first one has what the run came to
        is_elsewhere = pipeline.run.node_events.exists() and not pipeline.run.events.exists()
        if not (is_elsewhere or pipeline.run.is_finished(pipeline.recipe.to_dict())):
            place = display_path(pipeline.run.path)
            raise CommandEnded(1, f"{place} holds no finished run; see its console.log")
        measured = {key: end[key] for key in end if key.startswith("eval_") and isinstance(end[key], float)}
        return {"folder": str(pipeline.run.path), "step": self._last_step(), **measured}

    def words(self, facts: dict) -> str:
        loss = f", validation loss {facts['eval_loss']:.4f}" if "eval_loss" in facts else ""
        return f"{facts['step']:,} steps in {display_path(Path(facts['folder']))}{loss}"


class Evaluate(Step):
    """The exported model on the validation set, and a sample of it."""

    name = "evaluate"

    def inputs(self) -> dict:
        manifest = read_manifest(self.pipeline.data_folder) or {}
        validation = manifest.get("splits", {}).get("validation", {}).get("checksum")
        contents = {"the export": self.pipeline.content("export"), "the validation set": validation}
        return {"evaluation": self.pipeline.recipe.to_dict().get("evaluation"), "contents": contents}

    def run(self) -> dict:
        run, data = str(self.pipeline.run.path), str(self.pipeline.options.data_dir)
        words = [sys.executable, "-m", "pretraining.evaluation", run, "--data_dir", data, "--json"]
        answer = self.pipeline.call(*words, "--trust_extensions", captured=True)
        return json.loads(answer.strip().splitlines()[-1])

    def words(self, facts: dict) -> str:
        # null of a broken model, which JSON has for NaN
        facts = {key: math.nan if value is None else value for key, value in facts.items()}
        loss, perplexity, bits = (facts[key] for key in ("loss", "perplexity", "bits_per_byte"))
        return f"loss {loss:.4f}, perplexity {perplexity:.2f}, {bits:.4f} bits per byte"


class ReportStep(Step):
    """The page of the run."""

    name = "report"

    def inputs(self) -> dict:
        run = self.pipeline.run
        files = {each: getattr(run, each) for each in REPORTED if getattr(run, each).exists()}
        return {"contents": {"the run": self.pipeline.record.content("run", files)}}

    def examine(self) -> Decision:
        """Compare its inputs, and the page with the one that was written."""
        run = self.pipeline.run
        found = self.look_at_inputs(f"{display_path(run.report)} shows the run as it is")
        if found.runs or self.pipeline.content("report") == self.pipeline.record.facts(self.name)["content"]:
            return found
        return Decision(True, f"{display_path(run.report)} has changed or is gone")

    def run(self) -> dict:
        # its modules are not needed to say that it is up to date
        from pretraining.reporting.__main__ import write_report

        page = write_report([self.pipeline.run.path], self.pipeline.run.report)
        return {"page": str(page), "content": self.pipeline.content("report")}

    def words(self, facts: dict) -> str:
        return display_path(Path(facts["page"]))


class Publish(Step):
    """The export and the report at the hub, in a store or in a folder."""

    name = "publish"

    def inputs(self) -> dict:
        contents = {f"the {name}": self.pipeline.content(name) for name in ("export", "report")}
        return {"to": self.pipeline.options.publish, "contents": contents}

    def examine(self) -> Decision:
        if self.pipeline.options.publish is None:
            return Decision(False, "--publish OWNER/NAME, ADDRESS or FOLDER asks for it", NOT_ASKED)
        return self.look_at_inputs(f"{self.pipeline.options.publish} holds this export")

    def run(self) -> dict:
        words = ["push", str(self.pipeline.run.path), str(self.pipeline.options.publish), "--json"]
        words += ["--private"] * self.pipeline.options.private
        answer = self.pipeline.call(sys.executable, "-m", "pretraining.checkpoints", *words, captured=True)
        return json.loads(answer)

    def words(self, facts: dict) -> str:
        return f"{facts['files']} files, {num_bytes(facts['bytes'])}: {facts['to']}"


STEPS: dict[str, type[Step]] = {
    step.name: step for step in (Plan, Prepare, Doctor, Train, Evaluate, ReportStep, Publish)
}
NAMES = tuple(STEPS)
