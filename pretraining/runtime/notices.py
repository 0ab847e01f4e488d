"""Send a notice of a run's events to the user's command or webhook (`monitors.notify`), behind training.

A thread sends them, tries again a few times, and gives up: neither a slow nor a failing receiver holds up a run or ends
it. events.jsonl says what became of each notice: `notified` or `notify_failed`.
"""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pretraining.errors import GaveUp, UserError
from pretraining.outside.masking import masked
from pretraining.recipe.sections import Notify
from pretraining.runtime.exit_codes import variables_of_a_helper
from pretraining.runtime.process_group import from_rank_0
from pretraining.runtime.run_folder import STARTS, RunFolder, read_events, unix_seconds

EVENTS = {
    "started": ("start",),
    "continued": ("resume",),
    "stopped": ("stopped",),
    "hang": ("hang",),
    "rollback": ("rollback",),
    "gave_up": ("gave_up",),
    "failed": ("failed",),
    "finished": ("end",),
    "alert": (
        *("spike", "non_finite", "gradient_explosion", "plateau", "starved_experts"),
        *("straggler", "low_use", "early_stop", "save_failed", "upload_failed", "export_upload_failed"),
        "checkpoint_passed_over",
    ),
}
"""{entry of `monitors.notify.on`: the kinds of rows of events.jsonl that it means}"""

WORDS = {
    "start": "started",
    "resume": "continued from {checkpoint}",
    "stopped": "stopped at step {step}: {reason}; the same command without --resume continues",
    "hang": "made no progress for {minutes} minutes at step {step}: {who}",
    "rollback": "rolled back to step {to_step} ({rollback} of {of}): {why}",
    "gave_up": "gave up at step {step}: {why}",
    "failed": "failed: {reason}",
    "end": "finished: validation loss {eval_loss:.4f}",
    "low_use": "has had {of} {value} for {steps} steps at step {step}, below {least}",
}
LAST = ("gave_up", "hang")  # events after which a process ends without another word: the notice is waited for

ATTEMPTS = 3
PAUSE_SECONDS = 1.0  # before the second attempt; before the third, four times that
WEBHOOK_SECONDS = 10.0
COMMAND_SECONDS = 30.0
LONGEST_END_SECONDS = 20.0  # what the end of a run waits for its last notices
MOST_WAITING = 100
_VARIABLE = re.compile(r"\$\{?(\w+)")
STARTED_TOGETHER_SECONDS = 2.0  # ranks that fail for one reason fail within this time: one of them reports it


class Failed(Exception):
    """A receiver did not take a notice, for the reason in the text."""


class Notices:
    """Queue the wanted events of a run, and send them one after the other in a thread."""

    def __init__(self, run: RunFolder, name: str, settings: Notify) -> None:
        """name: the run's, for the messages."""
        self.run, self.name = run, name
        self.kinds = {kind for wanted in settings.on for kind in EVENTS[wanted]}
        self.ways: dict[str, Callable[[dict], None]] = {}
        if settings.command is not None:
            self.ways["command"] = lambda notice: run_command(settings.command, notice)
        if settings.webhook_env is not None:
            self.ways["webhook"] = lambda notice: post(settings.webhook_env, notice)
        self._waiting: queue.Queue[dict] = queue.Queue(MOST_WAITING)
        threading.Thread(target=self._send_all, name="notices", daemon=True).start()

    def add(self, row: dict) -> None:
        """Queue a row of events.jsonl if the recipe asks for its kind."""
        if row["event"] not in self.kinds:
            return
        try:
            self._waiting.put_nowait(notice_of(self.name, self.run, row))
        except queue.Full:
            self._note("notify_failed", of=row["event"], reason=f"{MOST_WAITING} notices are waiting")
        if row["event"] in LAST:
            self.wait(LONGEST_END_SECONDS)

    def wait(self, seconds: float) -> None:
        """Wait until all notices are sent or given up, but no longer than this."""
        until = time.monotonic() + seconds
        while self._waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.02)

    def _send_all(self) -> None:
        while True:
            notice = self._waiting.get()
            for way, send in self.ways.items():
                of = {"of": notice["event"], "by": way}
                for attempt in range(1, ATTEMPTS + 1):
                    try:
                        send(notice)
                    except Failed as failure:
                        reason = " ".join(str(failure).split())[:300]
                    except Exception as error:  # whatever it is, training goes on
                        reason = type(error).__name__
                    else:
                        self._note("notified", **of, attempts=attempt)
                        break
                    if attempt < ATTEMPTS:
                        time.sleep(PAUSE_SECONDS * 4 ** (attempt - 1))
                else:
                    self._note("notify_failed", **of, attempts=ATTEMPTS, reason=reason)
            self._waiting.task_done()

    def _note(self, kind: str, **details: object) -> None:
        # the folder may be gone, or its disk full: that is not ours to report
        with suppress(OSError):
            if self.run.path.is_dir():
                self.run.add_event(kind, **details)


@contextmanager
def notices(run: RunFolder, name: str, settings: Notify | None) -> Iterator[None]:
    """Send notices of the events inside the block. What it raises, a run that has begun journals as `failed`.

    Raises `UserError`: the variable of the webhook is not set on rank 0, or holds no address; every rank raises it.
    """
    if settings is None:
        yield
        return
    if settings.webhook_env is not None:
        from_rank_0(lambda: read_webhook(settings.webhook_env) and None)
    began, sender = time.time(), Notices(run, name, settings)
    run.listeners.append(sender.add)
    try:
        yield
    except Exception as error:
        # gave_up is an event of its own
        if not isinstance(error, GaveUp):
            if os.environ.get("RANK", "0") != "0":
                time.sleep(STARTED_TOGETHER_SECONDS)
            # this start has opened its folder, and no other rank has reported a failure of it; times of events are
            # whole seconds
            rows = read_events(run.events)
            kinds = {row["event"] for row in rows if unix_seconds(row["time"]) >= int(began)}
            if kinds & {*STARTS} and "failed" not in kinds:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                reason = str(error) if isinstance(error, UserError) else reason
                with suppress(OSError):
                    run.add_event("failed", reason=reason[:300])
        raise
    finally:
        sender.wait(LONGEST_END_SECONDS)
        run.listeners.remove(sender.add)


def notice_of(name: str, run: RunFolder, row: dict) -> dict:
    """Return what a receiver gets: Slack and Teams show its `text`, Discord its `content`, both are the `message`."""
    try:
        words = WORDS[row["event"]].format_map(row)
    except (KeyError, ValueError):  # an event of another kind, or without one of its usual details
        words = row["event"].replace("_", " ")
        words += f" at step {row['step']}" if "step" in row else ""
        words += f": {row['reason']}" if "reason" in row else ""
    message = f"{name} {words} ({socket.gethostname()}, {run.path.absolute()})"
    return {
        "event": next(wanted for wanted, kinds in EVENTS.items() if row["event"] in kinds),
        "run": name,
        "folder": str(run.path.absolute()),
        "host": socket.gethostname(),
        **dict.fromkeys(("message", "text", "content"), message),
        "details": row,
    }


def run_command(command: str, notice: dict) -> None:
    """Run a shell command; it gets the notice as JSON on stdin, its main parts as variables. Raises `Failed`."""
    variables = {f"PRETRAINING_{key.upper()}": notice[key] for key in ("event", "run", "folder", "message")}
    settings: dict = {
        "text": True,
        "errors": "replace",
        "shell": True,
        "env": {**variables_of_a_helper(), **variables},
    }
    # not a pipe, which a process that the command leaves behind would keep open
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        files = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": stderr}
        # a session of its own: signals that launchers send to the run's processes are not for it
        process = subprocess.Popen(command, start_new_session=True, **settings, **files)
        try:
            process.communicate(json.dumps(notice, default=str) + "\n", timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise Failed(f"did not end within {COMMAND_SECONDS:g} s") from None
        if process.returncode:
            stderr.seek(0)
            # wget, among others, repeats the address, and the variable with it may have any name
            complaint = masked(stderr.read(), _VARIABLE.findall(command)).strip()[-200:]
            raise Failed(f"exit code {process.returncode} {complaint}")


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for an error: urllib would ask there without the notice, and count it as sent."""

    def redirect_request(self, *_: Any) -> None:
        return None


def post(variable: str, notice: dict) -> None:
    """Post the notice as JSON to the address in a variable; raises `Failed`, which does not repeat the address."""
    try:
        address = read_webhook(variable)
    except UserError as error:  # another host's environment than rank 0's
        raise Failed(str(error)) from None
    headers = {"Content-Type": "application/json", "User-Agent": "pretraining-recipes"}
    request = urllib.request.Request(address, json.dumps(notice, default=str).encode(), headers)
    try:
        with urllib.request.build_opener(NoRedirect).open(request, timeout=WEBHOOK_SECONDS):
            return
    except urllib.error.HTTPError as error:
        moved = ", a redirect; give the address that it leads to" if error.code // 100 == 3 else ""
        raise Failed(f"HTTP {error.code}{moved}") from None
    except (OSError, ValueError) as error:
        # some errors repeat the address, of which a part is often a secret
        reason = getattr(error, "reason", None) or type(error).__name__
        raise Failed(str(reason).replace(address, "***")) from None


def read_webhook(variable: str) -> str:
    """Return the address in an environment variable; `UserError`, which does not repeat it, if it holds none."""
    address = os.environ.get(variable, "")
    if not re.fullmatch(r"https?://[^\s/]\S*", address):
        what = "holds no http address" if address else "is not set"
        remedy = "export it where train.py is started, or --set monitors.notify=null"
        raise UserError(f"monitors.notify.webhook_env: the variable {variable} {what}; {remedy}")
    return address
