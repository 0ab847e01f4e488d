"""`make test` on a machine with GPUs: tests of several ranks see none of them, those of `pytest -m gpu` do run."""

import os
import sys
from types import SimpleNamespace

import pytest

from tests import conftest
from tests.gear.runs import execute

PROGRAM = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"


def test_no_process_of_the_tests_sees_a_gpu():
    """Neither this one nor a rank for which the `deepspeed` launcher has named GPUs."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    rank = execute([sys.executable, "-c", PROGRAM], CUDA_VISIBLE_DEVICES="0,1")
    assert rank.stdout == "''\n", rank.output


@pytest.mark.parametrize("chosen, seen", [("gpu", "0,1"), ("", ""), ("not gpu", "")])
def test_only_the_session_of_gpu_tests_keeps_the_gpus(monkeypatch, chosen, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    conftest.pytest_configure(SimpleNamespace(option=SimpleNamespace(markexpr=chosen)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(
    "outcome, gpus, code", [("skipped", 1, 1), ("skipped", 0, 0), ("passed", 1, 0), ("failed", 1, 0)]
)
def test_a_gpu_that_no_test_could_use_fails_the_session(monkeypatch, outcome, gpus, code):
    """Everything skipped, with a GPU there: not a success. What failed has a code of its own already."""
    monkeypatch.setattr(conftest, "num_gpus", lambda: gpus)
    said = []
    reporter = SimpleNamespace(stats={outcome: ["a report"]}, write_line=lambda line, **_: said.append(line))
    manager = SimpleNamespace(get_plugin=lambda name: reporter)
    config = SimpleNamespace(option=SimpleNamespace(markexpr="gpu"), pluginmanager=manager)
    session = SimpleNamespace(config=config, testscollected=1, exitstatus=0)
    conftest.pytest_sessionfinish(session)
    assert session.exitstatus == code and len(said) == code
