"""Promise: a clean end. No run leaves memory behind, however it ends; DeepSpeed's ranks would 66 MiB each."""

from pathlib import Path

from tests.runs import execute

BUFFERS = Path("/dev/shm")
REDUCED = "3.0 of 2 ranks"


def program() -> None:
    """One rank: reduce through the shared buffer, which has no name any more."""
    import os

    import torch
    from deepspeed import comm

    from pretraining.training import join_ranks, leave_ranks

    rank, ranks = join_ranks()
    named = list(BUFFERS.glob(f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_{rank}"))
    comm.barrier()
    value = torch.full((1000,), rank + 1.0)
    comm.all_reduce(value)
    if rank == 0:
        print(f"{value[0].item()} of {ranks} ranks, {len(named)} named")
    leave_ranks()


def test_the_shared_buffers_have_no_names_while_ranks_use_them():
    finished = execute(["forked", "2", "-m", "tests.test_shared_memory"])
    assert finished.code == 0, finished.output
    assert f"{REDUCED}, 0 named" in finished.stdout


if __name__ == "__main__":
    program()
