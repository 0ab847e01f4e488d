"""Check that each split can hold one block; if not, suggest a validation_share that works."""

import math
from array import array
from collections import Counter
from pathlib import Path

from pretraining.errors import UserError
from pretraining.recipe.data import Data

FILE_NAME = "sizes.npz"
RECORDED_DOCUMENTS = 1 << 16
"""Documents whose draws are kept for an exact suggestion: a corpus with more is rarely too small."""


class SplitSizes:
    """Keep the draws and sizes of the first documents, to suggest a share that works."""

    def __init__(self):
        self._draws, self._tokens = array("d"), array("q")
        self._num_documents = 0

    def extend(self, draws: list[float], num_tokens: list[int]) -> None:
        self._num_documents += len(draws)
        room = max(0, RECORDED_DOCUMENTS - len(self._draws))
        self._draws.extend(draws[:room])
        self._tokens.extend(num_tokens[:room])

    def save(self, folder: Path) -> None:
        """Write what was recorded to `sizes.npz`."""
        import numpy as np

        np.savez(
            folder / FILE_NAME, draws=self._draws, tokens=self._tokens, num_documents=self._num_documents
        )

    @classmethod
    def joined(cls, folders: list[Path]) -> "SplitSizes":
        """Read what the `sizes.npz` files of these folders record, one after the other."""
        import numpy as np

        joined = cls()
        for folder in folders:
            kept = np.load(folder / FILE_NAME)
            joined.extend(kept["draws"].tolist(), kept["tokens"].tolist())
            # Documents beyond the recorded ones count too: with them the suggestion cannot be exact.
            joined._num_documents += int(kept["num_documents"]) - len(kept["draws"])
        return joined

    def workable_share(self, num_tokens: int, wanted: int) -> float | None:
        """Find the shortest validation_share that leaves each split `wanted` of `num_tokens` tokens, or None."""
        if self._num_documents > len(self._draws):
            # Not all draws are known: aim at twice what is wanted, if the corpus has room for it.
            return _round_up(2 * wanted / num_tokens, digits=1) if num_tokens > 4 * wanted else None
        documents = sorted(zip(self._draws, self._tokens, strict=True))
        validation = 0
        for draw, tokens in documents:
            validation += tokens
            if validation >= wanted:
                # A document is in validation if its draw is below the share. Try the shortest decimal first.
                for share in (_round_up(draw, digits) for digits in range(1, 16)):
                    below = sum(size for place, size in documents if place < share)
                    if wanted <= below <= num_tokens - wanted and share < 1:
                        return share
                return None
        return None


def _round_up(value: float, digits: int) -> float:
    """Find the smallest number of `digits` significant decimal digits above `value`."""
    unit = 10.0 ** (math.floor(math.log10(max(value, 1e-12))) - digits + 1)
    return float(f"{(math.floor(value / unit) + 1) * unit:.{digits}g}")


def check_blocks(splits: dict, data: Data, sequence_length: int, sizes: SplitSizes | None = None) -> None:
    """Raise UserError unless train, the held-out share and each validation source hold one block of inputs and targets.

    A block has `sequence_length` inputs.
    """
    # One more than the inputs: the target of the last one.
    wanted = sequence_length + 1
    held_out: Counter[int] = Counter()
    for shard in splits["validation"]["shards"]:
        held_out[shard.get("source") or 0] += shard["tokens"]  # None: of a single source in older data sets
    own = data.validation.sources if data.validation else []
    for number, source in enumerate(own):
        found = held_out.pop(len(data.sources) + number, 0)
        if found < wanted:
            raise UserError(
                f"data {data.name!r}: data.validation.sources.{number} ({source.called}) has {found:,} tokens, too "
                f"few for one block of {wanted:,}; add text to it, leave it out, or shorten the sequence length"
            )
    counts = {"train": splits["train"]["tokens"]}
    if data.validation_share:
        counts["validation"] = sum(held_out.values())
    total, short = sum(counts.values()), [name for name in counts if counts[name] < wanted]
    if not short:
        return
    share = sizes.workable_share(total, wanted) if sizes and data.validation_share else None
    if share is not None:
        advice = f"set data.validation_share to {share:g} (it is {data.validation_share:g})"
    elif total < len(counts) * wanted:
        blocks = "two blocks need" if len(counts) == 2 else "one block needs"
        advice = f"add text: {blocks} {len(counts) * wanted:,} tokens"
    else:
        advice = "add text or documents, change data.validation_share, or shorten the sequence length"
    raise UserError(
        f"data {data.name!r}: {short[0]} has {counts[short[0]]:,} of the corpus's {total:,} tokens, too "
        f"few for one block of {wanted:,} (sequence length {sequence_length:,} and one target); {advice}"
    )
