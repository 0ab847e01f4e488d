"""The journal of a run: what healing changed in the mapping from step to samples and learning rate.

One JSON line a rollback in `runs/<name>/journal.jsonl`. Everything below is a pure function of these rows, so a
run that is killed and started again repeats what the journal says.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pretraining.runtime.durable_files import read_rows, replacing


@dataclass(frozen=True)
class Rollback:
    """One return to an earlier step."""

    step: int
    """Optimizer step whose loss was the reason."""
    to_step: int
    """Optimizer steps of the checkpoint that was returned to; 0 for the beginning."""
    samples: tuple[int, int]
    """Positions [first, last) of the global order that are left out from then on."""
    lr_factor: float = 1.0
    """Of the learning rate in the steps to_step + 1 ... to_step + lr_steps."""
    lr_steps: int = 0


@dataclass(frozen=True)
class Journal:
    """The rollbacks of a run, oldest first."""

    rollbacks: tuple[Rollback, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "Journal":
        """What the file holds; a line that a dying run left half-written was never in force."""
        return cls.of(read_rows(path))

    @classmethod
    def of(cls, rows: Sequence[dict]) -> "Journal":
        """The journal of such rows."""
        return cls(tuple(Rollback(**{**row, "samples": tuple(row["samples"])}) for row in rows))

    def with_rollback(self, rollback: Rollback) -> "Journal":
        """This journal and one more row."""
        return Journal((*self.rollbacks, rollback))

    def write(self, path: Path) -> None:
        """Write the whole file anew, atomically and down to the disk."""
        with replacing(path) as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in self.rollbacks)

    @property
    def left_out(self) -> list[tuple[int, int]]:
        """Disjoint windows [first, last) of the global order that are not trained on, in order."""
        return merged(row.samples for row in self.rollbacks)

    def position(self, sample: int) -> int:
        """Position in the global order of the run's sample number `sample`, both counted from 0."""
        return position(sample, self.left_out)

    @property
    def lowers_rates(self) -> bool:
        """Whether some step has a lower learning rate than the schedule gives it."""
        return any(row.lr_factor != 1.0 and row.lr_steps for row in self.rollbacks)

    def lr_factor(self, finished_steps: int) -> float:
        """What the schedule's learning rate is multiplied with in the step after `finished_steps` steps."""
        factor = 1.0
        for row in self.rollbacks:
            if row.to_step <= finished_steps < row.to_step + row.lr_steps:
                factor *= row.lr_factor
        return factor

    def overtakes(self, step: int, known_rollbacks: int) -> bool:
        """Whether a checkpoint of `step` steps lies on a course that a later rollback has left.

        known_rollbacks: how many rows the journal had when it was committed.
        """
        return any(step > row.to_step for row in self.rollbacks[known_rollbacks:])


NOTHING_HEALED = Journal()


def merged(windows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same numbers as disjoint windows [first, last) in order."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(windows):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        elif last > first:
            joined.append((first, last))
    return joined


def position(sample: int, left_out: Sequence[tuple[int, int]]) -> int:
    """The `sample`-th number (from 0) outside the windows `left_out`, which are disjoint and in order."""
    for first, last in left_out:
        if sample < first:
            break
        sample += last - first
    return sample
