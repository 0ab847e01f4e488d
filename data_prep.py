"""Prepare the text of a recipe for training: sources x tokenizer -> data/<name>/."""

import argparse
import json
from pathlib import Path

from pretraining.command_line import (
    OneLineParser,
    add_recipe_arguments,
    not_negative_integer,
    positive_integer,
)
from pretraining.data.counting import count_as_text, count_data
from pretraining.data.execution import EXECUTORS, Execution, read_slurm_options
from pretraining.data.manifest import report_text, summary_of
from pretraining.data.prepare import Outcome, kept_text, prepare_data
from pretraining.errors import one_line_errors
from pretraining.refusals import load_run

EXAMPLES = """examples:
  python data_prep.py --recipe tiny
  python data_prep.py --recipe 124m --set data.validation_share=0.001
  python data_prep.py --recipe my_recipe.json --data_dir /fast/disk/data
  python data_prep.py --recipe 30b --executor slurm --slurm partition=cpu --slurm time=12:00:00
  python data_prep.py --recipe my_recipe.json --set data.filters.0.min_words=100 --replace
  python data_prep.py --recipe 124m --count --count_documents 10000

A second run with the same sources returns at once; an interrupted one goes on with what is not finished. A finished
data set is never changed unasked: see --replace."""


def main() -> None:
    options = parse_arguments()
    recipe, _ = load_run(options.recipe, options.set)
    if options.count:
        counts = count_data(recipe, options.count_documents, show_progress=not options.json)
        return print(json.dumps(counts) if options.json else count_as_text(counts))
    execution = Execution(options.executor, options.workers, read_slurm_options(options.slurm))
    outcome = prepare_data(recipe, options.data_dir, not options.json, execution, options.replace)
    if outcome.manifest is None:
        return print(as_submitted(outcome.jobs, options.json))
    summary = summary_of(outcome.folder, outcome.manifest, recipe.data.sources)
    summary["kept_aside"] = outcome.kept_aside and str(outcome.kept_aside)
    print(json.dumps(summary) if options.json else as_text(summary, outcome, options.data_dir))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_recipe_arguments(parser)
    parser.add_argument(
        "--executor",
        choices=EXECUTORS,
        default="auto",
        help="where tasks run: inline (this process), local (processes of this machine), slurm, ray; "
        "auto takes inline for small corpora, else local",
    )
    parser.add_argument(
        "--workers",
        type=not_negative_integer,
        default=0,
        metavar="N",
        help="tasks at once (default: every core)",
    )
    parser.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the jobs: partition, time, cpus_per_task, mem_per_cpu_gb, qos, max_array_size (repeatable)",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="make anew a finished data set that differs from the recipe; the old one is kept beside it",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.add_argument(
        "--count", action="store_true", help="count tokens by source and exit; writes nothing"
    )
    parser.add_argument(
        "--count_documents",
        type=positive_integer,
        metavar="N",
        help="with --count: the first N documents of each source",
    )
    return parser.parse_args(arguments)


def as_submitted(jobs: tuple[str, ...], as_json: bool) -> str:
    if as_json:
        return json.dumps({"jobs": jobs})
    return f"submitted {len(jobs)} jobs: {', '.join(jobs)}; the same command tells when the data is ready"


def as_text(summary: dict, outcome: Outcome, data_root: Path) -> str:
    lines = [f"data {summary['name']} is ready in {summary['folder']}"]
    for split in ("train", "validation"):
        counts = summary[split]
        lines.append(f"  {split:<11}{counts['documents']:>13,} documents {counts['tokens']:>15,} tokens")
    lines.append(
        f"  tokenizer  {summary['vocab_size']:>13,} ids       {summary['bytes_per_token']:>15.2f} bytes/token"
    )
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in summary["skipped"].items())
    lines.append(f"  documents left out: {left_out}")
    lines.append(f"  unigram entropy of validation {summary['unigram_bits_per_byte']:.3f} bits per byte")
    if len(summary["sources"]) > 1:
        lines += source_lines(summary["sources"])
    if report := report_text(outcome.manifest):
        lines.append(report)
    if outcome.kept_aside is not None:
        lines.append(kept_text(outcome.kept_aside, data_root))
    return "\n".join(lines)


def source_lines(sources: list[dict]) -> list[str]:
    """What is left of each source, and how much of a run it is to be."""
    lines = [f"  {'source':<24}{'documents':>14}{'tokens':>19}{'share':>9}  weight in a run"]
    for source in sources:
        counts = f"{source['documents']:>14,}{source['tokens']:>19,}{source['share']:>9.2%}"
        weight = "by size" if source["weight"] is None else f"{source['weight']:g}"
        lines.append(f"  {source['name'][:23]:<24}{counts}  {weight}")
    return lines


if __name__ == "__main__":
    with one_line_errors("what is finished is kept, and the same command goes on"):
        main()
