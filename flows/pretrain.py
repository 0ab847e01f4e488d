"""The pipeline as a Flyte workflow: the steps of `pretraining.pipeline`, each a task with the resources of its plan.

    pyflyte run flows/pretrain.py pretrain --recipe tiny --folder "$PWD"
    pyflyte run --remote --image IMAGE flows/pretrain.py pretrain --recipe 30b --world_size 8 --gpu H100 \\
        --store s3://bucket/runs

Needs flytekit (pip install -r requirements-flows.txt). IMAGE is that of the Dockerfile with `flows` among its EXTRAS.
A task is taken from Flyte's cache if its key is known: a digest of the texts' content and the keys that decide the
tokens, then of the parts of the recipe that decide the run.
"""

import datetime
import html
import json
import math
from pathlib import Path
from typing import NamedTuple

from flytekit import Cache, Deck, Resources, current_context, dynamic, task, workflow
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from pretraining.data.checksums import digest_of
from pretraining.errors import UserError
from pretraining.pipeline.__main__ import parse, run_steps
from pretraining.pipeline.step import Pipeline
from pretraining.pipeline.steps import Plan, Prepare
from pretraining.planning.gpus import find_gpu
from pretraining.planning.run_plan import build_run_plan
from pretraining.planning.setup import Setup
from pretraining.recipe import load_recipe
from pretraining.runtime.exit_codes import GAVE_UP, USER_ERROR
from pretraining.runtime.run_folder import results_of

FORMAT = "1"
"""Of the keys: another number makes every task run again."""
SMALL = Resources(cpu="1", mem="4Gi")
"""Of tasks that read and write some files."""
PREPARING = Resources(cpu="8", mem="32Gi")
EVALUATING_SPARE_BYTES = 8 << 30
TIMES_LONGER = 3
"""How much longer than planned a run may take before Flyte ends it."""
ENDS = (USER_ERROR, GAVE_UP)
"""Exit codes after which the same task would end in the same way."""


class Outcome(NamedTuple):
    """What the workflow returns."""

    evaluation: str
    """JSON of `python -m pretraining.evaluation`."""
    report: FlyteFile


def cached(*ignored: str) -> Cache:
    """Let Flyte's cache compare the input `key` alone."""
    return Cache(version=FORMAT, serialize=True, ignored_inputs=("request", *ignored))


def open_pipeline(request: str, data: Path | None = None, run: Path | None = None) -> Pipeline:
    """Build the pipeline that the inputs of the workflow describe, in its folder or in that of the task.

    data, run: where an earlier task's results are.
    """
    asked = json.loads(request)
    settings = list(asked["settings"])
    if asked["store"]:
        settings.append(f"checkpoints.upload={json.dumps(asked['store'])}")
    recipe = load_recipe(asked["recipe"], settings)
    place = Path(asked["folder"] or current_context().working_directory)
    words = ["--recipe", asked["recipe"], *(word for text in settings for word in ("--set", text))]
    words += ["--data_dir", str(place / "data"), "--output_dir", str(run or place / "runs" / recipe.name)]
    words += ["--world_size", str(asked["world_size"]), "--restarts", str(asked["restarts"])]
    if not asked["launcher"] and asked["world_size"] > 1:
        asked["launcher"] = f"deepspeed --num_gpus={asked['world_size']}"
    for option in ("deepspeed", "launcher", "gpu", "publish"):
        words += [f"--{option}", asked[option]] if asked[option] else []
    pipeline = Pipeline(parse(words))
    pipeline.gpu = asked["gpu"] or None  # that of this machine does not count
    if data is not None and data != pipeline.data_folder:
        # a task of a cluster gets a copy, under a name of Flyte's
        pipeline.data_folder.parent.mkdir(parents=True, exist_ok=True)
        pipeline.data_folder.unlink(missing_ok=True)
        pipeline.data_folder.symlink_to(data)
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


def needed(pipeline: Pipeline) -> dict:
    """Compute requests and time limit of the training task from the plan."""
    facts, gpu = Plan(pipeline).run(), find_gpu(pipeline.gpu) if pipeline.gpu else None
    ranks, memory = pipeline.world_size, facts["memory"]
    if gpu and ranks > gpu.gpus_per_node:
        raise UserError(
            f"world_size {ranks}: a task of Flyte is one node, and a node has {gpu.gpus_per_node} {gpu.name}; "
            "submit several nodes with launch/"
        )
    host_bytes = memory["host_node_bytes"] + (0 if gpu else ranks * memory["on_processor"])
    # token shards are copied to the node
    disk = facts["disk_bytes"] + facts["checkpoint_bytes"]
    plan = build_run_plan(Setup(pipeline.recipe, pipeline.ds_config, ranks))
    answer = {"mem": f"{math.ceil(host_bytes / 2**30) + 1}Gi", "cpu": str(4 * ranks)}
    answer |= {"ephemeral_storage": f"{math.ceil((disk + plan.data_bytes) / 2**30) + 1}Gi"}
    answer |= {"gpu": str(ranks)} if gpu else {}
    seconds = (facts["forecast"] or {}).get("seconds")
    return {**answer, "hours": seconds and math.ceil(TIMES_LONGER * seconds / 3600)}


@task(requests=SMALL, enable_deck=True)
def plan(request: str) -> str:
    """Plan the run and name what the other tasks depend on; a run that cannot fit ends the workflow here."""
    pipeline = open_pipeline(request)
    facts = {"needs": needed(pipeline), "keys": keys_of(pipeline), "facts": Plan(pipeline).run()}
    Deck("plan", f"<pre>{html.escape(json.dumps(facts, indent=2))}</pre>")
    return json.dumps(facts)


@task(requests=PREPARING, cache=cached(), retries=3)
def prepare(request: str, key: str) -> FlyteDirectory:
    """Make the token shards."""
    pipeline = open_pipeline(request)
    do(pipeline, "prepare")
    return kept(request, pipeline.data_folder)


@task(requests=SMALL, cache=cached("data"), retries=10)
def train(request: str, data: FlyteDirectory, key: str) -> FlyteDirectory:
    """Examine the node and train on it, to the end.

    A repeated attempt goes on from the checkpoints in `folder` or in `store`. Without either it begins anew.
    """
    pipeline = open_pipeline(request, Path(data.download()))
    do(pipeline, "doctor", "train")
    return kept(
        request, without_checkpoints(pipeline.run.path) if not is_shared(request) else pipeline.run.path
    )


@task(requests=SMALL, cache=cached("data", "run"), retries=3)
def evaluate(request: str, data: FlyteDirectory, run: FlyteDirectory, key: str) -> str:
    """Measure the exported model."""
    pipeline = open_pipeline(request, Path(data.download()), Path(run.download()))
    do(pipeline, "evaluate")
    return json.dumps(pipeline.record.facts("evaluate"))


@task(requests=SMALL, cache=cached("run", "evaluation"), retries=3, enable_deck=True)
def report(request: str, run: FlyteDirectory, evaluation: str, key: str) -> FlyteFile:
    """Write the report, and show it as the task's deck."""
    pipeline = open_pipeline(request, run=Path(run.download()))
    do(pipeline, "report")
    page = pipeline.run.report
    # a page of its own: its styles and scripts are not Flyte's
    framed = html.escape(page.read_text(encoding="utf-8"))
    Deck("report", f'<iframe style="width:100%;height:95vh;border:0" srcdoc="{framed}"></iframe>')
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
    hours = needs.pop("hours")
    limit = {"timeout": datetime.timedelta(hours=hours)} if hours else {}
    data = prepare(request=request, key=keys["prepare"])
    resources = Resources(**needs)
    run = train(request=request, data=data, key=keys["train"]).with_overrides(
        requests=resources, limits=resources, **limit
    )
    memory = math.ceil((found["facts"]["memory"]["on_processor"] + EVALUATING_SPARE_BYTES) / 2**30)
    one = Resources(cpu="4", mem=f"{memory}Gi", **({"gpu": "1"} if "gpu" in needs else {}))
    measured = evaluate(request=request, data=data, run=run, key=keys["train"]).with_overrides(
        requests=one, limits=one
    )
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
        world_size: GPUs of the training task, which is one node
        gpu: their kind, as H100; empty: it trains without
        launcher: what starts the ranks (default: deepspeed for several)
        folder: a disk that all tasks see, for data/ and runs/; empty: results go through Flyte's store
        store: address to which checkpoints are copied, so that another node goes on from them
        publish: model repository, address or folder for the export
        restarts: how often a crash or hang is started again on its node
    """
    request = ask(
        recipe=recipe,
        settings=settings,
        deepspeed=deepspeed,
        world_size=world_size,
        gpu=gpu,
        launcher=launcher,
        folder=folder,
        store=store,
        publish=publish,
        restarts=restarts,
    )
    return steps(request=request, planned=plan(request=request))


def is_shared(request: str) -> bool:
    """Say if all tasks see one folder, so that nothing is copied."""
    return bool(json.loads(request)["folder"])


def kept(request: str, folder: Path) -> FlyteDirectory:
    """Return a folder as a task's result, copied to Flyte's store unless all tasks see it."""
    return (
        FlyteDirectory(str(folder), remote_directory=False)
        if is_shared(request)
        else FlyteDirectory(str(folder))
    )


def without_checkpoints(run: Path) -> Path:
    """Move the checkpoints of a finished run aside: its result is the export, and what was logged."""
    aside = run.with_name(f"{run.name}.checkpoints")
    aside.mkdir(exist_ok=True)
    for folder in (*run.glob("checkpoint-*"), *run.glob("weights-*")):
        folder.rename(aside / folder.name)
    return run
