"""The pipeline as a Flyte workflow: the steps of `pretraining.pipeline`, each a task with the resources of its plan.

    pyflyte run flows/pretrain.py pretrain --recipe tiny --folder "$PWD"
    pyflyte run --remote --image IMAGE flows/pretrain.py pretrain --recipe 30b --world_size 16 --nodes 2 --gpu H100 \\
        --store s3://bucket/runs

Needs flytekit and its Elastic (pip install -r requirements-flows.txt). IMAGE is the Dockerfile's with `flows` among
its EXTRAS.
A task is taken from Flyte's cache if its key is known: a digest of the texts' content and the keys that decide the
tokens, then of the parts of the recipe that decide the run.
"""

import datetime
import html
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from pathlib import Path
from typing import NamedTuple

from flytekit import Cache, Deck, FlyteContextManager, Resources, current_context, dynamic, task, workflow
from flytekit.deck.deck import DECK_FILE_NAME
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from flytekitplugins.kfpytorch import Elastic

from pretraining.api import words_of
from pretraining.data.checksums import digest_of
from pretraining.data.streaming.cache import GIGABYTES_VARIABLE
from pretraining.data.streaming.remote_data import SHARE_OF_CACHE
from pretraining.errors import UserError
from pretraining.pipeline.__main__ import parse, run_steps
from pretraining.pipeline.steps import Pipeline, Plan, Prepare, Record
from pretraining.planning.gpus import find_gpu
from pretraining.planning.memory.need import memory_need
from pretraining.planning.run_plan import build_run_plan
from pretraining.planning.setup import Setup
from pretraining.recipe import load_recipe
from pretraining.runtime.exit_codes import GAVE_UP, USER_ERROR
from pretraining.runtime.run_folder import RunFolder, results_of

FORMAT = "2"  # of the keys: another number makes every task run again
SMALL = Resources(cpu="1", mem="4Gi")  # of tasks that read and write some files
PREPARING = Resources(cpu="8", mem="32Gi")
EVALUATING_SPARE_BYTES = 8 << 30
SHOWN_EVERY_SECONDS = 60.0  # how often the training task looks for a newer page of the run, its deck
OF_ELASTIC = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_ELASTIC += ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE")
"""Variables with which Elastic makes its worker a rank. It is none: it starts the ranks of its node."""
TIMES_LONGER = 3  # how much longer than planned a run may take before Flyte ends it
ENDS = (USER_ERROR, GAVE_UP)  # exit codes after which the same task would end in the same way


class Outcome(NamedTuple):
    """What the workflow returns."""

    evaluation: str  # JSON of `python -m pretraining.evaluation`
    report: FlyteFile


def cached(*ignored: str) -> Cache:
    """Let Flyte's cache compare the input `key` alone."""
    return Cache(version=FORMAT, serialize=True, ignored_inputs=("request", *ignored))


def open_pipeline(request: str, data: FlyteDirectory | None = None, run: Path | None = None) -> Pipeline:
    """Build the pipeline that the inputs of the workflow describe, in its folder or in that of the task.

    data, run: an earlier task's results. Shards are read where they are: from a store they are streamed.
    """
    asked = json.loads(request)
    settings = list(asked["settings"])
    if asked["store"]:
        settings.append(f"checkpoints.upload={json.dumps(asked['store'])}")
    recipe = load_recipe(asked["recipe"], settings)
    place = Path(asked["folder"] or current_context().working_directory)
    if not asked["launcher"] and asked["world_size"] > 1:
        asked["launcher"] = f"deepspeed --num_gpus={asked['world_size']}"
    options = {key: asked[key] for key in ("recipe", "world_size", "restarts")}
    options |= {key: asked[key] or None for key in ("deepspeed", "launcher", "gpu", "publish")}
    options |= {"data_dir": place / "data", "output_dir": run or place / "runs" / recipe.name}
    pipeline = Pipeline(parse(words_of({**options, "set": settings})))
    pipeline.gpu = asked["gpu"] or None  # that of this machine does not count
    if data is not None:
        pipeline.options.data_dir = data.remote_source or Path(data.path)
    return pipeline


def do(pipeline: Pipeline, *names: str) -> list[dict]:
    """Run steps that are not up to date; Flyte repeats the task if another attempt can end better."""
    rows: list[dict] = []
    code = run_steps(pipeline, names, rows)
    if code in ENDS:
        raise UserError(f"{rows[-1]['step']}: {rows[-1]['error']}")
    if code:
        raise FlyteRecoverableException(f"{rows[-1]['step']}: {rows[-1]['error']} (exit code {code})")
    return rows


def keys_of(pipeline: Pipeline) -> dict[str, str]:
    """Compute what each task's result depends on, before any of them runs."""
    recipe = pipeline.recipe.to_dict()
    tokens = Prepare(pipeline).identity()
    # where checkpoints are copied to decides nothing
    run = digest_of(tokens, json.loads(json.dumps(results_of(recipe), default=str)))
    return {"prepare": tokens, "train": run, "publish": digest_of(run, pipeline.options.publish)}


def needed(pipeline: Pipeline, asked: dict) -> dict:
    """Compute requests of each node and time limit of the training task from the plan."""
    facts, gpu = Plan(pipeline).run(), find_gpu(pipeline.gpu) if pipeline.gpu else None
    nodes, world_size = asked["nodes"], pipeline.world_size
    ranks = world_size // nodes
    if ranks * nodes != world_size or (gpu and ranks > gpu.gpus_per_node):
        most = f", and a node has {gpu.gpus_per_node} {gpu.name}" if gpu else ""
        asked_for = f"world_size {world_size}, nodes {nodes}"
        raise UserError(f"{asked_for}: each node has the same number of ranks{most}")
    if nodes > 1 and not (asked["folder"] or pipeline.recipe.checkpoints.upload):
        raise UserError(f"nodes {nodes}: name a store for checkpoints, or a folder that all nodes see")
    setup = Setup(pipeline.recipe, pipeline.ds_config, world_size)
    host_bytes = ranks * memory_need(setup).host_bytes
    host_bytes += 0 if gpu else ranks * facts["memory"]["on_processor"]
    # an order over all shards needs them all on the node in the end, but none before the run begins
    cache = build_run_plan(setup).data_bytes / SHARE_OF_CACHE
    # the first node may hold whole checkpoints
    disk = facts["disk_bytes"] + facts["checkpoint_bytes"] + cache
    answer = {"mem": f"{math.ceil(host_bytes / 2**30) + 1}Gi", "cpu": str(4 * ranks)}
    answer |= {"ephemeral_storage": f"{math.ceil(disk / 2**30) + 1}Gi"}
    answer |= {"gpu": str(ranks)} if gpu else {}
    seconds = (facts["forecast"] or {}).get("seconds")
    hours = seconds and math.ceil(TIMES_LONGER * seconds / 3600)
    return {**answer, "hours": hours, "cache_gb": math.ceil(cache / 1e9)}


@task(requests=SMALL, enable_deck=True)
def plan(request: str) -> str:
    """Plan the run and name what the other tasks depend on; a run that cannot fit ends the workflow here."""
    pipeline = open_pipeline(request)
    asked, context = json.loads(request), FlyteContextManager.current_context()
    if asked["nodes"] > 1 and context.execution_state.is_local_execution():
        raise UserError("nodes: this machine is one; add --remote behind `pyflyte run`, or leave --nodes out")
    facts = {"needs": needed(pipeline, asked), "keys": keys_of(pipeline), "facts": Plan(pipeline).run()}
    Deck("plan", f"<pre>{html.escape(json.dumps(facts, indent=2))}</pre>")
    return json.dumps(facts)


@task(requests=PREPARING, cache=cached(), retries=3)
def prepare(request: str, key: str) -> FlyteDirectory:
    """Make the token shards."""
    pipeline = open_pipeline(request)
    do(pipeline, "prepare")
    return kept(request, pipeline.options.data_dir)  # its parent: what `--data_dir` takes


def on_nodes(nodes: int | str, **variables: str) -> Callable:
    """Return the decorator of the training task: Elastic gives it so many nodes, and a worker on each.

    The worker is forked, because a spawned one cannot show a deck while it runs. It starts the node's ranks under the
    supervisor, which repeats crashes and hangs, but no refusal; Elastic would repeat all three.
    """
    elastic = Elastic(nnodes=nodes, nproc_per_node=1, start_method="fork")
    # with the shared memory that NCCL and data workers need
    more = {"retries": 10, "enable_deck": True, "shared_memory": True, "environment": variables}
    return task(task_config=elastic, requests=SMALL, cache=cached("data"), **more)


# in the pods of several nodes the operator says how many they are
@on_nodes(os.environ.get("PET_NNODES", 1))
def train(request: str, data: FlyteDirectory, key: str) -> FlyteDirectory:
    """Examine the nodes and train on them, to the end; the report is this task's deck from the first steps on.

    A repeated attempt goes on from the checkpoints in `folder` or in `store`. Without either it begins anew.
    """
    is_first, nodes = os.environ["RANK"] == "0", int(os.environ["WORLD_SIZE"])
    for name in OF_ELASTIC:
        os.environ.pop(name, None)
    pipeline = open_pipeline(request, data)
    if not is_first:
        # in a folder that all nodes see, the first one keeps the record
        pipeline.record = Record(RunFolder(Path(current_context().working_directory)))
    own_launcher = json.loads(request)["launcher"] or nodes == 1
    with shown(pipeline.run.report) if is_first else nullcontext():
        for name in ("doctor", "train"):
            if not own_launcher:
                # they meet where Elastic's workers do: that store outlives every start of the ranks
                words = ["torchrun", f"--nnodes={nodes}", f"--nproc_per_node={pipeline.world_size // nodes}"]
                words += ["--rdzv_backend=c10d", f"--rdzv_endpoint={os.environ['PET_RDZV_ENDPOINT']}"]
                # torchrun alone returns 1 whatever the doctor says
                before = [sys.executable, "-m", "pretraining.supervise", "--restarts", "0", "--"]
                words = [*(before if name == "doctor" else []), *words, f"--rdzv_id={name}"]
                pipeline.options.launcher = " ".join(words)
            do(pipeline, name)
    if not is_shared(request):
        # the result of a finished run is the export, and what was logged
        aside = pipeline.run.path.with_name(f"{pipeline.run.path.name}.checkpoints")
        aside.mkdir(exist_ok=True)
        for folder in (*pipeline.run.path.glob("checkpoint-*"), *pipeline.run.path.glob("weights-*")):
            folder.rename(aside / folder.name)
    return kept(request, pipeline.run.path)


@task(requests=SMALL, cache=cached("data", "run"), retries=3)
def evaluate(request: str, data: FlyteDirectory, run: FlyteDirectory, key: str) -> str:
    """Measure the exported model."""
    pipeline = open_pipeline(request, data, Path(run.download()))
    do(pipeline, "evaluate")
    return json.dumps(pipeline.record.facts("evaluate"))


@task(requests=SMALL, cache=cached("run", "evaluation"), retries=3, enable_deck=True)
def report(request: str, run: FlyteDirectory, evaluation: str, key: str) -> FlyteFile:
    """Write the report, and show it as the task's deck."""
    pipeline = open_pipeline(request, run=Path(run.download()))
    do(pipeline, "report")
    page = pipeline.run.report
    show(page)
    Deck("evaluation", f"<pre>{html.escape(json.dumps(json.loads(evaluation), indent=2))}</pre>")
    return FlyteFile(str(page), remote_path=False) if is_shared(request) else FlyteFile(str(page))


@task(requests=SMALL, cache=cached("run", "page"), retries=3)
def publish(request: str, run: FlyteDirectory, page: FlyteFile, key: str) -> str:
    """Publish export and report."""
    pipeline = open_pipeline(request, run=Path(run.download()))
    do(pipeline, "publish")
    return json.dumps(pipeline.record.facts("publish"))


@dynamic(requests=SMALL)
def steps(request: str, planned: str) -> Outcome:
    """Start the tasks, with the resources that the plan names."""
    found, asked = json.loads(planned), json.loads(request)
    keys, needs = found["keys"], dict(found["needs"])
    hours, cache = needs.pop("hours"), {GIGABYTES_VARIABLE: str(needs.pop("cache_gb"))}
    limit = {"timeout": datetime.timedelta(hours=hours)} if hours else {}
    data = prepare(request=request, key=keys["prepare"])
    resources = Resources(**needs)
    training = on_nodes(asked["nodes"], **cache)(train.task_function)
    run = training(request=request, data=data, key=keys["train"])
    run = run.with_overrides(requests=resources, limits=resources, **limit)
    memory = math.ceil((found["facts"]["memory"]["on_processor"] + EVALUATING_SPARE_BYTES) / 2**30)
    one = Resources(cpu="4", mem=f"{memory}Gi", **({"gpu": "1"} if "gpu" in needs else {}))
    measured = evaluate(request=request, data=data, run=run, key=keys["train"])
    measured = measured.with_overrides(requests=one, limits=one)
    page = report(request=request, run=run, evaluation=measured, key=keys["train"])
    if asked["publish"]:
        publish(request=request, run=run, page=page, key=keys["publish"])
    return Outcome(evaluation=measured, report=page)


@task(requests=SMALL)
def ask(
    recipe: str,
    settings: list[str],
    deepspeed: str,
    world_size: int,
    nodes: int,
    gpu: str,
    launcher: str,
    folder: str,
    store: str,
    publish: str,
    restarts: int,
) -> str:
    """Write the inputs of the workflow as one request."""
    return json.dumps(dict(locals()))


@workflow
def pretrain(
    recipe: str,
    settings: list[str] = [],  # noqa: B006  Flyte takes a default that JSON can hold
    deepspeed: str = "",
    world_size: int = 1,
    nodes: int = 1,
    gpu: str = "",
    launcher: str = "",
    folder: str = "",
    store: str = "",
    publish: str = "",
    restarts: int = 3,
) -> Outcome:
    """Run a recipe from its texts to a report.

    Args:
        recipe: a name of recipes/, or a path in the image
        settings: as --set takes them
        deepspeed: a file of ds_configs/ over the recipe's
        world_size: GPUs of the training task, on all its nodes together
        nodes: how many; several need the cluster's training operator, and `folder` or `store`
        gpu: their kind, as H100; empty: it trains without
        launcher: what starts the ranks of a node (default: deepspeed for several, torchrun on several nodes)
        folder: a disk that all tasks see, for data/ and runs/; empty: results go through Flyte's store
        store: address to which checkpoints are copied, so that another node goes on from them
        publish: model repository, address or folder for the export
        restarts: how often a crash or hang is started again on its node
    """
    request = ask(**locals())
    return steps(request=request, planned=plan(request=request))


@contextmanager
def shown(page: Path) -> Iterator[None]:
    """Show the page of a run as the task's deck while the block runs, whenever it has been written anew."""
    over, context = threading.Event(), copy_context()

    def follow() -> None:
        sandbox = Path(FlyteContextManager.current_context().file_access.local_sandbox_dir)
        last, published = 0, set()
        while not over.wait(SHOWN_EVERY_SECONDS):
            # there is no page yet, or the disk is full
            with suppress(OSError):
                if (written := page.stat().st_mtime_ns) == last:
                    continue
                last, before = written, set(sandbox.glob(f"*/{DECK_FILE_NAME}"))
                show(page)
                Deck.publish()
                # flytekit keeps a file of each: the disk of a long run would fill
                for older in published:
                    older.unlink(missing_ok=True)
                published = set(sandbox.glob(f"*/{DECK_FILE_NAME}")) - before

    follower = threading.Thread(target=context.run, args=(follow,), daemon=True)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join()
        if page.exists():
            show(page)


def show(page: Path) -> None:
    """Make the page the task's deck `report`, in place of an older one."""
    # a page of its own: its styles and scripts are not Flyte's
    framed = html.escape(page.read_text(encoding="utf-8"))
    decks = current_context().decks
    decks[:] = [each for each in decks if each.name != "report"]
    Deck("report", f'<iframe style="width:100%;height:95vh;border:0" srcdoc="{framed}"></iframe>')


def is_shared(request: str) -> bool:
    """Say if all tasks see one folder, so that nothing is copied."""
    return bool(json.loads(request)["folder"])


def kept(request: str, folder: Path) -> FlyteDirectory:
    """Return a folder as a task's result, copied to Flyte's store unless all tasks see it."""
    options = {"remote_directory": False} if is_shared(request) else {}
    return FlyteDirectory(str(folder), **options)
