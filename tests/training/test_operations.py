"""Numbers for operations: a real scrape, a real file and a real receiver of a run; none of them ever stops one."""

import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace

import pytest

from pretraining.errors import UserError
from pretraining.recipe.sections import LowUse, Prometheus
from pretraining.recipe.training import TRACKER_PACKAGES
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.notices import EVENTS, notice_of
from pretraining.runtime.run_folder import RunFolder
from pretraining.training import trackers
from pretraining.training.throughput import UseWatch
from pretraining.training.trackers import OPERATIONS, build_trackers
from tests.gear.runs import Run, Started, free_port
from tests.gear.served import Served

BOTH = ["prometheus", "opentelemetry"]


@pytest.fixture
def receiver(monkeypatch):
    """What a collector of OpenTelemetry would get: {name of a number: {its labels: its value}}, the newest."""
    pytest.importorskip("prometheus_client", reason="not installed (requirements-trackers.txt)")
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            sent = service.ExportMetricsServiceRequest()
            sent.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            for metric in sent.resource_metrics[0].scope_metrics[0].metrics:
                for point in metric.gauge.data_points:
                    labels = tuple(label.value.string_value for label in point.attributes)
                    value = getattr(point, point.WhichOneof("value"))
                    server.got.setdefault(metric.name, {})[labels] = value
            server.paths.add(self.path)
            self.send_response(server.answer)
            self.end_headers()

        def log_message(self, *words):
            pass

    with Served(Collector) as server:
        server.got, server.paths, server.answer = {}, set(), 200
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.address)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
        yield server


def scraped(port: int) -> dict[str, float]:
    """{a sample as Prometheus names it: its value}, by Prometheus' own parser."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return parsed(answer.read().decode())


def parsed(text: str) -> dict[str, float]:
    from prometheus_client.parser import text_string_to_metric_families

    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} <= {"small"}
    return {f"{sample.name} {sample.labels.get('state', '')}".strip(): sample.value for sample in samples}


def test_a_run_shows_the_same_numbers_to_all(workshop, tmp_path, receiver):
    """While it trains, on two ranks of which one alone answers; at its end the file and the receiver say so."""
    port, output = free_port(), tmp_path / "run"
    settings = (
        'training.report_to=["prometheus","opentelemetry"]',
        "training.logging_steps=1",
        f'monitors.prometheus={{"port": {port}, "textfile": "small.prom"}}',
    )
    started, seen = Started(workshop.command(output, settings=settings)), []
    while started.process.poll() is None:
        try:
            seen.append(scraped(port))
        except OSError:
            time.sleep(0.02)
    finished, run = started.finish(), Run(output)
    assert finished.code == 0, finished.output
    rows = {row["step"]: row for row in run.training_rows}
    losses = [row["train/loss"] for row in rows.values()]
    assert any(each.get("pretraining_loss") in losses for each in seen), (len(seen), seen[-1:])
    assert all(each["pretraining_state running"] == 1 for each in seen[:1])
    last = parsed((output / "small.prom").read_text())
    assert last["pretraining_step"] == max(rows) and last["pretraining_state finished"] == 1
    newest = rows[max(rows)]
    for name, metric in trackers.LOGGED.items():
        if metric in newest:
            assert last[f"pretraining_{name}"] == pytest.approx(newest[metric])
            assert receiver.got[f"pretraining_{name}"][("small",)] == pytest.approx(newest[metric])
    assert last["pretraining_validation_loss"] == pytest.approx(run.validation_rows[-1]["eval/loss"])
    assert receiver.got["pretraining_state"][("small", "finished")] == 1 and receiver.paths == {"/v1/metrics"}
    assert 0 <= last["pretraining_seconds_since_last_step"] < 600
    assert not [row for row in run.events if row["event"].startswith("tracker")]


class Told:
    """The trackers of a run in this process, and its events."""

    def __init__(self, folder, names, **prometheus) -> None:
        self.run = RunFolder(folder)
        folder.mkdir(exist_ok=True)
        *_, self.trackers = build_trackers(names, self.run, "small", None, Prometheus(**prometheus))
        self.state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=9)
        self.trackers.on_train_begin(SimpleNamespace(run_name="small", project=None), self.state, None)

    def log(self, **logs) -> None:
        self.state.global_step += 1
        self.trackers.on_step_end(None, self.state, None)
        self.trackers.on_log(None, self.state, None, logs=logs)

    def events(self, kind: str = "tracker") -> list[tuple[str, str]]:
        rows = [row for row in read_rows(self.run.events) if row["event"].startswith(kind)]
        return [(row["event"], row["tracker"]) for row in rows]


def test_a_file_is_old_or_new_never_half(tmp_path, receiver):
    """Read again and again while it is replaced."""
    told, halves = Told(tmp_path / "run", "prometheus", port=None, textfile=str(tmp_path / "a.prom")), []
    whole = len((tmp_path / "a.prom").read_text().splitlines())
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            text = (tmp_path / "a.prom").read_text()
            if not text.endswith("\n") or len(text.splitlines()) < whole:
                halves.append(text)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        told.log(loss=number / 3)
    is_over.set()
    reader.join()
    assert not halves and parsed((tmp_path / "a.prom").read_text())["pretraining_loss"] == pytest.approx(
        199 / 3
    )
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["a.prom"]


def test_what_cannot_be_reached_is_told_once_and_used_again(tmp_path, receiver):
    """A port that is taken, a folder that is not there, a receiver that refuses: the run goes on, then they have it."""
    with Served(BaseHTTPRequestHandler) as other:
        port = other.server_port
        told = Told(tmp_path / "run", BOTH, port=port, textfile=str(tmp_path / "gone" / "a.prom"))
        receiver.answer = 400
        for _ in range(3):
            told.log(loss=1.0)
        until = time.monotonic() + 60
        while len(told.events()) < 2 and time.monotonic() < until:
            told.log(loss=1.0)
            time.sleep(0.05)
        assert sorted(told.events()) == [("tracker_failed", name) for name in sorted(BOTH)]
    (tmp_path / "gone").mkdir()
    receiver.answer = 200
    while len(told.events()) < 4 and time.monotonic() < until:
        told.log(loss=2.0)
        time.sleep(0.05)
    assert sorted(told.events("tracker_recovered")) == [("tracker_recovered", name) for name in sorted(BOTH)]
    assert scraped(port)["pretraining_loss"] == 2.0 and (tmp_path / "gone" / "a.prom").exists()
    told.run.add_event("spike", step=3)
    told.run.add_event("hang", step=4, minutes=1, who="rank 1")
    shown = scraped(port)
    assert (shown["pretraining_alerts"], shown["pretraining_state hang"]) == (1, 1)
    assert receiver.got["pretraining_state"][("small", "hang")] == 1
    # another rank may have written the hang, and an error may have no event
    told.run.fail()
    assert scraped(port)["pretraining_state hang"] == 1
    told.run.add_event("resume", step=4)
    told.run.fail()
    assert scraped(port)["pretraining_state failed"] == 1
    # a run that rolled back begins again in the same process, on the same port
    build_trackers(BOTH, told.run, "small", None, Prometheus(port=port))[-1].on_train_begin(
        SimpleNamespace(run_name="small", project=None), told.state, None
    )
    assert scraped(port)["pretraining_state running"] == 1 and len(told.events()) == 4


def test_the_last_numbers_are_waited_for_behind_a_message_under_way(tmp_path, monkeypatch, receiver):
    """Promise: what a run says at its end arrives. A message that is still under way then has older numbers."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    export, under_way = OTLPMetricExporter.export, threading.Event()

    def slowly(*arguments, **options):
        result = export(*arguments, **options)
        if not under_way.is_set():
            under_way.set()
            time.sleep(0.5)
        return result

    monkeypatch.setattr(OTLPMetricExporter, "export", slowly)
    told = Told(tmp_path / "run", "opentelemetry", port=None)
    (numbers,) = [each for (_, run), each in trackers._made.items() if run == told.run.path]
    numbers.wake.set()
    assert under_way.wait(10)
    told.run.add_event("hang", step=4, minutes=1, who="rank 1")
    assert receiver.got["pretraining_state"][("small", "hang")] == 1


def test_a_receiver_that_never_answers_holds_up_nothing(tmp_path, monkeypatch, receiver):
    """It accepts and is silent: steps go on, and the end of a run waits for a few seconds at most."""
    monkeypatch.setattr(trackers, "RECEIVER_SECONDS", 0.5)
    silent = threading.Event()

    class Silent(BaseHTTPRequestHandler):
        def do_POST(self):
            silent.wait(30)

    with Served(Silent) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.address)
        told = Told(tmp_path / "run", "opentelemetry")
        began = time.monotonic()
        for _ in range(50):
            told.log(loss=1.0)
        told.run.add_event("end", eval_loss=1.0)
        assert time.monotonic() - began < 10
        silent.set()


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_missing_library_is_one_line_at_the_start(tmp_path, monkeypatch, name):
    module = (
        "opentelemetry.exporter.otlp.proto.http.metric_exporter"
        if name == "opentelemetry"
        else TRACKER_PACKAGES[name]
    )
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"{name}.*pip install {TRACKER_PACKAGES[name]}, or"):
        build_trackers(name, RunFolder(tmp_path / "run"), "small")
    assert not (tmp_path / "run").exists()


def test_low_use_is_an_alert_once_for_each_stretch(tmp_path):
    """Of the GPUs and of the MFU beside the plan's, after so many steps in a row; a notice has it in words."""
    low = UseWatch(LowUse(steps=30), planned_mfu=0.5)
    busy, idle = {"hardware/gpu_utilization": 0.9}, {"hardware/gpu_utilization": 0.2}
    slow = {**busy, "throughput/mfu": 0.29}
    assert not low.judge(idle, 20) and not low.judge(busy, 10) and not low.judge(idle, 20)
    assert low.judge(idle, 10) == [{"of": "gpu_utilization", "value": 0.2, "least": 0.5, "steps": 30}]
    assert not low.judge(idle, 100) and not low.judge(slow, 20)
    (found,) = low.judge(slow, 20)
    assert found == {"of": "mfu", "value": 0.29, "least": 0.3, "steps": 40}
    assert not UseWatch(LowUse(steps=1, gpu_utilization=None), planned_mfu=None).judge({**idle, **slow}, 9)
    run = RunFolder(tmp_path / "run")
    run.add_event("low_use", step=70, **found)
    (row,) = read_rows(run.events)
    assert "low_use" in EVENTS["alert"]
    assert (
        "small has had mfu 0.29 for 40 steps at step 70, below 0.3" in notice_of("small", run, row)["message"]
    )


@pytest.mark.parametrize("text", ["15s", "0", "-1", "1e3", "abc"])
def test_a_wrong_interval_is_one_line_at_the_start(monkeypatch, tmp_path, text):
    """In place of a thread that dies, or never waits."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", text)
    with pytest.raises(
        UserError, match=f"OTEL_METRIC_EXPORT_INTERVAL: '{text}' is no number of milliseconds"
    ):
        OPERATIONS["opentelemetry"](RunFolder(tmp_path), Prometheus())
