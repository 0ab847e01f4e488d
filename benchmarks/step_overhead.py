"""Step time of train.py against a bare PyTorch loop: same model, data, optimizer, processes; paired in one run.

    python benchmarks/step_overhead.py --shape small --processes 1 --deepspeed null
    python benchmarks/step_overhead.py --shape 124m --processes 2 --deepspeed zero2 --pairs 6

Inside one training run, blocks of Trainer steps alternate with blocks of bare steps on a second copy of the
model, so that both see the same machine at the same time. Prints one JSON line; the ratio is the median of
the ratios of neighbouring blocks.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from record import REPOSITORY, parser_of, record

# shape -> (recipe, overrides of the recipe, optimizer steps in a block)
SHAPES = {
    # 4 layers, width 128: a step of some 60 ms on two CPU cores.
    "small": (
        "tiny",
        {"model.n_layer": 4, "model.n_embd": 128, "model.n_head": 4, "model.n_positions": 128},
        20,
    ),
    # The GPT-2 small shape on the tokens of the tiny corpus; one sequence a rank and step.
    "124m": ("124m", {"model.n_positions": 1024, "data.name": "python-stdlib"}, 1),
}


def main() -> None:
    start_ranks(__file__, run_paired, parse_arguments())


def start_ranks(script: str, run: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> None:
    """`run(options)` on each of `options.processes` ranks: torchrun starts this script again."""
    if "BENCHMARK_WORKER" in os.environ:
        return run(options)
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={options.processes}"]
    command = [*launcher, script, *sys.argv[1:]]
    subprocess.run(command, env={**os.environ, "BENCHMARK_WORKER": "1"}, check=True)


def run_paired(options: argparse.Namespace) -> None:
    """Run train.py's own `main` with a callback that interleaves the bare loop."""
    _, _, block_steps = SHAPES[options.shape]
    paired = build_paired_callback(block_steps, options.pairs)
    train_with(paired, recipe_arguments(options, block_steps))
    if os.environ["RANK"] == "0":
        values = {key: value for key, value in vars(options).items() if key != "keep"}
        record("step_overhead", {**values, **paired.result()}, options.keep)


def train_with(callback, words: list[str]) -> None:
    """train.py's own `main` with these words, `callback` before all others and no progress bar."""
    import train
    from pretraining.training.progress import ProgressCallback
    from pretraining.training.watch import Watch

    callbacks = Watch.callbacks

    def with_ours(watch: Watch, saves) -> list:
        return [callback, *(c for c in callbacks(watch, saves) if not isinstance(c, ProgressCallback))]

    Watch.callbacks = with_ours
    sys.argv = ["train.py", *words]
    train.main()


def recipe_arguments(options: argparse.Namespace, block_steps: int) -> list[str]:
    """train.py's command line: no logging, evaluation or saving inside the measured steps."""
    recipe, overrides, _ = SHAPES[options.shape]
    tiny = json.loads((REPOSITORY / "recipes" / "tiny.json").read_text())
    length = overrides["model.n_positions"]
    per_step = options.micro_batch * length * options.processes
    num_steps = block_steps * (options.pairs + 1)
    output = Path(tempfile.gettempdir()) / f"step_overhead_{os.getppid()}"
    shutil.rmtree(output, ignore_errors=True)
    values = {
        **overrides,
        "data.sources": tiny["data"]["sources"],
        "data.tokenizer": tiny["data"]["tokenizer"],
        "data.validation_share": tiny["data"]["validation_share"],
        "budget.tokens_per_step": per_step,
        "budget.tokens": per_step * num_steps,
        "training.per_device_train_batch_size": options.micro_batch,
        "training.dataloader_num_workers": 0,
        "training.bf16": False,
        "training.logging_steps": num_steps,
        "training.logging_first_step": False,
        "training.eval_strategy": "no",
        "training.save_strategy": "no",
        "training.activation_checkpointing": False,
        "training.report_to": "none",
        "report.every_seconds": None,
        "evaluation.max_validation_tokens": length,
    }
    settings = [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    return ["--recipe", recipe, "--deepspeed", options.deepspeed, "--output_dir", str(output), *settings]


def build_paired_callback(block_steps: int, num_pairs: int):
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from transformers import TrainerCallback

    from pretraining.model.loss import next_token_loss
    from pretraining.training.collate import collate_blocks

    class PairedCallback(TrainerCallback):
        """After every block of Trainer steps, as many bare steps on a copy of the model."""

        def __init__(self):
            self.trainer_seconds, self.bare_seconds = [], []

        def on_train_begin(self, args, state, control, model, train_dataloader, optimizer, **kwargs):
            self.dataset = train_dataloader.dataset
            self.batch_size, self.position = args.per_device_train_batch_size, 0
            self.rank, self.world_size = args.process_index, args.world_size
            self.bare = type(model)(model.config).float()
            decayed = [p for p in self.bare.parameters() if p.ndim >= 2]
            others = [p for p in self.bare.parameters() if p.ndim < 2]
            groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
            self.optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
            self.parameters = decayed + others
            if self.world_size > 1:
                self.bare = DistributedDataParallel(self.bare)
            self.began = time.perf_counter()

        def bare_step(self):
            first = (self.position * self.world_size + self.rank) * self.batch_size
            self.position += 1
            batch = collate_blocks(self.dataset.__getitems__(range(first, first + self.batch_size)))
            loss = next_token_loss(self.bare(input_ids=batch["input_ids"]), batch["labels"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % block_steps == 0:
                now = time.perf_counter()
                self.trainer_seconds.append((now - self.began) / block_steps)
                for _ in range(block_steps):
                    self.bare_step()
                self.began = time.perf_counter()
                self.bare_seconds.append((self.began - now) / block_steps)

        def result(self) -> dict:
            """Medians over the pairs, the first (warming up) left out."""
            pairs = list(zip(self.trainer_seconds, self.bare_seconds, strict=True))[1:]
            return {
                "ratio": round(statistics.median(t / b for t, b in pairs), 4),
                "ratio_lowest_quartile": round(sorted(t / b for t, b in pairs)[len(pairs) // 4], 4),
                "trainer_step_seconds": round(statistics.median(t for t, _ in pairs), 5),
                "bare_step_seconds": round(statistics.median(b for _, b in pairs), 5),
                "num_threads": torch.get_num_threads(),
            }

    return PairedCallback()


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--deepspeed", default="null", help="a ds_config, or null")
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=15)
    return parser.parse_args()


if __name__ == "__main__":
    main()
