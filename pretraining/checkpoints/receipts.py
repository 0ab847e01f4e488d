"""What each rank vouches for: the files it wrote, their bytes and checksums, told once the disk holds them."""

import json
from pathlib import Path

from pretraining.runtime.durable_files import write_json


def receipt_name(rank: int, ranks: int) -> str:
    """`rank-00000-of-00002.json`."""
    return f"rank-{rank:05d}-of-{ranks:05d}.json"


def write_receipt(folder: Path, rank: int, ranks: int, files: dict[str, dict], **more) -> None:
    """Say that the disk holds `files`: {name relative to the checkpoint: {"bytes", "checksum": "xxh128:<hex>"}}.

    more: what else a rank has to say as JSON, the states of Python's and numpy's generators for one.
    """
    write_json(folder / receipt_name(rank, ranks), {"files": files, **more})


def read_receipt(folder: Path, rank: int, ranks: int) -> dict:
    """What a rank wrote with `write_receipt`."""
    return json.loads((folder / receipt_name(rank, ranks)).read_text(encoding="utf-8"))


def missing_receipts(folder: Path, ranks: int) -> list[int]:
    """Ranks that have not vouched for their files yet."""
    return [rank for rank in range(ranks) if not (folder / receipt_name(rank, ranks)).exists()]


def files_of_all_ranks(folder: Path, ranks: int) -> dict[str, dict]:
    """{name: {"bytes", "checksum"}} of every rank's files."""
    return {
        name: entry
        for rank in range(ranks)
        for name, entry in read_receipt(folder, rank, ranks)["files"].items()
    }
