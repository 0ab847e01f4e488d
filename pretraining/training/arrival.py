"""Train while the data is prepared: rank 0 starts the preparation, and all ranks wait together for text."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pretraining.data.arriving import POLL_SECONDS, ArrivingSplit, arrived_path, read_arrived
from pretraining.data.order import ALL_SAMPLES, Order
from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.prepared import (
    ArrivingData,
    PreparedData,
    is_prepared,
    open_prepared,
    preparing_command,
)
from pretraining.errors import UserError
from pretraining.recipe import Recipe
from pretraining.recipe.budget import Progress
from pretraining.recipe.fixed_keys import changes_of_run
from pretraining.runtime.exit_codes import variables_of_a_helper
from pretraining.runtime.heartbeat import long_work, process_fields, work_done
from pretraining.runtime.installation import REPOSITORY
from pretraining.runtime.process_group import from_rank_0
from pretraining.runtime.processes import error_line
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.stopping import StopRequests

LOG_NAME = "preparation.log"
LOOKS_AT_WORK_SECONDS = 5.0
ENDING_SECONDS = 15.0
AGAIN = "; once that is mended, the same command goes on"


class Arrival:
    """The data of a run that trains while it is prepared; with finished data, nothing that costs anything.

    Every rank makes one, and calls its methods together with the others. Only rank 0 has a preparation.
    """

    def __init__(self, recipe: Recipe, data_root: Path | str, run: RunFolder, stop: StopRequests):
        self.recipe, self.data_root, self.run, self.stop = recipe, Path(data_root), run, stop
        self._folder = self.data_root / recipe.data.name
        self._preparation: Alongside | None = None
        self._order: Order | None = None
        self._ready = ALL_SAMPLES
        self._shown: set[str] = set()
        self._checked = False
        self._worked = (0.0, 0.0)
        """When the preparation was last looked at, and its seconds of work then."""

    def open(self, resume: str = "never", allowed: Sequence[str] = ()) -> PreparedData:
        """Start the preparation, and open the data once tokenizer, validation and a first block are there.

        resume, allowed: `--resume` and `--allow_change`.

        Raises `UserError`: the folder holds the run of another recipe, or the preparation has failed.
        `SystemExit`: the run was asked to stop.
        """
        if resume != "never":
            # looked at again with the data; here, so that nobody waits for text to be refused
            from_rank_0(lambda: changes_of_run(self.run.path, self.recipe.to_dict(), allowed))
        if from_rank_0(lambda: is_prepared(self.recipe, self.data_root)):
            from_rank_0(lambda: self._show(f"{self._folder} is prepared: --while_preparing changes nothing"))
            return self._open_finished()

        def start() -> None:
            self._stale = _written(arrived_path(self._folder))
            command = preparing_command(self.recipe, self.data_root)
            self._preparation = Alongside(command, self.run.path / LOG_NAME)
            print(f"preparing {self._folder} beside the run; its output: {self._preparation.log}", flush=True)

        from_rank_0(start)
        with long_work():
            while (found := from_rank_0(self._first_look)) is None:
                if self.stop.agreed():
                    last = from_rank_0(lambda: (self.run.last_event("stopped") or {}).get("step", 0))
                    self.stop.leave_if_agreed(last)
                time.sleep(POLL_SECONDS)
        return ArrivingData.of(self.recipe, self.data_root, found) if found else self._open_finished()

    def _open_finished(self) -> PreparedData:
        return open_prepared(self.recipe, self.data_root).for_run(self.recipe)

    def _show(self, line: str) -> None:
        if line not in self._shown:
            self._shown.add(line)
            print(line, flush=True)

    def _first_look(self) -> dict | None:
        """Return the manifest of what is there, {} if all is there, None if it is too little to begin with."""
        assert self._preparation is not None
        if self._preparation.has_ended():
            if (failure := self._preparation.failure()) is not None:
                raise UserError(failure + AGAIN)
            return {}
        # What a killed preparation has left counts only after this one has looked at it.
        if _written(arrived_path(self._folder)) == self._stale:
            return None
        found = read_arrived(self._folder)
        return found if found and found["splits"]["train"]["tokens"] > self.recipe.sequence_length else None

    def follow(self, dataset: PackedDataset, progress: Progress) -> None:
        """Wait for the first step's samples of this dataset, and from now on for those of every other step."""
        if not isinstance(dataset.splits[0], ArrivingSplit):
            return
        self._order, self._ready, self._progress = dataset.order, 0, progress
        if not self.wait_for(progress.step):
            self.stop.leave_if_agreed(progress.step)

    def wait_for(self, step: int, samples_ahead: int = 0) -> bool:
        """Wait until the samples of the step after `step` can be read; False if the run is asked to stop.

        Costs nothing as long as they are known to be there. Else the ranks ask rank 0 together, so that they wait, stop
        and fail together.

        samples_ahead: how many samples behind the step the readers look at.

        Raises `UserError`: the preparation has failed, or its text is not enough for the run.
        """
        if self._order is None:
            return True
        # on rank 0, also while there is still something to read
        if self._preparation is not None and (failure := self._preparation.failure()) is not None:
            self._show(f"{failure}; training goes on with what is there")
        last = self._progress.samples_at(self._progress.last_step)
        samples = min(self._progress.samples_at(step + 1) + samples_ahead, last)
        if samples <= self._ready:
            return True
        began, waits = time.monotonic(), False
        try:
            with long_work():
                while True:
                    self._ready, end, works = from_rank_0(lambda: self._look(samples, step))
                    if works:
                        work_done()
                    if samples <= self._ready:
                        return True
                    if end is not None:
                        raise UserError(end)
                    waits = True
                    if self.stop.agreed():
                        return False
                    time.sleep(POLL_SECONDS)
        finally:
            if waits and self._preparation is not None:
                seconds = round(time.monotonic() - began, 3)
                self.run.add_event("waited_for_data", step=step, seconds=seconds)

    def _look(self, samples: int, step: int) -> tuple[int, str | None, bool]:
        """Look on rank 0: samples that can be read, why no more will come, whether it has moved since the last look."""
        assert self._order is not None and self._preparation is not None
        # In this order: what it finishes after the first question is seen by the second.
        ended, failure = self._preparation.has_ended(), self._preparation.failure()
        ready = self._order.ready_until()
        if ready >= ALL_SAMPLES and not self._checked:
            self._checked = True
            # Whether the text is enough for the run, as for any finished data.
            self._open_finished()
        if samples > ready and "wait" not in self._shown:
            self._shown.add("wait")
            words = f"step {step + 1:,} reads up to sample {samples:,}, and {ready:,} can be read so far"
            print(f"waiting for data: {words}; {self._preparation.log} shows the preparation", flush=True)
        if ended and failure is None and ready < samples:
            failure = (
                f"{self._folder}: its preparation has ended, and it is not there; type the same command again"
            )
        elif failure is not None:
            failure += AGAIN
        works, (at, seconds) = ready > self._ready, self._worked
        if not works and time.monotonic() - at >= LOOKS_AT_WORK_SECONDS:
            # it may have used the processor since it was last asked
            self._worked = time.monotonic(), self._preparation.seconds_worked()
            works = self._worked[1] != seconds
        return ready, failure, works

    def close(self) -> None:
        """End the preparation; print how it goes on if it is not done."""
        if self._preparation is None:
            return
        if not self._preparation.has_ended():
            print(f"{self._folder} is not whole: {self._preparation.command} goes on with it", flush=True)
        self._preparation.end()
        if not self.run.recipe.exists():
            self._preparation.log.unlink(missing_ok=True)  # a refused run leaves nothing


def _written(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


class Alongside:
    """`data_prep.py` beside a run, with which it ends. `command` is as it is typed; what it prints goes to `log`."""

    def __init__(self, command: str, log: Path):
        self.command, self.log = command, log
        options = shlex.split("--recipe" + command.partition("--recipe")[2])
        words = [sys.executable, str(REPOSITORY / "data_prep.py"), *options]
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
        """Say that it failed and why, in its own words; None while it works, and after it has done all."""
        code = self._process.poll()
        if code and self._failure is None:
            self._output.seek(0)
            lines = [line.strip() for line in self._output.read().splitlines() if line.strip()]
            how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            # without an error of ours the last line is that of a traceback
            self._failure = f"the preparation failed: {error_line(lines) or '; '.join([how, *lines[-1:]])}"
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
