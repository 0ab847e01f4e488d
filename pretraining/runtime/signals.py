"""Notice the signals that ask a run to stop, at once, whatever the main thread waits for."""

import os
import signal
import threading
import time
from collections.abc import Callable

from pretraining.runtime.exit_codes import INTERRUPTED

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
INSISTING = (signal.SIGTERM, signal.SIGINT)
# Ctrl-C reaches a rank from the terminal and again through its launcher: within this time it is one request.
SAME_REQUEST_SECONDS = 2.0
_LAST_SECONDS = 5.0


class SignalListener:
    """Keep the first signal that asked to stop. A second one, seconds later, ends the process at once.

    in_vain: called at each SIGTERM. True if the ranks cannot agree on a stop any more: the process then ends at once.
    """

    def __init__(self, in_vain: Callable[[], bool] = lambda: False):
        self.in_vain = in_vain
        self.received: int | None = None
        self._read_end, write_end = os.pipe()
        # set_wakeup_fd refuses a descriptor that blocks
        os.set_blocking(write_end, False)
        for number in ASKING:
            signal.signal(number, _wake_the_listener)
        # Python runs handlers between two instructions of the main thread, which may wait in a collective for minutes.
        # The pipe is written to at once, and a thread reads it.
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def _listen(self) -> None:
        first_at = 0.0
        # each byte is one signal's number
        while numbers := os.read(self._read_end, 64):
            for number in numbers:
                if number not in ASKING:
                    continue
                if number == signal.SIGTERM and self.in_vain():
                    os._exit(128 + number)
                if self.received is None:
                    self.received, first_at = number, time.monotonic()
                elif number in INSISTING and time.monotonic() - first_at > SAME_REQUEST_SECONDS:
                    os._exit(128 + number)


def ignore_in_worker() -> None:
    """Make a data worker ignore the signals that ask to stop. It ends with its rank, which torch's workers watch."""
    for number in ASKING:
        # launchers and terminals signal workers too, and the rank fails if one of its workers dies
        signal.signal(number, signal.SIG_IGN)


def end_with_standard_input() -> None:
    """End this process as Ctrl-C would once its standard input ends: with the process that holds the other end."""

    def wait() -> None:
        while os.read(0, 64):
            continue
        # to that thread, so that it leaves a system call too
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(_LAST_SECONDS)
        # a library may look at no signal, or the process may have been started to ignore this one
        os._exit(INTERRUPTED)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def _wake_the_listener(number, frame) -> None:
    """Do nothing. Only a signal with a handler of Python's wakes the listener, through the pipe."""


def _hold() -> None:
    """Block the signals around a fork. The new process gets them once `_forget` is done."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


def _forget() -> None:
    """Restore the default handlers in a forked process, which must not write into its parent's pipe."""
    # the hooks of `register_at_fork` stay for ever, even if another handler has replaced ours
    if signal.getsignal(signal.SIGTERM) is _wake_the_listener:
        signal.set_wakeup_fd(-1)
        for number in ASKING:
            signal.signal(number, signal.SIG_DFL)
    _release()
