"""A stage that starts from a stable checkpoint, as a run of its own."""

import os
import shutil
import tempfile
from pathlib import Path

from pretraining.checkpoints.marker import MARKER, flush_folder, read_marker
from pretraining.checkpoints.stage import Stage, staged_recipe
from pretraining.recipe import load_recipe
from pretraining.recipe.curve import changed_parts
from pretraining.refusals import load_run
from pretraining.runtime.durable_files import append_row, read_rows, write_json
from pretraining.runtime.run_folder import RunFolder


def branch(checkpoint: Path, stage: Stage, output: Path) -> dict:
    """Make `output` a run that goes on from `checkpoint`, whole and verified, for a stage; returns its recipe.

    The checkpoint's files are linked, or copied where the disk cannot: the run they are from is only read. The new
    recipe is the checkpoint's own but for name, schedule, budget and the stage's settings, whose change counts as
    accepted. `output` appears with all in it or not at all.

    Raises:
        UserError: the rate is not stable at that step, the step's size still rises, a setting is wrong, or the
            checkpoint could not be loaded with it.
    """
    marker, folder = read_marker(checkpoint), output.absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=folder) as unfinished:
        run = RunFolder(Path(unfinished) / output.name)
        write_json(run.recipe, {**marker["recipe"], "name": output.name})
        earlier, changed = load_recipe(str(run.recipe)), load_recipe(str(run.recipe), stage.settings)
        recipe = staged_recipe(earlier, changed, marker, stage, checkpoint)
        write_json(run.recipe, recipe)
        load_run(str(run.recipe))  # what is written can be read and trained
        _record(run, recipe, marker, stage, checkpoint)
        link_checkpoint(checkpoint, run.checkpoint(marker["step"]))
        run.path.rename(output)
    flush_folder(folder)
    return recipe


def _record(run: RunFolder, recipe: dict, marker: dict, stage: Stage, checkpoint: Path) -> None:
    """Where it comes from, what differs, and the rollbacks that led to the checkpoint."""
    step = marker["step"]
    changes = [
        {"step": step, "key": each.key, "from": each.earlier, "to": each.now}
        for each in changed_parts(recipe, marker["recipe"])
    ]
    write_json(run.changes, [*marker["changes"], *changes])
    for row in read_rows(RunFolder(checkpoint.parent).journal)[: marker["rollbacks"]]:
        append_row(run.journal, row)
    run.add_event("branch", step=step, parent=str(checkpoint), **stage._asdict())


def link_checkpoint(folder: Path, target: Path) -> None:
    """The same checkpoint at `target`, its marker last."""
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    for name in sorted(names, key=lambda name: name.name == MARKER):
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(folder / name, place)
        except OSError:  # another file system, or one without links
            shutil.copy2(folder / name, place)
    flush_folder(target)
