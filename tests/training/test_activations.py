"""Largest attention logits, sizes of activations, and queries and keys that are clipped: as computed by hand, at every
stage and degree.
"""

import math

import pytest
import torch

from pretraining.model.abilities import built
from pretraining.training.gradients import LogitClip
from pretraining.upstream import attention_logits
from pretraining.upstream.attention_logits import (
    WATCH,
    ClippedUnits,
    factors,
    forget_logits,
    largest_logits,
    read_logits,
    watch_attention,
)
from tests.gear.runs import LLAMA, MODELS, Workshop
from tests.training.test_curve import SHORT, beginning

STEPS = ("monitors.activations_steps=2", "monitors.noise_scale_steps=null")
CLIPPED = (*STEPS, "optimizer.qk_clip=0.05")
SEEN = ("stability/attention_logit/", "stability/activation/")


def by_hand(query, key, scaling, seen) -> torch.Tensor:
    """All logits at once."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = (query.double() @ key.double().transpose(-1, -2)) * scaling
    return logits.masked_fill(~seen, -math.inf).amax((0, 2, 3)).float()


@pytest.mark.parametrize("rows_at_once", [1, 5, 1000])
def test_the_largest_logit_is_that_of_all_pairs_that_may_be_seen(rows_at_once, monkeypatch):
    """Causal, in windows, in documents, by either kind of mask; with fewer heads of keys; some rows at a time."""
    monkeypatch.setattr(attention_logits, "CHUNK_BYTES", rows_at_once * 4 * 2 * 4 * 12)
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 12, 8), torch.randn(2, 2, 12, 8)
    places = torch.arange(12)
    behind = places[:, None] - places
    causal = (behind >= 0).expand(2, 1, 12, 12)
    borders = torch.tensor([0, 5, 12, 19, 24], dtype=torch.int32)
    documents = torch.tensor([[0] * 5 + [1] * 7, [2] * 7 + [3] * 5])
    together = (documents[:, :, None] == documents[:, None])[:, None]
    window = causal & (behind < 4)
    cases = (
        (causal, None, {}),
        (window, None, {"sliding_window": 4}),
        (causal & together, None, {"cu_seq_lens_q": borders}),
        (window & together, window & together, {}),
        (window, torch.where(window, 0.0, torch.finfo(torch.float32).min), {}),
        (torch.ones_like(causal), None, {"is_causal": False}),
    )
    for seen, mask, named in cases:
        found = largest_logits(query, key, mask, 0.3, **named)
        assert torch.allclose(found, by_hand(query, key, 0.3, seen), atol=1e-6), named
    assert torch.allclose(largest_logits(query, key, None, None), by_hand(query, key, 8**-0.5, causal))


def test_a_training_pass_is_seen_and_no_other(monkeypatch):
    """Through each kernel, with documents apart and without; the largest of several passes stays."""
    watch_attention()
    monkeypatch.setattr(WATCH, "is_on", True)
    tokens = torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    found = {}
    for kernel in ("eager", "sdpa", "sdpa_causal"):
        network = built({**LLAMA, "vocab_size": 96}, kernel)
        network.eval()(input_ids=tokens)
        assert not read_logits(network)
        network.train()(input_ids=tokens[:1])
        network(input_ids=tokens[1:])
        found[kernel] = torch.stack(list(read_logits(network).values()))
        forget_logits(network)
        network(input_ids=tokens)
        whole = torch.stack(list(read_logits(network).values()))
        assert torch.allclose(whole, found[kernel], rtol=1e-5) and whole.shape == (2, 4)
    assert torch.allclose(found["sdpa"], found["eager"], rtol=1e-5)
    assert torch.equal(found["sdpa"], found["sdpa_causal"])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_clipped_head_has_the_threshold_and_the_others_what_they_had(name, monkeypatch):
    """After the optimizer's step, whole and of rate 0: by the same tokens again."""
    watch_attention()
    network = built({**MODELS[name], "vocab_size": 96})
    tokens = torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    monkeypatch.setattr(WATCH, "is_on", False)

    def first_layer() -> torch.Tensor:
        network(input_ids=tokens).logits.sum().backward()
        return next(iter(read_logits(network).values()))

    clip = LogitClip(1.0)
    clip.on_train_begin(None, None, None, network, optimizer)
    clip.on_step_begin(None, None, None)
    before = first_layer()
    clip.threshold = before.sort().values[1:3].mean().item()
    values = {key: value.clone() for key, value in network.state_dict().items()}
    optimizer.step()
    clip.on_step_begin(None, None, None)
    assert first_layer() == pytest.approx(before.clamp(max=clip.threshold), rel=1e-5)
    changed = {key for key, value in network.state_dict().items() if not torch.equal(value, values[key])}
    assert changed and all(".c_attn." in key or "q_proj" in key for key in changed)
    optimizer.zero_grad()
    values = {key: value.clone() for key, value in network.state_dict().items()}
    clip.threshold = 0.01
    optimizer.step()  # refused: without gradients nothing is clipped either
    assert all(torch.equal(value, values[key]) for key, value in network.state_dict().items())
    clip.on_train_end(None, None, None)
    assert not WATCH.is_on


def test_factors_lead_to_the_threshold():
    largest = torch.tensor([-1.0, 50.0, 100.0, 400.0, -math.inf])
    units = ClippedUnits("attn", torch.arange(5), torch.ones(5))
    assert factors(units, largest, 100.0).tolist() == [1.0, 1.0, 1.0, 0.25, 1.0]


def test_signals_of_a_run_are_there_on_the_steps_asked_for(workshop: Workshop):
    """The largest logits and activations; without clipping they are others."""
    clipped, free = workshop.plain((*SHORT, *CLIPPED)), workshop.plain((*SHORT, *STEPS))
    seen = {row["step"]: beginning(row, SEEN) for row in clipped.training_rows}
    assert [step for step, signals in seen.items() if signals] == [2, 4] and len(seen[4]) == 4
    assert beginning(free.training_rows[3], SEEN) != pytest.approx(seen[4], rel=1e-3)
