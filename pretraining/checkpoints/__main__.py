"""What one does with the checkpoints of a run: look, verify, branch a decay off, reshard, export, push, make room."""

import argparse
import shlex
import shutil
import sys
import time
from pathlib import Path

from tqdm import tqdm

from pretraining.checkpoints.commands import (
    add_run,
    add_step,
    chosen_checkpoints,
    chosen_in_store,
    refuse_existing,
    run_of,
    store_of,
    whole_checkpoint,
    write_export,
)
from pretraining.checkpoints.folders import (
    COMMITTED,
    DAMAGED,
    OTHER_VERSION,
    UNCOMMITTED,
    DiskPlace,
    Place,
    catalogue,
    entry_of,
    health,
    remove_checkpoint,
    step_in,
    step_of,
)
from pretraining.checkpoints.format import MARKER, marker_or_nothing
from pretraining.checkpoints.merge import Merge
from pretraining.checkpoints.publish import Push
from pretraining.checkpoints.retention import Retention
from pretraining.command_line import (
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
from pretraining.outside.schema import check
from pretraining.planning.quantities import duration, num_bytes
from pretraining.recipe import recipe_schema
from pretraining.recipe.sections import Checkpoints
from pretraining.runtime.installation import as_typed
from pretraining.runtime.lock import lock_idle_run
from pretraining.runtime.run_folder import RunFolder
from pretraining.runtime.table import Column, write_table

# torch and transformers take seconds to import: the verbs that need them import their modules when they answer.

EPILOG = """examples:
  python -m pretraining.checkpoints list runs/tiny
  python -m pretraining.checkpoints verify runs/tiny
  python -m pretraining.checkpoints export runs/tiny --step 700
  python -m pretraining.checkpoints branch runs/qk-norm --at 15000 --decay 1-sqrt --steps 2000
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
            "stage", lambda row: "none" if row["ranks"] and row["zero_stage"] is None else row["zero_stage"]
        ),
        Column("loss", "loss", ".4f"),
        Column("validation", "eval_loss", ".4f"),
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_run(parser, or_address=True)

    def answer(self, options: argparse.Namespace) -> dict:
        """Return {"run", "checkpoints": entries of the catalogue}."""
        if is_remote(options.run):
            store, names = store_of(options.run)
            entries = [entry_of(name, step_in(name), health(store, name)) for name in names]
        else:
            entries = catalogue(run_of(options.run))
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
        add_run(parser, or_checkpoint=True, or_address=True)
        add_step(parser, "default: every committed one")

    def answer(self, options: argparse.Namespace) -> dict:
        """Return {"checkpoints": [{"checkpoint", "whole", "bytes", "seconds", "files"}]}.

        files: {name: what is wrong, or None}.
        """
        if is_remote(options.run):
            place, names = chosen_in_store(options.run, options.step)
            return {"checkpoints": [self._verified(place, name) for name in names]}
        chosen = chosen_checkpoints(options.run, options.step)
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
        add_run(parser, or_checkpoint=True)
        add_step(parser, "default: the newest")
        add = parser.add_argument
        add("--to", type=Path, metavar="DIR", help="a new folder (default: RUN/export-<step>)")
        what = "the average that the run keeps of its weights (optimizer.average_decay), not the weights"
        add("--average", action="store_true", help=what)
        what = "config and tokenizer (default: RUN/model, written by train.py)"
        add("--model", type=Path, metavar="DIR", help=what)
        add_trust(parser)

    def answer(self, options: argparse.Namespace) -> dict:
        """Return {"checkpoint", "step", "export", "bytes"}."""
        checkpoint = whole_checkpoint(options.run, options.step, "--step")
        run, step = RunFolder(checkpoint.parent), step_of(checkpoint)
        folder = options.to or run.path / f"export-{step}"
        refuse_existing(folder, "--to")
        description, trust = options.model or run.model, options.trust_extensions
        write_export(checkpoint, description, folder, trust, exponential=options.average)
        size = sum(path.stat().st_size for path in folder.iterdir())
        return {"checkpoint": str(checkpoint), "step": step, "export": str(folder), "bytes": size}

    def as_text(self, answer: dict) -> str:
        return f"{answer['export']}: the model after {answer['step']:,} steps, {num_bytes(answer['bytes'])}"


class Branch:
    """Start a decay of the learning rate, or another stage, from a stable checkpoint, as a run of its own.

    The new run's folder holds the checkpoint (linked, not copied, where the disk can) and a recipe which ends after
    --steps more; the run it is from stays as it is and can go on. --decay lets the rate fall meanwhile, --stage and
    --set change the recipe: a longer context, another mixture. Needs a schedule that is stable at that step: constant,
    constant_with_warmup or warmup_stable_decay. `train.py` continues it.
    """

    EXAMPLES = """  python -m pretraining.checkpoints branch runs/qk-norm --at 15000 --decay 1-sqrt --steps 2000
  python -m pretraining.checkpoints branch runs/qk-norm --at 15000 --decay linear --steps 500 --output runs/short
  python -m pretraining.checkpoints branch runs/qk-norm --at 15000 --steps 1000 --stage recipes/stages/qk-norm-8k.json
  python -m pretraining.checkpoints branch runs/qk-norm --at 15000 --steps 1000 --set data.sequence_length=1024"""
    SHAPES = ("linear", "cosine", "1-sqrt")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_run(parser, or_checkpoint=True)
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
        if options.min_lr_ratio and not options.decay:
            raise UserError("--min_lr_ratio: without --decay the rate stays; add that, or leave this out")
        # Every byte is verified before anything is written.
        checkpoint = whole_checkpoint(options.run, options.at, "--at")
        step, run = step_of(checkpoint), checkpoint.absolute().parent
        name = f"{run.name}-{options.decay or 'stage'}-{step}-{step + options.steps}"
        output = options.output or checkpoint.parent.with_name(name)
        refuse_existing(output, "--output")
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
        add_run(parser)
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
        run = run_of(options.run)
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
        entries = catalogue(run)  # from markers and sizes: a plan reads no byte of the weights
        committed = [each for each in entries if each["state"] == COMMITTED]
        kept = Retention(section, metric=metric).kept_steps(
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
        add_run(parser, or_checkpoint=True)
        add_step(parser, "default: the newest")
        parser.add_argument("--files", type=not_negative_integer, required=True, metavar="N", help="how many")
        parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")

    def answer(self, options: argparse.Namespace) -> dict:
        """Return {"checkpoint", "step", "to", "files", "bytes"}."""
        if options.files < 1:
            raise UserError("--files 0: a checkpoint needs one file at least")
        checkpoint = whole_checkpoint(options.run, options.step, "--step")
        refuse_existing(options.to, "--to")
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


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
