"""Prepare the data section of a recipe as data/<name>/, unless it is there; or only count the tokens of its sources."""

import os
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pretraining.data.corpus import (
    CLEANING_KEYS,
    Corpus,
    FileSource,
    TextSource,
    open_sources,
    read_ahead,
    read_batches,
    summed_skips,
)
from pretraining.data.manifest import (
    COUNTED,
    check_blocks,
    data_differences,
    fitting_beside,
    read_manifest,
    read_positions,
    report_text,
    source_entries,
)
from pretraining.data.portions import lacking, may_hold_more, portions_of, targets_beside
from pretraining.data.preparation.execution import Execution, run_stages, submit_to_slurm
from pretraining.data.preparation.stage import run_task
from pretraining.data.progress import ProgressBar
from pretraining.data.publishing import is_half_published, preparation_lock
from pretraining.data.text_files import HOW_TO_READ, unread_note
from pretraining.data.tokenizer import check_vocabulary, refuse_missing_folder
from pretraining.errors import UserError, file_error, require
from pretraining.outside.schema import listed
from pretraining.recipe.data import Data, Source
from pretraining.recipe.recipe import Recipe

if TYPE_CHECKING:
    from pretraining.data.preparation.plan import Preparation


@dataclass(frozen=True)
class Outcome:
    """What became of a preparation: a data set, or jobs that will make it."""

    folder: Path
    data_root: Path
    """The folder of the command line: it holds the data set, or a link to it."""
    specs: list[Source]
    """`data.sources` of the recipe, whose names and weights may be others than when the data was prepared."""
    manifest: dict | None = None
    """None: `jobs` will make it."""
    kept_aside: Path | None = None
    """The new path of the data set whose place this one took."""
    jobs: tuple[str, ...] = ()
    """Ids of submitted jobs."""

    def to_dict(self) -> dict:
        """Summarize the outcome for a script, as JSON values."""
        if self.manifest is None:
            return {"jobs": self.jobs}
        splits, own = self.manifest["splits"], self.manifest.get("validation_sources", ())
        counts = {name: {key: split[key] for key in COUNTED} for name, split in splits.items()}
        num_tokens = max(1, sum(count["tokens"] for count in counts.values()))
        sources = []
        for spec, entry in zip(self.specs, self.manifest["sources"], strict=True):
            held = {"documents": entry["documents"], "tokens": entry["tokens"]}
            share = entry["tokens"] / num_tokens
            sources.append({"name": spec.called, **held, "share": share, "weight": spec.weight})
        return {
            "name": self.manifest["name"],
            "folder": str(self.folder),
            **counts,
            "sources": sources,
            "validation_sources": [{k: entry[k] for k in ("name", "documents", "tokens")} for entry in own],
            "vocab_size": self.manifest["tokenizer"]["vocab_size"],
            "bytes_per_token": sum(count["bytes"] for count in counts.values()) / num_tokens,
            "skipped": self.manifest["skipped"],
            "unigram_bits_per_byte": splits["validation"]["unigram_bits_per_byte"],
            "fingerprint": self.manifest["fingerprint"],
            "kept_aside": self.kept_aside and str(self.kept_aside),
        }

    def as_text(self) -> str:
        """Summarize the outcome for a person."""
        if self.manifest is None:
            submitted = f"submitted {len(self.jobs)} jobs: {', '.join(self.jobs)}"
            return f"{submitted}; the same command tells when the data is ready"
        summary = self.to_dict()
        lines = [f"data {summary['name']} is ready in {summary['folder']}"]
        for split in ("train", "validation"):
            counts = summary[split]
            lines.append(f"  {split:<11}{counts['documents']:>13,} documents {counts['tokens']:>15,} tokens")
        ids, ratio = summary["vocab_size"], summary["bytes_per_token"]
        lines.append(f"  tokenizer  {ids:>13,} ids       {ratio:>15.2f} bytes/token")
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in summary["skipped"].items())
        lines.append(f"  documents left out: {left_out}")
        bits = summary["unigram_bits_per_byte"]
        lines.append(f"  unigram entropy of all validation tokens {bits:.3f} bits per byte")
        if len(summary["sources"]) > 1:
            lines.append(f"  {'source':<24}{'documents':>14}{'tokens':>19}{'share':>9}  weight in a run")
            for source in summary["sources"]:
                counts = f"{source['documents']:>14,}{source['tokens']:>19,}{source['share']:>9.2%}"
                weight = "by size" if source["weight"] is None else f"{source['weight']:g}"
                lines.append(f"  {source['name'][:23]:<24}{counts}  {weight}")
        for own in summary["validation_sources"]:
            counts = f"{own['documents']:>13,} documents {own['tokens']:>15,} tokens"
            lines.append(f"  validates on {own['name'][:23]:<24}{counts}")
        if report := report_text(self.manifest):
            lines.append(report)
        if self.kept_aside is not None:
            from pretraining.data.preparation.finish import kept_text

            lines.append(kept_text(self.kept_aside, self.data_root))
        return "\n".join(lines)


def prepare_data(
    recipe: Recipe,
    data_root: Path,
    show_progress: bool = True,
    execution: Execution | None = None,
    replace: bool = False,
) -> Outcome:
    """Prepare the recipe's data section under `data_root`.

    Returns at once if the same data was prepared already. If less of it was, goes on from there. Checks that the
    tokenizer fits `recipe.model.vocab_size` and that each split holds a block of `recipe.sequence_length`. A finished
    data set that differs is refused. With `replace` the new one takes its place once it is finished, and the old one is
    kept beside it. Raises UserError if the section, the sources or the disk do not allow it; finished tasks are kept.
    """
    data, named = recipe.data.to_dict(), Path(data_root) / recipe.data.name
    # A rename would replace a link, not the folder that it leads to.
    folder = Path(os.path.realpath(named)) if named.is_symlink() else named
    if folder.is_dir() and any(folder.iterdir()) and read_manifest(folder) is None:
        what = "holds files that are no prepared data (there is no manifest.json)"
        raise UserError(f"{folder}: {what}; choose another data.name, or move them")
    sources = open_sources(recipe.data)
    fingerprints, portions = [source.fingerprint() for source in sources], portions_of(recipe)
    kept, jobs = None, ()
    try:
        manifest = _finished(named, data, fingerprints, replace)
        # Also if it is there: the lock finishes what a killed `publish` left half done.
        if manifest is None or lacking(manifest, portions) or is_half_published(folder):
            # Now, not after hours of work.
            if folder.is_mount():
                what = "a disk is mounted there, and a data set is renamed into its place"
                remedy = "give a folder of that disk to --data_dir, or choose another data.name"
                raise UserError(f"{folder}: {what}; {remedy}")
            _refuse_unreadable(recipe)
            with preparation_lock(folder) as kept:
                manifest = _finished(named, data, fingerprints, replace)  # another process may have made it
                if manifest is None or lacking(manifest, portions):
                    # numpy, tokenizers and pyarrow are needed from here on
                    from pretraining.data.preparation.plan import Preparation

                    if manifest and "validation_positions" in manifest:
                        read_positions(folder, manifest)  # now, not after hours of work
                    _note_unread(recipe.data, sources)
                    targets = targets_beside(manifest, portions) if manifest else portions
                    preparation = Preparation.of(recipe, sources, folder, fingerprints, targets, manifest)
                    replaced, jobs = _build(preparation, show_progress, execution or Execution())
                    # A killed `publish` may have kept one before.
                    kept = replaced or kept
                    manifest = None if jobs else read_manifest(folder)
    except (OSError, MemoryError) as error:
        # Any other fault is a bug, and keeps its traceback.
        raise file_error(error, folder) or error from error
    if manifest is not None:
        check_vocabulary(manifest["tokenizer"]["vocab_size"], recipe.model.vocab_size)
        # Also for data of an earlier run, as sequence length and model may be others now.
        check_blocks(manifest["splits"], recipe.data, recipe.sequence_length)
        if may_hold_more(manifest, portions):
            # Here, because it imports numpy.
            from pretraining.data.prepared import check_part

            check_part(recipe, folder, manifest)
    return Outcome(folder, Path(data_root), recipe.data.sources, manifest, kept, jobs)


def _refuse_unreadable(recipe: Recipe) -> None:
    """Raise UserError for a source or tokenizer that the hub lacks, or whose terms this account has not accepted.

    A hub that does not answer is passed over, since a copy may be here: reading reports a real fault.
    """
    asked = [(f"{key}.dataset", "dataset", spec.dataset) for key, spec in recipe.data.text_origins]
    if isinstance(recipe.data.tokenizer, str):
        refuse_missing_folder(recipe.data.tokenizer)
    for key, kind, name in [*asked, ("data.tokenizer", "model", recipe.data.tokenizer)]:
        # a folder is no name, nor is a tokenizer that is trained
        if not isinstance(name, str) or Path(name).expanduser().exists():
            continue
        hub = require("huggingface_hub", "text or a tokenizer of the hub")
        try:
            # a copy of earlier days is read without asking the hub
            if kind == "model" and isinstance(hub.try_to_load_from_cache(name, "tokenizer.json"), str):
                continue
            hub.auth_check(name, repo_type=kind)
        except hub.errors.GatedRepoError as error:
            page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
            login = (
                "" if hub.get_token() else ", then export HF_TOKEN=TOKEN of that account (or hf auth login)"
            )
            what = f"{name} is gated, and its terms are not accepted: accept them at {page}{login}"
            raise UserError(f"{key}: {what}, or name another that is open; nothing was read") from error
        except hub.errors.RepositoryNotFoundError as error:
            what = f"the hub has no {kind} {name} that this account may see; name one that is there"
            raise UserError(f"{key}: {what}, or a folder; nothing was read") from error
        except Exception:  # every way of being offline has a class of its own, and a path is no name
            continue


def _note_unread(data: Data, sources: list[TextSource]) -> None:
    """Say which files beside those that are read are not, so that no document is lost without a word."""
    notes = [
        unread_note(f"{key}.path {spec.path}", source.unread, len(source.files), HOW_TO_READ)
        for (key, spec), source in zip(data.text_origins, sources, strict=False)
        if isinstance(source, FileSource) and source.unread
    ]
    if data.decontaminate and data.decontaminate.folder:
        from pretraining.data.dedup.decontamination import note_of_sets

        notes += filter(None, [note_of_sets(data.decontaminate.folder)])
    for note in notes:
        print(note, file=sys.stderr, flush=True)


def _finished(folder: Path, data: dict, fingerprints: list[dict], replace: bool) -> dict | None:
    """Read the manifest of what is prepared already; None: to be made. UserError if it differs, unless `replace`."""
    manifest = read_manifest(folder)
    differing = prepared_differences(manifest, data, fingerprints) if manifest else []
    if differing and not replace:
        what = f"holds another data set, and runs made from it need it: {listed(differing)}"
        remedy = (
            "give the new one a data.name of its own, or add --replace, which keeps the old one beside it"
        )
        raise UserError(f"{folder}: {what}; {remedy}{fitting_beside(folder, data, fingerprints)}")
    return None if differing else manifest


def prepared_differences(manifest: dict, data: dict, fingerprints: list[dict]) -> list[str]:
    """List how finished data differs from what a data section asks for now, with `fingerprints` of its sources."""
    # Converted data has no sources to compare with.
    if "converted_from" not in manifest and len(source_entries(manifest)) == len(fingerprints):
        for now, before in zip(fingerprints, source_entries(manifest), strict=True):
            # The hub does not answer: assume that it still holds what was prepared from it before.
            if now.get("commit", "") is None and now["dataset"] == before.get("dataset"):
                now["commit"] = before.get("commit")
    return data_differences(manifest, data, fingerprints)


def _build(
    preparation: "Preparation", show_progress: bool, execution: Execution
) -> tuple[Path | None, tuple[str, ...]]:
    """Run the stages and publish, or submit them to a cluster; return the path of a kept data set, and the job ids."""
    from pretraining.data.arriving import arrived_path
    from pretraining.data.preparation.finish import finish, keep_arrived
    from pretraining.data.preparation.tokenizing import drop_wrong_tokens

    drop_wrong_tokens(preparation.work)
    if execution.executor == "slurm":
        return None, tuple(submit_to_slurm(preparation, execution))
    try:
        # Of an earlier preparation of this folder, perhaps of other text.
        arrived_path(preparation.folder).unlink(missing_ok=True)
        with ProgressBar("preparing", show_progress) as progress:
            run_stages(preparation, execution, progress, partial(keep_arrived, preparation))
        return finish(preparation, show_progress), ()
    except UserError as error:
        # Worth keeping only if a stage of many tasks has finished some of them.
        if any(len(stage.pending()) < len(stage.keys) > 1 for stage in preparation.stages):
            raise UserError(f"{error}; finished tasks are kept in {preparation.work}") from error
        shutil.rmtree(preparation.work, ignore_errors=True)
        raise


def count_data(recipe: Recipe, num_documents: int | None = None, show_progress: bool = True) -> dict:
    """Count documents, bytes of text and tokens of each source in `recipe.data`; no shard is written.

    Texts are counted as they are read, before filters and deduplication, or the first `num_documents` of each source.
    For each and for all: documents, text_bytes, tokens (EOS included), bytes_per_token, and compression: bytes of text
    for each byte on disk. Raises UserError as a preparation does.
    """
    # numpy, tokenizers and pyarrow are needed from here on
    from pretraining.data.encoder import Encoder
    from pretraining.data.preparation.tokenizing import MakeTokenizer

    data = recipe.data
    sources = open_sources(data)[: len(data.sources)]  # of training
    _note_unread(data, sources)
    with ProgressBar("counting", show_progress) as progress, tempfile.TemporaryDirectory() as folder:
        # A tokenizer that is to be trained is trained in the temporary folder, and is gone after the count.
        made_for = (data.tokenizer, recipe.model.vocab_size, data.validation_share, data.borders)
        stage = MakeTokenizer(Path(folder), Corpus.of(data, sources), *made_for)
        run_task(stage, 0, progress)
        # Empty and undecodable texts say nothing about the encoder.
        sample = [each.text for each in islice(sources[0].documents(), 20) if each.text]
        encoder = Encoder(stage.output, stage.info, data.encoder, sample, data.borders)
        if encoder.note and progress.shown:
            print(encoder.note, file=sys.stderr)
        progress.label("counting")
        rows, skips = [], []
        for number, source in enumerate(sources):
            skipped: dict[str, int] = {}
            documents = islice(source.documents(), num_documents)
            row = Counter(documents=0, text_bytes=0, tokens=0)
            # Reads the next batches while this one is encoded.
            for batch in read_ahead(read_batches(number, documents, skipped, data.skip_undecodable)):
                tokens, _ = encoder.encode(batch.texts, batch.wheres)
                num_bytes = sum(batch.num_bytes)
                row.update(documents=len(batch.texts), text_bytes=num_bytes, tokens=len(tokens))
                progress.add(len(batch.texts), num_bytes, len(tokens))
            rows.append(dict(row))
            skips.append(skipped)
    total = {key: sum(row[key] for row in rows) for key in rows[0]}
    for row in [*rows, total]:
        # max: a source without text has no tokens.
        row["bytes_per_token"] = row["text_bytes"] / max(1, row["tokens"])
        row["compression"] = row["bytes_per_token"] / encoder.dtype.itemsize
    return {
        "name": data.name,
        "encoder": encoder.backend.name,
        "documents_of_each_source": num_documents,
        "before_cleaning": any(getattr(data, key) for key in CLEANING_KEYS),
        "sources": [{"source": spec.called, **row} for spec, row in zip(data.sources, rows, strict=True)],
        "total": total,
        "skipped": summed_skips(skips),
    }


def counts_text(counts: dict) -> str:
    """Show what `count_data` found as a table."""
    limit = counts["documents_of_each_source"]
    lines = [f"data {counts['name']}" + (f", the first {limit:,} documents of each source" if limit else "")]
    lines.append(f"  {'source':<32}{'documents':>13}{'text bytes':>17}{'tokens':>16}{'bytes/token':>13}")
    for row in [*counts["sources"], {"source": "total", **counts["total"]}]:
        texts = f"{row['documents']:>13,}{row['text_bytes']:>17,}"
        tokens = f"{row['tokens']:>16,}{row['bytes_per_token']:>13.2f}"
        lines.append(f"  {row['source'][-31:]:<32}{texts}{tokens}")
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in counts["skipped"].items())
    lines.append(f"  documents left out: {left_out}")
    if counts["before_cleaning"]:
        lines.append("  counted as read: before filters, deduplication and decontamination")
    return "\n".join(lines)
