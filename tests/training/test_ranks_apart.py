"""Promise: ranks that exchange messages decide together how many. In each case one of two ranks differs."""

import json

import pytest

from pretraining.evaluation.validation import Validation
from tests.evaluation.test_validation import Bigrams, by_source, recipe_of, sets_of, three_sources
from tests.gear.runs import execute


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """What two ranks found, case by case, and how they ended."""
    path = tmp_path_factory.mktemp("apart") / "found.json"
    words = ["forked", "2", "-m", "tests.gear.ranks_apart", path]
    finished = execute(words, timeout=300, TORCH_EXTENSIONS_DIR=str(path.parent / "extensions"))
    assert path.exists(), finished.output
    return json.loads(path.read_text()), finished


@pytest.mark.parametrize(
    "case, expected",
    [
        ("prefetched", 2),  # torch's least, which is all that rank 1 has room for
        ("alerted", None),  # rank 0's norm counts
        ("saved", ["checkpoint-1", "False"]),  # while training waits, on both
        ("stopped", 3),
        (
            "measured",
            "evaluation.hellaswag, endings: 12 on HOST, 8 on HOST; all nodes must read the same files",
        ),
        ("continued", ["1 tokens", "9 tokens"]),
    ],
)
def test_both_ranks_find_the_same(apart, case, expected):
    """Else one of them would wait for a message that the other does not send."""
    if case == "continued":
        pytest.importorskip("lm_eval", reason="lm-eval is not installed (requirements-eval.txt)")
    assert apart[0][case] == [expected, expected]


def test_two_ranks_measure_what_one_does(apart, tmp_path):
    """Batches that they cannot share evenly: the same numbers by source, and as many forward passes on each rank."""
    first, second = apart[0]["validated"]
    assert first == second and first["passes"] > 0
    alone = Validation(sets_of(by_source(three_sources(tmp_path))), recipe_of()).measure(Bigrams())
    assert {name: first[name] for name in alone} == pytest.approx(alone, rel=1e-6)


def test_no_rank_has_a_buffer_in_shared_memory(apart, tmp_path_factory):
    """Nothing is compiled for it and nothing is said of it."""
    found, finished = apart
    assert found["reduced"] == [[6.0, 0], [6.0, 0]]
    assert not any(tmp_path_factory.getbasetemp().glob("apart*/extensions/*"))
    assert "built" not in finished.stdout and "compil" not in finished.stdout


def test_what_one_node_lacks_is_one_line_and_exit_code_2(apart):
    """Rank 0 waits for a message meanwhile, and cannot report it."""
    finished = apart[1]
    assert finished.code == 2, finished.output
    assert [line for line in finished.stderr.splitlines() if line.startswith("error: ")] == [
        "error: no compiler on this node; install one"
    ]
