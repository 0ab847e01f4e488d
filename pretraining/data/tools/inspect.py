"""`inspect` and `stats`: show documents as text, and what a block or sample is made of; count documents and tokens."""

from collections import Counter
from pathlib import Path

import numpy as np

from pretraining.data.documents import Stretch, cuts_of_split
from pretraining.data.finished import FinishedData, SplitDocuments, count_tokens, open_finished, source_names
from pretraining.data.manifest import COUNTED, data_differences, entropy_bits, num_shard_bytes, source_entries
from pretraining.data.packed_dataset import build_training_dataset
from pretraining.data.prepared import open_folder, preparing_command
from pretraining.data.progress import ProgressBar
from pretraining.errors import UserError
from pretraining.outside.masking import escaped
from pretraining.outside.schema import listed
from pretraining.recipe.recipe import Recipe

SEARCH_BATCH = 256
"""Documents that a search decodes at once."""

SHOWN_STRETCHES = 4
"""Places of a packed block that its heading names; all its documents are shown."""

PERCENTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


class Inspection:
    """One split of a data set with the tokenizer that turns its tokens back into text."""

    def __init__(self, folder: Path, split: str = "train"):
        self.data = open_finished(folder)
        self.split, self.decoder = self.data.split(split), self.data.decoder()

    def document(self, number: int) -> dict:
        """Return place and text of one document; UserError if there is no such number."""
        _check_range("document", number, self.split.num_documents, self.split.name)
        document = self.split.document(number)
        return {**document.place(), "text": self._text(document.tokens)}

    def search(self, wanted: str, count: int) -> list[dict]:
        """Find the first `count` documents with `wanted` in their text; decodes from the start of the split."""
        found: list[dict] = []
        for first in range(0, self.split.num_documents, SEARCH_BATCH):
            numbers = range(first, min(first + SEARCH_BATCH, self.split.num_documents))
            documents = [self.split.document(number) for number in numbers]
            # tokenizers decodes the documents of a batch in parallel.
            ids = [self._ids(document.tokens) for document in documents]
            texts = self.decoder.decode_batch(ids, skip_special_tokens=False)
            read = zip(documents, texts, strict=True)
            found += [{**document.place(), "text": text} for document, text in read if wanted in text]
            if len(found) >= count:
                break
        return found[:count]

    def block(self, number: int, sequence_length: int) -> dict:
        """Describe block `number` (`sequence_length` inputs and one more target) and each document's part in it."""
        num_blocks = self.split.num_blocks(sequence_length)
        _check_range("block", number, num_blocks, self.split.name)
        start = number * sequence_length
        whole = self._made_of(self.split, [(start, start + sequence_length)])
        return {"block": number, "num_blocks": num_blocks, **whole}

    def _made_of(self, split: SplitDocuments, stretches: list[Stretch]) -> dict:
        """Describe a block of these stretches of the stream and the token after them, and each document's part.

        split: what is read of the data set, perhaps a part. Tokens are counted in it, documents in the whole.
        """
        parts, length = [], 0
        for place, (start, stop) in enumerate(stretches, 1):
            # Only the last stretch has the token after it, the target of the last input.
            end = stop + 1 if place == len(stretches) else stop
            for document in split.between(start, end):
                ends = max(start, document.start), min(end, document.start + len(document.tokens))
                inside = [each - document.start for each in ends]
                inner = {"document_tokens": inside, "block_tokens": [each - start + length for each in ends]}
                number = self.split.number_of(document.shard, document.row)
                text = self._text(document.tokens[slice(*inside)])
                parts.append({**document.place(), "number": number, **inner, "text": text})
            length += stop - start
        block = {"split": self.split.name, "sequence_length": length}
        return {**block, "stretches": [list(stretch) for stretch in stretches], "documents": parts}

    def sample(self, number: int, recipe: Recipe) -> dict:
        """Describe the block that a run of `recipe` reads as sample `number`, with its step and epoch."""
        manifest = self.data.manifest
        # No recipe section made converted data, so there is nothing to compare.
        differing = [] if "converted_from" in manifest else data_differences(manifest, recipe.data.to_dict())
        if differing:
            what = f"not the data that recipe {recipe.name!r} trains on: {listed(differing)}"
            raise UserError(f"{self.data.folder}: {what}; give the folder of its data.name")
        if self.split.name != "train":
            what = "a run reads its samples from train; --block shows blocks of other splits"
            raise UserError(f"--sample: {what}")
        if not 0 <= number < recipe.most_samples:
            raise UserError(f"--sample {number:,}: the run has {recipe.most_samples:,}, counted from 0")
        length = recipe.sequence_length
        # A split that is shorter than one block has no samples.
        _check_range("block", 0, self.split.num_blocks(length), self.split.name)
        # As a run does: what it reads may be a part of what is there.
        prepared = open_folder(recipe, self.data.folder, preparing_command(recipe, self.data.folder.parent))
        prepared = prepared.for_run(recipe)
        entry = prepared.manifest["splits"]["train"]
        split = SplitDocuments(self.data.folder, "train", entry, self.split.sources)
        dataset = build_training_dataset(prepared, recipe, number, 1)
        source, stretches = dataset.place(int(dataset.block_numbers([0])[0]))
        draw, num_blocks = number, dataset.num_blocks
        if prepared.mixture:
            draw = int(prepared.mixture.interleaving.draws(np.array([number]))[1][0])
            num_blocks = prepared.mixture.num_blocks[source]
        # The stretches count from the start of their source, `between` from the start of the split.
        before = sum(split.num_tokens for split in dataset.splits[:source])
        where = {
            "sample": number,
            # Steps count from 1, samples and epochs (of a mixture: those of the sample's source) from 0.
            "step": recipe.step_sizes.steps_within(number * length) + 1,
            "epoch": draw // num_blocks,
            "recipe": recipe.name,
        }
        return {
            **where,
            **self._made_of(split, [(before + start, before + stop) for start, stop in stretches]),
        }

    def _text(self, tokens) -> str:
        return self.decoder.decode(self._ids(tokens), skip_special_tokens=False)

    def _ids(self, tokens) -> list[int]:
        """Return the ids without the special tokens around the document."""
        ids, (closing, opening) = tokens.tolist(), self.data.borders
        start = int(bool(ids) and ids[0] == opening)
        return ids[start:-1] if len(ids) > start and ids[-1] == closing else ids[start:]


def _check_range(what: str, number: int, count: int, split: str) -> None:
    if count == 0:
        raise UserError(f"{split} has no {what}; use a shorter sequence length or another --split")
    if not 0 <= number < count:
        raise UserError(f"--{what} {number}: {split} has {count:,}, counted from 0 to {count - 1:,}")


def document_text(document: dict, max_chars: int, note: str = "") -> str:
    """Format a document, or its part in a block, for a reader; the text is cut to `max_chars` characters (0: whole)."""
    text = document["text"]
    shown = text[:max_chars] if max_chars else text
    more = f" [{len(text) - len(shown):,} more characters]" if len(shown) < len(text) else ""
    where = f"source {document['source']}, {document['shard']} row {document['row']:,}"
    size = f"{document['tokens']:,} tokens, {document['num_bytes']:,} bytes"
    head = f"[{document['split']} document {document['number']:,}: {size}, {where}]"
    return f"{head}\n{note}{escaped(shown)}{more}"


def block_text(block: dict, max_chars: int) -> str:
    """Format a block for a reader: its place, then each document's part."""
    lines, name = [], "a block"
    if "sample" in block:
        number, recipe = f"sample {block['sample']:,}", f"of recipe {block['recipe']}"
        lines.append(f"{number} {recipe}: step {block['step']:,}, epoch {block['epoch']:,}")
    if "block" in block:
        name = f"block {block['block']:,} of {block['num_blocks']:,} in sequence"
    stretches = [f"{start:,} to {stop - 1:,}" for start, stop in block["stretches"]]
    places = ", ".join(stretches[:SHOWN_STRETCHES])
    if len(stretches) > SHOWN_STRETCHES:
        places += f" and {len(stretches) - SHOWN_STRETCHES} more stretches"
    size = f"{block['sequence_length']:,} inputs and one more target"
    parts = f"parts of {len(block['documents']):,} documents"
    lines.append(f"{block['split']}, {name}: tokens {places} of the stream ({size}), {parts}")
    for part in block["documents"]:
        (first, last), (begin, end) = part["document_tokens"], part["block_tokens"]
        note = f"[its tokens {first:,} to {last - 1:,} are the block's {begin:,} to {end - 1:,}]\n"
        lines += ["", document_text(part, max_chars, note)]
    return "\n".join(lines)


def measure_data(
    folder: Path,
    with_tokens: bool = True,
    top: int = 10,
    show_progress: bool = False,
    sequence_length: int | None = None,
) -> dict:
    """Measure counts, lengths and token frequencies of the data set in `folder`, as JSON values.

    sequence_length: also count the documents that the ends of blocks cut (`cut_shares`). Without tokens only the
    manifest and the documents' ends are read, which takes seconds at any size.
    """
    data = open_finished(folder)
    size = num_shard_bytes(data.manifest)
    # Without tokens no shard is read as a whole, and there is no progress to show.
    with ProgressBar("measuring", show_progress and with_tokens, size) as progress:
        counted = top if with_tokens else None
        splits = {name: _measure_split(data, name, counted, progress) for name in data.split_names}
    if sequence_length is not None:
        splits["train"]["cuts"] = cuts_of_split(data.split("train"), sequence_length)
    num_tokens = sum(split["tokens"] for split in splits.values())
    named = zip(source_names(data.manifest), source_entries(data.manifest), strict=True)
    keys = ("documents", "tokens", "text_bytes")
    return {
        "folder": str(folder),
        "name": data.manifest["name"],
        "fingerprint": data.manifest["fingerprint"],
        "vocab_size": data.manifest["tokenizer"]["vocab_size"],
        "disk_bytes": size,
        "disk_bytes_per_token": size / max(1, num_tokens),
        "splits": splits,
        "sources": [{"name": name, **{k: entry[k] for k in keys if k in entry}} for name, entry in named],
    }


def _measure_split(data: FinishedData, name: str, top: int | None, progress: ProgressBar) -> dict:
    """Measure one split; top: how many tokens to list at each end, None to count none."""
    split, entry = data.split(name), data.manifest["splits"][name]
    measured = {key: entry[key] for key in COUNTED}
    measured["shards"] = len(split.shard_entries)
    measured["bytes_per_token"] = entry["bytes"] / max(1, entry["tokens"])
    by_source: dict[str, dict] = {}
    for shard_entry in split.shard_entries:
        counts = by_source.setdefault(split.source_of(shard_entry), dict.fromkeys(COUNTED, 0))
        for key in COUNTED:
            counts[key] += shard_entry[key]
    measured["by_source"] = by_source
    # A split may be empty: then there are no percentiles.
    if split.num_documents:
        # Only the ends are read here, and not the tokens. The EOS counts. Held are as many numbers as lengths differ.
        lengths: Counter[int] = Counter()
        for _, shard in split.shards():
            found, times = np.unique(np.diff(shard.ends, prepend=0), return_counts=True)
            lengths.update(dict(zip(found.tolist(), times.tolist(), strict=True)))
        values, weights = list(lengths), list(lengths.values())
        # The smallest length that at least this share of the documents do not exceed.
        ends = np.quantile(values, PERCENTILES, method="inverted_cdf", weights=weights).tolist()
        measured["document_tokens"] = {
            "mean": split.num_tokens / split.num_documents,
            "min": min(values),
            **{f"p{100 * share:g}": end for share, end in zip(PERCENTILES, ends, strict=True)},
        }
    if top is not None:
        counts = count_tokens(split, data.manifest["tokenizer"]["vocab_size"], progress)
        measured["token_frequencies"] = _frequencies(data, counts, entry["bytes"], top)
    return measured


def _frequencies(data: FinishedData, counts: np.ndarray, num_bytes: int, top: int) -> dict:
    eos, decoder = data.manifest["tokenizer"]["eos_token_id"], data.decoder()
    bits, total = entropy_bits(counts), max(1, int(counts.sum()))
    # Stable: of equally frequent ids the smaller one comes first, at every run.
    order = np.argsort(-counts, kind="stable")
    used = order[: int((counts > 0).sum())]

    def described(ids: np.ndarray) -> list[dict]:
        rows = []
        for token in ids.tolist():
            text = decoder.decode([token], skip_special_tokens=False)
            # A replacement character shows that a character was cut: then its spelling in the vocabulary.
            text = f"<{decoder.id_to_token(token)}>" if "�" in text else text
            count = int(counts[token])
            rows.append({"id": token, "text": text, "count": count, "share": count / total})
        return rows

    return {
        "unigram_bits_per_token": bits / total,
        "unigram_bits_per_byte": bits / max(1, num_bytes),
        "eos_share": int(counts[eos]) / total,
        "unused_ids": int((counts == 0).sum()),
        "used_once": int((counts == 1).sum()),
        "most_frequent": described(used[:top]),
        # Not those that are listed as most frequent, if there are few ids.
        "rarest": described(used[top:][-top:]),
    }


def stats_text(measured: dict) -> str:
    size = f"{measured['disk_bytes']:,} bytes of shards, {measured['disk_bytes_per_token']:.3f} bytes on disk"
    lines = [f"{measured['name']} in {measured['folder']}: {size} per token, {measured['vocab_size']:,} ids"]
    for name, split in measured["splits"].items():
        lines += ["", f"{name}: {split['shards']:,} shards"]
        lines.append(_count_line("all", split["documents"], split["tokens"], split["bytes"]))
        # With one source this would repeat the line above.
        if len(split["by_source"]) > 1:
            lines += [_count_line(source, *counts.values()) for source, counts in split["by_source"].items()]
        if lengths := split.get("document_tokens"):
            listed = "  ".join(f"{key} {value:,}" for key, value in lengths.items() if key != "mean")
            lines.append(f"  tokens per document     mean {lengths['mean']:,.1f}  {listed}")
        if (cuts := split.get("cuts")) is not None and not cuts["documents"]:
            lines.append("  blocks of that length   hold no whole document, or there is none")
        elif cuts is not None:
            # Both ways to fill blocks, so that a recipe can choose.
            for packing, head in (("in_sequence", "read in sequence"), ("best_fit", "packed by best fit")):
                cut = f"{cuts[packing]['cut']:.2%} of the {cuts['documents']:,} documents that fit into one"
                cropped = f"{cuts[packing]['cropped']:.2%} of their tokens come after a cut"
                lines.append(f"  {head:<24}blocks' ends cut {cut}, {cropped}")
        if found := split.get("token_frequencies"):
            ends = (found["most_frequent"], found["rarest"])
            most, rarest = ("  ".join(f"{t['text']!r} {t['count']:,}" for t in end) for end in ends)
            bits = [f"{found[f'unigram_bits_per_{unit}']:.4f} bits per {unit}" for unit in ("token", "byte")]
            lines += [
                f"  unigram entropy         {', '.join(bits)}",
                f"  EOS                     {100 * found['eos_share']:.4f} % of the tokens",
                f"  ids                     {found['unused_ids']:,} never occur, {found['used_once']:,} once",
                f"  most frequent           {most}",
                f"  rarest                  {rarest}",
            ]
    sources = [source for source in measured["sources"] if "tokens" in source]
    lines += ["", "sources (both splits)"] if sources else []
    shown = ("name", "documents", "tokens", "text_bytes")
    lines += [_count_line(*(source[key] for key in shown)) for source in sources]
    return "\n".join(lines)


def _count_line(name: str, documents: int, tokens: int, num_bytes: int) -> str:
    size = f"{num_bytes:>20,} bytes {num_bytes / max(1, tokens):>7.3f} bytes/token"
    return f"  {name:<24}{documents:>14,} documents {tokens:>18,} tokens {size}"
