"""Near-deduplication against datatrove's MinHash pipeline: recall, precision, CPU seconds, twins across the split.

    python benchmarks/dedup.py --megabytes 100 --repeats 3

Real text of this machine with planted near-duplicates; the truth is the exact Jaccard similarity of all pairs.
Both read the same JSONL pieces, find near duplicates at their defaults, and write what they keep; each runs in
a process of its own, in alternation, and its CPU seconds (user and system, children included) are medians.
datatrove's default needs spacy; without it (`--ours_alone`) only this repository is measured. One JSON line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from dedup_truth import build_corpus, exact_similarities
from record import REPOSITORY, parser_of, record

NUM_PIECES = 8
VALIDATION_SHARE = 0.02
NUM_DRAWS = 25


def main() -> None:
    options = parse_arguments()
    if options.engine:
        return ENGINES[options.engine](Path(options.folder))
    with tempfile.TemporaryDirectory(prefix="dedup_") as root:
        folder = Path(root)
        texts = build_corpus(folder / "pieces", options.megabytes * 10**6, NUM_PIECES)
        truth = exact_similarities(texts)
        engines = ["ours"] if options.ours_alone else ["ours", "datatrove"]
        seconds = measure(engines, folder, options.repeats)
        corpus = {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
        values = {**corpus, "pairs_at_0.8": sum(value >= 0.8 for value in truth.values())}
        for engine in engines:
            values[engine] = quality(truth, kept_by(folder / engine), len(texts))
            values[engine]["cpu_seconds"] = round(statistics.median(seconds[engine]), 2)
        values["ours"].update(details_of_ours(folder / "ours", truth, len(texts)))
        values["repeats"] = options.repeats
        record("dedup", values, options.keep)


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ours_alone", action="store_true", help="leave datatrove out")
    parser.add_argument("--engine", choices=["ours", "datatrove"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(engines: list[str], folder: Path, repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each run of each engine, in alternation."""
    seconds = {engine: [] for engine in engines}
    for _ in range(repeats):
        for engine in engines:
            command = [sys.executable, __file__, "--engine", engine, "--folder", str(folder)]
            subprocess.run(["rm", "-rf", str(folder / engine)], check=True)
            before = os.times()
            log = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
            after = os.times()
            if log.returncode:
                sys.exit(f"{engine} failed:\n{log.stderr[-3000:]}")
            used = after.children_user - before.children_user + after.children_system - before.children_system
            seconds[engine].append(used)
            print(f"{engine}: {used:.1f} CPU seconds", file=sys.stderr, flush=True)
    return seconds


def run_ours(folder: Path) -> None:
    """Read, sign, match, cluster, write the documents kept."""
    from pretraining.data.dedup.clusters import cluster
    from pretraining.data.dedup.minhash import MinHashSpec, sign_piece
    from pretraining.data.dedup.pairs import SignatureParts, match_slice, write_array
    from tests.gear.similar_texts import write_signatures

    spec, work = MinHashSpec(), folder / "ours"
    for piece in range(NUM_PIECES):
        write_signatures(work, piece, sign_piece([row["text"] for row in rows_of(folder, piece)], spec))
    parts = SignatureParts(work, NUM_PIECES)
    pairs = match_slice(parts, spec)
    write_array(work / "pairs.npy", pairs)
    dropped = np.zeros(len(parts.documents), bool)
    dropped[cluster([pairs], spec.accepted).dropped] = True
    for piece, mask in enumerate(parts.documents.split(dropped)):
        with (work / f"{piece:05d}.jsonl").open("w") as file:
            for row, drop in zip(rows_of(folder, piece), mask, strict=True):
                if not drop:
                    file.write(json.dumps(row) + "\n")


def rows_of(folder: Path, piece: int) -> list[dict]:
    with (folder / "pieces" / f"{piece:05d}.jsonl").open() as lines:
        return [json.loads(line) for line in lines]


def run_datatrove(folder: Path) -> None:
    """datatrove's four MinHash stages with their defaults, one process."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import minhash
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    accept_text_in_xxhash()
    work = folder / "datatrove"
    signatures, buckets, removed = (str(work / name) for name in ("signatures", "buckets", "removed"))
    reader = JsonlReader(str(folder / "pieces"))
    stages = [
        (NUM_PIECES, [reader, minhash.MinhashDedupSignature(signatures)]),
        (minhash.MinhashConfig().num_buckets, [minhash.MinhashDedupBuckets(signatures, buckets)]),
        (1, [minhash.MinhashDedupCluster(buckets, removed)]),
        (
            NUM_PIECES,
            [
                reader,
                minhash.MinhashDedupFilter(removed),
                JsonlWriter(str(work), "${rank}.jsonl", compression=None),
            ],
        ),
    ]
    for number, (tasks, pipeline) in enumerate(stages):
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=str(work / f"log{number}")).run()


def accept_text_in_xxhash() -> None:
    """datatrove 0.10.1 hands its hash function str, which xxhash 4 no longer takes."""
    import xxhash

    digest = xxhash.xxh64_intdigest
    xxhash.xxh64_intdigest = lambda text: digest(text.encode())


ENGINES = {"ours": run_ours, "datatrove": run_datatrove}


def kept_by(work: Path) -> set[int]:
    return {int(json.loads(line)["id"]) for path in work.glob("*.jsonl") for line in path.open()}


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
    from pretraining.data.dedup.clusters import cluster
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
    from pretraining.data.dedup.clusters import Clusters, assign_fates

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
