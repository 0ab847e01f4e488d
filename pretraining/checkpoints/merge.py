"""Average the weights of several checkpoints of a run."""

import argparse
import json
import math
import shlex
import sys
from pathlib import Path

from pretraining.checkpoints.commands import add_run, refuse_existing, run_of, write_export
from pretraining.checkpoints.folders import COMMITTED, WEIGHTS_ONLY, catalogue, damage
from pretraining.checkpoints.format import read_marker
from pretraining.command_line import add_data_source, add_trust, not_negative_number, positive_integer
from pretraining.errors import UserError
from pretraining.outside.schema import listed
from pretraining.recipe.fixed_keys import changed_parts
from pretraining.runtime.installation import as_typed
from pretraining.runtime.processes import CommandEnded, call
from pretraining.runtime.table import Column, write_table


def _refuse_other_runs(checkpoints: list[Path]) -> None:
    """Refuse a checkpoint whose recipe is not the last one's, but for changes that the run has accepted."""
    markers = [read_marker(checkpoint) for checkpoint in checkpoints]
    accepted = {change["key"] for change in markers[-1]["changes"]}
    for checkpoint, marker in zip(checkpoints, markers, strict=True):
        keys = {change.key for change in changed_parts(marker["recipe"], markers[-1]["recipe"])} - accepted
        if keys:
            what = f"is of another run, with another {listed(sorted(keys), ', ')}"
            raise UserError(f"{checkpoint}: {what}; name others with --steps")


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
        add_run(parser)
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
        """Return {"export", "loss": of the result or None, "parts": [{"part", "step", "share", "loss"}], "command"}.

        command: what measures the result.
        """
        if options.data_cache is not None and not options.validate:
            raise UserError("--data_cache: goes with --validate: add that, or leave it out")
        run, parts = run_of(options.run), self._parts(options)
        shares = [1 / len(parts)] * len(parts)
        if options.weights is not None:
            try:
                numbers = [not_negative_number(word) for word in options.weights.split(",")]
            except argparse.ArgumentTypeError as error:
                raise UserError(f"--weights {options.weights}: {error}") from error
            if len(numbers) != len(parts) or not 0 < sum(numbers) < math.inf:
                what = f"needs {len(parts)} numbers, one a part, not all 0"
                raise UserError(f"--weights {options.weights}: {what}")
            shares = [each / sum(numbers) for each in numbers]
        folders = [run.path / each["folder"] for each in parts]
        committed = [run.path / each["folder"] for each in parts if each["state"] == COMMITTED]
        for part in committed:
            if reason := damage(part):
                raise UserError(f"{part}: the checkpoint is damaged: {reason}; name others with --steps")
        _refuse_other_runs(committed)
        folder = options.to or run.path / f"merged-{parts[0]['step']}-{parts[-1]['step']}"
        refuse_existing(folder, "--to")
        by_part = dict(zip(folders, shares, strict=True))
        write_export(folders[-1], run.model, folder, options.trust_extensions, by_part)
        rows = [
            {"part": each["folder"], "step": each["step"], "share": part_share, "loss": each["eval_loss"]}
            for each, part_share in zip(parts, shares, strict=True)
        ]
        words = ["-m", "pretraining.evaluation", str(folder)]
        if folder.resolve().parent != run.path.resolve():
            words += ["--of", str(run.path)]
        loss = self._measured(folder, words, options) if options.validate else None
        command = as_typed(shlex.join(["python", *words]))
        return {"export": str(folder), "loss": loss, "parts": rows, "command": command}

    def _parts(self, options: argparse.Namespace) -> list[dict]:
        """Return the entries of the catalogue that are averaged, the oldest first."""
        # of a step that has both, the checkpoint comes first in the catalogue, and counts
        entries = reversed(catalogue(run_of(options.run)))
        there = {each["step"]: each for each in entries if each["state"] in (COMMITTED, WEIGHTS_ONLY)}
        newest_first, known = sorted(there, reverse=True), ", ".join(map(str, sorted(there))) or "none"
        if options.steps is not None:
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

    def _measured(self, folder: Path, words: list[str], options: argparse.Namespace) -> float:
        """Return the loss on the run's validation set, measured by the command that measures an export."""
        command = [sys.executable, *words, "--json", "--no-sample"]
        for name in ("data_dir", "data_cache", "data_cache_gb"):
            if (value := getattr(options, name)) is not None:
                command += [f"--{name}", str(value)]
        command += ["--trust_extensions"] if options.trust_extensions else []
        try:
            # its warnings are not shown: if it fails, its error is
            said, _ = call(command, captured=True, show=lambda line: None)
        except CommandEnded as error:
            raise UserError(f"{folder}: is written, and could not be measured: {error.reason}") from error
        return json.loads(said.splitlines()[-1])["loss"]

    def as_text(self, answer: dict) -> str:
        merged = {"part": Path(answer["export"]).name, "step": answer["parts"][-1]["step"], "share": 1.0}
        rows = [*answer["parts"], {**merged, "loss": answer["loss"]}]
        table = write_table(self.COLUMNS, rows)
        return table if answer["loss"] is not None else f"{table}\nmeasure it: {answer['command']}"
