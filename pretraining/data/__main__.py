"""`python -m pretraining.data verify|stats|inspect|convert|push DIR|quality FILE`: what one does with prepared data."""

import argparse
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretraining.command_line import OneLineParser, not_negative_integer, positive_integer
from pretraining.errors import Interrupted, UserError, nearest, one_line_errors

EXAMPLES_OF = {
    "verify": """examples:
  python -m pretraining.data verify data/python-stdlib
  python -m pretraining.data verify data/python-stdlib --json""",
    "stats": """examples:
  python -m pretraining.data stats data/python-stdlib
  python -m pretraining.data stats data/python-stdlib --no-tokens --json
  python -m pretraining.data stats data/python-stdlib --no-tokens --sequence_length 512""",
    "inspect": """examples:
  python -m pretraining.data inspect data/python-stdlib --split validation --count 5 --seed 1
  python -m pretraining.data inspect data/python-stdlib --document 17
  python -m pretraining.data inspect data/python-stdlib --search "def main" --count 1
  python -m pretraining.data inspect data/python-stdlib --block 5 --sequence_length 512
  python -m pretraining.data inspect data/python-stdlib --sample 1000 --recipe tiny""",
    "convert": """examples:
  python -m pretraining.data convert data/python-stdlib --to megatron exported/python-stdlib
  python -m pretraining.data convert data/python-stdlib --to datatrove exported/python-stdlib
  python -m pretraining.data convert data/theirs --from megatron corpus_text_document --tokenizer gpt2
  python -m pretraining.data convert data/theirs --from datatrove tokenized/ --tokenizer gpt2
  python -m pretraining.data convert data/theirs --from bin openwebtext/ --tokenizer gpt2
  python -m pretraining.data convert data/theirs --from mds my-copy-c4 --tokenizer EleutherAI/gpt-neox-20b""",
    "quality": """examples:
  python -m pretraining.data quality good-or-not.npz --good textbooks --other "crawl/*.jsonl"
  python -m pretraining.data quality good-or-not.npz --good rated.parquet --other crawl --json""",
    "push": """examples:
  python -m pretraining.data push data/python-stdlib my-name/python-stdlib --dry_run
  python -m pretraining.data push data/python-stdlib my-name/python-stdlib --private""",
}


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    try:
        answer, text = options.run(options)
        print(json.dumps(answer, ensure_ascii=False) if options.json else text, flush=True)
    except KeyboardInterrupt:
        exec("")  # as `one_line_errors` does
        interrupted = f"{options.verb} {options.folder}: interrupted; {options.after_interrupt}"
        raise Interrupted(interrupted) from None
    except BrokenPipeError:  # the reader (head, less) has seen enough
        # Else Python would fail again when it flushes stdout at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_verify(options: argparse.Namespace) -> tuple[dict, str]:
    # Imported in each verb: --help and errors of the command line need none of it.
    from pretraining.data.tools.finished import verify_data

    found = verify_data(options.folder, not options.json)
    size = f"{found['shards']:,} shards, {found['size']:,} bytes"
    held = f"{found['documents']:,} documents, {found['tokens']:,} tokens"
    return found, f"{found['folder']} is whole: {size}, {held}"


def run_stats(options: argparse.Namespace) -> tuple[dict, str]:
    from pretraining.data.tools.inspect import measure_data, stats_text

    counted = options.tokens, options.top, not options.json, options.sequence_length
    measured = measure_data(options.folder, *counted)
    return measured, stats_text(measured)


def run_inspect(options: argparse.Namespace) -> tuple[dict | list, str]:
    from pretraining.data.tools.inspect import Inspection, block_text, document_text
    from pretraining.recipe import load_recipe

    if options.sample is not None and options.recipe is None:
        raise UserError("--sample needs --recipe: the run whose samples are counted")
    if options.sample is not None and options.sequence_length is not None:
        raise UserError("--sample has the recipe's length; leave out --sequence_length")
    if options.block is not None and options.sequence_length is None and options.recipe is None:
        raise UserError("--block needs --sequence_length or --recipe: blocks are cut when reading")
    recipe = load_recipe(options.recipe, options.set) if options.recipe else None
    inspection = Inspection(options.folder, options.split)
    if options.sample is not None:
        block = inspection.sample(options.sample, recipe)
        return block, block_text(block, options.max_chars)
    if options.block is not None:
        block = inspection.block(options.block, options.sequence_length or recipe.sequence_length)
        return block, block_text(block, options.max_chars)
    if options.search is not None:
        documents = inspection.search(options.search, options.count or 3)
        if not documents:
            raise UserError(f"{options.folder}: no document of {options.split} holds {options.search!r}")
    else:
        # A range, so that no list of all documents is made.
        population = range(inspection.split.num_documents)
        if options.document is not None:
            first, last = options.document, options.document + (options.count or 1)
            # The first one is refused if it is not there; the others may be fewer at the end of the split.
            numbers = [first, *range(first + 1, min(last, len(population)))]
        else:
            drawn = random.Random(options.seed).sample(population, min(options.count or 3, len(population)))
            numbers = sorted(drawn)
        documents = [inspection.document(number) for number in numbers]
    return documents, "\n\n".join(document_text(each, options.max_chars) for each in documents)


def run_convert(options: argparse.Namespace) -> tuple[dict, str]:
    from pretraining.data.tools.convert import FORMATS, READ_ONLY, TokenFiles, export_data, import_data

    form, place = options.export_to or options.import_from
    known = FORMATS if options.export_to else (*FORMATS, *READ_ONLY)
    if form not in known:
        way = "write" if options.export_to else "read"
        raise UserError(f"convert: unknown form {form!r}{nearest(form, known)}; can {way} {', '.join(known)}")
    if options.export_to:
        made = export_data(options.folder, form, Path(place), not options.json)
    else:
        reading = TokenFiles(form, Path(place), options.dtype, options.column)
        given = options.tokenizer, options.validation_share, not options.json
        made = import_data(options.folder, reading, *given)
    lines = [f"{made['folder']} is ready"]
    for split in ("train", "validation"):
        counts = made[split]
        lines.append(f"  {split:<11}{counts['documents']:>13,} documents {counts['tokens']:>15,} tokens")
    if "eos_added" in made:
        lines.append(f"  {made['eos_added']:,} documents had no end-of-text token and got one")
        lines.append(f"  {made['empty']:,} documents without tokens left out")
    return made, "\n".join(lines)


def run_push(options: argparse.Namespace) -> tuple[dict, str]:
    from pretraining.data.manifest import MANIFEST_NAME
    from pretraining.data.tools.push import plan_push, push_data

    if options.dry_run:
        plan = plan_push(options.folder, options.repo_id)
        files, repo_id = plan["files"], plan["repo_id"]
        head = f"would upload {len(files):,} files, {plan['size']:,} bytes, to the data set {repo_id}"
        lines = [f"{size:>16,}  {path}" for path, size in files.items()]
        note = f"{MANIFEST_NAME} goes up as it is, with the paths and names of the sources"
        return plan, "\n".join([head, *lines, note, "", plan["card"]])
    pushed = push_data(options.folder, options.repo_id, options.private, not options.json)
    return pushed, f"{pushed['files']:,} files, {pushed['size']:,} bytes: {pushed['url']}"


def run_quality(options: argparse.Namespace) -> tuple[dict, str]:
    from pretraining.data.corpus import FileSource
    from pretraining.data.quality.classifier import train_classifier
    from pretraining.data.text_files import TextColumn, list_files

    if options.folder.suffix != ".npz":
        raise UserError(f"{options.folder}: the classifier is an .npz file; give such a name")
    sides = []
    for side in ("good", "other"):
        files = list_files(getattr(options, side), f"--{side}")
        documents = FileSource(files, TextColumn(key=f"--{side}")).documents()
        sides.append(document.text for document in documents if document.text)
    classifier, report = train_classifier(*sides)
    classifier.save(options.folder)
    counts = f"trained on {report['good']:,} good and {report['other']:,} other texts"
    lines = [f"{options.folder}: {counts}; of a tenth of them that it has not seen:"]
    pairs = f"the good one of a pair has the higher score in {report['auc']:.2%}"
    lines.append(f"  {report['accuracy']:.2%} judged right at 0.5; {pairs}")
    for side, (low, middle, high) in report["quantiles"].items():
        middles = f"half below {middle:.3f}, nine tenths below {high:.3f}"
        lines.append(f"  {side:<6} a tenth below {low:.3f}, {middles}")
    return {"model": str(options.folder), **report}, "\n".join(lines)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse `verb`, `run`, `folder`, `json`, `after_interrupt` (what an interrupt leaves) and what the verb adds."""
    firsts = [examples.splitlines()[1] for examples in EXAMPLES_OF.values()]
    what = "Verify, measure, read, convert and publish prepared data; train a classifier of quality."
    epilog = "\n".join(["examples:", *firsts, "", "Every verb has its own --help."])
    parser = OneLineParser("python -m pretraining.data", description=what, epilog=epilog)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add(to, name: str, what: str, **options: Any) -> None:
        to.add_argument(name, help=what, **options)

    _verb(verbs, run_verify, "compare every file of a data set with its manifest")
    stats = _verb(verbs, run_stats, "counts, document lengths, token frequencies")
    what = "counts and lengths only; no shard is read whole"
    add(stats, "--no-tokens", what, dest="tokens", action="store_false")
    add(stats, "--top", "tokens listed at each end (10)", type=positive_integer, default=10, metavar="N")
    what = "also which share of train's documents the ends of blocks of L tokens cut, in sequence and by best fit"
    add(stats, "--sequence_length", what, type=positive_integer, metavar="L")
    inspect = _verb(verbs, run_inspect, "documents as text; what a block is made of")
    which = inspect.add_mutually_exclusive_group()
    add(which, "--document", "this document of the split, from 0", type=int, metavar="N")
    add(which, "--search", "the first documents whose text holds TEXT", metavar="TEXT")
    add(which, "--block", "a block and the documents it is made of", type=int, metavar="B")
    add(which, "--sample", "sample I of a run of --recipe, from 0", type=int, metavar="I")
    add(inspect, "--split", "train (default) or validation", default="train")
    add(inspect, "--sequence_length", "with --block: inputs a block", type=positive_integer, metavar="L")
    what = "with --sample: its length, order and packing; with --block: its length"
    add(inspect, "--recipe", what, metavar="NAME|PATH")
    what = "change a value of --recipe"
    add(inspect, "--set", what, action="append", default=[], metavar="SECTION.KEY=VALUE")
    add(inspect, "--count", "documents to show (3 at random, else 1)", type=positive_integer, metavar="K")
    add(inspect, "--seed", "draw of the random documents (default 0)", type=int, default=0)
    add(
        inspect, "--max_chars", "of each text (default 2000; 0: all)", type=not_negative_integer, default=2000
    )
    what = "to and from megatron and datatrove, and from bin (nanoGPT, llm.c) and mds"
    convert = _verb(verbs, run_convert, what)
    way = convert.add_mutually_exclusive_group(required=True)
    what = "write DIR as megatron or datatrove to OUT"
    add(way, "--to", what, dest="export_to", nargs=2, metavar=("FORM", "OUT"))
    what = "make DIR of megatron, datatrove, bin (nanoGPT, llm.c) or mds: a prefix, file or folder"
    add(way, "--from", what, dest="import_from", nargs=2, metavar=("FORM", "PATH"))
    add(convert, "--tokenizer", "with --from: what the tokens were made with", metavar="NAME|PATH")
    what = "with --from bin without a header, or mds with a column of bytes: the type of a token "
    what += "(default: uint16 or uint32 by the tokenizer; int64)"
    add(convert, "--dtype", what, choices=("uint16", "uint32", "int32", "int64"))
    add(convert, "--column", "with --from mds: the tokens (default: tokens, input_ids)", metavar="NAME")
    what = "with --from: documents kept for validation, by a hash of their tokens (default 0.005)"
    add(convert, "--validation_share", what, type=float, default=0.005, metavar="SHARE")
    what = "train a classifier of good and other texts, for the filter rule quality"
    quality = _verb(verbs, run_quality, what, "the classifier to write, an .npz file", "FILE")
    for side in ("good", "other"):
        what = f"file, folder or glob of {side} texts: .txt, .jsonl, .parquet"
        quality.add_argument(f"--{side}", required=True, help=what, metavar="PATH")
    push = _verb(verbs, run_push, "upload a data set to the Hugging Face hub")
    add(push, "repo_id", "data set repository; made where it does not exist", metavar="OWNER/NAME")
    add(push, "--private", "make a new repository private", action="store_true")
    add(push, "--dry_run", "list the files and the card; send nothing", action="store_true")
    push.set_defaults(after_interrupt="the same command goes on where it stopped")
    return parser.parse_args(arguments)


def _verb(
    verbs,
    run: Callable,
    summary: str,
    of: str = "data set, such as data/python-stdlib",
    shown_as: str = "DIR",
) -> argparse.ArgumentParser:
    """Add the subcommand `name` of a function `run_name`, with its place (DIR), --json and its examples."""
    name = run.__name__.removeprefix("run_")
    shown = {
        "help": summary,
        "description": f"{summary[0].upper()}{summary[1:]}.",
        "epilog": EXAMPLES_OF[name],
    }
    parser = verbs.add_parser(name, **shown, allow_abbrev=False)
    parser.add_argument("folder", type=Path, metavar=shown_as, help=of)
    what = "print the answer as JSON, without a progress bar"
    parser.add_argument("--json", action="store_true", help=what)
    parser.set_defaults(run=run, after_interrupt="nothing was changed")
    return parser


if __name__ == "__main__":
    # What was begun is cleared away, as at Ctrl-C. Here, not in `main`: whoever imports that keeps their own handlers.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with one_line_errors():
        main()
