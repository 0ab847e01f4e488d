"""Prepare the text of a recipe for training: sources x tokenizer -> data/<name>/."""

import argparse
import os

from pretraining.command_line import (
    OneLineParser,
    add_recipe_arguments,
    not_negative_integer,
    positive_integer,
)
from pretraining.data.preparation.execution import EXECUTORS, SLURM_KEYS, Execution, read_slurm_options
from pretraining.data.preparation.prepare import count_data, counts_text, prepare_data
from pretraining.errors import one_line_errors
from pretraining.outside.masking import as_json
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.runtime.processes import end_with_standard_input

LOW_PRIORITY = 10

EXAMPLES = """examples:
  python data_prep.py --recipe tiny
  python data_prep.py --recipe 124m --set data.validation_share=0.001
  python data_prep.py --recipe my_recipe.json --data_dir /fast/disk/data
  python data_prep.py --recipe 30b --executor slurm --slurm partition=cpu --slurm time=12:00:00
  python data_prep.py --recipe my_recipe.json --set data.filters.0.min_words=100 --replace
  python data_prep.py --recipe 1.5b --limit_tokens 5e6
  python data_prep.py --recipe 124m --count --count_documents 10000

A second run with the same sources returns at once; an interrupted one goes on with what is not finished. A finished
data set is never changed unasked: see --replace."""


def main() -> None:
    options = parse_arguments()
    if options.beside_training:
        end_with_standard_input()
        os.nice(LOW_PRIORITY)
    recipe, _ = load_recipe_and_ds_config(options.recipe, options.set, limit_tokens=options.limit_tokens)
    # --json is for scripts, which need no progress bar.
    if options.count:
        counts = count_data(recipe, options.count_documents, show_progress=not options.json)
        print(as_json(counts) if options.json else counts_text(counts))
        return
    execution = Execution(options.executor, options.workers, read_slurm_options(options.slurm))
    outcome = prepare_data(recipe, options.data_dir, not options.json, execution, options.replace)
    print(as_json(outcome.to_dict()) if options.json else outcome.as_text())


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, epilog=EXAMPLES)
    add_recipe_arguments(parser)
    add = parser.add_argument
    what = "where tasks run: inline (this process), local (processes of this machine), slurm, ray; "
    what += "auto takes inline for small corpora, else local"
    add("--executor", choices=EXECUTORS, default="auto", help=what)
    what = "tasks at once (default: every core)"
    add("--workers", type=not_negative_integer, default=0, metavar="N", help=what)
    what = f"of the jobs: {', '.join(SLURM_KEYS)} (repeatable)"
    add("--slurm", action="append", default=[], metavar="KEY=VALUE", help=what)
    what = "make anew a finished data set that differs from the recipe; the old one is kept beside it"
    add("--replace", action="store_true", help=what)
    # For train.py --while_preparing, which starts this command: it ends with standard input, and gives way to training.
    add("--beside_training", action="store_true", help=argparse.SUPPRESS)
    add("--json", action="store_true", help="print the summary as one JSON object")
    add("--count", action="store_true", help="count tokens by source and exit; writes nothing")
    what = "with --count: the first N documents of each source"
    add("--count_documents", type=positive_integer, metavar="N", help=what)
    options = parser.parse_args(arguments)
    if options.count_documents and not options.count:
        parser.error("--count_documents: goes with --count: add that, or leave it out")
    if options.count and (options.replace or options.executor != "auto" or options.workers or options.slurm):
        what = "leave out --replace, --executor, --workers and --slurm"
        parser.error(f"--count: counts in this process, and writes nothing; {what}")
    return options


if __name__ == "__main__":
    with one_line_errors("what is finished is kept, and the same command goes on"):
        main()
