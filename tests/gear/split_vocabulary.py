"""Ranks that split a vocabulary, unevenly, beside each of them alone with all of it: losses, gradients, logits.

At last one of them lacks a compiler or memory that the others have.
"""

import copy
import json
import sys
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from pretraining.data.documents import IGNORED
from pretraining.model import cross_entropy
from pretraining.model.loss import build_loss
from pretraining.model.parallel import split_vocabulary
from pretraining.planning.memory import activations
from pretraining.training.ranks import joined_ranks
from pretraining.upstream.deepspeed import whole_shape
from tests.gear.runs import LLAMA
from tests.model.test_loss import WAYS, built, settings

VOCABULARY = 511
Z_LOSS = 0.01


SMALL = {"ON_PROCESSOR": 1 << 17, "MULTIPLE": 16}
"""A processor's memory and lengths for which a loss that is not compiled has more chunks than a compiled one."""


def lacking(what: str) -> AbstractContextManager:
    """Let this rank lack what others have: of its own it would cut the loss into more chunks, and exchange more."""
    cross_entropy._can_compile.cache_clear()
    cross_entropy._least_resources.cache_clear()
    if what == "compiler":
        missing = "room on /tmp" if dist.get_rank() == 1 else None
        return mock.patch.object(cross_entropy, "missing_compiler", lambda: missing)
    memory = activations.GPU_SHARE << (16 if dist.get_rank() == 2 else 18)
    return mock.patch.object(cross_entropy, "_resources", lambda *_: (False, memory))


def compare(tied: bool, kind: str, compile: bool | None, chunk_tokens: int | None = 50) -> dict:
    """The largest differences of this rank."""
    torch.manual_seed(1)
    whole = built({**LLAMA, "vocab_size": VOCABULARY}, tied)
    ids, labels = torch.randint(VOCABULARY, (3, 64)), torch.randint(VOCABULARY, (3, 64))
    labels[0, :5] = labels[2, 60:] = IGNORED
    expected = build_loss(whole, settings("plain", z_loss=Z_LOSS))(
        whole(input_ids=ids), labels, torch.tensor(400)
    )
    expected.backward()
    split = copy.deepcopy(whole)
    split.zero_grad()
    split_vocabulary(split, dist.get_world_size())
    sizes = []
    head = split.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape))
    loss_of = build_loss(split, settings(kind, chunk_tokens, Z_LOSS, compile))
    nats = torch.zeros(labels.numel(), dtype=torch.float64)
    loss = loss_of(split(input_ids=ids), labels, torch.tensor(400), each=nats)
    loss.backward()
    rows = slice(head.rows.first, head.rows.first + head.rows.own)
    gradients = 0.0
    for (name, ours), theirs in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert whole_shape(ours) == tuple(theirs.shape), name
        wanted = theirs.grad if ours.shape == theirs.shape else theirs.grad[rows]
        held = theirs if ours.shape == theirs.shape else theirs[rows]
        assert torch.equal(ours, held), name
        gradients = max(gradients, float((ours.grad - wanted).abs().max()))
    with torch.no_grad():
        logits = [model.eval()(input_ids=ids).logits for model in (split, whole)]
    return {
        "loss": abs(loss.item() - expected.item()),
        "each": abs(nats.sum().item() / 400 - expected.item()),
        "gradients": gradients,
        "logits": float((logits[0] - logits[1]).abs().max()),
        "columns": sizes[0][-1],
        "rows": head.rows.own,
        "is_tied": split.get_input_embeddings().weight is head.weight,
    }


if __name__ == "__main__":
    with joined_ranks(None):
        rank, found = dist.get_rank(), {}
        for tied, (kind, compile) in product((True, False), WAYS):
            found[f"{kind} {compile} {tied}"] = compare(tied, kind, compile)
        for what, kind in product(("compiler", "memory"), ("chunked", "fused")):
            with mock.patch.multiple(activations, **SMALL), lacking(what):
                found[f"{kind} {what} True"] = compare(True, kind, True, chunk_tokens=None)
    Path(f"{sys.argv[1]}-{rank}.json").write_text(json.dumps(found))
