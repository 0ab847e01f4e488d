"""Promise: the curve belongs to the recipe. Ranks may split embedding and head by tokens of the vocabulary."""

import json

from tests.gear.runs import LLAMA, execute
from tests.gear.split_vocabulary import VOCABULARY

RANKS = 3


def test_split_rows_have_the_loss_and_gradients_of_the_whole(tmp_path):
    """In float64, with a z-loss and ignored labels, tied and not, each way to compute the loss; uneven parts.

    Also if one rank lacks a compiler or memory that the others have: all exchange the numbers of as many chunks.
    """
    finished = execute(["forked", str(RANKS), "-m", "tests.gear.split_vocabulary", tmp_path / "found"])
    assert finished.code == 0, finished.output
    for rank in range(RANKS):
        for case, found in json.loads((tmp_path / f"found-{rank}.json").read_text()).items():
            kind, _, tied = case.split()
            assert found["rows"] == (171, 170, 170)[rank] and str(found["is_tied"]) == tied
            for name in ("loss", "each", "gradients", "logits"):
                assert found[name] < 1e-12, (case, name, found)
            # while it trains, no rank has whole logits unless a plain loss asks for them
            columns = {"plain": VOCABULARY, "chunked": found["rows"], "fused": LLAMA["hidden_size"]}
            assert found["columns"] == columns[kind]
