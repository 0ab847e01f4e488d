"""The training loss of each source of a mixture, from the forward passes that are made anyway."""

from collections.abc import Callable

import torch
from transformers import TrainerCallback

from pretraining.data.document_masking import IGNORED
from pretraining.data.mixing.training import source_names
from pretraining.recipe import Recipe
from pretraining.recipe.data import is_mixed
from pretraining.runtime.process_group import sum_over_ranks


class SourceLoss(TrainerCallback):
    """Adds up nats and targets by source on the device; the ranks' sums meet at logging, as `train/<source>_loss`.

    As trained: a z-loss is part of it, what a mixture of experts' routers add is not. Sources that the logged steps
    did not read are left out.
    """

    def __init__(self, names: list[str]):
        self.names = names
        self.sources: torch.Tensor | None = None
        self.sums: torch.Tensor | None = None

    def hear_sources(self, sources: torch.Tensor) -> None:
        """[batch] numbers of the sources that the next micro-batch is from."""
        self.sources = sources

    def around(self, compute_loss: Callable) -> Callable:
        """A loss that writes every token's nats into `each`, as the Trainer's `compute_loss_func`."""

        def watched(outputs, labels, num_items_in_batch=None):
            if self.sources is None:
                return compute_loss(outputs, labels, num_items_in_batch=num_items_in_batch)
            each = torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)
            loss = compute_loss(outputs, labels, num_items_in_batch=num_items_in_batch, each=each.view(-1))
            self._add(each.sum(1), (labels != IGNORED).sum(1))
            return loss

        return watched

    def _add(self, nats: torch.Tensor, targets: torch.Tensor) -> None:
        """[batch] each, of the micro-batch whose sources are known."""
        if self.sums is None:
            self.sums = torch.zeros(len(self.names), 2, dtype=torch.float64, device=nats.device)
        self.sums.index_add_(0, self.sources.to(nats.device), torch.stack([nats, targets], 1).double())
        self.sources = None

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" not in logs or self.sums is None:
            return
        flat, self.sums = sum_over_ranks(self.sums.flatten().tolist()), None
        for name, nats, targets in zip(self.names, flat[::2], flat[1::2], strict=True):
            if targets:
                logs[f"train/{name}_loss"] = nats / targets


def source_losses(recipe: Recipe) -> list[SourceLoss]:
    """One where the recipe mixes sources, unless it is switched off."""
    if not (recipe.monitors["source_loss"] and is_mixed(recipe.data)):
        return []
    return [SourceLoss(source_names(recipe.data, str(recipe.path)))]
