"""What tests of models build and count with."""

import pytest
from transformers import TrainingArguments

from pretraining.planning import shapes


@pytest.fixture
def arguments(tmp_path) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, seed=7)


@pytest.fixture
def counts_anew(monkeypatch, tmp_path):
    """Nothing is known of what other tests have counted."""
    monkeypatch.setenv("PRETRAINING_MODEL_CACHE", str(tmp_path / "counted"))
    shapes._counted.cache_clear()
