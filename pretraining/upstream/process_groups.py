"""Defaults of process groups that a run has to change; torch 2.13 and deepspeed 0.19.8.

- The limit of a group that is made without one (`wait_in_every_group`): DeepSpeed reduces in a group of its own making.
  torch's `default_pg_timeout` and `default_pg_nccl_timeout` are read when a group is made. Held by
  tests/test_launchers.py; may go once DeepSpeed hands its own limit on to every group.
- Reductions through shared memory (`leave_out_shared_memory`): DeepSpeed's table of operators that this machine can
  build. Held by tests/test_shared_memory.py; may go once they are built at their first use.
"""

from datetime import timedelta

import deepspeed
from torch.distributed import distributed_c10d


def wait_in_every_group(timeout: timedelta) -> None:
    """Give groups that are made without a limit this one.

    torch's own limit for NCCL is 10 minutes, and then it aborts the process. The watch for hangs, which can name the
    ranks, would have no time to do so.
    """
    # Two names: NCCL has a default of its own, every other backend takes the first.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout


def leave_out_shared_memory() -> None:
    """Keep DeepSpeed from building its reductions through shared memory, which only `inference_all_reduce` uses.

    comm/torch.py would build them for every process group, also without a ds_config. That takes a minute of compiling,
    a line on the screen, and 66 MiB a rank in /dev/shm that no process gives back. They also reduce over all ranks,
    whichever group is asked for; torch's own reductions keep to the group.
    """
    # Before `TorchBackend` is made, which looks here and builds them.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
