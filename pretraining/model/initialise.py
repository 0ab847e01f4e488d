"""Initial weights that depend on the seed and the parameter's name alone: the same at every ZeRO stage."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import deepspeed
import torch
from torch import nn
from transformers import PreTrainedModel

from pretraining.model.module_order import children_first, parameters_near

NO_FACTORS: Mapping[str, float] = {}


@torch.no_grad()
def initialise_weights(model: PreTrainedModel, seed: int, factors: Mapping[str, float] = NO_FACTORS) -> None:
    """Draw every weight from the architecture's own distribution, in fp32 on the CPU, seeded by module name.

    Each module's `_init_weights` runs on full fp32 tensors under its own generator, children before parents
    (GPT-2's attention and MLP redraw their output projections scaled by 1/sqrt(2 n_layer)); the result is
    rounded to the parameter's dtype. Under ZeRO-3 one module is gathered at a time and rank 0 draws.
    `factors`, by parameter name, multiply what was drawn.
    """
    for name, module, owner in children_first(model):
        parameters = parameters_near(module)
        with _whole(parameters) as is_to_write:
            if is_to_write:
                with _generator_of(seed, name), _as_fp32_on_cpu(parameters):
                    owner._init_weights(module)
    for name, parameter in model.named_parameters():
        if factors.get(name, 1.0) != 1.0:
            with _whole([parameter]) as is_to_write:
                if is_to_write:
                    parameter.mul_(factors[name])


@contextmanager
def _whole(parameters: list[nn.Parameter]) -> Iterator[bool]:
    """The parameters gathered where ZeRO-3 has them in shards; whether this rank is the one that writes them."""
    if not any(hasattr(p, "ds_id") for p in parameters):
        yield True
        return
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        yield torch.distributed.get_rank() == 0


@contextmanager
def _generator_of(seed: int, module_name: str) -> Iterator[None]:
    digest = hashlib.blake2b(f"{seed}/{module_name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        yield


@contextmanager
def _as_fp32_on_cpu(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Lend the parameters fp32 CPU storage, then write what was drawn there back into their own."""
    own_storage = [p.data for p in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.to("cpu", torch.float32, copy=True)
    yield
    for parameter, storage in zip(parameters, own_storage, strict=True):
        storage.copy_(parameter.data)
        parameter.data = storage
