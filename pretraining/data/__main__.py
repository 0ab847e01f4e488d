"""`python -m pretraining.data verify|stats|inspect|convert|push DIR`: what one does with prepared data."""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from pretraining.data.tools.arguments import parse_arguments
from pretraining.errors import Interrupted, UserError, one_line_errors


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    run = RUNS[options.verb]
    try:
        answer, text = run(options)
        print(json.dumps(answer, ensure_ascii=False) if options.json else text, flush=True)
    except KeyboardInterrupt:
        exec("")  # as `one_line_errors` does
        interrupted = f"{options.verb} {options.folder}: interrupted; {options.after_interrupt}"
        raise Interrupted(interrupted) from None
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_verify(options: argparse.Namespace) -> tuple[dict, str]:
    from pretraining.data.tools.verify import verify_data

    found = verify_data(options.folder, not options.json)
    text = (
        f"{found['folder']} is whole: {found['shards']:,} shards, {found['size']:,} bytes, "
        f"{found['documents']:,} documents, {found['tokens']:,} tokens"
    )
    return found, text


def run_stats(options: argparse.Namespace) -> tuple[dict, str]:
    from pretraining.data.tools.stats import measure_data, stats_text

    measured = measure_data(
        options.folder, options.tokens, options.top, not options.json, options.sequence_length
    )
    return measured, stats_text(measured)


def run_inspect(options: argparse.Namespace) -> tuple[dict | list, str]:
    from pretraining.data.tools.inspect import Inspection, block_text, documents_text

    recipe = _recipe_of(options)
    inspection = Inspection(options.folder, options.split)
    if options.block is not None or options.sample is not None:
        block = _block(options, inspection, recipe)
        return block, block_text(block, options.max_chars)
    documents = _documents(options, inspection)
    return documents, documents_text(documents, options.max_chars)


def _recipe_of(options: argparse.Namespace):
    from pretraining.recipe import load_recipe

    if options.sample is not None and options.recipe is None:
        raise UserError("--sample needs --recipe: the run whose samples are counted")
    if options.sample is not None and options.sequence_length is not None:
        raise UserError("--sample has the recipe's length; leave out --sequence_length")
    if options.block is not None and options.sequence_length is None and options.recipe is None:
        raise UserError("--block needs --sequence_length or --recipe: blocks are cut when reading")
    return load_recipe(options.recipe, options.set) if options.recipe else None


def _block(options: argparse.Namespace, inspection, recipe) -> dict:
    if options.sample is not None:
        return inspection.sample(options.sample, recipe)
    return inspection.block(options.block, options.sequence_length or recipe.sequence_length)


def _documents(options: argparse.Namespace, inspection) -> list[dict]:
    if options.search is not None:
        found = inspection.search(options.search, options.count or 3)
        if not found:
            raise UserError(f"{options.folder}: no document of {options.split} holds {options.search!r}")
        return found
    if options.document is not None:
        return inspection.documents_from(options.document, options.count or 1)
    return inspection.random_documents(options.count or 3, options.seed)


def run_convert(options: argparse.Namespace) -> tuple[dict, str]:
    from pretraining.data.tools.convert import FORMATS, export_data, import_data

    form, place = options.export_to or options.import_from
    if form not in FORMATS:
        raise UserError(f"convert: unknown form {form!r}; can convert {' and '.join(FORMATS)}")
    if options.export_to:
        made = export_data(options.folder, form, Path(place), not options.json)
    else:
        how = (options.tokenizer, options.validation_share, not options.json)
        made = import_data(options.folder, form, Path(place), *how)
    return made, _converted_text(made)


def _converted_text(made: dict) -> str:
    lines = [f"{made['folder']} is ready"]
    for split in ("train", "validation"):
        counts = made[split]
        lines.append(f"  {split:<11}{counts['documents']:>13,} documents {counts['tokens']:>15,} tokens")
    if "eos_added" in made:
        lines.append(f"  {made['eos_added']:,} documents had no end-of-text token and got one")
        lines.append(f"  {made['empty']:,} documents without tokens left out")
    return "\n".join(lines)


def run_push(options: argparse.Namespace) -> tuple[dict, str]:
    from pretraining.data.tools.push import plan_push, plan_text, push_data

    if options.dry_run:
        plan = plan_push(options.folder, options.repo_id)
        return plan, plan_text(plan)
    pushed = push_data(options.folder, options.repo_id, options.private, not options.json)
    return pushed, f"{pushed['files']:,} files, {pushed['size']:,} bytes: {pushed['url']}"


RUNS = {
    "verify": run_verify,
    "stats": run_stats,
    "inspect": run_inspect,
    "convert": run_convert,
    "push": run_push,
}


if __name__ == "__main__":
    # What was begun is cleared away, as at Ctrl-C. Here, not in `main`: whoever imports that keeps their own handlers.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with one_line_errors():
        main()
