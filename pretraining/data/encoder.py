"""Encode a batch of texts to one flat array of tokens; a share of the documents is encoded twice and compared.

The fast backend is used if it fits the tokenizer and agrees with the reference on the trial texts.
"""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from pretraining.data.encoder_backends import (
    BACKENDS,
    Backend,
    Fastokens,
    Reference,
    adversarial_texts,
    join_flat,
)
from pretraining.data.shards import token_dtype
from pretraining.data.tokenizer import TokenizerInfo
from pretraining.errors import UserError, nearest
from pretraining.outside.files import read_json_value

CHECKED_ONE_IN = 500
"""One of this many documents is also encoded by the reference."""

HASHED_CHARACTERS = 512
"""Characters of each end of a text that decide whether it is checked."""

LONG_DOCUMENT = 200
"""From this average length in tokens on, one copy for each document costs less than a mask over all tokens."""

AUTO = "auto"
SAMPLE_CHARACTERS = 1 << 16
"""Characters of the corpus in the check at the start: they take the reference some 60 ms."""


class Encoder:
    """Turn texts into tokens of the shards' type, with an EOS after each document, on every core, without the GIL."""

    def __init__(self, backend: Backend, reference: Reference, eos_token_id: int, dtype: np.dtype):
        self.backend, self.reference = backend, reference
        self.eos_token_id, self.dtype = eos_token_id, dtype
        self.note: str | None = None
        """A sentence for the user if `auto` fell back to the reference."""
        self.num_checked = 0
        """Documents that both have encoded, with equal results."""

    @classmethod
    def open(
        cls,
        folder: Path,
        info: TokenizerInfo,
        backend: str = AUTO,
        sample: list[str] | None = None,
    ) -> "Encoder":
        """Open the encoder of a tokenizer folder that `data.encoder` asks for.

        A fast backend must first encode built-in adversarial strings and the beginning of `sample` as the reference
        does. Raises UserError for a backend that is unknown, or that is named and does not fit.
        """
        # Whole texts from the front, the last one cut; a first text longer than the limit still gives a sample.
        trial, left = [], SAMPLE_CHARACTERS
        for text in sample or ():
            if left <= 0:
                break
            trial.append(text[:left])
            left -= len(text)
        chosen, reference, note = _choose_backend(folder, backend, trial)
        encoder = cls(chosen, reference, info.eos_token_id, token_dtype(info.vocab_size))
        encoder.note = note
        return encoder

    def encode(self, texts: list[str], wheres: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode a batch: `tokens` [tokens] of the shards' type, an EOS after each document; `ends` [texts], int64.

        Document i is `tokens[ends[i - 1]:ends[i]]`. `wheres` says where each text is from: a UserError names
        the document on which a fast backend and the reference differ.
        """
        ids, offsets = self.backend.encode_flat(texts)
        chosen = [number for number, text in enumerate(texts) if is_checked(text)]
        if self.backend is not self.reference and chosen:
            documents = join_flat([ids[offsets[number] : offsets[number + 1]] for number in chosen])
            exact = self.reference.encode_flat([texts[number] for number in chosen])
            different = _first_difference(documents, exact)
            if different is not None:
                raise UserError(
                    f"{wheres[chosen[different]]}: {self.backend.name} encodes this document differently from the "
                    f'reference; set data.encoder to "{Reference.name}" and prepare again'
                )
            self.num_checked += len(chosen)
        return close_documents(ids, offsets, self.eos_token_id, self.dtype)


def is_checked(text: str) -> bool:
    """Return whether both encode this document. The text alone decides, for one in `CHECKED_ONE_IN`."""
    import xxhash

    ends = text[:HASHED_CHARACTERS] + text[-HASHED_CHARACTERS:]
    # The length is the seed: it tells texts with equal ends apart.
    return xxhash.xxh3_64_intdigest(ends.encode("utf-8", "replace"), len(text)) % CHECKED_ONE_IN == 0


def close_documents(
    ids: np.ndarray, offsets: np.ndarray, eos_token_id: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Put an EOS after each text of `offsets` [texts + 1]; returns the tokens and where each text then ends."""
    ends = offsets[1:] + np.arange(1, len(offsets))
    tokens = np.empty(len(ids) + len(ends), dtype)
    tokens[ends - 1] = eos_token_id  # places in `tokens`, which the EOS of earlier documents have shifted
    if len(ids) < LONG_DOCUMENT * len(ends):
        ordinary = np.ones(len(tokens), bool)
        ordinary[ends - 1] = False
        tokens[ordinary] = ids
    else:  # few long documents: one copy for each
        for number, (first, last) in enumerate(pairwise(offsets.tolist())):
            tokens[first + number : last + number] = ids[first:last]
    return tokens, ends


# Choosing a backend.


class _Unfit(Exception):
    """Says why a backend cannot encode with this tokenizer; the text completes "<backend> ..."."""


def _choose_backend(folder: Path, wanted: str, sample: list[str]) -> tuple[Backend, Reference, str | None]:
    """Choose the backend; also returns the reference, and a sentence if `auto` had to fall back to it.

    Raises UserError if `wanted` is unknown, or was named and does not fit this tokenizer.
    """
    if wanted not in (AUTO, *BACKENDS):
        known = [AUTO, *BACKENDS]
        raise UserError(f"data.encoder: no encoder {wanted!r}{nearest(wanted, known)} ({', '.join(known)})")
    tokenizer = read_json_value(folder / "tokenizer.json")
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    # Text that spells a special token must stay text.
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if not token["special"]]
    # These would add tokens to a document, or cut it.
    tokenizer["post_processor"] = tokenizer["truncation"] = tokenizer["padding"] = None
    content = json.dumps(tokenizer)
    reference = Reference(content)
    # The spelling of a special token, read as ordinary text, must not become that token.
    ids, offsets = reference.encode_flat(list(special))
    for (token, number), start, stop in zip(special.items(), offsets, offsets[1:], strict=False):
        if number in ids[start:stop]:
            raise UserError(
                f"data.tokenizer: it turns text that spells {token!r} into the special token; choose a "
                "byte-level BPE tokenizer, or take the token out of the model's vocabulary in tokenizer.json"
            )
    if wanted == Reference.name:
        return reference, reference, None
    name = Fastokens.name if wanted == AUTO else wanted
    try:
        backend = _checked_backend(name, content, reference, [*adversarial_texts(tuple(special)), *sample])
        return backend, reference, None
    except _Unfit as unfit:
        if wanted == AUTO:
            note = f"{name} {unfit}: encoding with tokenizers, which is many times slower"
            return reference, reference, note
        raise UserError(
            f'data.encoder: {name} {unfit}; set data.encoder to "{AUTO}" or "{Reference.name}"'
        ) from unfit


def _checked_backend(name: str, content: str, reference: Reference, texts: list[str]) -> Backend:
    """Load the backend `name`; raise `_Unfit` unless it encodes `texts` as the reference does."""
    try:
        backend = BACKENDS[name](content)
        found = backend.encode_flat(texts)
    except ModuleNotFoundError as error:
        raise _Unfit(f"is not installed (pip install {error.name})") from error
    except BaseException as error:  # Rust panics are no Exceptions
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise _Unfit(f"cannot use this tokenizer ({reason})") from error
    number = _first_difference(found, reference.encode_flat(texts))
    if number is not None:
        raise _Unfit(f"encodes {texts[number][:40]!r} differently from the reference")
    return backend


def _first_difference(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> int | None:
    """Find the first text whose ids differ between two flat encodings; None if there is none."""
    if all(np.array_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True)):
        return None
    # Something differs: look for the first document, one by one.
    (ids, offsets), (ids_there, offsets_there) = one, other
    for number in range(len(offsets) - 1):
        here = ids[offsets[number] : offsets[number + 1]]
        if not np.array_equal(here, ids_there[offsets_there[number] : offsets_there[number + 1]]):
            return number
    return len(offsets) - 1
