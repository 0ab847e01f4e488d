"""Train a ladder of small runs of a recipe, and say which loss the recipe will reach, and what would be better."""

import argparse
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pretraining.command_line import (
    OneLineParser,
    add_data_source,
    add_deepspeed,
    named_path,
    positive_integer,
    positive_number,
)
from pretraining.errors import UserError, one_line_errors
from pretraining.ladder import answers, family
from pretraining.ladder.fit import check_enough
from pretraining.outside.masking import as_json
from pretraining.outside.schema import listed
from pretraining.planning.gpus import find_gpu
from pretraining.planning.ladder import FILE, read_ladder
from pretraining.planning.quantities import amount, count, dollars, gpu_count, hours, short
from pretraining.recipe.fixed_keys import changed_parts
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.reporting.page import LADDER_SCRIPTS, page_text, write_page
from pretraining.runtime.durable_files import write_json
from pretraining.runtime.exit_codes import FINISHED
from pretraining.runtime.installation import WORKPLACE
from pretraining.runtime.table import Column, write_table
from pretraining.sweep import (
    add_starting_arguments,
    check_starting_arguments,
    known_jobs,
    submit,
    train_all,
)

EXAMPLES = """examples:
  python -m pretraining.ladder tiny --up_to 0.1 --plan
  python -m pretraining.ladder tiny --up_to 0.1
  python -m pretraining.ladder tiny --show --flops 1e14
  python -m pretraining.ladder 124m --world_size 8 --gpu H100 --launcher "deepspeed --num_gpus=8"
  python -m pretraining.ladder 124m --output_dir runs/124m-ladder --world_size 8 \\
      --slurm="--nodes=1 --gpus-per-node=8 --time=4:00:00"
  python -m pretraining.ladder 124m --show --gpu H100 --dollars 500 --serve 1t
  python -m pretraining.ladder my_recipe.json --show --against runs/124m-ladder

The same command skips what is finished and goes on with the rest.
exit codes: 0 fitted, planned or submitted, 2 a run failed or the points cannot be fitted, 75 stopped on request"""
PAGE = "ladder.html"
SEEN = 10
"""Tokens of an answer over those of the longest run, up to which nothing is said."""
COSTS = (
    Column("member", "name"),
    Column("runs", "runs"),
    Column("parameters", "parameters", ","),
    Column("layers", "layers"),
    Column("longest", "tokens", short),
    Column("step", "tokens_per_step", ","),
    Column("rate", "learning_rate", ".3g"),
    Column("FLOPs", "flops", ".2e"),
    Column("hours", "hours", hours),
    Column("dollars", "dollars", dollars),
)


def main(arguments: list[str] | None = None) -> int:
    code, _ = run(parse(arguments))
    return code


def run(options: argparse.Namespace) -> tuple[int, Path]:
    """Plan, train, fit and answer, as far as the options ask for it; returns the exit code and the ladder's folder."""
    target, _ = load_recipe_and_ds_config(options.recipe, options.set, options.deepspeed)
    folder = options.output_dir or WORKPLACE / "runs" / f"{target.name}-ladder"
    code, failures = FINISHED, {}
    # a wrong name is no surprise after hours
    rival = options.against and read_ladder(str(options.against.absolute()))
    if not options.show:
        # all of them are checked before a file is written
        members = family.family_of(target, options, folder.absolute() / "recipes")
        rungs = family.rungs_of(members, folder, options)
        check_enough(np.array([[rung.member.parameters, rung.tokens] for rung in rungs], dtype=float).T)
        costs = family.costs_of(rungs, target, options.gpu and find_gpu(options.gpu), options.world_size)
        if options.plan:
            print(as_json(costs, indent=2) if options.json else _costs_text(costs))
            return FINISHED, folder
        family.check_begun(rungs)
        if (folder / PAGE).exists() and not (folder / FILE).exists():
            raise UserError(f"{folder}: its {PAGE} is of no ladder; choose another --output_dir")
        if (folder / FILE).exists():
            read_ladder(str(folder.absolute()))
        for member in members:
            member.write()
        if options.commands:
            print("\n".join(family.commands_of(rungs, options.launcher)))
            return FINISHED, folder
        with redirect_stdout(sys.stderr if options.json else sys.stdout):
            print(_costs_text(costs), flush=True)
            code = _start(rungs, folder, options, failures)
        left = [rung for rung in rungs if not rung.is_finished]
        if left and not failures:
            print(f"{len(rungs) - len(left)} of {len(rungs)} runs are finished", file=sys.stderr)
            return code, folder
        points, faults = family.measured(rungs)
        faults += [f"{name}: {why}" for name, why in failures.items()]
        write_json(folder / FILE, answers.fitted(target, points, faults))
    ladder = read_ladder(str(folder.absolute()))
    answer = answers.answer_of(ladder)
    if keys := [change.key for change in changed_parts(target.to_dict(), ladder.values["recipe"])]:
        answer["notes"].append(f"the ladder is of another recipe ({listed(keys, ', ')}), and so is its loss")
    if options.flops:
        answer["flops"] = answers.best_size(ladder, target, options.flops) | {"budget": options.flops}
    if options.dollars:
        best = answers.best_size(ladder, target, options.dollars, find_gpu(options.gpu), options.world_size)
        answer["dollars"] = best | {"budget": options.dollars}
    if options.serve:
        answer["serve"] = answers.best_to_serve(ladder, target, options.serve) | {"served": options.serve}
    if rival:
        answer["against"] = answers.compare(ladder, rival)
    for name in ("flops", "dollars", "serve"):
        if (times := answer.get(name, {}).get("tokens", 0) / ladder.most_tokens) > SEEN:
            what = "the law is not known there, and text that is read again counts less"
            answer["notes"].append(f"--{name}: has {times:,.0f} times the tokens of the longest run: {what}")
    if not options.show:
        page = page_text(answers.ladder_payload(ladder, answer), f"ladder of {target.name}", LADDER_SCRIPTS)
        write_page(folder / PAGE, page)
    text = as_json(answer, indent=2) if options.json else answers.as_text(answer, ladder.values)
    print(text, flush=True)
    if failures:
        name, failure = next(iter(failures.items()))
        raise UserError(f"{len(failures)} of {len(rungs)} runs failed; {name}: {failure}")
    return code, folder


def _start(
    rungs: list[family.Rung], folder: Path, options: argparse.Namespace, failures: dict[str, str]
) -> int:
    """Train what is not finished, or submit what can begin by now; returns the exit code."""
    if options.slurm is None:
        return train_all(rungs, options.launcher, failures, lambda rung: rung.branch_off(), "ladder")
    jobs = known_jobs(folder)
    whole = {rung.trunk for rung in rungs if not rung.begins and rung.is_finished}
    ready = [rung for rung in rungs if not rung.begins or rung.trunk in whole]
    for rung in ready:
        rung.branch_off()
    submit(ready, options.slurm, folder, jobs)
    return FINISHED


def _costs_text(costs: dict[str, Any]) -> str:
    """Write what every member takes, and the whole ladder beside its recipe."""
    empty = dict.fromkeys(column.value for column in COSTS)
    runs = sum(row["runs"] for row in costs["rows"])
    total = {**empty, **costs["ladder"], "name": "ladder", "runs": runs}
    rows = [*costs["rows"], total, {**empty, **costs["target"], "name": "recipe"}]
    share = costs["ladder"]["flops"] / costs["target"]["flops"]
    text = f"{write_table(COSTS, rows)}\nthe ladder takes {share:.1%} of the FLOPs of its recipe"
    if total["hours"] is not None:
        text += "; hours and dollars are of steps alone, without the starts of the runs"
    return "".join([text, "\n", *(f"note: {note}\n" for note in costs["notes"])])


def _numbers(kind: Callable[[str], float], text: str, own: tuple = ()) -> tuple:
    """Read numbers above 0, and no larger than a width can be, with commas between them, after `own`."""
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if not all(0 < number <= family.WIDEST for number in numbers):
        raise argparse.ArgumentTypeError(
            f"{text!r}: write numbers above 0, to {family.WIDEST:,}, with commas"
        )
    return tuple(dict.fromkeys((*own, *numbers)))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    shown = {"description": __doc__, "epilog": EXAMPLES, "allow_abbrev": False}
    parser = OneLineParser("python -m pretraining.ladder", **shown)
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a file of recipes/, or a path")
    repeated = {"action": "append", "default": [], "metavar": "SECTION.KEY=VALUE"}
    add("--set", **repeated, help="change one value of the recipe")
    add_deepspeed(parser)
    add_data_source(parser)
    what = "folder of all runs (default: runs/<recipe>-ladder)"
    add("--output_dir", type=named_path, metavar="DIR", help=what)
    # the size's own rate and batch are always among them: the law is fitted to those; others are as a name has them
    factors = partial(_numbers, lambda text: float(f"{float(text):g}"), own=(1.0,))
    for name, kind, metavar, what in (
        ("sizes", positive_integer, "N", "sizes (4)"),
        ("points", positive_integer, "N", "token counts of each size, each twice the one before (3)"),
        ("up_to", positive_number, "SHARE", "FLOPs of the largest run as a share of the recipe's (0.01)"),
        ("longest", positive_number, "X", "tokens per parameter of the largest run, over the recipe's (2)"),
        ("widths", partial(_numbers, int), "A,B,...", "these widths instead of --sizes and --up_to"),
        ("rates", factors, "A,B,...", "factors of each size's own rate to try too: 0.5,2 says which is best"),
        ("batches", factors, "A,B,...", "the same of the tokens of a step"),
        ("world_size", gpu_count, "N", "processes of each run (1)"),
    ):
        add(f"--{name}", type=kind, metavar=metavar, help=what)
    parser.set_defaults(sizes=4, points=3, up_to=0.01, longest=2.0, world_size=1)
    parser.set_defaults(widths=(), rates=(1.0,), batches=(1.0,))
    add("--plan", action="store_true", help="print what the ladder takes, and exit")
    add("--gpu", metavar="NAME", help="plan hours and dollars on this kind of GPU")
    add_starting_arguments(parser, "each run that can begin")
    add("--commands", action="store_true", help="print a line of shell for each member, and start nothing")
    add("--show", action="store_true", help="answer from what was fitted before, and start nothing")
    add("--flops", type=count, metavar="C", help="the best size for a budget of FLOPs: 1e19")
    add("--dollars", type=amount, metavar="D", help="the best size for so many dollars on --gpu")
    add("--serve", type=count, metavar="TOKENS", help="the best size if the model will serve so many tokens")
    what = "a ladder of another recipe: which of the two wins at this recipe's compute"
    add("--against", type=named_path, metavar="LADDER", help=what)
    add("--json", action="store_true", help="the answer as JSON; runs print on stderr")
    options = parser.parse_args(arguments)
    check_starting_arguments(options, ("plan", "commands", "show"))
    if max(options.sizes, options.points) > 40:
        raise UserError(f"--sizes {options.sizes}, --points {options.points}: at most 40 of each")
    if options.up_to > 1:
        raise UserError(f"--up_to {options.up_to:g}: a share of the recipe's FLOPs, at most 1")
    said = [name for name in ("sizes", "up_to") if getattr(options, name) != parser.get_default(name)]
    if options.widths and said:
        raise UserError("--widths: name the sizes, so that --sizes and --up_to say nothing; leave them out")
    if options.dollars and not options.gpu:
        raise UserError("--dollars needs --gpu NAME: what they buy depends on it")
    return options


if __name__ == "__main__":
    with one_line_errors("what is finished is kept, and the same command goes on"):
        sys.exit(main())
