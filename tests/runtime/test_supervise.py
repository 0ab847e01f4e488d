"""A run gets to its end by itself: started again after a crash or a hang, never after what must not be repeated."""

import os
import signal
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from pretraining.runtime.exit_codes import FINISHED, GAVE_UP, HANG, STOPPED, USER_ERROR, tell_exit_code
from pretraining.runtime.processes import (
    ASKING,
    launch_details,
    leave_again_if_stopped,
    resume_after_restart,
    starts_again_after_a_signal,
)
from pretraining.runtime.run_folder import RunFolder
from pretraining.supervise import hosts
from pretraining.supervise import supervisor as supervise
from tests.gear.runs import Started, environment, execute, forked_programs


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No pause between two starts; the handlers of the tests' own process stay as they are."""
    monkeypatch.setattr(supervise, "FIRST_PAUSE_SECONDS", 0.01)
    before = {number: signal.getsignal(number) for number in ASKING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def scripted(folder: Path, *codes: str) -> list[str]:
    """A command that ends with one code after the other: `76`, `told 75 as 1`, `kill`."""
    program = folder / "program.py"
    program.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path.cwd())!r})\n"
        "from pretraining.runtime.exit_codes import tell_exit_code\n"
        f"log = open({str(folder / 'starts')!r}, 'a+')\n"
        "log.seek(0)\n"
        "number = len(log.readlines())\n"
        "print(os.environ['PRETRAINING_RESTART'], file=log, flush=True)\n"
        f"words = {list(codes)!r}[number].split()\n"
        "if words[0] == 'kill': os.kill(os.getpid(), 9)\n"
        "if words[0] == 'told': tell_exit_code(int(words[1]))\n"
        "os._exit(int(words[-1]))\n"
    )
    return ["--", sys.executable, str(program)]


@pytest.mark.parametrize(
    "codes, expected",
    [
        (("1", "76", "kill", "0"), FINISHED),  # a crash, a hang and a kill are started again
        (("75",), STOPPED),
        (("77",), GAVE_UP),
        (("2",), USER_ERROR),
        (("told 2 1",), USER_ERROR),  # torchrun's 1 hides it, the rank has told it
        (("told 76 1", "told 75 1"), STOPPED),
        (("told 76 0",), FINISHED),  # torchrun has started the ranks again by itself
        (("1", "1", "76"), HANG),  # two restarts are allowed here
    ],
)
def test_what_is_started_again(tmp_path, codes, expected):
    """Restarts are counted for the run; the code is what a rank told, else the launcher's."""
    restarts = str(max(2, len(codes) - 1))
    assert supervise.main(["--restarts", restarts, *scripted(tmp_path, *codes)]) == expected
    assert (tmp_path / "starts").read_text().split() == [str(number) for number in range(len(codes))]


def alive(process: str) -> bool:
    """Not gone, and not a zombie, which has no command line."""
    path = Path(f"/proc/{process}/cmdline")
    return path.exists() and path.read_bytes() != b""


def test_ranks_that_outlive_their_launcher_end_and_it_is_a_crash(tmp_path, monkeypatch):
    """`deepspeed` answers 0 when its inner process is killed, and its ranks go on: no second run beside them."""
    monkeypatch.setattr(hosts, "SECONDS_TO_LEAVE", 0.3)
    command = f"setsid sleep 60 & echo $! >> {tmp_path / 'ranks'}"
    assert supervise.main(["--restarts", "1", "--", "sh", "-c", command]) == supervise.CRASH
    ranks = (tmp_path / "ranks").read_text().split()
    assert len(ranks) == 2 and not any(alive(rank) for rank in ranks)


def test_a_request_goes_past_the_launcher(tmp_path):
    """SIGTERM to the supervisor: the launcher hears nothing, the ranks find the file, the code is 75."""
    waiting = (
        "import os, time; from pretraining.runtime.exit_codes import supervisor_file, tell_exit_code\n"
        "print('up', flush=True)\n"
        "while not supervisor_file('STOP').exists(): time.sleep(0.01)\n"
        "tell_exit_code(75)\n"
        "os._exit(1)"
    )
    started = Started([sys.executable, "-m", "pretraining.supervise", "--", sys.executable, "-c", waiting])
    assert started.process.stdout.readline() == "up\n"
    started.process.send_signal(signal.SIGTERM)
    assert started.finish().code == STOPPED


def test_a_meeting_that_is_over_is_not_waited_for_in_vain(tmp_path, monkeypatch, capfd):
    """A store of another program at the place where torchrun meets: closed there, the run goes on by the next id."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    last = DynamicRendezvousHandler.from_backend("7-0", store, C10dRendezvousBackend(store, "7-0"), 1, 1)
    last.next_rendezvous()
    last.shutdown()
    for name, value in {**environment(), **forked_programs()}.items():
        monkeypatch.setenv(name, value)
    # the real one waits for longer than a meeting point takes to forget
    patient = "import json, sys; from pretraining.meeting_point import open_command; "
    patient += "print(json.dumps(open_command(sys.argv[1:], 0.0)))"
    monkeypatch.setattr(supervise, "OPEN_COMMAND", (sys.executable, "-c", patient))
    script = tmp_path / "rank.py"
    script.write_text("import os, sys; open(sys.argv[1], 'w').write(os.environ['TORCHELASTIC_RUN_ID'])")
    place = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{store.port}", "--rdzv_id=7-0"]
    words = ["torchrun", "--nnodes=1", *place, str(script), str(tmp_path / "met")]
    assert supervise.main(["--restarts", "1", "--", *words]) == FINISHED
    assert (tmp_path / "met").read_text() == "7-0-1"
    said = capfd.readouterr().err
    assert "RendezvousClosedError" in said and "meeting by the next --rdzv_id" in said


def test_a_command_that_a_signal_ended_has_the_code_of_a_shell():
    words = ["--restarts", "0", "--", "sh", "-c", "kill -9 $$"]
    assert execute([sys.executable, "-m", "pretraining.supervise", *words]).code == 128 + 9


def test_an_unknown_command_is_one_line(tmp_path):
    finished = execute([sys.executable, "-m", "pretraining.supervise", "--", "deepsped", "train.py"])
    assert finished.code == USER_ERROR
    assert finished.stderr == "error: deepsped: cannot be started: No such file or directory\n"


def test_the_code_of_an_attempt_that_the_launcher_repeats_does_not_count(tmp_path, monkeypatch):
    """torchrun starts its ranks again after a hang: what these tell later is how the run ended."""
    monkeypatch.setenv("PRETRAINING_SUPERVISOR", str(tmp_path))
    told = tmp_path / "exit_code"
    tell_exit_code(HANG)
    tell_exit_code(STOPPED)
    assert told.read_text() == str(HANG)  # the first of an attempt
    os.utime(told, (0, 0))
    tell_exit_code(STOPPED)
    assert told.read_text() == str(STOPPED)


@pytest.mark.parametrize("name", ["torchrun", "shell"])
def test_a_stopped_run_ends_its_torchrun(tmp_path, name):
    """`--max-restarts=100` would else start the ranks of a stopped run a hundred times. No other parent is ended."""
    program = (
        "import os, subprocess, sys, time; from pathlib import Path\n"
        "from pretraining.runtime.processes import launch_details, leave_again_if_stopped\n"
        "from pretraining.runtime.run_folder import RunFolder\n"
        "run = RunFolder(Path(sys.argv[1]))\n"
        "run.add_event('stopped', reason='a stop file', **launch_details())\n"
        "leave_again_if_stopped(run)\n"
    )
    launcher = tmp_path / name
    launcher.write_text(
        "import subprocess, sys, time\n"
        f"code = subprocess.call([sys.executable, '-c', {program!r}, {str(tmp_path / 'run')!r}])\n"
        "sys.exit(code)\n"
    )
    finished = execute([sys.executable, launcher], TORCHELASTIC_RESTART_COUNT="1")
    assert finished.code == (-signal.SIGTERM if name == "torchrun" else STOPPED), finished.output


def test_a_signal_of_torchrun_is_no_request_to_stop_for_good(tmp_path, monkeypatch):
    """It ends the ranks by a signal when a node has come, and starts them again."""
    for name in ("TORCHELASTIC_RESTART_COUNT", "PRETRAINING_SUPERVISOR"):
        monkeypatch.delenv(name, raising=False)
    assert not starts_again_after_a_signal()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert starts_again_after_a_signal()
    monkeypatch.setenv("PRETRAINING_SUPERVISOR", str(tmp_path))
    assert starts_again_after_a_signal()
    (tmp_path / "STOP").touch()  # the supervisor has been asked
    assert not starts_again_after_a_signal()


def test_a_restart_continues_what_its_launch_began(tmp_path, monkeypatch):
    """`--resume never` and PATH count for the first start of a launch alone."""
    run = RunFolder(tmp_path)
    run.add_event("start", launch="another:1")
    monkeypatch.setenv("PRETRAINING_SUPERVISOR", str(tmp_path))
    monkeypatch.setenv("PRETRAINING_RESTART", "0")
    assert resume_after_restart(run, "never") == "never"
    monkeypatch.setenv("PRETRAINING_RESTART", "1")
    assert resume_after_restart(run, "never") == "never"  # the first start did not come so far
    run.add_event("start", **launch_details())
    assert resume_after_restart(run, "never") == "auto"
    assert launch_details()["restart"] == 1
    leave_again_if_stopped(run)
    run.add_event("stopped", **launch_details())
    with pytest.raises(SystemExit, match=str(STOPPED)):
        leave_again_if_stopped(run)  # torchrun restarts what was asked to stop
    monkeypatch.setenv("PRETRAINING_RESTART", "0")
    leave_again_if_stopped(run)


def test_a_torchrun_that_takes_another_node_in_goes_on(tmp_path, monkeypatch):
    """It ends the ranks by SIGTERM and starts them again; after a stop file they leave again."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run = RunFolder(tmp_path)
    run.add_event("stopped", reason="SIGTERM", **launch_details())
    leave_again_if_stopped(run)
    run.add_event("stopped", reason="a stop file", **launch_details())
    with pytest.raises(SystemExit, match=str(STOPPED)):
        leave_again_if_stopped(run)
