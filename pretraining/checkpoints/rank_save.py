"""One rank's part of one save: what is to be written, how far it is, and what went wrong."""

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

from pretraining.checkpoints.awaiting import SaveAbandoned
from pretraining.checkpoints.full_disk import disk_errors_told
from pretraining.errors import UserError

Result = TypeVar("Result")


@dataclass
class RankSave:
    """Shared by the rank's main thread and the thread that writes; each field has one writer at a time."""

    SECONDS: ClassVar = ("blocked_seconds", "waited_seconds", "write_seconds")

    folder: Path
    name: str
    """Of the save, for the receipts."""
    files: dict[str, bytes]
    receipt: dict
    marker: dict
    num_bytes: int
    began: float
    """By `time.perf_counter`."""
    waited_seconds: float
    """For the save before."""
    blocked_seconds: float | None = None
    """How long training stood still, the waiting included; None while it still does."""
    write_seconds: float = 0.0
    done: bool = False
    failed: bool = False
    error: tuple[str, bool] | None = None
    """What this rank met, and whether a user can mend it."""
    abandoned: threading.Event = field(default_factory=threading.Event)

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """`work`, unless something has failed before; what it raises is kept for the step boundary."""
        if self.failed:
            return None
        try:
            with disk_errors_told(self.folder):
                return work()
        except SaveAbandoned:
            pass
        except UserError as error:
            self.error = (str(error), True)
        except Exception:  # a bug in a thread must end the run, not the thread alone
            self.error = (traceback.format_exc(), False)
        self.failed = True
        return None

    def report(self) -> dict:
        """What the other ranks are told at a step boundary."""
        so_far = time.perf_counter() - self.began
        return {
            "done": self.done,
            "failed": self.failed,
            "error": self.error,
            "num_bytes": self.num_bytes,
            "waited_seconds": round(self.waited_seconds, 4),
            "blocked_seconds": round(so_far if self.blocked_seconds is None else self.blocked_seconds, 4),
            "write_seconds": round(self.write_seconds, 4),
        }
