"""The training loss: cross-entropy of the next token, plus the router balance of a mixture of experts.

`loss.kind` of the recipe says how, never what: `plain` keeps all logits in fp32, `chunked` as the model made them,
`fused` none of them.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from pretraining.data.document_masking import IGNORED
from pretraining.errors import UserError
from pretraining.model.cross_entropy import chunked_nats
from pretraining.model.loss_head import LossHead, can_fuse, install_loss_head
from pretraining.model.router_losses import balance_of, router_z_loss, transformers_balance

PLAIN = {"kind": "plain", "chunk_tokens": None, "compile": None, "z_loss": 0.0, "router_z_loss": 0.0}


def token_nats(
    logits: torch.Tensor, labels: torch.Tensor, z_loss: float = 0.0, each: torch.Tensor | None = None
) -> torch.Tensor:
    """Summed cross-entropy in nats, computed in fp32 (fp64 for fp64 logits).

    logits: [batch, length, vocabulary]; labels: [batch, length], already the next tokens (-100 is skipped).
    each: [batch * length], is given every token's own.
    """
    precision = torch.promote_types(logits.dtype, torch.float32)
    rows, targets = logits.flatten(0, 1).to(precision), labels.flatten()
    nats = F.cross_entropy(rows, targets, ignore_index=IGNORED, reduction="sum")
    if z_loss:
        nats = nats + z_loss * (rows.logsumexp(-1).square() * (targets != IGNORED)).sum()
    if each is not None:
        _note_each(rows.detach(), targets, z_loss, each)
    return nats


def _note_each(rows: torch.Tensor, targets: torch.Tensor, z_loss: float, each: torch.Tensor) -> None:
    each.copy_(F.cross_entropy(rows, targets, ignore_index=IGNORED, reduction="none"))
    if z_loss:
        each.add_(z_loss * rows.logsumexp(-1).square() * (targets != IGNORED))


def build_loss(model: PreTrainedModel, settings: dict = PLAIN) -> Callable:
    """The Trainer's `compute_loss_func` for this model and the recipe's `loss` section.

    A fused loss changes the model's head (`LossHead`). Raises `UserError` where the model has no head that can be
    fused, or no router.
    """
    balanced = balance_of(model)
    if settings["router_z_loss"] and balanced is None:
        raise UserError(
            "loss.router_z_loss: needs a mixture of experts with model.output_router_logits true; set it, or leave "
            "router_z_loss out"
        )
    coefficient, balance = balanced or (0.0, transformers_balance)
    return partial(
        next_token_loss,
        router_coefficient=coefficient,
        balance=balance,
        router_z_coefficient=settings["router_z_loss"],
        nats=_nats_of(model, settings),
    )


def _nats_of(model: PreTrainedModel, settings: dict) -> Callable:
    """(what the model returned as logits, labels) -> summed nats."""
    kind, z_loss = settings["kind"], settings["z_loss"]
    way = {"z_loss": z_loss, "chunk_tokens": settings["chunk_tokens"], "compile": settings["compile"]}
    if kind == "fused" and not can_fuse(model):
        raise UserError(
            f"loss.kind: fused needs an output projection without bias that nothing scales, which "
            f"{type(model).__name__} is not known to have; use chunked"
        )
    if kind == "auto":
        kind = "fused" if can_fuse(model) else "chunked"
    if kind == "fused":
        return partial(_fused, install_loss_head(model), **way)
    if kind == "chunked":
        return partial(_chunked, **way)
    return partial(token_nats, z_loss=z_loss)


def _fused(head: LossHead, hidden, labels, **way) -> torch.Tensor:
    return head(hidden, labels, **way)


def _chunked(logits, labels, **way) -> torch.Tensor:
    return chunked_nats(logits.flatten(0, 1), labels.flatten(), **way)


def next_token_loss(
    outputs,
    labels,
    num_items_in_batch=None,
    router_coefficient: float = 0.0,
    balance: Callable = transformers_balance,
    router_z_coefficient: float = 0.0,
    nats: Callable = token_nats,
    each: torch.Tensor | None = None,
):
    """Share of one micro-batch in the mean loss of this rank's optimizer step, in nats per token.

    `num_items_in_batch` is the number of targets in all micro-batches of the step on this rank, so that
    micro-batches add up to a mean, and DeepSpeed's average over ranks is the mean of the whole step. The
    balancing loss of a mixture of experts is weighted by the same share: its coefficient means the same at
    any accumulation and world size (transformers multiplies it by both, huggingface/transformers#48690).
    `each`, [batch * length] in fp32, is given every token's own nats, 0 where there is no target.
    """
    num_items = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    loss = nats(outputs.logits, labels, each=each) / num_items
    share = (labels != IGNORED).sum() / num_items
    if router_coefficient:
        loss = loss + share * router_coefficient * balance(outputs)
    if router_z_coefficient:
        loss = loss + share * router_z_coefficient * router_z_loss(outputs.router_logits)
    return loss
