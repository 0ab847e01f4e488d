"""The Trainer, with validation and checkpoints of our own."""

import gc
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from transformers import PrinterCallback, Trainer, TrainingArguments, get_scheduler
from transformers.utils import logging

from pretraining.recipe.budget import StepSizes
from pretraining.runtime.journal import NOTHING_HEALED, Journal
from pretraining.runtime.signals import ignore_in_worker
from pretraining.training.arguments import training_refusals
from pretraining.training.monitors import tell
from pretraining.training.muon import BindPartitions, Muon
from pretraining.training.optimizers import describe_groups
from pretraining.training.schedule import count_tokens, follow_step_sizes, lower_rates
from pretraining.training.schedule_free import counting_by_tensor
from pretraining.training.stopping import StoppingCallback, StopRequests
from pretraining.training.throughput import StepClock, TimedTrainer
from pretraining.upstream.zero_optimizers import keep_norm_at_stage_0, mend_optimizer

ABSENT: dict = {}
"""A micro-batch that a smaller step does not have."""


class Checkpoints(Protocol):
    """What saves and loads the state of a Trainer: a `CheckpointManager`. All ranks call it together."""

    def save(self, trainer: Trainer) -> None: ...

    def load_state(self, trainer: Trainer, folder: Path) -> None: ...

    def load_position(self, trainer: Trainer, folder: Path) -> None: ...


class PretrainingTrainer(TimedTrainer):
    """`validate(model, step, interrupted) -> metrics` replaces the evaluation loop, whose mean is not exact.

    `schedule_clock(finished steps)` is what the learning rate's schedule counts where it does not count steps.
    `averaged_weights(trainer)` holds the weights to measure where the optimizer trains others.

    `checkpoints` replaces what the Trainer and DeepSpeed write and load: pickles of one layout.

    `stop` is asked after every step and in every round of a validation, which then has no result (None); once
    the checkpoint is saved the process leaves with its exit code. The Trainer's own cadence (`eval_strategy`,
    `eval_steps`) and its best-model bookkeeping stay in force. What it refuses of the recipe's `training`,
    optimizer and schedule included, is a `UserError` that names the file.
    """

    def __init__(
        self,
        *args,
        validate: Callable[[torch.nn.Module, int, Callable[[], bool]], dict | None],
        recipe_path: Path,
        checkpoints: Checkpoints | None = None,
        stop: StopRequests | None = None,
        journal: Journal = NOTHING_HEALED,
        step_sizes: StepSizes | None = None,
        schedule_clock: Callable[[int], float] | None = None,
        clock: StepClock | None = None,
        clipping: Callable[[torch.nn.Module, torch.optim.Optimizer], None] | None = None,
        averaged_weights: Callable[[Trainer], AbstractContextManager] = nullcontext,
        **kwargs,
    ):
        self.validate, self.recipe_path, self.journal = validate, recipe_path, journal
        self.checkpoints, self.stop, self.step_sizes = checkpoints, stop, step_sizes
        self.clock, self.clipping = clock or StepClock(), clipping
        self.averaged_weights, self.schedule_clock = averaged_weights, schedule_clock
        with training_refusals(recipe_path):  # before anything of the run is written
            super().__init__(*args, **kwargs)
            _try_optimizer_and_schedule(self.args)
        if stop is not None:
            self.add_callback(StoppingCallback(stop))
        self.remove_callback(PrinterCallback)  # ProgressCallback shows what it would
        logging.disable_progress_bar()  # one bar is enough
        if self.accelerator.ddp_handler is not None:
            self.accelerator.ddp_handler.gradient_as_bucket_view = True  # spares a copy of every gradient

    def train(self, *args, **kwargs):
        """As the Trainer's; a run that was asked to stop is left here."""
        result = super().train(*args, **kwargs)
        self._leave_if_stopped()
        return result

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """The recipe's schedule, scaled with the steps' sizes and lowered where recipe and journal say so."""
        clock = self.schedule_clock
        scheduler = super().create_scheduler(
            clock(num_training_steps) if clock else num_training_steps, optimizer
        )
        if clock:
            count_tokens(scheduler, clock)
        if self.step_sizes is not None:
            follow_step_sizes(scheduler, self.step_sizes)
        lower_rates(scheduler, self.journal)
        return scheduler

    def _get_grad_norm(self, model, grad_norm=None):
        """Of every step, before clipping; told to the callbacks that listen."""
        norm = super()._get_grad_norm(model, grad_norm)
        self._tell_norm(norm)
        return norm

    def _tell_norm(self, norm) -> None:
        tell(self.callback_handler.callbacks, "hear_gradient_norm", norm)

    def release(self) -> None:
        """Give back the memory of an engine that is not trained any further; the process group stays."""
        if self.is_deepspeed_enabled:
            self.model_wrapped.destroy()
        self.accelerator.free_memory()
        self.model = self.model_wrapped = self.optimizer = self.lr_scheduler = None
        self.callback_handler.model = self.callback_handler.optimizer = None
        gc.unfreeze()  # see training/collector.py
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model=None) -> tuple[type, dict]:
        """Transformers' choice; a rate that warms up does so by the schedule alone."""
        optimizer_class, keywords = Trainer.get_optimizer_cls_and_kwargs(args, model)
        keywords.pop("warmup_steps", None)
        return counting_by_tensor(optimizer_class), keywords

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """The recipe's optimizer; rank 0 says which parameters are in which group.

        Under DeepSpeed the Trainer asks for it twice, and the second time takes the one it has.
        """
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        if isinstance(optimizer, Muon):
            self.add_callback(BindPartitions(optimizer))
        if self.clipping is not None:
            self.clipping(self.model, optimizer)
        if self.is_world_process_zero():
            print("\n".join(describe_groups(optimizer)), flush=True)
        return optimizer

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict:
        """Validation loss in nats per token, perplexity and bits per byte; every rank takes part."""
        with self.averaged_weights(self):
            measured = self.validate(self.model_wrapped, self.state.global_step, self._interrupted)
            if measured is None:
                return self._evaluation_cut_short()
            metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    def _interrupted(self) -> bool:
        """Between two rounds of a validation."""
        self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        return self.stop is not None and self.stop.agreed()

    def _evaluation_cut_short(self) -> dict:
        """Save and stop; nothing is logged, and the next start measures again."""
        self.control.should_evaluate = False  # else the Trainer begins another one when it leaves its loop
        if self.state.global_step == self._initial_global_step:
            self._leave_if_stopped()  # the checkpoint it came from holds all there is
        self.control.should_save = self.control.should_training_stop = True
        judged = (self.args.metric_for_best_model or "loss").removeprefix("eval_")
        return {f"eval_{judged}": math.nan}

    def _leave_if_stopped(self) -> None:
        if self.stop is not None:
            self.stop.leave_if_agreed(self.state.global_step)

    def get_train_dataloader(self):
        """The Trainer's, whose workers outlive the signals that launchers send to every process."""
        loader = super().get_train_dataloader()
        if loader.num_workers:
            batches = loader.base_dataloader
            batches.worker_init_fn = _InWorker(batches.worker_init_fn)
        return loader

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        """The step's micro-batches. A ramp's smaller step has fewer: the others are absent and come first.

        The Trainer's loop counts micro-batches by a fixed accumulation; only the last of a step closes it.
        """
        sizes, wanted = self.step_sizes, num_batches
        if sizes is not None:
            wanted = num_batches * sizes.at(self.state.global_step) // sizes.full
        batches, num_items = super().get_batch_samples(epoch_iterator, wanted, device)
        return [ABSENT] * (num_batches - wanted) + batches, num_items

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """Forward and backward; nothing for an absent micro-batch."""
        if inputs is ABSENT:
            return self._tr_loss.new_zeros(())
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model, inputs, *args, **kwargs):
        """Forward pass and loss; the samples' sources are for the callbacks that listen, not for the model."""
        sources = inputs.pop("source", None)
        if sources is not None:
            tell(self.callback_handler.callbacks, "hear_sources", sources)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def floating_point_ops(self, inputs) -> int:
        """The Trainer's estimate of a forward and backward pass."""
        return 0 if inputs is ABSENT else super().floating_point_ops(inputs)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device):
        """Targets of the step on this rank; of masked documents, of which ranks hold different numbers, the mean.

        Each rank's loss is a sum over this count, and the step's loss the mean over the ranks.
        """
        items = super()._get_num_items_in_batch(batch_samples, device)
        if not batch_samples or "position_ids" not in batch_samples[0] or self.args.world_size == 1:
            return items
        items = items.to(device)
        dist.all_reduce(items)
        return items / self.args.world_size

    def log(self, logs: dict, start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if "loss" in logs:
            # The Trainer clears its running loss by subtracting it from itself: one NaN would stay for ever.
            self._tr_loss.zero_()

    def _save_checkpoint(self, model, trial) -> None:
        """At the cadence of `save_steps`; `on_save` of the callbacks comes next."""
        self.checkpoints.save(self)

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        """Prepare as for a fresh start, then set every state in place."""
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if self.is_deepspeed_enabled:
            keep_norm_at_stage_0(self.model_wrapped, self._tell_norm)
            mend_optimizer(self.model_wrapped.optimizer)
        if resume_from_checkpoint is not None:
            self.checkpoints.load_state(self, Path(resume_from_checkpoint))
        return prepared

    def _run_epoch(self, *args, **kwargs) -> None:
        """Not where training is over already: it was resumed from a checkpoint that early stopping had left."""
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        """Without DeepSpeed the Trainer would load the weights before it prepares them: see above."""

    def _load_rng_state(self, checkpoint) -> None:
        """Called once the loop's own counters are at their start: random generators, and the running loss."""
        if checkpoint is not None:
            self.checkpoints.load_position(self, Path(checkpoint))

    def closing_validation(self) -> dict:
        """Metrics of the last step, measured now unless the Trainer's cadence has just done so."""
        last = next((row for row in reversed(self.state.log_history) if "eval_loss" in row), {})
        if last.get("step") != self.state.global_step:
            last = self.evaluate()
            self._leave_if_stopped()
        return {key: value for key, value in last.items() if key.startswith("eval_")}


class _InWorker:
    """A data worker's first call: the Trainer's own, then deaf to the signals that ask a run to stop."""

    def __init__(self, first: Callable[[int], None] | None):
        self.first = first

    def __call__(self, worker: int) -> None:
        if self.first is not None:
            self.first(worker)
        ignore_in_worker()


def _try_optimizer_and_schedule(arguments: TrainingArguments) -> None:
    """Let transformers refuse their names and keywords now rather than when training begins."""
    Trainer.get_optimizer_cls_and_kwargs(arguments)
    get_scheduler(
        arguments.lr_scheduler_type,
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=arguments.learning_rate),
        num_warmup_steps=arguments.get_warmup_steps(arguments.max_steps),
        num_training_steps=arguments.max_steps,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )
