"""The report: every spike kept, every text escaped, bad files told, words that hold on curves whose answer is known."""

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pretraining.planning.comparison import compare_run
from pretraining.recipe import load_recipe
from pretraining.reporting import live
from pretraining.reporting.__main__ import main
from pretraining.reporting.analysis import (
    analyze,
    forecast,
    half_fit_error,
    report_end,
    sentences,
    spike_rows,
    track_record_beside,
)
from pretraining.reporting.live import LAST, live_report, set_priority
from pretraining.reporting.page import (
    bucket_means,
    kept_points,
    names_of,
    page_payload,
    page_text,
    run_payload,
    write_page,
)
from pretraining.reporting.published import read_curve
from pretraining.reporting.run_record import RunRecord
from pretraining.runtime.durable_files import append_row, read_rows, write_json
from pretraining.runtime.heartbeat import Heartbeat, gone_ranks, is_gone, read_place
from pretraining.runtime.run_folder import RunFolder, unix_seconds, utc_now
from tests.gear.finished_data import refusal
from tests.gear.nodes import wait_until
from tests.gear.runs import REPOSITORY, Started, choices, execute

SCRIPT = "<script>alert(1)</script></script><!-- \u2028 &amp; \"'"


def power_law(tokens, floor=2.0, scale=3.0, exponent=0.4):
    return floor + scale * (tokens / 1e6) ** -exponent


def made_run(folder, losses, finished=False, events=(), budget=None, started=True, **more) -> RunFolder:
    """A run folder of these logged losses, 1,000 tokens and a tenth of a second a step."""
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    budget = {"tokens": budget or 1000 * len(losses), "tokens_per_step": 1000}
    write_json(run.recipe, {"name": folder.name, "budget": budget, **more})
    if started:
        run.add_event("start", checkpoint=None)
    speed = {"throughput/step_seconds": 0.1, "throughput/tokens_per_second": 10_000}
    write_rows(run, losses, time.time(), lambda k: speed | {"train/learning_rate": min(k, 20) / 20})
    for event in events:
        append_row(run.events, event)
    if finished:
        run.add_event("end", eval_loss=losses[-1])
    return run


def write_rows(run: RunFolder, losses, began: float, more=lambda k: {}, seconds_a_row: float = 0.1) -> None:
    """Logged losses at these times."""
    rows = [{"step": k, "train/loss": loss, "train/tokens": 1000 * k} for k, loss in enumerate(losses, 1)]
    for k, row in enumerate(rows, 1):
        row |= {"time": began + k * seconds_a_row, **more(k)}
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_published_curve_lies_beneath_the_run_with_the_gap_at_each_validation(tmp_path):
    """By tokens: compared at the run's own validations, exact at a published point, straight in the log between."""
    tokens = [0, 100_000, 400_000, 900_000]
    curve = {"run": "theirs, 2024", "curves": {"eval/loss": {"tokens": tokens, "values": [9, 5, 4, 3.5]}}}
    write_json(tmp_path / "curve.json", curve)
    run = made_run(tmp_path / "run", [6.0] * 1000, published={"curve": str(tmp_path / "curve.json")})
    for step, loss in ((100, 5.25), (200, 4.25), (400, 3.9), (1000, 3.0)):
        append_row(run.metrics, {"step": step, "time": 0, "train/tokens": 1000 * step, "eval/loss": loss})
    shown = payload_of(run)["published"]
    assert shown["run"] == "theirs, 2024" and shown["series"]["eval/loss"]["step"] == [0, 100, 400, 900]
    assert [row[0] for row in shown["rows"]] == [100_000, 200_000, 400_000]  # none behind its end
    assert [row[3] for row in shown["rows"]] == pytest.approx([0.25, -0.25, -0.1])
    said = "The published run (theirs, 2024) had a validation loss of 4.0000 after 400,000 tokens"
    assert f"{said}; this one is 0.1000 below it." in analyzed(run)
    # a curve that has gone, or is none, is no reason to have no report
    series = ('{"tokens": [1], "values": []}', '{"tokens": ["1"], "values": [1]}', "3")
    for text in ("{}", *(f'{{"run": "x", "curves": {{"eval/loss": {each}}}}}' for each in series)):
        (tmp_path / "other.json").write_text(text)
        read_curve.cache_clear()
        assert read_curve(tmp_path / "other.json") is None and read_curve(tmp_path / "gone.json") is None


def test_a_short_run_says_why_it_has_no_gap_to_the_published_one_and_in_what_it_is_another(tmp_path):
    """In `analyze` and on the page, each in one line, until a published point is near."""
    small = ["model.num_hidden_layers=2", "model.vocab_size=50432", "data.tokenizer=EleutherAI/gpt-neox-20b"]
    recipes = [load_recipe("modded-nanogpt-muon", overrides).to_dict() for overrides in ([], small)]
    theirs, own = "modded-nanogpt, track 3, result 36", {"name", "budget"}
    told = [{key: recipe[key] for key in recipe.keys() - own} for recipe in recipes]
    whole, cut = (made_run(tmp_path / str(n), [6.0] * 82, **each) for n, each in enumerate(told))
    near = "no published point is near its 82,000 tokens yet; the first is at 65,536,000 tokens"
    no_gap = f"This run has no gap to the published one ({theirs}): {near}."
    shown = payload_of(whole)["published"]
    assert shown["notes"] == [no_gap] and shown["rows"] == [] and shown["is_comparable"]
    other = f"The published run ({theirs}) is not comparable: model, data.tokenizer."
    shown = payload_of(cut)["published"]
    assert shown["notes"] == [other, no_gap] and not shown["is_comparable"]
    assert no_gap in analyzed(whole) and {other, no_gap} <= set(analyzed(cut))
    # beyond the first point, but not validated yet
    row = {"step": 100_000, "time": 0, "train/tokens": 100_000_000, "train/loss": 4.5}
    append_row(whole.metrics, row)
    said = payload_of(whole)["published"]["notes"]
    assert "logged nothing to compare between 65,536,000 and 1,703,936,000 tokens" in said[0]
    append_row(whole.metrics, {**row, "eval/loss": 4.25})
    shown = payload_of(whole)["published"]
    assert shown["notes"] == [] and len(shown["rows"]) == 1


def noisy_law(num_rows=2000, seed=0, **law):
    tokens = 1000.0 * np.arange(1, num_rows + 1)
    return power_law(tokens, **law) + np.random.default_rng(seed).normal(0, 0.02, num_rows)


def payload_of(run: RunFolder, **choices) -> dict:
    """What the page shows of a run."""
    return run_payload(RunRecord(run.path), **choices)


def analyzed(run: RunFolder) -> list[str]:
    return sentences(analyze(RunRecord(run.path)))


def embedded(page: str) -> dict:
    """The data that the page's script reads."""
    return json.loads(page.partition('id="data">')[2].partition("</script>")[0])


@pytest.mark.parametrize("num_rows", [10, 3_000, 200_000])
def test_no_spike_is_lost_by_drawing_fewer_points(num_rows):
    """Single rows, high, low or not finite, first and last: all of them among the points that are kept."""
    values = np.random.default_rng(1).normal(3.0, 0.01, num_rows)
    odd = {num_rows // 3: 9.0, num_rows // 2: 0.1, num_rows * 4 // 5: math.nan}
    for row, value in odd.items():
        values[row] = value
    kept = kept_points(values, 1000)
    assert {0, num_rows - 1, *odd} <= set(kept.tolist())
    assert len(kept) <= max(1100, num_rows if num_rows <= 1000 else 0)
    _, means, counts = bucket_means(values, 500)
    assert counts.sum() == num_rows - 1
    assert np.average(means, weights=counts) == pytest.approx(np.nanmean(values))


def test_a_page_shows_text_as_text(tmp_path):
    """Names, descriptions, samples and events that hold markup leave the page's structure alone."""
    event = {"event": SCRIPT, "step": 3, "x": SCRIPT}
    run = made_run(tmp_path / "run", noisy_law(50), description=SCRIPT, events=[event])
    append_row(run.samples, {"step": 40, "prompt": SCRIPT, "text": SCRIPT})
    run.console_log.write_text(SCRIPT, encoding="utf-8")
    page = page_text(page_payload([payload_of(run)], None), SCRIPT)
    plain = page_text(page_payload([], None), "x")
    for tag in ("<script", "</script"):
        assert page.count(tag) == plain.count(tag)
    (shown,) = embedded(page)["runs"]
    assert shown["samples"] == {"prompts": [SCRIPT], "steps": [[40, SCRIPT]]}
    assert shown["description"] == shown["console"] == shown["events"][1]["event"] == SCRIPT
    assert "innerHTML" not in page and "http-equiv" in page and "default-src 'none'" in page


def test_marks_stand_where_the_events_happened(tmp_path):
    """By their step, their checkpoint or their time; a spike that nobody told of is found in the curve."""
    losses = noisy_law(400)
    losses[250] = 9.0
    events = [{"event": "resume", "checkpoint": "checkpoint-120"}]
    events += [{"event": "rollback", "step": 300, "to": 280}]
    events += [{"event": "brand_new_kind", "step": 310, "level": "warn"}]
    run = made_run(tmp_path / "run", losses, events=events)
    (run.checkpoint(380)).mkdir()
    write_json(run.checkpoint(380) / "committed.json", {})
    payload = payload_of(run)
    found = {(mark["kind"], mark["level"]): mark["step"] for mark in payload["marks"]}
    assert found[("resume", "note")] == 120 and found[("rollback", "bad")] == 300
    assert found[("brand_new_kind", "warn")] == 310 and found[("checkpoint", "good")] == 380
    assert found[("spike", "bad")] == 251
    assert next(mark["tokens"] for mark in payload["marks"] if mark["step"] == 300) == 300_000


def test_a_run_has_come_as_far_as_its_newest_row_or_event(tmp_path, capsys):
    """Stopped between two logged rows: one step in the state, the bar, the sentences and the marks."""
    moments = [f"2001-01-01T00:00:{second:02}Z" for second in (0, 5, 6, 9)]
    run = made_run(tmp_path / "run", [], budget=100_000, started=False)
    for step in (1, 10, 20):
        row = {"time": unix_seconds(moments[0]) + step / 100, "throughput/budget_share": step / 100}
        append_row(run.metrics, {"step": step, "train/loss": 3.0, "train/tokens": 1000 * step, **row})
    for moment, kind in zip(moments, ("start", "stopped", "warning", "upload_failed"), strict=True):
        append_row(run.events, {"time": moment, "event": kind, **({"step": 25} if kind == "stopped" else {})})
    payload = payload_of(run)
    assert payload["at_step"] == 25 and payload["budget_share"] == pytest.approx(0.25)
    assert (payload["last_place"]["step"], payload["last_place"]["tokens"]) == (25, 25_000)
    assert [(mark["step"], mark["tokens"]) for mark in payload["marks"][1:]] == [(25, 25_000)] * 3
    main(["analyze", str(run.path)])
    assert "25% of its tokens are spent" in capsys.readouterr().out
    append_row(run.events, {"time": moments[3], "event": "resume", "checkpoint": "checkpoint-20"})
    append_row(run.events, {"time": moments[3], "event": "change_accepted"})
    record = RunRecord(run.path)
    assert record.event_steps == [0, 25, 25, 25, 20, 20] and record.newest_step == 20


def test_half_written_and_broken_lines_are_passed_over(tmp_path):
    """The last run died in the middle of a line: read up to it; what another start appends counts again."""
    run = made_run(tmp_path / "run", [5.0, 4.0, math.nan])
    with run.metrics.open("a") as file:
        file.write('{"step": 4, "train/lo')
    record = RunRecord(run.path)
    assert len(record.metrics) == 3 and math.isnan(record.metrics.last("train/loss"))
    with run.metrics.open("a") as file:
        file.write('\n[1]\n{"step": NaN}\n{"step": 5, "train/loss": 3.0, "eval_loss": 3.5}\n')
    record.refresh()
    assert (len(record.metrics), record.metrics.broken_lines) == (4, 3)
    assert record.metrics.last("eval/loss") == 3.5, "rows from before the groups are read too"
    run.metrics.with_suffix(".new").write_text('{"step": 1, "train/loss": 7.0}\n')
    run.metrics.with_suffix(".new").replace(run.metrics)
    assert len(record.refresh().metrics) == 1, "a resumed run writes the file anew"
    assert run_payload(record)["num_rows"] == 1


def test_rows_that_a_rollback_undid_go_though_the_new_file_looks_like_the_old_one(tmp_path):
    """The inode of a file that is gone comes again; by it, and with more rows than before, an open page mixed both."""
    run = made_run(tmp_path / "run", [5.0, 4.0, 3.0])
    record, inode = RunRecord(run.path), run.metrics.stat().st_ino
    lines = run.metrics.read_text().splitlines(keepends=True)
    again = [line.replace("3.0", "3.5") for line in lines[2:]]
    run.metrics.write_text("".join([*lines[:2], *again, '{"step": 4, "train/loss": 2.5}\n']))
    assert run.metrics.stat().st_ino == inode
    _, losses = record.refresh().metrics.column("train/loss")
    assert losses.tolist() == [5.0, 4.0, 3.5, 2.5]


BAD_WORDS = [["{}/nowhere"], ["{}/empty"], ["analyze", "{}/empty"], ["{}/a", "{}/b"], ["csv", "{}/a", "{}/b"]]
BAD_WORDS += [["{}/a", "--output", each] for each in ("", "{}/b", "{}/kept")] + [["--serve={}/nowhere"]]


@pytest.mark.parametrize("words", BAD_WORDS)
def test_bad_folders_cost_one_line(tmp_path, words):
    """No such folder, no metrics, nowhere to write two runs to."""
    for name in ("empty", "a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "kept").write_text("of a user")
    (tmp_path / "a" / "events.jsonl").touch()
    refusal(main, [word.format(tmp_path) for word in words])
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "empty", "events.jsonl", "kept"]


def test_two_writers_of_a_page_wait_for_each_other(tmp_path):
    """The run writes it while a user asks for it: each finds a page of one piece, and none fails."""
    page, letters = tmp_path / "report.html", "abcd"
    texts = [letter * 3_000_000 for letter in letters]

    def write(text: str) -> None:
        for _ in range(5):
            write_page(page, text)
            assert page.read_text() in texts

    with ThreadPoolExecutor(len(texts)) as writers:
        list(writers.map(write, texts))
    assert list(tmp_path.iterdir()) == [page]


def test_a_power_law_is_found_again():
    """Planted floor, scale and exponent; the planted end lies in the interval, which is no wider than it must be."""
    tokens = np.linspace(1e4, 1e6, 1500)
    inside = 0
    for seed in range(10):
        losses = power_law(tokens) + np.random.default_rng(seed).normal(0, 0.03, len(tokens))
        losses[700] = 50.0  # a spike decides nothing
        made, truth = forecast(tokens, losses, 4e6), power_law(4e6)
        assert abs(made.loss - truth) < 0.1 and made.high - made.low < 0.5
        inside += made.low <= truth <= made.high
    assert inside >= 8
    assert forecast(tokens[:5], losses[:5], 4e6) is None


def test_spikes_are_found_and_noise_is_none():
    """Planted rises of 1.3 x to 5 x at known rows; none on the same curve without them."""
    losses = noisy_law(4000)
    assert spike_rows(losses) == []
    planted = {300: 1.3, 1111: 2.0, 2500: 5.0, 3990: 1.5}
    for row, factor in planted.items():
        losses[row] *= factor
    assert spike_rows(losses) == list(planted)


CURVES = {
    "learning": (noisy_law(300), "The run is learning"),
    "warming up": (noisy_law(15), "still warming up"),
    "plateau": (np.concatenate([noisy_law(300), np.full(700, 6.0)]), "plateau"),
    "diverging": (np.concatenate([noisy_law(300), np.linspace(7, 12, 300)]), "rising"),
    "broken": (np.concatenate([noisy_law(100), [math.nan] * 5]), "not a number"),
    "too few rows": (noisy_law(4), "Too few rows are logged"),
    "finished with few rows": (noisy_law(4), "The run is finished; too few"),
}


@pytest.mark.parametrize("phase", CURVES)
def test_the_phase_is_said_in_words(tmp_path, phase):
    """One curve of each kind. Few rows are no sign of a beginning."""
    losses, told = CURVES[phase]
    said = analyzed(made_run(tmp_path / "run", losses, "finished" in phase, budget=10_000_000))
    assert told in said[0], said


def test_json_has_null_where_a_loss_is_no_number(tmp_path, capsys):
    """A script that waits for a broken run reads what it says: NaN is no JSON."""
    run = made_run(tmp_path / "run", [5.0, math.nan])
    main(["analyze", str(run.path), "--json"])
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["last_loss"] is None


FLAT = np.concatenate([noisy_law(300), np.linspace(6.0, 4.5, 300), np.linspace(4.5, 4.6, 200)])


def test_no_sentence_takes_back_another(tmp_path):
    """A quarter that rose and a half that fell are told of their times; what cannot be done is not advised."""
    running, finished = (analyzed(made_run(tmp_path / str(over), FLAT, over)) for over in (False, True))
    (rate,), (last,) = ([each for each in said if "quarter" in each] for said in (running, finished))
    said = (
        r"the loss rose by 1\.\d%; over the last half, which is one doubling, its trend fell by 0\.\d+ nats"
    )
    assert re.search(said, rate)
    assert "lowers" not in rate and "--allow_change training.learning_rate" in rate
    assert "that is stagnation" in last and "stop" not in last and "--allow_change" not in last
    for phase in ("diverging", "broken"):
        found = analyze(RunRecord(made_run(tmp_path / phase, CURVES[phase][0], budget=10_000_000).path))
        text = " ".join(sentences(found))
        assert found.phase == phase and "power law" not in text and "stagnation" not in text, text


def test_a_run_is_analyzed_from_its_store_too(tmp_path, capsys):
    """By its address, as `postmortem` takes it: the same sentences, without the runs beside it, which are not there."""
    made_run(tmp_path / "kept", noisy_law(400), finished=True)
    run = made_run(tmp_path / "run", noisy_law(200), finished=True)
    main(["analyze", str(run.path)])
    here = capsys.readouterr().out
    main(["analyze", f"file://{run.path}"])
    assert capsys.readouterr().out == here
    said = refusal(main, ["analyze", f"file://{tmp_path}/none"])
    assert said.startswith(f"file://{tmp_path}/none: no run there")


STOPPED = {"event": "stopped", "step": 90, "reason": "SIGTERM"}
ENDINGS = {
    "stopped": (STOPPED, "Stopped at step 90 since 2001-01-01 00:00 UTC"),
    "hang": ({"event": "hang", "minutes": 5}, "It hung after step"),
    "gave up": ({"event": "gave_up", "step": 80, "why": "spikes"}, "It gave up at step 80"),
    "finished": ({"event": "end", "eval_loss": 3.0}, ""),
}


@pytest.mark.parametrize("state", ENDINGS)
def test_a_run_that_has_ended_says_how_and_since_when(tmp_path, state, capsys):
    """By its last event; in the page too; started again it is running."""
    event, told = ENDINGS[state]
    run = made_run(tmp_path / "run", noisy_law(100), events=[{"time": "2001-01-01T00:00:00Z", **event}])
    record = RunRecord(run.path)
    payload = run_payload(record)
    assert (record.state, payload["state"]) == (state, state)
    main(["analyze", str(run.path)])
    assert capsys.readouterr().out.startswith(told)
    append_row(run.events, {"time": utc_now(), "event": "resume", "checkpoint": "checkpoint-80"})
    assert RunRecord(run.path).state == "running"


def test_a_killed_run_is_silent_by_the_clock_of_its_reader(tmp_path, capsys):
    """Nothing tells of a kill: what tells is the time since the last row, against the longest pause before it."""
    run = made_run(tmp_path / "run", [3.0] * 100, started=False)
    killed_at = time.time() - 600
    write_rows(run, [3.0] * 100, killed_at - 1000, seconds_a_row=10.0)
    record = RunRecord(run.path)
    # not the file's time, which a copy changes
    assert record.last_written == pytest.approx(killed_at, abs=11)
    assert record.standing(killed_at + 60).state == "running" and record.standing().state == "silent"
    assert record.standing(killed_at + 60).step == 100
    main(["analyze", str(run.path)])
    told = capsys.readouterr().out
    assert "Nothing was written since" in told and "10.0 minutes ago" in told, told
    live, last, later = (run_payload(record, live=live) for live in (True, False, None))
    assert live["alive"] == pytest.approx(time.time(), abs=30), "its writer is alive"
    assert (last["silent_after"], later["silent_after"], later["alive"]) == (0, 120, record.last_written)
    write_rows(run, [3.0] * 100, killed_at - 40_000, seconds_a_row=400.0)
    assert RunRecord(run.path).state == "running", "it has paused for so long before"


BEATING = """import sys, time
from pathlib import Path
from pretraining.runtime.heartbeat import Heartbeat
beating = Heartbeat(Path(sys.argv[1]), int(sys.argv[2]))
beating.arrive('training', 110)
beating.beat(1)
print(flush=True)
time.sleep(600)
"""


def test_a_run_whose_processes_are_gone_is_killed_at_once(tmp_path, capsys):
    """SIGKILL of every rank: known from the heartbeats, with the checkpoint that the next start continues from."""
    run = made_run(tmp_path / "run", noisy_law(100))
    (run.checkpoint(75)).mkdir()
    write_json(run.checkpoint(75) / "committed.json", {})
    ranks = []
    for rank in ("0", "1"):
        command = [sys.executable, "-c", BEATING, run.heartbeats, rank]
        ranks.append(subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE))
    for rank in ranks:
        rank.stdout.readline()
    assert RunRecord(run.path).state == "running"
    ranks[0].kill()
    ranks[0].wait()
    assert RunRecord(run.path).state == "running", "a rank that is left may still stop and save"
    ranks[1].kill()  # and nobody asks for its exit code: it stays in the table of processes
    while (standing := RunRecord(run.path).standing()).state == "running":
        time.sleep(0.01)
    assert (standing.state, standing.step, standing.checkpoint) == ("killed", 110, "checkpoint-75")
    ranks[1].wait()
    main(["analyze", str(run.path)])
    told = capsys.readouterr().out
    assert told.startswith("Killed after step 110")
    assert "The same command without --resume continues from checkpoint-75." in told
    states = [payload_of(run, live=live)["state"] for live in (None, False, True)]
    assert states == ["killed", "killed", "running"]
    for beat in run.heartbeats.iterdir():
        os.utime(beat, (0, time.time() - 10))
    append_row(run.events, {"time": utc_now(), "event": "resume", "checkpoint": "checkpoint-75"})
    assert RunRecord(run.path).state == "running", "these heartbeats are of the start before"


def test_only_what_is_certain_of_a_process_counts(tmp_path):
    """An id that was given out again is another process; of another machine, only the clock can tell."""
    Heartbeat(tmp_path, 0).beat(1)
    (place,) = [read_place(tmp_path, 0)]
    assert not is_gone(place) and gone_ranks(tmp_path, 0.0) == []
    assert is_gone(replace(place, began=place.began - 1))
    assert not is_gone(replace(place, began=place.began - 1, machine="another"))
    assert not is_gone(replace(place, began=place.began - 1, machine="")), "a heartbeat that does not say"


def test_the_losses_are_told_apart(tmp_path):
    """The last row's, which the page's tile shows too, the median of the last rows, and the one of validation.

    A mixture that validation does not have is told beside it, in the run's own sentence, of mixture.json.
    """
    losses = noisy_law(200)
    losses[-1] = 4.5
    run = made_run(tmp_path / "run", losses)
    append_row(run.metrics, {"step": 200, "time": time.time(), "eval/loss": 3.4})
    write_json(run.mixture, {"validation_note": "Training and validation differ."})
    (told,) = [each for each in payload_of(run)["sentences"] if each.startswith("Training loss")]
    assert told.startswith("Training loss 4.5000 nats a token at step 200 (median of the last 10 rows: ")
    assert told.endswith("validation loss 3.4000. Training and validation differ.")


def test_the_end_of_a_run_says_what_it_took(tmp_path, monkeypatch, capsys):
    """Loss, time without the stop on request, tokens, memory, export and report; rank 0 alone."""
    moments = (("00:00", "start"), ("00:10", "stopped"), ("05:10", "resume"))
    events = [{"time": f"2001-01-01T{moment}:00Z", "event": event} for moment, event in moments]
    run = made_run(tmp_path / "run", [3.0] * 40, events=events, started=False, report={"every_seconds": 30})
    write_json(run.mixture, {"validation_note": "Said at the start, by `analyze` and by the report."})
    results = {"eval_loss": 3.5, "eval_bits_per_byte": 2.0, "unigram_bits_per_byte": 4.0}
    measured = {"peak_memory_bytes": 300_000_000}
    predicted = {"peak_memory_bytes": 290_000_000, "tokens_per_second": 12_500.0}
    write_json(run.plan, {"predicted": predicted})
    append_row(run.events, {"time": "2001-01-01T05:20:00Z", "event": "end", **results, "measured": measured})
    report_end(run)
    told = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    said = "validation loss 3.5000 nats per token, 2.0000 bits per byte (0.500 of the unigram entropy 4.0000, which"
    assert told[0][0] == "result" and told[0][1].startswith(said)
    assert told[1:] == [
        ["took", "40 steps, 40,000 tokens in 20.0 minutes, 4.00 s of them in its steps: 10,000 tokens/s"],
        ["measured", "peak memory 300 MB (planned 290 MB), tokens/s, all steps 10,000 (planned 12,500)"],
        ["export", str(run.export)],
        ["report", str(run.report)],
    ]
    monkeypatch.setenv("RANK", "1")
    report_end(run)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("began", ["branch", "resume", "at its end"])
def test_a_run_that_began_from_anothers_checkpoint_took_its_own_steps(tmp_path, capsys, began):
    """A branch, or `--resume` into a new folder: rows 21 to 30 of 1,000 tokens each are ten steps.

    From a checkpoint of the last step a run validates, exports, and has no rows.
    """
    run = made_run(tmp_path / "run", [3.0] * 30, started=False)
    own = [] if began == "at its end" else read_rows(run.metrics)[20:]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in own))
    if began == "branch":
        run.add_event("branch", step=20)
    run.add_event("resume", checkpoint="checkpoint-20")
    run.add_event("end", eval_loss=3.5, eval_bits_per_byte=2.0, unigram_bits_per_byte=4.0)
    report_end(run)
    assert f"took      {len(own)} steps, {len(own) * 1000:,} tokens in" in capsys.readouterr().out


def test_every_speed_is_of_all_steps_together(tmp_path):
    """The page, its table beside the plan and `planning compare` agree, and multiply out; a branch counts its own."""
    run = made_run(tmp_path / "run", [], budget=4000, started=False)
    rows = [(8010, 1.0, 1000.0, 0.1), (8020, 0.5, 2000.0, 0.2), (8040, 0.25, 4000.0, 0.4)]
    names = ("step", *(f"throughput/{name}" for name in ("step_seconds", "tokens_per_second", "mfu")))
    for row in rows:
        append_row(run.metrics, {"time": 0.0, **dict(zip(names, row, strict=True))})
    run.add_event("branch", step=8000)
    run.add_event("resume", step=8000, checkpoint="checkpoint-8000")
    write_json(run.plan, {})
    payload = payload_of(run)
    speed = payload["speed"]
    expected = {"tokens_per_second": 2000.0, "step_seconds": 0.5, "training_seconds": 20.0}
    assert speed == {**expected, "mfu": pytest.approx(0.2)}
    shown = {pair["quantity"]: pair["measured"] for pair in payload["plan"]["pairs"]}
    assert shown == {name: speed[name] for name in ("tokens_per_second", "step_seconds", "mfu")}
    compared = compare_run(run.path)
    assert all(compared[name]["measured"] == speed[name] for name in ("tokens_per_second", "step_seconds"))


def test_routine_events_do_not_crowd_out_the_others(tmp_path):
    """A thousand saves, each with its step, and the start is still listed; no save is a mark."""
    saves = [{"event": "save", "checkpoint": f"checkpoint-{k}", "bytes": 9067900} for k in range(1, 1001)]
    run = made_run(tmp_path / "run", noisy_law(50), events=[{"event": "alert", "step": 3}, *saves])
    payload = payload_of(run)
    assert [event["event"] for event in payload["events"] if not event["routine"]] == ["start", "alert"]
    assert payload["events"][-1]["step"] == 1000 and "save" not in {mark["kind"] for mark in payload["marks"]}


def test_forecasts_are_judged_by_the_finished_runs_beside_them(tmp_path, capsys):
    """A law fitted to the first half meets the end of a curve that keeps it, and says how it missed another."""
    made_run(tmp_path / "kept", noisy_law(400), finished=True)
    cut = noisy_law(400)
    cut[250:] *= 0.8
    made_run(tmp_path / "fell", cut, finished=True)
    run = made_run(tmp_path / "now", noisy_law(200), budget=400_000, report={"target_loss": 1.0})
    assert abs(half_fit_error(RunRecord(tmp_path / "kept"))) < 0.02
    assert 0.2 < half_fit_error(RunRecord(tmp_path / "fell")) < 0.35
    assert len(track_record_beside(run.path)) == 2
    main(["analyze", str(run.path)])
    told = capsys.readouterr().out
    assert "power law" in told and "2 finished runs" in told and "heading above it" in told
    main(["analyze", str(tmp_path / "kept")])
    assert "Such fits" not in capsys.readouterr().out, "no fit is made of a finished run"
    main(["analyze", str(run.path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert abs(found["heading"]["loss"] - power_law(400_000)) < 0.1 and found["target_is_met"] is False


def test_the_report_is_written_while_training_and_once_more_at_its_end(workshop, tmp_path):
    """By a process of its own that ends with the run: nothing is left behind, and the page says finished.

    Its end is not the run's: a supervisor starts a run that was killed again, also if the report's process ends well.
    It takes two starts from nothing, and the pause of the supervisor between them.
    """
    output = tmp_path / "run"
    settings = ("report.every_seconds=0.2", "training.eval_strategy=no", "training.logging_steps=1")
    command = workshop.typed([sys.executable], choices("null", settings), output)
    started = Started([sys.executable, "-m", "pretraining.supervise", "--restarts", "1", "--", *command])
    run = RunFolder(output)
    wait_until({"run": started}, lambda: run.report.exists() and read_place(run.heartbeats, 0) is not None)
    os.kill(read_place(run.heartbeats, 0).process, signal.SIGKILL)
    finished = started.finish()
    assert finished.code == 0 and not finished.strays, finished.output
    data = embedded(run.report.read_text(encoding="utf-8"))
    (shown,) = data["runs"]
    assert (shown["state"], shown["num_rows"], data["every_seconds"]) == ("finished", 11, None)
    assert not list(output.glob("*.partial"))
    assert [event["event"] for event in read_rows(run.events)].count("start") == 2


def test_the_writer_ends_with_a_run_that_is_killed(tmp_path):
    """Its standard input ends with the process that started it."""
    run = made_run(tmp_path / "run", noisy_law(30))
    program = (
        "import os, sys, time\n"
        "from pretraining.reporting.live import live_report\n"
        "from pretraining.runtime.run_folder import RunFolder\n"
        "run = RunFolder(sys.argv[1])\n"
        "with live_report(run, 0.1):\n"
        "    run.add_event('alert')\n"
        "    while not run.report.exists(): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    execute([sys.executable, "-c", program, run.path], REPOSITORY)
    page, waited = run.report, time.monotonic()
    while embedded(page.read_text(encoding="utf-8"))["every_seconds"] is not None:
        assert time.monotonic() - waited < 120, "the writer still believes that the run is alive"
        time.sleep(0.05)


def test_the_writer_is_the_last_in_line_for_the_processor(tmp_path, monkeypatch):
    """Also where Linux shares processors out by session, of which it has one of its own; until training is over."""
    run, writers = made_run(tmp_path / "run", noisy_law(30)), []
    start = live.start_writer
    monkeypatch.setattr(live, "start_writer", lambda *words: writers.append(start(*words)) or writers[-1])
    with live_report(run, 0.1):
        run.add_event("alert")
        while not run.report.exists():
            time.sleep(0.01)
        process, group = writers[0].pid, Path(f"/proc/{writers[0].pid}/autogroup")
        assert os.getpriority(os.PRIO_PROCESS, process) == LAST
        assert not group.exists() or group.read_text().split()[-1] == str(LAST)
        set_priority(process, 0)
        assert not group.exists() or group.read_text().split()[-1] == "0"


def test_overlaid_runs_show_the_settings_that_differ(tmp_path):
    """By dotted key, with defaults for what a recipe leaves out, ranks and versions; in the legend, the first ones."""
    one = {"deepspeed": "zero1", "training": {"learning_rate": 1e-3}, "data": {"sources": [{"path": "a"}]}}
    two = {"training": {"learning_rate": 2e-3, "weight_decay": 0.0}, "data": {"sources": [{"path": "b"}]}}
    recipes = {"one": one, "two": {"deepspeed": None, **two}}
    for name, recipe in recipes.items():
        run = made_run(tmp_path / name, noisy_law(20), **recipe)
        write_json(run.plan, {"world_size": len(name)})
        write_json(run.environment, {"versions": {"torch": name}, "git_commit": "same"})
    payload = page_payload([run_payload(RunRecord(tmp_path / name)) for name in recipes], None)
    assert payload["settings"] == [
        ["deepspeed", '"zero1"', "null"],
        ["training.learning_rate", "0.001", "0.002"],
        ["data.sources.0.path", '"a"', '"b"'],
        ["environment.versions.torch", '"one"', '"two"'],
    ]
    label = 'two: deepspeed null, training.learning_rate 0.002, data.sources.0.path "b"'
    assert payload["runs"][1]["label"] == label
    alone = page_payload([run_payload(RunRecord(tmp_path / "one"))], None)
    assert (alone["settings"], alone["runs"][0]["label"]) == ([], "one")


def test_runs_of_one_name_are_told_apart(tmp_path):
    """By their folders; by a number if these have one name too."""
    folders = [tmp_path / folder for folder in ("a/x", "b/y", "c/y")]
    records = [RunRecord(made_run(folder, [3.0], name="tiny").path) for folder in folders]
    assert names_of(records[:1]) == ["tiny"] and names_of(records[:2]) == ["x", "y"]
    assert names_of(records) == ["x", "y (1)", "y (2)"]


def test_every_row_is_written_as_csv(tmp_path, capsys):
    """One column a metric, of several runs; a missing value is empty, and a NaN is a NaN."""
    made_run(tmp_path / "one", [3.0, math.nan])
    run = made_run(tmp_path / "two", [5.0])
    append_row(run.metrics, {"step": 2, "time": time.time(), "eval/loss": 4.5})
    main(["csv", str(run.path)])
    assert capsys.readouterr().out.strip() == str(run.path / "metrics.csv")
    both = tmp_path / "both.csv"
    main(["csv", str(tmp_path / "one"), str(run.path), "--output", str(both)])
    with both.open(newline="") as file:
        rows = list(csv.DictReader(file))
    shown = [" ".join(row[key] for key in ("run", "step", "train/loss", "eval/loss")) for row in rows]
    assert shown == ["one 1 3.0 ", "one 2 NaN ", "two 1 5.0 ", "two 2  4.5"]


def test_samples_are_tabled_by_step_and_prompt(tmp_path):
    """Few steps of many, each with all its prompts; of a step that was repeated, the newer text."""
    run = made_run(tmp_path / "run", [3.0])
    for step in range(1, 201):
        for prompt in ("a", "b"):
            append_row(run.samples, {"step": step, "prompt": prompt, "text": f"{prompt}{step}"})
    append_row(run.samples, {"step": 200, "prompt": "b", "text": "again"})
    samples = payload_of(run)["samples"]
    assert samples["prompts"] == ["a", "b"] and len(samples["steps"]) == 60
    assert samples["steps"][0] == [1, "a1", "b1"] and samples["steps"][-1] == [200, "a200", "again"]


@pytest.mark.parametrize("every_seconds", [None, 0.1])
def test_no_report_is_written_where_the_recipe_says_so_or_nothing_happened(tmp_path, every_seconds):
    """`report.every_seconds` null starts nothing; a run that is refused leaves the folder as it was."""
    run = made_run(tmp_path / "run", noisy_law(30))
    time.sleep(0.1)
    with live_report(run, every_seconds):
        pass
    assert not run.report.exists()
