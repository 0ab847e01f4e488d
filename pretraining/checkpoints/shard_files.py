"""Write a checkpoint's tensors as fragments of flat parameters in safetensors files, and read back any slice.

Each rank writes one file. A key is `<state>/<parameter>@<start>`: a 1-D tensor that holds the elements [start,
start + numel) of the flattened parameter. If a layer is split over ranks, these may not follow each other there: the
key then names the cut as well (`Cut`), `<state>/<parameter>@<row>:<rows>:<column>:<columns>:<width>@<start>`, and
`start` counts in the cut. `<state>/<parameter>@whole` is a state with a shape of its own, such as a row factor. Keys
without `@` are the rank's own tensors, such as `rng/torch`.
"""

import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from pretraining.checkpoints.format import passed_on, read_receipt
from pretraining.errors import UserError
from pretraining.outside.files import COUNT, object_of, read_json_value
from pretraining.outside.schema import check
from pretraining.runtime.heartbeat import work_done

STATE_FORMAT = 1
STATE_FILE = "state.json"
MASTER = "master"  # the state that holds the fp32 weights
BUFFER = "buffer"  # the state that holds the model's persistent buffers

_CHUNK_BYTES = 1 << 24
_MAPPED_BYTES = 1 << 28  # resident pages of the mapped files stay below this
_IN_KEY = re.compile(r"(.*)@(\d+):(\d+):(\d+):(\d+):(\d+)", re.DOTALL)
_RANK_FILE = re.compile(r"rank-(\d{5})-of-(\d{5})\.safetensors")
# safetensors' names of types, in the order in which the library lays tensors out.
_TYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}


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


def _rows_in(flat: torch.Tensor, cut: Cut, start: int, rectangle: Rectangle) -> torch.Tensor:
    """Return a rectangle as a view [rows, columns] of a flat tensor whose first element is number `start` of a cut."""
    offset = cut.place(rectangle.row, rectangle.column) - start
    sizes, strides = (rectangle.rows, rectangle.columns), (cut.columns, 1)
    return flat.as_strided(sizes, strides, flat.storage_offset() + offset)


def rank_file(rank: int, ranks: int) -> str:
    """Return the name of one rank's file, `rank-00000-of-00002.safetensors`."""
    return f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def fragment_key(state: str, parameter: str, start: int | None, cut: Cut | None = None) -> str:
    """Return the key of a fragment; `start` is None for a state with a shape of its own, and counts in the cut."""
    if cut is not None and start is not None:
        if cut.start is None:
            parameter += f"@{cut.row}:{cut.rows}:{cut.column}:{cut.columns}:{cut.width}"
        else:
            start += cut.start
    return f"{state}/{parameter}@{'whole' if start is None else start}"


def write_rank_file(
    path: Path, tensors: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor] | None = None
) -> dict:
    """Write `tensors` as one safetensors file; tensors on a device are copied to memory one at a time.

    With `read`, `tensors` give only types and shapes (on torch's `meta` device), and `read` returns the data by name.
    The bytes are the same that safetensors' own `save_file` would write. Returns the file's `file_entry` once the disk
    holds it (fsync).
    """
    read = read or tensors.__getitem__

    def pieces() -> Iterator[memoryview]:
        yield memoryview(file_header(tensors)[0])
        for name in _in_file_order(tensors):
            data = memoryview(read(name).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
            yield from (data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES))

    with path.open("wb", buffering=0) as file:
        # `save_file` would need a second reading of the file for its checksum
        entry = passed_on(pieces(), file.write)
        os.fsync(file.fileno())
    return entry


def _in_file_order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    order = list(_TYPES)
    return sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))


def file_header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, int]:
    """Return a file's first bytes (length of the header as u64, JSON padded to 8 bytes) and the bytes that follow."""
    header, end = {}, 0
    for name in _in_file_order(tensors):
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        kind, shape = _TYPES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # The header ends at a multiple of 8 bytes, so that the tensors, the largest types first, are aligned.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


class Fragment(NamedTuple):
    start: int
    numel: int
    file: str
    key: str
    cut: Cut | None = None  # in which `start` counts; None: in the flattened parameter


class _Missing(UserError):
    """The files that were read so far do not hold a slice."""


def fetch_nothing(file: str) -> bool:
    """Fetch no file: to read what the files here hold."""
    return False


class CheckpointReader:
    """Reads any slice of any state of any parameter, for any number of ranks and any stage that wrote the checkpoint.

    parameters: {name: shape}. state: the content of `state.json`. ranks: the number of ranks that saved.

    fetch: for a checkpoint of which a node holds a part, brings a file of a rank into the folder; returns False if it
    cannot. It is called only for what the files here do not hold. first: the number of the file that holds most of what
    will be read: the others are opened only for what it lacks. None opens all of them.

    Raises `UserError` if `folder` is no checkpoint of this format, or files of it are missing.
    """

    def __init__(self, folder: Path, fetch: Callable[[str], bool] | None = None, first: int | None = None):
        self.folder, self._fetch = Path(folder), fetch
        self.state = read_state(self.folder)
        self.parameters = {name: tuple(entry["shape"]) for name, entry in self.state["parameters"].items()}
        self.files = _rank_files(self.folder, incomplete=fetch is not None)
        self.ranks = len(self.files)
        # One listing: thousands of ranks that asked for each of thousands of files would hold up a shared disk.
        here = {path.name for path in self.folder.iterdir()}
        self._later = [file for file in self.files if file in here]
        self._absent = [file for file in self.files if file not in here]
        self._open_files: dict[str, safe_open] = {}
        self._served_bytes = 0
        self._fragments: dict[tuple[str, str], list[Fragment]] = {}
        self._whole: dict[tuple[str, str], Fragment] = {}
        self._states: dict[str, list[str]] = {}
        own = self.files[first] if first is not None and first < self.ranks else None
        self._index([own] if own in here else self._later)

    def _bring_another(self) -> bool:
        """Open files that are here, or fetch the next one that is not; False if there are no more."""
        if self._later:
            # rank 0's first, which holds what is not partitioned; then all others at once
            self._index(self._later[:1] if self._later[0] == self.files[0] else self._later)
            return True
        if not self._absent or self._fetch is None:
            return False
        file = self._absent.pop(0)
        if not self._fetch(file):
            return False
        self._index([file])
        return True

    def _index(self, files: list[str]) -> None:
        """Note what is in these files."""
        found, indexed = set(), set(files)
        self._later = [file for file in self._later if file not in indexed]
        for file in files:
            opened = self._opened(file)
            for key in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                if "@" not in key:
                    continue
                # Names of states have no slash; names of parameters may hold any character.
                state, _, rest = key.partition("/")
                parameter, _, start = rest.rpartition("@")
                if start == "whole":
                    self._whole[state, parameter] = Fragment(0, 0, file, key)
                    continue
                cut = None
                if of_cut := _IN_KEY.fullmatch(parameter):
                    parameter, cut = of_cut[1], Cut(*map(int, of_cut.groups()[1:]))
                fragment = Fragment(int(start), prod(opened.get_slice(key).get_shape()), file, key, cut)
                self._fragments.setdefault((state, parameter), []).append(fragment)
                found.add((state, parameter))
        for state, parameter in found:
            self._states[parameter] = sorted({*self.states(parameter), state})
            # Starts and ends both ascend in each cut, without fragments that are inside another one: `read` then finds
            # its first fragment by bisection.
            kept: list[Fragment] = []
            fragments = self._fragments[state, parameter]
            for fragment in sorted(fragments, key=lambda each: (each.cut or (), each.start, -each.numel)):
                last = kept[-1] if kept and kept[-1].cut == fragment.cut else None
                if last is None or fragment.start + fragment.numel > last.start + last.numel:
                    kept.append(fragment)
            self._fragments[state, parameter] = kept

    def states(self, parameter: str) -> list[str]:
        """Return the names of a parameter's per-element states: `master`, `exp_avg`, ..."""
        return self._states.get(parameter, [])

    def has(self, state: str, parameter: str) -> bool:
        """Return whether the checkpoint holds a per-element state of a parameter."""
        while state not in self.states(parameter):
            if not self._bring_another():
                return False
        return True

    def whole_states(self, parameter: str) -> list[str]:
        """Return the names of a parameter's states that have a shape of their own."""
        while not (found := sorted(state for state, name in self._whole if name == parameter)):
            if not self._bring_another():
                break
        return found

    def numel(self, parameter: str) -> int:
        return prod(self.parameters[parameter])

    def dtype(self, state: str, parameter: str) -> torch.dtype:
        fragment = self._fragments[state, parameter][0]
        kind = self._opened(fragment.file).get_slice(fragment.key).get_dtype()
        return next(dtype for dtype, name in _TYPES.items() if name == kind)

    def read(
        self, state: str, parameter: str, start: int = 0, numel: int | None = None, cut: Cut | None = None
    ) -> torch.Tensor:
        """Return elements of a flattened state, or of its `cut`, as a new tensor; `UserError` if some are missing."""
        while True:
            try:
                return self._read(state, parameter, start, numel, cut)
            except _Missing:
                if not self._bring_another():
                    raise

    def _read(
        self, state: str, parameter: str, start: int, numel: int | None, cut: Cut | None
    ) -> torch.Tensor:
        if numel is None:
            numel = (self.numel(parameter) if cut is None else cut.numel) - start
        fragments = self._fragments.get((state, parameter), [])
        if cut is not None and cut.start is not None:
            start, cut = start + cut.start, None
        if cut is not None or any(fragment.cut for fragment in fragments):
            return self._read_rectangles(state, parameter, start, numel, cut, fragments)
        slice_, at, end = None, start, start + numel
        # From the last fragment that begins at `start` or before, on to the end of the slice.
        for fragment in fragments[max(0, bisect_right(fragments, (start,)) - 1) :]:
            stop = min(end, fragment.start + fragment.numel)
            if fragment.start > at or at == end:  # a gap, or done
                break
            if stop <= at:  # all of it is read already
                continue
            part = self._part(fragment, at - fragment.start, stop - fragment.start)
            slice_ = torch.empty(numel, dtype=part.dtype) if slice_ is None else slice_
            slice_[at - start : stop - start] = part
            at = stop
            work_done()
        if at < end:
            raise _Missing(f"{self.folder}: {state} of {parameter} is missing from element {at} on")
        return torch.empty(0) if slice_ is None else slice_

    def _read_rectangles(
        self, state: str, parameter: str, start: int, numel: int, cut: Cut | None, fragments: list[Fragment]
    ) -> torch.Tensor:
        """Do what `read` does if the slice, or a fragment, is of a cut."""
        widths = {each.width for each in (cut, *(fragment.cut for fragment in fragments)) if each}
        if len(widths) > 1:
            raise UserError(f"{self.folder}: {parameter} was cut in another way than this run cuts it")
        width = widths.pop()
        whole = Cut(0, self.numel(parameter) // width, 0, width, width)
        cut = cut or whole
        dtype = self.dtype(state, parameter) if fragments else torch.float32
        slice_, found = torch.empty(numel, dtype=dtype), torch.zeros(numel, dtype=torch.bool)
        for wanted in cut.rectangles(start, numel):
            for fragment in fragments:
                its = fragment.cut or whole
                for held in its.rectangles(fragment.start, fragment.numel):
                    if (common := wanted.common(held)) is None:
                        continue
                    end = common.row + common.rows
                    # a few rows at once: `_part` reads what is between their columns too
                    at_once = max(1, _CHUNK_BYTES // its.columns)
                    for row in range(common.row, end, at_once):
                        some = common._replace(row=row, rows=min(at_once, end - row))
                        first = its.place(some.row, some.column) - fragment.start
                        last = its.place(some.row + some.rows - 1, some.column) - fragment.start
                        part = self._part(fragment, first, last + some.columns)
                        source = _rows_in(part, its, fragment.start + first, some)
                        _rows_in(slice_, cut, start, some).copy_(source)
                        _rows_in(found, cut, start, some).fill_(True)
                        work_done()
        if not bool(found.all()):
            missing = start + int((~found).nonzero()[0])
            raise _Missing(f"{self.folder}: {state} of {parameter} is missing from element {missing} on")
        return slice_

    def read_whole(self, state: str, parameter: str) -> torch.Tensor:
        fragment = self._whole[state, parameter]
        return self._opened(fragment.file).get_tensor(fragment.key).clone()

    def own_tensors(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the tensors that one of the saving ranks wrote for itself (`rng/torch`); {} for any other rank."""
        if rank >= self.ranks:
            return {}
        opened = self._opened(self.files[rank])
        return {key: opened.get_tensor(key).clone() for key in opened.keys() if "@" not in key}  # noqa: SIM118

    def _part(self, fragment: Fragment, start: int, stop: int) -> torch.Tensor:
        """Return a view of the mapped file; the caller copies it before the next read."""
        part = self._opened(fragment.file).get_slice(fragment.key)[start:stop]
        self._served_bytes += part.numel() * part.element_size()
        return part

    def _opened(self, file: str) -> safe_open:
        if self._served_bytes > _MAPPED_BYTES:
            self.close()  # pages that were read stay in memory until the file is unmapped
        if file not in self._open_files:
            self._open_files[file] = safe_open(self.folder / file, framework="pt")
        return self._open_files[file]

    def close(self) -> None:
        self._open_files.clear()
        self._served_bytes = 0


def assemble(reader: CheckpointReader, parameter: str, state: str = MASTER) -> torch.Tensor:
    """Read the full tensor of a parameter (fp32 for `master`), in its own shape."""
    return reader.read(state, parameter).view(reader.parameters[parameter])


_TENSOR = object_of({"shape": {"type": "array", "items": COUNT}})
_TENSORS = {"type": "object", "patternProperties": {"(?s:.*)": _TENSOR}}
_STATE = object_of({"parameters": _TENSORS}, {"buffers": _TENSORS})  # what every reader of state.json needs


def read_state(folder: Path) -> dict:
    """Read what is the same on every rank; `UserError` if the folder has another or a newer format."""
    try:
        state = read_json_value(folder / STATE_FILE)
    except FileNotFoundError:
        what = f"is no checkpoint of this version's format ({STATE_FILE} is missing)"
        remedy = "start over with --resume never, or continue it with the version that wrote it"
        raise UserError(f"{folder} {what}: {remedy}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / STATE_FILE}: cannot be read ({error})") from error
    state = check(state, {"type": "object"}, str(folder / STATE_FILE))
    if state.get("format") != STATE_FORMAT:
        what = f"has format {state.get('format')} and this version reads {STATE_FORMAT}"
        raise UserError(f"{folder} {what}: update the repository")
    return check(state, _STATE, str(folder / STATE_FILE))


def _rank_files(folder: Path, incomplete: bool = False) -> list[str]:
    """Return the ranks' files in order; `UserError` if they are not one save's. incomplete: some may be missing."""
    # Every name says how many files there must be: a file of another save, or a missing one, shows.
    found = sorted(match[0] for path in folder.iterdir() if (match := _RANK_FILE.fullmatch(path.name)))
    expected = int(_RANK_FILE.fullmatch(found[0])[2]) if found else 1
    files = [rank_file(rank, expected) for rank in range(expected)]
    if found != files and not (incomplete and set(found) <= set(files)):
        missing = next((name for name in files if name not in found), found[-1])
        raise UserError(f"{folder}: the files of its ranks are not one save's: {missing}")
    return files


def mean_running_loss(folder: Path, savers: Iterable[int], ranks: int) -> dict | None:
    """Return the mean over `savers` of the losses since the last logged step, and these steps; None if none has any."""
    receipts = [read_receipt(folder, rank, ranks) for rank in savers]
    saved = [receipt["running_loss"] for receipt in receipts if "running_loss" in receipt]
    if not saved:
        return None
    return {"sum": sum(loss["sum"] for loss in saved) / len(saved), "steps": saved[0]["steps"]}
