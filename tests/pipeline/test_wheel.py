"""The wheel: what an empty environment and an empty folder need, and nothing of the checkout.

A test that installs it builds it with hatchling, as pip does, and sees the libraries of this environment.
"""

import json
import re
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from pretraining.runtime import installation
from tests.gear.runs import BIN, REPOSITORY, Run, completed, contents, execute, on_own_port

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
SCRIPTS = PROJECT["project"]["scripts"]
NOT_TYPED = re.compile(
    r"(?<![\w./-])(?:train|data_prep)\.py\b|(?<![\w./-])(?:accelerate_configs|docs|launch)/\w"
)
"""What somebody without a checkout does not have."""
HELPS = """
import contextlib, sys
from pretraining.runtime.installation import run_command
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    with contextlib.suppress(SystemExit):
        run_command()
"""
FOLDERS = ("pretraining", "recipes", "ds_configs", "accelerate_configs", "launch", "docs")


class Installed:
    """An environment with the wheel, and an empty folder to work in."""

    def __init__(self, folder: Path):
        self.wheel = self._built(folder / "wheel")
        self.bin, self.folder = folder / "environment" / "bin", folder / "empty"
        completed([sys.executable, "-m", "venv", "--without-pip", self.bin.parent])
        (self.packages,) = self.bin.parent.glob("lib/python*/site-packages")
        libraries = [path for path in sys.path if path.endswith("site-packages")]
        (self.packages / "libraries.pth").write_text("\n".join(libraries))
        pip = [sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "--quiet"]
        completed([*pip, "--no-deps", "--no-index", "--no-compile", self.wheel])
        # that of the libraries' environment begins with another interpreter
        launcher = (BIN / "deepspeed").read_text().partition("\n")[2]
        (self.bin / "deepspeed").write_text(f"#!{self.bin}/python\n{launcher}")
        (self.bin / "deepspeed").chmod(0o755)
        self.folder.mkdir()
        self.brought = self.files()

    @staticmethod
    def _built(folder: Path) -> Path:
        completed([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder])
        (wheel,) = folder.glob("*.whl")
        return wheel

    def files(self) -> dict[str, tuple]:
        """What is below the package; what Python compiles beside it does not count."""
        found = contents(self.packages / "pretraining")
        return {name: kept for name, kept in found.items() if "__pycache__" not in name}

    def run(self, *words, code: int = 0) -> str:
        """Type a command in the folder; returns what it said."""
        path = f"{self.bin}:{BIN}:/usr/bin:/bin"
        finished = execute([self.bin / words[0], *words[1:]], self.folder, PATH=path)
        assert finished.code == code, finished.output
        said = finished.stdout + (finished.stderr if code else "")
        assert not NOT_TYPED.search(said), said
        return said


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Installed:
    pytest.importorskip("hatchling", reason="hatchling is not installed (requirements-dev.txt)")
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_brings_what_git_keeps(installed):
    """All files of the package and of the folders that it reads, and no other file of the checkout."""
    listed = ["git", "ls-files", *FOLDERS, "benchmarks/results", "*.py", "requirements*.txt"]
    tracked, brought = completed(listed).stdout.splitlines(), (*FOLDERS, "benchmarks/results/")
    ours = {name for name in tracked if "/" not in name or name.startswith(brought)}
    ours -= {f"requirements-{name}.txt" for name in ("dev", "flows", "skypilot")}
    names = {name for name in zipfile.ZipFile(installed.wheel).namelist() if ".dist-info/" not in name}
    within = {name if name.startswith("pretraining/") else f"pretraining/repository/{name}" for name in ours}
    assert names == within


def test_two_commands_train_in_an_empty_folder(installed, workshop):
    """Data and run lie in the folder, on one process and on two, with the curve that a checkout has."""
    assert installed.run("pretraining-files").strip() == f"{installed.packages}/pretraining/repository"
    recipe = ["--recipe", workshop.recipe]
    refused = installed.run("pretraining-train", *recipe, code=2)
    assert refused.endswith(f"run: pretraining-data-prep --recipe {workshop.recipe}\n")
    prepared = json.loads(installed.run("pretraining-data-prep", *recipe, "--json"))
    assert prepared["folder"] == str(installed.folder / "data" / "corpus")
    assert prepared["fingerprint"] == workshop.summary["fingerprint"]
    installed.run("pretraining-train", *recipe, "--deepspeed", "null")
    one = Run(installed.folder / "runs" / "small")
    assert one.losses == workshop.plain().losses and (one.folder / "export" / "config.json").exists()
    environment = json.loads((one.folder / "environment.json").read_text())
    assert environment["git_commit"] is None
    assert environment["versions"]["pretraining-recipes"] == PROJECT["project"]["version"]
    ranks = [*on_own_port(["deepspeed", "--num_gpus=2"]), "--module", "pretraining.train"]
    installed.run(*ranks, *recipe, "--output_dir", "runs/two")
    assert Run(installed.folder / "runs" / "two").losses == workshop.run("zero2", by="deepspeed").losses
    assert "committed" in installed.run("pretraining-checkpoints", "list", "runs/two")
    shapes = json.loads(installed.run("pretraining-data-prep", "--recipe", "features/proteins", "--json"))
    assert shapes["train"]["tokens"] > 0
    assert installed.files() == installed.brought


def test_plans_and_checks_need_no_checkout(installed, workshop):
    plan = ["--recipe", "124m", "--plan", "--world_size", "1", "--gpu", "H100"]
    shown = completed(["python", "train.py", *plan])
    assert installed.run("pretraining-train", *plan) == shown.stdout
    best = installed.run("pretraining-plan", "fit", "--recipe", "7b", "--world_size", "8", "--gpu", "H100")
    assert "\ndeepspeed --num_gpus=8 --module pretraining.train \\\n    --recipe 7b" in best
    doctor = ["pretraining-doctor", "--recipe", workshop.recipe, "--data_dir", workshop.data, "--json"]
    answer = json.loads(installed.run(*doctor))
    assert answer["summary"]["will_break"] == 0
    assert installed.files() == installed.brought


def test_every_help_names_what_can_be_typed(installed):
    helps = installed.run("python", "-c", HELPS, *(set(SCRIPTS) - {"pretraining-files"}))
    assert helps.count("usage: ") == len(SCRIPTS) - 1
    assert "  deepspeed --num_gpus=8 --module pretraining.train --recipe 30b\n" in helps
    assert f"{installed.packages}/pretraining/repository/accelerate_configs/zero2.yaml" in helps


@pytest.mark.parametrize("script, target", SCRIPTS.items())
def test_every_script_has_its_module(script, target):
    """In a checkout too, where `pip install --editable .` makes the scripts."""
    module, _, function = target.partition(":")
    assert (module, getattr(installation, function)) == (installation.__name__, installation.run_command)
    name = script.removeprefix("pretraining-")
    if name not in ("files", "data-prep"):
        assert find_spec(f"pretraining.{installation.MODULES.get(name, name.replace('-', '_'))}")


INCLUDE = "deepspeed --include node0@node1:0,2 --num_gpus=8"
ACCELERATE = "accelerate launch --config_file my.yaml"
TYPED = {
    "run: python data_prep.py --recipe tiny": "run: pretraining-data-prep --recipe tiny",
    "run data_prep.py before train.py": "run pretraining-data-prep before pretraining-train",
    f"{INCLUDE} train.py --recipe 30b": f"{INCLUDE} --module pretraining.train --recipe 30b",
    f"{ACCELERATE} train.py": f"{ACCELERATE} --module pretraining.train",
    "with deepspeed, as train.py does": "with deepspeed, as pretraining-train does",
    "pip install -r requirements-data.txt": "pip install -r {here}/requirements-data.txt",
    "sbatch launch/slurm.sh": "sbatch {here}/launch/slurm.sh",
    "recipes/mine.json: no such file": "recipes/mine.json: no such file",
    "/home/me/train.py: line 3": "/home/me/train.py: line 3",
    "docs/data.md": "docs/data.md",
}


@pytest.mark.parametrize("written, typed", TYPED.items())
def test_a_wheel_says_what_can_be_typed(written, typed, monkeypatch, tmp_path):
    """Files by their path; a file of the user's own that is called alike keeps its name."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "data.md").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(installation, "IS_WHEEL", True)
    said = installation.as_typed(written)
    assert said == typed.format(here=REPOSITORY) and installation.as_typed(said) == said
