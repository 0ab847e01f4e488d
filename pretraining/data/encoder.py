"""Encode a batch of texts to one flat array of tokens; a share of the documents is encoded twice and compared.

Three tokenizers are called the same way. Each takes the content of a tokenizer.json. `encode_flat(texts)` returns `ids`
[tokens], uint32, and `offsets` [texts + 1], int64: text i is `ids[offsets[i]:offsets[i + 1]]`. All work in rayon's
threads, without the GIL. The fast one is used if it fits the tokenizer and agrees with the reference on trial texts.
"""

import json
import random
import unicodedata
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import xxhash

from pretraining.data.shards import token_dtype
from pretraining.data.tokenizer import Borders, TokenizerInfo
from pretraining.errors import UserError
from pretraining.outside.files import read_json_value

CHECKED_ONE_IN = 500
"""One of this many documents is also encoded by the reference."""

HASHED_CHARACTERS = 512
"""Characters of each end of a text that decide whether it is checked."""

AUTO = "auto"
SAMPLE_CHARACTERS = 1 << 16
"""Characters of the corpus in the check at the start: they take the reference some 60 ms."""


class Reference:
    """Encode by Hugging Face `tokenizers`, which defines the right result and reads every tokenizer.json."""

    name = "tokenizers"
    """The value of `data.encoder` that asks for it."""

    def __init__(self, content: str):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(content)

    def encode_flat(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        # The fast variant leaves out the character offsets, which nobody needs here.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return join_flat([np.array(encoding.ids, np.uint32) for encoding in encodings])


class Fastokens:
    """Encode by `fastokens`: PCRE2 and a merge table of its own. It agreed with the reference in every comparison."""

    name = "fastokens"

    def __init__(self, content: str):
        import fastokens

        self._tokenizer = fastokens.Tokenizer.from_json_str(content)

    def encode_flat(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, offsets = self._tokenizer.encode_batch_flat(texts)
        # Buffers of bytes: read as they are, without a copy.
        return np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.int64)


class Gigatoken:
    """Encode by `gigatoken`; the reference encodes the texts for which its newer Unicode matters."""

    name = "gigatoken"

    def __init__(self, content: str):
        import gigatoken

        self._tokenizer = gigatoken.Tokenizer.from_json(content)
        self._reference = Reference(content)

    def encode_flat(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        layout = self._tokenizer.encode_batch(texts).layout
        ids, offsets = np.asarray(layout.content.data), np.asarray(layout.offsets.data, np.int64)
        uncovered = uncovered_texts(texts)
        if not uncovered:
            return ids, offsets
        # The reference encodes them instead. Lengths may change, so the flat arrays are made again.
        documents = np.split(ids, offsets[1:-1])
        exact, starts = self._reference.encode_flat([texts[number] for number in uncovered])
        for position, number in enumerate(uncovered):
            documents[number] = exact[starts[position] : starts[position + 1]]
        return join_flat(documents)


def join_flat(documents: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.zeros(len(documents) + 1, np.int64)
    np.cumsum([len(document) for document in documents], out=offsets[1:])
    # The empty array sets the type if there are no documents.
    return np.concatenate([*documents, np.empty(0, np.uint32)]), offsets


class WrongTokens(UserError):
    """A fast backend encodes a document differently from the reference."""


Backend = Reference | Fastokens | Gigatoken
BACKENDS: dict[str, type[Backend]] = {backend.name: backend for backend in (Fastokens, Gigatoken, Reference)}


# Code points whose category depends on the version of the Unicode tables. Pre-tokenizers split at letters and digits:
# a code point assigned last year is a letter for a library with new tables, and nothing for one with old tables.
# Libraries also differ on private-use code points.

_UNCERTAIN = {"Cn", "Co"}
"""Categories of code points that are unassigned (in this Python's tables) or for private use."""

_ASSIGNED_PLANES = 0x40000
"""Beyond it only tags and variation selectors are assigned; texts with these go to the reference too."""


def uncovered_texts(texts: list[str]) -> list[int]:
    """List the numbers of the texts with such a code point."""
    # Python stores the answer of `isascii` with each text, so pure ASCII costs nothing.
    others = [(number, text.encode("utf-32-le")) for number, text in enumerate(texts) if not text.isascii()]
    return [number for number, raw in others if _uncertain_table()[np.frombuffer(raw, np.uint32)].any()]


@cache
def _uncertain_table() -> np.ndarray:
    """Make a table, [0x110000] bool, that says if a code point is one of `_UNCERTAIN`."""
    table = np.ones(0x110000, bool)
    categories = (unicodedata.category(chr(code)) in _UNCERTAIN for code in range(_ASSIGNED_PLANES))
    table[:_ASSIGNED_PLANES] = np.fromiter(categories, bool, _ASSIGNED_PLANES)
    return table


class Encoder:
    """Turn texts into tokens of the shards' type, with special tokens around each document, without the GIL."""

    def __init__(
        self,
        folder: Path,
        info: TokenizerInfo,
        backend: str = AUTO,
        sample: Iterable[str] = (),
        borders: str = "eos",
    ):
        """Open the encoder of a tokenizer folder that `data.encoder` asks for; borders: `data.borders`.

        A fast backend must first encode built-in adversarial strings and the beginning of `sample` as the reference
        does. Raises UserError for a backend that is named and does not fit.
        """
        self.note: str | None = None
        """A sentence for the user if `auto` fell back to the reference."""
        self.num_checked = 0
        """Documents that both have encoded, with equal results."""
        tokenizer = read_json_value(folder / "tokenizer.json")
        special = {token["content"]: token["id"] for token in tokenizer["added_tokens"] if token["special"]}
        # Text that spells a special token must stay text.
        tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if not token["special"]]
        # These would add tokens to a document, or cut it.
        tokenizer["post_processor"] = tokenizer["truncation"] = tokenizer["padding"] = None
        content = json.dumps(tokenizer)
        self.reference, self.dtype = Reference(content), token_dtype(info.vocab_size)
        self.backend: Backend = self.reference
        self.borders = Borders.of(borders, vars(info))
        # The spelling of a special token, read as ordinary text, must not become that token.
        ids, offsets = self.reference.encode_flat(list(special))
        for (token, number), start, stop in zip(special.items(), offsets, offsets[1:], strict=False):
            if number in ids[start:stop]:
                what = f"it turns text that spells {token!r} into the special token"
                remedy = "choose a byte-level BPE tokenizer, or take the token out of the model's vocabulary"
                raise UserError(f"data.tokenizer: {what}; {remedy} in tokenizer.json")
        if backend == Reference.name:
            return
        # Whole texts from the front, the last one cut; a first text longer than the limit still gives a sample.
        trial, left = list(adversarial_texts(tuple(special))), SAMPLE_CHARACTERS
        for text in sample:
            if left <= 0:
                break
            trial.append(text[:left])
            left -= len(text)
        name = Fastokens.name if backend == AUTO else backend
        try:
            fast = BACKENDS[name](content)
            different = _first_difference(fast.encode_flat(trial), self.reference.encode_flat(trial))
        except ModuleNotFoundError as error:
            unfit = f"is not installed (pip install {error.name})"
        except BaseException as error:  # Rust panics are no Exceptions
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            unfit = f"cannot use this tokenizer ({str(error).strip().partition(chr(10))[0]})"
        else:
            if different is None:
                self.backend = fast
                return
            unfit = f"encodes {trial[different][:40]!r} differently from the reference"
        if backend != AUTO:
            remedy = f'set data.encoder to "{AUTO}" or "{Reference.name}"'
            raise UserError(f"data.encoder: {name} {unfit}; {remedy}")
        self.note = f"{name} {unfit}: encoding with tokenizers, which is many times slower"

    def encode(self, texts: list[str], wheres: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode a batch: `tokens` [tokens] of the shards' type, documents in their borders; `ends` [texts], int64.

        Document i is `tokens[ends[i - 1]:ends[i]]`. `wheres` says where each text is from: WrongTokens names
        the document on which a fast backend and the reference differ.
        """
        ids, offsets = self.backend.encode_flat(texts)
        chosen = [number for number, text in enumerate(texts) if is_checked(text)]
        if self.backend is not self.reference and chosen:
            documents = join_flat([ids[offsets[number] : offsets[number + 1]] for number in chosen])
            exact = self.reference.encode_flat([texts[number] for number in chosen])
            different = _first_difference(documents, exact)
            if different is not None:
                what = f"{self.backend.name} encodes this document differently from the reference"
                remedy = f'set data.encoder to "{Reference.name}" and prepare again'
                anew = f"what {self.backend.name} has encoded is then encoded anew"
                raise WrongTokens(f"{wheres[chosen[different]]}: {what}; {remedy}: {anew}")
            self.num_checked += len(chosen)
        return close_documents(ids, offsets, self.borders, self.dtype)


def is_checked(text: str) -> bool:
    """Return whether both encode this document. The text alone decides, for one in `CHECKED_ONE_IN`."""
    ends = text[:HASHED_CHARACTERS] + text[-HASHED_CHARACTERS:]
    # The length is the seed: it tells texts with equal ends apart.
    return xxhash.xxh3_64_intdigest(ends.encode("utf-8", "replace"), len(text)) % CHECKED_ONE_IN == 0


def close_documents(
    ids: np.ndarray, offsets: np.ndarray, borders: Borders, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Put special tokens around each text of `offsets` [texts + 1]; returns the tokens and where each then ends."""
    added = sum(token is not None for token in borders)
    # Places in `tokens`, which the special tokens of earlier documents have shifted.
    ends = offsets[1:] + added * np.arange(1, len(offsets))
    last, first = ends - 1, ends - np.diff(offsets) - added
    places = [each for each in zip(borders, (last, first), strict=True) if each[0] is not None]
    tokens = np.empty(len(ids) + added * len(ends), dtype)
    ordinary = np.ones(len(tokens), bool)
    for token, at in places:
        tokens[at], ordinary[at] = token, False
    tokens[ordinary] = ids
    return tokens, ends


def _first_difference(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> int | None:
    """Find the first text whose ids differ between two flat encodings; None if there is none."""
    here, there = (np.split(ids, offsets[1:-1]) for ids, offsets in (one, other))
    pairs = enumerate(zip(here, there, strict=True))
    return next((number for number, pair in pairs if not np.array_equal(*pair)), None)


# Strings on which tokenizers that claim to agree have been seen to differ.

_STRIDE = 61  # looks at every 61st code point: 18,000 of them, some of every large category
_PER_CATEGORY = 12
_SURROUNDINGS = ('"{0}"', "a{0}b {0} 1{0}", ' "{0}"),\n{0}{0}')

_WRITTEN_OUT = (
    *("", " ", "\n", "\r", "\r\n", "\t", "\0", "a\0b", "\ufeff", "\u2028\u2029", "\x85", "\xa0a\xa0 a"),
    *("I'm you're he'll we'd they've it's don't", "I'M YOU'RE HE'LL", "'s's ' s'", "\u2019s it\u2019ll"),
    *("1 12 123 1234 12345 3.14159 1,000,000", "\u0661\u0662\u0663 \u00bd \u2167 \u00b2", "x1y2"),
    *("  a", "a  ", " a  b   c    d", "\n\n a\n \n\t\tb \r\n\r c", "a\r\rb\n\rc", "\u3000a\u2003 b", "a \n"),
    *("\uff11\uff12", "e\u0301\u0323 a\u0323\u0301", "\u0301", "\u1100\u1161\u11a8 \uac01"),
    *("\u0928\u093f \u0915\u094d\u0937", "\u4e2d\u6587\u5b57\u7b26\u3002\u65e5\u672c\u8a9e\u306e"),
    *("\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea\U0001f1eb", "\U0001f44d\U0001f3fd"),
    *("\u05e9\u05c1\u05dc\u05d5\u05dd \u202eabc\u202c", "\ue000 \uf8ff\U000f0000", "\ufffd\uffff\ufdd0"),
    *("\U00016ebb \U00016ea0", "\U0010ffff", "\u0378 \u0560", "\u03a3\u03c3\u03c2", "__init__"),
    *(" " * 3000 + "a", "a" * 3000, "\n" * 3000, "-" * 3000 + " ", "ab" * 2000, "9" * 1500, "\u4e2d" * 800),
    *('if x == "a":\n    return {"b": [1, 2]}  # c\n', "\\n\\t\\\\", "https://a.b/c?d=e&f=%20#g", "<s></s>"),
    *("\u0130I\u0131i \ufb01 \u1e9e\u00df \u01c5", "\u200b\u200c\u200d\u2060"),
)


@cache  # every task of a preparation asks for them, and they are drawn from all of Unicode
def adversarial_texts(
    special_tokens: tuple[str, ...], seed: int = 0, num_random: int = 300
) -> tuple[str, ...]:
    """Make trial strings: those above, every Unicode category in several surroundings, mixtures, spelled specials."""
    # Categories of so few characters that the stride may miss them.
    pools: dict[str, list[str]] = {"Zl": ["\u2028"], "Zp": ["\u2029"], "Cc": ["\0", "\t", "\n", "\r", "\x7f"]}
    for code in range(0x20, 0x110000, _STRIDE):
        category = unicodedata.category(chr(code))
        # Surrogates alone are no text: UTF-8 cannot encode them.
        if category != "Cs":
            pools.setdefault(category, []).append(chr(code))
    pools = {name: pool[:: -(-len(pool) // _PER_CATEGORY)] for name, pool in sorted(pools.items())}
    singles = [text.format(letter) for pool in pools.values() for letter in pool for text in _SURROUNDINGS]
    spelled = [text for token in special_tokens for text in (token, f"a{token}b", f" {token}\n{token}")]
    # A generator of its own: the same seed tries the same strings on every machine.
    draw = random.Random(seed)
    parts = [" ", "  ", "\n", "\t", "'s", "'ll", "the", " of", "12", "345", "_", "...", *special_tokens]
    names = list(pools)

    def part() -> str:
        return draw.choice(parts) if draw.random() < 0.5 else draw.choice(pools[draw.choice(names)])

    mixtures = ["".join(part() for _ in range(draw.randint(1, 40))) for _ in range(num_random)]
    return (*_WRITTEN_OUT, *singles, *spelled, *mixtures)
