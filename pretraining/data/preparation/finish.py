"""Finish a preparation: gather the tasks' shards into one data set, and write its manifest last."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np

from pretraining.data.manifest import (
    FORMAT,
    MANIFEST_NAME,
    content_fingerprint,
    deciding_section,
    entropy_bits,
    report_text,
)
from pretraining.data.preparation.cleaning import CleanedCorpus
from pretraining.data.preparation.split_sizes import SplitSizes, check_blocks
from pretraining.data.preparation.stages import Preparation
from pretraining.data.preparation.tokenizing import COUNTS_NAME, SPLITS
from pretraining.data.publishing import discard, publish, start_building
from pretraining.data.shard_writer import SplitWriter, split_entry
from pretraining.data.shards import open_shard
from pretraining.errors import UserError
from pretraining.recipe.data import TextOrigin
from pretraining.runtime.durable_files import replacing


def finish(preparation: Preparation, show_progress: bool = False) -> Path | None:
    """Gather the shards, write the manifest, and put the data set in its place.

    Returns the path under which an earlier data set is kept, if there was one. Raises UserError if a source has
    changed, a task has not finished, the corpus is empty, or a split is too small for one block.
    """
    # A source that changed meanwhile would give a data set of two versions.
    for corpus in filter(None, [preparation.corpus, preparation.validation]):
        corpus.check_unchanged()
    outputs, results = preparation.tokenize.outputs(), preparation.tokenize.results()
    if not any(entry["documents"] for result in results for entry in result["splits"].values()):
        raise preparation.texts.is_empty(_summed([result["skipped"] for result in results]))
    own_outputs, own_results = _validation_tasks(preparation)
    held_out, held_out_results = [*outputs, *own_outputs], [*results, *own_results]
    building = start_building(preparation.folder)
    try:
        splits = {
            "train": _link_shards(outputs, results, building / "train"),
            "validation": _join_validation(held_out, held_out_results, building / "validation"),
        }
        reports = preparation.cleaned.reports() if preparation.cleaned else {}
        _check_blocks(preparation, splits, outputs, reports if show_progress else {})
        shutil.copytree(preparation.tokenize.tokenizer.output, building / "tokenizer")
        with replacing(building / "dataset_dict.json") as file:
            json.dump({"splits": list(SPLITS)}, file)
        manifest = _manifest(preparation, splits, held_out, held_out_results, reports)
        # Last: where a manifest is, the data set is complete.
        with replacing(building / MANIFEST_NAME) as file:
            file.write(json.dumps(manifest, indent=2) + "\n")
    # Also after Ctrl-C: what is half built must not stay.
    except BaseException:
        discard(preparation.folder)
        raise
    return publish(preparation.folder)


def _validation_tasks(preparation: Preparation) -> tuple[list[Path], list[dict]]:
    """Return outputs and results of the texts of `data.validation`, whose sources are numbered behind the others."""
    stage, first = preparation.tokenize_validation, len(preparation.data.sources)
    if stage is None:
        return [], []
    return stage.outputs(), [{**result, "source": first + result["source"]} for result in stage.results()]


def _check_blocks(preparation: Preparation, splits: dict, outputs: list[Path], reports: dict) -> None:
    """Check the blocks of each split; if cleaning left too little, print `reports`, which say what it took out."""
    try:
        check_blocks(splits, preparation.data, preparation.sequence_length, SplitSizes.joined(outputs))
    except UserError:
        if reports:
            print(report_text(reports), file=sys.stderr)
        raise


def _summed(skips: list[dict]) -> dict[str, int]:
    """Sum what was left out while reading, over all tasks."""
    return {reason: sum(skip.get(reason, 0) for skip in skips) for reason in ("undecodable", "empty")}


def _link_shards(outputs: list[Path], results: list[dict], target: Path) -> dict:
    """Give the tasks' shards of train their final names, by links."""
    shards = [
        (output / "train" / shard["file"], {**shard, "source": result["source"]})
        for output, result in zip(outputs, results, strict=True)
        for shard in result["splits"]["train"]["shards"]
        if shard["documents"]
    ]
    target.mkdir()
    for number, (path, shard) in enumerate(shards):
        shard["file"] = f"data-{number:05d}-of-{len(shards):05d}.arrow"
        # Linked, not moved: a second try finds the tasks' shards again.
        _link(path, target / shard["file"])
    return split_entry(target, [shard for _, shard in shards], results[0]["splits"]["train"]["dtype"])


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # a file system without links
        shutil.copyfile(path, target)


def _join_validation(outputs: list[Path], results: list[dict], target: Path) -> dict:
    """Write the tasks' small parts of validation again, into few shards."""
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


def _manifest(
    preparation: Preparation, splits: dict, outputs: list[Path], results: list[dict], reports: dict
) -> dict:
    """Make the manifest: what the data set holds and came from, with counts, checksums, tokenizer and versions."""
    counts = np.sum([np.load(output / COUNTS_NAME) for output in outputs], axis=0)
    # What the tokens cost by their frequencies alone: a model must be better than that.
    bits_per_byte = entropy_bits(counts) / splits["validation"]["bytes"]
    splits["validation"]["unigram_bits_per_byte"] = round(bits_per_byte, 6)
    data, tokenizer = preparation.data, preparation.tokenize.tokenizer
    # Each text is read from its source once: by `Clean` if there is one, else by `Tokenize`.
    skips = [result["skipped"] for result in results]
    for texts in [preparation.cleaned, stage.texts if (stage := preparation.tokenize_validation) else None]:
        skips += texts.skipped() if isinstance(texts, CleanedCorpus) else []
    entries = _sources([spec for _, spec in data.text_origins], preparation.fingerprints, results)
    own = entries[len(data.sources) :]
    return {
        "format": FORMAT,
        "name": data.name,
        "fingerprint": content_fingerprint(splits),
        "data": deciding_section(data.to_dict()),
        "consulted": preparation.consulted,
        "tokenizer": vars(tokenizer.describe(tokenizer.output)),
        "encoding": _encoding(results),
        "sources": entries[: len(data.sources)],
        **({"validation_sources": own} if own else {}),
        "skipped": _summed(skips),
        **reports,
        "splits": splits,
        "versions": _versions(),
    }


def _sources(specs: list[TextOrigin], fingerprints: list[dict], results: list[dict]) -> list[dict]:
    """List name, fingerprint and counts of each source."""
    entries = []
    for number, (spec, fingerprint) in enumerate(zip(specs, fingerprints, strict=True)):
        mine = [entry for r in results if r["source"] == number for entry in r["splits"].values()]
        counts = {name: sum(entry[name] for entry in mine) for name in ("documents", "tokens")}
        counts["text_bytes"] = sum(entry["bytes"] for entry in mine)
        entries.append({"name": spec.called, **fingerprint, **counts})
    return entries


def _encoding(results: list[dict]) -> dict:
    """Say which encoder worked, and how many documents the reference has checked."""
    backends = sorted({result["encoding"]["backend"] for result in results})
    checked = sum(result["encoding"]["checked_documents"] for result in results)
    return {"backends": backends, "checked_documents": checked}


def _versions() -> dict:
    """List the versions of the packages that shape the bytes."""
    from importlib.metadata import version

    return {package: version(package) for package in ("numpy", "pyarrow", "tokenizers")}
