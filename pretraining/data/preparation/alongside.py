"""Run the preparation of a recipe's data in a process of its own, which ends with this one."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from pretraining.data.prepared import preparing_command
from pretraining.recipe.recipe import Recipe
from pretraining.runtime.exit_codes import variables_of_a_helper
from pretraining.runtime.heartbeat import process_fields
from pretraining.schema import REPOSITORY

ENDING_SECONDS = 15.0


class Alongside:
    """`data_prep.py` beside a run. Whatever it prints goes to the file `log`."""

    def __init__(self, recipe: Recipe, data_root: Path, log: Path):
        self.command, self.log = preparing_command(recipe, data_root), log
        words = [sys.executable, str(REPOSITORY / "data_prep.py"), *shlex.split(self.command)[2:]]
        self._failure: str | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        # Kept open: the run's folder may be renamed (`--resume never`).
        self._output = log.open("w+")
        self._process = subprocess.Popen(
            [*words, "--beside_training"],
            # Its end is how the process notices that this one is gone, however it went.
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            env=variables_of_a_helper(),
            start_new_session=True,  # Ctrl-C is for the run
        )

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def failure(self) -> str | None:
        """Return why it failed, in its own words; None while it works, and after it has done all."""
        code = self._process.poll()
        if not code or self._failure is not None:
            return self._failure
        self._output.seek(0)
        lines = [line.strip() for line in self._output.read().splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        # without an error of ours the last line is that of a traceback
        self._failure = errors[-1] if errors else "; ".join([how, *lines[-1:]])
        return self._failure

    def seconds_worked(self) -> float:
        """Add up the processor time of its processes: what grows as long as it works."""
        ticks = 0
        for folder in Path("/proc").glob("[0-9]*"):
            # proc(5): from field 3 on, so the session is at 3, and user and system time at 11 and 12
            fields = process_fields(int(folder.name))
            if len(fields) > 12 and int(fields[3]) == self._process.pid:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """End it if it still works; what is finished is kept."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
