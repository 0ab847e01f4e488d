"""Judge every step in the same way on all ranks, and apply the recipe's policy.

`LossWatch` computes the mean loss of all ranks before the gradients. `NonFiniteGuard` prevents steps with gradients
that are not finite, at any ZeRO stage and without DeepSpeed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import GradientState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from pretraining.recipe.sections import Monitors
from pretraining.runtime.process_group import sum_over_ranks
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.gradients import loss_scale
from pretraining.training.schedule import apply_schedule_now, step_schedule
from pretraining.training.spikes import Plateau, SpikeScore, advice
from pretraining.upstream.deepspeed import drop_refused_sums

COUNTED = ("spikes", "non_finite_steps", "refused_steps")
"""Counted since the beginning of the run; every row has them."""
MOST_OVERFLOWS = 100
"""Steps in a row without a loss scale that fits: halving comes from 2^32 to 1 in fewer, each tried twice."""


@dataclass(frozen=True)
class Instability:
    """Why training was ended early."""

    step: int
    sentence: str


class StabilityMonitor(TrainerCallback, ExportableState):
    """Report loss spikes, steps that are not finite, exploding gradients and plateaus in events.jsonl, once each.

    Decisions depend only on mean losses of all ranks, rank 0's gradient norms and a state that checkpoints keep. So
    every rank decides the same, and a resumed run decides as an uninterrupted one. A policy that ends training
    (rollback, stop) sets `finding`. The caller acts on it after `train` has returned.
    """

    def __init__(self, run: RunFolder, monitors: Monitors, origins: Callable[[int], dict]) -> None:
        """origins: maps an optimizer step (counted from 1) to a description of its samples, for the events."""
        self.run, self.settings, self.origins = run, monitors.spikes, origins
        self.policy = self.settings.policy
        self.watch = LossWatch(refuses=self.policy == "skip")
        self.loss_course = SpikeScore(self.settings.window)
        # 0.1 is in log norm, as SMALLEST_SCALE is in log loss
        self.norm_course = SpikeScore(self.settings.window, smallest_scale=0.1)
        self.plateau = Plateau(monitors.plateau_steps)
        self.in_spike = self.norm_in_spike = False
        self.non_finite_streak = self.refused_steps = self.spikes = self.non_finite_steps = 0
        self.overflow_steps = self.overflow_streak = 0
        self.is_scaled, self.loss_scale = False, 1.0
        self.finding: Instability | None = None
        self.alerted_step: int | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: Any,
        optimizer: Any,
        lr_scheduler: Any,
        **kwargs: Any,
    ) -> None:
        self.guard = NonFiniteGuard(optimizer)
        self.is_scaled = args.fp16
        self.loss_scale = loss_scale(optimizer)
        name = type(self).__name__
        self._restore(state.stateful_callbacks.get(name))
        # the Trainer expects an entry when it saves, and an older checkpoint lacks it
        state.stateful_callbacks[name] = self.state()
        apply_schedule_now(lr_scheduler)
        self._set_limit()

    def on_gradient_norm(self, norm: Any) -> None:
        """Keep the step's norm before clipping. DeepSpeed reports it after the step, the Trainer before it."""
        self.guard.on_gradient_norm(norm)

    def on_step_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any,
        lr_scheduler: Any,
        **kwargs: Any,
    ) -> None:
        if getattr(optimizer, "step_was_skipped", False):
            # ZeRO or fp16 skipped it, so the Trainer did not advance the schedule. But the rate belongs to the step.
            step_schedule(lr_scheduler)
        self._judge(self.watch.last_loss(), self.guard.refused_last_step(), state)
        if self.is_scaled:
            self.loss_scale = loss_scale(optimizer)  # of the next step
        self._set_limit()
        if self.finding is not None:
            control.should_training_stop = True
            # the caller returns to an earlier checkpoint, or ends the run
            control.should_save = control.should_evaluate = False

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict, **kwargs: Any) -> None:
        if "loss" in logs:
            for name in COUNTED:
                logs[f"stability/{name}"] = getattr(self, name)
            if self.is_scaled:
                logs["stability/loss_scale"] = self.loss_scale
                logs["stability/overflow_steps"] = self.overflow_steps
            # the norm of a step that overflowed is none
            if not self.overflow_streak:
                self._judge_norm(logs.get("grad_norm"), state)

    def _judge(self, loss: float, refused: bool, state) -> None:
        score, began = self.loss_course.score(loss), not self.in_spike
        expected = self.loss_course.expected
        # not ">": a NaN counts as a spike
        is_spike = not loss <= self.watch.limit
        # the policy "skip" refuses a spike by NaN gradients: that refusal is no non-finite step
        finite = math.isfinite(loss) and (not refused or (is_spike and self.policy == "skip"))
        if self._overflowed(loss, refused and not finite):
            # the loss is as good as any; only its gradients, times the scale, did not fit into fp16
            finite = True
        self.refused_steps += refused
        self.non_finite_streak = 0 if finite else self.non_finite_streak + 1
        self.non_finite_steps += not finite
        self.in_spike = is_spike
        self.loss_course.add(loss, is_spike or not finite)
        facts = {"loss": loss, "expected": expected, "applied": not refused}
        if not finite:
            self._judge_non_finite(facts, state)
        elif is_spike and began:
            self.spikes += 1
            self._tell("spike", state, score=score, **facts)
            self._leave(state, f"the loss is {loss:.4g}, {score:.1f} deviations above {expected:.4g}")
        if self.plateau.shows(state.global_step, self.loss_course.expected):
            self._tell("plateau", state, **facts, since_step=self.plateau.best_step)

    def _overflowed(self, loss: float, refused: bool) -> bool:
        """Return whether the step was left out to find a loss scale (fp16), and count it."""
        overflows = refused and math.isfinite(loss) and self.loss_scale > 1 and self.is_scaled
        self.overflow_streak = self.overflow_streak + 1 if overflows else 0
        self.overflow_steps += overflows
        return overflows and self.overflow_streak <= MOST_OVERFLOWS

    def _judge_non_finite(self, facts: dict, state) -> None:
        if self.non_finite_streak == 1:
            self._tell("non_finite", state, **facts)
        if self.non_finite_streak >= self.settings.non_finite_streak:
            self._leave(
                state,
                f"{self.non_finite_streak} steps in a row had a loss or gradients that are not finite",
                policies=("skip", "rollback", "stop"),
            )

    def _judge_norm(self, norm: float | None, state) -> None:
        if norm is None:
            return
        # Rank 0's: unlike GPUs compute other last digits of it, and the layer norms that follow are a collective.
        [norm] = sum_over_ranks([norm if state.is_world_process_zero else 0.0])
        if not math.isfinite(norm):
            return  # reported as non-finite already
        score = self.norm_course.score(norm)
        exploded, expected = score > self.settings.score, self.norm_course.expected
        self.norm_course.add(norm, exploded)
        if exploded and not self.norm_in_spike:
            self._tell("gradient_explosion", state, score=score, grad_norm=norm, expected=expected)
        self.norm_in_spike = exploded

    def _leave(self, state, why: str, policies: tuple[str, ...] = ("rollback", "stop")) -> None:
        if self.policy in policies:
            self.finding = Instability(state.global_step, f"step {state.global_step}: {why}")

    def _tell(self, kind: str, state, score: float | None = None, **facts) -> None:
        # on every rank: the layer norms of the next step are a collective
        self.alerted_step = state.global_step
        if state.is_world_process_zero:
            score = {} if score is None else {"score": round(score, 2)}
            facts |= {"policy": self.policy, **self.origins(state.global_step), **advice(kind)}
            self.run.add_event(kind, step=state.global_step, **score, **facts)

    def _set_limit(self) -> None:
        self.watch.set_limit(self.loss_course.limit(self.settings.score))

    def state(self) -> dict:
        """Return what checkpoints keep."""
        counts = ("in_spike", "norm_in_spike", "non_finite_streak", *COUNTED)
        counts += ("overflow_steps", "overflow_streak") if self.is_scaled else ()
        parts = {name: getattr(self, name).state() for name in ("loss_course", "norm_course", "plateau")}
        finding = None if self.finding is None else [self.finding.step, self.finding.sentence]
        counted = {name: getattr(self, name) for name in counts}
        return {"args": {}, "attributes": {**parts, **counted, "finding": finding}}

    def _restore(self, saved: dict | None) -> None:
        attributes = dict((saved or {}).get("attributes", {}))
        # It was saved at a request to stop, before the caller could act on it. The caller will after the next step.
        finding = attributes.pop("finding", None)
        self.finding = None if finding is None else Instability(*finding)
        for name, value in attributes.items():
            part = getattr(self, name)
            part.restore(value) if hasattr(part, "restore") else setattr(self, name, value)


class NumberOnItsWay:
    """Copy a number from the device to the host, after the work that is queued now.

    Reading it waits only for that work, not for work that is queued later.
    """

    def __init__(self, number: torch.Tensor) -> None:
        """number: a tensor of one element."""
        self._copy, self._arrival = number, None
        if number.is_cuda:
            # a copy is only asynchronous into pinned memory
            self._copy = torch.empty_like(number, device="cpu", pin_memory=True)
            self._copy.copy_(number, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def read(self) -> float:
        """Wait for the number and return it."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy.item()


class LossWatch:
    """Wrap the loss function, and refuse steps whose loss exceeds `limit` if asked to.

    It costs one all-reduce of one number per step, on the device. Reading the loss waits for the forward pass, not for
    the end of the step.
    """

    def __init__(self, refuses: bool) -> None:
        self.refuses, self.limit = refuses, math.inf
        self._sum: torch.Tensor | None = None
        self._last: NumberOnItsWay | None = None

    def around(self, compute_loss: Callable) -> Callable:
        """Wrap the Trainer's `compute_loss_func`. Each call returns one micro-batch's share of the step's loss."""

        def watched(outputs, labels, num_items_in_batch=None):
            loss = compute_loss(outputs, labels, num_items_in_batch=num_items_in_batch)
            share = loss.detach().float()
            self._sum = share.clone() if self._sum is None else self._sum + share
            # true in the last micro-batch of a step only
            if GradientState().sync_gradients:
                self._close_step(loss)
            return loss

        return watched

    def _close_step(self, loss: torch.Tensor) -> None:
        total, self._sum = self._sum, None
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        self._last = NumberOnItsWay(total)
        if self.refuses and loss.requires_grad:
            # On the device, so that nothing waits. NaN gradients are refused by what refuses any step that is not
            # finite, on all ranks and at every ZeRO stage alike.
            keep = torch.where(total <= self.limit, 1.0, math.nan)
            loss.register_hook(lambda gradient: gradient * keep)

    def set_limit(self, limit: float) -> None:
        """Set the highest loss that is applied from now on, rounded to fp32, in which the device compares it."""
        self.limit = torch.tensor(limit, dtype=torch.float32).item()

    def last_loss(self) -> float:
        """Return the last step's loss in nats per token, as the mean of the ranks; NaN before the first step."""
        return math.nan if self._last is None else self._last.read()


class NonFiniteGuard:
    """Prevent steps with gradients that are not finite, and report which step was refused.

    The optimizers of ZeRO and fp16 check this themselves and skip the step. A plain torch optimizer, which DeepSpeed's
    stage 0 uses too, would write such gradients into every weight. This guard removes them before it steps.
    """

    def __init__(self, optimizer: Any) -> None:
        """optimizer: the Trainer's, as accelerate or DeepSpeed wrapped it."""
        self.optimizer, self._took_away, self._norm = optimizer, False, None
        inner = getattr(optimizer, "optimizer", optimizer)
        # `overflow`: DeepSpeed's fp16 optimizers check the gradients themselves
        if isinstance(inner, torch.optim.Optimizer) and not hasattr(inner, "overflow"):
            inner.register_step_pre_hook(self._before_step)

    def on_gradient_norm(self, norm: Any) -> None:
        """Keep the norm of the next step's gradients. If it is known, it is not computed again."""
        self._norm = norm

    def _before_step(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = _norm_of(parameters) if self._norm is None else self._norm
        # gradients are the same on every rank by now, so every rank decides the same
        self._took_away = not math.isfinite(norm)
        if self._took_away:
            for parameter in parameters:
                # torch's optimizers leave weights and moments of a parameter without a gradient as they are
                parameter.grad = None

    def refused_last_step(self) -> bool:
        """Return whether the last step was not applied. The answer is the same on every rank."""
        took_away, self._took_away, self._norm = self._took_away, False, None
        refused = took_away or bool(getattr(self.optimizer, "step_was_skipped", False))
        if refused:
            drop_refused_sums(getattr(self.optimizer, "optimizer", None))
        return refused


def _norm_of(parameters: list[torch.Tensor]) -> float:
    """Return the norm of all their gradients together. It copies one number to the host."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0
