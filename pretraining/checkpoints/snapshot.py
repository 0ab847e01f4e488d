"""What a save needs of the live tensors, copied into host memory that is allocated once and kept."""

from collections.abc import Mapping
from pathlib import Path

import torch

from pretraining.command_line import ranks_here

_ALIGNMENT = 64  # bytes; any type of torch may begin there
_MEMINFO = Path("/proc/meminfo")


class HostSnapshot:
    """Host memory for one rank's tensors of one save; pinned where they come from a GPU.

    num_bytes: what it holds now; 0 before the first save.
    """

    def __init__(self):
        self._memory: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.numel()

    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of `tensors`, complete when this returns; they last until the next call."""
        self._make_room(tensors)
        copies, start = {}, 0
        for name, tensor in tensors.items():
            stop = start + tensor.numel() * tensor.element_size()
            copy = self._memory[start:stop].view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor.detach(), non_blocking=True)
            copies[name], start = copy, stop + -stop % _ALIGNMENT
        if self._memory.is_pinned():
            torch.cuda.synchronize()
        return copies

    def _make_room(self, tensors: Mapping[str, torch.Tensor]) -> None:
        needed = snapshot_bytes(tensors)
        if self._memory is None or self._memory.numel() < needed:
            self._memory = None  # never two at once
            pinned = any(tensor.is_cuda for tensor in tensors.values())
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=pinned)


def snapshot_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Host memory that copies of `tensors` take, in bytes."""
    sizes = (tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return sum(size + -size % _ALIGNMENT for size in sizes)


def available_bytes() -> int | None:
    """This rank's share of the host memory that is free now; None where the system does not tell."""
    try:
        lines = _MEMINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    kibibytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kibibytes is None else int(kibibytes) * 1024 // ranks_here()
