"""Texts of this machine, in which every filter rule finds something, and filter chains for tests."""

import random
import sysconfig
from functools import cache
from pathlib import Path

from pretraining.data.quality.chain import FilterChain
from pretraining.data.quality.text import TextView

PROSE = (
    "The ship left the harbour at dawn. Nobody on the quay had expected to see that happen with such haste. "
    "It was said that the captain feared the weather! Was he right to do so? The sea stayed calm and clear. "
    "On the third day they met a merchant who told them of the war and of all that they would have to face."
)

OTHER_ALPHABETS = [
    "Он сказал, что вернётся к вечеру. Никто ему не поверил! Почему? Это не было ясно…",
    "\u6e2f\u306b\u8239\u304c\u5165\u3063\u305f\u3002\u8ab0\u3082\u898b\u306a\u304b\u3063\u305f\uff01",
    "नमस्ते दुनिया। यह एक वाक्य है। \U0001f600 \U000e0041",
]


def real_texts() -> list[str]:
    """Python's sources, and documentation and licences of the installed packages: up to 20,000 characters each."""
    library, site = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    paths = sorted(library.glob("*.py"))[::8] + sorted(site.glob("*.dist-info/METADATA"))
    paths += sorted(site.glob("*.dist-info/**/LICENSE*"))[::3]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file()]
    return [text for text in texts if 0 < len(text) <= 20_000]


def damaged(text: str, draw: random.Random) -> str:
    """The text with lines repeated, cut, bulleted or ended by an ellipsis, so that every rule has work."""
    lines = text.split("\n")
    for _ in range(draw.randrange(1, 8)):
        at = draw.randrange(len(lines))
        before, after = draw.choice(["- ", "• ", "", "# ", "\u00a0"]), draw.choice(["...", "…", ".", ""])
        lines[at] = before + lines[at] + after
        lines[at:at] = lines[at : at + draw.randrange(6)] * draw.randrange(3)
    return "\n".join(lines[: draw.randrange(1, len(lines) + 1)])


@cache
def many_texts() -> list[str]:
    """Real texts, damaged ones, and the corners."""
    draw, real = random.Random(7), real_texts()
    corners = [" ", "\n\n", "a", "...", "\n\nx\n\n", "#" * 300, "a b " * 200, "x " * 60, PROSE]
    corners += OTHER_ALPHABETS
    broken = [damaged(text, draw) for text in real]
    return [*real, *broken, *corners, *(PROSE + text for text in OTHER_ALPHABETS)]


def chain_of(*specs: dict) -> FilterChain:
    return FilterChain(list(specs))


def verdict_of(spec: dict, text: str):
    """What the one rule says: None, a Rejection or a Changed."""
    return chain_of(spec).rules[0].judge(TextView(text))
