"""Finish a preparation: gather the tasks' shards into one data set, and write its manifest last."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretraining.data.arriving import ARRIVED_NAME
from pretraining.data.checksums import checksum_of_file, content_fingerprint, digest_of
from pretraining.data.corpus import summed_skips
from pretraining.data.finished import complete
from pretraining.data.manifest import (
    FORMAT,
    ORIGIN,
    POSITIONS_FILE,
    check_blocks,
    consulted,
    deciding_section,
    read_manifest,
    reading_options,
    report_text,
)
from pretraining.data.portions import cut_shards, rows_of_source
from pretraining.data.preparation.cleaning import CleanedCorpus, merged_reports
from pretraining.data.preparation.plan import Preparation, Survey
from pretraining.data.preparation.tokenizing import POSITIONS_NAME, Tokenize, workable_share
from pretraining.data.publishing import building, publish
from pretraining.data.shards import Shard, SplitWriter, TokenSplit, split_entry, summed_entry, token_dtype
from pretraining.errors import UserError
from pretraining.runtime.durable_files import replacing


class _Stretch(NamedTuple):
    """What a task gave of a source; or its first tasks together, which the data set in the new one's place holds."""

    folder: Path
    """Holds the shards, in a folder for each split."""
    result: dict
    """What the task reports; of several, with "tasks" and "largest_task" as in a manifest."""
    positions: Path
    rows: slice = slice(None)
    """Those of `positions` that belong to it."""

    @classmethod
    def of_task(cls, stage: Tokenize, task: int) -> "_Stretch":
        folder = stage.folder(task)
        return cls(folder, stage.result(task), folder / POSITIONS_NAME)

    @classmethod
    def of_begun(cls, begun: dict, source: int, earlier: dict[str, TokenSplit]) -> "_Stretch":
        """Take what was begun of a source from the splits of the data set that holds it, and perhaps more."""
        train, validation = earlier["train"], earlier["validation"]
        documents, folder = begun["validation_documents"], validation.folder.parent
        shards = [shard for shard in train.shard_entries if shard["source"] == source][: begun["shards"]]
        held_out = [s for s in cut_shards(validation, {source: documents}) if s["source"] == source]
        splits = {
            "train": {**{key: begun[key] for key in ("documents", "tokens")}, "shards": shards},
            "validation": summed_entry(held_out, validation.dtype.name),
        }
        first = rows_of_source(validation.shard_entries, source).start
        rows = slice(first, first + documents)
        return cls(folder, {**begun, "splits": splits, "cut": None}, folder / POSITIONS_FILE, rows)


@dataclass(frozen=True)
class _SourcePart:
    """What the data set gets of one source."""

    source: int
    stretches: list[_Stretch]

    @property
    def results(self) -> list[dict]:
        return [stretch.result for stretch in self.stretches]

    def shards(self, split: str) -> Iterator[tuple[Path, dict]]:
        """List the shards, each with its entry."""
        for stretch in self.stretches:
            for shard in stretch.result["splits"][split]["shards"]:
                if shard["documents"]:
                    yield stretch.folder / split / shard["file"], {**shard, "source": self.source}

    def validation_shards(self) -> Iterator[Shard]:
        for stretch in self.stretches:
            split = TokenSplit(stretch.folder / "validation", stretch.result["splits"]["validation"])
            for number, entry in enumerate(split.shard_entries):
                if entry["documents"]:
                    yield split.map_anew(number)

    def positions(self) -> np.ndarray:
        """Join the places of the validation documents: [documents] int64."""
        positions, tokens = [np.empty(0, np.int64)], 0
        for stretch in self.stretches:
            positions.append(np.load(stretch.positions)[stretch.rows] + tokens)
            tokens += stretch.result["splits"]["train"]["tokens"]
        return np.concatenate(positions)

    def whole_tasks(self, keys: list[list[str]]) -> dict:
        """Sum up the tasks that are there whole, for a preparation that goes on from here.

        keys: of the texts of each task. Returns {"tasks", "keys": their digest, "documents", "tokens", "shards" (of
        training), "largest_task" (its tokens), "validation_documents", "skipped", "encoding", "cleaned"}.
        """
        whole = [result for result in self.results if not result["cut"]]
        train = [result["splits"]["train"] for result in whole]
        tasks = sum(result.get("tasks", 1) for result in whole)
        largest = (result.get("largest_task", result["splits"]["train"]["tokens"]) for result in whole)
        cleaned = [result["cleaned"] for result in whole if "cleaned" in result]
        return {
            "tasks": tasks,
            "keys": digest_of(keys[:tasks]),
            "documents": sum(split["documents"] for split in train),
            "tokens": sum(split["tokens"] for split in train),
            "shards": sum(bool(shard["documents"]) for split in train for shard in split["shards"]),
            "largest_task": max(largest, default=0),
            "validation_documents": sum(result["splits"]["validation"]["documents"] for result in whole),
            "skipped": summed_skips(result["skipped"] for result in whole),
            "encoding": _encoding(whole),
            **({"cleaned": merged_reports(cleaned)} if cleaned else {}),
        }


def keep_arrived(preparation: Preparation) -> None:
    """Write down what a run that trains meanwhile can read: the first tasks that have finished without a gap."""
    if preparation.data.shuffle_blocks is None:
        return
    survey = Survey()
    for source in preparation.survey():
        gap = min(source.missing, default=inf)
        survey.append(source._replace(used=[task for task in source.used if task < gap]))
        # The stream goes on with the next source only where one is whole.
        if source.missing:
            break
    parts = {"train": _train_parts(preparation, survey), "validation": _validation_parts(preparation)}
    tokenizer, splits = preparation.tokenize.tokenizer, {}
    for split, own in parts.items():
        shards = [{**shard, "path": str(path)} for part in own for path, shard in part.shards(split)]
        splits[split] = summed_entry(shards, token_dtype(tokenizer.info.vocab_size).name)
    manifest = _identity(preparation, f"{ORIGIN}{preparation.origin}")
    manifest |= {"tokenizer_folder": str(tokenizer.output), "splits": splits}
    with replacing(preparation.work / ARRIVED_NAME) as file:
        json.dump(manifest, file)


def finish(preparation: Preparation, show_progress: bool = False) -> Path | None:
    """Gather the shards, write the manifest, and put the data set in its place.

    Returns the path under which an earlier data set is kept, if there was another one. Raises UserError if a source, or
    what a filter reads, has changed, a task has not finished, the corpus is empty, or a split is too small for a block.
    """
    # A source that changed meanwhile would give a data set of two versions.
    for corpus in filter(None, [preparation.corpus, preparation.validation]):
        for source in corpus.sources:
            source.check_unchanged()
    now = consulted(preparation.data.to_dict())
    for key in preparation.consulted:
        if now.get(key) != preparation.consulted[key]:
            what = "what it reads has changed while the data was prepared"
            raise UserError(f"{key}: {what}; run the same command again once nobody writes there")
    survey = preparation.survey()
    preparation.tokenize.refuse(survey.missing)
    trained = _train_parts(preparation, survey)
    parts = [*trained, *_validation_parts(preparation)]
    results = [result for part in trained for result in part.results]
    if not any(entry["documents"] for result in results for entry in result["splits"].values()):
        raise preparation.texts.is_empty(summed_skips(each["skipped"] for each in results))
    dtype = token_dtype(preparation.tokenize.tokenizer.info.vocab_size)
    with building(preparation.folder) as folder:
        # The small parts of validation are written again, into few shards.
        writer = SplitWriter(folder / "validation", dtype)
        for part in parts:
            writer.begin_source(part.source)
            for opened in part.validation_shards():
                writer.extend(opened.tokens, opened.ends, opened.num_bytes)
        shards = [shard for part in trained for shard in part.shards("train")]
        (folder / "train").mkdir()
        for number, (path, shard) in enumerate(shards):
            shard["file"] = f"data-{number:05d}-of-{len(shards):05d}.arrow"
            # Linked, not moved: a second try finds the tasks' shards again.
            try:
                os.link(path, folder / "train" / shard["file"])
            except OSError:  # a file system without links
                shutil.copyfile(path, folder / "train" / shard["file"])
        train = split_entry(folder / "train", [shard for _, shard in shards], dtype.name)
        splits = {"train": train, "validation": writer.finish()}
        np.save(folder / POSITIONS_FILE, np.concatenate([part.positions() for part in parts]))
        reports = preparation.cleaned.reports(results) if preparation.cleaned else {}
        tasks = preparation.bounded(survey).tokenize
        suggested = partial(workable_share, [tasks.folder(task) for source in survey for task in source.used])
        try:
            check_blocks(splits, preparation.data, preparation.sequence_length, suggested)
        except UserError:
            # If cleaning left too little, the reports say what it took out.
            if reports and show_progress:
                print(report_text(reports), file=sys.stderr)
            raise
        shutil.copytree(preparation.tokenize.tokenizer.output, folder / "tokenizer")
        manifest = _manifest(preparation, splits, parts, reports)
        manifest["validation_positions"] = checksum_of_file(folder / POSITIONS_FILE)
        complete(folder, manifest)
    return publish(preparation.folder, contains_earlier=preparation.goes_on)


def kept_text(kept: Path, data_root: Path) -> str:
    """Write the sentence about a data set whose place another one took."""
    goes_on = f"its runs go on with the recipe as it was, and {reading_options(kept, data_root)}"
    return f"the data set before it is kept in {kept}: {goes_on}"


def _train_parts(preparation: Preparation, survey: Survey) -> list[_SourcePart]:
    stage = preparation.bounded(survey).tokenize
    manifest = read_manifest(preparation.folder) if preparation.goes_on else None
    entries = manifest["splits"] if manifest else {}
    earlier = {name: TokenSplit(preparation.folder / name, entry) for name, entry in entries.items()}
    parts = []
    for number, (source, begun) in enumerate(zip(survey, preparation.begun, strict=False)):
        before = [_Stretch.of_begun(begun, number, earlier)] if begun else []
        parts.append(_SourcePart(number, [*before, *(_Stretch.of_task(stage, task) for task in source.used)]))
    return parts


def _validation_parts(preparation: Preparation) -> list[_SourcePart]:
    """List the texts of `data.validation`, whose sources are numbered behind the others."""
    stage, first = preparation.tokenize_validation, len(preparation.data.sources)
    if stage is None:
        return []
    done = [_Stretch.of_task(stage, number) for number in range(len(stage.outputs()))]
    return [
        _SourcePart(number, [task for task in done if task.result["source"] == number - first])
        for number in range(first, len(preparation.data.text_origins))
    ]


def _manifest(preparation: Preparation, splits: dict, parts: list[_SourcePart], reports: dict) -> dict:
    """Make the manifest: what the data set holds and came from, with counts, checksums, tokenizer and versions."""
    results = [result for part in parts for result in part.results]
    # Each text is read from its source once: by `Clean` if there is one, else by `Tokenize`.
    read = list(results)
    for texts in [preparation.cleaned, stage.texts if (stage := preparation.tokenize_validation) else None]:
        read += texts.clean.reports() if isinstance(texts, CleanedCorpus) and not texts.as_read else []
    entries, of_training = [], len(preparation.targets)
    for part in parts:
        held = {
            name: [shard for shard in entry["shards"] if shard["source"] == part.source]
            for name, entry in splits.items()
        }
        every = [shard for shards in held.values() for shard in shards]
        keys = {"documents": "documents", "tokens": "tokens", "text_bytes": "bytes"}
        counts_of = {key: sum(shard[name] for shard in every) for key, name in keys.items()}
        _, spec = preparation.data.text_origins[part.source]
        entries.append({"name": spec.called, **preparation.fingerprints[part.source], **counts_of})
        if any(preparation.targets) and part.source < of_training:
            # If the source was not read to its end, where to go on. The last task was run up to a bound.
            if part.results and (last := part.results[-1]["cut"]):
                cut = {name: sum(shard[name] for shard in held["train"]) for name in ("documents", "tokens")}
                entries[-1]["cut"] = {**cut, "last_document_tokens": last["last_document_tokens"]}
            entries[-1]["begun"] = part.whole_tasks(preparation.keys_of(part.source))
    own = entries[of_training:]
    return {
        **_identity(preparation, content_fingerprint(splits)),
        "encoding": _encoding(results),
        "sources": entries[:of_training],
        **({"validation_sources": own} if own else {}),
        "skipped": summed_skips(each["skipped"] for each in read),
        **reports,
        "splits": splits,
        # Of the packages that shape the bytes.
        "versions": {package: version(package) for package in ("numpy", "pyarrow", "tokenizers")},
    }


def _identity(preparation: Preparation, fingerprint: str) -> dict:
    return {
        "format": FORMAT,
        "name": preparation.data.name,
        "fingerprint": fingerprint,
        "origin": preparation.origin,
        "data": deciding_section(preparation.data.to_dict()),
        "consulted": preparation.consulted,
        "tokenizer": vars(preparation.tokenize.tokenizer.info),
    }


def _encoding(results: list[dict]) -> dict:
    """Say which encoder worked, and how many documents the reference has checked."""
    found = [result["encoding"] for result in results]
    backends = {backend for each in found for backend in each.get("backends", [each.get("backend")])}
    checked = sum(each["checked_documents"] for each in found)
    return {"backends": sorted(backends), "checked_documents": checked}
