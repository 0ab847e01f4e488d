"""The Dockerfile: what can be checked without an engine, and its steps in a root made of Debian's packages."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from pretraining.command_line import parse_train_arguments
from tests.gear.runs import REPOSITORY, completed, execute

TEXT = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
IGNORED = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
FAKE_NVCC = '#!/bin/sh\necho "Cuda compilation tools, release {release}, V{release}.0"\n'
"""All that a step asks of the base image."""


def instructions() -> list[tuple[str, str]]:
    """(instruction, its words in one line), in order, without comments."""
    lines = [line for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(name, words.strip()) for name, _, words in (line.partition(" ") for line in whole)]


STEPS = instructions()


def of(name: str) -> list[str]:
    return [words for each, words in STEPS if each == name]


def defaults() -> dict[str, str]:
    """The build arguments, with their values."""
    return dict(shlex.split(words)[0].split("=", 1) for words in of("ARG"))


def sent(name: str) -> bool:
    """Whether a path of the repository is part of what is built from."""
    kept = [pattern[1:] for pattern in IGNORED if pattern.startswith("!")]
    return any(fnmatch(name, pattern) or name.startswith(f"{pattern}/") for pattern in kept)


def labels() -> dict[str, str]:
    return dict(word.split("=", 1) for words in of("LABEL") for word in shlex.split(words))


def test_what_is_copied_is_there_and_sent():
    """The pins, and all that pyproject.toml makes the wheel of; nothing of tests, data and runs."""
    assert IGNORED[1] == "*"
    for words in of("COPY"):
        *sources, _ = [word for word in words.split() if not word.startswith("--")]
        for source in sources if "--from=" not in words and sources != ["."] else ():
            found = [path.name for path in REPOSITORY.glob(source)]
            assert found and all(map(sent, found)), source
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    metadata = PROJECT["project"]
    needed = ["pyproject.toml", metadata["readme"], *metadata["license-files"], *wheel["force-include"]]
    assert not [name for name in [*needed, *wheel["only-include"]] if not sent(name)]
    assert not [name for name in ("tests", "data", "runs", ".git", ".venv", "benchmarks") if sent(name)]


def test_pins_and_versions_are_those_of_the_repository():
    """The base by its digest; one version on label, image and launch files; extras that have a file."""
    base, version = defaults()["BASE"], PROJECT["project"]["version"]
    tag, _, digest = base.partition("@")
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
    assert labels()["org.opencontainers.image.base.name"] == f"docker.io/{tag}"
    assert labels()["org.opencontainers.image.version"] == version
    assert labels()["org.opencontainers.image.licenses"] == PROJECT["project"]["license"]
    assert all((REPOSITORY / f"requirements-{extra}.txt").is_file() for extra in defaults()["EXTRAS"].split())
    assert f"docker build --tag pretraining:{version} ." in TEXT
    for name in ("launch/kubernetes/jobset.yaml", "launch/skypilot.yaml", "docs/fleet.md"):
        text = (REPOSITORY / name).read_text(encoding="utf-8")
        images = re.findall(r"registry\.example\.com/pretraining:\S+?(?=[\s`]|$)", text)
        assert images and set(images) == {f"registry.example.com/pretraining:{version}"}, name


def test_the_image_is_no_roots_and_takes_a_command():
    """Kubernetes sees it by the number; the command that it has by itself is one of the wheel."""
    assert STEPS[-1][0] == "CMD" and of("USER") == ["10001:10001"]
    after = STEPS[STEPS.index(("USER", "10001:10001")) :]
    assert "RUN" not in dict(after) and "COPY" not in dict(after)
    (command,), entry = (ast.literal_eval(of(name)[0]) for name in ("CMD", "ENTRYPOINT"))
    assert command in PROJECT["project"]["scripts"] and entry == ["tini", "--"]
    jobs = yaml.safe_load_all((REPOSITORY / "launch" / "kubernetes" / "jobset.yaml").read_text())
    pod = next(jobs)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True}
    assert pod["containers"][0]["workingDir"] == of("WORKDIR")[0]


def test_the_command_that_it_shows_trains():
    """With shared memory, and a place for what is compiled at its first use."""
    shown = re.sub(r" \\\n#", " ", TEXT).partition("docker run ")[2].partition("\n")[0]
    docker, _, started = shown.partition(f"pretraining:{PROJECT['project']['version']} ")
    assert "--gpus all" in docker and "--shm-size=" in docker and f":{variables()['HOME']} " in docker
    launcher, _, options = started.partition(" --module pretraining.train ")
    assert launcher == "deepspeed --num_gpus=8" and parse_train_arguments(options.split()).recipe == "30b"


def variables() -> dict[str, str]:
    """What the last stage sets; PATH is its own."""
    found = dict(word.split("=", 1) for words in of("ENV") for word in shlex.split(words))
    return {name: value for name, value in found.items() if name != "PATH"}


def test_shells_and_python_can_read_every_step():
    for step in of("RUN"):
        assert execute(["sh", "-n", "-c", step]).code == 0, step
        words = shlex.split(step)
        if words[:2] == ["python", "-c"]:
            compile(words[2], "Dockerfile", "exec")


class Root:
    """A folder in which the steps of the stages are executed, as `docker build` would on Debian's packages."""

    def __init__(self, folder: Path):
        self.folder, self.environment, self.place = folder, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, "/"
        completed(["debootstrap", "--variant=minbase", "bookworm", folder])
        nvcc = folder / "usr" / "local" / "cuda" / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        release = ".".join(re.search(r":(\d+)\.(\d+)", defaults()["BASE"]).groups())
        nvcc.write_text(FAKE_NVCC.format(release=release))
        nvcc.chmod(0o755)
        # how this machine reaches packages
        shutil.copy("/etc/resolv.conf", folder / "etc" / "resolv.conf")
        shutil.copytree("/etc/apt/apt.conf.d", folder / "etc" / "apt" / "apt.conf.d", dirs_exist_ok=True)
        self.reached = {key: os.environ[key] for key in ("PIP_INDEX_URL", "PIP_PROXY") if key in os.environ}
        if certificates := os.environ.get("PIP_CERT"):
            shutil.copy(certificates, folder / "etc" / "reached.pem")
            self.reached |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE"), "/etc/reached.pem")

    def run(self, words: list[str], user: str = "0:0") -> subprocess.CompletedProcess:
        variables = [f"{key}={value}" for key, value in {**self.reached, **self.environment}.items()]
        inside = ["chroot", f"--userspec={user}", self.folder, "env", "--ignore-environment", *variables]
        inside += ["sh", "-c", f"cd {self.place} && exec {shlex.join(words)}"]
        # mounts that end with the command: what removes the folder must not find this machine's devices in it
        mounts = 'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec "$@"'
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mounts, self.folder, *inside]
        return subprocess.run(command, capture_output=True, text=True, timeout=3600)

    def do(self, name: str, words: str) -> None:
        """Carry out one instruction."""
        words = re.sub(r"\$\{PATH\}", self.environment["PATH"], words)
        if name == "RUN":
            done = self.run(["sh", "-c", words])
            assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        elif name in ("ENV", "ARG"):
            self.environment |= dict(word.split("=", 1) for word in shlex.split(words))
        elif name == "WORKDIR":
            self.place = words
        elif name == "COPY" and "--from=" not in words:  # the stages share this folder
            *sources, target = words.split()
            place = self.folder / target.strip("/")
            place.mkdir(parents=True, exist_ok=True)
            names = completed(["git", "ls-files"]).stdout.splitlines() if sources == ["."] else sources
            sources = [name for name in names if sent(name) or "*" in name]
            for found in (path for name in sources for path in REPOSITORY.glob(name)):
                copied = place / found.relative_to(REPOSITORY)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(found, copied)


@pytest.mark.skipif(
    not (shutil.which("debootstrap") and os.environ.get("DOCKERFILE_TESTS")),
    reason="ten minutes and 12 GB; DOCKERFILE_TESTS=1 runs it as root, after: apt-get install debootstrap",
)
@pytest.mark.timeout(7200)
def test_the_steps_make_an_image_that_trains(tmp_path):
    """All of them, with the packages of registries; then, as the image's user: a plan, text to token shards, a run."""
    root = Root(tmp_path / "root")
    for name, words in STEPS:
        root.do(name, words)
    entry = ast.literal_eval(of("ENTRYPOINT")[0])

    def typed(*words: str) -> str:
        done = root.run([*entry, *words], of("USER")[0])
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    plan = ["--recipe", "124m", "--plan", "--world_size", "8", "--gpu", "H100"]
    assert typed("pretraining-train", *plan).startswith("plan of 124m")
    few = ["--recipe", "tiny", "--limit_tokens", "20000"]
    typed("pretraining-data-prep", *few)
    typed("deepspeed", "--num_gpus=2", "--module", "pretraining.train", *few)
    (run,) = (root.folder / "workspace" / "runs").iterdir()
    assert (run / "export" / "model.safetensors").is_file() and run.stat().st_uid == 10001
