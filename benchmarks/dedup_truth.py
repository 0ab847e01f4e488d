"""Real text with planted near-duplicates, and the exact Jaccard similarity of every pair that resembles."""

import json
import math
import random
import sysconfig
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

SUFFIXES = (".py", ".txt", ".md", ".rst", ".html")
FEWEST_CHARACTERS, MOST_CHARACTERS = 200, 200_000
EDITS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04)
"""Share of words replaced in a planted copy; at 0.02 the Jaccard similarity of 5-grams is about 0.82."""

LEAST_SIMILARITY = 0.7
NGRAM = 5


def build_corpus(folder: Path, num_bytes: int, num_pieces: int) -> list[str]:
    """Texts in a shuffled order, a tenth of them edited copies of others; written as JSONL pieces."""
    chance = random.Random(0)
    texts = list(texts_of_this_machine(int(num_bytes * 0.9)))
    words = [word for text in texts[:200] for word in text.split()]
    originals = chance.sample(texts, len(texts) // 10)
    texts += [
        edited(text, EDITS[number % len(EDITS)], words, chance) for number, text in enumerate(originals)
    ]
    chance.shuffle(texts)
    folder.mkdir(parents=True)
    for piece, some in enumerate(np.array_split(np.arange(len(texts)), num_pieces)):
        with (folder / f"{piece:05d}.jsonl").open("w") as file:
            for number in some:
                file.write(json.dumps({"text": texts[number], "id": str(number)}) + "\n")
    return texts


def texts_of_this_machine(num_bytes: int) -> Iterator[str]:
    """Documentation, the standard library and installed packages, each file a text, no text twice."""
    paths, seen, size = sysconfig.get_paths(), set(), 0
    for root in ("/usr/share/doc", paths["stdlib"], paths["purelib"], "/usr/share", "/usr/lib"):
        for path in sorted(Path(root).rglob("*")):
            text = readable(path)
            if text and text not in seen:
                seen.add(text)
                size += len(text.encode())
                yield text
            if size >= num_bytes:
                return


def readable(path: Path) -> str | None:
    if path.suffix not in SUFFIXES or not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return text if FEWEST_CHARACTERS <= len(text) <= MOST_CHARACTERS else None


def edited(text: str, share: float, words: list[str], chance: random.Random) -> str:
    """`text` with `share` of its words (at least one) replaced at random places."""
    parts = text.split(" ")
    for _ in range(max(1, round(share * len(text.split())))):
        parts[chance.randrange(len(parts))] = chance.choice(words)
    return " ".join(parts)


def exact_similarities(texts: list[str]) -> dict[tuple[int, int], float]:
    """{(earlier, later): Jaccard similarity} of every pair at or above `LEAST_SIMILARITY`.

    Prefix filter (Bayardo, Ma, Srikant: Scaling up all pairs similarity search, WWW 2007): such a pair shares
    one of the rarest 1 - LEAST_SIMILARITY of the n-grams of each. Nothing is estimated.
    """
    from tests.gear.similar_texts import jaccard, ngram_sets

    sets = ngram_sets(texts, NGRAM)
    found, index = {}, {}
    for number, prefix in enumerate(rarest(sets)):
        lists = [index.setdefault(value, []) for value in prefix.tolist()]
        for other in set().union(*lists):
            small, large = sorted((len(sets[other]), len(sets[number])))
            if small >= LEAST_SIMILARITY * large:
                similarity = jaccard(sets[other], sets[number])
                if similarity >= LEAST_SIMILARITY:
                    found[other, number] = similarity
        for values in lists:
            values.append(number)
    return found


def rarest(sets: list[np.ndarray]) -> Iterator[np.ndarray]:
    """The n-grams of each set that every similar set must share one of."""
    bounds = np.cumsum([0] + [len(values) for values in sets])
    flat = np.concatenate(sets)
    _, inverse, counts = np.unique(flat, return_inverse=True, return_counts=True)
    frequency = counts[inverse]
    for first, end in pairwise(bounds):
        order = np.lexsort((flat[first:end], frequency[first:end]))
        length = end - first
        yield flat[first:end][order[: length - math.ceil(LEAST_SIMILARITY * length) + 1]]
