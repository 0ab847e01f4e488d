"""HellaSwag (Zellers et al. 2019): which of four endings does the model find likeliest?

Prompts, tokens and scores are lm-eval's: an ending is scored alone, given what comes before it.
"""

import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from pretraining.data.packages import require
from pretraining.errors import UserError
from pretraining.evaluation.likelihood import Pair, Score, score
from pretraining.evaluation.tokens import encode_pair

FIELDS = ("activity_label", "ctx_a", "ctx_b", "endings", "label")


class Item(NamedTuple):
    """One question."""

    context: str
    endings: tuple[str, ...]
    right: int
    """Number of the ending that followed."""


class Answer(NamedTuple):
    """What the model chose."""

    plain: int
    """By log-probability."""
    normalised: int
    """By log-probability over the ending's characters, as lm-eval's acc_norm."""


class HellaSwag:
    """Accuracy on the validation set of HellaSwag, by `hellaswag/acc` and `hellaswag/acc_norm`."""

    def __init__(
        self, items: Iterable[Item], tokenizer: PreTrainedTokenizerBase, max_length: int, batch_size: int
    ):
        self.items = list(items)
        self.max_length, self.batch_size = max_length, batch_size
        self.pairs = [
            Pair(*encode_pair(tokenizer, item.context, f" {ending}"))
            for item in self.items
            for ending in item.endings
        ]

    def measure(
        self, model: torch.nn.Module, interrupted: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """Shares of the items answered rightly; every rank must call it. Raises `Interrupted`."""
        answers = self.answers(model, interrupted)
        return {
            "hellaswag/acc": self._share(answer.plain for answer in answers),
            "hellaswag/acc_norm": self._share(answer.normalised for answer in answers),
        }

    def answers(
        self, model: torch.nn.Module, interrupted: Callable[[], bool] = lambda: False
    ) -> list[Answer]:
        """The model's choice in each item."""
        scores = iter(score(model, self.pairs, self.max_length, self.batch_size, interrupted))
        return [_answer(item, [next(scores) for _ in item.endings]) for item in self.items]

    def _share(self, chosen: Iterable[int]) -> float:
        right = [choice == item.right for choice, item in zip(chosen, self.items, strict=True)]
        return sum(right) / len(right)


def _answer(item: Item, scores: list[Score]) -> Answer:
    plain = [each.log_probability for each in scores]
    normalised = [value / max(1, len(ending)) for value, ending in zip(plain, item.endings, strict=True)]
    return Answer(plain.index(max(plain)), normalised.index(max(normalised)))


def read_items(source: str, limit: int | None = None) -> list[Item]:
    """The items of a .jsonl (or .jsonl.gz) file, or of the validation split of a dataset on the hub, at most `limit`.

    Raises `UserError` for what cannot be read, with the line.
    """
    is_file = source.endswith((".jsonl", ".jsonl.gz")) or Path(source).is_file()
    rows = _rows_of_file(Path(source)) if is_file else _rows_of_dataset(source)
    items = []
    for where, row in rows:
        if limit is not None and len(items) >= limit:
            break
        items.append(_item(row, where))
    if not items:
        raise UserError(f"evaluation.hellaswag: {source} holds no items; give the file hellaswag_val.jsonl")
    return items


def _rows_of_file(path: Path) -> Iterator[tuple[str, dict]]:
    opened = gzip.open if path.name.endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:line {number}", json.loads(line)
    except (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"evaluation.hellaswag: {path}: cannot be read ({error}); fetch it again") from error


def _rows_of_dataset(name: str) -> Iterator[tuple[str, dict]]:
    datasets = require("datasets", f"evaluation.hellaswag {name!r}")
    try:
        rows = datasets.load_dataset(name, split="validation")
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"evaluation.hellaswag: {name}: no such file, and no dataset that can be read ({reason}); give a .jsonl "
            "file or a name on the hub, as Rowan/hellaswag"
        ) from error
    yield from ((f"{name}:row {number}", row) for number, row in enumerate(rows, start=1))


def _item(row: dict, where: str) -> Item:
    """An item as lm-eval spells it; label is the number of the right ending, as text or number."""
    missing = [name for name in FIELDS if not isinstance(row, dict) or row.get(name) in (None, "", [])]
    missing = [name for name in missing if name != "ctx_b" or not isinstance(row, dict) or "ctx_b" not in row]
    if missing or not str(row["label"]).isdigit() or int(row["label"]) >= len(row["endings"]):
        what = f"has no {missing[0]}" if missing else f"has the label {row['label']!r}"
        raise UserError(f"evaluation.hellaswag: {where}: {what}; give the validation set of HellaSwag")
    context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
    endings = tuple(_clean(ending) for ending in row["endings"])
    return Item(_clean(f"{row['activity_label']}: {context}"), endings, int(row["label"]))


def _clean(text: str) -> str:
    """Without the marks of WikiHow's layout."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")
