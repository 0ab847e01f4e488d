"""The end of a preparation: the tasks' shards gathered into one data set, its manifest written last."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np

from pretraining.data.corpus import empty_corpus
from pretraining.data.engine.reports import as_text, cleaning_skips, reports_of
from pretraining.data.engine.tokenize_stage import RESULT_NAME, SPLITS
from pretraining.data.manifest import (
    FORMAT,
    MANIFEST_NAME,
    content_fingerprint,
    deciding_section,
    entropy_bits,
)
from pretraining.data.publishing import discard, publish, start_building
from pretraining.data.shard_writer import SplitWriter, split_entry, write_durably
from pretraining.data.shards import open_shard
from pretraining.data.split_sizes import SplitSizes, check_blocks
from pretraining.data.tokenizer import describe_tokenizer
from pretraining.errors import UserError
from pretraining.recipe.data import source_name


def finish(preparation) -> Path | None:
    """Gather, write the manifest, and put the data set in its place; where the one before it is kept, if there was one.

    Raises UserError where a task has not finished, the corpus is empty, or a split is too small for one block.
    """
    outputs = preparation.tokenize_stage.outputs(preparation.work)
    results = [json.loads((output / RESULT_NAME).read_text()) for output in outputs]
    _check_not_empty(preparation.data, results)
    building = start_building(preparation.folder)
    try:
        splits = {
            "train": _link_shards(outputs, results, building / "train"),
            "validation": _join_validation(outputs, results, building / "validation"),
        }
        _check_blocks(preparation, splits, outputs)
        shutil.copytree(preparation.tokenizer_folder, building / "tokenizer")
        write_durably(building / "dataset_dict.json", json.dumps({"splits": list(SPLITS)}))
        _write_manifest(building, preparation, splits, outputs, results)
    except BaseException:
        discard(preparation.folder)
        raise
    return publish(preparation.folder)


def _check_blocks(preparation, splits: dict, outputs: list[Path]) -> None:
    """As `check_blocks`; where filters left too little, their report tells which of them did."""
    try:
        check_blocks(splits, preparation.data, preparation.sequence_length, SplitSizes.joined(outputs))
    except UserError:
        if preparation.progress.shown and (reports := reports_of(preparation)):
            print(as_text(reports), file=sys.stderr)
        raise


def _check_not_empty(data: dict, results: list[dict]) -> None:
    if not any(entry["documents"] for result in results for entry in result["splits"].values()):
        raise empty_corpus(data, _summed([result["skipped"] for result in results]))


def _summed(skips: list[dict]) -> dict[str, int]:
    """What was left out while reading, over all tasks."""
    return {reason: sum(skip.get(reason, 0) for skip in skips) for reason in ("undecodable", "empty")}


def _link_shards(outputs: list[Path], results: list[dict], target: Path) -> dict:
    """The tasks' shards of train under their final names: links, so that a second try finds them again."""
    shards = [
        (output / "train" / shard["file"], {**shard, "source": result["source"]})
        for output, result in zip(outputs, results, strict=True)
        for shard in result["splits"]["train"]["shards"]
        if shard["documents"]
    ]
    target.mkdir()
    for number, (path, shard) in enumerate(shards):
        shard["file"] = f"data-{number:05d}-of-{len(shards):05d}.arrow"
        _link(path, target / shard["file"])
    return split_entry(target, [shard for _, shard in shards], results[0]["splits"]["train"]["dtype"])


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # a file system without links
        shutil.copyfile(path, target)


def _join_validation(outputs: list[Path], results: list[dict], target: Path) -> dict:
    """The tasks' small parts of validation, written anew into few shards."""
    dtype = np.dtype(results[0]["splits"]["validation"]["dtype"])
    writer = SplitWriter(target, dtype)
    for output, result in zip(outputs, results, strict=True):
        writer.begin_source(result["source"])
        for entry in result["splits"]["validation"]["shards"]:
            if not entry["documents"]:
                continue
            shard = open_shard(output / "validation" / entry["file"], entry, dtype)
            writer.extend(shard.tokens, shard.ends, shard.num_bytes)
    return writer.finish()


def _write_manifest(building: Path, preparation, splits: dict, outputs: list, results: list) -> None:
    """The last file: counts, checksums, tokenizer, sources and versions."""
    counts = np.sum([np.load(output / "validation_counts.npy") for output in outputs], axis=0)
    bits_per_byte = (
        entropy_bits(counts) / splits["validation"]["bytes"]
    )  # what the tokens cost by their frequencies
    splits["validation"]["unigram_bits_per_byte"] = round(bits_per_byte, 6)
    data = preparation.data
    skips = cleaning_skips(preparation) if preparation.cleans else [result["skipped"] for result in results]
    manifest = {
        "format": FORMAT,
        "name": data["name"],
        "fingerprint": content_fingerprint(splits),
        "data": deciding_section(data),
        "consulted": preparation.consulted,
        "tokenizer": describe_tokenizer(building / "tokenizer", str(data["tokenizer"])).__dict__,
        "encoding": _encoding(results),
        "sources": _sources(data["sources"], preparation.fingerprints, results),
        "skipped": _summed(skips),
        **reports_of(preparation),
        "splits": splits,
        "versions": _versions(),
    }
    write_durably(building / MANIFEST_NAME, json.dumps(manifest, indent=2) + "\n")


def _sources(specs: list[dict], fingerprints: list[dict], results: list[dict]) -> list[dict]:
    """Name, fingerprint and counts of each source."""
    entries = []
    for number, (spec, fingerprint) in enumerate(zip(specs, fingerprints, strict=True)):
        mine = [entry for r in results if r["source"] == number for entry in r["splits"].values()]
        counts = {name: sum(entry[name] for entry in mine) for name in ("documents", "tokens")}
        counts["text_bytes"] = sum(entry["bytes"] for entry in mine)
        entries.append({"name": source_name(spec), **fingerprint, **counts})
    return entries


def _encoding(results: list[dict]) -> dict:
    """Which encoder worked, and how many documents the reference has checked."""
    backends = sorted({result["encoding"]["backend"] for result in results})
    checked = sum(result["encoding"]["checked_documents"] for result in results)
    return {"backends": backends, "checked_documents": checked}


def _versions() -> dict:
    """Versions of the packages that shape the bytes."""
    from importlib.metadata import version

    return {package: version(package) for package in ("numpy", "pyarrow", "tokenizers")}
