"""The seven steps: what each depends on, why it runs or is up to date, and what it does.

Files count by their content: one that was only written again changes nothing. Code is not compared: after an upgrade,
`--from` asks for what is to be done again.
"""

import json
import re
import shlex
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO

from pretraining.checkpoints.folders import files_in
from pretraining.data.checksums import digest_of
from pretraining.data.manifest import deciding_section, num_shard_bytes, read_manifest
from pretraining.data.portions import lacking, portions_of
from pretraining.data.preparation.prepare import prepared_differences
from pretraining.data.sources import open_sources
from pretraining.errors import UserError
from pretraining.pipeline.command import StepEnded, call
from pretraining.pipeline.record import Record
from pretraining.pipeline.step import NOT_ASKED, UP_TO_DATE, Look, Step
from pretraining.pipeline.training import Doctor, Train
from pretraining.planning.gpus import find_gpu
from pretraining.planning.quantities import num_bytes
from pretraining.planning.screen import full_plan, in_short
from pretraining.recipe import Recipe
from pretraining.runtime.exit_codes import STOPPED
from pretraining.runtime.run_folder import RunFolder
from pretraining.schema import REPOSITORY, display_path, listed
from pretraining.supervise.hostfile import HostfileCommand

REPORTED = ("recipe", "plan", "environment", "metrics", "events", "samples", "mixture")
"""Files of a run that its report shows, as `RunFolder` names them."""


@dataclass
class Pipeline:
    """A recipe, where its files go, and how its steps are started."""

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
        self.steps: dict[str, Step] = {step.name: step(self) for step in STEPS}

    @property
    def training(self) -> Train:
        """Return the step that trains."""
        return self.steps[Train.name]

    @property
    def data_folder(self) -> Path:
        """Name the folder of the prepared data."""
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

    def look(self, name: str) -> Look:
        """Say whether a step is to run."""
        found = self.steps[name].look()
        if not found.runs and name in self.forced and found.state == UP_TO_DATE:
            return Look(True, "--from asks for it")
        return found

    def do(self, name: str) -> dict:
        """Run a step, and keep what it took and made."""
        step = self.steps[name]
        facts = step.run()
        # after the step: training changes what its own inputs are compared with
        self.record.add(name, {"inputs": step.kept_inputs(), "facts": facts})
        return facts

    def call(self, *command: str, captured: bool = False) -> str:
        """Run a command of a step to its end; `captured`: return what it printed.

        Raises:
            StepEnded: with its exit code.
        """
        return call(list(command), captured, self.output)


class Plan(Step):
    """What the run will take; refuses one that cannot fit. It comes first: nothing is paid before it."""

    name = "plan"

    def inputs(self) -> dict:
        """Describe recipe, ds_config and GPUs."""
        pipeline = self.pipeline
        return {
            "recipe": pipeline.recipe.to_dict(),
            "ds_config": pipeline.ds_config,
            "world_size": pipeline.world_size,
            "gpu": pipeline.gpu,
            "force": pipeline.force,
        }

    def look(self) -> Look:
        """Compare its inputs."""
        facts = self.pipeline.record.steps.get(self.name, {}).get("facts", {})
        return self.look_at_inputs(facts.get("in_short", ""))

    def run(self) -> dict:
        """Make the plan."""
        pipeline = self.pipeline
        gpu = find_gpu(pipeline.gpu) if pipeline.gpu else None
        plan = full_plan(pipeline.recipe, pipeline.ds_config, pipeline.world_size, gpu)
        if plan["refusals"] and not pipeline.force:
            first = plan["refusals"][0]
            raise UserError(f"plan refused: {first['what']}; {first['remedy']}")
        kept = ("parameters", "tokens", "steps", "disk_bytes", "checkpoint_bytes", "forecast")
        memory = {key: plan["memory"][key] for key in ("total", "on_processor", "host_node_bytes")}
        return {"in_short": in_short(plan), "memory": memory, **{key: plan[key] for key in kept}}

    def words(self, facts: dict) -> str:
        """Write it in short."""
        return facts["in_short"]


class Prepare(Step):
    """Token shards of the recipe's texts."""

    name = "prepare"

    @property
    def manifest(self) -> dict | None:
        """Read what is prepared; None if nothing is."""
        return read_manifest(self.pipeline.data_folder)

    @cached_property
    def sources(self) -> list:
        """Open the recipe's texts."""
        return open_sources(self.pipeline.recipe.data)

    def inputs(self) -> dict:
        """Describe the keys that decide the tokens, and the content of every source."""
        data = self.pipeline.recipe.data
        kept = self._kept_sources()
        contents = {}
        for (key, _), source, known in zip(data.text_origins, self.sources, kept, strict=True):
            fingerprint = source.fingerprint()
            # A source whose files were not written since is not read again.
            same = known is not None and known["fingerprint"] == fingerprint
            contents[key] = {
                "fingerprint": fingerprint,
                "content": known["content"] if same else source.content(),
            }
        portions = [portion and list(portion) for portion in portions_of(self.pipeline.recipe)]
        return {"data": deciding_section(data.to_dict()), "portions": portions, "sources": contents}

    def identity(self) -> str:
        """Compute the digest of the tokens that are asked for, the same wherever the texts are."""
        inputs = self.inputs()
        return digest_of(
            inputs["portions"], inputs["data"], [e["content"] for e in inputs["sources"].values()]
        )

    def _kept_sources(self) -> list[dict | None]:
        kept = self.pipeline.record.steps.get(self.name, {}).get("inputs", {}).get("sources", {})
        return [kept.get(key) for key, _ in self.pipeline.recipe.data.text_origins]

    def look(self) -> Look:
        """Compare the finished data with the recipe and its texts."""
        pipeline, manifest = self.pipeline, self.manifest
        place = display_path(pipeline.data_folder)
        if manifest is None:
            return Look(True, f"{place} is not there yet")
        made = f"{place} holds {_tokens(manifest):,} tokens of these texts"
        differing = prepared_differences(
            manifest, pipeline.recipe.data.to_dict(), [source.fingerprint() for source in self.sources]
        )
        if differing and not self._only_written_again(manifest):
            return Look(True, listed(differing) + ("" if pipeline.replace else "; it needs --replace"))
        if lacking(manifest, portions_of(pipeline.recipe)):
            return Look(True, f"{place} holds less than this run reads")
        if self.changes() != []:
            # for the day on which files are written again with the same content
            pipeline.record.add(self.name, {"inputs": self.kept_inputs(), "facts": self._facts(manifest)})
        return Look(False, f"{made}; files were written again with the same content" if differing else made)

    def _only_written_again(self, manifest: dict) -> bool:
        """Say if the texts are those that were prepared, in files of another time."""
        kept = self._kept_sources()
        of_data = self.pipeline.record.steps.get(self.name, {}).get("facts", {}).get("fingerprint")
        if of_data != manifest["fingerprint"] or None in kept:
            return False
        kept_data = self.pipeline.record.steps[self.name]["inputs"]["data"]
        now = self.kept_inputs()
        contents = [each["content"] for each in now["sources"].values()]
        return contents == [known["content"] for known in kept] and now["data"] == kept_data

    def run(self) -> dict:
        """Run data_prep.py."""
        pipeline = self.pipeline
        words = [*pipeline.recipe_words, "--data_dir", str(pipeline.data_root), *pipeline.prepare_words]
        words += ["--replace"] * pipeline.replace
        pipeline.call(sys.executable, str(REPOSITORY / "data_prep.py"), *words)
        manifest = self.manifest
        if manifest is None:
            raise StepEnded(STOPPED, "its jobs are submitted; the same command goes on once they have ended")
        return self._facts(manifest)

    def _facts(self, manifest: dict) -> dict:
        facts = {"folder": str(self.pipeline.data_folder), "tokens": _tokens(manifest)}
        return facts | {"fingerprint": manifest["fingerprint"], "bytes": num_shard_bytes(manifest)}

    def words(self, facts: dict) -> str:
        """Write how many tokens there are."""
        return f"{facts['tokens']:,} tokens, {num_bytes(facts['bytes'])}, in {display_path(Path(facts['folder']))}"


def _tokens(manifest: dict) -> int:
    return sum(split["tokens"] for split in manifest["splits"].values())


class Evaluate(Step):
    """The exported model on the validation set, and a sample of it."""

    name = "evaluate"

    def inputs(self) -> dict:
        """Describe the export, the validation tokens, and the recipe's section."""
        manifest = read_manifest(self.pipeline.data_folder) or {}
        validation = manifest.get("splits", {}).get("validation", {}).get("checksum")
        contents = {"the export": self.pipeline.content("export"), "the validation set": validation}
        return {"evaluation": self.pipeline.recipe.to_dict().get("evaluation"), "contents": contents}

    def look(self) -> Look:
        """Compare its inputs."""
        facts = self.pipeline.record.steps.get(self.name, {}).get("facts")
        return self.look_at_inputs(self.words(facts) if facts else "")

    def run(self) -> dict:
        """Run `python -m pretraining.evaluation`."""
        run, data = str(self.pipeline.run.path), str(self.pipeline.data_root)
        words = [sys.executable, "-m", "pretraining.evaluation", run, "--data_dir", data, "--json"]
        answer = self.pipeline.call(*words, "--trust_extensions", captured=True)
        return json.loads(answer.strip().splitlines()[-1])

    def words(self, facts: dict) -> str:
        """Write loss, perplexity and bits per byte."""
        loss, perplexity, bits = (facts[key] for key in ("loss", "perplexity", "bits_per_byte"))
        return f"loss {loss:.4f}, perplexity {perplexity:.2f}, {bits:.4f} bits per byte"


class Report(Step):
    """The page of the run."""

    name = "report"

    def inputs(self) -> dict:
        """Describe the files of the run that it shows."""
        run = self.pipeline.run
        files = {each: getattr(run, each) for each in REPORTED if getattr(run, each).exists()}
        return {"contents": {"the run": self.pipeline.record.content("run", files)}}

    def look(self) -> Look:
        """Compare its inputs, and the page with the one that was written."""
        run, kept = self.pipeline.run, self.pipeline.record.steps.get(self.name)
        found = self.look_at_inputs(f"{display_path(run.report)} shows the run as it is")
        if not found.runs and self.pipeline.content("report") != kept["facts"]["content"]:
            return Look(True, f"{display_path(run.report)} has changed or is gone")
        return found

    def run(self) -> dict:
        """Write report.html."""
        # its modules are not needed to say that it is up to date
        from pretraining.reporting.__main__ import write_report

        page = write_report([self.pipeline.run.path], self.pipeline.run.report)
        return {"page": str(page), "content": self.pipeline.content("report")}

    def words(self, facts: dict) -> str:
        """Write its path."""
        return display_path(Path(facts["page"]))


class Publish(Step):
    """The export and the report at the hub, in a store or in a folder."""

    name = "publish"

    def inputs(self) -> dict:
        """Describe what is published, and where."""
        contents = {
            "the export": self.pipeline.content("export"),
            "the report": self.pipeline.content("report"),
        }
        return {"to": self.pipeline.to, "contents": contents}

    def look(self) -> Look:
        """Compare its inputs, if it is asked for."""
        if self.pipeline.to is None:
            return Look(False, "--publish OWNER/NAME, ADDRESS or FOLDER asks for it", NOT_ASKED)
        return self.look_at_inputs(f"{self.pipeline.to} holds this export")

    def run(self) -> dict:
        """Run `python -m pretraining.checkpoints push`."""
        words = ["push", str(self.pipeline.run.path), str(self.pipeline.to), "--json"]
        words += ["--private"] * self.pipeline.private
        answer = self.pipeline.call(sys.executable, "-m", "pretraining.checkpoints", *words, captured=True)
        return json.loads(answer)

    def words(self, facts: dict) -> str:
        """Write where it is."""
        return f"{facts['files']} files, {num_bytes(facts['bytes'])}: {facts['to']}"


STEPS: tuple[type[Step], ...] = (Plan, Prepare, Doctor, Train, Evaluate, Report, Publish)
NAMES = tuple(step.name for step in STEPS)


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
