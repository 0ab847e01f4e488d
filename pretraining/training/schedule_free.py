"""Schedule-free optimizers of the `schedulefree` package, with their counts where ZeRO and checkpoints find them."""

from functools import cache

import torch

from pretraining.averaging import AVERAGING, Z

COUNTS = ("k", "lr_max", "weight_sum")
"""What the package counts in a parameter group: steps, the highest rate, the weights of the average."""


class _CountsByTensor(torch.optim.Optimizer):
    """Counts the steps of tensors instead of those of groups.

    ZeRO-3 steps the sub-groups of one group one after another, and counts of the group would rise at each. The
    weights that it steps are always those that it trains; whoever measures them finds the average by `AVERAGING`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.train()

    def step(self, closure=None):
        """One update of every tensor with a gradient; those of one group have been stepped equally often."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        groups = self.param_groups
        try:
            for group in groups:
                if stepped := [p for p in group["params"] if p.grad is not None]:
                    self._step_group(group, stepped)
        finally:
            self.param_groups = groups
        return loss

    def _step_group(self, group: dict, stepped: list[torch.Tensor]) -> None:
        counted, momentum = self.state[stepped[0]], _momentum(group)
        averaging = 1 - 1 / momentum
        if counted.get(AVERAGING, averaging) != averaging:
            self._take_over(stepped, counted[AVERAGING], momentum)
        group.update({key: counted.get(key, self.defaults[key]) for key in COUNTS})
        self.param_groups = [group]
        super().step()
        counts = {key: group[key] for key in COUNTS} | {AVERAGING: averaging}
        for parameter in stepped:
            self.state[parameter].update(counts)

    @torch.no_grad()
    def _take_over(self, tensors: list[torch.Tensor], earlier: float, momentum: float) -> None:
        """Weights that another momentum made, by what it kept as AVERAGING: from the average to this one's."""
        for tensor in tensors:
            z = self.state[tensor][Z]
            tensor.lerp_(z, earlier).lerp_(z, 1 - momentum)


def _momentum(group: dict) -> float:
    return group["momentum"] if "momentum" in group else group["betas"][0]


@cache
def counting_by_tensor(optimizer_class: type) -> type:
    """The package's class with counts by tensor; any other class as it is."""
    if optimizer_class.__module__.partition(".")[0] != "schedulefree":
        return optimizer_class
    return type(optimizer_class.__name__, (_CountsByTensor, optimizer_class), {})
