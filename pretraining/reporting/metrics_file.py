"""metrics.jsonl as columns, read once and then only where it has grown: a million rows fit in memory."""

import json
import math
from array import array
from pathlib import Path

import numpy as np
import orjson

from pretraining.metric_names import PLACE, grouped


class MetricsFile:
    """The rows of a metrics.jsonl, column by column; `read` takes in what was added since the last call.

    A line that is no row (a dying run left it half-written) is passed over and counted. A file that was replaced,
    as a resumed run does, is read anew.
    """

    def __init__(self, path: Path):
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.offset, self.inode, self.broken_lines = 0, None, 0
        self.steps, self.times = array("d"), array("d")
        self.columns: dict[str, tuple[array, array]] = {}  # name -> (row numbers, values)
        self._names: dict[str, str] = {}

    def read(self) -> bool:
        """Take in new rows; whether there were any."""
        if not self.path.is_file():
            return False
        status = self.path.stat()
        if status.st_ino != self.inode or status.st_size < self.offset:
            self._forget()
            self.inode = status.st_ino
        before = len(self.steps)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # being written, or never finished
                self.offset += len(line)
                self._add(line)
        return len(self.steps) > before

    def __len__(self) -> int:
        return len(self.steps)

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(row numbers, values) of a metric; both empty where no row has it."""
        rows, values = self.columns.get(name, (array("q"), array("d")))
        return np.array(rows, dtype=np.int64), np.array(values, dtype=np.float64)

    def names(self) -> list[str]:
        """Metrics that some row has, sorted."""
        return sorted(self.columns)

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        return self.columns[name][1][-1] if name in self.columns else None

    def _add(self, line: bytes) -> None:
        row = _parsed(line)
        if row is None or not isinstance(row.get("step"), int | float):
            self.broken_lines += bool(line.strip())
            return
        number = len(self.steps)
        self.steps.append(row["step"])
        self.times.append(row.get("time") or math.nan)
        for name, value in row.items():
            if name not in PLACE and isinstance(value, int | float):
                rows, values = self._column(name)
                rows.append(number)
                values.append(value)

    def _column(self, name: str) -> tuple[array, array]:
        known = self._names.get(name)
        if known is None:
            known = self._names[name] = grouped(name)
        if known not in self.columns:
            self.columns[known] = (array("q"), array("d"))
        return self.columns[known]


def _parsed(line: bytes) -> dict | None:
    try:
        row = orjson.loads(line)
    except ValueError:
        try:
            row = json.loads(line)  # a NaN, which JSON does not know and Python writes
        except ValueError:
            return None
    return row if isinstance(row, dict) else None
