"""The stability monitor: judges every step, alike on all ranks, and says what the recipe's policy makes of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from pretraining.runtime.run_folder import RunFolder
from pretraining.training.alerts import advice
from pretraining.training.loss_watch import LossWatch
from pretraining.training.nonfinite import NonFiniteGuard
from pretraining.training.plateau import Plateau
from pretraining.training.schedule import apply_schedule_now, step_schedule
from pretraining.training.spikes import SpikeScore


@dataclass(frozen=True)
class Finding:
    """Why training was left."""

    step: int
    sentence: str


class StabilityMonitor(TrainerCallback, ExportableState):
    """Loss spikes, steps that are not finite, exploding gradients and plateaus: one event each in events.jsonl.

    Its decisions are functions of losses that are means over all ranks and of its own state, which checkpoints
    keep: every rank decides alike, and a resumed run as the unbroken one. A policy that leaves training (rollback,
    stop) sets `finding`; the caller acts on it once `train` has returned.
    """

    def __init__(self, run: RunFolder, monitors: dict, origins: Callable[[int], dict]):
        """origins: from an optimizer step (counted from 1) to what its samples are, for the events."""
        self.run, self.settings, self.origins = run, monitors["spikes"], origins
        self.policy = self.settings["policy"]
        self.watch = LossWatch(refuses=self.policy == "skip")
        self.loss_course = SpikeScore(self.settings["window"])
        self.norm_course = SpikeScore(self.settings["window"], smallest_scale=0.1)
        self.plateau = Plateau(monitors["plateau_steps"])
        self.in_spike = self.norm_in_spike = False
        self.non_finite_streak = self.refused_steps = 0
        self.finding: Finding | None = None
        self.alerted_step: int | None = None

    def on_train_begin(self, args, state, control, optimizer, lr_scheduler, **kwargs):
        self.guard = NonFiniteGuard(optimizer)
        name = type(self).__name__
        self._restore(state.stateful_callbacks.get(name))
        state.stateful_callbacks[name] = self.state()  # an older checkpoint lacks it
        apply_schedule_now(lr_scheduler)
        self._set_limit()

    def hear_gradient_norm(self, norm) -> None:
        """Of the step, before clipping: before it is made, and by DeepSpeed after it."""
        self.guard.hear_gradient_norm(norm)

    def on_step_end(self, args, state, control, optimizer, lr_scheduler, **kwargs):
        if getattr(optimizer, "step_was_skipped", False):
            # By ZeRO or fp16: the Trainer has not moved it on, but the rate belongs to the step.
            step_schedule(lr_scheduler)
        self._judge(self.watch.last_loss(), self.guard.refused_last_step(), state)
        self._set_limit()
        if self.finding is not None:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            logs["stability/refused_steps"] = self.refused_steps
            self._judge_norm(logs.get("grad_norm"), state)

    def _judge(self, loss: float, refused: bool, state) -> None:
        score, began = self.loss_course.score(loss), not self.in_spike
        expected = self.loss_course.expected
        is_spike = not loss <= self.watch.limit
        finite = math.isfinite(loss) and (not refused or (is_spike and self.policy == "skip"))
        self.refused_steps += refused
        self.non_finite_streak = 0 if finite else self.non_finite_streak + 1
        self.in_spike = is_spike
        self.loss_course.add(loss, is_spike or not finite)
        facts = {"loss": loss, "expected": expected, "applied": not refused}
        if not finite:
            self._judge_non_finite(facts, state)
        elif is_spike and began:
            self._tell("spike", state, score=score, **facts)
            self._leave(state, f"the loss is {loss:.4g}, {score:.1f} deviations above {expected:.4g}")
        if self.plateau.shows(state.global_step, self.loss_course.expected):
            self._tell("plateau", state, **facts, since_step=self.plateau.best_step)

    def _judge_non_finite(self, facts: dict, state) -> None:
        if self.non_finite_streak == 1:
            self._tell("non_finite", state, **facts)
        if self.non_finite_streak >= self.settings["non_finite_streak"]:
            self._leave(
                state,
                f"{self.non_finite_streak} steps in a row had a loss or gradients that are not finite",
                policies=("skip", "rollback", "stop"),
            )

    def _judge_norm(self, norm: float | None, state) -> None:
        if norm is None or not math.isfinite(norm):
            return  # told as non-finite
        score = self.norm_course.score(norm)
        exploded, expected = score > self.settings["score"], self.norm_course.expected
        self.norm_course.add(norm, exploded)
        if exploded and not self.norm_in_spike:
            self._tell("gradient_explosion", state, score=score, grad_norm=norm, expected=expected)
        self.norm_in_spike = exploded

    def _leave(self, state, why: str, policies: tuple[str, ...] = ("rollback", "stop")) -> None:
        if self.policy in policies:
            self.finding = Finding(state.global_step, f"step {state.global_step}: {why}")

    def _tell(self, kind: str, state, score: float | None = None, **facts) -> None:
        self.alerted_step = state.global_step
        if state.is_world_process_zero:
            score = {} if score is None else {"score": round(score, 2)}
            facts |= {"policy": self.policy, **self.origins(state.global_step), **advice(kind)}
            self.run.add_event(kind, step=state.global_step, **score, **facts)

    def _set_limit(self) -> None:
        self.watch.set_limit(self.loss_course.limit(self.settings["score"]))

    def state(self) -> dict:
        """What checkpoints keep of it."""
        counts = ("in_spike", "norm_in_spike", "non_finite_streak", "refused_steps")
        parts = {name: getattr(self, name).state() for name in ("loss_course", "norm_course", "plateau")}
        finding = None if self.finding is None else [self.finding.step, self.finding.sentence]
        counted = {name: getattr(self, name) for name in counts}
        return {"args": {}, "attributes": {**parts, **counted, "finding": finding}}

    def _restore(self, saved: dict | None) -> None:
        attributes = dict((saved or {}).get("attributes", {}))
        # Saved at the request to stop, before the caller could act on it: it will after the next step.
        finding = attributes.pop("finding", None)
        self.finding = None if finding is None else Finding(*finding)
        for name, value in attributes.items():
            part = getattr(self, name)
            part.restore(value) if hasattr(part, "restore") else setattr(self, name, value)
