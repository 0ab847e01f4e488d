"""What the routers of a mixture of experts are trained by beside the cross-entropy."""

from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from pretraining.recipe.model import EXACT

COEFFICIENT = "router_aux_loss_coef"
Routers = tuple[torch.Tensor, ...]
"""Logits [tokens, experts] of every mixture layer."""


def balance_of(model: PreTrainedModel) -> tuple[float, Callable] | None:
    """The config's coefficient, and the loss of a model's outputs that it weighs; None where nothing is balanced."""
    config = model.config
    if not (getattr(config, "output_router_logits", False) and hasattr(config, COEFFICIENT)):
        return None
    of = transformers_balance
    if config.model_type in EXACT:
        of = partial(layers_balance, chosen=config.num_experts_per_tok)
    return getattr(config, COEFFICIENT), of


def transformers_balance(outputs) -> torch.Tensor:
    """What the model class itself reckons."""
    return outputs.aux_loss


def layers_balance(outputs, chosen: int) -> torch.Tensor:
    """Mean of `balancing_loss` over the layers.

    transformers adds up what the layers' experts of one number got before it multiplies: layers of which each
    overloads another expert look balanced to it.
    """
    return torch.stack([balancing_loss(logits, chosen) for logits in outputs.router_logits]).mean()


def balancing_loss(logits: torch.Tensor, chosen: int) -> torch.Tensor:
    """E sum_i f_i P_i of one layer (Fedus et al. 2021, equations 4 to 6): `chosen` where all experts get the same.

    f: of the tokens, those sent to an expert, each to `chosen` of them. P: the mean probability of an expert.
    """
    num_tokens, num_experts = logits.shape
    probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).mean(0)
    experts = logits.topk(chosen, dim=-1, sorted=False).indices.flatten()
    sent = torch.zeros_like(probabilities).scatter_add_(
        0, experts, torch.ones_like(experts, dtype=probabilities.dtype)
    )
    return num_experts * (sent / num_tokens * probabilities).sum()


def router_z_loss(router_logits: Routers) -> torch.Tensor:
    """Mean over tokens and layers of the squared log of the routers' normaliser (Zoph et al. 2022, equation 5)."""
    squares = [torch.logsumexp(logits.float(), -1).square().mean() for logits in router_logits]
    return torch.stack(squares).mean()
