"""What one does with the checkpoints of a run: look, verify, branch a decay off, reshard, export, push, make room."""

import argparse
import json
import math
import shlex
import shutil
import sys
import time
from pathlib import Path

from tqdm import tqdm

from pretraining.checkpoints.folders import (
    COMMITTED,
    DAMAGED,
    OTHER_VERSION,
    UNCOMMITTED,
    WEIGHTS_ONLY,
    DiskPlace,
    Place,
    Retention,
    catalogue,
    committed_checkpoints,
    damage,
    entry_of,
    health,
    remove_checkpoint,
    step_in,
    step_in_name,
    step_of,
)
from pretraining.checkpoints.format import MARKER, marker_or_nothing
from pretraining.checkpoints.remote import RemoteRun
from pretraining.checkpoints.upload import Push
from pretraining.command_line import (
    add_data_source,
    add_trust,
    answer_one,
    not_negative_integer,
    not_negative_number,
    positive_integer,
)
from pretraining.errors import UserError, one_line_errors
from pretraining.extend import MODEL, extensions_of_run, load_code_of_run
from pretraining.outside.addresses import is_remote
from pretraining.outside.files import TEXT, object_of, read_json_value
from pretraining.planning.quantities import duration, num_bytes
from pretraining.recipe import recipe_schema
from pretraining.recipe.sections import Checkpoints
from pretraining.runtime.imports import prepare_imports
from pretraining.runtime.installation import as_typed
from pretraining.runtime.lock import lock_idle_run
from pretraining.runtime.processes import CommandEnded, call
from pretraining.runtime.run_folder import RunFolder
from pretraining.runtime.table import Column, write_table
from pretraining.schema import check

# torch and transformers take seconds to import: the verbs that need them import their modules when they answer.

EPILOG = """examples:
  python -m pretraining.checkpoints list runs/tiny
  python -m pretraining.checkpoints verify runs/tiny
  python -m pretraining.checkpoints export runs/tiny --step 700
  python -m pretraining.checkpoints branch runs/qk-norm --at 8000 --decay 1-sqrt --steps 2000
  python -m pretraining.checkpoints prune runs/tiny --keep_last 1 --yes

Every verb has --help, and --json for scripts."""


def main(arguments: list[str] | None = None) -> None:
    answer_one("python -m pretraining.checkpoints", VERBS, __doc__, EPILOG, arguments)


class List:
    """The checkpoints of a run: step, age, size, ranks, ZeRO stage, losses, state.

    `committed` says that the marker holds and every file has its size; `verify` reads the bytes.
    """

    EXAMPLES = """  python -m pretraining.checkpoints list runs/tiny
  python -m pretraining.checkpoints list s3://bucket/runs/30b --json"""
    COLUMNS = (
        Column("step", "step"),
        Column("state", "state"),
        Column("age", "age_seconds", lambda seconds: duration(max(1, seconds))),
        Column("size", "bytes", num_bytes),
        Column("ranks", "ranks"),
        # A stage of None has two meanings: no marker (then there are no ranks either), or a run without DeepSpeed.
        Column(
            "stage",
            lambda each: "none" if each["ranks"] and each["zero_stage"] is None else each["zero_stage"],
        ),
        Column("loss", "loss", ".4f"),
        Column("validation", "eval_loss", ".4f"),
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_run(parser, or_address=True)

    def answer(self, options: argparse.Namespace) -> dict:
        """Return {"run", "checkpoints": entries of the catalogue}."""
        if is_remote(options.run):
            store, names = _store_of(options.run)
            entries = [entry_of(name, step_in(name), health(store, name)) for name in names]
        else:
            entries = catalogue(_run_of(options.run))
        return {"run": str(options.run), "checkpoints": entries}

    def as_text(self, answer: dict) -> str:
        entries = answer["checkpoints"]
        if not entries:
            return f"{answer['run']}: no checkpoint yet"
        reasons = [f"{each['folder']}: {each['reason']}" for each in entries if each["reason"]]
        return "\n".join([write_table(self.COLUMNS, entries, left=2), *reasons])


class Verify:
    """Compare every byte of committed checkpoints with their markers; exit code 2 where one is damaged.

    Reads several files at once; nothing is loaded, and nothing kept of what a store sends.
    """

    EXAMPLES = """  python -m pretraining.checkpoints verify runs/tiny
  python -m pretraining.checkpoints verify runs/tiny --step 700
  python -m pretraining.checkpoints verify s3://bucket/runs/30b --step 1000
  python -m pretraining.checkpoints verify /mnt/copies/checkpoint-700 --json"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_run(parser, or_checkpoint=True, or_address=True)
        _add_step(parser, "default: every committed one")

    def answer(self, options: argparse.Namespace) -> dict:
        """Return {"checkpoints": [{"checkpoint", "whole", "bytes", "seconds", "files"}]}.

        files: {name: what is wrong, or None}.
        """
        if is_remote(options.run):
            place, names = _chosen_in_store(options.run, options.step)
            return {"checkpoints": [self._verified(place, name) for name in names]}
        chosen = _chosen_checkpoints(options.run, options.step)
        # A node without a shared disk holds the files of its own ranks.
        of_run = chosen[0] != options.run
        is_part = of_run and RunFolder(options.run).holds_parts()
        place = DiskPlace(chosen[0].parent)
        return {"checkpoints": [self._verified(place, each.name, of_run, is_part) for each in chosen]}

    def _verified(self, place: Place, name: str, of_run: bool = True, is_part: bool = False) -> dict:
        began, found = time.perf_counter(), health(place, name, of_run, is_part)
        if found.word == OTHER_VERSION:
            raise UserError(found.reason)
        total = sum(entry["bytes"] for entry in found.files.values())
        # stdout holds the answer alone: scripts read it with --json.
        shown = {"file": sys.stderr, "disable": not sys.stderr.isatty(), "leave": False}
        # Without a readable marker there are no checksums to compare with.
        with tqdm(desc=name, total=total, unit="B", unit_scale=True, **shown) as bar:
            verdicts = place.verdicts(name, found.files, bar.update) if found.files else {}
        # The files are whole and the marker is wrong: a renamed folder, for example.
        if found.reason and not any(verdicts.values()):
            verdicts[MARKER] = found.reason
        return {
            "checkpoint": place.where(name),
            "whole": not any(verdicts.values()),
            "bytes": total,
            "seconds": round(time.perf_counter() - began, 3),
            "files": verdicts,
        }

    def as_text(self, answer: dict) -> str:
        lines = []
        for each in answer["checkpoints"]:
            verdict, size = "whole" if each["whole"] else "DAMAGED", num_bytes(each["bytes"])
            # `seconds` is rounded to milliseconds and may be 0.
            speed = f"{num_bytes(each['bytes'] / max(each['seconds'], 1e-3))}/s"
            lines.append(f"{each['checkpoint']}: {verdict}, {len(each['files'])} files, {size} at {speed}")
            lines += [f"  {reason or name + ': ok'}" for name, reason in each["files"].items()]
        return "\n".join(lines)

    def refusal(self, answer: dict) -> str | None:
        damaged = [each for each in answer["checkpoints"] if not each["whole"]]
        if not damaged:
            return None
        reason = next(filter(None, damaged[0]["files"].values()))
        return (
            f"{len(damaged)} of {len(answer['checkpoints'])} checkpoints damaged: {damaged[0]['checkpoint']}: "
            f"{reason}; --resume auto passes over it, prune removes it"
        )


class Export:
    """Make a `from_pretrained` folder of a checkpoint: weights, config, tokenizer, model card.

    Reads the checkpoint's own files, whichever ranks at whichever ZeRO stage wrote them, after verifying them; needs
    host memory for the weights, no GPU and none of the ranks that saved it.
    """

    EXAMPLES = """  python -m pretraining.checkpoints export runs/tiny
  python -m pretraining.checkpoints export runs/tiny --step 700 --to out/tiny-700
  python -m pretraining.checkpoints export /mnt/runs/350m --average
  python -m pretraining.checkpoints export /mnt/copies/checkpoint-700 --model runs/tiny/model --to out/tiny-700"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_run(parser, or_checkpoint=True)
        _add_step(parser, "default: the newest")
        add = parser.add_argument
        add("--to", type=Path, metavar="DIR", help="a new folder (default: RUN/export-<step>)")
        what = "the average that the run keeps of its weights (optimizer.average_decay), not the weights"
        add("--average", action="store_true", help=what)
        what = "config and tokenizer (default: RUN/model, written by train.py)"
        add("--model", type=Path, metavar="DIR", help=what)
        add_trust(parser)

    def answer(self, options: argparse.Namespace) -> dict:
        """Return {"checkpoint", "step", "export", "bytes"}."""
        checkpoint = _whole_checkpoint(options.run, options.step, "--step")
        run, step = RunFolder(checkpoint.parent), step_of(checkpoint)
        folder = options.to or run.path / f"export-{step}"
        _refuse_existing(folder, "--to")
        # Before transformers is imported: it makes that import faster.
        prepare_imports()
        from transformers.utils import logging

        from pretraining.checkpoints.export import export_checkpoint

        logging.disable_progress_bar()
        description, trust = options.model or run.model, options.trust_extensions
        export_checkpoint(checkpoint, description, folder, trust, exponential=options.average)
        size = sum(path.stat().st_size for path in folder.iterdir())
        return {"checkpoint": str(checkpoint), "step": step, "export": str(folder), "bytes": size}

    def as_text(self, answer: dict) -> str:
        return f"{answer['export']}: the model after {answer['step']:,} steps, {num_bytes(answer['bytes'])}"


class Merge:
    """Average the weights of several checkpoints of a run: one model, often as good as a decay of the rate.

    Parts are committed checkpoints and `weights-<step>/`, which retention leaves; the newest must be a checkpoint.
    Model merging in pretraining: Li et al. 2025 (arXiv 2505.12082), and LAWA, Kaddour 2022 (arXiv 2209.14981).
    """

    EXAMPLES = """  python -m pretraining.checkpoints merge runs/qk-norm --last 8
  python -m pretraining.checkpoints merge runs/qk-norm --steps 6000,7000,8000 --weights 1,2,3 --validate"""
    COLUMNS = (
        Column("part", "part"),
        Column("step", "step", ","),
        Column("share", "share", ".4f"),
        Column("validation", "loss", ".4f"),
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_run(parser)
        add, which = parser.add_argument, parser.add_mutually_exclusive_group(required=True)
        which.add_argument("--last", type=positive_integer, metavar="N", help="the newest N")
        which.add_argument("--steps", metavar="A,B,...", help="those of these steps")
        what = "how much each counts, from the oldest to the newest (default: alike)"
        add("--weights", metavar="W,W,...", help=what)
        add("--to", type=Path, metavar="DIR", help="a new folder (default: RUN/merged-<first>-<last>)")
        add("--validate", action="store_true", help="measure the result on the run's validation set")
        add_data_source(parser)
        add_trust(parser)

    def answer(self, options: argparse.Namespace) -> dict:
        """Return {"export", "loss": of the result or None, "parts": [{"part", "step", "share", "loss"}]}."""
        run, parts = _run_of(options.run), self._parts(options)
        shares = self._shares(options.weights, len(parts))
        folders = [run.path / each["folder"] for each in parts]
        for each, part in zip(parts, folders, strict=True):
            if each["state"] == COMMITTED and (reason := damage(part)):
                raise UserError(f"{part}: the checkpoint is damaged: {reason}; name others with --steps")
        folder = options.to or run.path / f"merged-{parts[0]['step']}-{parts[-1]['step']}"
        _refuse_existing(folder, "--to")
        prepare_imports()
        from transformers.utils import logging

        from pretraining.checkpoints.export import export_checkpoint

        logging.disable_progress_bar()
        by_part = dict(zip(folders, shares, strict=True))
        export_checkpoint(folders[-1], run.model, folder, options.trust_extensions, by_part)
        rows = [
            {"part": each["folder"], "step": each["step"], "share": part_share, "loss": each["eval_loss"]}
            for each, part_share in zip(parts, shares, strict=True)
        ]
        loss = self._measured(folder, options) if options.validate else None
        return {"export": str(folder), "loss": loss, "parts": rows}

    def _parts(self, options: argparse.Namespace) -> list[dict]:
        """Return the entries of the catalogue that are averaged, the oldest first."""
        # of a step that has both, the checkpoint comes first in the catalogue, and counts
        entries = reversed(catalogue(_run_of(options.run)))
        there = {each["step"]: each for each in entries if each["state"] in (COMMITTED, WEIGHTS_ONLY)}
        newest_first, known = sorted(there, reverse=True), ", ".join(map(str, sorted(there))) or "none"
        if options.steps:
            words = options.steps.split(",")
            wanted = {int(word) for word in words if word.strip().isdecimal()}
            if len(wanted) < len(words) or not wanted <= there.keys():
                what = "is not a list of different steps that are there"
                raise UserError(f"--steps {options.steps}: {what}; there are {known}")
        else:
            wanted = set(newest_first[: options.last])
            if len(wanted) < options.last:
                raise UserError(f"--last {options.last}: {options.run} has {len(wanted)}: {known}")
        parts = [there[step] for step in sorted(wanted)]
        if len(parts) < 2:
            raise UserError("one checkpoint is no average; `export` writes its weights")
        if parts[-1]["state"] != COMMITTED:
            newest = options.run / parts[-1]["folder"]
            raise UserError(f"{newest}: the newest part must be a checkpoint, which names recipe and data")
        return parts

    def _shares(self, weights: str | None, number: int) -> list[float]:
        if weights is None:
            return [1 / number] * number
        try:
            numbers = [not_negative_number(word) for word in weights.split(",")]
        except argparse.ArgumentTypeError as error:
            raise UserError(f"--weights {weights}: {error}") from error
        if len(numbers) != number or not 0 < sum(numbers) < math.inf:
            raise UserError(f"--weights {weights}: needs {number} numbers, one a part, not all 0")
        return [each / sum(numbers) for each in numbers]

    def _measured(self, folder: Path, options: argparse.Namespace) -> float:
        """Return the loss on the run's validation set, measured by the command that measures an export."""
        command = [sys.executable, "-m", "pretraining.evaluation", str(folder), "--json", "--no-sample"]
        for name in ("data_dir", "data_cache", "data_cache_gb"):
            if (value := getattr(options, name)) is not None:
                command += [f"--{name}", str(value)]
        command += ["--trust_extensions"] if options.trust_extensions else []
        try:
            # its warnings are not shown: if it fails, its error is
            said = call(command, captured=True, show=lambda line: None)
        except CommandEnded as error:
            raise UserError(f"{folder}: is written, and could not be measured: {error.reason}") from error
        return json.loads(said.splitlines()[-1])["loss"]

    def as_text(self, answer: dict) -> str:
        merged = {"part": Path(answer["export"]).name, "step": answer["parts"][-1]["step"], "share": 1.0}
        rows = [*answer["parts"], {**merged, "loss": answer["loss"]}]
        measure = f"measure it: python -m pretraining.evaluation {answer['export']}"
        table = write_table(self.COLUMNS, rows)
        return table if answer["loss"] is not None else f"{table}\n{measure}"


class Branch:
    """Start a decay of the learning rate, or another stage, from a stable checkpoint, as a run of its own.

    The new run's folder holds the checkpoint (linked, not copied, where the disk can) and a recipe which ends after
    --steps more; the run it is from stays as it is and can go on. --decay lets the rate fall meanwhile, --stage and
    --set change the recipe: a longer context, another mixture. Needs a schedule that is stable at that step: constant,
    constant_with_warmup or warmup_stable_decay. `train.py` continues it.
    """

    EXAMPLES = """  python -m pretraining.checkpoints branch runs/qk-norm --at 8000 --decay 1-sqrt --steps 2000
  python -m pretraining.checkpoints branch runs/qk-norm --at 8000 --decay linear --steps 500 --output runs/short
  python -m pretraining.checkpoints branch runs/qk-norm --at 8000 --steps 1000 --stage recipes/stages/qk-norm-8k.json
  python -m pretraining.checkpoints branch runs/qk-norm --at 8000 --steps 1000 --set data.sequence_length=1024"""
    SHAPES = ("linear", "cosine", "1-sqrt")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_run(parser, or_checkpoint=True)
        add, of_rate = parser.add_argument, "of the stable rate (0)"
        add("--at", type=not_negative_integer, metavar="STEP", help="default: the newest")
        add("--steps", type=positive_integer, required=True, metavar="N", help="how many more")
        add("--decay", choices=self.SHAPES, help="the rate falls over them (default: it stays)")
        add("--min_lr_ratio", type=not_negative_number, default=0.0, metavar="R", help=of_rate)
        what = "a file of the recipe's keys that change: a longer context, another mixture "
        add("--stage", type=Path, metavar="FILE", help=f"{what}(see recipes/stages/)")
        what = "change a value of the recipe, after the stage's (repeatable)"
        add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=what)
        what = "the new run's folder (default: beside RUN, named after the stage)"
        add("--output", type=Path, metavar="DIR", help=what)

    def answer(self, options: argparse.Namespace) -> dict:
        """Return {"checkpoint", "step", "run": the new folder, "last_step", "command": what trains it}."""
        from pretraining.checkpoints.branch import StageChanges, branch, read_stage

        if options.min_lr_ratio > 1:
            raise UserError(f"--min_lr_ratio {options.min_lr_ratio:g}: the rate is to fall; give 1 at most")
        # Every byte is verified before anything is written.
        checkpoint = _whole_checkpoint(options.run, options.at, "--at")
        step, run = step_of(checkpoint), checkpoint.absolute().parent
        name = f"{run.name}-{options.decay or 'stage'}-{step}-{step + options.steps}"
        output = options.output or checkpoint.parent.with_name(name)
        _refuse_existing(output, "--output")
        # --set comes after the file, so that it has the last word.
        settings, deepspeed = read_stage(options.stage) if options.stage else ((), None)
        lowered = options.steps, options.decay, options.min_lr_ratio
        branch(checkpoint, StageChanges(*lowered, (*settings, *options.set), deepspeed), output)
        words = ["train.py", "--recipe", str(RunFolder(output).recipe), "--output_dir", str(output)]
        answer = {"checkpoint": str(checkpoint), "step": step, "run": str(output)}
        return {**answer, "last_step": step + options.steps, "command": as_typed(shlex.join(words))}

    def as_text(self, answer: dict) -> str:
        return (
            f"{answer['run']}: goes on from {answer['checkpoint']} until step {answer['last_step']:,}\n"
            f"train it, by the launcher of your choice: {answer['command']}"
        )


class Prune:
    """Make room: remove what the recipe's retention does not keep, and what no start will ever use.

    Shows what would go; `--yes` removes it. Damaged and uncommitted checkpoints and those set aside go too, weights
    that retention left stay. Refused while a run is writing in the folder.
    """

    EXAMPLES = """  python -m pretraining.checkpoints prune runs/tiny
  python -m pretraining.checkpoints prune runs/tiny --keep_last 1 --yes
  python -m pretraining.checkpoints prune runs/tiny --keep_last 1 --keep_every 1000 --demote_to_weights --yes"""
    USELESS = (DAMAGED, UNCOMMITTED, "set aside")
    COLUMNS = (Column("folder", "folder"), Column("state", "state"), Column("size", "bytes", num_bytes))

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_run(parser)
        add, rule = parser.add_argument, "default: the recipe's"
        add("--keep_last", type=positive_integer, metavar="N", help=f"the newest N ({rule})")
        add("--keep_best", type=not_negative_integer, metavar="K", help=f"the K best ({rule})")
        add("--keep_every", type=positive_integer, metavar="M", help=f"every M steps ({rule})")
        what = "keep the weights of what goes, as weights-<step>/"
        add("--demote_to_weights", action="store_true", help=what)
        add_trust(parser)
        choice = parser.add_mutually_exclusive_group()
        choice.add_argument("--yes", action="store_true", help="remove it")
        choice.add_argument("--dry_run", action="store_true", help="show what would go (the default)")

    def answer(self, options: argparse.Namespace) -> dict:
        """Return {"removed": whether, "freed_bytes", "kept", "checkpoints": entries of the catalogue that go}."""
        run = _run_of(options.run)
        if not options.yes:
            return self._plan(run, options)
        with lock_idle_run(run.path):  # before the plan: a run that began now would save meanwhile
            plan = self._plan(run, options)
            if plan["demote_to_weights"]:
                load_code_of_run(extensions_of_run(run.path), [MODEL], options.trust_extensions)
            for entry in plan["checkpoints"]:
                folder, weights = run.path / entry["folder"], run.weights(entry["step"])
                if plan["demote_to_weights"] and entry["state"] == COMMITTED and not weights.exists():
                    from pretraining.checkpoints.export import demote_checkpoint

                    if not demote_checkpoint(run, folder, weights):
                        continue  # it stays: its weights could not be written
                # No start looks below aside/, so the order of removal does not matter there.
                if entry["state"] == "set aside":
                    shutil.rmtree(folder)
                else:
                    remove_checkpoint(folder)
                run.add_event("checkpoint_pruned", checkpoint=entry["folder"], state=entry["state"])
        return {**plan, "removed": True}

    def _plan(self, run: RunFolder, options: argparse.Namespace) -> dict:
        # The recipe's `checkpoints` with the command line's changes; without a recipe all are kept.
        keys = ("keep_last", "keep_best", "keep_every", "demote_to_weights")
        rule, metric = {"keep_last": None}, "loss"
        if run.recipe.exists():
            evaluation = object_of({}, {"metric": TEXT})
            sections = object_of({"checkpoints": object_of({})}, {"evaluation": evaluation})
            try:
                recipe = check(read_json_value(run.recipe), sections, str(run.recipe))
            except ValueError as error:
                raise UserError(f"{run.recipe}: is not JSON ({error}); copy it again") from error
            found = {key: recipe["checkpoints"][key] for key in keys if key in recipe["checkpoints"]}
            section = recipe_schema()["properties"]["checkpoints"]
            rule |= check(found, section, str(run.recipe), "checkpoints")
            metric = recipe.get("evaluation", {}).get("metric", metric)
        # An option that was not typed is None, or False for a flag: the recipe's value then counts.
        asked = {key: value for key, value in vars(options).items() if key in keys}
        rule |= {key: value for key, value in asked.items() if value is not None and value is not False}
        section = Checkpoints.of(rule)
        # From markers and sizes: a plan reads no byte of the weights.
        entries = catalogue(run)
        committed = [each for each in entries if each["state"] == COMMITTED]
        kept = Retention.of(section, None, metric).kept_steps(
            (each["step"], marker_or_nothing(run.path / each["folder"])) for each in committed
        )
        # Checkpoints of another version are kept: that version may still continue from them.
        going = [each for each in entries if each["state"] in self.USELESS]
        going += [each for each in committed if each["step"] not in kept]
        return {
            "run": str(run.path),
            "removed": False,
            "demote_to_weights": section.demote_to_weights,
            "freed_bytes": sum(each["bytes"] for each in going),
            "kept": sorted(kept, reverse=True),
            "checkpoints": going,
        }

    def as_text(self, answer: dict) -> str:
        going = answer["checkpoints"]
        kept = f"kept: {', '.join(map(str, answer['kept'])) or 'none'}"
        if not going:
            return f"{answer['run']}: nothing to remove; {kept}"
        freed = num_bytes(answer["freed_bytes"])
        done = f"removed: {freed} free" if answer["removed"] else f"would free {freed}; --yes removes it"
        return f"{write_table(self.COLUMNS, going, left=2)}\n{done}; {kept}"


class Reshard:
    """Rewrite a checkpoint into another number of files.

    No resume needs it: any number of ranks at any ZeRO stage reads any checkpoint as it is. Fewer files suit a slow
    store, more suit many readers. Verifies first; takes memory of one slice of a parameter.
    """

    EXAMPLES = """  python -m pretraining.checkpoints reshard runs/tiny --files 1 --to out/checkpoint
  python -m pretraining.checkpoints reshard runs/tiny --step 700 --files 8 --to out/checkpoint-700"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_run(parser, or_checkpoint=True)
        _add_step(parser, "default: the newest")
        parser.add_argument("--files", type=not_negative_integer, required=True, metavar="N", help="how many")
        parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")

    def answer(self, options: argparse.Namespace) -> dict:
        """Return {"checkpoint", "step", "to", "files", "bytes"}."""
        if options.files < 1:
            raise UserError("--files 0: a checkpoint needs one file at least")
        checkpoint = _whole_checkpoint(options.run, options.step, "--step")
        _refuse_existing(options.to, "--to")
        from pretraining.checkpoints.export import reshard

        reshard(checkpoint, options.to, options.files)
        size = sum(path.stat().st_size for path in options.to.iterdir())
        answer = {"checkpoint": str(checkpoint), "step": step_of(checkpoint), "to": str(options.to)}
        return {**answer, "files": options.files, "bytes": size}

    def as_text(self, answer: dict) -> str:
        size = num_bytes(answer["bytes"])
        return f"{answer['to']}: {answer['checkpoint']} in {answer['files']} files, {size}"


_ALL = (Branch, Export, List, Merge, Prune, Push, Reshard, Verify)
VERBS = {verb.__name__.lower(): verb() for verb in _ALL}


def _add_run(parser: argparse.ArgumentParser, or_checkpoint: bool = False, or_address: bool = False) -> None:
    what = "a run folder, or one checkpoint in it" if or_checkpoint else "a run folder"
    what += "; also its address in a store" if or_address else ""
    kind = (lambda text: text if is_remote(text) else Path(text)) if or_address else Path
    parser.add_argument("run", type=kind, metavar="RUN", help=what)


def _add_step(parser: argparse.ArgumentParser, which: str) -> None:
    parser.add_argument("--step", type=not_negative_integer, metavar="N", help=f"that checkpoint ({which})")


def _run_of(folder: Path) -> RunFolder:
    """Return the run in a folder; `UserError` if there is none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name a run folder, as runs/tiny")
    run = RunFolder(folder)
    if not run.recipe.exists() and not any(folder.glob("checkpoint-*")):
        raise UserError(f"{folder}: no run folder (no recipe.json, no checkpoint-*)")
    return run


def _chosen_checkpoints(folder: Path, step: int | None) -> list[Path]:
    """Return the committed checkpoints meant, newest first: one by its path or `step`, else all of the run."""
    # The path of one checkpoint: it may be a copy outside of any run, so that no run is looked for.
    if (folder / MARKER).exists():
        return [folder]
    committed = committed_checkpoints(_run_of(folder))
    found = committed if step is None else [each for each in committed if step_in_name(each) == step]
    if not found:
        there = ", ".join(str(step_in_name(each)) for each in reversed(committed))
        which = "no committed checkpoint" if step is None else f"no committed checkpoint of step {step}"
        raise UserError(f"{folder}: {which}" + (f"; there are those of {there}" if there else ""))
    return found


def _store_of(address: str) -> tuple[RemoteRun, list[str]]:
    """Return the place of a run in a store and the checkpoints there; `UserError` if there is none."""
    remote = RemoteRun(address).at_first_contact()
    if not (names := remote.checkpoints()):
        raise UserError(
            f"{remote.address}: no checkpoint-* there; give the address of a run, as s3://bucket/runs/30b"
        )
    return remote, names


def _chosen_in_store(address: str, step: int | None) -> tuple[RemoteRun, list[str]]:
    """Do the same for an address in a store; returns the place and the names."""
    remote, name = RemoteRun.of_checkpoint(address)
    if step_in(name) >= 0:
        address, step = remote.address, step_in(name)
    store, names = _store_of(address)
    names = [each for each in names if step in (None, step_in(each)) and MARKER in (store.sizes(each) or {})]
    if not names:
        which = "no committed checkpoint" + ("" if step is None else f" of step {step}")
        raise UserError(f"{address}: {which}; `list {address}` shows what is there")
    return store, names


def _whole_checkpoint(folder: Path, step: int | None, option: str) -> Path:
    """Return the newest of the chosen checkpoints, with every byte verified.

    option: the name of the option with which a user chooses another one, for the message.
    """
    checkpoint = _chosen_checkpoints(folder, step)[0]
    if reason := damage(checkpoint):
        raise UserError(f"{checkpoint}: the checkpoint is damaged: {reason}; choose another with {option}")
    return checkpoint


def _refuse_existing(folder: Path, option: str) -> None:
    if folder.exists():
        raise UserError(f"{folder}: is there already; remove it, or choose another with {option}")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
