"""What tests of models build and count with."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import TrainingArguments

from pretraining.model import cross_entropy
from pretraining.planning.shapes import count_model, parameter_tensors, widths_of
from pretraining.planning.sizes import model_size


@pytest.fixture
def arguments(tmp_path) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, seed=7)


@pytest.fixture
def nothing_compiled():
    """Graphs are counted from here on."""

    def forget() -> None:
        torch._dynamo.reset()
        counters.clear()
        cross_entropy._can_compile.cache_clear()
        cross_entropy._compiled.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def counts_anew(monkeypatch, tmp_path):
    """Nothing is known of what other tests have counted."""
    monkeypatch.setenv("PRETRAINING_MODEL_CACHE", str(tmp_path / "counted"))
    forget_counts()
    yield
    forget_counts()


def forget_counts() -> None:
    for counts in (count_model, parameter_tensors, widths_of, model_size):
        counts.cache_clear()
