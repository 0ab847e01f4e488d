"""Keep the place where the torchruns of several nodes meet, on a machine that may not be lost with one of them.

    python -m pretraining.meeting_point --port 29500

With `--rdzv_endpoint` on a training node, all nodes wait as long as that one is away. It trains nothing and needs no
GPU. Runs with different `--rdzv_id` may share it.
"""

import argparse
import contextlib
import json
import os
import socket
import sys
import time

from pretraining.command_line import OneLineParser, positive_integer
from pretraining.errors import UserError, one_line_errors, reason_of

EXAMPLES = """examples:
  python -m pretraining.meeting_point
  python -m pretraining.meeting_point --port 29500"""

PORT = 29500
FORGET_SECONDS = 20.0
"""A rendezvous that is over is forgotten if nobody has changed it for so long: each node that takes part changes it
every five seconds."""
_LOOK_SECONDS = 1.0


class MeetingPoint:
    """The store in which nodes meet. A command that comes again meets anew, whatever became of the one before."""

    def __init__(self, port: int, forget_seconds: float = FORGET_SECONDS) -> None:
        """Raises `UserError` if the port is taken, or none."""
        if port > 65535:
            raise UserError(f"--port {port}: is no port; they end at 65535")
        from torch.distributed import DistNetworkError, TCPStore  # only here: `--help` answers at once

        try:
            self.store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
        except DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise UserError(f"port {port} is taken on this machine; choose another by --port") from error
        self.forget_seconds = forget_seconds
        self._seen: dict[str, tuple[bytes, float]] = {}

    def look(self) -> list[str]:
        """Forget each rendezvous that is over and has not changed for long; return their names."""
        from pretraining.upstream.torchrun import closed_meetings, forget_meeting

        now, forgotten, closed = time.monotonic(), [], closed_meetings(self.store)
        self._seen = {key: seen for key, seen in self._seen.items() if key in closed}
        for key, state in closed.items():
            known, since = self._seen.setdefault(key, (state, now))
            if known != state:
                self._seen[key] = (state, now)
            elif now - since >= self.forget_seconds:
                forget_meeting(self.store, key, state)
                forgotten.append(key)
        return forgotten


def open_command(words: list[str], patience: float = 2 * FORGET_SECONDS) -> list[str]:
    """Return a torchrun command as it is, or with an id that all nodes find alike if its rendezvous stays over.

    A store of the run itself ends with its torchruns, and a meeting point forgets what is over. That of another
    program at this place does not, and turns the id away as long as it lives. patience: seconds without a change after
    which what is over stays over; a meeting point takes half as long.
    """
    from pretraining.upstream.torchrun import Meeting

    meeting, before, since = Meeting(words), {}, time.monotonic()
    while meeting.is_in_a_store:
        try:
            over = meeting.over()
        except RuntimeError as error:  # no store: the torchrun that comes first makes one
            reason = reason_of(error)
            print(f"meeting_point: {reason}; the command starts as it is", file=sys.stderr, flush=True)
            return words
        if not over:
            return words
        if over != before:
            before, since = over, time.monotonic()
        if time.monotonic() - since >= patience:
            return meeting.with_open_id(len(over))
        time.sleep(_LOOK_SECONDS)
    return words


def main(arguments: list[str] | None = None) -> None:
    what = "Keep the place where the torchruns of several nodes meet (docs/fleet.md). Ctrl-C ends it."
    parser = OneLineParser("python -m pretraining.meeting_point", description=what, epilog=EXAMPLES)
    parser.add_argument("--port", type=positive_integer, default=PORT, help=f"(default: {PORT})")
    # asked by a supervisor before it starts a torchrun again
    parser.add_argument("--open", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.open:
        # before torch is imported, which would print pages of C++ frames about a store that does not answer
        os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
        return print(json.dumps(open_command(options.open)))
    point = MeetingPoint(options.port)
    print(f"on every node: torchrun --rdzv_endpoint={socket.gethostname()}:{options.port} ...", flush=True)
    while True:
        time.sleep(_LOOK_SECONDS)
        point.look()


if __name__ == "__main__":
    with one_line_errors(), contextlib.suppress(KeyboardInterrupt):
        main()
