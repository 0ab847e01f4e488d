"""Checkpoints of one layout, resumed at another: how far the next losses are from the undisturbed run's.

    python benchmarks/resumes.py --pairs 60 --seed 1 --keep

A seed draws ordered pairs of layouts (ZeRO stage, offload, tensor, sequence and expert degree, hpZ, 1, 2 or 4 ranks)
and a model, a Llama or a mixture of experts. The first layout trains ten steps in fp32 and saves after five; the second
goes on from that checkpoint, by `train.py --resume`. Compared are both losses, and what both hold in the end: weights
and moments, each difference as a share of the largest number of its kind. A control forgets the moments on the way: its
losses show how much these five steps depend on them. Prints one JSON line a pair, on stderr, and one for all of them.
"""

import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from layouts import SETTINGS, models, trainable
from record import parser_of, record

MODELS = ("llama", "qwen3_moe")
SAVED_AFTER, STEPS, TOLERANCE = 5, 10, 1e-4
SAVERS = 12
"""Layouts of a model that save; each trains once."""
EVERY_FIFTH = (f"training.save_steps={SAVED_AFTER}",)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    from tests.gear.runs import Workshop

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="resumes_") as folder:
        workshop = Workshop(Path(folder))
        pairs = [compare(workshop, *pair) for pair in drawn(workshop.recipe, options.pairs, options.seed)]
        control = without_moments(workshop)
    within = [pair for pair in pairs if pair["loss"] <= TOLERANCE and pair["loss_to_plain"] <= TOLERANCE]
    values = {
        "seed": options.seed,
        "pairs": len(pairs),
        "within_tolerance": len(within),
        "tolerance": TOLERANCE,
    }
    values |= {
        key: max(pair[key] for pair in pairs) for key in ("loss", "loss_to_plain", "weights", "moments")
    }
    values |= {"loss_if_moments_are_forgotten": control, "of_pairs": pairs}
    record("resumes", {**values, "minutes": round((time.monotonic() - began) / 60, 1)}, options.keep)


def settings_of(model: str) -> tuple[str, ...]:
    """The changes of the small recipe."""
    return (f"model={json.dumps(models()[model])}", *SETTINGS, *EVERY_FIFTH)


def drawn(recipe: Path, pairs: int, seed: int) -> list[tuple]:
    """Draw (model, the layout that saves, another one that resumes)."""
    chance = random.Random(seed)
    known = {model: trainable(recipe, settings_of(model)) for model in MODELS}
    saving = {model: chance.sample(layouts, SAVERS) for model, layouts in known.items()}
    found: list[tuple] = []
    while len(found) < pairs:
        model = chance.choice(MODELS)
        pair = model, chance.choice(saving[model]), chance.choice(known[model])
        if pair[1] != pair[2] and pair not in found:
            found.append(pair)
    return found


def compare(workshop, model: str, saved: tuple, resumed: tuple) -> dict:
    """Resume at one layout what another one saved."""
    whole = run_of(workshop, model, *saved)
    ours = go_on(workshop, model, resumed, whole.folder / f"checkpoint-{SAVED_AFTER}")
    ends = (each.folder / f"checkpoint-{STEPS}" for each in (ours, whole))
    found = {
        "model": model,
        "saved": saved,
        "resumed": resumed,
        "loss": largest_difference(ours, whole),
        "loss_to_plain": largest_difference(ours, run_of(workshop, model, "null", 1)),
        **differences_of_states(*ends),
    }
    shutil.rmtree(ours.folder)
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def run_of(workshop, model: str, layout: str, ranks: int):
    """The undisturbed run of a layout; made once."""
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


def largest_difference(ours, theirs) -> float:
    """Of the losses after the checkpoint."""
    later = [
        {row["step"]: row["train/loss"] for row in run.training_rows if row["step"] > SAVED_AFTER}
        for run in (ours, theirs)
    ]
    assert len(later[0]) == STEPS - SAVED_AFTER and later[0].keys() == later[1].keys(), later
    return max(abs(later[0][step] - later[1][step]) for step in later[1])


def differences_of_states(ours: Path, theirs: Path) -> dict[str, float]:
    """Of the weights and moments of two checkpoints: as a share of the largest number of their kind."""
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
    """Let one process go on with its weights alone; the largest difference of its losses."""
    from safetensors.torch import load

    from pretraining.checkpoints.format import commit_checkpoint, read_marker, read_receipt, write_receipt
    from pretraining.checkpoints.shard_files import rank_file, reshard, write_rank_file

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
    return largest_difference(go_on(workshop, MODELS[0], ("null", 1), folder), whole)


if __name__ == "__main__":
    main()
