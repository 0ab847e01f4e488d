"""Handle a run that its launcher starts again: the command is the same, but the run must not begin anew."""

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

from pretraining.runtime.exit_codes import STOPPED, SUPERVISOR, supervisor_file, tell_exit_code
from pretraining.runtime.run_folder import STARTS, RunFolder, read_events

RESTART = "PRETRAINING_RESTART"
"""Variable: how many times a supervisor has started this run again."""
STARTED = "PRETRAINING_STARTED"
"""Variable: Unix seconds at which the supervisor began. The run's time limit counts from then."""
_TORCHRUN_RESTART = "TORCHELASTIC_RESTART_COUNT"
_TORCHRUNS = ("torchrun", "torch.distributed.run", "accelerate")


def launch_details() -> dict:
    """Return the details for the event of a start: {"launch": the same in all restarts, "restart": their number}.

    Empty if nothing restarts the run.
    """
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor:
        # without the host: after the loss of one, rank 0 may be on another
        return {"launch": f"{supervisor}:{os.environ.get(STARTED, '')}", "restart": _restarts()}
    if _TORCHRUN_RESTART in os.environ:
        # torchrun's process starts every attempt, so its id is the same in all of them
        return {"launch": f"{socket.gethostname()}:{os.getppid()}", "restart": _restarts()}
    return {}


def resume_after_restart(run: RunFolder, resume: str) -> str:
    """Return `--resume` as typed, or `auto` if this launch has begun the run before and now starts it again."""
    launches = [(run.last_event(kind) or {}).get("launch") for kind in STARTS]
    # the launch of the newest event counts: a run of that name from an earlier launch must not be continued unasked
    return "auto" if _restarts() and launch_details()["launch"] in launches else resume


def leave_again_if_stopped(run: RunFolder) -> None:
    """Raise `SystemExit(75)` if this launch was asked to stop before."""
    # `torchrun --max-restarts` takes exit code 75 for a crash, and starts the run again
    if not _restarts():
        return
    rows = [*read_events(run.events), *read_events(run.node_events)]
    stops = [row for row in rows if row.get("event") == "stopped"]
    # a torchrun that gets SIGTERM ends with its ranks; if it starts them again, it sent SIGTERM because a node came
    stopped = [row.get("launch") for row in stops if row.get("reason") != signal.SIGTERM.name]
    if launch_details()["launch"] not in stopped:
        return
    tell_exit_code(STOPPED)
    if _TORCHRUN_RESTART in os.environ:
        # asked to end; else it starts this rank as often as `--max-restarts` allows
        launcher = os.getppid()
        with suppress(OSError):  # another system, or it has ended
            words = Path(f"/proc/{launcher}/cmdline").read_text().split("\0")
            if any(Path(word).name in _TORCHRUNS for word in words):
                os.kill(launcher, signal.SIGTERM)
    raise SystemExit(STOPPED)


def starts_again_after_a_signal() -> bool:
    """Return whether a signal may come from a torchrun that starts the ranks again, because a node has come or gone."""
    stop = supervisor_file("STOP")
    return _TORCHRUN_RESTART in os.environ and not (stop and stop.exists())


def _restarts() -> int:
    """Count the restarts by torchrun and by a supervisor above it."""
    return sum(int(os.environ.get(name, "0")) for name in (RESTART, _TORCHRUN_RESTART))
