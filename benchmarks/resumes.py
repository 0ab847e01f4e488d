"""Checkpoints of one layout, resumed at another: how far the next losses are from the undisturbed run's.

    python benchmarks/resumes.py --pairs 60 --seed 1 --keep
    python benchmarks/resumes.py --all --keep
    python benchmarks/resumes.py --all --stages zero2 zero3 --ranks 1 2

A seed draws ordered pairs of layouts (ZeRO stage, offload, tensor, sequence and expert degree, hpZ, 1, 2 or 4 ranks)
and a model, a Llama or a mixture of experts; with `--all`, every pair of stage and number of ranks, a layout and itself
among them, on the Llama. The first layout trains ten steps in fp32 and saves after five; the second goes on from that
checkpoint, by `train.py --resume`. Compared are both losses, and what both hold in the end: weights and moments, each
difference as a share of the largest number of its kind. A control forgets the moments on the way: its losses show how
much these five steps depend on them. Prints one JSON line a pair, on stderr, and one for all of them.
"""

import json
import random
import shutil
import sys
import time
from itertools import product
from pathlib import Path

from gear import COMPARED, OFFLOADED, STAGES, models, parser_of, record, small_runs, trainable

MODELS = ("llama", "qwen3_moe")
SAVED_AFTER, STEPS, TOLERANCE = 5, 10, 1e-4
SAVERS = 12
"""Layouts of a model that save; each trains once."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="all pairs of --stages and --ranks, none drawn")
    every = (*STAGES, *OFFLOADED)
    parser.add_argument("--stages", nargs="+", choices=every, default=every, help="of --all")
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2, 4), help="of --all")
    options = parser.parse_args()
    began = time.monotonic()
    with small_runs() as workshop:
        layouts = list(product(options.stages, options.ranks))
        cases = [(MODELS[0], *pair) for pair in product(layouts, repeat=2)]
        if not options.all:
            cases = drawn(workshop.recipe, options.pairs, options.seed)
        pairs = [compare(workshop, *case) for case in cases]
        control = without_moments(workshop)
    values = {"stages": options.stages, "ranks": options.ranks} if options.all else {"seed": options.seed}
    values |= {
        "pairs": len(pairs),
        "within_tolerance": sum(max(pair["loss"], pair["loss_to_plain"]) <= TOLERANCE for pair in pairs),
        "tolerance": TOLERANCE,
        **{key: max(pair[key] for pair in pairs) for key in ("loss", "loss_to_plain", "weights", "moments")},
        "same_layout_loss": max((p["loss"] for p in pairs if p["saved"] == p["resumed"]), default=None),
        "loss_if_moments_are_forgotten": control,
        "of_pairs": pairs,
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    record("resumes", values, options.keep)


def settings_of(model: str) -> tuple[str, ...]:
    """Return the changes of the small recipe."""
    return (f"model={json.dumps(models()[model])}", *COMPARED, f"training.save_steps={SAVED_AFTER}")


def drawn(recipe: Path, pairs: int, seed: int) -> list[tuple]:
    """Draw (model, the layout that saves, another one that resumes)."""
    chance = random.Random(seed)
    known = {model: trainable(recipe, settings_of(model)) for model in MODELS}
    saving = {model: chance.sample(layouts, SAVERS) for model, layouts in known.items()}
    cases: list[tuple] = []
    while len(cases) < pairs:
        model = chance.choice(MODELS)
        case = model, chance.choice(saving[model]), chance.choice(known[model])
        if case[1] != case[2] and case not in cases:
            cases.append(case)
    return cases


def compare(workshop, model: str, saved: tuple, resumed: tuple) -> dict:
    """Resume at one layout what another one saved."""
    whole = run_of(workshop, model, *saved)
    ours = go_on(workshop, model, resumed, whole.folder / f"checkpoint-{SAVED_AFTER}")
    ends = (each.folder / f"checkpoint-{STEPS}" for each in (ours, whole))
    values = {
        "model": model,
        "saved": saved,
        "resumed": resumed,
        "loss": difference(ours, whole),
        "loss_to_plain": difference(ours, run_of(workshop, model, "null", 1)),
        **differences_of_states(*ends),
    }
    shutil.rmtree(ours.folder)
    print(json.dumps(values), file=sys.stderr, flush=True)
    return values


def run_of(workshop, model: str, layout: str, ranks: int):
    """Return the undisturbed run of a layout; made once."""
    by = "plain" if (layout, ranks) == ("null", 1) else "forked"
    return workshop.run(layout, ranks, by, settings_of(model))


def go_on(workshop, model: str, layout: tuple, checkpoint: Path):
    """Continue a checkpoint in a folder of its own, to the end."""
    from tests.gear.runs import Run, execute

    folder = workshop.folder / "resumed"
    by = "plain" if layout == ("null", 1) else "forked"
    more = ("--resume", checkpoint)
    finished = execute(workshop.command(folder, *layout, by, settings_of(model), more))
    if finished.code:
        raise SystemExit(f"{checkpoint} at {layout}: {finished.output}")
    return Run(folder)


def difference(ours, theirs) -> float:
    """Return the largest difference of the losses after the checkpoint."""
    later = [
        {row["step"]: row["train/loss"] for row in run.training_rows if row["step"] > SAVED_AFTER}
        for run in (ours, theirs)
    ]
    assert len(later[0]) == STEPS - SAVED_AFTER and later[0].keys() == later[1].keys(), later
    return max(abs(later[0][step] - later[1][step]) for step in later[1])


def differences_of_states(ours: Path, theirs: Path) -> dict[str, float]:
    """Return those of the weights and moments of two checkpoints, as a share of the largest number of their kind."""
    from pretraining.checkpoints.shard_files import MASTER, CheckpointReader, assemble

    readers = CheckpointReader(ours), CheckpointReader(theirs)
    assert readers[0].parameters == readers[1].parameters
    most: dict[str, float] = {}
    largest: dict[str, float] = {}
    for name in readers[1].parameters:
        assert readers[0].states(name) == readers[1].states(name)
        for state in readers[1].states(name):
            mine, other = (assemble(reader, name, state) for reader in readers)
            most[state] = max(most.get(state, 0.0), float((mine - other).abs().max()))
            largest[state] = max(largest.get(state, 0.0), float(other.abs().max()))
    shares = {state: most[state] / largest[state] for state in most}
    return {"weights": shares.pop(MASTER), "moments": max(shares.values())}


def without_moments(workshop) -> float:
    """Let one process go on with its weights alone; return the largest difference of its losses."""
    from safetensors.torch import load

    from pretraining.checkpoints.export import reshard
    from pretraining.checkpoints.format import commit_checkpoint, read_marker, read_receipt, write_receipt
    from pretraining.checkpoints.shard_files import rank_file, write_rank_file

    whole, folder = run_of(workshop, MODELS[0], "null", 1), workshop.folder / f"checkpoint-{SAVED_AFTER}"
    reshard(whole.folder / folder.name, folder, 1)
    name = rank_file(0, 1)
    # a copy: the file is written anew
    tensors = load((folder / name).read_bytes())
    for key, tensor in tensors.items():
        if key.startswith("exp_avg"):
            tensor.zero_()
    files = {**read_receipt(folder, 0, 1)["files"], name: write_rank_file(folder / name, tensors)}
    write_receipt(folder, 0, 1, files)
    marker = read_marker(folder)
    commit_checkpoint(folder, {key: value for key, value in marker.items() if key not in ("files", "format")})
    return difference(go_on(workshop, MODELS[0], ("null", 1), folder), whole)


if __name__ == "__main__":
    main()
