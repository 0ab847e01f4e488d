"""The stages between `clean` and `tokenize`: which documents are copies, and what becomes of each."""

import json
from pathlib import Path

import numpy as np

from pretraining.data.dedup.clusters import assign_fates, cluster, count_fates, duplicates_report
from pretraining.data.dedup.minhash import MinHashSpec
from pretraining.data.dedup.pairs import HashParts, SignatureParts, exact_pairs, match_slice, write_array
from pretraining.data.shard_writer import write_durably
from pretraining.recipe.data import source_name

PIECES_PER_SLICE = 32
"""Pieces for each slice of the comparison: a slice then holds in memory what some hundred pieces of text need."""


def gather_signatures(preparation, folder: Path) -> None:
    """The stage `signatures`: links that show the files of all pieces in one folder."""
    for piece, output in enumerate(preparation.clean_stage.outputs(preparation.work)):
        for kind in ("hashes", "keys", "sketch"):
            if (output / f"{kind}.npy").exists():
                (folder / f"{piece:05d}.{kind}.npy").symlink_to(output.resolve() / f"{kind}.npy")


def num_slices(num_pieces: int) -> int:
    """Tasks of the stage `match`."""
    return max(1, num_pieces // PIECES_PER_SLICE)


def match(preparation, number: int, folder: Path) -> None:
    """The stage `match`: pairs of equal and of similar documents in one slice of the comparison."""
    parts = preparation.signatures_stage.outputs(preparation.work)[0]
    dedup, num_pieces = preparation.data["dedup"], len(preparation.pieces)
    position = number, num_slices(num_pieces)
    if dedup["exact"]:
        write_array(folder / "exact.npy", exact_pairs(HashParts(parts, num_pieces), *position))
    if dedup["minhash"]:
        spec = MinHashSpec.from_recipe(dedup["minhash"])
        write_array(folder / "similar.npy", match_slice(SignatureParts(parts, num_pieces), spec, *position))


def decide_fates(preparation, folder: Path) -> None:
    """The stage `fates`: what becomes of every document, a file a piece, and a report."""
    dedup = preparation.data["dedup"]
    outputs = preparation.match_stage.outputs(preparation.work)
    paths = [path for output in outputs for path in sorted(output.glob("*.npy"))]
    pairs = [lambda path=path: np.load(path) for path in paths]
    # Without similar pairs only equal texts (similarity 1) are in question.
    accepted = MinHashSpec.from_recipe(dedup["minhash"]).accepted if dedup["minhash"] else 1.0
    clusters = cluster(pairs, accepted)
    share = preparation.data["validation_share"]
    cleaned = preparation.clean_stage.outputs(preparation.work)
    drawn = [np.load(output / "draws.npy") < share for output in cleaned]
    fates = assign_fates(drawn, clusters, pairs, dedup["remove"])
    for piece, own in enumerate(fates):
        write_array(folder / f"{piece:05d}.npy", own)
    sources = [piece.source for piece in preparation.pieces]
    names = [source_name(spec) for spec in preparation.data["sources"]]
    report = duplicates_report(clusters, [len(draws) for draws in drawn], sources, names)
    write_durably(folder / "report.json", json.dumps({**report, "fates": count_fates(fates)}))
