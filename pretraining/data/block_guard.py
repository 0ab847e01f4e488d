"""Look at the blocks that training reads: flag those from which a model learns nothing.

dominant     one token fills most of the block: padding, whitespace, a run of one character
few_tokens   hardly any distinct tokens: a table of digits, an ASCII drawing
repeated     the block repeats itself with a short period
ngram        an n-gram of at most `longest` tokens comes `times` times in a row, if the recipe asks for this
undecodable  a good part of the block's characters is U+FFFD: binary files, or text in a wrong encoding

At the other thresholds real English and code (among them Python's library and its documentation) raise no flag, except
for text that also looks degenerate to a person: dumps of numbers, tables of one value, drawn lines.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pretraining.data.shards import TokenSplit
from pretraining.outside.files import read_json_value
from pretraining.runtime.durable_files import append_row

if TYPE_CHECKING:
    from pretraining.data.prepared import PreparedData
    from pretraining.recipe import Recipe
    from pretraining.recipe.sections import RepeatedNgrams

_SAMPLED_ONE_IN = 16  # the first look takes one of this many tokens
_PERIODS_IN_BLOCK = 8  # a period is short if it fits at least this many times into the block

# Which blocks are flagged.
DOMINANT_SHARE = 0.6  # of the tokens that are the same one
DISTINCT_SHARE = 1 / 96  # fewer distinct tokens for each token; at least three are asked for in any block
REPEATED_SHARE = 0.9  # of the tokens that equal the token one period before
UNDECODABLE_SHARE = 0.05  # of the characters that are U+FFFD


def open_guard(path: Path | None, data: "PreparedData", recipe: "Recipe") -> "BlockGuard":
    """Make the guard that lists degenerate blocks of the run in the file `path`; None if another rank lists them."""
    token_bytes = data.read_tokenizer(lambda folder: tokens_of_file(folder / "tokenizer.json"))
    skips, ngrams = recipe.monitors.flagged_blocks == "skip", recipe.monitors.repeated_ngrams
    return BlockGuard(path, token_bytes, recipe.data.source_names, skips, ngrams)


class BlockGuard:
    """Look at blocks of token ids, and write each flagged one as a JSON line to `path`, unless it is None.

    token_bytes: the bytes that each token id stands for (`tokens_of_file`), or None to leave out the test for
    undecodable text. skips: whether the reader of the blocks leaves flagged ones out of the loss. ngrams: which
    repetition is left out in any case. A resumed run may flag one again.
    """

    def __init__(
        self,
        path: Path | None,
        token_bytes: Sequence[bytes] | None = None,
        source_names: Sequence[str] = (),
        skips: bool = False,
        ngrams: "RepeatedNgrams | None" = None,
    ):
        self.path, self.token_bytes, self.skips, self.ngrams = path, token_bytes, skips, ngrams
        self.source_names = dict(enumerate(source_names))
        self._at_worst = None
        if token_bytes is not None:
            # The U+FFFD in each token decoded by itself, [ids] uint16: an upper bound. In a text, the bytes of
            # neighbouring tokens may complete each other.
            counts = [text.decode(errors="replace").count("\ufffd") for text in token_bytes]
            self._at_worst = np.array(counts, np.uint16)

    def look(
        self, tokens: np.ndarray, split: TokenSplit, stretches: Sequence[tuple[int, int]], **place: int
    ) -> dict[str, float]:
        """Check one block, [L + 1] ids from these stretches of its split, and write down what is wrong with it.

        place: its `sample`, `block` and `source`.
        """
        reasons = self.reasons(tokens)
        if reasons and self.path is not None:
            # A packed block holds several documents: name the one in which its longest stretch begins.
            longest, _ = max(stretches, key=lambda stretch: stretch[1] - stretch[0])
            shard, document = split.document_at(longest)
            source = self.source_names.get(place["source"], place["source"])
            where = {**place, "source": source, "shard": shard, "document": document}
            # One write a line, so that ranks and workers can share the file.
            skipped = {"skipped": True} if self.leaves_out(reasons) else {}
            append_row(self.path, {**where, "reasons": reasons, **skipped})
        return reasons

    def leaves_out(self, reasons: dict) -> bool:
        return self.skips or "ngram" in reasons

    def reasons(self, tokens: np.ndarray) -> dict[str, float]:
        """Return {what is wrong: its measure} for one block of ids; empty for a sound one."""
        apart = max(1, int(DOMINANT_SHARE * len(tokens)) - 1)
        fewest = max(3, DISTINCT_SHARE * len(tokens))
        # The cheap tests first: most sound blocks pass them, and only the others are sorted.
        # A token that fills k of n places is its own neighbour at least 2k - n - 1 times.
        repeats = np.count_nonzero(tokens[1:] == tokens[:-1])
        varied = repeats < 2 * (apart + 1) - len(tokens) - 1
        # Distinct tokens of a sample are distinct tokens of the block.
        varied = varied and len(set(tokens[::_SAMPLED_ONE_IN].tolist())) >= fewest
        reasons: dict[str, float] = {}
        if not varied:
            # numpy sorts 32-bit integers several times faster than 16-bit ones.
            ordered = np.sort(tokens.astype(np.int32))
            # In sorted order, a token that occurs more than `apart` times equals the one `apart` places on.
            if (ordered[apart:] == ordered[:-apart]).any():
                commonest = np.unique(ordered, return_counts=True)[1].max()
                reasons["dominant"] = round(float(commonest / len(ordered)), 4)
            distinct = int(np.count_nonzero(ordered[1:] != ordered[:-1])) + 1
            if distinct < fewest:
                reasons["few_tokens"] = distinct
        if not reasons and (period := short_period(tokens, REPEATED_SHARE)):
            reasons["repeated"] = period
        # Decode only if the tokens, each by itself, could reach the limit: every one spells at least one character, or
        # a part of one that is counted. "clip" takes half the time of "raise"; no id is beyond the vocabulary.
        worst = self._at_worst
        bound = 0 if worst is None else int(worst.take(tokens, mode="clip").sum(dtype=np.int64))
        if worst is not None and bound >= UNDECODABLE_SHARE * len(tokens):
            text = b"".join([self.token_bytes[token] for token in tokens.tolist()]).decode(errors="replace")
            if (share := text.count("\ufffd") / max(1, len(text))) >= UNDECODABLE_SHARE:
                reasons["undecodable"] = round(share, 4)
        if self.ngrams and (size := repeated_ngram(tokens, self.ngrams.longest, self.ngrams.times)):
            reasons["ngram"] = size
        return reasons


def short_period(tokens: np.ndarray, share: float) -> int | None:
    """Find the shortest period, up to an eighth of the block, with which `share` of it repeats itself; or None."""
    longest = len(tokens) // _PERIODS_IN_BLOCK
    if longest < 1:
        return None
    # In a block with a period, nearly every token comes again one period later. So only distances that fit at two
    # of these three places are tried in full.
    places = (longest, len(tokens) // 2, len(tokens) - longest - 1)
    a, b, c = (tokens[place + 1 : place + 1 + longest] == tokens[place] for place in places)
    for distance in (np.flatnonzero((a & (b | c)) | (b & c)) + 1).tolist():
        if np.count_nonzero(tokens[distance:] == tokens[:-distance]) >= share * (len(tokens) - distance):
            return distance
    return None


def repeated_ngram(tokens: np.ndarray, longest: int, times: int) -> int | None:
    """Find the shortest n-gram, of up to `longest` tokens, that comes `times` times in a row in the block; or None.

    This is the rule of OLMo's data loader (Groeneveld et al. 2024), there with n-grams of 1 to 13 tokens and 32 times.
    """
    for size in range(1, min(longest, len(tokens) // times) + 1):
        # So many tokens in a row equal the one `size` before them.
        needed = size * (times - 1)
        one, other = tokens[size:], tokens[:-size]
        # One of every `needed` neighbours is looked at first: hardly any block has equal ones there.
        if (one[needed - 1 :: needed] == other[needed - 1 :: needed]).any():
            differing = np.flatnonzero(one != other)
            if np.diff(differing, prepend=-1, append=len(one)).max() > needed:
                return size
    return None


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def tokens_of_file(path: Path) -> list[bytes]:
    """Read the bytes of each token id from a tokenizer.json: byte-level BPE, or SentencePiece with byte fallback."""
    content = read_json_value(Path(path))
    vocabulary = content["model"]["vocab"]
    # BPE and WordPiece have {text: id}, Unigram lists [text, score] in the order of the ids.
    if not isinstance(vocabulary, dict):
        vocabulary = {text: number for number, (text, _) in enumerate(vocabulary)}
    decoder, ids = content.get("decoder") or {}, {}
    if any(part.get("type") == "ByteLevel" for part in [decoder, *decoder.get("decoders", [])]):
        # GPT-2's alphabet: printable bytes spell themselves, the others take the letters from U+0100 on.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        letters = {chr(byte): bytes([byte]) for byte in printable}
        letters |= {chr(256 + number): bytes([byte]) for number, byte in enumerate(others)}
        for text, number in vocabulary.items():
            ids[number] = b"".join(letters.get(letter, letter.encode()) for letter in text)
    else:
        for text, number in vocabulary.items():
            byte = _BYTE_TOKEN.fullmatch(text)
            # U+2581 is how SentencePiece writes a space.
            ids[number] = bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode()
    # Added tokens spell plain text, not the alphabet of the model's own vocabulary.
    ids |= {token["id"]: token["content"].encode() for token in content.get("added_tokens", [])}
    return [ids.get(number, b"") for number in range(max(ids) + 1)]
