"""Promise: nothing committed is lost. A run that loses a machine goes on by itself on those that are left."""

import time
from collections.abc import Callable
from pathlib import Path

from tests.runs import Run, Started, Workshop, committed, forked_programs, free_port, send_kill

QUICK = "last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=5"
"""torchrun's own patience with nodes that come late, or are silent: seconds, for two that are this machine."""


def test_a_lost_node_leaves_a_run_that_goes_on_with_one_rank(workshop: Workshop, tmp_path):
    """`torchrun --nnodes=1:2`: one node is killed; the other resumes on its own, and the curve stays the same."""
    output, reference = tmp_path / "run", workshop.run("zero2")
    port = free_port()
    here = {
        "GLOO_SOCKET_IFNAME": "lo",
        **forked_programs(),
    }  # both nodes are this machine, whatever its name leads to
    commands = [node_command(workshop, output, port, is_host) for is_host in (True, False)]
    survivor, lost = (Started(command, **here) for command in commands)
    run = Run(output)
    wait_until(survivor, lambda: run.dir.events.exists())
    node = lost.processes()
    wait_until(survivor, lambda: "checkpoint-4" in committed(output))
    send_kill(node)
    lost.kill()
    finished = survivor.finish()
    assert finished.code == 0, finished.output
    starts = [event for event in run.events if event["event"] in ("start", "resume")]
    assert [(event["event"], event["world_size"]) for event in starts] == [("start", 2), ("resume", 1)]
    assert max(abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True)) <= 1e-4


def node_command(workshop: Workshop, output: Path, port: int, is_host: bool) -> list[str]:
    """One of two nodes; who holds the meeting point is said, for it must not be the one that is killed."""
    rendezvous = (
        f"--rdzv_backend=c10d --rdzv_endpoint=127.0.0.1:{port} --rdzv_id=run "
        f"--rdzv_conf={QUICK},is_host={str(is_host).lower()}"
    )
    words = ["torchrun", "--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3", *rendezvous.split()]
    command = workshop.typed(words, ["--set", "training.save_steps=2"], output)
    command.remove("--standalone")
    return command


def wait_until(started: Started, reached: Callable[[], bool]) -> None:
    """Look again and again; an error where the run ends first."""
    while not reached():
        assert started.process.poll() is None, started.finish().output
        time.sleep(0.002)
