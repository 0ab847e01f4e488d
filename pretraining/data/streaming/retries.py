"""Asking a store again: exponential back-off with jitter, within a bounded time, with a line when it is slow."""

import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pretraining.addresses import masked
from pretraining.errors import UserError

PATIENCE_VARIABLE = "PRETRAINING_DATA_PATIENCE_SECONDS"
PATIENCE_SECONDS = 600.0
"""A store that gives no answer for so long ends the run: long enough for the outages that clouds call short."""

FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.1, 20.0
TOLD_AFTER_SECONDS = 10.0

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Patience:
    """How long one request to a store is repeated before the run gives up, in seconds.

    refused(error, what): the `UserError` for an answer that asking again will not change; by default as for reading
    data. speaker: whose line it is when a store is slow.
    """

    seconds: float = PATIENCE_SECONDS
    refused: "Callable[[Exception, str], UserError | None] | None" = None
    speaker: str = "data"

    @classmethod
    def here(cls) -> "Patience":
        """The default, or what the environment says."""
        return cls(float(os.environ.get(PATIENCE_VARIABLE, PATIENCE_SECONDS)))

    def ask(self, request: Callable[[], Answer], what: str) -> Answer:
        """The answer of `request`, asked until it comes; UserError for what waiting cannot mend, or too long."""
        start, delay, told = time.monotonic(), FIRST_DELAY_SECONDS, False
        while True:
            try:
                return request()
            except UserError:
                raise
            except (
                Exception
            ) as error:  # stores raise errors of many families; `refusal` knows the hopeless ones
                if refused := (self.refused or refusal)(error, what):
                    raise refused from error
                waited = time.monotonic() - start
                if waited + delay > self.seconds:
                    raise UserError(
                        f"{what}: the store does not answer ({reason_of(error)}), tried for {waited:.0f} s; start "
                        f"the same command again when it does, or wait longer: {PATIENCE_VARIABLE}",
                        on_every_rank=False,
                    ) from error
                if waited > TOLD_AFTER_SECONDS and not told:
                    slow = (
                        f"{what}: slow or failing store ({reason_of(error)}), trying for {waited:.0f} s now"
                    )
                    tell(slow, self.speaker)
                    told = True
            time.sleep(delay * random.uniform(0.5, 1.5))
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)


def refusal(error: Exception, what: str) -> UserError | None:
    """The UserError for an answer that will not change by asking again; None for any other."""
    if isinstance(error, FileNotFoundError):
        return UserError(f"{what}: not there; check --data_dir, or copy the data there again")
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
        return UserError(
            f"{what}: no permission to read it ({reason_of(error)}); check the account and its rights"
        )
    return None


def reason_of(error: BaseException) -> str:
    """The first line of an error's message, or its name where it has none; no secret is repeated."""
    return masked(str(error).strip().partition("\n")[0])[:200] or type(error).__name__


def tell(message: str, speaker: str = "data") -> None:
    """One line in the log of the run."""
    print(f"{speaker}: {message}", file=sys.stderr, flush=True)
