"""Log-probabilities of continuations, and HellaSwag, which is scored by them."""

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from pretraining.ds_config import NOT_SPLIT, Degrees
from pretraining.errors import UserError, require
from pretraining.evaluation.sampling import encode, evaluation_mode
from pretraining.outside.files import COUNT, json_lines
from pretraining.runtime.process_group import rank_groups
from pretraining.schema import fits

HELLASWAG_FIELDS = ("activity_label", "ctx_a", "ctx_b", "endings", "label")


class Pair(NamedTuple):
    """A text of two parts. Only the second part is scored."""

    context: list[int]
    """Tokens, at least one."""
    continuation: list[int]


class Score(NamedTuple):
    """The score of one continuation."""

    log_probability: float
    """In nats, summed over the tokens of the continuation."""
    is_greedy: bool
    """Whether each of these tokens was the likeliest one."""


class Passes(NamedTuple):
    """How texts that are scored go through the model."""

    max_length: int
    """Tokens that the model reads at once. From a longer text the last tokens are read."""
    batch_size: int
    degrees: Degrees = NOT_SPLIT
    """Ranks that split the model's layers read the same texts."""


class ScoringStopped(Exception):
    """Raised if the run is asked to stop: the measurement has no result."""


@torch.no_grad()
def score(
    model: torch.nn.Module,
    pairs: Sequence[Pair],
    passes: Passes,
    interrupted: Callable[[], bool] = lambda: False,
) -> list[Score]:
    """Score each pair: the same on every rank and at any world size. All ranks must call it with the same pairs.

    The ranks share the batches. Pairs of similar length share a batch, longest first, whatever the world size.

    Args:
        interrupted: is called before every round (one batch for each rank), and must return the same on all ranks.

    Raises:
        ScoringStopped: `interrupted` returned True.
    """
    groups, size = rank_groups(passes.degrees), passes.batch_size
    rank, ranks = groups.evaluating
    # Longest first: a batch that does not fit in memory fails at once, and padding stays small.
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i].context) - len(pairs[i].continuation))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    scores = torch.zeros(len(pairs), 2, dtype=torch.float64, device=next(model.parameters()).device)
    with evaluation_mode(model):
        for round_start in range(0, len(batches), ranks):
            if interrupted():
                raise ScoringStopped
            number = round_start + rank
            # Under ZeRO-3 a forward pass is a collective: a rank that runs out repeats the shortest batch without
            # effect.
            batch = batches[min(number, len(batches) - 1)]
            found = _score_batch(model, [pairs[index] for index in batch], passes.max_length)
            if number < len(batches) and not groups.tensor_part:
                scores.index_copy_(0, _on(scores.device, batch), found)
    if groups.world_size > 1:
        dist.all_reduce(scores)  # each pair has one rank's score, and zeros from all others
    # The host waits for the device only here: all scores stayed there until now.
    return [Score(nats, greedy == 1.0) for nats, greedy in scores.tolist()]


def _score_batch(model: torch.nn.Module, pairs: Sequence[Pair], max_length: int) -> torch.Tensor:
    """Score one batch: [pairs, 2] in fp64, the log-probability and 1 if all tokens are the likeliest."""
    device = next(model.parameters()).device
    # Padding is on the right: earlier positions of a causal model do not see it.
    # One token more than the model reads: the last one is only a target.
    texts = [(pair.context + pair.continuation)[-(max_length + 1) :] for pair in pairs]
    width = max(2, *map(len, texts)) - 1  # an input has at least one token
    rows = [text[:-1] + [0] * (width + 1 - len(text)) for text in texts]
    logits = model(input_ids=_on(device, rows)).logits
    scores = []
    for row, text, pair in zip(logits, texts, pairs, strict=True):
        end, count = len(text) - 1, min(len(pair.continuation), len(text) - 1)
        if not count:
            scores.append(torch.tensor([0.0, 1.0], dtype=torch.float64, device=device))
            continue
        # Only the rows that are scored go to fp32: all of a batch may be gigabytes.
        logs = torch.log_softmax(row[end - count : end].float(), -1)
        targets = _on(device, text[end - count + 1 :])
        chosen = logs.gather(1, targets[:, None]).double().sum()
        scores.append(torch.stack([chosen, (logs.argmax(-1) == targets).all().double()]))
    return torch.stack(scores)


def _on(device: torch.device, numbers: list) -> torch.Tensor:
    """Copy integers to the device; the host does not wait for the copy."""
    return torch.tensor(numbers).to(device, non_blocking=True)


def encode_pair(
    tokenizer: PreTrainedTokenizerBase, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Encode context and continuation as one text, cut at the end of the context's tokens.

    Spaces at the end of the context belong to the continuation, as in lm-eval. An empty context is the end-of-text
    token, with which every document begins.
    """
    spaces = len(context) - len(context.rstrip())
    if spaces:
        continuation = context[-spaces:] + continuation
        context = context[:-spaces]
    if not context:
        return [tokenizer.eos_token_id], encode(tokenizer, continuation)
    # The whole text is encoded, because a token may reach over the border.
    whole, before = encode(tokenizer, context + continuation), encode(tokenizer, context)
    return whole[: len(before)], whole[len(before) :]


class Item(NamedTuple):
    """One question of HellaSwag."""

    context: str
    endings: tuple[str, ...]
    right: int
    """Number of the ending that followed."""


class Choice(NamedTuple):
    """The ending that the model chose."""

    plain: int
    """By log-probability."""
    normalised: int
    """By log-probability divided by the ending's characters, as lm-eval's acc_norm."""


class HellaSwag:
    """HellaSwag (Zellers et al. 2019): which of four endings does the model find likeliest?

    Prompts, tokens and scores are lm-eval's: an ending is scored alone, given what comes before it.
    """

    def __init__(self, items: Iterable[Item], tokenizer: PreTrainedTokenizerBase, passes: Passes) -> None:
        self.items, self.passes = list(items), passes
        self.pairs = [
            Pair(*encode_pair(tokenizer, item.context, f" {ending}"))
            for item in self.items
            for ending in item.endings
        ]

    def num_items(self) -> dict[str, int]:
        """Count what is scored, by a name for it."""
        return {"evaluation.hellaswag, endings": len(self.pairs)}

    def measure(
        self, model: torch.nn.Module, interrupted: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """Compute {"hellaswag/acc", "hellaswag/acc_norm"}; every rank must call it. Raises `ScoringStopped`."""
        chosen = list(zip(self.items, self.answers(model, interrupted), strict=True))
        right = sum(choice.plain == item.right for item, choice in chosen)
        right_norm = sum(choice.normalised == item.right for item, choice in chosen)
        return {"hellaswag/acc": right / len(chosen), "hellaswag/acc_norm": right_norm / len(chosen)}

    def answers(
        self, model: torch.nn.Module, interrupted: Callable[[], bool] = lambda: False
    ) -> list[Choice]:
        """Find the model's choice in each item."""
        # scores come in the order of the pairs: the endings of the first item, then of the next
        scores = iter(score(model, self.pairs, self.passes, interrupted))
        answers = []
        for item in self.items:
            plain = [next(scores).log_probability for _ in item.endings]
            # An ending may be empty once its marks are removed.
            normalised = [
                nats / max(1, len(ending)) for nats, ending in zip(plain, item.endings, strict=True)
            ]
            # The first of equal ones, as argmax does.
            answers.append(Choice(plain.index(max(plain)), normalised.index(max(normalised))))
        return answers


def read_items(source: str, limit: int | None = None) -> list[Item]:
    """Read at most `limit` items of a .jsonl (or .jsonl.gz) file, or of the validation split of a dataset on the hub.

    Raises:
        UserError: something cannot be read; the message names the line.
    """
    is_file = source.endswith((".jsonl", ".jsonl.gz")) or Path(source).is_file()
    rows = _rows_of_file(Path(source)) if is_file else _rows_of_dataset(source)
    items = [_item(row, where) for where, row in islice(rows, limit)]
    if not items:
        raise UserError(f"evaluation.hellaswag: {source} holds no items; give the file hellaswag_val.jsonl")
    return items


def _rows_of_file(path: Path) -> Iterator[tuple[str, dict]]:
    try:
        for number, row in json_lines(path):
            yield f"{path}:line {number}", row
    except (OSError, EOFError, ValueError, zlib.error) as error:
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


_ITEM = {
    **{key: {"type": "string"} for key in ("activity_label", "ctx_a", "ctx_b")},
    "endings": {"type": "array", "items": {"type": "string"}},
    "label": {"anyOf": [COUNT, {"type": "string", "pattern": "[0-9]{1,9}"}]},
}


def _item(row: dict, where: str) -> Item:
    """Spell an item as lm-eval does; `label` is the number of the right ending, as text or number."""
    given = row if isinstance(row, dict) else {}
    missing = [name for name in HELLASWAG_FIELDS if given.get(name) in (None, "", [])]
    if "ctx_b" in given:  # may be empty
        missing = [name for name in missing if name != "ctx_b"]
    odd = [] if missing else [name for name, schema in _ITEM.items() if not fits(row[name], schema)]
    if missing or odd or int(row["label"]) >= len(row["endings"]):
        wrong = (odd or ["label"])[0]
        what = f"has no {missing[0]}" if missing else f"has the {wrong} {row[wrong]!r}"
        raise UserError(f"evaluation.hellaswag: {where}: {what}; give the validation set of HellaSwag")
    context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
    endings = tuple(_clean(ending) for ending in row["endings"])
    return Item(_clean(f"{row['activity_label']}: {context}"), endings, int(row["label"]))


def _clean(text: str) -> str:
    """Remove the marks of WikiHow's layout."""
    # The same three replacements as lm-eval's, in the same order: scores must agree item by item.
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")
