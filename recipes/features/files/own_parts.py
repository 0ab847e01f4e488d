"""A callback, a metric, a loss, a schedule and a filter of your own: one small example of each."""

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from pretraining import extend


@extend.callback
class LossAverage(TrainerCallback, ExportableState):
    """Add a running average of the training loss to every logged row, as `train/loss_average`."""

    def __init__(self) -> None:
        self.average: float | None = None

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Go on with the average that a checkpoint holds."""
        saved = state.stateful_callbacks.get("LossAverage")
        self.average = saved["attributes"]["average"] if saved else None

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Change the row before it is written: every rank calls this, with the same loss."""
        if "loss" in logs:
            before = logs["loss"] if self.average is None else self.average
            self.average = 0.9 * before + 0.1 * logs["loss"]
            logs["train/loss_average"] = self.average

    def state(self) -> dict:
        """Return what a checkpoint keeps."""
        return {"args": {}, "attributes": {"average": self.average}}


@extend.metric
def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Say of every token whether the most probable one is right: `eval/accuracy` is the share."""
    return (logits.argmax(-1) == labels).float()


@extend.loss
def focal(logits: torch.Tensor, labels: torch.Tensor, gamma: float = 2.0) -> torch.Tensor:
    """Weigh tokens that are predicted well less (Lin et al. 2017): (1 - p)^gamma times the cross-entropy."""
    nats = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return (1 - torch.exp(-nats)) ** gamma * nats


@extend.schedule
def power(step: float, num_steps: int, warmup_steps: int, exponent: float = 0.5) -> float:
    """Rise linearly, then fall as a power of the step."""
    if step < warmup_steps:
        return step / warmup_steps
    return (max(1, warmup_steps) / max(1, step)) ** exponent


@extend.filter
def has_a_docstring(text: str, longest_line: int = 2000) -> bool:
    """Keep texts with a docstring and no line longer than `longest_line` characters."""
    return '"""' in text and max(map(len, text.splitlines())) <= longest_line
