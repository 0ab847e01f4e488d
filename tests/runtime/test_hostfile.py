"""`deepspeed --hostfile` over real ssh, and `accelerate launch`, on hosts with names and addresses of their own."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pretraining.checkpoints.remote import RemoteRun
from pretraining.errors import UserError
from pretraining.runtime.exit_codes import STOPPED
from pretraining.runtime.processes import ASKING
from pretraining.supervise.hosts import SWITCHES, VALUES, Hosts
from pretraining.supervise.supervisor import CRASH, Supervisor
from tests.gear.nodes import wait_until
from tests.gear.object_store import Proxy, connect_to, newest_committed, s3_server, use_here
from tests.gear.runs import REPOSITORY, Run, Started, Workshop, choices, committed, environment, free_port
from tests.gear.ssh_hosts import SshHosts, installed, ssh_hosts

pytestmark = pytest.mark.timeout(7200)
"""Some take minutes on a lonely machine."""
needs_ssh = pytest.mark.skipif(
    not installed(), reason="needs root, and: apt-get install openssh-server openssh-client pdsh"
)
SOON = "-o ServerAliveInterval=1 -o ServerAliveCountMax=2 -o ConnectTimeout=2"
"""ssh notices a lost host after two seconds, not after a minute."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A supervisor sets handlers: those of the tests' own process come back."""
    before = {number: signal.getsignal(number) for number in ASKING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def hostfile(tmp_path) -> Path:
    path = tmp_path / "hosts.txt"
    path.write_text("# three\nalpha slots=4\n\nbeta slots=2 # and a word\ngamma slots=2\n")
    return path


WORDS = ["--set", 'a.b=["$HOME",(1)]', "--set", 'a.c="two words"']
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
    from deepspeed.launcher import runner

    def chosen_by_deepspeed(command: list[str]) -> dict:
        options = runner.parse_args(command[1:])
        assert [options.user_script, *options.user_args] == script
        hosts = runner.fetch_hostfile(options.hostfile)
        found = runner.parse_inclusion_exclusion(hosts, options.include, options.exclude)
        return dict(runner.apply_num_nodes_and_gpus(found, options.num_nodes, options.num_gpus))

    script = ["train.py", "--recipe", "30b", "--num_nodes", "9"]
    command = ["deepspeed", "--hostfile", str(hostfile), *words, *script]
    read = Hosts.of(command)
    slots = read.slots
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
        ("alpha slots=1\nbeta\n", [], "line 2 is not `NAME slots=NUMBER`: 'beta'"),
        ("alpha slots=1\n-oProxyCommand=x slots=1\n", [], "line 2 is not `NAME slots=NUMBER`: '-oProxy"),
        ("alpha slots=1\na[1-9999] slots=1\n", [], "line 2 is not `NAME slots=NUMBER`"),
        ("alpha slots=1\nbeta slots=99999999\n", [], "line 2: no host has so many GPUs"),
        ("alpha slots=1\n", ["--include=alpha:x"], "'alpha:x', which the command names, is not HOST:NUMBER"),
        ("", ["--force_multi"], "no host with a GPU is left"),
        ("alpha slots=0\nbeta slots=0\n", ["--force_multi"], "no host with a GPU is left"),
        (b"alpha slots=1\n\xff slots=1\n", [], r"is not UTF-8 text \(byte 14\)"),
        ("alpha slots=1\nalpha slots=1\n", [], "line 2 names this host twice"),
        ("alpha slots=1\n", ["--include=beta"], "it has no host beta"),
    ],
)
def test_a_hostfile_that_is_wrong_is_one_line(hostfile, text, words, complaint):
    """Nothing of it reaches ssh as an option."""
    hostfile.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=complaint) as caught:
        Hosts.of(["deepspeed", f"--hostfile={hostfile}", *words, "train.py"])
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
        assert Hosts.of(command) is None


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Path:
    """The only folder of the PATH: an `ssh` that runs the command here, except for gamma, and a `pdsh`."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, text in {"ssh": SSH, "pdsh": "#!/bin/sh\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return folder


SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
[ "$1" = gamma ] && echo "$1: no route" >&2 && exit 255
exec /bin/sh -c "$2"
"""


DOCTOR = ("--module", "pretraining.doctor", "--recipe", "30b")
"""As documented: DeepSpeed's launcher alone would end in a traceback before the doctor begins."""


@pytest.mark.parametrize(
    "words, least, enough", [(DOCTOR, None, False), (["train.py"], 3, False), (["train.py"], 2, True)]
)
def test_hosts_that_do_not_answer(hostfile, programs, tmp_path, capfd, words, least, enough):
    """Is a start without them allowed? The agents of the others leave; here, `deepspeed` is none that could start."""
    folder = tmp_path / "supervisor"
    folder.mkdir()
    supervisor = Supervisor(["deepspeed", "-H", str(hostfile), *words], folder, min_hosts=least)
    if enough:
        with pytest.raises(UserError, match="deepspeed: cannot be started"):
            supervisor.run(0)
    else:
        assert supervisor.run(0) == CRASH
    said = capfd.readouterr().err
    assert "supervise: no answer through ssh from gamma; " in said and "Traceback" not in said
    assert ("starting on alpha, beta" in said) == enough == (f"mend this, edit {hostfile}" not in said)


def test_hosts_without_pdsh_and_min_hosts_without_a_hostfile_are_one_line(hostfile, programs, tmp_path):
    (programs / "pdsh").unlink()
    with pytest.raises(UserError, match="pdsh is not installed here"):
        Supervisor(["deepspeed", "-H", str(hostfile), "train.py"], tmp_path).run(0)
    with pytest.raises(UserError, match="--min_hosts is for `deepspeed --hostfile FILE`"):
        Supervisor(["torchrun", "train.py"], tmp_path, min_hosts=1).run(0)


@pytest.mark.parametrize(
    "told, code",
    [
        ({}, 255),  # the launcher's own
        ({"beta": 0, "gamma": 0}, 255),  # alpha, which has rank 0, told nothing
        ({"alpha": 0, "beta": 0}, 0),
        ({"alpha": 76, "beta": 2}, 2),
        ({"alpha": 0, "beta": 75}, 75),
    ],
)
def test_which_exit_code_counts(hostfile, told, code):
    hosts = Hosts.of(["deepspeed", "-H", str(hostfile), "train.py"])
    hosts.codes = told
    assert hosts.code(255) == code


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
        command = ["deepspeed", "--hostfile", str(file), "tests/gear/host_program.py", str(shared), *WORDS]
        variables = {"TMPDIR": str(place), "DS_ENV_FILE": str(shared / "variables")}
        variables["PDSH_SSH_ARGS_APPEND"] = SOON
        started = Started(made.words("alpha", *supervise, *command), **variables)
        wait_until({"alpha": started}, lambda: len(list(shared.glob("0-*"))) == 3)
        made.hosts.pull_plug("gamma")
        wait_until({"alpha": started}, lambda: len(list(shared.glob("1-*"))) == 2)
        os.kill(started.process.pid, signal.SIGTERM)
        finished = started.finish()
        found = {path.name: json.loads(path.read_text()) for path in shared.glob("[01]-*")}
    assert finished.code == STOPPED and not finished.strays, finished.output
    assert sorted(found) == ["0-beta-1", "0-beta-2", "0-gamma-0", "1-beta-0", "1-beta-1"]
    assert {each["WORLD_SIZE"] for name, each in found.items() if name.startswith("1")} == {"2"}
    assert {each["OF_THE_USER"] for each in found.values()} == {"two words"}
    assert all(each["words"] == WORDS for each in found.values())
    assert "supervise: gamma lost; the run is ended on beta" in finished.stderr
    assert "supervise: no answer through ssh from gamma; starting on beta" in finished.stderr
    left = [name for name, folder in own.items() if any(folder.iterdir())]
    assert left == ["gamma"], "the supervisor's folder is removed where it can be"


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory) -> Iterator[SshHosts]:
    """`alpha` and `beta`, which see the same disk except for `own`: that is another folder on each."""
    folder = tmp_path_factory.mktemp("hosts")
    disks = {}
    for name in ("alpha", "beta"):
        (folder / f"own-{name}").mkdir()
        disks[name] = {folder / "own": folder / f"own-{name}"}
    (folder / "own").mkdir()
    (folder / "hosts.txt").write_text("alpha slots=1\nbeta slots=1\n")
    with ssh_hosts(folder, "alpha", "beta", disks=disks) as made:
        if made is None:
            pytest.skip("may not make networks here")
        yield made


class Typed:
    """Commands typed on the hosts, and what they need."""

    def __init__(self, workshop: Workshop, made: SshHosts, output: Path):
        self.made, self.folder = made, made.hosts.table.parent
        self.options = workshop.options("--output_dir", output, *choices("zero2", LONG))
        own = {name: value for name, value in environment().items() if name in CROSSING}
        self.variables = self.folder / "variables"
        self.variables.write_text("".join(f"{name}={value}\n" for name, value in own.items()))

    def start(self, host: str, *words: str) -> Started:
        """Start a command of these words before `train.py`."""
        command = self.made.words(host, *words, "train.py", *self.options)
        return Started(command, DS_ENV_FILE=str(self.variables), PDSH_SSH_ARGS_APPEND=SOON)

    def deepspeed(self, *words: str) -> list[str]:
        hosts = str(self.folder / "hosts.txt")
        return ["deepspeed", "--hostfile", hosts, *words, f"--master_port={free_port()}"]

    def lose(self, host: str) -> None:
        self.made.hosts.pull_plug(host)

    def bring_back(self, host: str) -> None:
        self.made.hosts.plug_in(host)
        self.made.start(host)


ROUNDING = 1e-5
"""Of losses near 5 in fp32, after up to 120 steps on another number of ranks."""
LONG = ("monitors.hang_minutes=0.25", "budget.tokens=61440")
LONG += ("training.save_steps=5", "training.eval_steps=60")
"""120 steps of some seconds; a lost host is named after 15."""


def losses_of(run: Run) -> dict[int, float]:
    """{step: training loss}, of which there is one each."""
    rows = run.training_rows
    assert [row["step"] for row in rows] == list(range(1, 121))
    return {row["step"]: row["train/loss"] for row in rows}


def newest_of(run: Run) -> int:
    """The step of the newest committed checkpoint; 0 if there is none."""
    return int((committed(run.folder) or ["checkpoint-0"])[0].partition("-")[2])


CROSSING = ("OMP_WAIT_POLICY", "HF_HUB_OFFLINE", "WANDB_MODE", "PRETRAINING_MODEL_CACHE")
NAMED = "did not arrive: rank 1 on beta"
expensive = pytest.mark.skipif(
    not (installed() and os.environ.get("HOSTFILE_TESTS")),
    reason="minutes; HOSTFILE_TESTS=1 runs it as root, after: apt-get install openssh-server openssh-client pdsh",
)


@expensive
def test_the_launcher_comes_back_and_the_run_goes_on_without_the_lost_host(workshop, two_hosts):
    """`deepspeed --hostfile`, one disk: a stop file, a lost node, `--exclude beta`. Losses are those of two ranks."""
    reference, run = workshop.run("zero2", settings=LONG), Run(two_hosts.hosts.table.parent / "shared")
    typed = Typed(workshop, two_hosts, run.folder)
    started = typed.start("alpha", *typed.deepspeed("--include", "beta@alpha"))
    wait_until({"alpha": started}, lambda: committed(run.folder))
    run.dir.stop_file.touch()
    assert started.finish().code == STOPPED
    started = typed.start("alpha", *typed.deepspeed())
    stopped = newest_of(run)
    wait_until({"alpha": started}, lambda: newest_of(run) > stopped)
    typed.lose("beta")
    finished = started.finish()
    # of the two, 76 of alpha's ranks and 255 of the ssh to beta, pdsh returns the largest
    assert finished.code == 255 and NAMED in finished.stderr + finished.stdout, finished.output
    assert "ssh exited with exit code 76" in finished.stderr, finished.output
    finished = typed.start("alpha", *typed.deepspeed("--exclude", "beta")).finish()
    assert finished.code == 0, finished.output
    typed.bring_back("beta")
    worlds = [event["world_size"] for event in run.events if event["event"] in ("start", "resume")]
    assert worlds == [2, 2, 1] and losses_of(run) == pytest.approx(losses_of(reference), abs=ROUNDING)


@expensive
def test_the_supervisor_goes_on_with_what_the_bucket_holds(workshop, two_hosts, tmp_path, monkeypatch):
    """Own disks and a bucket: `supervise --min_hosts 1` loses beta and finishes on alpha, with the same losses."""
    reference, folder = workshop.run("zero2", settings=LONG), two_hosts.hosts.table.parent
    typed, run = Typed(workshop, two_hosts, folder / "own" / "run"), Run(folder / "own-alpha" / "run")
    typed.options += ["--set", "checkpoints.upload=s3://bucket/runs"]
    address_outside = two_hosts.hosts.outside
    with s3_server(tmp_path / "log") as address, Proxy(address, lambda *_: None, address_outside) as proxy:
        keys = connect_to(proxy.address)
        with typed.variables.open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in keys.items())
        use_here(monkeypatch, address)
        remote = RemoteRun("s3://bucket/runs", "run")
        supervise = [sys.executable, "-m", "pretraining.supervise", "--min_hosts", "1", "--"]
        started = typed.start("alpha", *supervise, *typed.deepspeed())
        wait_until({"alpha": started}, lambda: newest_committed(remote, 3) is not None)
        typed.lose("beta")
        finished = started.finish()
    typed.bring_back("beta")
    assert finished.code == 0 and "supervise: beta lost" in finished.stderr, finished.output
    worlds = [event["world_size"] for event in run.events if event["event"] in ("start", "resume")]
    assert worlds == [2, 1] and losses_of(run) == pytest.approx(losses_of(reference), abs=ROUNDING)


ACCELERATE = ["accelerate", "launch", "--config_file", "accelerate_configs/zero2.yaml"]


def on_both(typed: Typed, *supervise: str) -> tuple[Started, Started, Callable[[], Started]]:
    """`accelerate launch` on alpha, after these words, and on beta; and a function that types beta's command again."""
    both = [*ACCELERATE, "--num_machines", "2", "--num_processes", "2", "--main_process_ip", "alpha"]
    both += ["--main_process_port", str(free_port()), "--machine_rank"]
    alpha, again = typed.start("alpha", *supervise, *both, "0"), lambda: typed.start("beta", *both, "1")
    return alpha, again(), again


@expensive
def test_accelerate_on_two_machines_loses_one(workshop, two_hosts):
    """Each machine has its command; alpha's ends after the hang, and goes on alone by the flags of one machine."""
    reference, run = workshop.run("zero2", settings=LONG), Run(two_hosts.hosts.table.parent / "accelerated")
    typed = Typed(workshop, two_hosts, run.folder)
    alpha, beta, _ = on_both(typed)
    wait_until({"alpha": alpha}, lambda: newest_of(run) > 0)
    typed.lose("beta")
    finished = alpha.finish()
    beta.finish()
    assert finished.code == 1 and NAMED in finished.stderr, finished.output
    alone = [*ACCELERATE, "--num_processes", "1", "--main_process_port", str(free_port())]
    finished = typed.start("alpha", *alone).finish()
    assert finished.code == 0, finished.output
    typed.bring_back("beta")
    worlds = [event["world_size"] for event in run.events if event["event"] in ("start", "resume")]
    assert worlds == [2, 1] and losses_of(run) == pytest.approx(losses_of(reference), abs=ROUNDING)


@expensive
def test_accelerate_under_a_supervisor_waits_for_the_machine_that_is_back(workshop, two_hosts):
    """alpha's supervisor starts it again; beta's command is typed again as it is back, and the run is finished."""
    reference, run = workshop.run("zero2", settings=LONG), Run(two_hosts.hosts.table.parent / "supervised")
    typed = Typed(workshop, two_hosts, run.folder)
    alpha, beta, again = on_both(typed, sys.executable, "-m", "pretraining.supervise", "--")
    wait_until({"alpha": alpha}, lambda: newest_of(run) > 0)
    typed.lose("beta")
    beta.finish()
    typed.bring_back("beta")
    beta, finished = again(), alpha.finish()
    assert finished.code == 0, finished.output
    assert beta.finish().code == 0
    worlds = [event["world_size"] for event in run.events if event["event"] in ("start", "resume")]
    assert worlds == [2, 2] and losses_of(run) == pytest.approx(losses_of(reference), abs=1e-6)


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (REPOSITORY / "accelerate_configs").glob("*.yaml"))
)
def test_every_accelerate_config_serves_several_machines(name, monkeypatch):
    """Else accelerate would call `deepspeed --hostfile None`, which trains the whole run on each machine alone."""
    from accelerate.commands import launch

    started = []
    monkeypatch.setattr(launch, "deepspeed_launcher", started.append)
    words = ["--config_file", str(REPOSITORY / "accelerate_configs" / f"{name}.yaml"), "--num_machines", "2"]
    words += ["--num_processes", "16", "--machine_rank", "1", "--main_process_ip", "node0", "train.py"]
    launch.launch_command(launch.launch_command_parser().parse_args(words))
    (options,) = started
    command, _ = launch.prepare_deepspeed_cmd_env(options)
    assert command is None, "torchrun's launcher, in accelerate's own process"
    assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("2", "8", 1)
    assert (options.rdzv_endpoint, options.rdzv_backend) == ("node0:29500", "static")
