"""The gradient noise scale: below it a larger batch pays, far above it tokens are wasted.

Two-batch estimator of McCandlish et al. 2018 ("An Empirical Model of Large-Batch Training"), appendix A.1.
"""

import math
import sys

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from pretraining.runtime.process_group import sum_over_ranks
from pretraining.training.micro_batch_norms import MicroBatchNorms

MEMORY = 0.9
"""Of the running means: what one measurement leaves of the ones before it."""


class NoiseScale:
    """tr(Sigma) / |G|^2 from squared gradient norms at two batch sizes, each smoothed before the division.

    Both parts are unbiased, their ratio is not: the smoothing is what makes it useful. The unit is that of the
    batch sizes.
    """

    def __init__(self, small: float, memory: float = MEMORY):
        """small: the smaller batch."""
        self.small, self.memory = small, memory
        self.signal = self.noise = 0.0

    def add(self, small_square: float, big_square: float, big: float) -> None:
        """One measurement: mean squared norm of gradients of the smaller batch, squared norm of one of `big`."""
        if not (math.isfinite(small_square) and math.isfinite(big_square)):
            return
        signal = (big * big_square - self.small * small_square) / (big - self.small)
        noise = (small_square - big_square) / (1 / self.small - 1 / big)
        self.signal = self.memory * self.signal + (1 - self.memory) * signal
        self.noise = self.memory * self.noise + (1 - self.memory) * noise

    @property
    def value(self) -> float | None:
        """None while the estimates do not make sense together: too little is known yet."""
        return self.noise / self.signal if self.signal > 0 and self.noise > 0 else None

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps, as JSON values."""
        return {"signal": self.signal, "noise": self.noise}

    def restore(self, state: dict[str, float]) -> None:
        """Continue from what `state` returned."""
        self.signal, self.noise = state["signal"], state["noise"]


class NoiseScaleCallback(TrainerCallback, ExportableState):
    """Measures on every `every_steps`-th step; logs `stability/gradient_noise_scale` in tokens.

    The small batch is a micro-batch (the mean over all of them, on all ranks), the big one the whole step, whose norm
    before clipping the Trainer tells. On all other steps nothing is done.
    """

    def __init__(self, every_steps: int, sequence_length: int):
        self.every_steps, self.sequence_length = every_steps, sequence_length
        self.norms: MicroBatchNorms | None = None
        self.scale: NoiseScale | None = None
        self.measures, self.is_new, self.gradient_norm = False, False, None

    def on_train_begin(self, args, state, control, model, optimizer, **kwargs):
        if args.gradient_accumulation_steps * args.world_size == 1:
            print(
                "monitors.noise_scale_steps: a step is one micro-batch here, so there is nothing to compare it with; "
                "a smaller training.per_device_train_batch_size gives two sizes",
                file=sys.stderr,
            )
            return
        self.norms = MicroBatchNorms(model)
        self.scale = NoiseScale(args.per_device_train_batch_size * self.sequence_length)
        name = type(self).__name__
        saved = state.stateful_callbacks.get(name)
        if saved and saved["attributes"]:
            self.scale.restore(saved["attributes"])
        state.stateful_callbacks[name] = self.state()

    def on_step_begin(self, args, state, control, optimizer, **kwargs):
        self.measures = self.norms is not None and (state.global_step + 1) % self.every_steps == 0
        if self.measures:
            self.loss_scale = loss_scale(optimizer)
            self.norms.open()

    def on_substep_end(self, args, state, control, **kwargs):
        if self.measures:
            self.norms.fold()

    def hear_gradient_norm(self, norm) -> None:
        """Of the whole step, before clipping; None where DeepSpeed does not tell."""
        self.gradient_norm = norm

    def on_step_end(self, args, state, control, **kwargs):
        if not self.measures:
            return
        total, own_passes = self.norms.close()
        total, passes = sum_over_ranks([total, own_passes])
        if self.gradient_norm is None or passes < 2:
            return
        # A micro-batch's backward pass carries its share of the step's mean loss.
        small_square = total / passes * (own_passes / self.loss_scale) ** 2
        self.scale.add(small_square, float(self.gradient_norm) ** 2, passes * self.scale.small)
        self.is_new = True

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs and self.is_new and self.scale.value is not None:
            logs["stability/gradient_noise_scale"] = round(self.scale.value, 3)
            self.is_new = False

    def state(self) -> dict:
        """What checkpoints keep of it."""
        return {"args": {}, "attributes": {} if self.scale is None else self.scale.state()}


def loss_scale(optimizer) -> float:
    """What the loss is multiplied with before the backward pass: fp16's, else 1."""
    scaler = getattr(optimizer, "scaler", None)
    if scaler is not None:
        return scaler.get_scale()
    return float(getattr(getattr(optimizer, "optimizer", optimizer), "loss_scale", 1.0))
