"""Promise: the curve belongs to the recipe. Ranks may split embedding and head by tokens of the vocabulary."""

import copy
from contextlib import AbstractContextManager
from itertools import product
from unittest import mock

import torch
import torch.distributed as dist

from pretraining.data.documents import IGNORED
from pretraining.model import cross_entropy
from pretraining.model.loss import build_loss
from pretraining.model.parallel import split_vocabulary
from pretraining.planning.memory import activations
from pretraining.upstream.deepspeed import whole_shape
from tests.gear.on_ranks import on_ranks
from tests.gear.runs import LLAMA
from tests.model.test_loss import WAYS, built, settings

RANKS, VOCABULARY, Z_LOSS = 3, 511, 0.01
SMALL = {"ON_PROCESSOR": 1 << 17, "MULTIPLE": 16}
"""A processor's memory and lengths for which a loss that is not compiled has more chunks than a compiled one."""


def lacking(what: str) -> AbstractContextManager:
    """Let this rank lack what others have: of its own it would cut the loss into more chunks, and exchange more."""
    cross_entropy._can_compile.cache_clear()
    cross_entropy._least_memory.cache_clear()
    if what == "compiler":
        missing = "room on /tmp" if dist.get_rank() == 1 else None
        return mock.patch.object(cross_entropy, "missing_compiler", lambda: missing)
    memory = activations.GPU_SHARE << (16 if dist.get_rank() == 2 else 18)
    return mock.patch.object(cross_entropy, "_memory", lambda device: memory)


def compare(tied: bool, kind: str, compile: bool | None, chunk_tokens: int | None = 50) -> dict:
    """The largest differences of this rank."""
    torch.manual_seed(1)
    whole = built({**LLAMA, "vocab_size": VOCABULARY}, tied)
    ids, labels = torch.randint(VOCABULARY, (3, 64)), torch.randint(VOCABULARY, (3, 64))
    labels[0, :5] = labels[2, 60:] = IGNORED
    plain = build_loss(whole, settings("plain", z_loss=Z_LOSS))
    expected = plain(whole(input_ids=ids), labels, torch.tensor(400))
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


def compare_all() -> dict[str, dict]:
    """{case: what `compare` finds on this rank}; at last one rank lacks a compiler or memory that the others have."""
    found = {}
    for tied, (kind, compile) in product((True, False), WAYS):
        if tied or not compile:  # what is compiled is the loss, which knows nothing of an embedding
            found[f"{kind} {compile} {tied}"] = compare(tied, kind, compile)
    for what, kind in product(("compiler", "memory"), ("chunked", "fused")):
        with mock.patch.multiple(activations, **SMALL), lacking(what):
            found[f"{kind} {what} True"] = compare(True, kind, True, chunk_tokens=None)
    return found


def test_split_rows_have_the_loss_and_gradients_of_the_whole():
    """In float64, with a z-loss and ignored labels, tied and not, each way to compute it; uneven parts.

    Also if one rank lacks a compiler or memory that the others have: all exchange the numbers of as many chunks.
    """
    for rank, answers in enumerate(on_ranks(RANKS, compare_all)):
        for case, found in answers.items():
            kind, _, tied = case.split()
            assert found["rows"] == (171, 170, 170)[rank] and str(found["is_tied"]) == tied
            for name in ("loss", "each", "gradients", "logits"):
                assert found[name] < 1e-12, (case, name, found)
            # while it trains, no rank has whole logits unless a plain loss asks for them
            columns = {"plain": VOCABULARY, "chunked": found["rows"], "fused": LLAMA["hidden_size"]}
            assert found["columns"] == columns[kind]
