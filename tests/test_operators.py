"""Promise 3, nothing lost: a compile that was killed does not make every later run wait for ever."""

import os
import subprocess
from pathlib import Path

import pytest

from pretraining.training import operators
from pretraining.training.operators import _announced, clear_abandoned_locks


@pytest.fixture
def lock(tmp_path, monkeypatch) -> Path:
    """The lock file of an operator's compile, as torch lays it out."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "deepspeed_ccl_comm").mkdir()
    lock = tmp_path / "deepspeed_ccl_comm" / "lock"
    lock.touch()
    return lock


def test_the_lock_of_a_dead_compile_is_removed(lock):
    assert clear_abandoned_locks() == [lock] and not lock.exists()


def test_the_lock_of_a_running_compile_stays(lock):
    descriptor = os.open(lock, os.O_RDONLY)
    assert clear_abandoned_locks() == [] and lock.exists()
    os.close(descriptor)


def test_a_lock_made_while_others_are_looked_at_stays(lock, monkeypatch):
    """Another rank ends its compile and the next begins between the two looks: its lock is not the abandoned one."""

    def links_meanwhile(name: str) -> set[str]:
        lock.unlink()
        lock.touch()
        return set()

    monkeypatch.setattr(operators, "_links", links_meanwhile)
    assert clear_abandoned_locks() == [] and lock.exists()


def test_the_compiler_that_a_killed_run_left_at_work_is_waited_for(lock, capsys):
    """It would write into the folder that the next compile starts anew."""
    compiler = subprocess.Popen(["sleep", "1"], cwd=lock.parent)
    assert clear_abandoned_locks() == [lock]
    assert compiler.poll() is not None and "left at work" in capsys.readouterr().out


def test_a_compile_and_a_wait_for_one_are_announced(lock, capsys):
    """A minute of silence looks like a hang; what is compiled already is loaded in silence."""
    load = _announced(lambda name: name)
    load("deepspeed_ccl_comm")
    assert f"waiting for another process that compiles in {lock.parent}" in capsys.readouterr().out
    lock.unlink()
    load("deepspeed_ccl_comm")
    assert "compiling DeepSpeed's CPU operators" in capsys.readouterr().out
    (lock.parent / "deepspeed_ccl_comm.so").touch()
    assert load("deepspeed_ccl_comm") == "deepspeed_ccl_comm" and not capsys.readouterr().out


def test_what_is_compiled_is_found_where_torch_keeps_it(tmp_path, monkeypatch, capsys):
    """Without TORCH_EXTENSIONS_DIR torch has a folder for each Python and device."""
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(operators.cpp_extension, "get_default_build_root", lambda: str(tmp_path))
    folder = Path(operators.cpp_extension._get_build_directory("deepspeed_ccl_comm", False))
    assert folder.is_relative_to(tmp_path)
    (folder / "deepspeed_ccl_comm.so").touch()
    assert _announced(lambda name: name)("deepspeed_ccl_comm") and not capsys.readouterr().out


def test_without_locks_nothing_is_done(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "none yet"))
    assert clear_abandoned_locks() == []
