"""Files to read text from, on this machine or at any fsspec address (`s3://`, `hf://`, `gs://`, `https://`)."""

import glob
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from pretraining.data.packages import require
from pretraining.errors import UserError

VERSION_KEYS = ("ETag", "etag", "md5Hash", "crc32c", "mtime", "LastModified", "last_modified", "created")
"""What stores call the thing that changes with a file's content, best first."""

BUFFER_BYTES = 1 << 20
"""Read from a file at once: a line of JSON holds a whole document, many times Python's default of 8 KB."""


@dataclass(frozen=True)
class InputFile:
    """One file of a source."""

    address: str
    """A local path, or an fsspec address."""
    name: str
    """Its path below the source's root, with `/`."""
    num_bytes: int
    version: str
    """Changes when the content does: modification time in ns, or the store's own tag."""

    def open(self) -> BinaryIO:
        """The file's bytes; remote ones are fetched as they are read."""
        if not is_remote(self.address):
            return Path(self.address).open("rb", buffering=BUFFER_BYTES)
        return require("fsspec", f"reading {self.address}").open(self.address, "rb").open()

    def check_unchanged(self) -> None:
        """UserError where this machine's file is no longer what it was when the files were listed."""
        if is_remote(self.address):
            return
        path = Path(self.address)
        if not path.is_file() or replace(local_file(path, path.parent), name=self.name) != self:
            raise UserError(
                f"{self.address}: changed or removed while it was being prepared; run the same command again once "
                "nobody writes there"
            )


def is_remote(address: str) -> bool:
    """Does `address` name a store (`s3://...`) rather than a path of this machine?"""
    return "://" in address


def list_files(spec: str, suffixes: tuple[str, ...]) -> list[InputFile]:
    """The files that a path, folder or glob names, by name; UserError where there is none to read.

    In a folder only those with one of `suffixes` count; a file or glob that names others is refused.
    """
    if not spec.strip():
        raise UserError("data.sources: path is empty; name a file, a folder or a glob")
    found = _remote_files(spec, suffixes) if is_remote(spec) else _local_files(spec, suffixes)
    if not found:
        raise UserError(f"data.sources: {spec}: no readable file there ({', '.join(suffixes)})")
    return sorted(found, key=lambda file: PurePosixPath(file.name).parts)


def local_file(path: Path, root: Path) -> InputFile:
    """A file of this machine, as it is now."""
    status = path.stat()
    return InputFile(str(path), path.relative_to(root).as_posix(), status.st_size, str(status.st_mtime_ns))


def has_suffix(name: str, suffixes: tuple[str, ...]) -> bool:
    """Does the name end with one of `suffixes`, in any case?"""
    return name.lower().endswith(suffixes)


def _local_files(spec: str, suffixes: tuple[str, ...]) -> list[InputFile]:
    path = Path(spec).expanduser()
    if path.is_dir():
        files = (each for each in path.rglob("*") if has_suffix(each.name, suffixes) and each.is_file())
        return [local_file(each, path) for each in files]
    if path.is_file():
        return [local_file(_readable(path, suffixes), path.parent)]
    if glob.has_magic(spec):
        fixed = next(number for number, part in enumerate(path.parts) if glob.has_magic(part))
        root = Path(*path.parts[:fixed])
        matches = root.glob(str(Path(*path.parts[fixed:])))
        return [local_file(_readable(each, suffixes), root) for each in matches if each.is_file()]
    raise UserError(f"data.sources: {spec}: no such file or folder (looked in {Path.cwd()})")


def _readable(path: Path | PurePosixPath, suffixes: tuple[str, ...]) -> Path | PurePosixPath:
    if not has_suffix(path.name, suffixes):
        raise UserError(
            f"data.sources: {path}: unknown suffix; readable are {', '.join(suffixes)}, and folders or globs of them"
        )
    return path


def _remote_files(spec: str, suffixes: tuple[str, ...]) -> list[InputFile]:
    fsspec = require("fsspec", f"reading {spec}")
    try:
        system, path = fsspec.core.url_to_fs(spec)
        entries = _remote_entries(system, path, suffixes)
    except ImportError as error:  # fsspec names the package that this kind of address needs
        raise UserError(f"data.sources: {spec}: {error}") from error
    except UserError:
        raise
    except Exception as error:  # every store has its own classes
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"data.sources: {spec}: cannot be reached ({type(error).__name__}: {reason}); check the address, the "
            "credentials and the network"
        ) from error
    # Not isdir(): to answer, fsspec's HTTP would fetch a whole file.
    is_folder = path not in entries and not glob.has_magic(path)
    root = path.rstrip("/") if is_folder else _fixed_part(path)
    return [_remote_file(system, name, info, root) for name, info in entries.items()]


def _remote_entries(system, path: str, suffixes: tuple[str, ...]) -> dict[str, dict]:
    """{path: what the store says of it} of the files that `path` names."""
    if glob.has_magic(path):
        entries = system.glob(path, detail=True)
        return {_named(name, suffixes): info for name, info in entries.items() if info["type"] == "file"}
    try:
        info = system.info(path)  # `exists` would take every fault of the network for an absence
    except FileNotFoundError as error:
        place = system.unstrip_protocol(path)
        raise UserError(f"data.sources: {place}: no such file or folder can be reached there") from error
    if info["type"] == "file":
        return {_named(path, suffixes): info}
    return {name: info for name, info in system.find(path, detail=True).items() if has_suffix(name, suffixes)}


def _named(name: str, suffixes: tuple[str, ...]) -> str:
    _readable(PurePosixPath(name), suffixes)
    return name


def _fixed_part(path: str) -> str:
    """The folder above the first part of `path` that holds a wildcard, or above its file."""
    parts = path.split("/")  # not PurePosixPath: the path may be a whole URL
    fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return "/".join(parts[:fixed])


def _remote_file(system, path: str, info: dict, root: str) -> InputFile:
    name = path.removeprefix(root).lstrip("/")
    version = next((str(info[key]) for key in VERSION_KEYS if info.get(key)), "")
    return InputFile(system.unstrip_protocol(path), name, int(info.get("size") or 0), version)
