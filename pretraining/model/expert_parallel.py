"""Experts that are split over ranks: each rank computes its own experts, for the tokens of all ranks of its group.

GShard (Lepikhin et al. 2020, arXiv 2006.16668): every rank routes its own tokens, sends each to the ranks of its
experts, and gets the results back, one exchange each way. No token is dropped: the exchange has as many rows as were
chosen. All else is data-parallel, and the ranks of a group read different samples.

Router and experts stay the model's own modules: an expert's weights are a slice of the stacked parameter under the same
name, and logits, losses and loads come from the same router.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from pretraining.model.exchange import exchange
from pretraining.upstream.split_weights import hold_experts, make_expert_groups
from pretraining.upstream.torch import let_length_vary

FEWEST_ROWS = 2
"""Fewer are filled up with zeros: without a row no gradient would reach the weights, and this rank would miss the
reductions of the others. torch.compile would make a graph of its own for a single row."""
_exchange = torch.compiler.disable(exchange)


def split_experts(model: PreTrainedModel, size: int) -> None:
    """Leave each rank its part of every layer's experts, and let tokens travel. All ranks must call this.

    The weights are not drawn yet. Under ZeRO-3 the parameters are in shards already.
    """
    group = make_expert_groups(size)
    for experts in expert_modules(model):
        for name, parameter in list(experts.named_parameters(recurse=False)):
            hold_experts(experts, name, size)
            del parameter
        dispatch = ExpertDispatch(experts, group)
        experts.num_experts = dispatch.local
        experts.forward = dispatch


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """List the modules that hold all experts of a layer, stacked along the first dimension of their parameters."""
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


class ExpertDispatch:
    """The forward pass of a module of experts of which this rank has a part.

    It takes the arguments of the module's own forward pass, and returns the same. In a compiled block, a graph ends
    before it and another begins after it; the rank's own experts are a graph between the two exchanges.
    """

    def __init__(self, experts: Any, group: dist.ProcessGroup) -> None:
        """experts: with the number of all experts still."""
        self.compute, self.group = experts.forward, group
        self.experts, self.ranks = experts.num_experts, dist.get_world_size(group)
        self.local = self.experts // self.ranks

    @torch.compiler.disable(recursive=False)
    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs, [tokens, width].

        Args:
            hidden_states: [tokens, width].
            top_k_index: the chosen experts, [tokens, chosen], numbered over all ranks.
            top_k_weights: [tokens, chosen].
        """
        tokens, chosen = top_k_index.shape
        numbers = top_k_index.flatten()
        order = numbers.argsort(stable=True)  # by expert, thus by rank
        counts, sent, received = self.agree(numbers)
        rows = _exchange(hidden_states[order // chosen], self.group, sent, received)
        rows = _exchange(self._computed(rows, counts), self.group, received, sent)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        # as the module's own forward pass does: weighted in the weights' type, and added up in it
        weighted = rows[back].view(tokens, chosen, -1) * top_k_weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden_states.dtype)

    @torch.compiler.disable
    def agree(self, numbers: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        """Return the rows that come here [ranks, own experts], and how many go to and come from each rank."""
        # not bincount, for which the host would wait
        ones = torch.ones_like(numbers)
        going = torch.zeros(self.experts, dtype=ones.dtype, device=ones.device).scatter_add_(0, numbers, ones)
        coming = torch.empty_like(going)
        dist.all_to_all_single(coming, going, group=self.group)
        sums = torch.stack([going, coming]).view(2, self.ranks, self.local).sum(2)
        sent, received = sums.tolist()  # the host waits here, once: it must know the sizes of the exchange
        return coming.view(self.ranks, self.local), sent, received

    @torch.compiler.disable(recursive=False)
    def _computed(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Pass rows through this rank's experts; counts: [ranks, own experts], in the order of the rows."""
        numbers = torch.arange(self.local, device=rows.device).repeat(self.ranks)
        numbers = numbers.repeat_interleave(counts.flatten(), output_size=len(rows))
        num_rows, missing = len(rows), FEWEST_ROWS - len(rows)
        if missing > 0:
            rows = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
            numbers = torch.cat([numbers, numbers.new_zeros(missing)])
        parts = rows, numbers.unsqueeze(1), rows.new_ones(len(rows), 1)
        for part in parts:  # one graph for every number of rows
            let_length_vary(part)
        return self.compute(*parts)[:num_rows]
