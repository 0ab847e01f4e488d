"""The pipeline as a Flyte workflow: run here end to end, then from its cache; its resources are those of the plan."""

import json
from pathlib import Path

import pytest

from pretraining.errors import UserError
from pretraining.pipeline import step
from pretraining.pipeline.__main__ import parse
from pretraining.pipeline.step import Pipeline
from pretraining.pipeline.steps import Plan
from pretraining.runtime.processes import CommandEnded
from tests.pipeline.test_pipeline import SHORT, Place, forked

flytekit = pytest.importorskip("flytekit", reason="flytekit is not installed (requirements-flows.txt)")


@pytest.fixture
def calls(monkeypatch, tmp_path) -> list[str]:
    """The scripts and modules that the steps start; Flyte's cache is this test's own."""
    import flytekit.core.local_cache as cache

    monkeypatch.setattr(cache, "CACHE_LOCATION", str(tmp_path / "cache"))
    monkeypatch.setattr(cache.LocalTaskCache, "_initialized", False)
    started: list[str] = []

    def noted(command, *arguments, **more) -> str:
        words = {Path(word).name.removesuffix(".py") for word in command}
        known = ("data_prep", "pretraining.doctor", "train", "pretraining.evaluation")
        started.append(next(name for name in known if name in words))
        if fails and started[-1] == "train":
            raise CommandEnded(1, fails.pop())
        return forked(command, *arguments, **more)

    fails: list[str] = ["the node was lost"]
    monkeypatch.setattr(step, "call", noted)
    return started


def test_a_flow_runs_once_and_then_comes_from_the_cache(workshop, tmp_path, capsys, calls, monkeypatch):
    """The first training fails: it alone is repeated, with no shared folder. The report is its task's deck."""
    from flytekit.exceptions.user import FlyteRecoverableException

    from flows.pretrain import pretrain

    pages: list[str] = []
    monkeypatch.setattr("flows.pretrain.Deck", lambda name, page: pages.append(f"{name}: {page}"))
    place = Place(tmp_path, workshop, capsys)
    asked = {"recipe": str(tmp_path / "small.json"), "settings": list(SHORT), "restarts": 0}
    with pytest.raises(FlyteRecoverableException, match="the node was lost"):
        pretrain(**asked)
    assert calls == ["data_prep", "pretraining.doctor", "train"]
    first = pretrain(**asked)
    assert calls[3:] == ["pretraining.doctor", "train", "pretraining.evaluation"]
    assert json.loads(first.evaluation)["loss"] > 0 and "<title>" in Path(first.report).read_text()
    assert any(page.startswith("report: <iframe") and "&lt;title&gt;" in page for page in pages)
    second = pretrain(**asked)
    assert second.evaluation == first.evaluation and len(calls) == 6
    # another rate, the same tokens
    pretrain(**{**asked, "settings": [*SHORT, "training.learning_rate=0.02"]})
    assert calls[6:] == ["pretraining.doctor", "train", "pretraining.evaluation"]
    assert place.texts.exists()


def planned_on(recipe: str, ranks: int, gpu: str, folder: Path) -> Pipeline:
    words = ["--recipe", recipe, "--world_size", str(ranks), "--gpu", gpu, "--output_dir", str(folder)]
    return Pipeline(parse(words))


def test_the_training_task_asks_for_what_the_plan_needs(tmp_path):
    """As the dynamic workflow would be sent to a cluster: GPUs, host memory, disk and a time limit."""
    from flytekit.configuration import Image, ImageConfig, SerializationSettings
    from flytekit.core.context_manager import ExecutionState, FlyteContextManager

    from flows import pretrain as flow

    pipeline = planned_on("30b", 8, "H200-SXM", tmp_path)
    needs = flow.needed(pipeline)
    assert needs["gpu"] == "8" and int(needs["mem"].removesuffix("Gi")) > 100 and needs["hours"] > 24
    planned = {"needs": needs, "keys": dict.fromkeys(("prepare", "train", "publish"), "k")}
    planned["facts"] = Plan(pipeline).run()
    request = json.dumps({"publish": "", "folder": ""})
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


def test_more_ranks_than_a_node_has_are_refused(tmp_path):
    from flows.pretrain import needed

    with pytest.raises(UserError, match="a task of Flyte is one node"):
        needed(planned_on("7b", 16, "H100-SXM", tmp_path))
