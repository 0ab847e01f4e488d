"""Judge every step in the same way on all ranks, report spikes and plateaus, and apply the recipe's policy.

A spike is a high score over a window (`monitors.spikes`): a robust one, or by mean and deviation. `LossWatch` computes
the mean loss of all ranks before the gradients. `NonFiniteGuard` prevents steps with gradients that are not finite, at
any ZeRO stage and without DeepSpeed. An alert names likely causes in the order in which to look at them.

The numbers are `Spikes` in recipe/sections.py. Who goes back to a checkpoint is `roll_back` in checkpoints/resume.py.
"""

import math
from collections import deque
from collections.abc import Callable
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate.state import GradientState
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from pretraining.recipe.sections import Monitors
from pretraining.runtime.process_group import rank_and_world_size, sum_over_ranks
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.gradients import loss_scale
from pretraining.upstream.deepspeed import drop_refused_sums, refuse_norms

RECENT = 16
"""Steps whose median is the expected value; few enough to follow a falling loss."""
FEWEST = 32
"""The least number of steps before anything is judged."""
NORMAL_MAD = 1.4826
"""Standard deviation of normal noise, divided by its median absolute deviation."""
TAIL_SHARE = 1 / 16
"""Share of the window's values in the upper tail, taken as exponential (peaks over threshold, Coles 2001, ch. 4)."""
RARE, RARE_SCORE = 1e-7, 6.0
"""A value that only the share `RARE` of healthy ones exceeds scores at most `RARE_SCORE`."""
TINY = 1e-300
"""In place of a loss or norm of zero, which has no logarithm."""
SMALLEST_SCALE = 0.012
"""In log loss. A rise of less than `score` times this is no spike, even if the curve was very calm."""


class SpikeScore:
    """Score values against the last `window` of them that were no spikes themselves.

    The scores use logarithms, because spikes are factors. The course is the median of the last `RECENT` values. Noise
    is the larger of two measures: the median absolute deviation, and the upper tail of the distances to the course.
    """

    def __init__(self, window: int, smallest_scale: float = SMALLEST_SCALE):
        self.window, self.smallest_scale = window, smallest_scale
        self.values: deque[float] = deque(maxlen=RECENT)
        self.distances: deque[float] = deque(maxlen=window)
        self.rejected: list[float] = []
        self._judged_by: tuple[float, float] | None = None

    def score(self, value: float) -> float:
        """Return standard deviations above the course; inf if the value is not finite, 0 while too little is known."""
        if not math.isfinite(value):
            return math.inf
        if len(self.distances) < FEWEST:
            return 0.0
        course, scale = self._course_and_scale()
        return (math.log(max(value, TINY)) - course) / scale

    def limit(self, score: float) -> float:
        """Return the value at which `score` is reached; inf while too little is known."""
        if len(self.distances) < FEWEST:
            return math.inf
        course, scale = self._course_and_scale()
        # math.exp raises OverflowError above 709
        return math.exp(min(course + score * scale, 700.0))

    @property
    def expected(self) -> float | None:
        return math.exp(median(self.values)) if self.values else None

    def add(self, value: float, is_spike: bool) -> None:
        """Add a value. Spikes do not change the course, until many in a row show a new level."""
        if not math.isfinite(value):
            return
        value = math.log(max(value, TINY))
        # one healthy value ends the row of spikes
        if not is_spike:
            self.rejected.clear()
            self._judged_by = None
            if len(self.values) == RECENT:
                # to the course without the value itself; it lags behind a falling loss, which costs sensitivity but
                # raises no false alarm
                self.distances.append(value - median(self.values))
            self.values.append(value)
            return
        self.rejected.append(value)
        if len(self.rejected) >= max(FEWEST, self.window // 2):
            level, self.rejected, self._judged_by = self.rejected, [], None
            self.values.clear()
            self.values.extend(level)

    def _course_and_scale(self) -> tuple[float, float]:
        # kept until a value is added: the limit of a step and the score after it must agree
        if self._judged_by is None:
            ordered = sorted(self.distances)
            centre = median(ordered)
            spread = NORMAL_MAD * median([abs(d - centre) for d in ordered])
            # The value that the share RARE exceeds, if the tail is exponential: its scale is the mean excess of the
            # largest values, which are the share TAIL_SHARE.
            count = int(TAIL_SHARE * len(ordered))
            threshold = ordered[-1 - count]
            mean_excess = sum(ordered[-count:]) / count - threshold
            tail = threshold + mean_excess * math.log(TAIL_SHARE / RARE) - centre
            # a rising loss moves the course up; a falling one does not move it down
            course = median(self.values) + max(0.0, centre)
            self._judged_by = course, max(spread, tail / RARE_SCORE, self.smallest_scale)
        return self._judged_by

    def state(self) -> dict:
        return {name: list(getattr(self, name)) for name in ("values", "distances", "rejected")}

    def restore(self, state: dict) -> None:
        self.values = deque(state["values"], maxlen=RECENT)
        kept = islice(state["distances"], max(0, len(state["distances"]) - self.window), None)
        self.distances = deque(kept, maxlen=self.window)
        self.rejected, self._judged_by = list(state["rejected"]), None


class Deviations:
    """Score values by the mean and standard deviation of the last `window` of them, spikes too.

    The rule of OLMo 3 (OLMo-core, `SkipStepOptimizer`): nothing is judged before half a window is there.
    """

    def __init__(self, window: int):
        self.values: deque[float] = deque(maxlen=window)

    def score(self, value: float) -> float:
        """Return standard deviations above the mean; inf if the value is not finite, 0 while too little is known."""
        if not math.isfinite(value):
            return math.inf
        mean, deviation = self._mean_and_deviation()
        if deviation in (0.0, math.inf):
            return math.inf if value > mean else 0.0
        return (value - mean) / deviation

    def limit(self, score: float) -> float:
        """Return the value at which `score` is reached; inf while too little is known."""
        mean, deviation = self._mean_and_deviation()
        return mean + score * deviation

    @property
    def expected(self) -> float | None:
        return math.fsum(self.values) / len(self.values) if self.values else None

    def add(self, value: float, is_spike: bool) -> None:
        if math.isfinite(value):
            self.values.append(value)

    def _mean_and_deviation(self) -> tuple[float, float]:
        """Return both; infinite while too little is known."""
        if 2 * len(self.values) < self.values.maxlen:
            return math.inf, math.inf
        mean = self.expected
        squares = math.fsum((value - mean) ** 2 for value in self.values)
        return mean, math.sqrt(squares / (len(self.values) - 1))

    def state(self) -> dict:
        return {"values": list(self.values)}

    def restore(self, state: dict) -> None:
        self.values = deque(state["values"], maxlen=self.values.maxlen)


LEAST_GAIN = 0.001
"""Share of the loss. A smaller gain is no progress."""


class Plateau:
    """Report once if the course has not gained `LEAST_GAIN` for so many steps (None: never), and again after a gain."""

    def __init__(self, num_steps: int | None):
        self.num_steps = num_steps
        self.best, self.best_step, self.told = None, 0, False

    def shows(self, step: int, expected: float | None) -> bool:
        """Return whether a plateau is to be reported now. `expected` is the course's loss after `step`."""
        if expected is None:
            return False
        if self.best is None or expected < self.best * (1 - LEAST_GAIN):
            self.best, self.best_step, self.told = expected, step, False
        if self.num_steps is None or self.told or step - self.best_step < self.num_steps:
            return False
        self.told = True
        return True

    def state(self) -> dict:
        return {"best": self.best, "best_step": self.best_step, "told": self.told}

    def restore(self, state: dict) -> None:
        self.best, self.best_step, self.told = state["best"], state["best_step"], state["told"]


ADVICE = {
    "spike": {
        "causes": [
            "the data of these samples (see documents and flagged)",
            "the learning rate is high for this point of the schedule",
            "the second moments lag behind larger gradients",
        ],
        "try": [
            "look at the samples: python -m pretraining.data inspect DATA --sample N --recipe RECIPE",
            "monitors.spikes.policy rollback: goes back and leaves these samples out",
            "a lower training.learning_rate, a longer warmup_steps, a lower adam_beta2 (0.95)",
            "a lower training.max_grad_norm",
        ],
    },
    "non_finite": {
        "causes": [
            "a number beyond the precision's range: attention scores or logits that grow",
            "the data of these samples (see documents and flagged)",
            "the learning rate",
        ],
        "try": [
            "training.bf16 in place of training.fp16, or fp32 for some steps to find the place",
            "a lower training.learning_rate or training.max_grad_norm",
        ],
    },
    "gradient_explosion": {
        "causes": [
            "the learning rate is close to what this model bears",
            "unusual samples: repeated tokens, one language among others",
        ],
        "try": [
            "nothing yet where the loss holds: training.max_grad_norm bounds the step",
            "a lower training.learning_rate",
        ],
    },
    "starved_experts": {
        "causes": [
            "the balancing loss weighs too little beside the cross-entropy",
            "the routers settled while the learning rate was high",
        ],
        "try": [
            "a higher model.router_aux_loss_coef (0.01 is common), loss.balance_weight or bias_rate",
            "loss.router_z_loss (0.001), a longer training.warmup_steps",
        ],
    },
    "plateau": {
        "causes": [
            "the learning rate has decayed, or is too high to settle",
            "the model has learned what its size and this data allow",
        ],
        "try": [
            "compare with the validation loss: a gap says memorised data, none says capacity",
            "another schedule or learning rate in a run of its own, from an earlier checkpoint",
        ],
    },
}


COUNTED = ("spikes", "non_finite_steps", "refused_steps")
"""Counted since the beginning of the run; every row has them."""
MOST_OVERFLOWS = 100
"""Steps in a row without a loss scale that fits: halving comes from 2^32 to 1 in fewer, each tried twice."""


class Instability(NamedTuple):
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
        self.judges_norms = self.settings.rule == "deviations"
        # loss and norm are judged together where the norm is known
        self.watch = LossWatch(refuses=self.policy == "skip" and not self.judges_norms)
        self.loss_course: SpikeScore | Deviations = SpikeScore(self.settings.window)
        # of the logarithm of the norm, as SMALLEST_SCALE is of that of the loss
        self.norm_course: SpikeScore | Deviations = SpikeScore(self.settings.window, smallest_scale=0.1)
        if self.judges_norms:
            self.loss_course, self.norm_course = (Deviations(self.settings.window) for _ in range(2))
        self.norm, self.norm_limit = math.nan, math.inf
        self.plateau = Plateau(monitors.plateau_steps)
        self.in_spike = self.norm_in_spike = False
        self.non_finite_streak = self.refused_steps = self.spikes = self.non_finite_steps = 0
        self.overflow_steps = self.overflow_streak = 0
        self.is_scaled, self.loss_scale = False, 1.0
        self.finding: Instability | None = None
        self.alerted_step: int | None = None
        self.refused_last_step = False

    def on_train_begin(self, args, state, control, optimizer, lr_scheduler, **kwargs) -> None:
        is_refused = self._is_refused if self.judges_norms else None
        self.guard = NonFiniteGuard(optimizer, is_refused)
        refuse_norms(is_refused)
        self.is_scaled = args.fp16
        self.loss_scale = loss_scale(optimizer)
        name = type(self).__name__
        saved = dict((state.stateful_callbacks.get(name) or {}).get("attributes", {}))
        # one that was saved as the run was asked to stop in that step: the caller acts on it after the next one
        finding = saved.pop("finding", None)
        self.finding = None if finding is None else Instability(*finding)
        for key, value in saved.items():
            part = getattr(self, key)
            if not hasattr(part, "restore"):
                setattr(self, key, value)
            # a window that another rule kept has other names and units: this one begins anew
            elif value.keys() == part.state().keys():
                part.restore(value)
        # the Trainer expects an entry when it saves, and an older checkpoint lacks it
        state.stateful_callbacks[name] = self.state()
        self._set_limit()

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.norm = math.nan

    def on_gradient_norm(self, norm: Any) -> None:
        """Keep the step's norm before clipping. DeepSpeed reports it after the step, the Trainer before it."""
        self.guard.on_gradient_norm(norm)

    def _is_refused(self, norm: float) -> bool:
        """Return whether the step is left out, by its loss and its norm; the same on every rank."""
        self.norm = norm
        return self.policy == "skip" and (self.watch.last_loss() > self.watch.limit or norm > self.norm_limit)

    def on_step_end(self, args, state, control, optimizer, lr_scheduler, **kwargs) -> None:
        if getattr(optimizer, "step_was_skipped", False) and isinstance(lr_scheduler, LambdaLR):
            # ZeRO or fp16 skipped it, so the Trainer did not advance the schedule. But the rate belongs to the step.
            # A schedule by metrics stays.
            lr_scheduler.step()
        self.refused_last_step = self.guard.refused_last_step()
        self._judge(self.watch.last_loss(), self.refused_last_step, state)
        if self.is_scaled:
            self.loss_scale = loss_scale(optimizer)  # of the next step
        self._set_limit()
        if self.finding is not None:
            control.should_training_stop = True
            # the caller returns to an earlier checkpoint, or ends the run
            control.should_save = control.should_evaluate = False

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if "loss" in logs:
            for name in COUNTED:
                logs[f"stability/{name}"] = getattr(self, name)
            if self.is_scaled:
                logs["stability/loss_scale"] = self.loss_scale
                logs["stability/overflow_steps"] = self.overflow_steps
            if self.judges_norms and math.isfinite(self.norm):
                logs["grad_norm"] = self.norm  # of a step that was left out DeepSpeed says infinity
            # the norm of a step that overflowed is none
            elif not self.overflow_streak:
                self._judge_norm(logs.get("grad_norm"), state)

    def _judge(self, loss: float, refused: bool, state) -> None:
        score, began = self.loss_course.score(loss), not self.in_spike
        expected = self.loss_course.expected
        # not "<=": a norm that is not finite is no spike
        norm_is_high = self.judges_norms and self.norm_limit < self.norm < math.inf
        # not ">": a NaN counts as a spike
        is_spike = not loss <= self.watch.limit or norm_is_high
        # the policy "skip" refuses a spike by NaN gradients: that refusal is no non-finite step
        finite = math.isfinite(loss) and (not refused or (is_spike and self.policy == "skip"))
        # left out to find a loss scale (fp16): the loss is good, only its gradients, times the scale, did not fit
        overflows = refused and not finite and math.isfinite(loss) and self.loss_scale > 1 and self.is_scaled
        self.overflow_streak = self.overflow_streak + 1 if overflows else 0
        self.overflow_steps += overflows
        finite = finite or (overflows and self.overflow_streak <= MOST_OVERFLOWS)
        self.refused_steps += refused
        self.non_finite_streak = 0 if finite else self.non_finite_streak + 1
        self.non_finite_steps += not finite
        self.in_spike = is_spike
        self.loss_course.add(loss, is_spike or not finite)
        facts = {"loss": loss, "expected": expected, "applied": not refused}
        why = f"the loss is {loss:.4g}, {score:.1f} deviations above {expected or math.nan:.4g}"
        if self.judges_norms:
            facts |= {"grad_norm": self.norm, "expected_grad_norm": self.norm_course.expected}
            if norm_is_high:
                high, usual = self.norm_course.score(self.norm), self.norm_course.expected
                why = f"the gradient norm is {self.norm:.4g}, {high:.1f} deviations above {usual:.4g}"
                score = max(score, high)
            self.norm_course.add(self.norm, is_spike)
        if not finite:
            if self.non_finite_streak == 1:
                self._tell("non_finite", state, **facts)
            if self.non_finite_streak >= self.settings.non_finite_streak:
                what = f"{self.non_finite_streak} steps in a row had a loss or gradients that are not finite"
                self._leave(state, what, policies=("skip", "rollback", "stop"))
        elif is_spike and began:
            self.spikes += 1
            self._tell("spike", state, score=round(score, 2), **facts)
            self._leave(state, why)
        if self.plateau.shows(state.global_step, self.loss_course.expected):
            self._tell("plateau", state, **facts, since_step=self.plateau.best_step)

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
            self._tell("gradient_explosion", state, score=round(score, 2), grad_norm=norm, expected=expected)
        self.norm_in_spike = exploded

    def _leave(self, state, why: str, policies: tuple[str, ...] = ("rollback", "stop")) -> None:
        if self.policy in policies:
            self.finding = Instability(state.global_step, f"step {state.global_step}: {why}")

    def _tell(self, kind: str, state, **facts) -> None:
        # on every rank: the layer norms of the next step are a collective
        self.alerted_step = state.global_step
        if state.is_world_process_zero:
            facts |= {"policy": self.policy, **self.origins(state.global_step), **ADVICE[kind]}
            self.run.add_event(kind, step=state.global_step, **facts)

    def _set_limit(self) -> None:
        """Set the highest loss that is applied from now on, rounded to fp32, in which the device compares it."""
        limit = self.loss_course.limit(self.settings.score)
        self.watch.limit = torch.tensor(limit, dtype=torch.float32).item()
        if self.judges_norms:
            self.norm_limit = self.norm_course.limit(self.settings.score)

    def state(self) -> dict:
        """Return what checkpoints keep."""
        counts = ("in_spike", "norm_in_spike", "non_finite_streak", *COUNTED)
        counts += ("overflow_steps", "overflow_streak") if self.is_scaled else ()
        parts = {name: getattr(self, name).state() for name in ("loss_course", "norm_course", "plateau")}
        finding = None if self.finding is None else list(self.finding)
        counted = {name: getattr(self, name) for name in counts}
        return {"args": {}, "attributes": {**parts, **counted, "finding": finding}}


class NumberOnItsWay:
    """Copy a number from the device to the host, after the work that is queued now.

    Reading it waits only for that work, not for work that is queued later.
    """

    def __init__(self, number: torch.Tensor) -> None:
        self._copy, self._arrival = number, None
        if number.is_cuda:
            # a copy is only asynchronous into pinned memory
            self._copy = torch.empty_like(number, device="cpu", pin_memory=True)
            self._copy.copy_(number, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def read(self) -> float:
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

    def last_loss(self) -> float:
        """Return the last step's loss in nats per token, as the mean of the ranks; NaN before the first step."""
        return math.nan if self._last is None else self._last.read()


class NonFiniteGuard:
    """Prevent steps with gradients that are not finite, and report which step was refused.

    The optimizers of ZeRO and fp16 check this themselves and skip the step. A plain torch optimizer, which DeepSpeed's
    stage 0 uses too, would write such gradients into every weight. This guard removes them before it steps.

    optimizer: the Trainer's, as accelerate or DeepSpeed wrapped it. is_refused: says of a finite norm if its step is
    left out too.
    """

    def __init__(self, optimizer: Any, is_refused: Callable[[float], bool] | None = None) -> None:
        self.optimizer, self.is_refused, self._took_away, self._norm = optimizer, is_refused, False, None
        inner = getattr(optimizer, "optimizer", optimizer)
        # `overflow`: DeepSpeed's fp16 optimizers check the gradients themselves
        if isinstance(inner, torch.optim.Optimizer) and not hasattr(inner, "overflow"):
            inner.register_step_pre_hook(self._before_step)

    def on_gradient_norm(self, norm: Any) -> None:
        """Keep the norm of the next step's gradients. If it is known, it is not computed again."""
        self._norm = norm

    def _before_step(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = self._norm
        if norm is None:  # one number is copied to the host
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0
        # gradients are the same on every rank by now, so every rank decides the same
        self._took_away = not math.isfinite(norm)
        if self.is_refused is not None:
            # rank 0's: unlike GPUs compute other last digits of it
            [norm] = sum_over_ranks([float(norm) if rank_and_world_size()[0] == 0 else 0.0])
            self._took_away = self.is_refused(norm) or not math.isfinite(norm)
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
