"""`convert`: to and from the token files of Megatron-LM and datatrove, a shard at a time."""

import errno
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretraining.data.arrow_layout import write_durably
from pretraining.data.manifest import FORMAT, MANIFEST_NAME, content_fingerprint, num_shard_bytes
from pretraining.data.prepare import DISK_FAULTS
from pretraining.data.progress import Progress
from pretraining.data.publishing import discard, preparation_lock, publish, start_building
from pretraining.data.tokenizer import TokenizerInfo, describe_tokenizer, save_tokenizer
from pretraining.data.tools.datatrove import DatatroveFile, datatrove_files, write_datatrove
from pretraining.data.tools.distributions import count_tokens, entropy_bits
from pretraining.data.tools.documents import SplitDocuments
from pretraining.data.tools.finished import FinishedData, open_finished
from pretraining.data.tools.foreign import SPLITS, ForeignPart, ForeignWriter
from pretraining.data.tools.megatron import MegatronFile, megatron_files, megatron_prefix, write_megatron
from pretraining.errors import UserError

FORMATS = ("megatron", "datatrove")


def export_data(folder: Path, form: str, out: Path, show_progress: bool = False) -> dict:
    """Write the data set of `folder` into the new folder `out` in another tool's form; counts by split.

    `megatron` gives train.bin, train.idx, validation.bin, validation.idx; `datatrove` the folders train/ and
    validation/ of .ds files. The tokenizer lies beside them. Nothing is left of an `out` that did not succeed.
    """
    data = open_finished(folder)
    splits = [data.split(name) for name in data.split_names]
    with new_folder(out) as building:
        with Progress("converting", show_progress, num_shard_bytes(data.manifest)) as progress:
            for split in splits:
                _export_split(data, split, form, building, progress)
        shutil.copytree(data.tokenizer_folder, building / "tokenizer")
    counts = {split.name: {"documents": split.num_documents, "tokens": split.num_tokens} for split in splits}
    return {"format": form, "folder": str(out), **counts}


def _export_split(
    data: FinishedData, split: SplitDocuments, form: str, building: Path, progress: Progress
) -> None:
    def on_shard(entry: dict) -> None:
        progress.add(entry["documents"], entry["size"], entry["tokens"])

    if form == "megatron":
        write_megatron(split, building / split.name, on_shard)
    else:
        given = data.manifest["data"].get("tokenizer")
        name = given if isinstance(given, str) else data.manifest["name"]
        write_datatrove(split, building / split.name, name.replace("|", "/"), on_shard)


def import_data(
    folder: Path,
    form: str,
    origin: Path,
    tokenizer: str | None,
    validation_share: float,
    show_progress: bool = False,
) -> dict:
    """Make the new data set `folder` of another tool's token files at `origin`; its counts.

    `origin` is a Megatron prefix, a .ds file, or a folder of them. In a folder as `export_data` writes it train
    and validation stay what they are, and its tokenizer is taken where none is given; otherwise a hash of each
    document's tokens says which split it goes to.
    """
    if tokenizer is None and (origin / "tokenizer" / "tokenizer.json").is_file():
        tokenizer = str(origin / "tokenizer")
    if tokenizer is None:
        raise UserError(
            f"--from {form} {origin}: give the --tokenizer (name or folder) its tokens were made with"
        )
    if not 0 < validation_share < 1:
        raise UserError(f"--validation_share {validation_share:g}: must lie between 0 and 1")
    parts = foreign_parts(form, origin)
    with new_folder(folder) as building:
        info = _put_tokenizer(tokenizer, building / "tokenizer")
        writer = ForeignWriter(building, info, validation_share)
        entries = writer.write(parts, show_progress)
        _check_splits(writer, origin, validation_share)
        section = {
            "sources": [{"path": str(origin)}],
            "tokenizer": tokenizer,
            "validation_share": validation_share,
        }
        _write_manifest(building, folder.name, form, section, writer, entries)
    counted = {key: value for key, value in vars(writer.counts).items() if key != "splits"}
    counts = {
        name: {key: entry[key] for key in ("documents", "tokens", "bytes")} for name, entry in entries.items()
    }
    return {"format": form, "folder": str(folder), **counts, **counted}


def foreign_parts(form: str, origin: Path) -> list[ForeignPart]:
    """The files at `origin`, in the order of their names, checked for being whole."""
    if form == "megatron":
        files = megatron_files(origin) if origin.is_dir() else [megatron_prefix(origin)]
        opened = [(prefix, _named_split(files, prefix), MegatronFile(prefix)) for prefix in files]
    else:
        files = datatrove_files(origin) if origin.is_dir() else [origin]
        folders = sorted({path.parent for path in files})
        opened = [(path, _named_split(folders, path.parent), DatatroveFile(path)) for path in files]
    if not opened:
        wanted = "PREFIX.idx" if form == "megatron" else ".ds"
        raise UserError(
            f"{origin}: no {wanted} files in this folder; give the folder or file that holds the tokens"
        )
    return [ForeignPart(path, split, file.size, file.documents()) for path, split, file in opened]


def _named_split(paths: list[Path], path: Path) -> str | None:
    """`path`'s own name where the paths are exactly train and validation."""
    return path.name if sorted(p.name for p in paths) == list(SPLITS) else None


def _put_tokenizer(name: str, folder: Path) -> TokenizerInfo:
    try:
        save_tokenizer(name, folder)
        return describe_tokenizer(folder, name)
    except UserError as error:
        raise UserError(str(error).replace("data.tokenizer", "--tokenizer")) from error


def _check_splits(writer: ForeignWriter, origin: Path, validation_share: float) -> None:
    for name, count in writer.counts.splits.items():
        if not count:
            raise UserError(
                f"{origin}: {name} would be empty: {writer.counts.documents:,} documents at "
                f"--validation_share {validation_share:g}; choose another share"
            )


def _write_manifest(
    building: Path, name: str, form: str, section: dict, writer: ForeignWriter, entries: dict
) -> None:
    """The last file of a converted data set; `converted_from` says that no recipe section made it."""
    counts, info = writer.counts, vars(writer.info)
    write_durably(building / "dataset_dict.json", json.dumps({"splits": list(SPLITS)}))
    validation = SplitDocuments(building, "validation", entries["validation"], [name])
    bits = entropy_bits(count_tokens(validation, writer.info.vocab_size))
    entries["validation"]["unigram_bits_per_byte"] = round(bits / max(1, entries["validation"]["bytes"]), 6)
    fingerprint = content_fingerprint(entries)
    source = {"fingerprint": fingerprint, "documents": counts.documents, "tokens": counts.tokens}
    manifest = {
        "format": FORMAT,
        "name": name,
        "fingerprint": fingerprint,
        "data": {**section, "skip_undecodable": False},
        "converted_from": {
            "format": form,
            "path": section["sources"][0]["path"],
            "eos_added": counts.eos_added,
        },
        "tokenizer": info,
        "sources": [{**source, "text_bytes": counts.text_bytes}],
        "skipped": {"undecodable": 0, "empty": counts.empty},
        "splits": entries,
        "versions": {},
    }
    write_durably(building / MANIFEST_NAME, json.dumps(manifest, indent=2) + "\n")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `folder` once the disk holds all of it.

    UserError where `folder` exists, or the disk refuses; then, and after an interrupt, nothing is left.
    """
    try:
        _refuse_existing(folder)
        with preparation_lock(folder):
            _refuse_existing(folder)
            building = start_building(folder)
            try:
                yield building
            except BaseException:
                discard(folder)
                raise
            publish(folder)
    except OSError as error:
        if error.errno in DISK_FAULTS:
            raise UserError(f"{error.filename or folder}: {DISK_FAULTS[error.errno]}") from error
        if error.errno == errno.ENOTDIR:
            raise UserError(f"{folder}: its parent is a file; choose another folder") from error
        raise


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise UserError(f"{folder}: exists already; choose a new folder, or remove this one first")
