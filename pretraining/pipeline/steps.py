"""The seven steps: what each depends on, why it runs or is up to date, and what it does.

Files count by their content: one that was only written again changes nothing. Code is not compared: after an upgrade,
`--from` asks for what is to be done again.
"""

import json
import re
import shlex
import sys
from functools import cached_property
from pathlib import Path

from pretraining.data.checksums import digest_of
from pretraining.data.manifest import deciding_section, num_shard_bytes, read_manifest
from pretraining.data.portions import lacking, portions_of
from pretraining.data.preparation.prepare import prepared_differences
from pretraining.data.sources import open_sources
from pretraining.errors import UserError
from pretraining.pipeline.step import NOT_ASKED, Decision, Step
from pretraining.pipeline.training import Doctor, Train
from pretraining.planning.gpus import find_gpu
from pretraining.planning.quantities import num_bytes
from pretraining.planning.screen import full_plan, in_short
from pretraining.runtime.exit_codes import STOPPED
from pretraining.runtime.processes import CommandEnded
from pretraining.schema import REPOSITORY, display_path, listed
from pretraining.supervise.hosts import HostfileCommand

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
            "force": pipeline.force,
        }

    def examine(self) -> Decision:
        return self.look_at_inputs(self.pipeline.record.facts(self.name).get("in_short", ""))

    def run(self) -> dict:
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
        return facts["in_short"]


class Prepare(Step):
    """Token shards of the recipe's texts."""

    name = "prepare"

    @property
    def manifest(self) -> dict | None:
        return read_manifest(self.pipeline.data_folder)

    @cached_property
    def sources(self) -> list:
        return open_sources(self.pipeline.recipe.data)

    @property
    def kept_sources(self) -> list[dict | None]:
        """List what the last run noted of each source; None of one that it did not have."""
        kept = self.pipeline.record.steps.get(self.name, {}).get("inputs", {}).get("sources", {})
        return [kept.get(key) for key, _ in self.pipeline.recipe.data.text_origins]

    def inputs(self) -> dict:
        """Describe the keys that decide the tokens, and the content of every source."""
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
        """Compare the finished data with the recipe and its texts."""
        pipeline, manifest = self.pipeline, self.manifest
        place = display_path(pipeline.data_folder)
        if manifest is None:
            return Decision(True, f"{place} is not there yet")
        fingerprints = [source.fingerprint() for source in self.sources]
        differing = prepared_differences(manifest, pipeline.recipe.data.to_dict(), fingerprints)
        if differing and not self._only_written_again(manifest):
            return Decision(True, listed(differing) + ("" if pipeline.replace else "; it needs --replace"))
        if lacking(manifest, portions_of(pipeline.recipe)):
            return Decision(True, f"{place} holds less than this run reads")
        if self.changes() != []:
            # for the day on which files are written again with the same content
            pipeline.record.add(self.name, {"inputs": self.kept_inputs(), "facts": self._facts(manifest)})
        made = f"{place} holds {self._facts(manifest)['tokens']:,} tokens of these texts"
        again = "; files were written again with the same content" if differing else ""
        return Decision(False, made + again)

    def _only_written_again(self, manifest: dict) -> bool:
        """Return whether the texts are those that were prepared, in files of another time."""
        record, kept = self.pipeline.record, self.kept_sources
        if record.facts(self.name).get("fingerprint") != manifest["fingerprint"] or None in kept:
            return False
        before, now = record.steps[self.name]["inputs"], self.kept_inputs()
        contents = [each["content"] for each in now["sources"].values()]
        return contents == [known["content"] for known in kept] and now["data"] == before["data"]

    def run(self) -> dict:
        pipeline = self.pipeline
        words = [*pipeline.recipe_words, "--data_dir", str(pipeline.data_root), *pipeline.prepare_words]
        words += ["--replace"] * pipeline.replace
        pipeline.call(sys.executable, str(REPOSITORY / "data_prep.py"), *words)
        manifest = self.manifest
        if manifest is None:
            why = "its jobs are submitted; the same command goes on once they have ended"
            raise CommandEnded(STOPPED, why)
        return self._facts(manifest)

    def _facts(self, manifest: dict) -> dict:
        tokens = sum(split["tokens"] for split in manifest["splits"].values())
        facts = {"folder": str(self.pipeline.data_folder), "tokens": tokens}
        return facts | {"fingerprint": manifest["fingerprint"], "bytes": num_shard_bytes(manifest)}

    def words(self, facts: dict) -> str:
        return f"{facts['tokens']:,} tokens, {num_bytes(facts['bytes'])}, in {display_path(Path(facts['folder']))}"


class Evaluate(Step):
    """The exported model on the validation set, and a sample of it."""

    name = "evaluate"

    def inputs(self) -> dict:
        """Describe the export, the validation tokens, and the recipe's section."""
        manifest = read_manifest(self.pipeline.data_folder) or {}
        validation = manifest.get("splits", {}).get("validation", {}).get("checksum")
        contents = {"the export": self.pipeline.content("export"), "the validation set": validation}
        return {"evaluation": self.pipeline.recipe.to_dict().get("evaluation"), "contents": contents}

    def examine(self) -> Decision:
        facts = self.pipeline.record.facts(self.name)
        return self.look_at_inputs(self.words(facts) if facts else "")

    def run(self) -> dict:
        run, data = str(self.pipeline.run.path), str(self.pipeline.data_root)
        words = [sys.executable, "-m", "pretraining.evaluation", run, "--data_dir", data, "--json"]
        answer = self.pipeline.call(*words, "--trust_extensions", captured=True)
        return json.loads(answer.strip().splitlines()[-1])

    def words(self, facts: dict) -> str:
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
        if (
            not found.runs
            and self.pipeline.content("report") != self.pipeline.record.facts(self.name)["content"]
        ):
            return Decision(True, f"{display_path(run.report)} has changed or is gone")
        return found

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
        contents = {
            "the export": self.pipeline.content("export"),
            "the report": self.pipeline.content("report"),
        }
        return {"to": self.pipeline.to, "contents": contents}

    def examine(self) -> Decision:
        if self.pipeline.to is None:
            return Decision(False, "--publish OWNER/NAME, ADDRESS or FOLDER asks for it", NOT_ASKED)
        return self.look_at_inputs(f"{self.pipeline.to} holds this export")

    def run(self) -> dict:
        words = ["push", str(self.pipeline.run.path), str(self.pipeline.to), "--json"]
        words += ["--private"] * self.pipeline.private
        answer = self.pipeline.call(sys.executable, "-m", "pretraining.checkpoints", *words, captured=True)
        return json.loads(answer)

    def words(self, facts: dict) -> str:
        return f"{facts['files']} files, {num_bytes(facts['bytes'])}: {facts['to']}"


STEPS: dict[str, type[Step]] = {
    step.name: step for step in (Plan, Prepare, Doctor, Train, Evaluate, ReportStep, Publish)
}
NAMES = tuple(STEPS)


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
