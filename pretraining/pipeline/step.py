"""A step: what it depends on, and whether that is still what it was when the step ran last."""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pretraining.schema import differences, listed

if TYPE_CHECKING:
    from pretraining.pipeline.steps import Pipeline

UP_TO_DATE, NOT_NEEDED, NOT_ASKED = "up to date", "not needed", "not asked for"


@dataclass(frozen=True)
class Look:
    """Whether a step is to run, and why."""

    runs: bool
    why: str
    state: str = UP_TO_DATE
    """Of a step that does not run."""


class Step(ABC):
    """One step of a pipeline."""

    name: ClassVar[str]

    def __init__(self, pipeline: "Pipeline"):
        self.pipeline = pipeline

    @abstractmethod
    def look(self) -> Look:
        """Say whether the step is to run."""

    @abstractmethod
    def run(self) -> dict:
        """Run the step; returns what is worth knowing of it.

        Raises:
            StepEnded: its command ended with an exit code.
            UserError: it is refused.
        """

    @abstractmethod
    def words(self, facts: dict) -> str:
        """Write what a finished step has made."""

    def inputs(self) -> dict:
        """Describe all that the step depends on, as JSON values."""
        return {}

    def kept_inputs(self) -> dict:
        """Describe its inputs as a file gives them back."""
        return json.loads(json.dumps(self.inputs()))

    def changes(self) -> list[str] | None:
        """List how its inputs differ from those of its last run; None if it has not run."""
        before = self.pipeline.record.steps.get(self.name)
        if before is None:
            return None
        now = self.kept_inputs()
        there, here = before["inputs"].get("contents", {}), now.pop("contents", {})
        values = {key: value for key, value in before["inputs"].items() if key != "contents"}
        contents = [f"{name} has changed" for name in here if there.get(name) != here[name]]
        return list(map(str, differences(values, now))) + contents

    def look_at_inputs(self, made: str) -> Look:
        """Say whether its inputs are those of its last run. made: what is there if they are."""
        changes = self.changes()
        if changes is None:
            return Look(True, "it has not run here")
        return Look(True, listed(changes)) if changes else Look(False, made)
