"""Finish a preparation: gather the tasks' shards into one data set, and write its manifest last."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from math import inf
from pathlib import Path

import numpy as np

from pretraining.data.arriving import ARRIVED_NAME, ORIGIN
from pretraining.data.checksums import checksum_of_file, content_fingerprint, digest_of
from pretraining.data.corpus import summed_skips
from pretraining.data.manifest import (
    FORMAT,
    POSITIONS_FILE,
    check_blocks,
    deciding_section,
    read_manifest,
    reading_options,
    report_text,
)
from pretraining.data.portions import rows_of
from pretraining.data.preparation.cleaning import CleanedCorpus, merged_reports
from pretraining.data.preparation.plan import Begun, Preparation, Survey
from pretraining.data.preparation.tokenizing import POSITIONS_NAME, workable_share
from pretraining.data.publishing import building, publish
from pretraining.data.shards import Shard, SplitWriter, TokenSplit, split_entry, summed_entry, token_dtype
from pretraining.data.tools.finished import complete
from pretraining.errors import UserError
from pretraining.runtime.durable_files import replacing


@dataclass(frozen=True)
class _SourcePart:
    """What the data set gets of one source: what was there before, then the outputs of tasks."""

    source: int
    done: list[tuple[Path, dict]]
    """The tasks: the folder of each one's output, and what it reports about it."""
    begun: Begun = field(default_factory=Begun)
    earlier: dict[str, TokenSplit] = field(default_factory=dict)
    """The splits of the data set that `begun` is about: that in the place of the new one, which holds less of the
    same."""

    def shards(self, split: str) -> Iterator[tuple[Path, dict]]:
        """List the shards of the tasks, each with its entry; before those of training, what is there already."""
        if self.begun and split == "train":
            train = self.earlier["train"]
            of_source = [shard for shard in train.shard_entries if shard["source"] == self.source]
            for shard in of_source[: self.begun.shards]:
                yield train.folder / shard["file"], dict(shard)
        for output, result in self.done:
            for shard in result["splits"][split]["shards"]:
                if shard["documents"]:
                    yield output / split / shard["file"], {**shard, "source": self.source}

    def validation_shards(self) -> Iterator[tuple[Shard, int]]:
        """Open the shards of validation, each with the number of its first documents that count."""
        if self.begun:
            split, left = self.earlier["validation"], self.begun.validation_documents
            for number, entry in enumerate(split.shard_entries):
                if entry["source"] == self.source and left:
                    yield split.map_anew(number), min(left, entry["documents"])
                    left -= min(left, entry["documents"])
        for output, result in self.done:
            split = TokenSplit(output / "validation", result["splits"]["validation"])
            for number, entry in enumerate(split.shard_entries):
                if entry["documents"]:
                    yield split.map_anew(number), entry["documents"]

    def positions(self) -> np.ndarray:
        """Join the places of the validation documents: [documents] int64."""
        positions, tokens = [np.empty(0, np.int64)], 0
        if self.begun:
            validation = self.earlier["validation"]
            rows = rows_of(validation.shard_entries, self.source)
            before = np.load(validation.folder.parent / POSITIONS_FILE)[rows]
            positions.append(before[: self.begun.validation_documents])
            tokens = self.begun.tokens
        for output, result in self.done:
            positions.append(np.load(output / POSITIONS_NAME) + tokens)
            tokens += result["splits"]["train"]["tokens"]
        return np.concatenate(positions)

    def accounts(self, cut_too: bool = True) -> list[dict]:
        """List what was skipped, encoded and cleaned: {"skipped", "encoding", "cleaned"} of each stretch of tasks."""
        results = [result for _, result in self.done if cut_too or not result["cut"]]
        return [*([self.begun.to_dict()] if self.begun else []), *results]

    def whole_tasks(self, keys: list[list[str]]) -> Begun:
        """Sum up the tasks that are there whole, for a preparation that goes on from here."""
        whole = [result["splits"] for _, result in self.done if not result["cut"]]
        accounts, first = self.accounts(cut_too=False), self.begun
        train, number = [splits["train"] for splits in whole], len(whole) + first.tasks
        held_out = sum(splits["validation"]["documents"] for splits in whole)
        cleaned = [account["cleaned"] for account in accounts if "cleaned" in account]
        return Begun(
            tasks=number,
            keys=digest_of(keys[:number]),
            documents=first.documents + sum(split["documents"] for split in train),
            tokens=first.tokens + sum(split["tokens"] for split in train),
            shards=first.shards + sum(bool(s["documents"]) for split in train for s in split["shards"]),
            largest_task=max([first.largest_task, *(split["tokens"] for split in train)]),
            validation_documents=first.validation_documents + held_out,
            skipped=summed_skips(each["skipped"] for each in accounts),
            encoding=_encoding(accounts),
            cleaned=merged_reports(cleaned) if cleaned else None,
        )


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

    Returns the path under which an earlier data set is kept, if there was another one. Raises UserError if a source has
    changed, a task has not finished, the corpus is empty, or a split is too small for one block.
    """
    # A source that changed meanwhile would give a data set of two versions.
    for corpus in filter(None, [preparation.corpus, preparation.validation]):
        for source in corpus.sources:
            source.check_unchanged()
    survey = preparation.survey()
    preparation.tokenize.refuse(survey.missing)
    trained = _train_parts(preparation, survey)
    parts = [*trained, *_validation_parts(preparation)]
    results = [result for part in trained for _, result in part.done]
    has_text = any(entry["documents"] for result in results for entry in result["splits"].values())
    if not has_text and not preparation.goes_on:
        raise preparation.texts.is_empty(summed_skips(each["skipped"] for each in results))
    dtype = token_dtype(preparation.tokenize.tokenizer.info.vocab_size)
    with building(preparation.folder) as folder:
        # The small parts of validation are written again, into few shards.
        writer = SplitWriter(folder / "validation", dtype)
        for part in parts:
            writer.begin_source(part.source)
            for opened, documents in part.validation_shards():
                writer.extend(opened.tokens, opened.ends[:documents], opened.num_bytes[:documents])
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
        accounts = [account for part in trained for account in part.accounts()]
        reports = preparation.cleaned.reports(accounts) if preparation.cleaned else {}
        outputs = [output for part in trained for output, _ in part.done]
        suggested = partial(workable_share, outputs)
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
    done = [[(stage.folder(task), stage.result(task)) for task in source.used] for source in survey]
    return [_SourcePart(n, tasks, preparation.begun[n], earlier) for n, tasks in enumerate(done)]


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


def _manifest(preparation: Preparation, splits: dict, parts: list[_SourcePart], reports: dict) -> dict:
    """Make the manifest: what the data set holds and came from, with counts, checksums, tokenizer and versions."""
    accounts = [account for part in parts for account in part.accounts()]
    # Each text is read from its source once: by `Clean` if there is one, else by `Tokenize`.
    read = list(accounts)
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
            if part.done and (last := part.done[-1][1]["cut"]):
                cut = {name: sum(shard[name] for shard in held["train"]) for name in ("documents", "tokens")}
                entries[-1]["cut"] = {**cut, "last_document_tokens": last["last_document_tokens"]}
            entries[-1]["begun"] = part.whole_tasks(preparation.keys_of(part.source)).to_dict()
    own = entries[of_training:]
    return {
        **_identity(preparation, content_fingerprint(splits)),
        "encoding": _encoding(accounts),
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


def _encoding(accounts: list[dict]) -> dict:
    """Say which encoder worked, and how many documents the reference has checked."""
    found = [account["encoding"] for account in accounts]
    backends = {backend for each in found for backend in each.get("backends", [each.get("backend")])}
    checked = sum(each["checked_documents"] for each in found)
    return {"backends": sorted(backends), "checked_documents": checked}
