"""The Trainer's own steps, each under its phase of the step clock."""

import torch
from transformers import Trainer

from pretraining.training.step_clock import StepClock


class TimedTrainer(Trainer):
    """Marks waiting for data, forward and backward; the optimizer is marked by `time_optimizer`."""

    clock: StepClock

    def get_batch_samples(self, *args, **kwargs):
        """The step's micro-batches; the wait for them ends every pause."""
        self.clock.enter("data_wait")
        batches = super().get_batch_samples(*args, **kwargs)
        self.clock.enter("other")
        return batches

    def training_step(self, *args, **kwargs):
        """Forward and backward of one micro-batch; under DeepSpeed the optimizer too, in the last of a step."""
        loss = super().training_step(*args, **kwargs)
        self.clock.enter("other")
        return loss

    def compute_loss(self, *args, **kwargs):
        """Forward pass and loss; what follows in a training step is the backward pass."""
        self.clock.enter("forward")
        loss = super().compute_loss(*args, **kwargs)
        self.clock.enter("backward")
        return loss


def time_optimizer(optimizer, clock: StepClock) -> None:
    """Mark every step of the prepared `optimizer` on the clock, whoever calls it.

    Under ZeRO that is DeepSpeed's own optimizer, which the engine steps inside the backward call: its step holds
    the gradient norm, the update and the gathering of updated weights.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if isinstance(inner, torch.optim.Optimizer):
        before = []
        inner.register_step_pre_hook(lambda *_: before.append(clock.enter("optimizer")))
        inner.register_step_post_hook(lambda *_: clock.enter(before.pop()) and None)
        return
    step = inner.step

    def timed_step(*args, **kwargs):
        with clock.during("optimizer"):
            return step(*args, **kwargs)

    inner.step = timed_step
