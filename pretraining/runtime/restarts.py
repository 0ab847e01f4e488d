"""A run that its launcher starts again: what was typed once must not begin it anew each time."""

import os
import socket

from pretraining.runtime.exit_codes import STOPPED, SUPERVISOR, tell_exit_code
from pretraining.runtime.run_folder import RunFolder

RESTART = "PRETRAINING_RESTART"
"""Variable: how often a supervisor has started this run again."""
STARTED = "PRETRAINING_STARTED"
"""Variable: Unix time at which the supervisor began; the run's time limit counts from there."""
_TORCHRUN_RESTART = "TORCHELASTIC_RESTART_COUNT"


def launch_details() -> dict:
    """For the event of a start: {"launch": what all restarts share, "restart": how many there were}.

    Empty where nothing restarts the run.
    """
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor:
        return {"launch": f"{socket.gethostname()}:{supervisor}", "restart": _restarts()}
    if _TORCHRUN_RESTART in os.environ:
        return {"launch": f"{socket.gethostname()}:{os.getppid()}", "restart": _restarts()}
    return {}


def resume_after_restart(run: RunFolder, resume: str) -> str:
    """`--resume` as typed, or `auto` where this launch has opened the run already and now starts it again."""
    launches = [(run.last_event(kind) or {}).get("launch") for kind in ("start", "resume")]
    return "auto" if _restarts() and launch_details()["launch"] in launches else resume


def leave_again_if_stopped(run: RunFolder) -> None:
    """Raise `SystemExit(75)` where this launch was asked to stop: `torchrun --max-restarts` takes that for a crash."""
    stopped = run.last_event("stopped") or {}
    if _restarts() and stopped.get("launch") == launch_details()["launch"]:
        tell_exit_code(STOPPED)
        raise SystemExit(STOPPED)


def _restarts() -> int:
    """Restarts by torchrun and by a supervisor above it."""
    return sum(int(os.environ.get(name, "0")) for name in (RESTART, _TORCHRUN_RESTART))
