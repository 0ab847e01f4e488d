"""Initial weights that depend only on the seed and the parameter's name: the same at every ZeRO stage."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from pretraining.upstream.deepspeed import own_rows, share_of, whole_shape
from pretraining.upstream.transformers import draw_module, forget_drawn, is_partitioned, times_written

NO_FACTORS: Mapping[str, float] = {}


@torch.no_grad()
def initialise_weights(model: PreTrainedModel, seed: int, factors: Mapping[str, float] = NO_FACTORS) -> None:
    """Draw every weight from the architecture's own distribution, in fp32 on the CPU, seeded by module name.

    The class's rule for each module runs on full fp32 tensors, with a generator for each module, children first. The
    result is rounded to the parameter's dtype. Under ZeRO-3 one module is gathered at a time and rank 0 draws.

    Args:
        factors: {parameter name: factor of the drawn values}.
    """
    # GPT-2's attention and MLP draw their children's output projections again, scaled by 1/sqrt(2 n_layer).
    for name, module, owner in children_first(model):
        parameters = parameters_near(module)
        with whole(parameters) as is_to_write:
            if is_to_write:
                # The same random numbers at every stage: a GPU, or 16 bits, would draw others.
                with _generator_of(seed, name), _as_fp32_on_cpu(parameters):
                    draw_module(owner, module)
    for name, parameter in model.named_parameters():
        if factors.get(name, 1.0) != 1.0:  # most have none, and need no gathering
            with whole([parameter]) as is_to_write:
                if is_to_write:
                    parameter.mul_(factors[name])


def children_first(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Yield (name, module, the PreTrainedModel whose rule initialises it), every child before its parent."""

    def walk(
        name: str, module: nn.Module, owner: PreTrainedModel
    ) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child, owner)
        yield name, module, owner

    return walk("", model, model)


def parameters_near(module: nn.Module) -> list[nn.Parameter]:
    """List what a module's rule may draw: its own parameters and its children's. Only these are gathered then."""
    return [p for each in (module, *module.children()) for p in each.parameters(recurse=False)]


@contextmanager
def whole(parameters: list[nn.Parameter]) -> Iterator[bool]:
    """Gather the parameters if ZeRO-3 has them in shards; yield whether this rank is one that writes them.

    Of split experts it gathers this rank's.
    """
    if not any(map(is_partitioned, parameters)):
        yield True
        return
    import deepspeed  # here and not above: counting a model does not wait for its import

    split = [each for each in parameters if share_of(each) is not None]
    others = [each for each in parameters if share_of(each) is None]
    copies = share_of(split[0]).copies if split else None
    # the values of the first rank, or of the first that has the same experts, go to the others when the block ends
    gathered = partial(deepspeed.zero.GatheredParameters, modifier_rank=0)
    with gathered(others), gathered(split):
        yield torch.distributed.get_rank(copies) == 0


@contextmanager
def _generator_of(seed: int, module_name: str) -> Iterator[None]:
    """Seed torch's generator by seed and module name, so that no weight depends on what was drawn before it."""
    digest = hashlib.blake2b(f"{seed}/{module_name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        # 63 bits, because torch's seeds are signed
        torch.random.default_generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        yield


@contextmanager
def _as_fp32_on_cpu(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Lend the parameters fp32 CPU storage, then write what was drawn there back into their own.

    Split experts get storage for all of them, so that each is drawn as if none were split.
    """
    own_storage = [p.data for p in parameters]
    for parameter in parameters:
        lent = torch.empty(whole_shape(parameter), dtype=torch.float32)
        own_rows(parameter, lent).copy_(parameter.data)
        parameter.data = lent
    yield
    for parameter, storage in zip(parameters, own_storage, strict=True):
        storage.copy_(own_rows(parameter, parameter.data))
        parameter.data = storage


@torch.no_grad()
def drawing_faults(built: PreTrainedModel) -> list[str]:
    """Find parameters that `initialise_weights` would not draw, or would draw from too far; one sentence each.

    A matrix that no module draws would keep the bytes that its memory had before.

    Args:
        built: on the meta device.
    """
    faults, drawn = [], set()
    for parameter in built.parameters():
        forget_drawn(parameter)
    for name, module, owner in children_first(built):
        inside = dict(module.named_parameters(prefix=name))
        before = {key: times_written(parameter) for key, parameter in inside.items()}
        draw_module(owner, module)
        written = {key for key, parameter in inside.items() if times_written(parameter) != before[key]}
        drawn |= {id(inside[key]) for key in written}
        # Under ZeRO-3 no other parameters are gathered while the rule of a module runs.
        near = {id(parameter) for parameter in parameters_near(module)}
        far = [key for key in written if id(inside[key]) not in near]
        faults += [f"{key} is drawn from two levels above it, by {type(module).__name__}" for key in far]
    # Biases and norms may be left to their constructors, which fill them with zeros and ones.
    matrices = ((key, parameter) for key, parameter in built.named_parameters() if parameter.ndim >= 2)
    return faults + [
        f"{key} is drawn by no module" for key, parameter in matrices if id(parameter) not in drawn
    ]
