"""From a recipe to a published model: plan, prepare, doctor, train, evaluate, report, publish."""

import argparse
import sys
import time
from dataclasses import asdict

from pretraining.checkpoints.folders import refuse_foreign_files
from pretraining.command_line import (
    OneLineParser,
    add_deepspeed,
    add_launcher,
    add_recipe_arguments,
    add_resuming_arguments,
    named_path,
    not_negative_integer,
    positive_integer,
)
from pretraining.data.preparation.execution import EXECUTORS
from pretraining.errors import UserError, one_line_errors
from pretraining.outside.masking import as_json
from pretraining.outside.schema import display_path
from pretraining.pipeline.steps import NAMES, STEPS, Decision, Pipeline
from pretraining.planning.quantities import duration
from pretraining.runtime.exit_codes import FINISHED, INTERRUPTED, STOPPED, USER_ERROR
from pretraining.runtime.lock import holder_of
from pretraining.runtime.processes import CommandEnded

EXAMPLES = """examples:
  python -m pretraining.pipeline --recipe tiny
  python -m pretraining.pipeline --recipe tiny --show
  python -m pretraining.pipeline --recipe 30b --launcher "deepspeed --num_gpus=8" --gpu H200
  python -m pretraining.pipeline --recipe tiny --until doctor
  python -m pretraining.pipeline --recipe tiny --from evaluate --publish my-name/tiny

A step runs if what it depends on has changed; else one line says why it is up to date. The same command goes on after
a stop, a failure or a kill. --from runs a step and those after it although they are up to date.
exit codes: 0 all is up to date, 2 a step was refused, 75 stopped on request; else that of the step which failed."""

FOLLOWS = {
    "doctor": ["prepare"],
    "train": ["prepare"],
    "evaluate": ["train"],
    "report": ["train", "evaluate"],
    "publish": ["train", "report"],
}
"""What each step takes the result of: --show does not know that result yet if the other is to run."""


def main(arguments: list[str] | None = None) -> int:
    """Run every step that is not up to date, and return the exit code."""
    options = parse(arguments)
    first = NAMES.index(options.start) if options.start else len(NAMES)
    pipeline = Pipeline(options, NAMES[first:], sys.stderr if options.json else None)
    # what the steps depend on changes until its end
    if (holder := holder_of(pipeline.run.path)) is not None:
        place = display_path(pipeline.run.path)
        remedy = f"wait for its end, or stop it with touch {place}/STOP and type this command again"
        raise UserError(f"{place} is being trained ({holder}): {remedy}")
    if not options.show:
        refuse_foreign_files(pipeline.run)
    names = NAMES[: NAMES.index(options.until) + 1] if options.until else NAMES
    names = tuple(name for name in names if name not in options.skip)
    rows: list[dict] = []
    code = (show_steps if options.show else run_steps)(pipeline, names, rows)
    if options.json:
        answer = {"recipe": pipeline.recipe.name, "run": str(pipeline.run.path)}
        print(as_json({**answer, "exit_code": code, "steps": rows}, indent=2), flush=True)
    return code


def run_steps(pipeline: Pipeline, names: tuple[str, ...], rows: list[dict]) -> int:
    """Run the steps in order until one ends badly; each adds a row. Returns the exit code."""
    for name in names:
        if pipeline.stop_asked:
            pipeline.say(name, "not begun: stopped on request; the same command goes on")
            return STOPPED
        step = STEPS[name](pipeline)
        look = step.look()
        row: dict = {"step": name, "state": "runs" if look.runs else look.state, "why": look.why}
        pipeline.say(name, f"{row['state']}: {look.why}")
        rows.append(row)
        if not look.runs:
            continue
        began = time.monotonic()
        try:
            facts = step.run()
            # after the step: training changes what its own inputs are compared with
            pipeline.record.add(name, {"inputs": step.kept_inputs(), "facts": facts})
        except CommandEnded as ended:
            state = "stopped" if ended.code in (STOPPED, INTERRUPTED) else "failed"
            row |= {"state": state, "code": ended.code, "error": ended.reason}
            next_command = "the same command goes on from here"
            if ended.code == USER_ERROR:
                next_command = "do what the line above says, then type the same command again"
            pipeline.say(name, f"{state}: {ended.reason}; nothing after it was run; {next_command}")
            return ended.code
        except UserError as error:
            row |= {"state": "failed", "code": error.exit_code, "error": str(error)}
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        seconds = time.monotonic() - began
        row |= {"state": "done", "seconds": round(seconds, 3), "facts": facts}
        pipeline.say(name, f"done in {duration(seconds)}: {step.words(facts)}")
    return FINISHED


def show_steps(pipeline: Pipeline, names: tuple[str, ...], rows: list[dict]) -> int:
    """Say of each step whether it would run; nothing is started."""
    running: set[str] = set()
    for name in names:
        before = next((each for each in FOLLOWS.get(name, ()) if each in running), None)
        asked = name != "publish" or pipeline.options.publish is not None
        # before it has run, nobody knows what it makes: its content may be the same
        first = Decision(True, f"{before} comes before it") if before and asked else None
        look = first or STEPS[name](pipeline).look()
        if look.runs:
            running.add(name)
        pipeline.say(name, f"{'would run' if look.runs else look.state}: {look.why}")
        rows.append({"step": name, **asdict(look)})
    return FINISHED


def parse(arguments: list[str] | None) -> argparse.Namespace:
    prog = "python -m pretraining.pipeline"
    parser = OneLineParser(prog, description=__doc__, epilog=EXAMPLES, allow_abbrev=False)
    add_recipe_arguments(parser)
    add = parser.add_argument
    add_deepspeed(parser)
    add("--output_dir", type=named_path, metavar="DIR", help="run folder (default: runs/<recipe>)")
    add_launcher(parser)
    what = "ranks that are planned for (default: what --launcher says, else 1)"
    add("--world_size", type=positive_integer, metavar="N", help=what)
    add("--gpu", metavar="NAME", help="planned for, as H100 (default: the GPU of this machine)")
    add("--from", dest="start", choices=NAMES, help="run this step and all after it")
    add("--until", choices=NAMES, help="this step is the last one")
    add("--skip", action="append", default=[], choices=NAMES, help="leave a step out (repeatable)")
    what = "publish the export and the report there: a model repository of the hub, s3://bucket/folder, "
    what += "./folder"
    add("--publish", metavar="OWNER/NAME|ADDRESS|FOLDER", help=what)
    add("--private", action="store_true", help="with --publish: a new repository is private")
    what = "how often a crash or hang of training is started again (default: 3)"
    add("--restarts", type=not_negative_integer, default=3, metavar="N", help=what)
    add_resuming_arguments(parser)
    what = "make anew a data set or an unfinished run that differs from the recipe; the old one is kept beside it"
    add("--replace", action="store_true", help=what)
    add("--force", action="store_true", help="go on where the plan says that the run does not fit")
    add("--executor", choices=EXECUTORS, default="auto", help="of data_prep.py")
    add("--workers", type=not_negative_integer, default=0, metavar="N", help="of data_prep.py")
    add("--slurm", action="append", default=[], metavar="KEY=VALUE", help="of data_prep.py")
    add("--show", action="store_true", help="say what would run, and start nothing")
    add("--json", action="store_true", help="the steps as JSON; commands print on stderr")
    options = parser.parse_args(arguments)
    if options.private and options.publish is None:
        raise UserError("--private goes with --publish: add that, or leave --private out")
    if options.start and options.until and NAMES.index(options.start) > NAMES.index(options.until):
        raise UserError(f"--from {options.start}: comes after --until {options.until}; exchange them")
    return options


if __name__ == "__main__":
    with one_line_errors("what is finished is kept, and the same command goes on"):
        code = main()
    sys.exit(code)
