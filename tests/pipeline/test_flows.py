"""The pipeline as a Flyte workflow: run here end to end, then from its cache; its resources are those of the plan."""

import html
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import s3fs

from pretraining.errors import UserError
from pretraining.pipeline import steps
from pretraining.pipeline.__main__ import parse
from pretraining.pipeline.steps import Pipeline, Plan
from pretraining.runtime.processes import CommandEnded
from tests.gear.object_store import BUCKET, s3_server, use_here
from tests.gear.runs import Started, forked_programs, free_port
from tests.pipeline.test_pipeline import SHORT, Place, forked
from tests.reporting.test_reporting import embedded

# What its rich logger says at any later garbage collection would stand in the stdout of another test.
os.environ["FLYTE_SDK_RICH_TRACEBACKS"] = "0"
flytekit = pytest.importorskip("flytekit", reason="flytekit is not installed (requirements-flows.txt)")

WAITS = """
import time
from pathlib import Path
from transformers import TrainerCallback
from pretraining import extend

@extend.callback
class Waits(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        until = time.monotonic() + 60
        while state.global_step == 1 and not Path({seen!r}).exists() and time.monotonic() < until:
            time.sleep(0.05)
"""
"""An extension: the run waits after its first step until its curve was seen."""


@pytest.fixture
def calls(monkeypatch, tmp_path) -> Callable[[], list[str]]:
    """What the steps have started, in this process and in Elastic's workers; Flyte's cache is this test's own."""
    import flytekit.core.local_cache as cache

    monkeypatch.setattr(cache, "CACHE_LOCATION", str(tmp_path / "cache"))
    monkeypatch.setattr(cache.LocalTaskCache, "_initialized", False)
    started, lost = tmp_path / "started", tmp_path / "lost"

    def noted(command, *arguments, **more) -> str:
        words = {Path(word).name.removesuffix(".py") for word in command}
        known = ("data_prep", "pretraining.doctor", "train", "pretraining.evaluation")
        name = next(name for name in known if name in words)
        with started.open("a") as file:
            file.write(f"{name}\n")
        if name == "train" and not lost.exists():
            lost.touch()
            raise CommandEnded(1, "the node was lost")
        return forked(command, *arguments, **more)

    monkeypatch.setattr(steps, "call", noted)
    return lambda: started.read_text().splitlines() if started.exists() else []


@pytest.fixture
def sandbox(monkeypatch, tmp_path) -> Iterator[Path]:
    """Flyte's folder on this machine; what tasks hand on goes through a store."""
    from flytekit.configuration import DataConfig
    from flytekit.core.context_manager import FlyteContextManager
    from flytekit.core.data_persistence import FileAccessProvider

    monkeypatch.setenv("PRETRAINING_DATA_CACHE", str(tmp_path / "shards"))
    with s3_server(tmp_path / "log") as address:
        use_here(monkeypatch, address)
        files = FileAccessProvider(str(tmp_path / "sandbox"), f"s3://{BUCKET}/flyte", DataConfig.auto())
        context = FlyteContextManager.current_context().with_file_access(files)
        with FlyteContextManager.with_context(context):
            yield Path(files.local_sandbox_dir)


def test_a_flow_runs_once_and_then_comes_from_the_cache(
    workshop, tmp_path, capsys, calls, monkeypatch, sandbox
):
    """Two ranks under Elastic stream their shards, and their deck shows the curve before they end.

    The first training fails: it alone is repeated, with no shared folder. The report is its task's deck too.
    """
    from flytekit import Deck
    from flytekit.exceptions.user import FlyteRecoverableException
    from flytekit.types.directory import FlyteDirectory

    from flows import pretrain as flow

    seen, publish = tmp_path / "seen.html", Deck.publish

    def published() -> None:
        publish()
        page = max(sandbox.glob("*/deck.html"), key=lambda path: path.stat().st_mtime_ns)
        if not seen.exists() and page_of(page)["runs"][0]["num_rows"]:
            shutil.copy(page, seen)

    def kept(request: str, folder: Path) -> FlyteDirectory:
        # flytekit uploads nothing where it runs on one machine
        return FlyteDirectory(str(folder), remote_directory=f"s3://{BUCKET}/{folder.name}{len(calls())}")

    monkeypatch.setattr(Deck, "publish", staticmethod(published))
    monkeypatch.setattr(flow, "kept", kept)
    monkeypatch.setattr(flow, "SHOWN_EVERY_SECONDS", 0.1)
    place = Place(tmp_path, workshop, capsys)
    (tmp_path / "waits.py").write_text(WAITS.format(seen=str(seen)))
    settings = [*SHORT, 'extensions=["waits.py"]', "report.every_seconds=0.1"]
    asked = {"recipe": str(tmp_path / "small.json"), "settings": settings, "world_size": 2, "restarts": 0}
    with pytest.raises(FlyteRecoverableException, match="the node was lost"):
        flow.pretrain(**asked)
    assert calls() == ["data_prep", "pretraining.doctor", "train"]
    first = flow.pretrain(**asked)
    assert calls()[3:] == ["pretraining.doctor", "train", "pretraining.evaluation"]
    assert json.loads(first.evaluation)["loss"] > 0 and "<title>" in Path(first.report).read_text()
    # while it ran, and at the end of the two tasks
    live = page_of(seen)
    assert live["every_seconds"] == 0.1
    assert (live["runs"][0]["state"], live["runs"][0]["num_rows"]) == ("running", 1)
    decks = [page_of(path) for path in sandbox.glob("*/deck.html") if "srcdoc=" in path.read_text()]
    assert {deck["runs"][0]["state"] for deck in decks} == {"finished"} and len(decks) > 1
    # the shards that were prepared are the only ones in folders of tasks: none was copied
    places = Path(flytekit.current_context().working_directory).parent
    made = {path.parents[1] for path in (*places.rglob("*.arrow"), *sandbox.rglob("*.arrow"))}
    assert len(made) == 1 and list((tmp_path / "shards").glob("*/*.arrow"))
    second = flow.pretrain(**asked)
    assert second.evaluation == first.evaluation and len(calls()) == 6
    # another rate, the same tokens
    flow.pretrain(**{**asked, "settings": [*settings, "training.learning_rate=0.02"], "world_size": 1})
    assert calls()[6:] == ["pretraining.doctor", "train", "pretraining.evaluation"]
    assert place.texts.exists()


def page_of(deck: Path) -> dict:
    """The data of the report that a deck's file shows."""
    return embedded(html.unescape(deck.read_text().partition('srcdoc="')[2].partition('"')[0]))


def test_two_pods_train_one_run_without_a_shared_disk(workshop, tmp_path, monkeypatch):
    """Elastic's first worker has the result, and its deck is in the store; the other node gives nothing back."""
    with s3_server(tmp_path / "log") as address:
        use_here(monkeypatch, address)
        asked = {"recipe": str(workshop.recipe), "settings": list(SHORT), "store": f"s3://{BUCKET}/runs"}
        asked |= {"world_size": 2, "nodes": 2, "restarts": 0, "folder": ""}
        asked |= dict.fromkeys(("deepspeed", "gpu", "launcher", "publish"), "")
        asked["settings"] += ["report.every_seconds=0.1"]
        command = [sys.executable, "-m", "tests.gear.pods", f"s3://{BUCKET}/meta"]
        command += [json.dumps(asked), workshop.data]
        variables = {"PET_NNODES": "2:2", "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}"}
        variables |= {"FLYTE_INTERNAL_EXECUTION_ID": "pods", "TMPDIR": str(tmp_path), **forked_programs()}
        # one machine plays both, and its name leads to itself: torchrun counts nodes in the order of addresses
        places = ({"GLOO_SOCKET_IFNAME": "lo", "PET_LOCAL_ADDR": f"127.0.0.{number}"} for number in (1, 2))
        pods = [Started(command, **variables, **place) for place in places]
        first, other = [pod.finish() for pod in pods]
        assert (first.code, other.code) == (0, 0), first.output + other.output
        run = Path(first.stdout.rpartition("run: ")[2].strip())
        deck = tmp_path / "deck.html"
        deck.write_bytes(s3fs.S3FileSystem().cat(f"{BUCKET}/meta/deck.html"))
    assert json.loads((run / "plan.json").read_text())["world_size"] == 2 and (run / "export").is_dir()
    assert "run: " not in other.stdout and page_of(deck)["runs"][0]["state"] == "finished"


def planned_on(recipe: str, ranks: int, gpu: str, folder: Path) -> Pipeline:
    words = ["--recipe", recipe, "--world_size", str(ranks), "--gpu", gpu, "--output_dir", str(folder)]
    return Pipeline(parse(words))


def test_the_training_task_asks_for_what_the_plan_needs(tmp_path):
    """As the workflow is sent to a cluster: GPUs, host memory and disk of each of two nodes, a time limit."""
    from flytekit.configuration import Image, ImageConfig, SerializationSettings
    from flytekit.core.context_manager import ExecutionState, FlyteContextManager

    from flows import pretrain as flow

    pipeline, place = planned_on("30b", 16, "H200-SXM", tmp_path), {"nodes": 2, "folder": "/shared"}
    needs = flow.needed(pipeline, place)
    assert needs["gpu"] == "8" and int(needs["mem"].removesuffix("Gi")) > 100 and needs["hours"] > 24
    planned = {"needs": needs, "keys": dict.fromkeys(("prepare", "train", "publish"), "k")}
    planned["facts"] = Plan(pipeline).run()
    request = json.dumps({"publish": "", **place})
    settings = SerializationSettings(
        image_config=ImageConfig(default_image=Image("i", "i", "1")), project="p", domain="d", version="v"
    )
    with FlyteContextManager.with_context(
        FlyteContextManager.current_context().with_serialization_settings(settings)
    ) as context:
        state = context.new_execution_state().with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
        with FlyteContextManager.with_context(context.with_execution_state(state)) as context:
            spec = flow.steps.compile_into_workflow(
                context, flow.steps._task_function, request=request, planned=json.dumps(planned)
            )
    nodes = {node.task_node.reference_id.name.rpartition(".")[2]: node for node in spec.nodes}
    assert list(nodes) == ["prepare", "train", "evaluate", "report"]
    asked = {each.name: each.value for each in nodes["train"].task_node.overrides.resources.requests}
    assert needs["gpu"] in asked.values() and needs["mem"] in asked.values()
    assert nodes["train"].metadata.timeout.total_seconds() == 3600 * needs["hours"]
    (job,) = [task.custom for task in spec.tasks if task.type == "pytorch"]
    assert job["workerReplicas"]["replicas"] == 2 and job["elasticConfig"]["nprocPerNode"] == 1


@pytest.mark.parametrize(
    ("ranks", "nodes", "message"),
    [(16, 1, "a node has 8 H100-SXM"), (16, 3, "the same number of ranks"), (16, 2, "name a store")],
)
def test_ranks_that_the_nodes_cannot_have_are_refused(tmp_path, ranks, nodes, message):
    from flows.pretrain import needed

    with pytest.raises(UserError, match=message):
        needed(planned_on("7b", ranks, "H100-SXM", tmp_path), {"nodes": nodes, "folder": ""})


def test_several_nodes_are_refused_on_one_machine(calls):
    """Elastic would wait for the others."""
    from flows.pretrain import pretrain

    with pytest.raises(UserError, match="add --remote"):
        pretrain(recipe="tiny", world_size=2, nodes=2)
    assert not calls()
