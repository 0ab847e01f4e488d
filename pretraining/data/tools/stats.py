"""`stats`: count the data by split and by source, the lengths of documents, and the tokens that occur."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pretraining.data.documents import cuts_of_split
from pretraining.data.manifest import entropy_bits, num_shard_bytes, source_entries
from pretraining.data.progress import ProgressBar
from pretraining.data.tools.finished import (
    FinishedData,
    LengthDistribution,
    count_tokens,
    open_finished,
    source_names,
)

if TYPE_CHECKING:
    import tokenizers

PERCENTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
COUNTED = ("documents", "tokens", "bytes")


def measure_data(
    folder: Path,
    with_tokens: bool = True,
    top: int = 10,
    show_progress: bool = False,
    sequence_length: int | None = None,
) -> dict:
    """Measure counts, lengths and token frequencies of the data set in `folder`, as JSON values.

    If a sequence length is given, also count the documents that the ends of its blocks cut (`cut_shares`). Without
    tokens only the manifest and the documents' ends are read, which takes seconds at any size.
    """
    data = open_finished(folder)
    size = num_shard_bytes(data.manifest)
    # Without tokens no shard is read as a whole, and there is no progress to show.
    with ProgressBar("measuring", show_progress and with_tokens, size) as progress:
        splits = {
            name: _measure_split(data, name, top if with_tokens else None, progress)
            for name in data.split_names
        }
    if sequence_length is not None:
        splits["train"]["cuts"] = cuts_of_split(data.split("train").stream, sequence_length)
    num_tokens = sum(split["tokens"] for split in splits.values())
    return {
        "folder": str(folder),
        "name": data.manifest["name"],
        "fingerprint": data.manifest["fingerprint"],
        "vocab_size": data.manifest["tokenizer"]["vocab_size"],
        "disk_bytes": size,
        "disk_bytes_per_token": size / max(1, num_tokens),
        "splits": splits,
        "sources": [
            {
                "name": name,
                **{key: entry[key] for key in ("documents", "tokens", "text_bytes") if key in entry},
            }
            for name, entry in zip(source_names(data.manifest), source_entries(data.manifest), strict=True)
        ],
    }


def _measure_split(data: FinishedData, name: str, top: int | None, progress: ProgressBar) -> dict:
    """Measure one split; top: how many tokens to list at each end, None to count none."""
    split, entry = data.split(name), data.manifest["splits"][name]
    measured = {key: entry[key] for key in COUNTED}
    measured["shards"] = len(split.entries)
    measured["bytes_per_token"] = entry["bytes"] / max(1, entry["tokens"])
    by_source: dict[str, dict] = {}
    for shard_entry in split.entries:
        counts = by_source.setdefault(split.source_of(shard_entry), dict.fromkeys(COUNTED, 0))
        for key in COUNTED:
            counts[key] += shard_entry[key]
    measured["by_source"] = by_source
    # A split may be empty: then there are no percentiles.
    if split.num_documents:
        lengths = LengthDistribution()
        # Only the ends are read here, and not the tokens. The EOS counts.
        for _, shard in split.shards():
            lengths.add(shard.ends)
        named = {f"p{100 * share:g}": lengths.percentile(share) for share in PERCENTILES}
        mean = split.num_tokens / split.num_documents
        measured["document_tokens"] = {"mean": mean, "min": int(lengths.lengths[0]), **named}
    if top is not None:
        info = data.manifest["tokenizer"]
        occurrences = count_tokens(split, info["vocab_size"], progress.add_shard)
        measured["token_frequencies"] = _frequencies(
            occurrences, info["eos_token_id"], entry["bytes"], top, data.decoder()
        )
    return measured


def _frequencies(
    counts: np.ndarray, eos: int, num_bytes: int, top: int, decoder: "tokenizers.Tokenizer"
) -> dict:
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
    """Format the measurements for a reader."""
    lines = [
        f"{measured['name']} in {measured['folder']}: {measured['disk_bytes']:,} bytes of shards, "
        f"{measured['disk_bytes_per_token']:.3f} bytes on disk per token, {measured['vocab_size']:,} ids"
    ]
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
            lines += [
                f"  {head:<24}blocks' ends cut {cuts[packing]['cut']:.2%} of the {cuts['documents']:,} documents that "
                f"fit into one, {cuts[packing]['cropped']:.2%} of their tokens come after a cut"
                for packing, head in {
                    "in_sequence": "read in sequence",
                    "best_fit": "packed by best fit",
                }.items()
            ]
        if frequencies := split.get("token_frequencies"):
            lines += _frequency_lines(frequencies)
    if any("tokens" in source for source in measured["sources"]):
        lines += ["", "sources (both splits)"]
        lines += [
            _count_line(s["name"], s["documents"], s["tokens"], s["text_bytes"]) for s in measured["sources"]
        ]
    return "\n".join(lines)


def _count_line(name: str, documents: int, tokens: int, num_bytes: int) -> str:
    per_token = num_bytes / max(1, tokens)
    return (
        f"  {name:<24}{documents:>14,} documents {tokens:>18,} tokens {num_bytes:>20,} bytes "
        f"{per_token:>7.3f} bytes/token"
    )


def _frequency_lines(found: dict) -> list[str]:
    def listed(tokens: list[dict]) -> str:
        return "  ".join(f"{token['text']!r} {token['count']:,}" for token in tokens)

    return [
        f"  unigram entropy         {found['unigram_bits_per_token']:.4f} bits per token, "
        f"{found['unigram_bits_per_byte']:.4f} bits per byte",
        f"  EOS                     {100 * found['eos_share']:.4f} % of the tokens",
        f"  ids                     {found['unused_ids']:,} never occur, {found['used_once']:,} once",
        f"  most frequent           {listed(found['most_frequent'])}",
        f"  rarest                  {listed(found['rarest'])}",
    ]
