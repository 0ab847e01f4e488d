"""`python -m pretraining.data verify|stats|inspect|convert|push DIR|quality FILE`: what one does with prepared data."""

import argparse
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from pretraining.command_line import OneLineParser, not_negative_integer, positive_integer
from pretraining.errors import Interrupted, UserError, nearest, one_line_errors
from pretraining.outside.masking import as_json

EXAMPLES_OF = {
    "verify": """\
  python -m pretraining.data verify data/python-stdlib
  python -m pretraining.data verify data/python-stdlib --json""",
    "stats": """\
  python -m pretraining.data stats data/python-stdlib
  python -m pretraining.data stats data/python-stdlib --no-tokens --json
  python -m pretraining.data stats data/python-stdlib --no-tokens --sequence_length 512""",
    "inspect": """\
  python -m pretraining.data inspect data/python-stdlib --split validation --count 5 --seed 1
  python -m pretraining.data inspect data/python-stdlib --document 17
  python -m pretraining.data inspect data/python-stdlib --search "def main" --count 1
  python -m pretraining.data inspect data/python-stdlib --block 5 --sequence_length 512
  python -m pretraining.data inspect data/python-stdlib --sample 1000 --recipe tiny""",
    "convert": """\
  python -m pretraining.data convert data/python-stdlib --to megatron exported/python-stdlib
  python -m pretraining.data convert data/python-stdlib --to datatrove exported/python-stdlib
  python -m pretraining.data convert data/theirs --from megatron corpus_text_document --tokenizer gpt2
  python -m pretraining.data convert data/theirs --from datatrove tokenized/ --tokenizer gpt2
  python -m pretraining.data convert data/theirs --from bin openwebtext/ --tokenizer gpt2
  python -m pretraining.data convert data/theirs --from mds my-copy-c4 --tokenizer EleutherAI/gpt-neox-20b""",
    "quality": """\
  python -m pretraining.data quality good-or-not.npz --good textbooks --other "crawl/*.jsonl"
  python -m pretraining.data quality good-or-not.npz --good rated.parquet --other crawl --json""",
    "push": """\
  python -m pretraining.data push data/python-stdlib my-name/python-stdlib --dry_run
  python -m pretraining.data push data/python-stdlib my-name/python-stdlib --private""",
}

DEFAULT_SHARE = 0.005


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    try:
        answer, text = options.run(options)
        print(as_json(answer, ensure_ascii=False) if options.json else text, flush=True)
    except KeyboardInterrupt:
        exec("")  # as `one_line_errors` does
        interrupted = f"{options.verb} {options.folder}: interrupted; {options.after_interrupt}"
        raise Interrupted(interrupted) from None
    except BrokenPipeError:  # the reader (head, less) has seen enough
        # Else Python would fail again when it flushes stdout at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_verify(options: argparse.Namespace) -> tuple[dict, str]:
    # Imported in each verb: --help and errors of the command line need none of it.
    from pretraining.data.finished import verify_data

    found = verify_data(options.folder, not options.json)
    size = f"{found['shards']:,} shards, {found['size']:,} bytes"
    held = f"{found['documents']:,} documents, {found['tokens']:,} tokens"
    return found, f"{found['folder']} is whole: {size}, {held}"


def run_stats(options: argparse.Namespace) -> tuple[dict, str]:
    from pretraining.data.tools.inspect import measure_data, stats_text

    wanted = options.tokens, options.top or 10, not options.json, options.sequence_length
    measured = measure_data(options.folder, *wanted)
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
        held = inspection.split.num_documents
        if options.document is not None:
            first, last = options.document, options.document + (options.count or 1)
            # The first one is refused if it is not there; the others may be fewer at the end of the split.
            numbers = [first, *range(first + 1, min(last, held))]
        else:
            # Of a range, so that no list of all documents is made.
            numbers = sorted(
                random.Random(options.seed or 0).sample(range(held), min(options.count or 3, held))
            )
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
        share = DEFAULT_SHARE if options.validation_share is None else options.validation_share
        made_with = options.tokenizer, share
        made = import_data(options.folder, reading, *made_with, not options.json)
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
    firsts = [examples.splitlines()[0] for examples in EXAMPLES_OF.values()]
    what = "Verify, measure, read, convert and publish prepared data; train a classifier of quality."
    epilog = "\n".join(["examples:", *firsts, "", "Every verb has its own --help."])
    parser = OneLineParser("python -m pretraining.data", description=what, epilog=epilog)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _verb(verbs, run_verify, "compare every file of a data set with its manifest")
    add = _verb(verbs, run_stats, "counts, document lengths, token frequencies").add_argument
    what = "counts and lengths only; no shard is read whole"
    add("--no-tokens", dest="tokens", action="store_false", help=what)
    add("--top", type=positive_integer, metavar="N", help="tokens listed at each end (10)")
    what = "also which share of train's documents the ends of blocks of L tokens cut, in sequence and by best fit"
    add("--sequence_length", type=positive_integer, metavar="L", help=what)
    inspect = _verb(verbs, run_inspect, "documents as text; what a block is made of")
    which = inspect.add_mutually_exclusive_group().add_argument
    which("--document", type=int, metavar="N", help="this document of the split, from 0")
    which("--search", metavar="TEXT", help="the first documents whose text holds TEXT")
    which("--block", type=int, metavar="B", help="a block and the documents it is made of")
    which("--sample", type=int, metavar="I", help="sample I of a run of --recipe, from 0")
    add = inspect.add_argument
    add("--split", default="train", help="train (default) or validation")
    add("--sequence_length", type=positive_integer, metavar="L", help="with --block: inputs a block")
    what = "with --sample: its length, order and packing; with --block: its length"
    add("--recipe", metavar="NAME|PATH", help=what)
    what = "change a value of --recipe"
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=what)
    add("--count", type=positive_integer, metavar="K", help="documents to show (3 at random, else 1)")
    add("--seed", type=int, help="draw of the random documents (default 0)")
    what = "of each text (default 2000; 0: all)"
    add("--max_chars", type=not_negative_integer, default=2000, help=what)
    what = "to and from megatron and datatrove, and from bin (nanoGPT, llm.c) and mds"
    convert = _verb(verbs, run_convert, what)
    way = convert.add_mutually_exclusive_group(required=True).add_argument
    what = "write DIR as megatron or datatrove to OUT"
    way("--to", dest="export_to", nargs=2, metavar=("FORM", "OUT"), help=what)
    what = "make DIR of megatron, datatrove, bin (nanoGPT, llm.c) or mds: a prefix, file or folder"
    way("--from", dest="import_from", nargs=2, metavar=("FORM", "PATH"), help=what)
    add = convert.add_argument
    add("--tokenizer", metavar="NAME|PATH", help="with --from: what the tokens were made with")
    what = "with --from bin without a header, or mds with a column of bytes: the type of a token "
    what += "(default: uint16 or uint32 by the tokenizer; int64)"
    add("--dtype", choices=("uint16", "uint32", "int32", "int64"), help=what)
    add("--column", metavar="NAME", help="with --from mds: the tokens (default: tokens, input_ids)")
    what = f"with --from: documents kept for validation, by a hash of their tokens (default {DEFAULT_SHARE})"
    add("--validation_share", type=float, metavar="SHARE", help=what)
    what = "train a classifier of good and other texts, for the filter rule quality"
    add = _verb(verbs, run_quality, what, "FILE", "the classifier to write, an .npz file").add_argument
    for side in ("good", "other"):
        what = f"file, folder or glob of {side} texts: .txt, .jsonl, .parquet"
        add(f"--{side}", required=True, help=what, metavar="PATH")
    push = _verb(verbs, run_push, "upload a data set to the Hugging Face hub")
    push.set_defaults(after_interrupt="the same command goes on where it stopped")
    add = push.add_argument
    add("repo_id", metavar="OWNER/NAME", help="data set repository; made where it does not exist")
    add("--private", action="store_true", help="make a new repository private")
    add("--dry_run", action="store_true", help="list the files and the card; send nothing")
    options = parser.parse_args(arguments)
    for name, has_effect in with_effect(options).items():
        if getattr(options, name) not in (None, []) and not has_effect:
            parser.error(f"--{name}: would change nothing of what is asked for; leave it out")
    return options


def with_effect(options: argparse.Namespace) -> dict[str, bool]:
    """Return {option of the verb: whether it can change the answer}, of those for which it depends on others."""
    if options.verb == "stats":
        return {"top": options.tokens}
    if options.verb == "convert":
        form = options.import_from and options.import_from[0]
        dtype, column = form in ("bin", "mds"), form == "mds"
        return {**dict.fromkeys(("tokenizer", "validation_share"), form), "dtype": dtype, "column": column}
    if options.verb == "inspect":
        of_documents = options.block is None and options.sample is None
        is_drawn = of_documents and options.document is None and options.search is None
        # of a block it says the length alone
        recipe = options.sample is not None or (options.block is not None and options.sequence_length is None)
        of_blocks = {"recipe": recipe, "set": options.recipe is not None, "sequence_length": not of_documents}
        return {**of_blocks, "count": of_documents, "seed": is_drawn}
    return {}


def _verb(
    verbs, run: Callable, summary: str, place: str = "DIR", of: str = "data set, such as data/python-stdlib"
) -> argparse.ArgumentParser:
    """Add the subcommand `name` of a function `run_name`, with its place, --json and its examples."""
    name = run.__name__.removeprefix("run_")
    description, epilog = f"{summary[0].upper()}{summary[1:]}.", f"examples:\n{EXAMPLES_OF[name]}"
    parser = verbs.add_parser(name, help=summary, description=description, epilog=epilog, allow_abbrev=False)
    parser.add_argument("folder", type=Path, metavar=place, help=of)
    what = "print the answer as JSON, without a progress bar"
    parser.add_argument("--json", action="store_true", help=what)
    parser.set_defaults(run=run, after_interrupt="nothing was changed")
    return parser


if __name__ == "__main__":
    # What was begun is cleared away, as at Ctrl-C. Here, not in `main`: whoever imports that keeps their own handlers.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with one_line_errors():
        main()
