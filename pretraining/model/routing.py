"""What the routers of a mixture choose, noted where the module of the experts is called with it."""

import torch
from torch import nn

from pretraining.upstream.deepspeed import whole_shape
from pretraining.upstream.transformers import is_experts

CORRECTION_BIASES = ("correction_bias", "expert_bias")
"""How classes of transformers call the buffer that changes which experts a router chooses, and not their weights."""


class Routing:
    """The choices of the last forward pass, and the correction biases behind them, of every mixture layer.

    A layer is a module of experts as transformers writes all of them: called with (tokens, chosen experts, weights).
    """

    def __init__(self, model: nn.Module) -> None:
        """Note from now on what the experts' modules of the model are called with."""
        buffers = [name for name, _ in model.named_buffers() if name.endswith(CORRECTION_BIASES)]
        self.sizes: list[int] = []
        """How many experts a layer has."""
        self._model, self._biases, self._experts = model, [], []
        for name, module in model.named_modules():
            if not is_experts(module):
                continue
            mixture = name.rpartition(".")[0] + "."
            self._biases.append(next((key for key in buffers if key.startswith(mixture)), None))
            # a rank may have some of them, and ZeRO-3 empty ones
            self.sizes.append(whole_shape(next(module.parameters(recurse=False)))[0])
            module.register_forward_pre_hook(_note, with_kwargs=True)
            module.chosen_experts = None
            self._experts.append(module)

    @property
    def choices(self) -> list[torch.Tensor]:
        """[tokens, chosen] numbers of experts, of each layer."""
        return [module.chosen_experts for module in self._experts]

    @property
    def biases(self) -> list[torch.Tensor | None]:
        """Each layer's correction bias, None if its router has none; a model that was moved has new ones."""
        return [None if name is None else self._model.get_buffer(name) for name in self._biases]


def _note(module: nn.Module, inputs: tuple, keywords: dict) -> None:
    # On the module: with a number of the layer here, or a hook of its own, each block would be compiled anew.
    # If activations are recomputed, the layer is called again with the same choices: nothing is counted twice.
    module.chosen_experts = [*inputs, *keywords.values()][1]


def watch_routing(model: nn.Module) -> Routing | None:
    """Set `model.routing`, once, and return it; None if the model has no experts that could be watched."""
    if not hasattr(model, "routing"):
        routing = Routing(model)
        model.routing = routing if routing.sizes else None
    return model.routing
