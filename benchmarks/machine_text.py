"""This machine's own text as JSON lines: Python sources and documentation, every different file once."""

import json
import sysconfig
from collections.abc import Iterator
from itertools import count
from pathlib import Path

SUFFIXES = (".py", ".md", ".txt", ".rst")
SPECIAL = "<|endoftext|>"


def write_corpus(root: Path, wanted_bytes: int, num_files: int) -> int:
    """corpus-<n>.jsonl in `root`, filled in turn; the bytes of text in them.

    Where the machine has less text than is wanted, it comes again with the number of the round in front.
    """
    files = [(root / f"corpus-{number}.jsonl").open("w", encoding="utf-8") for number in range(num_files)]
    num_bytes = 0
    for number, text in enumerate(endless_texts()):
        files[number % num_files].write(json.dumps({"text": text}) + "\n")
        num_bytes += len(text.encode())
        if num_bytes >= wanted_bytes:
            break
    for file in files:
        file.close()
    return num_bytes


def endless_texts() -> Iterator[str]:
    for number in count():
        yield from (f"{number}\n{text}" if number else text for text in machine_texts())


def machine_texts() -> Iterator[str]:
    """Every different text of the standard library, the installed packages and /usr/share/doc."""
    roots = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "/usr/share/doc"]
    seen = set()
    for path in (path for root in roots for path in sorted(Path(root).rglob("*"))):
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text and SPECIAL not in text and hash(text) not in seen:
            seen.add(hash(text))
            yield text
