"""What the machine of a run turns out to be, for the plan to be judged by: GPU, memory, room on the disk."""

from pathlib import Path

import torch
import torch.distributed as dist

from pretraining.command_line import ranks_here
from pretraining.planning.findings import Found
from pretraining.planning.gpus import known_gpu
from pretraining.runtime.host import disk_room_bytes, host_memory_bytes
from pretraining.training.ranks import device_name


def find_machine(run_folder: Path, continues: bool, data_tokens: int) -> Found:
    """What rank 0 finds, told to every rank, so that all judge alike.

    Args:
        continues: the run has begun already, and its own checkpoints take the places of those to come; else they
            stay beside them.
    """
    found: list[Found | None] = [None]
    if dist.get_rank() == 0:
        on_gpu = torch.cuda.is_available()
        found[0] = Found(
            gpu_memory_bytes=torch.cuda.get_device_properties(0).total_memory if on_gpu else None,
            gpu=known_gpu(device_name()) if on_gpu else None,
            has_bf16=torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else None,
            disk_room_bytes=disk_room_bytes(run_folder, continues),
            host_memory_bytes=host_memory_bytes(),
            ranks_per_host=ranks_here(),
            trains_on_processor=not on_gpu,
            data_tokens=data_tokens,
            continues=continues,
        )
    dist.broadcast_object_list(found, src=0)
    return found[0]
