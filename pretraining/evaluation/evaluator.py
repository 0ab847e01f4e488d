"""The evaluation of a run while it trains: validation loss, HellaSwag, tasks of lm-eval."""

import socket
from collections.abc import Callable, Collection, Sequence

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from pretraining.data.prepared import PreparedData
from pretraining.ds_config import NOT_SPLIT, Degrees
from pretraining.errors import UserError, nearest
from pretraining.evaluation.harness import Harness
from pretraining.evaluation.likelihood import HellaSwag, Passes, ScoringStopped, read_items
from pretraining.evaluation.sampling import SamplingCallback
from pretraining.evaluation.validation import Validation, validation_sets
from pretraining.recipe import Recipe
from pretraining.runtime.process_group import gather_from_ranks
from pretraining.runtime.run_folder import RunFolder


class Evaluator:
    """The evaluation of a run: the exact loss at every validation, and scores at some of them.

    What the recipe's `evaluation` asks for is opened with its data here; the model comes later.

    Args:
        last_step: the last step of the run. Scores are measured there too, whatever `evaluation.task_steps` says.
        run: the folder that gets samples of text after every validation; None: no samples.
        degrees: over how many ranks the model's layers are split.

    Raises:
        UserError: a task is unknown, its data cannot be read, lm-eval is not installed, no validation measures
            `evaluation.metric`, or ranks read other data or items.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: PreparedData,
        tokenizer: PreTrainedTokenizerBase,
        last_step: int,
        run: RunFolder | None = None,
        degrees: Degrees = NOT_SPLIT,
    ) -> None:
        section = recipe.evaluation
        self.callbacks = () if run is None else (SamplingCallback(run, recipe, tokenizer),)
        self.validation = Validation(validation_sets(data, recipe), recipe, degrees)
        passes = Passes(recipe.model.max_position_embeddings, self.validation.batch_size, degrees)
        self.scorers = build_scorers(section.tasks, section.hellaswag, tokenizer, passes, section.task_limit)
        check_alike(data, self.validation, self.scorers)
        self.task_steps, self.last_step = section.task_steps, last_step
        self.metric = section.metric
        # A score's name ("<task>/<metric>") is known only after it is measured; every other name is known now.
        if "/" not in self.metric:
            self._check_metric(self.validation.names)

    @property
    def dataset(self) -> Dataset:
        """The validation blocks, for the Trainer."""
        return self.validation.dataset

    def unigram_bits_per_byte(self) -> float:
        """Compute the bits per byte of the same tokens by frequency alone, to compare `bits_per_byte` with."""
        return self.validation.unigram_bits_per_byte()

    def measure(
        self, model: torch.nn.Module, step: int, interrupted: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Measure the model after `step`; every rank must call it, and gets the same metrics. None if interrupted."""
        metrics = self.validation.measure(model, interrupted)
        # Interrupted: all ranks return here together.
        if metrics is None:
            return None
        due = self.task_steps is None or step % self.task_steps == 0 or step == self.last_step
        if self.scorers and due:
            try:
                for scorer in self.scorers:
                    metrics |= scorer.measure(model, interrupted)
            except ScoringStopped:
                return None
            # The first scores show whether the name exists.
            if "/" in self.metric:
                self._check_metric(metrics)
        return metrics

    def _check_metric(self, names: Collection[str]) -> None:
        if self.metric not in names:
            known = nearest(self.metric, names) or f"; there are {', '.join(names)}"
            raise UserError(f"evaluation.metric: a validation has no {self.metric!r}{known}")


def check_alike(data: PreparedData, validation: Validation, scorers: Sequence[HellaSwag | Harness]) -> None:
    """Raise `UserError` on all ranks if one reads other data, or more or fewer items. A collective.

    Nodes may have files of their own. A rank with more items would wait for passes that the others do not make.
    """
    found = {
        "fingerprint of the data": data.fingerprint,
        "validation blocks": sum(len(part.dataset) for part in validation.parts),
    }
    for scorer in scorers:
        found |= scorer.num_items()
    (first, expected), *others = gather_from_ranks((socket.gethostname(), found))
    for host, there in others:
        for what, value in expected.items():
            if there.get(what) != value:
                raise UserError(
                    f"{what}: {value} on {first}, {there.get(what)} on {host}; all nodes must read the same files"
                )


def build_scorers(
    tasks: Sequence[str],
    hellaswag: str | None,
    tokenizer: PreTrainedTokenizerBase,
    passes: Passes,
    limit: int | None,
) -> list[HellaSwag | Harness]:
    """Open HellaSwag if its data is named, and lm-eval if tasks are; `limit` items of each."""
    # Opened before the model is built, so that a missing file or task is reported at once.
    scorers: list[HellaSwag | Harness] = []
    if hellaswag is not None:
        scorers.append(HellaSwag(read_items(hellaswag, limit), tokenizer, passes))
    if tasks:
        scorers.append(Harness(tasks, tokenizer, passes, limit))
    return scorers
