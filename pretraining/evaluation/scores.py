"""Scores of a model in training or exported: HellaSwag and the tasks of lm-eval, which it answers or continues."""

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import stdev
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from pretraining.ds_config import NOT_SPLIT, Degrees
from pretraining.errors import UserError, nearest, reason_of, require
from pretraining.evaluation.sampling import continued, encode, encode_start, evaluation_mode, seeded
from pretraining.outside.files import COUNT, NUMBER, TEXT, UNREADABLE, json_lines, object_of
from pretraining.outside.schema import check, fits, read_json
from pretraining.runtime.process_group import gather_from_ranks, rank_groups
from pretraining.upstream.lm_eval import no_task_bars

SEED = 1234
"""The seed that lm-eval itself uses for few-shot examples."""
SUFFIXES = (".yaml", ".yml")
PASSED_ON = ("do_sample", "top_k", "top_p")
"""Generation arguments of a task that `generate` takes unchanged."""


class Pair(NamedTuple):
    """A text of two parts. Only the second part is scored."""

    context: list[int]
    """Tokens, at least one."""
    continuation: list[int]


class Score(NamedTuple):
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


class MeasurementStopped(Exception):
    """Raised if the run is asked to stop: the measurement has no result."""


Asked = Callable[[], bool]
"""Answers whether the run is asked to stop; called before every round, it must return the same on all ranks."""


def never() -> bool:
    return False


def own_of_rounds(count: int, rank: int, ranks: int, interrupted: Asked) -> Iterator[int]:
    """Yield this rank's number in every round of `count` pieces of work; from `count` on there is nothing left for it.

    `MeasurementStopped` if the run is asked to stop.
    """
    for first in range(0, count, ranks):
        if interrupted():
            raise MeasurementStopped
        yield first + rank


@torch.no_grad()
def score(model: nn.Module, pairs: Sequence[Pair], passes: Passes, interrupted: Asked = never) -> list[Score]:
    """Score each pair: the same on every rank and at any world size. All ranks must call it with the same pairs.

    The ranks share the batches. Pairs of similar length share a batch, longest first, whatever the world size.
    """
    groups, size = rank_groups(passes.degrees), passes.batch_size
    # Longest first: a batch that does not fit in memory fails at once, and padding stays small.
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i].context) - len(pairs[i].continuation))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    device = next(model.parameters()).device
    # of each pair the log-probability, and 1 if all tokens are the likeliest
    scores = torch.zeros(len(pairs), 2, dtype=torch.float64, device=device)
    with evaluation_mode(model):
        for number in own_of_rounds(len(batches), *groups.evaluating, interrupted):
            # Under ZeRO-3 a forward pass is a collective: a rank that runs out repeats the shortest batch without
            # effect.
            batch = [pairs[index] for index in batches[min(number, len(batches) - 1)]]
            # Padding is on the right: earlier positions of a causal model do not see it.
            # One token more than the model reads: the last one is only a target.
            texts = [(pair.context + pair.continuation)[-(passes.max_length + 1) :] for pair in batch]
            width = max(2, *map(len, texts)) - 1  # an input has at least one token
            rows = [text[:-1] + [0] * (width + 1 - len(text)) for text in texts]
            found, logits = [], model(input_ids=_on(device, rows)).logits
            for row, text, pair in zip(logits, texts, batch, strict=True):
                end, count = len(text) - 1, min(len(pair.continuation), len(text) - 1)
                if not count:
                    found.append(torch.tensor([0.0, 1.0], dtype=torch.float64, device=device))
                    continue
                # Only the rows that are scored go to fp32: all of a batch may be gigabytes.
                logs = torch.log_softmax(row[end - count : end].float(), -1)
                targets = _on(device, text[end - count + 1 :])
                chosen = logs.gather(1, targets[:, None]).double().sum()
                found.append(torch.stack([chosen, (logs.argmax(-1) == targets).all().double()]))
            if number < len(batches) and not groups.tensor_part:
                scores.index_copy_(0, _on(device, batches[number]), torch.stack(found))
    if groups.world_size > 1:
        dist.all_reduce(scores)  # each pair has one rank's score, and zeros from all others
    # The host waits for the device only here: all scores stayed there until now.
    return [Score(nats, greedy == 1.0) for nats, greedy in scores.tolist()]


def _on(device: torch.device, numbers: list) -> torch.Tensor:
    """Copy integers to the device; the host does not wait for the copy."""
    return torch.tensor(numbers).to(device, non_blocking=True)


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Encode context and continuation as one text, cut at the end of the context's tokens.

    Spaces at the end of the context belong to the continuation, as in lm-eval. An empty context is the token with
    which every document begins (`encode_start`).
    """
    spaces = len(context) - len(context.rstrip())
    if spaces:
        continuation = context[-spaces:] + continuation
        context = context[:-spaces]
    if not context:
        tokens = encode(tokenizer, continuation)
        # lm-eval: a continuation that begins with the end-of-text token brings its own context
        start = encode_start(tokenizer, "")
        return (tokens[:1], tokens[1:]) if tokens[:1] == start else (start, tokens)
    # The whole text is encoded, because a token may reach over the border.
    whole, before = encode_start(tokenizer, context + continuation), encode_start(tokenizer, context)
    return whole[: len(before)], whole[len(before) :]


class Item(NamedTuple):
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

    def __init__(self, items: Iterable[Item], tokenizer: Tokenizer, passes: Passes) -> None:
        self.items, self.passes = list(items), passes
        texts = [(item.context, f" {ending}") for item in self.items for ending in item.endings]
        self.pairs = [Pair(*encode_pair(tokenizer, *text)) for text in texts]

    def num_items(self) -> dict[str, int]:
        return {"evaluation.hellaswag, endings": len(self.pairs)}

    def measure(self, model: nn.Module, interrupted: Asked = never) -> dict[str, float]:
        """Compute {"hellaswag/acc", "hellaswag/acc_norm"}; every rank must call it. Raises `MeasurementStopped`."""
        answers = zip(self.items, self.answers(model, interrupted), strict=True)
        chosen = [(item, choice) for item, choice in answers if choice is not None]
        if len(chosen) < len(self.items):
            return dict.fromkeys(("hellaswag/acc", "hellaswag/acc_norm"), math.nan)
        right = sum(choice.plain == item.right for item, choice in chosen)
        right_norm = sum(choice.normalised == item.right for item, choice in chosen)
        return {"hellaswag/acc": right / len(chosen), "hellaswag/acc_norm": right_norm / len(chosen)}

    def answers(self, model: nn.Module, interrupted: Asked = never) -> list[Choice | None]:
        """Find the model's choice in each item; None where its logits are not finite."""
        # scores come in the order of the pairs: the endings of the first item, then of the next
        scores = iter(score(model, self.pairs, self.passes, interrupted))
        answers: list[Choice | None] = []
        for item in self.items:
            plain = [next(scores).log_probability for _ in item.endings]
            # An ending may be empty once its marks are removed.
            both = zip(plain, item.endings, strict=True)
            normalised = [nats / max(1, len(ending)) for nats, ending in both]
            # The first of equal ones, as argmax does.
            choice = Choice(plain.index(max(plain)), normalised.index(max(normalised)))
            answers.append(None if math.isnan(sum(plain)) else choice)
        return answers


_ITEM = {
    **dict.fromkeys(("activity_label", "ctx_a", "ctx_b"), TEXT),
    "endings": {"type": "array", "items": TEXT},
    "label": {"anyOf": [COUNT, {"type": "string", "pattern": "[0-9]{1,9}"}]},
}


def read_items(source: str, limit: int | None = None) -> list[Item]:
    """Read at most `limit` items of a .jsonl (or .jsonl.gz) file, or of the validation split of a dataset on the hub.

    Raises `UserError`: something cannot be read; the message names the line.
    """
    if source.endswith((".jsonl", ".jsonl.gz")) or Path(source).is_file():
        try:
            rows = [(f"line {number}", row) for number, row in islice(json_lines(Path(source)), limit)]
        except (*UNREADABLE, ValueError) as error:
            remedy = "check the path" if isinstance(error, FileNotFoundError) else "fetch it again"
            what = f"{source}: cannot be read ({reason_of(error)}); {remedy}"
            raise UserError(f"evaluation.hellaswag: {what}") from error
    else:
        import datasets

        try:
            split = datasets.load_dataset(source, split="validation")
        except (OSError, ValueError, RuntimeError) as error:
            reason = reason_of(error)
            what = f"evaluation.hellaswag: {source}: no such file, and no dataset that can be read ({reason})"
            raise UserError(f"{what}; give a .jsonl file or a name on the hub, as Rowan/hellaswag") from error
        rows = [(f"row {number}", row) for number, row in enumerate(islice(split, limit), start=1)]
    if not rows:
        raise UserError(f"evaluation.hellaswag: {source} holds no items; give the file hellaswag_val.jsonl")
    items = []
    for place, row in rows:
        given = row if isinstance(row, dict) else {}
        there = {name for name, value in given.items() if name == "ctx_b" or value not in (None, "", [])}
        missing = [name for name in _ITEM if name not in there]
        odd = [] if missing else [name for name, schema in _ITEM.items() if not fits(row[name], schema)]
        if missing or odd or int(row["label"]) >= len(row["endings"]):
            wrong = (odd or ["label"])[0]
            what = f"has no {missing[0]}" if missing else f"has the {wrong} {row[wrong]!r}"
            where = f"evaluation.hellaswag: {source}:{place}"
            raise UserError(f"{where}: {what}; give the validation set of HellaSwag")
        # spelled as lm-eval does; `label` is the number of the right ending, as text or number
        context = _clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
        items.append(Item(context, tuple(map(_clean, row["endings"])), int(row["label"])))
    return items


def _clean(text: str) -> str:
    # Without the marks of WikiHow's layout, by the three replacements of lm-eval, in its order: scores must agree.
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


class Harness:
    """Tasks of lm-eval. They are loaded with their data before there is a model.

    Args:
        names: tasks, tags or groups of lm-eval, YAML files, folders of YAML files, or sets of tasks.
        limit: items of each task.
    """

    def __init__(
        self, names: Sequence[str], tokenizer: Tokenizer, passes: Passes, limit: int | None = None
    ) -> None:
        self.sets = {name: read_set(name) for name in names if is_set(name)}
        self.loaded = load_tasks([name for name in names if name not in self.sets], self.sets)
        self.tokenizer, self.passes, self.limit = tokenizer, passes, limit

    def num_items(self) -> dict[str, int]:
        tasks = self.loaded["tasks"].items()
        return {f"evaluation.tasks, items of {name}": len(task.eval_docs) for name, task in tasks}

    def measure(self, model: nn.Module, interrupted: Asked = never) -> dict[str, float]:
        """Compute {"<task>/<metric>": score}, the same on every rank; all ranks must call it.

        Every rank builds all requests, and the ranks share the forward passes. Raises `MeasurementStopped`.
        """
        from lm_eval.evaluator import evaluate  # optional: only a recipe with tasks needs it

        answering = HarnessModel(model, self.tokenizer, self.passes, interrupted)
        # Tasks draw the same random numbers each time, without effect on training's generators: Python's, numpy's and
        # torch's.
        states = random.getstate(), np.random.get_state()
        random.seed(SEED)
        np.random.seed(SEED)
        try:
            with seeded(SEED, next(model.parameters()).device), no_task_bars():
                # no bootstrap: errors of the estimates are not logged, and take minutes
                settings = {"limit": self.limit, "bootstrap_iters": 0, "log_samples": False}
                results = evaluate(answering, self.loaded, **settings)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
        found = scores_of(results["results"])
        # of scores that are no numbers lm-eval takes the first for the largest
        found = found if answering.is_finite else dict.fromkeys(found, math.nan)
        for name, chosen in self.sets.items():
            found |= summary_of(Path(name).stem, chosen, found)
        return found


class HarnessModel:
    """A causal language model as lm-eval's `evaluate` asks it (its class `LM`).

    Every rank gets all requests, and the ranks share the forward passes: to lm-eval it is one process.

    model: wrapped as in training (a DeepSpeed engine, DDP), or bare.
    """

    rank, world_size = 0, 1

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, passes: Passes, interrupted: Asked = never
    ) -> None:
        self.model, self.tokenizer, self.passes, self.interrupted = model, tokenizer, passes, interrupted
        self.is_finite = True  # every log-probability so far

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        pairs = [Pair(*encode_pair(self.tokenizer, *request.args)) for request in requests]
        scores = score(self.model, pairs, self.passes, self.interrupted)
        self.is_finite &= not any(math.isnan(each.log_probability) for each in scores)
        return [tuple(each) for each in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Sum the log-probability of whole texts: each token once, after as much context as a window holds."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        # The first window of a text has as its context the token with which documents begin.
        (prefix,) = encode_start(self.tokenizer, "")
        settings = {"prefix_token": prefix, "max_seq_len": self.passes.max_length}
        texts = [encode(self.tokenizer, *request.args) for request in requests]
        cut = [get_rolling_token_windows(text, context_len=1, **settings) for text in texts]
        windows = [[Pair(*make_disjoint_window(window)) for window in text] for text in cut]
        pairs = [window for text in windows for window in text]
        scores = iter(score(self.model, pairs, self.passes, self.interrupted))
        return [sum(next(scores).log_probability for _ in text) for text in windows]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Continue up to a stop string, greedy unless the task says otherwise; each rank takes a request a round."""
        from lm_eval.models.utils import normalize_gen_kwargs

        groups = rank_groups(self.passes.degrees)
        texts: list[str | None] = [None] * len(requests)
        # One limit for all requests, because a rank that is done goes on with the longest of a round. Half of the
        # model's positions at most, so that there is room for the question.
        settings = [normalize_gen_kwargs(request.args[1]) for request in requests]
        most_tokens = min(max(each["max_gen_toks"] for each in settings), self.passes.max_length // 2)
        for own in own_of_rounds(len(requests), *groups.evaluating, self.interrupted):
            # A forward pass may be a collective: a rank that runs out repeats the last request without effect.
            number = min(own, len(requests) - 1)
            texts[number] = self._continued(requests[number].args[0], settings[number], most_tokens)
        shares = zip(*gather_from_ranks(texts), strict=True)
        return [next(text for text in column if text is not None) for column in shares]

    def _continued(self, context: str, settings: dict, most_tokens: int) -> str:
        # The end of a long context stays: the question comes last.
        ids = encode_start(self.tokenizer, context)[-(self.passes.max_length - most_tokens) :]
        sampling = {key: settings[key] for key in PASSED_ON if key in settings}
        # lm-eval 0.4.13 adds temperature 0 to greedy tasks, which `generate` does not need.
        if settings["do_sample"]:
            sampling["temperature"] = settings["temperature"]
        # An empty stop string would end every text at once.
        stops = [stop for stop in settings["until"] if stop]
        sampling |= {"stop_strings": stops} if stops else {}
        # An engine or DDP wraps the model that has `generate`.
        model = getattr(self.model, "module", self.model)
        num_tokens = min(settings["max_gen_toks"], most_tokens)
        found = continued(model, self.tokenizer, ids, num_tokens, **sampling) or []  # no answer of a NaN
        # `generate` stops after the stop string: cut it off, as lm-eval does
        text = self.tokenizer.decode(found, skip_special_tokens=True)
        return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


SETS = Path(__file__).with_name("sets")
_WORD = {**TEXT, "minLength": 1}
_CHANCE = {**NUMBER, "minimum": 0, "exclusiveMaximum": 1}
_ROW = object_of({"task": _WORD, "shots": COUNT, "metric": _WORD, "chance": _CHANCE})
_ROWS = {"type": "array", "items": {**_ROW, "additionalProperties": False}, "minItems": 1}
_RUNS = {"type": "array", "items": NUMBER, "minItems": 2}
_SPREAD = object_of({"runs": _RUNS})
_SET = object_of({"tasks": _ROWS, "metric": {"enum": ["mean", "centered"]}}, {"spread": _SPREAD})


def is_set(name: str) -> bool:
    """Return whether `evaluation.tasks` names a set of tasks: one of SETS, or a file of the same kind."""
    return name.endswith(".json") or (SETS / f"{name}.json").is_file()


def read_set(name: str) -> dict:
    """Read a set: its tasks with examples, metric and chance, and how their scores become one."""
    path = Path(name) if name.endswith(".json") else SETS / f"{name}.json"
    return check(read_json(path), _SET, f"evaluation.tasks: {name}")


def score_name(set_name: str, row: dict) -> str:
    """Return what a task of a set is called: it may be there twice, with other examples."""
    return f"{set_name}_{Path(row['task']).stem}_{row['shots']}"


def summary_of(set_name: str, chosen: dict, found: dict[str, float]) -> dict[str, float]:
    """Compute the score of a set, and the deviation of repeated runs if it is published: {"dclm_core/centered": ...}.

    centered: of each task what is above chance, in parts of what could be (CORE: Li et al. 2024, section 3.5).
    """
    summed = 0.0
    for row in chosen["tasks"]:
        name = f"{score_name(set_name, row)}/{row['metric']}"
        if name not in found:
            there = nearest(name, found) or f"; there are {', '.join(found)}"
            raise UserError(
                f"evaluation.tasks: {set_name} has the metric {name}, which its task does not{there}"
            )
        chance = row["chance"] if chosen["metric"] == "centered" else 0.0
        summed += (found[name] - chance) / (1 - chance)
    summary = {f"{set_name}/{chosen['metric']}": summed / len(chosen["tasks"])}
    if "spread" in chosen:
        summary[f"{set_name}/deviation_of_runs"] = stdev(chosen["spread"]["runs"])
    return summary


def load_tasks(names: Sequence[str], sets: Mapping[str, dict] = MappingProxyType({})) -> dict:
    """Load what `lm_eval.evaluator.evaluate` takes, with as many few-shot examples as each task or set says.

    Raises `UserError`: lm-eval is missing, knows no such task, or cannot read its data.
    """
    managers = require("lm_eval.tasks", f"evaluation.tasks ({', '.join([*names, *sets])})")
    rows = {score_name(Path(name).stem, row): row for name, each in sets.items() for row in each["tasks"]}
    of_sets = list(dict.fromkeys(row["task"] for row in rows.values()))
    folders = [name for name in names if Path(name).is_dir()]
    shipped = [name for name in [*names, *of_sets] if name not in folders and not name.endswith(SUFFIXES)]
    # Indexing the tasks that lm-eval ships takes half a minute; files need none of them.
    manager = managers.TaskManager(include_path=folders or None, include_defaults=bool(shipped))
    wanted = [name for name in names if name not in folders]
    for folder in folders:
        inside = managers.TaskManager(include_path=folder, include_defaults=False).all_tasks
        if not inside:
            what = "holds no task of lm-eval; give a folder of YAML files"
            raise UserError(f"evaluation.tasks: {folder} {what}")
        wanted += inside
    for name in [*wanted, *of_sets]:
        if name not in manager.all_tasks and not Path(name).is_file():
            known = nearest(name, manager.all_tasks) or "; `lm-eval ls tasks` lists them"
            raise UserError(f"evaluation.tasks: lm-eval knows no task {name!r}{known}")
    try:
        loaded = manager.load(wanted)
        for name, row in rows.items():
            # one for each row: their examples differ
            [task] = manager.load([row["task"]])["tasks"].values()
            task.set_config(key="num_fewshot", value=row["shots"])
            loaded["tasks"][name] = task
    except UserError:
        raise
    except Exception as error:  # from a task's own code, its YAML, its data set or the network
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        what = f"{', '.join(wanted)} cannot be loaded ({reason}); check the names and the network"
        raise UserError(f"evaluation.tasks: {what}") from error
    for task in loaded["tasks"].values():
        # The same defaults as lm-eval's own command.
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)
    return loaded


def scores_of(results: dict[str, dict]) -> dict[str, float]:
    """Name scores: {"arc_easy/acc": 0.4} from lm-eval's {"arc_easy": {"acc,none": 0.4, "acc_stderr,none": ...}}.

    A task's own filter stays in the name: "gsm8k/exact_match.strict-match".
    """
    scores = {}
    for task, values in results.items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            # Keys without a comma, such as "alias", are no scores.
            if isinstance(value, int | float) and kind and not metric.endswith("_stderr"):
                name = metric if kind == "none" else f"{metric}.{kind}"
                scores[f"{task}/{name}"] = float(value)
    return scores
