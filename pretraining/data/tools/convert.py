"""`convert`: read and write the token files of Megatron-LM and datatrove, and read raw .bin and MDS."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretraining.data.block_guard import tokens_of_file
from pretraining.data.checksums import content_fingerprint
from pretraining.data.corpus import draw_of
from pretraining.data.finished import complete, open_finished
from pretraining.data.manifest import COUNTED, FORMAT, num_shard_bytes
from pretraining.data.progress import ProgressBar
from pretraining.data.publishing import building, preparation_lock, publish
from pretraining.data.shards import SplitWriter, token_dtype
from pretraining.data.tokenizer import TokenizerInfo, describe_tokenizer, note_prefix, save_tokenizer
from pretraining.data.tools import formats
from pretraining.errors import UserError, file_error

FORMATS = ("megatron", "datatrove")
READ_ONLY = ("bin", "mds")
"""Formats that are read and not written."""
SPLITS = ("train", "validation")
BATCH_TOKENS = 1 << 20
"""Tokens converted at once."""

CHECKED_DOCUMENTS = 64
"""Documents that are decoded to check the table of bytes for each token."""


def export_data(folder: Path, form: str, out: Path, show_progress: bool = False) -> dict:
    """Write the data set of `folder` into the new folder `out` in another tool's form; return counts by split.

    `megatron` writes train.bin, train.idx, validation.bin, validation.idx, `datatrove` the folders train/ and
    validation/ of .ds files; the tokenizer is beside them. If the export fails, `out` is removed.
    """
    data = open_finished(folder)
    splits = [data.split(name) for name in data.split_names]
    given = data.manifest["data"].get("tokenizer")
    tokenizer = given if isinstance(given, str) else data.manifest["name"]
    with _new_folder(out) as building:
        with ProgressBar("converting", show_progress, num_shard_bytes(data.manifest)) as progress:
            for split in splits:
                if form == "megatron":
                    formats.write_megatron(split, building / split.name, progress)
                else:
                    # datatrove's metadata separates its fields by "|".
                    named = tokenizer.replace("|", "/")
                    formats.write_datatrove(split, building / split.name, named, progress)
        shutil.copytree(data.tokenizer_folder, building / "tokenizer")
    counts = {split.name: {"documents": split.num_documents, "tokens": split.num_tokens} for split in splits}
    return {"format": form, "folder": str(out), **counts}


class TokenFiles(NamedTuple):
    """Another tool's token files."""

    form: str
    origin: Path
    """A Megatron prefix, a .ds or .bin file, an MDS folder, or a folder of them."""
    dtype: str | None = None
    """Of raw .bin, and of a column of bytes in MDS."""
    column: str | None = None
    """The tokens in MDS."""

    def parts(self, info: TokenizerInfo) -> list[tuple[Path, str | None, formats.ForeignFile]]:
        """Open the files at `origin`, by name, checked to be whole, each with the split that its name says, or None."""
        origin, eos = self.origin, info.eos_token_id
        names = {"megatron": "*.idx", "datatrove": "**/*.ds", "bin": "*.bin", "mds": "**/index.json"}
        paths = [origin]
        if origin.is_dir():
            # Of MDS its own index, or those of the folders in it.
            own = [origin / "index.json"] if self.form == "mds" else []
            paths = [path for path in own if path.is_file()] or sorted(origin.glob(names[self.form]))
        if not paths:
            own_names = {"megatron": "PREFIX.idx", "mds": "index.json"}
            kind = own_names.get(self.form, Path(names[self.form]).suffix)
            what = f"no {kind} files in this folder; give the folder or file that holds the tokens"
            raise UserError(f"{origin}: {what}")
        files: list[formats.ForeignFile]
        if self.form == "megatron":
            # Of one, .bin or .idx may be typed with the prefix.
            paths = [path.with_suffix("") if path.suffix in (".bin", ".idx") else path for path in paths]
            files = [formats.MegatronFile(prefix) for prefix in paths]
        elif self.form == "bin":
            files = [formats.BinFile(path, self.dtype, info.vocab_size, eos) for path in paths]
        elif self.form == "mds":
            files = [formats.MdsFolder(path, self.column, self.dtype, eos) for path in paths]
        else:
            files = [formats.DatatroveFile(path) for path in paths]
        said = [path.name if self.form in ("megatron", "bin") else path.parent.name for path in paths]
        return list(zip(paths, formats.named_splits(said), files, strict=True))


def import_data(
    folder: Path,
    files: TokenFiles,
    tokenizer: str | None,
    validation_share: float,
    show_progress: bool = False,
) -> dict:
    """Make the new data set `folder` from another tool's token files; return its counts.

    In a folder that `export_data` wrote, or whose names all say train or validation, these stay as they are; its
    tokenizer is used if none is given. In other folders a hash of each document's tokens chooses its split.
    """
    form, origin = files.form, files.origin
    if tokenizer is None and (origin / "tokenizer" / "tokenizer.json").is_file():
        tokenizer = str(origin / "tokenizer")
    if tokenizer is None:
        what = "give the --tokenizer (name or folder) its tokens were made with"
        raise UserError(f"--from {form} {origin}: {what}")
    if not 0 < validation_share < 1:
        raise UserError(f"--validation_share {validation_share:g}: must lie between 0 and 1")
    if not origin.exists() and form in READ_ONLY:
        raise UserError(f"{origin}: no such file or folder; give what holds the tokens to --from {form}")
    with _new_folder(folder) as building:
        try:
            save_tokenizer(tokenizer, building / "tokenizer")
            info = describe_tokenizer(building / "tokenizer", tokenizer)
        except UserError as error:
            # The error names a key of a recipe, but this command has an option instead.
            raise UserError(str(error).replace("data.tokenizer", "--tokenizer")) from error
        writer = ForeignWriter(building, info, validation_share)
        parts = files.parts(info)
        size = sum(opened.size for _, _, opened in parts)
        with ProgressBar("converting", show_progress, size) as progress:
            for path, split, opened in parts:
                for batch in _batches_of(opened.documents()):
                    writer.write(batch, path, split)
                    num_tokens = sum(map(len, batch))
                    progress.add(len(batch), num_tokens * batch[0].itemsize, num_tokens)
        entries = {name: each.finish() for name, each in writer.writers.items()}
        # Only now: hashes of the documents chose the splits while they were written.
        keys = {"documents": "documents", "tokens": "tokens", "text_bytes": "bytes"}
        together = {key: sum(entry[name] for entry in entries.values()) for key, name in keys.items()}
        for name, entry in entries.items():
            if not entry["documents"]:
                what = f"{together['documents']:,} documents at --validation_share {validation_share:g}"
                raise UserError(f"{origin}: {name} would be empty: {what}; choose another share")
        section: dict = {"sources": [{"path": str(origin)}], "tokenizer": tokenizer}
        section |= {"validation_share": validation_share, "skip_undecodable": False}
        if writer.begun == together["documents"]:
            section["borders"] = "bos_eos"
        # Prompts begin as documents do.
        note_prefix(building / "tokenizer", info, section.get("borders", "eos"))
        info = describe_tokenizer(building / "tokenizer", tokenizer)
        fingerprint = content_fingerprint(entries)
        manifest = {
            "format": FORMAT,
            "name": folder.name,
            "fingerprint": fingerprint,
            "data": section,
            # It says that no recipe section made the data.
            "converted_from": {"format": form, "path": str(origin), "eos_added": writer.eos_added},
            "tokenizer": vars(info),
            "sources": [{"fingerprint": fingerprint, **together}],
            "skipped": {"undecodable": 0, "empty": writer.empty},
            "splits": entries,
            # Unknown, because another tool made the tokens.
            "versions": {},
        }
        complete(building, manifest)
    counts = {name: {key: entry[key] for key in COUNTED} for name, entry in entries.items()}
    changed = {"eos_added": writer.eos_added, "empty": writer.empty}
    return {"format": form, "folder": str(folder), **counts, **together, **changed}


def draw_of_tokens(tokens: np.ndarray) -> float:
    """Draw a number in [0, 1) from the ids of a document without its EOS: below validation_share means validation.

    As there is no text, it is `draw_of` the ids: equal documents stay together, but perhaps not where their text is.
    """
    # uint32 whatever the file's own type, so that equal documents of two files agree.
    return draw_of(np.ascontiguousarray(tokens, "<u4").tobytes())


class ForeignWriter:
    """Writes foreign documents as the splits of a data set in `folder`."""

    def __init__(self, folder: Path, info: TokenizerInfo, validation_share: float):
        self.info, self.validation_share = info, validation_share
        self.dtype = token_dtype(info.vocab_size)
        self.writers = {name: SplitWriter(folder / name, self.dtype) for name in SPLITS}
        self.token_bytes = TokenBytes(folder / "tokenizer", info.vocab_size)
        self.eos_added = self.empty = self.begun = 0
        """Documents that had no EOS and got one, those without tokens, which are left out, and those with a BOS."""

    def write(self, batch: list[np.ndarray], path: Path, split: str | None) -> None:
        """Write documents of the file at `path`, to `split` or, if it is None, to what a hash of each document says."""
        together = np.concatenate(batch)
        # Foreign files may have signed types, and so negative ids.
        for extreme in (int(together.min(initial=0)), int(together.max(initial=0))):
            if not 0 <= extreme < self.info.vocab_size:
                what = f"token id {extreme:,}, but the tokenizer has {self.info.vocab_size:,} ids"
                raise UserError(f"{path}: {what}; give the tokenizer the file was made with")
        wide, narrow = together.astype("<u4"), together.astype(self.dtype)
        stops = np.cumsum([len(document) for document in batch])
        starts = np.concatenate([[0], stops[:-1]])
        starts, stops = starts[starts < stops], stops[starts < stops]
        # An EOS at the end belongs to no text: neither its bytes nor the draw include it. Nor do the bytes a BOS.
        ends = stops - (together[stops - 1] == self.info.eos_token_id)
        begun = (starts < ends) & (together[starts] == self.info.bos_token_id)
        num_bytes = self.token_bytes.count(wide, starts + begun, ends)
        self.begun += int(begun.sum())
        self.empty += len(batch) - len(stops)
        self.eos_added += int((ends == stops).sum())
        for start, end, stop, size in np.column_stack([starts, ends, stops, num_bytes]).tolist():
            document, chosen = narrow[start:stop], split
            if split is None:
                is_held_out = draw_of_tokens(wide[start:end]) < self.validation_share
                chosen = "validation" if is_held_out else "train"
            if end == stop:
                document = np.append(document, self.dtype.type(self.info.eos_token_id))
            self.writers[chosen].append(document, size)


def _batches_of(documents: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Yield consecutive documents, about `BATCH_TOKENS` tokens at a time."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        # + 1, so that many empty documents fill a batch too.
        size += len(document) + 1
        if size >= BATCH_TOKENS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class TokenBytes:
    """Counts the UTF-8 bytes of the text that documents of token ids decode to.

    Of byte-level BPE every id stands for a fixed number of bytes, and a table gives the sum. The first documents are
    decoded too. If the two differ, or for other kinds of tokenizers, every document is decoded.
    """

    def __init__(self, tokenizer_folder: Path, vocab_size: int):
        from tokenizers import Tokenizer, decoders

        path = tokenizer_folder / "tokenizer.json"
        self._decoder = Tokenizer.from_file(str(path))
        self._table: np.ndarray | None = None
        """Bytes of each id: int64 [vocab_size]; None for a tokenizer that is not byte-level."""
        self._left_to_check = CHECKED_DOCUMENTS
        if isinstance(self._decoder.decoder, decoders.ByteLevel):
            spelled = [len(text) for text in tokens_of_file(path)]
            self._table = np.zeros(max(vocab_size, len(spelled)), np.int64)
            self._table[: len(spelled)] = spelled

    def count(self, tokens: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Count the bytes of each document, which is tokens[start:end] without its EOS: int64 [documents]."""
        if self._table is not None:
            before = np.concatenate([[0], np.cumsum(self._table[tokens])])
            counts = before[ends] - before[starts]
            checked = slice(self._left_to_check)
            texts = self._texts(tokens, starts[checked], ends[checked])
            self._left_to_check -= len(texts)
            # A replacement character stands for bytes that are not UTF-8: it has another length than these.
            pairs = [(text, count) for text, count in zip(texts, counts, strict=False) if "�" not in text]
            if all(len(text.encode()) == count for text, count in pairs):
                return counts
            # From here on every document is decoded, those of this batch too.
            self._table = None
        return np.array([len(text.encode()) for text in self._texts(tokens, starts, ends)], np.int64)

    def _texts(self, tokens: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> list[str]:
        ids = [tokens[start:end].tolist() for start, end in zip(starts, ends, strict=True)]
        return self._decoder.decode_batch(ids, skip_special_tokens=False)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `folder` once all of it is on the disk; else nothing is left.

    Raises UserError if `folder` exists or the disk refuses.
    """
    try:
        with preparation_lock(folder):
            # Under the lock: another process may have made it while this one waited.
            if folder.exists():
                what = "exists already; choose a new folder, or remove this one first"
                raise UserError(f"{folder}: {what}")
            with building(folder) as place:
                yield place
            publish(folder)
    except (OSError, MemoryError) as error:
        raise file_error(error, folder) or error from error
