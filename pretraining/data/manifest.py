"""Read and compare manifest.json: what a data set holds and came from. It is written last: if it is there, the data
set is complete."""

import io
import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pretraining.data.checksums import checksum_of, checksum_of_file
from pretraining.data.publishing import kept_beside
from pretraining.data.tokenizer import describe_tokenizer, local_checksums
from pretraining.errors import UserError
from pretraining.outside.files import CHECKSUM, COUNT, DIGEST, NAME, object_of, parse_json, read_bytes
from pretraining.outside.schema import Difference, check, differences, filled
from pretraining.recipe import recipe_schema
from pretraining.recipe.data import Data, is_mixed

if TYPE_CHECKING:
    import numpy

FORMAT = 2
MANIFEST_NAME = "manifest.json"
POSITIONS_FILE = "validation_positions.npy"
"""For each document of validation, the tokens of training of its source before it: int64 [documents]. A run that sees
only the first documents of a source finds there which of validation belong to them."""

DECIDING_KEYS = (
    "sources",  # the texts, in this order: of each source what follows
    *("tokenizer", "borders"),  # the ids
    "validation_share",  # on which side of the split a document is
    "validation",  # other texts on that side
    *("skip_undecodable", "filters", "dedup", "decontaminate"),  # which documents are left out
)
"""The keys of a recipe's data section that decide the prepared bytes. All other keys say how the bytes are read, or how
fast they are made. A change of such a key needs no new preparation."""

DECIDING_SOURCE_KEYS = (
    *("builtin", "path", "dataset", "config", "split", "revision"),  # which files or rows
    *("text_column", "format", "keep"),  # which of their columns, or how else, and which rows
)
"""The same for each entry in `sources`. Its name, weight and max_epochs only say how a run mixes it."""
DECIDING_CAPS = ("max_tokens", "max_documents")
"""The same for each entry in `validation.sources`: every run measures all that was prepared of it."""

COUNTED = ("documents", "tokens", "bytes")
"""What the manifest counts in each shard and split."""


_COUNTS = dict.fromkeys(COUNTED, COUNT)
_PLACES = object_of(dict.fromkeys(("input_ids", "offsets", "num_bytes"), COUNT))
_FILE = {"file": NAME, "size": COUNT, "checksum": CHECKSUM, "buffers": _PLACES}
_SHARDS = {"type": "array", "items": object_of({**_COUNTS, **_FILE}, {"source": COUNT})}
_DTYPE = {"type": "string", "enum": ["uint16", "uint32"]}
_SPLIT = object_of({**_COUNTS, "dtype": _DTYPE, "checksum": DIGEST, "shards": _SHARDS})
_SOURCES = {"type": "array", "items": {"type": "object"}}
_OWN = {**object_of({"sources": _SOURCES}), "type": ["object", "null"]}
_FILTERS = {"type": ["array", "null"], "items": {"type": "object"}}
ORIGIN = "origin:"
"""Begins the identity of tokens that are not there yet, in the place of their fingerprint."""
_TOKENIZER = {"vocab_size": COUNT, "fingerprint": DIGEST}
_REQUIRED = {
    "name": {"type": "string"},
    "fingerprint": DIGEST,
    "data": object_of({"sources": _SOURCES, "tokenizer": {}}, {"validation": _OWN, "filters": _FILTERS}),
    "tokenizer": object_of(_TOKENIZER, {"eos_token_id": COUNT, "files": {"type": "object"}}),
    "splits": {
        "type": "object",
        "required": ["train", "validation"],
        "patternProperties": {NAME["pattern"]: _SPLIT},
        "additionalProperties": False,
    },
}
SHAPE = object_of(_REQUIRED, {"sources": _SOURCES})
"""What every reader of a manifest relies on. Digests and names become paths."""


def deciding_section(data: dict) -> dict:
    """Take the part of a data section that decides the prepared bytes; a key that is not given has its default."""

    def sources(section: dict, keys: tuple[str, ...]) -> dict:
        given = section["sources"]
        return {"sources": [{key: each[key] for key in keys if each.get(key) is not None} for each in given]}

    whole = filled(data, recipe_schema()["properties"]["data"])
    # Rules for some sources know them by name.
    named = ("name",) if any(rule.get("sources") for rule in whole.get("filters") or ()) else ()
    deciding = {key: whole.get(key) for key in DECIDING_KEYS} | sources(whole, DECIDING_SOURCE_KEYS + named)
    # Identities of data from before there was the key do not hold its default.
    if deciding["borders"] == "eos":
        del deciding["borders"]
    if own := deciding["validation"]:
        deciding["validation"] |= sources(own, DECIDING_SOURCE_KEYS + DECIDING_CAPS)
    return deciding


def source_entries(manifest: dict) -> list[dict]:
    """List the entries of all sources as shards number them: those of training, then data.validation's own."""
    return [*manifest.get("sources", ()), *manifest.get("validation_sources", ())]


def data_differences(manifest: dict, data: dict, fingerprints: list[dict] | None = None) -> list[str]:
    """List how a prepared data set differs from what a data section asks for, one short text for each difference.

    Keys that only say how data is read do not count. fingerprints: of all sources now; None if they need not be there.
    """
    if "converted_from" in manifest:
        return [f"it was converted from {manifest['converted_from']['format']} files, not prepared from text"]
    # A difference of keys says most, so it is reported alone.
    found = differences(deciding_section(manifest["data"]), deciding_section(data), "data")
    if found:
        return list(map(str, found))
    places = [f"data.sources.{number}" for number in range(len(manifest.get("sources", ())))]
    places += [f"data.validation.sources.{n}" for n in range(len(manifest.get("validation_sources", ())))]
    texts: list[str | None] = []
    for key, there, here in zip(places, source_entries(manifest), fingerprints or [], strict=False):
        changed = _common_differences(there, here, key)
        if not changed or "files" not in there.keys() & here.keys():
            texts += map(str, changed[:1])
            continue
        files = [f"{n:,} {'file' if n == 1 else 'files'}" for n in (there["files"], here["files"])]
        if there["bytes"] == here["bytes"] and files[0] == files[1]:
            texts.append(f"{key}: {files[1]} of the same size, but written since or named otherwise")
            continue
        sizes = [f"{source['bytes']:,} bytes in {n}" for source, n in zip((there, here), files, strict=True)]
        texts.append(f"{key}: {sizes[0]} there, {sizes[1]} here")
    texts.append(tokenizer_difference(manifest, data))
    if fingerprints is not None and (there := manifest.get("consulted")):
        # Without a list or a package that only a preparation needs, nobody knows.
        with suppress(UserError):
            here = consulted(data)
            changed = [key for key in there if _common_differences(there[key], here.get(key, {}), key)]
            texts += [f"{key}: what it reads has changed since" for key in changed]
    return list(filter(None, texts))


def tokenizer_difference(manifest: dict, data: dict) -> str | None:
    """Report if the folder that `data.tokenizer` names holds another tokenizer than the data was made with."""
    named, made = data["tokenizer"], manifest["tokenizer"]
    # none: a hub name or a trained tokenizer has no local file to compare
    if not (files := local_checksums(named)):
        return None
    if files["tokenizer.json"] != made["fingerprint"]:
        return f"data.tokenizer: {named} holds another one than the data was made with"
    # `tokenizers` is imported only if a file has changed.
    here = made if files == made.get("files") else vars(describe_tokenizer(Path(named).expanduser(), named))
    # BOS is in the tokens only if it is asked for.
    for key in ("eos_token_id", *(["bos_token_id"] if "bos" in data.get("borders", "eos") else [])):
        if here.get(key) != made.get(key, here.get(key)):
            what = f"has {key} {here[key]} (tokenizer_config.json), the data was made with {made[key]}"
            return f"data.tokenizer: {named} {what}"
    return None


def fitting_beside(folder: Path, data: dict, fingerprints: list[dict] | None = None) -> str:
    """Return `; <kept> fits: ...` if a data set kept beside `folder` (or its link's target) is what is asked for."""
    # Resolved: data sets are kept beside the folder that a link leads to.
    for path in kept_beside(folder.resolve()):
        try:
            manifest = read_manifest(path)
        except (UserError, OSError):  # damaged or unreadable: not worth naming
            continue
        if manifest and not data_differences(manifest, data, fingerprints):
            return f"; {path} fits: {reading_options(path, folder.parent)}"
    return ""


def reading_options(kept: Path, data_root: Path) -> str:
    """Write the options with which a run goes on with a data set kept aside."""
    elsewhere = f"--data_dir {kept.parent} " if kept.parent != data_root.resolve() else ""
    return f"{elsewhere}--set data.name={kept.name}"


def consulted(data: dict) -> dict:
    """Describe what filters and decontamination use, with checksums of the files they read, under dotted keys."""
    found = {}
    if data.get("filters"):
        from pretraining.data.quality.chain import FilterChain

        chain = FilterChain(data["filters"])
        found = {f"data.filters.{number}": rule for number, rule in enumerate(chain.identity)}
    if sets := data.get("decontaminate"):
        from pretraining.data.dedup.decontamination import checksums_of_tasks, fingerprint_of_sets

        if folder := sets.get("folder"):
            found["data.decontaminate.folder"] = {"files": fingerprint_of_sets(folder, [])}
        if files := checksums_of_tasks(sets.get("tasks") or []):
            found["data.decontaminate.tasks"] = {"files": files}
    # As the manifest gives it back: JSON has no tuples, and its keys are strings.
    return json.loads(json.dumps(found))


def _common_differences(there: dict, here: dict, key: str) -> list[Difference]:
    # A manifest of another version may have more keys or fewer. Its data set stays valid.
    common = [name for name in here if name in there]
    return differences({name: there[name] for name in common}, {name: here[name] for name in common}, key)


def entropy_bits(counts: "numpy.ndarray") -> float:
    """Compute the total bits that tokens of these counts [vocab_size] cost under their own frequencies."""
    import numpy as np

    # An id that never occurs costs nothing, and its logarithm would be minus infinity.
    seen = counts[counts > 0]
    return float(-(seen * np.log2(seen / seen.sum())).sum())


def read_manifest(folder: Path) -> dict | None:
    """Read the manifest of a finished data set, None if there is none; UserError if it cannot be read."""
    path, remedy = folder / MANIFEST_NAME, f"delete {folder} and prepare the data again"
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return None
    return parse_manifest(content, str(path), remedy, remedy)


def parse_manifest(content: str | bytes, where: str, if_damaged: str, if_other_format: str) -> dict:
    """Parse the manifest in `content`; a UserError names the place `where` and the remedy that fits."""
    try:
        manifest = parse_json(content)
    except ValueError as error:
        raise UserError(f"{where}: damaged manifest; {if_damaged}") from error
    # Before the shape: a manifest of another format is not damaged, and needs another remedy.
    if isinstance(manifest, dict) and manifest.get("format") != FORMAT:
        found = manifest.get("format")
        raise UserError(f"{where}: format {found}, this code reads {FORMAT}; {if_other_format}")
    try:
        manifest = check(manifest, SHAPE, "damaged manifest")
        for name, split in manifest["splits"].items():
            for key in _COUNTS:
                if (total := sum(shard[key] for shard in split["shards"])) != split[key]:
                    what = f"the shards of {name} hold {total:,} {key}, not {split[key]:,}"
                    raise UserError(f"damaged manifest: {what}")
        return manifest
    except UserError as error:
        raise UserError(f"{where}: {error}; {if_damaged}") from None


def verify(folder: Path, manifest: dict) -> None:
    """Read every shard whole and compare checksums. A UserError names a damaged file."""
    for split, entry in manifest["splits"].items():
        for shard in entry["shards"]:
            path = folder / split / shard["file"]
            found = checksum_of_file(path) if path.is_file() else "nothing"
            if found != shard["checksum"]:
                what = f"damaged shard: checksum {found}, expected {shard['checksum']}"
                remedy = f"delete {folder} and prepare the data again (data_prep.py), or copy it again"
                raise UserError(f"{path}: {what}; {remedy}")


def read_positions(folder: Path, manifest: dict) -> "numpy.ndarray":
    """Read `POSITIONS_FILE`; UserError unless it is the one that the manifest was written with."""
    path = folder / POSITIONS_FILE
    content = read_bytes(path) if path.is_file() else None
    remedy = f"copy it again, or delete {folder} and prepare the data again (data_prep.py)"
    return parse_positions(content, manifest, str(path), remedy)


def parse_positions(content: bytes | None, manifest: dict, where: str, remedy: str) -> "numpy.ndarray":
    import numpy as np

    found = "nothing" if content is None else checksum_of(content)
    if found != (expected := manifest["validation_positions"]):
        what = f"missing or damaged: checksum {found}, expected {expected}"
        raise UserError(f"{where}: {what}; a run that reads a part of the data needs it: {remedy}")
    return np.load(io.BytesIO(content))


def num_shard_bytes(manifest: dict) -> int:
    return sum(shard["size"] for entry in manifest["splits"].values() for shard in entry["shards"])


def report_text(manifest: dict) -> str:
    """Describe what filters, decontamination and deduplication took out; empty if the recipe asked for none."""
    parts = []
    if "filters" in manifest:
        from pretraining.data.quality.chain import FilterReport

        parts.append(FilterReport(**manifest["filters"]).as_text())
    if "decontamination" in manifest:
        found = manifest["decontamination"]
        sets = ", ".join(f"{name}: {entry['dropped']:,}" for name, entry in found["sets"].items())
        counts = f"{found['dropped']:,} of {found['documents']:,} documents"
        parts.append(f"decontamination: {counts} ({sets or 'none'})")
    if "duplicates" in manifest:
        found = manifest["duplicates"]
        fates = found["fates"]
        clusters = f"{found['clusters']:,} clusters (the largest has {found['largest_cluster']:,})"
        removed = f"{fates['duplicate']:,} of them removed, and {fates['validation_twin']:,} more"
        repeated = f"{found['dropped']:,} of {found['documents']:,} documents repeat another, in {clusters}"
        parts.append(f"duplicates: {repeated}; {removed} that are too close to validation")
    if "passages" in manifest:
        found = manifest["passages"]
        runs = f"{found['repeated']:,} of {found['windows']:,} runs of {found['words']} words occurred before"
        done = "cut out of them" if found["remove"] else "kept"
        parts.append(f"passages: {runs}, in {found['documents']:,} documents; {done}")
    return "\n".join(parts)


def check_blocks(
    splits: dict,
    data: Data,
    sequence_length: int,
    workable_share: Callable[[int, int], float | None] = lambda *_: None,
    is_part: bool = False,
) -> None:
    """Raise UserError unless train, the held-out share, each validation source and each source of a mixture hold a
    block, and a target more.

    workable_share: finds a data.validation_share that leaves each split a block, from tokens there are and wanted.
    is_part: whether the splits are what a run reads of a data set that holds more.
    """
    # One more than the inputs: the target of the last one.
    wanted = sequence_length + 1
    trained, held_out = Counter[int](), Counter[int]()
    for counter, split in ((trained, "train"), (held_out, "validation")):
        for shard in splits[split]["shards"]:
            source = shard.get("source") or 0  # None: of a single source in older data sets
            counter[source] += shard["tokens"]
    own = data.validation.sources if data.validation else []
    needed = {
        f"data.validation.sources.{number} ({each.called})": held_out.pop(len(data.sources) + number, 0)
        for number, each in enumerate(own)
    }
    for number, each in enumerate(data.sources if is_mixed(data) else ()):
        needed[f"data.sources.{number} ({each.called})"] = trained[number]
    for what, found in needed.items():
        if found < wanted:
            what += f" has {found:,} tokens, too few for one block of {wanted:,}"
            remedy = "add text to it, leave it out, or shorten the sequence length"
            raise UserError(f"data {data.name!r}: {what}; {remedy}")
    counts = {"train": splits["train"]["tokens"]}
    if data.validation_share:
        counts["validation"] = sum(held_out.values())
    total, short = sum(counts.values()), [name for name in counts if counts[name] < wanted]
    if not short:
        return
    share = workable_share(total, wanted) if data.validation_share else None
    whole = f"{total:,} tokens that this run reads" if is_part else f"corpus's {total:,} tokens"
    if is_part:
        more = "let the run read more (budget.tokens, data.sources max_tokens)"
        advice = f"set data.validation_share above {data.validation_share:g} (with a data.name of its own), or {more}"
    elif share is not None:
        advice = f"set data.validation_share to {share:g} (it is {data.validation_share:g})"
    elif total < len(counts) * wanted:
        blocks = "two blocks need" if len(counts) == 2 else "one block needs"
        advice = f"add text: {blocks} {len(counts) * wanted:,} tokens"
    else:
        advice = "add text or documents, change data.validation_share, or shorten the sequence length"
    what = f"{short[0]} has {counts[short[0]]:,} of the {whole}, too few for one block of {wanted:,}"
    block = f"(sequence length {sequence_length:,} and one target)"
    raise UserError(f"data {data.name!r}: {what} {block}; {advice}")
