"""A preparation as stages of numbered tasks, run here, in processes of this machine, or on a cluster.

A task's output appears whole or not at all, so that each can be run again alone. Its folder's name has a digest of all
that it depends on: a finished task of other input is never mistaken for it, and one of unchanged input never run again.
"""

import os
import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pretraining.data.progress import ProgressBar
from pretraining.errors import UserError
from pretraining.runtime.durable_files import sync_to_disk


@dataclass(frozen=True)
class Stage(ABC):
    """One step of a preparation: a task for each of its keys. The fields of a subclass are its inputs."""

    name: ClassVar[str]

    work: Path
    """The folder in which the tasks of all stages keep what they have finished."""

    @property
    @abstractmethod
    def keys(self) -> list[str]:
        """Make a digest for each task, of everything that its output depends on."""

    @abstractmethod
    def run(self, number: int, folder: Path, progress: ProgressBar) -> None:
        """Write the output of task `number` into an empty folder."""

    def folder(self, number: int) -> Path:
        """Name the folder of the finished task's output, also before it is there."""
        return self.work / self.name / f"{number:05d}-{self.keys[number][:12]}"

    def pending(self) -> list[int]:
        return [number for number in range(len(self.keys)) if not self.folder(number).is_dir()]

    def outputs(self) -> list[Path]:
        """List the folders of all tasks; UserError if one has not finished."""
        self.refuse(self.pending())
        return [self.folder(number) for number in range(len(self.keys))]

    def refuse(self, pending: list[int]) -> None:
        """Raise UserError for tasks that have not finished, if there are any."""
        if pending:
            what = f"{len(pending)} tasks of the stage {self.name!r} have not finished"
            remedy = "run the same command again: only they are repeated"
            raise UserError(f"{self.work}: {what} (the first: {pending[0]}); {remedy}")


def run_task(stage: Stage, number: int, progress: ProgressBar | None = None) -> None:
    """Run one task, unless it has finished. Two processes may run the same one: the first to finish wins."""
    finished = stage.folder(number)
    if finished.is_dir():
        return
    # Two machines may run the same task in a shared folder: each builds in its own.
    part = finished.with_name(f".{finished.name}.{os.uname().nodename}.{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        stage.run(number, part, progress or ProgressBar())
        # Before the rename: a power cut must not leave a finished name with half-written files.
        for path in [*part.rglob("*"), part]:
            sync_to_disk(path)
        try:
            part.rename(finished)
        except OSError:
            if not finished.is_dir():  # another process's result is as good as ours
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
