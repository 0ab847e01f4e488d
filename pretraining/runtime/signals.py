"""Signals that ask a run to stop: noticed at once, whatever the main thread waits for."""

import os
import signal
import threading
import time
from collections.abc import Callable

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
INSISTING = (signal.SIGTERM, signal.SIGINT)
# Ctrl-C reaches a rank from the terminal and again through its launcher: within this time it is one request.
SAME_REQUEST_SECONDS = 2.0


class SignalListener:
    """Remembers the first signal that asked to stop; a second one, seconds later, ends the process at once.

    Python runs handlers between two instructions of the main thread, which may sit in a collective for minutes.
    A thread reads the signals' numbers from a pipe instead.

    in_vain: asked at a SIGTERM; whether no stop can be agreed on, so that the process ends at once.
    """

    def __init__(self, in_vain: Callable[[], bool] = lambda: False):
        self.in_vain = in_vain
        self.received: int | None = None
        self._first_at = 0.0
        self._read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        for number in ASKING:
            signal.signal(number, _wake_the_listener)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def _listen(self) -> None:
        while numbers := os.read(self._read_end, 64):
            for number in numbers:
                if number in ASKING:
                    self._note(number)

    def _note(self, number: int) -> None:
        if number == signal.SIGTERM and self.in_vain():
            os._exit(128 + number)
        if self.received is None:
            self.received, self._first_at = number, time.monotonic()
        elif number in INSISTING and time.monotonic() - self._first_at > SAME_REQUEST_SECONDS:
            os._exit(128 + number)


def ignore_in_worker() -> None:
    """For a data worker: launchers and terminals signal it too, and the rank would die of its death.

    It ends with its rank, which torch's workers watch.
    """
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)


def _wake_the_listener(number, frame) -> None:
    """Nothing: the pipe has been written to before Python calls this."""


def _hold() -> None:
    """A signal that meets the new process is delivered once `_forget` is done."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


def _forget() -> None:
    """A forked process must not write into its parent's pipe."""
    if signal.getsignal(signal.SIGTERM) is _wake_the_listener:
        signal.set_wakeup_fd(-1)
        for number in ASKING:
            signal.signal(number, signal.SIG_DFL)
    _release()
