"""How a test starts a run through the real command line, and reads what the run left behind."""

import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

from pretraining.data.corpus import draw_of
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.run_folder import RunFolder
from tests.gear.forked import ForkedRanks, server

Made = TypeVar("Made")

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MARK = "PRETRAINING_TEST_PROCESS"
ANSWERS = str(Path(tempfile.gettempdir(), "pretraining-tests-models"))
"""Folder of what programs have answered about models, kept from one session of tests to the next."""
TIMEOUT_SECONDS = 900
"""Only for what would never end, as a busy machine is slow."""
LEAVING_SECONDS = 60
"""What a launcher starts beside the ranks ends a moment after it; on a busy machine the moment is longer."""
PORTS = range(20_000, 29_000)
"""Below those that the system gives to whoever asks for any."""

LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
LAUNCHED |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""Variables that a launcher sets."""

SMALL_RECIPE = {
    "description": "A GPT-2 of two layers for tests: eight sequences of 64 tokens a step, ten steps.",
    "model": {
        "model_type": "gpt2",
        "vocab_size": 512,
        "n_positions": 64,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
    },
    "data": {"name": "corpus", "tokenizer": {"train_vocab_size": 512}, "validation_share": 0.04},
    "budget": {"tokens": 5120, "tokens_per_step": 512},
    "training": {
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": 2,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        # Large enough, with clipping that is always at work, for the curve to depend on the gradients' size.
        "adam_epsilon": 0.001,
        "weight_decay": 0.1,
        "max_grad_norm": 0.25,
        "per_device_train_batch_size": 2,
        "bf16": False,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_strategy": "steps",
        "save_steps": 4,
        "report_to": "none",
        "seed": 7,
    },
    "deepspeed": "zero2",
    "monitors": {"noise_scale_steps": 2, "layer_norms_steps": 5},
    "checkpoints": {"keep_last": 2},
    "evaluation": {"prompt": "def ", "sample_tokens": 8},
    "report": {"every_seconds": None},
}
STEPS = 10

LLAMA = {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 64, "hidden_size": 64}
LLAMA |= {"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2}
ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.01}
EXPERTS = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    **ROUTED,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 16}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, **ROUTED}
GPT_OSS = {
    **LLAMA,
    "model_type": "gpt_oss",
    "head_dim": 16,
    "intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
MODELS = {"gpt2": SMALL_RECIPE["model"], "llama": LLAMA, "qwen3_moe": EXPERTS}
FAMILIES = {**MODELS, "qwen3": QWEN3, "mixtral": MIXTRAL}
OTHER_MODELS = {
    # as they are built here: their classes have a padding token of their own
    "olmo2": {**LLAMA, "model_type": "olmo2", "pad_token_id": None},
    "gemma": {**LLAMA, "model_type": "gemma", "head_dim": 16, "pad_token_id": None},
    "gpt_neox": {**{k: v for k, v in LLAMA.items() if "key_value" not in k}, "model_type": "gpt_neox"},
    "qwen2_moe": {
        **LLAMA,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 96,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}
"""Types that no formula describes."""
TOKENIZER = SimpleNamespace(bos_token_id=0, eos_token_id=0)
"""As much of one as the configuration of a model asks for."""


@dataclass(frozen=True)
class Finished:
    """A process that has ended, and the processes it left behind."""

    code: int
    stdout: str
    stderr: str
    strays: tuple[int, ...]

    @property
    def output(self) -> str:
        """Everything it said, for the message of a failed assertion."""
        return self.stdout[-3000:] + self.stderr[-6000:]

    @property
    def refusal(self) -> str:
        """The one line on stderr with which the process refused what a user had asked for."""
        assert (self.code, self.stderr.count("\n")) == (2, 1), self.output
        return self.stderr


class Started:
    """A process and all its descendants, found again by a mark in their environment."""

    def __init__(self, command: list, folder: Path = REPOSITORY, **variables: str):
        self.mark = uuid.uuid4().hex
        variables = {**environment(), **variables, MARK: self.mark}
        words = [str(word) for word in command]
        if words[0] == "forked":
            logs = Path(tempfile.mkdtemp(dir=server().pipe.parent)) / "logs"
            self.process = ForkedRanks(words[2:], int(words[1]), free_port(), folder, variables, logs)
            return
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, timeout: float = TIMEOUT_SECONDS) -> Finished:
        """Wait for the end; nothing outlives a test, whatever happens."""
        try:
            stdout, stderr = self.process.communicate(timeout=timeout)
            until = time.monotonic() + LEAVING_SECONDS
            while (strays := tuple(self.processes())) and time.monotonic() < until:
                time.sleep(0.1)
        finally:
            self.kill()
        return Finished(self.process.returncode, stdout, stderr, strays)

    def processes(self) -> list[int]:
        """Process ids that carry the mark: workers that launchers put into sessions of their own included."""
        wanted = f"{MARK}={self.mark}".encode()
        found = self.process.processes() if isinstance(self.process, ForkedRanks) else []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal sends it: to every process of the command's group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL all of them at once, as a machine that fails does."""
        while processes := self.processes():
            send_kill(processes)
            self.process.poll()
            time.sleep(0.01)
        self.process.kill()
        self.process.wait()


def environment() -> dict[str, str]:
    """The test's own environment without what an outer launcher, tracker or make may have set; offline."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "WANDB_", "ACCELERATE_", "OMP_", "PYTHONPATH")
    dropped += ("MAKE", "MFLAGS")  # a make started by `make test` would announce its folders
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    path = os.pathsep.join([str(BIN), kept.get("PATH", os.defpath)])
    # Passive threads: on a busy machine spinning ones would wait for each other's time slices.
    own = {"PATH": path, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "OMP_WAIT_POLICY": "PASSIVE"}
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        own["PYTHONPATH"] = str(REPOSITORY / "tests" / "gear" / "hidden_gpus")
    own["PRETRAINING_MODEL_CACHE"] = ANSWERS
    return {**kept, **own}


def execute(command: list, folder: Path = REPOSITORY, timeout=TIMEOUT_SECONDS, **variables: str) -> Finished:
    """Run a command to its end."""
    return Started(command, folder, **variables).finish(timeout)


def completed(command: list, folder: Path = REPOSITORY, **variables: str) -> Finished:
    """Run a command to its end, which must be a good one."""
    finished = execute(command, folder, **variables)
    assert finished.code == 0, finished.output
    return finished


def refused(finished: Finished, *fragments: str) -> str:
    """The one line of a command that was refused, with these fragments in it."""
    assert finished.code == 2, finished.output
    assert finished.stderr.startswith("error: ") and finished.stderr.count("\n") == 1, finished.stderr
    for fragment in fragments:
        assert fragment in finished.stderr
    return finished.stderr


def forked_programs() -> dict[str, str]:
    """Variables with which a real launcher, and the ranks that it starts, are forked (tests/gear/hidden_gpus).

    The launcher does all it does, without its imports' and its ranks' imports' eight seconds each.
    """
    return {"PRETRAINING_TEST_FORKS": str(server().pipe)}


LAUNCHERS = {
    "python": ("python",),
    "deepspeed": ("deepspeed", "--num_gpus={ranks}"),
    "torchrun": ("torchrun", "--nproc_per_node={ranks}"),
    # As torchrun would, without the seconds of imports; `plain` as python would.
    "forked": ("forked", "{ranks}"),
    "plain": ("forked", "0"),
    # Two processes and zero3 is what the file says; the small recipe says zero2.
    "accelerate": ("accelerate", "launch", "--config_file", "accelerate_configs/zero3.yaml"),
}


def launcher(name: str, ranks: int) -> list[str]:
    """The words before `train.py`, as a user types them."""
    return [word.format(ranks=ranks) for word in LAUNCHERS[name]]


def way(layout: str) -> tuple[str, int, str]:
    """Stage, ranks and launcher of `zero2` (two ranks), `zero3:tensor=2/4` (four) or `null` (one plain process)."""
    stage, _, ranks = layout.partition("/")
    return (stage, 1, "plain") if stage == "null" else (stage, int(ranks or 2), "forked")


def on_own_port(words: list[str]) -> list[str]:
    """A launcher's words, made to meet its workers where no other run on this machine does."""
    ports = {
        "deepspeed": f"--master_port={free_port()}",
        "torchrun": "--standalone",
        "accelerate": f"--main_process_port={free_port()}",
    }
    return [*words, ports[words[0]]] if words[0] in ports else words


def free_port() -> int:
    """A TCP port nobody listens on, which no other test has had lately: the one who asks listens seconds later."""
    with (Path(tempfile.gettempdir()) / f"pretraining-tests-port-{os.getuid()}").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        taken = int(file.read() or os.getpid())
        while not _is_free(PORTS[(taken := taken + 1) % len(PORTS)]):
            continue
        file.truncate(0)
        file.write(str(taken))
    return PORTS[taken % len(PORTS)]


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True


class Run:
    """The folder of a run, as a reader of its files sees it."""

    def __init__(self, folder: Path, finished: Finished | None = None):
        self.dir, self.folder, self.finished = RunFolder(folder), folder, finished

    @property
    def rows(self) -> list[dict]:
        return read_rows(self.dir.metrics)

    @property
    def events(self) -> list[dict]:
        return read_rows(self.dir.events)

    @property
    def samples(self) -> list[dict]:
        return read_rows(self.dir.samples)

    @property
    def training_rows(self) -> list[dict]:
        return [row for row in self.rows if "train/loss" in row]

    @property
    def validation_rows(self) -> list[dict]:
        return [row for row in self.rows if "eval/loss" in row]

    @property
    def saved_state_bytes(self) -> int:
        """Of the newest checkpoint's weights and optimizer states, without headers, random states and 8-bit tables."""
        from safetensors import safe_open

        total = 0
        for path in (self.folder / committed(self.folder)[0]).glob("*.safetensors"):
            with safe_open(path, framework="pt") as opened:
                keys = [key for key in opened.keys() if "@" in key and not key.startswith("qmap")]  # noqa: SIM118
                total += sum(opened.get_tensor(key).nbytes for key in keys)
        return total

    @property
    def losses(self) -> list[float]:
        """Training loss of every step, which the rows must hold once each and in order."""
        rows = self.training_rows
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        return [row["train/loss"] for row in rows]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("checkpoint-*"))


def made_once(path: Path, make: Callable[[], Made]) -> Made:
    """What `make` returns: made by whichever of the session's processes asks first, kept at `path` for the others.

    What failed is not tried again: the others fail with the same words.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    failed = path.with_suffix(".failed")
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            assert not failed.exists(), f"{path.stem} failed before:\n{failed.read_text()}"
            try:
                path.write_bytes(pickle.dumps(make()))
            except Exception as error:
                failed.write_text(f"{type(error).__name__}: {error}")
                raise
        return pickle.loads(path.read_bytes())


class Workshop:
    """One small corpus, prepared once, and every distinct run made once, whichever process of the tests asks."""

    def __init__(self, folder: Path):
        self.folder, self.data = folder, folder / "data"
        self.recipe = folder / "small.json"
        _write_corpus(folder / "corpus")
        values = {
            **SMALL_RECIPE,
            "data": {**SMALL_RECIPE["data"], "sources": [{"path": str(folder / "corpus")}]},
        }
        self.recipe.write_text(json.dumps(values))
        prepared = completed([sys.executable, "data_prep.py", *self.options("--json")])
        self.summary = json.loads(prepared.stdout)
        values["training"]["per_device_eval_batch_size"] = _awkward_batch(self.num_validation_blocks)
        self.recipe.write_text(json.dumps(values))

    @property
    def num_validation_blocks(self) -> int:
        return (self.summary["validation"]["tokens"] - 1) // SMALL_RECIPE["model"]["n_positions"]

    def options(self, *more) -> list[str]:
        """The options that every command on the small recipe takes."""
        return ["--recipe", str(self.recipe), "--data_dir", str(self.data), *map(str, more)]

    def command(self, output: Path, stage="zero2", ranks=2, by="forked", settings=(), more=()) -> list[str]:
        """`<launcher> train.py` on the small recipe, whose own stage is zero2."""
        return self.typed(launcher(by, ranks), [*choices(stage, settings), *more], output)

    def typed(self, words: list[str], options: list[str], output: Path) -> list[str]:
        """The command of these launcher's words and these options of train.py."""
        return [*on_own_port(words), "train.py", *self.options("--output_dir", output, *options)]

    def run(self, stage="zero2", ranks=2, by="forked", settings=()) -> Run:
        """The finished run of these choices; made at the first call, shared by all tests."""
        return self.run_typed(launcher(by, ranks), choices(stage, settings))

    def run_typed(self, words: list[str], options: list[str]) -> Run:
        """The finished run of a command; made at the first call, shared by all tests."""
        name = hashlib.blake2b(repr((words, options)).encode(), digest_size=8).hexdigest()
        output = self.folder / "runs" / name

        def make() -> Run:
            # one launcher's interpreters are fresh ones: those of the run that most tests compare with
            forks = {} if words[0] == "deepspeed" else forked_programs()
            return Run(output, completed(self.typed(words, options, output), **forks))

        return made_once(output.with_suffix(".run"), make)

    def continued(self, run: Run, output: Path, stage="null", ranks=1, by="plain", settings=()) -> Run:
        """A copy of a run, as a kill after its checkpoint at 8 of 10 steps would have left it, continued to its end."""
        shutil.copytree(run.folder, output, ignore=shutil.ignore_patterns(f"checkpoint-{STEPS}", "export"))
        return Run(output, completed(self.command(output, stage, ranks, by, settings)))

    def plain(self, settings=()) -> Run:
        """One plain process without DeepSpeed: what every other run is compared with."""
        return self.run("null", 1, "plain", settings)

    def examined(self) -> dict:
        """What the doctor says of two ranks under the real `deepspeed`, with the small recipe; asked once."""
        run = self.folder / "examined"

        def examine() -> dict:
            words = [*on_own_port(launcher("deepspeed", 2)), "--module", "pretraining.doctor"]
            finished = execute([*words, *self.options("--output_dir", run, "--json")], **forked_programs())
            assert finished.code == 0 and not finished.strays and not run.exists(), finished.output
            return {**answer_of(finished.stdout), "stderr": finished.stderr}

        return made_once(self.folder / "examined.doctor", examine)


def answer_of(output: str) -> dict:
    """The JSON object that rank 0 printed, whatever launchers print around it."""
    return json.JSONDecoder().raw_decode(output[output.index("{\n") :])[0]


def choices(stage: str, settings=()) -> list[str]:
    """The options of train.py that choose a stage other than the recipe's, and change values."""
    stage_words = [] if stage == SMALL_RECIPE["deepspeed"] else ["--deepspeed", stage]
    return [*stage_words, *(word for setting in settings for word in ("--set", setting))]


def looped_model(folder: Path) -> tuple[str, ...]:
    """Settings of a model of one's own, each of whose two blocks is called twice in a pass; its file is in `folder`."""
    own = (REPOSITORY / "recipes" / "features" / "files" / "own_model.py").read_text()
    once = "for layer in self.layers:"
    assert own.count(once) == 1
    (file := folder / "looped.py").write_text(own.replace(once, "for layer in (*self.layers, *self.layers):"))
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    return f'extensions=["{file}"]', section_of({"model_type": "parallel", **sizes})


def section_of(model: dict, **keys) -> str:
    """The setting of a model section with these keys changed."""
    return f"model={json.dumps({**model, **keys})}"


def _write_corpus(folder: Path) -> None:
    """Forty modules of the standard library, of 2 to 8 KB; at least one of them is for validation."""
    folder.mkdir(parents=True)
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    chosen = [path for path in modules if 2_000 < path.stat().st_size < 8_000][:40]
    texts = {path.stem: path.read_bytes() for path in chosen}
    last, share = chosen[-1].stem, SMALL_RECIPE["data"]["validation_share"]
    # which are, their text alone decides, and each release of Python has other texts
    while min(map(draw_of, texts.values())) >= share:
        texts[last] += b"#\n"
    for name, text in texts.items():
        (folder / f"{name}.txt").write_bytes(text)


def _awkward_batch(num_blocks: int) -> int:
    """A batch size that leaves the last batch short and two ranks with unequal numbers of batches."""
    return next(size for size in range(16, 80) if num_blocks % size and -(-num_blocks // size) % 2)


def start_and_kill(command: list[str], reached: Callable[[], bool], **variables: str) -> None:
    """Start a run and SIGKILL all its processes as soon as `reached()`: within a millisecond those known by then."""
    started, known, looked_at = Started(command, **variables), [], 0.0
    try:
        while started.process.poll() is None and not reached():
            if time.monotonic() - looked_at > 2:
                known, looked_at = started.processes(), time.monotonic()
            time.sleep(0.002)
        assert started.process.poll() is None, "the run ended before it could be killed"
        send_kill(known)
    finally:
        started.kill()


def send_kill(processes: list[int]) -> None:
    """SIGKILL to each that is still there."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def committed(folder: Path) -> list[str]:
    """Names of the checkpoints that are complete, newest first."""
    steps = [int(path.parent.name.partition("-")[2]) for path in folder.glob("checkpoint-*/committed.json")]
    return [f"checkpoint-{step}" for step in sorted(steps, reverse=True)]


def without_packages(folder: Path, *names: str) -> dict[str, str]:
    """Environment in which Python does not find these installed packages."""
    (folder / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find_spec = PathFinder.find_spec\n"
        "PathFinder.find_spec = classmethod(lambda cls, name, path=None, target=None:\n"
        f"    None if name.partition('.')[0] in {names!r} else find_spec(name, path, target))\n"
    )
    return {"PYTHONPATH": str(folder)}


def contents(folder: Path) -> dict[str, tuple]:
    """{file: (bytes, time of the last change)}."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(f.relative_to(folder)): (f.read_bytes(), f.stat().st_mtime_ns) for f in files}


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {name: content for name, (content, _) in contents(folder).items()}
