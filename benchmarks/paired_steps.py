"""Blocks of train.py's steps and of a bare PyTorch loop's, in turns inside one training run."""

import statistics
import time
from contextlib import nullcontext
from copy import deepcopy

import deepspeed
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from pretraining.model.loss import next_token_loss
from pretraining.training.arguments import collate_blocks

ON_GPU = torch.cuda.is_available()


class PairedSteps(TrainerCallback):
    """After every block of Trainer steps, as many bare steps on a copy of the model."""

    speed = None
    """The run's SpeedMeter: whoever starts training hands it over."""

    def __init__(self, block_steps: int, bare_loop: "type[BareLoop] | None"):
        self.block_steps, self.bare_loop = block_steps, bare_loop
        self.bare = None

    def on_train_begin(self, args, state, control, model, train_dataloader, **kwargs):
        self.model, self.dataset, self.args = model, train_dataloader.dataset, args
        self.trainer_seconds, self.bare_seconds, self.phases = [], [], {}
        self.trainer_peak = self.bare_peak = None
        peak_since_then()
        self.began = now()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.block_steps:
            return
        ended = now()
        self.trainer_seconds.append((ended - self.began) / self.block_steps)
        self._take_phases(state.global_step)
        if self.bare_loop:
            with self.speed.clock.during("bare"):
                self._bare_block()
        else:
            self.trainer_peak = peak_since_then()
        self.began = now()

    def _take_phases(self, step: int) -> None:
        """Seconds by phase of the blocks after the first."""
        taken = self.speed.clock.take()
        if step > self.block_steps:
            for phase, seconds in taken.items():
                self.phases[phase] = self.phases.get(phase, 0.0) + seconds

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
        """Medians over the pairs, the first (warming up) left out."""
        seconds = statistics.median(self.trainer_seconds[1:])
        steps = self.block_steps * (len(self.trainer_seconds) - 1)
        phases = ("data_wait", "forward", "backward", "optimizer")
        return {
            **self._rates("", seconds),
            "peak_bytes": self.trainer_peak,
            "step_seconds": round(seconds, 5),
            **{f"{phase}_seconds": round(self.phases.get(phase, 0) / steps, 6) for phase in phases},
            **(self._beside_the_bare_loop() if self.bare_loop else {}),
            "block_steps": self.block_steps,
            "num_threads": torch.get_num_threads(),
        }

    def _beside_the_bare_loop(self) -> dict:
        pairs = list(zip(self.trainer_seconds, self.bare_seconds, strict=True))[1:]
        seconds = statistics.median(bare for _, bare in pairs)
        ratios = sorted(trainer / bare for trainer, bare in pairs)
        return {
            "ratio": round(statistics.median(ratios), 4),
            "ratio_lowest_quartile": round(ratios[len(pairs) // 4], 4),
            "bare_step_seconds": round(seconds, 5),
            **self._rates("bare_", seconds),
            "bare_peak_bytes": self.bare_peak,
        }

    def _rates(self, prefix: str, step_seconds: float) -> dict:
        rate = self.speed.step_sizes.at(0) / step_seconds
        mfu = self.speed.utilization(rate).get("throughput/mfu")
        return {f"{prefix}tokens_per_second": round(rate, 1), f"{prefix}mfu": mfu}


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
        self.over_ranks(arguments)

    def over_ranks(self, arguments) -> None:
        """Share the gradients of all ranks."""
        if self.world_size > 1:
            self.model = DistributedDataParallel(self.model)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and labels of the next micro-batch."""
        first = (self.position * self.world_size + self.rank) * self.batch_size
        self.position += 1
        batch = collate_blocks(self.dataset.__getitems__(range(first, first + self.batch_size)))
        return tuple(torch.as_tensor(batch[key]).to(self.device) for key in ("input_ids", "labels"))

    def step(self) -> None:
        """Forward, backward, clipping, AdamW."""
        ids, labels = self.batch()
        with self.autocast():
            loss = next_token_loss(self.model(input_ids=ids), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class EngineLoop(BareLoop):
    """The shortest loop around a second DeepSpeed engine, configured as the run's."""

    def over_ranks(self, arguments) -> None:
        """Make the engine."""
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
