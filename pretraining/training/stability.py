"""The stability monitor: judges every step, alike on all ranks, and applies the recipe's policy.

`LossWatch` knows the mean loss of all ranks before its gradients are there; `NonFiniteGuard` keeps a step whose
gradients are not finite from being applied, at any stage and without DeepSpeed.
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
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.schedule import apply_schedule_now, step_schedule
from pretraining.training.spikes import Plateau, SpikeScore, advice
from pretraining.upstream.zero_optimizers import drop_refused_sums


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

    def __init__(self, run: RunFolder, monitors: Monitors, origins: Callable[[int], dict]) -> None:
        """origins: from an optimizer step (counted from 1) to what its samples are, for the events."""
        self.run, self.settings, self.origins = run, monitors.spikes, origins
        self.policy = self.settings.policy
        self.watch = LossWatch(refuses=self.policy == "skip")
        self.loss_course = SpikeScore(self.settings.window)
        self.norm_course = SpikeScore(self.settings.window, smallest_scale=0.1)
        self.plateau = Plateau(monitors.plateau_steps)
        self.in_spike = self.norm_in_spike = False
        self.non_finite_streak = self.refused_steps = 0
        self.finding: Finding | None = None
        self.alerted_step: int | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any,
        lr_scheduler: Any,
        **kwargs: Any,
    ) -> None:
        self.guard = NonFiniteGuard(optimizer)
        name = type(self).__name__
        self._restore(state.stateful_callbacks.get(name))
        state.stateful_callbacks[name] = self.state()  # an older checkpoint lacks it
        apply_schedule_now(lr_scheduler)
        self._set_limit()

    def on_gradient_norm(self, norm: Any) -> None:
        """Of the step, before clipping: before it is made, and by DeepSpeed after it."""
        self.guard.on_gradient_norm(norm)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any,
        lr_scheduler: Any,
        **kwargs: Any,
    ) -> None:
        if getattr(optimizer, "step_was_skipped", False):
            # By ZeRO or fp16: the Trainer has not moved it on, but the rate belongs to the step.
            step_schedule(lr_scheduler)
        self._judge(self.watch.last_loss(), self.guard.refused_last_step(), state)
        self._set_limit()
        if self.finding is not None:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict, **kwargs: Any
    ) -> None:
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
        if self.non_finite_streak >= self.settings.non_finite_streak:
            self._leave(
                state,
                f"{self.non_finite_streak} steps in a row had a loss or gradients that are not finite",
                policies=("skip", "rollback", "stop"),
            )

    def _judge_norm(self, norm: float | None, state) -> None:
        if norm is None or not math.isfinite(norm):
            return  # told as non-finite
        score = self.norm_course.score(norm)
        exploded, expected = score > self.settings.score, self.norm_course.expected
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
        self.watch.set_limit(self.loss_course.limit(self.settings.score))

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


class NumberOnItsWay:
    """A number of the device, copied to the host behind the work that is queued there now.

    Who reads it waits for that work alone, and not for what is queued later.
    """

    def __init__(self, number: torch.Tensor) -> None:
        """number: a tensor of one element."""
        self._copy, self._arrival = number, None
        if number.is_cuda:
            self._copy = torch.empty_like(number, device="cpu", pin_memory=True)
            self._copy.copy_(number, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def read(self) -> float:
        """The number."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy.item()


class LossWatch:
    """Stands around the loss function; a step whose loss exceeds `limit` can be kept from being applied.

    Costs one all-reduce of one number a step, on the device; who asks for it waits for the forward pass, not for the
    end of the step. To refuse a step it multiplies the gradient of the loss with NaN, on the device too: what refuses
    steps with gradients that are not finite then refuses this one, on all ranks and at every ZeRO stage alike.
    """

    def __init__(self, refuses: bool) -> None:
        self.refuses, self.limit = refuses, math.inf
        self._sum: torch.Tensor | None = None
        self._last: NumberOnItsWay | None = None

    def around(self, compute_loss: Callable) -> Callable:
        """The Trainer's `compute_loss_func`, watched; each call is one micro-batch's share of the step's loss."""

        def watched(outputs, labels, num_items_in_batch=None):
            loss = compute_loss(outputs, labels, num_items_in_batch=num_items_in_batch)
            share = loss.detach().float()
            self._sum = share.clone() if self._sum is None else self._sum + share
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
            keep = torch.where(total <= self.limit, 1.0, math.nan)
            loss.register_hook(lambda gradient: gradient * keep)

    def set_limit(self, limit: float) -> None:
        """From now on: the highest loss that is applied, rounded as the device compares it."""
        self.limit = torch.tensor(limit, dtype=torch.float32).item()

    def last_loss(self) -> float:
        """Loss of the step just made, nats per token, mean over the ranks; NaN before the first."""
        return math.nan if self._last is None else self._last.read()


class NonFiniteGuard:
    """Keeps steps with non-finite gradients from being applied, and tells which step was refused.

    ZeRO's optimizers and fp16's look for themselves: they clear such gradients and leave the weights alone. A plain
    torch optimizer, which DeepSpeed's stage 0 uses too, would write them into every weight: before it steps, this
    guard takes the gradients away, which leaves weights and moments as they are. Gradients are the same on every
    rank by then, and so is what it does.
    """

    def __init__(self, optimizer: Any) -> None:
        """optimizer: the Trainer's, as accelerate or DeepSpeed wrapped it."""
        self.optimizer, self._took_away, self._norm = optimizer, False, None
        inner = getattr(optimizer, "optimizer", optimizer)
        if isinstance(inner, torch.optim.Optimizer) and not hasattr(inner, "overflow"):
            inner.register_step_pre_hook(self._before_step)

    def on_gradient_norm(self, norm: Any) -> None:
        """Of the gradients that are about to be stepped with; nothing is looked through again where it is known."""
        self._norm = norm

    def _before_step(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = _norm_of(parameters) if self._norm is None else self._norm
        self._took_away = not math.isfinite(norm)
        if self._took_away:
            for parameter in parameters:
                parameter.grad = None

    def refused_last_step(self) -> bool:
        """Whether the step just made was left out; the same answer on every rank."""
        took_away, self._took_away, self._norm = self._took_away, False, None
        refused = took_away or bool(getattr(self.optimizer, "step_was_skipped", False))
        if refused:
            drop_refused_sums(getattr(self.optimizer, "optimizer", None))
        return refused


def _norm_of(parameters: list[torch.Tensor]) -> float:
    """Of their gradients together: one pass, and one number to the host."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0
