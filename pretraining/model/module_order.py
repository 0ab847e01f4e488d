"""The order in which a model's weights are drawn, and in which it is looked at whether they can be."""

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel


def children_first(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Yield (name, module, the PreTrainedModel whose rule initialises it), every child before its parent."""

    def walk(name: str, module: nn.Module, owner: PreTrainedModel):
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child, owner)
        yield name, module, owner

    return walk("", model, model)


def parameters_near(module: nn.Module) -> list[nn.Parameter]:
    """Those that a module's rule may draw: its own and its children's. Under ZeRO-3 no others are gathered then."""
    return [p for each in (module, *module.children()) for p in each.parameters(recurse=False)]
