"""A small ladder of the small recipe: nine runs of seconds, made once for all tests."""

from pathlib import Path

from tests.gear.runs import Workshop, completed, forked_programs, made_once

SMALL_SIZES = ("--widths", "16,24,32", "--longest", "1")
LADDER_SETTINGS = ("budget.tokens=65536", "evaluation.max_validation_tokens=2000")
LADDER_SETTINGS += ("monitors.noise_scale_steps=null", "monitors.layer_norms_steps=null")
# nine losses on two documents: with seed 7 they are no law
LADDER_SETTINGS += ("training.seed=3",)


def ladder_command(workshop: Workshop, folder: Path, *more: str) -> list[str]:
    """The command of a ladder of the small recipe in this folder."""
    words = [word for text in LADDER_SETTINGS for word in ("--set", text)]
    options = ["--data_dir", str(workshop.data), "--deepspeed", "null", "--output_dir", str(folder)]
    return ["python", "-m", "pretraining.ladder", str(workshop.recipe), *options, *words, *more]


def small_ladder(workshop: Workshop) -> Path:
    """The folder of the whole ladder."""
    folder = workshop.folder / "ladder"
    command = ladder_command(workshop, folder, *SMALL_SIZES)
    made_once(workshop.folder / "ladder.made", lambda: completed(command, **forked_programs()))
    return folder
