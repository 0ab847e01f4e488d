"""The training loss of each source: what its own samples cost, whatever they share a micro-batch with."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pretraining.data.documents import IGNORED
from pretraining.model.cross_entropy import token_nats
from pretraining.model.loss import PLAIN, build_loss
from pretraining.runtime.metric_names import grouped
from pretraining.training.metrics import SourceLoss
from tests.gear.runs import MODELS


@pytest.mark.parametrize("kind", ["plain", "chunked", "fused"])
def test_the_loss_of_a_source_is_that_of_its_samples(kind):
    """By hand, sample by sample, over two micro-batches that mix two of three sources; masked targets do not count."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS["llama"])).train()
    monitor, batches = SourceLoss(["web", "code", "books"]), []
    for sources in ([0, 1, 0], [1, 1, 0]):
        ids, labels = torch.randint(512, (3, 16)), torch.randint(512, (3, 16))
        labels[1, 3:9] = IGNORED
        batches.append((ids, labels, sources))
    expected = {0: [0.0, 0], 1: [0.0, 0]}
    for ids, labels, sources in batches:
        for row, source in enumerate(sources):
            nats = token_nats(model(input_ids=ids[row : row + 1]).logits, labels[row : row + 1])
            expected[source][0] += nats.item()
            expected[source][1] += (labels[row] != IGNORED).sum().item()
    loss = monitor.around(build_loss(model, replace(PLAIN, kind=kind)))
    for ids, labels, sources in batches:
        monitor.on_sources(torch.tensor(sources))
        loss(model(input_ids=ids), labels).backward()
    logs = {"loss": 0.0}
    monitor.on_log(None, None, None, logs=logs)
    assert logs["train/web_loss"] == pytest.approx(expected[0][0] / expected[0][1], rel=1e-5)
    assert logs["train/code_loss"] == pytest.approx(expected[1][0] / expected[1][1], rel=1e-5)
    assert "train/books_loss" not in logs and grouped("train/web_loss") == "train/web_loss"
    monitor.on_log(None, None, None, logs=(again := {"loss": 0.0}))
    assert again == {"loss": 0.0}
