"""What a save needs of the live tensors, copied into host memory that is allocated once and kept."""

from collections.abc import Mapping

import torch

from pretraining.command_line import ranks_here
from pretraining.planning.memory.need import SNAPSHOT_ALIGNMENT, pinned_bytes, snapshot_bytes
from pretraining.runtime.host import free_memory_bytes


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
        """Copies of `tensors`, for which there is room, complete when this returns; they last until the next call."""
        copies, start = {}, 0
        for name, tensor in tensors.items():
            stop = start + tensor.numel() * tensor.element_size()
            copy = self._memory[start:stop].view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor.detach(), non_blocking=True)
            copies[name], start = copy, stop + -stop % SNAPSHOT_ALIGNMENT
        if self._memory.is_pinned():
            torch.cuda.synchronize()
        return copies

    def would_fit(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether this rank's share of the free host memory suffices for copies of `tensors`.

        All ranks of a host must ask before one of them takes its memory.
        """
        needed, free = _bytes_of(tensors), free_memory_bytes()
        if needed <= self.num_bytes or free is None:
            return True
        return pinned_bytes(needed) - self.num_bytes < free // ranks_here()

    def make_room(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Take the memory that copies of `tensors` need; False if the system does not give it."""
        needed = _bytes_of(tensors)
        if self._memory is None or needed > self.num_bytes:
            self.release()  # never two at once
            on_gpu = any(tensor.is_cuda for tensor in tensors.values())
            try:
                self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=on_gpu)
            except RuntimeError:  # what was free a moment ago is taken, or may not be pinned
                return False
        return True

    def release(self) -> None:
        """Give the memory back."""
        self._memory = None


def _bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    return snapshot_bytes(tensor.nbytes for tensor in tensors.values())
