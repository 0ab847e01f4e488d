"""The served page: all runs of a folder, live, and nothing else; by a real server process and in a real browser."""

import http.client
import json
import re
import signal
import socket
import time
from typing import Self
from urllib.parse import quote, urlencode

import pytest

from pretraining.reporting.__main__ import main
from pretraining.reporting.run_record import FIRST_LOOK, TAIL, RunRecord
from pretraining.runtime.durable_files import append_row
from tests.gear.finished_data import refusal
from tests.gear.nodes import wait_until
from tests.gear.runs import Started, execute, without_packages
from tests.reporting.test_report_page import DRAWN, INK, browser, new_page  # noqa: F401
from tests.reporting.test_reporting import SCRIPT, made_run, noisy_law

RUNS = 1000
SERVE = ["python", "-m", "pretraining.reporting", "--serve"]
IMAGE = "<img src=x onerror=alert(1)>"
SECRET = "this lies outside"


class Server:
    """A server in a process of its own, on a port that was free; it is killed at the end of its `with` block."""

    def __init__(self, folder, *more: str, **variables: str) -> None:
        self.started = Started([*SERVE, folder, "--port", "0", *more], **variables)
        self.said = self.started.process.stdout.readline()
        self.link = self.started.process.stdout.readline().split()[-1]
        self.port = int(re.search(r":(\d+)/", self.link)[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.started.kill()

    def ask(self, path: str, method: str = "GET", host: str | None = "127.0.0.1", **headers: str):
        """(status, headers, text) of a request that is sent as it is written."""
        lines = [f"{method} {path} HTTP/1.1", "Connection: close"]
        lines += [] if host is None else [f"Host: {host}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as sent:
            sent.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
            answer = http.client.HTTPResponse(sent, method=method)
            answer.begin()
            return answer.status, answer.headers, answer.read().decode()

    def data(self, *names: str) -> dict:
        return json.loads(self.ask(f"/data.json?{urlencode([('run', name) for name in names])}")[2])

    def listed(self) -> dict[str, dict]:
        return {row["name"]: row for row in json.loads(self.ask("/runs.json")[2])["rows"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A thousand small runs, one with markup in its name, one of a sweep; links that lead out of it; no run at all."""
    outside = tmp_path_factory.mktemp("outside")
    made_run(outside / "elsewhere", noisy_law(20), description=SECRET)
    (outside / "secret.txt").write_text(SECRET)
    runs = tmp_path_factory.mktemp("served") / "runs"
    for k in range(RUNS):
        run = runs / f"run-{k:04}"
        run.mkdir(parents=True)
        (run / "recipe.json").write_text(json.dumps({"name": run.name, "budget": {"tokens": 40_000}}))
        (run / "events.jsonl").write_text('{"time": "2026-01-01T00:00:00Z", "event": "start"}\n')
        rows = [{"step": step, "time": 1.7672256e9 + step, "train/loss": 9 - k / 1000} for step in range(20)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made_run(runs / IMAGE, noisy_law(300), description=SCRIPT)
    made_run(runs / "sweep" / "point-1", noisy_law(300), finished=True)
    (runs / "linked").symlink_to(outside / "elsewhere")
    spoiled = made_run(runs / "spoiled", noisy_law(20))
    spoiled.console_log.symlink_to(outside / "secret.txt")
    (runs / "garbage").mkdir()
    (runs / "garbage" / "events.jsonl").write_bytes(b"\x00\xff[1]\n")
    (runs / "garbage" / "metrics.jsonl").write_text("{}\nno row\n")
    return runs


@pytest.fixture(scope="module")
def server(folder):
    with Server(folder) as server:
        yield server


def test_a_thousand_runs_are_listed_by_the_ends_of_their_files(server, folder):
    """State, step, loss and share of each; a run of a sweep by its place; what has not changed is not sent again."""
    hidden = "not shown, with links in the folder"
    assert server.said.split(maxsplit=1) == ["runs", f"{RUNS + 2:,} runs in {folder}; 1 {hidden}\n"]
    rows = server.listed()
    assert len(rows) == RUNS + 2 and rows["sweep/point-1"]["state"] == "finished"
    assert rows["run-0500"]["last"]["train/loss"] == 8.5 and rows["run-0500"]["at_step"] == 19
    _, headers, _ = server.ask("/runs.json")
    status, _, text = server.ask("/runs.json", If_None_Match=headers["ETag"])
    assert (status, text) == (304, "")
    append_row(folder / "run-0500" / "metrics.jsonl", {"step": 20, "time": time.time(), "train/loss": 1.25})
    wait_until({"server": server.started}, lambda: server.listed()["run-0500"]["last"]["train/loss"] == 1.25)
    assert server.ask("/runs.json", If_None_Match=headers["ETag"])[0] == 200


PATHS = """/.. /../ /../../etc/passwd /%2e%2e/etc/passwd /%2e%2e%2f%2e%2e%2fetc%2fpasswd /..%2f..%2fsecret.txt
    /%252e%252e/secret.txt //etc/passwd /runs.json/../../secret.txt /show/../../secret.txt /style.css/..%2f..%2fx
    /..\\..\\secret.txt /%5c..%5csecret.txt /page.js%00.css /file:///etc/passwd /run-0001/metrics.jsonl
    /run-0001/recipe.json /.git/config /linked/events.jsonl /spoiled/console.log /RUNS.JSON /assets/format.js"""
NAMES = """.. ../outside ../../outside0/elsewhere /etc linked spoiled garbage ./run-0001 run-0001/
    run-0001/../run-0002 %2e%2e run-0001\0 sweep sweep/../linked file:///etc"""
METHODS = ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "CONNECT")
HOSTS = ("evil.example", "evil.example:80", "", None, "127.0.0.1.evil.example", "localhost.evil.example")
HOSTS += ("localhost@evil.example", "[::1]evil.example", "evil.example#localhost", "[", "0x7f.1.evil.example")


def test_nothing_but_the_runs_of_the_folder_is_shown(server):
    """Paths, names, methods and hosts of every kind: refused in one line, with the strict headers, and no secret."""
    tried = [server.ask(path) for path in PATHS.split()]
    for name in ("", *NAMES.split()):
        tried += [server.ask(f"{path}?run={quote(name, safe='')}") for path in ("/show", "/data.json")]
        tried.append(server.ask(f"/show?run=run-0001&run={quote(name, safe='')}"))
    assert {status for status, _, _ in tried} <= {400, 404}
    for method in METHODS:
        assert server.ask("/", method)[0] in (400, 405), method
    refused = [server.ask(path, host=host) for host in HOSTS for path in ("/", "/runs.json")]
    assert {status for status, _, _ in refused} <= {400, 421}
    assert len(tried) + len(METHODS) + len(refused) > 90
    for _, _, text in tried + refused:
        assert SECRET not in text and "root:" not in text and text.count("\n") <= 1, text
    for host in ("127.0.0.1:80", "localhost", "[::1]:6006", "10.0.0.7"):  # as through a tunnel
        assert server.ask("/page.js", host=host)[0] == 200
    for answer in (tried[0], refused[-1], server.ask("/"), server.ask("/show?run=run-0001", "HEAD")):
        assert "default-src 'none'; script-src 'self'" in answer[1]["Content-Security-Policy"]
        assert answer[1]["X-Content-Type-Options"] == "nosniff" and answer[1]["Cache-Control"] == "no-store"
        assert "server" not in answer[1]


def test_another_address_asks_for_the_token_of_the_link(folder):
    """Without it, or with another: refused. With it once, a cookie that no script reads has it."""
    with Server(folder / "sweep", "--host", "0.0.0.0") as server:
        token = server.link.partition("?token=")[2]
        assert len(token) >= 32
        for path in ("/", "/runs.json", "/?token=", f"/?token={token[:-1]}", "/page.js", "/?token=%C3%A4"):
            assert server.ask(path)[0] == 401, path
        status, headers, _ = server.ask(f"/?token={token}", host=socket.gethostname())
        cookie = headers["Set-Cookie"]
        assert (status, headers["Location"]) == (303, "/")
        assert "HttpOnly" in cookie and "samesite" in cookie.lower()
        opened = server.ask(f"/show?run=a%2Fb&token={token}&run=c")
        assert (opened[0], opened[1]["Location"]) == (303, "/show?run=a%2Fb&run=c")
        assert server.ask(f"//evil.example/?token={token}")[1]["Location"] == "/"
        assert server.ask("/runs.json", Cookie=cookie.partition(";")[0])[0] == 200
        assert server.ask("/runs.json", Cookie=cookie.partition("=")[0] + "=x")[0] == 401
        assert server.ask(f"/?token={token}", host="evil.example")[0] == 421
        assert server.ask(f"/?token={token}", "POST")[0] == 405


def test_a_list_knows_an_end_with_many_scores(tmp_path):
    """The end of events.jsonl that a list reads holds it, with the notices behind it."""
    run = made_run(tmp_path / "run", [5.0, 4.0])
    run.add_event("end", **{f"eval/task_{k}/acc": k / 400 for k in range(400)})
    run.add_event("notified", of="finished", by="webhook", attempts=1)
    assert RunRecord(run.path, TAIL).standing().state == "finished"


def test_a_long_run_is_shown_at_once_and_then_whole(tmp_path):
    """First some blocks of its rows, with a note; once a process has read all, every spike is there."""
    run = made_run(tmp_path / "runs" / "long", [5.0] * 20)
    more = {f"throughput/part_{k}_seconds": 0.25 for k in range(24)}
    with run.metrics.open("a") as file:
        for step in range(21, 36_001):
            loss = 50.0 if step == 17_777 else 4.0
            file.write(json.dumps({"step": step, "time": 1.7e9 + step, "train/loss": loss, **more}) + "\n")
    first = RunRecord(run.path, FIRST_LOOK)
    assert first.metrics.is_excerpt and 1000 < len(first.metrics) < 12_000 and not first.metrics.broken_lines
    steps = first.steps.tolist()
    assert steps[-1] == 36_000 and steps == sorted(set(steps)) and steps[0] == 1
    assert len(RunRecord(run.path, TAIL).metrics) < 10
    with Server(tmp_path / "runs") as server:
        shown = server.data("long")
        assert shown["runs"][0]["is_partial"] and shown["every_seconds"] == 1
        wait_until({"server": server.started}, lambda: "is_partial" not in server.data("long")["runs"][0])
        shown = server.data("long")["runs"][0]
        assert shown["num_rows"] == 36_000 and 50 in shown["series"]["train/loss"]["value"]
        append_row(run.metrics, {"step": 36_001, "time": time.time(), "train/loss": 60.0})
        wait_until({"server": server.started}, lambda: server.data("long")["runs"][0]["num_rows"] == 36_001)
        server.started.interrupt()
        finished = server.started.finish()
    assert finished.code == 128 + signal.SIGINT and not finished.strays
    assert "Traceback" not in finished.stderr and finished.stderr.endswith("interrupted\n"), finished.stderr


def test_sigterm_leaves_no_folder_behind(tmp_path):
    """As a service manager ends it."""
    for name in ("runs", "temporary"):
        (tmp_path / name).mkdir()
    with Server(tmp_path / "runs", TMPDIR=str(tmp_path / "temporary")) as server:
        server.started.process.terminate()
        finished = server.started.finish()
    assert finished.code == 128 + signal.SIGTERM and "Traceback" not in finished.stderr, finished.output
    assert not list((tmp_path / "temporary").iterdir())


def test_the_runs_of_a_store_are_listed_and_opened(tmp_path):
    """By the ends of their files; of one that is opened all records come."""
    run = made_run(tmp_path / "stored" / "one", noisy_law(2000), description="from afar")
    (tmp_path / "stored" / "no-run").mkdir()
    with Server((tmp_path / "stored").as_uri()) as server:
        rows = server.listed()
        assert rows.keys() == {"one"} and rows["one"]["at_step"] == 2000
        shown = server.data("one")["runs"][0]
        assert shown["num_rows"] == 2000 and shown["description"] == "from afar"
        assert shown["folder"] == f"{(tmp_path / 'stored').as_uri()}/one" and run.path.is_dir()
        assert server.ask("/show?run=no-run")[0] == 404


def test_the_list_and_the_pages_stay_fresh_in_a_browser(server, folder, new_page):  # noqa: F811
    """Filtered, sorted, two runs laid over each other, and a new row drawn without loading the page again."""
    page = new_page(server.link)
    rows = page.locator("#runs tbody tr")
    assert rows.count() == RUNS + 2 and page.locator("main img, main script").count() == 0
    assert "; 1 not shown, with links in the folder" in page.locator("#runs .head").inner_text()
    page.get_by_label("filter").fill("onerror")
    assert rows.count() == 1 and IMAGE in rows.inner_text() and SCRIPT[:40] in rows.inner_text()
    page.get_by_label(f"choose {IMAGE}").check()
    page.get_by_label("filter").fill("finished")
    page.get_by_role("button", name="training loss").click()
    page.get_by_label("choose sweep/point-1").check()
    page.get_by_role("button", name="Lay 2 over each other").click()
    page.wait_for_selector(f"{DRAWN} canvas")
    assert all(page.evaluate(INK))
    assert page.locator("#loss .legend button").all_inner_texts()[:2] == [IMAGE, "sweep/point-1"]
    for axis in ("steps", "hours", "tokens"):
        page.get_by_role("button", name=axis, exact=True).click()
    page.evaluate("window.isTheSamePage = true")
    append_row(folder / IMAGE / "metrics.jsonl", {"step": 777, "time": time.time(), "train/loss": 3.5})
    page.get_by_role("cell", name="777", exact=True).wait_for(timeout=60_000)
    assert page.evaluate("window.isTheSamePage")
    page.get_by_role("link", name="all runs").click()
    page.wait_for_selector("#runs tbody tr")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "nowhere: no such folder"),
        ([__file__], "no such folder"),
        (["s3//bucket/runs"], "write s3://bucket/runs"),
        (["memory://runs"], "is lost when its process ends"),
        (["file:///nowhere/at/all"], "all: no run;"),
        ([".", "--host", "300.1.2.3"], "choose others with --host and --port"),
        ([".", "--port", "99999"], "choose others with --host and --port"),
        ([".", "--port", "-1"], "is not a whole number"),
        ([], "expected one argument"),
    ],
)
def test_an_address_that_cannot_be_served_is_one_line(words, told):
    assert told in refusal(main, ["--serve", *words])


def test_a_taken_port_and_a_missing_package_are_one_line_with_exit_code_2(server, tmp_path):
    taken = execute([*SERVE, tmp_path, "--port", str(server.port)])
    lacking = execute([*SERVE, tmp_path], **without_packages(tmp_path, "uvicorn"))
    assert "Address already in use" in taken.refusal and "pip install uvicorn" in lacking.refusal
    assert taken.stdout == lacking.stdout == ""
