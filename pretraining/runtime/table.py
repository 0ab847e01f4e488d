"""Tables and lists of facts in plain text, as the commands print them."""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Column(NamedTuple):
    """One column of a table: its title, and how the cell of a row is written."""

    title: str
    value: str | Callable[[Any], Any]  # key of the row, or a function of it; None is written as `-`
    write: str | Callable[[Any], str] = ""  # a format, or a function that writes the value

    def cell(self, row: Any) -> str:
        value = self.value(row) if callable(self.value) else row[self.value]
        if value is None:
            return "-"
        return self.write(value) if callable(self.write) else format(value, self.write)


def write_table(columns: Sequence[Column], rows: Iterable[Any], left: int = 1) -> str:
    """Write a table, a line for each row: the first `left` columns aligned left, the others right."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    return aligned([[column.title for column in columns], *cells], left)


def aligned(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Write lines of cells below each other; the first line is the header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = zip(line, widths, strict=True)
        padded = [f"{c:<{width}}" if n < left else f"{c:>{width}}" for n, (c, width) in enumerate(cells)]
        text.append("  ".join(padded).rstrip())
    return "\n".join(text)


def facts(rows: Sequence[tuple[str, str]], line_width: int = 118) -> str:
    """Write label and value, one pair per line; a long value continues on the next lines, below its start."""
    width = max(len(label) for label, _ in rows) + 2
    lines = []
    for label, value in rows:
        # an empty value still needs its line
        parts = textwrap.wrap(value, line_width - width, break_on_hyphens=False) or [""]
        lines += [f"{label:<{width}}{parts[0]}", *(" " * width + part for part in parts[1:])]
    return "\n".join(lines)
