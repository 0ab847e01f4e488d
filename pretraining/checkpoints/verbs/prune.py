"""Make room: remove what the recipe's retention does not keep, and what no start will ever use.

Shows what would go; `--yes` removes it. Damaged and uncommitted checkpoints and those set aside go too, weights
that retention left stay. Refused while a run is writing in the folder.
"""

import argparse
import json
import shutil
from pathlib import Path

from pretraining.checkpoints.catalogue import catalogue
from pretraining.checkpoints.folders import remove_checkpoint
from pretraining.checkpoints.retention import Kept, Retention, measured_at
from pretraining.checkpoints.selection import add_run, run_of
from pretraining.command_line import not_negative_integer, positive_integer
from pretraining.planning.quantities import columns, num_bytes
from pretraining.runtime.run_folder import RunFolder

EXAMPLES = """  python -m pretraining.checkpoints prune runs/tiny
  python -m pretraining.checkpoints prune runs/tiny --keep_last 1 --yes
  python -m pretraining.checkpoints prune runs/tiny --keep_last 1 --keep_every 1000 --demote_to_weights --yes"""
USELESS = ("damaged", "uncommitted", "set aside")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and what to keep where it is not the recipe's rule."""
    add_run(parser)
    rule = "default: the recipe's"
    parser.add_argument("--keep_last", type=positive_integer, metavar="N", help=f"the newest N ({rule})")
    parser.add_argument("--keep_best", type=not_negative_integer, metavar="K", help=f"the K best ({rule})")
    parser.add_argument("--keep_every", type=positive_integer, metavar="M", help=f"every M steps ({rule})")
    parser.add_argument(
        "--demote_to_weights", action="store_true", help="keep the weights of what goes, as weights-<step>/"
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--yes", action="store_true", help="remove it")
    choice.add_argument("--dry_run", action="store_true", help="show what would go (the default)")


def answer(options: argparse.Namespace) -> dict:
    """{"removed": whether, "freed_bytes", "kept", "checkpoints": entries of the catalogue that go}."""
    run = run_of(options.run)
    if not options.yes:
        return _plan(run, options)
    from pretraining.checkpoints.lock import folder_held

    with folder_held(run.path):
        plan = _plan(run, options)
        for entry in plan["checkpoints"]:
            _remove(run, entry, demote=plan["demote_to_weights"])
    return {**plan, "removed": True}


def _plan(run: RunFolder, options: argparse.Namespace) -> dict:
    section = _section(run, options)
    entries = catalogue(run)
    committed = [each for each in entries if each["state"] == "committed"]
    kept = Retention.of(section, metric=section["metric"]).kept_steps(
        Kept(each["step"], measured_at(run.path / each["folder"], section["metric"])) for each in committed
    )
    going = [each for each in entries if each["state"] in USELESS]
    going += [each for each in committed if each["step"] not in kept]
    return {
        "run": str(run.path),
        "removed": False,
        "demote_to_weights": section["demote_to_weights"],
        "freed_bytes": sum(each["bytes"] for each in going),
        "kept": sorted(kept, reverse=True),
        "checkpoints": going,
    }


def _section(run: RunFolder, options: argparse.Namespace) -> dict:
    """The recipe's `checkpoints`, with what the command line says over it; everything kept without a recipe."""
    section = {"keep_last": None, "keep_best": 0, "keep_every": None, "demote_to_weights": False}
    section["metric"] = "loss"
    if run.recipe.exists():
        recipe = json.loads(run.recipe.read_text(encoding="utf-8"))
        written = {**recipe["checkpoints"], **recipe.get("evaluation", {})}
        section |= {key: written[key] for key in section if key in written}
    given = {key: value for key, value in vars(options).items() if key in section}
    return section | {key: value for key, value in given.items() if value is not None and value is not False}


def _remove(run: RunFolder, entry: dict, demote: bool) -> None:
    folder: Path = run.path / entry["folder"]
    if demote and entry["state"] == "committed" and not run.weights(entry["step"]).exists():
        from pretraining.checkpoints.weights import demote_checkpoint

        if not demote_checkpoint(run, folder, run.weights(entry["step"])):
            return
    if entry["state"] == "set aside":
        shutil.rmtree(folder)
    else:
        remove_checkpoint(folder)
    run.add_event("checkpoint_pruned", checkpoint=entry["folder"], state=entry["state"])


def as_text(answer: dict) -> str:
    """What goes, what that frees, and how to do it."""
    going = answer["checkpoints"]
    kept = f"kept: {', '.join(map(str, answer['kept'])) or 'none'}"
    if not going:
        return f"{answer['run']}: nothing to remove; {kept}"
    table = columns(
        ["folder", "state", "size"], [[e["folder"], e["state"], num_bytes(e["bytes"])] for e in going], left=2
    )
    freed = num_bytes(answer["freed_bytes"])
    done = f"removed: {freed} free" if answer["removed"] else f"would free {freed}; --yes removes it"
    return f"{table}\n{done}; {kept}"
