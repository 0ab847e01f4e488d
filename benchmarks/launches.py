"""What Python needs to launch a training step's kernels: by layer, by micro-batch, by step, at every ZeRO stage.

    python benchmarks/launches.py --keep

A GPU that is faster waits for it, so a plan foresees no shorter step (`launch_seconds` in planning/tables/rates.json).
One rank trains a model so narrow that computing is next to nothing: with few layers and one micro-batch, few layers
and more micro-batches, and more layers. These three give the three numbers of a stage and mode. The seconds are the
rank's own on the processor, which others do not disturb.
"""

import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from gear import STAGES, middle, on_forked_ranks, parser_of, record, short_recipe, short_trainer
from transformers import TrainerCallback

LAYERS = (2, 12)
MICRO_BATCHES = (1, 5)
MODES = {"eager": "none", "compiled": "blocks"}
RUNS, WARM_STEPS, STEPS = 3, 8, 30
NARROW = {"model.n_embd": 16, "model.n_head": 2, "model.n_positions": 16}


class Seconds(TrainerCallback):
    """The rank's seconds on the processor, at each step's end."""

    def on_train_begin(self, *_, **__):
        self.ends = []

    def on_step_end(self, *_, **__):
        self.ends.append(time.process_time())


def main() -> None:
    options = parser_of(__doc__).parse_args()
    found = {stage: {mode: parts_of(stage, mode) for mode in MODES} for stage in STAGES}
    record("launches", {"model_type": "gpt2", "seconds": found}, options.keep)


def parts_of(stage: str, mode: str) -> dict[str, float]:
    """Return the seconds of a step, of each micro-batch in it, and of each layer of a micro-batch."""
    (few, many), (one, more) = LAYERS, MICRO_BATCHES
    short, longer, deeper = (measured(stage, mode, *each) for each in ((few, one), (few, more), (many, more)))
    layer = (deeper - longer) / (many - few) / more
    micro_batch = (longer - short) / (more - one) - few * layer
    parts = {"step": short - one * (micro_batch + few * layer), "micro-batch": micro_batch, "layer": layer}
    return {name: round(value, 5) for name, value in parts.items()}


def measured(stage: str, mode: str, layers: int, accumulation: int) -> float:
    """Return a step's seconds: the median run of three, each the median of its steps."""
    name = f"{stage}, {mode}, {layers} layers, {accumulation} micro-batches"
    work = partial(run, stage, mode, layers, accumulation)
    return middle((on_forked_ranks(1, work, name)[0]["seconds"] for _ in range(RUNS)), 6)


def run(stage: str, mode: str, layers: int, accumulation: int, folder: Path) -> dict:
    values = {**NARROW, "model.n_layer": layers, "training.per_device_train_batch_size": 1}
    values |= {"training.bf16": True, "speed.compile": MODES[mode], "data.sequence_length": 16}
    steps, seconds = WARM_STEPS + STEPS, Seconds()
    recipe, config = short_recipe("features/gpt2", values, stage, 16 * accumulation, steps)
    trainer = short_trainer(recipe, config, folder / "run", accumulation, steps, seconds)
    # more threads would wait for each other in kernels of some microseconds, which no GPU does
    torch.set_num_threads(1)
    trainer.train()
    ends = seconds.ends[WARM_STEPS:]
    return {"seconds": middle((after - before for before, after in pairwise(ends)), 6)}


if __name__ == "__main__":
    main()
