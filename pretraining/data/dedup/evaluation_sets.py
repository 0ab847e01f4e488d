"""The texts of evaluation sets: files of a folder, or tasks of lm-eval."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from pretraining.data.manifest import digest_of
from pretraining.data.packages import require
from pretraining.data.text_files import local_file, read_documents
from pretraining.errors import UserError

READ_SUFFIXES = (".txt", ".jsonl", ".jsonl.gz")


def read_evaluation_sets(folder: str | None = None, tasks: list[str] = ()) -> Iterator[tuple[str, str]]:
    """(name of the set, text) of every file in `folder` and its folders, then of every lm-eval task.

    A .txt is one text. Of a .jsonl(.gz) every string in a row is a text, whatever its key, so that questions,
    choices and answers are found by themselves. Raises UserError for what is missing or cannot be read.
    """
    if folder is not None:
        yield from _of_folder(Path(folder))
    for name in tasks:
        yield from ((name, text) for text in _of_task(name))


def fingerprint_of_sets(folder: str | None, tasks: list[str]) -> str:
    """Changes when the files of `folder` do, or the names of the tasks, or lm-eval's version."""
    if folder is None and not tasks:
        raise UserError("data.decontaminate names no evaluation sets: give it a folder, or tasks")
    version = require("lm_eval", "data.decontaminate.tasks").__version__ if tasks else None
    files = [local_file(path, Path(folder)) for path in _files_of(Path(folder))] if folder else []
    return digest_of([(file.name, file.num_bytes, file.version) for file in files], list(tasks), version)


def _files_of(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if path.name.lower().endswith(READ_SUFFIXES))
    if not found:
        raise UserError(
            f"data.decontaminate.folder: {folder} holds no {', '.join(READ_SUFFIXES)}; "
            "name a folder of evaluation sets"
        )
    return found


def _of_folder(folder: Path) -> Iterator[tuple[str, str]]:
    for path in _files_of(folder):
        name = str(path.relative_to(folder))
        texts = _of_text(path) if path.suffix.lower() == ".txt" else _of_json_lines(path)
        yield from ((name, text) for text in texts)


def _of_text(path: Path) -> Iterator[str]:
    for document in read_documents(local_file(path, path.parent)):
        if document.text is None:
            raise UserError(f"{document.where}: not UTF-8 text; convert the file")
        yield document.text


def _of_json_lines(path: Path) -> Iterator[str]:
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield from strings_of(_row(line, f"{path}:line {number}"))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); fetch or convert it again") from error


def _row(line: str, where: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg}); mend or remove the line") from error


def strings_of(value: object) -> Iterator[str]:
    """Every string in a JSON value, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings_of(inner)


def _of_task(name: str) -> Iterator[str]:
    """Every string of the evaluated documents of an lm-eval task, tag or group, and the prompts built of them.

    `name` may also be the path of a task's YAML file.
    """
    managers = require("lm_eval.tasks", f"data.decontaminate.tasks ({name})")
    # Indexing the tasks that lm-eval ships takes half a minute; a file needs none of them.
    manager = managers.TaskManager(include_defaults=not Path(name).is_file())
    for task in _load_tasks(manager, name):
        for document in task.eval_docs:
            yield from strings_of(document)
            yield from strings_of(task.doc_to_text(document))


def _load_tasks(manager, name: str) -> list:
    try:
        return list(manager.load([name])["tasks"].values())
    except KeyError as error:
        raise UserError(
            f"data.decontaminate.tasks: lm-eval knows no task {name!r}; `lm-eval ls tasks` lists them"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"data.decontaminate.tasks: {name} cannot be loaded ({error})") from error
