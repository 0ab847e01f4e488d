"""A machine is examined before it is paid for: every fault planted in it is named by a line of its own."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pretraining.doctor import __main__ as doctor
from pretraining.doctor import gpus, machine, reach
from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding, as_lines, summary, summary_line
from pretraining.doctor.launch import Launch, check_earlier_start, needs_of, plan_launch
from pretraining.outside.addresses import hub_repository
from pretraining.planning.costs import forecast, write_words
from pretraining.planning.gpus import FOLDER_VARIABLE, find_gpu, keep_rates, kept_rates
from pretraining.planning.memory.need import memory_need
from pretraining.planning.setup import Setup
from pretraining.recipe.fixed_keys import changes_of_run
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.runtime import host
from pretraining.runtime.failures import failing_gpus
from tests.gear.finished_data import refusal
from tests.gear.local_hub import REPOSITORY_ID, LocalHub
from tests.gear.runs import LAUNCHED, SMALL_RECIPE, completed, execute, refused

NVIDIA_SMI = """#!{python}
import sys
ROWS, UNKNOWN = {rows}, {unknown}
asked = next(word for word in sys.argv if word.startswith("--query-gpu=")).partition("=")[2].split(",")
for field in asked:
    if field in UNKNOWN:
        sys.exit(print(f'Field "{{field}}" is not a valid field to query.') or 2)
for row in ROWS:
    print(", ".join(str(row.get(field, "[N/A]")) for field in asked))
"""
HEALTHY = {"name": "NVIDIA H100 80GB HBM3", "driver_version": "580.95.05", "memory.total": 81559}
HEALTHY |= {"compute_cap": "9.0", "mig.mode.current": "Disabled", "ecc.errors.uncorrected.volatile.total": 0}
HEALTHY |= {"power.limit": "700.00", "power.default_limit": "700.00", "persistence_mode": "Enabled"}
HEALTHY |= {"clocks_event_reasons.active": "0x0000000000000001", "memory.used": 4}
SICK = {"driver_version": "535.183.01", "memory.used": 40000, "compute_cap": "7.0"}
SICK |= {"mig.mode.current": "Enabled"}
SICK |= {"ecc.errors.uncorrected.volatile.total": 3, "power.limit": "400.00", "persistence_mode": "Disabled"}
FAULTS = """set -e
mount -t tmpfs -o size=64k none /dev/shm
mount -t tmpfs -o size=1m none {run}
mount -t tmpfs -o ro none {data}
mount -t tmpfs none /sys/fs/cgroup
echo 4000000000 > /sys/fs/cgroup/memory.max
echo '100000 100000' > /sys/fs/cgroup/cpu.max
mount -t tmpfs -o ro none {home}
echo '127.0.1.1 doctor-test' > {folder}/hosts
mount --bind {folder}/hosts /etc/hosts
hostname doctor-test
ulimit -n 256
ulimit -l 64
PATH={folder}/bin
exec "$@"
"""
"""In namespaces of its own, so that no other process has these faults, and nobody need be root."""


def install(folder: Path, name: str, version: str) -> None:
    """A package of this version, as far as its metadata says."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def install_torch(folder: Path, version: str, cuda: str | None) -> None:
    """A torch that says how it was built, and that must not be imported."""
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('the doctor imports torch')\n")
    text = f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\n"
    (package / "version.py").write_text(text)
    install(folder, "torch", version)


SEEN = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
"""The planted GPUs: real ones are hidden from tests."""


def plant_gpus(folder: Path, number: int, unknown: tuple = (), **fields) -> None:
    """An nvidia-smi that tells of so many GPUs; it does not know the `unknown` fields."""
    names = [{"index": n, "uuid": f"GPU-{n}", "pci.bus_id": f"00000000:0{n}:00.0"} for n in range(number)]
    rows = [{**HEALTHY, **each, **fields} for each in names]
    folder.mkdir(parents=True, exist_ok=True)
    tool = folder / "nvidia-smi"
    tool.write_text(NVIDIA_SMI.format(python=sys.executable, rows=rows, unknown=unknown))
    tool.chmod(0o755)


def write_recipe(folder: Path, source: str, tokenizer, **training) -> Path:
    """A small recipe whose text and tokenizer lie on the hub."""
    path, words = folder / "small.json", {"eval_steps": 5, "dataloader_num_workers": 2, **training}
    data = {**SMALL_RECIPE["data"], "sources": [{"dataset": source}], "tokenizer": tokenizer}
    budget = {"tokens": 81920, "tokens_per_step": 8192}
    training = {**SMALL_RECIPE["training"], **words}
    path.write_text(json.dumps({**SMALL_RECIPE, "data": data, "budget": budget, "training": training}))
    return path


class Examined:
    """What the doctor printed as JSON."""

    def __init__(self, finished):
        assert finished.stdout and "Traceback" not in finished.stderr, finished.output
        self.code, self.answer = finished.code, json.loads(finished.stdout)
        self.findings = [Finding(**each) for each in self.answer["findings"]]

    def find(self, check: str, words: str) -> Finding:
        """The one line of a check that holds these words."""
        found = [each for each in self.findings if each.check == check and words in each.message]
        assert len(found) == 1, as_lines(self.findings)
        return found[0]


def only(check: str, findings: Iterable[Finding]) -> Finding | None:
    """The one finding of this check; None if there is none."""
    found = [each for each in findings if each.check == check]
    assert len(found) < 2, found
    return found[0] if found else None


def examine(*words, **variables) -> Examined:
    return Examined(execute([sys.executable, "-m", "pretraining.doctor", "--json", *words], **variables))


@pytest.fixture(scope="module")
def sick(request) -> Examined:
    """A machine with every fault that namespaces, limits, a PATH and a hub on this machine can give it."""
    # Not in pytest's folder: that lies in /dev/shm, which is one of the faults.
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    request.addfinalizer(lambda: shutil.rmtree(folder))
    run, data, home = places = [folder / name for name in ("run", "data", "home")]
    for place in places:
        place.mkdir()
    namespaces = ["unshare", "-rmu"]
    if subprocess.run([*namespaces, "mount", "-t", "tmpfs", "none", run], capture_output=True).returncode:
        pytest.skip("this system gives no user its own namespaces")
    plant_gpus(folder / "bin", 8, unknown=("clocks_event_reasons.active",), **SICK)
    install_torch(folder / "packages", "2.13.0+cu130", "13.0")
    install(folder / "packages", "tqdm", "4.1.0")
    optional = {"report_to": "swanlab", "optim": "adamw_torch"}
    recipe = write_recipe(folder, "someone/gated", "someone/missing", **optional)
    faults = FAULTS.format(folder=folder, run=run, data=data, home=home)
    command = [sys.executable, "-m", "pretraining.doctor", "--json", "--recipe", recipe, "--world_size", "64"]
    command += ["--deepspeed", "zero3_nvme", "--output_dir", run, "--data_dir", data]
    variables = {**SEEN, "PYTHONPATH": str(folder / "packages"), "HF_HOME": str(folder / "hf")}
    variables |= {"TORCH_EXTENSIONS_DIR": str(home / "built"), "NCCL_P2P_DISABLE": "1"}
    variables["TORCH_NCCL_AVOID_RECORD_STREAMS"] = "1"
    with LocalHub() as hub:
        hub.gated.add("someone/gated")
        variables |= {**hub.environment, "HF_TOKEN": "", "NCCL_SOCKET_IFNAME": "ib9"}
        return Examined(execute([*namespaces, "sh", "-c", faults, "sh", *command], **variables))


PLANTED = {
    "driver": ("driver", BREAKS, "535.183.01 is older than the 580", "update the driver to 580"),
    "capability": ("compute capability", BREAKS, "compute capability 7.0", "CUDA 12"),
    "memory in use": ("GPU memory", COSTS, "other processes hold up to 41.9 GB", "nvidia-smi"),
    "MIG": ("MIG", COSTS, "GPUs 0-7: cut into MIG slices", "nvidia-smi -i 0,1,2,3,4,5,6,7 -mig 0"),
    "memory errors": ("GPU memory errors", COSTS, "could not correct", "restart"),
    "power": ("power limit", COSTS, "limited to 400 W of 700 W", "nvidia-smi -pl 700"),
    "persistence": ("persistence", COSTS, "put to sleep", "nvidia-smi -pm 1"),
    "package version": ("packages", COSTS, "tqdm 4.1.0 (tested: ", "requirements.txt"),
    "tracker": ("packages", BREAKS, "training.report_to swanlab needs swanlab", "pip install swanlab"),
    "C++ compiler": ("compiler", BREAKS, "needs a C++ compiler (c++): not found", "apt-get install g++"),
    "ninja": ("compiler", BREAKS, "needs ninja: not found", "pip install ninja"),
    "no place for operators": ("compiler", BREAKS, "a folder to keep them in", "TORCH_EXTENSIONS_DIR"),
    "shared memory": ("shared memory", BREAKS, "65.5 kB free in /dev/shm", "--shm-size=1g"),
    "open files": ("open files", BREAKS, "a process may open 256, a rank needs about 512", "ulimit -n"),
    "locked memory": ("locked memory", BREAKS, "a process may lock 65.5 kB", "ulimit -l unlimited"),
    "container's memory": ("plan", BREAKS, "the machine has 4.00 GB", "GPUs"),
    "container's cores": ("cores", COSTS, "1 for 8 ranks here of 2 data workers each", "--cpus-per-task"),
    "host name": ("host name", BREAKS, "doctor-test resolves to 127.0.1.1", "GLOO_SOCKET_IFNAME"),
    "interface": ("network", BREAKS, "NCCL_SOCKET_IFNAME is ib9", "or unset NCCL_SOCKET_IFNAME"),
    "slow messages": ("network", COSTS, "NCCL_P2P_DISABLE=1", "unset NCCL_P2P_DISABLE"),
    "unread variable": ("network", FINE, "TORCH_NCCL_AVOID_RECORD_STREAMS changes nothing", ""),
    "memory filesystem": ("filesystem", COSTS, "the memory of this machine", "--output_dir"),
    "full disk": ("disk", BREAKS, "of disk, there is room for 1.05 MB", "--output_dir"),
    "read-only folder": ("data folder", BREAKS, "cannot be written (Read-only file system)", "--data_dir"),
    "gated data": ("data", BREAKS, "someone/gated: gated, and closed without a token", "HF_TOKEN"),
    "unknown tokenizer": ("tokenizer", BREAKS, "someone/missing: the hub knows no such", "HF_TOKEN"),
    "data to prepare": ("data", BREAKS, "is not prepared", "python data_prep.py --recipe"),
}
"""Fault -> (check, verdict, words of the message, words of the remedy)."""


def test_every_planted_fault_is_named_by_a_line_and_what_will_break_is_exit_code_2(sick):
    """Promise: you know before you pay; what is wrong, and what to do about it. One summary for a script, and the
    versions; torch was not imported, or its stand-in would have raised."""
    for fault, (check, verdict, message, remedy) in PLANTED.items():
        finding = sick.find(check, message)
        assert finding.verdict == verdict and remedy in finding.remedy, (fault, finding)
    found = sick.answer["summary"]
    assert sick.code == 2 and found["verdict"] == BREAKS
    assert found["will_break"] == sum(each.verdict == BREAKS for each in sick.findings)
    assert sick.answer["versions"]["tqdm"] == "4.1.0" and len(sick.answer["gpus"]) == 8


def test_a_healthy_machine_has_none_of_these_faults(tmp_path):
    """Eight idle GPUs, a torch and a driver for them, and a hub that answers: each line that the faults brought forth
    is gone, or says that it is fine."""
    folder = tmp_path
    plant_gpus(folder / "bin", 8)
    install_torch(folder / "packages", "2.13.0+cu130", "13.0")
    recipe = write_recipe(folder, REPOSITORY_ID, REPOSITORY_ID, report_to="none")
    with LocalHub() as hub:
        variables = {**hub.environment, "PYTHONPATH": str(folder / "packages"), "HF_HOME": str(folder / "hf")}
        variables |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", FOLDER_VARIABLE: str(folder / "kept")}
        variables |= SEEN
        words = ["--recipe", recipe, "--data_dir", folder / "data", "--output_dir", folder / "run"]
        healthy = examine(*words, **variables)
    checks = {each.check for each in healthy.findings if each.verdict != FINE}
    # Verdicts agree with train.py, which refuses data that is still to be made.
    (broken,) = (each for each in healthy.findings if each.verdict == BREAKS)
    assert broken.check == "data" and broken.remedy.startswith("run: python data_prep.py --recipe "), broken
    assert healthy.code == 2, as_lines(healthy.findings)
    faults = {check for check, *_ in PLANTED.values()}
    # left over: what this machine really lacks, and data that is still to be made
    assert checks & faults <= {"data", "cores", "packages", "plan", "shared memory", "filesystem"}
    assert healthy.find("driver", "580.95.05").verdict == FINE
    assert healthy.find("data", f"{REPOSITORY_ID}: ").verdict == FINE
    assert not (folder / "run").exists()  # nothing is left behind
    # the rate of the disk is kept for the plans of this machine, beside the GPUs that were found
    finding = healthy.find("disk speed", "one process writes ")
    kept = json.loads(Path(healthy.answer["kept"]).read_text())
    entry = kept["8 x H100-SXM"]["disk_bytes_per_second"]
    assert entry["value"] == finding.values["disk_bytes_per_second"] > 0
    assert entry["where"] == str(folder / "run")


def test_a_plan_uses_the_measured_disk_of_its_own_machine_only(tmp_path, monkeypatch):
    """The same GPUs: the checkpoint's time is from the measured rate and says so. Others, or a damaged file: as if
    nothing was kept."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    setup, gpu = Setup(*load_recipe_and_ds_config("30b"), 8), find_gpu("H200")
    assumed = forecast(setup, gpu)["step"]["checkpoints"]
    keep_rates({"disk_bytes_per_second": 1e9}, "/fast", "H200", 8)
    keep_rates({"product_flops": 5e14}, "/fast", "H200", 8)
    assert kept_rates("H200", 8).keys() == {"disk_bytes_per_second", "product_flops"}
    measured = forecast(setup, gpu)["step"]["checkpoints"]
    assert measured["write_seconds"] == measured["bytes"] / 1e9 != assumed["write_seconds"]
    words = write_words(measured)
    assert "5.17 minutes to write (1.00 GB/s to /fast, measured here on " in words
    assert write_words(assumed) == ""
    for other, number in (("H100-SXM", 8), ("H200", 16)):
        elsewhere = forecast(replace(setup, world_size=number), find_gpu(other))
        assert elsewhere["step"]["checkpoints"]["disk"] is None

    path = keep_rates({"disk_bytes_per_second": 1e9}, "/fast", "H200", 8)
    for content in ("{", "[]", '{"8 x H200": 3}', '{"8 x H200": {"disk_bytes_per_second": {"value": "1"}}}'):
        path.write_text(content)
        assert kept_rates("H200", 8) == {}  # a plan never fails for what was measured once


def test_a_torch_for_processors_beside_gpus_and_a_hub_that_is_gone(tmp_path):
    """The processor would train, silently; and what is not fetched yet cannot be."""
    plant_gpus(tmp_path / "bin", 1, **{"memory.used": 81000})
    install_torch(tmp_path / "packages", "2.13.0+cpu", None)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    recipe = write_recipe(tmp_path, "someone/corpus", "someone/tokenizer", bf16=True)
    variables = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
    variables |= {**SEEN, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HF_HOME": str(tmp_path)}
    words = ["--recipe", recipe, "--data_dir", tmp_path / "data", "--output_dir", tmp_path]
    found = examine(*words, PYTHONPATH=str(tmp_path / "packages"), **variables)
    assert found.code == 2
    assert "without an index of builds for processors" in found.find("torch build", "2.13.0+cpu").remedy
    assert found.find("plan", "586 MB are left of a GPU's memory").verdict == BREAKS
    for check, name in (("data", "someone/corpus"), ("tokenizer", "someone/tokenizer")):
        finding = found.find(check, f"{name}: http://127.0.0.1:{port} cannot be reached (Connection refused)")
        assert finding.verdict == BREAKS and "HF_ENDPOINT" in finding.remedy


def test_a_refused_recipe_or_data_that_cannot_be_read_is_one_line_among_the_others(tmp_path):
    """The machine is examined all the same."""
    found = examine("--recipe", "features/gpt2", "--world_size", "3")
    assert found.code == 2 and found.find("recipe", "tokens_per_step").verdict == BREAKS
    assert found.find("host memory", "GB").verdict == FINE
    (tmp_path / "file").write_text("no folder")
    found = examine("--recipe", "features/gpt2", "--data_dir", tmp_path / "file")
    assert found.find("data", "cannot be read").verdict == BREAKS
    assert found.find("disk speed", "one process writes")


def test_the_table_for_people_ends_in_one_summary_line_and_a_misspelt_option_is_one_line():
    """Verdict, check, message; the remedy beneath; the worst verdict decides the code."""
    refused(execute([sys.executable, "-m", "pretraining.doctor", "--recip", "features/gpt2"]))
    finished = execute([sys.executable, "-m", "pretraining.doctor", "--local_rank", "0"])
    *_, before_last, last = finished.stdout.splitlines()
    assert finished.code == 0, finished.output
    assert before_last == "" and last.startswith("nothing will break; ")
    findings = [Finding("a", COSTS, "slow", "mend it"), Finding("b", BREAKS, "gone", where="rank 1")]
    shown = ["costs you   a  slow", "               -> mend it", "will break  b  gone (rank 1)"]
    assert as_lines(findings).splitlines() == shown
    assert summary_line(summary(findings, 0.25)) == "1 will break a run here; 1 cost you; 0 fine (0.2 s)"


def test_only_rank_0_speaks_under_a_launcher(monkeypatch, capsys):
    """Ranks meet in `cluster`; one rank of each node examines it first, and hands over what it has found."""
    asked, examined = [], []

    def examine_cluster(options, machine):
        asked.append(machine)
        return machine, [Finding("ranks", FINE, "here")]

    def examine(options):
        examined.append(os.environ["RANK"])
        return [Finding("disk", FINE, "large")], on_gpus(2, 4)

    together = SimpleNamespace(examine_cluster=examine_cluster, end_rank=lambda code: None)
    monkeypatch.setattr(doctor, "examine", examine)
    monkeypatch.setitem(sys.modules, "pretraining.doctor.cluster", together)
    launched = {**LAUNCHED, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for rank in range(4):
        for name, value in {**launched, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)}.items():
            monkeypatch.setenv(name, value)
        doctor.main([])
        said = capsys.readouterr().out
        assert not said if rank else f"large ({socket.gethostname()})" in said and said.count("large") == 1
    assert examined == ["0", "2"] and list(map(len, asked)) == [1, 0, 1, 0]


KEPT = {
    "garbage": ("{garbage", "recipe.json: cannot be read"),
    "no recipe": ("{}", "it is no recipe of a run"),
    "a list": ("[]", "it is no recipe of a run"),
    "another recipe": ({"training.learning_rate": 1.0}, "of another recipe: training.learning_rate"),
    "this recipe": ({}, None),
}
"""What a run folder's recipe.json holds: text, or values that differ; and what is said of it."""


@pytest.mark.parametrize("name", KEPT)
def test_a_run_folder_is_read_as_a_start_reads_it(tmp_path, name):
    """The words are those with which train.py refuses it (`changes_of_run`)."""
    kept, said = KEPT[name]
    recipe, ds_config = load_recipe_and_ds_config("features/gpt2")
    if isinstance(kept, dict):
        settings = [f"{key}={value}" for key, value in kept.items()]
        kept = json.dumps(load_recipe_and_ds_config("features/gpt2", settings)[0].to_dict())
    (tmp_path / "recipe.json").write_text(kept)
    (finding,) = check_earlier_start(Launch(gpus.Gpus(), 1, 1, tmp_path, Path("data"), recipe, ds_config))
    if said is None:
        assert finding.verdict == FINE and changes_of_run(tmp_path, recipe.to_dict()) == []
        return
    assert said in finding.message and finding.verdict == BREAKS and "--output_dir" in finding.remedy
    assert refusal(changes_of_run, tmp_path, recipe.to_dict()) == f"{finding.message}; {finding.remedy}"


def test_what_is_not_examined_of_amds_gpus_is_said():
    """Not fine: nothing of them was looked at."""
    (finding,) = gpus.check_gpus(gpus.Gpus(), gpus.TorchBuild("2.13.0+rocm7.1", None))
    assert finding.verdict == COSTS
    assert "memory errors, power, clocks and links are not checked" in finding.message
    assert "rocm-smi" in finding.remedy and "--world_size N" in finding.remedy


def test_the_own_name_is_judged_as_ranks_judge_it(monkeypatch):
    """One look-up: what `join_ranks` refuses between hosts will break, and an interface that is named mends it."""
    monkeypatch.setattr(host.socket, "gethostname", lambda: "node")
    monkeypatch.delenv(host.GLOO_INTERFACE, raising=False)
    several, alone = on_gpus(8, 16), on_gpus(8, 8)
    own = ("127.0.1.1", "node", BREAKS), (None, "node", BREAKS), ("10.0.0.7", None, FINE)
    for address, name, verdict in own:
        monkeypatch.setattr(host, "own_address", lambda address=address: address)
        assert host.loopback_name() == name
        names = [only("host name", reach.check_names(launch)).verdict for launch in (several, alone)]
        assert names == [verdict, FINE]
    monkeypatch.setattr(host, "own_address", lambda: "127.0.1.1")
    monkeypatch.setenv(host.GLOO_INTERFACE, "eth0")
    finding = only("host name", reach.check_names(several))
    assert finding.verdict == FINE and "eth0" in finding.message


def on_gpus(number: int, world_size: int, **fields) -> Launch:
    """A run without a recipe on GPUs that nobody has."""
    found = tuple(gpus.GpuFound(str(n), "NVIDIA H100 80GB HBM3", 85 << 30, 0, fields) for n in range(number))
    return Launch(gpus.Gpus(found, "580.95.05"), world_size, number, Path("runs"), Path("data"))


V2 = {"memory.max": "8000000000", "memory.current": "5000000000"}
V2["memory.stat"] = "anon 1\ninactive_file 1000000000"
V1 = {"memory.limit_in_bytes": "8000000000", "memory.usage_in_bytes": "5000000000"}
V1["memory.stat"] = "inactive_file 0\ntotal_inactive_file 1000000000"


GROUPS = [("0::/jobs/mine", "", V2, {"cpu.max": "150000 100000"}), ("0::/elsewhere/on/the/host", "", V2, {})]
GROUPS += [("4:memory:/jobs/mine", "memory", V1, {})]


@pytest.mark.parametrize("line, group, files, cpu", GROUPS)
def test_limits_of_a_container_are_those_of_its_groups(monkeypatch, tmp_path, line, group, files, cpu):
    """SLURM limits a group below the root, a container shows its own group as the root; both versions of groups."""
    folder = tmp_path / group / ("" if "elsewhere" in line else "jobs")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {**files, **cpu}.items():
        (folder / name).write_text(text)
    (tmp_path / "own").write_text(line)
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(host.os, "sysconf", {"SC_PHYS_PAGES": 15_625_000, "SC_PAGE_SIZE": 4096}.__getitem__)
    monkeypatch.setattr(host, "kernel_bytes", lambda name: 30_000_000_000)
    assert host.host_memory_bytes() == host.container_memory_bytes() == 8_000_000_000
    assert host.free_memory_bytes() == 4_000_000_000
    assert host.cores() <= 1.5 or not cpu
    (folder / next(iter(files))).write_text("max" if files is V2 else str(2**63 - 4096))
    assert host.container_memory_bytes() is None and host.host_memory_bytes() == 64_000_000_000


def test_memory_that_others_hold_is_not_free(monkeypatch):
    """Large enough, but not now: the kernel would end a rank."""
    recipe, ds_config = load_recipe_and_ds_config("features/gpt2")
    need = memory_need(Setup(recipe, ds_config))
    launch = Launch(gpus.Gpus(), 1, 1, Path("runs"), Path("data"), recipe, ds_config, need=need)
    for free, verdict in ((2 * need.on_processor, FINE), (need.on_processor / 2, COSTS)):
        monkeypatch.setattr(host, "free_memory_bytes", lambda free=free: free)
        assert only("host memory", machine.check_machine(launch)).verdict == verdict


def test_a_local_store_is_not_asked_through_a_proxy(monkeypatch):
    """A proxy of the outside knows no address of this network."""
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    local = {"http://10.0.0.5:9000": True, "http://minio:9000": True, "https://hub.example": False}
    for endpoint, names in local.items():
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert bool(only("proxy", reach.check_names(on_gpus(1, 1)))) == names
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    monkeypatch.setenv("no_proxy", "localhost,minio")
    assert only("proxy", reach.check_names(on_gpus(1, 1))) is None


def test_gpus_on_a_socket_that_this_process_may_not_use(monkeypatch, tmp_path):
    """Copies would cross the sockets; a GPU beside our cores is none of the matter."""
    (tmp_path / "0000:07:00.0").mkdir()
    monkeypatch.setattr(machine, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1})
    launch = on_gpus(1, 1, **{"pci.bus_id": "00000000:07:00.0"})
    for cores, verdict in (("8-15", COSTS), ("0-7", None)):
        (tmp_path / "0000:07:00.0" / "local_cpulist").write_text(cores)
        finding = only("NUMA", machine.check_machine(launch))
        assert (finding and finding.verdict) == verdict


def test_prepared_data_needs_no_source_any_more(tmp_path):
    """Nothing is asked of a hub once the shards lie there; damaged ones break the run."""
    text = tmp_path / "text.jsonl"
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    rows = ({"text": f"Line {n} of {words[n % 7]} words: {words[n % 5]} {n * n}."} for n in range(3000))
    text.write_text("\n".join(map(json.dumps, rows)))
    recipe = write_recipe(tmp_path, "someone/corpus", {"train_vocab_size": 300})
    values = json.loads(recipe.read_text())
    values["data"]["sources"] = [{"path": str(text)}]
    recipe.write_text(json.dumps(values))
    completed([sys.executable, "data_prep.py", "--recipe", recipe, "--data_dir", tmp_path / "data"])
    text.unlink()
    options = doctor.parse_arguments(["--recipe", str(recipe), "--data_dir", str(tmp_path / "data")])
    launch, refused = plan_launch(options, gpus.Gpus())
    (finding,) = reach.ask_all(reach.questions_of(launch))()
    assert not refused and finding.verdict == FINE and finding.message.startswith("prepared: "), finding
    next((tmp_path / "data" / "corpus" / "train").glob("*.arrow")).unlink()
    (finding,) = reach.ask_all(reach.questions_of(launch))()
    assert finding.verdict == BREAKS


def test_what_is_not_fetched_cannot_be_offline(monkeypatch):
    """HF_HUB_OFFLINE forbids asking; what the cache holds is fine."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: True)
    finding = reach._tokenizer("someone/tokenizer")
    assert finding.verdict == BREAKS and "unset HF_HUB_OFFLINE" in finding.remedy
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "/cache/tokenizer.json")
    assert reach._tokenizer("someone/tokenizer").verdict == FINE
    # what is fetched has no place in a home that cannot be written: said before it is fetched
    monkeypatch.setenv("HF_HOME", "/proc/none")
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    finding = reach._repository("tokenizer", "model", "someone/tokenizer")
    assert finding.verdict == BREAKS and "export HF_HOME=" in finding.remedy


def test_an_answer_that_does_not_come_is_not_waited_for(monkeypatch):
    """All questions together take no longer than their limit."""
    monkeypatch.setattr(reach, "SECONDS", 0.05)
    never = threading.Event()
    answers = reach.ask_all({("data", name): never.wait for name in ("one", "other")})
    assert ["no answer" in each.message for each in answers()] == [True, True]
    never.set()
    with pytest.raises(ZeroDivisionError):
        reach.ask_all({("data", "fault of ours"): lambda: 1 / 0})()


ANSWERS = [(403, True, "closed to the account of your token (403)"), (503, False, "the hub answers 503")]


@pytest.mark.parametrize("status, has_token, words", ANSWERS)
def test_what_the_hub_answers_is_said_in_words(monkeypatch, tmp_path, status, has_token, words):
    """A token without rights, a hub that is down: each has its own remedy."""
    with LocalHub() as hub:
        hub.refuse_with = status
        token = {"HF_TOKEN": "hf_local" if has_token else "", "HF_HOME": str(tmp_path)}
        for name, value in {**hub.environment, **token}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
        monkeypatch.setattr("huggingface_hub.get_token", lambda: token["HF_TOKEN"] or None)
        finding = reach._repository("data", "dataset", "some one/corpus")
    assert words in finding.message and finding.remedy


def test_folders_of_one_repository_are_one_question():
    """Seven sources of a mixture lie in one repository of the hub."""
    recipe, ds_config = load_recipe_and_ds_config("30b")
    launch = Launch(gpus.Gpus(), 1, 1, Path("runs"), Path("nowhere"), recipe, ds_config)
    asked = [("data", "prepared data"), ("data", "MBZUAI-LLM/SlimPajama-627B-DC"), ("tokenizer", "gpt2")]
    assert list(reach.questions_of(launch)) == asked


def test_only_the_gpus_that_a_process_sees_count(monkeypatch, tmp_path):
    """CUDA_VISIBLE_DEVICES, by number or by name; CUDA passes over all behind a name that is none."""
    plant_gpus(tmp_path, 4)
    monkeypatch.setenv("PATH", str(tmp_path))
    for chosen, seen in (("2,0", ["2", "0"]), ("GPU-3", ["3"]), ("MIG-1", []), ("1,9,2", ["1"]), ("", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        found = gpus.read_gpus()
        assert [gpu.index for gpu in found.found] == seen
    (finding,) = gpus.check_gpus(found, gpus.TorchBuild("2.13.0", "13.0"))
    assert "CUDA_VISIBLE_DEVICES leaves none" in finding.message


def test_an_old_driver_with_a_compatibility_package_is_none(monkeypatch):
    """A container may bring the newer library; torch asks that one."""
    launch, torch = on_gpus(1, 1), gpus.TorchBuild("2.13.0+cu130", "13.0")
    old = replace(launch.gpus, driver="535.183.01")
    for cuda, verdict in ((None, BREAKS), (12.2, BREAKS), (13.0, FINE)):
        monkeypatch.setattr(gpus, "driver_cuda", lambda cuda=cuda: cuda)
        assert only("driver", gpus.check_gpus(old, torch)).verdict == verdict


def test_a_driver_that_does_not_answer(monkeypatch, tmp_path):
    """Updated under a running machine, its library and its kernel module differ: no GPU can be used."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = gpus.check_gpus(gpus.read_gpus(), gpus.TorchBuild("2.13.0", "13.0"))
    assert finding.verdict == BREAKS and "version mismatch" in finding.message


def test_infiniband_needs_memory_that_may_be_locked(monkeypatch, tmp_path):
    """Across machines the run ends when it registers its buffers; on one machine the adapter is idle."""
    (tmp_path / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    state = tmp_path / "mlx5_0" / "ports" / "1" / "state"
    monkeypatch.setattr(machine, "INFINIBAND", tmp_path)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (65536, 65536))
    for world_size, verdict in ((16, BREAKS), (8, COSTS)):
        assert only("locked memory", machine.check_machine(on_gpus(8, world_size))).verdict == verdict
    for text, verdict in (("4: ACTIVE", FINE), ("1: DOWN", COSTS)):
        state.write_text(text)
        assert only("InfiniBand", machine.check_machine(on_gpus(8, 8))).verdict == verdict


def test_ranks_may_open_files_up_to_the_hard_limit(monkeypatch):
    """They raise their own limit, so that of the shell does not matter."""
    for limit, verdict in {(256, 65536): FINE, (256, 1024): BREAKS}.items():
        monkeypatch.setattr(machine.resource, "getrlimit", lambda _, limit=limit: limit)
        assert only("open files", machine.check_machine(on_gpus(8, 1024))).verdict == verdict


def test_errors_that_the_driver_logged_are_named_by_device(monkeypatch, tmp_path):
    """A program's own mistakes (Xid 31) are none of the machine's."""
    log, launch, torch = tmp_path / "kmsg", on_gpus(1, 1), gpus.TorchBuild("2.13.0+cu130", "13.0")
    monkeypatch.setattr(gpus, "failing_gpus", lambda: failing_gpus(log))
    text = "6,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
    log.write_text(text)
    assert "Xid 79 of 0000:3b:00" in only("Xid", gpus.check_gpus(launch.gpus, torch)).message
    log.write_text(text.replace("79", "31"))
    assert only("Xid", gpus.check_gpus(launch.gpus, torch)) is None


@pytest.mark.parametrize("ahead, verdict", [(0, None), (120, COSTS), (3600, BREAKS), (-3600, BREAKS)])
def test_a_clock_that_is_off_is_measured_against_the_hub(monkeypatch, ahead, verdict):
    """Stores refuse requests that seem fifteen minutes old."""
    monkeypatch.setattr(reach.time, "time", lambda: 1_767_225_600 + ahead)
    finding = reach.check_clock("Thu, 01 Jan 2026 00:00:00 GMT")
    assert (finding and finding.verdict) == verdict


def test_a_filesystem_that_lacks_what_a_commit_needs(monkeypatch, tmp_path):
    """Bucket mounts without links or locks: a checkpoint there may be lost."""

    def refuse(*_):
        raise OSError("not supported")

    assert machine.missing_operations(tmp_path) == [] and not list(tmp_path.iterdir())
    monkeypatch.setattr(machine.os, "link", refuse)
    monkeypatch.setattr(machine.fcntl, "flock", refuse)
    assert machine.missing_operations(tmp_path) == ["file locks", "hard links"]
    monkeypatch.setattr(machine, "filesystem_of", lambda _: ("/bucket", "fuse.bucket"))
    assert "fuse.bucket at /bucket has no file locks" in machine.check_filesystem(tmp_path).message


def test_a_disk_with_room_but_without_inodes(monkeypatch, tmp_path):
    """Free bytes are not all that a checkpoint needs."""
    launch = replace(on_gpus(1, 1), run_folder=tmp_path)
    assert only("inodes", machine.check_disks(launch)) is None
    status = SimpleNamespace(f_files=1000, f_favail=20, f_frsize=4096, f_blocks=0, f_bfree=0, f_bavail=0)
    monkeypatch.setattr(machine.os, "statvfs", lambda _: status)
    assert only("inodes", machine.check_disks(launch)).verdict == BREAKS


def test_what_an_upload_needs_is_tried(tmp_path):
    """A file is written and removed, as the run does at its start; a place that cannot be written is named."""
    assert reach._upload(str(tmp_path / "kept")).verdict == FINE
    assert not list((tmp_path / "kept").iterdir())
    (tmp_path / "file").touch()
    finding = reach._upload(str(tmp_path / "file" / "kept"))
    assert finding.verdict == BREAKS and "credentials" in finding.remedy
    names = {"a/b/runs": "a/b", "datasets/a/b@c/d": "datasets/a/b", "buckets/a/b/c": None}
    assert {name: hub_repository(f"hf://{name}") for name in names} == names


def test_packages_are_asked_for_by_the_key_that_needs_them():
    """Each need names its key; a recipe that asks for nothing has none."""
    settings = ["training.report_to=trackio", "training.optim=lion_32bit"]
    settings += ["checkpoints.upload=s3://bucket/runs"]
    recipe, ds_config = load_recipe_and_ds_config("124m", settings, "zero1")
    launch = Launch(gpus.Gpus(), 1, 1, Path("runs"), Path("data"), recipe, ds_config)
    modules = {needed.module for needed in needs_of(launch)}
    assert {"trackio", "bitsandbytes", "s3fs"} <= modules
    recipe, ds_config = load_recipe_and_ds_config("features/gpt2")
    assert needs_of(Launch(gpus.Gpus(), 1, 1, Path("runs"), Path("data"), recipe, ds_config)) == []


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no nvidia-smi")
@pytest.mark.gpu
def test_the_gpus_of_this_machine_are_read():
    """Each has a name, memory and a driver."""
    found = gpus.read_gpus()
    assert found.driver and all(gpu.memory_bytes > 1e9 for gpu in found.found)
