"""Promise: a clean end. No run leaves memory behind, however it ends, and none builds what it does not use."""

from pathlib import Path

from tests.gear.runs import execute

BUFFERS = Path("/dev/shm")
REDUCED = "3.0 of 2 ranks"


def program() -> None:
    """One rank: reduce, and look for a buffer of DeepSpeed's, which would take 66 MiB until the machine starts anew."""
    import os

    import torch
    from deepspeed import comm

    from pretraining.training.ranks import join_ranks, leave_ranks

    rank, ranks = join_ranks()
    named = list(BUFFERS.glob(f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_{rank}"))
    comm.barrier()
    value = torch.full((1000,), rank + 1.0)
    comm.all_reduce(value)
    comm.inference_all_reduce(value)
    if rank == 0:
        print(f"{value[0].item() / ranks} of {ranks} ranks, {len(named)} named")
    leave_ranks()


def test_no_rank_has_a_buffer_in_shared_memory(tmp_path):
    """Nothing is compiled for it and nothing is said of it."""
    finished = execute(
        ["forked", "2", "-m", "tests.data.test_shared_memory"], TORCH_EXTENSIONS_DIR=str(tmp_path)
    )
    assert finished.code == 0, finished.output
    assert f"{REDUCED}, 0 named" in finished.stdout and not list(tmp_path.iterdir())
    assert "built" not in finished.stdout and "compil" not in finished.stdout


if __name__ == "__main__":
    program()
