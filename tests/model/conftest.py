"""What tests of models build with."""

import pytest
from transformers import TrainingArguments


@pytest.fixture
def arguments(tmp_path) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, seed=7)
