"""The evaluation of a run while it trains: validation loss, exact over the set, and the scores of scores.py.

When it runs is the Trainer's to decide (`training.eval_strategy`, `eval_steps`, `eval_on_start`); one that was cut
short is repeated (`Evaluator.is_repeated`). `evaluate` of training/trainer.py calls it then, and adds the metrics of
averaged weights (`average_...`).
"""

import math
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import ConcatDataset
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers import TrainerCallback, TrainerState, TrainingArguments

from pretraining.data.documents import IGNORED, count_blocks, part_of_sequences, stack_blocks
from pretraining.data.manifest import entropy_bits
from pretraining.data.mixture import large_enough, open_by_source
from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.prepared import PreparedData
from pretraining.data.shards import TokenSplit
from pretraining.ds_config import NOT_SPLIT, Degrees
from pretraining.errors import UserError, nearest
from pretraining.evaluation import scores
from pretraining.evaluation.sampling import SamplingCallback, evaluation_mode
from pretraining.extend import all_of
from pretraining.planning.memory.activations import VALIDATED_AT_ONCE
from pretraining.recipe import Recipe
from pretraining.recipe.data import is_mixed, read_stages, run_shares
from pretraining.runtime.metric_names import OF_AVERAGE, perplexity
from pretraining.runtime.process_group import RankGroups, from_rank_0, gather_from_ranks, rank_groups
from pretraining.runtime.run_folder import RunFolder, first_step, is_validated, read_events

DEFAULT_BATCH_SIZE = 8  # of TrainingArguments
MEASURED = ("loss", "perplexity", "bits_per_byte")
COUNTED_BLOCKS = 256
"""Blocks whose tokens are counted at once."""


class ValidationSet(NamedTuple):
    """A part of the validation split that is measured by itself."""

    name: str | None
    """None: the part has no number of its own."""
    split: TokenSplit
    beside: bool = False
    """Whether it is measured beside the loss of the run, and is no part of it."""
    share: Fraction = Fraction(0)
    """Of the run's mixture, what this set stands for; 0 for all sets if the run has no mixture."""


class MeasuredSet(NamedTuple):
    """The blocks of one validation set that are measured."""

    name: str | None
    dataset: PackedDataset
    """Map-style, {"input_ids": int64 [length], "labels": int64 [length]}, labels already the next tokens."""
    num_bytes: float
    """UTF-8 bytes of text behind those labels."""
    beside: bool
    share: Fraction


def validation_sets(data: PreparedData, recipe: Recipe) -> list[ValidationSet]:
    """Open the validation split: the held-out share, by source if several have names of their own, and other sources.

    The sources of `data.validation` are measured beside the held-out share; without a share, they are the validation.
    """
    where, length = recipe.where, recipe.sequence_length
    names, parts = recipe.data.source_names, open_by_source(data.validation)
    shares = [Fraction(0)] * len(names)
    if is_mixed(recipe.data):
        # What the mixture promises each source over the whole run.
        train, packing = open_by_source(data.train), recipe.data.packing
        read = [train.get(number) for number in range(len(names))]
        sizes = [0 if split is None else count_blocks(split, length, packing) for split in read]
        wished = read_stages(recipe.data, sizes, recipe.num_samples, length)
        shares = run_shares(wished, recipe.num_samples)
    share_of = dict(zip(names, shares, strict=False))
    held_out = {number: part for number, part in parts.items() if number < len(names)}
    sets = [ValidationSet(names[n], part, False, share_of[names[n]]) for n, part in held_out.items()]
    # Losses by source need names that tell the sources apart.
    if len(sets) < 2 or len(set(names)) < len(names):
        # The shards of `data.validation` are behind those of the share.
        num_shards = sum(len(part.shard_entries) for part in held_out.values())
        whole = num_shards == len(data.validation.shard_entries)
        split = data.validation if whole else data.validation.part(0, num_shards)
        sets = [ValidationSet(None, split)] if split.num_tokens else []
    beside = bool(sets)
    for number, source in enumerate(recipe.data.validation.sources if recipe.data.validation else []):
        # With no part of the sources held out, a set that has a source's name stands for that source.
        share = Fraction(0) if beside else share_of.get(source.called, Fraction(0))
        part = large_enough(parts.get(len(names) + number), source.called, length, where, of_validation=True)
        sets.append(ValidationSet(source.called, part, beside, share))
    return sets


class Validation:
    """The validation blocks of a run and the size of their text, by source if there are several."""

    def __init__(
        self, sets: TokenSplit | Sequence[ValidationSet], recipe: Recipe, degrees: Degrees = NOT_SPLIT
    ) -> None:
        """Take the whole validation split, or its first `evaluation.max_validation_tokens`.

        Of several sets each is also measured by itself. The tokens are then divided in proportion to the sizes of the
        sets, and each that has a block gets at least one. The sets beside the others get as many tokens again.
        """
        sets = [ValidationSet(None, sets)] if isinstance(sets, TokenSplit) else sets
        groups = [[each for each in sets if each.beside is beside] for beside in (False, True)]
        self.parts = [part for group in groups for part in _first_blocks(group, recipe)]
        # whether every source of the run's mixture is among the sets
        self.follows_mixture = len(self.parts) > 1 and sum(part.share for part in self.parts) == 1
        self.batch_size, self.degrees = recipe.training.per_device_eval_batch_size, degrees
        self.own_metrics: Mapping[str, Callable] = all_of(recipe.extensions, "metric")
        # The Trainer wants one dataset; `measure` reads the parts.
        datasets = [part.dataset for part in self.parts]
        self.dataset = datasets[0] if len(datasets) == 1 else ConcatDataset(datasets)

    @property
    def names(self) -> list[str]:
        sets = [part.name for part in self.parts if part.name is not None]
        mixture = ["mixture"] if self.follows_mixture else []
        by_set = [f"{each}_{name}" for each in [*mixture, *sets] for name in MEASURED]
        return [*MEASURED, *by_set, *self.own_metrics]

    @torch.no_grad()
    def measure(self, model: nn.Module, interrupted: scores.Asked = scores.never) -> dict[str, float]:
        """Measure {"loss": nats per token, "perplexity", "bits_per_byte"} of all blocks; every rank must call it.

        With several sources also {"<source>_loss", ...} for each, as the Trainer names the metrics of several
        evaluation sets, and {"mixture_loss", ...}: their means by the shares that the run's mixture gives the sources.
        Group r of n takes every n-th batch: a rank, or the ranks that split layers or sequences. Each of those that
        split sequences counts its own part. Raises `MeasurementStopped`.
        """
        groups, device = rank_groups(self.degrees), next(model.parameters()).device
        # nats, tokens and own metrics of each part over this rank's batches, [parts, 2 + own metrics]
        # fp64: sums over a million tokens would lose digits in fp32, and differ with the number of ranks.
        totals = torch.zeros(len(self.parts), 2 + len(self.own_metrics), dtype=torch.float64, device=device)
        # (part, its samples) of every forward pass; no batch mixes parts.
        batches = [
            (number, range(start, min(start + self.batch_size, len(part.dataset))))
            for number, part in enumerate(self.parts)
            for start in range(0, len(part.dataset), self.batch_size)
        ]
        with evaluation_mode(model):
            for number in scores.own_of_rounds(
                len(batches), groups.data_rank, groups.data_ranks, interrupted
            ):
                # Under ZeRO-3 a forward pass is a collective: a rank that runs out reads the first block, and counts
                # nothing of it.
                place, indices = batches[number] if number < len(batches) else (0, range(0))
                dataset = self.parts[place].dataset
                inputs = _batch([dataset[i] for i in indices] or [dataset[0]], groups, device)
                labels = inputs.pop("labels")
                if not indices:
                    labels.fill_(IGNORED)
                # The model gets no labels: its own loss would shift them, and would keep all logits in fp32.
                logits = model(**inputs).logits
                totals[place] += _sums(self.own_metrics, logits.flatten(0, 1), labels.flatten())
        if dist.is_initialized() and dist.get_world_size() > 1:
            if groups.tensor_part:
                totals.zero_()  # what the first rank of those that split the layers has counted
            # Sums and not means: the ranks have different numbers of tokens.
            dist.all_reduce(totals)
        measured = list(zip(self.parts, totals.tolist(), strict=True))
        counted = [sums for part, sums in measured if not part.beside]
        nats, tokens, *own = (sum(column) for column in zip(*counted, strict=True))
        num_bytes = sum(part.num_bytes for part in self.parts if not part.beside)
        metrics = _named("", nats / tokens, nats / math.log(2) / num_bytes)
        if self.follows_mixture:
            rows = [(float(part.share), sums, part.num_bytes) for part, sums in measured if part.share]
            loss = sum(share * nats / tokens for share, (nats, tokens, *_), _ in rows)
            bytes_per_token = sum(share * num_bytes / tokens for share, (_, tokens, *_), num_bytes in rows)
            metrics |= _named("mixture_", loss, loss / math.log(2) / bytes_per_token)
        metrics |= {name: value / tokens for name, value in zip(self.own_metrics, own, strict=True)}
        for part, (nats, tokens, *_) in measured:
            if part.name is not None:
                metrics |= _named(f"{part.name}_", nats / tokens, nats / math.log(2) / part.num_bytes)
        return metrics

    def unigram_bits_per_byte(self) -> float:
        """Compute the bits per byte of the measured tokens by frequency alone: what a model without context reaches."""
        counts = np.zeros(0, np.int64)
        parts = [part for part in self.parts if not part.beside]
        for part in parts:
            for start in range(0, len(part.dataset), COUNTED_BLOCKS):
                stop = min(start + COUNTED_BLOCKS, len(part.dataset))
                blocks = part.dataset.__getitems__(list(range(start, stop)))
                labels = np.concatenate([block["labels"] for block in blocks])
                # the vocabulary's size is not known here: the longer of the two counts stays
                found = np.bincount(labels[labels != IGNORED], minlength=len(counts))
                found[: len(counts)] += counts
                counts = found
        return entropy_bits(counts) / sum(part.num_bytes for part in parts)


def _named(prefix: str, loss: float, bits_per_byte: float) -> dict[str, float]:
    names = (f"{prefix}{name}" for name in MEASURED)
    return dict(zip(names, (loss, perplexity(loss), bits_per_byte), strict=True))


def _batch(blocks: list[dict[str, np.ndarray]], groups: RankGroups, device: torch.device) -> dict[str, Any]:
    """Stack blocks (`stack_blocks`) into tensors on the device, and keep this rank's part of each sequence."""
    parts = groups.degrees.sequence
    batch = part_of_sequences(stack_blocks(blocks), groups.sequence_part, parts)
    if parts > 1:
        batch["splits_sequences"] = True  # for the attention of split sequences (model/parallel.py)
    return {
        key: torch.from_numpy(x).to(device, non_blocking=True) if isinstance(x, np.ndarray) else x
        for key, x in batch.items()
    }


def _sums(own_metrics: Mapping[str, Callable], logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum nats, targets and own metrics over logits [tokens, vocabulary] with labels [tokens]: [2 + own], in fp64.

    Raises `UserError`: a metric returns something else than a number for each token that has a target.
    """
    sums = torch.zeros(2 + len(own_metrics), dtype=torch.float64, device=logits.device)
    # In fp32 for a few tokens at a time, added up in fp64.
    for rows, targets in zip(logits.split(VALIDATED_AT_ONCE), labels.split(VALIDATED_AT_ONCE), strict=True):
        counted = targets != IGNORED
        nats = F.cross_entropy(rows.float(), targets, ignore_index=IGNORED, reduction="sum")
        chunk = [nats.double(), counted.sum().double()]
        for name, function in own_metrics.items():
            values = function(rows[counted].float(), targets[counted])
            if not isinstance(values, torch.Tensor) or values.shape != targets[counted].shape:
                shape = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
                what = f"it must return a tensor of one number a token, [{int(counted.sum())}], and returned {shape}"
                raise UserError(f"metric {name}: {what}")
            chunk.append(values.double().sum())
        sums += torch.stack(chunk)
    return sums


def _first_blocks(sets: Sequence[ValidationSet], recipe: Recipe) -> list[MeasuredSet]:
    length, max_tokens = recipe.sequence_length, recipe.evaluation.max_validation_tokens
    masks_documents, chosen = recipe.data.document_masking, []
    # A set with less than one block is not measured, unless there is no other.
    sets = [each for each in sets if each.split.num_blocks(length)] or sets
    total = sum(each.split.num_blocks(length) for each in sets)
    wanted = total if max_tokens is None else min(total, max(1, max_tokens // length))
    for each in sets:
        split, held = each.split, each.split.num_blocks(length)
        num_blocks = min(held, max(1, held * wanted // max(1, total)))
        dataset = PackedDataset([split], length, num_samples=num_blocks, masks_documents=masks_documents)
        # the last label is one token beyond the blocks
        num_bytes = split.bytes_before(num_blocks * length + 1)
        # If documents are masked, their first tokens are no targets: their text, taken as a mean share, does not count.
        if masks_documents:
            num_bytes *= 1 - len(split.document_ends(0, num_blocks * length)) / (num_blocks * length)
        chosen.append(MeasuredSet(each.name, dataset, num_bytes, each.beside, each.share))
    return chosen


class Evaluator(TrainerCallback):
    """The evaluation of a run: the exact loss at every validation, and scores at some of them.

    What the recipe's `evaluation` asks for is opened with its data here; the model comes later.

    Args:
        last_step: the last step of the run. Scores are measured there too, whatever `evaluation.task_steps` says.
        run: the folder that gets samples of text after every validation; None: no samples.
        degrees: over how many ranks the model's layers are split.

    Raises `UserError`: a task is unknown, its data cannot be read, lm-eval is not installed, no validation measures
    `evaluation.metric`, or ranks read other data or items.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: PreparedData,
        tokenizer: Tokenizer,
        last_step: int,
        run: RunFolder | None = None,
        degrees: Degrees = NOT_SPLIT,
    ) -> None:
        section, self.run = recipe.evaluation, run
        samples = () if run is None else (SamplingCallback(run, recipe, tokenizer),)
        self.callbacks = (self, *samples)
        self.validation = Validation(validation_sets(data, recipe), recipe, degrees)
        self.dataset = self.validation.dataset  # for the Trainer
        self.unigram_bits_per_byte = self.validation.unigram_bits_per_byte
        passes = scores.Passes(recipe.model.max_position_embeddings, self.validation.batch_size, degrees)
        self.scorers = build_scorers(section.tasks, section.hellaswag, tokenizer, passes, section.task_limit)
        check_alike(data, self.validation, self.scorers)
        self.task_steps, self.last_step = section.task_steps, last_step
        self.metric = section.metric
        # A score's name ("<task>/<metric>") is known only after it is measured; every other name is known now.
        if "/" not in self.metric:
            averages = recipe.optimizer.average_decay is not None
            of_average = [f"{OF_AVERAGE}{name}" for name in MEASURED] if averages else []
            self._check_metric([*self.validation.names, *of_average])

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Begin with a validation where the run begins, if that is asked for, or to repeat one."""
        # not at every start: it would be one that the undisturbed run does not make
        begins = args.eval_on_start and state.global_step == from_rank_0(
            lambda: first_step(read_events(self.run.events)) if self.run else 0
        )
        args.eval_on_start = begins or self.is_repeated(args, state)

    def is_repeated(self, args: TrainingArguments, state: TrainerState) -> bool:
        """Return whether the validation after the present step, the first of a start, was due and has no result."""
        step = state.global_step
        due = args.eval_strategy == "steps" and step > 0 and step % state.eval_steps == 0
        due = due and step >= args.eval_delay
        return due and not is_validated(step, state.log_history)

    def measure(self, model: nn.Module, step: int, interrupted: scores.Asked) -> dict[str, float] | None:
        """Measure the model after `step`; every rank must call it, and gets the same metrics. None if interrupted."""
        due = self.task_steps is None or step % self.task_steps == 0 or step == self.last_step
        scorers = self.scorers if due else []
        try:
            metrics = self.validation.measure(model, interrupted)
            for scorer in scorers:
                metrics |= scorer.measure(model, interrupted)
        except scores.MeasurementStopped:  # on all ranks together
            return None
        # The first scores show whether the name exists.
        if scorers and "/" in self.metric:
            self._check_metric(metrics)
        return metrics

    def _check_metric(self, names: Collection[str]) -> None:
        if self.metric not in names:
            known = nearest(self.metric, names) or f"; there are {', '.join(names)}"
            raise UserError(f"evaluation.metric: a validation has no {self.metric!r}{known}")


def check_alike(
    data: PreparedData, validation: Validation, scorers: Sequence[scores.HellaSwag | scores.Harness]
) -> None:
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
                differing = f"{value} on {first}, {there.get(what)} on {host}"
                raise UserError(f"{what}: {differing}; all nodes must read the same files")


def build_scorers(
    tasks: Sequence[str],
    hellaswag: str | None,
    tokenizer: Tokenizer,
    passes: scores.Passes,
    limit: int | None,
) -> list[scores.HellaSwag | scores.Harness]:
    """Open HellaSwag if its data is named, and lm-eval if tasks are; `limit` items of each."""
    # Opened before the model is built, so that a missing file or task is reported at once.
    scorers: list[scores.HellaSwag | scores.Harness] = []
    if hellaswag is not None:
        scorers.append(scores.HellaSwag(scores.read_items(hellaswag, limit), tokenizer, passes))
    if tasks:
        scorers.append(scores.Harness(tasks, tokenizer, passes, limit))
    return scorers
