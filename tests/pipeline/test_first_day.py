"""The page "First day": its files are written and its commands run, in their order, as a new user would."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.gear.runs import REPOSITORY, execute, forked_programs, launcher
from tests.gear.scored_tasks import write_items, write_tasks
from tests.house.test_readme import commands_of

PAGE = REPOSITORY / "docs" / "first_day.md"
TASKS = 12
LAUNCHER = re.compile(r"deepspeed --num_gpus=(\d) ")
SMALL = ("--set", "model.n_embd=32", "--set", "model.n_layer=1", "--set", "model.n_head=2")
"""A smaller `tiny`: what the page promises is that its commands work, and no size."""


def files_of(page: str) -> dict[str, str]:
    """The files that the page shows: the block after the sentence that names one."""
    return dict(re.findall(r"This is `(my/[\w.-]+)`.*?```(?:json|python)\n(.*?)^```", page, re.M | re.S))


class Day:
    """A folder in which the page's commands find and leave `my/`, `data/` and `runs/`."""

    def __init__(self, folder: Path):
        self.folder, self.data, self.runs = folder, folder / "data", folder / "runs"
        (folder / "my").mkdir()
        for name, text in files_of(PAGE.read_text(encoding="utf-8")).items():
            (folder / name).write_text(self.moved(text))

    def moved(self, text: str) -> str:
        """The text with the page's folders in this one."""
        return re.sub(r"(?<![\w/])(my/|runs/|both\.html)", rf"{self.folder}/\1", text)

    def run(self, line: str) -> str:
        """Run a command to its end; returns what it printed."""
        if line.startswith(("mkdir", "for ", "cp ")):
            finished = execute(["bash", "-c", self.moved(line)], **forked_programs())
        elif line.startswith("lm_eval"):
            finished = execute(["forked", "0", "-m", *self.scored(line)])
        else:
            finished = execute(self.words(line), **forked_programs())
        assert finished.code == 0, f"{line}\n{finished.output}"
        return finished.output

    def words(self, line: str) -> list:
        """The command, with forked ranks in place of the launcher's, and its folders in this one."""
        started = LAUNCHER.match(line)
        words = [self.moved(word) for word in shlex.split(LAUNCHER.sub("", line))]
        if "--tasks" in words:
            words = self.scored(line)
        places = ["--data_dir", self.data]
        if words[0] == "train.py":
            name = next((word[5:] for word in words if word.startswith("name=")), Path(words[2]).stem)
            name += "-limited" if "--limit_tokens" in words else ""
            output = [] if "--output_dir" in words else ["--output_dir", self.runs / name]
            small = [] if name == "own-model" else SMALL
            return [*launcher("forked", int(started[1])), *words, *small, *places, *output]
        if "pretraining.sweep" in words:
            return [*words, *SMALL, *places, "--output_dir", self.runs / "sweep"]
        if "pretraining.evaluation" in words:
            return ["forked", "0", *words[1:], *places]
        return [*words, *(places if "data_prep.py" in words else [])]

    def scored(self, line: str) -> list[str]:
        """The words of a command that scores, with local tasks in place of the hub's."""
        tasks = write_tasks(self.folder / "tasks", write_items(self.folder / "items.jsonl"))
        words = [self.moved(word) for word in shlex.split(line)]
        if words[0] != "lm_eval":
            return [str(tasks) if word == "arc_easy,piqa" else word for word in words]
        words = ["read_line" if word == "arc_easy,piqa" else word for word in words]
        return [*words, "--include_path", str(tasks)]

    def end_of(self, name: str) -> dict:
        """The newest value of every metric of a run that has ended."""
        folder = self.runs / name
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        assert events[-1]["event"] == "end" and (folder / "export").is_dir(), folder
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return {key: value for row in rows for key, value in row.items()}


@pytest.fixture(scope="module")
def day(tmp_path_factory) -> Day:
    return Day(tmp_path_factory.mktemp("first_day"))


def test_the_page_has_twelve_tasks_with_commands():
    """Guards the parser: a task whose commands it does not find would test nothing."""
    parts = re.split(r"^## \d+\. ", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
    assert len(parts) == TASKS and all("```bash" in part for part in parts)
    assert len(files_of(PAGE.read_text(encoding="utf-8"))) == 4


def test_every_command_of_the_first_day_works(day):
    """In the page's order, because later tasks use what earlier ones made."""
    for line in commands_of(PAGE):
        if "lm_eval" in line or "--tasks" in line:
            pytest.importorskip("lm_eval", reason="lm-eval is not installed (requirements-eval.txt)")
        if line == "python docs/notebook.py":
            continue  # tests/test_api.py executes it
        day.run(line)
    assert "eval/front-page_loss" in day.end_of("validated")
    first, continued = day.end_of("first"), day.end_of("continued")
    assert continued["eval/loss"] < first["eval/loss"], "continued from what the first run had learned"
    assert day.end_of("with-callback")["train/loss_in_bits"] > day.end_of("with-callback")["train/loss"]
    assert day.end_of("elsewhere")["eval/loss"] == pytest.approx(first["eval/loss"], rel=1e-5)
    assert (day.folder / "both.html").stat().st_size > 10_000
    assert json.loads((day.folder / "my" / "notice.json").read_text())["event"] == "finished"
    day.end_of("own-model")
