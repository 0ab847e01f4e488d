"""Adapt the optimizers of the `schedulefree` package: keep their counts where ZeRO and checkpoints find them."""

from functools import cache

import torch

from pretraining.averaging import AVERAGING, Z

COUNTS = ("k", "lr_max", "weight_sum")
"""What the package keeps in a parameter group: steps, the highest rate, the sum of the average's weights."""


class _CountsByTensor(torch.optim.Optimizer):
    """Count the steps of tensors instead of those of groups.

    The weights in place are always those that are trained. A validation computes the average by `AVERAGING`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # the package refuses to step otherwise
        self.train()

    def step(self, closure=None):
        """Update every tensor with a gradient. The tensors of a group with gradients must have equal step counts."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        groups = self.param_groups
        try:
            # ZeRO-3 steps the sub-groups of one group one after another: counts of the group would rise at each of them
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
        # the package steps all of `param_groups`
        self.param_groups = [group]
        super().step()
        counts = {key: group[key] for key in COUNTS} | {AVERAGING: averaging}
        for parameter in stepped:
            self.state[parameter].update(counts)

    @torch.no_grad()
    def _take_over(self, tensors: list[torch.Tensor], earlier: float, momentum: float) -> None:
        """Convert weights of another momentum to the average, by its AVERAGING `earlier`, then to this momentum's."""
        for tensor in tensors:
            z = self.state[tensor][Z]
            tensor.lerp_(z, earlier).lerp_(z, 1 - momentum)


def _momentum(group: dict) -> float:
    return group["momentum"] if "momentum" in group else group["betas"][0]


@cache
def counting_by_tensor(optimizer_class: type) -> type:
    """Return the package's class with counts by tensor; any other class unchanged."""
    if optimizer_class.__module__.partition(".")[0] != "schedulefree":
        return optimizer_class
    # the same name: it is written and shown as the package's class
    return type(optimizer_class.__name__, (_CountsByTensor, optimizer_class), {})
