"""The history of a GPU's memory, for https://pytorch.org/memory_viz; torch 2.13.

torch documents these functions under private names. Their names and parameters are held by
tests/test_upstream.py; no test opens a snapshot. May go once they have public ones.
"""

from pathlib import Path

import torch


def start_memory_history(most_allocations: int) -> None:
    """Record every allocation from now on, the last `most_allocations` of them."""
    torch.cuda.memory._record_memory_history(max_entries=most_allocations)


def write_memory_history(path: Path) -> None:
    """Write what was recorded, and stop recording."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
