"""Keep the journal of a run: how rollbacks changed which samples and which learning rate a step has.

Each rollback is one JSON line in `runs/<name>/journal.jsonl`. Everything below is a pure function of these rows.
A run that is killed and started again therefore repeats what the journal says.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pretraining.errors import UserError
from pretraining.outside.files import COUNT, object_of
from pretraining.outside.schema import check
from pretraining.runtime.durable_files import read_rows, replacing


@dataclass(frozen=True)
class Rollback:
    step: int  # the optimizer step whose loss caused it
    to_step: int  # the optimizer step of the checkpoint that the run returned to; 0 for the beginning
    samples: tuple[int, int]  # positions [first, last) of the global order that are left out from then on
    lr_factor: float = 1.0  # multiplies the learning rate in the steps to_step + 1 ... to_step + lr_steps
    lr_steps: int = 0


_NEEDED = {"step": COUNT, "to_step": COUNT, "samples": {"type": "array", "items": COUNT}}
_ROW = object_of(_NEEDED, {"lr_steps": COUNT, "lr_factor": {"type": "number", "minimum": 0}})
_ROW["additionalProperties"] = False


@dataclass(frozen=True)
class Journal:
    """The rollbacks of a run, oldest first."""

    rollbacks: tuple[Rollback, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "Journal":
        """Read the file. A line that a dying run left half-written never took effect."""
        return cls.of(read_rows(path))

    @classmethod
    def of(cls, rows: Sequence[dict]) -> "Journal":
        """Build the journal from rows as `write` makes them."""
        rollbacks = []
        try:
            for row in rows:
                first, last = check(row, _ROW, "journal.jsonl")["samples"]
                # JSON has no tuples: without this, a row read back would not equal the one written
                rollbacks.append(Rollback(**{**row, "samples": (first, last)}))
        except (UserError, ValueError) as error:
            # left out in silence, it would change the samples of the steps behind it
            remedy = "bring back the file that the run wrote"
            raise UserError(f"the run's journal is damaged ({error}); {remedy}") from None
        return cls(tuple(rollbacks))

    def write(self, path: Path) -> None:
        with replacing(path) as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in self.rollbacks)

    @property
    def left_out(self) -> list[tuple[int, int]]:
        """The windows [first, last) of the global order that are not trained on: disjoint and sorted."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted(row.samples for row in self.rollbacks):
            # "<=" also joins windows that only touch
            if joined and first <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
            elif last > first:
                joined.append((first, last))
        return joined

    def position(self, sample: int) -> int:
        """Return the position in the global order of the run's sample number `sample`, both counted from 0."""
        for first, last in self.left_out:
            if sample < first:
                break
            sample += last - first  # jump over this window, and compare the new position with the next one
        return sample

    def overtakes(self, step: int, known_rollbacks: int) -> bool:
        """Return whether a rollback has discarded the checkpoint after `step`, which knew of so many rollbacks."""
        return any(step > row.to_step for row in self.rollbacks[known_rollbacks:])


NOTHING_HEALED = Journal()
