"""Provide the CheckpointManager, with which the Trainer saves and loads: what each rank saves, and how it is set again.

The order of a save: this rank's share of the Trainer's state is gathered (`rank_share`), copied and written in the
background (background.py), and committed (format.py). Then old checkpoints are removed (retention.py) and the new one
is uploaded (upload.py). Loading reads the files (shard_files.py) into the live state (live_state.py).

Every rank saves its own fragments of the parameters and optimizer states. Rank 0 also saves what is the same on every
rank. On loading, each rank reads the slices that it needs, for any number of ranks and any stage that saved them.
"""

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from pretraining.checkpoints.background import CheckpointWriter
from pretraining.checkpoints.export import averaged_weights, demote_checkpoint, exponential_average
from pretraining.checkpoints.format import (
    Identity,
    Start,
    add_metrics,
    commit_checkpoint,
    metrics_at,
    read_receipt,
)
from pretraining.checkpoints.live_state import LiveState, set_block
from pretraining.checkpoints.remote import RemoteRun
from pretraining.checkpoints.retention import Retention
from pretraining.checkpoints.shard_files import (
    BUFFER,
    MASTER,
    STATE_FILE,
    STATE_FORMAT,
    CheckpointReader,
    fetch_nothing,
    fragment_key,
    mean_running_loss,
)
from pretraining.checkpoints.upload import Uploader, send_export
from pretraining.data.prepared import PreparedData
from pretraining.errors import UserError
from pretraining.planning.run_plan import RunPlan
from pretraining.recipe import Recipe
from pretraining.runtime.heartbeat import long_work
from pretraining.runtime.process_group import device_name, from_rank_0, together
from pretraining.runtime.run_folder import RunFolder, describe_environment, is_validated
from pretraining.upstream.deepspeed import whole_shape
from pretraining.upstream.torch import rates_now, set_rates
from pretraining.upstream.transformers import OpenTrainer, is_persistent

NOTABLE_RISE = 1.1
"""Of the learning rate at a start, beside that of the checkpoint."""


class CheckpointManager(TrainerCallback):
    """Saves, commits, removes and uploads the checkpoints of one start of a run, and loads the one it continues from.

    The Trainer calls `save`, `load_state` and `load_position`, on all ranks together. As a callback it polls the save
    in flight at each step, and waits for it at the end. It comes before the callback that writes the metrics, because
    the first row after a save says how long the save blocked training.
    """

    def __init__(
        self, run: RunFolder, recipe: Recipe, plan: RunPlan, data: PreparedData, start: Start
    ) -> None:
        self.run, self.start = run, start
        environment = describe_environment(device_name(), plan.world_size)
        self.identity = Identity(recipe, data.manifest, plan.layout, environment, start)
        section = recipe.checkpoints
        demote = demote_checkpoint if section.demote_to_weights else None
        self.retention = Retention(section, demote, recipe.evaluation.metric)
        remote = section.upload and RemoteRun(section.upload, run.path.name)
        self.uploader = Uploader(run, remote, section.upload_mirror, self.retention) if remote else None
        self.writer = CheckpointWriter(
            run,
            commit_checkpoint,
            after_commit=self._remove_old,
            on_committed=self._upload,
            background=section.background,
            on_full_disk=section.on_full_disk,
        )
        self._last_saved: int | None = None
        self._last_logged: dict | None = None

    def save(self, trainer: Trainer, validation_follows: bool = False) -> None:
        """Begin to save this step; returns once its state is copied. validation_follows: so does `add_validation`."""
        step = trainer.state.global_step
        # The Trainer asks for the same save up to three times: before the validation, after it, and at its last step.
        if self._last_saved == step:
            return
        self._last_saved, self.writer.validation_follows = step, validation_follows
        marker = self.identity.marker_at(step, trainer.state.log_history)
        self.writer.save(step, *rank_share(trainer), marker)

    def add_validation(self, trainer: Trainer) -> None:
        """Add what was measured of this step to the marker of its checkpoint, if there is one."""
        step = trainer.state.global_step
        metrics = metrics_at(step, trainer.state.log_history)
        if self.writer.add_validation(metrics) or not is_validated(step, trainer.state.log_history):
            return
        folder = self.start.checkpoint
        if folder is not None and folder == self.run.checkpoint(step):
            # the run continues from it, and an earlier start was cut short in this validation
            together(lambda: add_metrics(folder, metrics) if self.run.disks.is_first else None)
            self._upload(folder)

    def load_state(self, trainer: OpenTrainer, folder: Path) -> None:
        """Set a prepared Trainer from a checkpoint, in place, piece by piece; `UserError` if that does not fit."""
        fetch = self.start.fetch or (None if self.run.disks.shared else fetch_nothing)
        reader = CheckpointReader(folder, fetch, first=dist.get_rank())
        live = LiveState(trainer.model, trainer.optimizer)
        ours, theirs = {name: whole_shape(p) for p, name in live.names.items()}, reader.parameters
        if changed := [name for name in ours.keys() | theirs if ours.get(name) != theirs.get(name)]:
            name = min(changed)
            what = f"{name} is {theirs.get(name)} there and {ours.get(name)} here"
            raise UserError(f"{folder} is of another model: {what}")
        with torch.no_grad(), long_work():
            for block in live.blocks:
                with live.held(block, changed=True):
                    set_block(block, reader)
            for (state, name), tensor in live.kept_whole.items():
                # not there: saved before the first step, or with other settings
                if state in reader.whole_states(name):
                    tensor.copy_(reader.read_whole(state, name))
            live.set_weights()  # once all masters are set
            live.set_frozen(reader)
            for name, buffer in _persistent_buffers(live.model).items():
                buffer.copy_(reader.read(BUFFER, name, 0, buffer.numel()).view_as(buffer))
        reader.close()
        set_schedule(trainer.lr_scheduler, reader.state["schedule"], trainer.state.global_step)
        self._tell_rise(reader.state["schedule"]["rates"], schedule_state(trainer.lr_scheduler)["rates"])
        state, validation = trainer.state, self.start.validation
        if validation and not is_validated(state.global_step, state.log_history):
            # saved before its validation: what that changed is done now
            state.log_history.append({**validation, "epoch": state.epoch, "step": state.global_step})
            if not isinstance(trainer.lr_scheduler, LambdaLR):
                trainer.lr_scheduler.step(validation["eval_loss"])
        scaler: Any = live.loss_scaler or trainer.accelerator.scaler
        saved = reader.state["loss_scaler"] or {}
        # values that this scaler does not have are left out
        if hasattr(scaler, "load_state_dict"):
            scaler.load_state_dict({**scaler.state_dict(), **saved})
        elif scaler is not None:
            vars(scaler).update({key: value for key, value in saved.items() if key in vars(scaler)})
        if trainer.is_deepspeed_enabled:
            trainer.model_wrapped.skipped_steps = reader.state["skipped_steps"]

    def _tell_rise(self, earlier: Sequence[float], rates: Sequence[float]) -> None:
        """Say if the rate rises at this start, as that of a run whose decay is over if its budget is longer now."""
        before, now = max(earlier, default=0.0), max(rates, default=0.0)
        if dist.get_rank() == 0 and now > NOTABLE_RISE * before:
            self.run.add_event("rate_rises", step=self.start.step, earlier=before, now=now)
            line = f"the learning rate rises from {before:g} to {now:g} at this start: its schedule is another one now"
            remedy = "to go on after a decay, branch off before it (python -m pretraining.checkpoints branch)"
            print(f"{line}; {remedy}", file=sys.stderr, flush=True)

    def load_position(self, trainer: OpenTrainer, folder: Path) -> None:
        """Set the random generators and the running loss, after the Trainer's loop has reset its own counters."""
        rank, reader = dist.get_rank(), CheckpointReader(folder, fetch_nothing, first=dist.get_rank())
        same_ranks = reader.ranks == dist.get_world_size()
        # With another number of ranks no saved generator fits: each rank keeps the one of its seed.
        if same_ranks and (numbers := read_receipt(folder, rank, reader.ranks).get("rng")):
            tensors = reader.own_tensors(rank)
            version, internal, gauss = numbers["python"]
            random.setstate((version, tuple(internal), gauss))
            kind, keys, *rest = numbers["numpy"]
            np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
            torch.random.set_rng_state(tensors["rng/torch"])
            if torch.cuda.is_available() and "rng/cuda" in tensors:
                torch.cuda.random.set_rng_state(tensors["rng/cuda"])
        # The sum of losses since the last logged step goes on: the next row is the same as in a run without a break.
        # With another number of ranks each takes the mean: only the mean over ranks is logged.
        savers = [rank] if same_ranks else range(reader.ranks)
        # an earlier version's `reshard` left it out
        if saved := mean_running_loss(folder, savers, reader.ranks):
            trainer.running_loss.fill_(saved["sum"])
            trainer.last_logged_step = trainer.state.global_step - saved["steps"]

    # what a validation asks for
    averaged_weights = staticmethod(averaged_weights)
    exponential_average = staticmethod(exponential_average)

    def wait_for_upload(self) -> None:
        """Wait until the last checkpoint and the export are uploaded, or failed; every rank calls this at the end."""
        if self.uploader is None:
            return
        self.uploader.wait()
        with long_work():
            from_rank_0(lambda: send_export(self.run, self.uploader.remote))

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        # The upload of the one from which the run continues may have been interrupted.
        if self.start.checkpoint is not None:
            self._upload(self.start.checkpoint)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.writer.poll()

    def on_log(self, *_: Any, logs: dict, **__: Any) -> None:
        """Add to the first row after a save how long it blocked training, and the bytes of its copy."""
        # Rows of validations have no `loss`; they do not count as the first row.
        if "loss" in logs and self.writer.last is not self._last_logged:
            self._last_logged = self.writer.last
            logs["save_blocked_seconds"] = self._last_logged["blocked_seconds"]
            logs["save_snapshot_bytes"] = self._last_logged["snapshot_bytes"]

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.writer.wait()

    def _upload(self, folder: Path) -> None:
        # --resume PATH may name a checkpoint of another run, which this run must not upload.
        if self.uploader is not None and folder.parent == self.run.path:
            self.uploader.offer(folder)

    def _remove_old(self) -> None:
        removed = self.retention.apply(self.run)
        if self.uploader is not None:
            self.uploader.remove([folder.name for folder in removed])


class RankShare(NamedTuple):
    tensors: Mapping[str, torch.Tensor]  # by key; perhaps views of live tensors, which the next step changes
    files: Mapping[str, bytes]
    receipt: Mapping  # what else its receipt holds, as JSON


def rank_share(trainer: OpenTrainer) -> RankShare:
    """Gather this rank's share of a checkpoint of the Trainer as it is now; all ranks call it together."""
    # The Trainer's own `_save_checkpoint`, which this one replaces, updates FLOPs and callbacks in the same way.
    trainer.store_flos()
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            trainer.state.stateful_callbacks[type(callback).__name__] = callback.state()
    live = LiveState(trainer.model, trainer.optimizer)
    files = shared_files(trainer, live) if dist.get_rank() == 0 else {}
    # Each rank draws from its own generators and has its own loss since the last logged step, in nats per token.
    steps = trainer.state.global_step - trainer.last_logged_step
    loss = {"sum": trainer.running_loss.item(), "steps": steps}
    return RankShare(dict(rank_tensors(live)), files, {"rng": random_numbers(), "running_loss": loss})


def shared_files(trainer: OpenTrainer, live: LiveState) -> dict[str, bytes]:
    """Return what is the same on every rank: {name: content} of small files."""
    scalars = {}  # the optimizer's counts
    for block in live.blocks:
        with live.held(block):
            values = block.scalars()
            # By parameter, because another ZeRO stage groups the parameters in other blocks.
            scalars |= {name: values for name in block.parameters if block.state}

    def described(tensor: torch.Tensor) -> dict:
        # the shape of the whole tensor, even if ZeRO-3 has partitioned it
        return {"shape": list(whole_shape(tensor)), "dtype": str(tensor.dtype).removeprefix("torch.")}

    scaler = live.loss_scaler or trainer.accelerator.scaler
    # DeepSpeed's scaler has no state of its own: its attributes are its state.
    numbers = {}
    if scaler is not None:
        numbers = scaler.state_dict() if hasattr(scaler, "state_dict") else vars(scaler)
    state = {
        "format": STATE_FORMAT,
        "optimizer": type(live.torch_optimizer).__name__,
        "scalars": scalars,
        "schedule": schedule_state(trainer.lr_scheduler),
        "loss_scaler": {k: v for k, v in numbers.items() if isinstance(v, int | float | bool)} or None,
        "skipped_steps": getattr(trainer.model_wrapped, "skipped_steps", 0),
        "parameters": {name: described(parameter) for parameter, name in live.names.items()},
        "buffers": {name: described(buffer) for name, buffer in _persistent_buffers(live.model).items()},
    }
    return {
        STATE_FILE: f"{json.dumps(state, indent=2)}\n".encode(),
        TRAINER_STATE_NAME: f"{json.dumps(asdict(trainer.state), indent=2, sort_keys=True)}\n".encode(),
    }


def rank_tensors(live: LiveState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (key, tensor) of all that this rank saves: live views, and copies of blocks that are swapped to NVMe."""
    for block in live.blocks:
        # A block on NVMe is in memory only inside `held`: a view of it would not last.
        copied = torch.clone if block.is_swapped else lambda tensor: tensor
        with live.held(block):
            for state, tensor in block.per_element().items():
                for piece in map(live.own, block.pieces):
                    if piece.numel:
                        key = fragment_key(state, piece.parameter, piece.start, piece.cut)
                        yield key, copied(piece.of(tensor))
            # A state with its own shape must belong to one parameter: that of a flat partition fits no other partition.
            if len(block.parameters) == 1 and live.owns_whole:
                for state, tensor in block.whole().items():
                    yield fragment_key(state, block.parameters[0], None), copied(tensor.detach())
    for name in live.frozen:
        piece, tensor = live.own_frozen(name)
        if piece.numel:
            yield fragment_key(MASTER, name, piece.start, piece.cut), piece.of(tensor)
    if dist.get_rank() == 0:  # these are the same on every rank
        for (state, name), tensor in live.kept_whole.items():
            yield fragment_key(state, name, None), tensor
        for name, buffer in _persistent_buffers(live.model).items():
            yield fragment_key(BUFFER, name, 0), buffer.detach().reshape(-1)
    yield "rng/torch", torch.random.get_rng_state()  # uint8 states of torch's generators
    if torch.cuda.is_available():
        yield "rng/cuda", torch.cuda.random.get_rng_state()


def _persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to the model's state, by name."""
    found = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if is_persistent(module, name.rpartition(".")[2]):
                found[name] = buffer
    return found


def schedule_state(scheduler: LRScheduler) -> dict:
    rates = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
    return {"state": scheduler.state_dict(), "rates": rates}


PROGRESS = (
    *("best", "num_bad_epochs", "num_good_epochs", "cooldown_counter", "warmup_counter", "last_epoch"),
    *("reset_start", "_streaming_avg"),
)
"""What validations change in a schedule that follows them; all else is set by this run's recipe."""


def set_schedule(scheduler: LRScheduler, saved: dict, step: int) -> None:
    """Continue a schedule after `step`, at which it was saved; peak, shape and settings are those of this recipe."""
    state, own = saved["state"], scheduler.state_dict()
    if isinstance(scheduler, LambdaLR):
        # a function of the step alone, whatever schedule was saved
        scheduler.load_state_dict({**own, "last_epoch": step, "_step_count": step + 1})
        set_rates(scheduler, rates_now(scheduler))
        return
    progress = {key: state[key] for key in PROGRESS if key in state and key in own}
    if "reset_start" in progress:  # GreedyLR counts its setting down
        progress["reset_start"] += own["reset_start_original"] - state["reset_start_original"]
    if state.get("window_size") != own.get("window_size"):
        progress.pop("_streaming_avg", None)  # an average over another window begins anew
    scheduler.load_state_dict({**own, **progress})
    rates, num_groups = saved["rates"], len(scheduler.optimizer.param_groups)
    if len(rates) != num_groups:
        what = f"{type(scheduler).__name__} has brought {len(rates)} groups of parameters to their rates, and now there"
        remedy = "keep them, or choose a training.lr_scheduler_type that counts steps"
        raise UserError(f"optimizer.groups: {what} are {num_groups}; {remedy}")
    # A scheduler writes the rates of the groups only at its next step; this step needs them already.
    set_rates(scheduler, rates)


def random_numbers() -> dict:
    """Return the states of Python's and numpy's generators, for JSON."""
    kind, keys, *rest = np.random.get_state()
    version, internal, gauss = random.getstate()
    return {"python": [version, list(internal), gauss], "numpy": [kind, keys.tolist(), *rest]}
