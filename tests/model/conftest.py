"""What tests of models build and count with."""

import json

import pytest
from transformers import TrainingArguments

from pretraining.model.counting import describe
from pretraining.planning import shapes


@pytest.fixture
def arguments(tmp_path) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, seed=7)


@pytest.fixture
def counts_here(monkeypatch, tmp_path):
    """Counts in this process, which has torch: the program's own function, without the seconds of its imports."""
    monkeypatch.setattr(shapes, "ask_of_model", lambda module, section: describe(json.loads(section)))
    monkeypatch.setenv("PRETRAINING_MODEL_CACHE", str(tmp_path / "counted"))
    shapes._counted.cache_clear()
