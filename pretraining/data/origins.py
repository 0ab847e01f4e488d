"""Where the samples of a step came from: positions, sources, shards and documents, for alerts."""

from collections.abc import Callable
from functools import partial

import numpy as np

from pretraining.data.mixing.training import source_names
from pretraining.data.packed import PackedDataset
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.run_folder import RunFolder
from pretraining.schema import display_path

MOST_SAMPLES = 16
"""Samples whose documents are named."""


def step_origins(dataset: PackedDataset, recipe, run: RunFolder, steps_before: int) -> Callable[[int], dict]:
    """`describe_step` as a function of the optimizer step, for a dataset that begins after `steps_before` steps."""
    names = source_names(recipe.data, display_path(recipe.path))
    tokens_before, length = recipe.step_sizes.tokens_at(steps_before), recipe.sequence_length

    def first_sample(step: int) -> int:
        return dataset.first_sample + (recipe.step_sizes.tokens_at(step - 1) - tokens_before) // length

    return partial(describe_step, dataset, first_sample, names, run)


def describe_step(
    dataset: PackedDataset, first_sample: Callable[[int], int], names: list[str], run: RunFolder, step: int
) -> dict:
    """{"samples", "documents", "flagged"} of optimizer step `step`, counted from 1.

    samples: [first, last) positions of the global order, as `inspect --sample` takes them. documents: the document
    in which each of the first `MOST_SAMPLES` blocks starts. flagged: what the guard said of blocks of this step.
    """
    numbers = np.arange(first_sample(step), first_sample(step + 1))
    positions = getattr(dataset.order, "positions", lambda samples: samples)(numbers)
    shown = zip(positions[:MOST_SAMPLES].tolist(), dataset.order.blocks(numbers[:MOST_SAMPLES]), strict=True)
    first, last = int(numbers[0]), int(numbers[-1])
    flagged = [row for row in read_rows(run.flagged_blocks) if first <= row["sample"] <= last]
    return {
        "samples": [int(positions[0]), int(positions[-1]) + 1],
        "documents": [{"sample": sample, **_origin(dataset, int(block), names)} for sample, block in shown],
        "flagged": [{key: row[key] for key in ("source", "shard", "document", "reasons")} for row in flagged],
    }


def _origin(dataset: PackedDataset, block: int, names: list[str]) -> dict:
    source, stretches = dataset.place(block)
    shard, document = dataset.splits[source].document_at(stretches[0][0])
    name = {"source": names[source]} if source < len(names) and len(dataset.splits) > 1 else {}
    return {**name, "shard": shard, "document": document}
