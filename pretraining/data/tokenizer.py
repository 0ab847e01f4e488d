"""Make the tokenizer of a data set: load it by name or path, or train it on the corpus; keep it beside the shards."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretraining.errors import UserError
from pretraining.extend import load_pretrained
from pretraining.outside.files import read_bytes, read_json_value
from pretraining.recipe.data import END_OF_TEXT

KNOWN_EOS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
"""Looked for in this order if a folder does not name its end-of-text token."""

COMPANION_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class TokenizerInfo:
    """What the manifest says about a tokenizer folder."""

    vocab_size: int
    """Highest id plus one, special tokens included: the rows an embedding needs."""
    eos_token: str
    eos_token_id: int
    fingerprint: str
    """blake2b of tokenizer.json"""
    files: dict[str, str]
    """blake2b of each file of the folder that says what a token is"""


def local_fingerprint(spec: str | dict) -> str | None:
    """Compute the fingerprint of the tokenizer.json in a local folder; None for a hub name or a trained tokenizer."""
    if isinstance(spec, str) and (Path(spec).expanduser() / "tokenizer.json").is_file():
        return checksums_of(Path(spec).expanduser())["tokenizer.json"]
    return None


def checksums_of(folder: Path) -> dict[str, str]:
    """Compute blake2b of each file of a tokenizer folder that is there."""
    there = [name for name in ("tokenizer.json", *COMPANION_FILES) if (folder / name).is_file()]
    return {name: hashlib.blake2b(read_bytes(folder / name), digest_size=16).hexdigest() for name in there}


def tokenizer_fault(folder: Path, entry: dict) -> tuple[str, str] | None:
    """Find a file of the folder that is not as a manifest's `entry` says: its name and what is wrong; else None."""
    found = checksums_of(folder)
    # A manifest of an older version knows tokenizer.json alone.
    made = entry.get("files") or {**found, "tokenizer.json": entry["fingerprint"]}
    for name in sorted(made.keys() | found.keys(), reverse=True):
        if made.get(name) != found.get(name):
            return name, "missing" if name not in found else "not the one the data was made with"
    return None


def save_tokenizer(name: str, folder: Path) -> None:
    """Put the tokenizer that a recipe names (a local folder or a hub name) into `folder`."""
    source = Path(name).expanduser()
    if (source / "tokenizer.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for file in checksums_of(source):
            shutil.copyfile(source / file, folder / file)
        return
    refuse_missing_folder(name)
    try:
        tokenizer = load_pretrained("AutoTokenizer", name, use_fast=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(
            f"data.tokenizer: {name!r} cannot be loaded ({str(error).strip().partition(chr(10))[0]}); give a "
            'hub name that is reachable, a folder with tokenizer.json, or {"train_vocab_size": N}'
        ) from error
    tokenizer.save_pretrained(folder)
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"data.tokenizer: {name!r} has no tokenizer.json (it is not a fast tokenizer)")


def refuse_missing_folder(name: str) -> None:
    """Raise UserError for a tokenizer that can only be a folder, and that is not there."""
    # The hub would only report an invalid name: its names have one slash.
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path and not Path(name).expanduser().exists():
        raise UserError(f"data.tokenizer: {name} cannot be read: no such folder (looked in {Path.cwd()})")


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    folder: Path,
    min_frequency: int = 1,
    special_tokens: Sequence[str] = (),
) -> None:
    """Train a byte-level BPE of exactly `vocab_size` ids into `folder`; `<|endoftext|>` is 0, `special_tokens` follow.

    Pairs that occur less than `min_frequency` times are not merged. The same texts give the same file. Raises UserError
    if the corpus has too few merges for that many ids.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[END_OF_TEXT, *special_tokens],
        # All 256 bytes, so that any text can be encoded, also one with bytes that the corpus does not have.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The trainer stops without an error if no pair is left to merge.
    if (found := tokenizer.get_vocab_size()) != vocab_size:
        remedy = f"set it to {found:,} or more"
        if found < vocab_size:
            lower = " or lower min_frequency" if min_frequency > 1 else ""
            remedy = f"set it to {found:,} or less, or add text{lower}"
        what = f"the corpus gives {found:,} tokens, not {vocab_size:,}"
        raise UserError(f"data.tokenizer.train_vocab_size: {what}; {remedy}")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    # With it `AutoTokenizer` opens the folder.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        # Else decoding would remove spaces before punctuation, and the text would not come back as it was.
        "clean_up_tokenization_spaces": False,
        # Else transformers would not list them among its special tokens.
        **({"extra_special_tokens": list(special_tokens)} if special_tokens else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def check_vocabulary(found: int, vocab_size: int | None) -> None:
    """Raise UserError if a tokenizer has more ids (`found`) than the model has embeddings."""
    if vocab_size is not None and found > vocab_size:
        raise UserError(
            f"data.tokenizer: it has {found:,} ids, the model only {vocab_size:,}: "
            f"--set model.vocab_size={-(-found // 128) * 128} (a multiple of 128), or choose a smaller tokenizer"
        )


def describe_tokenizer(folder: Path, name: str) -> TokenizerInfo:
    """Return size, EOS and fingerprint of a tokenizer folder; UserError (about `name`) if it has no EOS token."""
    # By content, not by folder: the same tokenizer is loaded once in a process, whatever folders hold it.
    files = checksums_of(folder)
    key = tuple(files.items())
    if key in _DESCRIBED:
        return _DESCRIBED[key]
    from tokenizers import Tokenizer

    try:
        # not by its path: a pipe would keep the library waiting, where no signal is looked at
        tokenizer = Tokenizer.from_buffer(read_bytes(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exception for a bad file
        raise UserError(
            f"data.tokenizer: {name}: its tokenizer.json cannot be read ({error}); save the tokenizer again"
        ) from error
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    eos_token = _configured_eos(folder) or next((token for token in KNOWN_EOS if token in vocab), None)
    if eos_token not in vocab:
        remedy = "name one as eos_token in its tokenizer_config.json"
        raise UserError(f"data.tokenizer: {name} has no end-of-text token; {remedy}")
    # Not the number of tokens: ids may have gaps, and an embedding needs a row for the highest.
    size = max(vocab.values()) + 1
    _DESCRIBED[key] = TokenizerInfo(size, eos_token, vocab[eos_token], files["tokenizer.json"], files)
    return _DESCRIBED[key]


_DESCRIBED: dict[tuple[tuple[str, str], ...], TokenizerInfo] = {}


def _configured_eos(folder: Path) -> str | None:
    """Read the eos_token of tokenizer_config.json, which is a string or an added-token object."""
    path = folder / "tokenizer_config.json"
    try:
        eos = read_json_value(path).get("eos_token") if path.is_file() else None
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"data.tokenizer: tokenizer_config.json is no JSON object ({error}); mend it"
        ) from error
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(eos, str | None):
        raise UserError("data.tokenizer: eos_token in tokenizer_config.json is no text; mend it")
    return eos
