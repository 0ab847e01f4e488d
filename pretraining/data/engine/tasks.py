"""Numbered tasks whose output appears whole or not at all, so that each can be run again alone.

A task's folder carries a digest of all that its output depends on. A finished task of other input is never
mistaken for this one, and one whose input is unchanged is never run again.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pretraining.errors import UserError
from pretraining.runtime.durable_files import sync_to_disk


@dataclass(frozen=True)
class Stage:
    """One step of a preparation: a task for each of `keys`."""

    name: str
    keys: list[str]
    """A digest for each task, of all that its output depends on."""
    run: Callable[[int, Path], None]
    """Writes the output of task number n into an empty folder."""

    def folder(self, work: Path, number: int) -> Path:
        """Where the finished task's output is, or will be."""
        return work / self.name / f"{number:05d}-{self.keys[number][:12]}"

    def pending(self, work: Path) -> list[int]:
        """Numbers of the tasks that are still to run."""
        return [number for number in range(len(self.keys)) if not self.folder(work, number).is_dir()]

    def outputs(self, work: Path) -> list[Path]:
        """The folders of all tasks; UserError where one has not finished."""
        if pending := self.pending(work):
            raise UserError(
                f"{work}: {len(pending)} tasks of the stage {self.name!r} have not finished (the first: {pending[0]}); "
                "run the same command again: only they are repeated"
            )
        return [self.folder(work, number) for number in range(len(self.keys))]


def run_task(stage: Stage, work: Path, number: int) -> None:
    """Run one task, unless it has finished. Two processes may run the same one: the first to finish wins."""
    finished = stage.folder(work, number)
    if finished.is_dir():
        return
    part = finished.with_name(f".{finished.name}.{os.uname().nodename}.{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        stage.run(number, part)
        for path in [*part.rglob("*"), part]:
            sync_to_disk(path)
        _rename(part, finished)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _rename(part: Path, finished: Path) -> None:
    try:
        part.rename(finished)
    except OSError:
        if not finished.is_dir():  # another process's result is as good as ours
            raise
