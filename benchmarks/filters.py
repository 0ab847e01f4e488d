"""Filter rules on real text of this machine: MB per CPU second, and the verdicts, beside datatrove's own classes.

    python benchmarks/filters.py
    python benchmarks/filters.py --megabytes 4 --rounds 5

Prints one JSON line a rule. datatrove runs twice where it can: with the word splitter of this repository, which
must give the same verdict on every document, and with its default one, spaCy's, where spaCy is installed
(`pip install spacy`; it is needed for nothing else). All sides take turns in every round; medians.
"""

import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from gear import parser_of, record

DATATROVE = {
    "gopher_quality": "GopherQualityFilter",
    "gopher_repetition": "GopherRepetitionFilter",
    "c4": "C4QualityFilter",
    "fineweb": "FineWebQualityFilter",
}
SPECS = {
    **{name: {"rule": name} for name in DATATROVE},
    "length": {"rule": "length", "min_words": 50},
    "language": {"rule": "language", "languages": ["en"]},
    "language, 2,000 characters": {"rule": "language", "languages": ["en"], "max_characters": 2000},
    "blocklist of 400": {"rule": "blocklist", "words": [f"{n}xyz" for n in range(400)]},
    "pii": {"rule": "pii", "mask": ["email", "ip", "phone"]},
}
LARGEST_DOCUMENT = 100_000


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=float, default=2.0, help="text to filter, about")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds")
    options = parser.parse_args()
    texts = texts_of_this_machine(int(options.megabytes * 1e6))
    num_bytes = sum(len(text.encode()) for text in texts)
    for name, spec in SPECS.items():
        sides = {"ours": ours(spec)}
        if name in DATATROVE:
            sides |= datatrove_sides(DATATROVE[name])
        seconds, kept = compare(sides, texts, options.rounds)
        values = {"rule": name, "num_documents": len(texts), "megabytes": round(num_bytes / 1e6, 2)}
        values["kept"] = sum(kept["ours"])
        for side in sides:
            values[f"{side}_mb_per_cpu_second"] = round(num_bytes / 1e6 / seconds[side], 2)
            if side != "ours":
                same = sum(a == b for a, b in zip(kept["ours"], kept[side], strict=True))
                values[f"{side}_same_verdict"] = round(same / len(texts), 4)
        record("filters", values, options.keep)


def texts_of_this_machine(num_bytes: int) -> list[str]:
    """What packages say about themselves, their documentation and Python's standard library, in a fixed shuffle."""
    site = Path(sysconfig.get_path("purelib"))
    paths = [path for suffix in ("METADATA", "*.md", "*.rst", "*.txt") for path in sorted(site.rglob(suffix))]
    paths += sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(paths)
    texts, left = [], num_bytes
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="ignore")
        if 0 < len(text) <= LARGEST_DOCUMENT and left > 0:
            texts.append(text)
            left -= len(text)
    return texts


def ours(spec: dict) -> Callable[[list[str]], list[bool]]:
    from pretraining.data.quality.chain import FilterChain

    chain = FilterChain([spec])
    return lambda texts: [text is not None for text in chain.apply(texts, [""] * len(texts))]


def datatrove_sides(class_name: str) -> dict[str, Callable[[list[str]], list[bool]]]:
    """datatrove's class with our splitter, and with spaCy where there is one; none without datatrove."""
    if find_spec("datatrove") is None:
        print("datatrove is not installed: no comparison", file=sys.stderr)
        return {}
    from datatrove.pipeline import filters

    from tests.gear.reference_splitter import ReferenceSplitter

    sides = {"datatrove": filtering_by(getattr(filters, class_name)(language=ReferenceSplitter()))}
    if find_spec("spacy") is not None:
        sides["datatrove_spacy"] = filtering_by(getattr(filters, class_name)())
    return sides


def filtering_by(rule) -> Callable[[list[str]], list[bool]]:
    from datatrove.data import Document
    from datatrove.utils.text import split_into_parts

    def apply(texts: list[str]) -> list[bool]:
        split_into_parts.cache_clear()
        return [rule.filter(Document(text=text, id="")) is True for text in texts]

    return apply


def compare(sides: dict[str, Callable], texts: list[str], rounds: int) -> tuple[dict, dict]:
    """side -> median CPU seconds over the texts; side -> whether it keeps each text. A first round warms up."""
    seconds, kept = {side: [] for side in sides}, {}
    for _ in range(rounds + 1):
        for side, apply in sides.items():
            began = time.process_time()
            kept[side] = apply(texts)
            seconds[side].append(time.process_time() - began)
    return {side: statistics.median(times[1:]) for side, times in seconds.items()}, kept


if __name__ == "__main__":
    main()
