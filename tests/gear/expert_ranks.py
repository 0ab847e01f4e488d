"""Compute with experts that two ranks split, and with whole ones: `python -m tests.gear.expert_ranks FILE`."""

import copy
import json
import sys
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from pretraining.model.parallel import split_experts
from pretraining.training.ranks import join_ranks, leave_ranks
from pretraining.upstream.deepspeed import own_rows
from tests.model.test_expert_parallel import MIXTRAL

CHOICES = {"all": [0, 1, 2, 3], "those of the first rank": [0, 1], "those of the second": [3, 2], "one": [2]}
IMPLEMENTATIONS = ("eager", "grouped_mm")
TOKENS, CHOSEN = 24, 2


def largest_difference(choices: list[int], implementation: str) -> float:
    """Between outputs, and gradients of tokens, weights and scores, of whole and of split experts."""
    config = AutoConfig.for_model(**MIXTRAL)
    config._experts_implementation = implementation
    torch.manual_seed(0)
    whole = nn.ModuleDict({"layer": nn.ModuleDict({"experts": MixtralExperts(config)})})
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.1)
    split = copy.deepcopy(whole)
    split_experts(split, 2)
    for ours, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        ours.data.copy_(own_rows(ours, theirs.data))
    torch.manual_seed(dist.get_rank())
    tokens, scores = torch.randn(TOKENS, config.hidden_size), torch.rand(TOKENS, CHOSEN)
    chosen = torch.tensor(choices)[torch.randint(len(choices), (TOKENS, CHOSEN))]
    found = []
    for model in (whole, split):
        inputs = [tokens.clone().requires_grad_(), scores.clone().requires_grad_()]
        output = model["layer"]["experts"](inputs[0], chosen, inputs[1])
        (output**2).sum().backward()
        weights = [parameter.grad for parameter in model.parameters()]
        if model is whole:
            for gradient in weights:
                dist.all_reduce(gradient)
            weights = [own_rows(p, each) for p, each in zip(split.parameters(), weights, strict=True)]
        found.append([output.detach(), *(each.grad for each in inputs), *weights])
    return max(
        float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6))
        for theirs, ours in zip(*found, strict=True)
    )


def main(path: str) -> None:
    join_ranks()
    found = {}
    for (name, choices), implementation in product(CHOICES.items(), IMPLEMENTATIONS):
        largest = torch.tensor(largest_difference(choices, implementation))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        found[f"{name}, {implementation}"] = float(largest)
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found))
    leave_ranks()


if __name__ == "__main__":
    main(sys.argv[1])
