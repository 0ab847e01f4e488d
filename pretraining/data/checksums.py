"""Checksums of files, and digests of JSON values and of token streams.

A stream's digest does not depend on how it is cut into shards, and those of two streams can be joined without reading
them. Each document is hashed (xxh3, 64 bits). The hashes are the coefficients of a polynomial, which is evaluated
modulo 2**64 at two odd points: the joined value follows from both values and the length of the second stream.
"""

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretraining.outside.files import regular

if TYPE_CHECKING:
    import numpy as np

_POINTS = (0x9E3779B97F4A7C15, 0xD1342543DE82EF95)
_MODULUS = 1 << 64


def checksum_of_file(path: Path) -> str:
    """Compute `xxh128:<hex>` of the whole file."""
    import xxhash

    # Several GB/s: it protects against damage, not against forgery.
    digest = xxhash.xxh128()
    with open(path, "rb", opener=regular) as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return f"xxh128:{digest.hexdigest()}"


def checksum_of(content: bytes) -> str:
    """Compute the same of the content of a file."""
    import xxhash

    return f"xxh128:{xxhash.xxh128(content).hexdigest()}"


def digest_of(*parts: Any) -> str:
    """Compute blake2b of JSON values, independent of the order of their keys."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def content_fingerprint(splits: dict) -> str:
    """Compute the identity of the tokens, the same on every machine and in every folder; it keys the order."""
    return digest_of([[name, splits[name]["dtype"], splits[name]["checksum"]] for name in sorted(splits)])


def digest_of_documents(tokens: "np.ndarray", ends: "np.ndarray") -> str:
    """Digest, in 32 hex digits, the documents that end at `ends` [documents] of `tokens` [tokens]."""
    import numpy as np
    import xxhash

    content, width = memoryview(np.ascontiguousarray(tokens)).cast("B"), tokens.itemsize
    edges = [0, *(ends * width).tolist()]
    coefficients = np.array([xxhash.xxh3_64_intdigest(content[a:b]) for a, b in pairwise(edges)], np.uint64)
    values = []
    for point in _POINTS:
        # point**(documents - 1) ... point**0. uint64 products and sums wrap: this is arithmetic modulo 2**64.
        powers = np.full(len(coefficients), point, np.uint64)
        powers[:1] = 1
        powers = np.cumprod(powers, dtype=np.uint64)[::-1]
        values.append(int((coefficients * powers).sum(dtype=np.uint64)))
    return "".join(f"{value:016x}" for value in values)


def joined_digest(digests: list[str], num_documents: list[int]) -> str:
    """Join the digests of streams, from these digests and their numbers of documents."""
    values = [0, 0]
    for digest, count in zip(digests, num_documents, strict=True):
        for number, point in enumerate(_POINTS):
            added = int(digest[16 * number : 16 * number + 16], 16)
            # What came before moves up by the documents of this stream.
            values[number] = (values[number] * pow(point, count, _MODULUS) + added) % _MODULUS
    return "".join(f"{value:016x}" for value in values)
