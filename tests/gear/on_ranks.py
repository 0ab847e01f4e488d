"""Call a function on forked ranks that have met each other; each of them is `python -m tests.gear.on_ranks`."""

import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gear.runs import completed


def on_ranks(ranks: int, function: Callable, *arguments: Any) -> list:
    """What the function, which may be a test file's own, returns on each rank, in their order; 0: a plain process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "call").write_bytes(pickle.dumps((function, arguments)))
        completed(["forked", str(ranks), "-m", "tests.gear.on_ranks", folder])
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(max(1, ranks))]


def main(folder: Path) -> None:
    import torch.distributed as dist

    from pretraining.training.ranks import joined_ranks

    function, arguments = pickle.loads((folder / "call").read_bytes())
    with joined_ranks(None):
        (folder / str(dist.get_rank())).write_bytes(pickle.dumps(function(*arguments)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
