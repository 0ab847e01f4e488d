"""Which parameters the rule of each module draws, seen on the meta device (initial_weights.py draws by them)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from pretraining.upstream.transformers import RuleTrace, StandIn, draw_module, forget_drawn


@torch.no_grad()
def drawing_faults(built: PreTrainedModel) -> list[str]:
    """Find parameters that `initialise_weights` would not draw, or would draw from too far; one sentence each.

    A matrix that no module draws would keep the bytes that its memory had before.

    built: on the meta device.
    """
    faults, drawn, names = [], set(), {each: name for name, each in built.named_parameters()}
    for parameter in built.parameters():
        forget_drawn(parameter)
    for _, module, _, trace in traced(
        built, lambda each: torch.empty_like(each, dtype=torch.float32, device="meta")
    ):
        drawn |= trace.written
        # No other parameters have memory while the rule of a module runs.
        far = trace.written.difference(parameters_near(module))
        by = type(module).__name__
        faults += [
            f"{names[each]} is drawn from two levels above it, by {by}" for each in names if each in far
        ]
    # Biases and norms may be left to their constructors, which fill them with zeros and ones.
    matrices = ((key, parameter) for key, parameter in built.named_parameters() if parameter.ndim >= 2)
    return faults + [f"{key} is drawn by no module" for key, parameter in matrices if parameter not in drawn]


def traced(
    model: PreTrainedModel, on_meta: Callable[[nn.Parameter], torch.Tensor]
) -> Iterator[tuple[str, nn.Module, PreTrainedModel, RuleTrace]]:
    """Yield (name, module, the model whose rule it is, what the rule does to the parameters), every child first.

    on_meta: returns a tensor of the meta device of a parameter's whole shape.
    """
    with torch.random.fork_rng(devices=[]):  # a rule may draw into tensors of its own
        for name, module, owner in children_first(model):
            everything = {parameter: parameter for parameter in module.parameters()}
            with standing_in(module, on_meta) as stand_ins, RuleTrace({**everything, **stand_ins}) as trace:
                draw_module(owner, module)
            yield name, module, owner, trace


def children_first(
    module: nn.Module, name: str = "", owner: PreTrainedModel | None = None
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Yield (name, module, the PreTrainedModel whose rule initialises it), every child before its parent."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child_name, child in module.named_children():
        yield from children_first(child, f"{name}.{child_name}" if name else child_name, owner)
    yield name, module, owner


def parameters_near(module: nn.Module) -> list[nn.Parameter]:
    """List what a module's rule may draw: its own parameters and its children's."""
    return list(dict.fromkeys(parameter for _, _, parameter in _places_near(module)))


def _places_near(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    modules = (module, *module.children())
    return [(each, *named) for each in modules for named in each.named_parameters(recurse=False)]


@contextmanager
def standing_in(
    module: nn.Module, tensor_for: Callable[[nn.Parameter], torch.Tensor]
) -> Iterator[dict[nn.Parameter, StandIn]]:
    """Put {parameter: another one, of the tensor given} in the place of all that the module's rule may draw."""
    places = _places_near(module)
    stand_ins = {parameter: StandIn(tensor_for(parameter)) for _, _, parameter in places}
    for place, name, parameter in places:
        setattr(place, name, stand_ins[parameter])
    try:
        yield stand_ins
    finally:
        for place, name, parameter in places:
            setattr(place, name, parameter)
