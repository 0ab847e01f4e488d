"""Name the part of a parameter that a layer split over ranks leaves to one of them, and copy between such parts.

A checkpoint knows every element by its place in the whole parameter, not by the rank that held it. So what was saved at
one degree of parallelism can be read at any other. Tensor parallelism cuts a matrix along one dimension, expert
parallelism cuts the first dimension of the experts, and a part of packed matrices is cut along two.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

_IN_KEY = re.compile(r"(.*)@(\d+):(\d+):(\d+):(\d+):(\d+)", re.DOTALL)


class Cut(NamedTuple):
    """Rows and columns of a parameter whose elements are seen as a matrix with `width` columns.

    The elements of a cut are numbered row by row, as they are in the memory of a rank that holds the cut alone.
    """

    row: int
    rows: int
    column: int
    columns: int
    width: int

    @classmethod
    def of(cls, shape: Sequence[int], parts: Mapping[int, tuple[int, int]]) -> "Cut":
        """Return the cut of a parameter of `shape` that has the elements [start, start + length) of some dimensions.

        parts: {dimension: (start, length)}. Besides the last of them, only the first dimension may be cut.
        """
        whole = {dimension: (0, size) for dimension, size in enumerate(shape)}
        cut = {dimension: part for dimension, part in parts.items() if part != whole[dimension]}
        last = max(cut, default=0)
        if any(0 < dimension < last for dimension in cut):
            raise ValueError(f"no such cut of {list(shape)}: {dict(parts)}")
        inner, between = prod(shape[last + 1 :]), prod(shape[1:last])
        start, length = cut.get(last, whole.get(last, (0, 1)))
        first, count = cut.get(0, whole[0]) if last else (0, 1)
        return cls(first * between, count * between, start * inner, length * inner, prod(shape[last:]))

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def start(self) -> int | None:
        """Place of the first element in the flattened parameter; None if the others do not follow it directly."""
        follows = self.rows <= 1 or self.columns == self.width
        return self.row * self.width + self.column if follows else None

    def key(self, parameter: str) -> str:
        """Return the parameter's name with the cut, as it is in the key of a fragment."""
        return f"{parameter}@{self.row}:{self.rows}:{self.column}:{self.columns}:{self.width}"

    def rectangles(self, start: int, numel: int) -> Iterator["Rectangle"]:
        """Yield the elements [start, start + numel) of the cut: a part of a row, whole rows, a part of a row."""
        end = start + numel
        while start < end:
            row, column = divmod(start, self.columns)
            whole_rows = (end - start) // self.columns if column == 0 else 0
            rows = max(1, whole_rows)
            columns = self.columns if whole_rows else min(self.columns - column, end - start)
            yield Rectangle(self.row + row, rows, self.column + column, columns)
            start += rows * columns

    def place(self, row: int, column: int) -> int:
        """Return the number of an element of the cut by its place in the whole matrix."""
        return (row - self.row) * self.columns + column - self.column


class Rectangle(NamedTuple):
    """Rows and columns of the whole matrix."""

    row: int
    rows: int
    column: int
    columns: int

    def common(self, other: "Rectangle") -> "Rectangle | None":
        """Return what both have, or None."""
        row, column = max(self.row, other.row), max(self.column, other.column)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        columns = min(self.column + self.columns, other.column + other.columns) - column
        return Rectangle(row, rows, column, columns) if rows > 0 and columns > 0 else None

    def some_rows(self, at_once: int) -> Iterator["Rectangle"]:
        """Yield it in pieces of `at_once` rows."""
        for row in range(self.row, self.row + self.rows, at_once):
            yield self._replace(row=row, rows=min(at_once, self.row + self.rows - row))


def split_key(text: str) -> tuple[str, Cut | None]:
    """Return the parameter's name and the cut of which `Cut.key` made a text; None if it is the name alone."""
    if (found := _IN_KEY.fullmatch(text)) is None:
        return text, None
    name, *numbers = found.groups()
    return name, Cut(*map(int, numbers))


def rows_of(flat: torch.Tensor, cut: Cut, start: int, rectangle: Rectangle) -> torch.Tensor:
    """Return a rectangle as a view [rows, columns] of a flat tensor whose first element is number `start` of a cut."""
    offset = cut.place(rectangle.row, rectangle.column) - start
    sizes, strides = (rectangle.rows, rectangle.columns), (cut.columns, 1)
    return flat.as_strided(sizes, strides, flat.storage_offset() + offset)
