"""Keep the documents of one block apart: positions start again at each, and no target crosses a border.

model/attention.py keeps attention inside of a document by these positions.
"""

import numpy as np

IGNORED = -100
"""Label of a token that is no target: the default `ignore_index` of torch's cross-entropy."""


def masked_block(tokens: np.ndarray, ends: np.ndarray) -> dict[str, np.ndarray]:
    """Split the tokens of one block into inputs, labels and positions, int64 [L] each.

    The first token of a document is no target. A document that began before the block goes on at position 0.

    Args:
        tokens: int64 [L + 1].
        ends: places in the block, from 1 to L, at which a document has just ended.
    """
    labels = tokens[1:].copy()
    # Label i is token i + 1, and token `end` begins the next document: nothing the model may look at comes before it.
    labels[ends - 1] = IGNORED
    begins = np.zeros(len(labels), np.int64)
    # An end at L begins a document that has no input in this block.
    inside = ends[ends < len(labels)]
    begins[inside] = inside
    # The latest beginning before each place: a running maximum, no loop over documents.
    positions = np.arange(len(labels)) - np.maximum.accumulate(begins)
    return {"input_ids": tokens[:-1], "labels": labels, "position_ids": positions}


def stack_blocks(blocks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray | int | bool]:
    """Make one batch of blocks: int64 [L] under each key becomes int64 [batch, L].

    If the blocks have positions, the batch also holds what a forward pass needs to keep documents apart, whatever
    the model's config says: their borders (`document_borders`) and `use_cache` False.
    """
    batch = {key: np.stack([block[key] for block in blocks]) for key in blocks[0]}
    if "position_ids" not in batch:
        return batch
    # With a cache, transformers 5.23 takes positions that start again for one text
    # (`masking_utils._preprocess_mask_arguments`).
    return {**batch, **document_borders(batch["position_ids"]), "use_cache": False}


def part_of_sequences(batch: dict, part: int, parts: int) -> dict:
    """Cut inputs, labels and positions [batch, L] to one of `parts` equal parts of each sequence.

    The borders of documents stay those of the whole sequences: attention gathers the parts. The positions say where in
    the sequence the part is.
    """
    if parts == 1:
        return batch
    rows, length = batch["input_ids"].shape
    own = slice(part * length // parts, (part + 1) * length // parts)
    whole = {"position_ids": np.tile(np.arange(length), (rows, 1)), **batch}
    cut = {key: whole[key][:, own] for key in ("input_ids", "labels", "position_ids")}
    return {**batch, **cut, "use_cache": False}


def document_borders(position_ids: np.ndarray) -> dict[str, np.ndarray | int]:
    """Return what kernels for sequences of different lengths take, from positions [batch, L].

    The names are those of transformers. `cu_seq_lens_q` and `cu_seq_lens_k`, int32 [documents + 1], are the borders in
    the batch written as one row. `max_length_q` and `max_length_k` are L, a bound on a document's length.
    """
    begins = np.flatnonzero(position_ids.reshape(-1) == 0)
    borders = np.append(begins, position_ids.size).astype(np.int32)
    length = position_ids.shape[1]
    # The bound L, not the longest document: it is the same for every batch, so kernels compile once.
    lengths = {"max_length_q": length, "max_length_k": length}
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, **lengths}
