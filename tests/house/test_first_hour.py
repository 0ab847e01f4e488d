"""benchmarks/first_hour.py: its pieces run once, the most valuable first, and a second call goes on behind the last."""

import json
import sys
import time

import pytest

from tests.gear.runs import REPOSITORY, Started, execute, refused

PROGRAM = """
import sys
sys.path.insert(0, "benchmarks")
import first_hour
from first_hour import Piece

def pieces_of(options, gpus):
    said = "import json; print(json.dumps({'benchmark': 'x', 'n': 3}))"
    slow = f"import time, pathlib; pathlib.Path({str(options.folder / 'begun')!r}).touch(); time.sleep(60)"
    if (options.folder / "begun").exists():
        slow = "print('second time')"
    wrong = "raise SystemExit('no such kernel')"
    named = {"first": ("a line", said), "second": ("slow", slow), "third": ("wrong", wrong)}
    return [Piece(name, shows, (sys.executable, "-c", code)) for name, (shows, code) in named.items()]

first_hour.pieces_of = pieces_of
sys.exit(first_hour.main())
"""


def command(folder, *words: str) -> list:
    return [sys.executable, "-c", PROGRAM, "--small", "--folder", folder, *words]


def test_killed_in_a_piece_it_goes_on_there_and_says_what_failed(tmp_path):
    """SIGKILL to all; the piece before it is not run again, and what a benchmark said is kept."""
    started = Started(command(tmp_path))
    while not (tmp_path / "begun").exists():
        assert started.process.poll() is None
        time.sleep(0.01)
    kept = (tmp_path / "first.json").stat().st_mtime_ns
    started.kill()
    assert not (tmp_path / "second.json").exists()
    late = execute(command(tmp_path, "--minutes", "0"))
    assert late.code == 75 and "[2/3] second: slow: not begun" in late.stdout, late.output
    again = execute(command(tmp_path))
    assert again.code == 1 and "[1/3] first: a line: done" in again.stdout, again.output
    assert "ended with code 1: no such kernel" in again.stdout
    assert (tmp_path / "first.json").stat().st_mtime_ns == kept
    assert json.loads((tmp_path / "first.json").read_text())["lines"] == [{"benchmark": "x", "n": 3}]
    assert "third: wrong: ended with code 1" in execute(command(tmp_path, "--list")).stdout


def test_without_a_gpu_one_line_says_how_to_try_it(tmp_path):
    command = [sys.executable, "benchmarks/first_hour.py", "--folder", tmp_path / "hour"]
    refused(execute(command), "--small tries the path on a CPU")
    assert not (tmp_path / "hour").exists()


@pytest.mark.parametrize("words", [(), ("--small",)])
def test_each_piece_is_a_command_that_there_is(monkeypatch, words):
    """Scripts exist and know the options: on GPUs nothing needs a second look."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["first_hour.py", *words])
    import first_hour

    folder = REPOSITORY / "runs" / "first_hour"
    given = first_hour.argparse.Namespace(small=bool(words), recipe="124m", folder=folder)
    for piece in first_hour.pieces_of(given, 8):
        scripts = [word for word in piece.words if word.endswith(".py")]
        assert scripts and all((REPOSITORY / script).is_file() for script in scripts), piece
        given_to_it = piece.words[piece.words.index(scripts[0]) :]
        options = {word.partition("=")[0] for word in given_to_it if word[:2] == "--"}
        text = "".join((REPOSITORY / script).read_text() for script in (*scripts, "benchmarks/gear.py"))
        text += (REPOSITORY / "pretraining" / "command_line.py").read_text()
        if "pytest" not in piece.words:
            assert all(f'"{option}"' in text for option in options), (piece.name, options)
