"""Notices of a run's events, to a real server and a real command; neither may hold up a run or end it."""

import json
import time
from http.server import BaseHTTPRequestHandler

import pytest

from pretraining.errors import GaveUp, UserError
from pretraining.recipe import load_recipe
from pretraining.recipe.sections import Notify
from pretraining.runtime import notices as module
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.exit_codes import OF_RANKS
from pretraining.runtime.notices import notices
from pretraining.runtime.run_folder import RunFolder
from tests.gear.finished_data import refusal
from tests.gear.runs import execute
from tests.gear.served import Served

WEBHOOK = "PRETRAINING_TEST_WEBHOOK"
NO_PART_OF_FILES = "T0/B0/sesame"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(module, "STARTED_TOGETHER_SECONDS", 0.0)


@pytest.fixture
def server(monkeypatch):
    """A server on this machine; it answers with the codes of `server.answers`, then with 200."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.received.append((self.path, json.loads(body)))
            self.send_response(server.answers.pop(0) if server.answers else 200)
            self.end_headers()

        def log_message(self, *words):
            pass

    with Served(Answer) as server:
        server.received, server.answers = [], []
        monkeypatch.setenv(WEBHOOK, f"{server.address}/{NO_PART_OF_FILES}")
        yield server


def journalled(run: RunFolder) -> list[dict]:
    """What became of the notices."""
    rows = [row for row in read_rows(run.events) if row["event"].startswith("notif")]
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


def test_a_webhook_gets_what_the_recipe_asks_for(tmp_path, server):
    """Tried again after an error of the server; other events are not sent; the address is in no file."""
    run, server.answers = RunFolder(tmp_path / "run"), [503]
    with notices(run, "small", Notify(on=["stopped", "alert"], webhook_env=WEBHOOK)):
        run.add_event("start", step=0)
        run.add_event("spike", step=7, loss=9.0)
        run.add_event("stopped", step=8, reason="SIGTERM")
    assert [path for path, _ in server.received] == [f"/{NO_PART_OF_FILES}"] * 3
    (_, again), (_, last) = server.received[1:]
    assert (again["event"], again["details"]["event"], again["details"]["loss"]) == ("alert", "spike", 9.0)
    assert last["message"].startswith(
        "small stopped at step 8: SIGTERM; the same command without --resume continues ("
    )
    assert last["message"] == last["text"] == last["content"] and last["folder"] == str(run.path)
    assert journalled(run) == [
        {"event": "notified", "of": "alert", "by": "webhook", "attempts": 2},
        {"event": "notified", "of": "stopped", "by": "webhook", "attempts": 1},
    ]
    assert "sesame" not in run.events.read_text() and not run.listeners


def test_a_command_gets_the_notice_and_is_no_rank(tmp_path, monkeypatch):
    """On its standard input and as variables; the exit code that a supervisor reads is the run's, and not its own."""
    for name in OF_RANKS:
        monkeypatch.setenv(name, "0")
    run = RunFolder(tmp_path / "run")
    command = 'cat > "$PRETRAINING_FOLDER/notice.json"; env > %s'
    with notices(run, "small", Notify(on=["rollback"], command=command % (tmp_path / "variables"))):
        run.add_event("rollback", step=9, to_step=4, rollback=1, of=3, why="a spike")
    notice = json.loads((run.path / "notice.json").read_text())
    assert notice["message"].startswith("small rolled back to step 4 (1 of 3): a spike (")
    lines = (tmp_path / "variables").read_text().splitlines()
    assert {"PRETRAINING_EVENT=rollback", "PRETRAINING_RUN=small"} <= set(lines)
    assert not {line.partition("=")[0] for line in lines} & set(OF_RANKS)
    assert journalled(run) == [{"event": "notified", "of": "rollback", "by": "command", "attempts": 1}]


def test_receivers_that_fail_stop_nothing(tmp_path, server, monkeypatch):
    """A server that refuses, and a command that does not end: tried a few times, journalled, no exception, no wait."""
    monkeypatch.setattr(module, "COMMAND_SECONDS", 0.1)
    run, server.answers = RunFolder(tmp_path / "run"), [404] * 9
    with notices(run, "small", Notify(on=["finished"], command="sleep 60", webhook_env=WEBHOOK)):
        run.add_event("end", eval_loss=3.0)
        assert not journalled(run)  # not one of three attempts can have ended yet
    assert journalled(run) == [
        {"event": "notify_failed", "of": "finished", "by": "command", "attempts": 3}
        | {"reason": "did not end within 0.1 s"},
        {"event": "notify_failed", "of": "finished", "by": "webhook", "attempts": 3, "reason": "HTTP 404"},
    ]
    monkeypatch.setenv(WEBHOOK, f"http://127.0.0.1:1/{NO_PART_OF_FILES}")
    with notices(run, "small", Notify(on=["finished"], command="echo no >&2; exit 3", webhook_env=WEBHOOK)):
        run.add_event("end", eval_loss=3.0)
    assert [row["reason"] for row in journalled(run)[2:3]] == ["exit code 3 no"]
    assert "refused" in journalled(run)[3]["reason"] and "sesame" not in run.events.read_text()


def test_a_redirect_is_no_receiver(tmp_path, server):
    """Asked again at the other address, it would get no notice, and count as sent."""
    run, server.answers = RunFolder(tmp_path / "run"), [301] * 3
    with notices(run, "small", Notify(on=["finished"], webhook_env=WEBHOOK)):
        run.add_event("end", eval_loss=3.0)
    (row,) = journalled(run)
    assert row["event"] == "notify_failed" and row["reason"].startswith("HTTP 301, a redirect")


def test_a_command_may_say_what_is_no_text(tmp_path):
    """Its stderr is only for the case that it fails. A process that it leaves behind is not waited for."""
    run, command = RunFolder(tmp_path / "run"), "printf '\\351' >&2; sleep 60 &"
    with notices(run, "small", Notify(on=["finished"], command=command)):
        run.add_event("end", eval_loss=3.0)
    assert journalled(run) == [{"event": "notified", "of": "finished", "by": "command", "attempts": 1}]


def test_what_a_failing_command_says_is_kept_without_the_address(tmp_path, monkeypatch):
    """wget names the address it could not reach, in whichever variable it was."""
    monkeypatch.setenv(WEBHOOK, f"http://127.0.0.1:1/{NO_PART_OF_FILES}")
    run = RunFolder(tmp_path / "run")
    command = f'echo "no answer of ${{{WEBHOOK}}}: refused" >&2; exit 1'
    with notices(run, "small", Notify(on=["finished"], command=command)):
        run.add_event("end", eval_loss=3.0)
    assert journalled(run)[0]["reason"] == "exit code 1 no answer of ***: refused"


def test_the_end_of_a_run_does_not_wait_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_END_SECONDS", 0.1)
    run, began = RunFolder(tmp_path / "run"), time.monotonic()
    with notices(run, "small", Notify(on=["finished"], command="sleep 60")):
        run.add_event("end", eval_loss=3.0)
    assert time.monotonic() - began < 30


def test_a_run_that_fails_says_so_once(tmp_path):
    """A crash or an error after the run has begun, on whichever rank; nothing before, nothing twice."""
    run, settings = RunFolder(tmp_path / "run"), Notify(on=["failed", "gave_up"], command="true")

    def fail(error: Exception, *events: str) -> list[str]:
        run.events.unlink(missing_ok=True)
        with pytest.raises(type(error)), notices(run, "small", settings):
            for event in events:
                run.add_event(event, step=3, why="it")
            raise error
        return [row["event"] for row in read_rows(run.events) if row["event"] != "notified"]

    assert fail(UserError("refused")) == [] and not run.events.exists()
    assert fail(MemoryError("out of\nmemory"), "start") == ["start", "failed"]
    assert read_rows(run.events)[1]["reason"] == "MemoryError: out of memory"
    assert journalled(run) == [{"event": "notified", "of": "failed", "by": "command", "attempts": 1}]
    assert fail(RuntimeError("peer"), "start", "failed") == ["start", "failed"]
    assert fail(GaveUp("spikes"), "resume", "gave_up") == ["resume", "gave_up"]


@pytest.mark.parametrize(
    "notify, said",
    [
        ({"on": ["stopped"]}, "monitors.notify: has no receiver; give command or webhook_env"),
        ({"webhook_env": "https://hooks.example/T0/sesame"}, "webhook_env: is no name of a variable"),
        ({"command": "curl https://hooks.slack.com/services/sesame"}, "command: holds a secret"),
        ({"command": "true", "on": ["stoped"]}, "did you mean 'stopped'"),
    ],
)
def test_what_cannot_be_notified_is_one_line(tmp_path, notify, said):
    """Where and what to do; a secret that was written into the recipe is not repeated."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"base": "features/gpt2", "description": "d", "monitors": {"notify": notify}}))
    line = refusal(load_recipe, str(path))
    assert said in line and "sesame" not in line


def test_a_variable_that_is_not_set_refuses_the_run(workshop, tmp_path):
    """Through train.py: one line, exit code 2, nothing written."""
    setting = f'monitors.notify={{"webhook_env": "{WEBHOOK}"}}'
    finished = execute(workshop.command(tmp_path / "run", "null", 1, "plain", (setting,)))
    assert finished.code == 2 and not (tmp_path / "run").exists(), finished.output
    (line,) = finished.stderr.splitlines()
    assert line.startswith("error: ") and f": the variable {WEBHOOK} is not set; export it" in line
