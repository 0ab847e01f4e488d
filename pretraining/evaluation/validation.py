"""Validation loss, perplexity and bits per byte: exact over the set, the same at any world size."""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import ConcatDataset

from pretraining.data.document_masking import IGNORED, part_of_sequences, stack_blocks
from pretraining.data.manifest import entropy_bits
from pretraining.data.mixture import ValidationSet
from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.shards import TokenSplit
from pretraining.ds_config import NOT_SPLIT, Degrees
from pretraining.errors import UserError
from pretraining.evaluation.sampling import evaluation_mode
from pretraining.extend import all_of
from pretraining.recipe import Recipe
from pretraining.runtime.metric_names import perplexity
from pretraining.runtime.rank_groups import RankGroups, rank_groups

DEFAULT_BATCH_SIZE = 8  # of TrainingArguments
CHUNK_TOKENS = 1024
"""Tokens whose logits are held in fp32 at once."""
COUNTED_BLOCKS = 256
"""Blocks whose tokens are counted at once."""


def batch_size_of(recipe: Recipe) -> int:
    """Read how many blocks or texts each rank takes in one forward pass."""
    return recipe.training.per_device_eval_batch_size


class Part(NamedTuple):
    """The validation blocks of one set."""

    name: str | None
    """None if the split is not measured by source."""
    dataset: PackedDataset
    """Map-style, {"input_ids": int64 [length], "labels": int64 [length]}, labels already the next tokens."""
    num_bytes: float
    """UTF-8 bytes of text behind those labels."""
    beside: bool = False
    """Whether the set is no part of the loss of the run."""
    share: Fraction = Fraction(0)
    """Of the run's mixture."""


class Validation:
    """The validation blocks of a run and the size of their text, by source if there are several."""

    def __init__(
        self,
        parts: Sequence[Part],
        batch_size: int,
        own: Mapping[str, Callable] = MappingProxyType({}),
        degrees: Degrees = NOT_SPLIT,
    ) -> None:
        # own: metrics of the recipe's extensions, by name
        self.parts, self.batch_size, self.own, self.degrees = tuple(parts), batch_size, own, degrees
        # The Trainer wants one dataset; `measure` reads the parts.
        datasets = [part.dataset for part in self.parts]
        self.dataset = datasets[0] if len(datasets) == 1 else ConcatDataset(datasets)

    @classmethod
    def of(
        cls, sets: TokenSplit | Sequence[ValidationSet], recipe: Recipe, degrees: Degrees = NOT_SPLIT
    ) -> "Validation":
        """Take the whole validation split, or its first `evaluation.max_validation_tokens`.

        Of several sets each is also measured by itself. The tokens are then divided in proportion to the sizes of the
        sets, and each that has a block gets at least one. The sets beside the others get as many tokens again.
        """
        sets = [ValidationSet(None, sets)] if isinstance(sets, TokenSplit) else sets
        groups = [[each for each in sets if each.beside is beside] for beside in (False, True)]
        parts = [part for group in groups for part in _parts(group, recipe)]
        return cls(parts, batch_size_of(recipe), all_of(recipe.extensions, "metric"), degrees)

    @property
    def names(self) -> list[str]:
        """Names of the metrics that `measure` returns."""
        sets = [part.name for part in self.parts if part.name is not None]
        mixture = ["mixture"] if self._follows_mixture else []
        ours = ("loss", "perplexity", "bits_per_byte")
        by_set = [f"{each}_{name}" for each in [*mixture, *sets] for name in ours]
        return [*ours, *by_set, *self.own]

    @property
    def _follows_mixture(self) -> bool:
        """Whether every source of the run's mixture is among the sets."""
        return len(self.parts) > 1 and sum(part.share for part in self.parts) == 1

    @torch.no_grad()
    def measure(
        self, model: torch.nn.Module, interrupted: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Measure {"loss": nats per token, "perplexity", "bits_per_byte"} of all blocks; every rank must call it.

        With several sources also {"<source>_loss", ...} for each, as the Trainer names the metrics of several
        evaluation sets, and {"mixture_loss", ...}: their means by the shares that the run's mixture gives the sources.
        Group r of n takes every n-th batch: a rank, or the ranks that split layers or sequences. Each of those that
        split sequences counts its own part.

        Args:
            interrupted: is called before every round (one batch for each rank), and must return the same on all
                ranks. If it returns True, the result is None.
        """
        with evaluation_mode(model):
            totals = self._totals(model, interrupted)
        if totals is None:
            return None
        if dist.is_initialized() and dist.get_world_size() > 1:
            if rank_groups(self.degrees).tensor_part:
                totals.zero_()  # what the first rank of those that split the layers has counted
            # Sums and not means: the ranks have different numbers of tokens.
            dist.all_reduce(totals)
        return self._metrics(totals.tolist())

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

    def _totals(self, model: torch.nn.Module, interrupted: Callable[[], bool]) -> torch.Tensor | None:
        """Sum nats, tokens and own metrics of each part over this rank's batches; None if interrupted.

        [parts, 2 + own metrics]
        """
        groups, device = rank_groups(self.degrees), next(model.parameters()).device
        # fp64: sums over a million tokens would lose digits in fp32, and differ with the number of ranks.
        totals = torch.zeros(len(self.parts), 2 + len(self.own), dtype=torch.float64, device=device)
        batches = self._batches()
        for round_start in range(0, len(batches), groups.data_ranks):
            if interrupted():
                return None
            number = round_start + groups.data_rank
            # Under ZeRO-3 a forward pass is a collective: a rank that runs out reads the first block with weight zero.
            part, indices = batches[number] if number < len(batches) else (0, range(0))
            totals[part] += self._nats_and_tokens(model, part, indices, groups, device)
        return totals

    def _batches(self) -> list[tuple[int, range]]:
        """List (part, its samples) of every forward pass; no batch mixes parts."""
        return [
            (number, range(start, min(start + self.batch_size, len(part.dataset))))
            for number, part in enumerate(self.parts)
            for start in range(0, len(part.dataset), self.batch_size)
        ]

    def _metrics(self, totals: list[list[float]]) -> dict[str, float]:
        """Compute the metrics from the sums of each part: nats, tokens, own metrics."""
        measured = list(zip(self.parts, totals, strict=True))
        counted = [sums for part, sums in measured if not part.beside]
        nats, tokens, *own = (sum(column) for column in zip(*counted, strict=True))
        num_bytes = sum(part.num_bytes for part in self.parts if not part.beside)
        metrics = {
            "loss": nats / tokens,
            "perplexity": perplexity(nats / tokens),
            "bits_per_byte": nats / math.log(2) / num_bytes,
        }
        if self._follows_mixture:
            rows = [(float(part.share), sums, part.num_bytes) for part, sums in measured if part.share]
            loss = sum(share * nats / tokens for share, (nats, tokens, *_), _ in rows)
            bytes_per_token = sum(share * num_bytes / tokens for share, (_, tokens, *_), num_bytes in rows)
            metrics |= {"mixture_loss": loss, "mixture_perplexity": perplexity(loss)}
            metrics["mixture_bits_per_byte"] = loss / math.log(2) / bytes_per_token
        metrics |= {name: value / tokens for name, value in zip(self.own, own, strict=True)}
        for part, (nats, tokens, *_) in measured:
            if f"{part.name}_loss" in self.names:
                metrics[f"{part.name}_loss"] = nats / tokens
                metrics[f"{part.name}_perplexity"] = perplexity(nats / tokens)
                metrics[f"{part.name}_bits_per_byte"] = nats / math.log(2) / part.num_bytes
        return metrics

    def _nats_and_tokens(
        self, model: torch.nn.Module, part: int, indices: range, groups: RankGroups, device: torch.device
    ) -> torch.Tensor:
        dataset = self.parts[part].dataset
        inputs = _batch([dataset[i] for i in indices] or [dataset[0]], groups, device)
        labels: Any = inputs.pop("labels")
        if not indices:
            # Past the end: the pass runs, and counts for nothing.
            labels.fill_(IGNORED)
        # The model gets no labels: its own loss would shift them, and would keep all logits in fp32.
        rows, targets = model(**inputs).logits.flatten(0, 1), labels.flatten()
        sums = [_summed_nats(rows, targets), (targets != IGNORED).sum().double()]
        return torch.stack([*sums, *_summed_own(self.own, rows, targets)])


def _batch(
    blocks: list[dict[str, np.ndarray]], groups: RankGroups, device: torch.device
) -> dict[str, torch.Tensor | int]:
    """Stack blocks (`stack_blocks`) into tensors on the device, and keep this rank's part of each sequence."""
    parts = groups.degrees.sequence
    batch = part_of_sequences(stack_blocks(blocks), groups.sequence_part, parts)
    if parts > 1:
        batch["splits_sequences"] = True  # for the attention of split sequences (model/sequence_parallel.py)
    return {
        key: torch.from_numpy(x).to(device, non_blocking=True) if isinstance(x, np.ndarray) else x
        for key, x in batch.items()
    }


def _summed_nats(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum the cross-entropy of [tokens, vocabulary]: in fp32 for a few tokens at a time, added up in fp64."""
    parts = zip(logits.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), strict=True)
    return sum(
        F.cross_entropy(rows.float(), targets, ignore_index=IGNORED, reduction="sum").double()
        for rows, targets in parts
    )


def _summed_own(
    own: Mapping[str, Callable], logits: torch.Tensor, labels: torch.Tensor
) -> list[torch.Tensor]:
    """Sum metrics of extensions over the tokens of [tokens, vocabulary] that have a target, in fp64.

    Raises:
        UserError: one returns something else than a number for each token.
    """
    sums = {name: torch.zeros((), dtype=torch.float64, device=logits.device) for name in own}
    parts = zip(logits.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), strict=True) if own else ()
    for rows, targets in parts:
        kept = targets != IGNORED
        for name, function in own.items():
            values = function(rows[kept].float(), targets[kept])
            if not isinstance(values, torch.Tensor) or values.shape != targets[kept].shape:
                shape = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
                what = f"it must return a tensor of one number a token, [{int(kept.sum())}], and returned {shape}"
                raise UserError(f"metric {name}: {what}")
            sums[name] += values.double().sum()
    return list(sums.values())


def _parts(sets: Sequence[ValidationSet], recipe: Recipe) -> list[Part]:
    """Choose the blocks of each set, `evaluation.max_validation_tokens` together."""
    length, max_tokens = recipe.sequence_length, recipe.evaluation.max_validation_tokens
    # A set with less than one block is not measured, unless there is no other.
    sets = [each for each in sets if each.split.num_blocks(length)] or sets
    total = sum(each.split.num_blocks(length) for each in sets)
    wanted = total if max_tokens is None else min(total, max(1, max_tokens // length))
    return [
        _first_blocks(each, max(1, each.split.num_blocks(length) * wanted // max(1, total)), recipe)
        for each in sets
    ]


def _first_blocks(chosen: ValidationSet, num_blocks: int, recipe: Recipe) -> Part:
    length, masks_documents, split = recipe.sequence_length, recipe.data.document_masking, chosen.split
    num_blocks = min(num_blocks, split.num_blocks(length))
    dataset = PackedDataset(split, length, num_samples=num_blocks, masks_documents=masks_documents)
    num_bytes = split.bytes_before(num_blocks * length + 1)  # the last label is one token beyond the blocks
    # If documents are masked, their first tokens are no targets: their text, taken as a mean share, does not count.
    if masks_documents:
        num_bytes *= 1 - len(split.document_ends(0, num_blocks * length)) / (num_blocks * length)
    return Part(chosen.name, dataset, num_bytes, chosen.beside, chosen.share)
