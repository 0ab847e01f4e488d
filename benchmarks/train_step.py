"""Speed of train.py's step, beside a bare PyTorch loop: same model, data, optimizer, processes; paired in one run.

    python benchmarks/train_step.py --shape small --deepspeed null
    python benchmarks/train_step.py --shape 124m --processes 2 --deepspeed zero2 --pairs 6
    python benchmarks/train_step.py --shape small --deepspeed zero1 --bare engine
    python benchmarks/train_step.py --shape 1.5b --deepspeed zero2 --micro_batch 16 --keep                (needs a GPU)
    python benchmarks/train_step.py --shape 7b --layers 8 --deepspeed zero2 --micro_batch 4 --keep        (needs a GPU)
    python benchmarks/train_step.py --shape 124m --deepspeed zero2 --levers --keep

Inside one training run, blocks of Trainer steps alternate with blocks of bare steps on a second copy of the model, so
that both see the same machine at the same time. Prints one JSON line: the ratio is the median of the ratios of
neighbouring blocks; tokens/s of both, what share of the dense peak they are (MFU, where the GPU's peak is known), the
memory that each allocates at most (GPUs), and where the Trainer's step spends its time. The bare loop is fp32 with
torch's fused AdamW, under autocast where the recipe is in bf16. On a CPU the shapes train in fp32.

`--levers` takes the bare loop away and adds one lever after the other to a plain step: a line for each, and a table.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from copy import deepcopy

import torch
from gear import SHAPES, as_ranks, chosen, is_rank, last_json, record, run_command, step_parser, train_blocks
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from pretraining.model.loss import next_token_loss
from pretraining.training.trainer import collate_blocks

ON_GPU = torch.cuda.is_available()
BLOCK_STEPS_ON_GPU = 10

# Each is added to those before it.
LEVERS = {
    "plain": {"loss.kind": "plain", "model.attn_implementation": "eager"},
    "attention kernel": {"model.attn_implementation": None},
    "chunked loss": {"loss.kind": "chunked"},
    "fused loss": {"loss.kind": "fused"},
    "compiled blocks": {"speed.compile": "blocks"},
    "documents kept apart": {"data.document_masking": True},
    "every layer recomputed": {"training.activation_checkpointing": True},
}


def main() -> None:
    parser = step_parser(__doc__, pairs=15)
    parser.add_argument("--layers", type=int, help="instead of the shape's, if these are too many here")
    parser.add_argument("--block_steps", type=int, help="steps of a block (default: by shape, 10 on a GPU)")
    parser.add_argument("--bare", choices=list(LOOPS), default="plain", help="PyTorch's loop, or an engine's")
    parser.add_argument("--levers", action="store_true", help="what each lever brings, without the bare loop")
    parser.add_argument("--lever", choices=LEVERS, help="used by --levers: the last one that is added")
    options = parser.parse_args()
    if is_rank():
        run_paired(options)
    elif options.levers and options.lever is None:
        measure_levers(options)
    else:
        subprocess.run(as_ranks(options.processes), check=True)


def measure_levers(options: argparse.Namespace) -> None:
    """Run each lever on top of those before it; print a JSON line each, and a row of a table on stderr."""
    print(f"{'':<24}{'tokens/s':>12}{'MFU':>8}{'peak GB':>10}", file=sys.stderr)
    for lever in LEVERS:
        finished = run_command(*as_ranks(options.processes, "--lever", lever), code=None)
        lines = [line for line in finished.stdout.splitlines() if line.startswith('{"benchmark"')]
        print(*lines, sep="\n", flush=True)
        if finished.code:
            print(finished.stderr[-3000:], file=sys.stderr)
        row = last_json(lines[-1]) if finished.code == 0 else {}
        rate, mfu, peak = (row.get(key) for key in ("tokens_per_second", "mfu", "peak_bytes"))
        cells = ["failed" if rate is None else f"{rate:,.0f}", "" if mfu is None else f"{mfu:.1%}"]
        cells.append("" if peak is None else f"{peak / 1e9:,.1f}")
        print("{:<24}{:>12}{:>8}{:>10}".format(lever, *cells), file=sys.stderr)


def run_paired(options: argparse.Namespace) -> None:
    """Train with a callback that interleaves the bare loop: precision, data workers and layers as the options say."""
    from pretraining.recipe import load_recipe
    from pretraining.recipe.model import own_key

    shape, changes = SHAPES[options.shape], {}
    if ON_GPU:
        changes |= {"training.bf16": True, "training.dataloader_num_workers": 2}
    if options.layers:
        model = load_recipe(shape.recipe).model
        changes[f"model.{own_key(model, 'num_hidden_layers')}"] = options.layers
    for name, lever in LEVERS.items() if options.lever else ():
        changes |= lever
        if name == options.lever:
            break
    block_steps = options.block_steps or (BLOCK_STEPS_ON_GPU if ON_GPU else shape.block_steps)
    paired = PairedSteps(block_steps, None if options.levers else LOOPS[options.bare])
    train_blocks(options, block_steps, options.pairs + 1, paired, changes)
    if os.environ["RANK"] == "0":
        record("train_step", {**chosen(options, "block_steps", "levers"), **paired.result()}, options.keep)


class PairedSteps(TrainerCallback):
    """After every block of Trainer steps, as many bare steps on a copy of the model."""

    # the run's SpeedMeter: whoever starts training hands it over
    speed = None

    def __init__(self, block_steps: int, bare_loop: "type[BareLoop] | None"):
        self.block_steps, self.bare_loop = block_steps, bare_loop
        self.bare = None

    def on_train_begin(self, args, state, control, model, train_dataloader, **kwargs):
        self.model, self.dataset, self.args = model, train_dataloader.dataset, args
        self.trainer_seconds, self.bare_seconds, self.phases = [], [], Counter()
        self.trainer_peak = self.bare_peak = None
        peak_since_then()
        self.began = now()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.block_steps:
            return
        ended = now()
        self.trainer_seconds.append((ended - self.began) / self.block_steps)
        taken = self.speed.clock.take()
        if state.global_step > self.block_steps:  # the first block warms up
            self.phases.update(taken)
        if self.bare_loop:
            with self.speed.clock.during("bare"):
                self._bare_block()
        else:
            self.trainer_peak = peak_since_then()
        self.began = now()

    def _bare_block(self) -> None:
        if self.bare is None:
            self.trainer_peak = peak_since_then()
            self.trainer_bytes = torch.cuda.memory_allocated() if ON_GPU else 0
            self.bare = self.bare_loop(self.model, self.dataset, self.args)
        began = now()
        for _ in range(self.block_steps):
            self.bare.step()
        self.bare_seconds.append((now() - began) / self.block_steps)
        if ON_GPU:
            self.bare_peak = peak_since_then() - self.trainer_bytes

    def result(self) -> dict:
        """Return medians over the pairs, the first (warming up) left out."""

        def rates(prefix: str, step_seconds: float) -> dict:
            rate = self.speed.tokens_at(1) / step_seconds
            mfu = self.speed.utilization(rate).get("throughput/mfu")
            return {f"{prefix}tokens_per_second": round(rate, 1), f"{prefix}mfu": mfu}

        seconds = statistics.median(self.trainer_seconds[1:])
        values = {**rates("", seconds), "peak_bytes": self.trainer_peak, "step_seconds": round(seconds, 5)}
        steps = self.block_steps * (len(self.trainer_seconds) - 1)
        for phase in ("data_wait", "forward", "backward", "optimizer"):
            values[f"{phase}_seconds"] = round(self.phases[phase] / steps, 6)
        if self.bare_loop:
            pairs = list(zip(self.trainer_seconds, self.bare_seconds, strict=True))[1:]
            bare_seconds = statistics.median(bare for _, bare in pairs)
            ratios = sorted(trainer / bare for trainer, bare in pairs)
            values |= {
                "ratio": round(statistics.median(ratios), 4),
                "ratio_lowest_quartile": round(ratios[len(pairs) // 4], 4),
                "bare_step_seconds": round(bare_seconds, 5),
                **rates("bare_", bare_seconds),
                "bare_peak_bytes": self.bare_peak,
            }
        return {**values, "block_steps": self.block_steps, "num_threads": torch.get_num_threads()}


class BareLoop:
    """The shortest loop that trains a copy of the model as it should be."""

    def __init__(self, model, dataset, arguments):
        self.dataset, self.batch_size, self.position = dataset, arguments.per_device_train_batch_size, 0
        self.rank, self.world_size = arguments.process_index, arguments.world_size
        self.device, bf16 = arguments.device, arguments.bf16
        self.autocast = (lambda: torch.autocast(self.device.type, torch.bfloat16)) if bf16 else nullcontext
        inner = getattr(model, "_orig_mod", model)
        self.model = type(inner)(inner.config).float().to(self.device)
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
        self.parameters = decayed + others
        self.share_gradients(arguments)

    def share_gradients(self, arguments) -> None:
        if self.world_size > 1:
            self.model = DistributedDataParallel(self.model)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and labels of the next micro-batch."""
        first = (self.position * self.world_size + self.rank) * self.batch_size
        self.position += 1
        batch = collate_blocks(self.dataset.__getitems__(range(first, first + self.batch_size)))
        return tuple(torch.as_tensor(batch[key]).to(self.device) for key in ("input_ids", "labels"))

    def step(self) -> None:
        ids, labels = self.batch()
        with self.autocast():
            loss = next_token_loss(self.model(input_ids=ids), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class EngineLoop(BareLoop):
    """The shortest loop around a second DeepSpeed engine, configured as the run's."""

    def share_gradients(self, arguments) -> None:
        import deepspeed

        config = deepcopy(arguments.hf_deepspeed_config.config)
        self.engine = deepspeed.initialize(model=self.model, optimizer=self.optimizer, config=config)[0]

    def step(self) -> None:
        """Forward, backward, and the engine's step, which clips."""
        ids, labels = self.batch()
        self.engine.backward(next_token_loss(self.engine(input_ids=ids), labels))
        self.engine.step()


LOOPS = {"plain": BareLoop, "engine": EngineLoop}


def now() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_since_then() -> int | None:
    """The most that was allocated since the last call."""
    if not ON_GPU:
        return None
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


if __name__ == "__main__":
    main()
