"""Decontamination: find training documents that hold a part of an evaluation set, and read such sets.

A document is found by a shared n-gram of words (13 by default, as in Brown et al. 2020, appendix C), normalised as in
`ngrams`. Shorter evaluation texts are searched for whole, down to `shortest` words. Still shorter ones would be found
everywhere: they are left out and counted.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from pretraining.data.checksums import checksum_of_file, digest_of
from pretraining.data.dedup.ngrams import batches_of, ngrams_of, units_of
from pretraining.data.quality.chain import added
from pretraining.data.text_files import files_below, local_file, read_documents, unread_note
from pretraining.errors import UserError, require
from pretraining.outside.files import UNREADABLE, json_lines
from pretraining.recipe.data import Decontaminate

_FILTER_BITS = 24
"""A table of 2**24 bytes shows for most n-grams that they are in no evaluation set."""

_NUM_EXAMPLES = 5

_READ_SUFFIXES = (".txt", ".jsonl", ".jsonl.gz")


@dataclass
class ContaminationIndex:
    """The n-grams of all evaluation sets, which are searched for in training documents."""

    spec: Decontaminate
    names: list[str]
    hashes: dict[int, np.ndarray]
    """{words in the n-gram: uint64, ascending}."""
    owners: dict[int, np.ndarray]
    """{words in the n-gram: int32, the set each hash was first seen in}."""
    texts: list[int]
    """Texts of each set."""
    too_short: list[int]
    """Those of them that are too short to look for."""

    def __post_init__(self):
        self._filters = {}
        for length, hashes in self.hashes.items():
            self._filters[length] = np.zeros(1 << _FILTER_BITS, np.bool_)
            self._filters[length][_bucket(hashes)] = True

    def check(self, texts: Sequence[str], wheres: Sequence[str]) -> tuple[np.ndarray, dict]:
        """Return bool [texts], whether each is contaminated, and a report (`merge_reports` adds those of batches).

        For every evaluation set with a find it holds the documents dropped, and examples: where each text comes from
        (`wheres`) and the shared words.
        """
        contaminated = np.zeros(len(texts), np.bool_)
        report: dict[str, Any] = {"documents": len(texts), "dropped": 0, "sets": {}}
        done = 0
        for batch in batches_of(texts):
            units = units_of(batch)
            finds = np.zeros((0, 4), np.int64)  # of text, first word, words and set
            for length, hashes in self.hashes.items():
                windows = ngrams_of(units, length)
                # The table spares most n-grams the binary search.
                likely = np.flatnonzero(self._filters[length][_bucket(windows.hashes)])
                places = np.minimum(np.searchsorted(hashes, windows.hashes[likely]), len(hashes) - 1)
                sure = hashes[places] == windows.hashes[likely]
                # From the number of the n-gram to the number of its first word: texts have fewer n-grams than words.
                where, owner = likely[sure], self.owners[length][places[sure]]
                text = np.searchsorted(windows.first, where, side="right") - 1
                word = where - windows.first[text] + units.first[text]
                found = np.column_stack([text, word, np.full(len(text), length), owner])
                finds = np.concatenate([finds, found])
            # By text, then by word, so that examples show the first find of a document.
            finds = finds[np.lexsort((finds[:, 1], finds[:, 0]))]
            counts = np.diff(units.first)
            begun = np.unique(finds[:, :2], axis=0)[:, 0]  # lengths that begin at the same word count once
            hits = np.bincount(begun, minlength=len(counts))
            # A document shorter than one n-gram counts as one n-gram.
            ngrams = np.maximum(counts - self.spec.ngram + 1, 1)
            dropped = (hits > 0) & (hits >= self.spec.share * ngrams)
            contaminated[done : done + len(batch)] = dropped
            # A find in a document that is kept is not reported, and of others each set once.
            finds = finds[dropped[finds[:, 0]]]
            firsts = np.unique(finds[:, [0, 3]], axis=0, return_index=True)[1]
            ends = np.append(units.starts, len(units.texts))
            for text, word, length, owner in finds[np.sort(firsts)].tolist():
                entry = report["sets"].setdefault(self.names[owner], {"dropped": 0, "examples": []})
                entry["dropped"] += 1
                if len(entry["examples"]) < _NUM_EXAMPLES:
                    words = units.texts[ends[word] : ends[word + length]]
                    example = {"where": wheres[done + text], "words": " ".join(words.split()).lower()}
                    entry["examples"].append(example)
            done += len(batch)
        report["dropped"] = int(contaminated.sum())
        return contaminated, report


def build_index(texts: Iterable[tuple[str, str]], spec: Decontaminate) -> ContaminationIndex:
    """Index (evaluation set, text) pairs; a set is counted in the order of its first text."""
    names: dict[str, int] = {}
    hashes, owners = {}, {}
    num_texts, too_short = Counter(), Counter()
    for name, text in texts:
        owner = names.setdefault(name, len(names))
        num_texts[owner] += 1
        units = units_of([text])
        length = min(spec.ngram, len(units.hashes))
        # A text too short to look for is counted, so that the report shows it.
        too_short[owner] += length < spec.shortest
        if length >= spec.shortest:
            found = ngrams_of(units, max(length, 1)).hashes
            hashes.setdefault(length, []).append(found)
            owners.setdefault(length, []).append(np.full(len(found), owner, np.int32))
    distinct, first_owners = {}, {}
    for length in sorted(hashes):
        # The first occurrence, so that the owner is the set that was read first.
        distinct[length], first = np.unique(np.concatenate(hashes[length]), return_index=True)
        first_owners[length] = np.concatenate(owners[length])[first]
    counts = ([counter[owner] for owner in names.values()] for counter in (num_texts, too_short))
    return ContaminationIndex(spec, list(names), distinct, first_owners, *counts)


def _bucket(hashes: np.ndarray) -> np.ndarray:
    return (hashes >> np.uint64(64 - _FILTER_BITS)).astype(np.int64)


def merge_reports(reports: Iterable[dict]) -> dict:
    """Add up reports, in the order of their texts."""
    nothing: dict = {"documents": 0, "dropped": 0, "sets": {}}
    return reduce(partial(added, most_examples=_NUM_EXAMPLES), reports, nothing)


def read_evaluation_sets(folder: str | None = None, tasks: list[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield (name of the set, text) of every file in `folder` and its folders, then of lm-eval tasks, tags and groups.

    A .txt is one text. Of a .jsonl(.gz) every string in a row is one, whatever its key: questions, choices and answers
    are found by themselves. Raises UserError for what is missing or cannot be read.
    """
    for path in _files_of(Path(folder)) if folder is not None else ():
        name = str(path.relative_to(folder))
        if path.suffix.lower() == ".txt":
            for document in read_documents(local_file(path, path.parent)):
                if document.text is None:
                    raise UserError(f"{document.where}: not UTF-8 text; convert the file")
                yield name, document.text
            continue
        try:
            for _, value in json_lines(path):
                yield from ((name, text) for text in _strings_of(value))
        except ValueError as error:
            raise UserError(f"{path}:{error}; mend or remove the line") from error
        except UNREADABLE as error:
            raise UserError(f"{path}: cannot be read ({error}); fetch or convert it again") from error
    for name in tasks:
        managers = require("lm_eval.tasks", f"data.decontaminate.tasks ({name})")
        # Indexing the tasks that lm-eval ships takes half a minute; a YAML file needs none of them.
        manager = managers.TaskManager(include_defaults=not Path(name).is_file())
        try:
            loaded = list(manager.load([name])["tasks"].values())
        except KeyError as error:
            what = f"lm-eval knows no task {name!r}; `lm-eval ls tasks` lists them"
            raise UserError(f"data.decontaminate.tasks: {what}") from error
        except (OSError, ValueError) as error:
            raise UserError(f"data.decontaminate.tasks: {name} cannot be loaded ({error})") from error
        for task in loaded:
            for document in task.eval_docs:
                # The prompt too: a task may build it from parts that are in no field.
                for part in (document, task.doc_to_text(document)):
                    yield from ((name, text) for text in _strings_of(part))


def fingerprint_of_sets(folder: str | None, tasks: list[str]) -> str:
    """Return a digest of the files of `folder`, the names of the tasks, their YAML files, and lm-eval's version."""
    # Another version of lm-eval may build other prompts from the same data.
    version = require("lm_eval", "data.decontaminate.tasks").__version__ if tasks else None
    files = [local_file(path, Path(folder)) for path in _files_of(Path(folder))] if folder else []
    read = [(file.name, file.num_bytes, file.version) for file in files]
    # A digest of names alone stays what it was.
    return digest_of(read, list(tasks), version, *checksums_of_tasks(tasks))


def checksums_of_tasks(tasks: list[str]) -> list[str]:
    """Compute those of the YAML files among lm-eval tasks, without the files that these name."""
    return [checksum_of_file(Path(name)) for name in tasks if Path(name).is_file()]


def note_of_sets(folder: str) -> str | None:
    """Say which files of a folder of evaluation sets are not read; None: all are."""
    unread: Counter[str] = Counter()
    found = _files_of(Path(folder), unread)
    remedy = f"convert them to {', '.join(_READ_SUFFIXES)}"
    return unread_note("data.decontaminate.folder", unread, len(found), remedy) if unread else None


def _files_of(folder: Path, unread: Counter[str] | None = None) -> list[Path]:
    key, counter = "data.decontaminate.folder", Counter() if unread is None else unread
    found = sorted(files_below(folder, key, _READ_SUFFIXES, counter)) if folder.is_dir() else []
    if not found:
        what = f"{folder} holds no {', '.join(_READ_SUFFIXES)}; name a folder of evaluation sets"
        raise UserError(f"data.decontaminate.folder: {what}")
    return found


def _strings_of(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings_of(inner)
