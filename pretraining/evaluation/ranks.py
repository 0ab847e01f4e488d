"""Which of the processes this is."""

import torch.distributed as dist


def rank_and_world_size() -> tuple[int, int]:
    """(0, 1) where there is no process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
