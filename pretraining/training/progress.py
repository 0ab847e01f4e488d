"""The progress bar: loss, tokens/s and time left on a terminal, one line per logged step elsewhere."""

import sys

from tqdm import tqdm
from transformers import TrainerCallback


class ProgressCallback(TrainerCallback):
    """Shown by rank 0 on stderr."""

    def __init__(self):
        self.bar = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.on_terminal = sys.stderr.isatty()
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc="step",
                unit="step",
                dynamic_ncols=True,
                disable=not self.on_terminal,
            )

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(1)

    def on_log(self, args, state, control, logs, **kwargs):
        if self.bar is None or not ("loss" in logs or "eval_loss" in logs):
            return
        if "eval_loss" in logs:
            line = f"validation loss {logs['eval_loss']:.4f}, {logs['eval_bits_per_byte']:.4f} bits per byte"
            self._print(f"step {state.global_step}: {line}{_by_source(logs)}")
        elif self.on_terminal:
            self.bar.set_postfix_str(
                f"loss {logs['loss']:.4f}, {logs['throughput/tokens_per_second']:,.0f} tokens/s"
            )
        else:
            self._print(
                f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}  "
                f"{logs['throughput/tokens_per_second']:,.0f} tokens/s  "
                f"{_clock(logs['throughput/seconds_left'])} left"
            )

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()

    def _print(self, line: str) -> None:
        self.bar.write(line, file=sys.stderr) if self.on_terminal else print(
            line, file=sys.stderr, flush=True
        )


def _by_source(logs: dict) -> str:
    """The loss of each source, if validation has several."""
    names = [
        name for name in logs if name.startswith("eval_") and name.endswith("_loss") and name != "eval_loss"
    ]
    losses = [f"{name.removeprefix('eval_').removesuffix('_loss')} {logs[name]:.4f}" for name in names]
    return f"; loss of {', '.join(losses)}" if losses else ""


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
