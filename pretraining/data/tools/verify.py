"""`verify`: check that every byte of a data set is as it was written, and that a model can read every token."""

from pathlib import Path
from typing import Any

import numpy as np

from pretraining.data.checksums import checksum_of_file, content_fingerprint
from pretraining.data.manifest import MANIFEST_NAME, num_shard_bytes
from pretraining.data.progress import ProgressBar
from pretraining.data.shards import Shard, buffer_positions
from pretraining.data.tokenizer import describe_tokenizer, tokenizer_fault
from pretraining.data.tools.finished import CHUNK_TOKENS, FinishedData, open_finished
from pretraining.errors import UserError
from pretraining.outside.files import read_json_value


def verify_data(folder: Path, show_progress: bool = False) -> dict:
    """Read all of `folder` once; return {"folder", "shards", "size", "documents", "tokens"} if it is whole.

    Compares every shard with its checksum, the tokenizer with its fingerprint, the document ends with the
    tokens, and the token ids with the vocabulary. UserError names the first file that is damaged.
    """
    data = open_finished(folder)
    # First what is small: a damaged manifest is reported before the shards are read.
    if content_fingerprint(data.manifest["splits"]) != data.manifest["fingerprint"]:
        what = "damaged manifest: its fingerprint is not that of its checksums"
        raise damaged(folder / MANIFEST_NAME, what, folder)
    _check_tokenizer(data)
    found: dict[str, Any] = {"folder": str(folder), "shards": 0, "size": 0, "documents": 0, "tokens": 0}
    with ProgressBar("verifying", show_progress, num_shard_bytes(data.manifest)) as progress:
        for name in data.split_names:
            split = data.split(name)
            # `load_from_disk` takes the shards from state.json.
            listing = split.folder / "state.json"
            try:
                listed = [file["filename"] for file in read_json_value(listing)["_data_files"]]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise damaged(listing, f"missing or damaged ({error})", folder) from error
            if listed != [entry["file"] for entry in split.entries]:
                raise damaged(listing, f"lists other shards than {MANIFEST_NAME}", folder)
            for number, entry in enumerate(split.entries):
                path = split.folder / entry["file"]
                # The checksum first: later checks then read what was written.
                if (checksum := checksum_of_file(path)) != entry["checksum"]:
                    what = f"damaged shard: checksum {checksum}, expected {entry['checksum']}"
                    raise damaged(path, what, folder)
                if buffer_positions(path) != entry["buffers"]:
                    raise damaged(path, "its buffers are not where the manifest says", folder)
                if problem := _problem_of(split.shard(number), entry, data.manifest["tokenizer"]):
                    raise damaged(path, problem, folder)
                found["shards"] += 1
                for key in ("size", "documents", "tokens"):
                    found[key] += entry[key]
                progress.add_shard(entry)
    return found


def damaged(path: Path, what: str, folder: Path) -> UserError:
    """Write the error: the file, what is wrong with it, and what to do."""
    return UserError(f"{path}: {what}; copy it again, or delete {folder} and prepare the data again")


def _check_tokenizer(data: FinishedData) -> None:
    if fault := tokenizer_fault(data.tokenizer_folder, data.manifest["tokenizer"]):
        raise damaged(data.tokenizer_folder / fault[0], fault[1], data.folder)
    path = data.tokenizer_folder / "tokenizer.json"
    try:
        found = vars(describe_tokenizer(data.tokenizer_folder, str(path)))
    except Exception as error:  # tokenizers raises bare Exceptions for what it cannot parse
        raise damaged(path, f"damaged tokenizer ({error})", data.folder) from error
    for key, expected in data.manifest["tokenizer"].items():
        # Keys of the manifest that this version does not describe are not compared.
        if found.get(key, expected) != expected:
            what = f"not the tokenizer of the shards: its {key} is {found[key]}, expected {expected}"
            raise damaged(path, what, data.folder)


def _problem_of(shard: Shard, entry: dict, tokenizer: dict) -> str | None:
    """Check that ends ascend to the last token, each after an EOS, and that ids are below the vocabulary's size."""
    lengths, eos = np.diff(shard.ends, prepend=0), tokenizer["eos_token_id"]
    if len(lengths) and lengths.min() < 1:
        return f"document {int(lengths.argmin())} of the shard has no tokens"
    if int(shard.num_bytes.sum()) != entry["bytes"]:
        return f"its texts have {int(shard.num_bytes.sum()):,} bytes, the manifest says {entry['bytes']:,}"
    # Lengths of at least 1 are sure here, so `ends - 1` is inside its own document.
    unclosed = np.flatnonzero(shard.tokens[shard.ends - 1] != eos)
    if len(unclosed):
        return f"document {int(unclosed[0])} of the shard does not end with {tokenizer['eos_token']} ({eos})"
    for start in range(0, len(shard.tokens), CHUNK_TOKENS):
        highest = int(shard.tokens[start : start + CHUNK_TOKENS].max())
        if highest >= tokenizer["vocab_size"]:
            return f"token id {highest} in a vocabulary of {tokenizer['vocab_size']:,}"
    return None
