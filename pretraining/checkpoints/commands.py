"""Find the run and the checkpoints that a command means, in words that are the same for every verb."""

import argparse
import os
from pathlib import Path
from typing import Any

from pretraining.checkpoints.folders import damage, step_in, step_of
from pretraining.checkpoints.format import MARKER
from pretraining.checkpoints.remote import RemoteRun
from pretraining.command_line import not_negative_integer
from pretraining.errors import UserError
from pretraining.outside.addresses import is_remote
from pretraining.runtime.imports import prepare_imports
from pretraining.runtime.run_folder import RunFolder, step_in_name


def add_run(parser: argparse.ArgumentParser, or_checkpoint: bool = False, or_address: bool = False) -> None:
    what = "a run folder, or one checkpoint in it" if or_checkpoint else "a run folder"
    what += "; also its address in a store" if or_address else ""
    kind = (lambda text: text if is_remote(text) else Path(text)) if or_address else Path
    parser.add_argument("run", type=kind, metavar="RUN", help=what)


def add_step(parser: argparse.ArgumentParser, which: str) -> None:
    parser.add_argument("--step", type=not_negative_integer, metavar="N", help=f"that checkpoint ({which})")


def run_of(folder: Path) -> RunFolder:
    """Return the run in a folder; `UserError` if there is none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name a run folder, as runs/tiny")
    run = RunFolder(folder)
    if not run.recipe.exists() and not any(folder.glob("checkpoint-*")):
        raise UserError(f"{folder}: no run folder (no recipe.json, no checkpoint-*)")
    return run


def chosen_checkpoints(folder: Path, step: int | None) -> list[Path]:
    """Return the committed checkpoints meant, newest first: one by its path or `step`, else all of the run."""
    # The path of one checkpoint: it may be a copy outside of any run, so that no run is looked for.
    if (folder / MARKER).exists():
        if step is not None:
            refuse_another_step(step, step_of(folder))
        return [folder]
    committed = run_of(folder).committed()
    found = committed if step is None else [each for each in committed if step_in_name(each) == step]
    if not found:
        there = ", ".join(str(step_in_name(each)) for each in reversed(committed))
        which = "no committed checkpoint" if step is None else f"no committed checkpoint of step {step}"
        raise UserError(f"{folder}: {which}" + (f"; there are those of {there}" if there else ""))
    return found


def store_of(address: str) -> tuple[RemoteRun, list[str]]:
    """Return the place of a run in a store and the checkpoints there; `UserError` if there is none."""
    remote = RemoteRun(address).at_first_contact()
    if not (names := remote.checkpoints()):
        remedy = "give the address of a run, as s3://bucket/runs/30b"
        raise UserError(f"{remote.address}: no checkpoint-* there; {remedy}")
    return remote, names


def refuse_another_step(step: int, named: int) -> None:
    """Raise `UserError` if an option and the path of one checkpoint mean two."""
    if step != named:
        raise UserError(
            f"step {step} is asked for, and the path names that of step {named}; leave one of them out"
        )


def chosen_in_store(address: str, step: int | None) -> tuple[RemoteRun, list[str]]:
    """Do the same for an address in a store; returns the place and the names."""
    remote, name = RemoteRun.of_checkpoint(address)
    if step_in(name) >= 0:
        if step is not None:
            refuse_another_step(step, step_in(name))
        address, step = remote.address, step_in(name)
    store, names = store_of(address)
    names = [each for each in names if step in (None, step_in(each)) and MARKER in (store.sizes(each) or {})]
    if not names:
        which = "no committed checkpoint" + ("" if step is None else f" of step {step}")
        raise UserError(f"{address}: {which}; `list {address}` shows what is there")
    return store, names


def whole_checkpoint(folder: Path, step: int | None, option: str) -> Path:
    """Return the newest chosen checkpoint, with every byte verified. option: what chooses another, for the message."""
    checkpoint = chosen_checkpoints(folder, step)[0]
    if reason := damage(checkpoint):
        raise UserError(f"{checkpoint}: the checkpoint is damaged: {reason}; choose another with {option}")
    return checkpoint


def write_export(*arguments: Any, **options: Any) -> None:
    prepare_imports()  # before transformers is imported: it makes that import faster
    from transformers.utils import logging

    from pretraining.checkpoints.export import export_checkpoint

    logging.disable_progress_bar()
    export_checkpoint(*arguments, **options)


def refuse_existing(folder: Path, option: str) -> None:
    if os.path.lexists(folder):
        raise UserError(f"{folder}: is there already; remove it, or choose another with {option}")
