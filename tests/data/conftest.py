"""What tests of several files of this room begin with."""

from types import SimpleNamespace

import pytest

from tests.gear.finished_data import make_data


@pytest.fixture
def small_tasks(monkeypatch) -> None:
    """A small corpus has many tasks, which are not run in processes of their own."""
    for module in ("corpus", "preparation.plan"):
        monkeypatch.setattr(f"pretraining.data.{module}.PIECE_BYTES", 3000)
        monkeypatch.setattr(f"pretraining.data.{module}.TASK_PIECES", 2)


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> SimpleNamespace:
    """One data set of several shards for all tests, which leave it as it is."""
    return make_data(tmp_path_factory.mktemp("made"))
