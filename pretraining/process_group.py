"""Which of the ranks this process is."""


def rank_and_world_size() -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) for a process without a group."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
