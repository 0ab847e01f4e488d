"""How long the gradients of single micro-batches are, before anything is added up or sent."""

import torch


class MicroBatchNorms:
    """Squared norms of this rank's micro-batch gradients, between `open` and `close`; outside them it costs nothing.

    Hooks on the parameters see the gradient of one backward pass, whole and unreduced, at every ZeRO stage and under
    DDP: they run before what accumulates, reduces or shards it.
    """

    def __init__(self, model: torch.nn.Module):
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._norms: list[torch.Tensor] = []
        self._sum: torch.Tensor | None = None
        self._hooks: list = []
        self._passes = 0

    def open(self) -> None:
        """Look at every backward pass from here on."""
        self._hooks = [parameter.register_hook(self._see) for parameter in self.parameters]

    def _see(self, gradient: torch.Tensor) -> None:
        self._norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32))

    def fold(self) -> None:
        """After each backward pass: one number in place of one a parameter."""
        if self._norms:
            square = torch.stack(self._norms).double().square().sum()
            self._sum = square if self._sum is None else self._sum + square
            self._norms.clear()
            self._passes += 1

    def close(self) -> tuple[float, int]:
        """(sum of the squared norms of the micro-batches since `open`, their number); waits for the device."""
        self.fold()
        for hook in self._hooks:
            hook.remove()
        total, passes = self._sum, self._passes
        self._sum, self._passes, self._hooks = None, 0, []
        return 0.0 if total is None else total.item(), passes
