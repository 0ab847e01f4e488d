"""Loading into a live Trainer: each rank reads the slices it needs, whichever ranks at whichever stage saved them."""

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Trainer

from pretraining.checkpoints.fragments import LiveState, live_state
from pretraining.checkpoints.optimizer_states import set_block
from pretraining.checkpoints.random_state import set_random_state
from pretraining.checkpoints.receipts import read_receipt
from pretraining.checkpoints.saving import persistent_buffers
from pretraining.checkpoints.schedule import set_scaler, set_schedule
from pretraining.checkpoints.shard_files import CheckpointReader
from pretraining.errors import UserError
from pretraining.runtime.heartbeat import long_work


def load_checkpoint(trainer: Trainer, folder: Path) -> None:
    """Set weights, optimizer states, schedule and loss scaler of a prepared Trainer, in place.

    Takes memory of the largest piece of a parameter that this rank holds. Raises `UserError` where the checkpoint
    does not fit the model or the optimizer.
    """
    reader = CheckpointReader(folder)
    live = live_state(trainer.model, trainer.optimizer)
    _refuse_other_shapes(live, reader)
    with torch.no_grad(), long_work():
        for block in live.blocks:
            with live.held(block, changed=True):
                set_block(block, reader)
        live.set_weights()
        for name, buffer in persistent_buffers(live.model).items():
            buffer.copy_(reader.read("buffer", name, 0, buffer.numel()).view_as(buffer))
    reader.close()
    set_schedule(trainer.lr_scheduler, reader.state["schedule"])
    set_scaler(live.loss_scaler() or trainer.accelerator.scaler, reader.state["loss_scaler"])
    if trainer.is_deepspeed_enabled:
        trainer.model_wrapped.skipped_steps = reader.state["skipped_steps"]


def load_random_state(folder: Path) -> None:
    """Set this rank's random generators, where as many ranks saved the checkpoint as run now."""
    reader = CheckpointReader(folder)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if reader.ranks == ranks and (numbers := read_receipt(folder, rank, ranks).get("rng")):
        set_random_state(reader.own_tensors(rank), numbers)


def load_running_loss(trainer: Trainer, folder: Path) -> None:
    """Go on with the losses since the last logged step: the next row is then that of a run without a break."""
    reader = CheckpointReader(folder)
    saved = [read_receipt(folder, rank, reader.ranks).get("running_loss") for rank in range(reader.ranks)]
    if reader.ranks == dist.get_world_size():
        saved = [saved[dist.get_rank()]]
    trainer._tr_loss.fill_(sum(loss["sum"] for loss in saved) / len(saved))
    trainer._globalstep_last_logged = trainer.state.global_step - saved[0]["steps"]


def _refuse_other_shapes(live: LiveState, reader: CheckpointReader) -> None:
    ours = {name: tuple(getattr(p, "ds_shape", p.shape)) for p, name in live.names.items()}
    changed = [
        name for name in ours.keys() | reader.parameters if ours.get(name) != reader.parameters.get(name)
    ]
    if changed:
        name = min(changed)
        raise UserError(
            f"{reader.folder} is of another model: {name} is {reader.parameters.get(name)} there and "
            f"{ours.get(name)} here"
        )
