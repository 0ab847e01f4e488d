"""The training loss: cross-entropy of the next token, plus the router losses of a mixture of experts.

`loss.kind` of the recipe says how the cross-entropy is computed, never what: `plain` keeps all logits in fp32,
`chunked` keeps them as the model made them, `fused` keeps none of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from pretraining.data.documents import IGNORED
from pretraining.errors import UserError
from pretraining.extend import model_extension, named
from pretraining.model.cross_entropy import LossHead, LossSettings, chunked_nats, token_nats
from pretraining.model.parallel import SplitHead, mean_over
from pretraining.recipe.model import ROUTER_COEFFICIENT, why_not
from pretraining.recipe.sections import Loss
from pretraining.runtime.process_group import ALONE, RankGroups
from pretraining.upstream.deepspeed import whole_shape
from pretraining.upstream.transformers import is_experts
from pretraining.upstream.wide_weights import WideLinear

PLAIN = Loss(kind="plain")
"""A `loss` section that asks for nothing."""


def build_loss(model: PreTrainedModel, settings: Loss = PLAIN, groups: RankGroups = ALONE) -> Callable:
    """Build the Trainer's `compute_loss_func` for this model from the recipe's `loss` section.

    A fused loss changes the model's head (`LossHead`). groups: which ranks have parts of the same sequences.

    Raises `UserError`: `router_z_loss` of a model that does not return its routers' scores.
    """
    if settings.router_z_loss and not getattr(model.config, "output_router_logits", False):
        raise UserError(
            "loss.router_z_loss: needs a mixture of experts with model.output_router_logits true; set it, or leave "
            "router_z_loss out"
        )
    if getattr(model.config, "output_router_logits", False):
        watch_routing(model)  # for the losses below, and for ExpertLoad (training/experts.py)
    coefficient, balance = balance_of(model, settings, groups) or (0.0, own_balance)
    return partial(
        next_token_loss,
        router_coefficient=coefficient,
        balance=balance,
        router_z_coefficient=settings.router_z_loss,
        sequence_group=groups.sequence_group,
        nats=_nats_of(model, settings),
    )


def _nats_of(model: PreTrainedModel, settings: Loss) -> Callable:
    """Choose the cross-entropy: a function (the model's `logits`, labels) -> summed nats."""
    kind, z_loss = settings.kind, settings.z_loss
    if settings.function is not None:
        own = partial(named("loss", settings.function), **settings.arguments)
        return partial(own_loss, function=own, name=settings.function)
    if kind == "plain":
        return partial(token_nats, z_loss=z_loss)
    way, head = LossSettings(z_loss, settings.chunk_tokens, settings.compile), model.get_output_embeddings()
    if kind == "auto":
        # a linear layer without bias, and nothing else
        is_known = isinstance(head, LossHead) or type(head) in (nn.Linear, WideLinear)
        section = model.config.to_dict()
        # of a class of the user's own the recipe knows more (`Recipe.resolved_loss`)
        is_known = is_known and head.bias is None and model_extension(section["model_type"]) is None
        fuses = is_known and not why_not(section, "fused")
        kind = "fused" if fuses else "chunked"
    if kind == "fused":
        if isinstance(head, SplitHead):
            head.gives = "input"
        else:
            # in place: a new module would lose the name and the tie to the embedding
            head.__class__ = LossHead
        # in training the model returns the head's input as logits
        return partial(head, way=way)
    if isinstance(head, SplitHead):
        head.gives = "own logits"
        way = replace(way, rows=head.rows)
    return lambda logits, labels, each: chunked_nats(logits.flatten(0, 1), labels.flatten(), way, each)


def own_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    function: Callable,
    name: str,
    each: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum a loss of an extension over the tokens that have a target.

    Args:
        logits: [batch, length, vocabulary].
        labels: [batch, length]; -100 has no target. The function gets 0 in its place, and what it returns there does
            not count.
        function: (logits [tokens, vocabulary] in fp32, labels [tokens]) -> [tokens].
        each: [batch * length], receives every token's own loss.
    """
    rows, targets = logits.flatten(0, 1).float(), labels.flatten()
    losses = function(rows, targets.clamp(min=0))
    if not isinstance(losses, torch.Tensor) or losses.shape != targets.shape:
        shape = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        what = f"it must return a tensor of one loss a token, [{len(targets)}], and returned {shape}"
        raise UserError(f"loss.function: {name}: {what}")
    # not multiplied: infinity times zero is a NaN
    losses = losses.masked_fill(targets == IGNORED, 0.0)
    if each is not None:
        each.copy_(losses.detach())
    return losses.sum()


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


def balance_of(
    model: PreTrainedModel, settings: Loss = PLAIN, groups: RankGroups = ALONE
) -> tuple[float, Callable] | None:
    """Return the coefficient and the balancing loss (outputs) -> scalar; None if no loss balances.

    The coefficient is the model's own if its class has one (`router_aux_loss_coef`), else the recipe's. If routers have
    a correction bias, the loss over each sequence is enough: the biases do the rest (training/experts.py).
    """
    config = model.config
    if settings.balance == "none" or not getattr(config, "output_router_logits", False):
        return None
    routing, has_coefficient = watch_routing(model), hasattr(config, ROUTER_COEFFICIENT)
    weight = getattr(config, ROUTER_COEFFICIENT, settings.balance_weight)
    if routing is None:
        return (weight, own_balance) if has_coefficient else None
    watched = {"routing": routing, "sequence_group": groups.sequence_group}
    if not has_coefficient and any(bias is not None for bias in routing.biases):
        return settings.sequence_balance, partial(sequence_balance, **watched)
    return weight, partial(layers_balance, **watched)


def own_balance(outputs: Any) -> torch.Tensor:
    """Return the balancing loss that a model class computes itself, whose experts cannot be watched."""
    if outputs.aux_loss is None:
        what = "has router_aux_loss_coef and computes no such loss; take another type, or set loss.balance to none"
        raise UserError(f"model.model_type: {what}")
    return outputs.aux_loss


def sequence_balance(
    outputs: Any, routing: Routing, sequence_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Add up E/k sum_i f_i P_i of the layers, as DeepSeek-V3 does; of each the mean over sequences (eq. 17 to 20).

    f counts the k highest scores without the correction bias; P is the mean of sigmoid scores divided by their sum.
    """
    layers = []
    for logits, chosen in zip(outputs.router_logits, routing.choices, strict=True):
        # also a fused loss gets [batch, length, ...]; 16 bits count to 256
        scores = logits.float().view(*outputs.logits.shape[:2], -1).sigmoid()
        highest = scores.topk(chosen.shape[-1], dim=-1, sorted=False).indices
        layers.append((counted(highest, scores[:, 0]), (scores / scores.sum(-1, keepdim=True)).mean(1)))
    sums = products(layers, sequence_group)
    return torch.stack(
        [each.mean() / c.shape[-1] for each, c in zip(sums, routing.choices, strict=True)]
    ).sum()


def layers_balance(
    outputs: Any, routing: Routing, sequence_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Average E sum_i f_i P_i over the layers (Fedus et al. 2021, equations 4 to 6): k if all experts are equal.

    f is the share of tokens that are sent to an expert; each goes to k experts. P is the mean probability of an expert.
    """
    # Layer by layer: transformers adds up the tokens of each expert number over all layers before it multiplies. Layers
    # that each overload another expert then look balanced.
    layers = []
    for logits, chosen in zip(outputs.router_logits, routing.choices, strict=True):
        probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).mean(0)
        layers.append((counted(chosen, probabilities), probabilities))
    return torch.stack(products(layers, sequence_group)).mean()


def counted(choices: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the share of tokens that are sent to each expert. choices: [..., tokens, k]; like: [..., experts]."""
    # scatter_add_ and not bincount, because the host would wait for bincount
    experts = choices.flatten(-2)
    sent = torch.zeros_like(like).scatter_add_(-1, experts, torch.ones_like(experts, dtype=like.dtype))
    return sent / choices.shape[-2]


def products(
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]], sequence_group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """Return E sum_i f_i P_i of each layer's (f, P), [..., experts] each.

    sequence_group: ranks that have the other parts of the same sequences. f and P are then means over all of them.
    """
    if sequence_group is not None:
        # One message for all layers. The gradient passes through the sum over the ranks: each has the whole loss.
        flat = mean_over(torch.cat([each.flatten() for pair in layers for each in pair]), sequence_group)
        parts = iter(flat.split([each.numel() for pair in layers for each in pair]))
        layers = [(next(parts).view_as(f), next(parts).view_as(p)) for f, p in layers]
    return [f.shape[-1] * (f * p).sum(-1) for f, p in layers]


def router_z_loss(router_logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """Average the squared log of the routers' normaliser over tokens and layers (Zoph et al. 2022, equation 5)."""
    squares = [torch.logsumexp(logits.float(), -1).square().mean() for logits in router_logits]
    return torch.stack(squares).mean()


def next_token_loss(
    outputs: Any,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None = None,
    router_coefficient: float = 0.0,
    balance: Callable = own_balance,
    router_z_coefficient: float = 0.0,
    sequence_group: dist.ProcessGroup | None = None,
    nats: Callable = token_nats,
    each: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a micro-batch's share in the mean loss of this rank's optimizer step, in nats per token.

    Args:
        num_items_in_batch: targets in all micro-batches of the step on this rank.
        sequence_group: ranks that have the other parts of the same sequences.
        each: [batch * length] in fp32, receives every token's own nats, 0 if it has no target.
    """
    # With the targets of the whole step as divisor micro-batches add up to a mean, and DeepSpeed's average over ranks
    # is the mean of the step.
    num_items = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    loss = nats(outputs.logits, labels, each=each) / num_items
    # The router losses have the same weight, so that a coefficient means the same at any accumulation and world size;
    # transformers multiplies it by both (huggingface/transformers#48690).
    share = (labels != IGNORED).sum() / num_items
    if sequence_group is not None and (router_coefficient or router_z_coefficient):
        share = mean_over(share, sequence_group)  # of whole sequences: every rank has the same
    if router_coefficient:
        loss = loss + share * router_coefficient * balance(outputs)
    if router_z_coefficient:
        loss = loss + share * router_z_coefficient * router_z_loss(outputs.router_logits)
    return loss
