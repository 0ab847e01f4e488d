"""`deepspeed --hostfile` over real ssh, and `accelerate launch`, on hosts with names and addresses of their own."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pretraining.errors import UserError
from pretraining.hostfile import SWITCHES, VALUES, HostfileCommand
from pretraining.runtime.exit_codes import STOPPED
from tests.runs import Started
from tests.ssh_hosts import installed, ssh_hosts

needs_ssh = pytest.mark.skipif(
    not installed(), reason="needs root, and: apt-get install openssh-server openssh-client pdsh"
)
SOON = "-o ServerAliveInterval=1 -o ServerAliveCountMax=2 -o ConnectTimeout=2"
"""ssh notices a lost host after two seconds, not after a minute."""


@pytest.fixture
def hostfile(tmp_path) -> Path:
    path = tmp_path / "hosts.txt"
    path.write_text("# three\nalpha slots=4\n\nbeta slots=2 # and a word\ngamma slots=2\n")
    return path


FILTERS = [
    [],
    ["--include", "alpha@beta:1"],
    ["-i", "gamma@alpha:0,2"],
    ["--exclude=beta"],
    ["-e", "alpha:0,3@gamma"],
    ["--num_nodes=2"],
    ["--num_gpus", "2", "--num_nodes", "2"],
    ["--num_accelerators=1"],
]


@pytest.mark.parametrize("words", FILTERS, ids=" ".join)
def test_hosts_are_those_that_deepspeed_would_choose(hostfile, words):
    """And the command for them alone chooses the same."""
    from deepspeed.launcher.runner import (
        apply_num_nodes_and_gpus,
        fetch_hostfile,
        parse_args,
        parse_inclusion_exclusion,
    )

    def chosen_by_deepspeed(command: list[str]) -> dict:
        options = parse_args(command[1:])
        assert (
            options.user_args == ["--recipe", "30b", "--num_nodes", "9"] and options.user_script == "train.py"
        )
        found = parse_inclusion_exclusion(fetch_hostfile(options.hostfile), options.include, options.exclude)
        return dict(apply_num_nodes_and_gpus(found, options.num_nodes, options.num_gpus))

    command = [
        "deepspeed",
        "--hostfile",
        str(hostfile),
        *words,
        "train.py",
        "--recipe",
        "30b",
        "--num_nodes",
        "9",
    ]
    read = HostfileCommand.of(command)
    slots = read.slots()
    assert slots == chosen_by_deepspeed(command) and len(slots) > 1
    assert chosen_by_deepspeed(read.on(slots)) == slots
    last = dict(list(slots.items())[-1:])
    assert chosen_by_deepspeed(read.on(last)) == last


def test_every_option_of_the_launcher_is_known():
    """Else the script would be looked for in the wrong place."""
    from deepspeed.launcher.runner import parse_args

    words = vars(parse_args(["train.py"]))
    assert set(words) - {"user_script", "user_args"} == {*VALUES.split(), *SWITCHES.split()}


@pytest.mark.parametrize(
    "text, words, complaint",
    [
        ("alpha slots=1\nbeta\n", [], "line 2 is not `NAME slots=NUMBER`: beta"),
        ("alpha slots=1\nalpha slots=1\n", [], "line 2 names this host twice"),
        ("alpha slots=1\n", ["--include=beta"], "it has no host beta"),
    ],
)
def test_a_hostfile_that_is_wrong_is_one_line(hostfile, text, words, complaint):
    hostfile.write_text(text)
    with pytest.raises(UserError, match=complaint) as caught:
        HostfileCommand.of(["deepspeed", f"--hostfile={hostfile}", *words, "train.py"])
    assert str(hostfile) in str(caught.value)


def test_other_launchers_have_no_hosts(hostfile):
    typed = ["deepspeed", f"--hostfile={hostfile}"]
    for command in (
        ["torchrun", "--nnodes=2", "train.py"],
        ["deepspeed", "--num_gpus=2", "train.py"],
        [*typed, "--no_ssh", "--node_rank=0", "train.py"],
        [*typed, "--launcher=openmpi", "train.py"],
        [*typed, "--include=alpha", "train.py"],  # DeepSpeed starts it on this machine
    ):
        assert HostfileCommand.of(command) is None


@needs_ssh
def test_a_lost_host_is_left_out_and_a_stop_reaches_all(tmp_path):
    """The supervisor on `alpha`; `beta` and `gamma` are in the hostfile, and share nothing with it but one folder.

    gamma's plug is pulled: the run is ended on beta and starts again there. SIGTERM then stops it in order.
    """
    shared, file = tmp_path / "shared", tmp_path / "hosts.txt"
    shared.mkdir()
    file.write_text("gamma slots=1\nbeta slots=2\n")
    own = {name: tmp_path / f"tmp-{name}" for name in ("alpha", "beta", "gamma")}
    place = tmp_path / "tmp"
    for folder in (place, *own.values()):
        folder.mkdir()
    disks = {name: {place: folder} for name, folder in own.items()}
    (shared / "variables").write_text("OF_THE_USER=two words\n")
    with ssh_hosts(tmp_path, *own, disks=disks) as made:
        if made is None:
            pytest.skip("may not make networks here")
        supervise = [sys.executable, "-m", "pretraining.supervise", "--min_hosts", "1", "--"]
        command = [
            "deepspeed",
            "--hostfile",
            str(file),
            "tests/host_program.py",
            str(shared),
            "--set",
            "a.b=c",
        ]
        variables = {
            "TMPDIR": str(place),
            "DS_ENV_FILE": str(shared / "variables"),
            "PDSH_SSH_ARGS_APPEND": SOON,
        }
        started = Started(made.words("alpha", *supervise, *command), **variables)
        wait_for(started, lambda: len(list(shared.glob("0-*"))) == 3)
        made.hosts.pull_plug("gamma")
        wait_for(started, lambda: len(list(shared.glob("1-*"))) == 2)
        os.kill(started.process.pid, signal.SIGTERM)
        finished = started.finish()
        found = {path.name: json.loads(path.read_text()) for path in shared.glob("[01]-*")}
    assert finished.code == STOPPED and not finished.strays, finished.output
    assert sorted(found) == ["0-beta-1", "0-beta-2", "0-gamma-0", "1-beta-0", "1-beta-1"]
    assert {each["WORLD_SIZE"] for name, each in found.items() if name.startswith("1")} == {"2"}
    assert {each["OF_THE_USER"] for each in found.values()} == {"two words"}
    assert "supervise: gamma lost; the run is ended on beta" in finished.stderr
    assert "supervise: no answer through ssh from gamma; starting on beta" in finished.stderr
    left = [name for name, folder in own.items() if any(folder.iterdir())]
    assert left == ["gamma"], "the supervisor's folder is removed where it can be"


def wait_for(started: Started, reached: Callable[[], bool]) -> None:
    """Look again and again; an error if the command ends first."""
    while not reached():
        assert started.process.poll() is None, started.finish().output
        time.sleep(0.05)
