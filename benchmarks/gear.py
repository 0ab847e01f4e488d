"""What benchmarks share: the line of results, commands and ranks, this machine's texts, small runs and short trainings.

Nothing heavy is imported before it is needed.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

RESULTS = REPOSITORY / "benchmarks" / "results"
STAGES = ("zero0", "zero1", "zero2", "zero3")
OFFLOADED = ("zero2_offload", "zero3_offload")
SPLIT = {
    "sequence": ("sequence=2", "sequence=4"),
    "tensor": ("tensor=2", "tensor=4", "tensor=2,sequence=2"),
    "expert": ("expert=2", "expert=4"),
    "hpz": ("hpz=2",),
}
"""Degrees of a ds_config, by kind."""
COMPARED = ("monitors.noise_scale_steps=null", "monitors.layer_norms_steps=null", "evaluation.prompt=")
COMPARED += ("training.eval_steps=10", "training.save_steps=1", "checkpoints.keep_every=1")
"""No more than is compared, and a checkpoint of every step."""
SPECIAL = "<|endoftext|>"
SUFFIXES = (".py", ".md", ".txt", ".rst")
TEXT_FOLDERS = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "/usr/share/doc")
TOKENIZER = SimpleNamespace(bos_token_id=0, eos_token_id=0)
"""As much of one as a model's configuration asks for."""
POLL_SECONDS = 0.05


def parser_of(description: str) -> argparse.ArgumentParser:
    """Return an argument parser with the module's docstring as help, and `--keep`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true", help="append to benchmarks/results/<device>.jsonl")
    return parser


def chosen(options: argparse.Namespace, *without: str) -> dict:
    """Return the options as values of a line."""
    return {key: value for key, value in vars(options).items() if key not in ("keep", *without)}


def record(benchmark: str, values: dict, keep: bool) -> None:
    """Print {"benchmark", values..., "when", "environment"} as one line."""
    from pretraining.runtime.durable_files import append_row
    from pretraining.runtime.run_folder import describe_environment

    # the GPU's name, or `CPU <architecture> <cores> cores`
    device = f"CPU {platform.machine()} {len(os.sched_getaffinity(0))} cores"
    if Path("/proc/driver/nvidia/gpus").exists():
        import torch

        device = torch.cuda.get_device_name()
    environment = describe_environment(device, int(os.environ.get("WORLD_SIZE", "1")))
    del environment["world_size"]
    row = {"benchmark": benchmark, **values, "when": time.strftime("%Y-%m-%d"), "environment": environment}
    print(json.dumps(row), flush=True)
    if keep:
        append_row(RESULTS / f"{device.lower().replace(' ', '-')}.jsonl", row)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of one call; on a GPU, until it has done all of it."""
    began = time.perf_counter()
    work()
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def seconds_in_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way in each round; they take turns, there and back, so that a drift favours none."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 else reversed(ways):
            seconds[way].append(timed(ways[way]))
    return seconds


def middle(values: Iterable[float], digits: int = 4) -> float | None:
    """Return the median, rounded; None of nothing."""
    listed = list(values)
    return round(statistics.median(listed), digits) if listed else None


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


# Commands, ranks and their memory


class Ended(NamedTuple):
    """A command that has ended as it should."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    cpu_seconds: float
    """Of the command and of what it has started and waited for, user and system."""
    peak_bytes: int
    """The most that it and its descendants held at once (proportional set size); 0 if it was not watched."""


def run_command(*words, code: int | None = 0, watched: bool = False, **variables: str) -> Ended:
    """Run a command in the repository to its end.

    code: which it has to end with, or this process ends with its last words; None: any.
    """
    with tempfile.TemporaryFile("w+") as errors:
        before, began = os.times(), time.perf_counter()
        process = subprocess.Popen(
            [str(word) for word in words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **variables},
            cwd=REPOSITORY,
        )
        held = (lambda: sum(map(proportional_bytes, descendants(process.pid)))) if watched else None
        with sampled_peak(held, POLL_SECONDS) as peak:
            output = process.communicate()[0]
            seconds, after = time.perf_counter() - began, os.times()
        errors.seek(0)
        said = errors.read()
    if code not in (None, process.returncode):
        sys.exit(f"{' '.join(map(str, words))}: ended with {process.returncode}: {said[-3000:]}")
    used = after.children_user - before.children_user + after.children_system - before.children_system
    return Ended(process.returncode, output, said, seconds, used, peak[0])


@contextmanager
def sampled_peak(held: Callable[[], int] | None, every_seconds: float) -> Iterator[list[int]]:
    """Yield a list whose one number becomes the most that `held` has returned while it is open; None: 0."""
    peak, ended = [held() if held else 0], threading.Event()

    def sample() -> None:
        while not ended.wait(every_seconds):
            peak[0] = max(peak[0], held())

    sampler = threading.Thread(target=sample)
    if held:
        sampler.start()
    yield peak
    ended.set()
    if held:
        sampler.join()


def last_json(output: str) -> dict:
    """Return the JSON object of the last line."""
    return json.loads(output.splitlines()[-1])


def in_fresh_process(function: Callable[..., dict], *words) -> dict:
    """Call a function of the benchmark with texts, in a process of its own; return its values and `peak_bytes`."""
    script = Path(sys.argv[0]).resolve()
    program = f"import json, sys; sys.path.insert(0, {str(script.parent)!r}); import gear, {script.stem} as script; "
    program += f"found = script.{function.__name__}(*sys.argv[1:]); "
    # not ru_maxrss: it begins with the size of the process that started this one
    program += "print(json.dumps({**found, 'peak_bytes': gear.memory_line('VmHWM')}))"
    return last_json(run_command(sys.executable, "-c", program, *words).stdout)


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """Return the value of a JSON file, which is made if it is not there."""
    if not path.exists():
        path.write_text(json.dumps(make()))
    return json.loads(path.read_text())


def choices(values: dict) -> list[str]:
    """Return the words of a command that change a recipe: {dotted key: value}."""
    return [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def on_each_core(work: Callable[[Any], Any], things: Iterable) -> list:
    """Return what `work` finds of each thing; as many at a time as there are cores, what it starts on one of them."""
    cores = sorted(os.sched_getaffinity(0))
    # what a thread starts has the thread's core: it computes with as many threads as it has cores
    with ThreadPoolExecutor(len(cores), initializer=lambda: os.sched_setaffinity(0, {cores.pop()})) as pinned:
        return list(pinned.map(work, things))


def as_ranks(ranks: int, *words) -> list[str]:
    """Return the command that starts the benchmark again on so many ranks, with its own arguments and `words`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, str(Path(sys.argv[0]).resolve()), *sys.argv[1:], *map(str, words)]


def is_rank() -> bool:
    """Return whether a launcher started this process."""
    return "RANK" in os.environ


def leave_at_once() -> None:
    """End a rank without what torch and DeepSpeed would still do at an interpreter's end."""
    from pretraining.training.ranks import leave_ranks

    leave_ranks()
    sys.stdout.flush()
    os._exit(0)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    try:
        lists = [(thread / "children").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [int(child) for each in lists for child in each.split()]


def descendants(pid: int) -> list[int]:
    """Return the process and all below it."""
    return [pid, *(below for child in children(pid) for below in descendants(child))]


def proportional_bytes(pid: int | str = "self") -> int:
    """Return a process's memory; a page that several processes map counts once in their sum. 0: it is gone."""
    return memory_line("Pss", f"/proc/{pid}/smaps_rollup")


def memory_line(key: str, path: str = "/proc/self/status") -> int:
    """Return the bytes of one line of a file of /proc; 0 where the file is gone."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)


# Texts and data


def machine_texts(suffixes=SUFFIXES, folders=TEXT_FOLDERS) -> Iterator[str]:
    """Yield every different text of the standard library, the installed packages and /usr/share/doc."""
    seen = set()
    for path in (path for folder in folders for path in sorted(Path(folder).rglob("*"))):
        if path.suffix not in suffixes or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text and SPECIAL not in text and hash(text) not in seen:
            seen.add(hash(text))
            yield text


def write_corpus(folder: Path, wanted_bytes: int, num_files: int, texts: list[str] | None = None) -> int:
    """Write corpus-<n>.jsonl in `folder`, filled in turn; return the bytes of text in them.

    texts: of this machine, if not given. Where there are fewer than is wanted, they come again with the number of the
    round in front.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [(folder / f"corpus-{number}.jsonl").open("w", encoding="utf-8") for number in range(num_files)]
    again = (f"{n}\n{text}" if n else text for n in count() for text in texts or machine_texts())
    num_bytes = 0
    for number, text in enumerate(again):
        files[number % num_files].write(json.dumps({"text": text}) + "\n")
        num_bytes += len(text.encode())
        if num_bytes >= wanted_bytes:
            break
    for file in files:
        file.close()
    return num_bytes


def library_modules() -> list[str]:
    """Return the texts of the standard library's own modules."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def repository_tokenizer(folder: Path, vocab_size: int) -> Path:
    """Train a byte-level BPE on the repository's own text."""
    from pretraining.data.tokenizer import train_tokenizer

    paths = sorted(path for room in ("pretraining", "tests") for path in (REPOSITORY / room).rglob("*.py"))
    train_tokenizer((path.read_text(encoding="utf-8") for path in paths), vocab_size, folder)
    return folder


def tiny_recipe(folder: Path, data: dict) -> Path:
    """Write recipe `tiny` with another data section, for tokenizers of at most 8,192 ids."""
    values = json.loads((REPOSITORY / "recipes" / "features" / "gpt2.json").read_text())
    del values["$schema"]
    values["model"]["vocab_size"] = 8192
    values["data"] = {"name": "corpus", **data}
    path = folder / "recipe.json"
    path.write_text(json.dumps(values))
    return path


def prepare_data(*words) -> tuple[dict, Ended]:
    """Run data_prep.py; return its summary, and what it took."""
    command = [sys.executable, "data_prep.py", *words, "--json"]
    ended = run_command(*command, watched=True, HF_HUB_OFFLINE="1")
    return json.loads(ended.stdout), ended


def digests(folder: Path) -> dict[str, str]:
    """Return {file: digest} of all below a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# Small runs of train.py (tests/gear/runs.py), and a few steps of its Trainer


@contextmanager
def small_runs() -> Iterator:
    """Yield a Workshop: the small recipe, its corpus, and its runs, in a folder that goes afterwards."""
    from tests.gear.runs import Workshop

    with tempfile.TemporaryDirectory(prefix="small_runs_") as folder:
        yield Workshop(Path(folder))


def models() -> dict[str, dict]:
    """Return small shapes, with heads and experts that four ranks can split."""
    from tests.gear.runs import FAMILIES

    names = ("llama", "qwen3", "mixtral", "qwen3_moe")
    return {name: {**FAMILIES[name], "num_key_value_heads": 4} for name in names}


def refusal(recipe: Path, settings: tuple[str, ...], layout: str, ranks: int) -> str | None:
    """Return why the checks of a run refuse a layout, or None."""
    from pretraining.errors import UserError
    from pretraining.recipe.refusals import load_recipe_and_ds_config

    try:
        load_recipe_and_ds_config(str(recipe), settings, layout, ranks)
    except UserError as error:
        return str(error)
    return None


def trainable(recipe: Path, settings: tuple[str, ...]) -> list[tuple[str, int]]:
    """List the layouts (ds_config with degrees, number of ranks) that the checks of a run accept."""
    degrees = ["", *(f":{each}" for kind in SPLIT.values() for each in kind), ":expert=2,sequence=2"]
    layouts = ["null", *(f"{stage}{each}" for stage in (*STAGES, *OFFLOADED) for each in degrees)]
    pairs = ((layout, ranks) for layout in layouts for ranks in (1, 2, 4))
    return [(layout, ranks) for layout, ranks in pairs if refusal(recipe, settings, layout, ranks) is None]


def llama_of(width: int, layers: int) -> dict:
    """Return the model section of a Llama with heads of 64, two of them to a key."""
    return {
        "model_type": "llama",
        "vocab_size": 16384,
        "max_position_embeddings": 256,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 128,
        "tie_word_embeddings": False,
    }


def short_recipe(name: str, values: dict, way: str | None, tokens_per_step: int, steps: int) -> tuple:
    """Return a recipe of so many steps that neither validates nor saves, and its ds_config or None.

    values: {dotted key: value}, over the recipe's; way: a ds_config over the recipe's.
    """
    from pretraining.ds_config import load_ds_config
    from pretraining.recipe import load_recipe

    values = {"training.eval_strategy": "no", "training.save_strategy": "no", **values}
    values |= {"budget.tokens_per_step": tokens_per_step, "budget.tokens": tokens_per_step * steps}
    recipe = load_recipe(name, [f"{key}={json.dumps(value)}" for key, value in values.items()], way)
    return recipe, load_ds_config(recipe.deepspeed) if recipe.deepspeed else None


def short_trainer(recipe, config: dict | None, folder: Path, accumulation: int, steps: int, callback):
    """Return a Trainer ready to run `steps` steps on one block of zeros; joins the process group.

    The recipe's own arguments, model, Trainer and ds_config; nothing is compiled unless `speed.compile` names it.
    """
    import torch

    from pretraining.ds_config import degrees_of
    from pretraining.model.build import build_model
    from pretraining.model.loss import build_loss
    from pretraining.runtime.process_group import rank_groups
    from pretraining.training.arguments import build_arguments
    from pretraining.training.ranks import join_ranks
    from pretraining.training.trainer import PretrainingTrainer, RunParts

    join_ranks()
    arguments = build_arguments(recipe, config, folder, accumulation)
    groups = rank_groups(degrees_of(config))
    speed = replace(recipe.speed, compile=recipe.speed.compile.replace("auto", "none"))
    weights = recipe.weights
    built = build_model(recipe.model, TOKENIZER, arguments, speed=speed, weights=weights, groups=groups)
    block = torch.zeros(recipe.sequence_length, dtype=torch.long)
    return PretrainingTrainer(
        recipe,
        built,
        arguments,
        loss=build_loss(built, recipe.resolved_loss, groups),
        train_dataset=[{"input_ids": block, "labels": block}] * (recipe.samples_per_step * steps),
        parts=RunParts(callbacks=[callback], groups=groups),
    )


def on_forked_ranks(ranks: int, measure: Callable[[Path], dict], name: str) -> list[dict]:
    """Fork the ranks, after the imports, and collect what `measure` returns in each; it gets a folder of them all.

    name: of the case, for the message if it fails.
    """
    import deepspeed  # noqa: F401
    import torch

    from tests.gear.runs import free_port

    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as made:
        folder, children = Path(made), []
        for rank in range(ranks):
            child = os.fork()
            if child:
                children.append(child)
                continue
            log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
            torch.set_num_threads(1)
            try:
                (folder / str(rank)).write_text(json.dumps(measure(folder)))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"{name} failed:\n{(folder / 'log').read_text()[-3000:]}")
        return [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]


# train.py's own steps, measured inside one run


class Shape(NamedTuple):
    """What is trained, and how many optimizer steps make a block on a CPU."""

    recipe: str
    overrides: dict
    block_steps: int


SHAPES = {
    # 4 layers, width 128: a step of some 60 ms on two CPU cores.
    "small": Shape(
        "features/gpt2",
        {"model.n_layer": 4, "model.n_embd": 128, "model.n_head": 4, "model.n_positions": 128},
        20,
    ),
    "tiny": Shape("tiny", {}, 5),
    # The GPT-2 small shape on the tokens of the tiny corpus; one sequence a rank and step.
    "124m": Shape("124m", {"model.n_positions": 1024}, 1),
    "1.5b": Shape("1.5b", {}, 1),
    "7b": Shape("7b", {"data.sequence_length": 2048}, 1),
}


def step_parser(description: str, pairs: int) -> argparse.ArgumentParser:
    """Return a parser of what is trained."""
    parser = parser_of(description)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--deepspeed", default="null", help="a ds_config, or null")
    parser.add_argument("--micro_batch", type=int, default=4, help="sequences of a rank's step")
    parser.add_argument("--pairs", type=int, default=pairs, help="measured blocks of either kind")
    return parser


def train_blocks(options: argparse.Namespace, block_steps: int, blocks: int, callback, changes: dict) -> None:
    """Run train.py's own `main` for so many blocks of steps, `callback` before all others and no progress bar.

    Nothing is logged, evaluated or saved inside the steps, except by `changes` of the recipe. The callback is given the
    run's `speed`, its SpeedMeter.
    """
    import train
    from pretraining.recipe import load_recipe
    from pretraining.training.metrics import ProgressCallback
    from pretraining.training.monitors import RunMonitors

    shape = SHAPES[options.shape]
    tiny = json.loads((REPOSITORY / "recipes" / "features" / "gpt2.json").read_text())
    settings = [f"{key}={json.dumps(value)}" for key, value in shape.overrides.items()]
    length = load_recipe(shape.recipe, settings).sequence_length
    per_step, num_steps = options.micro_batch * length * options.processes, block_steps * blocks
    output = Path(tempfile.gettempdir()) / f"train_step_{os.getppid()}"
    shutil.rmtree(output, ignore_errors=True)
    values = {
        **shape.overrides,
        **{f"data.{key}": value for key, value in tiny["data"].items()},
        "budget.tokens_per_step": per_step,
        "budget.tokens": per_step * num_steps,
        "training.per_device_train_batch_size": options.micro_batch,
        "training.dataloader_num_workers": 0,
        "training.bf16": False,
        "training.logging_steps": num_steps,
        "training.logging_first_step": False,
        "training.eval_strategy": "no",
        "training.save_strategy": "no",
        "training.activation_checkpointing": False,
        "training.report_to": "none",
        "report.every_seconds": None,
        "evaluation.max_validation_tokens": length,
        **changes,
    }
    callbacks = RunMonitors.callbacks

    def with_ours(watch: RunMonitors, saves) -> list:
        callback.speed = watch.speed
        return [callback, *(c for c in callbacks(watch, saves) if not isinstance(c, ProgressCallback))]

    RunMonitors.callbacks = with_ours
    words = ["--recipe", shape.recipe, "--deepspeed", options.deepspeed, "--output_dir", str(output)]
    sys.argv = ["train.py", *words, *choices(values)]
    train.main()
