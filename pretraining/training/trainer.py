"""Train a run: its micro-batches, its learning rate, its validation, and its checkpoints.

The loop is transformers'. Only public methods are overridden here. upstream/transformers.py opens private ones.
"""

import atexit
import gc
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, Dataset, default_convert
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
)
from transformers.utils import logging

from pretraining.data.documents import part_of_sequences, stack_blocks
from pretraining.errors import UserError
from pretraining.recipe import Recipe
from pretraining.runtime.journal import NOTHING_HEALED
from pretraining.runtime.metric_names import OF_AVERAGE
from pretraining.runtime.process_group import ALONE, RankGroups
from pretraining.runtime.processes import ignore_in_worker, kill_workers
from pretraining.runtime.run_folder import is_validated
from pretraining.training import optimizers
from pretraining.training.arguments import training_refusals
from pretraining.training.gradients import Clipping, LogitClip, refuse_frozen_projections
from pretraining.training.monitors import RunMonitors, SettledCollector, notify
from pretraining.training.muon import Muon
from pretraining.training.schedule import follow_run, own_schedule
from pretraining.training.stopping import StoppingCallback
from pretraining.training.throughput import StepClock
from pretraining.upstream.deepspeed import keep_norm_at_stage_0, mend_optimizer, stepping_optimizers
from pretraining.upstream.split_weights import expert_groups_of
from pretraining.upstream.torch import LoaderWorkers
from pretraining.upstream.transformers import OpenTrainer
from pretraining.upstream.wide_weights import split_by_type

PLAIN_GROUPS = 2
"""Parameters that are decayed, and those that are not: with Muon, rates by kind and muP there are more groups."""
PREFETCH_FACTOR = 2
"""Micro-batches that each data worker reads ahead, if the recipe does not say it: torch's default."""
ABSENT: dict = {}
"""A micro-batch that a smaller step does not have."""


@dataclass(frozen=True)
class RunParts:
    """What a run has beside its model and its data; each may be absent."""

    evaluator: Any = None
    """An `Evaluator`; None validates nothing."""
    checkpoints: Any = None
    """A `CheckpointManager`; None saves nothing."""
    monitors: RunMonitors | None = None
    """They have begun this attempt, and say where. None: it begins at the first step."""
    arrival: Any = None
    """An `Arrival`, of data that is prepared meanwhile."""
    callbacks: Sequence[TrainerCallback] = ()
    groups: RankGroups = ALONE
    """Which ranks work on the same samples."""


NO_PARTS = RunParts()


class PretrainingTrainer(OpenTrainer):
    """Train a recipe from the present step of its run.

    The recipe's optimizer, clipping and learning rate are chosen here. The evaluator replaces the Trainer's evaluation
    loop, whose mean is not exact. The checkpoints replace what the Trainer writes. The Trainer's own
    cadence (`eval_strategy`, `eval_steps`, `save_steps`) and its best-model bookkeeping stay in force.

    This class looks for a request to stop after every step and between the rounds of a validation; one that is cut
    short has no result. Once a checkpoint is saved, the process ends with 75 (runtime/exit_codes.py).

    loss: the Trainer's `compute_loss_func`.

    Raises `UserError`: transformers refuses a value of the recipe's `training`, optimizer and schedule included.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: PreTrainedModel,
        arguments: TrainingArguments,
        *,
        loss: Callable,
        train_dataset: Dataset | Sequence,
        parts: RunParts = NO_PARTS,
    ) -> None:
        monitors, groups = parts.monitors, parts.groups
        self.recipe, self.groups, self.arrival = recipe, groups, parts.arrival
        self.evaluator, self.checkpoints = evaluator, checkpoints = parts.evaluator, parts.checkpoints
        self.progress = monitors.start.progress(recipe) if monitors else recipe.progress()
        self.journal = monitors.start.journal if monitors else NOTHING_HEALED
        self.clock = monitors.speed.clock if monitors else StepClock()
        self.stop = monitors.stop if monitors else None
        self.workers: LoaderWorkers | None = None
        with training_refusals(recipe.where):  # before anything of the run is written
            callbacks = [
                *(evaluator.callbacks if evaluator else ()),
                *(monitors.callbacks(checkpoints) if monitors else ()),
                *parts.callbacks,
                Clipping(recipe),
            ]
            if recipe.optimizer.qk_clip:
                refuse_frozen_projections(model)
                callbacks.append(LogitClip(recipe.optimizer.qk_clip))
            if recipe.speed.bf16_decay:
                callbacks.append(optimizers.Bf16InDecay(recipe, self.progress.schedule_place))
            part, ranks = groups.sequence_part, groups.degrees.sequence
            super().__init__(
                model=model,
                args=arguments,
                train_dataset=train_dataset,
                eval_dataset=evaluator.dataset if evaluator else None,
                data_collator=partial(collate_blocks, part=part, parts=ranks),
                compute_loss_func=monitors.loss(loss) if monitors else loss,
                optimizer_cls_and_kwargs=optimizers.choose_optimizer(recipe),
                callbacks=callbacks,
            )
            # Let transformers refuse names and keywords now rather than when training begins.
            note = optimizers.check_optimizer(recipe, self.args)
            get_scheduler(
                self.args.lr_scheduler_type,
                torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=self.args.learning_rate),
                num_warmup_steps=self.args.get_warmup_steps(self.args.max_steps),
                num_training_steps=self.args.max_steps,
                scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
            )
        if note and self.is_world_process_zero():
            print(f"note: {note}", file=sys.stderr, flush=True)
        if self.stop is not None:
            self.add_callback(StoppingCallback(self.stop))
        self.remove_callback(PrinterCallback)  # ProgressCallback shows the same
        logging.disable_progress_bar()  # one bar is enough
        if self.accelerator.ddp_handler is not None:
            self.accelerator.ddp_handler.gradient_as_bucket_view = True  # saves a copy of every gradient

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does. A run that was asked to stop ends here."""
        try:
            result = super().train(*args, **kwargs)
        except Exception:
            if self.checkpoints:
                self.checkpoints.writer.wait_for_marker()  # written behind training; the process ends with it
            raise
        finally:
            if self.workers is not None:
                self.workers.end()
        self._leave_if_stopped()
        return result

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LRScheduler:
        """Build the recipe's schedule, and let it follow the run."""
        num_steps = self.progress.schedule_place(num_training_steps)
        if (schedule := own_schedule(self.recipe, num_steps)) is not None:
            self.lr_scheduler = LambdaLR(self.optimizer if optimizer is None else optimizer, schedule)
        scheduler = super().create_scheduler(num_steps, optimizer)
        follow_run(scheduler, self.progress, self.journal)
        return scheduler

    def gradient_norm_known(self, norm: float | torch.Tensor | None) -> None:
        notify(self.callback_handler.callbacks, "on_gradient_norm", norm)

    def release(self) -> None:
        """Free the memory of an engine that is not trained any more. The process group stays."""
        if self.is_deepspeed_enabled:
            self.model_wrapped.destroy()
        self.accelerator.free_memory()
        self.model = self.model_wrapped = self.optimizer = self.lr_scheduler = None
        # it too refers to the engine's parts, and would keep their memory
        self.callback_handler.model = self.callback_handler.optimizer = None
        # what SettledCollector froze would not be collected; without it, what others froze need not be looked at
        callbacks = self.callback_handler.callbacks
        if any(isinstance(each, SettledCollector) and each.has_frozen for each in callbacks):
            gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[type, dict]:
        """Return Transformers' choice, without the optimizer's own warm-up: only the schedule warms up."""
        optimizer_class, keywords = Trainer.get_optimizer_cls_and_kwargs(args, model)
        keywords.pop("warmup_steps", None)
        return optimizers.counting_by_tensor(optimizer_class), keywords

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the recipe's optimizer. Rank 0 prints groups that differ in more than weight decay."""
        # under DeepSpeed the Trainer calls this twice
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        # All of a group's parameters may be frozen, and DeepSpeed can flatten neither no parameter nor two types.
        optimizer.param_groups[:] = split_by_type(optimizer.param_groups)
        if isinstance(optimizer, Muon):
            # first: what it adds to the logs comes before the row is written
            self.callback_handler.callbacks.insert(
                0, optimizers.GroupValues(optimizer, self.progress.schedule_place)
            )
        is_plain = len(optimizer.param_groups) <= PLAIN_GROUPS and not self.recipe.weights.frozen
        if self.is_world_process_zero() and not is_plain:
            print("\n".join(optimizers.describe_groups(optimizer, self.model)), flush=True)
        # Ranks that have other experts cannot share a partition. Without split experts this changes nothing.
        optimizer.param_groups[:] = expert_groups_of(optimizer.param_groups)
        return optimizer

    def get_tp_size(self) -> int:
        """Return 1: a rank counts the targets of the samples that it reads, also if others read the same ones."""
        return 1

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict:
        """Measure validation loss in nats per token, perplexity and bits per byte, and tasks; every rank takes part.

        A save that is due comes first: if the validation dies, no step is lost.
        """
        step, strategy = self.state.global_step, self.args.save_strategy
        # `epoch` saves at the end of the only one, which is validated before
        is_due = self.control.should_save or (strategy == "epoch" and step >= self.state.max_steps)
        if self.checkpoints and is_due and step > self.first_step:
            with self.clock.during("saving"):
                self.checkpoints.save(self, validation_follows=True)

        def interrupted() -> bool:
            """Return whether the validation is to end, between two of its rounds."""
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            return self.stop is not None and self.stop.agreed()

        of_average: dict | None = {}
        if self.checkpoints and self.recipe.optimizer.average_decay is not None and step > 0:
            with self.checkpoints.exponential_average(self):
                of_average = self.evaluator.measure(self.model_wrapped, step, interrupted)
        # the weights are exchanged for their average, and back after the block
        averaged = self.checkpoints.averaged_weights(self) if self.checkpoints else nullcontext()
        with averaged:
            measured = None
            if of_average is not None:
                measured = self.evaluator.measure(self.model_wrapped, step, interrupted)
            if measured is None:
                # Save and stop. Nothing is logged, and the next start repeats the validation. If one were still wanted,
                # the Trainer would begin it as it leaves its loop.
                self.control.should_evaluate = False
                if step == self.first_step:
                    self._leave_if_stopped()  # the checkpoint it came from holds all there is
                self.control.should_save = self.control.should_training_stop = True
                # a NaN under the name that the Trainer looks up in what a validation returns
                judged = (self.args.metric_for_best_model or "loss").removeprefix("eval_")
                metrics = {f"eval_{judged}": math.nan}
            else:
                measured |= {f"{OF_AVERAGE}{name}": value for name, value in of_average.items()}
                metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
                self.log(metrics)
                self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if self.checkpoints:
            if self.control.should_save and not is_validated(step, self.state.log_history):
                self.checkpoints.save(self)  # cut short: before a schedule follows the NaN that stands for it
            self.checkpoints.add_validation(self)
        return metrics

    def _leave_if_stopped(self) -> None:
        if self.stop is not None:
            self.stop.leave_if_agreed(self.state.global_step)

    def get_train_dataloader(self) -> DataLoader:
        """Return the Trainer's loader, whose workers ignore signals; ranks that share a sample get the same batches."""
        if (together := self.groups.degrees.ranks_per_sample) > 1:
            # accelerate gives the ranks of one group the same batches if this mesh has their number
            shape = (self.groups.data_ranks, together)
            mesh = init_device_mesh(self.args.device.type, shape, mesh_dim_names=("dp", "tp"))
            self.accelerator.state.ds_device_mesh = mesh
        # hidden while the loader is built: accelerate would make a mesh of its own from it, without split sequences
        config = self.accelerator.deepspeed_plugin.deepspeed_config if self.is_deepspeed_enabled else {}
        split = config.pop("tensor_parallel", None)
        try:
            loader = super().get_train_dataloader()
        finally:
            if split is not None:
                config["tensor_parallel"] = split
        if loader.num_workers:
            batches = loader.base_dataloader
            batches.worker_init_fn = partial(_begin_worker, batches.worker_init_fn)
            self.workers = LoaderWorkers(batches)
            atexit.register(kill_workers)  # if a worker does not leave, or a second one could not be started
        return loader

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list, Any]:
        """Return the step's micro-batches. A ramp's smaller step has fewer: the others are absent and come first."""
        if self.arrival is not None:
            # A worker reads so many micro-batches ahead, and accelerate's loader one more.
            workers = self.args.dataloader_num_workers
            ahead = 1 + workers * (self.args.dataloader_prefetch_factor or PREFETCH_FACTOR)
            samples = ahead * self.args.per_device_train_batch_size * self.args.world_size
            # a run that is asked to stop meanwhile, or cannot go on, saves
            try:
                with self.clock.during("data_wait"):
                    arrived = self.arrival.wait_for(self.state.global_step, samples)
            except UserError:
                self._save_before_leaving()
                raise
            if not arrived:
                self._save_before_leaving()
                self._leave_if_stopped()
        sizes = self.progress.step_sizes
        wanted = num_batches * sizes.at(self.state.global_step) // sizes.full
        self.clock.enter("data_wait")  # ends every pause
        batches, num_items = super().get_batch_samples(epoch_iterator, wanted, device)
        self.clock.enter("other")
        # the Trainer counts a fixed number of micro-batches, and the last one closes the step: it must be a real one
        return [ABSENT] * (num_batches - wanted) + batches, num_items

    def _save_before_leaving(self) -> None:
        """Save the steps that were done since the start, and end the callbacks, as after the last step."""
        if self.state.global_step > self.first_step:
            self.checkpoints.save(self)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)

    def training_step(self, model: Any, inputs: dict, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward, or nothing for an absent micro-batch. DeepSpeed steps after a step's last one."""
        if inputs is ABSENT:
            return self.running_loss.new_zeros(())
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.clock.enter("other")
        return loss

    def compute_loss(self, model: Any, inputs: dict, *args: Any, **kwargs: Any) -> Any:
        """Run forward pass and loss. The samples' sources go to the callbacks that use them, not to the model."""
        sources = inputs.pop("source", None)
        if sources is not None:
            notify(self.callback_handler.callbacks, "on_sources", sources)
        self.clock.enter("forward")
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.clock.enter("backward")  # which follows in a training step
        return loss

    def floating_point_ops(self, inputs: dict) -> int:
        """Return the Trainer's estimate for a forward and backward pass; 0 for an absent micro-batch."""
        return 0 if inputs is ABSENT else super().floating_point_ops(inputs)

    def count_targets(self, batch_samples: list, count: Any) -> torch.Tensor | int | None:
        """Return this rank's targets of the step; if ranks may have different numbers, the mean of all ranks' numbers.

        Each rank's loss is a sum divided by this count, and the step's loss the mean of the ranks' losses.
        """
        skips = self.recipe.monitors.skips_blocks
        if not batch_samples or not (skips or self.recipe.data.document_masking):
            return count
        count = count.to(self.args.device)
        if self.args.world_size > 1:
            dist.all_reduce(count)
        if skips:
            # every block of the step may be skipped: its loss is then 0, and not 0 / 0
            count = count.clamp(min=1)
        return count / self.args.world_size

    def log(self, logs: dict, start_time: float | None = None) -> None:
        """Log as the Trainer does, then set the running loss to zero, even if it was NaN."""
        super().log(logs, start_time)
        if "loss" in logs:
            self.running_loss.zero_()  # the Trainer subtracts it from itself, so that one NaN would stay for ever

    def prepared(self) -> None:
        """Mend DeepSpeed's engine and its optimizer."""
        engine: Any = self.model_wrapped
        if self.is_deepspeed_enabled:
            keep_norm_at_stage_0(engine, self.gradient_norm_known)
            mend_optimizer(engine.optimizer)
            if self.recipe.speed.compile == "deepcompile":
                engine.compile(backend=self.recipe.speed.compile_backend)
        if self.recipe.optimizer.average_decay is not None:
            # now: accelerate and DeepSpeed have put others in the place of the one that was created
            prepared: Any = self.optimizer
            for each in stepping_optimizers(prepared.optimizer):
                optimizers.keep_average(each, self.recipe.optimizer, lambda: self.state.global_step)

    def repeats_validation(self) -> bool:
        return self.evaluator is not None and self.evaluator.is_repeated(self.args, self.state)

    def closing_results(self) -> dict[str, float]:
        """Return the metrics of the last step, measured now unless the Trainer's cadence has just done so."""
        assert self.evaluator is not None
        last = next((row for row in reversed(self.state.log_history) if "eval_loss" in row), {})
        if last.get("step") != self.state.global_step:
            last = self.evaluate()
            self._leave_if_stopped()
        metrics = {key: value for key, value in last.items() if key.startswith("eval_")}
        return {**metrics, "unigram_bits_per_byte": self.evaluator.unigram_bits_per_byte()}


def _begin_worker(first: Callable[[int], None] | None, worker: int) -> None:
    """Do what the Trainer's data worker begins with. Then it ignores signals that ask a run to stop."""
    if first is not None:
        first(worker)
    ignore_in_worker()


def collate_blocks(
    blocks: list[dict[str, np.ndarray]], part: int = 0, parts: int = 1
) -> dict[str, torch.Tensor | int]:
    """Stack blocks to tensors for the model's forward pass: of each sequence the rank's own `part` of `parts`."""
    return default_convert(part_of_sequences(stack_blocks(blocks), part, parts))
