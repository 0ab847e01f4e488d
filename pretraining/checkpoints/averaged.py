"""The weights that a run means, where its optimizer trains others (`pretraining/averaging.py`)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import Trainer

from pretraining.averaging import AVERAGING, Z
from pretraining.checkpoints.fragments import live_state
from pretraining.checkpoints.shard_files import CheckpointReader, assemble


@contextmanager
def averaged_weights(trainer: Trainer) -> Iterator[bool]:
    """The model with the averaged weights, then to the bit with those it trains; every rank calls it together.

    Says whether there is an average; where there is, it takes memory of a copy of the masters. After an error nothing
    is brought back: the other ranks would not take part, and nobody would hear of it.
    """
    live = live_state(trainer.model, trainer.optimizer)
    averaging = [block for block in live.blocks if AVERAGING in block.state]
    if not averaging:
        yield False
        return
    trained = [block.tensor.detach().clone() for block in averaging]
    with torch.no_grad():
        for block in averaging:
            block.tensor.lerp_(block.state[Z], block.state[AVERAGING])
        live.set_weights()
    yield True
    with torch.no_grad():
        for block, tensor in zip(averaging, trained, strict=True):
            block.tensor.copy_(tensor)
        live.set_weights()


def averaged(reader: CheckpointReader, parameter: str) -> torch.Tensor:
    """A parameter's averaged weights out of a checkpoint, in fp32: its masters where nothing was averaged."""
    masters = assemble(reader, parameter)
    share = reader.state["scalars"].get(parameter, {}).get(AVERAGING)
    return masters if share is None else masters.lerp_(assemble(reader, parameter, Z), share)
