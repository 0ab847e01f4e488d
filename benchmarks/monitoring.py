"""What watching a run costs, or an average of its weights; and what its report weighs.

    python benchmarks/monitoring.py overhead --deepspeed null --pairs 20
    python benchmarks/monitoring.py average --shape tiny --processes 2 --deepspeed zero2 --pairs 20
    python benchmarks/monitoring.py report --rows 1000000

overhead: blocks of steps with all monitoring on (phases, metrics.jsonl, gathering of the ranks, the judging of every
loss, heartbeats, a report written every five seconds and, once a block, noise scale and norms by layer) alternate with
blocks without any of it, in one run; the ratio is the median over neighbouring blocks. The rank's own time on the
processor, which a busy machine disturbs less, stands beside it.
average: the same with `optimizer.average_decay`; blocks that move the average alternate with blocks that do not.
report: a run folder of that many logged steps with planted spikes, written as a page and, where a Chromium and
playwright are there, opened: bytes, seconds, and how many of the spikes the page holds.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from gear import SHAPES, as_ranks, chosen, is_rank, middle, record, run_command, step_parser, train_blocks

LAYERS = 80
FEWEST_STEPS = 10
"""Of a block: in shorter ones gradients are not measured, for they would be at every step."""


def main() -> None:
    parser = step_parser(__doc__, pairs=20)
    parser.add_argument("what", choices=("overhead", "average", "report"))
    parser.add_argument("--logging_steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=1_000_000, help="logged steps of the report")
    options = parser.parse_args()
    if options.what == "report":
        measure_report(options)
    elif is_rank():
        {"overhead": measure_overhead, "average": measure_average}[options.what](options)
    else:
        subprocess.run(as_ranks(options.processes), check=True)


def measure_overhead(options: argparse.Namespace) -> None:
    """Train with a callback that switches the monitoring."""
    block_steps = SHAPES[options.shape].block_steps
    switch = build_switch(block_steps, monitoring_turned())
    every = block_steps if block_steps >= FEWEST_STEPS else None
    monitored = {"training.logging_steps": options.logging_steps, "report.every_seconds": 5}
    monitored |= {"monitors.noise_scale_steps": every, "monitors.layer_norms_steps": every}
    # Two micro-batches a step, or the noise scale would have nothing to compare.
    monitored["training.per_device_train_batch_size"] = options.micro_batch // 2
    train_blocks(options, 2 * block_steps, options.pairs + 1, switch, monitored)
    if os.environ["RANK"] == "0":
        values = {**chosen(options, "what", "rows"), "gradients_measured_every_steps": every}
        record("monitoring", {**values, **switch.result()}, options.keep)


def measure_average(options: argparse.Namespace) -> None:
    """Train with a callback that switches the average's move, which an optimizer makes after its step."""
    from pretraining.training import optimizers

    block_steps, moving, make = SHAPES[options.shape].block_steps, [True], optimizers.get_ema_multi_avg_fn

    def switched(decay: float):
        move = make(decay)
        return lambda *tensors: move(*tensors) if moving[0] else None

    optimizers.get_ema_multi_avg_fn = switched
    switch = build_switch(block_steps, lambda on: moving.__setitem__(0, on))
    train_blocks(options, 2 * block_steps, options.pairs + 1, switch, {"optimizer.average_decay": 0.99})
    if os.environ["RANK"] == "0":
        values = {**chosen(options, "what", "rows", "logging_steps"), **switch.result()}
        record("average_step", values, options.keep)


def monitoring_methods() -> dict[tuple[type, str], Callable]:
    """{(class, method): what stands in for it while nothing is monitored}."""
    from pretraining.training.gradients import LayerNormsCallback, NoiseScaleCallback
    from pretraining.training.hangs import HangCallback
    from pretraining.training.metrics import MetricsCallback
    from pretraining.training.stability import LossWatch, StabilityMonitor
    from pretraining.training.throughput import StepClock

    names = {
        StepClock: "enter settle",
        MetricsCallback: "on_log on_step_end",
        StabilityMonitor: "on_log on_step_end",
        HangCallback: "on_step_begin on_substep_end on_step_end",
        NoiseScaleCallback: "on_step_begin on_substep_end on_step_end on_gradient_norm on_log",
        LayerNormsCallback: "on_step_begin on_step_end on_gradient_norm on_log",
    }
    nothing = {(owner, name): lambda *_, **__: None for owner, each in names.items() for name in each.split()}

    def forget(watch: LossWatch, loss) -> None:
        watch._sum = None

    return {**nothing, (LossWatch, "_close_step"): forget}


def monitoring_turned() -> Callable[[bool], None]:
    """Return what turns all monitoring on or off."""
    from pretraining.reporting import live

    writers = []
    start = live.start_writer
    live.start_writer = lambda *arguments: writers.append(start(*arguments)) or writers[-1]
    off = monitoring_methods()
    real = {place: getattr(*place) for place in off}

    def turn(on: bool) -> None:
        for (owner, name), method in (real if on else off).items():
            setattr(owner, name, method)
        for writer in writers:
            writer.send_signal(signal.SIGCONT if on else signal.SIGSTOP)

    return turn


def build_switch(block_steps: int, turn: Callable[[bool], None]):
    """Return a callback that turns something off and on, and times the blocks of steps with it and without."""
    from transformers import TrainerCallback

    class Switch(TrainerCallback):
        """Blocks of steps, by turns with it and without."""

        def on_train_begin(self, args, state, control, **kwargs):
            self.on, self.seconds, self.processor_seconds = True, {True: [], False: []}, {True: [], False: []}
            self.begin()

        def begin(self) -> None:
            self.began = time.perf_counter(), time.process_time()

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step and state.global_step % block_steps == 0:
                self.seconds[self.on].append((time.perf_counter() - self.began[0]) / block_steps)
                self.processor_seconds[self.on].append((time.process_time() - self.began[1]) / block_steps)
                self.on = not self.on
                turn(self.on)
                self.begin()

        def on_train_end(self, args, state, control, **kwargs):
            turn(True)

        def result(self) -> dict:
            """Medians over the pairs, the first (warming up) left out."""
            pairs, processor = (
                list(zip(seconds[True], seconds[False], strict=False))[1:]
                for seconds in (self.seconds, self.processor_seconds)
            )
            return {
                "ratio": middle(on / off for on, off in pairs),
                "step_seconds": middle((off for _, off in pairs), 5),
                "extra_milliseconds_a_step": middle(1000 * (on - off) for on, off in pairs),
                "extra_processor_milliseconds_a_step": middle(1000 * (on - off) for on, off in processor),
            }

    return Switch()


def measure_report(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="report_") as folder:
        spikes = write_rows(Path(folder) / "run", options.rows)
        ended = run_command(sys.executable, "-m", "pretraining.reporting", f"{folder}/run")
        page = Path(folder) / "run" / "report.html"
        # those that are among the drawn points of the loss
        text = page.read_text(encoding="utf-8").partition('id="data">')[2].partition("</script>")[0]
        shown = spikes & set(json.loads(text)["runs"][0]["series"]["train/loss"]["step"])
        values = {
            "rows": options.rows,
            "write_seconds": round(ended.seconds, 2),
            "megabytes": round(page.stat().st_size / 1e6, 3),
            "spikes_shown": f"{len(shown)} of {len(spikes)}",
            **opened(page),
        }
    record("monitoring_report", values, options.keep)


def write_rows(folder: Path, num_rows: int) -> set[int]:
    """A run of this many logged steps with everything that a GPU run logs; the steps of its planted spikes.

    Every hundredth row has the gradient norms of eighty layers.
    """
    folder.mkdir()
    draw = random.Random(0)
    spikes = set(draw.sample(range(1000, num_rows, num_rows // 200), 50))
    (folder / "recipe.json").write_text(json.dumps({"name": "long", "budget": {"tokens": 2000 * num_rows}}))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_rows + 1):
            loss = 2 + 8 * step**-0.25 + draw.gauss(0, 0.02)
            loss *= draw.uniform(1.3, 5) if step in spikes else 1
            names = ("tokens_per_second", "mfu", "hfu", "goodput", "step_seconds", "data_wait_seconds")
            names += ("forward_backward_seconds", "optimizer_seconds", "evaluation_seconds", "saving_seconds")
            row = {"step": step, "time": 1.8e9 + 0.3 * step, "train/loss": loss, "train/tokens": 2000 * step}
            row |= {"train/grad_norm": draw.gauss(1, 0.1), "train/learning_rate": 3e-4 * step / num_rows}
            row |= {f"throughput/{name}": draw.gauss(1, 0.1) for name in names} | {"memory/peak_bytes": 4e10}
            if step % 100 == 0:
                row |= {f"stability/gradient_norm/h.{layer}": draw.gauss(1, 0.1) for layer in range(LAYERS)}
            file.write(json.dumps(row) + "\n")
    return spikes


def opened(page: Path) -> dict:
    """Return the median of five openings in headless Chromium, until everything is drawn; nothing without one."""
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None or find_spec("playwright") is None:
        return {}
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser, seconds = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"]), []
        for _ in range(5):
            tab = browser.new_page(viewport={"width": 1280, "height": 900})
            began = time.perf_counter()
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-drawn]")
            seconds.append(time.perf_counter() - began)
            tab.close()
        values = {"open_seconds": middle(seconds, 2), "chromium": browser.version}
        browser.close()
    return values


if __name__ == "__main__":
    main()
