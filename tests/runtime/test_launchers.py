"""The same run by deepspeed, torchrun, accelerate launch and plain python, each with a clean end."""

import os
import re
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pretraining.ds_config import ds_config_names
from pretraining.errors import UserError
from pretraining.runtime import host
from pretraining.runtime.exit_codes import HANG
from pretraining.training import ranks
from pretraining.upstream.deepspeed import wait_in_every_group
from tests.gear.runs import REPOSITORY, STEPS, execute, free_port

CONFIGS = sorted((REPOSITORY / "accelerate_configs").glob("*.yaml"))
WAYS = {
    "deepspeed": ("zero2", 2),
    "torchrun": ("zero1", 2),  # the README's command, whose run this is
    "accelerate": ("zero2", 2),
    "python": ("null", 1),
}
OUTLINE = ["run", "start", "plan", "result", "took", "measured", "export"]
"""First words of the lines with which a run begins and ends; the small recipe has no report."""
# What a torn-down run must not say.
COMPLAINTS = ("there is already one", "untested optimizer", "offline mode", "destroy_process_group")
COMPLAINTS += ("Traceback", "leaked", "terminate called", "resource_tracker")


@pytest.fixture(params=WAYS)
def run(workshop, request):
    stage, ranks = WAYS[request.param]
    return workshop.run(stage, ranks, by=request.param)


def test_every_launcher_gives_the_same_curve(workshop, run):
    """Promise: the curve belongs to the recipe, not to what started the processes."""
    assert run.losses == pytest.approx(workshop.run("zero2", by="deepspeed").losses, abs=1e-4)
    assert [row["step"] for row in run.validation_rows] == [STEPS // 2, STEPS]


def test_every_launcher_ends_cleanly(run):
    """Exit code 0, no process left, no complaint about the process group; three lines first, the result last, once."""
    assert (run.finished.code, run.finished.strays) == (0, ())
    assert not [word for word in COMPLAINTS if word in run.finished.stdout + run.finished.stderr]
    labels = [line.split(" ")[0] for line in run.finished.stdout.splitlines()]
    told = [label for label in labels if label in OUTLINE]
    assert told == OUTLINE, run.finished.output
    assert re.search(r"^took +10 steps, 5,120 tokens in ", run.finished.stdout, re.MULTILINE)
    assert run.finished.stdout.count("validation loss") == 1
    assert run.finished.stdout.count(f"export    {run.dir.export}\n") == 1
    told = [event["event"] for event in run.events if event["event"] != "save"]
    assert told == ["start", "end"]


def test_accelerate_trains_with_the_ds_config_of_its_file(workshop):
    """The recipe says zero2, the file zero3: the file of `accelerate launch` wins, as `--deepspeed` would."""
    start = workshop.run(by="accelerate").events[0]
    assert (start["world_size"], start["zero_stage"]) == (2, 3)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_accelerate_config_names_the_ds_config_of_its_name(path: Path):
    """accelerate itself reads the file, and what it names exists."""
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    named = config.deepspeed_config["deepspeed_config_file"]
    assert named == f"ds_configs/{path.stem}.json"
    assert path.stem in ds_config_names()
    assert config.deepspeed_config["zero3_init_flag"] == ("zero3" in path.stem)
    example = re.search(r"--config_file (\S+)", path.read_text())[1]
    assert example == str(path.relative_to(REPOSITORY))


def test_more_processes_than_gpus_is_one_sentence(monkeypatch):
    """--num_gpus beyond what is there: how many there are, and what to say to each launcher."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UserError, match="2 found; start at most 2 processes") as caught:
        ranks._claim_gpu(2)
    assert not caught.value.on_every_rank


def test_a_port_that_another_run_has_is_one_line(workshop, tmp_path):
    """Bad input: two runs on one machine; which port is taken, and how to choose another."""
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = str(other.getsockname()[1])
        variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        finished = execute(workshop.command(tmp_path / "run", "zero2", 1, "plain"), **variables)
    lines = finished.stderr.splitlines()
    assert finished.code == 2 and "Traceback" not in finished.stderr, finished.output
    assert lines[-1].startswith(f"error: port {port} is taken") and "--master_port=N" in lines[-1]


@pytest.mark.parametrize(
    "rank, said",
    [("0", "1 of 2 ranks came to 127.0.0.1:"), ("1", "rank 1 did not reach rank 0 at 127.0.0.1:")],
)
def test_a_rank_that_does_not_come_is_one_line(monkeypatch, rank, said):
    """A rank that ended before it met the others, as by Ctrl-C: they leave with the code of a hang, not of a crash."""
    variables = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ranks.RanksMissing, match=f"{said}.* within 0.02 minutes; see in the logs") as error:
        ranks._meet("gloo", timedelta(minutes=30), timedelta(seconds=1.2))
    assert "\n" not in str(error.value) and error.value.exit_code == HANG
    assert error.value.on_every_rank == (rank == "0")  # rank 0 speaks for all if it is there
    assert not torch.distributed.is_initialized()


def test_every_group_waits_longer_than_the_watch_over_hangs(monkeypatch):
    """A group that DeepSpeed makes without a limit would abort after torch's ten minutes, before a hang is named."""
    from torch.distributed import distributed_c10d

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    wait_in_every_group(timedelta(minutes=50))
    for backend in ("nccl", "gloo"):
        assert distributed_c10d._get_default_timeout(backend) == timedelta(minutes=50)


def test_a_rank_may_open_as_many_files_as_the_system_allows(tmp_path):
    """Most shells allow 1,024, and a rank has a connection to every other one."""
    program = tmp_path / "rank.py"
    program.write_text(
        "from resource import RLIMIT_NOFILE, getrlimit, setrlimit\n"
        "from pretraining.training.ranks import prepare_rank\n"
        "_, hard = getrlimit(RLIMIT_NOFILE)\n"
        "setrlimit(RLIMIT_NOFILE, (64, hard))\n"
        "prepare_rank()\n"
        "print(getrlimit(RLIMIT_NOFILE) == (hard, hard))"
    )
    finished = execute(["forked", "0", program])
    assert finished.stdout.endswith("True\n"), finished.output


def test_vector_kernels_are_chosen_in_one_thread_before_ranks_meet(monkeypatch):
    """Promise: every later loss equals the undisturbed run's, also where several threads compute.

    MKL chooses kernels at a function's first call, and two threads that make it at once may get different ones.
    """

    class Met(Exception):
        pass

    def meet(**_):
        raise Met

    called = []
    for name in ranks._VECTOR_FUNCTIONS:
        own = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda x, name=name, f=own: called.append((name, f(x).numel())))
    monkeypatch.setattr("deepspeed.init_distributed", meet)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    threads = torch.get_num_threads()
    try:
        with pytest.raises(Met):
            ranks.join_ranks()
    finally:
        torch.set_num_threads(threads)
    assert {"tanh", "exp", "log", "erf"} <= {name for name, _ in called}
    assert {size for _, size in called} == {1}


def test_a_driver_that_is_too_old_is_one_line(monkeypatch):
    """Bad input: torch's own sentence, which build of torch asks, and what to do; no restart would help."""

    def refuse(device):
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 12020).")

    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.set_device", refuse)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    said = r"too old \(found version 12020\)\.; update the driver to 580 or newer"
    with pytest.raises(UserError, match=said) as error:
        ranks._claim_gpu(0)
    assert "\n" not in str(error.value)


ADDRESSES = {
    "Debian's own": (["127.0.1.1"], "host"),
    "a network's": (["127.0.0.2", "127.0.0.3"], None),
    "none": ([], "host"),
    "another machine's": (["192.0.2.1"], "host"),
}
"""Addresses of the name `host`, and what is said; 127.0.0.2 plays the one that other machines reach."""


@pytest.mark.parametrize("kind", ADDRESSES)
def test_a_name_that_other_hosts_cannot_reach_is_one_line(monkeypatch, kind):
    """Bad input: NCCL would connect between hosts, gloo would not; refused at once, by one rank of the host."""
    addresses, said = ADDRESSES[kind]

    def resolve(name, *_, **__):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    loopback = SimpleNamespace(is_loopback=True), SimpleNamespace(is_loopback=False)
    monkeypatch.setattr(host.socket, "gethostname", lambda: "host")
    monkeypatch.setattr(host.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(host.ipaddress, "ip_address", lambda ip: loopback[ip == "127.0.0.2"])
    monkeypatch.delenv(host.GLOO_INTERFACE, raising=False)
    assert host.loopback_name() == said
    variables = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "node0"}
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    if said is None:
        return ranks._check_own_name()
    with pytest.raises(UserError, match=r"host, the name of this host.*GLOO_SOCKET_IFNAME") as error:
        ranks._check_own_name()
    assert "\n" not in str(error.value) and not error.value.on_every_rank
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UserError) as error:
        ranks._check_own_name()
    assert error.value.on_every_rank
    for key, value in {"WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "GLOO_SOCKET_IFNAME": "eth0"}.items():
        with monkeypatch.context() as one_host:
            one_host.setenv(key, value)
            ranks._check_own_name()


@pytest.mark.parametrize("backend, device_ids", [("nccl", [3]), ("gloo", None)])
def test_the_last_barrier_names_its_gpu(monkeypatch, backend, device_ids):
    """Honest output: torch warns if it has to guess, as for one rank without a launcher."""
    called = []
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: backend)
    monkeypatch.setattr("torch.distributed.barrier", lambda **given: called.append(given))
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: called.append("left"))
    ranks.leave_ranks()
    assert called == [{"device_ids": device_ids}, "left"]
