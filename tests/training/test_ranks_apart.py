"""Promise: ranks that exchange messages decide together how many. In each case one of two ranks differs."""

import json

import pytest

from tests.gear.runs import execute


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """What two ranks found, case by case, and how they ended."""
    path = tmp_path_factory.mktemp("apart") / "found.json"
    finished = execute(["forked", "2", "-m", "tests.gear.ranks_apart", path], timeout=300)
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


def test_what_one_node_lacks_is_one_line_and_exit_code_2(apart):
    """Rank 0 waits for a message meanwhile, and cannot report it."""
    finished = apart[1]
    assert finished.code == 2, finished.output
    assert [line for line in finished.stderr.splitlines() if line.startswith("error: ")] == [
        "error: no compiler on this node; install one"
    ]
