"""Read what others wrote: their files, their JSON, and the names in it that become paths. SECURITY.md lists them."""

import errno
import gzip
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 30
"""The largest file that is read whole. The manifest of a million shards has half of it."""
UNREADABLE = (OSError, EOFError, zlib.error)
"""What reading a file raises, compressed ones too, if it is not whole."""

NAME = {"type": "string", "pattern": r"[^/\\\x00-\x1f\x7f]+(?<!^\.)(?<!^\.\.)"}
"""Schema of a name that becomes one part of a path: no separator, no control character, neither `.` nor `..`."""
DIGEST = {"type": "string", "pattern": "[0-9a-f]{16,128}"}
"""Schema of a digest, which becomes the name of a file or folder."""
CHECKSUM = {"type": "string", "pattern": "[0-9a-z]+:[0-9a-f]{16,128}"}
"""Schema of a digest behind the name of its function."""
COUNT: dict = {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1}
TEXT: dict = {"type": "string"}
NUMBER: dict = {"type": "number"}


def object_of(needed: dict[str, dict], others: dict[str, dict] | None = None) -> dict:
    """Return the schema of an object that has these keys, and perhaps the others."""
    return {"type": "object", "required": [*needed], "properties": {**needed, **(others or {})}}


def regular(path: str, flags: int) -> int:
    """Open a regular file; the `opener` of `open()`. A link is followed to read, and never to write.

    Raises `OSError`: ENXIO for a pipe, a socket or a device, on which a reader would wait; ELOOP for a link.
    """
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    # what `truncate` loses would be lost before the kind of file is known
    safe = flags & ~os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if writes else 0)
    descriptor = os.open(path, safe, 0o666)
    kind = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(kind) or (stat.S_ISDIR(kind) and not writes)):  # Python itself refuses a folder
        os.close(descriptor)
        raise OSError(errno.ENXIO, "is no regular file", str(path))
    if flags & os.O_TRUNC:
        os.ftruncate(descriptor, 0)
    return descriptor


def read_bytes(path: Path, last_bytes: int | None = None) -> bytes:
    """Read a whole file, or its end; `OSError` if it is no regular file, or larger than any of ours."""
    with open(path, "rb", opener=regular) as file:
        if last_bytes is not None:
            file.seek(max(0, os.fstat(file.fileno()).st_size - last_bytes))
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"is larger than {MOST_BYTES:,} bytes", str(path))
    return content


def parse_json(content: str | bytes, **options: Any) -> Any:
    """Parse one JSON value; `ValueError` for whatever is none: bytes that are no text, brackets without end.

    Half of a surrogate pair is refused too, because it could not be written again. options: of `json.loads`.
    """

    def integer(digits: str) -> int:
        if len(digits) > 300:
            raise ValueError(f"{digits[:20]}... is too large for a number")  # also for a float
        return int(digits)

    text = content if isinstance(content, str) else content.decode("utf-8")
    try:
        value = json.loads(text, **{"parse_int": integer, **options})
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def read_json_value(path: Path) -> Any:
    """Read the JSON value in a file; `OSError` or `ValueError` if there is none."""
    return parse_json(read_bytes(path))


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number, value) of the lines of a .jsonl or .jsonl.gz file, without empty ones.

    Raises `OSError` (of compressed bytes also EOFError and zlib.error), and `ValueError` with the line that is no JSON.
    """
    is_packed = path.name.lower().endswith(".gz")
    with open(path, "rb", opener=regular) as file, gzip.open(file) if is_packed else file as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield number, parse_json(line)
                except ValueError as error:
                    raise ValueError(f"line {number}: not valid JSON ({error})") from None


def is_name(text: str) -> bool:
    return re.fullmatch(NAME["pattern"], text) is not None


def inside(folder: Path, name: object) -> Path:
    """Return the path of what lies below `folder` under a relative name; `ValueError` if the name leads elsewhere."""
    parts = name.split("/") if isinstance(name, str) else [""]
    if not all(map(is_name, parts)):
        raise ValueError(f"{str(name)[:80]!r} is no name of a file below {folder}")
    return folder.joinpath(*parts)
