"""Promise: nothing committed is lost. Two nodes share nothing but a store; each keeps, uploads and reads its own shards."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes import Nodes, two_nodes
from tests.runs import Workshop, committed


@pytest.fixture
def nodes(workshop: Workshop, tmp_path: Path) -> Iterator[Nodes]:
    with two_nodes(workshop, tmp_path) as made:
        if made is None:
            pytest.skip("may not make networks here")
        yield made


def test_two_nodes_train(nodes: Nodes, tmp_path: Path):
    store = tmp_path / "store"
    reference = nodes.workshop.run("zero2")
    finished = nodes.run(settings=(f"checkpoints.upload={store}",))
    for each in finished.values():
        assert each.code == 0, each.output
    assert nodes.disk("alpha").losses == reference.losses
    print(finished["alpha"].output)
    import subprocess
    print(subprocess.run(["find", tmp_path, "-type", "f"], capture_output=True, text=True).stdout)
    for n in ("alpha", "beta"):
        print((nodes.disk(n).folder/"node_events.jsonl").read_text() if n=="beta" else nodes.disk(n).dir.events.read_text())
    assert 0
