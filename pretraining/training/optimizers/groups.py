"""Parameter groups by what the parameters are: hidden matrices, embeddings and head, norms and biases."""

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from pretraining.recipe.mup import Scales
from pretraining.training.optimizers.matrices import hidden_matrices

Named = dict[str, nn.Parameter]


def split_parameters(model: PreTrainedModel) -> tuple[Named, Named, Named]:
    """({name: parameter} of hidden matrices, of embeddings, head and routers, of norms and biases)."""
    matrices, tables, vectors = {}, {}, {}
    hidden = hidden_matrices(model)
    for name, parameter in model.named_parameters():
        dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
        home = matrices if name in hidden else tables if dimensions >= 2 else vectors
        home[name] = parameter
    return matrices, tables, vectors


def by_scales(group: dict, scales: Mapping[str, Scales]) -> list[dict]:
    """The group, whose `params` have names, cut into one for each of the factors of rate, decay and epsilon."""
    found: dict[tuple, list] = {}
    for name, parameter in group["params"].items():
        each = scales.get(name, Scales())
        found.setdefault((each.rate, each.decay, each.epsilon), []).append(parameter)
    return [
        {**group, "params": parameters, **_scaled(group, *factors)} for factors, parameters in found.items()
    ]


def _scaled(group: dict, rate: float, decay: float, epsilon: float) -> dict:
    values = {"lr": group["lr"] * rate, "weight_decay": group["weight_decay"] * decay}
    return {**values, "eps": group["eps"] * epsilon} if "eps" in group else values


def describe_groups(optimizer: torch.optim.Optimizer) -> list[str]:
    """A line for each parameter group: what, how many, at which rate. Before DeepSpeed flattens them."""
    lines = []
    for group in optimizer.param_groups:
        parameters = group["params"]
        numel = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
        name = group.get("name") or ("decayed" if group["weight_decay"] else "not decayed")
        algorithm = group.get("algorithm", type(optimizer).__name__.lower())
        lines.append(
            f"{name}: {algorithm}, {len(parameters)} tensors, {numel:,} parameters, "
            f"learning rate {group['lr']:g}, weight decay {group['weight_decay']:g}"
        )
    return lines
