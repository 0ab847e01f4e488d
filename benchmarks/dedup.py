"""Near-deduplication against datatrove's MinHash pipeline: recall, precision, CPU seconds, twins across the split.

    python benchmarks/dedup.py --megabytes 100 --repeats 3

Real text of this machine with planted near-duplicates; the truth is the exact Jaccard similarity of all pairs.
Both read the same JSONL pieces, find near duplicates at their defaults, and write what they keep; each runs in
a process of its own, in alternation, and its CPU seconds (user and system, children included) are medians.
datatrove's default needs spacy; without it (`--ours_alone`) only this repository is measured. One JSON line.
"""

import argparse
import json
import math
import random
import shutil
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from gear import SUFFIXES, machine_texts, parser_of, record, run_command

NUM_PIECES = 8
VALIDATION_SHARE = 0.02
NUM_DRAWS = 25
FEWEST_CHARACTERS, MOST_CHARACTERS = 200, 200_000
EDITS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04)
"""Share of words replaced in a planted copy; at 0.02 the Jaccard similarity of 5-grams is about 0.82."""

LEAST_SIMILARITY = 0.7
NGRAM = 5
PATHS = sysconfig.get_paths()
TEXT_ROOTS = ("/usr/share/doc", PATHS["stdlib"], PATHS["purelib"], "/usr/share", "/usr/lib")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ours_alone", action="store_true", help="leave datatrove out")
    parser.add_argument("--engine", choices=["ours", "datatrove"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        return {"ours": run_ours, "datatrove": run_datatrove}[options.engine](options.folder)
    with tempfile.TemporaryDirectory(prefix="dedup_") as root:
        folder = Path(root)
        texts = build_corpus(folder / "pieces", options.megabytes * 10**6, NUM_PIECES)
        truth = exact_similarities(texts)
        engines = ["ours"] if options.ours_alone else ["ours", "datatrove"]
        seconds: dict[str, list[float]] = {engine: [] for engine in engines}
        for _ in range(options.repeats):
            for engine in engines:
                shutil.rmtree(folder / engine, ignore_errors=True)
                ended = run_command(sys.executable, __file__, "--engine", engine, "--folder", root)
                seconds[engine].append(ended.cpu_seconds)
                print(f"{engine}: {ended.cpu_seconds:.1f} CPU seconds", file=sys.stderr, flush=True)
        values = {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
        values["pairs_at_0.8"] = sum(value >= 0.8 for value in truth.values())
        for engine in engines:
            rows = (json.loads(line) for path in (folder / engine).glob("*.jsonl") for line in path.open())
            values[engine] = quality(truth, {int(row["id"]) for row in rows}, len(texts))
            values[engine]["cpu_seconds"] = round(statistics.median(seconds[engine]), 2)
        values["ours"].update(details_of_ours(folder / "ours", truth, len(texts)))
        record("dedup", {**values, "repeats": options.repeats}, options.keep)


def build_corpus(folder: Path, num_bytes: int, num_pieces: int) -> list[str]:
    """Texts in a shuffled order, a tenth of them edited copies of others; written as JSONL pieces."""
    chance = random.Random(0)
    texts, left = [], int(num_bytes * 0.9)
    for text in machine_texts((*SUFFIXES, ".html"), TEXT_ROOTS):
        if FEWEST_CHARACTERS <= len(text) <= MOST_CHARACTERS and left > 0:
            texts.append(text)
            left -= len(text.encode())
        elif left <= 0:
            break
    words = [word for text in texts[:200] for word in text.split()]
    originals = chance.sample(texts, len(texts) // 10)
    for number, text in enumerate(originals):  # with words replaced at random places
        parts = text.split(" ")
        for _ in range(max(1, round(EDITS[number % len(EDITS)] * len(text.split())))):
            parts[chance.randrange(len(parts))] = chance.choice(words)
        texts.append(" ".join(parts))
    chance.shuffle(texts)
    folder.mkdir(parents=True)
    for piece, some in enumerate(np.array_split(np.arange(len(texts)), num_pieces)):
        with (folder / f"{piece:05d}.jsonl").open("w") as file:
            for number in some:
                file.write(json.dumps({"text": texts[number], "id": str(number)}) + "\n")
    return texts


def exact_similarities(texts: list[str]) -> dict[tuple[int, int], float]:
    """{(earlier, later): Jaccard similarity} of every pair at or above `LEAST_SIMILARITY`.

    Prefix filter (Bayardo, Ma, Srikant: Scaling up all pairs similarity search, WWW 2007): such a pair shares
    one of the rarest 1 - LEAST_SIMILARITY of the n-grams of each. Nothing is estimated.
    """
    from tests.gear.similar_texts import jaccard, ngram_sets

    sets = ngram_sets(texts, NGRAM)
    found, index = {}, {}
    for number, prefix in enumerate(rarest(sets)):
        lists = [index.setdefault(value, []) for value in prefix.tolist()]
        for other in set().union(*lists):
            small, large = sorted((len(sets[other]), len(sets[number])))
            if small >= LEAST_SIMILARITY * large:
                similarity = jaccard(sets[other], sets[number])
                if similarity >= LEAST_SIMILARITY:
                    found[other, number] = similarity
        for values in lists:
            values.append(number)
    return found


def rarest(sets: list[np.ndarray]) -> Iterator[np.ndarray]:
    """The n-grams of each set that every similar set must share one of."""
    bounds = np.cumsum([0] + [len(values) for values in sets])
    flat = np.concatenate(sets)
    _, inverse, counts = np.unique(flat, return_inverse=True, return_counts=True)
    frequency = counts[inverse]
    for first, end in pairwise(bounds):
        order = np.lexsort((flat[first:end], frequency[first:end]))
        length = end - first
        yield flat[first:end][order[: length - math.ceil(LEAST_SIMILARITY * length) + 1]]


def run_ours(folder: Path) -> None:
    """Read, sign, match, cluster, write the documents kept."""
    from pretraining.data.dedup.duplicates import SignatureParts, cluster, match_slice
    from pretraining.data.dedup.minhash import MinHashSpec, sign_piece
    from tests.gear.similar_texts import write_signatures

    spec, work = MinHashSpec(), folder / "ours"
    pieces = [
        write_signatures(work / str(piece), sign_piece([row["text"] for row in rows_of(folder, piece)], spec))
        for piece in range(NUM_PIECES)
    ]
    parts = SignatureParts(pieces)
    pairs = match_slice(parts, spec)
    np.save(work / "pairs.npy", pairs)
    dropped = np.zeros(len(parts.documents), bool)
    dropped[cluster([pairs], spec.accepted).dropped] = True
    for piece, mask in enumerate(np.split(dropped, parts.documents.first[1:-1])):
        with (work / f"{piece:05d}.jsonl").open("w") as file:
            for row, drop in zip(rows_of(folder, piece), mask, strict=True):
                if not drop:
                    file.write(json.dumps(row) + "\n")


def rows_of(folder: Path, piece: int) -> list[dict]:
    with (folder / "pieces" / f"{piece:05d}.jsonl").open() as lines:
        return [json.loads(line) for line in lines]


def run_datatrove(folder: Path) -> None:
    """datatrove's four MinHash stages with their defaults, one process."""
    import xxhash
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import minhash
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    # datatrove 0.10.1 hands its hash function str, which xxhash 4 no longer takes
    digest = xxhash.xxh64_intdigest
    xxhash.xxh64_intdigest = lambda text: digest(text.encode())
    work = folder / "datatrove"
    signatures, buckets, removed = (str(work / name) for name in ("signatures", "buckets", "removed"))
    reader = JsonlReader(str(folder / "pieces"))
    writer = JsonlWriter(str(work), "${rank}.jsonl", compression=None)
    stages = [
        (NUM_PIECES, [reader, minhash.MinhashDedupSignature(signatures)]),
        (minhash.MinhashConfig().num_buckets, [minhash.MinhashDedupBuckets(signatures, buckets)]),
        (1, [minhash.MinhashDedupCluster(buckets, removed)]),
        (NUM_PIECES, [reader, minhash.MinhashDedupFilter(removed), writer]),
    ]
    for number, (tasks, pipeline) in enumerate(stages):
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=str(work / f"log{number}")).run()


def quality(truth: dict, kept: set[int], num_documents: int) -> dict:
    """Recall: pairs of which at most one is left. Precision: dropped documents that had such a twin."""
    dropped = set(range(num_documents)) - kept
    alike = {pair for pair, similarity in truth.items() if similarity >= 0.8}
    return {
        "dropped": len(dropped),
        "recall_at_0.8": round(1 - sum(a in kept and b in kept for a, b in alike) / len(alike), 5),
        "precision_at_0.8": round(len(dropped & {n for pair in alike for n in pair}) / len(dropped), 5),
        "precision_at_0.7": round(len(dropped & {n for pair in truth for n in pair}) / len(dropped), 5),
    }


def details_of_ours(work: Path, truth: dict, num_documents: int) -> dict:
    """Precision of the accepted pairs, of (dropped, kept) pairs, and validation documents with a twin in train."""
    from pretraining.data.dedup.duplicates import cluster
    from pretraining.data.dedup.minhash import MinHashSpec

    spec, pairs = MinHashSpec(), np.load(work / "pairs.npy")
    accepted = pairs[pairs["similarity"] >= np.float32(spec.accepted)]
    clusters = cluster([pairs], spec.accepted)
    replaced = np.column_stack([clusters.representatives_of(clusters.dropped), clusters.dropped])
    return {
        "pairs_precision_at_0.8": share_true(accepted[["first", "second"]].tolist(), truth, 0.8),
        "pairs_precision_at_0.7": share_true(accepted[["first", "second"]].tolist(), truth, 0.7),
        "dropped_like_kept_at_0.7": share_true(map(tuple, replaced.tolist()), truth, 0.7),
        **validation_twins(truth, clusters, pairs, num_documents),
    }


def share_true(pairs, truth: dict, least: float) -> float:
    return round(float(np.mean([truth.get(pair, 0) >= least for pair in pairs])), 5)


def validation_twins(truth: dict, clusters, pairs: np.ndarray, num_documents: int) -> dict:
    """Share of validation documents with a twin (Jaccard >= 0.8) in train, over many draws, by method."""
    from pretraining.data.dedup.duplicates import Clusters, assign_fates

    alone = Clusters(np.zeros(0, np.int64), np.zeros(0, np.int64))
    arms = {
        "none": (alone, [], True),
        "dedup": (clusters, [], True),
        "dedup_and_guard": (clusters, [pairs], True),
        "guard_without_removal": (clusters, [pairs], False),
    }
    alike = np.array([pair for pair, similarity in truth.items() if similarity >= 0.8])
    twins, sizes, lost = dict.fromkeys(arms, 0), dict.fromkeys(arms, 0), dict.fromkeys(arms, 0)
    for seed in range(NUM_DRAWS):
        draws = np.random.default_rng(seed).random(num_documents) < VALIDATION_SHARE
        for name, arm in arms.items():
            fates = assign_fates([draws], *arm)[0]
            twins[name] += count_twins(fates, alike)
            sizes[name] += np.count_nonzero(fates == 1)
            lost[name] += np.count_nonzero(fates == 3)
    return {
        "validation_twins": {name: round(twins[name] / sizes[name], 6) for name in arms},
        "train_dropped_by_guard": {
            name: lost[name] / NUM_DRAWS / num_documents for name in arms if lost[name]
        },
    }


def count_twins(fates: np.ndarray, alike: np.ndarray) -> int:
    """Validation documents that have one of the pairs `alike` with a document in train."""
    sides = fates[alike]
    one, other = (sides == [1, 0]).all(axis=1), (sides == [0, 1]).all(axis=1)
    return len(np.union1d(alike[one, 0], alike[other, 1]))


if __name__ == "__main__":
    main()
