"""Muon for hidden matrices and AdamW for the rest, on whole parameters or on the flat partitions of ZeRO.

Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon): the momentum of a matrix, orthogonalised. Momentum and
weights stay where ZeRO keeps them; a matrix comes together on one rank only for its orthogonalisation.
"""

from collections.abc import Callable, Sequence

import torch
from torch.optim.adamw import adamw

from pretraining.training.optimizers.exchange import Fragment, plan_rounds, work_on_whole
from pretraining.training.optimizers.matrices import Matrices
from pretraining.training.optimizers.newton_schulz import orthogonalize_all


def spectral_scale(matrices: Matrices) -> float:
    """sqrt(max(1, outputs / inputs)): the update's effect on the outputs does not depend on the shape (Jordan 2024)."""
    outputs, inputs = matrices.fan_out_in
    return max(1.0, outputs / inputs) ** 0.5


def adamw_scale(matrices: Matrices) -> float:
    """0.2 sqrt(max(outputs, inputs)): entries as large as AdamW's, whose rates then fit (Liu et al. 2025, eq. 4)."""
    return 0.2 * max(matrices.fan_out_in) ** 0.5


SCALES = {"match_adamw": adamw_scale, "spectral": spectral_scale}


class Muon(torch.optim.Optimizer):
    """One optimizer of two rules: groups with `algorithm` "muon" and "adamw".

    Args:
        groups: parameter groups; one of "muon" has lr, weight_decay, momentum, nesterov, newton_schulz_steps and
            scale, one of "adamw" lr, weight_decay, betas and eps.
        matrices: {parameter: its matrices} of every parameter in a group of "muon".

    DeepSpeed replaces a group's parameters by flat fp32 partitions: `bind` then says what lies in them.
    """

    def __init__(self, groups: list[dict], matrices: dict[torch.Tensor, Matrices]):
        super().__init__(groups, {"algorithm": "adamw"})
        self.matrices = list(matrices.values())
        self._numbers = {id(parameter): number for number, parameter in enumerate(matrices)}
        self._costs = {number: each.cost for number, each in enumerate(self.matrices)}
        self.bind(list(matrices), self._whole_parameters)

    def bind(
        self, tensors: Sequence[torch.Tensor], locate: Callable[[Sequence[torch.Tensor]], list[Fragment]]
    ) -> None:
        """Say which tensors hold the matrices from now on; `locate` finds this rank's fragments in some of them."""
        self._tensors, self._locate, self._plans = {id(tensor): tensor for tensor in tensors}, locate, {}

    def number_of(self, parameter: torch.Tensor) -> int | None:
        """How fragments name a parameter of the model; None for one that AdamW updates."""
        return self._numbers.get(id(parameter))

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every group that has parameters; all ranks must call it alike."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            if group["params"]:
                (self._step_muon if group["algorithm"] == "muon" else self._step_adamw)(group)
        return loss

    def _step_muon(self, group: dict) -> None:
        parameters = group["params"]
        updates = [self._momentum_update(parameter, group) for parameter in parameters]
        if any(id(parameter) not in self._tensors for parameter in parameters):
            # No tensor of the model's: loading a checkpoint asks, with zeros, which states one would have.
            assert not any(update.any() for update in updates), (
                "Muon was not told what lies in its partitions"
            )
            return
        device = _compute_device(updates[0])
        dtype = torch.bfloat16 if device.type == "cuda" else updates[0].dtype
        work_on_whole(self._plan(parameters), updates, self._orthogonalized_by(group), dtype, device)
        for parameter, update in zip(parameters, updates, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update.view_as(parameter), alpha=-group["lr"])

    def _momentum_update(self, parameter: torch.Tensor, group: dict) -> torch.Tensor:
        """[numel]: the running mean of the gradients, with Nesterov's look ahead."""
        gradient, state = parameter.grad, self.state[parameter]
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum.clone()
        return update.flatten()

    def _plan(self, parameters: list[torch.Tensor]) -> list:
        key = tuple(map(id, parameters))
        if key not in self._plans:
            self._plans[key] = plan_rounds(self._locate(parameters), self._costs)
        return self._plans[key]

    def _orthogonalized_by(self, group: dict) -> Callable:
        scale, steps = SCALES[group["scale"]], group["newton_schulz_steps"]

        def orthogonalized(whole: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
            batches = [self.matrices[number].of(flat) for number, flat in whole.items()]
            results = zip(whole, orthogonalize_all(batches, steps), strict=True)
            return {n: self.matrices[n].put(result * scale(self.matrices[n])) for n, result in results}

        return orthogonalized

    def _whole_parameters(self, parameters: Sequence[torch.Tensor]) -> list[Fragment]:
        """Without ZeRO every rank holds every parameter."""
        numbered = ((self._numbers[id(p)], place, p.numel()) for place, p in enumerate(parameters))
        return [Fragment(number, 0, place, 0, numel) for number, place, numel in numbered]

    def _step_adamw(self, group: dict) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        states = [self._adamw_state(parameter) for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _adamw_state(self, parameter: torch.Tensor) -> dict:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _compute_device(tensor: torch.Tensor) -> torch.device:
    """The rank's GPU, also for states that lie in host memory."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else tensor.device
