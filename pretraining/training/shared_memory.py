"""DeepSpeed's buffer for reductions between ranks of one machine: 66 MiB of memory a rank, which nobody gives back."""

import os
from pathlib import Path

import torch.distributed as dist

FOLDER = Path("/dev/shm")


def forget_shared_buffer() -> None:
    """Take this rank's buffer out of /dev/shm, once all ranks have it open: it goes with the last of them.

    deepspeed 0.19.8 (csrc/cpu/comm/shm.cpp) never removes it: each run, killed or not, would keep its memory until
    the machine starts anew. Every rank must call it.
    """
    dist.barrier()
    place = f"{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}"
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{place}_{dist.get_rank()}"
    (FOLDER / name).unlink(missing_ok=True)
