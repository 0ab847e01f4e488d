"""The input cut into pieces, and pieces gathered into tasks: by the input alone, never by who does the work."""

from typing import NamedTuple

from pretraining.data.text_files import Extent

PIECE_BYTES = 16 << 20
"""Text of a piece, the unit of filtering: minutes of the slowest filter, seconds of the others."""

TASK_PIECES = 16
"""Pieces that are tokenized together: 256 MB of text, about one shard of 64 M tokens."""


class Piece(NamedTuple):
    """Some 16 MB of text of one source."""

    source: int
    extents: list[Extent]


def cut_sources(sources: list, piece_bytes: int | None = None) -> list[Piece]:
    """All pieces (of `PIECE_BYTES`), in the order of the sources and of their files."""
    piece_bytes = piece_bytes or PIECE_BYTES
    return [
        Piece(number, extents) for number, source in enumerate(sources) for extents in source.cut(piece_bytes)
    ]


def gather(pieces: list[Piece], sources: list, task_pieces: int | None = None) -> list[range]:
    """Ranges of (`TASK_PIECES`) piece numbers to tokenize together: neighbours of one source.

    A piece of a source with `large_pieces` is a task of its own.
    """
    task_pieces = task_pieces or TASK_PIECES
    tasks, start = [], 0
    for stop in range(1, len(pieces) + 1):
        source = pieces[start].source
        full = stop - start == (1 if sources[source].large_pieces else task_pieces)
        if stop == len(pieces) or full or pieces[stop].source != source:
            tasks.append(range(start, stop))
            start = stop
    return tasks
