"""A batch of texts to one flat array of tokens, with a share of the documents encoded twice and compared."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np

from pretraining.data.encoding.backends import Backend, Reference
from pretraining.data.encoding.selection import AUTO, choose_backend, first_difference, sample_of
from pretraining.data.tokenizer import TokenizerInfo
from pretraining.errors import UserError

CHECKED_ONE_IN = 500
"""Documents a backend encodes for each one that the reference encodes too."""

HASHED_CHARACTERS = 512
"""Of either end of a text, for the draw that decides whether it is checked."""


LONG_DOCUMENT = 200
"""Tokens of the average document from which a copy for each costs less than a mask over all tokens."""


class Encoder:
    """Turns texts into tokens of the shards' type, an EOS after each document. It uses every core, without the GIL."""

    def __init__(self, backend: Backend, reference: Reference, eos_token_id: int, dtype: np.dtype):
        self.backend, self.reference = backend, reference
        self.eos_token_id, self.dtype = eos_token_id, dtype
        self.note: str | None = None
        """A sentence for the user where `auto` fell back to the reference."""
        self.num_checked = 0
        """Documents that both have encoded, equally."""

    @classmethod
    def open(
        cls,
        folder: Path,
        info: TokenizerInfo,
        dtype: np.dtype,
        backend: str = AUTO,
        num_threads: int | None = None,
        sample: list[str] | None = None,
    ) -> "Encoder":
        """The encoder of a tokenizer folder, by `data.encoder`.

        A fast backend first encodes built-in adversarial strings and the front of `sample` as the reference
        does. `num_threads` bounds the threads of this process's backends; only the first one opened can set
        it (default: every core). Raises UserError for a backend that is unknown, or named and unfit.
        """
        if num_threads is not None:
            os.environ["RAYON_NUM_THREADS"] = str(num_threads)
        chosen, reference, note = choose_backend(folder, backend, sample_of(sample or []))
        encoder = cls(chosen, reference, info.eos_token_id, dtype)
        encoder.note = note
        return encoder

    def encode(self, texts: list[str], wheres: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """`tokens` [tokens] of the shards' type, an EOS after each document; `ends` [texts], int64.

        Document i is `tokens[ends[i - 1]:ends[i]]`. `wheres` says where each text is from: UserError names
        the document on which a fast backend and the reference differ.
        """
        ids, offsets = self.backend.encode_flat(texts)
        if self.backend is not self.reference:
            self._check(texts, wheres, ids, offsets)
        return close_documents(ids, offsets, self.eos_token_id, self.dtype)

    def _check(self, texts: list[str], wheres: list[str], ids: np.ndarray, offsets: np.ndarray) -> None:
        chosen = [number for number, text in enumerate(texts) if is_checked(text)]
        if not chosen:
            return
        documents = [ids[offsets[number] : offsets[number + 1]] for number in chosen]
        exact, starts = self.reference.encode_flat([texts[number] for number in chosen])
        lengths = np.array([len(document) for document in documents])
        found = np.concatenate(documents), np.concatenate([[0], np.cumsum(lengths)])
        different = first_difference(found, (exact, starts))
        if different is not None:
            raise UserError(
                f"{wheres[chosen[different]]}: {self.backend.name} encodes this document differently from the "
                f'reference; set data.encoder to "{Reference.name}" and prepare again'
            )
        self.num_checked += len(chosen)


def is_checked(text: str) -> bool:
    """Is this one of the documents both encode? One in `CHECKED_ONE_IN`, by its text alone."""
    import xxhash

    ends = text[:HASHED_CHARACTERS] + text[-HASHED_CHARACTERS:]
    return xxhash.xxh3_64_intdigest(ends.encode("utf-8", "replace"), len(text)) % CHECKED_ONE_IN == 0


def close_documents(
    ids: np.ndarray, offsets: np.ndarray, eos_token_id: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """The ids of `offsets` [texts + 1] with an EOS after each text, and where each then ends."""
    ends = offsets[1:] + np.arange(1, len(offsets))
    tokens = np.empty(len(ids) + len(ends), dtype)
    tokens[ends - 1] = eos_token_id
    if len(ids) < LONG_DOCUMENT * len(ends):
        ordinary = np.ones(len(tokens), bool)
        ordinary[ends - 1] = False
        tokens[ordinary] = ids
    else:  # a copy for each document, where there are few
        for number, (first, last) in enumerate(pairwise(offsets.tolist())):
            tokens[first + number : last + number] = ids[first:last]
    return tokens, ends
