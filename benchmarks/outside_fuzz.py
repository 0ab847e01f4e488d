"""Mutated files of strangers: each reader must read them or say one line, in time, and write nowhere else.

    python benchmarks/outside_fuzz.py --mutations 2000 --seed 1 --keep

One good file of each kind (manifest, marker, receipt, journal, events, metrics, hostfile, configs, tokenizers, weights,
archives, recipe) comes from a small run; tests/gear/outside_fuzz.py draws the mutations. A traceback, a hang, or a
change outside of the folder is a defect: it is shown on stderr as soon as it is found, and the exit code is 1. Prints
one JSON line of what came of them, in all and of each reader.
"""

import sys
from collections import Counter, defaultdict

from gear import parser_of, record, small_runs


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    from tests.gear.outside_fuzz import DEFECTS, OutsideFuzz

    counts, readers = Counter(), defaultdict(Counter)
    with small_runs() as workshop:
        fuzz = OutsideFuzz(workshop, workshop.folder / "fuzz", options.seed)
        for _ in range(options.mutations):
            outcome = fuzz.try_one()
            counts[outcome.kind] += 1
            readers[outcome.reader][outcome.kind] += 1
            if outcome.kind in DEFECTS:
                print(f"\n{outcome.kind}: {outcome.reader}: {outcome.said}", file=sys.stderr, flush=True)
    defects = sum(counts[kind] for kind in DEFECTS)
    record(
        "outside_fuzz", {"seed": options.seed, **counts, "defects": defects, "readers": readers}, options.keep
    )
    sys.exit(int(defects > 0))


if __name__ == "__main__":
    main()
