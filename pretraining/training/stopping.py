"""Stop a run on request: by a signal, a file, a time limit, a lost launcher, validations that do not improve.

The ranks agree after every step. The step after which they agree is saved, and the run ends with its exit code.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable

from transformers import TrainerCallback

from pretraining.recipe.sections import Evaluation
from pretraining.runtime.exit_codes import STOPPED, supervisor_file, tell_exit_code
from pretraining.runtime.failures import keep_end_by_launcher
from pretraining.runtime.metric_names import is_better, worst_value
from pretraining.runtime.process_group import from_rank_0, largest_over_ranks
from pretraining.runtime.processes import STARTED, SignalListener, launch_details, starts_again_after_a_signal
from pretraining.runtime.run_folder import RunFolder, first_step, read_events
from pretraining.training.ranks import launcher_is_gone, sibling_is_gone, started_by_deepspeed

NOT_ASKED, LAUNCHER_GONE, STOP_FILE, SUPERVISOR, TIME_LIMIT, A_SIGNAL = 0, 1, 2, 3, 4, 64
"""What the ranks agree on: the largest value counts. A signal's value is its number added to the last one."""
FILES_LOOKED_AT_EVERY_SECONDS = 1.0


class StopRequests:
    """Collect requests to stop this run, and let the ranks agree on them.

    run: its `STOP` file is a request. It is removed when the run stops.
    time_limit_hours: wall-clock hours after which the run stops itself; None for no limit.
    """

    def __init__(self, run: RunFolder, time_limit_hours: float | None) -> None:
        self._looked_at, self._seen, self._agreed = 0.0, NOT_ASKED, NOT_ASKED
        self.run = run

        def ends_with_the_others() -> bool:
            # If a rank has crashed, its launcher ends the others. An agreement with the crashed rank would never come.
            if self._agreed or not sibling_is_gone():
                return False
            keep_end_by_launcher(run)
            return True

        self.signals = SignalListener(in_vain=ends_with_the_others)
        # all starts under one supervisor share one time limit
        started = float(os.environ.get(STARTED, time.time()))
        self._until = None if time_limit_hours is None else started + time_limit_hours * 3600
        self._by_deepspeed = started_by_deepspeed()
        # the run's file is looked for once per disk, the supervisor's once per machine
        self._files = {run.stop_file: STOP_FILE} if run.disks.is_first else {}
        if os.environ.get("LOCAL_RANK", "0") == "0" and (path := supervisor_file("STOP")):
            self._files[path] = SUPERVISOR

    def agreed(self) -> bool:
        """Return whether all ranks stop now, the same on every rank. A collective, until they have agreed."""
        if self._agreed:
            return True
        if self.signals.received is not None:
            asked = A_SIGNAL + self.signals.received
        elif self._until is not None and time.time() >= self._until:
            asked = TIME_LIMIT
        else:
            if time.monotonic() - self._looked_at > FILES_LOOKED_AT_EVERY_SECONDS:
                self._looked_at = time.monotonic()
                found = [asks for path, asks in self._files.items() if path.is_file()]
                self._seen = max(found, default=LAUNCHER_GONE if launcher_is_gone() else NOT_ASKED)
            asked = self._seen
        self._agreed = largest_over_ranks(asked)
        return self._agreed != NOT_ASKED

    def leave_if_agreed(self, step: int) -> None:
        """If the ranks have agreed, record it once a disk, and raise `SystemExit(75)` on all. Not a collective."""
        if not self._agreed:
            return
        # if the launcher is gone, nobody asked: a supervisor starts the run again
        asked = self._agreed != LAUNCHER_GONE
        # torchrun starts the ranks again with other nodes: a supervisor must not take that for the end
        final = asked and not (self._agreed > A_SIGNAL and starts_again_after_a_signal())
        if self.run.disks.is_first:
            self.run.stop_file.unlink(missing_ok=True)
            unasked = {"asked": False} if supervisor_file("STOP") else {}  # which starts it again
            details = launch_details() if asked else unasked
            self.run.add_event("stopped", step=step, reason=self.reason, **details)
        if os.environ.get("RANK", "0") == "0":
            why = self.reason
            if self._by_deepspeed and why == signal.SIGTERM.name:
                why += " (deepspeed sends it for Ctrl-C too)"
            line = f"stopped at step {step}: {why}; the same command without --resume continues"
            print(line, file=sys.stderr, flush=True)
        if final:
            tell_exit_code(STOPPED)
        raise SystemExit(STOPPED)

    @property
    def reason(self) -> str:
        """The agreed reason, in words."""
        if self._agreed > A_SIGNAL:
            return signal.Signals(self._agreed - A_SIGNAL).name
        return {
            LAUNCHER_GONE: "its launcher is gone",
            STOP_FILE: "a stop file",
            SUPERVISOR: "its supervisor was asked to stop",
            TIME_LIMIT: "checkpoints.time_limit_hours",
        }[self._agreed]


class StoppingCallback(TrainerCallback):
    """Look for requests after every step. The step after which the ranks agree is saved, and is the last one."""

    def __init__(self, stop: StopRequests) -> None:
        self.stop = stop

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.stop.agreed():
            control.should_save = control.should_training_stop = True


class EarlyStopping(TrainerCallback):
    """Stop early by the rule of transformers' own callback, but from the logged validations alone.

    A run that was killed and started again therefore stops at the same step as an uninterrupted one. It does not go on
    from the checkpoint at which it had stopped. The numbers are the same on every rank, and so is the decision. A run
    that began at another's checkpoint counts its own validations alone: its parent's rate or data were others.

    section: its `patience` is the number of validations in a row that are not better in `metric` than the best before
    them by more than `min_improvement`; None never stops.
    """

    def __init__(self, run: RunFolder, section: Evaluation) -> None:
        self.run, self.section, self.metric = run, section, f"eval_{section.metric}"
        self.first_step = 0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if self.section.patience is not None:
            self.first_step = from_rank_0(lambda: first_step(read_events(self.run.events)))
        if self._is_over(state):
            control.should_training_stop = True

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        # after the last step training ends anyway: that is no early stop
        if state.global_step >= state.max_steps or not self._is_over(state):
            return
        control.should_training_stop = control.should_save = True
        if state.is_world_process_zero:
            values = self._values(state)
            best = best_step(values, self.metric)
            details = {"metric": self.section.metric, "best": values[best], "best_step": best}
            self.run.add_event(
                "early_stop", step=state.global_step, **details, patience=self.section.patience
            )

    def _values(self, state) -> dict[int, float]:
        """Return {step: value} of the validations so far, in order. A repeated one counts once."""
        before = self.first_step or -1  # the validation of step 0 is the run's own
        rows = (row for row in state.log_history if self.metric in row and row["step"] > before)
        return {row["step"]: row[self.metric] for row in rows}

    def _is_over(self, state) -> bool:
        if self.section.patience is None:
            return False
        values = self._values(state).values()
        worse = validations_without_gain(values, self.metric, self.section.min_improvement)
        return worse >= self.section.patience


def validations_without_gain(values: Iterable[float], metric: str, min_improvement: float) -> int:
    """Count how many of the last `values` in a row were no gain. A NaN never is, unless it is the first."""
    best, without_gain = worst_value(metric), -1
    for value in values:
        better = is_better(metric, value, best)
        gained = better and abs(value - best) > min_improvement
        # below 0: the first value always counts as a gain
        without_gain = 0 if gained or without_gain < 0 else without_gain + 1
        # as transformers does: a better value is the best, even if its gain is too small to count
        best = value if better else best
    return max(0, without_gain)


def best_step(values: dict[int, float], metric: str) -> int:
    """Return the step of the best value; the first one of equal values."""
    best, best_value = min(values), worst_value(metric)
    for step, value in values.items():
        if is_better(metric, value, best_value):
            best, best_value = step, value
    return best
