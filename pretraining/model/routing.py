"""What the routers of a mixture choose, seen where its experts take it."""

from collections.abc import Callable

import torch
from torch import nn

CORRECTION_BIASES = ("correction_bias", "expert_bias")
"""How classes of transformers call the buffer that is added to a router's scores for the choice alone."""


class Routing:
    """The choices of the last forward pass, layer by layer, and the correction biases that they follow.

    A layer is a module of experts as transformers writes all of them: called with (tokens, chosen experts, weights).
    """

    def __init__(self, model: nn.Module) -> None:
        """Watch the experts' modules of a model."""
        buffers = [name for name, _ in model.named_buffers() if name.endswith(CORRECTION_BIASES)]
        self.chosen: list[torch.Tensor | None] = []
        self.sizes: list[int] = []
        self._model, self._biases = model, []
        for name, module in model.named_modules():
            if not hasattr(module, "_is_expert_parallel"):  # set by use_experts_implementation alone
                continue
            mixture = name.rpartition(".")[0] + "."
            self._biases.append(next((key for key in buffers if key.startswith(mixture)), None))
            self.sizes.append(module.num_experts)
            self.chosen.append(None)
            module.register_forward_pre_hook(self._keeper(len(self.chosen) - 1), with_kwargs=True)

    @property
    def biases(self) -> list[torch.Tensor | None]:
        """Each layer's correction bias, None if its router has none. Asked anew: a move to a device replaces them."""
        return [None if name is None else self._model.get_buffer(name) for name in self._biases]

    def _keeper(self, layer: int) -> Callable:
        def keep(module: nn.Module, inputs: tuple, keywords: dict) -> None:
            # A recomputed layer chooses once more, and the same: it replaces what it had.
            given = [*inputs, *keywords.values()]
            self.chosen[layer] = given[1].detach()

        return keep

    @torch.no_grad()
    def counts(self) -> torch.Tensor:
        """Return how often each expert was chosen in the last forward pass, [layers, experts] in int64."""
        counts = torch.zeros(
            len(self.sizes), max(self.sizes), dtype=torch.int64, device=self.chosen[0].device
        )
        for row, chosen in zip(counts, self.chosen, strict=True):
            # scatter_add_ and not bincount, because the host would wait for bincount
            experts = chosen.flatten()
            row.scatter_add_(0, experts, torch.ones_like(experts))
        return counts


def routing_of(model: nn.Module) -> Routing | None:
    """Return what watches the choices of this model, the same at each call; None if it has no experts to watch."""
    if not hasattr(model, "routing"):
        routing = Routing(model)
        model.routing = routing if routing.sizes else None
    return model.routing
