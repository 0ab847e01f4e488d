"""What a run is measured by while it trains: the validation loss, HellaSwag, tasks of lm-eval."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from pretraining.data.shards import TokenSplit
from pretraining.errors import UserError, nearest
from pretraining.evaluation.harness import Harness
from pretraining.evaluation.hellaswag import HellaSwag, read_items
from pretraining.evaluation.likelihood import Interrupted
from pretraining.evaluation.validation import Validation
from pretraining.recipe import Recipe, model_positions


class Scorer(Protocol):
    """{"<task>/<metric>": score} of a model; every rank calls it. Raises `Interrupted`."""

    def measure(self, model: torch.nn.Module, interrupted: Callable[[], bool]) -> dict[str, float]: ...


class Measures:
    """One validation of a run: exact loss, and at some of them scores."""

    def __init__(self, validation: Validation, scorers: Sequence[Scorer], recipe: Recipe, last_step: int):
        self.validation, self.scorers, self.last_step = validation, tuple(scorers), last_step
        self.task_steps = recipe.evaluation["task_steps"]
        self.metric = recipe.evaluation["metric"]
        if "/" not in self.metric:
            self._check_metric(validation.names)

    @classmethod
    def of(
        cls,
        splits: TokenSplit | Mapping[str, TokenSplit],
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        last_step: int,
    ) -> "Measures":
        """What the recipe's `evaluation` asks for, with its data; no model is needed yet.

        Raises `UserError` for a task that there is not, data that cannot be read, lm-eval that is not installed.
        """
        section, validation = recipe.evaluation, Validation.of(splits, recipe)
        shape = {"max_length": model_positions(recipe.model), "batch_size": validation.batch_size}
        scorers = scorers_of(
            section["tasks"], section["hellaswag"], tokenizer, section["task_limit"], **shape
        )
        return cls(validation, scorers, recipe, last_step)

    @property
    def dataset(self):
        """The validation blocks, for the Trainer."""
        return self.validation.dataset

    def unigram_bits_per_byte(self) -> float:
        """What `bits_per_byte` is compared with, of the same tokens."""
        return self.validation.unigram_bits_per_byte()

    def measure(
        self, model: torch.nn.Module, step: int, interrupted: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Metrics after `step`, the same on every rank, each of which must call it; None where it was interrupted."""
        metrics = self.validation.measure(model, interrupted)
        if metrics is None:
            return None
        if self.scorers and self._scores_at(step):
            try:
                for scorer in self.scorers:
                    metrics |= scorer.measure(model, interrupted)
            except Interrupted:
                return None
            if "/" in self.metric:
                self._check_metric(metrics)
        return metrics

    def _scores_at(self, step: int) -> bool:
        return self.task_steps is None or step % self.task_steps == 0 or step == self.last_step

    def _check_metric(self, names: Collection[str]) -> None:
        if self.metric not in names:
            known = nearest(self.metric, names) or f"; there are {', '.join(names)}"
            raise UserError(f"evaluation.metric: a validation has no {self.metric!r}{known}")


def scorers_of(
    tasks: Sequence[str],
    hellaswag: str | None,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    **shape,
) -> list[Scorer]:
    """HellaSwag where its data is named, lm-eval where tasks are. shape: `max_length` and `batch_size`, in tokens."""
    scorers: list[Scorer] = []
    if hellaswag is not None:
        scorers.append(HellaSwag(read_items(hellaswag, limit), tokenizer, **shape))
    if tasks:
        scorers.append(Harness(tasks, tokenizer, limit=limit, **shape))
    return scorers
