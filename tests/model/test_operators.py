"""DeepSpeed's operators are compiled once for all runs of an environment, and a killed compile stops none of them."""

import re
import shutil
import time
from pathlib import Path

import pytest

from pretraining.doctor import launch as doctor_launch
from pretraining.ds_config import load_ds_config
from pretraining.recipe import load_recipe
from pretraining.training import operators
from pretraining.training.arguments import build_arguments
from pretraining.upstream import toolchain
from tests.gear.chaos import ranks_of
from tests.gear.finished_data import refusal
from tests.gear.runs import Started, send_kill

SOURCE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "sum", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_small() {
    PyObject* made = PyModule_Create(&module);
    PyModule_AddIntConstant(made, "answer", ANSWER);
    return made;
}
"""
LOAD = """
import sys
import torch.utils.cpp_extension as cpp_extension
from pretraining.training.operators import keep_compiled_operators
keep_compiled_operators()
flags = ["-g", f"-DANSWER={sys.argv[2]}"]
print("answer", cpp_extension.load("small", [sys.argv[1]], extra_cflags=flags).answer)
"""


class Machine:
    """A compiler that counts its calls, a folder for what it compiles, and a source to compile."""

    def __init__(self, folder: Path):
        self.calls, self.sleeping = folder / "calls", folder / "sleeping"
        self.cache, self.source, self.program = folder / "cache", folder / "small.cpp", folder / "load.py"
        self.source.write_text(SOURCE)
        self.program.write_text(LOAD)
        self.calls.touch()
        self.compiler = folder / "c++"
        self.compiler.write_text(
            f'#!/bin/sh\necho "$@" >> {self.calls}\n'
            f'case "$*" in *" -c "*) while [ -e {self.sleeping} ]; do sleep 0.05; done;; esac\n'
            f'exec {shutil.which("c++")} "$@"\n'
        )
        self.compiler.chmod(0o755)

    def start(self, answer: int = 42) -> Started:
        """A process that loads the operator, as a run does."""
        variables = {"CXX": str(self.compiler), "TORCH_EXTENSIONS_DIR": str(self.cache)}
        return Started(["forked", "0", self.program, self.source, answer], **variables)

    def said(self, started: Started, answer: int = 42) -> str:
        """What a process said that has loaded the operator."""
        finished = started.finish(300)
        assert finished.code == 0 and f"answer {answer}\n" in finished.stdout, finished.output
        return finished.stdout

    def wait_for_compile(self, number: int, started: Started) -> None:
        """Return once the compiler was started for the so many-th time."""
        while self.num_compiles < number:
            assert started.process.poll() is None, started.finish().output
            time.sleep(0.01)

    @property
    def num_compiles(self) -> int:
        return sum(" -c " in line for line in self.calls.read_text().splitlines())


@pytest.fixture
def machine(tmp_path) -> Machine:
    if shutil.which("c++") is None:
        pytest.skip("no compiler here")
    return Machine(tmp_path)


def test_a_second_process_starts_no_compiler(machine):
    """The first says that it compiles; the second loads in silence, wherever its copy of the source lies."""
    assert "compiling DeepSpeed's operator small" in machine.said(machine.start())
    calls = machine.calls.read_text()
    assert "-DANSWER=42" in calls and " -g " not in calls  # nobody debugs it, and it takes most of the time
    (machine.source.parent / "other").mkdir()
    machine.source = machine.source.rename(machine.source.parent / "other" / "small.cpp")
    assert machine.said(machine.start()) == "answer 42\n" and machine.calls.read_text() == calls
    (kept,) = machine.cache.iterdir()
    assert sorted(path.name for path in kept.iterdir()) == ["compiling", "small.so"]


def test_the_same_is_compiled_once_and_what_differs_apart(machine):
    """The ranks of a run start together: one compiles, the others wait. Another environment has a file of its own."""
    started = [(machine.start(answer), answer) for answer in (1, 2, 1)]
    for process, answer in started:
        machine.said(process, answer)
    assert machine.num_compiles == 2 and len(list(machine.cache.iterdir())) == 2


def test_a_killed_compile_stops_no_later_run(machine):
    """Promise 3, nothing lost: neither its lock nor its compiler, which is still at work, is in the way."""
    machine.sleeping.touch()
    killed = machine.start()
    machine.wait_for_compile(1, killed)
    send_kill(ranks_of(killed))
    later = machine.start()
    machine.wait_for_compile(2, later)
    machine.sleeping.unlink()
    machine.said(later)
    killed.finish()
    (kept,) = machine.cache.iterdir()
    assert sorted(path.name for path in kept.iterdir()) == ["compiling", "small.so"]


MISSING = {
    "compiler": ("zero2_offload", "to cpu .* a C\\+\\+ compiler"),
    "ninja": ("zero3_offload", "to cpu .* ninja: pip install ninja"),
    "libaio": ("zero3_nvme", "to nvme .* libaio: .* --deepspeed zero3_offload"),
    "toolkit": ("zero3_nvme", "CUDA 13.0, and there is no nvcc here: .* CUDA_HOME"),
    "other toolkit": ("zero3_nvme", "CUDA 13.0, and the nvcc here is of CUDA 12"),
}


@pytest.fixture
def tools(monkeypatch, tmp_path) -> Path:
    """A machine whose tools are the scripts in one folder; all are there, and a GPU beside a torch of CUDA 13.0."""
    folder = tmp_path / "cuda" / "bin"
    folder.mkdir(parents=True)
    for name in ("c++", "ninja", "cc"):
        (folder / name).write_text("#!/bin/sh\n")
    (folder / "nvcc").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.1'\n")
    for tool in folder.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin")  # sh, and what it calls
    for name, value in {"CXX": "c++", "CC": str(folder / "cc"), "CUDA_HOME": str(folder.parent)}.items():
        monkeypatch.setenv(name, value)
    which = shutil.which
    found = lambda name: which(name, path=str(folder))  # noqa: E731
    monkeypatch.setattr(toolchain.shutil, "which", found)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    return folder


def take_away(tools: Path, name: str) -> None:
    """As a machine without it: a compiler that links no libaio, a toolkit without nvcc, or of another CUDA."""
    if name == "libaio":
        (tools / "cc").write_text("#!/bin/sh\nexit 1\n")
    elif name == "other toolkit":
        (tools / "nvcc").write_text("#!/bin/sh\necho 'release 12.8, V12.8.9'\n")
    else:
        (tools / {"compiler": "c++", "toolkit": "nvcc"}.get(name, name)).unlink()


@pytest.mark.parametrize("name", MISSING)
def test_what_an_offload_cannot_compile_is_one_line_and_the_doctor_s_verdict(
    tools, tmp_path, monkeypatch, name
):
    """Bad input: said before the model is built, where DeepSpeed would fail with a traceback after it.

    What `train.py` refuses will break the run, and the doctor says the same remedy.
    """
    from pretraining.doctor.gpus import GpuFound, Gpus, TorchBuild
    from pretraining.doctor.launch import Launch

    deepspeed, said = MISSING[name]
    operators.check_operators(load_ds_config("zero3_nvme"))  # nothing is missing yet
    ds_config, folders = load_ds_config(deepspeed), (Path("runs"), Path("data"))
    monkeypatch.setattr(doctor_launch, "torch_build", lambda: TorchBuild("2.13.0+cu130", "13.0"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tools))
    found = Gpus((GpuFound("0", "NVIDIA H100 80GB HBM3", 85 << 30, 0),))
    launch = Launch(found, 1, 1, *folders, ds_config=ds_config)
    (fine,) = doctor_launch._compilers(launch)
    assert fine.verdict == "fine"
    take_away(tools, name)
    (finding,) = doctor_launch._compilers(launch)
    line = refusal(build_arguments, load_recipe("features/gpt2"), ds_config, tmp_path, 1)
    assert re.search(said, line)
    assert finding.verdict == "will break" and line.endswith(f": {finding.remedy}")
    operators.check_operators(load_ds_config("zero3"))
    operators.check_operators(None)
