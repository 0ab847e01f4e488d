"""Promise: nothing committed is lost. A run that loses a machine goes on without it, and takes it back later."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from pretraining.checkpoints.remote import RemoteRun, newest_committed
from pretraining.runtime.run_folder import STARTS
from pretraining.supervise.supervisor import MEET_ANEW
from tests.gear.hosts import Hosts, hosts
from tests.gear.node import disk_of
from tests.gear.nodes import HERE, SLOW, wait_until
from tests.gear.object_store import Proxy, connect_to, s3_server, use_here
from tests.gear.runs import Run, Started, Workshop, forked_programs, free_port

QUICK = "last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=10"
"""torchrun's own patience with nodes that come late, or are silent: seconds, for two that are this machine."""


def test_a_lost_node_is_done_without_and_taken_back(workshop: Workshop, tmp_path, monkeypatch):
    """`torchrun --nnodes=1:2` on two hosts that share nothing but a bucket: the plug of one is pulled, and put back.

    Nobody types anything on the other: it names the hang, resumes alone, and resumes with the one that is back, whose
    disk is empty. The curve stays the same.
    """
    reference, output = workshop.run("zero2"), tmp_path / "run"
    (tmp_path / "slow.py").write_text(SLOW)
    settings = [
        "training.save_steps=2",
        "checkpoints.upload=s3://bucket/runs",
        "monitors.hang_minutes=0.25",
        f'extensions=["{tmp_path / "slow.py"}"]',
    ]
    with ExitStack() as stack:
        made = stack.enter_context(hosts(tmp_path, "alpha", "beta"))
        if made is None:
            pytest.skip("may not make networks here")
        address = stack.enter_context(s3_server(tmp_path / "log"))
        proxy = stack.enter_context(Proxy(address, lambda number, path: None, made.outside))
        use_here(monkeypatch, address)
        remote, port = RemoteRun("s3://bucket/runs", "run"), free_port()

        def start(name: str) -> Started:
            disk_of(output, name).mkdir()
            command = node_command(workshop, made, name, port, output, settings)
            variables = {MEET_ANEW: "1", **HERE, **forked_programs(), **connect_to(proxy.address)}
            return Started(command, SECONDS_A_STEP="1", **variables)

        output.mkdir()
        alpha, beta = (start(name) for name in ("alpha", "beta"))
        run = Run(disk_of(output, "alpha"))
        wait_until({"alpha": alpha}, lambda: newest_committed(remote, 3) is not None)
        made.pull_plug("beta")
        beta.finish()
        wait_until({"alpha": alpha}, lambda: len(starts_of(run)) == 2)
        made.plug_in("beta")
        disk_of(output, "beta").rename(tmp_path / "lost")
        beta = start("beta")
        finished = [each.finish() for each in (alpha, beta)]
    for each in finished:
        assert each.code == 0, each.output
    run = max((Run(disk_of(output, name)) for name in ("alpha", "beta")), key=lambda run: len(starts_of(run)))
    assert [(event["event"], event["world_size"]) for event in starts_of(run)] == [
        ("start", 2),
        ("resume", 1),
        ("resume", 2),
    ]
    assert max(abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True)) <= 1e-4


def starts_of(run: Run) -> list[dict]:
    return [event for event in run.events if event["event"] in STARTS]


def node_command(
    workshop: Workshop, made: Hosts, name: str, port: int, output: Path, settings: list[str]
) -> list[str]:
    """One of two hosts; who holds the meeting point is said, for it must not be the one that is lost."""
    rendezvous = (
        f"--rdzv_backend=c10d --rdzv_endpoint={made.address('alpha')}:{port} --rdzv_id=run "
        f"--rdzv_conf={QUICK},is_host={str(name == 'alpha').lower()} --local_addr={made.address(name)}"
    )
    words = ["torchrun", "--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3", *rendezvous.split()]
    choices = [word for setting in settings for word in ("--set", setting)]
    command = workshop.typed(words, choices, output)
    command.remove("--standalone")
    return [*made.words(name, {output: disk_of(output, name)}), *command]
