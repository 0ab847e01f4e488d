"""You know before you pay: a run that cannot fit is refused before anything is built, and predicted meets measured."""

import json
import sys
from dataclasses import replace

import pytest

from pretraining.errors import UserError
from pretraining.planning import step_time
from pretraining.planning.comparison import QUANTITIES, compare_run
from pretraining.planning.costs import forecast
from pretraining.planning.run_plan import Objection, Verdict, build_run_plan
from pretraining.planning.screen import as_text, full_plan
from pretraining.runtime.durable_files import append_row, read_rows, write_json
from pretraining.runtime.run_folder import RunFolder
from tests.gear.runs import REPOSITORY, execute
from tests.planning.test_planning import H200, setup

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

PLAIN = ("null", 1, "plain")
GIANT = ("model.n_embd=65536", "model.n_layer=32")
"""1.6 trillion parameters: no machine that runs tests has the memory."""


def test_a_run_that_cannot_fit_is_refused_before_anything_is_built(workshop, tmp_path):
    """One line within seconds, and no run folder."""
    finished = execute(workshop.command(tmp_path / "run", *PLAIN, settings=GIANT))
    assert finished.code == 2 and finished.stderr.count("error: ") == 1, finished.output
    line = finished.stderr.splitlines()[-1]
    assert line.startswith("error: small needs ") and "--force" in line
    assert not (tmp_path / "run").exists()


def test_a_finished_run_holds_predicted_and_measured(workshop):
    """plan.json and the end event of a run that has no GPU: what it took, and the checkpoint as predicted."""
    run = workshop.run("zero2").dir
    plan, end = json.loads(run.plan.read_text()), run.last_event("end")
    assert plan["predicted"]["peak_memory_bytes"] > 0 and plan["predicted"]["mfu"] is None
    measured = end["measured"]
    assert set(measured) == set(QUANTITIES) - {"mfu", "validation_loss"}
    assert measured["training_seconds"] > 0
    assert 0 < measured["peak_memory_bytes"] < 2 * plan["predicted"]["peak_memory_bytes"]
    row = compare_run(run.path)
    assert row["finished"] and row["tokens_per_second"]["measured"] == measured["tokens_per_second"]
    assert row["checkpoint_bytes"]["measured"] >= plan["checkpoint_bytes"]
    assert row["validation_loss"] == {"predicted": None, "measured": end["eval_loss"], "ratio": None}


def test_a_measured_run_feeds_later_plans(tmp_path, monkeypatch):
    """A kept line of benchmarks/measured_run.py takes the place of the assumed MFU, recomputation counted back in."""
    import measured_run

    run = RunFolder(tmp_path / "run")
    case = setup("7b", 8, "training.activation_checkpointing=true", way="zero3")
    plan = replace(build_run_plan(case), predicted={"mfu": 0.3})
    for path, value in (
        (run.plan, plan.to_dict()),
        (run.recipe, case.recipe.to_dict()),
        (run.environment, {"device": "NVIDIA H200"}),
    ):
        write_json(path, value)
    with pytest.raises(UserError, match="no measured MFU"):
        measured_run.line_of(run)
    run.add_event("end", measured={"mfu": 0.36})
    append_row(tmp_path / "h200.jsonl", measured_run.line_of(run))
    monkeypatch.setattr(step_time.expected_utilization, "__defaults__", (tmp_path, 1.0))
    found = forecast(case, H200)
    assert "measured" in found["utilization"]["source"] and not found["utilization"]["assumed"]
    assert found["mfu"] == pytest.approx(0.36)
    screen = " ".join(as_text(full_plan(case, H200)).split())
    assert "MFU" in screen and "measured by benchmarks/measured_run.py on NVIDIA H200" in screen
    plain = setup("7b", 8, "training.activation_checkpointing=false", way="zero3")
    assert forecast(plain, H200)["mfu"] > 0.4


def test_warnings_are_told_once_and_kept(tmp_path, capsys, monkeypatch):
    """By rank 0 on stderr, and as events at the step where the run starts; a refusal that was forced among them."""
    no, careful = Objection("too large", "--set a=1"), Objection("no clipping", "--set b=2")
    verdict = Verdict([no], [careful])
    with pytest.raises(UserError, match=r"too large; --set a=1 .*--force"):
        verdict.enforce()
    run = RunFolder(tmp_path)
    verdict.enforce(force=True).keep(run, 25)
    monkeypatch.setenv("RANK", "1")
    verdict.enforce(force=True).keep(run, 25)
    assert capsys.readouterr().err == "warning: too large; --set a=1\nwarning: no clipping; --set b=2\n"
    events = [(row["event"], row["step"], row["what"], row["remedy"]) for row in read_rows(run.events)]
    assert events == [("forced", 25, "too large", "--set a=1"), ("warning", 25, "no clipping", "--set b=2")]
