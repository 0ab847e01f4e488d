"""Make the tokenizer of a data set: load it by name or path, or train it on the corpus; keep it beside the shards."""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pretraining.errors import UserError
from pretraining.extend import load_pretrained
from pretraining.outside.files import read_bytes, read_json_value
from pretraining.recipe.data import END_OF_TEXT

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KNOWN_EOS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
"""Looked for in this order if a folder does not name its end-of-text token."""

SPLITS = {
    "gpt4": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
}
"""Patterns of `data.tokenizer.split` by name, beside gpt2's, which `tokenizers` has. That of cl100k_base, as the
tokenizers of Llama 3 and OLMo 2 write it."""

DOCUMENT_PREFIX = "document_prefix"
"""Key of tokenizer_config.json for the token with which each document of the data begins: prompts begin with it too."""

COMPANION_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class TokenizerInfo:
    """What the manifest says about a tokenizer folder."""

    vocab_size: int
    """Highest id plus one, special tokens included: the rows an embedding needs."""
    eos_token: str
    eos_token_id: int
    bos_token_id: int | None
    fingerprint: str
    """blake2b of tokenizer.json"""
    files: dict[str, str]
    """blake2b of each file of the folder that says what a token is"""


class Borders(NamedTuple):
    """The special tokens around a document; None: there is none."""

    closing: int | None
    opening: int | None = None

    @classmethod
    def of(cls, borders: str, tokenizer: dict) -> "Borders":
        """Read `data.borders`; tokenizer: what a manifest says of it, with a BOS if it is asked for (`note_prefix`)."""
        ends, begins = tokenizer["eos_token_id"], tokenizer.get("bos_token_id")
        return cls(ends if "eos" in borders else None, begins if "bos" in borders else None)


def local_fingerprint(spec: str | dict) -> str | None:
    """Compute the fingerprint of the tokenizer.json in a local folder; None for a hub name or a trained tokenizer."""
    return local_checksums(spec).get("tokenizer.json")


def local_checksums(spec: str | dict) -> dict[str, str]:
    """Compute those of a local folder's files (`checksums_of`); {} for a hub name or a trained tokenizer."""
    if isinstance(spec, str) and (Path(spec).expanduser() / "tokenizer.json").is_file():
        return checksums_of(Path(spec).expanduser())
    return {}


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
        what = f"{name!r} cannot be loaded ({str(error).strip().partition(chr(10))[0]})"
        remedy = 'give a hub name that is reachable, a folder with tokenizer.json, or {"train_vocab_size": N}'
        raise UserError(f"data.tokenizer: {what}; {remedy}") from error
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
    split: str = "gpt2",
) -> None:
    """Train a byte-level BPE of exactly `vocab_size` ids into `folder`; `<|endoftext|>` is 0, `special_tokens` follow.

    Pairs that occur less than `min_frequency` times are not merged, nor what `split` (gpt2, gpt4, or a regular
    expression) takes apart. The same texts give the same file. Raises UserError if the corpus has too few merges for
    that many ids, or if `split` is no expression.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split != "gpt2":
        try:
            pieces = pre_tokenizers.Split(Regex(SPLITS.get(split, split)), "isolated")
        except Exception as error:  # tokenizers raises plain Exception
            remedy = f"write gpt2, {', '.join(SPLITS)}, or an expression that Oniguruma reads"
            raise UserError(f"data.tokenizer.split: {split!r}: {error}; {remedy}") from error
        spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, spelled])
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
    _save(tokenizer, folder, special_tokens)


def make_units(
    texts: Iterable[str], units: str, folder: Path, min_frequency: int = 1, special_tokens: Sequence[str] = ()
) -> None:
    """Write a tokenizer of bytes, or of the characters that occur `min_frequency` times; both can encode any text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    special = [END_OF_TEXT, *special_tokens]
    if units == "bytes":
        # BPE without merges; the texts say nothing about it.
        return train_tokenizer((), 256 + len(special), folder, special_tokens=special_tokens)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    characters = sorted(character for character, count in counts.items() if count >= min_frequency)
    spellings = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    vocabulary = {spelling: number for number, spelling in enumerate(spellings)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    # fastokens would find a text that spells a special token in the vocabulary.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(special)
    _save(tokenizer, folder, special_tokens)


def _save(tokenizer: "Tokenizer", folder: Path, special_tokens: Sequence[str]) -> None:
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


def note_prefix(folder: Path, info: TokenizerInfo, borders: str) -> None:
    """Write into the folder's tokenizer_config.json if documents begin with its BOS; UserError if it has none."""
    if "bos" in borders and info.bos_token_id is None:
        remedy = "name one in its tokenizer_config.json, or set it to eos"
        raise UserError(f"data.borders: the tokenizer has no bos_token; {remedy}")
    prefix = _configured(folder, "bos_token") if "bos" in borders else None
    # The tokenizer may come from an export whose documents had other borders.
    if prefix != _configured(folder, DOCUMENT_PREFIX):
        path = folder / "tokenizer_config.json"
        config = {**read_json_value(path), DOCUMENT_PREFIX: prefix}
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_vocabulary(found: int, vocab_size: int | None) -> None:
    """Raise UserError if a tokenizer has more ids (`found`) than the model has embeddings."""
    if vocab_size is not None and found > vocab_size:
        remedy = f"--set model.vocab_size={-(-found // 128) * 128} (a multiple of 128), or choose a smaller tokenizer"
        raise UserError(f"data.tokenizer: it has {found:,} ids, the model only {vocab_size:,}: {remedy}")


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
        what = f"its tokenizer.json cannot be read ({error}); save the tokenizer again"
        raise UserError(f"data.tokenizer: {name}: {what}") from error
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    known = next((token for token in KNOWN_EOS if token in vocab), None)
    eos_token = _configured(folder, "eos_token") or known
    if eos_token not in vocab:
        remedy = "name one as eos_token in its tokenizer_config.json"
        raise UserError(f"data.tokenizer: {name} has no end-of-text token; {remedy}")
    # Not the number of tokens: ids may have gaps, and an embedding needs a row for the highest.
    size = max(vocab.values()) + 1
    bos, made = vocab.get(_configured(folder, "bos_token")), files["tokenizer.json"]
    _DESCRIBED[key] = TokenizerInfo(size, eos_token, vocab[eos_token], bos, made, files)
    return _DESCRIBED[key]


def configured_borders(folder: Path) -> list[str]:
    """List what the folder's tokenizer_config.json says of EOS and BOS."""
    return [f"{name}={token}" for name in ("eos_token", "bos_token") if (token := _configured(folder, name))]


_DESCRIBED: dict[tuple[tuple[str, str], ...], TokenizerInfo] = {}


def _configured(folder: Path, name: str) -> str | None:
    """Read a special token of tokenizer_config.json, which is a string or an added-token object."""
    path = folder / "tokenizer_config.json"
    try:
        token = read_json_value(path).get(name) if path.is_file() else None
    except (ValueError, AttributeError) as error:
        what = f"tokenizer_config.json is no JSON object ({error}); mend it"
        raise UserError(f"data.tokenizer: {what}") from error
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str | None):
        raise UserError(f"data.tokenizer: {name} in tokenizer_config.json is no text; mend it")
    return token
