"""Finish a preparation: gather the tasks' shards into one data set, and write its manifest last."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from math import inf
from pathlib import Path

import numpy as np

from pretraining.data.arriving import ARRIVED_NAME, from_origin
from pretraining.data.checksums import checksum_of_file, content_fingerprint, digest_of
from pretraining.data.manifest import (
    FORMAT,
    MANIFEST_NAME,
    POSITIONS_FILE,
    check_blocks,
    deciding_section,
    entropy_bits,
    read_manifest,
    reading_options,
    report_text,
)
from pretraining.data.portions import rows_of
from pretraining.data.preparation.cleaning import CleanedCorpus, merged_reports
from pretraining.data.preparation.plan import Begun, Preparation, Survey
from pretraining.data.preparation.tokenizing import COUNTS_NAME, POSITIONS_NAME, SPLITS, SplitSizes
from pretraining.data.publishing import building, publish
from pretraining.data.shards import (
    SplitWriter,
    TokenSplit,
    open_shard,
    split_entry,
    summed_entry,
    token_dtype,
)
from pretraining.errors import UserError
from pretraining.runtime.durable_files import replacing


@dataclass(frozen=True)
class _SourcePart:
    """What the data set gets of one source: what was there before, then the outputs of tasks."""

    source: int
    done: list[tuple[Path, dict]]
    """The tasks: the folder of each one's output, and what it reports about it."""
    begun: Begun | None = None
    earlier: "_Earlier | None" = None
    """The data set that `begun` is about."""

    @property
    def results(self) -> list[dict]:
        return [result for _, result in self.done]

    def train_shards(self) -> Iterator[tuple[Path, dict]]:
        """List the shards of training, each with its entry."""
        if self.begun and self.earlier:
            shards = self.earlier.manifest["splits"]["train"]["shards"]
            of_source = [shard for shard in shards if shard["source"] == self.source]
            for shard in of_source[: self.begun.shards]:
                yield self.earlier.folder / "train" / shard["file"], dict(shard)
        for output, result in self.done:
            for shard in result["splits"]["train"]["shards"]:
                if shard["documents"]:
                    yield output / "train" / shard["file"], {**shard, "source": self.source}

    def positions(self) -> np.ndarray:
        """Join the places of the validation documents: [documents] int64."""
        positions, tokens = [np.empty(0, np.int64)], 0
        if self.begun and self.earlier:
            rows = rows_of(self.earlier.validation.shard_entries, self.source)
            before = np.load(self.earlier.folder / POSITIONS_FILE)[rows]
            positions.append(before[: self.begun.validation_documents])
            tokens = self.begun.tokens
        for output, result in self.done:
            positions.append(np.load(output / POSITIONS_NAME) + tokens)
            tokens += result["splits"]["train"]["tokens"]
        return np.concatenate(positions)

    def accounts(self) -> list[dict]:
        """List what was skipped, encoded and cleaned: {"skipped", "encoding", "cleaned"} of each stretch of tasks."""
        return [*([self.begun.to_dict()] if self.begun else []), *self.results]

    def whole_tasks(self, keys: list[list[str]]) -> Begun:
        """Sum up the tasks that are there whole, for a preparation that goes on from here."""
        whole = [result for result in self.results if not result["cut"]]
        accounts = [*([self.begun.to_dict()] if self.begun else []), *whole]
        train = [result["splits"]["train"] for result in whole]
        number = len(whole) + (self.begun.tasks if self.begun else 0)
        cleaned = [account["cleaned"] for account in accounts if "cleaned" in account]
        first = self.begun or Begun(0, "", 0, 0, 0, 0, 0, {}, {})
        return Begun(
            tasks=number,
            keys=digest_of(keys[:number]),
            documents=first.documents + sum(split["documents"] for split in train),
            tokens=first.tokens + sum(split["tokens"] for split in train),
            shards=first.shards + sum(bool(s["documents"]) for split in train for s in split["shards"]),
            largest_task=max([first.largest_task, *(split["tokens"] for split in train)]),
            validation_documents=first.validation_documents
            + sum(result["splits"]["validation"]["documents"] for result in whole),
            skipped=_summed([account["skipped"] for account in accounts]),
            encoding=_encoding(accounts),
            cleaned=merged_reports(cleaned) if cleaned else None,
        )


class _Earlier:
    """The data set in the place of the new one, which holds less of the same."""

    def __init__(self, folder: Path, manifest: dict):
        self.folder, self.manifest = folder, manifest

    @cached_property
    def validation(self) -> TokenSplit:
        return TokenSplit(self.folder / "validation", self.manifest["splits"]["validation"])

    def add_validation(self, source: int, count: int, writer: SplitWriter) -> np.ndarray:
        """Write the first `count` documents of validation of a source; return their tokens."""
        read = []
        for number, entry in enumerate(self.validation.shard_entries):
            if entry["source"] == source and count:
                shard, documents = self.validation.map_anew(number), min(count, entry["documents"])
                ends = shard.ends[:documents]
                tokens = shard.tokens[: ends[-1] if documents else 0]
                writer.extend(tokens, ends, shard.num_bytes[:documents])
                read.append(tokens)
                count -= documents
        return np.concatenate(read) if read else np.empty(0, self.validation.dtype)


def keep_arrived(preparation: Preparation) -> None:
    """Write down what a run that trains meanwhile can read: the first tasks that have finished without a gap."""
    if preparation.data.shuffle_blocks is None:
        return
    sources = []
    for source in preparation.survey().sources:
        gap = min(source.missing, default=inf)
        sources.append(replace(source, used=[task for task in source.used if task < gap]))
        # The stream goes on with the next source only where one is whole.
        if source.missing:
            break
    trained = _train_parts(preparation, Survey(sources))
    train = [{**shard, "path": str(path)} for part in trained for path, shard in part.train_shards()]
    validation = [
        {**shard, "source": part.source, "path": str(output / "validation" / shard["file"])}
        for part in _validation_parts(preparation)
        for output, result in part.done
        for shard in result["splits"]["validation"]["shards"]
        if shard["documents"]
    ]
    tokenizer, data = preparation.tokenize.tokenizer, preparation.data
    info = tokenizer.describe(tokenizer.output)
    manifest = {
        "format": FORMAT,
        "name": data.name,
        "fingerprint": from_origin(preparation.origin),
        "origin": preparation.origin,
        "data": deciding_section(data.to_dict()),
        "tokenizer": vars(info),
        "tokenizer_folder": str(tokenizer.output),
        "splits": {
            name: summed_entry(shards, token_dtype(info.vocab_size).name)
            for name, shards in {"train": train, "validation": validation}.items()
        },
    }
    with replacing(preparation.work / ARRIVED_NAME) as file:
        json.dump(manifest, file)


def finish(preparation: Preparation, show_progress: bool = False) -> Path | None:
    """Gather the shards, write the manifest, and put the data set in its place.

    Returns the path under which an earlier data set is kept, if there was another one. Raises UserError if a source has
    changed, a task has not finished, the corpus is empty, or a split is too small for one block.
    """
    # A source that changed meanwhile would give a data set of two versions.
    for corpus in filter(None, [preparation.corpus, preparation.validation]):
        corpus.check_unchanged()
    survey = preparation.survey()
    if missing := survey.missing:
        raise UserError(
            f"{preparation.work}: {len(missing)} tasks of the stage 'tokenize' have not finished (the first: "
            f"{missing[0]}); run the same command again: only they are repeated"
        )
    trained = _train_parts(preparation, survey)
    parts = [*trained, *_validation_parts(preparation)]
    results = [result for part in trained for result in part.results]
    has_text = any(entry["documents"] for result in results for entry in result["splits"].values())
    if not has_text and not preparation.goes_on:
        raise preparation.texts.is_empty(_summed([result["skipped"] for result in results]))
    with building(preparation.folder) as folder:
        validation, counts = _join_validation(parts, results, folder / "validation")
        splits = {"train": _link_shards(trained, results, folder / "train"), "validation": validation}
        np.save(folder / POSITIONS_FILE, np.concatenate([part.positions() for part in parts]))
        accounts = [account for part in trained for account in part.accounts()]
        reports = preparation.cleaned.reports(accounts) if preparation.cleaned else {}
        sizes = SplitSizes.joined([output for part in trained for output, _ in part.done])
        try:
            check_blocks(splits, preparation.data, preparation.sequence_length, sizes.workable_share)
        except UserError:
            # If cleaning left too little, the reports say what it took out.
            if reports and show_progress:
                print(report_text(reports), file=sys.stderr)
            raise
        shutil.copytree(preparation.tokenize.tokenizer.output, folder / "tokenizer")
        with replacing(folder / "dataset_dict.json") as file:
            json.dump({"splits": list(SPLITS)}, file)
        manifest = _manifest(preparation, splits, parts, counts, reports)
        manifest["validation_positions"] = checksum_of_file(folder / POSITIONS_FILE)
        # Last: where a manifest is, the data set is complete.
        with replacing(folder / MANIFEST_NAME) as file:
            file.write(json.dumps(manifest, indent=2) + "\n")
    return publish(preparation.folder, contains_earlier=preparation.goes_on)


def kept_text(kept: Path, data_root: Path) -> str:
    """Write the sentence about a data set whose place another one took."""
    options = reading_options(kept, data_root)
    return (
        f"the data set before it is kept in {kept}: its runs go on with the recipe as it was, and {options}"
    )


def _train_parts(preparation: Preparation, survey: Survey) -> list[_SourcePart]:
    """List what there is of each source."""
    stage = preparation.bounded(survey.bounds).tokenize
    manifest = read_manifest(preparation.folder) if preparation.goes_on else None
    earlier = _Earlier(preparation.folder, manifest) if manifest else None
    parts = []
    for number, source in enumerate(survey.sources):
        done = [(stage.folder(task), stage.result(task)) for task in source.used]
        parts.append(_SourcePart(number, done, preparation.begun[number], earlier))
    return parts


def _validation_parts(preparation: Preparation) -> list[_SourcePart]:
    """List the texts of `data.validation`, whose sources are numbered behind the others."""
    stage, first = preparation.tokenize_validation, len(preparation.data.sources)
    if stage is None:
        return []
    done = [(folder, stage.result(number)) for number, folder in enumerate(stage.outputs())]
    return [
        _SourcePart(number, [task for task in done if task[1]["source"] == number - first])
        for number in range(first, len(preparation.data.text_origins))
    ]


def _summed(skips: list[dict]) -> dict[str, int]:
    return {reason: sum(skip.get(reason, 0) for skip in skips) for reason in ("undecodable", "empty")}


def _link_shards(parts: list[_SourcePart], results: list[dict], target: Path) -> dict:
    """Give the shards of train their final names, by links."""
    shards = [shard for part in parts for shard in part.train_shards()]
    target.mkdir()
    for number, (path, shard) in enumerate(shards):
        shard["file"] = f"data-{number:05d}-of-{len(shards):05d}.arrow"
        # Linked, not moved: a second try finds the tasks' shards again.
        try:
            os.link(path, target / shard["file"])
        except OSError:  # a file system without links
            shutil.copyfile(path, target / shard["file"])
    return split_entry(target, [shard for _, shard in shards], results[0]["splits"]["train"]["dtype"])


def _join_validation(parts: list[_SourcePart], results: list[dict], target: Path) -> tuple[dict, np.ndarray]:
    """Write the small parts of validation again, into few shards; count how often each id [vocab_size] occurs."""
    dtype = np.dtype(results[0]["splits"]["validation"]["dtype"])
    writer = SplitWriter(target, dtype)
    counts = np.sum([np.load(output / COUNTS_NAME) for part in parts for output, _ in part.done], axis=0)
    for part in parts:
        writer.begin_source(part.source)
        if part.begun and part.earlier:
            tokens = part.earlier.add_validation(part.source, part.begun.validation_documents, writer)
            counts += np.bincount(tokens, minlength=len(counts))
        for output, result in part.done:
            for entry in result["splits"]["validation"]["shards"]:
                if not entry["documents"]:
                    continue
                shard = open_shard(output / "validation" / entry["file"], entry, dtype)
                writer.extend(shard.tokens, shard.ends, shard.num_bytes)
    return writer.finish(), counts


def _manifest(
    preparation: Preparation, splits: dict, parts: list[_SourcePart], counts: np.ndarray, reports: dict
) -> dict:
    """Make the manifest: what the data set holds and came from, with counts, checksums, tokenizer and versions."""
    # What the tokens cost by their frequencies alone: a model must be better than that.
    bits_per_byte = entropy_bits(counts) / splits["validation"]["bytes"]
    splits["validation"]["unigram_bits_per_byte"] = round(bits_per_byte, 6)
    data, tokenizer = preparation.data, preparation.tokenize.tokenizer
    accounts = [account for part in parts for account in part.accounts()]
    # Each text is read from its source once: by `Clean` if there is one, else by `Tokenize`.
    skips = [account["skipped"] for account in accounts]
    for texts in [preparation.cleaned, stage.texts if (stage := preparation.tokenize_validation) else None]:
        skips += texts.skipped() if isinstance(texts, CleanedCorpus) else []
    entries = [_source(preparation, part, splits) for part in parts]
    own = entries[len(data.sources) :]
    return {
        "format": FORMAT,
        "name": data.name,
        "fingerprint": content_fingerprint(splits),
        "origin": preparation.origin,
        "data": deciding_section(data.to_dict()),
        "consulted": preparation.consulted,
        "tokenizer": vars(tokenizer.describe(tokenizer.output)),
        "encoding": _encoding(accounts),
        "sources": entries[: len(data.sources)],
        **({"validation_sources": own} if own else {}),
        "skipped": _summed(skips),
        **reports,
        "splits": splits,
        # Of the packages that shape the bytes.
        "versions": {package: version(package) for package in ("numpy", "pyarrow", "tokenizers")},
    }


def _source(preparation: Preparation, part: _SourcePart, splits: dict) -> dict:
    """Describe a source: name, fingerprint, counts, and if it was not read to its end, where to go on."""
    shards = {
        name: [shard for shard in entry["shards"] if shard["source"] == part.source]
        for name, entry in splits.items()
    }
    every = [shard for own in shards.values() for shard in own]
    counts = {name: sum(shard[name] for shard in every) for name in ("documents", "tokens")}
    counts["text_bytes"] = sum(shard["bytes"] for shard in every)
    _, spec = preparation.data.text_origins[part.source]
    entry = {"name": spec.called, **preparation.fingerprints[part.source], **counts}
    if not any(preparation.targets) or part.source >= len(preparation.targets):
        return entry
    # The last task was run up to a bound.
    if part.done and (last := part.results[-1]["cut"]):
        cut = {name: sum(shard[name] for shard in shards["train"]) for name in ("documents", "tokens")}
        entry["cut"] = {**cut, "last_document_tokens": last["last_document_tokens"]}
    return {**entry, "begun": part.whole_tasks(preparation.keys_of(part.source)).to_dict()}


def _encoding(accounts: list[dict]) -> dict:
    """Say which encoder worked, and how many documents the reference has checked."""
    found = [account["encoding"] for account in accounts]
    backends = {backend for each in found for backend in each.get("backends", [each.get("backend")])}
    return {
        "backends": sorted(backends),
        "checked_documents": sum(each["checked_documents"] for each in found),
    }
