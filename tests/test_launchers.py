"""The same run by deepspeed, torchrun, accelerate launch and plain python, each with a clean end."""

import os
import re
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from pretraining.ds_config import ds_config_names
from pretraining.errors import UserError
from pretraining.training import ranks
from tests.runs import REPOSITORY, STEPS, execute

CONFIGS = sorted((REPOSITORY / "accelerate_configs").glob("*.yaml"))
WAYS = {
    "deepspeed": ("zero2", 2),
    "torchrun": ("zero1", 2),  # the README's command, whose run this is
    "accelerate": ("zero2", 2),
    "python": ("null", 1),
}
# What a torn-down run must not say.
COMPLAINTS = (
    "there is already one",
    "untested optimizer",
    "offline mode",
    "destroy_process_group",
    "Traceback",
    "leaked",
    "terminate called",
    "resource_tracker",
)


@pytest.fixture(params=WAYS)
def run(workshop, request):
    stage, ranks = WAYS[request.param]
    return workshop.run(stage, ranks, by=request.param)


def test_every_launcher_gives_the_same_curve(workshop, run):
    """Promise: the curve belongs to the recipe, not to what started the processes."""
    assert run.losses == pytest.approx(workshop.run("zero2", by="deepspeed").losses, abs=1e-4)
    assert [row["step"] for row in run.validation_rows] == [STEPS // 2, STEPS]


def test_every_launcher_ends_cleanly(run):
    """Exit code 0, no process left, no complaint about the process group, the result told once."""
    assert (run.finished.code, run.finished.strays) == (0, ())
    assert not [word for word in COMPLAINTS if word in run.finished.stdout + run.finished.stderr]
    assert len(re.findall(r"^steps +10 of 512 tokens: ", run.finished.stdout, re.MULTILINE)) == 1
    assert run.finished.stdout.count("\n10 steps, 5,120 tokens in ") == 1
    assert run.finished.stdout.count("validation loss") == 1
    assert run.finished.stdout.count(f"export: {run.dir.export}") == 1
    assert run.finished.stdout.count("\nnot decayed: ") == 1
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


def test_every_group_waits_longer_than_the_watch_over_hangs(monkeypatch):
    """A group that DeepSpeed makes without a limit would abort after torch's ten minutes, before a hang is named."""
    from torch.distributed import distributed_c10d

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    ranks._wait_as_long_in_every_group(timedelta(minutes=50))
    for backend in ("nccl", "gloo"):
        assert distributed_c10d._get_default_timeout(backend) == timedelta(minutes=50)


def test_vector_kernels_are_chosen_in_one_thread_before_ranks_meet(monkeypatch):
    """Promise: every later loss equals the undisturbed run's, also where several threads compute.

    MKL chooses kernels at a function's first call, and two threads that make it at once may get different ones.
    """

    class Met(Exception):
        pass

    def meet(**_):
        raise Met

    called = []
    recorded = [lambda x, f=f: called.append((f.__name__, f(x).numel())) for f in ranks._VECTOR_FUNCTIONS]
    monkeypatch.setattr(ranks, "_VECTOR_FUNCTIONS", recorded)
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
    with pytest.raises(UserError, match=r"too old \(found version 12020\)\.; update the driver") as error:
        ranks._claim_gpu(0)
    assert "\n" not in str(error.value)
