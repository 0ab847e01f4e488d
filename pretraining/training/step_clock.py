"""Where the time of a step goes: at every moment exactly one phase is running, so that the phases add up."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

PAUSES = ("evaluation", "saving")
"""Phases that are no part of a step."""


class StepClock:
    """Seconds by phase, on the device's own time line where it is a GPU.

    There a change of phase records an event on the current stream and asks for its time only once the device
    has passed it: nothing waits, except `take` for the last event, which logging has waited for already.
    """

    def __init__(self, on_gpu: bool | None = None):
        self.on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
        self.seconds: dict[str, float] = defaultdict(float)
        self.phase = "other"
        self._mark = None
        self._pending: deque = deque()  # (phase, its first event, the event after it)

    def start(self) -> None:
        """Forget everything; the time from here on is `other`."""
        self.seconds.clear()
        self._pending.clear()
        self.phase, self._mark = "other", self._now()

    def enter(self, phase: str) -> str:
        """End the running phase and begin `phase`; returns the one that ended."""
        ended, mark = self.phase, self._now()
        if self._mark is not None:
            self._add(ended, self._mark, mark)
        self.phase, self._mark = phase, mark
        return ended

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """`phase` inside the block, afterwards the one before it again."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def take(self) -> dict[str, float]:
        """{phase: seconds} since the last call."""
        self.enter(self.phase)
        if self.on_gpu:
            self._mark.synchronize()
            self._fold(lambda event: True)
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken

    def settle(self) -> None:
        """Add up what the device has passed, so that a long stretch without a log holds few events."""
        if self.on_gpu:
            self._fold(lambda event: event.query())

    def _now(self):
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _add(self, phase: str, begin, end) -> None:
        if self.on_gpu:
            self._pending.append((phase, begin, end))
        else:
            self.seconds[phase] += end - begin

    def _fold(self, has_passed: Callable) -> None:
        while self._pending and has_passed(self._pending[0][2]):
            phase, begin, end = self._pending.popleft()
            self.seconds[phase] += begin.elapsed_time(end) / 1e3  # milliseconds
